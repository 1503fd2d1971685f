package pgalloc

import (
	"fmt"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/context"
	"gvisor.dev/gvisor/pkg/errors/linuxerr"
	"gvisor.dev/gvisor/pkg/hostarch"
	"gvisor.dev/gvisor/pkg/log"
	"gvisor.dev/gvisor/pkg/safemem"
	"gvisor.dev/gvisor/pkg/sentry/memmap"
	"gvisor.dev/gvisor/pkg/sentry/usage"
)

// NoSyscall is the number of no system call.
const NoSyscall = ^uintptr(0)

// A PageBackend owns the content of a MemoryFile's pages: it may take a page
// out of the backing file while nothing can access it, and puts it back before
// anything does. All offsets are bytes into the memory file.
//
// Lock order: any Sentry lock, MemoryFile.mu included, may be held when calling
// a PageBackend; a PageBackend never takes MemoryFile.mu in the methods below,
// BeginSave excepted.
type PageBackend interface {
	// Extend tells that the file now has size bytes. It precedes every access
	// to the new pages.
	Extend(size uint64) error

	// Gate returns with every page that overlaps [start, end) in the file.
	// It must be called after whatever makes the caller visible to an
	// eviction (MemoryManager.activeMu or a section) and before the access.
	Gate(start, end uint64) error

	// Drop forgets the content of [start, end): the caller is about to free
	// or zero those pages. It may be called with MemoryFile.mu locked.
	Drop(start, end uint64)

	// Decommit is Drop for pages that stay in use, and pinned if they are.
	Decommit(start, end uint64)

	// Pin is Gate, and keeps the pages from eviction until they are dropped.
	Pin(start, end uint64) error

	// Window returns the part of [limStart, limEnd) worth mapping in one go
	// for an access to [needStart, needEnd), which it includes.
	Window(needStart, needEnd, limStart, limEnd uint64) (uint64, uint64)

	// NonResident counts the pages for which Gate has something to do. While
	// it is zero, Gate need not be called.
	NonResident() *atomic.Int64

	// EnterSection and ExitSection bracket accesses through mappings that no
	// MemoryManager lock covers. They nest and never block.
	EnterSection() uint32
	ExitSection(token uint32)

	// BeginSave brings all pages back and inhibits eviction until the
	// returned function is called.
	BeginSave() (func(), error)

	// CopyUp returns what a first write to the template's page at need makes
	// the application's own.
	CopyUp(need, limStart, limEnd uint64) (start, end uint64)

	// Refault returns what to restore and map for a fault on the page at need,
	// and whether there is anything to restore.
	Refault(need, limStart, limEnd uint64) (start, end uint64, refault bool)

	// EvictedBytes is the size of the pages that the file does not hold but
	// the guest has committed.
	EvictedBytes() uint64

	// OverlayCommitted sets bit 0 of vec[i] for each evicted page, vec[0]
	// being the page at start, as mincore would had the page not been evicted.
	OverlayCommitted(start uint64, vec []byte)

	// Admit is called before a fault (sysno is NoSyscall) or a system call of a task
	// is handled, with no lock held: it may wait for memory, as long as the task is
	// not killed.
	Admit(t context.Context, sysno uintptr)

	// HasTemplate tells whether there is a template: an immutable file with
	// the pages that the memory file was loaded with. The methods below are
	// called only if there is.
	HasTemplate() bool

	// TemplateFD is the template's file, which cannot be written to.
	TemplateFD() int

	// Adopt tells that the pages of [start, end) are those of the template
	// from byte off on. Their content is not in the memory file.
	Adopt(start, end, off uint64) error

	// TemplateWindow returns the part of [limStart, limEnd) around the page at
	// need that an application may map from the template, from byte off on,
	// if that is worth it. The caller holds MemoryManager.templateMu until it
	// has made the mapping.
	TemplateWindow(need, limStart, limEnd uint64) (start, end, off uint64, ok bool)

	// Piece returns the end of the part of [start, end) from start on that a
	// fault should map in one way, and whether that is from the template.
	Piece(start, end uint64) (pieceEnd uint64, template bool)

	// MapTemplate is TemplateWindow for exactly [start, end).
	MapTemplate(start, end uint64) (off uint64, ok bool)

	// ReadTemplate fills dst with the pages from byte start on, as far as they
	// are the template's only, and returns how many bytes that are.
	ReadTemplate(dst []byte, start uint64) (n uint64)

	// TemplateBacked tells whether the page at off is the template's, or may
	// be mapped from it.
	TemplateBacked(off uint64) bool

	// GateMapped is Gate, and tells whether a page may be mapped from the
	// template.
	GateMapped(start, end uint64) (mapped bool, err error)

	// ClearTemplateMapped tells that no page in [start, end) is mapped from
	// the template by the memory manager that may write to it.
	ClearTemplateMapped(start, end uint64)

	// Close releases the backend's memory.
	Close()
}

// NewPageBackend, if not nil, makes the backend of a MemoryFile that holds
// application memory. It is set before the first MemoryFile is created.
var NewPageBackend func(f *MemoryFile) (PageBackend, error)

// AttachPageBackend gives f a backend if there is one to give.
//
// Preconditions: f has just been created.
func (f *MemoryFile) AttachPageBackend() error {
	if NewPageBackend == nil {
		return nil
	}
	b, err := NewPageBackend(f)
	if err != nil || b == nil {
		return err
	}
	f.backend = pageBackendRef{b: b, nonResident: b.NonResident(), hasTemplate: b.HasTemplate()}
	if f.backend.hasTemplate {
		f.backend.template = &templateFile{fd: b.TemplateFD()}
	}
	return nil
}

// pageBackendRef is a possibly absent PageBackend, and its counter of
// non-resident pages one load away: gates are in the path of every copy to or
// from the application.
type pageBackendRef struct {
	b           PageBackend
	nonResident *atomic.Int64
	hasTemplate bool
	template    *templateFile
}

func (r *pageBackendRef) gate(fr memmap.FileRange) error {
	if r.b == nil || r.nonResident.Load() == 0 {
		return nil
	}
	if err := r.b.Gate(fr.Start, fr.End); err != nil {
		// The callers' callers know errnos only. Gate fails when the host has
		// no memory for the page; anything else is fatal inside the backend.
		log.Warningf("Restoring evicted pages %v: %v", fr, err)
		return linuxerr.ENOMEM
	}
	return nil
}

// adopt takes over the pages in fr, which the pages file of the checkpoint being
// loaded has from off on, and advances off. It returns false if they are to be
// loaded as usual.
func (r *pageBackendRef) adopt(fr memmap.FileRange, off *uint64) (bool, error) {
	if !r.hasTemplate {
		return false, nil
	}
	if err := r.b.Adopt(fr.Start, fr.End, *off); err != nil {
		return false, err
	}
	*off += fr.Length()
	return true, nil
}

func (r *pageBackendRef) extend(size uint64) error {
	if r.b == nil {
		return nil
	}
	return r.b.Extend(size)
}

func (r *pageBackendRef) drop(fr memmap.FileRange) {
	if r.b != nil {
		r.b.Drop(fr.Start, fr.End)
	}
}

func (r *pageBackendRef) decommit(fr memmap.FileRange) {
	if r.b != nil {
		r.b.Decommit(fr.Start, fr.End)
	}
}

func (r *pageBackendRef) evictedBytes() uint64 {
	if r.b == nil {
		return 0
	}
	return r.b.EvictedBytes()
}

func (r *pageBackendRef) overlayCommitted(fr memmap.FileRange, vec []byte) {
	if r.b != nil && r.nonResident.Load() != 0 {
		r.b.OverlayCommitted(fr.Start, vec)
	}
}

func (r *pageBackendRef) close() {
	if r.b != nil {
		r.b.Close()
	}
}

// A Section is a bracket around accesses to a MemoryFile through mappings that
// no MemoryManager lock covers: an eviction waits for the sections that were
// open when it marked its pages.
type Section struct {
	b     PageBackend
	token uint32
}

// EnterSection opens a section.
func (f *MemoryFile) EnterSection() Section {
	if f.backend.b == nil {
		return Section{}
	}
	return Section{f.backend.b, f.backend.b.EnterSection()}
}

// Exit closes the section.
func (s Section) Exit() {
	if s.b != nil {
		s.b.ExitSection(s.token)
	}
}

// Gate returns with all pages in fr in the backing file.
func (f *MemoryFile) Gate(fr memmap.FileRange) error {
	return f.backend.gate(fr)
}

// BeginSave brings evicted pages back and keeps all pages in place until the
// returned function is called.
func (f *MemoryFile) BeginSave() (func(), error) {
	if f.backend.b == nil {
		return func() {}, nil
	}
	return f.backend.b.BeginSave()
}

// MapWindow narrows limit to what is worth mapping for an access to need.
//
// Preconditions: limit.IsSupersetOf(need).
func (f *MemoryFile) MapWindow(need, limit memmap.FileRange) memmap.FileRange {
	if f.backend.b == nil || f.backend.nonResident.Load() == 0 {
		return limit
	}
	s, e := f.backend.b.Window(need.Start, need.End, limit.Start, limit.End)
	return memmap.FileRange{Start: s, End: e}
}

// MapInternalUngated is file.MapInternal without restoring evicted pages. The
// mapping may be kept; each access through it must be preceded by Gate for the
// range accessed.
func MapInternalUngated(file memmap.File, fr memmap.FileRange, at hostarch.AccessType) (safemem.BlockSeq, error) {
	f, ok := file.(*MemoryFile)
	if !ok || f.backend.b == nil || at.Execute {
		return file.MapInternal(fr, at)
	}
	if l := f.asyncPageLoad.Load(); l != nil {
		if err := l.awaitLoad(fr); err != nil {
			return safemem.BlockSeq{}, err
		}
	}
	var one safemem.Block
	var many []safemem.Block
	f.forEachMappingSlice(fr, func(bs []byte) {
		b := safemem.BlockFromSafeSlice(bs)
		switch {
		case many != nil:
			many = append(many, b)
		case one.Len() != 0:
			many = []safemem.Block{one, b}
		default:
			one = b
		}
	})
	if many != nil {
		return safemem.BlockSeqFromSlice(many), nil
	}
	return safemem.BlockSeqOf(one), nil
}

// MapInternalPinned is MapInternal for mappings that outlive the call: the
// pages are not evicted until they are freed.
func (f *MemoryFile) MapInternalPinned(fr memmap.FileRange, at hostarch.AccessType) (safemem.BlockSeq, error) {
	if err := PinPages(f, fr); err != nil {
		return safemem.BlockSeq{}, err
	}
	return f.MapInternal(fr, at)
}

// PinPages keeps fr from eviction until its pages are freed. It has no effect
// on other kinds of file.
func PinPages(file memmap.File, fr memmap.FileRange) error {
	f, ok := file.(*MemoryFile)
	if !ok || f.backend.b == nil {
		return nil
	}
	if err := f.AwaitLoadAll(); err != nil {
		return err
	}
	if err := f.backend.b.Pin(fr.Start, fr.End); err != nil {
		log.Warningf("Pinning pages %v: %v", fr, err)
		return linuxerr.ENOMEM
	}
	return nil
}

// VisitEvictable calls fn, in ascending order and with f.mu locked, for ranges
// of used pages that hold application memory. No page passed to fn is freed
// before VisitEvictable returns.
func (f *MemoryFile) VisitEvictable(fn func(fr memmap.FileRange)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for seg := f.memAcct.FirstSegment(); seg.Ok(); seg = seg.NextSegment() {
		ma := seg.ValuePtr()
		if ma.wasteOrReleasing || ma.kind == usage.System {
			continue
		}
		fn(seg.Range())
	}
}

// Resident sets bit 0 of vec[i] if the page at start + i*PageSize is in the
// backing file.
//
// Preconditions: all pages are part of the file.
func (f *MemoryFile) Resident(start uint64, vec []byte) error {
	var err error
	f.forEachMappingSlice(memmap.FileRange{Start: start, End: start + uint64(len(vec))*hostarch.PageSize}, func(bs []byte) {
		if err == nil {
			n := len(bs) / hostarch.PageSize
			err = mincore(bs, vec[:n])
			vec = vec[n:]
		}
	})
	return err
}

// Punch frees the host memory of fr.
func (f *MemoryFile) Punch(fr memmap.FileRange) error {
	return f.decommitFile(fr)
}

// HeldBytes is the host memory that the backing file holds.
func (f *MemoryFile) HeldBytes() (uint64, error) {
	var st unix.Stat_t
	if err := unix.Fstat(f.FD(), &st); err != nil {
		return 0, fmt.Errorf("fstat of the memory file: %w", err)
	}
	return uint64(st.Blocks) * 512, nil
}

// HasTemplate tells whether f has a template.
func (f *MemoryFile) HasTemplate() bool {
	return f.backend.hasTemplate
}

// Template is the template as a file to map into applications.
//
// Preconditions: f.HasTemplate().
func (f *MemoryFile) Template() memmap.File {
	return f.backend.template
}

// TemplateWindow is PageBackend.TemplateWindow.
//
// Preconditions: f.HasTemplate().
func (f *MemoryFile) TemplateWindow(need uint64, limit memmap.FileRange) (fr, template memmap.FileRange, ok bool) {
	start, end, off, ok := f.backend.b.TemplateWindow(need, limit.Start, limit.End)
	return memmap.FileRange{Start: start, End: end}, memmap.FileRange{Start: off, End: off + end - start}, ok
}

// Admit is PageBackend.Admit.
func (f *MemoryFile) Admit(t context.Context, sysno uintptr) {
	if f.backend.b != nil {
		f.backend.b.Admit(t, sysno)
	}
}

// Piece is PageBackend.Piece.
//
// Preconditions: f.HasTemplate(); fr is not empty.
func (f *MemoryFile) Piece(fr memmap.FileRange) (piece memmap.FileRange, template bool) {
	end, template := f.backend.b.Piece(fr.Start, fr.End)
	return memmap.FileRange{Start: fr.Start, End: end}, template
}

// MapTemplate is PageBackend.MapTemplate.
//
// Preconditions: f.HasTemplate().
func (f *MemoryFile) MapTemplate(fr memmap.FileRange) (template memmap.FileRange, ok bool) {
	off, ok := f.backend.b.MapTemplate(fr.Start, fr.End)
	return memmap.FileRange{Start: off, End: off + fr.Length()}, ok
}

// templateBuffers has room for what ReadTemplate copies at a time.
var templateBuffers = sync.Pool{New: func() any { return new([64 << 10]byte) }}

// ReadTemplate copies from fr to dsts what only the template has of its beginning,
// without giving it memory. It copies nothing if that is not the case; the caller
// then reads as usual. A read needs no more than the content at some time during
// the read.
func (f *MemoryFile) ReadTemplate(fr memmap.FileRange, dsts safemem.BlockSeq) (uint64, error) {
	if !f.backend.hasTemplate || !f.backend.b.TemplateBacked(fr.Start) {
		return 0, nil
	}
	buf := templateBuffers.Get().(*[64 << 10]byte)
	defer templateBuffers.Put(buf)
	start := fr.Start &^ (hostarch.PageSize - 1)
	want := min((fr.End-start+hostarch.PageSize-1)&^(hostarch.PageSize-1), uint64(len(buf)))
	n := f.backend.b.ReadTemplate(buf[:want], start)
	if n == 0 {
		return 0, nil
	}
	src := buf[fr.Start-start : min(n, fr.End-start)]
	return safemem.CopySeq(dsts, safemem.BlockSeqOf(safemem.BlockFromSafeSlice(src)))
}

// TemplateBacked is PageBackend.TemplateBacked.
//
// Preconditions: f.HasTemplate().
func (f *MemoryFile) TemplateBacked(off uint64) bool {
	return f.backend.b.TemplateBacked(off)
}

// GateMapped is PageBackend.GateMapped.
//
// Preconditions: f.HasTemplate().
func (f *MemoryFile) GateMapped(fr memmap.FileRange) (bool, error) {
	mapped, err := f.backend.b.GateMapped(fr.Start, fr.End)
	if err != nil {
		log.Warningf("Restoring evicted pages %v: %v", fr, err)
		err = linuxerr.ENOMEM
	}
	return mapped, err
}

// ClearTemplateMapped is PageBackend.ClearTemplateMapped.
//
// Preconditions: f.HasTemplate().
func (f *MemoryFile) ClearTemplateMapped(fr memmap.FileRange) {
	f.backend.b.ClearTemplateMapped(fr.Start, fr.End)
}

// Refault tells, for a fault on the page need, whether the file lacks a page
// near it, and if so what to restore and map.
func (f *MemoryFile) Refault(need, limit memmap.FileRange) (memmap.FileRange, bool) {
	if f.backend.b == nil || f.backend.nonResident.Load() == 0 || need.Length() != hostarch.PageSize {
		return memmap.FileRange{}, false
	}
	s, e, ok := f.backend.b.Refault(need.Start, limit.Start, limit.End)
	return memmap.FileRange{Start: s, End: e}, ok
}

// AllInMemory tells whether every page in fr, which is not large, has memory.
func (f *MemoryFile) AllInMemory(fr memmap.FileRange) bool {
	vec := make([]byte, fr.Length()/hostarch.PageSize)
	if f.Resident(fr.Start, vec) != nil {
		return false
	}
	for _, v := range vec {
		if v&1 == 0 {
			return false
		}
	}
	return true
}

// CopyUp is how much of the file an application's first write to the page need,
// which is the template's, makes its own.
func (f *MemoryFile) CopyUp(need, limit memmap.FileRange) memmap.FileRange {
	s, e := f.backend.b.CopyUp(need.Start, limit.Start, limit.End)
	return memmap.FileRange{Start: s, End: e}
}

// templateFile is the template as address spaces map it: read-only, shared by
// all sandboxes of the template, never freed.
type templateFile struct {
	memmap.DefaultMemoryType
	memmap.NoBufferedIOFallback

	fd int
}

var _ memmap.File = (*templateFile)(nil)

// IncRef implements memmap.File.IncRef.
func (*templateFile) IncRef(memmap.FileRange, uint32) {}

// DecRef implements memmap.File.DecRef.
func (*templateFile) DecRef(memmap.FileRange) {}

// MapInternal implements memmap.File.MapInternal. Platforms that map through
// the Sentry's address space get none of the template: its pages are restored
// by copy there (see MemoryManager.mapTemplateLocked).
func (*templateFile) MapInternal(memmap.FileRange, hostarch.AccessType) (safemem.BlockSeq, error) {
	return safemem.BlockSeq{}, linuxerr.EFAULT
}

// DataFD implements memmap.File.DataFD.
func (t *templateFile) DataFD(memmap.FileRange) (int, error) {
	return t.fd, nil
}

// FD implements memmap.File.FD.
func (t *templateFile) FD() int {
	return t.fd
}
