// Package prefetch predicts which pages a sandbox will want back when it
// resumes, from those that it wanted back before.
//
// A step is the time between two waits. The set of pages that steps of one
// sandbox touch repeats, their order does not (measured: one step's set predicts
// the next one's of the same kind with 88-99 % recall), so a History keeps sets:
// a score per page, raised when the page had to be restored on demand and
// lowered when a prediction was wrong. Groups of pages remember when in the last
// step they were first wanted, and are predicted in that order.
//
// A page that is restored and mapped ahead of use leaves no trace when it is
// used. So one in SampleEvery predicted units is restored but not mapped; its
// first use then is a fault that needs no restoring, which the caller reports
// with Used. What samples tell counts for the precision. A predicted page keeps
// its score if its sample, or without one anything in its group, was used.
//
// History is safe for concurrent use. Its mutex is a leaf.
package prefetch

import (
	"sort"
	"sync"
)

const (
	// GroupPages is how many pages a group has: 2 MiB.
	GroupPages = 512
	// UnitPages is how many pages are sampled together: 64 KiB.
	UnitPages = 16

	unitsPerGroup = GroupPages / UnitPages

	// Scores: a page is predicted from predictAt on, that is, if it was wanted
	// by two of the last three steps. Steps of an agent alternate between
	// tools, and what only the last one wanted is wrong three times in four
	// (measured), at the price of a restore each.
	hit       = 2
	maxScore  = 3
	predictAt = 3

	// SampleEvery is how many predicted units there are to one sample.
	SampleEvery = 8
)

// A bitmap has a bit for each page of a group.
type bitmap [GroupPages / 64]uint64

func (m *bitmap) set(i uint64)      { m[i/64] |= 1 << (i % 64) }
func (m *bitmap) has(i uint64) bool { return m[i/64]>>(i%64)&1 != 0 }

// A group is what is known of GroupPages pages.
type group struct {
	// scores has 2 bits per page.
	scores [GroupPages / 4]uint8
	// touched pages were wanted in this step; predicted ones were predicted
	// for it.
	touched, predicted bitmap
	// sampled and used have a bit for each unit: restored without being
	// mapped, and then used.
	sampled, used uint32
	// order is when in this step the group was first touched, 0 if it was not;
	// last is what it was in the last step that touched it.
	order, last uint32
}

func (g *group) score(i uint64) uint8 { return g.scores[i/4] >> (i % 4 * 2) & 3 }

func (g *group) setScore(i uint64, s uint8) {
	sh := i % 4 * 2
	g.scores[i/4] = g.scores[i/4]&^(3<<sh) | s<<sh
}

// History is what is known of one sandbox.
type History struct {
	mu     sync.Mutex
	groups map[uint64]*group
	clock  uint32
	salt   uint64
	total  Quality
}

// Quality counts pages over the lifetime of a History.
type Quality struct {
	// Wanted pages had to be restored on demand, Predicted ones were restored
	// ahead.
	Wanted, Predicted uint64
	// Sampled pages are those of samples; Used, those of samples that were
	// used.
	Sampled, Used uint64
}

// Precision is the share of predicted pages that were used, as far as samples
// tell, or 0 if there are none.
func (q Quality) Precision() float64 {
	if q.Sampled == 0 {
		return 0
	}
	return float64(q.Used) / float64(q.Sampled)
}

// Recall is the share of pages that were wanted and had been predicted.
func (q Quality) Recall() float64 {
	p := q.Precision() * float64(q.Predicted)
	if p == 0 {
		return 0
	}
	return p / (p + float64(q.Wanted))
}

// New returns an empty History.
func New() *History {
	return &History{groups: make(map[uint64]*group)}
}

// Wanted tells that pages [first, end) were restored on demand.
func (h *History) Wanted(first, end uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for p := first; p < end; p++ {
		g := h.groups[p/GroupPages]
		if g == nil {
			g = new(group)
			h.groups[p/GroupPages] = g
		}
		g.touched.set(p % GroupPages)
		h.stamp(g)
	}
	h.total.Wanted += end - first
}

func (h *History) stamp(g *group) {
	if g.order == 0 {
		h.clock++
		g.order = h.clock
	}
}

// Used tells that a fault found page p resident.
func (h *History) Used(p uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if g := h.groups[p/GroupPages]; g != nil {
		if u := uint32(1) << (p % GroupPages / UnitPages); g.sampled&u != 0 {
			g.used |= u
			h.stamp(g)
		}
	}
}

// A Run is a number of neighbouring pages that are predicted. Map is false for
// samples: they are to be restored but not mapped.
type Run struct {
	First, End uint64
	Map        bool
}

// Predict returns the pages that the step that has just begun will want, in the
// order in which it will want them.
func (h *History) Predict() []Run {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.salt++
	type entry struct {
		n uint64
		g *group
	}
	var entries []entry
	for n, g := range h.groups {
		entries = append(entries, entry{n, g})
	}
	sort.Slice(entries, func(i, j int) bool {
		if a, b := entries[i].g.last, entries[j].g.last; a != b {
			return a < b
		}
		return entries[i].n < entries[j].n
	})
	var runs []Run
	for _, e := range entries {
		g := e.g
		for i := uint64(0); i < GroupPages; i++ {
			if g.touched.has(i) || g.score(i) < predictAt {
				continue
			}
			g.predicted.set(i)
			h.total.Predicted++
			p := e.n*GroupPages + i
			sample := (e.n*unitsPerGroup+i/UnitPages+h.salt)%SampleEvery == 0
			if sample {
				g.sampled |= 1 << (i / UnitPages)
			}
			if k := len(runs) - 1; k >= 0 && runs[k].End == p && runs[k].Map == !sample {
				runs[k].End++
			} else {
				runs = append(runs, Run{p, p + 1, !sample})
			}
		}
	}
	return runs
}

// EndStep tells that a wait has begun.
func (h *History) EndStep() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.clock = 0
	for n, g := range h.groups {
		empty := true
		for i := uint64(0); i < GroupPages; i++ {
			s := g.score(i)
			unit := uint32(1) << (i / UnitPages)
			switch {
			case g.touched.has(i):
				s = min(s+hit, maxScore)
			case g.predicted.has(i) && g.sampled&unit != 0:
				h.total.Sampled++
				if g.used&unit != 0 {
					h.total.Used++
					s = maxScore
				} else {
					s--
				}
			case g.predicted.has(i) && g.order != 0:
				// Not sampled, and something near it was used.
			case s > 0:
				s--
			}
			g.setScore(i, s)
			empty = empty && s == 0
		}
		g.touched, g.predicted, g.sampled, g.used = bitmap{}, bitmap{}, 0, 0
		if g.order != 0 {
			g.last, g.order = g.order, 0
		}
		if empty {
			delete(h.groups, n)
		}
	}
}

// Quality returns the counts so far.
func (h *History) Quality() Quality {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.total
}

// MetadataBytes is about how much memory the History takes.
func (h *History) MetadataBytes() uint64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	return uint64(len(h.groups)) * 400
}
