package memfile

import (
	"sync/atomic"
	"time"

	"runsc-agentzip/memfile/prefetch"
)

// A resume is a wait whose end somebody wants to know of.
type resume struct {
	// left counts down the demand restores that make a resume.
	left atomic.Int64
	c    chan struct{}
}

// AwaitResume returns a channel that is closed once n accesses had to restore
// pages: a few may be a timer in the guest, many in a row are the guest going
// back to work. A later call supersedes the earlier ones.
func (b *Backend) AwaitResume(n int) <-chan struct{} {
	r := &resume{c: make(chan struct{})}
	r.left.Store(int64(n))
	b.resume.Store(r)
	return r.c
}

// DemandRestores is how many accesses had to restore pages.
func (b *Backend) DemandRestores() uint64 { return b.stats.restoreNS.count.Load() }

// demanded tells that an access restored pages [first, end).
func (b *Backend) demanded(first, end uint64, took time.Duration) {
	b.stats.restoreNS.add(took)
	b.stats.lastDemand.Store(time.Now().UnixNano())
	b.history.Wanted(first, end)
	if r := b.resume.Load(); r != nil && r.left.Add(-1) == 0 {
		b.resume.CompareAndSwap(r, nil)
		close(r.c)
	}
}

// StepEnded tells that a step that began at a time has ended, for statistics: how
// long after it began the last access had to restore pages.
func (b *Backend) StepEnded(began time.Time) {
	if last := b.stats.lastDemand.Swap(0); last > began.UnixNano() {
		b.stats.resumeNS.add(time.Duration(last - began.UnixNano()))
	}
}

// premapPages is how many pages are mapped together while prefetching: the
// first pages that the guest wants should not wait for the last.
const premapPages = 512

// Prefetch restores the pages that the step in progress is newly predicted to
// want, and maps all but a sample of them. It returns how many it restored, soon
// after stop returns true.
func (b *Backend) Prefetch(stop func() bool) (n uint64, err error) {
	return b.prefetch(stop, 0)
}

// PrefetchNow is Prefetch without waiting for faults to tell of what kind the
// step is.
func (b *Backend) PrefetchNow(stop func() bool) (n uint64, err error) {
	return b.prefetch(stop, eagerFaults)
}

// eagerFaults is as how many faults the request to prefetch counts.
const eagerFaults = 64

func (b *Backend) prefetch(stop func() bool, minFaults int) (n uint64, err error) {
	// A deepening beside it would go on for longer than the guest can wait.
	b.hurry.Add(1)
	b.passMu.Lock()
	defer b.passMu.Unlock()
	b.hurry.Add(-1)
	stop = b.stopFunc(stop)
	var mapped []Range
	pending := uint64(0)
	premap := func() {
		if len(mapped) != 0 {
			b.host.Premap(mapped, stop)
		}
		mapped, pending = mapped[:0], 0
	}
	// Patterns of a sibling may know pages that this file does not have (yet).
	pages := b.table.pages()
	isTemplate := func(p uint64) bool { return p < pages && isTemplate(b.table.load(p)) }
	runs := b.history.Predict(minFaults, isTemplate)
	for i, run := range runs {
		run.End = min(run.End, pages)
		if i+1 < len(runs) && run.Map && runs[i+1].Map && runs[i+1].First < pages {
			run.End = b.bridge(run.End, runs[i+1].First)
		}
		for p := run.First; p < run.End; {
			if stop() {
				return n, nil
			}
			if b.table.load(p)&stateMask != evicted {
				p++
				continue
			}
			k, err := b.restoreRun(p, run.End, &b.stats.prefetched)
			if err != nil {
				return n, err
			}
			n += k
			if run.Map && k != 0 {
				mapped = appendRange(mapped, p<<pageShift, (p+k)<<pageShift)
				if pending += k; pending >= premapPages {
					premap()
				}
			}
			p += max(k, 1)
		}
	}
	premap()
	return n, nil
}

// bridge returns next if there are so few pages of the template between the pages
// end and next that it is better to copy them than to map what is on both sides
// apart.
func (b *Backend) bridge(end, next uint64) uint64 {
	if next < end || next-end > pieceMin {
		return end
	}
	for p := end; p < next; p++ {
		if !isTemplate(b.table.load(p)) {
			return end
		}
	}
	return next
}

// ImportPatterns takes over what a sibling's steps have taught: see
// prefetch.History.Import.
func (b *Backend) ImportPatterns(exported []byte, template prefetch.Digest) error {
	return b.history.Import(exported, template)
}

// ExportPatterns returns what steps have taught of late, for siblings, in at most
// limit bytes.
func (b *Backend) ExportPatterns(template prefetch.Digest, limit int) []byte {
	return b.history.Export(template, limit)
}
