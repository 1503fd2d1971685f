package server

import (
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"runsc-agentzip/memfile/codec"
	"runsc-agentzip/memfile/dedup"
	"runsc-agentzip/pkg/pool/wire"
)

// variant returns a page that resembles p, and differs for each seed.
func variant(p *codec.Page, seed uint64) *codec.Page {
	v := *p
	binary.LittleEndian.PutUint64(v[:], rand.NewPCG(seed, 2).Uint64())
	return &v
}

func sketchOf(p *codec.Page) (s dedup.Sketch) {
	s.Make(p)
	return s
}

func resembleMessage(pages ...*wire.Sketched) []byte {
	var w wire.Writer
	w.Begin(wire.Resemble, 0)
	for _, p := range pages {
		w.Sketched(p)
	}
	return w.Bytes()
}

// resemble sends a Resemble, and takes what the pool says.
func (p *peer) resemble(t *poolT, cookie uint32, content *codec.Page) wire.Hash {
	t.Helper()
	h := p.view.hash(content)
	require.NoError(t, p.conn.message(resembleMessage(&wire.Sketched{Page: wire.Page{Hash: h, Cookie: cookie}, Sketch: sketchOf(content), Alone: true}), -1))
	p.sync(t)
	return h
}

// publish answers the only Want that there is.
func (p *peer) publish(t *poolT, content *codec.Page, tpl uint32) {
	t.Helper()
	require.Len(t, p.view.wants, 1)
	require.Equal(t, p.view.hash(content), p.view.wants[0].Hash)
	require.NoError(t, p.conn.message(publishMessage(wire.Content{Page: p.view.wants[0], Template: tpl, Data: content}), -1))
	p.view.wants = nil
	p.sync(t)
}

// peers returns some that the pool has welcomed. They end with the test.
func (t *poolT) peers(n int, g *wire.Greeting) []*peer {
	var ps []*peer
	for range n {
		p := newPeer(t, t.s, g)
		p.sync(t)
		t.Cleanup(func() {
			if p.conn.d.conns[p.conn.id] != nil {
				p.end()
			}
		})
		ps = append(ps, p)
	}
	return ps
}

// Of pages that resemble each other the second is taken, as a base, and the others
// are told.
func TestSimilarPages(t *testing.T) {
	first := page(1, 2000)
	second, third := variant(first, 1), variant(first, 2)
	tpl := &memTemplate{pages: []codec.Page{*variant(first, 3)}}
	p := newPool(t, Options{OpenTemplate: func(dir, digest string) (Template, error) {
		if dir != "/t" {
			return nil, errors.New("not there")
		}
		return tpl, nil
	}})
	g := greeting("d")
	g.Template, g.TemplateDir = "ab", "/t"
	ps := p.peers(3, g)
	a, b, c := ps[0], ps[1], ps[2]
	foreign := p.peers(1, greeting("e"))[0]

	a.resemble(p, 1, first)
	a.resemble(p, 2, second) // nobody else's
	require.Empty(t, a.view.wants)
	checkServer(p, p.s)
	a.resemble(p, 3, page(2, 2000))

	h := b.resemble(p, 4, variant(first, 4))
	require.Equal(t, []wire.Page{{Hash: h, Cookie: 4, Base: true}}, b.view.wants)
	// While it is awaited, others that resemble it wait, too.
	c.resemble(p, 5, third)
	require.Empty(t, c.view.wants)
	checkServer(p, p.s)
	b.publish(p, variant(first, 4), 0)
	a.sync(p)
	c.sync(p)
	require.Len(t, b.view.told, 1)
	l := b.view.told[0].Loc
	require.Equal(t, []wire.Place{{Page: wire.Page{Hash: h, Cookie: 4}, Loc: l}}, b.view.told)
	require.Empty(t, b.view.similar)
	require.Len(t, a.view.similar, 1)
	require.Equal(t, h, a.view.similar[0].Hash)
	require.Contains(t, []uint32{1, 2}, a.view.similar[0].Cookie)
	require.Equal(t, []wire.Place{{Page: wire.Page{Hash: h, Cookie: 5}, Loc: l}}, c.view.similar)
	require.Empty(t, append(a.view.told, c.view.told...))
	require.False(t, a.view.record(p, l).HasBase)
	require.Equal(t, variant(first, 4), a.view.read(p, l, nil))

	// From now on it is told at once, and the exact page too.
	a.view.similar = nil
	a.resemble(p, 6, variant(first, 5))
	require.Equal(t, []wire.Place{{Page: wire.Page{Hash: h, Cookie: 6}, Loc: l}}, a.view.similar)
	a.resemble(p, 7, variant(first, 4))
	require.Equal(t, []wire.Place{{Page: wire.Page{Hash: h, Cookie: 7}, Loc: l}}, a.view.told)
	require.Len(t, a.view.similar, 1)

	// An exact twin is stored relative to the template, and is no base then.
	for _, q := range []*peer{a, b} {
		q.view.told = nil
		q.resemble(p, 8, third)
	}
	// c has offered it, so that the first of them is asked.
	a.publish(p, third, 0)
	require.True(t, a.view.record(p, a.view.told[0].Loc).HasBase)
	st := p.s.Stats().Total
	require.EqualValues(t, 1, st.Bases)
	require.Zero(t, st.Violations)
	require.EqualValues(t, 2, st.Wanted)
	require.EqualValues(t, 9, st.Resembled)
	require.EqualValues(t, 3, st.Similar)
	require.Greater(t, st.HeapBytes, 2*minGeneration)

	// Another domain sees nothing.
	foreign.resemble(p, 1, first)
	require.Empty(t, foreign.view.wants)
	require.Empty(t, foreign.view.similar)
	checkServer(p, p.s)

	// A drained pool tells what it has, and takes nothing.
	p.s.Drain()
	a.view.similar = nil
	a.resemble(p, 9, variant(first, 6))
	require.Len(t, a.view.similar, 1)
	a.resemble(p, 9, page(3, 2000))
	b.resemble(p, 9, variant(page(3, 2000), 1))
	require.Empty(t, b.view.wants)
	checkServer(p, p.s)
}

// Exact twins that have no base become one.
func TestExactBase(t *testing.T) {
	p := newPool(t, Options{})
	ps := p.peers(3, greeting("d"))
	content := page(1, 2000)
	for _, q := range ps[:2] {
		require.NoError(t, q.conn.message(offerMessage(wire.Page{Hash: q.view.hash(content)}), -1))
		q.sync(p)
	}
	ps[1].publish(p, content, wire.NoPage)
	ps[2].resemble(p, 3, variant(content, 1))
	require.Len(t, ps[2].view.similar, 1)
	require.Equal(t, ps[1].view.told[0].Loc, ps[2].view.similar[0].Loc)
}

// What was asked for as a base and does not come is asked for again, or is a
// candidate again.
func TestBaseAskedAgain(t *testing.T) {
	p := newPool(t, Options{})
	ps := p.peers(3, greeting("d"))
	a, b, c := ps[0], ps[1], ps[2]
	content := page(1, 2000)
	a.resemble(p, 1, variant(content, 1))
	b.resemble(p, 1, content)
	require.Len(t, b.view.wants, 1)
	b.resemble(p, 1, content)
	require.Len(t, b.view.wants, 1)
	p.time.Add(uint32(patience + 1))
	b.resemble(p, 1, content)
	require.Len(t, b.view.wants, 2)
	b.view.wants = nil
	p.time.Add(uint32(patience + 1))
	c.resemble(p, 5, content)
	c.publish(p, content, wire.NoPage)
	for _, q := range ps {
		q.sync(p)
	}
	require.Len(t, b.view.told, 1)
	require.Len(t, c.view.told, 1)
	require.Len(t, a.view.similar, 1)
	checkServer(p, p.s)

	other := page(2, 2000)
	c.view.told = nil
	a.resemble(p, 1, variant(other, 1))
	b.resemble(p, 1, other)
	p.pass(abandon + 1)
	st := p.s.Stats().Total
	require.Zero(t, st.Pending)
	checkServer(p, p.s)
	c.resemble(p, 1, other)
	c.publish(p, other, wire.NoPage)
	require.Len(t, c.view.told, 1)
	checkServer(p, p.s)
}

// Who has ended has nothing that could resemble anything.
func TestSimilarDead(t *testing.T) {
	p := newPool(t, Options{})
	ps := p.peers(3, greeting("d"))
	a, b, c := ps[0], ps[1], ps[2]
	content := page(1, 2000)
	a.resemble(p, 1, content)
	a.end()
	b.resemble(p, 1, variant(content, 1))
	require.Empty(t, b.view.wants)
	// Nor is there anybody to wait for.
	c.resemble(p, 1, variant(content, 2))
	require.Len(t, c.view.wants, 1)
	c.end()
	d := p.peers(1, greeting("d"))[0]
	d.resemble(p, 1, variant(content, 3))
	require.Len(t, d.view.wants, 1)
	// The same page again is the same entry.
	n := len(d.conn.d.sketches.gens[0].items)
	d.resemble(p, 2, variant(content, 3))
	b.resemble(p, 3, variant(content, 1))
	b.resemble(p, 4, content)
	require.Len(t, d.conn.d.sketches.gens[0].items, n)
	checkServer(p, p.s)
}

// A base moves, and is found as long as it lives.
func TestBaseMoves(t *testing.T) {
	p := newPool(t, Options{Keep: time.Second})
	p.s.minOpen = 0
	ps := p.peers(3, greeting("d"))
	a, b, c := ps[0], ps[1], ps[2]
	content := page(0, 500)
	for i := range uint64(20) {
		a.resemble(p, 1, variant(page(i, 500), 1))
		b.resemble(p, 1, page(i, 500))
		b.publish(p, page(i, 500), wire.NoPage)
	}
	a.sync(p)
	require.Len(t, a.view.similar, 20)
	l := a.view.similar[0].Loc
	require.NoError(t, a.conn.message(refMessage(wire.Ref, l), -1))
	p.pass(10 * second)
	c.resemble(p, 1, variant(content, 2))
	require.Len(t, c.view.similar, 1)
	at := c.view.similar[0].Loc
	require.NotEqual(t, l, at)
	require.Equal(t, content, c.view.read(p, at, nil))
	require.NoError(t, c.conn.message(refMessage(wire.Ref, at), -1))
	// Others were dropped, and are not told.
	c.resemble(p, 2, variant(page(1, 500), 2))
	require.Len(t, c.view.similar, 1)
	require.Len(t, c.view.wants, 1)
	c.publish(p, variant(page(1, 500), 2), wire.NoPage)
	// Without references it is kept a while.
	require.NoError(t, c.conn.message(refMessage(wire.Unref, at), -1))
	p.pass(second / 2)
	b.resemble(p, 3, variant(content, 3))
	p.pass(second)
	require.Len(t, b.view.similar, 1)
	require.Equal(t, at, b.view.similar[0].Loc)
	checkServer(p, p.s)
}

// A pool without room takes no bases.
func TestSimilarFull(t *testing.T) {
	p := newPool(t, Options{DomainMaxBytes: 40 << 10})
	ps := p.peers(2, greeting("d"))
	a, b := ps[0], ps[1]
	for i := range uint64(20) {
		a.resemble(p, 1, variant(page(i, 2500), 1))
		b.resemble(p, 1, page(i, 2500))
		if len(b.view.wants) == 0 {
			require.Positive(t, i)
			require.EqualValues(t, 1, p.s.Stats().Total.Full)
			checkServer(p, p.s)
			return
		}
		b.publish(p, page(i, 2500), wire.NoPage)
	}
	require.Fail(t, "never full")
}

// Sketches that nobody made of a page, and floods of them, do no harm.
func TestSketchFloods(t *testing.T) {
	for name, o := range map[string]Options{"unlimited": {}, "limited": {DomainMaxBytes: 2 << 20}, "tiny": {DomainMaxBytes: 512}} {
		t.Run(name, func(t *testing.T) {
			p := newPool(t, o)
			ps := p.peers(2, greeting("d"))
			a, b := ps[0], ps[1]
			a.tap.drop, b.tap.drop = true, true
			r := rand.New(rand.NewPCG(1, 1))
			n := uint32(0)
			flood := func(q *peer, rounds int, f func(s *dedup.Sketch)) {
				pages := make([]*wire.Sketched, 1100)
				for range rounds {
					for j := range pages {
						n++
						s := &wire.Sketched{}
						binary.LittleEndian.PutUint32(s.Hash[:], n)
						s.Hash[8] = byte(j)
						f(&s.Sketch)
						pages[j] = s
					}
					require.NoError(t, q.conn.message(resembleMessage(pages...), -1))
				}
			}
			d := a.conn.d
			bounded := func() {
				checkServer(p, p.s)
				d.mu.Lock()
				defer d.mu.Unlock()
				require.LessOrEqual(t, len(d.pending), maxPending)
				require.LessOrEqual(t, d.sketches.bytes(), d.sketchLimit())
			}
			// Equal features, too many, none.
			flood(a, 1, func(s *dedup.Sketch) { s.N = dedup.Features })
			flood(a, 1, func(s *dedup.Sketch) { s.N = 1 << 20 })
			flood(a, 1, func(s *dedup.Sketch) { s.N = 1; s.Feature[0] = 1 })
			flood(a, 1, func(s *dedup.Sketch) { s.N, s.Feature = 3, [dedup.Features]uint32{3, 2, 1} })
			require.Empty(t, d.sketches.gens)
			bounded()
			// The same for all.
			same := func(s *dedup.Sketch) { s.N, s.Feature = 3, [dedup.Features]uint32{0, 1, ^uint32(0)} }
			flood(a, 2, same)
			flood(b, 2, same)
			bounded()
			// Many.
			rounds := 10
			if o.DomainMaxBytes == 0 {
				rounds = 2*maxSketches/1100 + 10
			}
			many := func(s *dedup.Sketch) {
				s.N = dedup.Features
				for i := range s.Feature {
					s.Feature[i] = r.Uint32()
				}
				slices.Sort(s.Feature[:])
			}
			flood(a, rounds, many)
			bounded()
			// Whatever is found is of no use, but b's work goes on.
			flood(b, 2, many)
			flood(b, 1, same)
			bounded()
			require.Zero(t, p.s.Stats().Total.Violations)
		})
	}
}

// Of two pages the one that has more in common is found, in whichever
// generation it is.
func TestSketches(t *testing.T) {
	var x sketches
	defer x.free()
	r := rand.New(rand.NewPCG(1, 1))
	limit := 2 * int(dedup.TablePages(pageRound)) // two generations
	at := func(k int) (s dedup.Sketch) {
		s.N = dedup.Features
		for i := range s.Feature {
			s.Feature[i] = uint32(k*100 + i)
		}
		return s
	}
	for k := range 1000 {
		s := at(k)
		require.NoError(t, x.add(&s, sketched{hash: wire.Hash{byte(k), byte(k >> 8)}}, 2*minGeneration))
		for range 4 {
			j := r.IntN(k + 1)
			s, shared := at(j), dedup.Features-r.IntN(5)
			for i := shared; i < dedup.Features; i++ {
				s.Feature[i] += 50
			}
			var best [maxNear]near
			n := x.find(&s, &best)
			if j > k-limit/2 {
				require.Equal(t, 1, n)
				require.Equal(t, shared, best[0].shared)
				require.Equal(t, wire.Hash{byte(j), byte(j >> 8)}, best[0].hash)
			}
			if j <= k-limit {
				require.Zero(t, n)
			}
		}
	}
	var best [maxNear]near
	a, b := at(999), at(970)
	copy(a.Feature[:3], b.Feature[:3])
	require.Equal(t, 2, x.find(&a, &best))
	require.Equal(t, [2]int{5, 3}, [2]int{best[0].shared, best[1].shared})
	require.NoError(t, x.add(&a, sketched{}, 0))
	x.free()
	require.Zero(t, x.bytes())
	require.Zero(t, x.find(&a, &best))
}

// BenchmarkResemble is a page offered with a sketch, in a full index.
func BenchmarkResemble(b *testing.B) {
	s := newServer(Options{}, func() stamp { return began })
	defer s.Close()
	p := newPeer(b, s, greeting("d"))
	p.tap.drop = true
	defer p.end()
	r := rand.New(rand.NewPCG(1, 1))
	random := func() *wire.Sketched {
		k := &wire.Sketched{Sketch: dedup.Sketch{N: dedup.Features}}
		binary.LittleEndian.PutUint64(k.Hash[:], r.Uint64())
		for i := range k.Sketch.Feature {
			k.Sketch.Feature[i] = r.Uint32() >> 5
		}
		slices.Sort(k.Sketch.Feature[:])
		return k
	}
	d := p.conn.d
	d.mu.Lock()
	for range 2 * maxSketches {
		k := random()
		d.enter(&d.sketches, &k.Sketch, sketched{})
		d.enter(&d.bases, &k.Sketch, sketched{})
	}
	d.mu.Unlock()
	var pages []*wire.Sketched
	for range 1000 {
		pages = append(pages, random())
	}
	msg := resembleMessage(pages...)
	for b.Loop() {
		p.conn.message(msg, -1)
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/1000, "ns/page")
}

// What is swept goes, all else is found as before, and what is entered next takes no more
// than it may.
// TestSweepBelowLimit: what is kept when the limit has fallen is in few generations.
func TestSweepBelowLimit(t *testing.T) {
	const n = 20000
	var x sketches
	defer x.free()
	for k := range n {
		var s dedup.Sketch
		s.N = dedup.Features
		for i := range s.Feature {
			s.Feature[i] = uint32(k*100 + i)
		}
		require.NoError(t, x.add(&s, sketched{hash: wire.Hash{byte(k), byte(k >> 8)}}, 1<<30))
	}
	require.NoError(t, x.sweep(2*minGeneration, func(p *sketched) bool { return p.hash[0]%2 == 0 }))
	require.Less(t, len(x.gens), 8)
	require.Greater(t, x.len(), n*2/5)
}

func TestSweep(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	at := func(k int) (s dedup.Sketch) {
		s.N = dedup.Features
		for i := range s.Feature {
			s.Feature[i] = uint32(k*100 + i)
		}
		return s
	}
	found := func(x *sketches, k int) bool {
		s := at(k)
		var best [maxNear]near
		for _, b := range best[:x.find(&s, &best)] {
			if b.hash == (wire.Hash{byte(k), byte(k >> 8)}) {
				return true
			}
		}
		return false
	}
	for _, limit := range []uint64{3 * minGeneration, 20 * minGeneration, 1 << 30} {
		for _, part := range []float64{0, 0.02, 0.3, 0.6, 1} {
			var x sketches
			const n = 2000
			for k := range n {
				s := at(k)
				require.NoError(t, x.add(&s, sketched{hash: wire.Hash{byte(k), byte(k >> 8)}}, limit))
				require.LessOrEqual(t, x.bytes(), limit)
			}
			before, had := x.bytes(), map[int]bool{}
			for k := range n {
				had[k] = found(&x, k)
			}
			kept := map[wire.Hash]bool{}
			for _, g := range x.gens {
				for i := range g.items {
					kept[g.items[i].hash] = r.Float64() < part
				}
			}
			require.NoError(t, x.sweep(limit, func(p *sketched) bool { return kept[p.hash] }))
			wanted := 0
			for k := range n {
				if had[k] && kept[wire.Hash{byte(k), byte(k >> 8)}] {
					wanted++
					require.True(t, found(&x, k), "%d of %v", k, part)
				}
			}
			if x.bytes() != before {
				require.Less(t, x.bytes(), before)
				require.Equal(t, wanted, x.len())
			}
			if part == 0 {
				require.Zero(t, x.bytes())
			}
			// The next one does not push them out.
			s := at(n)
			require.NoError(t, x.add(&s, sketched{hash: wire.Hash{n & 255, n >> 8}}, limit))
			require.LessOrEqual(t, x.bytes(), limit)
			require.GreaterOrEqual(t, x.len(), wanted/2)
			require.True(t, found(&x, n))
			x.free()
		}
	}
}

// Sketches of who has ended, of what is published and of bases that are gone go by
// themselves.
func TestSketchesGo(t *testing.T) {
	p := newPool(t, Options{Keep: time.Second})
	p.s.minOpen = 0
	ps := p.peers(2, greeting("d"))
	a, b := ps[0], ps[1]
	d := a.conn.d
	for i := range uint64(200) {
		a.resemble(p, uint32(i), page(i, 500))
	}
	require.Equal(t, 200, d.sketches.len())
	for i := range uint64(100) {
		b.resemble(p, uint32(i), variant(page(i, 500), 1))
		b.publish(p, variant(page(i, 500), 1), wire.NoPage)
	}
	require.Equal(t, 100, d.bases.len())
	a.sync(p)
	require.Len(t, a.view.similar, 100)
	require.NoError(t, a.conn.message(refMessage(wire.Ref, a.view.similar[0].Loc), -1))
	for range 3 {
		p.pass(sweepTime)
	}
	require.Equal(t, 1, d.bases.len())
	a.end()
	for range 3 {
		p.pass(moveTime)
	}
	require.Zero(t, d.bases.bytes())
	for _, g := range d.sketches.gens {
		for _, s := range g.items {
			require.Equal(t, b.conn.id, s.conn)
		}
	}
	require.False(t, d.unswept)
	checkServer(p, p.s)
}

// What bases have spared long ago counts no more.
func TestSketchLimit(t *testing.T) {
	p := newPool(t, Options{})
	p.s.sketchFloor = sketchFloor
	a := p.peers(1, greeting("d"))[0]
	d := a.conn.d
	require.Equal(t, 2*minGeneration, d.sketchLimit())
	d.usage(a.conn, 1<<20)
	require.Equal(t, 2*minGeneration+1<<20/sketchShare, d.sketchLimit())
	d.baseBytes = 1 << 19
	require.Equal(t, 2*minGeneration+1<<19/sketchShare, d.sketchLimit())
	p.pass(sparedTime)
	require.Equal(t, 2*minGeneration+1<<18/sketchShare, d.sketchLimit())
	p.pass(100 * sparedTime)
	require.Equal(t, 2*minGeneration, d.sketchLimit())
}
