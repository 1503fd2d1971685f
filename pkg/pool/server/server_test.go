package server

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"runsc-agentzip/memfile/codec"
	"runsc-agentzip/pkg/pool/wire"
)

// deadline is how long a test waits for what has to happen.
const deadline = 20 * time.Second

// page returns a page that compresses to about size bytes, and differs for each
// seed.
func page(seed uint64, size int) *codec.Page {
	p := new(codec.Page)
	r := rand.New(rand.NewPCG(seed, 1))
	for i := range min(size, len(p)) {
		p[i] = byte(r.Uint32())
	}
	return p
}

// A client is a sandbox, over a socket.
type client struct {
	t    testing.TB
	fd   int
	buf  [wire.MaxMessage]byte
	view view
}

// A view is what a sandbox knows of the pool.
type view struct {
	key      *wire.Key
	hasher   *wire.Hasher
	decoder  *codec.Decoder
	index    int
	places   uint64
	segs     map[uint32]int
	retired  map[uint32]bool
	wants    []wire.Page
	told     []wire.Place
	alone    []wire.Loc
	similar  []wire.Place
	shares   []wire.Sharing
	patterns []byte
	refused  string
}

func newView() view {
	return view{index: -1, decoder: codec.NewDecoder(), segs: map[uint32]int{}, retired: map[uint32]bool{}}
}

// got takes a message from the pool, and keeps the descriptor.
func (v *view) got(t testing.TB, b []byte, fd int) {
	m, err := wire.Parse(b)
	require.NoError(t, err)
	switch m.Type {
	case wire.Welcome:
		v.key = (*wire.Key)(append([]byte(nil), m.Body...))
		v.hasher = wire.NewHasher(v.key)
	case wire.Refuse:
		v.refused = string(m.Body)
	case wire.Index:
		if v.index >= 0 {
			unix.Close(v.index)
		}
		v.index, v.places = fd, m.Uint64(0)
		require.GreaterOrEqual(t, fd, 0)
	case wire.Segment:
		require.GreaterOrEqual(t, fd, 0)
		_, twice := v.segs[m.Arg]
		require.False(t, twice, "segment %d twice", m.Arg)
		v.segs[m.Arg] = fd
	case wire.Retire:
		require.Contains(t, v.segs, m.Arg)
		require.False(t, v.retired[m.Arg])
		v.retired[m.Arg] = true
	case wire.Want:
		for i := range m.N {
			v.wants = append(v.wants, m.Page(i))
		}
	case wire.Published:
		for i := range m.N {
			p := m.Place(i)
			require.Contains(t, v.segs, p.Loc.Segment())
			v.told = append(v.told, p)
		}
	case wire.Similar:
		for i := range m.N {
			p := m.Place(i)
			require.Contains(t, v.segs, p.Loc.Segment())
			v.similar = append(v.similar, p)
		}
	case wire.Alone:
		for i := range m.N {
			require.Contains(t, v.segs, m.Loc(i).Segment())
			v.alone = append(v.alone, m.Loc(i))
		}
	case wire.Share:
		s, err := m.Sharing()
		require.NoError(t, err)
		v.shares = append(v.shares, s)
	case wire.Patterns:
		v.patterns = append(v.patterns, m.Body...)
		require.LessOrEqual(t, len(v.patterns), int(m.Arg))
	default:
		require.Fail(t, "unexpected", "%v", m.Type)
	}
}

func (v *view) close() {
	if v.index >= 0 {
		unix.Close(v.index)
	}
	for _, fd := range v.segs {
		unix.Close(fd)
	}
}

func (v *view) hash(p *codec.Page) wire.Hash { return v.hasher.Sum(p) }

// record reads the record at a location.
func (v *view) record(t testing.TB, l wire.Loc) wire.Record {
	buf := make([]byte, wire.MaxRecord)
	require.Contains(t, v.segs, l.Segment())
	n, err := unix.Pread(v.segs[l.Segment()], buf, int64(l.Offset()))
	require.NoError(t, err)
	r, err := wire.ParseRecord(buf[:n])
	require.NoError(t, err)
	return r
}

// read decodes the page at a location.
func (v *view) read(t testing.TB, l wire.Loc, base *codec.Page) *codec.Page {
	r := v.record(t, l)
	p := new(codec.Page)
	require.NoError(t, v.decoder.Decode(p, r.Tag, r.Enc, base))
	require.Equal(t, r.Sum, codec.Sum(p))
	require.Equal(t, r.Hash, v.hash(p))
	return p
}

// find looks a page up in the index.
func (v *view) find(t testing.TB, h *wire.Hash) (wire.Loc, bool) {
	var slots [wire.ProbeSize]byte
	_, err := unix.Pread(v.index, slots[:], int64(wire.Probe(h, v.places)))
	require.NoError(t, err)
	return wire.FindSlot(slots[:], h)
}

func pair(t testing.TB) (ours, theirs int) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	return fds[0], fds[1]
}

func greeting(domain string) *wire.Greeting {
	return &wire.Greeting{Version: wire.Version, Name: "test", Domain: domain}
}

// attach returns a client that the pool has welcomed.
func attach(t testing.TB, s *Server, g *wire.Greeting) *client {
	ours, theirs := pair(t)
	require.NoError(t, s.Attach(theirs, g))
	return newClient(t, ours)
}

func newClient(t testing.TB, fd int) *client {
	c := &client{t: t, fd: fd, view: newView()}
	t.Cleanup(c.close)
	c.until(func() bool { return c.view.index >= 0 })
	return c
}

func (c *client) close() {
	if c.fd >= 0 {
		unix.Close(c.fd)
		c.fd = -1
		c.view.close()
	}
}

// until receives until something is true.
func (c *client) until(done func() bool) {
	c.t.Helper()
	end := time.Now().Add(deadline)
	for !done() {
		err := c.receive()
		if err == unix.EAGAIN {
			require.True(c.t, time.Now().Before(end), "timeout")
			unix.Poll([]unix.PollFd{{Fd: int32(c.fd), Events: unix.POLLIN}}, 10)
			continue
		}
		require.NoError(c.t, err)
	}
}

func (c *client) receive() error {
	n, fd, err := wire.Receive(c.fd, c.buf[:])
	if err == nil {
		c.view.got(c.t, c.buf[:n], fd)
	}
	return err
}

// ended waits for the end of the connection.
func (c *client) ended() {
	c.t.Helper()
	end := time.Now().Add(deadline)
	for {
		err := c.receive()
		if err == unix.EAGAIN {
			require.True(c.t, time.Now().Before(end), "timeout")
			unix.Poll([]unix.PollFd{{Fd: int32(c.fd), Events: unix.POLLIN}}, 10)
			continue
		}
		if err != nil {
			require.True(c.t, errors.Is(err, io.EOF) || errors.Is(err, unix.ECONNRESET), "%v", err)
			return
		}
	}
}

func (c *client) send(b []byte) {
	c.t.Helper()
	require.NoError(c.t, c.trySend(b, -1))
}

func (c *client) trySend(b []byte, fd int) error {
	for {
		err := wire.Send(c.fd, b, fd)
		if err != unix.EAGAIN {
			return err
		}
		unix.Poll([]unix.PollFd{{Fd: int32(c.fd), Events: unix.POLLOUT}}, 10)
	}
}

func offerMessage(pages ...wire.Page) []byte {
	var w wire.Writer
	w.Begin(wire.Offer, 0)
	for _, p := range pages {
		w.Page(p)
	}
	return w.Bytes()
}

func publishMessage(contents ...wire.Content) []byte {
	var w wire.Writer
	w.Begin(wire.Publish, 0)
	for _, c := range contents {
		w.Content(c)
	}
	return w.Bytes()
}

func refMessage(t wire.Type, locs ...wire.Loc) []byte {
	var w wire.Writer
	w.Begin(t, 0)
	for _, l := range locs {
		w.Loc(l)
	}
	return w.Bytes()
}

func usageMessage() []byte {
	var w wire.Writer
	w.Begin(wire.Usage, 0)
	return w.Bytes()
}

func (c *client) offer(cookie uint32, pages ...*codec.Page) {
	c.t.Helper()
	for _, p := range pages {
		c.send(offerMessage(wire.Page{Hash: c.view.hash(p), Cookie: cookie}))
		cookie++
	}
}

// awaitStats waits until the pool's figures fulfil a condition.
func awaitStats(t testing.TB, s *Server, done func(*Usage) bool) {
	t.Helper()
	end := time.Now().Add(deadline)
	for {
		st := s.Stats()
		if done(&st.Total) {
			return
		}
		require.True(t, time.Now().Before(end), "timeout: %+v", st.Total)
		time.Sleep(time.Millisecond)
	}
}

// share makes a page known to two clients and published. Both know its place.
func share(t testing.TB, a, b *client, p *codec.Page, tpl uint32) wire.Loc {
	t.Helper()
	h := a.view.hash(p)
	na, nb := len(a.view.told), len(b.view.told)
	before := a.offers(a.t)
	a.offer(7, p)
	awaitStats(t, a.t.(*poolT).s, func(u *Usage) bool { return u.Offers == before+1 })
	b.offer(9, p)
	b.until(func() bool { return len(b.view.wants) > 0 })
	require.Equal(t, []wire.Page{{Hash: h, Cookie: 9}}, b.view.wants)
	b.view.wants = nil
	b.send(publishMessage(wire.Content{Page: wire.Page{Hash: h, Cookie: 9}, Template: tpl, Data: p}))
	a.until(func() bool { return len(a.view.told) > na })
	b.until(func() bool { return len(b.view.told) > nb })
	pa, pb := a.view.told[na], b.view.told[nb]
	require.Equal(t, wire.Page{Hash: h, Cookie: 7}, pa.Page)
	require.Equal(t, wire.Page{Hash: h, Cookie: 9}, pb.Page)
	require.Equal(t, pa.Loc, pb.Loc)
	return pa.Loc
}

func (c *client) offers(t testing.TB) uint64 { return t.(*poolT).s.Stats().Total.Offers }

// A poolT is a test with a pool whose time the test sets.
type poolT struct {
	testing.TB
	s    *Server
	time atomic.Uint32
}

func newPool(t testing.TB, o Options) *poolT {
	p := &poolT{TB: t}
	p.time.Store(uint32(began))
	p.s = newServer(o, func() stamp { return stamp(p.time.Load()) })
	p.s.sketchFloor = 1 << 30
	t.Cleanup(func() { require.NoError(t, p.s.Close()) })
	return p
}

// pass lets time pass, and the pool do its maintenance.
func (p *poolT) pass(d stamp) {
	p.time.Add(uint32(d))
	p.s.tick()
}

func TestShare(t *testing.T) {
	p := newPool(t, Options{})
	a, b := attach(p, p.s, greeting("d")), attach(p, p.s, greeting("d"))
	require.Equal(t, a.view.key, b.view.key)
	content := page(1, 1000)
	l := share(t, a, b, content, wire.NoPage)
	for _, c := range []*client{a, b} {
		require.Equal(t, content, c.view.read(t, l, nil))
		h := c.view.hash(content)
		at, ok := c.view.find(t, &h)
		require.True(t, ok)
		require.Equal(t, l, at)
	}
	// A third is told at once, and finds it without asking, too.
	c := attach(p, p.s, greeting("d"))
	c.until(func() bool { return len(c.view.segs) == 1 })
	h := c.view.hash(content)
	at, ok := c.view.find(t, &h)
	require.True(t, ok)
	require.Equal(t, content, c.view.read(t, at, nil))
	c.offer(3, content)
	c.until(func() bool { return len(c.view.told) == 1 })
	require.Equal(t, wire.Place{Page: wire.Page{Hash: h, Cookie: 3}, Loc: l}, c.view.told[0])
	st := p.s.Stats()
	require.EqualValues(t, 1, st.Total.Hits)
	require.EqualValues(t, 1, st.Total.Published)
	require.EqualValues(t, 1, st.Total.Pages)
	require.Zero(t, st.Total.Violations)
	require.NotContains(t, st.Domains[0].Name, "d\x00")

	// Each pays its part.
	for i, c := range []*client{a, b, c} {
		c.send(refMessage(wire.Ref, l))
		awaitStats(t, p.s, func(u *Usage) bool { return u.ReferencedBytes > 0 })
		p.time.Add(uint32(2 * second))
		c.send(usageMessage())
		c.until(func() bool { return len(c.view.shares) == 1 })
		r := c.view.record(t, l)
		require.EqualValues(t, r.Size()/(i+1), c.view.shares[0].Pages)
		require.Positive(t, c.view.shares[0].Overhead)
	}
	checkServer(t, p.s)
}

// A page that one sandbox offers, how often ever, stays its own.
func TestAlone(t *testing.T) {
	p := newPool(t, Options{})
	a, b := attach(p, p.s, greeting("d")), attach(p, p.s, greeting("d"))
	content := page(1, 1000)
	a.offer(1, content)
	a.offer(2, content)
	b.offer(1, page(2, 1000))
	awaitStats(t, p.s, func(u *Usage) bool { return u.Offers == 3 })
	st := p.s.Stats().Total
	require.EqualValues(t, 2, st.Candidates)
	require.Zero(t, st.Wanted)

	// Who has ended has nothing any more.
	a.close()
	awaitStats(t, p.s, func(u *Usage) bool { return u.Clients == 1 })
	b.offer(1, content)
	awaitStats(t, p.s, func(u *Usage) bool { return u.Offers == 4 })
	require.Zero(t, p.s.Stats().Total.Wanted)
	checkServer(t, p.s)
}

func TestDomains(t *testing.T) {
	p := newPool(t, Options{})
	a1, a2 := attach(p, p.s, greeting("a")), attach(p, p.s, greeting("a"))
	b1 := attach(p, p.s, greeting("b"))
	g := greeting("a")
	g.Template = "ab"
	c1 := attach(p, p.s, g)
	require.NotEqual(t, a1.view.key, b1.view.key)
	require.NotEqual(t, a1.view.key, c1.view.key)
	content := page(1, 1000)
	share(t, a1, a2, content, wire.NoPage)

	domain := func(c *client, s *Server) DomainStats {
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, d := range s.domains {
			if d.key == *c.view.key {
				return d.stats()
			}
		}
		return DomainStats{}
	}
	before := domain(a1, p.s)
	for _, c := range []*client{b1, c1} {
		c.offer(1, content)
		// Neither is the other's hash of use.
		c.send(offerMessage(wire.Page{Hash: a1.view.hash(content), Cookie: 1}))
		// Nor its place.
		c.send(refMessage(wire.Ref, a1.view.told[0].Loc))
		h := c.view.hash(content)
		_, ok := c.view.find(t, &h)
		require.False(t, ok)
	}
	awaitStats(t, p.s, func(u *Usage) bool { return u.Offers == 6 && u.Violations == 2 })
	st := p.s.Stats()
	require.Len(t, st.Domains, 3)
	require.EqualValues(t, 1, st.Total.Wanted)
	require.Zero(t, st.Total.Hits)
	require.Equal(t, before, domain(a1, p.s))
	require.Empty(t, b1.view.segs)
	require.Empty(t, c1.view.segs)
	checkServer(t, p.s)
}

type memTemplate struct {
	pages  []codec.Page
	err    error
	closed atomic.Bool
}

func (m *memTemplate) Pages() uint64 { return uint64(len(m.pages)) }
func (m *memTemplate) ReadPages(dst []byte, n uint64) error {
	copy(dst, m.pages[n][:])
	return m.err
}
func (m *memTemplate) Close() error {
	m.closed.Store(true)
	return nil
}

func TestTemplate(t *testing.T) {
	tpl := &memTemplate{pages: []codec.Page{*page(1, 4096), *page(2, 4096)}}
	opened := 0
	o := Options{OpenTemplate: func(dir, digest string) (Template, error) {
		opened++
		if dir != "/right" || digest != "ab" {
			return nil, errors.New("not there")
		}
		return tpl, nil
	}}
	p := newPool(t, o)
	g := greeting("d")
	g.Template, g.TemplateDir = "ab", "/wrong"
	a, b := attach(p, p.s, g), attach(p, p.s, g)
	// Without the template, pages are stored on their own.
	l := share(t, a, b, page(3, 1000), 1)
	require.False(t, a.view.record(t, l).HasBase)
	share(t, a, b, page(4, 1000), 1)
	require.Equal(t, 1, opened)

	g.TemplateDir = "/right"
	c := attach(p, p.s, g)
	content := tpl.pages[1]
	content[100]++
	l = share(t, a, c, &content, 1)
	r := c.view.record(t, l)
	require.True(t, r.HasBase)
	require.EqualValues(t, 1, r.Base)
	require.Equal(t, &content, c.view.read(t, l, &tpl.pages[1]))
	require.True(t, p.s.Stats().Domains[0].Template)
	// A number that the template does not have is no base.
	share(t, a, c, page(5, 1000), 2)

	// What costs a sandbox nothing, or cannot be made smaller, is not kept, and
	// not asked for again.
	reject := func(content *codec.Page, tpl uint32) {
		st := p.s.Stats().Total
		a.offer(1, content)
		awaitStats(t, p.s, func(u *Usage) bool { return u.Offers == st.Offers+1 })
		c.offer(1, content)
		c.until(func() bool { return len(c.view.wants) == 1 })
		c.send(publishMessage(wire.Content{Page: c.view.wants[0], Template: tpl, Data: content}))
		c.view.wants = nil
		awaitStats(t, p.s, func(u *Usage) bool { return u.Rejected == st.Rejected+1 })
		a.offer(1, content)
		c.offer(1, content)
		awaitStats(t, p.s, func(u *Usage) bool { return u.Offers == st.Offers+4 })
		require.Equal(t, st.Wanted+1, p.s.Stats().Total.Wanted)
		checkServer(t, p.s)
	}
	reject(new(codec.Page), wire.NoPage)
	reject(&tpl.pages[0], 0)
	reject(page(6, 4096), 0)
	require.Equal(t, 2, opened)

	// A template that cannot be read is given up.
	tpl.err = errors.New("broken disk")
	l = share(t, a, c, page(7, 1000), 1)
	require.False(t, c.view.record(t, l).HasBase)
	require.True(t, tpl.closed.Load())
	require.False(t, p.s.Stats().Domains[0].Template)
}

func TestServe(t *testing.T) {
	s := New(Options{})
	path := filepath.Join(t.TempDir(), "pool")
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	require.NoError(t, err)
	served := make(chan error)
	go func() { served <- s.Serve(l) }()
	dial := func() int {
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
		require.NoError(t, err)
		require.NoError(t, unix.Connect(fd, &unix.SockaddrUnix{Name: path}))
		return fd
	}
	hello := func(g *wire.Greeting) []byte {
		var w wire.Writer
		require.NoError(t, g.Hello(&w))
		return w.Bytes()
	}
	admin := func(cmd string) []byte {
		var w wire.Writer
		w.Begin(wire.Admin, 0)
		w.Body([]byte(cmd))
		return w.Bytes()
	}
	// answer waits for a message.
	answer := func(fd int) wire.Message {
		buf := make([]byte, wire.MaxMessage)
		require.NoError(t, wire.Wait(fd))
		n, got, err := wire.Receive(fd, buf)
		require.NoError(t, err)
		require.Equal(t, -1, got)
		m, err := wire.Parse(buf[:n])
		require.NoError(t, err)
		return m
	}

	fd := dial()
	require.NoError(t, wire.Send(fd, hello(greeting("d")), -1))
	a := newClient(t, fd)
	require.Empty(t, a.view.refused)

	fd = dial()
	defer unix.Close(fd)
	require.NoError(t, wire.Send(fd, admin("stats"), -1))
	m := answer(fd)
	require.Equal(t, wire.Report, m.Type)
	var st Stats
	require.NoError(t, json.Unmarshal(m.Body, &st))
	require.Equal(t, 1, st.Total.Clients)
	require.False(t, st.Drained)
	require.NoError(t, wire.Send(fd, admin("drain"), -1))
	m = answer(fd)
	require.NoError(t, json.Unmarshal(m.Body, &st))
	require.True(t, st.Drained)

	bad := greeting("d")
	bad.Version++
	noDomain := greeting("")
	badDigest := greeting("d")
	badDigest.Template = "xyz"
	for name, msg := range map[string][]byte{
		"version": hello(bad), "domain": hello(noDomain), "hexadecimal": hello(badDigest), "no command": admin("format"),
		"before a hello": offerMessage(), "malformed": {1, 2, 3}, "hello": append(hello(greeting("d")), '{'),
	} {
		fd := dial()
		require.NoError(t, wire.Send(fd, msg, -1))
		m := answer(fd)
		require.Equal(t, wire.Refuse, m.Type, name)
		require.Contains(t, string(m.Body), name)
		require.NoError(t, wire.Wait(fd))
		_, _, err := wire.Receive(fd, make([]byte, wire.MaxMessage))
		require.ErrorIs(t, err, io.EOF)
		unix.Close(fd)
	}
	// One that says nothing, and one that ends at once, do not matter.
	silent := dial()
	defer unix.Close(silent)
	unix.Close(dial())

	require.NoError(t, s.Close())
	require.NoError(t, <-served)
	a.ended()
	require.Error(t, s.Attach(-1, greeting("d")))
	_, theirs := pair(t)
	require.ErrorIs(t, s.Attach(theirs, greeting("d")), errClosed)
	require.NoError(t, s.Close())
}

// A page outlives the pool, and the sandboxes go on with the next one.
func TestRestart(t *testing.T) {
	before := descriptors(t)
	p := newPool(t, Options{})
	a, b := attach(p, p.s, greeting("d")), attach(p, p.s, greeting("d"))
	content := page(1, 1000)
	l := share(t, a, b, content, wire.NoPage)
	a.send(refMessage(wire.Ref, l))
	require.NoError(t, p.s.Close())
	a.ended()
	b.ended()
	require.Equal(t, content, a.view.read(t, l, nil))

	next := newPool(t, Options{})
	ours, theirs := pair(t)
	require.NoError(t, next.s.Attach(theirs, greeting("d")))
	a2 := newClient(next, ours)
	b2 := attach(next, next.s, greeting("d"))
	require.NotEqual(t, a.view.key, a2.view.key)
	l2 := share(t, a2, b2, content, wire.NoPage)
	require.Equal(t, content, a2.view.read(t, l2, nil))
	require.Equal(t, content, a.view.read(t, l, nil))
	require.NoError(t, next.s.Close())
	for _, c := range []*client{a, b, a2, b2} {
		c.close()
	}
	require.Equal(t, before, descriptors(t))
	require.Zero(t, next.s.held.Load())
}

func descriptors(t testing.TB) int {
	fds, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	return len(fds)
}

func TestDrain(t *testing.T) {
	p := newPool(t, Options{Keep: time.Second})
	p.s.minOpen = 0
	a, b := attach(p, p.s, greeting("d")), attach(p, p.s, greeting("d"))
	content := page(1, 1000)
	l := share(t, a, b, content, wire.NoPage)
	for i := range 10 {
		share(t, a, b, page(uint64(10+i), 1000), wire.NoPage)
	}
	a.send(refMessage(wire.Ref, l))
	awaitStats(t, p.s, func(u *Usage) bool { return u.ReferencedBytes > 0 })
	p.s.Drain()
	offers := a.offers(p)
	a.offer(1, page(2, 100))
	awaitStats(t, p.s, func(u *Usage) bool { return u.Offers == offers+1 })
	b.offer(1, page(2, 100), content)
	awaitStats(t, p.s, func(u *Usage) bool { return u.Offers == offers+3 })
	st := p.s.Stats().Total
	require.EqualValues(t, 11, st.Wanted)
	require.EqualValues(t, 1, st.Hits)
	p.pass(10 * second)
	require.EqualValues(t, 1, p.s.Stats().Total.Segments)
	a.send(refMessage(wire.Unref, l))
	awaitStats(t, p.s, func(u *Usage) bool { return u.ReferencedBytes == 0 })
	p.pass(10 * second)
	require.Zero(t, p.s.Stats().Total.Segments)
	a.until(func() bool { return len(a.view.retired) == 1 })
	require.Equal(t, content, a.view.read(t, l, nil))
}

// What is asked for and does not come is asked of another.
func TestAskAgain(t *testing.T) {
	p := newPool(t, Options{})
	a, b, c := attach(p, p.s, greeting("d")), attach(p, p.s, greeting("d")), attach(p, p.s, greeting("d"))
	content := page(1, 1000)
	n := uint64(0)
	offer := func(c *client) {
		c.offer(5, content)
		n++
		awaitStats(t, p.s, func(u *Usage) bool { return u.Offers == n })
	}
	offer(a)
	offer(b)
	offer(c)
	require.EqualValues(t, 1, p.s.Stats().Total.Wanted)
	p.time.Add(uint32(patience + 1))
	offer(c)
	c.until(func() bool { return len(c.view.wants) == 1 })
	// The first one's answer is late, but nothing bad.
	b.until(func() bool { return len(b.view.wants) == 1 })
	b.send(publishMessage(wire.Content{Page: b.view.wants[0], Data: content}))
	// Nor is there anybody to wait for when it has ended.
	c.close()
	awaitStats(t, p.s, func(u *Usage) bool { return u.Clients == 2 })
	checkServer(t, p.s)
	offer(a)
	a.until(func() bool { return len(a.view.wants) == 1 })
	a.send(publishMessage(wire.Content{Page: a.view.wants[0], Template: wire.NoPage, Data: content}))
	b.until(func() bool { return len(b.view.told) == 1 })
	a.until(func() bool { return len(a.view.told) == 1 })
	require.Zero(t, p.s.Stats().Total.Violations)

	// In the end it is a candidate again.
	other := page(2, 1000)
	a.offer(1, other)
	awaitStats(t, p.s, func(u *Usage) bool { return u.Candidates == 1 })
	b.offer(1, other)
	awaitStats(t, p.s, func(u *Usage) bool { return u.Pending == 1 })
	p.pass(abandon + 1)
	st := p.s.Stats().Total
	require.Zero(t, st.Pending)
	require.EqualValues(t, 1, st.Candidates)
	checkServer(t, p.s)
}

func TestReferencesEnd(t *testing.T) {
	p := newPool(t, Options{Keep: time.Second})
	p.s.minOpen = 0
	a, b := attach(p, p.s, greeting("d")), attach(p, p.s, greeting("d"))
	var locs []wire.Loc
	for i := range 20 {
		locs = append(locs, share(t, a, b, page(uint64(i), 500), wire.NoPage))
	}
	a.send(refMessage(wire.Ref, locs...))
	a.send(refMessage(wire.Ref, locs...))
	b.send(refMessage(wire.Ref, locs[0]))
	awaitStats(t, p.s, func(u *Usage) bool { return u.UnreferencedBytes == 0 })
	p.pass(10 * second)
	require.Zero(t, p.s.Stats().Total.Retired)
	a.close()
	awaitStats(t, p.s, func(u *Usage) bool { return u.Clients == 1 })
	// It goes on leaving after it is no client any more.
	one := b.view.record(t, locs[0])
	awaitStats(t, p.s, func(u *Usage) bool { return u.ReferencedBytes == uint64(one.Size()) })
	checkServer(t, p.s)
	p.pass(10 * second)
	b.until(func() bool { return len(b.view.retired) == 1 && len(b.view.segs) == 2 })
	h := b.view.hash(page(0, 500))
	l, ok := b.view.find(t, &h)
	require.True(t, ok)
	require.NotEqual(t, locs[0], l)
	require.Equal(t, page(0, 500), b.view.read(t, l, nil))
	require.Equal(t, page(0, 500), b.view.read(t, locs[0], nil))
	h = b.view.hash(page(1, 500))
	_, ok = b.view.find(t, &h)
	require.False(t, ok)
	// A late word about the retired segment is nothing bad.
	b.send(refMessage(wire.Unref, locs[0]))
	b.send(refMessage(wire.Ref, l))
	awaitStats(t, p.s, func(u *Usage) bool { return u.UnreferencedBytes == 0 })
	require.Zero(t, p.s.Stats().Total.Violations)
	checkServer(t, p.s)

	// Without sandboxes nothing stays.
	b.close()
	awaitStats(t, p.s, func(u *Usage) bool { return u.Clients == 0 })
	p.pass(9)
	require.Len(t, p.s.Stats().Domains, 1)
	p.pass(10 * second)
	st2 := p.s.Stats()
	require.Empty(t, st2.Domains)
	require.Zero(t, p.s.held.Load())
	require.EqualValues(t, 20, st2.Total.Published)
}

func TestSegmentFull(t *testing.T) {
	p := newPool(t, Options{})
	p.s.minOpen = 0
	a, b := attach(p, p.s, greeting("d")), attach(p, p.s, greeting("d"))
	// 3000 bytes each: more than one segment.
	const n = wire.SegmentSize/3000 + 100
	contents := map[wire.Hash]*codec.Page{}
	var pages []wire.Page
	for i := range n {
		content := page(uint64(i), 2900)
		h := a.view.hash(content)
		contents[h] = content
		pages = append(pages, wire.Page{Hash: h, Cookie: uint32(i)})
	}
	a.send(offerMessage(pages...))
	awaitStats(t, p.s, func(u *Usage) bool { return u.Offers == n })
	b.send(offerMessage(pages...))
	b.until(func() bool { return len(b.view.wants) == n })
	for len(b.view.wants) > 0 {
		k := min(15, len(b.view.wants))
		var cs []wire.Content
		for _, w := range b.view.wants[:k] {
			cs = append(cs, wire.Content{Page: w, Template: wire.NoPage, Data: contents[w.Hash]})
		}
		b.send(publishMessage(cs...))
		b.view.wants = b.view.wants[k:]
	}
	b.until(func() bool { return len(b.view.told) == n })
	a.until(func() bool { return len(a.view.told) == n })
	require.Len(t, a.view.segs, 2)
	for _, pl := range a.view.told {
		require.Equal(t, contents[pl.Hash], a.view.read(t, pl.Loc, nil))
		h := pl.Hash
		l, ok := a.view.find(t, &h)
		require.True(t, ok)
		require.Equal(t, pl.Loc, l)
	}
	require.Greater(t, a.view.places, uint64(n), "the index has grown")
	checkServer(t, p.s)

	// The full one is sealed for good.
	require.Eventually(t, func() bool {
		seals, err := unix.FcntlInt(uintptr(a.view.segs[0]), unix.F_GET_SEALS, 0)
		require.NoError(t, err)
		return seals == unix.F_SEAL_GROW|unix.F_SEAL_SHRINK|unix.F_SEAL_FUTURE_WRITE|unix.F_SEAL_WRITE|unix.F_SEAL_SEAL
	}, deadline, time.Millisecond)

	// All at once are dropped, and most of the index with them.
	index := p.s.Stats().Total.IndexBytes
	p.pass(2 * p.s.keep)
	a.until(func() bool { return a.view.retired[0] && a.view.retired[1] })
	st := p.s.Stats().Total
	require.EqualValues(t, n, st.Dropped)
	require.Less(t, st.IndexBytes, index)
	checkServer(t, p.s)
}

func TestBudget(t *testing.T) {
	for name, o := range map[string]Options{
		"host":   {MaxBytes: 64 << 10},
		"domain": {DomainMaxBytes: 64 << 10},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPool(t, o)
			a, b := attach(p, p.s, greeting("d")), attach(p, p.s, greeting("d"))
			var locs []wire.Loc
			var i uint64
			fill := func() {
				for full := p.s.Stats().Total.Full; ; i++ {
					content := page(i, 2900)
					st := p.s.Stats().Total
					a.offer(1, content)
					awaitStats(t, p.s, func(u *Usage) bool { return u.Offers == st.Offers+1 })
					b.offer(1, content)
					awaitStats(t, p.s, func(u *Usage) bool { return u.Offers == st.Offers+2 })
					if p.s.Stats().Total.Full > full {
						return
					}
					b.until(func() bool { return len(b.view.wants) == 1 })
					b.send(publishMessage(wire.Content{Page: b.view.wants[0], Template: wire.NoPage, Data: content}))
					b.view.wants = nil
					n := len(b.view.told)
					b.until(func() bool { return len(b.view.told) == n+1 })
					locs = append(locs, b.view.told[n].Loc)
					require.LessOrEqual(t, p.s.Stats().Total.Bytes, uint64(64<<10))
				}
			}
			fill()
			first := len(locs)
			require.Greater(t, first, 10)
			b.send(refMessage(wire.Ref, locs[:5]...))
			awaitStats(t, p.s, func(u *Usage) bool { return u.ReferencedBytes > 0 })
			// There is no room, so what nobody refers to goes without being
			// kept, and the rest moves.
			p.pass(2 * grace)
			require.EqualValues(t, 5, p.s.Stats().Total.Pages)
			fill()
			require.Greater(t, len(locs), first+3)
			for j := range uint64(5) {
				h := b.view.hash(page(j, 2900))
				l, ok := b.view.find(t, &h)
				require.True(t, ok)
				require.Equal(t, page(j, 2900), b.view.read(t, l, nil))
			}
			checkServer(t, p.s)
		})
	}
}

func TestPatterns(t *testing.T) {
	p := newPool(t, Options{})
	a := attach(p, p.s, greeting("d"))
	message := func(total int, body []byte) []byte {
		var w wire.Writer
		w.Begin(wire.Patterns, uint32(total))
		w.Body(body)
		return w.Bytes()
	}
	content := make([]byte, 150_000)
	for i := range content {
		content[i] = byte(i * 7 / 5)
	}
	for i := 0; i < len(content); i += 60_000 {
		a.send(message(len(content), content[i:min(i+60_000, len(content))]))
	}
	a.send(message(200, content[:100])) // never complete
	a.offer(1, page(1, 1))
	awaitStats(t, p.s, func(u *Usage) bool { return u.Offers == 1 })
	b := attach(p, p.s, greeting("d"))
	b.until(func() bool { return len(b.view.patterns) == len(content) })
	require.Equal(t, content, b.view.patterns)
	d := p.s.anyDomain()
	require.Less(t, len(d.patterns), len(content)/10)

	a.send(message(300, content[:100])) // another total
	a.send(message(0, content[:100]))
	a.send(message(wire.MaxPatterns+1, content[:100]))
	a.send(message(10, content[:100]))
	a.send(message(10, nil))
	awaitStats(t, p.s, func(u *Usage) bool { return u.Violations == 5 })
	heap := p.s.Stats().Total.HeapBytes
	a.send(message(200, content[:100]))
	a.offer(1, page(2, 1))
	awaitStats(t, p.s, func(u *Usage) bool { return u.Offers == 2 })
	// What has come counts, not what may yet come.
	require.Greater(t, p.s.Stats().Total.HeapBytes, heap)
	require.LessOrEqual(t, p.s.Stats().Total.HeapBytes, heap+200)
	checkServer(t, p.s)
	p.pass(abandon + 1)
	for _, d := range p.s.domains {
		require.Zero(t, d.parts)
	}
	checkServer(t, p.s)
}

func TestReport(t *testing.T) {
	var st Stats
	for i := range 1000 {
		st.Domains = append(st.Domains, DomainStats{Name: fmt.Sprint(i)})
	}
	b := st.report(wire.MaxMessage - 8)
	require.LessOrEqual(t, len(b), wire.MaxMessage-8)
	var got Stats
	require.NoError(t, json.Unmarshal(b, &got))
	require.Greater(t, len(got.Domains), 20)
	require.Equal(t, 1000, len(got.Domains)+got.OmittedDomains)
}

// checkServer checks that what the pool counts is what there is. Nobody may be
// leaving meanwhile.
func checkServer(t require.TestingT, s *Server) {
	s.mu.Lock()
	defer s.mu.Unlock()
	held := int64(0)
	for _, d := range s.domains {
		d.mu.Lock()
		held += int64(d.held)
		checkDomain(t, d)
		d.mu.Unlock()
	}
	require.Equal(t, held, s.held.Load())
}

func checkDomain(t require.TestingT, d *domain) {
	refs := map[wire.Loc]uint32{}
	groups := 0
	for _, c := range d.conns {
		groups += len(c.refs)
		for key, group := range c.refs {
			g := d.segs[uint32(key>>32)]
			require.NotNil(t, g, "reference to a retired segment")
			require.NotZero(t, group)
			for i := range refGroupSize {
				if group[i/64]>>(i%64)&1 != 0 {
					refs[g.loc(int(uint32(key))*refGroupSize+i)]++
				}
			}
		}
	}
	require.Equal(t, groups, d.groups)
	held, records, bytes, referenced := uint64(len(d.index.mem)), uint64(0), uint64(0), uint64(0)
	indexed := uint64(0)
	all := 0
	for num, g := range d.segs {
		alone := 0
		require.Equal(t, num, g.num)
		held += g.held()
		own := uint64(0)
		for i := range g.recs {
			records++
			bytes += g.size(i)
			require.Equal(t, refs[g.loc(i)], g.recs[i].refs)
			if g.recs[i].refs == 1 {
				alone++
				require.LessOrEqual(t, g.aloneAt, max(g.recs[i].last, d.s.now())+aloneAgain)
			}
			if g.recs[i].refs > 0 {
				own += g.size(i)
			}
			r, err := wire.ParseRecord(g.bytes(i))
			require.NoError(t, err)
			require.EqualValues(t, r.Size(), g.size(i))
			if at, j, _ := d.lookup(&r.Hash); at == g && j == i {
				indexed++
			}
			delete(refs, g.loc(i))
		}
		require.Equal(t, own, g.referenced)
		require.Equal(t, alone, g.alone)
		referenced += own
		all += alone
	}
	require.Equal(t, all, d.alone)
	require.Empty(t, refs)
	require.Equal(t, [4]uint64{held, records, bytes, referenced}, [4]uint64{d.held, d.records, d.recordBytes, d.referenced})
	require.Equal(t, indexed, d.index.n)
	slots := uint64(0)
	for s := d.index.mem; len(s) >= wire.SlotSize; s = s[wire.SlotSize:] {
		if [8]byte(s) != [8]byte{} {
			slots++
		}
	}
	require.Equal(t, slots, d.index.n)

	n, dead, refusals, own := 0, 0, 0, map[uint32]int{}
	for _, m := range d.candidates {
		for _, c := range m {
			n++
			switch {
			case c.conn == refused:
				refusals++
			case d.conns[c.conn] == nil:
				dead++
			default:
				own[c.conn]++
			}
		}
	}
	require.Equal(t, [3]int{n, dead, refusals}, [3]int{d.ncandidates, d.dead, d.refusals})
	for _, x := range []*sketches{&d.sketches, &d.bases} {
		for _, g := range x.gens {
			require.Equal(t, cap(g.items), g.most)
			require.LessOrEqual(t, len(g.items), g.most)
		}
		require.LessOrEqual(t, x.bytes(), min(uint64(maxSketches*sketchBytes), uint64(d.candidateLimit())*candidateBytes))
	}
	asked, parts, partBytes := map[uint32]int{}, 0, uint64(0)
	for _, w := range d.pending {
		asked[w.from]++
		require.LessOrEqual(t, len(w.offerers), maxOfferers)
		require.LessOrEqual(t, len(w.similar), maxOfferers)
		require.True(t, w.base || len(w.similar) == 0)
	}
	for id, c := range d.conns {
		require.Equal(t, [2]int{own[id], asked[id]}, [2]int{c.candidates, c.asked})
		if c.partial {
			parts++
			partBytes += uint64(cap(c.part))
		} else {
			require.Nil(t, c.part)
		}
	}
	require.Equal(t, parts, d.parts)
	require.Equal(t, partBytes, d.partBytes)
	parted := d.sketches.bytes() + d.bases.bytes() + uint64(d.ncandidates)*candidateBytes + uint64(cap(d.patterns)) + partBytes + uint64(len(d.conns))*connectionBytes
	require.GreaterOrEqual(t, d.heap(), parted)
}

// TestOneConnectionEach attaches a sandbox again, and asks whether it can be its
// own sibling.
func TestOneConnectionEach(t *testing.T) {
	s := New(Options{})
	defer s.Close()
	g := greeting("a")
	g.Sandbox = "one"
	first := attach(t, s, g)
	second := attach(t, s, g)
	first.ended()
	awaitStats(t, s, func(u *Usage) bool { return u.Clients == 1 })
	// In another domain, too.
	other := greeting("b")
	other.Sandbox = "one"
	third := attach(t, s, other)
	second.ended()
	awaitStats(t, s, func(u *Usage) bool { return u.Clients == 1 })
	third.close()
	awaitStats(t, s, func(u *Usage) bool { return u.Clients == 0 })
	s.mu.Lock()
	require.Empty(t, s.sandboxes)
	s.mu.Unlock()

	// Others are not concerned.
	two := greeting("a")
	two.Sandbox = "two"
	a, b := attach(t, s, g), attach(t, s, two)
	defer a.close()
	defer b.close()
	awaitStats(t, s, func(u *Usage) bool { return u.Clients == 2 })
}

// A sandbox is told of pages that nobody else has taken for long, and of no others.
func TestTellAlone(t *testing.T) {
	p := newPool(t, Options{})
	ps := p.peers(2, greeting("d"))
	a, b := ps[0], ps[1]
	var locs []wire.Loc
	for i := range uint64(3) {
		content := page(i, 600)
		h := a.view.hash(content)
		for _, o := range ps {
			require.NoError(t, o.conn.message(offerMessage(wire.Page{Hash: h, Cookie: uint32(i)}), -1))
			o.sync(p)
		}
		b.publish(p, content, wire.NoPage)
		locs = append(locs, b.view.told[i].Loc)
	}
	require.NoError(t, a.conn.message(refMessage(wire.Ref, locs...), -1))
	require.NoError(t, b.conn.message(refMessage(wire.Ref, locs[1:]...), -1))
	pass := func(d stamp) {
		p.time.Add(uint32(d))
		p.s.tick()
		a.sync(p)
		b.sync(p)
		checkServer(p, p.s)
	}
	require.EqualValues(t, 1, p.s.Stats().Total.AlonePages)
	pass(aloneTime - 1)
	require.Empty(t, a.view.alone)
	pass(1)
	require.Equal(t, locs[:1], a.view.alone)
	pass(aloneTime)
	require.Len(t, a.view.alone, 1, "told twice")

	// b has one no longer.
	require.NoError(t, b.conn.message(refMessage(wire.Unref, locs[1]), -1))
	pass(aloneTime)
	require.Equal(t, locs[:2], a.view.alone)
	require.Empty(t, b.view.alone)
	pass(aloneAgain)
	require.ElementsMatch(t, append(locs[:2:2], locs[:2]...), a.view.alone)
	require.EqualValues(t, 4, p.s.Stats().Total.Alone)

	// What it gives up then goes, and b is the only one to have the third.
	require.NoError(t, a.conn.message(refMessage(wire.Unref, locs...), -1))
	require.EqualValues(t, 1, p.s.Stats().Total.AlonePages)
	pass(aloneTime)
	require.Equal(t, locs[2:], b.view.alone)
	p.s.Drain()
	pass(2 * aloneAgain)
	require.Len(t, b.view.alone, 1)
}
