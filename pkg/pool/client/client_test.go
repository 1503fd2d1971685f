package client

import (
	"bytes"
	"fmt"
	"io"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"runsc-agentzip/memfile"
	"runsc-agentzip/memfile/codec"
	"runsc-agentzip/pkg/pool/wire"
)

func TestReferences(t *testing.T) {
	c, p := connect(t)
	p.addSegment(70)
	p.put(70, hashOf(1))
	p.put(70, hashOf(2))
	p.barrier(c)

	a, b := mustFind(t, c, hashOf(1)), mustFind(t, c, hashOf(2))
	require.Less(t, uint64(max(a, b)), uint64(1)<<memfile.PoolLocBits)
	require.Equal(t, a, mustFind(t, c, hashOf(1)))
	_, ok := find(t, c, hashOf(3))
	require.False(t, ok)
	requireReadable(t, c, a, hashOf(1))
	require.Empty(t, p.received(), "nothing before Flush")
	c.Flush()
	require.Equal(t, []string{"ref 70:0 70:48"}, p.received())

	c.Ref(b)
	c.Unref(b)
	c.Unref(a)
	c.Flush()
	require.Empty(t, p.received(), "both have references")

	c.Unref(a)
	requireReadable(t, c, b, hashOf(2))
	c.Unref(b)
	c.Flush()
	require.Equal(t, []string{"unref 70:0 70:48"}, p.received())
	c.Flush()
	require.Empty(t, p.received())
	s := c.State()
	require.Equal(t, State{Connected: true, Connects: 1, Found: 3, Missed: 1, Segments: 1}, s)
}

func TestRestoredAndEvictedAgain(t *testing.T) {
	c, p := connect(t)
	p.addSegment(0)
	p.put(0, hashOf(1))
	p.barrier(c)

	c.Unref(mustFind(t, c, hashOf(1)))
	c.Flush()
	require.Empty(t, p.received(), "evicted and restored")

	mustFind(t, c, hashOf(1))
	c.Flush()
	require.Equal(t, []string{"ref 0:0"}, p.received())
	for range 3 {
		l := mustFind(t, c, hashOf(1))
		c.Unref(l)
		c.Unref(l)
		mustFind(t, c, hashOf(1))
		c.Flush()
		require.Empty(t, p.received(), "restored and evicted again")
	}
}

func TestRetire(t *testing.T) {
	c, p := connect(t)
	before := descriptors(t, "")
	p.addSegment(5)
	p.addSegment(6)
	p.put(5, hashOf(1))
	p.put(5, hashOf(2))
	p.put(6, hashOf(3))
	p.barrier(c)
	a, b, other := mustFind(t, c, hashOf(1)), mustFind(t, c, hashOf(2)), mustFind(t, c, hashOf(3))
	c.Unref(other)
	c.Flush()
	p.received()
	require.False(t, c.Stale(a))
	require.False(t, c.Work().Stale)

	p.retire(5)
	p.retire(6)
	p.barrier(c)
	require.Equal(t, before+1, descriptors(t, ""), "6 has no references")
	<-c.Ready()
	require.True(t, c.Work().Stale)
	require.True(t, c.Stale(a))
	require.False(t, c.Stale(other))
	requireReadable(t, c, a, hashOf(1))
	_, ok := find(t, c, hashOf(1))
	require.False(t, ok, "the index leads to a segment that is gone")
	c.Ref(a)
	c.Unref(a)
	c.Unref(b)
	require.Equal(t, 1, c.State().StaleSegments)

	c.Unref(a)
	require.Equal(t, before, descriptors(t, ""))
	require.False(t, c.Work().Stale)
	require.False(t, c.Stale(a))
	_, err := c.Read(a, make([]byte, wire.MaxRecord))
	require.ErrorContains(t, err, "not open")
	c.Flush()
	require.Empty(t, p.received(), "the pool has forgotten these")

	// Both local numbers serve again, and the pool's too.
	p.addSegment(6)
	p.put(6, hashOf(4))
	p.barrier(c)
	l := mustFind(t, c, hashOf(4))
	require.Less(t, l>>unitBits, memfile.PoolLoc(2))
	c.Flush()
	require.Equal(t, []string{"ref 6:0"}, p.received())
}

// TestRetiredBeforeUnref retires a segment when an Unref is due.
func TestRetiredBeforeUnref(t *testing.T) {
	c, p := connect(t)
	p.addSegment(1)
	p.put(1, hashOf(1))
	p.barrier(c)
	l := mustFind(t, c, hashOf(1))
	c.Flush()
	require.Equal(t, []string{"ref 1:0"}, p.received())
	c.Unref(l)
	p.retire(1)
	p.barrier(c)
	require.Zero(t, c.State().Segments)
	require.Zero(t, c.places)
	c.Flush()
	require.Empty(t, p.received())
}

// TestFoundWhileRetired retires a segment between Find's read and its reference.
func TestFoundWhileRetired(t *testing.T) {
	c, p := connect(t)
	p.addSegment(1)
	at := p.put(1, hashOf(1))
	p.barrier(c)
	c.mu.Lock()
	pl, _ := c.lookup(at)
	pl.s.pins++
	c.mu.Unlock()
	p.retire(1)
	p.barrier(c)
	require.Equal(t, 1, c.State().Segments, "it is being read")
	c.mu.Lock()
	pl.s.pins--
	l := c.take(pl)
	c.unlock()
	require.True(t, c.Stale(l))
	require.True(t, c.Work().Stale)
	requireReadable(t, c, l, hashOf(1))
	c.Unref(l)
	require.Equal(t, State{Connected: true, Connects: 1}, c.State())
}

// TestQueuedByAnEarlierSegment has entries of a closed segment in the queue when
// another one has its number.
func TestQueuedByAnEarlierSegment(t *testing.T) {
	c, p := connect(t)
	p.addSegment(1)
	p.put(1, hashOf(1))
	p.barrier(c)
	l := mustFind(t, c, hashOf(1))
	p.retire(1)
	p.barrier(c)
	c.Unref(l)
	p.addSegment(2)
	p.put(2, hashOf(2))
	p.barrier(c)
	require.Equal(t, l, mustFind(t, c, hashOf(2)))
	c.Flush()
	require.Equal(t, []string{"ref 2:0"}, p.received())
	c.Unref(l)
	c.Flush()
	require.Equal(t, []string{"unref 2:0"}, p.received())
}

func TestOffers(t *testing.T) {
	c, p := connect(t)
	h := hashOf(1)
	key := c.Key()
	c.Offer(key, &h, 1)
	c.Offer(key, &h, 2)
	require.Empty(t, p.received())
	c.Flush()
	require.Equal(t, []string{"offer 1 2"}, p.received())
	c.Offer(new(wire.Key), &h, 3)
	c.Offer(nil, &h, 4)
	for i := range batchOffers {
		require.Nil(t, p.receive())
		c.Offer(key, &h, uint32(i))
	}
	m := p.receive()
	require.Equal(t, batchOffers, m.N)
	require.Equal(t, wire.Page{Hash: h, Cookie: batchOffers - 1}, m.Page(batchOffers-1))
	c.Flush()
	require.Empty(t, p.received())
	require.EqualValues(t, 2, c.State().Dropped)
	require.EqualValues(t, batchOffers+2, c.State().Offered)
}

func TestWork(t *testing.T) {
	c, p := connect(t)
	p.addSegment(3)
	l := p.put(3, hashOf(1))
	p.barrier(c)
	for len(c.Ready()) > 0 {
		<-c.Ready()
	}
	// A new pool is offered what is stored until that is done.
	require.Equal(t, memfile.PoolWork{Key: c.Key(), Anew: true}, c.Work())
	c.OfferedAll(new(wire.Key))
	require.Equal(t, memfile.PoolWork{Key: c.Key(), Anew: true}, c.Work())
	c.OfferedAll(c.Key())
	require.Equal(t, memfile.PoolWork{Key: c.Key()}, c.Work())

	p.w.Begin(wire.Want, 0)
	p.w.Page(wire.Page{Hash: hashOf(7), Cookie: 700})
	p.w.Page(wire.Page{Hash: hashOf(8), Cookie: 800})
	p.send(-1)
	p.publish(hashOf(1), 100, l)
	p.publish(hashOf(2), 200, wire.MakeLoc(4, 0))
	p.publish(hashOf(2), 200, wire.Loc(3<<32|units))
	p.barrier(c)
	<-c.Ready()
	w := c.Work()
	require.Equal(t, []wire.Page{{Hash: hashOf(7), Cookie: 700}, {Hash: hashOf(8), Cookie: 800}}, w.Want)
	require.Len(t, w.Published, 1, "two locations lead nowhere")
	require.Equal(t, hashOf(1), w.Published[0].Hash)
	require.EqualValues(t, 100, w.Published[0].Page)
	requireReadable(t, c, w.Published[0].Loc, hashOf(1))
	require.Equal(t, memfile.PoolWork{Key: c.Key()}, c.Work())
	c.Flush()
	require.Equal(t, []string{"ref 3:0"}, p.received())

	h := hashOf(7)
	page := &codec.Page{9}
	require.True(t, c.Publish(c.Key(), &h, 700, wire.NoPage, page))
	require.False(t, c.Publish(nil, &h, 700, 1, page))
	require.False(t, c.Publish(new(wire.Key), &h, 700, 1, page))
	require.Equal(t, []string{fmt.Sprintf("publish 700 %d 9", wire.NoPage)}, p.received())
	s := c.State()
	require.EqualValues(t, 2, s.Wanted)
	require.EqualValues(t, 1, s.Published)
}

// TestFlood has more work than the queues hold.
func TestFlood(t *testing.T) {
	c, p := connect(t)
	p.addSegment(3)
	l := p.put(3, hashOf(1))
	for range maxQueue/100 + 20 {
		p.w.Begin(wire.Want, 0)
		for i := range 100 {
			p.w.Page(wire.Page{Cookie: uint32(i)})
		}
		p.send(-1)
		p.w.Begin(wire.Published, 0)
		for i := range 100 {
			p.w.Place(wire.Place{Page: wire.Page{Cookie: uint32(i)}, Loc: l})
		}
		p.send(-1)
	}
	p.barrier(c)
	_, own := c.Sharing()
	require.Less(t, own, uint64(1<<20))
	want, published, rounds := 0, 0, 0
	for range maxQueue {
		select {
		case <-c.Ready():
			w := c.Work()
			require.LessOrEqual(t, len(w.Want)+len(w.Published), maxWork)
			if rounds++; rounds == 1 {
				require.Len(t, w.Want, maxWork/2)
				require.Len(t, w.Published, maxWork/2)
			}
			want += len(w.Want)
			published += len(w.Published)
			for _, pl := range w.Published {
				c.Unref(pl.Loc)
			}
		default:
		}
	}
	require.Equal(t, maxQueue, want)
	require.Equal(t, maxQueue, published)
	c.Flush()
	require.Empty(t, p.received())
	p.retire(3)
	p.barrier(c)
	require.Zero(t, c.State().Segments, "all references were given up")
}

func TestPatterns(t *testing.T) {
	c, p := connect(t)
	require.Nil(t, c.Patterns())
	all := bytes.Repeat([]byte("pattern"), wire.MaxPatterns/7)
	for range 2 {
		for b := all; len(b) > 0; {
			n := min(len(b), wire.MaxPart)
			p.w.Begin(wire.Patterns, uint32(len(all)))
			p.w.Body(b[:n])
			p.send(-1)
			b = b[n:]
		}
		p.barrier(c)
		require.Equal(t, all, c.Patterns())
		require.Nil(t, c.Patterns())
	}

	c.SendPatterns(nil)
	c.SendPatterns(make([]byte, wire.MaxPatterns+1))
	require.Empty(t, p.received())
	c.SendPatterns(all[:100])
	require.Equal(t, []string{"patterns 100 of 100"}, p.received())

	// Longer than what the socket holds: what is begun is completed.
	var got []byte
	c.SendPatterns(all)
	c.SendPatterns([]byte("dropped"))
	for range 4000 {
		if m := p.receive(); m != nil {
			require.EqualValues(t, len(all), m.Arg)
			got = append(got, m.Body...)
		}
		c.Flush()
	}
	require.Equal(t, all, got)
}

func TestUsage(t *testing.T) {
	c, p := connect(t)
	c.AskUsage()
	require.Equal(t, []string{"usage"}, p.received())
	p.w.Begin(wire.Share, 0)
	p.w.Sharing(wire.Sharing{Pages: 1000, Overhead: 2000})
	p.send(-1)
	eventually(t, func() bool {
		s, _ := c.Sharing()
		return s == wire.Sharing{Pages: 1000, Overhead: 2000}
	})
}

// TestFull has a pool that does not read.
func TestFull(t *testing.T) {
	c := New(Options{Log: t.Logf})
	defer c.Close()
	p, fd := dial(t)
	defer p.close()
	require.NoError(t, unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, 40<<10))
	require.NoError(t, c.Attach(fd))
	p.welcome()
	p.sendIndex()
	p.addSegment(1)
	const n = 2000
	p.places = 1 << 16
	require.NoError(t, unix.Ftruncate(p.index, int64(wire.IndexSize(p.places))))
	p.sendIndex()
	for i := range n {
		p.put(1, hashOf(i))
	}
	p.barrier(c)

	h, key, page := hashOf(1), c.Key(), new(codec.Page)
	sent := 0
	for c.Publish(key, &h, 1, 1, page) {
		sent++
	}
	require.Positive(t, sent)
	c.AskUsage()
	c.SendPatterns(make([]byte, patternsPart+1))
	locs := make([]memfile.PoolLoc, n)
	for i := range locs {
		locs[i] = mustFind(t, c, hashOf(i))
	}
	for range 3 * batchOffers {
		c.Offer(key, &h, 1)
	}
	c.Flush()
	s := c.State()
	require.True(t, s.Connected)
	require.EqualValues(t, 3*batchOffers, s.Dropped)
	require.Zero(t, s.Offered)

	// References wait until there is room, and are not sent if they have come to
	// nothing by then.
	for _, l := range locs[n/2:] {
		c.Unref(l)
	}
	c.Flush()
	told := map[wire.Loc]bool{}
	published := 0
	drain := func() {
		for range 100 {
			c.Flush()
			for m := p.receive(); m != nil; m = p.receive() {
				switch m.Type {
				case wire.Publish:
					published++
				case wire.Ref, wire.Unref:
					for i := range m.N {
						require.Equal(t, m.Type == wire.Unref, told[m.Loc(i)])
						told[m.Loc(i)] = m.Type == wire.Ref
					}
				default:
					t.Fatalf("%v was to be dropped", m.Type)
				}
			}
		}
	}
	drain()
	require.Equal(t, sent, published)
	require.Len(t, told, n/2)

	// The same for references that are given up.
	for c.Publish(key, &h, 1, 1, page) {
		sent++
	}
	for _, l := range locs[:n/2] {
		c.Unref(l)
	}
	c.Flush()
	for _, l := range locs[:n/4] {
		c.Ref(l)
	}
	drain()
	has := 0
	for _, ok := range told {
		if ok {
			has++
		}
	}
	require.Equal(t, n/4, has)
}

// TestDisconnect ends a connection after each step of a dialogue.
func TestDisconnect(t *testing.T) {
	// Descriptors of earlier tests' pools are closed by now.
	before, beforeSockets := descriptors(t, ""), sockets(t)
	for last := 0; ; last++ {
		done := false
		for _, how := range []string{"the pool hangs up", "the pool's end is gone when something is sent", "replaced", "closed"} {
			t.Run(fmt.Sprintf("%d/%s", last, how), func(t *testing.T) {
				done = disconnectAfter(t, last, how)
			})
			require.Equal(t, before, descriptors(t, ""))
			require.Equal(t, beforeSockets, sockets(t))
		}
		if done {
			return
		}
	}
}

// disconnectAfter does the first steps of a dialogue and ends it. It returns true
// if these were all.
func disconnectAfter(t *testing.T, last int, how string) (done bool) {
	var logged atomic.Int32
	c := New(Options{Log: func(format string, args ...any) {
		logged.Add(1)
		t.Logf(format, args...)
	}})
	defer c.Close()
	p, fd := dial(t)
	defer p.close()
	require.NoError(t, c.Attach(fd))

	var held []memfile.PoolLoc
	h := hashOf(1)
	var l wire.Loc
	steps := []func(){
		func() { p.welcome() },
		func() { p.sendIndex() },
		func() { p.addSegment(1); p.addSegment(2); l = p.put(1, h); p.put(2, hashOf(2)) },
		func() { p.barrier(c) },
		func() { held = append(held, mustFind(t, c, h)) },
		func() { c.Flush() },
		func() { c.Offer(c.Key(), &h, 5) },
		func() { p.w.Begin(wire.Patterns, 20); p.w.Body([]byte("half")); p.send(-1) },
		func() { p.publish(h, 1, l) },
		func() { p.publish(hashOf(2), 1, wire.MakeLoc(2, 0)) },
		func() { p.w.Begin(wire.Want, 0); p.w.Page(wire.Page{}); p.send(-1) },
		func() { p.barrier(c) },
		func() { c.Flush() },
		func() { p.retire(1) },
		func() { p.barrier(c) },
		func() { c.SendPatterns(make([]byte, wire.MaxPatterns)) },
		func() { held = append(held, held[0]); c.Ref(held[0]) },
	}
	for _, step := range steps[:min(last, len(steps))] {
		step()
	}
	live := last > 3
	var next *fakePool
	switch how {
	case "the pool hangs up":
		p.hangUp()
	case "the pool's end is gone when something is sent":
		require.NoError(t, unix.Shutdown(p.socket, unix.SHUT_RD))
		if c.Key() == nil {
			p.hangUp()
			break
		}
		// Either the sender or the receiver notices.
		c.AskUsage()
		p.ended()
	case "replaced":
		next, fd = dial(t)
		defer next.close()
		require.NoError(t, c.Attach(fd))
		p.ended()
	case "closed":
		c.Close()
		p.ended()
		require.ErrorIs(t, c.Attach(dup(t)), errClosed)
	}
	disconnected(t, c)
	require.Nil(t, c.Key())
	<-c.Ready()
	require.False(t, c.State().Connected)
	require.Equal(t, memfile.PoolWork{}, c.Work())
	c.Flush()
	c.AskUsage()
	c.Offer(c.Key(), &h, 5)
	for _, l := range held {
		require.False(t, c.Stale(l), "there is nowhere to look for it")
		requireReadable(t, c, l, h)
	}
	segments := 0
	if len(held) > 0 {
		segments = 1
	}
	require.Equal(t, segments, c.State().Segments)

	if how != "closed" {
		// What is held stays across connections, and is stale.
		if next == nil {
			// It is logged after everything else.
			require.Eventually(t, func() bool { return logged.Load() == 1 }, 10*time.Second, time.Millisecond)
			next, fd = dial(t)
			defer next.close()
			require.NoError(t, c.Attach(fd))
		}
		if live {
			require.False(t, c.Stale(0))
		}
		next.welcome()
		next.sendIndex()
		next.addSegment(1)
		next.put(1, h)
		next.barrier(c)
		require.Equal(t, next.key, *c.Key())
		require.Equal(t, len(held) > 0, c.Work().Stale)
		moved := mustFind(t, c, h)
		require.False(t, c.Stale(moved))
		for _, l := range held {
			require.NotEqual(t, moved, l)
			require.True(t, c.Stale(l))
			requireReadable(t, c, l, h)
		}
		c.Flush()
		require.Equal(t, []string{"ref 1:0"}, next.received())
		c.Unref(moved)
		require.Nil(t, c.Patterns())
	}
	for _, l := range held {
		c.Unref(l)
	}
	require.Zero(t, c.State().StaleSegments)
	c.Close()
	require.Zero(t, c.State().Segments)
	return last >= len(steps)
}

func dup(t *testing.T) int {
	p, fd := dial(t)
	t.Cleanup(p.close)
	return fd
}

// TestHostile sends what no pool sends. The connection ends, with a reason.
func TestHostile(t *testing.T) {
	raw := func(b ...byte) func(p *fakePool) {
		return func(p *fakePool) { p.sendBytes(b, -1) }
	}
	body := func(ty wire.Type, arg uint32, b []byte, fd bool) func(p *fakePool) {
		return func(p *fakePool) {
			p.w.Begin(ty, arg)
			p.w.Body(b)
			if fd {
				p.send(p.index)
			} else {
				p.send(-1)
			}
		}
	}
	segment := func(n uint32) func(p *fakePool) { return func(p *fakePool) { p.addSegment(n) } }
	for _, c := range []struct {
		name  string
		greet bool // false: before Welcome
		send  func(p *fakePool)
		want  string
	}{
		{"short", true, raw(1, 2, 3), "malformed message of 3 bytes"},
		{"empty", true, func(p *fakePool) {
			require.NoError(p.t, unix.Sendmsg(p.socket, nil, nil, nil, unix.MSG_NOSIGNAL))
		}, "closed"},
		{"unknown type", true, raw(200, 0, 0, 0, 0, 0, 0, 0), "unknown type"},
		{"reserved byte", true, raw(byte(wire.Retire), 1, 0, 0, 0, 0, 0, 0), "malformed"},
		{"wrong count", true, raw(byte(wire.Want), 0, 9, 0, 0, 0, 0, 0), "malformed"},
		{"items of no items", true, raw(byte(wire.Retire), 0, 9, 0, 0, 0, 0, 0), "malformed"},
		{"a sandbox's message", true, body(wire.Usage, 0, nil, false), "nothing that a pool sends"},
		{"an offer", true, body(wire.Offer, 0, nil, false), "nothing that a pool sends"},
		{"a report", true, body(wire.Report, 0, []byte("{}"), false), "nothing that a pool sends"},
		{"segment before welcome", false, segment(1), "segment at the wrong time"},
		{"index before welcome", false, (*fakePool).sendIndex, "index at the wrong time"},
		{"want before welcome", false, body(wire.Want, 0, nil, false), "want at the wrong time"},
		{"welcome twice", true, (*fakePool).welcome, "welcome at the wrong time"},
		{"short key", false, body(wire.Welcome, 0, make([]byte, 31), false), "key of 31 bytes"},
		{"long key", false, body(wire.Welcome, 0, make([]byte, 33), false), "key of 33 bytes"},
		{"welcome with a descriptor", false, body(wire.Welcome, 0, make([]byte, 32), true), "welcome with a descriptor"},
		{"refused", false, body(wire.Refuse, 0, []byte("no \x1b such tenant"), false), `refuses it: "no \x1b such tenant"`},
		{"refused at length", true, body(wire.Refuse, 0, bytes.Repeat([]byte("x"), wire.MaxPart), false), "refuses it"},
		{"segment without descriptor", true, body(wire.Segment, 1, nil, false), "segment without its descriptor"},
		{"segment with a body", true, body(wire.Segment, 1, []byte("x"), true), "segment with 1 bytes"},
		{"segment twice", true, func(p *fakePool) { p.addSegment(1); p.addSegment(1) }, "segment 1 is announced twice"},
		{"retire of nothing", true, body(wire.Retire, 1<<31, nil, false), "segment 2147483648 goes away"},
		{"retire twice", true, func(p *fakePool) {
			p.addSegment(1)
			body(wire.Retire, 1, nil, false)(p)
			body(wire.Retire, 1, nil, false)(p)
		}, "segment 1 goes away"},
		{"retire with a body", true, func(p *fakePool) { p.addSegment(1); body(wire.Retire, 1, []byte("x"), false)(p) }, "retire with 1 bytes"},
		{"index without descriptor", true, body(wire.Index, 0, nil, false), "index without its descriptor"},
		{"index of nothing", true, body(wire.Index, 0, nil, true), "index of another form"},
		{"index of two sizes", true, func(p *fakePool) {
			p.w.Begin(wire.Index, 0)
			p.w.Uint64(1)
			p.w.Uint64(2)
			p.send(p.index)
		}, "index of another form"},
		{"huge index", true, func(p *fakePool) { p.places = maxPlaces + 1; p.sendIndex() }, "index of another form"},
		{"share of one number", true, func(p *fakePool) { p.w.Begin(wire.Share, 0); p.w.Uint64(1); p.send(-1) }, "share of 1 items"},
		{"want with a descriptor", true, body(wire.Want, 0, nil, true), "want with a descriptor"},
		{"no patterns", true, body(wire.Patterns, 0, nil, false), "part of 0 bytes of 0"},
		{"empty part", true, body(wire.Patterns, 10, nil, false), "part of 0 bytes of 10"},
		{"too many patterns", true, body(wire.Patterns, wire.MaxPatterns+1, []byte("x"), false), "of patterns"},
		{"more than the patterns", true, body(wire.Patterns, 1, []byte("xy"), false), "part of 2 bytes of 1"},
		{"patterns of two lengths", true, func(p *fakePool) {
			body(wire.Patterns, 4, []byte("xy"), false)(p)
			body(wire.Patterns, 5, []byte("z"), false)(p)
		}, "after 2 bytes of 4"},
		{"more than the rest of the patterns", true, func(p *fakePool) {
			body(wire.Patterns, 4, []byte("xyz"), false)(p)
			body(wire.Patterns, 4, []byte("zz"), false)(p)
		}, "after 3 bytes of 4"},
		{"too long", true, raw(make([]byte, wire.MaxMessage+1)...), "too long"},
		{"two descriptors", true, func(p *fakePool) {
			p.w.Begin(wire.Segment, 1)
			require.NoError(p.t, unix.Sendmsg(p.socket, p.w.Bytes(), unix.UnixRights(p.index, p.index), nil, unix.MSG_NOSIGNAL))
		}, "more than one descriptor"},
		{"a hundred descriptors", true, func(p *fakePool) {
			fds := make([]int, 100)
			for i := range fds {
				fds[i] = p.index
			}
			p.w.Begin(wire.Want, 0)
			require.NoError(p.t, unix.Sendmsg(p.socket, p.w.Bytes(), unix.UnixRights(fds...), nil, unix.MSG_NOSIGNAL))
		}, "more than one descriptor"},
	} {
		t.Run(c.name, func(t *testing.T) {
			before := descriptors(t, "")
			var logged []string
			lost := make(chan struct{})
			cl := New(Options{Log: func(format string, args ...any) {
				logged = append(logged, fmt.Sprintf(format, args...))
				close(lost)
			}})
			p, fd := dial(t)
			require.NoError(t, cl.Attach(fd))
			if c.greet {
				p.welcome()
				p.sendIndex()
				p.barrier(cl)
			}
			c.send(p)
			<-lost
			p.ended()
			require.Nil(t, cl.Key())
			require.Contains(t, cl.State().Reason, c.want)
			require.Less(t, len(cl.State().Reason), 4*maxRefusal)
			require.Len(t, logged, 1)
			cl.Close()
			require.Len(t, logged, 1)
			p.close()
			require.Equal(t, before, descriptors(t, ""))
		})
	}
}

// TestLies has a pool whose messages are well-formed. Nothing is found that is not
// what was looked for.
func TestLies(t *testing.T) {
	c, p := connect(t)
	p.addSegment(1)
	good := p.put(1, hashOf(1))
	miss := func(why string, h wire.Hash) {
		t.Helper()
		p.barrier(c)
		_, ok := find(t, c, h)
		require.False(t, ok, why)
	}
	for i, l := range []wire.Loc{
		good,                                 // another page
		good + 1,                             // the middle of a page
		wire.MakeLoc(1, 100*wire.Align),      // nothing
		wire.MakeLoc(1, wire.SegmentSize-16), // the end of the segment
		wire.MakeLoc(1, wire.SegmentSize),    // beyond it
		wire.MakeLoc(1, 1<<32), wire.Loc(1)<<32 | ^wire.Loc(0)>>32, ^wire.Loc(0),
		wire.MakeLoc(0, 0), wire.MakeLoc(2, 0), // no segments
	} {
		h := hashOf(100 + i)
		p.enter(h, l)
		miss(fmt.Sprintf("%#x", uint64(l)), h)
	}

	// A page that ends with its segment is read whole, one that is cut is not.
	h := hashOf(2)
	r := recordOf(h)
	b := make([]byte, r.Size())
	r.Put(b)
	end := int64(wire.SegmentSize - len(b))
	_, err := unix.Pwrite(p.segments[1], b, end)
	require.NoError(t, err)
	p.enter(h, wire.MakeLoc(1, uint64(end)))
	l := mustFind(t, c, h)
	require.NoError(t, unix.Ftruncate(p.segments[1], end+wire.RecordHeader+7))
	miss("cut", h)
	_, err = c.Read(l, make([]byte, wire.MaxRecord))
	require.ErrorIs(t, err, wire.ErrRecord)
	require.ErrorContains(t, err, "segment 1")
	require.NoError(t, unix.Ftruncate(p.segments[1], 0))
	_, err = c.Read(l, make([]byte, wire.MaxRecord))
	require.ErrorIs(t, err, wire.ErrRecord)
	c.Unref(l)

	// An index that has another size, or is none.
	for _, places := range []uint64{0, 1, 1 << 30, maxPlaces} {
		p.places = places
		p.sendIndex()
		for i := range 20 {
			miss("wrong size", hashOf(1000+i))
		}
	}
	r2, err := unix.Open("/", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	require.NoError(t, err)
	defer unix.Close(r2)
	for _, fd := range []int{r2, p.socket} {
		p.w.Begin(wire.Index, 0)
		p.w.Uint64(64)
		p.send(fd)
		miss("not a file", hashOf(1))
		p.w.Begin(wire.Segment, uint32(1000+fd))
		p.send(fd)
		p.sendIndex()
		p.publish(hashOf(1), 1, wire.MakeLoc(uint32(1000+fd), 0))
		p.barrier(c)
		w := c.Work()
		require.Len(t, w.Published, 1)
		_, err := c.Read(w.Published[0].Loc, make([]byte, wire.MaxRecord))
		require.ErrorContains(t, err, "segment")
		c.Unref(w.Published[0].Loc)
	}
	require.True(t, c.State().Connected)
}

// TestTooManySegments pretends that there are as many as there may be.
func TestTooManySegments(t *testing.T) {
	c, p := connect(t)
	c.mu.Lock()
	c.open += maxSegments
	c.mu.Unlock()
	p.addSegment(1)
	p.ended()
	c.mu.Lock()
	c.open -= maxSegments
	c.mu.Unlock()
	require.Contains(t, c.State().Reason, "one more than")
}

func TestMisuse(t *testing.T) {
	c, p := connect(t)
	p.addSegment(1)
	p.put(1, hashOf(1))
	p.barrier(c)
	l := mustFind(t, c, hashOf(1))
	c.Unref(l)
	require.Panics(t, func() { c.Unref(l) })
	require.Panics(t, func() { c.Unref(l + 1) })
	require.Panics(t, func() { c.Unref(memfile.PoolLoc(1) << unitBits) })
	require.Panics(t, func() { c.Ref(1<<memfile.PoolLocBits - 1) })
	_, err := c.Read(^memfile.PoolLoc(0), make([]byte, wire.MaxRecord))
	require.Error(t, err)
	require.False(t, c.Stale(^memfile.PoolLoc(0)))
	c.Ref(l)
	c.Unref(l)
	c.Flush()
	require.Empty(t, p.received())

	require.ErrorContains(t, c.Attach(-1), "descriptor -1")
	require.True(t, c.State().Connected)
	require.NoError(t, c.Attach(memfd(t, "no-socket", 0)))
	eventually(t, func() bool { return strings.Contains(c.State().Reason, "receiving") })
	eventually(t, func() bool { return descriptors(t, "no-socket") == 0 })
}

// TestCloseWithoutConnection leaves nothing behind.
func TestCloseWithoutConnection(t *testing.T) {
	before := sockets(t)
	c := New(Options{})
	require.Equal(t, before+2, sockets(t))
	require.Nil(t, c.Key())
	c.Flush()
	c.AskUsage()
	c.SendPatterns([]byte("x"))
	c.Close()
	c.Close()
	require.Equal(t, before, sockets(t))
	p, fd := dial(t)
	require.ErrorIs(t, c.Attach(fd), errClosed)
	_, _, err := wire.Receive(p.socket, make([]byte, 1))
	require.ErrorIs(t, err, io.EOF)
	p.close()
}

// TestOwn compares the estimate with what the heap says.
func TestOwn(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector's memory is another")
	}
	heap := func() uint64 {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := heap()
	c, p := connect(t)
	for s := range uint32(20) {
		p.addSegment(s)
		p.barrier(c)
		c.mu.Lock()
		sg := c.byNumber[s]
		for u := range uint32(5000) {
			c.take(place{sg, u * 3})
		}
		c.mu.Unlock()
		c.Flush()
		p.received()
	}
	held := heap() - before
	_, own := c.Sharing()
	t.Logf("heap %d, estimate %d, 100000 places", held, own)
	require.InEpsilon(t, held, own, 0.3)
	runtime.KeepAlive(c)
}
