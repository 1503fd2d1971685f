package governor

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestBusy(t *testing.T) {
	now, used := time.Unix(100, 0), time.Duration(0)
	var failure error
	g := New(func() (time.Duration, error) { return used, failure })
	g.now = func() time.Time { return now }
	pass := func(d, u time.Duration) bool {
		now, used = now.Add(d), used+u
		return g.Busy()
	}
	require.False(t, pass(time.Hour, 0), "no work, no measurement")
	g.Begin()
	require.False(t, pass(window, window*8/10))
	require.True(t, pass(window, window*4/10))
	require.True(t, pass(window/2, window/2), "too short to tell")
	require.True(t, pass(window/2, 0), "half a processor in all")
	require.False(t, pass(2*window, 2*window))
	require.True(t, pass(window, 0))
	failure = errors.New("no")
	require.True(t, pass(window, window), "the last that is known")
	failure = nil
	g.Begin()
	require.True(t, pass(window, 0))
	g.End()
	require.True(t, pass(memory/2, 0))
	require.False(t, pass(memory/2, 0), "long ago")

	// The last window is taken when the work ends.
	g.Begin()
	now = now.Add(window)
	g.End()
	require.True(t, g.Busy())

	var none *Governor
	none.Begin()
	none.End()
	require.False(t, none.Busy())
}
