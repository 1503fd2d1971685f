package gc

import (
	"math"
	"runtime"
	"runtime/debug"
	"testing"

	"github.com/stretchr/testify/require"
)

var sink []byte

func TestOff(t *testing.T) {
	collections := func() uint32 {
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.NumGC
	}
	garbage := func(bytes int) {
		for range bytes >> 20 {
			sink = make([]byte, 1<<20)
		}
	}
	was := debug.SetGCPercent(77)
	defer debug.SetGCPercent(was)
	var o Off
	o.Release()
	require.False(t, o.Held())

	runtime.GC()
	o.Hold()
	o.Hold()
	require.True(t, o.Held())
	n := collections()
	garbage(Slack / 2)
	require.Equal(t, n, collections())
	garbage(4 * Slack)
	require.Less(t, n, collections(), "the heap has grown by more than Slack")

	o.Release()
	o.Release()
	require.False(t, o.Held())
	require.Equal(t, 77, debug.SetGCPercent(77))
	require.EqualValues(t, math.MaxInt64, debug.SetMemoryLimit(-1))
}
