package server

import (
	"encoding/binary"
	"fmt"
	"net"
	"os"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"runsc-agentzip/memfile/codec"
	"runsc-agentzip/pkg/pool/wire"
)

// twoClients returns a pool, two clients that share a page, and its place.
func twoClients(t *testing.T) (p *poolT, a, b *client, content *codec.Page, l wire.Loc) {
	p = newPool(t, Options{})
	a, b = attach(p, p.s, greeting("d")), attach(p, p.s, greeting("d"))
	content = page(1, 1000)
	return p, a, b, content, share(t, a, b, content, wire.NoPage)
}

func TestWrongContent(t *testing.T) {
	p := newPool(t, Options{})
	a, b := attach(p, p.s, greeting("d")), attach(p, p.s, greeting("d"))
	content := page(1, 1000)
	a.offer(1, content)
	awaitStats(t, p.s, func(u *Usage) bool { return u.Offers == 1 })
	b.offer(1, content)
	b.until(func() bool { return len(b.view.wants) == 1 })
	b.send(publishMessage(wire.Content{Page: b.view.wants[0], Template: wire.NoPage, Data: page(2, 1000)}))
	awaitStats(t, p.s, func(u *Usage) bool { return u.Violations == 1 })
	require.Zero(t, p.s.Stats().Total.Published)
	// Another is asked at once.
	a.offer(1, content)
	a.until(func() bool { return len(a.view.wants) == 1 })
	a.send(publishMessage(wire.Content{Page: a.view.wants[0], Template: wire.NoPage, Data: content}))
	a.until(func() bool { return len(a.view.told) == 1 })
	require.Equal(t, content, a.view.read(t, a.view.told[0].Loc, nil))
	checkServer(t, p.s)
}

func TestUnwanted(t *testing.T) {
	p, a, b, _, _ := twoClients(t)
	mine := page(2, 1000)
	msg := publishMessage(wire.Content{Page: wire.Page{Hash: a.view.hash(mine)}, Template: wire.NoPage, Data: mine})
	for range maxViolations {
		a.send(msg)
	}
	awaitStats(t, p.s, func(u *Usage) bool { return u.Violations == maxViolations })
	require.Equal(t, 2, p.s.Stats().Total.Clients)
	a.send(msg)
	a.ended()
	st := p.s.Stats().Total
	require.EqualValues(t, 1, st.Published)
	// b does not notice.
	b.offer(1, page(3, 100))
	awaitStats(t, p.s, func(u *Usage) bool { return u.Offers == 3 && u.Clients == 1 })
	checkServer(t, p.s)
}

func TestMalformed(t *testing.T) {
	var hello, admin, welcome wire.Writer
	require.NoError(t, greeting("e").Hello(&hello))
	admin.Begin(wire.Admin, 0)
	admin.Body([]byte("stats"))
	welcome.Begin(wire.Welcome, 0)
	offer := offerMessage(wire.Page{}, wire.Page{})
	wrongCount := append([]byte(nil), offer...)
	binary.LittleEndian.PutUint16(wrongCount[2:], 3)
	for name, msg := range map[string][]byte{
		"one byte": {2}, "unknown": {200, 0, 0, 0, 0, 0, 0, 0}, "garbage": []byte("GET / HTTP/1.1\r\n\r\n"),
		"half": offer[:len(offer)/2], "wrong count": wrongCount, "too long": make([]byte, wire.MaxMessage+1),
		"hello": hello.Bytes(), "admin": admin.Bytes(), "the pool's": welcome.Bytes(),
	} {
		t.Run(name, func(t *testing.T) {
			p, a, b, content, l := twoClients(t)
			a.send(msg)
			a.ended()
			awaitStats(t, p.s, func(u *Usage) bool { return u.Clients == 1 })
			require.Equal(t, content, b.view.read(t, l, nil))
			checkServer(t, p.s)
		})
	}
}

func TestDescriptors(t *testing.T) {
	p, a, _, _, _ := twoClients(t)
	null, err := os.Open("/dev/null")
	require.NoError(t, err)
	defer null.Close()
	before := descriptors(t)
	for range 20 {
		require.NoError(t, a.trySend(usageMessage(), int(null.Fd())))
	}
	awaitStats(t, p.s, func(u *Usage) bool { return u.Violations == 20 })
	require.Equal(t, before, descriptors(t))
	// Several at once are malformed.
	require.NoError(t, unix.Sendmsg(a.fd, usageMessage(), unix.UnixRights(int(null.Fd()), int(null.Fd()), int(null.Fd())), nil, 0))
	a.ended()
	awaitStats(t, p.s, func(u *Usage) bool { return u.Clients == 1 })
	p.s.mu.Lock()
	defer p.s.mu.Unlock()
	// Ours was closed by the pool, nothing else has changed.
	require.Equal(t, before-1, descriptors(t))
}

func TestForeignReferences(t *testing.T) {
	p, a, b, _, l := twoClients(t)
	r := a.view.record(t, l)
	size := uint64(r.Size())
	a.send(refMessage(wire.Ref, l))
	awaitStats(t, p.s, func(u *Usage) bool { return u.ReferencedBytes == size })
	// What others hold cannot be given up, and nothing be held twice.
	b.send(refMessage(wire.Unref, l, l, l))
	b.send(refMessage(wire.Ref, l, l, l))
	b.send(refMessage(wire.Unref, l))
	b.send(refMessage(wire.Unref, l, l))
	b.offer(1, page(2, 100))
	awaitStats(t, p.s, func(u *Usage) bool { return u.Offers == 3 })
	require.Equal(t, size, p.s.Stats().Total.ReferencedBytes)
	require.Zero(t, p.s.Stats().Total.Violations)
	// Places where nothing is.
	b.send(refMessage(wire.Ref, l+1, l-1, wire.MakeLoc(5, 0), wire.Loc(1<<40), wire.Loc(1<<32-1), ^wire.Loc(0)))
	awaitStats(t, p.s, func(u *Usage) bool { return u.Violations == 6 })
	require.Equal(t, size, p.s.Stats().Total.ReferencedBytes)
	checkServer(t, p.s)
}

func TestFloods(t *testing.T) {
	p, a, b, content, l := twoClients(t)
	// Hashes without end: the pool remembers so many, and b works on.
	pages := make([]wire.Page, 2700)
	const rounds = maxCandidates/2700 + 10
	for i := range rounds {
		for j := range pages {
			binary.LittleEndian.PutUint64(pages[j].Hash[:], uint64(i*len(pages)+j)+1)
			pages[j].Hash[8] = byte(j)
		}
		a.send(offerMessage(pages...))
	}
	awaitStats(t, p.s, func(u *Usage) bool { return u.Offers == 2+rounds*2700 })
	st := p.s.Stats().Total
	require.EqualValues(t, maxCandidates, st.Candidates)
	require.EqualValues(t, rounds*2700-maxCandidates, st.Ignored)
	require.Equal(t, content, b.view.read(t, l, nil))
	checkServer(t, p.s)

	// Answers that are not received are not kept: the socket is full, and then
	// the queue.
	for range 3000 {
		a.offer(1, content)
	}
	awaitStats(t, p.s, func(u *Usage) bool { return u.Hits == 3000 })
	p.s.mu.Lock()
	for c := range p.s.conns {
		c.mu.Lock()
		require.LessOrEqual(t, len(c.queue), maxAdvisory)
		c.mu.Unlock()
	}
	p.s.mu.Unlock()
	require.Equal(t, 2, p.s.Stats().Total.Clients)

	// One that does not take what it must is closed.
	d := p.s.anyDomain()
	d.mu.Lock()
	for _, c := range d.conns {
		for i := 0; c.push(packet{msg: []byte{byte(wire.Refuse), 0, 0, 0, 0, 0, 0, 0}}, true); i++ {
			require.Less(t, i, 2*maxQueued)
		}
	}
	d.mu.Unlock()
	awaitStats(t, p.s, func(u *Usage) bool { return u.Clients == 0 })

	// The candidates go with their owner.
	p.pass(1)
	require.Zero(t, p.s.Stats().Total.Candidates)
	checkServer(t, p.s)
}

func (s *Server) anyDomain() *domain {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, d := range s.domains {
		return d
	}
	return nil
}

func TestViolationsFlood(t *testing.T) {
	p, a, _, _, _ := twoClients(t)
	locs := make([]wire.Loc, 8000)
	for i := range locs {
		locs[i] = wire.MakeLoc(77, uint64(i)*wire.Align)
	}
	a.send(refMessage(wire.Ref, locs...))
	a.ended()
	awaitStats(t, p.s, func(u *Usage) bool { return u.Clients == 1 })
}

// A sandbox can do nothing to what it gets.
func TestReadOnly(t *testing.T) {
	p, a, _, content, l := twoClients(t)
	const seals = unix.F_SEAL_GROW | unix.F_SEAL_SHRINK | unix.F_SEAL_FUTURE_WRITE
	for name, fd := range map[string]int{"segment": a.view.segs[l.Segment()], "index": a.view.index} {
		flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
		require.NoError(t, err)
		require.Equal(t, unix.O_RDONLY, flags&unix.O_ACCMODE, name)
		got, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
		require.NoError(t, err)
		require.Equal(t, seals, got&seals, name)

		attack := func(fd int) {
			var st unix.Stat_t
			require.NoError(t, unix.Fstat(fd, &st))
			_, err = unix.Pwrite(fd, []byte("x"), 0)
			require.Error(t, err)
			require.Error(t, unix.Ftruncate(fd, 0))
			require.Error(t, unix.Ftruncate(fd, st.Size+4096))
			require.Error(t, unix.Fallocate(fd, 0, 0, st.Size+4096))
			require.Error(t, unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, 4096))
			_, err = unix.Mmap(fd, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
			require.Error(t, err)
			m, err := unix.Mmap(fd, 0, 4096, unix.PROT_READ, unix.MAP_SHARED)
			require.NoError(t, err)
			require.Error(t, unix.Mprotect(m, unix.PROT_READ|unix.PROT_WRITE))
			require.NoError(t, unix.Munmap(m))
		}
		attack(fd)
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_WRITE)
		require.Error(t, err)
		_, err = unix.FcntlInt(uintptr(fd), unix.F_SETFL, unix.O_RDWR)
		require.NoError(t, err) // ignores the mode
		attack(fd)
		// Root may open it again, but to no end.
		if again, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", fd), unix.O_RDWR|unix.O_CLOEXEC, 0); err == nil {
			attack(again)
			_, err = unix.FcntlInt(uintptr(again), unix.F_ADD_SEALS, unix.F_SEAL_WRITE)
			require.Error(t, err)
			unix.Close(again)
		}
	}
	require.Equal(t, content, a.view.read(t, l, nil))
	checkServer(t, p.s)
}

// Pages whose hashes are made to collide do not make the index grow without end.
func TestCollisions(t *testing.T) {
	p := newPool(t, Options{})
	a, b := attach(p, p.s, greeting("d")), attach(p, p.s, greeting("d"))
	var want wire.Hash
	found := 0
	for i := uint64(1); found < wire.MaxProbe+4; i++ {
		var content codec.Page
		binary.LittleEndian.PutUint64(content[:], i)
		h := a.view.hash(&content)
		if found > 0 && wire.Probe(&h, minPlaces) != wire.Probe(&want, minPlaces) {
			continue
		}
		want = h
		found++
		n := a.offers(p)
		a.offer(1, &content)
		awaitStats(t, p.s, func(u *Usage) bool { return u.Offers == n+1 })
		b.offer(1, &content)
		b.until(func() bool { return len(b.view.wants) == 1 })
		b.send(publishMessage(wire.Content{Page: b.view.wants[0], Template: wire.NoPage, Data: &content}))
		b.view.wants = nil
		awaitStats(t, p.s, func(u *Usage) bool { return u.Published+u.Full == uint64(found) })
	}
	st := p.s.Stats().Total
	require.EqualValues(t, wire.MaxProbe, st.Published)
	require.EqualValues(t, 4, st.Full)
	require.EqualValues(t, wire.IndexSize(minPlaces), st.IndexBytes)
	checkServer(t, p.s)
}

// Maintenance runs by itself, and rests when there is nothing to do.
func TestMaintenance(t *testing.T) {
	var quiet atomic.Int32
	s := New(Options{Keep: 100 * time.Millisecond, Quiet: func() { quiet.Add(1) }})
	defer s.Close()
	a := attach(t, s, greeting("d"))
	a.close()
	require.Eventually(t, func() bool { return len(s.Stats().Domains) == 0 }, deadline, 5*time.Millisecond)
	// What it has left is given back, once.
	require.Eventually(t, func() bool { return quiet.Load() > 0 }, deadline, 5*time.Millisecond)
	time.Sleep(3 * s.every)
	require.EqualValues(t, 1, quiet.Load())
}

// An encoder is kept while it is in use.
func TestEncoderIdle(t *testing.T) {
	p := newPool(t, Options{})
	ps := p.peers(2, greeting("d"))
	for _, q := range ps {
		require.NoError(t, q.conn.message(offerMessage(wire.Page{Hash: q.view.hash(page(1, 700))}), -1))
		q.sync(p)
	}
	ps[1].publish(p, page(1, 700), wire.NoPage)
	p.pass(encoderIdle)
	require.NotNil(t, ps[0].conn.d.enc)
	require.False(t, p.s.dropped.Load())
	p.pass(1)
	require.Nil(t, ps[0].conn.d.enc)
	require.True(t, p.s.dropped.Swap(false))
	p.pass(encoderIdle)
	require.False(t, p.s.dropped.Load())
}

// Other users are refused.
func TestOtherUser(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	s := New(Options{})
	defer s.Close()
	name := fmt.Sprintf("@agentzip-pool-test-%d", os.Getpid())
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: name, Net: "unixpacket"})
	require.NoError(t, err)
	go s.Serve(l)
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	defer unix.Close(fd)
	connected := make(chan error)
	go func() {
		// The thread is another user's, and ends with the goroutine.
		runtime.LockOSThread()
		if _, _, e := unix.RawSyscall(unix.SYS_SETRESUID, ^uintptr(0), 65534, ^uintptr(0)); e != 0 {
			connected <- e
			return
		}
		connected <- unix.Connect(fd, &unix.SockaddrUnix{Name: name})
	}()
	require.NoError(t, <-connected)
	require.NoError(t, wire.Wait(fd))
	buf := make([]byte, wire.MaxMessage)
	n, _, err := wire.Receive(fd, buf)
	require.NoError(t, err)
	m, err := wire.Parse(buf[:n])
	require.NoError(t, err)
	require.Equal(t, wire.Refuse, m.Type)
	require.Contains(t, string(m.Body), "user 65534 may not use the pool")
	require.Empty(t, s.Stats().Domains)
}
