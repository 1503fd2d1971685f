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
	a.packed.mu.Lock()
	defer a.packed.mu.Unlock()
	a.pagesMu.Lock()
	defer a.pagesMu.Unlock()

	segments := *a.segments.Load()
	linked := a.checkLists(&r)
	var totals [maxClasses]class
	var packed packingState
	var heldPages uint64
	for i, seg := range segments {
		if seg.index != i {
			r.add("segment %d says it is %d", i, seg.index)
		}
		heldPages += a.checkSegment(&r, seg, linked, &totals, &packed)
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
	packed.list, packed.open = a.packed.list, a.packed.open
	if packed != a.packed.packingState {
		r.add("packed slabs are %+v, the counters say %+v", packed, a.packed.packingState)
	}
	for _, ref := range packed.open {
		if ref != 0 && !a.isPacked(ref) {
			r.add("slab %#x is open but not packed", uint32(ref))
		}
	}
	blobs += packed.blobs
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
		if b, err := p.blob(); err != nil || len(b) != u.n {
			r.add("live blob %#x has %d bytes, should have %d (%v)", uint64(u.handle), len(b), u.n, err)
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
	for prev, ref := slabRef(0), a.packed.list; ref != 0; {
		if ref.segment() >= len(segments) {
			r.add("slab %#x is listed as packed, but does not exist", uint32(ref))
			break
		}
		if _, ok := linked[ref]; ok {
			r.add("slab %#x is listed as packed, but is listed already", uint32(ref))
			break
		}
		linked[ref] = [2]int{packedClass, 0}
		_, s := a.slab(ref)
		if s.prev != prev {
			r.add("packed slab %#x comes after %#x but says %#x", uint32(ref), uint32(prev), uint32(s.prev))
		}
		prev, ref = ref, s.next
	}
	return linked
}

func (a *Arena) isPacked(ref slabRef) bool {
	segments := *a.segments.Load()
	if ref.segment() >= len(segments) {
		return false
	}
	seg, s := a.slab(ref)
	index := ref.index()
	return seg.usedSlabs[index/64]>>(index%64)&1 == 1 && s.class == packedClass
}

// checkPacked checks what is in a packed slab and adds it to total.
func (a *Arena) checkPacked(r *report, ref slabRef, total *packingState) (held uint64) {
	seg, s := a.slab(ref)
	begin := int(s.page) * pageSize
	end, live := packedBitmap, 0
	packedStarts(seg, uint32(begin)).each(func(offset int) {
		if offset < packedBegin(end) {
			r.add("packed slab %#x: a blob begins at %d, in what ends at %d", uint32(ref), offset, end)
			return
		}
		b, err := packedBlob(seg.data[begin+offset-packedLength : begin+packedBytes])
		if err != nil || offset+len(b) > s.fill() {
			r.add("packed slab %#x: the blob at %d has %d bytes, and %d are written (%v)", uint32(ref), offset, len(b), s.fill(), err)
			return
		}
		end = offset + len(b)
		live += packedSize(len(b))
		total.blobs++
		total.bytes += uint64(len(b))
	})
	if live != s.live() || live == 0 || s.used != 0 || s.fill() > packedBytes {
		r.add("packed slab %#x has %d bytes in use and says %d; %d are written, %d slots used", uint32(ref), live, s.live(), s.fill(), s.used)
	}
	held = uint64(packedHeld(s.fill()))
	total.slabs++
	total.live += uint64(live)
	total.held += held
	return held
}

// checkSegment checks the slabs of a segment, strikes them off linked, adds
// what they hold to totals and returns how many pages they hold.
func (a *Arena) checkSegment(r *report, seg *segment, linked map[slabRef][2]int, totals *[maxClasses]class, packed *packingState) (held uint64) {
	taken := 0 // pages in slabs, held or not
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
		if int(s.class) >= numClasses && s.class != packedClass {
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
		taken += n
		if s.class == packedClass {
			held += a.checkPacked(r, ref, packed)
			if where, ok := linked[ref]; !ok || where[0] != packedClass {
				r.add("packed slab %#x is not listed", uint32(ref))
			}
			delete(linked, ref)
			continue
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
	if taken != segmentPages-seg.freePages {
		r.add("segment %d has %d free pages and %d in slabs", seg.index, seg.freePages, taken)
	}
	for page := range segmentPages {
		if e := pageEntry(seg.entry(page).Load()); e != entries[page] {
			r.add("page %d of segment %d is mapped to %#x, should be %#x", page, seg.index, uint32(e), uint32(entries[page]))
		}
	}
	if pages != *seg.usedPages {
		r.add("segment %d: the bitmap of pages does not agree with the slabs", seg.index)
	}
	return held
}

// each calls f for every blob of a segment with its offset and the size of what it is
// in, at most.
func (seg *segment) each(f func(offset, size int)) {
	for index := range seg.slabsTouched {
		if seg.usedSlabs[index/64]>>(index%64)&1 == 0 {
			continue
		}
		seg.eachOf(&seg.slabs[index], f)
	}
}

// eachOf is each for one slab.
func (seg *segment) eachOf(s *slab, f func(offset, size int)) {
	begin := int(s.page) * pageSize
	if s.class == packedClass {
		packedStarts(seg, uint32(begin)).each(func(offset int) { f(begin+offset, packedBytes-offset) })
		return
	}
	if int(s.class) >= numClasses {
		return // as Check says
	}
	geo := &geometry[s.class]
	for slot := range int(geo.slots) {
		if s.allocated(slot) {
			f(begin+slot*int(geo.size), int(geo.size))
		}
	}
}
