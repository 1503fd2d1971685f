package arena

import (
	"errors"
	"fmt"
)

// maxReports limits what Check lists of one kind.
const maxReports = 10

// Check compares everything the arena knows twice, and, if live is not nil,
// the blobs it holds with those the caller knows of: live yields every handle
// in use with its blob's length. It returns all differences found, or nil.
//
// live is called before the arena takes any lock, so it may use the arena.
// For the comparison to mean something, no Alloc or Free may run from then
// until Check returns, which is for the caller to ensure; with a nil live,
// Check may run at any time and holds up others while it does.
func (a *Arena) Check(live func(yield func(Handle, int) bool)) error {
	var r report
	type use struct {
		handle Handle
		n      int
	}
	var uses []use
	if live != nil {
		live(func(h Handle, n int) bool {
			uses = append(uses, use{h, n})
			return true
		})
	}

	for i := range numClasses {
		a.classes[i].mu.Lock()
		defer a.classes[i].mu.Unlock()
	}
	a.pagesMu.Lock()
	defer a.pagesMu.Unlock()

	segments := *a.segments.Load()
	linked := a.checkLists(&r)
	var totals [maxClasses]class
	var heldPages uint64
	for i, seg := range segments {
		if seg.index != i {
			r.add("segment %d says it is %d", i, seg.index)
		}
		heldPages += a.checkSegment(&r, seg, linked, &totals)
	}
	if heldPages != a.heldPages {
		r.add("slabs have %d pages, the counter says %d", heldPages, a.heldPages)
	}
	if heldPages > a.maxPages {
		r.add("slabs have %d pages, the limit is %d", heldPages, a.maxPages)
	}
	for ref := range linked {
		r.add("slab %#x is listed but not in use", uint32(ref))
	}
	blobs := uint64(0)
	for i := range numClasses {
		c, got := &a.classes[i], &totals[i]
		if c.slabs != got.slabs || c.blobs != got.blobs || c.bytes != got.bytes {
			r.add("class %d has %d slabs, %d blobs, %d bytes; the counters say %d, %d, %d",
				i, got.slabs, got.blobs, got.bytes, c.slabs, c.blobs, c.bytes)
		}
		blobs += got.blobs
	}
	if live == nil {
		return r.err()
	}

	// Every live handle must name a blob, none twice, and there must be no
	// blobs beside them.
	known := make(map[int][]uint64) // per segment, a bit per unit
	distinct := uint64(0)
	for _, u := range uses {
		p, err := a.resolve(u.handle)
		if err != nil {
			r.add("live blob: %v", err)
			continue
		}
		if n, err := length(p.mem); err != nil || n != u.n {
			r.add("live blob %#x has %d bytes, should have %d (%v)", uint64(u.handle), n, u.n, err)
		}
		index := p.ref.segment()
		if known[index] == nil {
			known[index] = make([]uint64, segmentUnits/64)
		}
		unit := uint64(u.handle) % segmentUnits
		if known[index][unit/64]>>(unit%64)&1 == 1 {
			r.add("handle %#x is live twice", uint64(u.handle))
			continue
		}
		known[index][unit/64] |= 1 << (unit % 64)
		distinct++
	}
	if distinct == blobs {
		return r.err()
	}
	r.add("%d live handles, but %d blobs", distinct, blobs)
	for i, seg := range segments {
		seg.each(func(offset, _ int) {
			unit := offset >> unitShift
			if known[i] == nil || known[i][unit/64]>>(unit%64)&1 == 0 {
				r.add("blob %#x is leaked", uint64(seg.handle(offset)))
			}
		})
	}
	return r.err()
}

// report collects differences.
type report struct {
	errs    []error
	omitted int
}

func (r *report) add(format string, args ...any) {
	if len(r.errs) >= maxReports {
		r.omitted++
		return
	}
	r.errs = append(r.errs, fmt.Errorf("arena: "+format, args...))
}

func (r *report) err() error {
	if r.omitted > 0 {
		r.errs = append(r.errs, fmt.Errorf("arena: and %d more", r.omitted))
	}
	return errors.Join(r.errs...)
}

// checkLists walks the fullness groups and returns the slabs found with the
// class and group they are listed in.
func (a *Arena) checkLists(r *report) map[slabRef][2]int {
	linked := make(map[slabRef][2]int)
	segments := *a.segments.Load()
	for ci := range numClasses {
		c := &a.classes[ci]
		for g, head := range c.groups {
			if (head != 0) != (c.filled>>g&1 == 1) {
				r.add("class %d: group %d begins with slab %#x, the mask says %08b", ci, g, uint32(head), c.filled)
			}
			for prev, ref := slabRef(0), head; ref != 0; {
				if ref.segment() >= len(segments) {
					r.add("class %d: group %d lists slab %#x, which does not exist", ci, g, uint32(ref))
					break
				}
				if _, ok := linked[ref]; ok {
					r.add("class %d: group %d lists slab %#x, which is listed already", ci, g, uint32(ref))
					break
				}
				linked[ref] = [2]int{ci, g}
				_, s := a.slab(ref)
				if s.prev != prev {
					r.add("slab %#x comes after %#x but says %#x", uint32(ref), uint32(prev), uint32(s.prev))
				}
				prev, ref = ref, s.next
			}
		}
	}
	return linked
}

// checkSegment checks the slabs of a segment, strikes them off linked, adds
// what they hold to totals and returns how many pages they have.
func (a *Arena) checkSegment(r *report, seg *segment, linked map[slabRef][2]int, totals *[maxClasses]class) (held uint64) {
	var pages [segmentPages / 64]uint64
	var entries [segmentPages]pageEntry
	for index := range segmentPages {
		s := &seg.slabs[index]
		if seg.usedSlabs[index/64]>>(index%64)&1 == 0 {
			if index < seg.slabsTouched && !s.unused() {
				r.add("entry %d of segment %d is not in use but has blobs", index, seg.index)
			}
			continue
		}
		ref := makeRef(seg.index, index)
		if int(s.class) >= numClasses {
			r.add("slab %#x is of class %d", uint32(ref), s.class)
			continue
		}
		geo := &geometry[s.class]
		n := int(geo.pages)
		if int(s.page)+n > segmentPages || int(s.page)%64+n > 64 || index >= seg.slabsTouched || int(s.page)+n > seg.pagesTouched {
			r.add("slab %#x has pages %d to %d", uint32(ref), s.page, int(s.page)+n)
			continue
		}
		for i := range n {
			page := int(s.page) + i
			if pages[page/64]>>(page%64)&1 == 1 {
				r.add("page %d of segment %d is in two slabs", page, seg.index)
			}
			pages[page/64] |= 1 << (page % 64)
			entries[page] = makePageEntry(i, index, s.class)
		}
		held += uint64(n)

		t := &totals[s.class]
		t.slabs++
		used := uint8(0)
		for slot := range maxSlots {
			if !s.allocated(slot) {
				continue
			}
			used++
			if slot >= int(geo.slots) {
				r.add("slab %#x: slot %d of %d is in use", uint32(ref), slot, geo.slots)
				continue
			}
			begin := int(s.page)*pageSize + slot*int(geo.size)
			n, err := length(seg.data[begin : begin+int(geo.size)])
			if err != nil || n > MaxBlob || classOf(n) != s.class {
				r.add("slab %#x of class %d: slot %d has length %d (%v)", uint32(ref), s.class, slot, n, err)
			}
			t.blobs++
			t.bytes += uint64(n)
		}
		if used != s.used || used == 0 {
			r.add("slab %#x has %d blobs and says %d", uint32(ref), used, s.used)
		}
		where, ok := linked[ref]
		delete(linked, ref)
		switch {
		case s.used == geo.slots || s.used == 0:
			if ok || s.next != 0 || s.prev != 0 {
				r.add("slab %#x with %d blobs of %d is listed", uint32(ref), s.used, geo.slots)
			}
		case !ok || where != [2]int{int(s.class), group(s.used, geo)}:
			r.add("slab %#x with %d blobs of %d is listed in %v (%v)", uint32(ref), s.used, geo.slots, where, ok)
		}
	}
	if held != uint64(segmentPages-seg.freePages) {
		r.add("segment %d has %d free pages and %d in slabs", seg.index, seg.freePages, held)
	}
	for page := range segmentPages {
		if e := pageEntry(seg.pageMap[page].Load()); e != entries[page] {
			r.add("page %d of segment %d is mapped to %#x, should be %#x", page, seg.index, uint32(e), uint32(entries[page]))
		}
	}
	if pages != *seg.usedPages {
		r.add("segment %d: the bitmap of pages does not agree with the slabs", seg.index)
	}
	return held
}

// each calls f for every blob of a segment with its offset and its slot's size.
func (seg *segment) each(f func(offset, size int)) {
	for index := range seg.slabsTouched {
		if seg.usedSlabs[index/64]>>(index%64)&1 == 0 {
			continue
		}
		s := &seg.slabs[index]
		geo := &geometry[s.class]
		for slot := range int(geo.slots) {
			if s.allocated(slot) {
				f(int(s.page)*pageSize+slot*int(geo.size), int(geo.size))
			}
		}
	}
}
