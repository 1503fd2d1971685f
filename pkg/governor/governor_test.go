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

// TestRest: with rests the thread wants a processor of a busy host for no more than
// Trickle of the time, and takes all that it can get of another.
func TestRest(t *testing.T) {
	now, used := time.Unix(100, 0), time.Duration(0)
	g := New(func() (time.Duration, error) { return used, nil })
	g.now = func() time.Time { return now }
	work := func(share float64, lasts time.Duration) (got float64) {
		began, usedBegan := now, used
		for now.Sub(began) < lasts {
			const piece = 50 * time.Microsecond
			used += piece
			now = now.Add(time.Duration(float64(piece) / share))
			now = now.Add(g.Rest())
		}
		return float64(used-usedBegan) / float64(now.Sub(began))
	}
	require.Zero(t, g.Rest(), "no work")
	g.Begin()
	require.InDelta(t, 0.95, work(0.95, 10*time.Second), 0.001)
	for _, share := range []float64{0.5, 0.3, 0.05} {
		require.InDelta(t, share*Trickle, work(share, 30*time.Second), share*Trickle*0.05)
	}
	require.True(t, g.Busy())
	require.InDelta(t, 0.95, work(0.95, 10*time.Second), 0.001)
	require.False(t, g.Busy())
	g.End()

	// A new spell of work: the host may not be busy any more.
	g.Begin()
	require.Zero(t, g.Rest())
	g.End()

	var none *Governor
	require.Zero(t, none.Rest())
}
