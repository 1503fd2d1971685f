package arena

import (
	"fmt"
	"math/bits"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// segment is a mapping: the pages of slabs and, behind them, the bookkeeping.
// All bookkeeping of an empty segment is zero, so that it starts right and can
// be given back with the pages.
type segment struct {
	index   int
	mapping []byte
	data    []byte

	// Of the fields below, the slices are in the mapping. pagesMu guards
	// everything but the slabs' content and reads of the page map.

	// usedPages and usedSlabs are bitmaps of pages in slabs and of entries of
	// slabs in use.
	usedPages *[segmentPages / 64]uint64
	usedSlabs *[segmentPages / 64]uint64
	// pageMap says which slab a page belongs to; see entry.
	pageMap *[segmentPages]atomic.Uint32
	slabs   *[segmentPages]slab

	freePages int
	// noRun is the shortest run of pages known not to be there, to keep full
	// segments from being searched for every slab.
	noRun int
	// slabsTouched and pagesTouched are the entries of slabs and of pageMap
	// that may be backed by memory: all before them.
	slabsTouched int
	pagesTouched int
}

// slab is the bookkeeping of a slab. A slab in use belongs to its class, whose
// mutex guards it; alloc is also read without.
type slab struct {
	// alloc has a bit for every slot in use; in a packed slab it is packedFill and
	// packedLive.
	alloc [maxSlots / 64]atomic.Uint64
	// next and prev link the slabs of a fullness group.
	next, prev slabRef
	page       uint16 // the first one in the segment
	used       uint8  // slots
	class      uint8
}

// Pages and entries of slabs are taken lowest first. So that the bookkeeping of a
// segment that has few takes one page, the page map is there backwards, the bitmaps
// follow its end and the slabs follow these: what is touched is one range, and its
// middle is in one page with 3/8 of a page on both sides of the bitmaps.
const (
	pageMapOffset = segmentSize + 3*pageSize/8
	bitmapsOffset = pageMapOffset + segmentPages*4
	slabsOffset   = bitmapsOffset + 2*segmentPages/8
	mappingSize   = (slabsOffset + segmentPages*int(unsafe.Sizeof(slab{})) + pageSize - 1) / pageSize * pageSize
)

// entry returns a page's entry of the page map.
func (seg *segment) entry(page int) *atomic.Uint32 { return &seg.pageMap[segmentPages-1-page] }

// slabRef names a slab in the arena; 0 is none.
type slabRef uint32

func makeRef(segment, slab int) slabRef { return slabRef(segment*segmentPages+slab) + 1 }

func (r slabRef) segment() int { return int(r-1) / segmentPages }
func (r slabRef) index() int   { return int(r-1) % segmentPages }

// pageEntry is an entry of a page map: bits 0-2 the page's number in its slab,
// 3-14 the slab's number in the segment, 16-23 the class, 31 set. It says all
// that a reader without a lock needs, in one atomic word.
type pageEntry uint32

func makePageEntry(pageInSlab, slab int, class uint8) pageEntry {
	return pageEntry(pageInSlab) | pageEntry(slab)<<3 | pageEntry(class)<<16 | 1<<31
}

func (e pageEntry) valid() bool        { return e>>31 == 1 }
func (e pageEntry) pageInSlab() uint32 { return uint32(e & 7) }
func (e pageEntry) slab() int          { return int(e >> 3 & (segmentPages - 1)) }
func (e pageEntry) class() uint8       { return uint8(e >> 16) }

// mapMemory is a variable so that tests can make it fail.
var mapMemory = unix.Mmap

func newSegment(index int) (*segment, error) {
	mapping, err := mapMemory(-1, 0, mappingSize, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return nil, fmt.Errorf("%w: mmap: %v", ErrNoMemory, err)
	}
	// A kernel without huge pages refuses, which is as well.
	_ = unix.Madvise(mapping, unix.MADV_NOHUGEPAGE)
	return &segment{
		index:     index,
		mapping:   mapping,
		data:      mapping[:segmentSize:segmentSize],
		usedPages: (*[segmentPages / 64]uint64)(unsafe.Pointer(&mapping[bitmapsOffset])),
		usedSlabs: (*[segmentPages / 64]uint64)(unsafe.Pointer(&mapping[bitmapsOffset+segmentPages/8])),
		pageMap:   (*[segmentPages]atomic.Uint32)(unsafe.Pointer(&mapping[pageMapOffset])),
		slabs:     (*[segmentPages]slab)(unsafe.Pointer(&mapping[slabsOffset])),
		freePages: segmentPages,
		noRun:     maxSlabPages + 1,
	}, nil
}

func (seg *segment) handle(offset int) Handle {
	return Handle(uint64(seg.index+1)*segmentUnits + uint64(offset>>unitShift))
}

func (seg *segment) metadataBytes() uint64 {
	n := uint64(unsafe.Sizeof(*seg))
	if seg.pagesTouched > 0 {
		begin := (bitmapsOffset - seg.pagesTouched*4) / pageSize * pageSize
		n += roundPage(slabsOffset + seg.slabsTouched*int(unsafe.Sizeof(slab{})) - begin)
	}
	return n
}

func roundPage(n int) uint64 { return uint64(n+pageSize-1) / pageSize * pageSize }

// takePages finds and marks a run of pages, lowest first so that segments stay
// dense at the bottom. A run does not cross a multiple of 64.
func (seg *segment) takePages(n int) (page int, ok bool) {
	if n > seg.freePages || n >= seg.noRun {
		return 0, false
	}
	for w, used := range seg.usedPages {
		// Leave the bits at which n free pages begin.
		runs := ^used
		for i := 1; i < n; i++ {
			runs &= ^used >> i
		}
		if runs != 0 {
			bit := bits.TrailingZeros64(runs)
			seg.usedPages[w] |= (1<<n - 1) << bit
			seg.freePages -= n
			page = w*64 + bit
			seg.pagesTouched = max(seg.pagesTouched, page+n)
			return page, true
		}
	}
	seg.noRun = n
	return 0, false
}

func (seg *segment) givePages(page, n int) {
	seg.usedPages[page/64] &^= (1<<n - 1) << (page % 64)
	seg.freePages += n
	seg.noRun = maxSlabPages + 1
}

// takeSlab finds and marks an unused entry of slabs. There is one as long as
// there are free pages.
func (seg *segment) takeSlab() int {
	for w, used := range seg.usedSlabs {
		if ^used != 0 {
			bit := bits.TrailingZeros64(^used)
			seg.usedSlabs[w] |= 1 << bit
			seg.slabsTouched = max(seg.slabsTouched, w*64+bit+1)
			return w*64 + bit
		}
	}
	panic("arena: more slabs than pages in a segment")
}

// reserve is how many pages of the limit only packed slabs get, less than 1 %: what is
// freed in packed slabs is not given out again, and to run them empty takes another.
func (a *Arena) reserve() uint64 {
	if a.maxPages/packedPages < 128 {
		return 0
	}
	return packedPages
}

// hold counts pages that slabs of a class are about to use. pagesMu is held.
func (a *Arena) hold(pages int, ci uint8) error {
	if a.closed {
		return ErrClosed
	}
	limit := a.maxPages
	if ci != packedClass {
		limit -= a.reserve()
	}
	if a.heldPages+uint64(pages) > limit {
		return fmt.Errorf("%w: %d of %d bytes are taken", ErrFull, a.heldPages*pageSize, a.maxPages*pageSize)
	}
	a.heldPages += uint64(pages)
	return nil
}

// newSlab takes pages for a slab, of which it counts some as held, and makes it one
// of class ci, empty and in no list. The class's lock is held.
func (a *Arena) newSlab(ci uint8, held int) (slabRef, error) {
	geo := &geometry[ci]
	pages := int(geo.pages)
	a.pagesMu.Lock()
	defer a.pagesMu.Unlock()
	if err := a.hold(held, ci); err != nil {
		return 0, err
	}
	seg, page, err := a.findPages(pages)
	if err != nil {
		a.heldPages -= uint64(held)
		return 0, err
	}
	index := seg.takeSlab()
	s := &seg.slabs[index]
	if s.used != 0 || !s.unused() {
		panic(fmt.Sprintf("arena: entry %d of segment %d was given up with blobs in it", index, seg.index))
	}
	s.page, s.class, s.next, s.prev = uint16(page), ci, 0, 0
	for i := range pages {
		seg.entry(page + i).Store(uint32(makePageEntry(i, index, ci)))
	}
	return makeRef(seg.index, index), nil
}

func (a *Arena) findPages(n int) (*segment, int, error) {
	segments := *a.segments.Load()
	for _, seg := range segments {
		if page, ok := seg.takePages(n); ok {
			return seg, page, nil
		}
	}
	if len(segments) >= maxSegments {
		return nil, 0, fmt.Errorf("%w: all handles are in use", ErrNoMemory)
	}
	seg, err := newSegment(len(segments))
	if err != nil {
		return nil, 0, err
	}
	grown := make([]*segment, len(segments)+1)
	copy(grown, segments)
	grown[len(segments)] = seg
	a.segments.Store(&grown)
	page, ok := seg.takePages(n)
	if !ok {
		panic("arena: a new segment has no room")
	}
	return seg, page, nil
}

// releaseSlab gives the pages of an empty slab, which is in no list and has held
// some of them, back to the host. The class's lock is held.
func (a *Arena) releaseSlab(ref slabRef, held int) {
	seg, s := a.slab(ref)
	page, pages := int(s.page), int(geometry[s.class].pages)
	// Before the pages can be had by others, but not under pagesMu.
	dontNeed(seg.data[page*pageSize : (page+pages)*pageSize])

	a.pagesMu.Lock()
	defer a.pagesMu.Unlock()
	for i := range pages {
		seg.entry(page + i).Store(0)
	}
	index := ref.index()
	seg.usedSlabs[index/64] &^= 1 << (index % 64)
	seg.givePages(page, pages)
	a.heldPages -= uint64(held)
	if seg.freePages == segmentPages {
		// No slab is left, so no lock but this one guards anything here.
		dontNeed(seg.mapping[segmentSize:])
		seg.slabsTouched, seg.pagesTouched = 0, 0
	}
}

// dontNeed gives memory back to the host; it reads as zero afterwards.
func dontNeed(b []byte) {
	if err := unix.Madvise(b, unix.MADV_DONTNEED); err != nil {
		// The range is mapped and aligned, so this does not happen; going on
		// with accounts that are not true would be worse than to stop.
		panic(fmt.Sprintf("arena: madvise(DONTNEED): %v", err))
	}
}

func (a *Arena) slab(ref slabRef) (*segment, *slab) {
	seg := (*a.segments.Load())[ref.segment()]
	return seg, &seg.slabs[ref.index()]
}

// group is the fullness group of a slab that is neither empty nor full.
func group(used uint8, geo *classGeometry) int {
	return int(used) * fullnessGroups / int(geo.slots)
}

// link puts a slab into its list: in front, where Alloc takes from, or second,
// so that a slab that is running empty is not the next to be filled.
func (a *Arena) link(c *class, geo *classGeometry, ref slabRef, front bool) {
	_, s := a.slab(ref)
	g := group(s.used, geo)
	s.prev, s.next = 0, c.groups[g]
	if s.next != 0 && !front {
		_, first := a.slab(s.next)
		s.prev, s.next = s.next, first.next
		first.next = ref
	} else {
		c.groups[g] = ref
		c.filled |= 1 << g
	}
	if s.next != 0 {
		_, next := a.slab(s.next)
		next.prev = ref
	}
}

// unlink takes a slab out of its list; its fill must still be what it was when
// it was linked.
func (a *Arena) unlink(c *class, geo *classGeometry, ref slabRef) {
	_, s := a.slab(ref)
	if s.next != 0 {
		_, next := a.slab(s.next)
		next.prev = s.prev
	}
	if s.prev != 0 {
		_, prev := a.slab(s.prev)
		prev.next = s.next
	} else {
		g := group(s.used, geo)
		if c.groups[g] != ref {
			panic(fmt.Sprintf("arena: slab %#x is not where its fill says", uint32(ref)))
		}
		c.groups[g] = s.next
		if s.next == 0 {
			c.filled &^= 1 << g
		}
	}
	s.next, s.prev = 0, 0
}

func (s *slab) allocated(slot int) bool { return s.alloc[slot/64].Load()>>(slot%64)&1 == 1 }

func (s *slab) unused() bool {
	for i := range s.alloc {
		if s.alloc[i].Load() != 0 {
			return false
		}
	}
	return true
}

// firstFree returns a free slot, or one past the last slot that exists.
func (s *slab) firstFree() int {
	for i := range s.alloc {
		if free := ^s.alloc[i].Load(); free != 0 {
			return i*64 + bits.TrailingZeros64(free)
		}
	}
	return maxSlots
}

// set and clear mark a slot. Only the holder of the class's lock writes, so
// load and store need not be one step.
func (s *slab) set(slot int) {
	s.alloc[slot/64].Store(s.alloc[slot/64].Load() | 1<<(slot%64))
}

func (s *slab) clear(slot int) {
	s.alloc[slot/64].Store(s.alloc[slot/64].Load() &^ (1 << (slot % 64)))
}

// setLength records in a slot that its blob has n bytes, less than the slot.
// The last byte says how many bytes are left over, itself included, up to 127;
// beyond that it has its top bit set and is the high part of the number, and
// the byte before it the low part.
func setLength(mem []byte, n int) {
	last := len(mem) - 1
	if left := len(mem) - n; left < 0x80 {
		mem[last] = byte(left)
	} else {
		mem[last] = 0x80 | byte(left>>8)
		mem[last-1] = byte(left)
	}
}

// length returns the length of the blob in a used slot.
func length(mem []byte) (int, error) {
	last := len(mem) - 1
	left := int(mem[last])
	if left >= 0x80 {
		left = left&0x7f<<8 | int(mem[last-1])
		if left < 0x80 {
			left = 0
		}
	}
	if left < 1 || left >= len(mem) {
		return 0, fmt.Errorf("%w: its length was overwritten: %d of %d bytes left over", ErrCorrupt, left, len(mem))
	}
	return len(mem) - left, nil
}

// poison makes the use of freed or not yet written blobs visible.
func poison(mem []byte) {
	for i := range mem {
		mem[i] = 0xdb
	}
}
