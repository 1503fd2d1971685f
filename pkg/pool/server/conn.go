package server

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"runsc-agentzip/pkg/pool/wire"
)

const (
	// maxQueued is how many messages that must not be lost may be queued for a
	// connection, beside those that it is greeted with.
	maxQueued = 4096
	// maxAdvisory and maxAdvisoryBytes are how much may be queued when a
	// message that may be lost is.
	maxAdvisory      = 256
	maxAdvisoryBytes = 256 << 10
	// maxViolations is how much a connection may do wrong before it is closed.
	maxViolations = 100
	// maxAllowed bounds how many late answers to a Want a connection may have.
	maxAllowed = 64 << 10
	// helloTimeout is how long a new connection may be silent.
	helloTimeout = 10 * time.Second
)

var (
	errSlow       = errors.New("it does not receive what it is sent")
	errViolations = fmt.Errorf("more than %d violations of the protocol", maxViolations)
	errClosed     = errors.New("the pool is closed")
	errReplaced   = errors.New("the sandbox has another connection")
)

// A transport carries messages.
type transport interface {
	// receive waits for a message. The buffer goes back to buffers.
	receive() (buf *[wire.MaxMessage]byte, n, fd int, err error)
	// send sends a message, and waits while there is no room for it.
	send(msg []byte, fd int) error
	// close ends both. It does not wait.
	close() error
}

// buffers has what messages are received into.
var buffers = sync.Pool{New: func() any { return new([wire.MaxMessage]byte) }}

// A socket is a transport over a non-blocking SOCK_SEQPACKET socket.
type socket struct {
	f interface {
		io.Closer
		SetReadDeadline(time.Time) error
	}
	raw syscall.RawConn
}

func newSocket(f interface {
	io.Closer
	syscall.Conn
	SetReadDeadline(time.Time) error
}) (*socket, error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return nil, err
	}
	return &socket{f, raw}, nil
}

func (s *socket) close() error { return s.f.Close() }

func (s *socket) receive() (buf *[wire.MaxMessage]byte, n, fd int, err error) {
	// No buffer is held while there is nothing to receive.
	rerr := s.raw.Read(func(sock uintptr) bool {
		buf = buffers.Get().(*[wire.MaxMessage]byte)
		if n, fd, err = wire.Receive(int(sock), buf[:]); err == nil {
			return true
		}
		buffers.Put(buf)
		buf = nil
		return err != unix.EAGAIN
	})
	if rerr != nil {
		return nil, 0, -1, rerr
	}
	return buf, n, fd, err
}

func (s *socket) send(msg []byte, fd int) error {
	for {
		var err error
		if werr := s.raw.Write(func(sock uintptr) bool {
			err = wire.Send(int(sock), msg, fd)
			return err != unix.EAGAIN
		}); werr != nil {
			return werr
		}
		// Too many descriptors are under way to all receivers together, and
		// nothing tells when there are fewer.
		if err != unix.ETOOMANYREFS {
			return err
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// sendNow sends a message if there is room.
func (s *socket) sendNow(msg []byte) {
	s.raw.Control(func(sock uintptr) { wire.Send(int(sock), msg, -1) })
}

// trusted tells whether the peer is root or the pool's own user.
func (s *socket) trusted() error {
	var cred *unix.Ucred
	var err error
	if cerr := s.raw.Control(func(sock uintptr) {
		cred, err = unix.GetsockoptUcred(int(sock), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); cerr != nil {
		return cerr
	}
	if err != nil {
		return fmt.Errorf("who is there: %w", err)
	}
	if uid := os.Geteuid(); cred.Uid != 0 && int(cred.Uid) != uid {
		return fmt.Errorf("user %d may not use the pool, only root and user %d", cred.Uid, uid)
	}
	return nil
}

// A packet is a message to be sent, and the descriptor that goes with it, or nil.
type packet struct {
	msg  []byte
	file *sharedFD
}

// A conn is the connection of a sandbox.
type conn struct {
	s  *Server
	tr transport
	// id is unique in the pool, and not refused.
	id   uint32
	name string
	// sandbox is which one it is, or empty.
	sandbox string
	// d is the domain; it does not change after join.
	d *domain

	// What follows belongs to the goroutine that handles the messages.

	violations int

	// What follows is protected by domain.mu.

	// candidates is how many the connection has, asked how many pages are
	// awaited from it, allowed how many it may still send.
	candidates, asked, allowed int
	refs                       map[uint64]refGroup
	// part is what has come of total bytes of patterns, if partial is set,
	// since partAt.
	part    []byte
	partial bool
	// skip is how much is still to come of patterns that are ignored.
	skip   int
	total  int
	partAt stamp
	// sharedAt is when its usage was last computed, if shared is set.
	shared   bool
	sharedAt stamp

	// limit is how many packets may be queued. It does not change after join.
	limit int
	// mu protects what follows.
	mu     sync.Mutex
	queue  []packet
	queued int // bytes
	// writing is set while a goroutine sends the queue.
	writing bool
	closed  bool
	// cause is why the pool has closed the connection.
	cause error
	// lost counts messages that were dropped.
	lost uint64
}

// push queues a message. If it must not be lost, and there is no room, the
// connection is closed. It returns false if the message was not queued.
func (c *conn) push(p packet, must bool) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return false
	}
	if !must && (len(c.queue) >= maxAdvisory || c.queued >= maxAdvisoryBytes) {
		c.lost++
		return false
	}
	if len(c.queue) >= c.limit {
		c.closeLocked(errSlow)
		return false
	}
	if p.file != nil {
		p.file.acquire()
	}
	c.queue = append(c.queue, p)
	c.queued += len(p.msg)
	if !c.writing {
		c.writing = true
		c.s.wg.Add(1)
		go c.write()
	}
	return true
}

// next takes a packet from the queue. Without one, the writer ends.
func (c *conn) next() (packet, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.queue) == 0 {
		c.queue = nil
		c.writing = false
		return packet{}, false
	}
	p := c.queue[0]
	c.queue[0] = packet{}
	c.queue = c.queue[1:]
	c.queued -= len(p.msg)
	return p, true
}

// write sends what is queued.
func (c *conn) write() {
	defer c.s.wg.Done()
	for {
		p, ok := c.next()
		if !ok {
			return
		}
		fd := -1
		if p.file != nil {
			fd = p.file.fd
		}
		err := c.tr.send(p.msg, fd)
		p.file.release()
		if err != nil {
			c.close(err)
		}
	}
}

// close ends the connection, because of cause. Its goroutines end soon after.
func (c *conn) close(cause error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closeLocked(cause)
}

// closeLocked is close with conn.mu held.
func (c *conn) closeLocked(cause error) {
	if c.closed {
		return
	}
	c.closed, c.cause = true, cause
	for _, p := range c.queue {
		p.file.release()
	}
	c.queue, c.queued = nil, 0
	c.tr.close()
}

// run handles the connection's messages until it ends.
func (c *conn) run() {
	defer c.s.wg.Done()
	c.d.tellPatterns(c)
	var err error
	for err == nil {
		buf, n, fd, rerr := c.tr.receive()
		if err = rerr; err == nil {
			err = c.message(buf[:n], fd)
			buffers.Put(buf)
		}
	}
	c.close(err)
	c.s.leave(c)
}

// message handles a message from a sandbox, and the descriptor that came with
// it, or -1. An error ends the connection.
func (c *conn) message(b []byte, fd int) error {
	before := c.violations
	if fd >= 0 {
		// No message of a sandbox has one.
		unix.Close(fd)
		c.violations++
	}
	m, err := wire.Parse(b)
	if err != nil {
		return err
	}
	switch m.Type {
	case wire.Offer, wire.Resemble:
		c.d.offer(c, &m)
	case wire.Publish:
		c.d.publish(c, &m)
	case wire.Ref, wire.Unref:
		c.d.ref(c, &m)
	case wire.Patterns:
		c.d.pattern(c, &m)
	case wire.Usage:
		c.d.usage(c, m.Arg)
	case wire.Turn:
		if m.Arg != 0 {
			c.s.turns.take(c)
		} else {
			c.s.turns.give(c)
		}
	default:
		return fmt.Errorf("%w: %v from a sandbox", wire.ErrMessage, m.Type)
	}
	if c.violations != before {
		c.d.mu.Lock()
		c.d.counts.Violations += uint64(c.violations - before)
		c.d.mu.Unlock()
	}
	if c.violations > maxViolations {
		return errViolations
	}
	return nil
}

// ordinary tells whether err is the usual end of a connection.
func ordinary(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, unix.ECONNRESET) || errors.Is(err, unix.EPIPE) ||
		errors.Is(err, net.ErrClosed) || errors.Is(err, os.ErrClosed) || errors.Is(err, errClosed) || errors.Is(err, errReplaced)
}
