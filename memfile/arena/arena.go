// Package arena stores compressed pages outside of the Go heap.
//
// A blob (1 to [MaxBlob] bytes) is named by a [Handle], a number that fits in
// 40 bits, so that a page table of plain integers can hold it and the garbage
// collector never looks at stored pages or at the bookkeeping of them.
//
// # Layout
//
// Memory comes from the host in segments of 16 MiB of address space, which
// cost nothing until they are touched. A segment is cut into slabs of 1 to 8
// pages, and a slab into equal slots of one size class (the idea of zsmalloc).
// The classes are derived, not listed: sizes grow by 1/16 but at least by 16
// bytes; each takes the fewest pages that leave at most 1/16 of the slab
// unused; sizes that arrive at the same number of pages and slots are one
// class, whose slots then share out the whole slab. That makes about 60
// classes. Finer ones would save 1-2 % with 100000 blobs and lose more than
// that to partly filled slabs with 5000, which is nearer to what a sandbox has.
//
// A slab that becomes empty goes back to the host at once (MADV_DONTNEED) and
// its pages may then serve any class. There is no cache of empty slabs:
// evictions and restores come in phases, so a slab is rarely needed again
// right after it was emptied, and the call takes a microsecond or two for what
// took a dozen Allocs to fill.
//
// # Packed slabs
//
// Each class has a slab that is not full. With a few hundred blobs that is most of
// the memory. So what is likely to stay can be packed: AllocPacked puts blobs of all
// sizes one behind the other into slabs of 8 pages, whose bookkeeping is a bitmap of
// the units at which blobs begin, and the length before each. What is freed there is
// not given out again, since it has no size that another has: Loose says which slabs
// have lost most, and moving their blobs, to packed slabs, returns them. A caller
// packs when nothing is to change for a while, as an agent's sandbox that waits.
//
// # Bounds
//
// Rounding: the share of a slab that belongs to a blob of n bytes is at most
// n*9/8+16 up to n = 3503, and n*1.17+16 above. With the sizes that compressed
// pages have, slots are 4 % larger than the blobs.
//
// Fragmentation: a class takes a new slab only if all of its slabs are full,
// so for each class
//
//	slabs <= ceil(most slots ever used at one time / slots per slab)
//
// counted since the class was last empty, and HeldBytes is at most the sum of
// that over the classes. After frees at random this bound may be reached: of
// 40000 blobs, freeing half at random returns 2 % of the memory, freeing 90 %
// returns 44 %. Allocation takes the fullest slabs first (in eighths), so that
// the sparse ones run empty: when a third of the blobs is replaced over and over,
// HeldBytes stays below 1.1 times the blobs' bytes.
//
// The arena cannot move blobs, but [Arena.Sparse] says which ones the caller may
// move to get the rest back. It returns blobs as long as the emptiest slab of a
// class fits into the free slots of the others. Once it returns none, a class
// has less than one slab's slots free, and so
//
//	slabs = ceil(slots in use / slots per slab)
//
// which is Stats.PackedBytes over all classes: no arrangement in classes needs fewer.
// What is free in one class does not serve another before its slab is empty.
//
// Once Loose returns none either, less than 1/64 of what blobs take is lost beside
// them, or else each slab has lost less than 1/64 of itself, 1/16 of a packed one; so
// much a packed slab of the longest blobs loses at its end, up to 1/7, which real ones
// do not. A packed blob of n bytes takes n+2 rounded up to 16, and 1/128 for the
// bitmap.
//
// Bookkeeping: 32 bytes per slab and 4 bytes per page of it, in the segment's mapping,
// counted in MetadataBytes by whole pages. With compressed pages that
// is 5 to 8 bytes per blob, and at most 11 for blobs up to 3503 bytes. The
// length of a blob is written into the slot behind it, where rounding leaves
// room; a slot is at least one byte longer than its blob.
//
// All in all, 100000 compressed pages take 1.05 times their bytes, 25000 take
// 1.06 and 5000 take 1.10; 1300 take 1.25 and 300 take 1.87 (see TestOverhead). When
// they are packed, 5000 take 1.06, 1300 take 1.07 and 300 take 1.12 (see
// TestPackedOverhead).
//
// # System calls
//
// mmap (PRIVATE, ANONYMOUS, NORESERVE), munmap (in Close) and madvise
// (DONTNEED; and NOHUGEPAGE once per segment, because on hosts where huge
// pages are "always" the first byte of a slab would take 2 MiB and khugepaged
// would undo what DONTNEED gave back). gVisor's own seccomp filters allow
// exactly these.
//
// # Concurrency
//
// All methods but Close are safe for concurrent use. Lock order:
//
//	caller's locks -> class.mu (one at a time; Check takes all, in order) -> packing.mu -> Arena.pagesMu
//
// Bytes takes no lock. It may not race with Free of the same handle, and a
// slice must not be used after Free of its handle; a page table has that
// property anyway. A handle that was freed and given out again cannot be told
// from a valid one: callers keep in the blob whose it is. With the build tag
// "invariants", Free overwrites the blob.
package arena

import (
	"errors"
	"fmt"
	"math/bits"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Handle names a blob. The zero Handle names none. Handles use the low 40 bits.
type Handle uint64

// HandleBits is the number of bits that a Handle may use.
const HandleBits = 40

const (
	pageShift    = 12
	pageSize     = 1 << pageShift
	unitShift    = 4 // slots begin at multiples of 16 bytes
	segmentShift = 24
	segmentSize  = 1 << segmentShift
	segmentPages = segmentSize / pageSize
	segmentUnits = segmentSize >> unitShift
	// maxSegments is what fits in a Handle: number 0 is not used, so that a
	// Handle is never 0.
	maxSegments = 1<<(HandleBits+unitShift-segmentShift) - 1
)

var (
	// ErrFull means that the blob would take the arena over MaxBytes.
	ErrFull = errors.New("arena: full")
	// ErrNoMemory means that the host refused to map more memory.
	ErrNoMemory = errors.New("arena: host refused memory")
	// ErrSize means that a blob of this length cannot be stored.
	ErrSize = errors.New("arena: bad blob length")
	// ErrHandle means that a handle does not name a blob.
	ErrHandle = errors.New("arena: bad handle")
	// ErrCorrupt means that the memory of a blob was overwritten from outside.
	ErrCorrupt = errors.New("arena: blob corrupt")
	// ErrClosed means that the arena was closed.
	ErrClosed = errors.New("arena: closed")
)

// Options are the parameters of an Arena.
type Options struct {
	// MaxBytes limits Stats.HeldBytes. 0 means no limit. From 4 MiB on the last 32 KiB
	// of it are for AllocPacked only: to run packed slabs empty takes another.
	MaxBytes uint64
}

// Arena is a store of blobs.
type Arena struct {
	maxPages uint64
	// segments is replaced as a whole (under pagesMu) when it grows, so that
	// it can be read without a lock. Segments stay until Close.
	segments atomic.Pointer[[]*segment]
	classes  [maxClasses]class
	packed   packing

	// pagesMu guards which pages of which segment belong to slabs.
	pagesMu   sync.Mutex
	heldPages uint64
	closed    bool
}

// class is one size class. The mutex guards its fields and the slabs that
// belong to it, but for what Bytes reads.
type class struct {
	mu sync.Mutex
	// groups are heads of lists of slabs that are neither empty nor full, by
	// fullness in eighths; the bits of filled say which are not empty.
	groups [fullnessGroups]slabRef
	filled uint8
	slabs  uint32
	blobs  uint64
	bytes  uint64 // lengths of blobs
}

const fullnessGroups = 8

// New returns an empty Arena. Memory is taken when it is needed.
func New(o Options) (*Arena, error) {
	a := &Arena{maxPages: o.MaxBytes / pageSize}
	if o.MaxBytes == 0 {
		a.maxPages = ^uint64(0)
	} else if a.maxPages == 0 {
		return nil, fmt.Errorf("arena: MaxBytes %d is less than a page", o.MaxBytes)
	}
	a.segments.Store(new([]*segment))
	return a, nil
}

// Alloc makes room for a blob of n bytes. The slice has n bytes of undefined
// content and is valid until Free. The error is ErrSize, ErrFull, ErrNoMemory
// or ErrClosed, possibly wrapped.
func (a *Arena) Alloc(n int) (Handle, []byte, error) {
	if n < 1 || n > MaxBlob {
		return 0, nil, fmt.Errorf("%w: %d", ErrSize, n)
	}
	ci := classOf(n)
	geo := &geometry[ci]
	c := &a.classes[ci]
	c.mu.Lock()
	defer c.mu.Unlock()

	var ref slabRef
	if c.filled == 0 {
		var err error
		if ref, err = a.newSlab(ci, int(geo.pages)); err != nil {
			return 0, nil, err
		}
		c.slabs++
	} else {
		ref = c.groups[bits.Len8(c.filled)-1]
		a.unlink(c, geo, ref)
	}
	seg, s := a.slab(ref)
	slot := s.firstFree()
	if slot >= int(geo.slots) {
		panic(fmt.Sprintf("arena: slab %#x of class %d is listed as partly filled but is full", ref, ci))
	}
	begin := int(s.page)<<pageShift + slot*int(geo.size)
	mem := seg.data[begin : begin+int(geo.size) : begin+int(geo.size)]
	if invariants {
		poison(mem)
	}
	setLength(mem, n)
	s.set(slot)
	s.used++
	if s.used < geo.slots {
		a.link(c, geo, ref, true)
	}
	c.blobs++
	c.bytes += uint64(n)
	return seg.handle(begin), mem[:n:n], nil
}

// Bytes returns the blob that h names, with its length. It validates h and
// takes no lock.
func (a *Arena) Bytes(h Handle) ([]byte, error) {
	p, err := a.resolve(h)
	if err != nil {
		return nil, err
	}
	b, err := p.blob()
	if err != nil {
		return nil, fmt.Errorf("%w (handle %#x)", err, uint64(h))
	}
	return b, nil
}

// Free gives up the blob that h names. It panics if there is none: then a page
// table is wrong and a page would be restored from somebody else's bytes.
func (a *Arena) Free(h Handle) {
	p, err := a.resolve(h)
	if err != nil {
		panic(fmt.Sprintf("arena: Free: %v", err))
	}
	if p.class == packedClass {
		a.freePacked(h)
		return
	}
	geo := &geometry[p.class]
	c := &a.classes[p.class]
	c.mu.Lock()
	defer c.mu.Unlock()
	// Once more under the lock: of two Frees at the same time one must fail.
	if q, err := a.resolve(h); err != nil || q.class != p.class {
		panic(fmt.Sprintf("arena: Free of handle %#x: freed twice at the same time", uint64(h)))
	}
	n, err := length(p.mem)
	if err != nil {
		panic(fmt.Sprintf("arena: Free of handle %#x: %v", uint64(h), err))
	}
	if p.slab.used < geo.slots {
		a.unlink(c, geo, p.ref)
	}
	if invariants {
		poison(p.mem)
	}
	p.slab.clear(p.slot)
	p.slab.used--
	c.blobs--
	c.bytes -= uint64(n)
	if p.slab.used > 0 {
		a.link(c, geo, p.ref, false)
		return
	}
	c.slabs--
	a.releaseSlab(p.ref, int(geo.pages))
}

// place is where a handle points.
type place struct {
	ref   slabRef
	slab  *slab
	class uint8
	slot  int
	mem   []byte // the whole slot; in a packed slab from the length to the slab's end
}

// blob returns the blob that lies there.
func (p *place) blob() ([]byte, error) {
	if p.class == packedClass {
		return packedBlob(p.mem)
	}
	n, err := length(p.mem)
	if err != nil {
		return nil, err
	}
	return p.mem[:n:n], nil
}

func (a *Arena) resolve(h Handle) (place, error) {
	index := uint64(h)/segmentUnits - 1
	segments := *a.segments.Load()
	if h == 0 || index >= uint64(len(segments)) {
		return place{}, fmt.Errorf("%w: %#x is in no segment", ErrHandle, uint64(h))
	}
	seg := segments[index]
	offset := uint32(uint64(h)%segmentUnits) << unitShift
	page := offset >> pageShift
	entry := pageEntry(seg.entry(int(page)).Load())
	if !entry.valid() {
		return place{}, fmt.Errorf("%w: %#x is in no slab", ErrHandle, uint64(h))
	}
	p := place{ref: makeRef(int(index), entry.slab()), slab: &seg.slabs[entry.slab()], class: entry.class()}
	geo := &geometry[p.class]
	begin := (page - entry.pageInSlab()) << pageShift
	if p.class == packedClass {
		if offset-begin < packedBitmap || !packedStarts(seg, begin).has(offset-begin) {
			return place{}, fmt.Errorf("%w: no blob begins at %#x", ErrHandle, uint64(h))
		}
		p.mem = seg.data[offset-packedLength : begin+packedPages*pageSize]
		return p, nil
	}
	slot := (offset - begin) / geo.size
	if offset != begin+slot*geo.size || slot >= uint32(geo.slots) {
		return place{}, fmt.Errorf("%w: %#x is inside a slot", ErrHandle, uint64(h))
	}
	p.slot = int(slot)
	if !p.slab.allocated(p.slot) {
		return place{}, fmt.Errorf("%w: %#x is free", ErrHandle, uint64(h))
	}
	p.mem = seg.data[offset : offset+geo.size : offset+geo.size]
	return p, nil
}

// Stats says what an Arena holds.
type Stats struct {
	Blobs     uint64 // blobs stored
	BlobBytes uint64 // sum of their lengths
	SlotBytes uint64 // sum of the slots they take, or of what they take of packed slabs
	// HeldBytes is the memory of all slabs, used or not: what the arena takes
	// from the host for blobs. Pages of a slab that were never written to are
	// included, although the host has not provided them yet. Of a packed slab only
	// those are held that it has got to.
	HeldBytes uint64
	// PackedBytes is what HeldBytes would be if every class had as few slabs
	// as its blobs need. Moving the blobs that Sparse returns gets there. Moving those
	// that Loose returns may get below it.
	PackedBytes uint64
	// MetadataBytes is everything else: bookkeeping in the segments, by whole
	// pages that may have been touched, and Go objects.
	MetadataBytes uint64
	// SegmentBytes is the address space taken.
	SegmentBytes uint64
}

// Stats returns what the arena holds. With other calls running, the numbers
// are of slightly different moments.
func (a *Arena) Stats() Stats {
	var s Stats
	for i := range numClasses {
		c := &a.classes[i]
		c.mu.Lock()
		s.Blobs += c.blobs
		s.BlobBytes += c.bytes
		s.SlotBytes += c.blobs * uint64(geometry[i].size)
		slots := uint64(geometry[i].slots)
		s.PackedBytes += (c.blobs + slots - 1) / slots * uint64(geometry[i].pages) * pageSize
		c.mu.Unlock()
	}
	p := &a.packed
	p.mu.Lock()
	s.Blobs += p.blobs
	s.BlobBytes += p.bytes
	s.SlotBytes += p.live
	s.PackedBytes += p.held * pageSize
	p.mu.Unlock()
	a.pagesMu.Lock()
	defer a.pagesMu.Unlock()
	s.HeldBytes = a.heldPages * pageSize
	segments := *a.segments.Load()
	s.MetadataBytes = uint64(unsafe.Sizeof(*a)) + uint64(unsafe.Sizeof(segments)) + uint64(cap(segments))*uint64(unsafe.Sizeof(segments[0]))
	for _, seg := range segments {
		s.MetadataBytes += seg.metadataBytes()
		s.SegmentBytes += uint64(len(seg.mapping))
	}
	return s
}

// Close returns all memory to the host. No other call may be running, and no
// slice of the arena may be used any more; later calls fail with ErrClosed or
// ErrHandle.
func (a *Arena) Close() error {
	for i := range numClasses {
		a.classes[i].mu.Lock()
		defer a.classes[i].mu.Unlock()
	}
	a.packed.mu.Lock()
	defer a.packed.mu.Unlock()
	a.pagesMu.Lock()
	defer a.pagesMu.Unlock()
	if a.closed {
		return nil
	}
	a.closed = true
	segments := *a.segments.Swap(new([]*segment))
	a.heldPages = 0
	for i := range numClasses {
		c := &a.classes[i]
		c.groups, c.filled, c.slabs, c.blobs, c.bytes = [fullnessGroups]slabRef{}, 0, 0, 0, 0
	}
	a.packed.packingState = packingState{}
	var errs []error
	for _, seg := range segments {
		if err := unix.Munmap(seg.mapping); err != nil {
			errs = append(errs, fmt.Errorf("arena: munmap: %w", err))
		}
	}
	return errors.Join(errs...)
}
