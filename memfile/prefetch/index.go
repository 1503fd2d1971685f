package prefetch

import (
	"cmp"
	"math"
	"math/bits"
	"slices"
)

// An index says what each pattern has of a group without a search, and keeps the
// counts that the belief in the patterns is made from. Predict is on the path to the
// first page of a resume and is called again and again in a step: the first call makes
// the index, what changes the patterns or ends the step drops it.
type index struct {
	// patterns are those of the History, all of them sealed: of an open one it
	// is a copy.
	patterns []*Pattern
	// numbers are the numbers of the groups that patterns have, in ascending
	// order. rows has for each of them one place for each pattern: that of the
	// group among the pattern's, from 1, or 0 if it has none.
	numbers []uint32
	rows    []uint32
	// sure is what nearly every step wants of the groups, whatever its kind:
	// sureAt has for each group the place in it, from 1, or 0 if that is nothing.
	sure   []wish
	sureAt []uint32
	// order is where the groups are sorted for a call.
	order []uint64

	// units is how many units there are in all patterns together, left how many
	// of those of each pattern were not predicted in this step.
	units int
	left  [MaxPatterns]int
	// hits is how many of the first looked units of the evidence each pattern
	// has.
	hits   [MaxPatterns]int
	looked int
}

// A wish is the pages of a group that a step is likely to want, and those of them that
// it is likely to leave as the template has them.
type wish struct {
	pages, same bitmap
}

// wishBytes is the size of a wish.
const wishBytes = 2 * GroupPages / 8

// indexed returns the index of the step in progress.
//
// Preconditions: h.learn is locked.
func (h *History) indexed() *index {
	if h.index != nil {
		return h.index
	}
	x := &index{patterns: make([]*Pattern, len(h.patterns))}
	groups := 0
	for k, p := range h.patterns {
		x.patterns[k] = p.sealed()
		groups = max(groups, p.len())
	}
	x.numbers = make([]uint32, 0, groups)
	x.rows = make([]uint32, 0, groups*len(h.patterns))
	var next [MaxPatterns]int
	for {
		n, some := uint32(math.MaxUint32), false
		for k, p := range x.patterns {
			if next[k] < len(p.groups) {
				n, some = min(n, p.groups[next[k]].number), true
			}
		}
		if !some {
			break
		}
		predicted := h.predictedUnits(uint64(n))
		all := uint32(0)
		for k, p := range x.patterns {
			place := 0
			if i := next[k]; i < len(p.groups) && p.groups[i].number == n {
				next[k]++
				place = next[k]
				all |= p.groups[i].units
				// What has been predicted does not fault any more.
				x.left[k] += bits.OnesCount32(p.groups[i].units &^ predicted)
			}
			x.rows = append(x.rows, uint32(place))
		}
		x.numbers = append(x.numbers, n)
		x.units += bits.OnesCount32(all)
	}
	// They stay for the step: without the room that they have grown into.
	x.numbers, x.rows = slices.Clone(x.numbers), slices.Clone(x.rows)
	x.decideSure()
	h.index = x
	return x
}

// decideSure makes up what nearly every step wants: it needs no evidence.
func (x *index) decideSure() {
	n := len(x.patterns)
	x.sureAt = make([]uint32, len(x.numbers))
	if n < sureSteps {
		return
	}
	weights := make([]float64, n)
	for k := range weights {
		weights[k] = 1 / float64(n)
	}
	v := newVote(weights, sure)
	for i := range x.numbers {
		if w := v.likely(x, x.row(i), math.MaxUint32); w.pages != (bitmap{}) {
			x.sure = append(x.sure, w)
			x.sureAt[i] = uint32(len(x.sure))
		}
	}
	x.sure = slices.Clone(x.sure)
}

// surely returns what nearly every step wants of the i-th group.
func (x *index) surely(i int) wish {
	if at := x.sureAt[i]; at != 0 {
		return x.sure[at-1]
	}
	return wish{}
}

// predictedUnits returns the units of group n that were predicted in this step.
func (h *History) predictedUnits(n uint64) uint32 {
	h.mu.Lock()
	defer h.mu.Unlock()
	if g := h.groups[n]; g != nil {
		return g.predicted.units()
	}
	return 0
}

// row returns the places of the i-th group, one for each pattern.
func (x *index) row(i int) []uint32 {
	return x.rows[i*len(x.patterns):][:len(x.patterns)]
}

// inOrderOf returns the groups in the order of pattern best, those that it does not
// have or has seen no use of last. The lower half of each number is which group it is.
func (x *index) inOrderOf(best int) []uint64 {
	x.order = slices.Grow(x.order[:0], len(x.numbers))
	for i := range x.numbers {
		order := uint32(math.MaxUint32)
		if place := x.row(i)[best]; place != 0 {
			order = x.patterns[best].groups[place-1].order
		}
		x.order = append(x.order, uint64(order)<<32|uint64(i))
	}
	slices.Sort(x.order)
	return x.order
}

// predicted tells that units of the i-th group were predicted that were not before.
func (x *index) predicted(i int, units uint32) {
	for k, place := range x.row(i) {
		if place != 0 {
			x.left[k] -= bits.OnesCount32(x.patterns[k].groups[place-1].units & units)
		}
	}
}

// look counts what the evidence says of the patterns.
func (x *index) look(evidence []uint64) {
	for _, u := range evidence[x.looked:] {
		i, ok := slices.BinarySearchFunc(x.numbers, u/unitsPerGroup, func(n uint32, want uint64) int { return cmp.Compare(uint64(n), want) })
		if !ok {
			continue
		}
		for k, place := range x.row(i) {
			if place != 0 {
				x.hits[k] += int(x.patterns[k].groups[place-1].units >> (u % unitsPerGroup) & 1)
			}
		}
	}
	x.looked = len(evidence)
}

// believe returns how likely the present step is of each pattern's kind, and, last,
// that it is of a new kind.
//
// Preconditions: h.learn is locked.
func (h *History) believe(x *index) (belief [MaxPatterns + 1]float64) {
	h.mu.Lock()
	evidence := h.evidence // Faults only append to it.
	h.mu.Unlock()
	x.look(evidence)

	// Logarithms, as the products vanish.
	n, units := len(x.patterns), float64(x.units)
	logs := belief[:n+1]
	for k := range x.patterns {
		hits := x.hits[k]
		logs[k] = float64(n-1-k)*math.Log(decay) +
			float64(hits)*math.Log((1-stray)/max(float64(x.left[k]), float64(hits), 1)) +
			float64(len(evidence)-hits)*math.Log(stray/max(units, 1))
	}
	logs[n] = math.Log(novelWeight*float64(n)) - float64(len(evidence))*math.Log(max(novelSpace*units, 1))
	top := slices.Max(logs)
	sum := 0.0
	for k, l := range logs {
		logs[k] = math.Exp(l - top)
		sum += logs[k]
	}
	for k := range logs {
		logs[k] /= sum
	}
	return belief
}

// bytes is about how much memory the index takes besides the patterns.
func (x *index) bytes(patterns []*Pattern) (n uint64) {
	if x == nil {
		return 0
	}
	for k, p := range x.patterns {
		if p != patterns[k] {
			n += p.bytes()
		}
	}
	return n + uint64(len(x.patterns)+cap(x.order))*8 +
		uint64(cap(x.numbers)+cap(x.rows)+cap(x.sureAt))*4 + uint64(cap(x.sure))*wishBytes + 500
}
