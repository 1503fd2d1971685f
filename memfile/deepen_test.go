package memfile

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestRest: a deepening pauses between pages for as long as it is told, with no page
// busy, all of its workers at once; and not when it is to stop or somebody waits for it.
func TestRest(t *testing.T) {
	const n, long = 600, time.Hour
	for _, workers := range []int{1, 3} {
		opts := DefaultOptions()
		opts.Workers = workers
		var rests, pauses atomic.Int64
		var rest atomic.Int64
		opts.Rest = func() time.Duration {
			rests.Add(1)
			d := time.Duration(rest.Load())
			if d != 0 {
				pauses.Add(1)
			}
			return d
		}
		f := newFixture(t, n, opts)
		f.kinds(kindText)
		f.evict(t)

		rest.Store(int64(long))
		var stop atomic.Bool
		var replaced uint64
		var err error
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			replaced, err = f.b.Deepen(stop.Load)
		}()
		require.Eventually(t, func() bool { return pauses.Load() == 1 }, 10*time.Second, time.Millisecond)
		f.r.pages(func(p uint64) {
			if p%3 == 0 {
				f.gateOne(t, p)
			}
		})
		time.Sleep(4 * restStep)
		require.EqualValues(t, 1, pauses.Load(), "the others wait, too")
		stop.Store(true)
		<-ended
		require.ErrorIs(t, err, ErrStopped)
		require.Less(t, replaced, uint64(n/2))
		f.verifyBackend(t)

		// A check does not wait for the pauses of a pass that goes on beside it.
		stop.Store(false)
		pauses.Store(0)
		ended = make(chan struct{})
		go func() {
			defer close(ended)
			_, err = f.b.Deepen(stop.Load)
		}()
		require.Eventually(t, func() bool { return pauses.Load() == 1 }, 10*time.Second, time.Millisecond)
		res, cerr := f.b.Check(nil)
		require.NoError(t, cerr)
		require.Empty(t, res.Problems)
		<-ended
		require.NoError(t, err)

		// Who wants to prefetch does not wait for the pass.
		rest.Store(0)
		f.r.pages(func(p uint64) {
			f.gateOne(t, p)
			f.set(p, version{p, 2})
		})
		f.evict(t)
		rest.Store(int64(long))
		pauses.Store(0)
		ended = make(chan struct{})
		go func() {
			defer close(ended)
			_, err = f.b.Deepen(stop.Load)
		}()
		require.Eventually(t, func() bool { return pauses.Load() == 1 }, 10*time.Second, time.Millisecond)
		_, perr := f.b.PrefetchNow(nil)
		require.NoError(t, perr)
		<-ended
		require.ErrorIs(t, err, ErrStopped)
		require.Zero(t, f.b.hurry.Load())
		require.Zero(t, f.b.waiting.Load())

		// Pauses that are short are all made.
		rest.Store(int64(10 * time.Microsecond))
		f.evict(t)
		rests.Store(0)
		_, err = f.b.Deepen(nil)
		require.NoError(t, err)
		require.Positive(t, rests.Load())
		f.verifyBackend(t)
		f.verifyAll(t)
	}
}
