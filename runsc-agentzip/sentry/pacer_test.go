package sentry

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"runsc-agentzip/memfile/codec"
	"runsc-agentzip/pkg/pool/client"
	"runsc-agentzip/pkg/pool/wire"
)

// newTestPacer returns a pacer and the pool's end of its connection.
func newTestPacer(t *testing.T) (*pacer, int) {
	c := client.New(client.Options{Log: t.Logf})
	t.Cleanup(c.Close)
	p := newPacer(c)
	fd := attachTo(t, p)
	return p, fd
}

// attachTo gives p a new connection, and waits until it is live.
func attachTo(t *testing.T, p *pacer) int {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	t.Cleanup(func() { unix.Close(fds[0]) })
	old := p.Key()
	require.NoError(t, p.Attach(fds[1]))
	var w wire.Writer
	w.Begin(wire.Welcome, 0)
	w.Body(make([]byte, len(wire.Key{})))
	require.NoError(t, wire.Send(fds[0], w.Bytes(), -1))
	for p.Key() == nil || p.Key() == old {
		<-p.Ready()
	}
	// Nothing is stored.
	require.True(t, p.Work().Anew)
	p.OfferedAll(p.Key())
	return fds[0]
}

// want asks for n pages and waits until the pacer knows.
func want(t *testing.T, p *pacer, fd, n int) {
	ask(t, fd, n)
	for p.waiting() < n {
		<-p.Ready()
	}
}

// ask asks for pages 0 to n, in messages as long as they may be.
func ask(t *testing.T, fd, n int) {
	var w wire.Writer
	for i := range n {
		if i == 0 || w.Room() == 0 {
			if i != 0 {
				require.NoError(t, wire.Send(fd, w.Bytes(), -1))
			}
			w.Begin(wire.Want, 0)
		}
		w.Page(wire.Page{Hash: wire.Hash{1}, Cookie: uint32(i)})
	}
	require.NoError(t, wire.Send(fd, w.Bytes(), -1))
}

func (p *pacer) waiting() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.want)
}

func TestPacerParts(t *testing.T) {
	p, fd := newTestPacer(t)
	require.Nil(t, p.backlog())
	want(t, p, fd, 100)
	require.NotNil(t, p.backlog())
	var got []uint32
	for {
		w := p.Work()
		require.LessOrEqual(t, len(w.Want), workPart)
		if len(w.Want) == 0 {
			break
		}
		require.Equal(t, p.Key(), w.Key)
		for _, pg := range w.Want {
			got = append(got, pg.Cookie)
		}
	}
	require.Len(t, got, 100)
	for i, c := range got {
		require.Equal(t, uint32(i), c)
	}
	require.Nil(t, p.backlog())
}

// TestPacerFull: what the socket does not take is kept, and goes later.
func TestPacerFull(t *testing.T) {
	p, fd := newTestPacer(t)
	const pages = 1000
	want(t, p, fd, pages)
	var content codec.Page
	sent := make(map[uint32]bool)
	buf := make([]byte, wire.MaxMessage)
	receive := func() {
		for {
			n, _, err := wire.Receive(fd, buf)
			if err == unix.EAGAIN {
				return
			}
			require.NoError(t, err)
			m, err := wire.Parse(buf[:n])
			require.NoError(t, err)
			require.Equal(t, wire.Publish, m.Type)
			for i := range m.N {
				c := m.Content(i).Cookie
				require.False(t, sent[c], "page %d twice", c)
				sent[c] = true
			}
		}
	}
	wasFull := false
	for len(sent) < pages {
		p.begin()
		for {
			w := p.Work()
			if len(w.Want) == 0 {
				break
			}
			for _, pg := range w.Want {
				if !p.Publish(w.Key, &pg.Hash, pg.Cookie, wire.NoPage, &content) {
					wasFull = true
				}
			}
		}
		if len(sent)+workPart < pages {
			require.NotNil(t, p.backlog())
		}
		receive()
	}
	require.True(t, wasFull)
	require.Nil(t, p.backlog())
}

// TestPacerAnew: a new pool is offered what is stored a part at a time, and after what
// it asks for.
func TestPacerAnew(t *testing.T) {
	p, fd := newTestPacer(t)
	require.False(t, p.Work().Anew)
	require.Nil(t, p.backlog())

	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	defer unix.Close(fds[0])
	old := p.Key()
	require.NoError(t, p.Attach(fds[1]))
	unix.Close(fd)
	fd = fds[0]
	var w wire.Writer
	w.Begin(wire.Welcome, 0)
	w.Body(make([]byte, len(wire.Key{})))
	require.NoError(t, wire.Send(fd, w.Bytes(), -1))
	for p.Key() == nil || p.Key() == old {
		<-p.Ready()
	}
	for p.backlog() == nil { // what the client knows the pacer has yet to collect
		<-p.Ready()
	}
	for range 3 {
		<-p.backlog()
		began := time.Now()
		require.True(t, p.Work().Anew)
		if again := p.Work().Anew; time.Since(began) < anewPause/2 {
			require.False(t, again, "the pool has had no time")
		}
	}
	want(t, p, fd, 3*workPart)
	for p.waiting() != 0 {
		<-p.backlog()
		require.False(t, p.Work().Anew)
	}
	<-p.backlog()
	for !p.Work().Anew {
		<-p.backlog()
	}
	// Sharing that cannot go on is no reason to look again at once.
	began := time.Now()
	p.putOff()
	<-p.backlog()
	require.GreaterOrEqual(t, time.Since(began), anewPause)

	// What was offered to another pool is no news to this one.
	p.OfferedAll(old)
	require.NotNil(t, p.backlog())
	p.OfferedAll(p.Key())
	require.False(t, p.Work().Anew)
	require.Nil(t, p.backlog())
}

// TestPacerNewConnection: what an earlier connection asked for is forgotten, and
// no queue grows without bound.
func TestPacerNewConnection(t *testing.T) {
	p, fd := newTestPacer(t)
	want(t, p, fd, 50)
	old := p.Key()
	fd = attachTo(t, p)
	require.Empty(t, p.Work().Want)
	require.Nil(t, p.backlog())
	require.False(t, p.Publish(old, &wire.Hash{}, 1, wire.NoPage, new(codec.Page)))
	require.Zero(t, p.waiting())

	for n := 1000; n <= maxBacklog; n += 1000 {
		ask(t, fd, 1000)
		for p.waiting() < n {
			<-p.Ready()
		}
	}
	p.mu.Lock()
	p.keep(make([]wire.Page, 1000)...)
	require.Len(t, p.want, maxBacklog)
	p.mu.Unlock()
	_, own := p.Sharing()
	require.GreaterOrEqual(t, own, uint64(maxBacklog*wire.HashSize))
}
