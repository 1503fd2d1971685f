package arena

import (
	"encoding/binary"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"
)

// A packed slab has blobs of all sizes one behind the other. It begins with a bitmap
// of the units at which a blob begins. Before each blob is its length; the blob
// begins with the next unit that leaves room for that.
const (
	packedPages  = 8
	packedBytes  = packedPages * pageSize
	packedBitmap = packedBytes >> unitShift / 8
	packedLength = 2

	// packedOpen is how many packed slabs take blobs, so that what is too long for
	// the end of one is followed there by something shorter.
	packedOpen = 2

	// The words of slab.alloc. packedFill is the offset in the slab behind the last
	// blob that it was given, packedLive the bytes that blobs in use take.
	packedFill = 0
	packedLive = 1

	// looseShare is how much of what blobs take may be lost in slabs beside it
	// before it is worth to move blobs, as the inverse of a share. Of a slab that
	// they are moved out of this has to be lost at least: loosest or, of packed
	// slabs, whose ends are never full, loosestPacked.
	looseShare = 64
	// looseBytes is how much is moved at a time: so much more memory is held for a
	// moment.
	looseBytes    = 4 << 20
	loosest       = 64
	loosestPacked = 16
)

// packing is the packed slabs. The mutex guards its fields and the slabs, but for
// what Bytes reads.
type packing struct {
	mu sync.Mutex
	packingState
}

type packingState struct {
	// list begins the list of all packed slabs.
	list slabRef
	// open are those that take blobs.
	open  [packedOpen]slabRef
	slabs uint32
	blobs uint64
	bytes uint64 // lengths of blobs
	live  uint64 // bytes that they take
	held  uint64 // pages
}

// packedBegin returns where the blob behind a slab's fill begins.
func packedBegin(fill int) int {
	return (fill + packedLength + 1<<unitShift - 1) >> unitShift << unitShift
}

// packedSize is how many bytes a blob of n takes.
func packedSize(n int) int { return packedBegin(n) }

// packedHeld is how many pages of a slab have been written to.
func packedHeld(fill int) int { return (fill + pageSize - 1) / pageSize }

func (s *slab) fill() int { return int(s.alloc[packedFill].Load()) }
func (s *slab) live() int { return int(s.alloc[packedLive].Load()) }

// startBits is the bitmap of a packed slab.
type startBits [packedBitmap / 8]atomic.Uint64

func packedStarts(seg *segment, begin uint32) *startBits {
	return (*startBits)(unsafe.Pointer(&seg.data[begin]))
}

func (b *startBits) has(offset uint32) bool {
	unit := offset >> unitShift
	return b[unit/64].Load()>>(unit%64)&1 == 1
}

// flip adds or removes a start. Only the holder of the lock writes.
func (b *startBits) flip(offset uint32) {
	unit := offset >> unitShift
	b[unit/64].Store(b[unit/64].Load() ^ 1<<(unit%64))
}

// each calls f for the offset of each start.
func (b *startBits) each(f func(offset int)) {
	for unit := range uint32(packedBytes >> unitShift) {
		if b.has(unit << unitShift) {
			f(int(unit << unitShift))
		}
	}
}

// packedBlob returns the blob of which mem begins with the length.
func packedBlob(mem []byte) ([]byte, error) {
	n := int(binary.LittleEndian.Uint16(mem))
	if n < 1 || n > MaxBlob || packedLength+n > len(mem) {
		return nil, fmt.Errorf("%w: its length was overwritten: %d", ErrCorrupt, n)
	}
	return mem[packedLength : packedLength+n : packedLength+n], nil
}

// AllocPacked is Alloc for a blob that is likely to stay. It takes 2 bytes more than
// itself and what is left of 16, whatever its length. What is freed of a packed slab
// is not given out again: the slab has to run empty.
func (a *Arena) AllocPacked(n int) (Handle, []byte, error) {
	if n < 1 || n > MaxBlob {
		return 0, nil, fmt.Errorf("%w: %d", ErrSize, n)
	}
	p := &a.packed
	p.mu.Lock()
	defer p.mu.Unlock()
	// The fullest that it fits in; the fullest of all is closed for a new one.
	best, bestFill, full, fullFill := -1, 0, 0, -1
	for i, ref := range p.open {
		if ref == 0 {
			if fullFill <= packedBytes {
				full, fullFill = i, packedBytes+1
			}
			continue
		}
		_, s := a.slab(ref)
		fill := s.fill()
		if packedBegin(fill)+n <= packedBytes && fill > bestFill {
			best, bestFill = i, fill
		}
		if fill > fullFill {
			full, fullFill = i, fill
		}
	}
	if best < 0 {
		ref, err := a.newSlab(packedClass, 1)
		if err != nil {
			return 0, nil, err
		}
		_, s := a.slab(ref)
		s.alloc[packedFill].Store(packedBitmap)
		s.next = p.list
		if s.next != 0 {
			_, next := a.slab(s.next)
			next.prev = ref
		}
		p.list = ref
		p.open[full] = ref
		p.slabs++
		p.held++
		best, bestFill = full, packedBitmap
	}
	ref := p.open[best]
	seg, s := a.slab(ref)
	begin := packedBegin(bestFill)
	if grow := packedHeld(begin+n) - packedHeld(bestFill); grow > 0 {
		a.pagesMu.Lock()
		err := a.hold(grow, packedClass)
		a.pagesMu.Unlock()
		if err != nil {
			a.dropEmptyPacked(ref)
			return 0, nil, err
		}
		p.held += uint64(grow)
	}
	slabBegin := int(s.page) << pageShift
	mem := seg.data[slabBegin+begin-packedLength : slabBegin+packedBytes]
	binary.LittleEndian.PutUint16(mem, uint16(n))
	mem = mem[packedLength : packedLength+n : packedLength+n]
	if invariants {
		poison(mem)
	}
	s.alloc[packedFill].Store(uint64(begin + n))
	s.alloc[packedLive].Store(uint64(s.live() + packedSize(n)))
	packedStarts(seg, uint32(slabBegin)).flip(uint32(begin))
	p.blobs++
	p.bytes += uint64(n)
	p.live += uint64(packedSize(n))
	return seg.handle(slabBegin + begin), mem, nil
}

// freePacked gives up a blob in a packed slab.
func (a *Arena) freePacked(h Handle) {
	p := &a.packed
	p.mu.Lock()
	defer p.mu.Unlock()
	// Of two Frees at the same time one must fail.
	at, err := a.resolve(h)
	if err != nil || at.class != packedClass {
		panic(fmt.Sprintf("arena: Free of handle %#x: freed twice at the same time", uint64(h)))
	}
	mem, err := at.blob()
	if err != nil {
		panic(fmt.Sprintf("arena: Free of handle %#x: %v", uint64(h), err))
	}
	n := len(mem)
	if invariants {
		poison(mem)
	}
	seg, s := a.slab(at.ref)
	if packedSize(n) > s.live() {
		panic(fmt.Sprintf("arena: Free of handle %#x: its length was overwritten: %d of %d bytes in its slab", uint64(h), n, s.live()))
	}
	slabBegin := uint32(s.page) << pageShift
	packedStarts(seg, slabBegin).flip(uint32(uint64(h)%segmentUnits)<<unitShift - slabBegin)
	s.alloc[packedLive].Store(uint64(s.live() - packedSize(n)))
	p.blobs--
	p.bytes -= uint64(n)
	p.live -= uint64(packedSize(n))
	a.dropEmptyPacked(at.ref)
}

// dropEmptyPacked gives a slab back if nothing is left in it. The lock is held.
func (a *Arena) dropEmptyPacked(ref slabRef) {
	p := &a.packed
	seg, s := a.slab(ref)
	if s.live() != 0 {
		return
	}
	// What decides lies beside the blobs: they must not go for a length that was
	// overwritten.
	packedStarts(seg, uint32(s.page)<<pageShift).each(func(offset int) {
		panic(fmt.Sprintf("arena: packed slab %#x is empty by its count, but has a blob at %d: lengths were overwritten", uint32(ref), offset))
	})
	a.closePacked(ref)
	if s.next != 0 {
		_, next := a.slab(s.next)
		next.prev = s.prev
	}
	if s.prev != 0 {
		_, prev := a.slab(s.prev)
		prev.next = s.next
	} else {
		p.list = s.next
	}
	s.next, s.prev = 0, 0
	held := packedHeld(s.fill())
	s.alloc[packedFill].Store(0)
	p.slabs--
	p.held -= uint64(held)
	a.releaseSlab(ref, held)
}

// closePacked has a slab take no more blobs.
func (a *Arena) closePacked(ref slabRef) {
	for i := range a.packed.open {
		if a.packed.open[i] == ref {
			a.packed.open[i] = 0
		}
	}
}

// Loose returns handles of blobs that lie in slabs of which much is lost, about limit
// of them, most lost first: if the caller moves each (AllocPacked, copy, Free), these
// slabs go back to the host, and at most the looseShare-th part of what all blobs take
// is lost, as far as that is possible. It returns nil if nothing can be gained.
// Otherwise it is as Sparse, which comes first: it moves less.
func (a *Arena) Loose(limit int) []Handle {
	type candidate struct {
		ref        slabRef
		class      uint8
		lost, held int // bytes
		blobs      int // about
	}
	var candidates []candidate
	var taken, held int
	for ci := range numClasses {
		geo := &geometry[ci]
		c := &a.classes[ci]
		c.mu.Lock()
		taken += int(c.blobs) * int(geo.size)
		bytes := int(geo.pages) * pageSize
		held += int(c.slabs) * bytes
		for _, ref := range c.groups {
			for ref != 0 {
				_, s := a.slab(ref)
				lost := bytes - int(s.used)*int(geo.size)
				if lost*loosest >= bytes {
					candidates = append(candidates, candidate{ref, uint8(ci), lost, bytes, int(s.used)})
				}
				ref = s.next
			}
		}
		c.mu.Unlock()
	}
	p := &a.packed
	p.mu.Lock()
	taken += int(p.live)
	held += int(p.held) * pageSize
	for ref := p.list; ref != 0; {
		_, s := a.slab(ref)
		bytes := packedHeld(s.fill()) * pageSize
		if lost := bytes - s.live(); lost*loosestPacked >= bytes {
			candidates = append(candidates, candidate{ref, packedClass, lost, bytes, s.live() * int(p.blobs) / int(p.live)})
		}
		ref = s.next
	}
	p.mu.Unlock()
	a.pagesMu.Lock()
	room := a.maxPages - min(a.heldPages, a.maxPages)
	a.pagesMu.Unlock()

	lost := held - taken
	slices.SortFunc(candidates, func(x, y candidate) int { return y.lost*x.held - x.lost*y.held })
	victims, move, gain, blobs := 0, 0, 0, 0
	for _, c := range candidates {
		if lost <= taken/looseShare || blobs >= limit || move >= looseBytes {
			break
		}
		// A slab goes only if all of its blobs find room.
		if uint64(loosePages(move+c.held-c.lost)) > room {
			break
		}
		victims++
		move += c.held - c.lost
		gain += c.held
		lost -= c.lost
		blobs += c.blobs
	}
	// The last slab that they go to may be a new one, with pages of its own for its
	// bitmap and its end.
	if gain < (loosePages(move)+2)*pageSize {
		return nil
	}
	var handles []Handle
	for _, c := range candidates[:victims] {
		if len(handles) >= limit {
			break
		}
		handles = a.appendBlobs(handles, c.ref, c.class)
	}
	return handles
}

// loosePages is how many pages blobs of so many bytes take anew: themselves, bitmaps, and
// the ends of slabs.
func loosePages(bytes int) int {
	need := bytes + (bytes/(packedBytes-packedBitmap)+1)*packedBitmap + bytes/64
	return (need + pageSize - 1) / pageSize
}

// appendBlobs appends the handles of a slab's blobs, if it is there still and of that
// class. Of a packed slab they are the last that it was given.
func (a *Arena) appendBlobs(handles []Handle, ref slabRef, class uint8) []Handle {
	mu := &a.packed.mu
	if class != packedClass {
		mu = &a.classes[class].mu
	}
	mu.Lock()
	defer mu.Unlock()
	seg, s := a.slab(ref)
	// Whether the entry is in use still only pagesMu knows.
	a.pagesMu.Lock()
	index := ref.index()
	there := seg.usedSlabs[index/64]>>(index%64)&1 == 1 && s.class == class
	a.pagesMu.Unlock()
	if !there {
		return handles
	}
	if class == packedClass {
		a.closePacked(ref)
	}
	seg.eachOf(s, func(offset, _ int) { handles = append(handles, seg.handle(offset)) })
	return handles
}
