package gofer

import (
	"runtime"
	"runtime/debug"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"runsc-agentzip/runsc-agentzip/gc"
)

func TestIs(t *testing.T) {
	for _, c := range []struct {
		args []string
		want bool
	}{
		{nil, false},
		{[]string{"runsc"}, false},
		{[]string{"runsc-gofer", "--root=/run/x", "--debug", "gofer", "--bundle=/b"}, true},
		{[]string{"gofer", "boot"}, false},
		{[]string{"runsc", "--root=/gofer", "exec", "gofer"}, false},
	} {
		require.Equal(t, c.want, Is(c.args), "%q", c.args)
	}
}

func TestPace(t *testing.T) {
	var p pace
	now, total := time.Duration(0), uint64(3<<20)
	var collections, looks []time.Duration
	step := func(bytes uint64) {
		now += p.pause
		total += bytes
		looks = append(looks, now)
		if p.look(total) {
			collections = append(collections, now)
		}
	}
	// Once after the start, when it has become quiet.
	step(0)
	for range 3 {
		step(1 << 20)
	}
	require.Empty(t, collections, "it is not quiet")
	step(10 << 10)
	require.Len(t, collections, 1)
	// Then it sleeps longer and longer.
	for range 30 {
		step(100)
	}
	require.Len(t, collections, 1)
	require.Equal(t, late, p.pause)
	require.Equal(t, late, looks[len(looks)-1]-looks[len(looks)-2])
	// Until there is something to do again.
	step(1 << 20)
	require.Equal(t, soon, p.pause)
	step(0)
	require.Len(t, collections, 2)
	// Little garbage is left alone.
	for range 5 {
		step(40 << 10)
		step(0)
	}
	require.Len(t, collections, 2)
	step(60 << 10)
	step(0)
	require.Len(t, collections, 3)
}

// TestCollector: what is set is as it was in the end.
func TestCollector(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(73))
	processors, limit := runtime.GOMAXPROCS(0), debug.SetMemoryLimit(-1)
	now := func() int {
		p := debug.SetGCPercent(73)
		debug.SetGCPercent(p)
		return p
	}
	var c gc.Off
	c.Release()
	require.Equal(t, 73, now())
	for range 2 {
		collect()
		c.Hold()
		require.Equal(t, -1, now())
		require.Less(t, debug.SetMemoryLimit(-1), int64(1<<30))
		c.Release()
		c.Release()
		require.Equal(t, 73, now())
		require.Equal(t, limit, debug.SetMemoryLimit(-1))
	}
	require.Equal(t, processors, runtime.GOMAXPROCS(0))
}
