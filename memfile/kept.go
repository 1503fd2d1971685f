package memfile

import (
	"sync/atomic"

	"runsc-agentzip/memfile/codec"
)

// A page that is restored keeps its stored form, as a page in memory keeps its
// place in swap: most pages that a step wants back it only reads. If the next
// eviction finds the page as it was, it needs no encoding, and what deepening has
// gained is not lost. (Of the pages with a stored form that a step of the
// benchmark's agents wanted, three quarters with language servers and a third to
// a half with pandas were unchanged afterwards.)
//
// Nothing tells when a page changes, so a kept form is no more than a guess: an
// eviction takes it only if it decodes to the page, byte by byte. It costs a tenth
// of the page, or less, for as long as the page is in the file; it is counted as
// part of the store, and is given up when the page is freed or pinned, when an
// eviction finds the page changed, when the store is full or memory is scarce. While
// a checkpoint has all pages in the file none is kept.
//
// A form that refers to the pool is not kept: what it refers to may move.

// keepable tells whether w, the word of a page that is being restored, has a form
// to keep.
func (b *Backend) keepable(w word) bool {
	h := handleOf(w)
	if h == 0 {
		return false
	}
	all, err := b.store.Bytes(h)
	if err != nil || len(all) < blobHeader {
		return false
	}
	return blobHead(atomic.LoadUint64(headAt(all))).base() != basePool
}

// isKept tells whether the form that was kept, according to the word w that the
// page had as a candidate, is that of the content.
//
// Preconditions: the page is committing: nobody else can give up the form.
func (b *Backend) isKept(content *codec.Page, page uint64, w word) bool {
	b.stats.reuse.tries.Add(1)
	s, err := b.blob(page, tagOf(w), handleOf(w))
	if err != nil || s.sum != codec.Sum(content) {
		b.stats.reuse.rejects.Add(1)
		return false
	}
	r := b.restorers.Get().(*restorer)
	defer b.restorers.Put(r)
	got := (*codec.Page)(r.buf[:])
	if b.load(r, got, page, w) != nil || *got != *content {
		// The page is in the file and right, the form is not.
		b.stats.reuse.rejects.Add(1)
		return false
	}
	b.stats.reuse.won(len(s.enc))
	return true
}

// replaceKept changes the word of a page whose form was kept to one without a form.
func (b *Backend) replaceKept(page uint64, old, new word) bool {
	b.frees.open()
	defer b.frees.close()
	if !b.table.cas(page, old, new) {
		return false
	}
	b.forgetKept(old)
	return true
}

// forgetKept gives up the form that a page with the word kept, if it did.
func (b *Backend) forgetKept(w word) {
	if handleOf(w) != 0 {
		b.stats.kept.Add(-1)
		b.discard(w)
	}
}

// DropKept gives up all kept forms, for the memory that they take.
func (b *Backend) DropKept() {
	b.passMu.Lock()
	defer b.passMu.Unlock()
	if !b.closed.Load() {
		b.dropKept()
	}
}

// dropKept gives up all kept forms and returns how many there were.
//
// Preconditions: passMu is held.
func (b *Backend) dropKept() (n uint64) {
	if b.stats.kept.Load() == 0 {
		return 0
	}
	b.table.visitWritten(func(first, end uint64) bool {
		for p := first; p < end; p++ {
			w := b.table.load(p)
			if s := w & stateMask; (s == resident || s == candidate) && handleOf(w) != 0 && b.replaceKept(p, w, w&^formMask) {
				n++
			}
		}
		return true
	})
	return n
}
