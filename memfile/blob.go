package memfile

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync/atomic"
	"unsafe"

	"runsc-agentzip/memfile/arena"
	"runsc-agentzip/memfile/codec"
)

// A blob in the store is a header and the encoded page. The header repeats what
// the page table says, so that a wrong handle is found out before it is
// decoded, and holds the checksum of the page that decoding must give.
//
//	bytes 0-7    codec.Sum of the page
//	bytes 8-15   the head, see below
//	bytes 16-20  the base, unless that is the template's page at the same place
//
// # Bases and roots
//
// A page may be encoded relative to any page of the template, or to a page of
// this sandbox that is stored in a form without a base. The blob of the latter
// is then called a root. A root never changes and is never freed while it is
// referred to: it counts its references, one from its page and one from each
// dependant. If its page leaves the store first, it lives on as an orphan until
// its dependants are gone, which the next deepening sees to. There are no
// chains: what depends on a root is no root. So restoring a page reads at most
// one other blob or page of the template.
//
// # Pages of the pool
//
// A page that the pool has is stored as a blob without content, whose base says
// where in the pool it is (codec.TagPool). Another may be encoded relative to a
// page of the pool, if that has no base itself. The blob has a reference to the
// location, which ends with the blob.
const (
	blobHeader = 16
	blobBase   = 5
)

// A blobHead is the second word of a blob. It is changed atomically, since
// references come and go while others decode the blob.
//
//	bits 0-31   page number
//	bits 32-35  codec.Tag
//	bits 36-37  baseKind
//	bit  38     orphan
//	bits 40-51  length of the encoded page
//	bits 52-63  references
type blobHead uint64

const (
	headOrphan blobHead = 1 << 38
	headRef    blobHead = 1 << 52
	// headFixed is what stays the same for as long as a blob lives.
	headFixed = headRef - 1 - headOrphan

	maxRefs = 1<<12 - 1
	// maxDependants is how many pages may come to depend on a root: what
	// becomes an orphan costs storing all of them again.
	maxDependants = 64
	// maxPage bounds page numbers: 16 TiB of memory file.
	maxPages = 1 << 32
)

func (h blobHead) page() uint64   { return uint64(h & (1<<32 - 1)) }
func (h blobHead) tag() codec.Tag { return codec.Tag(h >> 32 & 15) }
func (h blobHead) base() baseKind { return baseKind(h >> 36 & 3) }
func (h blobHead) length() int    { return int(h >> 40 & (1<<12 - 1)) }
func (h blobHead) refs() int      { return int(h >> 52) }

// A baseKind says what a page is encoded relative to, if its form needs a base.
type baseKind uint8

const (
	baseSame     baseKind = 0 // the template's page at the same place
	baseTemplate baseKind = 1 // the template's page of the given number
	baseRoot     baseKind = 2 // the page that the blob of the given handle is of
	basePool     baseKind = 3 // the page of the pool at the given PoolLoc; with codec.TagPool the page itself
)

// A baseRef names a base. The zero baseRef is the template's page at the same
// place, or none.
type baseRef struct {
	kind baseKind
	n    uint64
}

// fits tells whether pages with the tag have a base of this kind.
func (k baseKind) fits(tag codec.Tag) bool {
	switch {
	case tag == codec.TagPool:
		return k == basePool
	case hasBase(tag):
		return true
	}
	return k == baseSame
}

// size is what the reference takes in a blob.
func (r baseRef) size() int {
	if r.kind == baseSame {
		return 0
	}
	return blobBase
}

func hasBase(tag codec.Tag) bool { return tag == codec.TagWordDelta || tag == codec.TagZstdBase }

// mayBeRoot tells whether pages may be encoded relative to one with the tag.
func mayBeRoot(tag codec.Tag) bool {
	return tag == codec.TagS2 || tag == codec.TagZstd || tag == codec.TagWords
}

// headAt is the head in the bytes of a blob, which begin at a multiple of 16.
func headAt(blob []byte) *uint64 { return (*uint64)(unsafe.Pointer(&blob[8])) }

func putBase(blob []byte, n uint64) {
	binary.LittleEndian.PutUint32(blob[blobHeader:], uint32(n))
	blob[blobHeader+4] = byte(n >> 32)
}

// put stores an encoded page, with one reference.
func (b *Backend) put(sum, page uint64, tag codec.Tag, base baseRef, enc []byte) (arena.Handle, error) {
	at := blobHeader + base.size()
	h, dst, err := b.store.Alloc(at + len(enc))
	if err != nil {
		return 0, err
	}
	binary.LittleEndian.PutUint64(dst, sum)
	head := blobHead(page) | blobHead(tag)<<32 | blobHead(base.kind)<<36 | blobHead(len(enc))<<40 | headRef
	atomic.StoreUint64(headAt(dst), uint64(head))
	if base.kind != baseSame {
		putBase(dst, base.n)
	}
	copy(dst[at:], enc)
	if n := b.stats.stored.Add(1); n == b.opts.TestCorrupt {
		dst[min(at+len(enc)/2, len(dst)-1)] ^= 0x10
	}
	return h, nil
}

// A stored is what a blob says. It is valid for as long as the blob is.
type stored struct {
	head blobHead
	sum  uint64
	base baseRef
	enc  []byte
}

// parse reads the blob that h names. The caller has a reference to it.
func (b *Backend) parse(h arena.Handle) (s stored, err error) {
	all, err := b.store.Bytes(h)
	if err != nil {
		return s, err
	}
	if len(all) < blobHeader {
		return s, fmt.Errorf("blob of %d bytes", len(all))
	}
	s.sum = binary.LittleEndian.Uint64(all)
	s.head = blobHead(atomic.LoadUint64(headAt(all)))
	s.base.kind = s.head.base()
	at := blobHeader + s.base.size()
	if !s.base.kind.fits(s.head.tag()) || s.head.length() != len(all)-at {
		return s, fmt.Errorf("header %#x does not fit a blob of %d bytes", uint64(s.head), len(all))
	}
	if s.base.kind != baseSame {
		s.base.n = uint64(binary.LittleEndian.Uint32(all[blobHeader:])) | uint64(all[blobHeader+4])<<32
	}
	s.enc = all[at:]
	return s, nil
}

// errCorrupt is what reading a stored page fails with when what was read is
// not what was stored.
type errCorrupt struct {
	page uint64
	tag  codec.Tag
	what string
}

func (e *errCorrupt) Error() string {
	return fmt.Sprintf("stored page at memory file offset %#x (%v): %s", e.page<<pageShift, e.tag, e.what)
}

// blob returns what is stored of a page with the tag.
func (b *Backend) blob(page uint64, tag codec.Tag, h arena.Handle) (stored, error) {
	s, err := b.parse(h)
	if err != nil {
		return s, &errCorrupt{page, tag, err.Error()}
	}
	if s.head.page() != page || s.head.tag() != tag {
		return s, &errCorrupt{page, tag, fmt.Sprintf("header %#x is that of the page at %#x (%v)", uint64(s.head), s.head.page()<<pageShift, s.head.tag())}
	}
	return s, nil
}

// load decodes the page that w, the word of a page that the caller has made
// busy, refers to, and verifies it.
func (b *Backend) load(r *restorer, dst *codec.Page, page uint64, w word) error {
	r.root = 0
	return b.loadNext(r, dst, page, w)
}

// loadNext is load for one of several pages that the caller has made busy. A
// root that is needed again is not decoded again: all pages loaded since r.root
// was 0 must still be busy, and where they were loaded to unchanged.
func (b *Backend) loadNext(r *restorer, dst *codec.Page, page uint64, w word) error {
	tag := tagOf(w)
	switch tag {
	case codec.TagZero:
		clear(dst[:])
		return nil
	case codec.TagTemplate:
		if err := b.readTemplate(dst[:], page); err != nil {
			return &errCorrupt{page, tag, err.Error()}
		}
		return nil
	}
	s, err := b.blob(page, tag, handleOf(w))
	if err != nil {
		return err
	}
	if tag == codec.TagPool {
		if err := b.loadShared(r, dst, &s); err != nil {
			return &errCorrupt{page, tag, err.Error()}
		}
		return nil
	}
	var base *codec.Page
	if hasBase(tag) {
		root := s.base.kind == baseRoot
		if root && r.root != 0 && r.root == arena.Handle(s.base.n) {
			base = r.rootPage
		} else {
			base, r.root = &r.base, 0
			if err := b.loadBase(r, base, page, s.base); err != nil {
				return &errCorrupt{page, tag, err.Error()}
			}
			if root {
				r.root, r.rootPage = arena.Handle(s.base.n), base
			}
		}
	}
	if err := s.decode(&r.dec, dst, base); err != nil {
		return &errCorrupt{page, tag, err.Error()}
	}
	if mayBeRoot(tag) {
		r.root, r.rootPage = handleOf(w), dst
	}
	return nil
}

// decode decodes and verifies the page.
func (s *stored) decode(dec *codec.Decoder, dst, base *codec.Page) error {
	if err := dec.Decode(dst, s.head.tag(), s.enc, base); err != nil {
		return err
	}
	if got := codec.Sum(dst); got != s.sum {
		return fmt.Errorf("checksum mismatch: stored %#016x, decoded %#016x", s.sum, got)
	}
	return nil
}

// loadBase puts the base of a page into dst.
func (b *Backend) loadBase(r *restorer, dst *codec.Page, page uint64, base baseRef) error {
	switch base.kind {
	case baseTemplate:
		return b.readTemplatePage(dst, base.n)
	case baseRoot:
		s, err := b.parse(arena.Handle(base.n))
		if err == nil && !mayBeRoot(s.head.tag()) {
			err = errors.New("it depends on another")
		}
		if err == nil {
			err = s.decode(&r.dec, dst, nil)
		}
		if err != nil {
			return fmt.Errorf("the root it depends on, of the page at %#x (%v): %w", s.head.page()<<pageShift, s.head.tag(), err)
		}
		return nil
	case basePool:
		if err := b.loadPoolBase(&r.dec, dst, PoolLoc(base.n), r.record[:]); err != nil {
			return fmt.Errorf("the pool's page at %#x that it depends on: %w", base.n, err)
		}
		return nil
	}
	return b.readTemplate(dst[:], page)
}

// share adds a reference to the blob h of a page, if it still is that page's.
// The caller holds passMu, so no page can meanwhile have left the store and come
// back.
func (b *Backend) share(page uint64, h arena.Handle) (ok bool) {
	w, ok := b.claim(page)
	if !ok {
		return false
	}
	defer b.unclaim(page, w)
	if handleOf(w) != h || !mayBeRoot(tagOf(w)) {
		return false
	}
	return b.addRef(h, 1+maxDependants)
}

// addRef adds a reference to a blob that the caller keeps from being freed. It
// fails if there are limit already. The caller holds passMu.
func (b *Backend) addRef(h arena.Handle, limit int) bool {
	all, err := b.store.Bytes(h)
	if err != nil || len(all) < blobHeader {
		return false
	}
	// Others may only give references up meanwhile.
	if blobHead(atomic.LoadUint64(headAt(all))).refs() >= limit {
		return false
	}
	atomic.AddUint64(headAt(all), uint64(headRef))
	return true
}

// claim makes an evicted page busy and returns its word, or false if the page is
// in another state.
func (b *Backend) claim(page uint64) (word, bool) {
	w := b.table.load(page)
	return w, w&stateMask == evicted && b.table.cas(page, w, w&^stateMask|busy)
}

// unclaim makes a busy page an evicted one with the word w.
func (b *Backend) unclaim(page uint64, w word) {
	b.table.store(page, w)
	b.waiters.wake(page, page+1)
}

// unref gives up a reference to a blob: its page's if owner is set, otherwise
// a dependant's. With the last one the blob is freed.
func (b *Backend) unref(h arena.Handle, owner bool) {
	all, err := b.store.Bytes(h)
	if err != nil || len(all) < blobHeader {
		b.store.Free(h) // which says what is wrong
		return
	}
	at := headAt(all)
	for {
		old := blobHead(atomic.LoadUint64(at))
		head := old - headRef
		if owner && head.refs() != 0 {
			head |= headOrphan
		}
		if !atomic.CompareAndSwapUint64(at, uint64(old), uint64(head)) {
			continue
		}
		switch {
		case head.refs() != 0:
			if owner {
				b.stats.orphans.Add(1)
			}
			return
		case old&headOrphan != 0:
			b.stats.orphans.Add(-1)
		}
		break
	}
	s, err := b.parse(h)
	b.store.Free(h)
	if err != nil {
		return
	}
	switch s.base.kind {
	case baseRoot:
		b.unref(arena.Handle(s.base.n), false)
	case basePool:
		b.pool.Load().Unref(PoolLoc(s.base.n))
	}
}

// discard gives up the blob of a page that was not evicted after all, or of one
// that no longer is.
func (b *Backend) discard(w word) {
	if h := handleOf(w); h != 0 {
		b.unref(h, true)
	}
}
