package server

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/bits"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"runsc-agentzip/memfile/codec"
	"runsc-agentzip/pkg/pool/wire"
)

// Sandboxes that come and go at once, with compaction all the time: what they
// have is what it should be, and the counts are right in the end.
func TestConcurrent(t *testing.T) {
	p := newPool(t, Options{Keep: time.Second, DomainMaxBytes: 200 << 10})
	p.s.minOpen = 0
	contents := make([]*codec.Page, 400)
	for i := range contents {
		contents[i] = page(uint64(i), 200+5*i)
		if i%3 == 0 && i > 0 {
			contents[i] = variant(contents[i-1], 1)
		}
	}
	var wg sync.WaitGroup
	for w := range 6 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			r := rand.New(rand.NewPCG(uint64(w), 2))
			for round := range 8 {
				c := attach(p, p.s, greeting("d"))
				held := map[wire.Loc]*codec.Page{}
				for range 20 {
					var pages []wire.Page
					for range 30 {
						// Everybody works on something new now and then.
						i := round*40 + r.IntN(80)
						pages = append(pages, wire.Page{Hash: c.view.hash(contents[i]), Cookie: uint32(i)})
					}
					if r.IntN(2) == 0 {
						c.send(offerMessage(pages...))
					} else {
						var s []*wire.Sketched
						for _, p := range pages {
							s = append(s, &wire.Sketched{Page: p, Sketch: sketchOf(contents[p.Cookie])})
						}
						c.send(resembleMessage(s...))
					}
					if r.IntN(4) == 0 {
						c.send(usageMessage())
					}
					unix.Poll([]unix.PollFd{{Fd: int32(c.fd), Events: unix.POLLIN}}, 1)
					for c.receive() == nil {
					}
					for _, w := range c.view.wants {
						c.send(publishMessage(wire.Content{Page: w, Template: wire.NoPage, Data: contents[w.Cookie]}))
					}
					c.view.wants = nil
					for _, pl := range c.view.told {
						if !c.view.retired[pl.Loc.Segment()] {
							c.send(refMessage(wire.Ref, pl.Loc))
							held[pl.Loc] = contents[pl.Cookie]
						}
					}
					c.view.told = nil
					for _, pl := range c.view.similar {
						r := c.view.record(t, pl.Loc)
						require.Equal(t, pl.Hash, r.Hash)
						require.False(t, r.HasBase)
					}
					c.view.similar = nil
					for l, content := range held {
						if r.IntN(5) == 0 {
							require.True(t, *content == *c.view.read(t, l, nil))
							c.send(refMessage(wire.Unref, l))
							delete(held, l)
						}
					}
				}
				c.close()
			}
		}()
	}
	stop := make(chan struct{})
	ticking := make(chan struct{})
	go func() {
		defer close(ticking)
		for {
			select {
			case <-stop:
				return
			case <-time.After(time.Millisecond):
				p.pass(1)
			}
		}
	}()
	wg.Wait()
	close(stop)
	<-ticking
	awaitStats(t, p.s, func(u *Usage) bool { return u.Clients == 0 && u.ReferencedBytes == 0 })
	st := p.s.Stats().Total
	require.Zero(t, st.Violations)
	require.Positive(t, st.Published)
	require.Positive(t, st.Retired)
	require.Positive(t, st.Similar)
	checkServer(t, p.s)
}

// More references than are gone through at a time.
func TestManyReferences(t *testing.T) {
	p := newPool(t, Options{})
	a, b := newPeer(t, p.s, greeting("d")), newPeer(t, p.s, greeting("d"))
	t.Cleanup(a.end)
	t.Cleanup(b.end)
	const n = 2*lockGroups*refGroupSize + 1000
	d := p.s.anyDomain()
	// By chance a key has one page of 10 million refused.
	d.key = wire.Key{}
	var locs []wire.Loc
	for i := range n {
		h := wire.NewHasher(&d.key).Sum(page(uint64(i), 8))
		d.mu.Lock()
		l, err := d.append(&wire.Record{Hash: h, Tag: codec.TagFill, Enc: []byte("12345678")})
		d.mu.Unlock()
		require.NoError(t, err)
		locs = append(locs, l)
	}
	for part := range slices.Chunk(locs, 8000) {
		require.NoError(t, a.conn.message(refMessage(wire.Ref, part...), -1))
		require.NoError(t, b.conn.message(refMessage(wire.Ref, part...), -1))
	}
	checkServer(t, p.s)
	require.NoError(t, a.conn.message(usageMessage(), -1))
	require.NoError(t, a.conn.message(usageMessage(), -1))
	a.sync(t)
	require.Len(t, a.view.shares, 1)
	require.EqualValues(t, n*48/2, a.view.shares[0].Pages)
	a.end()
	require.Zero(t, p.s.Stats().Total.UnreferencedBytes)
	checkServer(t, p.s)
	b.end()
	st := p.s.Stats().Total
	require.Zero(t, st.ReferencedBytes)
	require.Zero(t, p.s.anyDomain().groups)
	checkServer(t, p.s)
}

// An index that gets twice the places may have no room for all of its pages: it
// gets more.
func TestCrowdedIndex(t *testing.T) {
	p := newPool(t, Options{})
	a := newPeer(t, p.s, greeting("d"))
	t.Cleanup(a.end)
	d := p.s.anyDomain()
	n := uint64(0)
	add := func(at uint64) error {
		n++
		var h wire.Hash
		binary.LittleEndian.PutUint64(h[:], n)
		binary.LittleEndian.PutUint64(h[8:], at)
		d.mu.Lock()
		defer d.mu.Unlock()
		_, err := d.append(&wire.Record{Hash: h, Tag: codec.TagFill, Enc: []byte("12345678")})
		return err
	}
	const small = minPlaces
	const middle = 2*(small+wire.MaxProbe-1) - wire.MaxProbe + 1
	const large = 2*(middle+wire.MaxProbe-1) - wire.MaxProbe + 1
	place := func(at, places uint64) uint64 {
		hi, _ := bits.Mul64(at, places)
		return hi
	}
	// Two hashes that share a place in the middle one only.
	var low, high uint64
	for i := uint64(2); low == 0; i++ {
		edge, _ := bits.Div64(i, small-1, small)
		l, h := edge-math.MaxUint64/10000, edge+math.MaxUint64/10000
		if place(l, middle) == place(h, middle) && place(l, large) < place(h, large) {
			require.Equal(t, i, place(h, small))
			require.Equal(t, i-1, place(l, small))
			low, high = l, h
		}
	}
	const others = minPlaces / 5
	for i := range uint64(others) {
		require.NoError(t, add(math.MaxUint64/2+i*(math.MaxUint64/(others*5/2))))
	}
	for range wire.MaxProbe {
		require.NoError(t, add(high))
	}
	require.NoError(t, add(low))
	require.EqualValues(t, small, d.index.places)
	// This has no room in the small one, the hash low not in the middle one.
	last := high + math.MaxUint64/(small+small/4)
	require.Equal(t, place(high, small), place(last, small))
	require.NoError(t, add(last))
	require.EqualValues(t, large, d.index.places)
	require.EqualValues(t, n, d.index.n)
	checkServer(t, p.s)
	// More than can be at one place are somebody's choice.
	require.ErrorContains(t, add(high), "no room in the index")
	require.EqualValues(t, large, d.index.places)
}

// A log cannot be flooded.
func TestLog(t *testing.T) {
	var lines []string
	p := newPool(t, Options{Log: func(format string, args ...any) { lines = append(lines, fmt.Sprintf(format, args...)) }})
	for i := range 100 {
		p.s.log("%d", i)
	}
	require.Len(t, lines, 21)
	p.time.Add(uint32(second))
	p.s.log("later")
	require.Equal(t, "later", lines[21])
	newPool(t, Options{}).s.log("nobody hears it")
}
