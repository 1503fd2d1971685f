package memfile

import (
	"testing"

	"github.com/stretchr/testify/require"

	"runsc-agentzip/memfile/codec"
)

func (f *fixture) dropKept() uint64 {
	f.b.passMu.Lock()
	defer f.b.passMu.Unlock()
	return f.b.dropKept()
}

// TestKeptForms has pages evicted again that were read, written to, or freed since.
func TestKeptForms(t *testing.T) {
	const n = 32
	f := newFixture(t, n, DefaultOptions())
	f.kinds(kindText)
	f.evict(t)
	_, err := f.b.Deepen(nil)
	require.NoError(t, err)
	f.verifyBackend(t)
	stored := f.b.stats.stored.Load()
	deepBytes := f.b.store.Stats().HeldBytes

	f.verifyAll(t)
	require.EqualValues(t, n, f.b.stats.kept.Load())
	require.Zero(t, f.b.Stats().Pages.Compressed)
	require.Equal(t, deepBytes, f.b.Stats().StoreBytes, "kept forms are part of the store")
	f.verifyBackend(t)

	// Read only: nothing is encoded anew, and the deep forms are back.
	f.evict(t)
	require.Equal(t, stored, f.b.stats.stored.Load())
	require.EqualValues(t, n, f.b.stats.reuse.wins.Load())
	require.Zero(t, f.b.stats.kept.Load())
	again, err := f.b.Deepen(nil)
	require.NoError(t, err)
	require.Zero(t, again)
	f.verifyBackend(t)

	// Half of them are written to.
	f.r.pages(func(p uint64) { f.gateOne(t, p) })
	i := 0
	f.r.pages(func(p uint64) {
		if i++; i%2 == 0 {
			f.touch(p, true)
		}
	})
	f.evict(t)
	// What is written may be what was there.
	require.GreaterOrEqual(t, f.b.stats.reuse.wins.Load(), uint64(n+n/2))
	require.NotZero(t, f.b.stats.reuse.rejects.Load())
	require.EqualValues(t, 2*n, f.b.stats.reuse.wins.Load()+f.b.stats.reuse.rejects.Load())
	f.verifyBackend(t)
	f.verifyAll(t)

	// Pinned and freed pages keep nothing.
	first := f.r.Start
	require.NoError(t, f.b.Pin(first, first+4*PageSize))
	f.b.Drop(first, first+8*PageSize)
	f.r.pages(func(p uint64) {
		if p<<pageShift < first+8*PageSize {
			require.Zero(t, handleOf(f.b.table.load(p)))
		}
	})
	require.EqualValues(t, f.b.stats.kept.Load(), f.dropKept())
	require.Zero(t, f.b.store.Stats().Blobs)
}

// TestKeptFormIsWrong has a form damaged while its page is in the file: the page is
// stored anew.
func TestKeptFormIsWrong(t *testing.T) {
	f := newFixture(t, 16, DefaultOptions())
	f.kinds(kindText)
	f.evict(t)
	f.verifyAll(t)
	f.r.pages(func(p uint64) {
		w := f.b.table.load(p)
		if tagOf(w) == codec.TagFill {
			return
		}
		blob, err := f.b.store.Bytes(handleOf(w))
		require.NoError(t, err)
		blob[len(blob)-1] ^= 0x55
	})
	f.evict(t)
	require.Zero(t, f.b.stats.reuse.wins.Load())
	f.verifyAll(t)
	f.verifyBackend(t)
	require.Zero(t, f.b.stats.checksumFailures.Load())
}

// TestKeptFormsMakeRoom has a store that is too small for both the kept forms and
// the new ones.
func TestKeptFormsMakeRoom(t *testing.T) {
	opts := DefaultOptions()
	opts.Workers = 4 // one gives up forms that another looks at
	f := newFixture(t, 64, opts)
	f.kinds(kindText)
	f.evict(t)
	opts.StoreMax = f.b.store.Stats().HeldBytes

	f = newFixture(t, 64, opts)
	f.kinds(kindText)
	f.evict(t)
	require.Zero(t, f.b.stats.rejects[rejectStore].Load())
	for i := range 40 {
		f.r.pages(func(p uint64) {
			f.gateOne(t, p)
			f.touch(p, (p+uint64(i))%3 == 0)
		})
		f.evict(t)
		f.verifyBackend(t)
	}
	f.verifyAll(t)
}
