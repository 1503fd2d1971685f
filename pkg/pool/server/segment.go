package server

import (
	"errors"
	"fmt"
	"slices"
	"sort"
	"time"

	"golang.org/x/sys/unix"

	"runsc-agentzip/pkg/pool/wire"
)

// pageRound is what memory is taken in, in bytes.
const pageRound = 4096

func roundUp(n uint64) uint64 { return (n + pageRound - 1) &^ (pageRound - 1) }

// A rec is what the pool knows of a record beside the record itself.
type rec struct {
	// unit is the record's offset, in units of wire.Align.
	unit uint32
	// refs is the number of connections that have a reference.
	refs uint32
	// last is when the record was last used, while refs is 0, or later to keep
	// it for longer; while refs is 1, since when it is, or later if the connection
	// was told.
	last stamp
}

// A segment holds records, in the order of their offsets.
type segment struct {
	*memory
	num uint32
	// used is the size of the records, in units of wire.Align.
	used uint32
	recs []rec
	// referenced is the size of those with references, in bytes.
	referenced uint64
	// alone is the number of records with one reference, aloneAt when the first of
	// them may be due for being told of.
	alone   int
	aloneAt stamp
}

func (g *segment) usedBytes() uint64 { return uint64(g.used) * wire.Align }

// held is the memory behind the segment, in bytes.
func (g *segment) held() uint64 { return roundUp(g.usedBytes()) }

// size is that of record i, in bytes.
func (g *segment) size(i int) uint64 {
	end := g.used
	if i+1 < len(g.recs) {
		end = g.recs[i+1].unit
	}
	return uint64(end-g.recs[i].unit) * wire.Align
}

func (g *segment) loc(i int) wire.Loc {
	return wire.MakeLoc(g.num, uint64(g.recs[i].unit)*wire.Align)
}

// bytes returns record i.
func (g *segment) bytes(i int) []byte {
	off := uint64(g.recs[i].unit) * wire.Align
	return g.mem[off : off+g.size(i)]
}

func (g *segment) hash(i int) *wire.Hash {
	return (*wire.Hash)(g.mem[uint64(g.recs[i].unit)*wire.Align:])
}

// find returns the record at a location in the segment, or -1.
func (g *segment) find(l wire.Loc) int {
	unit := uint32(l)
	i := sort.Search(len(g.recs), func(i int) bool { return g.recs[i].unit >= unit })
	if i == len(g.recs) || g.recs[i].unit != unit {
		return -1
	}
	return i
}

// alive is the size of the records with a reference, or used after since, in
// bytes.
func (g *segment) alive(since stamp) uint64 {
	n := g.referenced
	if n == g.usedBytes() {
		return n
	}
	for i := range g.recs {
		if g.recs[i].lives(since) && g.recs[i].refs == 0 {
			n += g.size(i)
		}
	}
	return n
}

func (r *rec) lives(since stamp) bool { return r.refs > 0 || r.last > since }

// openSegment returns the segment with room for so many bytes that records are
// appended to. domain.mu must be held.
func (d *domain) openSegment(size uint64) (*segment, error) {
	if d.open != nil && d.open.usedBytes()+size <= wire.SegmentSize {
		return d.open, nil
	}
	d.closeSegment()
	m, err := newMemory("agentzip-pool-segment", wire.SegmentSize, true)
	if err != nil {
		return nil, err
	}
	d.open = &segment{memory: m, num: d.next}
	d.next++
	d.segs[d.open.num] = d.open
	p := d.open.announcement()
	for _, c := range d.conns {
		c.push(packet{p, d.open.file}, true)
	}
	return d.open, nil
}

func (g *segment) announcement() []byte {
	var w wire.Writer
	w.Begin(wire.Segment, g.num)
	return slices.Clone(w.Bytes())
}

// closeSegment ends appending to the open segment, if there is one. domain.mu
// must be held.
func (d *domain) closeSegment() {
	g := d.open
	if g == nil {
		return
	}
	d.open = nil
	g.recs = slices.Clip(slices.Clone(g.recs))
	w, err := g.finish()
	if err != nil {
		d.s.log("pool: segment %d of domain %s stays writable for the pool: %v", g.num, d.name, err)
		return
	}
	// The kernel waits here for pages that somebody has pinned.
	num := g.num
	d.s.wg.Add(1)
	go func() {
		defer d.s.wg.Done()
		defer unix.Close(w)
		var err error
		for i := range 5 {
			if _, err = unix.FcntlInt(uintptr(w), unix.F_ADD_SEALS, unix.F_SEAL_WRITE|unix.F_SEAL_SEAL); err != unix.EBUSY {
				break
			}
			time.Sleep(time.Duration(i) * 50 * time.Millisecond)
		}
		if err != nil {
			// F_SEAL_FUTURE_WRITE holds, and there is no writable mapping.
			d.s.log("pool: segment %d of domain %s is not sealed for good: %v", num, d.name, err)
		}
	}()
}

// room takes size bytes of the open segment for a record that was last used at
// last. The caller writes its bytes to what room returns. domain.mu must be held.
func (d *domain) room(size uint64, last stamp) (*segment, []byte, error) {
	g, err := d.openSegment(size)
	if err != nil {
		return nil, nil, err
	}
	before := g.held()
	off := g.usedBytes()
	g.recs = append(g.recs, rec{unit: g.used, last: last})
	g.used += uint32(size / wire.Align)
	d.records++
	d.recordBytes += size
	d.hold(int64(g.held() - before))
	return g, g.mem[off : off+size], nil
}

// An index is the domain's hash table. See package wire.
type index struct {
	*memory
	places uint64
	// n is the number of slots in use.
	n uint64
}

const (
	// minPlaces makes the smallest index, 4 KiB.
	minPlaces = 1<<8 - wire.MaxProbe + 1
	// sparse: an index grows only if more than 1/sparse of it is in use.
	// Otherwise somebody chooses pages so that their hashes collide: by chance
	// that happens to one page in 10 million.
	sparse = 16
)

func newIndex(places uint64) (*index, error) {
	m, err := newMemory("agentzip-pool-index", wire.IndexSize(places), false)
	if err != nil {
		return nil, err
	}
	return &index{memory: m, places: places}, nil
}

func (x *index) slots(h *wire.Hash) []byte {
	off := wire.Probe(h, x.places)
	return x.mem[off : off+wire.ProbeSize]
}

// hasRoom tells whether a hash that is not in the index can be entered.
func (x *index) hasRoom(h *wire.Hash) bool {
	var free wire.Hash
	for s := x.slots(h); len(s) > 0; s = s[wire.SlotSize:] {
		if [8]byte(s[:8]) == [8]byte(free[:8]) {
			return true
		}
	}
	return false
}

// errCrowded tells that the pages in an index, entered in another order, do not
// find room in a new one.
var errCrowded = errors.New("no room for the pages in use")

// resize makes an index with so many places and enters everything.
// domain.mu must be held.
func (d *domain) resize(places uint64) error {
	x, err := newIndex(places)
	if err != nil {
		return err
	}
	for _, g := range d.segs {
		for i := range g.recs {
			h := g.hash(i)
			if l, ok := wire.FindSlot(d.index.slots(h), h); !ok || l != g.loc(i) {
				continue
			}
			if !wire.PutSlot(x.slots(h), h, g.loc(i)) {
				x.free()
				return errCrowded
			}
			x.n++
		}
	}
	d.hold(int64(len(x.mem)) - int64(len(d.index.mem)))
	d.index.free()
	d.index = x
	p := x.announcement()
	for _, c := range d.conns {
		c.push(packet{p, x.file}, true)
	}
	return nil
}

func (x *index) announcement() []byte {
	var w wire.Writer
	w.Begin(wire.Index, 0)
	w.Uint64(x.places)
	return slices.Clone(w.Bytes())
}

// grow makes room in the index for a hash. domain.mu must be held.
func (d *domain) grow(h *wire.Hash) error {
	for places := d.index.places; !d.index.hasRoom(h); {
		if d.index.n*sparse < places {
			return fmt.Errorf("no room in the index with %d of %d places in use", d.index.n, d.index.places)
		}
		places = 2*(places+wire.MaxProbe-1) - wire.MaxProbe + 1
		if d.over(wire.IndexSize(places) - uint64(len(d.index.mem))) {
			return fmt.Errorf("an index of %d bytes is over the limit", wire.IndexSize(places))
		}
		// Twice the places are too few for one in 4000 indexes that fill up
		// (simulated): the order in which pages are entered matters.
		if err := d.resize(places); err != nil && err != errCrowded {
			d.s.log("pool: index of domain %s: %v", d.name, err)
			return err
		}
	}
	return nil
}

// lookup finds a published page. taken is set if the index has no place for the
// hash because that is taken by another that begins with the same bytes.
// domain.mu must be held.
func (d *domain) lookup(h *wire.Hash) (g *segment, i int, taken bool) {
	l, ok := wire.FindSlot(d.index.slots(h), h)
	if !ok {
		return nil, -1, false
	}
	if g = d.segs[l.Segment()]; g != nil {
		if i = g.find(l); i >= 0 && *g.hash(i) == *h {
			return g, i, false
		}
	}
	return nil, -1, true
}
