package mm

import (
	"errors"
	"fmt"
	"sort"
	"sync"
	"time"

	"gvisor.dev/gvisor/pkg/context"
	"gvisor.dev/gvisor/pkg/hostarch"
	"gvisor.dev/gvisor/pkg/sentry/memmap"
	"gvisor.dev/gvisor/pkg/sentry/pgalloc"
)

// registry holds every MemoryManager that may have mappings. Tasks are no
// substitute: an exec in progress, a vfork parent or a holder of
// /proc/[pid]/mem keeps a MemoryManager that no task points to.
//
// registry.mu is a leaf.
var registry struct {
	mu sync.Mutex
	m  map[*MemoryManager]struct{}
}

func register(mm *MemoryManager) *MemoryManager {
	if pgalloc.NewPageBackend == nil {
		return mm
	}
	registry.mu.Lock()
	defer registry.mu.Unlock()
	if registry.m == nil {
		registry.m = make(map[*MemoryManager]struct{})
	}
	registry.m[mm] = struct{}{}
	return mm
}

func unregister(mm *MemoryManager) {
	if pgalloc.NewPageBackend == nil {
		return
	}
	registry.mu.Lock()
	defer registry.mu.Unlock()
	delete(registry.m, mm)
}

// admit is called before a fault of the task ctx is handled, with no lock held.
func (mm *MemoryManager) admit(ctx context.Context) {
	mm.mf.Admit(ctx, pgalloc.NoSyscall)
}

// gatePMA makes the pages of pseg that ar covers ready for the Sentry to access
// through an internal mapping.
//
// Preconditions: mm.activeMu must be locked; pseg.Range() overlaps ar.
func (mm *MemoryManager) gatePMA(pseg pmaIterator, ar hostarch.AddrRange) error {
	pma := pseg.ValuePtr()
	f, ok := pma.file.(*pgalloc.MemoryFile)
	if !ok {
		return nil
	}
	ar = ar.Intersect(pseg.Range())
	fr := pseg.fileRangeOf(ar)
	if !mayMapTemplate(f, pma) {
		return f.Gate(fr)
	}
	mapped, err := f.GateMapped(fr)
	if err != nil {
		return err
	}
	if mapped && !pma.needCOW {
		// The application may see the template's copy of a page that the
		// caller may be about to write to. (With needCOW nobody writes to the
		// page in place, and both copies stay equal.)
		mm.templateMu.Lock()
		defer mm.templateMu.Unlock()
		mm.unmapASLocked(hostarch.AddrRange{
			Start: ar.Start.RoundDown(),
			End:   ar.End.MustRoundUp(),
		})
		f.ClearTemplateMapped(fr)
	}
	return nil
}

// mustGate is gatePMA for all pmas in ar, in a place that cannot return an
// error. Restoring fails only when the host has no memory left for a page and
// did not find any for as long as the backend was ready to wait.
//
// Preconditions: as internalMappingsLocked.
func (mm *MemoryManager) mustGate(pseg pmaIterator, ar hostarch.AddrRange) {
	for {
		if err := mm.gatePMA(pseg, ar); err != nil {
			// Not a panic in this goroutine: deferred calls would wait for
			// locks that it holds, and the sandbox would hang.
			go panic(fmt.Sprintf("restoring guest memory for addresses %v: %v", ar, err))
			select {}
		}
		if ar.End <= pseg.End() {
			return
		}
		pseg = pseg.NextSegment()
	}
}

// getGatedInternalMappingsLocked is getInternalMappingsLocked, followed by
// gatePMA for ar.
func (mm *MemoryManager) getGatedInternalMappingsLocked(pseg pmaIterator, ar hostarch.AddrRange) error {
	if err := pseg.getInternalMappingsLocked(); err != nil {
		return err
	}
	return mm.gatePMA(pseg, ar)
}

// pinPMALocked makes the pages of pseg that ar covers ready for accesses at any
// time, by anybody.
//
// Preconditions: mm.activeMu must be locked for writing.
func (mm *MemoryManager) pinPMALocked(pseg pmaIterator, ar hostarch.AddrRange) error {
	if err := mm.gatePMA(pseg, ar); err != nil {
		return err
	}
	return pgalloc.PinPages(pseg.ValuePtr().file, pseg.fileRangeOf(ar))
}

// mayMapTemplate tells whether applications may see pages of pma in the
// template's copy. They may if writing to such a page in place takes being its
// only owner, which holds for private memory; pages of tmpfs, shared memory and
// the page cache are written to by anybody. Huge pages may be zeroed in place
// while they are mapped (MADV_DONTNEED on a part of one).
func mayMapTemplate(f *pgalloc.MemoryFile, p *pma) bool {
	return f.HasTemplate() && p.private && !p.huge
}

// mapWindowLocked narrows limit, a part of pseg, to what is worth mapping for an
// access to ar. If it returns done, it has mapped it already, from the template.
//
// Preconditions: as mapASLocked.
func (mm *MemoryManager) mapWindowLocked(pseg pmaIterator, ar, limit hostarch.AddrRange) (_ hostarch.AddrRange, done bool, _ error) {
	pma := pseg.ValuePtr()
	f, ok := pma.file.(*pgalloc.MemoryFile)
	if !ok {
		return limit, false, nil
	}
	lim := pseg.fileRangeOf(limit)
	addrs := func(fr memmap.FileRange) hostarch.AddrRange {
		return hostarch.AddrRange{
			Start: limit.Start + hostarch.Addr(fr.Start-lim.Start),
			End:   limit.End - hostarch.Addr(lim.End-fr.End),
		}
	}
	need := limit.Intersect(ar)
	perms := pma.effectivePerms
	pieces := mayMapTemplate(f, pma) && mm.p.MapUnit() == 0 && need.Length() == hostarch.PageSize && perms.Read && !perms.Execute
	if pieces {
		mm.templateMu.Lock()
		fr, tfr, ok := f.TemplateWindow(pseg.fileRangeOf(need).Start, lim)
		if ok {
			err := mm.as.MapFile(addrs(fr).Start, f.Template(), tfr, hostarch.Read, false /* precommit */)
			mm.templateMu.Unlock()
			return limit, true, err
		}
		mm.templateMu.Unlock()
	}
	fr, refault := f.Refault(pseg.fileRangeOf(need), lim)
	if !refault {
		return addrs(f.MapWindow(pseg.fileRangeOf(need), lim)), false, nil
	}
	if !pieces {
		return limit, true, mm.mapRestoredLocked(pseg, addrs(fr))
	}
	for fr.Length() != 0 {
		piece, template := f.Piece(fr)
		if err := mm.mapPieceLocked(pseg, addrs(piece), piece, template); err != nil {
			return limit, true, err
		}
		fr.Start = piece.End // pieces are never empty
	}
	return limit, true, nil
}

// mapPieceLocked maps piece, a part of pseg, at ar: from the template if it still
// can be.
//
// Preconditions: as mapASLocked; mayMapTemplate.
func (mm *MemoryManager) mapPieceLocked(pseg pmaIterator, ar hostarch.AddrRange, piece memmap.FileRange, template bool) error {
	f := pseg.ValuePtr().file.(*pgalloc.MemoryFile)
	if template {
		mm.templateMu.Lock()
		if tfr, ok := f.MapTemplate(piece); ok {
			defer mm.templateMu.Unlock()
			return mm.as.MapFile(ar.Start, f.Template(), tfr, hostarch.Read, false /* precommit */)
		}
		mm.templateMu.Unlock()
	}
	return mm.mapRestoredLocked(pseg, ar)
}

// mapRestoredLocked maps ar, a part of pseg whose pages were taken from the
// application and are wanted back. It fills page tables too, since a further
// fault per page would cost more, but not where that would give memory to pages
// that never had any.
//
// Preconditions: as mapASLocked.
func (mm *MemoryManager) mapRestoredLocked(pseg pmaIterator, ar hostarch.AddrRange) error {
	pma := pseg.ValuePtr()
	f := pma.file.(*pgalloc.MemoryFile)
	fr := pseg.fileRangeOf(ar)
	if err := f.Gate(fr); err != nil {
		return err
	}
	perms := pma.effectivePerms
	if pma.needCOW {
		perms.Write = false
	}
	if !perms.Any() {
		return nil
	}
	return mm.mapFileLocked(pma, ar.Start, fr, perms, f.AllInMemory(fr))
}

// mapFileLocked is mm.as.MapFile for pages fr of p. For pages that may be mapped
// from the template it restores and maps in one step: otherwise another fault
// could decide to map the template before they are restored, and do so after the
// application has written to them.
//
// Preconditions: mm.activeMu must be locked.
func (mm *MemoryManager) mapFileLocked(p *pma, addr hostarch.Addr, fr memmap.FileRange, at hostarch.AccessType, precommit bool) error {
	f, ok := p.file.(*pgalloc.MemoryFile)
	if !ok || !mayMapTemplate(f, p) {
		return mm.as.MapFile(addr, p.file, fr, at, precommit)
	}
	mm.templateMu.Lock()
	defer mm.templateMu.Unlock()
	if err := mm.as.MapFile(addr, f, fr, at, precommit); err != nil {
		return err
	}
	if !p.needCOW {
		f.ClearTemplateMapped(fr)
	}
	return nil
}

// PremapFile maps restored, sorted ranges of f into the address spaces that have
// them, ahead of faults.
func PremapFile(f *pgalloc.MemoryFile, ranges []memmap.FileRange, stop func() bool) {
	registry.mu.Lock()
	mms := make([]*MemoryManager, 0, len(registry.m))
	for mm := range registry.m {
		mms = append(mms, mm)
	}
	registry.mu.Unlock()
	for _, mm := range mms {
		if mm.mf == f {
			mm.premapFile(f, ranges, stop)
		}
	}
}

func (mm *MemoryManager) premapFile(f *pgalloc.MemoryFile, ranges []memmap.FileRange, stop func() bool) {
	// Where the ranges are mapped is found in one go, and each place is looked
	// at again when it is mapped: a fault needs activeMu for writing for a
	// moment, and should not wait for all of this.
	type place struct {
		ar hostarch.AddrRange
		fr memmap.FileRange
	}
	var places []place
	mm.activeMu.RLock()
	for pseg := mm.pmas.FirstSegment(); pseg.Ok(); pseg = pseg.NextSegment() {
		if pseg.ValuePtr().file != f {
			continue
		}
		fr := pseg.fileRange()
		i := sort.Search(len(ranges), func(i int) bool { return ranges[i].End > fr.Start })
		for ; i < len(ranges) && ranges[i].Start < fr.End; i++ {
			r := ranges[i].Intersect(fr)
			start := pseg.Start() + hostarch.Addr(r.Start-fr.Start)
			places = append(places, place{hostarch.AddrRange{Start: start, End: start + hostarch.Addr(r.Length())}, r})
		}
	}
	mm.activeMu.RUnlock()
	for _, p := range places {
		if stop() || !mm.premapPlace(f, p.ar, p.fr) {
			return
		}
	}
}

// premapPlace maps fr at ar if that is still where it belongs. It returns false
// if there is nothing more to do in mm.
func (mm *MemoryManager) premapPlace(f *pgalloc.MemoryFile, ar hostarch.AddrRange, fr memmap.FileRange) bool {
	mm.activeMu.RLock()
	defer mm.activeMu.RUnlock()
	if mm.as == nil {
		return false
	}
	pseg := mm.pmas.FindSegment(ar.Start)
	if !pseg.Ok() || pseg.ValuePtr().file != f || !pseg.Range().IsSupersetOf(ar) || pseg.fileRangeOf(ar) != fr {
		return true
	}
	return mm.mapRestoredLocked(pseg, ar) == nil
}

// mapFaultLocked maps ar for an application that faulted on it.
//
// Preconditions: as mapASLocked; pseg contains ar and allows the access.
func (mm *MemoryManager) mapFaultLocked(ctx context.Context, pseg pmaIterator, ar hostarch.AddrRange, at hostarch.AccessType) error {
	pma := pseg.ValuePtr()
	f, ok := pma.file.(*pgalloc.MemoryFile)
	if !at.Write || !ok || !mayMapTemplate(f, pma) || pma.needCOW || !f.TemplateBacked(pseg.fileRangeOf(ar).Start) {
		return mm.mapASLocked(ctx, pseg, ar, memmap.PlatformEffectDefault)
	}
	// Copy up: mapFileLocked restores the pages, and replaces in one step what
	// the application has mapped. Nobody else writes to them before: the
	// Sentry's writes take templateMu when they see that a page may be mapped
	// from the template.
	fr := f.CopyUp(pseg.fileRangeOf(ar), pseg.fileRange())
	start := pseg.Start() + hostarch.Addr(fr.Start-pma.off)
	return mm.mapRestoredLocked(pseg, hostarch.AddrRange{Start: start, End: start + hostarch.Addr(fr.Length())})
}

// unmapMergeGap is the largest run of pages that UnmapFile unmaps needlessly to
// save a call: a munmap in a stub costs about as much as refaulting one or two
// mappings.
const unmapMergeGap = 2 << 20

// ErrBusy is returned by UnmapFile when a MemoryManager stays locked.
var ErrBusy = errors.New("a memory manager is in use for too long")

// UnmapFile removes the application mappings of marked, sorted ranges of f from
// every address space, and returns only after every access through an internal
// mapping that began before the call has ended. Pages that mlock keeps are
// handed to unmark first.
//
// It never waits for a lock, so that a long operation in one MemoryManager
// cannot hold up others behind it: it tries again until deadline and then
// returns ErrBusy, with some address spaces unmapped and some not. yield is
// called between MemoryManagers and ends the walk with ErrBusy when it returns
// false.
func UnmapFile(f *pgalloc.MemoryFile, marked []memmap.FileRange, unmark func(memmap.FileRange), deadline time.Time, yield func() bool) error {
	registry.mu.Lock()
	todo := make([]*MemoryManager, 0, len(registry.m))
	for mm := range registry.m {
		todo = append(todo, mm)
	}
	registry.mu.Unlock()

	for pause := 20 * time.Microsecond; len(todo) != 0; {
		busy := todo[:0]
		for _, mm := range todo {
			if !yield() {
				return ErrBusy
			}
			if mm.mf == f && !mm.tryUnmapFile(f, marked, unmark) {
				busy = append(busy, mm)
			}
		}
		todo = busy
		if len(todo) == 0 {
			break
		}
		if time.Now().After(deadline) {
			return ErrBusy
		}
		time.Sleep(pause)
		pause = min(2*pause, 2*time.Millisecond)
	}
	return nil
}

// tryUnmapFile does UnmapFile's work in one MemoryManager. It returns false,
// having done nothing, if mm is locked.
func (mm *MemoryManager) tryUnmapFile(f *pgalloc.MemoryFile, marked []memmap.FileRange, unmark func(memmap.FileRange)) bool {
	// The wrappers of both locks lack TryLock. What their lock order
	// validator would check holds: mappingMu precedes activeMu.
	if !mm.mappingMu.mu.TryRLock() {
		return false
	}
	if !mm.activeMu.mu.TryLock() {
		mm.mappingMu.mu.RUnlock()
		return false
	}
	defer mm.activeMu.mu.Unlock()
	if mm.lockedAS != 0 {
		mm.unmarkLocked(f, unmark)
	}
	mm.mappingMu.mu.RUnlock()
	if mm.as == nil {
		// Released: the application can't run, and pmas only wait to be
		// freed.
		return true
	}

	var pending hostarch.AddrRange
	flush := func() {
		mm.unmapASLocked(pending)
		pending = hostarch.AddrRange{}
	}
	for pseg := mm.pmas.FirstSegment(); pseg.Ok(); pseg = pseg.NextSegment() {
		if pseg.ValuePtr().file != f {
			if pending.Length() != 0 {
				flush()
			}
			continue
		}
		fr := pseg.fileRange()
		i := sort.Search(len(marked), func(i int) bool { return marked[i].End > fr.Start })
		for ; i < len(marked) && marked[i].Start < fr.End; i++ {
			m := marked[i].Intersect(fr)
			ar := hostarch.AddrRange{
				Start: pseg.Start() + hostarch.Addr(m.Start-fr.Start),
				End:   pseg.Start() + hostarch.Addr(m.End-fr.Start),
			}
			switch {
			case pending.Length() == 0:
				pending = ar
			case ar.Start-pending.End <= unmapMergeGap:
				pending.End = ar.End
			default:
				flush()
				pending = ar
			}
		}
	}
	flush()
	return true
}

// unmarkLocked hands the pages of f that mlock keeps in mm to unmark.
//
// Preconditions: mm.mappingMu and mm.activeMu must be locked.
func (mm *MemoryManager) unmarkLocked(f *pgalloc.MemoryFile, unmark func(memmap.FileRange)) {
	for vseg := mm.vmas.FirstSegment(); vseg.Ok(); vseg = vseg.NextSegment() {
		if vseg.ValuePtr().mlockMode == memmap.MLockNone {
			continue
		}
		ar := vseg.Range()
		for pseg := mm.pmas.LowerBoundSegment(ar.Start); pseg.Ok() && pseg.Start() < ar.End; pseg = pseg.NextSegment() {
			if pseg.ValuePtr().file == f {
				unmark(pseg.fileRangeOf(pseg.Range().Intersect(ar)))
			}
		}
	}
}
