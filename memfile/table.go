package memfile

import (
	"fmt"
	"math/bits"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// PageSize is the unit of eviction, in bytes.
const PageSize = 4096

const pageShift = 12

// A word is a page's entry in the page table.
//
//	bits 0-2   state
//	bit  3     pinned: not to be evicted until dropped
//	bit  4     tmapped: an application may have the template's copy mapped
//	bit  5     deep: the stored form is as small as it gets
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

// tableChunk is how many pages one mapping of the table covers: 1 GiB of file,
// which is the unit the memory file grows by, in 2 MiB of table.
const tableChunk = 1 << 18

// groupPages is how many pages share a host page of the table.
const groupPages = PageSize / 8

// A chunk is the table of tableChunk pages.
type chunk struct {
	// words are off the Go heap, with host memory behind only those groups
	// that were written.
	words *[tableChunk]word

	// used has a bit for each group in which a page was ever marked.
	used [tableChunk / groupPages / 64]atomic.Uint64
}

// A table is the page table: one word per page.
type table struct {
	// mu serialises extend and close.
	mu sync.Mutex

	// chunks is replaced as a whole when the table grows.
	chunks atomic.Pointer[[]*chunk]
}

func (t *table) load() []*chunk {
	if p := t.chunks.Load(); p != nil {
		return *p
	}
	return nil
}

func (t *table) extend(pages uint64) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	chunks := append([]*chunk(nil), t.load()...)
	need := int((pages + tableChunk - 1) / tableChunk)
	for len(chunks) < need {
		m, err := unix.MmapPtr(-1, 0, nil, tableChunk*8, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
		if err != nil {
			t.chunks.Store(&chunks)
			return fmt.Errorf("mapping the page table: %w", err)
		}
		chunks = append(chunks, &chunk{words: (*[tableChunk]word)(m)})
	}
	t.chunks.Store(&chunks)
	return nil
}

// at returns the word of page p.
//
// Preconditions: p is within the file.
func (t *table) at(p uint64) *word {
	return &(*t.chunks.Load())[p/tableChunk].words[p%tableChunk]
}

// use tells that the word of page p is about to be written by an eviction.
// Pages of groups that were never used are resident.
func (t *table) use(p uint64) {
	g := p % tableChunk / groupPages
	u := &t.load()[p/tableChunk].used[g/64]
	if bit := uint64(1) << (g % 64); u.Load()&bit == 0 {
		u.Or(bit)
	}
}

// visit calls fn for ranges of pages, in ascending order, that together hold
// every page that is not resident. It ends when fn returns false.
func (t *table) visit(fn func(first, end uint64) bool) {
	for i, c := range t.load() {
		for j := range c.used {
			for u := c.used[j].Load(); u != 0; u &= u - 1 {
				g := uint64(j*64 + bits.TrailingZeros64(u))
				first := uint64(i)*tableChunk + g*groupPages
				if !fn(first, first+groupPages) {
					return
				}
			}
		}
	}
}

// pages is the number of pages that the table covers.
func (t *table) pages() uint64 {
	return uint64(len(t.load())) * tableChunk
}

// heldBytes is the host memory behind the table.
func (t *table) heldBytes() uint64 {
	n := uint64(0)
	for _, c := range t.load() {
		n += uint64(unsafe.Sizeof(*c))
		for j := range c.used {
			n += uint64(bits.OnesCount64(c.used[j].Load())) * PageSize
		}
	}
	return n
}

func (t *table) close() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, c := range t.load() {
		_ = unix.MunmapPtr(unsafe.Pointer(c.words), tableChunk*8)
	}
	t.chunks.Store(nil)
}
