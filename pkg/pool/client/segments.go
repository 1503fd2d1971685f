package client

import (
	"fmt"

	"golang.org/x/sys/unix"

	"runsc-agentzip/memfile"
	"runsc-agentzip/pkg/pool/wire"
)

const (
	// maxSegments is how many segments may be open: 64 GiB of pages.
	maxSegments = 1 << 14
	// maxPlaces is how many places an index may claim to have. Its bytes then
	// have 64-bit offsets that are positive.
	maxPlaces = 1 << 40

	// A PoolLoc is a segment's local number and, in unitBits bits, a unit: the
	// offset in the segment divided by wire.Align.
	unitBits = 18
	units    = 1 << unitBits
)

// A segment's units are all that unitBits bits can tell apart.
var _ = [1]struct{}{}[wire.SegmentSize/wire.Align-units]

// What a segment's map has for a unit: a count of references and three marks. The
// zero value is as good as none. A count that does not fit would be one of pages
// of more than 2 TiB of memory.
const (
	counts = 1<<29 - 1
	// alone is set if the pool says that no other sandbox has taken the place, and
	// there are references still.
	alone = 1 << 29
	// told is set if the pool takes the place for one that the sandbox has.
	told = 1 << 30
	// queued is set if the place is in dirty.
	queued = 1 << 31
)

// A segment is one of the pool's segments. It is protected by the Client's mu,
// except that num, server and fd never change.
type segment struct {
	num    uint32 // the local number
	server uint32 // the pool's number
	fd     int
	// gone is set if it is retired, or its connection has ended.
	gone bool
	// pins is how many reads of fd without a reference are under way.
	pins int
	// total is the number of references.
	total uint64
	refs  map[uint32]uint32
	// peak is the largest length of refs: a map does not shrink.
	peak int
}

// A place is a unit of a segment.
type place struct {
	s    *segment
	unit uint32
}

func (p place) loc() wire.Loc { return wire.MakeLoc(p.s.server, uint64(p.unit)*wire.Align) }

// An index is the pool's index. It is protected by the Client's mu, except that
// fd and places never change.
type index struct {
	fd     int
	places uint64
	gone   bool
	pins   int
}

// A doomed is a descriptor that nobody uses any more. If it was a segment's, that
// has had the local number num.
type doomed struct {
	fd      int
	segment bool
	num     uint32
}

// pread reads what a file has of b at off. What cannot be read is not there.
func pread(fd int, b []byte, off uint64) (int, error) {
	for {
		n, err := unix.Pread(fd, b, int64(off))
		if err != unix.EINTR {
			return max(n, 0), err
		}
	}
}

// Find implements memfile.Pool. Apart from two preads it takes a few hundred ns,
// and does not allocate.
func (c *Client) Find(key *wire.Key, h *wire.Hash, buf []byte) (memfile.PoolLoc, wire.Record, bool) {
	c.mu.Lock()
	ix := c.index
	if key == nil || c.key.Load() != key || ix == nil {
		c.state.Missed++
		c.mu.Unlock()
		return 0, wire.Record{}, false
	}
	ix.pins++
	c.mu.Unlock()

	n, _ := pread(ix.fd, buf[:wire.ProbeSize], wire.Probe(h, ix.places))
	l, ok := wire.FindSlot(buf[:n], h)

	c.mu.Lock()
	ix.pins--
	c.settleIndex(ix)
	var p place
	if ok {
		p, ok = c.lookup(l)
	}
	if !ok {
		c.state.Missed++
		c.unlock()
		return 0, wire.Record{}, false
	}
	p.s.pins++
	c.unlock()

	n, _ = pread(p.s.fd, buf[:wire.MaxRecord], l.Offset())
	r, err := wire.ParseRecord(buf[:n])

	c.mu.Lock()
	defer c.unlock()
	p.s.pins--
	if err != nil || r.Hash != *h {
		c.state.Missed++
		c.settle(p.s)
		return 0, wire.Record{}, false
	}
	c.state.Found++
	return c.take(p), r, true
}

// Read implements memfile.Pool.
func (c *Client) Read(l memfile.PoolLoc, buf []byte) (wire.Record, error) {
	c.mu.Lock()
	s, unit := c.segment(l), uint32(l%units)
	c.mu.Unlock()
	if s == nil {
		return wire.Record{}, fmt.Errorf("page %#x of the pool: its segment is not open, so nobody has a reference to it", uint64(l))
	}
	// The caller's reference keeps the descriptor open.
	n, err := pread(s.fd, buf[:wire.MaxRecord], uint64(unit)*wire.Align)
	if err != nil {
		return wire.Record{}, fmt.Errorf("page at byte %d of the pool's segment %d: %w", unit*wire.Align, s.server, err)
	}
	r, err := wire.ParseRecord(buf[:n])
	if err != nil {
		return wire.Record{}, fmt.Errorf("page at byte %d of the pool's segment %d: %w", unit*wire.Align, s.server, err)
	}
	return r, nil
}

// Ref implements memfile.Pool. It panics if the location's segment is not open,
// so that nobody can have a reference to it.
func (c *Client) Ref(l memfile.PoolLoc) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.segment(l)
	if s == nil {
		panic(fmt.Sprintf("reference to page %#x of the pool, whose segment is not open", uint64(l)))
	}
	c.take(place{s, uint32(l % units)})
}

// Unref implements memfile.Pool. It panics if the location has no reference.
func (c *Client) Unref(l memfile.PoolLoc) {
	c.mu.Lock()
	defer c.unlock()
	c.give(l)
}

// Stale implements memfile.Pool.
func (c *Client) Stale(l memfile.PoolLoc) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.segment(l)
	return c.live && s != nil && (s.gone || s.refs[uint32(l%units)]&alone != 0)
}

// markAlone notes that no other sandbox has taken a place.
//
// Preconditions: c.mu is held.
func (c *Client) markAlone(l wire.Loc) {
	if p, ok := c.lookup(l); ok {
		if e := p.s.refs[p.unit]; e&counts != 0 && e&alone == 0 {
			c.alone++
			p.s.refs[p.unit] = e | alone
		}
	}
}

// segment returns the open segment that a location is in, or nil.
//
// Preconditions: c.mu is held.
func (c *Client) segment(l memfile.PoolLoc) *segment {
	if n := l >> unitBits; n < memfile.PoolLoc(len(c.segments)) {
		return c.segments[n]
	}
	return nil
}

// lookup returns the place that the pool calls l, if there is one.
//
// Preconditions: c.mu is held.
func (c *Client) lookup(l wire.Loc) (place, bool) {
	s, unit := c.byNumber[l.Segment()], uint32(l)
	if s == nil || unit >= units {
		return place{}, false
	}
	return place{s, unit}, true
}

// take takes a reference to a place.
//
// Preconditions: c.mu is held; p.s is open.
func (c *Client) take(p place) memfile.PoolLoc {
	if p.s.gone && p.s.total == 0 {
		c.stale++
	}
	p.s.total++
	c.put(p, p.s.refs[p.unit]+1)
	return memfile.PoolLoc(p.s.num)<<unitBits | memfile.PoolLoc(p.unit)
}

// give gives up a reference.
//
// Preconditions: c.mu is held, and released by c.unlock.
func (c *Client) give(l memfile.PoolLoc) {
	p := place{c.segment(l), uint32(l % units)}
	var e uint32
	if p.s != nil {
		e = p.s.refs[p.unit]
	}
	if e&counts == 0 {
		panic(fmt.Sprintf("page %#x of the pool has no reference to give up", uint64(l)))
	}
	p.s.total--
	if p.s.gone && p.s.total == 0 {
		c.stale--
	}
	c.put(p, e-1)
	c.settle(p.s)
}

// put writes what the map has for a place, and queues the place if the pool is to
// be told.
//
// Preconditions: c.mu is held; p.s is open.
func (c *Client) put(p place, e uint32) {
	s := p.s
	if e&alone != 0 && e&counts == 0 {
		e &^= alone
		c.alone--
	}
	if !s.gone && (e&counts != 0) != (e&told != 0) && e&queued == 0 {
		e |= queued
		c.dirty = append(c.dirty, memfile.PoolLoc(s.num)<<unitBits|memfile.PoolLoc(p.unit))
	}
	if e == 0 || s.gone && e&counts == 0 {
		delete(s.refs, p.unit)
		if len(s.refs) == 0 {
			c.places -= s.peak
			s.refs, s.peak = nil, 0
		}
		return
	}
	if s.refs == nil {
		s.refs = make(map[uint32]uint32)
	}
	s.refs[p.unit] = e
	if len(s.refs) > s.peak {
		s.peak++
		c.places++
	}
}

// addSegment enters a segment that the pool has announced.
//
// Preconditions: c.mu is held.
func (c *Client) addSegment(server uint32, fd int) error {
	if c.byNumber[server] != nil {
		return fmt.Errorf("segment %d is announced twice", server)
	}
	if c.open >= maxSegments {
		return fmt.Errorf("segment %d is one more than %d", server, maxSegments)
	}
	s := &segment{server: server, fd: fd}
	if n := len(c.free); n > 0 {
		s.num = c.free[n-1]
		c.free = c.free[:n-1]
	} else {
		s.num = uint32(len(c.segments))
		c.segments = append(c.segments, nil)
	}
	c.segments[s.num] = s
	c.byNumber[server] = s
	c.open++
	return nil
}

// forget has a segment gone.
//
// Preconditions: c.mu is held, and released by c.unlock.
func (c *Client) forget(s *segment) {
	s.gone = true
	c.forgotten.Add(1)
	delete(c.byNumber, s.server)
	if s.total > 0 {
		c.stale++
	}
	c.settle(s)
}

// settle dooms a segment that is gone and that nobody uses.
//
// Preconditions: c.mu is held, and released by c.unlock; s is open.
func (c *Client) settle(s *segment) {
	if !s.gone || s.total > 0 || s.pins > 0 {
		return
	}
	c.segments[s.num] = nil
	c.places -= s.peak
	c.doomed = append(c.doomed, doomed{fd: s.fd, segment: true, num: s.num})
}

// dropIndex gives up the index.
//
// Preconditions: c.mu is held, and released by c.unlock.
func (c *Client) dropIndex() {
	if ix := c.index; ix != nil {
		c.index = nil
		ix.gone = true
		c.settleIndex(ix)
	}
}

// settleIndex dooms an index that was given up and that nobody reads.
//
// Preconditions: c.mu is held, and released by c.unlock.
func (c *Client) settleIndex(ix *index) {
	if ix.gone && ix.pins == 0 {
		c.doomed = append(c.doomed, doomed{fd: ix.fd})
	}
}
