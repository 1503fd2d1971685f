package memfile

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"runsc-agentzip/memfile/dedup"
)

// What follows is a small Sentry: a memory file (a real one, so that holes,
// residency and partial writes are real) with an allocator, address spaces that
// applications access without any lock, copies in and out through internal
// mappings, file operations that only sections cover, and users that pin. They
// call the Backend exactly where the hooks in gVisor do. The model knows what
// every page must hold.

// A tester is what a test or a rapid property gives.
type tester interface {
	rapid.TB
	Cleanup(func())
}

// A fatalError is what the fake Host.Fatal panics with.
type fatalError string

var errBusy = errors.New("busy")

// faults are injected errors. The chances are per 1024 calls.
type faults struct {
	noMemory   atomic.Bool  // every write fails
	noMemoryIn atomic.Int32 // chance of a write to fail with ENOMEM
	readIn     atomic.Int32
	punchIn    atomic.Int32
	busyIn     atomic.Int32
}

func chance(in *atomic.Int32) bool {
	n := in.Load()
	return n != 0 && rand.Int32N(1024) < n
}

// pageUse is what the allocator knows of a page.
type pageUse struct {
	refs   int32
	waste  bool // freed, content undefined
	system bool // not to be evicted
}

// pageModel is what a page must hold. The lock orders accesses to its content;
// it is taken after whatever keeps an eviction from the page, and nothing waits
// for a Backend while holding it.
type pageModel struct {
	mu   sync.Mutex
	is   version
	last uint32 // the highest version there was of this page
}

// A version is what a page may hold: what was written to some page at some
// time. The zero version is zeroes.
type version struct {
	page uint64
	n    uint32
}

type fakeHost struct {
	fd     int
	lo, hi uint64 // the pages of the file that are used, by number
	mem    []byte // the Sentry's mapping of them
	model  []pageModel
	faults faults
	slow   bool

	// backend is nil if nothing is ever evicted.
	backend *Backend

	// template, if not nil, is what the first pages were adopted from.
	template      fakeTemplate
	adopted       uint64
	templateReads atomic.Uint64

	// mu is the allocator's lock.
	mu    sync.Mutex
	use   []pageUse
	limit uint64 // pages from here on are not part of the file yet

	// spaces is the registry of address spaces.
	spacesMu sync.Mutex
	spaces   map[*space]struct{}
}

// newFakeHost returns a host whose file has n usable pages that straddle two
// chunks of the page table. The second chunk is added when it is needed.
func newFakeHost(tb tester, n uint64, opts *Options) *fakeHost {
	fd, err := unix.MemfdCreate("fake-memory", unix.MFD_CLOEXEC)
	if err != nil {
		tb.Fatal(err)
	}
	h := &fakeHost{
		fd:     fd,
		lo:     tableChunk - n/2,
		hi:     tableChunk - n/2 + n,
		model:  make([]pageModel, n),
		use:    make([]pageUse, n),
		limit:  tableChunk,
		spaces: make(map[*space]struct{}),
	}
	if err := unix.Ftruncate(fd, int64(h.hi<<pageShift)); err != nil {
		tb.Fatal(err)
	}
	h.mem, err = unix.Mmap(fd, int64(h.lo<<pageShift), int(n<<pageShift), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		tb.Fatal(err)
	}
	if opts != nil {
		h.backend, err = New(h, *opts)
		if err != nil {
			tb.Fatal(err)
		}
		if err := h.backend.Extend(tableChunk << pageShift); err != nil {
			tb.Fatal(err)
		}
	}
	tb.Cleanup(func() {
		if h.backend != nil {
			h.backend.Close()
		}
		_ = unix.Munmap(h.mem)
		_ = unix.Close(fd)
	})
	return h
}

// page returns the memory of a page, as the Sentry's mapping has it.
func (h *fakeHost) page(p uint64) []byte {
	return h.mem[(p-h.lo)<<pageShift : (p-h.lo+1)<<pageShift]
}

func (h *fakeHost) ReadAt(p []byte, off uint64) error {
	if chance(&h.faults.readIn) {
		return unix.EIO
	}
	h.delay()
	n, err := unix.Pread(h.fd, p, int64(off))
	if err == nil && n != len(p) {
		err = fmt.Errorf("short read of %d bytes", n)
	}
	return err
}

func (h *fakeHost) WriteAt(p []byte, off uint64) error {
	if h.faults.noMemory.Load() || chance(&h.faults.noMemoryIn) {
		// The host may have found memory for some of it.
		_, _ = unix.Pwrite(h.fd, p[:rand.IntN(len(p)/PageSize)*PageSize], int64(off))
		return unix.ENOMEM
	}
	h.delay()
	_, err := unix.Pwrite(h.fd, p, int64(off))
	h.delay()
	return err
}

func (h *fakeHost) punch(r Range) {
	if err := unix.Fallocate(h.fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, int64(r.Start), int64(r.End-r.Start)); err != nil {
		panic(err)
	}
}

func (h *fakeHost) Punch(r Range) error {
	if chance(&h.faults.punchIn) {
		if n := rand.Uint64N((r.End-r.Start)/PageSize + 1); n != 0 && rand.IntN(2) == 0 {
			h.punch(Range{r.Start, r.Start + n*PageSize})
		}
		return unix.EINTR
	}
	h.delay()
	h.punch(r)
	h.delay()
	return nil
}

// delay is the host being slow now and then.
func (h *fakeHost) delay() {
	if !h.slow {
		return
	}
	switch rand.IntN(64) {
	case 0, 1:
		time.Sleep(time.Duration(rand.IntN(300)) * time.Microsecond)
	case 2, 3, 4, 5:
		runtime.Gosched()
	}
}

func (h *fakeHost) Resident(off uint64, vec []byte) error {
	m := h.mem[off-h.lo<<pageShift:]
	if _, _, errno := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(&m[0])), uintptr(len(vec)*PageSize), uintptr(unsafe.Pointer(&vec[0]))); errno != 0 {
		return errno
	}
	return nil
}

func (h *fakeHost) HeldBytes() (uint64, error) {
	var st unix.Stat_t
	err := unix.Fstat(h.fd, &st)
	return uint64(st.Blocks) * 512, err
}

func (h *fakeHost) VisitEvictable(fn func(Range)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for i := 0; i < len(h.use); {
		if h.use[i].refs == 0 || h.use[i].system {
			i++
			continue
		}
		first := i
		for i < len(h.use) && h.use[i].refs != 0 && !h.use[i].system && i-first < 100 {
			i++
		}
		fn(Range{(h.lo + uint64(first)) << pageShift, (h.lo + uint64(i)) << pageShift})
	}
}

func (h *fakeHost) EndAccess(marked []Range, unmark func(Range), deadline time.Time, stop func() bool) error {
	h.spacesMu.Lock()
	var todo []*space
	for s := range h.spaces {
		todo = append(todo, s)
	}
	h.spacesMu.Unlock()
	for len(todo) != 0 {
		if stop() || time.Now().After(deadline) || chance(&h.faults.busyIn) {
			return errBusy
		}
		busy := todo[:0]
		for _, s := range todo {
			if !s.tryUnmap(marked, unmark) {
				busy = append(busy, s)
			}
		}
		if todo = busy; len(todo) != 0 {
			time.Sleep(20 * time.Microsecond)
		}
	}
	return nil
}

// Premap maps pages that applications are expected to access. Not every address
// space can be had at any time.
func (h *fakeHost) Premap(ranges []Range, stop func() bool) {
	h.spacesMu.Lock()
	defer h.spacesMu.Unlock()
	for s := range h.spaces {
		if stop() || !s.mu.TryRLock() {
			continue
		}
		for _, p := range s.extents {
			for _, r := range ranges {
				if r = (Range{max(r.Start, p.Start), min(r.End, p.End)}); r.Start < r.End {
					_ = s.mapFile(p, r)
				}
			}
		}
		s.mu.RUnlock()
	}
}

func (h *fakeHost) Fatal(msg string) { panic(fatalError(msg)) }

// --- What hooks and glue do ---

// gate is pageBackendRef.gate.
func (h *fakeHost) gate(r Range) error {
	if h.backend == nil || h.backend.NonResident().Load() == 0 {
		return nil
	}
	return h.backend.Gate(r.Start, r.End)
}

func (h *fakeHost) drop(r Range) {
	if h.backend != nil {
		h.backend.Drop(r.Start, r.End)
	}
}

func (h *fakeHost) enter() func() {
	if h.backend == nil {
		return func() {}
	}
	token := h.backend.EnterSection()
	return func() { h.backend.ExitSection(token) }
}

// window is MemoryFile.MapWindow.
func (h *fakeHost) window(need, lim Range) Range {
	if h.backend == nil || h.backend.NonResident().Load() == 0 {
		return lim
	}
	s, e := h.backend.Window(need.Start, need.End, lim.Start, lim.End)
	return Range{s, e}
}

func (r Range) pages(fn func(p uint64)) {
	for p := r.Start >> pageShift; p < r.End>>pageShift; p++ {
		fn(p)
	}
}

// allocate is MemoryFile.Allocate: it returns n pages of zeroes with one
// reference, or false if there are none in a row.
func (h *fakeHost) allocate(n uint64, system bool) (Range, bool) {
	defer h.enter()()
	h.mu.Lock()
	// Free pages, or waste pages, first fit; never both.
	run := func(waste bool) (uint64, bool) {
		length := uint64(0)
		for i := range h.use {
			if h.use[i].refs == 0 && h.use[i].waste == waste {
				if length++; length == n {
					return uint64(i) + 1 - n, true
				}
			} else {
				length = 0
			}
		}
		return 0, false
	}
	first, recycled := uint64(0), true
	var ok bool
	if first, ok = run(true); !ok {
		recycled = false
		if first, ok = run(false); !ok {
			h.mu.Unlock()
			return Range{}, false
		}
	}
	r := Range{(h.lo + first) << pageShift, (h.lo + first + n) << pageShift}
	if end := r.End >> pageShift; end > h.limit {
		if h.backend != nil {
			if err := h.backend.Extend(r.End); err != nil {
				panic(err)
			}
		}
		h.limit = (end + tableChunk - 1) / tableChunk * tableChunk
	}
	for i := first; i < first+n; i++ {
		h.use[i] = pageUse{refs: 1, system: system}
	}
	h.mu.Unlock()
	if recycled {
		if err := h.gate(r); err != nil {
			h.decRef(r)
			return Range{}, false
		}
		r.pages(func(p uint64) {
			m := &h.model[p-h.lo]
			m.mu.Lock()
			clear(h.page(p))
			m.is = version{}
			m.mu.Unlock()
		})
	}
	return r, true
}

func (h *fakeHost) incRef(r Range) {
	h.mu.Lock()
	defer h.mu.Unlock()
	r.pages(func(p uint64) {
		if h.use[p-h.lo].refs == 0 {
			panic("incRef of a free page")
		}
		h.use[p-h.lo].refs++
	})
}

func (h *fakeHost) hasUniqueRef(r Range) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	unique := true
	r.pages(func(p uint64) { unique = unique && h.use[p-h.lo].refs == 1 })
	return unique
}

// decRef is MemoryFile.DecRef.
func (h *fakeHost) decRef(r Range) {
	h.mu.Lock()
	defer h.mu.Unlock()
	r.pages(func(p uint64) {
		u := &h.use[p-h.lo]
		if u.refs--; u.refs == 0 {
			u.waste = true
			h.drop(Range{p << pageShift, (p + 1) << pageShift})
		} else if u.refs < 0 {
			panic("decRef of a free page")
		}
	})
}

// release is the releaser goroutine of a MemoryFile: it frees up to n waste
// pages.
func (h *fakeHost) release(n int) {
	var taken []uint64
	h.mu.Lock()
	for i := range h.use {
		if h.use[i].waste && len(taken) < n {
			h.use[i] = pageUse{refs: 1, system: true} // in nobody's hands
			taken = append(taken, h.lo+uint64(i))
		}
	}
	h.mu.Unlock()
	for _, p := range taken {
		h.model[p-h.lo].mu.Lock()
		h.punch(Range{p << pageShift, (p + 1) << pageShift})
		h.model[p-h.lo].is = version{}
		h.model[p-h.lo].mu.Unlock()
	}
	h.mu.Lock()
	for _, p := range taken {
		h.use[p-h.lo] = pageUse{}
	}
	h.mu.Unlock()
}

// decommit is MemoryFile.Decommit. The caller holds a reference to r.
func (h *fakeHost) decommit(r Range) {
	defer h.enter()()
	r.pages(func(p uint64) { h.model[p-h.lo].mu.Lock() })
	h.drop(r)
	h.punch(r)
	r.pages(func(p uint64) {
		h.model[p-h.lo].is = version{}
		h.model[p-h.lo].mu.Unlock()
	})
}

// --- Address spaces ---

// A space is a memory manager with its address space.
type space struct {
	h *fakeHost

	// mu is activeMu.
	mu      sync.RWMutex
	extents []pma
	locked  []Range // mlocked parts of extents

	// templateMu orders mapping the template's pages as against replacing such
	// mappings.
	templateMu sync.Mutex

	// tlb is held for reading while the application accesses memory: a change
	// of its mappings takes effect at once for the next access and waits for
	// those under way, as it does in hardware.
	tlb    sync.RWMutex
	mapped []mapping
}

// A pma is a part of the file in an address space, with a reference to it.
type pma struct {
	Range

	// private pages are written to in place by their only owner.
	private bool

	// adopted pages came from the template. Somebody always keeps them, so that
	// there are some throughout a test.
	adopted bool

	// needCOW is set if other address spaces may have references, and nobody
	// writes in place.
	needCOW bool
}

// A mapping is how the application sees a page.
type mapping uint8

const (
	unmapped mapping = iota
	mappedFile
	mappedFileRO
	mappedTemplate
)

func (h *fakeHost) newSpace() *space {
	s := &space{h: h, mapped: make([]mapping, len(h.use))}
	h.spacesMu.Lock()
	defer h.spacesMu.Unlock()
	h.spaces[s] = struct{}{}
	return s
}

// tryUnmap is MemoryManager.tryUnmapFile.
func (s *space) tryUnmap(marked []Range, unmark func(Range)) bool {
	if !s.mu.TryLock() {
		return false
	}
	defer s.mu.Unlock()
	for _, r := range s.locked {
		unmark(r)
	}
	for _, r := range marked {
		s.remap(r, unmapped)
	}
	return true
}

// remap is AddressSpace.Unmap or MapFile. The caller has mu locked.
func (s *space) remap(r Range, m mapping) {
	s.tlb.Lock()
	defer s.tlb.Unlock()
	r.pages(func(p uint64) { s.mapped[p-s.h.lo] = m })
}

// find returns the number of the pma that has the page, or -1. The caller has mu
// locked.
func (s *space) find(p uint64) int {
	return slices.IndexFunc(s.extents, func(r pma) bool { return r.Start <= p<<pageShift && p<<pageShift < r.End })
}

// access is the application's access to a page. It returns false if the space
// does not have the page or the host has no memory for it.
func (s *space) access(p uint64, write bool) bool {
	for {
		s.tlb.RLock()
		switch m := s.mapped[p-s.h.lo]; {
		case m == mappedFile, m == mappedFileRO && !write:
			s.h.touch(p, write)
			s.tlb.RUnlock()
			return true
		case m == mappedTemplate && !write:
			s.h.readTemplate(p)
			s.tlb.RUnlock()
			return true
		}
		s.tlb.RUnlock()
		if !s.fault(p, write) {
			return false
		}
	}
}

// breakCOW is what getPMAsLocked does before a write to the i-th pma. It returns
// false if the pages have been copied: then the pma has others.
//
// The caller has mu locked for writing.
func (s *space) breakCOW(i int) bool {
	pma := &s.extents[i]
	if !pma.needCOW {
		return true
	}
	if s.h.hasUniqueRef(pma.Range) {
		pma.needCOW = false
		return true
	}
	old := pma.Range
	r, ok := s.h.allocate((old.End-old.Start)>>pageShift, false)
	if !ok {
		return false
	}
	// Allocate's section covers the copy.
	defer s.h.enter()()
	if s.gatePMA(*pma, old) != nil || s.h.gate(r) != nil {
		s.h.decRef(r)
		return false
	}
	for off := uint64(0); off < old.End-old.Start; off += PageSize {
		s.h.copyPage((r.Start+off)>>pageShift, (old.Start+off)>>pageShift)
	}
	pma.Range, pma.needCOW, pma.adopted = r, false, false
	s.remap(old, unmapped)
	s.h.decRef(old)
	return false
}

// fork gives the i-th pma of s to child, too.
func (s *space) fork(i int, child *space) {
	s.mu.Lock()
	if i >= len(s.extents) {
		s.mu.Unlock()
		return
	}
	p := &s.extents[i]
	if p.private {
		p.needCOW = true
		s.remap(p.Range, unmapped)
	}
	s.h.incRef(p.Range)
	cp := *p
	s.mu.Unlock()
	child.mu.Lock()
	defer child.mu.Unlock()
	child.extents = append(child.extents, cp)
}

// fault is MemoryManager.HandleUserFault.
func (s *space) fault(p uint64, write bool) bool {
	if write {
		s.mu.Lock()
		i := s.find(p)
		ok := i >= 0 && s.breakCOW(i)
		s.mu.Unlock()
		if !ok {
			return false // the page is no longer the one meant
		}
	}
	s.mu.RLock()
	defer s.mu.RUnlock()
	i := s.find(p)
	if i < 0 {
		return false
	}
	pma := s.extents[i]
	b := s.h.backend
	need := Range{p << pageShift, (p + 1) << pageShift}
	if s.mayMapTemplate(pma) {
		if write && !pma.needCOW && b.TemplateBacked(need.Start) {
			// mapFaultLocked
			var r Range
			r.Start, r.End = b.CopyUp(need.Start, pma.Start, pma.End)
			mustContain(r, need, pma.Range)
			s.templateMu.Lock()
			defer s.templateMu.Unlock()
			if s.h.gate(r) != nil {
				return false
			}
			s.remap(r, mappedFile)
			b.ClearTemplateMapped(r.Start, r.End)
			return true
		}
		// mapWindowLocked. The lock is held until the page is mapped from
		// wherever it is: a mapping of the file, made here, may otherwise be
		// written to, and then be replaced by one of the template that somebody
		// else is about to make.
		s.templateMu.Lock()
		defer s.templateMu.Unlock()
		start, end, off, ok := b.TemplateWindow(need.Start, pma.Start, pma.End)
		if ok {
			r := Range{start, end}
			mustContain(r, need, pma.Range)
			r.pages(func(p uint64) {
				if want := s.h.template.pageOf(p); off>>pageShift+p-start>>pageShift != want {
					panic(fmt.Sprintf("page %#x is template page %d, mapped from offset %#x for %#x", p<<pageShift, want, off, start))
				}
			})
			s.h.delay()
			s.remap(r, mappedTemplate)
			return true
		}
		if start, end, refault := b.Refault(need.Start, pma.Start, pma.End); refault {
			mustContain(Range{start, end}, need, pma.Range)
			s.templateMu.Unlock()
			err := s.mapPieces(pma, Range{start, end})
			s.templateMu.Lock()
			return err == nil
		}
	}
	win := s.h.window(need, pma.Range)
	mustContain(win, need, pma.Range)
	return s.mapFileLocked(pma, win) == nil
}

// mapPieces is the end of mapWindowLocked. The caller has mu locked.
func (s *space) mapPieces(p pma, r Range) error {
	b := s.h.backend
	for r.Start < r.End {
		end, template := b.Piece(r.Start, r.End)
		piece := Range{r.Start, end}
		if end <= r.Start || end > r.End {
			panic(fmt.Sprintf("piece %x of %x", piece, r))
		}
		r.Start = end
		s.h.delay()
		if template {
			s.templateMu.Lock()
			off, ok := b.MapTemplate(piece.Start, piece.End)
			if ok {
				if want := s.h.template.pageOf(piece.Start >> pageShift); off>>pageShift != want {
					panic(fmt.Sprintf("page %#x is template page %d, mapped from offset %#x", piece.Start, want, off))
				}
				s.h.delay()
				s.remap(piece, mappedTemplate)
			}
			s.templateMu.Unlock()
			if ok {
				continue
			}
		}
		if err := s.mapRestored(p, piece); err != nil {
			return err
		}
	}
	return nil
}

// mapRestored is mapRestoredLocked. The caller has mu locked.
func (s *space) mapRestored(p pma, r Range) error {
	if err := s.h.gate(r); err != nil {
		return err
	}
	s.templateMu.Lock()
	defer s.templateMu.Unlock()
	if err := s.mapFileLocked(p, r); err != nil {
		return err
	}
	if !p.needCOW {
		s.h.backend.ClearTemplateMapped(r.Start, r.End)
	}
	return nil
}

// mapFile maps a part of a pma. The caller has mu locked.
func (s *space) mapFile(p pma, r Range) error {
	if s.mayMapTemplate(p) {
		s.templateMu.Lock()
		defer s.templateMu.Unlock()
	}
	return s.mapFileLocked(p, r)
}

// mapFileLocked is mapFile with templateMu locked, if it matters.
func (s *space) mapFileLocked(p pma, r Range) error {
	s.h.delay()
	if err := s.h.gate(r); err != nil {
		return err
	}
	s.h.delay()
	if p.needCOW {
		s.remap(r, mappedFileRO)
	} else {
		s.remap(r, mappedFile)
	}
	return nil
}

func mustContain(win, need, limit Range) {
	if win.Start > need.Start || win.End < need.End || win.Start < limit.Start || win.End > limit.End {
		panic(fmt.Sprintf("window %x for %x in %x", win, need, limit))
	}
}

func (s *space) mayMapTemplate(p pma) bool {
	return s.h.template != nil && p.private
}

// gatePMA is MemoryManager.gatePMA. The caller has mu locked.
func (s *space) gatePMA(p pma, r Range) error {
	if !s.mayMapTemplate(p) {
		return s.h.gate(r)
	}
	b := s.h.backend
	mapped, err := b.GateMapped(r.Start, r.End)
	if err != nil {
		return err
	}
	if mapped && !p.needCOW {
		s.templateMu.Lock()
		defer s.templateMu.Unlock()
		s.remap(r, unmapped)
		b.ClearTemplateMapped(r.Start, r.End)
	}
	return nil
}

// copyIO is a copy in or out: up to n pages of a pma.
func (s *space) copyIO(rnd *rand.Rand, n uint64, write bool) error {
	if write {
		s.mu.Lock()
		for i := range s.extents {
			if rnd.IntN(3) == 0 {
				s.breakCOW(i)
			}
		}
		s.mu.Unlock()
	}
	s.mu.RLock()
	defer s.mu.RUnlock()
	if len(s.extents) == 0 {
		return nil
	}
	p := s.extents[rnd.IntN(len(s.extents))]
	return s.copyRange(p, part(rnd, p.Range, n), write && !p.needCOW)
}

// copyRange is a copy in or out. The caller has mu locked.
func (s *space) copyRange(p pma, r Range, write bool) error {
	if err := s.gatePMA(p, r); err != nil {
		return err
	}
	r.pages(func(p uint64) { s.h.touch(p, write) })
	return nil
}

// part returns a part of r that is at most n pages long.
func part(rnd *rand.Rand, r Range, n uint64) Range {
	total := (r.End - r.Start) >> pageShift
	k := 1 + rnd.Uint64N(min(n, total))
	start := r.Start + rnd.Uint64N(total-k+1)<<pageShift
	return Range{start, start + k<<pageShift}
}

// mmap adds a pma, whose reference the space takes over.
func (s *space) mmap(r Range, private bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.extents = append(s.extents, pma{Range: r, private: private})
}

// munmap removes a pma.
func (s *space) munmap(rnd *rand.Rand) {
	s.mu.Lock()
	if len(s.extents) == 0 {
		s.mu.Unlock()
		return
	}
	s.munmapLocked(rnd.IntN(len(s.extents)))
}

// munmapLocked removes the i-th pma. The caller has mu locked, and no longer
// afterwards.
func (s *space) munmapLocked(i int) {
	r := s.extents[i].Range
	if s.extents[i].adopted && s.h.hasUniqueRef(r) {
		s.mu.Unlock()
		return
	}
	s.extents[i] = s.extents[len(s.extents)-1]
	s.extents = s.extents[:len(s.extents)-1]
	s.locked = nil
	s.remap(r, unmapped)
	s.mu.Unlock()
	s.h.decRef(r)
}

// --- Templates ---

// A fakeTemplate has, for each page, the page of the file that was adopted from
// it. What it holds is version 1 of that page.
type fakeTemplate []uint64

func (t fakeTemplate) Pages() uint64 { return uint64(len(t)) }

func (t fakeTemplate) ReadPages(dst []byte, n uint64) error {
	for i := uint64(0); i < uint64(len(dst))>>pageShift; i++ {
		content(dst[i<<pageShift:][:PageSize], version{t[n+i], 1})
	}
	return nil
}

// Similar returns pages at random, some of which are of the same kind.
func (t fakeTemplate) Similar(s *dedup.Sketch, best []dedup.Match) (n int) {
	for n < min(s.N, len(best)) && len(t) != 0 {
		best[n] = dedup.Match{Item: s.Feature[n] % uint32(len(t)), Shared: 2}
		n++
	}
	return n
}

// pageOf returns the number of the template's page for a page of the file.
func (t fakeTemplate) pageOf(p uint64) uint64 {
	for i := range t {
		if t[i] == p {
			return uint64(i)
		}
	}
	panic(fmt.Sprintf("page %#x is not in the template", p<<pageShift))
}

// readTemplate verifies that a page, which the application has mapped from the
// template, should still have that content.
func (h *fakeHost) readTemplate(p uint64) {
	m := &h.model[p-h.lo]
	m.mu.Lock()
	defer m.mu.Unlock()
	h.templateReads.Add(1)
	var have, want [PageSize]byte
	content(have[:], version{p, 1})
	content(want[:], m.is)
	if have != want {
		panic(fmt.Sprintf("page %#x is mapped from the template but has version %x; word %#x", p<<pageShift, m.is, h.backend.table.load(p)))
	}
}

// adopt makes the first n pages of the file those of a template, with holes and
// an offset between the two, and returns them as pmas that hold references.
// Without a Backend, the pages are loaded.
func (h *fakeHost) adopt(tb tester, rnd *rand.Rand, n uint64) (pmas []pma) {
	tb.Helper()
	type piece struct{ r, hole Range }
	var pieces []piece
	template := fakeTemplate{h.hi, h.hi} // in nobody's use
	for left := n; left != 0; {
		r, ok := h.allocate(1+rnd.Uint64N(min(left, 48)), false)
		hole, _ := h.allocate(1+rnd.Uint64N(3), false)
		if !ok {
			tb.Fatal("no room")
		}
		left -= (r.End - r.Start) >> pageShift
		pieces = append(pieces, piece{r, hole})
		r.pages(func(p uint64) { template = append(template, p) })
	}
	if h.backend != nil {
		h.template = template
		h.backend.SetTemplate(template, true)
	}
	off := uint64(2 * PageSize)
	for _, pc := range pieces {
		if h.backend == nil {
			pc.r.pages(func(p uint64) { content(h.page(p), version{p, 1}) })
		} else if err := h.backend.Adopt(pc.r, off); err != nil {
			tb.Fatal(err)
		}
		off += pc.r.End - pc.r.Start
		pc.r.pages(func(p uint64) { h.model[p-h.lo].is = version{p, 1} })
		pmas = append(pmas, pma{Range: pc.r, private: true, adopted: true}, pma{Range: pc.hole, private: true})
	}
	h.adopted = n
	return pmas
}

// --- Content ---

// bases are pages of different kinds, made unique by stamps.
var bases = func() (bs [8][PageSize]byte) {
	rnd := rand.New(rand.NewPCG(1, 2))
	random := func(b []byte) {
		for i := range b {
			b[i] = byte(rnd.Uint32())
		}
	}
	words := bytes.Fields([]byte("the quick brown fox jumps over a lazy dog and eats seven more of them 0x7f00 nil error"))
	for k := range bs {
		b := bs[k][:]
		switch k {
		case 0: // zeroes
		case 1: // one word repeated
		case 2, 3, 4: // text
			for i := 0; i < len(b); {
				i += copy(b[i:], words[rnd.IntN(len(words))])
				i += copy(b[i:], " ")
			}
		case 5: // few words that are not zero
			for range 20 {
				random(b[rnd.IntN(PageSize-8):][:8])
			}
		case 6: // incompressible
			random(b)
		case 7: // hardly compressible
			random(b[:PageSize*8/10])
		}
	}
	return bs
}()

func (v version) hash() uint64 {
	x := v.page*0x9e3779b97f4a7c15 ^ uint64(v.n)*0xbf58476d1ce4e5b9
	x ^= x >> 29
	return x * 0x94d049bb133111eb
}

// content fills dst with what a version holds.
func content(dst []byte, v version) {
	x := v.hash()
	if v.n != 0 && v.n%3 == 0 {
		// Version 1 with a few words changed.
		content(dst, version{v.page, 1})
		for i := range 4 {
			binary.LittleEndian.PutUint64(dst[x>>(9*i)%(PageSize/8)*8:], x)
		}
		return
	}
	kind := x >> 32 % uint64(len(bases))
	switch {
	case v.n == 0 || kind == 0:
		clear(dst)
	case kind == 1:
		for i := 0; i < PageSize; i += 8 {
			binary.LittleEndian.PutUint64(dst[i:], x|1)
		}
	default:
		copy(dst, bases[kind][:])
		for i := 0; i < PageSize; i += 512 {
			binary.LittleEndian.PutUint64(dst[i:], x)
			binary.LittleEndian.PutUint64(dst[i+8:], v.page<<32|uint64(v.n))
		}
	}
}

// touch verifies a page, which the caller may access, and writes a new version
// if write is set.
func (h *fakeHost) touch(p uint64, write bool) {
	m := &h.model[p-h.lo]
	m.mu.Lock()
	defer m.mu.Unlock()
	mem := h.page(p)
	var want [PageSize]byte
	content(want[:], m.is)
	if !bytes.Equal(mem, want[:]) {
		panic(fmt.Sprintf("page %#x has wrong content: version %x expected; %s", p<<pageShift, m.is, h.describe(p, mem, want[:])))
	}
	if write {
		// Now and then what the template has.
		m.last++
		m.is = version{p, m.last + 1}
		if m.last%2 == 0 {
			m.is.n = 1
		}
		content(mem, m.is)
	}
}

// copyPage verifies a page and copies it to another.
func (h *fakeHost) copyPage(to, from uint64) {
	h.touch(from, false)
	// The copy is new to everybody but its maker.
	h.model[from-h.lo].mu.Lock()
	defer h.model[from-h.lo].mu.Unlock()
	copy(h.page(to), h.page(from))
	h.model[to-h.lo].mu.Lock()
	defer h.model[to-h.lo].mu.Unlock()
	h.model[to-h.lo].is = h.model[from-h.lo].is
}

func (h *fakeHost) describe(p uint64, got, want []byte) string {
	i := 0
	for got[i] == want[i] {
		i++
	}
	s := fmt.Sprintf("first difference at byte %d, is %x, should be %x", i, got[i:min(i+16, PageSize)], want[i:min(i+16, PageSize)])
	if h.backend != nil {
		s += fmt.Sprintf("; word %#x", h.backend.table.load(p))
	}
	return s
}

func (h *fakeHost) read(p uint64)  { h.touch(p, false) }
func (h *fakeHost) write(p uint64) { h.touch(p, true) }

// verifyAll gates and verifies every page in use.
func (h *fakeHost) verifyAll(tb tester) {
	tb.Helper()
	for i := range h.use {
		p := h.lo + uint64(i)
		if h.use[i].refs == 0 {
			continue
		}
		if err := h.gate(Range{p << pageShift, (p + 1) << pageShift}); err != nil {
			tb.Fatalf("gate of page %#x: %v", p<<pageShift, err)
		}
		h.read(p)
	}
}

// --- Invariants ---

// verifyBackend checks everything that the Backend counts against the page
// table and the store. Nothing may be going on.
func (h *fakeHost) verifyBackend(tb tester) {
	tb.Helper()
	b := h.backend
	states, tags := map[word]int64{}, map[int]int64{}
	var blobs uint64
	var kept int64
	for p := uint64(0); p < b.table.pages(); p++ {
		if b.table.entry(p) == nil {
			p += blockPages - 1 // all resident, says the table
			continue
		}
		w := b.table.load(p)
		states[w&stateMask]++
		if w&stateMask == evicted {
			tags[int(tagOf(w))]++
		}
		if handleOf(w) != 0 {
			blobs++
			if w&stateMask == resident {
				kept++
			} else if w&stateMask != evicted {
				tb.Errorf("page %#x is %s and has a form", p<<pageShift, stateNames[w&stateMask])
			}
		}
	}
	for s, n := range states {
		if n != 0 && s != resident && s != raw && s != evicted {
			tb.Errorf("%d pages are %s", n, stateNames[s])
		}
	}
	equal := func(what string, got, want int64) {
		tb.Helper()
		if got != want {
			tb.Errorf("%s: %d, should be %d", what, got, want)
		}
	}
	always := int64(0)
	if h.template != nil {
		always = 1
	}
	equal("nonResident", b.nonResident.Load(), states[raw]+states[evicted]+always)
	equal("kept", b.stats.kept.Load(), kept)
	equal("raw", b.stats.raw.Load(), states[raw])
	for i := range b.stats.forms {
		equal(fmt.Sprintf("pages in form %d", i), b.stats.forms[i].Load(), tags[i])
	}
	equal("evicted pages", int64(b.stats.evictedPages()), states[evicted])
	equal("blobs", int64(b.store.Stats().Blobs), int64(blobs)+b.stats.orphans.Load())
	equal("evicted in total", int64(b.stats.evictedTotal.Load()+h.adopted), int64(b.stats.restored.Load()+b.stats.dropped.Load())+states[evicted])
	equal("restored by cause", int64(b.stats.demand.Load()+b.stats.prefetched.Load()+b.stats.saved.Load()), int64(b.stats.restored.Load()))
	equal("waiters", b.waiters.waiting.Load(), 0)
	equal("restores", int64(len(b.restoring)), 0)
	equal("open frees", int64(b.frees.opened.Load()), int64(b.frees.closed.Load()))
	for i := range b.sections.n {
		equal("open sections", b.sections.n[i].count.Load(), 0)
	}
	equal("saves", b.inhibit.Load(), 0)
	res, err := b.Check(nil)
	if err != nil {
		tb.Errorf("check: %v", err)
	}
	for _, p := range res.Problems {
		tb.Errorf("check: %s", p)
	}
	equal("pages checked", int64(res.Stored), states[evicted])
}
