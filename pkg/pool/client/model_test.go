package client

import (
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"runsc-agentzip/memfile"
	"runsc-agentzip/memfile/codec"
	"runsc-agentzip/pkg/pool/wire"
)

// listen takes what a client has sent and applies it to what the pool was told. A
// Ref of what it was told of, or an Unref of what it was not, costs a message for
// nothing.
func (p *fakePool) listen(told map[wire.Loc]bool) {
	for m := p.receive(); m != nil; m = p.receive() {
		if m.Type != wire.Ref && m.Type != wire.Unref {
			continue
		}
		for i := range m.N {
			l := m.Loc(i)
			require.Equal(p.t, m.Type == wire.Unref, told[l], "%v %#x", m.Type, uint64(l))
			if m.Type == wire.Ref {
				told[l] = true
			} else {
				delete(told, l)
			}
		}
	}
}

// TestModel compares a client with a simple model, step by step.
func TestModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		before := descriptors(t, "")
		c := New(Options{})
		defer c.Close()

		// A held is what the model knows of a location with references.
		type held struct {
			hash wire.Hash
			n    int
			at   wire.Loc
			pool *fakePool
		}
		var (
			p     *fakePool // nil: not connected
			refs  = map[memfile.PoolLoc]*held{}
			index map[wire.Hash]wire.Loc
			told  map[wire.Loc]bool
			// full is set while the pool does not read.
			full bool
			// next is the number of the last segment.
			next uint32
		)
		disconnect := func() {
			if p != nil {
				p.close()
				p = nil
				disconnected(t, c)
			}
		}
		defer disconnect()
		gone := func(h *held) bool {
			if p == nil || h.pool != p {
				return true
			}
			_, ok := p.segments[h.at.Segment()]
			return !ok
		}
		took := func(l memfile.PoolLoc, h wire.Hash) {
			c.mu.Lock()
			at := place{c.segment(l), uint32(l % units)}.loc()
			c.mu.Unlock()
			e := refs[l]
			if e == nil {
				e = &held{hash: h, at: at, pool: p}
				refs[l] = e
			}
			require.Equal(t, h, e.hash)
			require.Equal(t, at, e.at)
			e.n++
		}
		drawRef := func(t *rapid.T) memfile.PoolLoc {
			var all []memfile.PoolLoc
			for s := range memfile.PoolLoc(64) {
				for u := range memfile.PoolLoc(64) {
					if l := s<<unitBits | u*3; refs[l] != nil {
						all = append(all, l)
					}
				}
			}
			if len(all) == 0 {
				t.Skip("nothing is held")
			}
			return rapid.SampledFrom(all).Draw(t, "held")
		}
		drawHash := func(t *rapid.T) wire.Hash { return hashOf(rapid.IntRange(0, 9).Draw(t, "page")) }
		drawSegment := func(t *rapid.T) uint32 {
			if p == nil || len(p.segments) == 0 {
				t.Skip("no segments")
			}
			return rapid.SampledFrom(slices.Sorted(maps.Keys(p.segments))).Draw(t, "segment")
		}
		t.Repeat(map[string]func(*rapid.T){
			"connect": func(t *rapid.T) {
				disconnect()
				pool, fd := dial(t)
				require.NoError(t, unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, 20<<10))
				require.NoError(t, c.Attach(fd))
				p, index, told, full = pool, map[wire.Hash]wire.Loc{}, map[wire.Loc]bool{}, false
				p.welcome()
				p.sendIndex()
				for i := range 5 {
					if i%3 == 0 {
						next++
						p.addSegment(next)
					}
					index[hashOf(i)] = p.put(next, hashOf(i))
				}
			},
			"disconnect": func(t *rapid.T) { disconnect() },
			"segment": func(t *rapid.T) {
				if p == nil || len(p.segments) > 4 {
					t.Skip("not connected, or enough of them")
				}
				next++
				p.addSegment(next)
			},
			"put": func(t *rapid.T) {
				n, h := drawSegment(t), drawHash(t)
				if p.used[n] > 2000 {
					t.Skip("full")
				}
				index[h] = p.put(n, h)
			},
			"retire": func(t *rapid.T) {
				n := drawSegment(t)
				// What was told of it is worth nothing from now on.
				if !full {
					p.listen(told)
				}
				p.retire(n)
				p.barrier(c)
				for l := range told {
					if l.Segment() == n {
						delete(told, l)
					}
				}
			},
			"find": func(t *rapid.T) {
				h := drawHash(t)
				if p != nil {
					p.barrier(c)
				}
				l, ok := find(t, c, h)
				at, has := index[h]
				if p != nil {
					_, open := p.segments[at.Segment()]
					has = has && open
				}
				require.Equal(t, p != nil && has, ok)
				if ok {
					took(l, h)
					require.Equal(t, at, refs[l].at)
				}
			},
			"published": func(t *rapid.T) {
				h := drawHash(t)
				at, has := index[h]
				if p == nil || !has {
					t.Skip("nothing to publish")
				}
				p.publish(h, 1, at)
				p.barrier(c)
				if rapid.Bool().Draw(t, "work") {
					for _, pl := range c.Work().Published {
						took(pl.Loc, pl.Hash)
					}
				}
			},
			"work": func(t *rapid.T) {
				for _, pl := range c.Work().Published {
					c.Unref(pl.Loc)
				}
			},
			"ref": func(t *rapid.T) {
				l := drawRef(t)
				c.Ref(l)
				refs[l].n++
			},
			"unref": func(t *rapid.T) {
				l := drawRef(t)
				c.Unref(l)
				if refs[l].n--; refs[l].n == 0 {
					delete(refs, l)
				}
			},
			"fill": func(t *rapid.T) {
				if p == nil {
					t.Skip("not connected")
				}
				p.barrier(c)
				h := hashOf(0)
				for c.Publish(c.Key(), &h, 0, 0, new(codec.Page)) {
				}
				full = true
			},
			"flush": func(t *rapid.T) {
				if p == nil {
					c.Flush()
					t.Skip("not connected")
				}
				p.barrier(c)
				for _, pl := range c.Work().Published {
					c.Unref(pl.Loc)
				}
				if full && rapid.Bool().Draw(t, "still full") {
					c.Flush()
					return
				}
				if full {
					p.listen(told)
					full = false
				}
				c.Flush()
				p.listen(told)
				want := map[wire.Loc]bool{}
				for _, h := range refs {
					if !gone(h) {
						want[h.at] = true
					}
				}
				for l := range told {
					if _, ok := p.segments[l.Segment()]; !ok {
						// Sent before the segment was retired, and read after it.
						delete(told, l)
					}
				}
				require.Equal(t, want, told)
			},
			"": func(t *rapid.T) {
				if p != nil {
					p.barrier(c)
				}
				// Queued pages have references too, so segments may be open
				// only for them.
				segments := map[memfile.PoolLoc]bool{}
				stale := 0
				for l, h := range refs {
					requireReadable(t, c, l, h.hash)
					require.Equal(t, p != nil && gone(h), c.Stale(l))
					if gone(h) && !segments[l>>unitBits] {
						segments[l>>unitBits] = true
						stale++
					}
				}
				s := c.State()
				require.Equal(t, p != nil, s.Connected)
				require.GreaterOrEqual(t, s.StaleSegments, stale)
				have := 0
				if p != nil {
					have = len(p.segments)
				}
				require.Equal(t, have+s.StaleSegments, s.Segments)
			},
		})

		disconnect()
		stale := map[memfile.PoolLoc]bool{}
		for l := range refs {
			stale[l>>unitBits] = true
		}
		require.Equal(t, before+len(stale), descriptors(t, ""))
		for l, h := range refs {
			for range h.n {
				c.Unref(l)
			}
		}
		require.Equal(t, before, descriptors(t, ""))
		c.mu.Lock()
		defer c.mu.Unlock()
		require.Zero(t, c.open)
		require.Zero(t, c.stale)
		require.Zero(t, c.places)
		require.Empty(t, c.byNumber)
	})
}

// TestConcurrent has several threads find, read and give up pages while segments
// come and go and connections are lost.
func TestConcurrent(t *testing.T) {
	before, beforeSockets := descriptors(t, ""), sockets(t)
	c := New(Options{})
	const (
		pages   = 200
		workers = 4
		rounds  = 300
	)
	stop := make(chan struct{})
	type counts map[memfile.PoolLoc]int
	models := make([]counts, workers)
	var wg sync.WaitGroup
	for w := range workers {
		models[w] = counts{}
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(1, uint64(w)))
			buf := make([]byte, wire.MaxRecord)
			type ref struct {
				l memfile.PoolLoc
				h wire.Hash
			}
			var held []ref
			for {
				select {
				case <-stop:
					return
				default:
				}
				switch op := rnd.IntN(10); {
				case op < 4 && len(held) < 300:
					key, h := c.Key(), hashOf(rnd.IntN(pages))
					if l, r, ok := c.Find(key, &h, buf); ok {
						if r.Hash != h {
							t.Error("another page was found")
						}
						held = append(held, ref{l, h})
						models[w][l]++
					} else if key != nil {
						c.Offer(key, &h, 1)
					}
				case len(held) == 0:
				case op < 6:
					r := held[rnd.IntN(len(held))]
					c.Ref(r.l)
					held = append(held, r)
					models[w][r.l]++
				case op < 8:
					r := held[rnd.IntN(len(held))]
					c.Stale(r.l)
					if got, err := c.Read(r.l, buf); err != nil || got.Hash != r.h {
						t.Errorf("%v: %v, want %v", err, got.Hash, r.h)
					}
				default:
					i := rnd.IntN(len(held))
					c.Unref(held[i].l)
					if models[w][held[i].l]--; models[w][held[i].l] == 0 {
						delete(models[w], held[i].l)
					}
					held[i] = held[len(held)-1]
					held = held[:len(held)-1]
				}
			}
		})
	}
	// The Backend's worker.
	wg.Go(func() {
		for {
			select {
			case <-stop:
				return
			case <-c.Ready():
			default:
			}
			w := c.Work()
			for _, pl := range w.Published {
				if r, err := c.Read(pl.Loc, make([]byte, wire.MaxRecord)); err != nil || r.Hash != pl.Hash {
					t.Errorf("%v: %v, want %v", err, r.Hash, pl.Hash)
				}
				c.Unref(pl.Loc)
			}
			for i := range w.Want {
				c.Publish(w.Key, &w.Want[i].Hash, 1, 1, new(codec.Page))
			}
			c.Flush()
			c.SendPatterns(make([]byte, 100<<10))
			c.Patterns()
			c.Sharing()
			c.State()
		}
	})
	// The pool. What was told of a retired segment cannot be checked: a Ref may
	// be under way.
	var p *fakePool
	var pools []*fakePool
	rnd := rand.New(rand.NewPCG(2, 2))
	told, next := map[wire.Loc]bool{}, uint32(0)
	for round := range rounds {
		if p == nil || round%60 == 59 {
			if p != nil {
				if round%120 == 59 {
					p.hangUp()
				}
			}
			var fd int
			p, fd = dial(t)
			p.places = 1024
			require.NoError(t, unix.Ftruncate(p.index, int64(wire.IndexSize(p.places))))
			require.NoError(t, c.Attach(fd))
			pools = append(pools, p)
			told = map[wire.Loc]bool{}
			p.welcome()
			p.sendIndex()
		}
		p.listen(told)
		// Numbers are never used again.
		next++
		p.addSegment(next)
		for range 20 {
			i := rnd.IntN(pages)
			l := p.put(next, hashOf(i))
			p.publish(hashOf(i), 1, l)
		}
		if round%10 == 0 {
			p.sendIndex()
		}
		p.w.Begin(wire.Want, 0)
		p.w.Page(wire.Page{Hash: hashOf(1)})
		p.send(-1)
		if len(p.segments) > 5 {
			for n := range p.segments {
				p.retire(n)
				break
			}
		}
	}
	close(stop)
	wg.Wait()
	p.listen(told)
	p.barrier(c)
	for w := c.Work(); len(w.Published) > 0; w = c.Work() {
		for _, pl := range w.Published {
			c.Unref(pl.Loc)
		}
	}
	c.Flush()
	p.listen(told)

	// The sum of the models is what the client has, and what it has told.
	all := counts{}
	for _, m := range models {
		for l, n := range m {
			all[l] += n
		}
	}
	c.mu.Lock()
	got, want := counts{}, map[wire.Loc]bool{}
	for _, s := range c.segments {
		if s == nil {
			continue
		}
		total := uint64(0)
		for unit, e := range s.refs {
			if n := int(e & (1<<30 - 1)); n > 0 {
				got[memfile.PoolLoc(s.num)<<unitBits|memfile.PoolLoc(unit)] = n
				total += uint64(n)
				if !s.gone {
					want[place{s, unit}.loc()] = true
				}
			}
		}
		require.Equal(t, total, s.total)
		require.Zero(t, s.pins)
	}
	c.mu.Unlock()
	require.Equal(t, all, got)
	for l := range told {
		if _, ok := p.segments[l.Segment()]; !ok {
			delete(told, l)
		}
	}
	require.Equal(t, want, told)

	for l, n := range all {
		for range n {
			c.Unref(l)
		}
	}
	p.hangUp()
	disconnected(t, c)
	s := c.State()
	require.Zero(t, s.Segments)
	require.Zero(t, s.StaleSegments)
	c.Close()
	for _, p := range pools {
		p.close()
	}
	require.Equal(t, beforeSockets, sockets(t))
	require.Equal(t, before, descriptors(t, ""))
}
