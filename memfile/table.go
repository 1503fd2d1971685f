package memfile

import (
	"math/bits"
	"sync"
	"sync/atomic"
	"unsafe"

	"runsc-agentzip/memfile/codec"
)

// PageSize is the unit of eviction, in bytes.
const PageSize = 4096

const pageShift = 12

// A word is a page's entry in the page table.
//
//	bits 0-2   state
//	bit  3     pinned: not to be evicted until dropped
//	bit  4     tmapped: an application may have the template's copy mapped; of a
//	           page that is the template's, or not yet restored, see entry.mapped
//	bit  5     deep: the stored form is as small as it gets
//	bit  6     never set: see packedHeader
//	bits 8-15  codec.Tag of the stored form
//	bits 16-55 arena.Handle of the blob, 0 if the form needs none
//
// A page in the file that has a handle keeps the form that it was stored in when
// it was last evicted: see kept.go.
type word = uint64

const (
	resident   word = 0
	candidate  word = 1
	raw        word = 2
	committing word = 3
	evicted    word = 4
	busy       word = 5

	stateMask word = 7
	pinned    word = 8
	tmapped   word = 16
	deep      word = 32

	tagShift    = 8
	handleShift = 16
	handleMask  = 1<<40 - 1

	// formMask is what says how a page is stored.
	formMask word = deep | 0xff<<tagShift | handleMask<<handleShift
)

var stateNames = [8]string{"resident", "candidate", "raw", "committing", "evicted", "busy", "invalid", "invalid"}

// templateWord is the word of a page that only the template has.
const templateWord = evicted | word(codec.TagTemplate)<<tagShift

// frozen stands in a leaf for every word that is elsewhere now, or about to be. It
// is no word of a page: load and cas never show it to their callers.
const frozen = ^word(0)

// # Where words are
//
// Most pages of a sandbox that was restored are the template's, and most of its
// file was never used. Such a page's word need not be stored: it follows from
// whether the page was adopted. So words are in leaves of 32 pages each, which are
// made when a word of theirs first becomes another, and tidy takes away again when
// all of them are what they were. (Of 114 groups of 512 pages that held a template
// of 220 MiB, clones that had taken a few steps had such words in 48 to 74 while
// they waited, of leaves in 170 to 340 of 1800, of leaves half as large in 220 to
// 490.)
//
// A leaf has a word for each of its pages, or it is packed: it has only those that
// are not what they were to begin with. A packed leaf becomes a whole one when a
// word that it does not have is written, as the next step does, and tidy packs it
// again. (Leaves of clones that wait had such words for four of their 32 pages: whole,
// they were a ninth of all that the clones owned.)
//
// Leaves come from slabs of a host page each. tidy moves them together when a step
// has left slabs that are mostly empty. Both slabs and the directory are of the Go
// heap, since readers take no lock: the garbage collector knows when the last one
// has gone.
//
// A leaf is taken away or replaced while others use its words: see freeze.
const (
	// leafPages is how many pages share a leaf, of 256 bytes if it is whole.
	leafPages = 32
	// slabWords is how many words a slab has room for.
	slabWords = PageSize / 8
	// groupPages is how many pages are visited together.
	groupPages = 512
	// blockPages is how many pages a block of the directory covers, 8 MiB in 1 KiB: a
	// memory file is used in places far apart.
	blockPages = 1 << 11
	// tableChunk is how many pages the table grows by: 1 GiB of file, which is the
	// unit that the memory file grows by.
	tableChunk = 1 << 18
)

// A leaf is the first of the words of leafPages pages; the others follow it in its
// slab. There is one for each page, in order, unless the first one is a packedHeader.
type leaf struct{ first word }

// packedHeader is set in the first word of a packed leaf, and in no word of a page.
// The upper half of that word has a bit for each page whose word the leaf has, in
// order, behind it. Such a first word never changes.
const packedHeader word = 1 << 6

// No constant expression if a word of a page could have it.
const _ = -uint((stateMask | pinned | tmapped | formMask) & packedHeader)

// at returns the nth word of a leaf.
func (l *leaf) at(n int) *word {
	return (*word)(unsafe.Add(unsafe.Pointer(l), n*8))
}

// packed returns a bit for each page that a packed leaf has a word of. ok is false if
// the leaf is whole.
func (l *leaf) packed() (has uint32, ok bool) {
	first := atomic.LoadUint64(&l.first)
	if first == frozen || first&packedHeader == 0 {
		return 0, false // only the words of pages are frozen
	}
	return uint32(first >> 32), true
}

// has returns a bit for each page that the leaf has a word of.
func (l *leaf) has() uint32 {
	if has, ok := l.packed(); ok {
		return has
	}
	return ^uint32(0)
}

// find returns the word of page i of the leaf, or nil if it has none: then it is what
// it was to begin with.
func (l *leaf) find(i uint64) *word {
	has, ok := l.packed()
	if !ok {
		return l.at(int(i))
	}
	if has>>i&1 == 0 {
		return nil
	}
	return l.at(1 + bits.OnesCount32(has&(1<<i-1)))
}

// leafWords is how many words a leaf takes that has those of the pages that has has a
// bit for. One that is whole takes no more than if it were packed.
func leafWords(has uint32) int { return min(1+bits.OnesCount32(has), leafPages) }

// An entry of the directory tells of leafPages pages.
type entry struct {
	// leaf has the words that are not what they were to begin with, and may have
	// others. It is nil if there is none.
	leaf atomic.Pointer[leaf]
	// template has a bit for each page that was adopted: to begin with its word is
	// templateWord, that of others resident. It changes only in adopt.
	template atomic.Uint32
	// mapped has a bit for each page that is the template's and that an application
	// may have mapped from there. It is kept apart from the words because reading
	// memory should not make leaves. A bit may also be left over from an earlier
	// time that the page was the template's.
	mapped atomic.Uint32
}

type block [blockPages / leafPages]entry

type chunk [tableChunk / blockPages]atomic.Pointer[block]

// A table is the page table: one word per page.
type table struct {
	// chunks is replaced as a whole when the table grows.
	chunks atomic.Pointer[[]*chunk]

	// mu is held while the directory, which leaf has an entry's words, or mapped
	// bits change. It is a leaf: nothing is locked while it is held, and it is
	// held for the work on one leaf at a time.
	mu sync.Mutex
	// free is what is left of the last slab.
	free []word
	// slabs, blocks and leaves are how many are in use; slabs is too high rather
	// than too low.
	slabs, blocks, leaves uint64
}

func (t *table) list() []*chunk {
	if p := t.chunks.Load(); p != nil {
		return *p
	}
	return nil
}

// extend makes room for pages.
func (t *table) extend(pages uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	chunks := append([]*chunk(nil), t.list()...)
	for need := int((pages + tableChunk - 1) / tableChunk); len(chunks) < need; {
		chunks = append(chunks, new(chunk))
	}
	t.chunks.Store(&chunks)
}

// entry returns the entry that has page p, or nil if the pages of its block are
// resident.
//
// Preconditions: p is within the file.
func (t *table) entry(p uint64) *entry {
	b := (*t.chunks.Load())[p/tableChunk][p%tableChunk/blockPages].Load()
	if b == nil {
		return nil
	}
	return &b[p%blockPages/leafPages]
}

// initial is what the word of page p is to begin with.
func (e *entry) initial(p uint64) word {
	if e.template.Load()>>(p%leafPages)&1 != 0 {
		return templateWord
	}
	return resident
}

// load returns the word of page p.
//
// Preconditions: p is within the file.
func (t *table) load(p uint64) word {
	for {
		e := t.entry(p)
		if e == nil {
			return resident
		}
		w := e.load(p)
		if w != frozen {
			return w
		}
		t.awaitMove()
	}
}

// load returns the word of page p, or frozen.
func (e *entry) load(p uint64) word {
	if l := e.leaf.Load(); l != nil {
		if at := l.find(p % leafPages); at != nil {
			return atomic.LoadUint64(at)
		}
	}
	return e.initial(p)
}

// awaitMove returns when the leaf that has a word that was frozen is no longer in use:
// whoever froze it has mu until the entry says what holds now.
func (t *table) awaitMove() {
	t.mu.Lock()
	t.mu.Unlock() //nolint:staticcheck
}

// cas changes the word of page p from old to new, and returns false if it is
// another than old.
func (t *table) cas(p uint64, old, new word) bool {
	for {
		if t.load(p) != old {
			return false // without a leaf made for it
		}
		at := t.written(p)
		if atomic.CompareAndSwapUint64(at, old, new) {
			return true
		}
		if atomic.LoadUint64(at) == frozen {
			t.awaitMove()
		}
	}
}

// store sets the word of page p.
//
// Preconditions: the page is committing or busy, and the caller's.
func (t *table) store(p uint64, w word) {
	for {
		at := t.written(p)
		// It has no owner but the caller, but may be moved.
		if old := atomic.LoadUint64(at); old == frozen {
			t.awaitMove()
		} else if atomic.CompareAndSwapUint64(at, old, w) {
			return
		}
	}
}

// written returns where the word of page p is, and makes a leaf that has it if there
// is none.
func (t *table) written(p uint64) *word {
	if e := t.entry(p); e != nil {
		if l := e.leaf.Load(); l != nil {
			if at := l.find(p % leafPages); at != nil {
				return at
			}
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.makeEntry(p)
	l := e.leaf.Load()
	if l == nil {
		t.leaves++
	} else if at := l.find(p % leafPages); at != nil {
		return at
	}
	words := e.freeze(l)
	l = t.newLeaf(&words, ^uint32(0))
	e.leaf.Store(l)
	return l.find(p % leafPages)
}

// makeEntry returns the entry that has page p, and makes it if there is none.
//
// Preconditions: mu is held.
func (t *table) makeEntry(p uint64) *entry {
	b := &t.list()[p/tableChunk][p%tableChunk/blockPages]
	if b.Load() == nil {
		b.Store(new(block))
		t.blocks++
	}
	return t.entry(p)
}

// newLeaf returns a leaf that has the words of those pages that has has a bit for, or
// of all.
//
// Preconditions: mu is held.
func (t *table) newLeaf(words *[leafPages]word, has uint32) *leaf {
	n := leafWords(has)
	if len(t.free) < n {
		t.free = new([slabWords]word)[:]
		t.slabs++
	}
	to := t.free[:n:n]
	t.free = t.free[n:]
	l := (*leaf)(unsafe.Pointer(&to[0]))
	if n == leafPages {
		copy(to, words[:])
		return l
	}
	to[0] = packedHeader | word(has)<<32
	to = to[1:]
	for m := has; m != 0; m &= m - 1 {
		to[0], to = words[bits.TrailingZeros32(m)], to[1:]
	}
	return l
}

// adopt makes the pages [first, last), which are resident and nobody's yet, the
// template's.
func (t *table) adopt(first, last uint64) {
	for p := first; p < last; {
		end := min(last, p|(leafPages-1)+1)
		t.mu.Lock()
		e := t.makeEntry(p)
		e.template.Or(pageBits(p, end))
		if l := e.leaf.Load(); l != nil {
			// Because of other pages.
			for ; p < end; p++ {
				if at := l.find(p % leafPages); at != nil {
					atomic.StoreUint64(at, templateWord)
				}
			}
		}
		t.mu.Unlock()
		p = end
	}
}

// pageBits has a bit for each of the pages [first, last), which are of one leaf.
func pageBits(first, last uint64) uint32 {
	return uint32(1<<(last-first)-1) << (first % leafPages)
}

// skipResident returns the first page from p on that is not resident, or last.
func (t *table) skipResident(p, last uint64) uint64 {
	for p < last {
		end := min(last, p|(leafPages-1)+1)
		if e := t.entry(p); e == nil {
			p = end
		} else if p += uint64(bits.TrailingZeros32(e.notResident() >> (p % leafPages))); p < end {
			return p
		} else {
			p = end
		}
	}
	return last
}

// notResident has a bit for each page of the entry that is not resident, or whose word
// is being moved.
func (e *entry) notResident() uint32 {
	m := e.template.Load() // to begin with, these
	l := e.leaf.Load()
	if l == nil {
		return m
	}
	has := l.has()
	m &^= has
	for ; has != 0; has &= has - 1 {
		i := bits.TrailingZeros32(has)
		if atomic.LoadUint64(l.find(uint64(i)))&stateMask != resident {
			m |= 1 << i
		}
	}
	return m
}

// templates has a bit for each page of the entry that only the template has. ok is
// false if the leaf is being moved.
func (e *entry) templates() (all uint32, ok bool) {
	all = e.template.Load()
	l := e.leaf.Load()
	if l == nil {
		return all, true
	}
	for m := all & l.has(); m != 0; m &= m - 1 {
		w := atomic.LoadUint64(l.find(uint64(bits.TrailingZeros32(m))))
		if w == frozen {
			return 0, false
		}
		if !isTemplate(w) {
			all &^= m & -m
		}
	}
	return all, true
}

// templates has a bit for each page of the leaf of page p that only the template has.
func (t *table) templates(p, _ uint64) uint32 {
	e := t.entry(p)
	if e == nil {
		return 0
	}
	for {
		if m, ok := e.templates(); ok {
			return m
		}
		t.awaitMove()
	}
}

// templatesFrom returns the end of the run of pages from p on, up to last, that only
// the template has.
func (t *table) templatesFrom(p, last uint64) uint64 {
	return runFrom(p, last, t.templates)
}

// templatesTo returns the beginning of the run of such pages, from first on, that
// ends before page p.
func (t *table) templatesTo(p, first uint64) uint64 {
	return runTo(p, first, t.templates)
}

// markFrom is templatesFrom, and marks the pages as mapped from the template.
func (t *table) markFrom(p, last uint64) uint64 { return runFrom(p, last, t.markMapped) }

// markTo is templatesTo, and marks the pages as mapped from the template.
func (t *table) markTo(p, first uint64) uint64 { return runTo(p, first, t.markMapped) }

// runFrom returns the end of the run of pages from p on, up to last, that mask has a
// bit for. mask is asked for pages [first, end) of one leaf at a time.
func runFrom(p, last uint64, mask func(first, end uint64) uint32) uint64 {
	for p < last {
		end := min(last, p|(leafPages-1)+1)
		n := uint64(bits.TrailingZeros32(^(mask(p, end) >> (p % leafPages))))
		if n < end-p {
			return p + n
		}
		p = end
	}
	return last
}

// runTo is runFrom for pages before p, from first on.
func runTo(p, first uint64, mask func(first, end uint64) uint32) uint64 {
	for p > first {
		q := max(first, (p-1)&^(leafPages-1))
		n := uint64(bits.LeadingZeros32(^(mask(q, p) << (leafPages - 1 - (p-1)%leafPages))))
		if n < p-q {
			return p - n
		}
		p = q
	}
	return first
}

// markMapped marks those of the pages [first, end), of one leaf, that only the
// template has, as such that an application may have mapped from there, and returns
// a bit for each.
//
// There is a moment at which they are the template's and marked: marks are only
// taken away with mu held, and by the owner of a busy page. Whoever makes one of them
// resident has claimed it after that moment, and so finds the mark when it takes it.
// The other way round, a page that was claimed before is not the template's when it is
// looked at the second time, and its mark, if it was not taken, is left over.
func (t *table) markMapped(first, end uint64) uint32 {
	e := t.entry(first)
	if e == nil {
		return 0
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	m, _ := e.templates()
	m &= pageBits(first, end)
	if e.mapped.Load()&m != m {
		e.mapped.Or(m)
		// Marked first, looked at then.
		still, _ := e.templates()
		m &= still
	}
	return m
}

// takeMapped tells whether page p is marked as mapped from the template, and takes
// the mark away.
//
// Preconditions: the page is busy, and the caller's.
func (t *table) takeMapped(p uint64) bool {
	e, bit := t.entry(p), uint32(1)<<(p%leafPages)
	if e == nil || e.mapped.Load()&bit == 0 {
		return false
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	e.mapped.And(^bit)
	return true
}

// maybeMapped tells whether page p is marked as mapped from the template, or was when
// it last was the template's.
func (t *table) maybeMapped(p uint64) bool {
	e := t.entry(p)
	return e != nil && e.mapped.Load()>>(p%leafPages)&1 != 0
}

// freeze ends the use of the words of a leaf, which may be nil: afterwards nobody can
// change one, and who wants one waits for mu. It returns the words of all pages.
//
// Preconditions: mu is held.
func (e *entry) freeze(l *leaf) (words [leafPages]word) {
	for i := range words {
		var at *word
		if l != nil {
			at = l.find(uint64(i))
		}
		if at != nil {
			words[i] = atomic.SwapUint64(at, frozen)
		} else {
			words[i] = e.initial(uint64(i))
		}
	}
	return words
}

// changed returns a bit for each page whose word is not what it was to begin with.
func (e *entry) changed(l *leaf) (m uint32) {
	for has := l.has(); has != 0; has &= has - 1 {
		i := uint64(bits.TrailingZeros32(has))
		if atomic.LoadUint64(l.find(i)) != e.initial(i) {
			m |= 1 << i
		}
	}
	return m
}

// tidy takes away leaves that are not needed any more, and packs the others if that
// frees two slabs and 1/32 of them. It ends soon after stop returns true.
//
// Preconditions: Backend.passMu is held.
func (t *table) tidy(stop func() bool) { t.tidyTo(stop, 32, (*entry).changed) }

// tidyInStep is tidy while the guest goes on, and writes words that packed leaves would
// not have: others are moved together as they are if that frees a fifth of the slabs.
//
// Preconditions: Backend.passMu is held.
func (t *table) tidyInStep(stop func() bool) {
	t.tidyTo(stop, 4, func(_ *entry, l *leaf) uint32 { return l.has() })
}

// tidyTo takes away leaves, and moves the others together if that frees two slabs and
// one in share. keep tells which words of a leaf a new one would have; it has all that
// are not what they were to begin with at the time.
func (t *table) tidyTo(stop func() bool, share uint64, keep func(*entry, *leaf) uint32) {
	// How many slabs the leaves would need, and what is free in the last of them.
	need, free := uint64(0), 0
	if !t.eachLeaf(stop, func(e *entry, l *leaf) {
		if e.changed(l) == 0 && t.move(e, l, 0) {
			return
		}
		n := leafWords(keep(e, e.leaf.Load()))
		if n > free {
			need++
			free = slabWords
		}
		free -= n
	}) {
		return
	}
	t.mu.Lock()
	old := t.slabs
	// A move copies words, and makes as much garbage.
	sparse := old >= need+need/share+2
	if sparse {
		t.free = nil
	}
	t.mu.Unlock()
	if !sparse {
		return
	}
	if t.eachLeaf(stop, func(e *entry, l *leaf) { t.move(e, l, keep(e, l)) }) {
		t.mu.Lock()
		// A leaf that was made meanwhile may have been moved, too.
		t.slabs -= old
		t.mu.Unlock()
	}
}

// move replaces a leaf by one that has the words of the pages keep, and those that are
// not what they were to begin with; by none, if there is none. It tells whether there
// is none.
//
// Preconditions: mu is held.
func (t *table) move(e *entry, l *leaf, keep uint32) (gone bool) {
	words := e.freeze(l)
	has := uint32(0)
	for i, w := range words {
		if w != e.initial(uint64(i)) {
			has |= 1 << i
		}
	}
	if has == 0 {
		e.leaf.Store(nil)
		t.leaves--
		return true
	}
	e.leaf.Store(t.newLeaf(&words, has|keep))
	return false
}

// eachLeaf calls fn, with mu held, for each entry that has a leaf. It returns false
// if stop ended it.
func (t *table) eachLeaf(stop func() bool, fn func(e *entry, l *leaf)) bool {
	for _, c := range t.list() {
		for i := range c {
			b := c[i].Load()
			if b == nil {
				continue
			}
			if stop() {
				return false
			}
			for j := range b {
				e := &b[j]
				if e.leaf.Load() == nil {
					continue
				}
				t.mu.Lock()
				if l := e.leaf.Load(); l != nil {
					fn(e, l)
				}
				t.mu.Unlock()
			}
		}
	}
	return true
}

// visit calls fn for groups of pages, in ascending order, that together hold
// every page that is not resident. It ends when fn returns false.
func (t *table) visit(fn func(first, end uint64) bool) { t.visitGroups(false, fn) }

// visitWritten is visit for every page that is neither resident without a kept form
// nor as it was adopted.
func (t *table) visitWritten(fn func(first, end uint64) bool) { t.visitGroups(true, fn) }

func (t *table) visitGroups(written bool, fn func(first, end uint64) bool) {
	for i, c := range t.list() {
		for j := range c {
			b := c[j].Load()
			if b == nil {
				continue
			}
			const entries = groupPages / leafPages
			for k := 0; k < len(b); k += entries {
				some := false
				for e := k; e < k+entries && !some; e++ {
					some = b[e].leaf.Load() != nil || !written && b[e].template.Load() != 0
				}
				first := uint64(i)*tableChunk + uint64(j)*blockPages + uint64(k)*leafPages
				if some && !fn(first, first+groupPages) {
					return
				}
			}
		}
	}
}

// pages is the number of pages that the table covers.
func (t *table) pages() uint64 {
	return uint64(len(t.list())) * tableChunk
}

// heldBytes is the memory that the table takes.
func (t *table) heldBytes() uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return uint64(len(t.list()))*uint64(unsafe.Sizeof(chunk{})) + t.blocks*uint64(unsafe.Sizeof(block{})) + t.slabs*PageSize
}

func (t *table) close() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.chunks.Store(nil)
	t.free, t.slabs, t.blocks, t.leaves = nil, 0, 0, 0
}
