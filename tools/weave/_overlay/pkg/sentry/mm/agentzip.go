package mm

import (
	"errors"
	"fmt"
	"sort"
	"sync"
	"time"

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

// gatePMA restores the pages of pseg that ar covers.
//
// Preconditions: mm.activeMu must be locked; pseg.Range() overlaps ar.
func gatePMA(pseg pmaIterator, ar hostarch.AddrRange) error {
	f, ok := pseg.ValuePtr().file.(*pgalloc.MemoryFile)
	if !ok {
		return nil
	}
	return f.Gate(pseg.fileRangeOf(pseg.Range().Intersect(ar)))
}

// mustGate is gatePMA for all pmas in ar, in a place that cannot return an
// error. Restoring fails only when the host has no memory left for a page and
// did not find any for as long as the backend was ready to wait.
//
// Preconditions: as internalMappingsLocked.
func mustGate(pseg pmaIterator, ar hostarch.AddrRange) {
	for {
		if err := gatePMA(pseg, ar); err != nil {
			panic(fmt.Sprintf("restoring guest memory for addresses %v: %v", ar, err))
		}
		if ar.End <= pseg.End() {
			return
		}
		pseg = pseg.NextSegment()
	}
}

// getGatedInternalMappingsLocked is getInternalMappingsLocked, followed by
// gatePMA for ar.
func (pseg pmaIterator) getGatedInternalMappingsLocked(ar hostarch.AddrRange) error {
	if err := pseg.getInternalMappingsLocked(); err != nil {
		return err
	}
	return gatePMA(pseg, ar)
}

// mapWindow narrows limit, a part of pseg, to what is worth mapping for an
// access to ar.
func mapWindow(pseg pmaIterator, ar, limit hostarch.AddrRange) hostarch.AddrRange {
	f, ok := pseg.ValuePtr().file.(*pgalloc.MemoryFile)
	if !ok {
		return limit
	}
	lim := pseg.fileRangeOf(limit)
	win := f.MapWindow(pseg.fileRangeOf(limit.Intersect(ar)), lim)
	return hostarch.AddrRange{
		Start: limit.Start + hostarch.Addr(win.Start-lim.Start),
		End:   limit.End - hostarch.Addr(lim.End-win.End),
	}
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
