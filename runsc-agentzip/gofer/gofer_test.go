package gofer

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
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
