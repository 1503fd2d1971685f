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

	// mu protects the present step.
	mu     sync.Mutex
	groups map[uint64]*group
	// evidence is the units of the first faults, each once, by number in the
	// file.
	evidence []uint64
	seen     map[uint64]struct{}
	clock    uint32
	faults   int
	total    Quality
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

func (h *History) beginStep() {
	h.groups = make(map[uint64]*group)
	h.seen = make(map[uint64]struct{})
	h.evidence = nil
	h.clock, h.faults = 0, 0
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
	g := h.groups[p/GroupPages]
	if g == nil {
		g = new(group)
		h.groups[p/GroupPages] = g
	}
	g.wrote.set(p % GroupPages)
}

// Same tells that, of the pages from first on, those with a bit in pages turned
// out to be the template's after the step that ended last.
func (h *History) Same(first uint64, pages uint64) {
	h.learn.Lock()
	defer h.learn.Unlock()
	if len(h.patterns) == 0 {
		return
	}
	last := h.patterns[len(h.patterns)-1]
	for ; pages != 0; pages &= pages - 1 {
		p := first + uint64(bits.TrailingZeros64(pages))
		if m := last.open[p/GroupPages]; m != nil && !m.wrote.has(p%GroupPages) {
			m.same.set(p % GroupPages)
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
	belief := h.believe()
	best := 0
	for k, b := range belief {
		if b > belief[best] {
			best = k
		}
	}

	// The groups of all patterns that matter, in the order of the likeliest.
	type entry struct {
		n     uint64
		order uint32
	}
	var entries []entry
	listed := make(map[uint64]bool)
	list := func(n uint64, order uint32) {
		if !listed[n] {
			listed[n] = true
			entries = append(entries, entry{n, order})
		}
	}
	h.patterns[best].each(func(n uint64, order, _ uint32) { list(n, order) })
	for _, p := range h.patterns {
		p.each(func(n uint64, _, _ uint32) { list(n, math.MaxUint32) })
	}
	slices.SortFunc(entries, func(a, b entry) int {
		if a.order != b.order {
			return cmp.Compare(a.order, b.order)
		}
		return cmp.Compare(a.n, b.n)
	})

	// What nearly every step wants, whatever its kind, needs no evidence.
	prior := make([]float64, len(h.patterns))
	if len(prior) >= sureSteps {
		for k := range prior {
			prior[k] = 1 / float64(len(prior))
		}
	}
	h.salt++
	room := h.room(minFaults)
	var runs []Run
	for _, e := range entries {
		mask, same := h.likely(e.n, prior, sure)
		if room > 0 {
			more, moreSame := h.likely(e.n, belief, 0.5)
			for i := range mask {
				same[i] = same[i]&^more[i] | moreSame[i]
				mask[i] |= more[i]
			}
		}
		if mask == (bitmap{}) {
			continue
		}
		// Where a step writes to one page it may write to its neighbours the next
		// time: what a unit of faults has one of is restored as before. (Leaving
		// out single pages cost 70 % more faults on lsp, and more processor time
		// than it saved.)
		var written bitmap
		for i := range written {
			written[i] = mask[i] &^ same[i]
		}
		for i, w := range unitPages(written.units()) {
			same[i] &^= w
		}
		h.mu.Lock()
		g := h.groups[e.n]
		if g == nil {
			g = new(group)
			h.groups[e.n] = g
		}
		for i, w := range mask {
			fresh := w &^ g.touched[i] &^ g.predicted[i]
			for s := fresh & same[i]; s != 0; s &= s - 1 {
				if isTemplate(e.n*GroupPages + uint64(i)*64 + uint64(bits.TrailingZeros64(s))) {
					fresh &^= s & -s
				}
			}
			g.predicted[i] |= fresh
			h.total.Predicted += uint64(bits.OnesCount64(fresh))
			room -= bits.OnesCount64(fresh)
			for ; fresh != 0; fresh &= fresh - 1 {
				j := uint64(i)*64 + uint64(bits.TrailingZeros64(fresh))
				p := e.n*GroupPages + j
				sample := (p/UnitPages+h.salt)%SampleEvery == 0
				if sample {
					g.sampled |= 1 << (j / UnitPages)
				}
				if k := len(runs) - 1; k >= 0 && runs[k].End == p && runs[k].Map == !sample {
					runs[k].End++
				} else {
					runs = append(runs, Run{p, p + 1, !sample})
				}
			}
		}
		h.mu.Unlock()
	}
	return runs
}

// room returns how many pages may be predicted now: the more faults the step has
// had, the more is known about it, and the more it may cost if that is wrong.
func (h *History) room(minFaults int) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	n := max(h.faults, minFaults) * budget
	for _, g := range h.groups {
		n -= g.predicted.count()
	}
	return n
}

// believe returns how likely the present step is of each pattern's kind. What is
// missing to 1 is the likelihood of a new kind.
//
// Preconditions: h.learn is locked.
func (h *History) believe() []float64 {
	h.mu.Lock()
	evidence := slices.Clone(h.evidence)
	predicted := make(map[uint64]uint32, len(h.groups))
	for n, g := range h.groups {
		if u := g.predicted.units(); u != 0 {
			predicted[n] = u
		}
	}
	h.mu.Unlock()

	all := make(map[uint64]uint32)
	have := make([]map[uint64]uint32, len(h.patterns))
	size := make([]float64, len(h.patterns))
	for k, p := range h.patterns {
		have[k] = make(map[uint64]uint32, p.len())
		p.each(func(n uint64, _, u uint32) {
			have[k][n] = u
			all[n] |= u
			// What has been predicted does not fault any more.
			size[k] += float64(bits.OnesCount32(u &^ predicted[n]))
		})
	}
	units := 0.0
	for _, u := range all {
		units += float64(bits.OnesCount32(u))
	}

	// Logarithms, as the products vanish.
	logs := make([]float64, len(h.patterns)+1)
	for k := range h.patterns {
		hits := 0
		for _, u := range evidence {
			if have[k][u/unitsPerGroup]>>(u%unitsPerGroup)&1 != 0 {
				hits++
			}
		}
		logs[k] = float64(len(h.patterns)-1-k)*math.Log(decay) +
			float64(hits)*math.Log((1-stray)/max(size[k], float64(hits), 1)) +
			float64(len(evidence)-hits)*math.Log(stray/max(units, 1))
	}
	logs[len(h.patterns)] = math.Log(novelWeight*float64(len(h.patterns))) -
		float64(len(evidence))*math.Log(max(novelSpace*units, 1))
	top := slices.Max(logs)
	sum := 0.0
	for k, l := range logs {
		logs[k] = math.Exp(l - top)
		sum += logs[k]
	}
	for k := range logs {
		logs[k] /= sum
	}
	return logs[:len(h.patterns)]
}

// likely returns the pages of group n that the step wants with a likelihood of
// at least the threshold, and those of them that it is likely to leave as the
// template has them.
//
// Preconditions: h.learn is locked.
func (h *History) likely(n uint64, belief []float64, threshold float64) (mask, same bitmap) {
	var ms []memory
	var ws []float64
	for k, b := range belief {
		if b < negligible {
			continue
		}
		if m, ok := h.patterns[k].group(n); ok {
			ms, ws = append(ms, m), append(ws, b)
		}
	}
	for i := range mask {
		some := uint64(0)
		for k := range ms {
			some |= ms[k].pages[i]
		}
		for ; some != 0; some &= some - 1 {
			bit := some & -some
			sum, left := 0.0, 0.0
			for k := range ms {
				m := &ms[k]
				if m.pages[i]&bit != 0 {
					sum += ws[k]
					if m.same[i]&bit != 0 {
						left += ws[k]
					}
				}
			}
			if sum >= threshold {
				mask[i] |= bit
				if left > sum*mostlySame {
					same[i] |= bit
				}
			}
		}
	}
	return mask, same
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
	h.learn.Unlock()
	h.mu.Lock()
	defer h.mu.Unlock()
	return n + uint64(len(h.groups))*220 + uint64(len(h.evidence))*40
}
