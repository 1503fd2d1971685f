package client

import (
	"encoding/binary"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"runsc-agentzip/memfile"
	"runsc-agentzip/pkg/pool/wire"
)

// FuzzIncoming feeds a connection messages: each is a byte that tells whether a
// descriptor comes with it, two bytes of length, and the message. Whatever they
// are, nothing panics, what is handed out is readable or says why not, and no
// descriptor is left.
func FuzzIncoming(f *testing.F) {
	var seed []byte
	var w wire.Writer
	add := func(fd byte) {
		seed = append(seed, fd)
		seed = binary.LittleEndian.AppendUint16(seed, uint16(len(w.Bytes())))
		seed = append(seed, w.Bytes()...)
		f.Add(seed)
	}
	h := hashOf(1)
	w.Begin(wire.Welcome, 0)
	w.Body(make([]byte, 32))
	add(0)
	w.Begin(wire.Index, 0)
	w.Uint64(64)
	add(1)
	w.Begin(wire.Segment, 1)
	add(2)
	w.Begin(wire.Published, 0)
	w.Place(wire.Place{Page: wire.Page{Hash: h}, Loc: wire.MakeLoc(1, 0)})
	w.Place(wire.Place{Page: wire.Page{Hash: h}, Loc: wire.MakeLoc(1, 4096)})
	add(0)
	w.Begin(wire.Want, 0)
	w.Page(wire.Page{Hash: h})
	add(0)
	w.Begin(wire.Share, 0)
	w.Sharing(wire.Sharing{Pages: 1, Overhead: 2})
	add(0)
	w.Begin(wire.Patterns, 2)
	w.Body([]byte("x"))
	add(0)
	add(0)
	w.Begin(wire.Retire, 1)
	add(0)
	w.Begin(wire.Refuse, 0)
	w.Body([]byte("no"))
	add(0)

	p, fd := dial(f)
	unix.Close(fd)
	p.hangUp()
	f.Cleanup(p.close)
	p.segments[1] = memfd(f, "segment", wire.SegmentSize)
	p.put(1, h)
	f.Fuzz(func(t *testing.T, b []byte) {
		before := descriptors(t, "")
		c := New(Options{})
		defer c.Close()
		// Without the receiver, so that it is this goroutine that panics.
		cn := &conn{fd: -1}
		c.conn = cn
		buf, held := make([]byte, wire.MaxRecord), map[memfile.PoolLoc]int{}
		for len(b) >= 3 {
			fd := -1
			if k := b[0] % 3; k > 0 {
				var err error
				fd, err = unix.FcntlInt(uintptr([]int{0, p.index, p.segments[1]}[k]), unix.F_DUPFD_CLOEXEC, 0)
				require.NoError(t, err)
			}
			n := int(binary.LittleEndian.Uint16(b[1:]))
			b = b[3:]
			n = min(n, len(b))
			m, err := wire.Parse(b[:n])
			b = b[n:]
			if err == nil {
				fd, err = c.handle(cn, &m, fd)
			}
			if fd >= 0 {
				unix.Close(fd)
			}
			if err != nil {
				c.disconnect(cn, err)
				break
			}
			if l, _, ok := c.Find(c.Key(), &h, buf); ok {
				held[l]++
			}
			for _, pl := range c.Work().Published {
				held[pl.Loc]++
				c.Read(pl.Loc, buf)
				c.Stale(pl.Loc)
			}
		}
		_, own := c.Sharing()
		require.Less(t, own, uint64(2*wire.MaxPatterns+1<<20))
		c.disconnect(cn, errClosed)
		c.mu.Lock()
		c.dead = nil
		c.mu.Unlock()
		for l, n := range held {
			for range n {
				c.Unref(l)
			}
		}
		require.Zero(t, c.State().Segments)
		require.Equal(t, before, descriptors(t, ""))
	})
}
