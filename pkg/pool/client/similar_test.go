package client

import (
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"runsc-agentzip/memfile/dedup"
	"runsc-agentzip/pkg/pool/wire"
)

func TestResemble(t *testing.T) {
	c, p := connect(t)
	h, key := hashOf(1), c.Key()
	sk := &dedup.Sketch{Feature: [dedup.Features]uint32{7, 8}, N: 2}
	c.Resemble(key, &h, 1, sk, true)
	require.Empty(t, p.received())
	c.Flush()
	require.Equal(t, []string{"resemble 1/2"}, p.received())
	c.Resemble(new(wire.Key), &h, 3, sk, true)
	for i := range batchOffers {
		require.Nil(t, p.receive())
		c.Resemble(key, &h, uint32(i), sk, true)
	}
	m := p.receive()
	require.Equal(t, batchOffers, m.N)
	require.Equal(t, wire.Sketched{Page: wire.Page{Hash: h, Cookie: batchOffers - 1}, Sketch: *sk, Alone: true}, m.Sketched(batchOffers-1))
	require.EqualValues(t, 1, c.State().Dropped)
	require.EqualValues(t, batchOffers+1, c.State().Offered)

	// Nobody receives.
	sent := c.State().Offered
	for range 100 * batchOffers {
		c.Resemble(key, &h, 1, sk, true)
	}
	c.Flush()
	s := c.State()
	require.True(t, s.Connected)
	require.EqualValues(t, 100*batchOffers, s.Offered-sent+s.Dropped-1)
	require.Greater(t, s.Dropped, uint64(1))
}

func TestSimilar(t *testing.T) {
	c, p := connect(t)
	p.addSegment(3)
	l := p.put(3, hashOf(1))
	p.barrier(c)
	for range maxWork {
		p.w.Begin(wire.Similar, 0)
		for i := range 3 {
			p.w.Place(wire.Place{Page: wire.Page{Hash: hashOf(1), Cookie: uint32(i)}, Loc: l})
		}
		p.send(-1)
		p.publish(hashOf(1), 100, l)
		p.w.Begin(wire.Want, 0)
		p.w.Page(wire.Page{Hash: hashOf(7), Cookie: 700})
		p.send(-1)
	}
	p.barrier(c)
	similar, published, want := 0, 0, 0
	for {
		w := c.Work()
		if len(w.Similar)+len(w.Published)+len(w.Want) == 0 {
			break
		}
		require.LessOrEqual(t, len(w.Similar)+len(w.Published)+len(w.Want), maxWork)
		if similar == 0 {
			require.Equal(t, []int{maxWork / 4, maxWork / 4, maxWork / 2}, []int{len(w.Similar), len(w.Published), len(w.Want)})
			requireReadable(t, c, w.Similar[0].Loc, hashOf(1))
		}
		similar, published, want = similar+len(w.Similar), published+len(w.Published), want+len(w.Want)
		for _, at := range append(w.Similar, w.Published...) {
			c.Unref(at.Loc)
		}
	}
	require.Equal(t, []int{3 * maxWork, maxWork, maxWork}, []int{similar, published, want})

	// Those that wait have no references left after a disconnect.
	p.w.Begin(wire.Similar, 0)
	p.w.Place(wire.Place{Page: wire.Page{Hash: hashOf(1)}, Loc: l})
	p.send(-1)
	p.barrier(c)
	require.NoError(t, unix.Shutdown(p.socket, unix.SHUT_RDWR))
	eventually(t, func() bool { return !c.State().Connected && c.State().Segments == 0 })
}

func TestTurn(t *testing.T) {
	c := New(Options{})
	defer c.Close()
	<-c.TakeTurn() // nobody to ask
	c.GiveTurn()

	c, p := connect(t)
	turn := c.TakeTurn()
	require.Equal(t, []string{"turn"}, p.received())
	select {
	case <-turn:
		t.Fatal("not yet")
	default:
	}
	tell := func(arg uint32) {
		p.w.Begin(wire.Turn, arg)
		p.send(-1)
		p.barrier(c)
	}
	tell(1)
	<-turn
	tell(1) // once is enough
	c.GiveTurn()
	require.Equal(t, []string{"turn"}, p.received())
	tell(1) // too late

	turn = c.TakeTurn()
	require.NoError(t, unix.Shutdown(p.socket, unix.SHUT_RDWR))
	<-turn // nobody to wait for
}

// A page that nobody else has taken is stale until it is given up.
func TestAlone(t *testing.T) {
	c, p := connect(t)
	p.addSegment(3)
	h := hashOf(1)
	l := p.put(3, h)
	p.publish(h, 7, l)
	p.barrier(c)
	at := c.Work().Published[0].Loc
	c.Ref(at)
	c.Flush()
	require.False(t, c.Stale(at))
	told := func(locs ...wire.Loc) {
		p.w.Begin(wire.Alone, 0)
		for _, l := range locs {
			p.w.Loc(l)
		}
		p.send(-1)
		p.barrier(c)
	}
	// Others than those that it has taken are none of its business.
	told(wire.MakeLoc(3, 1<<20), wire.MakeLoc(9, 0), ^wire.Loc(0))
	require.False(t, c.Work().Stale)
	n := c.Forgotten()
	told(l, l)
	require.Greater(t, c.Forgotten(), n)
	require.True(t, c.Stale(at))
	require.True(t, c.Work().Stale)
	c.Unref(at)
	require.True(t, c.Stale(at), "there is another reference")
	c.Unref(at)
	require.False(t, c.Work().Stale)
	require.Zero(t, c.alone)
	_, _, ok := c.Find(c.Key(), &h, make([]byte, wire.MaxRecord))
	require.True(t, ok)
	require.False(t, c.Stale(at), "taken anew")

	// A segment that goes away takes its marks along.
	told(l)
	require.True(t, c.Work().Stale)
	p.retire(3)
	p.barrier(c)
	require.True(t, c.Stale(at))
	c.Unref(at)
	require.Zero(t, c.alone)
	require.False(t, c.Work().Stale)
}
