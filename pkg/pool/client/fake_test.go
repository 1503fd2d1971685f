package client

import (
	"encoding/binary"
	"fmt"
	"io"
	"os"
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

// A tester is what *testing.T, *testing.F, *testing.B and *rapid.T have in common.
type tester interface {
	require.TestingT
	Helper()
	Fatalf(format string, args ...any)
}

// A fakePool is the other end of a connection, without any logic of its own.
type fakePool struct {
	t      tester
	socket int
	key    wire.Key
	places uint64
	index  int
	// segments are descriptors, used how many bytes of each are taken.
	segments map[uint32]int
	used     map[uint32]uint64
	w        wire.Writer
}

// barriers numbers the barriers of all pools.
var barriers atomic.Uint64

// memfdName is what the memfds of this package's tests are called, so that open
// descriptors of theirs can be counted.
const memfdName = "pool-client-test"

func memfd(t tester, name string, size int64) int {
	t.Helper()
	fd, err := unix.MemfdCreate(memfdName+"-"+name, unix.MFD_CLOEXEC)
	require.NoError(t, err)
	require.NoError(t, unix.Ftruncate(fd, size))
	return fd
}

// descriptors is how many descriptors there are of memfds of this name.
func descriptors(t tester, name string) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	n := 0
	for _, e := range entries {
		if l, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil && strings.HasPrefix(l, "/memfd:"+memfdName+"-"+name) {
			n++
		}
	}
	return n
}

// sockets is how many descriptors of sockets there are.
func sockets(t tester) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	n := 0
	for _, e := range entries {
		if l, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil && strings.HasPrefix(l, "socket:") {
			n++
		}
	}
	return n
}

// dial returns a fake pool and the sandbox's end of a connection to it.
func dial(t tester) (*fakePool, int) {
	t.Helper()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	p := &fakePool{t: t, socket: pair[0], places: 64, segments: map[uint32]int{}, used: map[uint32]uint64{}}
	p.index = memfd(t, "index", int64(wire.IndexSize(p.places)))
	copy(p.key[:], fmt.Sprintf("key %d", pair[0]))
	return p, pair[1]
}

// close ends the connection and closes everything of the pool.
func (p *fakePool) close() {
	p.hangUp()
	if p.index >= 0 {
		unix.Close(p.index)
	}
	for _, fd := range p.segments {
		unix.Close(fd)
	}
	p.index, p.segments = -1, nil
}

func (p *fakePool) hangUp() {
	if p.socket >= 0 {
		unix.Close(p.socket)
		p.socket = -1
	}
}

// send sends a message that has been put together in w. It waits for room.
func (p *fakePool) send(fd int) {
	p.t.Helper()
	p.sendBytes(p.w.Bytes(), fd)
}

func (p *fakePool) sendBytes(b []byte, fd int) {
	p.t.Helper()
	eventually(p.t, func() bool {
		err := wire.Send(p.socket, b, fd)
		if err != unix.EAGAIN {
			require.NoError(p.t, err)
		}
		return err == nil
	})
}

func (p *fakePool) welcome() {
	p.t.Helper()
	p.w.Begin(wire.Welcome, 0)
	p.w.Body(p.key[:])
	p.send(-1)
}

func (p *fakePool) sendIndex() {
	p.t.Helper()
	p.w.Begin(wire.Index, 0)
	p.w.Uint64(p.places)
	p.send(p.index)
}

func (p *fakePool) addSegment(n uint32) {
	p.t.Helper()
	if _, ok := p.segments[n]; !ok {
		p.segments[n] = memfd(p.t, "segment", wire.SegmentSize)
	}
	p.w.Begin(wire.Segment, n)
	p.send(p.segments[n])
}

func (p *fakePool) retire(n uint32) {
	p.t.Helper()
	p.w.Begin(wire.Retire, n)
	p.send(-1)
	unix.Close(p.segments[n])
	delete(p.segments, n)
	delete(p.used, n)
}

// put writes a page to a segment, and into the index.
func (p *fakePool) put(segment uint32, h wire.Hash) wire.Loc {
	p.t.Helper()
	r := recordOf(h)
	b := make([]byte, r.Size())
	r.Put(b)
	l := wire.MakeLoc(segment, p.used[segment])
	p.used[segment] += uint64(len(b))
	_, err := unix.Pwrite(p.segments[segment], b, int64(l.Offset()))
	require.NoError(p.t, err)
	p.enter(h, l)
	return l
}

func (p *fakePool) enter(h wire.Hash, l wire.Loc) {
	p.t.Helper()
	slots := make([]byte, wire.ProbeSize)
	_, err := unix.Pread(p.index, slots, int64(wire.Probe(&h, p.places)))
	require.NoError(p.t, err)
	require.True(p.t, wire.PutSlot(slots, &h, l))
	_, err = unix.Pwrite(p.index, slots, int64(wire.Probe(&h, p.places)))
	require.NoError(p.t, err)
}

func (p *fakePool) publish(h wire.Hash, cookie uint32, l wire.Loc) {
	p.t.Helper()
	p.w.Begin(wire.Published, 0)
	p.w.Place(wire.Place{Page: wire.Page{Hash: h, Cookie: cookie}, Loc: l})
	p.send(-1)
}

// barrier returns when the client has taken everything that was sent.
func (p *fakePool) barrier(c *Client) {
	p.t.Helper()
	n := barriers.Add(1)
	p.w.Begin(wire.Share, 0)
	p.w.Sharing(wire.Sharing{Pages: n})
	p.send(-1)
	eventually(p.t, func() bool {
		s, _ := c.Sharing()
		return s.Pages == n
	})
}

// received returns what the client has sent, each message in words.
func (p *fakePool) received() []string {
	p.t.Helper()
	var all []string
	for {
		m := p.receive()
		if m == nil {
			return all
		}
		s := m.Type.String()
		for i := range m.N {
			switch m.Type {
			case wire.Ref, wire.Unref:
				s += fmt.Sprintf(" %d:%d", m.Loc(i).Segment(), m.Loc(i).Offset())
			case wire.Offer:
				s += fmt.Sprintf(" %d", m.Page(i).Cookie)
			case wire.Resemble:
				o := m.Sketched(i)
				s += fmt.Sprintf(" %d/%d", o.Cookie, o.Sketch.N)
			case wire.Publish:
				c := m.Content(i)
				s += fmt.Sprintf(" %d %d %d", c.Cookie, c.Template, c.Data[0])
			}
		}
		if m.Type == wire.Patterns {
			s += fmt.Sprintf(" %d of %d", len(m.Body), m.Arg)
		}
		all = append(all, s)
	}
}

// receive returns a message, or nil if there is none.
func (p *fakePool) receive() *wire.Message {
	p.t.Helper()
	buf := make([]byte, wire.MaxMessage)
	n, fd, err := wire.Receive(p.socket, buf)
	if err == unix.EAGAIN || err == io.EOF || err == unix.ECONNRESET {
		return nil
	}
	require.NoError(p.t, err)
	require.Equal(p.t, -1, fd)
	m, err := wire.Parse(buf[:n])
	require.NoError(p.t, err)
	return &m
}

// ended returns when the client has closed the connection.
func (p *fakePool) ended() {
	p.t.Helper()
	eventually(p.t, func() bool {
		_, _, err := wire.Receive(p.socket, make([]byte, wire.MaxMessage))
		return err == io.EOF || err == unix.ECONNRESET
	})
}

// eventually waits for what another goroutine does. It gives up after a time that
// nothing takes.
func eventually(t tester, ok func() bool) {
	t.Helper()
	for began, n := time.Now(), 0; !ok(); n++ {
		if time.Since(began) > time.Minute {
			t.Fatalf("it has not happened within a minute")
		}
		if n < 100 {
			runtime.Gosched()
			continue
		}
		time.Sleep(100 * time.Microsecond)
	}
}

// disconnected returns when a client has lost its connection and has closed what
// it does not need any more.
func disconnected(t tester, c *Client) {
	t.Helper()
	eventually(t, func() bool {
		s := c.State()
		return !s.Connected && s.Reason != "" && s.Segments == s.StaleSegments
	})
}

func hashOf(n int) (h wire.Hash) {
	binary.LittleEndian.PutUint64(h[:], uint64(n)*0x9e3779b97f4a7c15+1)
	binary.LittleEndian.PutUint64(h[8:], uint64(n)*0xd1342543de82ef95)
	return h
}

// recordOf is what the fake pool has of a page.
func recordOf(h wire.Hash) wire.Record {
	return wire.Record{Hash: h, Sum: binary.LittleEndian.Uint64(h[:]), Tag: codec.TagFill, Enc: h[:8]}
}

// connect returns a live client and its pool, which has an index and no segments.
func connect(t *testing.T) (*Client, *fakePool) {
	c := New(Options{Log: t.Logf})
	t.Cleanup(c.Close)
	return c, reconnect(t, c)
}

func reconnect(t *testing.T, c *Client) *fakePool {
	p, fd := dial(t)
	t.Cleanup(p.close)
	require.NoError(t, c.Attach(fd))
	p.welcome()
	p.sendIndex()
	p.barrier(c)
	return p
}

func find(t tester, c *Client, h wire.Hash) (memfile.PoolLoc, bool) {
	t.Helper()
	l, r, ok := c.Find(c.Key(), &h, make([]byte, wire.MaxRecord))
	if ok {
		require.Equal(t, recordOf(h), r)
	}
	return l, ok
}

func mustFind(t tester, c *Client, h wire.Hash) memfile.PoolLoc {
	t.Helper()
	l, ok := find(t, c, h)
	require.True(t, ok)
	return l
}

func requireReadable(t tester, c *Client, l memfile.PoolLoc, h wire.Hash) {
	t.Helper()
	r, err := c.Read(l, make([]byte, wire.MaxRecord))
	require.NoError(t, err)
	require.Equal(t, recordOf(h), r)
}
