package client

import (
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"runsc-agentzip/memfile"
	"runsc-agentzip/pkg/pool/wire"
)

var _ memfile.Pool = (*Client)(nil)

// Options are those of a Client.
type Options struct {
	// Log, if not nil, is told why a connection was lost, once for each. It must
	// not call the Client.
	Log func(format string, args ...any)
}

// A Client is the sandbox's end of the pool. Its methods are safe for concurrent
// use and never wait for the pool.
type Client struct {
	log   func(format string, args ...any)
	ready chan struct{}

	// key is the live connection's, or nil. It is written with mu held.
	key atomic.Pointer[wire.Key]

	// forgotten counts segments that went away, and how often pages were said to be
	// alone.
	forgotten atomic.Uint64

	closeOnce sync.Once
	// done is closed when the receiver has ended.
	done chan struct{}
	// changed wakes the receiver while it has no connection.
	changed chan struct{}

	// sendMu serialises what is sent.
	sendMu sync.Mutex
	// w and what follows are scratch, protected by sendMu.
	w            wire.Writer
	refs, unrefs []place

	mu sync.Mutex
	// All that follows is protected by mu.

	// wake is a socket pair: the receiver polls the first, and what is written
	// to the second wakes it. -1 before and after its time; wakeErr says why
	// there is none.
	wake    [2]int
	wakeErr error
	closed  bool
	// running is set once the receiver has been started.
	running bool

	// conn is the connection, or nil. live is set from its Welcome on. dead are
	// earlier ones that the receiver has yet to close.
	conn *conn
	live bool
	dead []*conn

	// index is the live connection's, or nil.
	index *index
	// segments has the open segments at their local numbers, and nil at those in
	// free. byNumber has those that are not gone, by the pool's numbers.
	segments []*segment
	free     []uint32
	byNumber map[uint32]*segment
	// open is how many segments there are, stale how many of them are gone and
	// have references, places how many places their maps have room for, alone how
	// many places have references that are marked as alone.
	open, stale, places, alone int
	// doomed are descriptors that nobody uses any more: unlock closes them.
	doomed []doomed

	// dirty are places whose count has become zero or no longer is: all those
	// that are marked as queued, and maybe others.
	dirty []memfile.PoolLoc
	// offers and sketched wait for being sent.
	offers   []wire.Page
	sketched []wire.Sketched
	// want, published and similar wait for Work. Each item of the latter two has a
	// reference.
	want               []wire.Page
	published, similar []memfile.PoolPlace
	share              wire.Sharing
	// anew is set from a Welcome on until all that is stored was offered.
	anew bool
	// spared is what bases have spared since the pool was last told, in bytes.
	spared uint64

	// patterns are complete and wait for Patterns. incoming are the parts so far
	// of patterns of incomingTotal bytes. outgoing is what is left to send of
	// patterns of outgoingTotal bytes.
	patterns      []byte
	incoming      []byte
	incomingTotal uint32
	outgoing      []byte
	outgoingTotal uint32

	// turn is closed when the sandbox has its turn, which granted says. It is
	// nil if it does not want it.
	turn    chan struct{}
	granted bool

	state State
}

// A conn is a connection. The receiver alone reads from the socket and closes it.
type conn struct {
	// fd is the socket, or -1 once it is closed. It is written by the receiver
	// with sendMu held.
	fd int
}

// State is what a Client tells of itself.
type State struct {
	// Connected is set while a connection is live.
	Connected bool
	// Reason says why the last connection was lost, in words; empty if none was.
	Reason string
	// Connects is how many connections have become live.
	Connects uint64
	// Offered and Dropped are how many offers were sent and dropped.
	Offered, Dropped uint64
	// Wanted is how many pages the pool has asked for, Published how many it was
	// given.
	Wanted, Published uint64
	// Found and Missed are how many calls of Find have found something or not.
	Found, Missed uint64
	// Segments is how many segments are open, StaleSegments in how many of them
	// there are pages although they are gone.
	Segments, StaleSegments int
}

// wakeFD is where the descriptors of the socket pair go: gVisor's loader wants to
// find some of the lower ones free.
const wakeFD = 1024

var errClosed = errors.New("the pool's client is closed")

// New returns a Client without a connection. It makes a socket pair, so it has to
// be called before seccomp filters are installed; if that fails, Attach says so.
func New(o Options) *Client {
	c := &Client{
		log:      o.Log,
		ready:    make(chan struct{}, 1),
		done:     make(chan struct{}),
		changed:  make(chan struct{}, 1),
		wake:     [2]int{-1, -1},
		byNumber: make(map[uint32]*segment),
	}
	if c.log == nil {
		c.log = func(string, ...any) {}
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		c.wakeErr = fmt.Errorf("the pool's client has no socket pair: %w", err)
		return c
	}
	for i, fd := range pair {
		// Without so many descriptors, one of the low ones serves as well.
		if high, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, wakeFD); err == nil {
			unix.Close(fd)
			pair[i] = high
		}
	}
	c.wake = pair
	return c
}

// Attach makes a connection of a connected SOCK_SEQPACKET socket, on which Hello
// has been sent. An earlier connection is closed. The Client owns the socket from
// now on, even if Attach fails, which it does after Close and if New could not
// make its socket pair. What is wrong with the socket itself shows in State.
func (c *Client) Attach(fd int) error {
	if fd < 0 {
		return fmt.Errorf("the pool's socket is descriptor %d: want one that is open", fd)
	}
	c.mu.Lock()
	err := c.wakeErr
	if c.closed {
		err = errClosed
	}
	if err != nil {
		c.mu.Unlock()
		unix.Close(fd)
		return err
	}
	c.lose(c.conn, "replaced by a new connection")
	c.conn = &conn{fd: fd}
	if !c.running {
		c.running = true
		go c.receive(c.wake[0])
	}
	c.wakeReceiver()
	c.unlock()
	return nil
}

// Close ends the connection for good. Pages stay readable as long as they have
// references.
func (c *Client) Close() {
	c.closeOnce.Do(func() {
		c.mu.Lock()
		c.closed = true
		c.lose(c.conn, "closed")
		c.wakeReceiver()
		running := c.running
		c.unlock()
		if running {
			<-c.done
		}
		c.mu.Lock()
		pair := c.wake
		c.wake = [2]int{-1, -1}
		c.mu.Unlock()
		for _, fd := range pair {
			if fd >= 0 {
				unix.Close(fd)
			}
		}
	})
}

// Ready is signalled when there is Work, when Patterns have arrived, and when the
// connection came or went.
func (c *Client) Ready() <-chan struct{} { return c.ready }

func (c *Client) signal() {
	select {
	case c.ready <- struct{}{}:
	default:
	}
}

// State returns what the Client tells of itself.
func (c *Client) State() State {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.state
	s.Connected, s.Segments, s.StaleSegments = c.live, c.open, c.stale
	return s
}

// Forgotten is how often so far pages may have become Stale: how many segments have
// gone away, and messages of pages that nobody else has taken.
func (c *Client) Forgotten() uint64 { return c.forgotten.Load() }

// Key implements memfile.Pool.
func (c *Client) Key() *wire.Key { return c.key.Load() }

// unlock releases mu and closes what nobody uses any more. A local number is free
// only when its descriptor is closed.
//
// Preconditions: c.mu is held.
func (c *Client) unlock() {
	doomed := c.doomed
	c.doomed = nil
	c.mu.Unlock()
	if len(doomed) == 0 {
		return
	}
	for _, d := range doomed {
		unix.Close(d.fd)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, d := range doomed {
		if d.segment {
			c.free = append(c.free, d.num)
			c.open--
		}
	}
}

// wakeReceiver makes the receiver look at what has changed.
//
// Preconditions: c.mu is held.
func (c *Client) wakeReceiver() {
	select {
	case c.changed <- struct{}{}:
	default:
	}
	if c.wake[1] >= 0 {
		// When the pair is full the receiver is woken anyway.
		_ = wire.Send(c.wake[1], []byte{0}, -1)
	}
}

// lose gives up a connection, unless it was given up before.
//
// Preconditions: c.mu is held, and released by c.unlock.
func (c *Client) lose(cn *conn, reason string) bool {
	if cn == nil || c.conn != cn {
		return false
	}
	c.conn, c.live = nil, false
	c.dead = append(c.dead, cn)
	c.key.Store(nil)
	c.state.Reason = reason
	c.state.Dropped += uint64(len(c.offers) + len(c.sketched))
	c.offers, c.sketched, c.want, c.dirty = nil, nil, nil, nil
	c.incoming, c.incomingTotal = nil, 0
	c.outgoing, c.outgoingTotal = nil, 0
	c.grantTurn()
	c.dropIndex()
	published := append(c.published, c.similar...)
	c.published, c.similar, c.anew = nil, nil, false
	for _, s := range c.segments {
		if s != nil && !s.gone {
			c.forget(s)
		}
	}
	for i := range published {
		c.give(published[i].Loc)
	}
	c.signal()
	return true
}

// disconnect gives up a connection and logs why.
func (c *Client) disconnect(cn *conn, why error) {
	c.mu.Lock()
	lost := c.lose(cn, why.Error())
	if lost {
		c.wakeReceiver()
	}
	c.unlock()
	if lost {
		c.log("the connection to the pool is lost, pages are no longer shared: %v", why)
	}
}

// receive is the receiver: it takes what the pool sends, and closes connections.
func (c *Client) receive(wake int) {
	defer close(c.done)
	var buf []byte
	for {
		cn, ok := c.current()
		if !ok {
			return
		}
		if cn == nil {
			<-c.changed
			continue
		}
		if buf == nil {
			buf = make([]byte, wire.MaxReply)
		}
		err := c.receiveOne(cn, buf)
		if err == unix.EAGAIN {
			buf = nil // it may be long
			err = wait(cn.fd, wake)
		}
		if err != nil {
			c.disconnect(cn, err)
		}
	}
}

// current closes connections that were given up. It returns the present one, or
// nil if there is none, or false after Close.
func (c *Client) current() (*conn, bool) {
	c.mu.Lock()
	cn, dead, closed := c.conn, c.dead, c.closed
	c.dead = nil
	c.mu.Unlock()
	if len(dead) > 0 {
		c.sendMu.Lock()
		for _, d := range dead {
			unix.Close(d.fd)
			d.fd = -1
		}
		c.sendMu.Unlock()
	}
	return cn, !closed
}

// receiveOne takes a message. It returns unix.EAGAIN if there is none.
func (c *Client) receiveOne(cn *conn, buf []byte) error {
	n, fd, err := wire.Receive(cn.fd, buf)
	switch {
	case err == unix.EAGAIN:
		return err
	case err == io.EOF:
		return errors.New("the pool has closed it")
	case err != nil:
		return fmt.Errorf("receiving: %w", err)
	}
	m, err := wire.Parse(buf[:n])
	if err == nil {
		fd, err = c.handle(cn, &m, fd)
	}
	if fd >= 0 {
		unix.Close(fd)
	}
	return err
}

// wait blocks until a socket has something to receive, its end is reached, or the
// receiver is woken.
func wait(socket, wake int) error {
	fds := [2]unix.PollFd{{Fd: int32(socket), Events: unix.POLLIN}, {Fd: int32(wake), Events: unix.POLLIN}}
	for {
		_, err := unix.Ppoll(fds[:], nil, nil)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return fmt.Errorf("waiting: %w", err)
		}
		break
	}
	var b [1]byte
	for fds[1].Revents != 0 {
		if _, _, err := wire.Receive(wake, b[:]); err != nil {
			break
		}
	}
	return nil
}
