package prefetch

import (
	"cmp"
	"math"
	"math/bits"
	"slices"
	"sync"
)

// A History is what is known of one sandbox.
type History struct {
	// learn protects what was learnt from past steps.
	learn    sync.Mutex
	patterns []*Pattern
	salt     uint64
	// index is of the patterns and the step in progress, or nil.
	index *index

	// mu protects the present step.
	mu     sync.Mutex
	groups map[uint64]*group
	// evidence is the units of the first faults, each once, by number in the
	// file.
	evidence []uint64
	seen     map[uint64]struct{}
	clock    uint32
	faults   int
	// predicted is how many pages were predicted for the step.
	predicted int
	total     Quality
}

// A group is what the present step has done to GroupPages pages.
type group struct {
	// touched pages were wanted in this step; predicted ones were predicted
	// for it.
	touched, predicted bitmap
	// wrote are those whose first write was a fault.
	wrote bitmap
	// sampled and used have a bit for each unit: restored without being
	// mapped, and then used.
	sampled, used uint32
	// order is the group's place in the order of first touches, or 0.
	order uint32
}

// Quality counts pages over the lifetime of a History.
type Quality struct {
	// Wanted pages had to be restored on demand, Predicted ones were restored
	// ahead.
	Wanted, Predicted uint64
	// Sampled pages are those of samples; Used, those of samples that were
	// used.
	Sampled, Used uint64
	// Patterns is how many kinds of steps are known at present.
	Patterns uint64
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
	h := &History{}
	h.beginStep()
	return h
}

// beginStep forgets the present step.
//
// Preconditions: h.learn and h.mu are locked.
func (h *History) beginStep() {
	h.index = nil
	h.groups = make(map[uint64]*group)
	h.seen = make(map[uint64]struct{})
	h.evidence = nil
	h.clock, h.faults, h.predicted = 0, 0, 0
}

// Wanted tells that pages [first, end) were restored on demand.
func (h *History) Wanted(first, end uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for p := first; p < end; {
		n := p / GroupPages
		g := h.group(n)
		h.stamp(g)
		next := min(end, (n+1)*GroupPages)
		g.touched.setRange(p%GroupPages, p%GroupPages+next-p)
		p = next
	}
	h.total.Wanted += end - first
	h.faults++
	if u := first / UnitPages; len(h.evidence) < maxEvidence {
		if _, ok := h.seen[u]; !ok {
			h.seen[u] = struct{}{}
			h.evidence = append(h.evidence, u)
		}
	}
}

// Wrote tells that a fault was the first write to page p, which was the template's
// until then.
func (h *History) Wrote(p uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.group(p / GroupPages).wrote.set(p % GroupPages)
}

// group returns what the present step has done to group n.
//
// Preconditions: h.mu is locked.
func (h *History) group(n uint64) *group {
	g := h.groups[n]
	if g == nil {
		g = new(group)
		h.groups[n] = g
	}
	return g
}

// Same tells that, of the pages from first on, those with a bit in pages turned
// out to be the template's after the step that ended last.
func (h *History) Same(first uint64, pages uint64) {
	h.learn.Lock()
	defer h.learn.Unlock()
	if len(h.patterns) == 0 {
		return
	}
	h.index = nil // Its copy of the open pattern is not true any more.
	last := h.patterns[len(h.patterns)-1]
	// The pages are of two words of bitmaps.
	for i, w := range [2]uint64{pages << (first % 64), pages >> (64 - first%64)} {
		p := (first/64 + uint64(i)) * 64
		if m := last.open[p/GroupPages]; w != 0 && m != nil {
			j := p % GroupPages / 64
			m.same[j] |= w &^ m.wrote[j]
		}
	}
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

// Predict returns the pages that the step in progress is now known to want and
// was not before, in the order in which it will want them. It is called when a
// step begins and again as its faults give evidence. The budget is that of as many
// faults as there were, or of minFaults if that is more.
//
// Pages that steps did not write to are left out if isTemplate says that they are
// the template's: they are read where they are.
func (h *History) Predict(minFaults int, isTemplate func(page uint64) bool) []Run {
	h.learn.Lock()
	defer h.learn.Unlock()
	if len(h.patterns) == 0 {
		return nil
	}
	x := h.indexed()
	likelihood := h.believe(x)
	belief := likelihood[:len(h.patterns)]
	best := 0
	for k, b := range belief {
		if b > belief[best] {
			best = k
		}
	}

	kind := newVote(belief, 0.5)
	h.salt++
	room := h.room(minFaults)
	var runs []Run
	for _, next := range x.inOrderOf(best) {
		at := int(uint32(next))
		n := uint64(x.numbers[at])
		open := h.open(n)
		if open == 0 {
			continue
		}
		w := x.surely(at)
		if room > 0 {
			more := kind.likely(x, x.row(at), open)
			for i := range w.pages {
				w.same[i] = w.same[i]&^more.pages[i] | more.same[i]
				w.pages[i] |= more.pages[i]
			}
		}
		if w.pages == (bitmap{}) {
			continue
		}
		// Where a step writes to one page it may write to its neighbours the next
		// time: what a unit of faults has one of is restored as before. (Leaving
		// out single pages cost 70 % more faults on lsp, and more processor time
		// than it saved.)
		for i, p := range w.pages {
			w.same[i] &^= spread(gather(p &^ w.same[i]))
		}
		h.mu.Lock()
		g := h.group(n)
		before := g.predicted.units()
		for i, p := range w.pages {
			fresh := p &^ g.touched[i] &^ g.predicted[i]
			for s := fresh & w.same[i]; s != 0; s &= s - 1 {
				if isTemplate(n*GroupPages + uint64(i)*64 + uint64(bits.TrailingZeros64(s))) {
					fresh &^= s & -s
				}
			}
			g.predicted[i] |= fresh
			count := bits.OnesCount64(fresh)
			h.predicted += count
			h.total.Predicted += uint64(count)
			room -= count
			for fresh != 0 {
				// A run of pages of one unit.
				j := bits.TrailingZeros64(fresh)
				k := min(bits.TrailingZeros64(^(fresh >> j)), UnitPages-j%UnitPages)
				fresh &^= (1<<k - 1) << j
				p := n*GroupPages + uint64(i*64+j)
				sample := (p/UnitPages+h.salt)%SampleEvery == 0
				if sample {
					g.sampled |= 1 << (p / UnitPages % unitsPerGroup)
				}
				runs = appendRun(runs, Run{p, p + uint64(k), !sample})
			}
		}
		after := g.predicted.units()
		h.mu.Unlock()
		x.predicted(at, after&^before)
	}
	return runs
}

// appendRun appends r to runs, or to the last of them.
func appendRun(runs []Run, r Run) []Run {
	if k := len(runs) - 1; k >= 0 && runs[k].End == r.First && runs[k].Map == r.Map {
		runs[k].End = r.End
		return runs
	}
	return append(runs, r)
}

// open returns the units of group n that have pages that the step has neither wanted
// nor was predicted to want.
func (h *History) open(n uint64) uint32 {
	h.mu.Lock()
	defer h.mu.Unlock()
	g := h.groups[n]
	if g == nil {
		return math.MaxUint32
	}
	var open bitmap
	for i := range open {
		open[i] = ^(g.touched[i] | g.predicted[i])
	}
	return open.units()
}

// room returns how many pages may be predicted now: the more faults the step has
// had, the more is known about it, and the more it may cost if that is wrong.
func (h *History) room(minFaults int) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return max(h.faults, minFaults)*budget - h.predicted
}

// EndStep tells that a step has ended: its pages are being evicted.
func (h *History) EndStep() {
	h.learn.Lock()
	defer h.learn.Unlock()
	if p := h.finishStep(); p.len() != 0 {
		h.sealLast()
		h.patterns = append(h.patterns, p)
		h.patterns = slices.Delete(h.patterns, 0, max(len(h.patterns)-MaxPatterns, 0))
	}
}

// Seal tells that all pages were looked at that the step which ended last has left:
// Same has no more to say of it.
func (h *History) Seal() {
	h.learn.Lock()
	defer h.learn.Unlock()
	h.index = nil // The sandbox may wait now; the next step makes another.
	h.sealLast()
}

func (h *History) sealLast() {
	if n := len(h.patterns); n != 0 {
		h.patterns[n-1].seal()
	}
}

// recentSteps is how many steps Recent looks back.
const recentSteps = 2

// Recent returns a function that tells whether one of the last steps wanted a page
// of group n.
func (h *History) Recent(n uint64) func(page uint64) bool {
	h.learn.Lock()
	defer h.learn.Unlock()
	var m bitmap
	for _, p := range h.patterns[max(len(h.patterns)-recentSteps, 0):] {
		if g, ok := p.group(n); ok {
			for i := range m {
				m[i] |= g.pages[i]
			}
		}
	}
	return func(page uint64) bool { return page/GroupPages == n && m.has(page%GroupPages) }
}

// finishStep returns the pages that the step wanted, as far as known, and begins
// another.
func (h *History) finishStep() *Pattern {
	h.mu.Lock()
	defer h.mu.Unlock()
	step := &Pattern{open: make(map[uint64]*memory, len(h.groups))}
	sampled, used := 0, 0
	for n, g := range h.groups {
		// What was predicted and not seen to be used comes last.
		m := &memory{order: cmp.Or(g.order, math.MaxUint32), wrote: g.wrote}
		samples, usedSamples := unitPages(g.sampled), unitPages(g.sampled&g.used)
		// Predicted pages that are no samples share the fate of most samples
		// around them; without any, something in the group must have been wanted.
		likely := 2*bits.OnesCount32(g.sampled&g.used) >= bits.OnesCount32(g.sampled) && (g.sampled != 0 || g.order != 0)
		for i := range m.pages {
			p := g.predicted[i] &^ g.touched[i]
			s := p & samples[i]
			sampled += bits.OnesCount64(s)
			used += bits.OnesCount64(s & usedSamples[i])
			m.pages[i] = g.touched[i] | s&usedSamples[i]
			if likely {
				m.pages[i] |= p &^ s
			}
		}
		if m.pages != (bitmap{}) {
			step.open[n] = m
		}
	}
	h.total.Sampled += uint64(sampled)
	h.total.Used += uint64(used)
	h.beginStep()
	return step
}

// Quality returns the counts so far.
func (h *History) Quality() Quality {
	h.learn.Lock()
	n := len(h.patterns)
	h.learn.Unlock()
	h.mu.Lock()
	defer h.mu.Unlock()
	q := h.total
	q.Patterns = uint64(n)
	return q
}

// MetadataBytes is about how much memory the History takes.
func (h *History) MetadataBytes() uint64 {
	h.learn.Lock()
	n := uint64(0)
	for _, p := range h.patterns {
		n += p.bytes()
	}
	n += h.index.bytes(h.patterns)
	h.learn.Unlock()
	h.mu.Lock()
	defer h.mu.Unlock()
	return n + uint64(len(h.groups))*220 + uint64(len(h.evidence))*40
}
