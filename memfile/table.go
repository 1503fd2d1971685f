package memfile

import (
	"fmt"
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
//	bits 8-15  codec.Tag of the stored form
//	bits 16-55 arena.Handle of the blob, 0 if the form needs none
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

	tagShift    = 8
	handleShift = 16
	handleMask  = 1<<40 - 1
)

var stateNames = [8]string{"resident", "candidate", "raw", "committing", "evicted", "busy", "invalid", "invalid"}

// tableChunk is how many pages one mapping of the table covers: 1 GiB of file,
// which is the unit the memory file grows by, in 2 MiB of table.
const tableChunk = 1 << 18

// A table is the page table: one word per page, off the Go heap, with host
// memory behind only those parts that were written.
type table struct {
	// mu serialises extend and close.
	mu sync.Mutex

	// chunks is replaced as a whole when the table grows.
	chunks atomic.Pointer[[]*[tableChunk]word]
}

func (t *table) extend(pages uint64) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	var old []*[tableChunk]word
	if p := t.chunks.Load(); p != nil {
		old = *p
	}
	need := int((pages + tableChunk - 1) / tableChunk)
	if need <= len(old) {
		return nil
	}
	chunks := append([]*[tableChunk]word(nil), old...)
	for len(chunks) < need {
		m, err := unix.MmapPtr(-1, 0, nil, tableChunk*8, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
		if err != nil {
			return fmt.Errorf("mapping the page table: %w", err)
		}
		chunks = append(chunks, (*[tableChunk]word)(m))
	}
	t.chunks.Store(&chunks)
	return nil
}

// at returns the word of page p.
//
// Preconditions: p is within the file.
func (t *table) at(p uint64) *word {
	return &(*t.chunks.Load())[p/tableChunk][p%tableChunk]
}

// pages is the number of pages that the table covers.
func (t *table) pages() uint64 {
	if p := t.chunks.Load(); p != nil {
		return uint64(len(*p)) * tableChunk
	}
	return 0
}

// heldBytes is the host memory behind the table.
func (t *table) heldBytes() uint64 {
	p := t.chunks.Load()
	if p == nil {
		return 0
	}
	var n uint64
	vec := make([]byte, tableChunk*8/PageSize)
	for _, c := range *p {
		if err := mincore(unsafe.Pointer(c), tableChunk*8, vec); err != nil {
			n += tableChunk * 8
			continue
		}
		for _, v := range vec {
			n += uint64(v&1) * PageSize
		}
	}
	return n
}

func (t *table) close() {
	t.mu.Lock()
	defer t.mu.Unlock()
	p := t.chunks.Load()
	if p == nil {
		return
	}
	for _, c := range *p {
		_ = unix.MunmapPtr(unsafe.Pointer(c), tableChunk*8)
	}
	t.chunks.Store(nil)
}

func mincore(p unsafe.Pointer, n uintptr, vec []byte) error {
	if _, _, errno := unix.RawSyscall(unix.SYS_MINCORE, uintptr(p), n, uintptr(unsafe.Pointer(&vec[0]))); errno != 0 {
		return errno
	}
	return nil
}
