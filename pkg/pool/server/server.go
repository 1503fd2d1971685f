package server

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"runsc-agentzip/pkg/pool/wire"
)

// Options are those of a Server.
type Options struct {
	// MaxBytes is the most memory that the segments and indexes of all domains
	// together may take, in bytes, and DomainMaxBytes those of one. 0 is no
	// limit. What the pool remembers of pages that only one sandbox has takes
	// up to an eighth of the smaller one more, for each domain, and so do the
	// sketches of these pages and those of bases.
	MaxBytes, DomainMaxBytes uint64
	// Keep is how long a page without references is kept, and a domain
	// without sandboxes. 0 is DefaultKeep.
	Keep time.Duration
	// OpenTemplate opens the template with a digest in a folder. It must fail
	// if the template there has another digest. If nil, pages are stored
	// without regard to templates.
	OpenTemplate func(dir, digest string) (Template, error)
	// Quiet is called when memory has become garbage and little happens: when the pool
	// has encoded nothing for 10 s, and when there is nothing to be done from time to
	// time any more. It may take a while, and may be nil.
	Quiet func()
	// Log is called with what an administrator should know. It may be nil.
	Log func(format string, args ...any)
}

// DefaultKeep is Options.Keep if that is 0.
const DefaultKeep = 10 * time.Second

// A Template has the pages that the sandboxes of a domain began with. It is used
// by one goroutine at a time.
type Template interface {
	// Pages returns the number of pages.
	Pages() uint64
	// ReadPages reads whole pages from page n on into dst.
	ReadPages(dst []byte, n uint64) error
	Close() error
}

// A stamp is a time, in tenths of a second since long before the server began.
type stamp uint32

const (
	second  stamp = 10
	began   stamp = 1 << 30
	maxKeep       = began / 2
)

// A domainID is the SHA-256 of a domain's key and its template's digest.
type domainID [sha256.Size]byte

func idOf(g *wire.Greeting) domainID {
	h := sha256.New()
	for _, s := range []string{g.Domain, g.Template} {
		var n [8]byte
		binary.LittleEndian.PutUint64(n[:], uint64(len(s)))
		h.Write(n[:])
		h.Write([]byte(s))
	}
	return domainID(h.Sum(nil))
}

// String returns a short name that does not reveal the key.
func (id domainID) String() string {
	sum := sha256.Sum256(id[:])
	return hex.EncodeToString(sum[:6])
}

// A Server is the pool of a host. Its methods are safe for concurrent use.
type Server struct {
	opts Options
	// now is the time.
	now  func() stamp
	keep stamp
	// every is the time between two maintenances.
	every time.Duration
	// minOpen is the size from which on the open segment may be compacted, in
	// bytes.
	minOpen uint64
	// sketchFloor is sketchFloor.
	sketchFloor uint64

	// held is the memory of all domains' segments and indexes, in bytes.
	held atomic.Int64
	// pressed is set when there was no room on the host for a page.
	pressed atomic.Bool
	drained atomic.Bool
	// dropped is set when a domain has dropped its encoder.
	dropped atomic.Bool
	kicked  chan struct{}
	done    chan struct{}
	// wg counts goroutines.
	wg sync.WaitGroup

	turns turns

	logs struct {
		sync.Mutex
		at stamp
		n  int
	}

	// mu protects what follows.
	mu        sync.Mutex
	closed    bool
	listeners map[*net.UnixListener]struct{}
	// greeting has connections that have not said who they are.
	greeting map[*socket]struct{}
	conns    map[*conn]struct{}
	domains  map[domainID]*domain
	// sandboxes has the connection of each sandbox that says which it is.
	sandboxes map[string]*conn
	lastConn  uint32
	// past has what freed domains have counted.
	past Counts
}

// New returns a Server without connections.
func New(o Options) *Server {
	start := time.Now()
	s := newServer(o, func() stamp { return began + stamp(time.Since(start)/(time.Second/time.Duration(second))) })
	s.wg.Add(1)
	go s.maintenance()
	return s
}

// newServer returns a Server that somebody has to call tick of.
func newServer(o Options, now func() stamp) *Server {
	if o.Keep <= 0 {
		o.Keep = DefaultKeep
	}
	s := &Server{
		opts: o, now: now,
		keep:      max(1, stamp(min(o.Keep/(time.Second/time.Duration(second)), time.Duration(maxKeep)))),
		every:     min(max(o.Keep/4, 100*time.Millisecond), 2*time.Second),
		minOpen:   minOpen,
		kicked:    make(chan struct{}, 1),
		done:      make(chan struct{}),
		listeners: map[*net.UnixListener]struct{}{},
		greeting:  map[*socket]struct{}{},
		conns:     map[*conn]struct{}{},
		domains:   map[domainID]*domain{},
		sandboxes: map[string]*conn{},
	}
	s.sketchFloor = sketchFloor
	s.turns.init()
	return s
}

// log logs, but not more than a few lines a second.
func (s *Server) log(format string, args ...any) {
	const most = 20
	if s.opts.Log == nil {
		return
	}
	l := &s.logs
	l.Lock()
	if now := s.now() / second; now != l.at {
		l.at, l.n = now, 0
	}
	l.n++
	n := l.n
	l.Unlock()
	if n <= most {
		s.opts.Log(format, args...)
	} else if n == most+1 {
		s.opts.Log("pool: more lines than %d a second are dropped", most)
	}
}

// Serve accepts connections of a "unixpacket" listener until the Server is
// closed, and then returns nil. It closes the listener.
func (s *Server) Serve(l *net.UnixListener) error {
	defer l.Close()
	if n := l.Addr().Network(); n != "unixpacket" {
		return fmt.Errorf("the pool listens on unixpacket sockets, not %s", n)
	}
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil
	}
	s.listeners[l] = struct{}{}
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.listeners, l)
	}()
	for {
		c, err := l.AcceptUnix()
		if err == nil {
			s.accept(c)
			continue
		}
		select {
		case <-s.done:
			return nil
		default:
		}
		// Out of descriptors or memory: others end.
		if !errors.Is(err, unix.EMFILE) && !errors.Is(err, unix.ENFILE) && !errors.Is(err, unix.ENOMEM) &&
			!errors.Is(err, unix.ENOBUFS) && !errors.Is(err, unix.ECONNABORTED) {
			return fmt.Errorf("accept sandboxes: %w", err)
		}
		s.log("pool: accept: %v", err)
		select {
		case <-s.done:
			return nil
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// accept greets a connection.
func (s *Server) accept(c *net.UnixConn) {
	sock, err := newSocket(c)
	if err != nil {
		c.Close()
		return
	}
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		c.Close()
		return
	}
	s.greeting[sock] = struct{}{}
	s.wg.Add(1)
	s.mu.Unlock()
	go func() {
		defer s.wg.Done()
		joined, err := s.greet(sock)
		s.mu.Lock()
		delete(s.greeting, sock)
		s.mu.Unlock()
		if err != nil {
			if !ordinary(err) {
				s.log("pool: refused a connection: %v", err)
			}
			sock.refuse(err)
		}
		if !joined {
			sock.close()
		}
	}()
}

// refuse tells why.
func (s *socket) refuse(why error) {
	var w wire.Writer
	w.Begin(wire.Refuse, 0)
	text := why.Error()
	w.Body([]byte(text[:min(len(text), 1024)]))
	s.sendNow(w.Bytes())
}

// greet finds out who has connected. It returns true if the connection is a
// sandbox's now.
func (s *Server) greet(sock *socket) (joined bool, err error) {
	if err := sock.trusted(); err != nil {
		return false, err
	}
	for {
		if err := sock.f.SetReadDeadline(time.Now().Add(helloTimeout)); err != nil {
			return false, err
		}
		g, err := s.first(sock)
		if err != nil {
			return false, err
		}
		if g != nil {
			sock.f.SetReadDeadline(time.Time{})
			return true, s.join(sock, g)
		}
	}
}

// first handles a message of a connection that has not said who it is. It returns
// what a Hello says, or nil after an Admin.
func (s *Server) first(sock *socket) (*wire.Greeting, error) {
	buf, n, fd, err := sock.receive()
	if err != nil {
		return nil, err
	}
	defer buffers.Put(buf)
	if fd >= 0 {
		unix.Close(fd)
	}
	m, err := wire.Parse(buf[:n])
	if err != nil {
		return nil, err
	}
	switch m.Type {
	case wire.Hello:
		return m.Greeting()
	case wire.Admin:
		switch cmd := string(m.Body); cmd {
		case "stats":
		case "drain":
			s.Drain()
		default:
			return nil, fmt.Errorf("no command %.40q: there are stats and drain", cmd)
		}
		var w wire.Writer
		w.Begin(wire.Report, 0)
		st := s.Stats()
		w.Body(st.report(w.Room()))
		return nil, sock.send(w.Bytes(), -1)
	}
	return nil, fmt.Errorf("%w: %v before a hello", wire.ErrMessage, m.Type)
}

// Attach takes over one end of a pair of SOCK_SEQPACKET sockets as the connection
// of a sandbox, about which g says what a Hello would. The descriptor belongs
// to the Server, also after an error.
func (s *Server) Attach(fd int, g *wire.Greeting) error {
	kind, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TYPE)
	if err == nil && kind != unix.SOCK_SEQPACKET {
		err = errors.New("want a SOCK_SEQPACKET socket")
	}
	if err == nil {
		err = unix.SetNonblock(fd, true)
	}
	if err != nil {
		unix.Close(fd)
		return fmt.Errorf("attach a sandbox: descriptor %d: %w", fd, err)
	}
	unix.CloseOnExec(fd)
	f := os.NewFile(uintptr(fd), "sandbox")
	if f == nil {
		return fmt.Errorf("attach a sandbox: descriptor %d: %w", fd, unix.EBADF)
	}
	sock, err := newSocket(f)
	if err != nil {
		f.Close()
		return fmt.Errorf("attach a sandbox: %w", err)
	}
	// The same rules as for a Hello.
	var w wire.Writer
	err = g.Hello(&w)
	if err == nil {
		var m wire.Message
		if m, err = wire.Parse(w.Bytes()); err == nil {
			g, err = m.Greeting()
		}
	}
	if err == nil {
		err = s.join(sock, g)
	} else {
		sock.refuse(err)
		sock.close()
	}
	if err != nil {
		return fmt.Errorf("attach sandbox %q: %w", g.Name, err)
	}
	return nil
}

const (
	maxName   = 256
	maxDigest = 128
	maxDir    = 4096
)

// check checks what wire does not.
func check(g *wire.Greeting) error {
	if _, err := hex.DecodeString(g.Template); err != nil || len(g.Template) > maxDigest {
		return fmt.Errorf("the template's digest %.40q is not hexadecimal, or longer than %d characters", g.Template, maxDigest)
	}
	if len(g.Name) > maxName || len(g.TemplateDir) > maxDir || len(g.Sandbox) > maxDir {
		return fmt.Errorf("name of %d bytes, template's folder of %d, sandbox of %d: want at most %d, %d and %d", len(g.Name), len(g.TemplateDir), len(g.Sandbox), maxName, maxDir, maxDir)
	}
	return nil
}

// join makes a connection that of a sandbox. With an error, it is refused and
// closed.
func (s *Server) join(sock *socket, g *wire.Greeting) error {
	c, err := s.newConn(sock, g)
	if err != nil {
		sock.refuse(err)
		sock.close()
		return err
	}
	go c.run()
	return nil
}

// newConn adds a connection to its domain. The caller has to see to it that
// conn.run is called.
func (s *Server) newConn(tr transport, g *wire.Greeting) (*conn, error) {
	if err := check(g); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, errClosed
	}
	id := idOf(g)
	d := s.domains[id]
	if d == nil {
		var err error
		if d, err = newDomain(s, id, g); err != nil {
			return nil, fmt.Errorf("new domain: %w", err)
		}
		s.domains[id] = d
	}
	if s.lastConn++; s.lastConn == refused {
		s.lastConn++
	}
	c := &conn{s: s, tr: tr, id: s.lastConn, name: g.Name, sandbox: g.Sandbox, refs: map[uint64]refGroup{}}
	s.conns[c] = struct{}{}
	if c.sandbox != "" {
		// One connection each: otherwise a sandbox that is attached again and
		// again could be its own sibling.
		if old := s.sandboxes[c.sandbox]; old != nil {
			old.close(errReplaced)
		}
		s.sandboxes[c.sandbox] = c
	}
	s.wg.Add(1)
	d.join(c, g)
	return c, nil
}

// leave forgets a connection that has ended.
func (s *Server) leave(c *conn) {
	c.mu.Lock()
	cause := c.cause
	c.mu.Unlock()
	if !ordinary(cause) {
		s.log("pool: closed the connection of sandbox %q: %v", c.name, cause)
	}
	c.s.turns.give(c)
	c.d.leave(c)
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, c)
	if s.sandboxes[c.sandbox] == c {
		delete(s.sandboxes, c.sandbox)
	}
}

// kick sees to it that there is a maintenance soon.
func (s *Server) kick() {
	select {
	case s.kicked <- struct{}{}:
	default:
	}
}

// maintenance calls tick while there is something to do.
func (s *Server) maintenance() {
	defer s.wg.Done()
	again := false
	for {
		var timer <-chan time.Time
		if again {
			timer = time.After(s.every)
		} else {
			select {
			case <-s.done:
				return
			case <-s.kicked:
			}
			timer = time.After(s.every)
		}
		select {
		case <-s.done:
			return
		case <-timer:
		}
		rest := again
		again = s.tick()
		if rest = rest && !again; (s.dropped.Swap(false) || rest) && s.opts.Quiet != nil {
			s.opts.Quiet()
		}
	}
}

// tick does what has to be done from time to time, and returns true if it has to
// be called again though nothing may happen until then.
func (s *Server) tick() (again bool) {
	now := s.now()
	pressed := s.pressed.Swap(false)
	s.mu.Lock()
	domains := make([]*domain, 0, len(s.domains))
	for _, d := range s.domains {
		domains = append(domains, d)
	}
	s.mu.Unlock()
	for _, d := range domains {
		if !s.freeIdle(d, now) && d.maintain(now, pressed) {
			again = true
		}
	}
	return again
}

// freeIdle frees a domain that has been without connections for long.
func (s *Server) freeIdle(d *domain, now stamp) bool {
	s.mu.Lock()
	d.mu.Lock()
	idle := len(d.conns) == 0 && now > d.empty+s.keep
	if idle {
		delete(s.domains, d.id)
		s.past.add(&d.counts)
	}
	d.mu.Unlock()
	s.mu.Unlock()
	if idle {
		d.free()
	}
	return idle
}

// Drain makes the Server publish nothing more, and move nothing that is referred
// to, so that it can be replaced. What there is stays of use.
func (s *Server) Drain() { s.drained.Store(true) }

// Close ends all connections and lets go of all memory. Sandboxes keep what they
// have descriptors of.
func (s *Server) Close() error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		s.wg.Wait()
		return nil
	}
	s.closed = true
	close(s.done)
	for l := range s.listeners {
		l.Close()
	}
	for sock := range s.greeting {
		sock.close()
	}
	conns := make([]*conn, 0, len(s.conns))
	for c := range s.conns {
		conns = append(conns, c)
	}
	s.mu.Unlock()
	for _, c := range conns {
		c.close(errClosed)
	}
	s.wg.Wait()
	s.turns.stop()
	s.mu.Lock()
	domains := s.domains
	s.domains = map[domainID]*domain{}
	for _, d := range domains {
		d.mu.Lock()
		s.past.add(&d.counts)
		d.mu.Unlock()
	}
	s.mu.Unlock()
	for _, d := range domains {
		d.free()
	}
	return nil
}

// report returns the Stats as JSON of at most room bytes, with fewer domains if
// need be.
func (st Stats) report(room int) []byte {
	for {
		b, err := json.Marshal(&st)
		if err != nil {
			return []byte("{}")
		}
		if len(b) <= room || len(st.Domains) == 0 {
			return b
		}
		n := len(st.Domains) * room / len(b) * 9 / 10
		st.OmittedDomains += len(st.Domains) - n
		st.Domains = st.Domains[:n]
	}
}
