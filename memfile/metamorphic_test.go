package memfile

import (
	"bytes"
	"fmt"
	"maps"
	"math/rand/v2"
	"testing"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"runsc-agentzip/memfile/codec"
)

// A twin is two Sentries that are told to do the same: one evicts, the other
// has no Backend.
type twin struct {
	hosts  [2]*fakeHost // the first one evicts
	spaces [2][2]*space
	pinned []Range
}

// both calls fn for either Sentry with one of its address spaces.
func (w *twin) both(k int, fn func(h *fakeHost, s *space)) {
	for i, h := range w.hosts {
		fn(h, w.spaces[i][k])
	}
}

// pick draws an address space and one of its pmas, or skips the action.
func (w *twin) pick(t *rapid.T) (k, i int) {
	k = rapid.IntRange(0, 1).Draw(t, "space")
	n := len(w.spaces[0][k].extents)
	if n == 0 {
		t.Skip("nothing is mapped")
	}
	return k, rapid.IntRange(0, n-1).Draw(t, "pma")
}

// within draws a part of r.
func within(t *rapid.T, r Range) Range {
	n := (r.End - r.Start) >> pageShift
	first := rapid.Uint64Range(0, n-1).Draw(t, "first")
	count := rapid.Uint64Range(1, n-first).Draw(t, "count")
	return Range{r.Start + first<<pageShift, r.Start + (first+count)<<pageShift}
}

// TestEvictionIsInvisible does the same random operations with evictions and
// without, and compares all memory.
func TestEvictionIsInvisible(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		opts := DefaultOptions()
		opts.MapUnit = PageSize << rapid.IntRange(0, 5).Draw(t, "unit")
		opts.Workers = rapid.IntRange(1, 2).Draw(t, "workers")
		opts.NoMemoryTimeout = 1
		if rapid.IntRange(0, 3).Draw(t, "small store") == 0 {
			opts.StoreMax = 32 << 10
		}
		const n = 96
		w := &twin{hosts: [2]*fakeHost{newFakeHost(t, n, &opts), newFakeHost(t, n, nil)}}
		for i, h := range w.hosts {
			w.spaces[i] = [2]*space{h.newSpace(), h.newSpace()}
		}
		h, b := w.hosts[0], w.hosts[0].backend
		if rapid.Bool().Draw(t, "template") {
			seed := rapid.Uint64().Draw(t, "seed")
			w.both(0, func(h *fakeHost, s *space) {
				s.extents = h.adopt(t, rand.New(rand.NewPCG(seed, 1)), 40)
			})
		}
		evict := func(t *rapid.T) error {
			res, err := b.Evict(EvictOptions{Tier: codec.Tier(rapid.IntRange(0, 2).Draw(t, "tier"))})
			if got := res.Evicted + res.Rejected + res.Locked + res.Skipped; res.Aborted != 0 || got != res.Marked {
				t.Fatalf("%d of %d pages are accounted for: %+v", got, res.Marked, res)
			}
			return err
		}
		var pool *fakePool
		actions := map[string]func(*rapid.T){
			"": func(t *rapid.T) {
				h.verifyBackend(t)
				if pool != nil {
					pool.verify(t, b)
				}
			},
			"mmap": func(t *rapid.T) {
				pages := rapid.Uint64Range(1, 24).Draw(t, "pages")
				private, system := rapid.Bool().Draw(t, "private"), rapid.IntRange(0, 9).Draw(t, "system") == 0
				w.both(rapid.IntRange(0, 1).Draw(t, "space"), func(h *fakeHost, s *space) {
					if r, ok := h.allocate(pages, system); ok {
						s.mmap(r, private)
					}
				})
			},
			"munmap": func(t *rapid.T) {
				k, i := w.pick(t)
				w.both(k, func(h *fakeHost, s *space) {
					s.mu.Lock()
					s.munmapLocked(i)
				})
			},
			"fork": func(t *rapid.T) {
				k, i := w.pick(t)
				for _, ss := range w.spaces {
					ss[k].fork(i, ss[1-k])
				}
			},
			"application": func(t *rapid.T) {
				k, i := w.pick(t)
				write := rapid.Bool().Draw(t, "write")
				within(t, w.spaces[0][k].extents[i].Range).pages(func(p uint64) {
					w.both(k, func(h *fakeHost, s *space) { s.access(p, write) })
				})
			},
			"copy": func(t *rapid.T) {
				k, i := w.pick(t)
				write := rapid.Bool().Draw(t, "write")
				if write {
					w.both(k, func(h *fakeHost, s *space) { s.breakCOW(i) })
				}
				p := w.spaces[0][k].extents[i]
				r := within(t, p.Range)
				w.both(k, func(h *fakeHost, s *space) {
					if err := s.copyRange(p, r, write && !p.needCOW); err != nil {
						t.Fatal(err)
					}
				})
			},
			"copy without memory": func(t *rapid.T) {
				k, i := w.pick(t)
				p := w.spaces[0][k].extents[i]
				r := within(t, p.Range)
				h.faults.noMemory.Store(true)
				_ = w.spaces[0][k].copyRange(p, r, false)
				h.faults.noMemory.Store(false)
			},
			"decommit": func(t *rapid.T) {
				k, i := w.pick(t)
				if w.spaces[0][k].extents[i].private {
					t.Skip("private")
				}
				r := within(t, w.spaces[0][k].extents[i].Range)
				w.both(k, func(h *fakeHost, s *space) { h.decommit(r) })
			},
			"mlock": func(t *rapid.T) {
				k, i := w.pick(t)
				r := within(t, w.spaces[0][k].extents[i].Range)
				w.both(k, func(h *fakeHost, s *space) { s.locked = []Range{r} })
			},
			"release": func(t *rapid.T) {
				pages := rapid.IntRange(1, 40).Draw(t, "pages")
				w.both(0, func(h *fakeHost, s *space) { h.release(pages) })
			},
			"pin": func(t *rapid.T) {
				pages := rapid.Uint64Range(1, 4).Draw(t, "pages")
				w.both(0, func(h *fakeHost, s *space) {
					r, ok := h.allocate(pages, false)
					if !ok {
						return
					}
					if h.backend != nil {
						if err := h.backend.Pin(r.Start, r.End); err != nil {
							t.Fatal(err)
						}
						w.pinned = append(w.pinned, r)
					}
				})
			},
			"use pinned": func(t *rapid.T) {
				for _, r := range w.pinned {
					w.both(0, func(h *fakeHost, s *space) { r.pages(func(p uint64) { h.touch(p, true) }) })
				}
			},
			"unpin": func(t *rapid.T) {
				for _, r := range w.pinned {
					w.both(0, func(h *fakeHost, s *space) { h.decRef(r) })
				}
				w.pinned = nil
			},
			"evict": func(t *rapid.T) {
				if err := evict(t); err != nil {
					t.Fatal(err)
				}
			},
			"evict with failures": func(t *rapid.T) {
				h.faults.readIn.Store(100)
				h.faults.punchIn.Store(500)
				h.faults.busyIn.Store(400)
				_ = evict(t)
				h.faults.busyIn.Store(0)
				h.faults.readIn.Store(0)
				h.faults.punchIn.Store(0)
			},
			"deepen": func(t *rapid.T) {
				if _, err := b.Deepen(nil); err != nil {
					t.Fatal(err)
				}
			},
			"save": func(t *rapid.T) {
				end, err := b.BeginSave()
				if err != nil {
					t.Fatal(err)
				}
				w.compare(t, false)
				end()
			},
			"save without memory": func(t *rapid.T) {
				h.faults.noMemory.Store(true)
				if end, err := b.BeginSave(); err == nil {
					end()
				}
				h.faults.noMemory.Store(false)
			},
		}
		if rapid.Bool().Draw(t, "pool") {
			pool = newFakePool(h.template, rapid.Uint64().Draw(t, "pool seed"))
			b.SetPool(pool)
			maps.Copy(actions, pool.actions(b))
		}
		t.Repeat(actions)
		w.compare(t, true)
		actions[""](t)
	})
}

// compare compares the memory of both, restoring it first if gate is set.
func (w *twin) compare(t *rapid.T, gate bool) {
	a, b := w.hosts[0], w.hosts[1]
	// What a save reads.
	buf := make([]byte, PageSize)
	for i := range a.use {
		p := a.lo + uint64(i)
		if a.use[i] != b.use[i] {
			t.Fatalf("page %#x: allocator has %+v and %+v", p<<pageShift, a.use[i], b.use[i])
		}
		if a.use[i].refs == 0 {
			continue
		}
		if gate {
			if err := a.gate(Range{p << pageShift, (p + 1) << pageShift}); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := unix.Pread(a.fd, buf, int64(p<<pageShift)); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(buf, b.page(p)) || !bytes.Equal(a.page(p), buf) {
			t.Fatal(fmt.Sprintf("page %#x differs: %s", p<<pageShift, a.describe(p, a.page(p), b.page(p))))
		}
	}
}
