package memfile

import (
	"errors"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"runsc-agentzip/memfile/arena"
	"runsc-agentzip/memfile/codec"
	"runsc-agentzip/memfile/prefetch"
)

// storedOf parses the blob of an evicted page.
func (f *fixture) storedOf(tb tester, p uint64) (word, stored) {
	tb.Helper()
	w := f.b.table.load(p)
	s, err := f.b.parse(handleOf(w))
	if err != nil {
		tb.Fatal(err)
	}
	return w, s
}

// rooted returns a fixture of n pages of text that are stored as small as it
// gets, a root with its dependants.
func rooted(tb tester, n uint64, opts Options) (f *fixture, root uint64, dependants []uint64) {
	tb.Helper()
	f = newFixture(tb, n, opts)
	f.kinds(kindText)
	f.evict(tb)
	if _, err := f.b.Deepen(nil); err != nil {
		tb.Fatal(err)
	}
	byRoot := map[arena.Handle][]uint64{}
	f.r.pages(func(p uint64) {
		if w, s := f.storedOf(tb, p); s.base.kind == baseRoot {
			byRoot[arena.Handle(s.base.n)] = append(byRoot[arena.Handle(s.base.n)], p)
		} else if w&deep == 0 {
			tb.Errorf("page %#x was not deepened", p<<pageShift)
		}
	})
	f.r.pages(func(p uint64) {
		if w, _ := f.storedOf(tb, p); len(byRoot[handleOf(w)]) > len(dependants) {
			root, dependants = p, byRoot[handleOf(w)]
		}
	})
	if len(dependants) < 2 {
		tb.Fatalf("the roots have too few dependants: %v", byRoot)
	}
	return f, root, dependants
}

func (f *fixture) gateOne(tb tester, p uint64) {
	tb.Helper()
	if err := f.b.Gate(p<<pageShift, (p+1)<<pageShift); err != nil {
		tb.Fatal(err)
	}
	f.touch(p, false)
}

// TestRootOutlivesItsPage restores, drops and deepens a root's page and its
// dependants in every order.
func TestRootOutlivesItsPage(t *testing.T) {
	orphans := func(t *testing.T, f *fixture, want int64) {
		t.Helper()
		require.Equal(t, want, f.b.stats.orphans.Load())
		f.verifyBackend(t)
	}
	leave := map[string]func(*fixture, *testing.T, uint64){
		"restored": func(f *fixture, t *testing.T, p uint64) {
			f.gateOne(t, p)
			f.dropKept()
		},
		"dropped": func(f *fixture, t *testing.T, p uint64) {
			f.b.Drop(p<<pageShift, (p+1)<<pageShift)
			f.model[p-f.lo].is = version{}
			f.fakeHost.punch(Range{p << pageShift, (p + 1) << pageShift})
		},
	}
	for name, gone := range leave {
		t.Run(name, func(t *testing.T) {
			// The root first, then its dependants.
			f, root, deps := rooted(t, 32, DefaultOptions())
			gone(f, t, root)
			orphans(t, f, 1)
			require.EqualValues(t, 1, f.b.Stats().OrphanBlobs)
			for _, p := range deps[1:] {
				gone(f, t, p)
			}
			orphans(t, f, 1)
			f.gateOne(t, deps[0])
			f.dropKept()
			orphans(t, f, 0)
			f.verifyAll(t)

			// The dependants first.
			f, root, deps = rooted(t, 32, DefaultOptions())
			for _, p := range deps {
				gone(f, t, p)
			}
			orphans(t, f, 0)
			_, s := f.storedOf(t, root)
			require.Equal(t, 1, s.head.refs())
			gone(f, t, root)
			orphans(t, f, 0)
			f.verifyAll(t)

			// Deepening frees an orphan: its dependants find other forms.
			f, root, _ = rooted(t, 32, DefaultOptions())
			gone(f, t, root)
			if _, err := f.b.Deepen(nil); err != nil {
				t.Fatal(err)
			}
			orphans(t, f, 0)
			f.verifyAll(t)
			orphans(t, f, 0)
		})
	}
}

// TestRootIsEvictedAgain has a root's page come back with another content while
// pages still depend on the old one.
func TestRootIsEvictedAgain(t *testing.T) {
	f, root, _ := rooted(t, 32, DefaultOptions())
	for i := range 5 {
		f.gateOne(t, root)
		f.touch(root, true)
		f.evict(t)
		f.verifyBackend(t)
		if i%2 == 0 {
			if _, err := f.b.Deepen(nil); err != nil {
				t.Fatal(err)
			}
			f.verifyBackend(t)
		}
	}
	f.verifyAll(t)
	f.verifyBackend(t)
}

// TestEveryBitOfARoot flips each bit of a root and of a page that depends on
// it. Either the flip is found, or it does not matter.
func TestEveryBitOfARoot(t *testing.T) {
	f, root, deps := rooted(t, 32, DefaultOptions())
	p := deps[0]
	w := f.b.table.load(p)
	r := f.b.acquireRestorer()
	defer f.b.releaseRestorer(r)
	var page, want codec.Page
	content(want[:], f.model[p-f.lo].is)
	for _, blob := range [][]byte{f.blobOf(t, root), f.blobOf(t, p)} {
		harmless := 0
		for bit := range len(blob) * 8 {
			blob[bit/8] ^= 1 << (bit % 8)
			err := f.b.load(r, &page, p, w)
			var corrupt *errCorrupt
			switch {
			case err == nil && page == want:
				harmless++
			case err == nil:
				t.Errorf("bit %d of %d flipped gives another page", bit, len(blob)*8)
			case !errors.As(err, &corrupt):
				t.Errorf("bit %d: %v", bit, err)
			}
			blob[bit/8] ^= 1 << (bit % 8)
		}
		// References, and the page number of a root, are not looked at.
		if harmless > len(blob)*8/10+64 {
			t.Errorf("%d of %d flips do not matter", harmless, len(blob)*8)
		}
	}
	blob := f.blobOf(t, root)
	blob[len(blob)-3] ^= 4
	f.gateFatally(t, p, "the root it depends on")
	blob[len(blob)-3] ^= 4
	f.verifyAll(t)
}

// TestNoChains: what depends on another page is no base.
func TestNoChains(t *testing.T) {
	f, _, deps := rooted(t, 64, DefaultOptions())
	f.r.pages(func(p uint64) {
		if _, s := f.storedOf(t, p); s.base.kind == baseRoot {
			base, err := f.b.parse(arena.Handle(s.base.n))
			require.NoError(t, err)
			require.True(t, mayBeRoot(base.head.tag()))
			require.Equal(t, baseSame, base.base.kind)
		}
	})
	// And is refused if it were.
	_, s := f.storedOf(t, deps[0])
	putBase(f.blobOf(t, deps[1]), uint64(handleOf(f.b.table.load(deps[0]))))
	f.gateFatally(t, deps[1], "it depends on another")
	putBase(f.blobOf(t, deps[1]), s.base.n)
	f.verifyAll(t)
}

// TestManyDependants has more pages than one root can count.
func TestManyDependants(t *testing.T) {
	f, root, _ := rooted(t, 8, DefaultOptions())
	h := handleOf(f.b.table.load(root))
	_, s := f.storedOf(t, root)
	before := s.head.refs()
	n := 0
	for f.b.share(root, h) {
		n++
	}
	require.Equal(t, 1+maxDependants-before, n)
	for range n {
		f.b.unref(h, false)
	}
	f.verifyBackend(t)
}

// TestShare: a page that is not, or no longer, what was read is no base.
func TestShare(t *testing.T) {
	f, root, deps := rooted(t, 32, DefaultOptions())
	h := handleOf(f.b.table.load(root))
	require.False(t, f.b.share(root, h+1), "another blob")
	require.False(t, f.b.share(deps[0], handleOf(f.b.table.load(deps[0]))), "not a root")
	f.gateOne(t, root)
	require.False(t, f.b.share(root, h), "restored")
	f.verifyBackend(t)
}

// TestCompact drops most pages, and checks that what is left takes as few slabs
// as there can be, roots and orphans included.
func TestCompact(t *testing.T) {
	for _, workers := range []int{1, 3} {
		opts := DefaultOptions()
		opts.Workers = workers
		f := newFixture(t, 3000, opts)
		f.kinds(2, 3, 4, 5, kindTight)
		if _, err := f.b.Evict(EvictOptions{Tier: codec.TierMid}); err != nil {
			t.Fatal(err)
		}
		if _, err := f.b.Deepen(nil); err != nil {
			t.Fatal(err)
		}
		packed := func(st arena.Stats) {
			t.Helper()
			require.Less(t, float64(st.HeldBytes), float64(st.BlobBytes)*1.07+4*PageSize)
		}
		st := f.b.store.Stats()
		require.Equal(t, st.PackedBytes, st.HeldBytes, "after deepening")
		packed(st)
		rnd := rand.New(rand.NewPCG(1, 2))
		shared := 0
		f.r.pages(func(p uint64) {
			if f.state(p) == "evicted" {
				if _, s := f.storedOf(t, p); s.head.refs() > 1 {
					shared++
				}
			}
		})
		f.r.pages(func(p uint64) {
			if f.state(p) != "evicted" {
				return
			}
			if rnd.IntN(8) != 0 {
				f.b.Drop(p<<pageShift, (p+1)<<pageShift)
				f.model[p-f.lo].is = version{}
			}
		})
		require.Greater(t, shared, 20)
		require.Positive(t, f.b.stats.orphans.Load())
		st = f.b.store.Stats()
		require.Greater(t, st.HeldBytes, st.PackedBytes*5/4)
		// Without what deepening does to dependants of orphans.
		f.b.passMu.Lock()
		require.NoError(t, f.b.compact(func() bool { return false }))
		st = f.b.store.Stats()
		require.Equal(t, st.PackedBytes, st.HeldBytes)
		require.NoError(t, f.b.pack(func() bool { return false }))
		f.b.passMu.Unlock()
		packed(f.b.store.Stats())
		require.Positive(t, f.b.stats.orphans.Load())
		f.verifyBackend(t)
		if _, err := f.b.Deepen(nil); err != nil {
			t.Fatal(err)
		}
		require.Zero(t, f.b.stats.orphans.Load())
		st = f.b.store.Stats()
		require.Equal(t, st.PackedBytes, st.HeldBytes)
		packed(st)
		t.Logf("moved %d blobs", f.b.stats.moved.Load())
		f.verifyBackend(t)
		f.verifyAll(t)
	}
}

// TestCompactFull has no room for a single copy.
// TestCompactInterrupted: wherever moving blobs is interrupted, and whichever
// dependants it cannot have, the references of roots are right.
func TestCompactInterrupted(t *testing.T) {
	f := newFixture(t, 3000, DefaultOptions())
	f.kinds(2, 3, 4, 5, kindTight)
	if _, err := f.b.Evict(EvictOptions{Tier: codec.TierMid}); err != nil {
		t.Fatal(err)
	}
	if _, err := f.b.Deepen(nil); err != nil {
		t.Fatal(err)
	}
	rnd := rand.New(rand.NewPCG(1, 2))
	for k := 1; k < 60; k++ {
		// Make some slabs sparse.
		f.r.pages(func(p uint64) {
			if f.state(p) == "evicted" && rnd.IntN(40) == 0 {
				f.b.Drop(p<<pageShift, (p+1)<<pageShift)
				f.model[p-f.lo].is = version{}
			}
		})
		// Some dependants are busy, as if they were being restored.
		var busyPages []uint64
		f.r.pages(func(p uint64) {
			w := f.b.table.load(p)
			if w&stateMask == evicted && hasBase(tagOf(w)) && rnd.IntN(4) == 0 {
				f.b.table.store(p, w&^stateMask|busy)
				busyPages = append(busyPages, p)
			}
		})
		calls := 0
		f.b.passMu.Lock()
		err := f.b.compact(func() bool { calls++; return calls > k })
		f.b.passMu.Unlock()
		for _, p := range busyPages {
			w := f.b.table.load(p)
			f.b.table.store(p, w&^stateMask|evicted)
		}
		if err != nil {
			require.ErrorIs(t, err, ErrStopped)
		}
		f.verifyBackend(t)
	}
	if _, err := f.b.Deepen(nil); err != nil {
		t.Fatal(err)
	}
	require.Zero(t, f.b.stats.orphans.Load())
	f.verifyBackend(t)
	f.verifyAll(t)
}

// TestPrefetchBeyondTheFile: what a sibling has learnt may be about pages that
// this file does not have.
func TestPrefetchBeyondTheFile(t *testing.T) {
	learnt := prefetch.New()
	far := uint64(8 * tableChunk)
	for range 4 {
		learnt.Wanted(far-8, far+8)
		learnt.Wanted(far+1000, far+1016)
		// Just behind the end of the file of the fixture, near each other.
		learnt.Wanted(2*tableChunk, 2*tableChunk+2)
		learnt.Wanted(2*tableChunk+4, 2*tableChunk+6)
		learnt.EndStep()
	}
	f := newFixture(t, 600, DefaultOptions())
	require.EqualValues(t, 2*tableChunk, f.b.table.pages())
	f.kinds(2, 5)
	f.evict(t)
	require.NoError(t, f.b.ImportPatterns(learnt.Export(prefetch.Digest{1}, prefetch.ExportMax), prefetch.Digest{1}))
	n, err := f.b.PrefetchNow(nil)
	require.NoError(t, err)
	require.Zero(t, n)
	f.verifyBackend(t)
	f.verifyAll(t)
}

func TestCompactFull(t *testing.T) {
	f := newFixture(t, 600, DefaultOptions())
	f.kinds(2, 5)
	f.evict(t)
	f.r.pages(func(p uint64) {
		if p%4 != 0 && f.state(p) == "evicted" {
			f.b.Drop(p<<pageShift, (p+1)<<pageShift)
			f.model[p-f.lo].is = version{}
		}
	})
	// Nothing can be claimed.
	f.r.pages(func(p uint64) {
		if w := f.b.table.load(p); w&stateMask == evicted {
			f.b.table.store(p, w&^stateMask|busy)
		}
	})
	require.NoError(t, f.b.compact(func() bool { return false }))
	f.r.pages(func(p uint64) {
		if w := f.b.table.load(p); w&stateMask == busy {
			f.b.table.store(p, w&^stateMask|evicted)
		}
	})
	require.ErrorIs(t, f.b.compact(func() bool { return true }), ErrStopped)
	f.verifyBackend(t)
	f.verifyAll(t)
}

// FuzzBlob reads arbitrary bytes as the blob of a page.
func FuzzBlob(f *testing.F) {
	fx, root, deps := rooted(f, 32, DefaultOptions())
	rootBlob := handleOf(fx.b.table.load(root))
	for _, p := range append(deps, root) {
		f.Add(fx.blobOf(f, p), uint8(tagOf(fx.b.table.load(p))), true)
	}
	f.Add([]byte{}, uint8(0), false)
	r := fx.b.acquireRestorer()
	f.Fuzz(func(t *testing.T, blob []byte, tag uint8, fix bool) {
		if len(blob) == 0 || len(blob) > arena.MaxBlob {
			return
		}
		h, dst, err := fx.b.store.Alloc(len(blob))
		require.NoError(t, err)
		defer fx.b.store.Free(h)
		copy(dst, blob)
		if fix && len(blob) >= blobHeader+blobBase {
			// What a fuzzer cannot guess.
			head := blobHead(atomic.LoadUint64(headAt(dst)))
			at := blobHeader
			if head.base() != baseSame {
				at += blobBase
			}
			head = head&^(0xfff<<40|1<<32-1|15<<32) | blobHead(len(blob)-at)<<40 | blobHead(root) | blobHead(tag&15)<<32
			atomic.StoreUint64(headAt(dst), uint64(head))
			if head.base() == baseRoot {
				putBase(dst, uint64(rootBlob))
			}
		}
		var page codec.Page
		err = fx.b.load(r, &page, root, evictedWord(codec.Tag(tag&15), h))
		var corrupt *errCorrupt
		if err != nil && (!errors.As(err, &corrupt) || !strings.Contains(err.Error(), "stored page")) {
			t.Fatalf("untyped error: %v", err)
		}
	})
}
