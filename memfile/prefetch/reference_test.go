package prefetch

import (
	"cmp"
	"math"
	"math/bits"
	"slices"
)

// What follows is Predict as it was before it was made fast, and what else did its work
// page by page: with nothing kept from one call to the next. It says what the methods
// have to return and to leave behind. It is for a History that nobody else uses.

func referenceWanted(h *History, first, end uint64) {
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

func referenceSame(h *History, first uint64, pages uint64) {
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

func referencePredict(h *History, minFaults int, isTemplate func(page uint64) bool) []Run {
	if len(h.patterns) == 0 {
		return nil
	}
	belief := referenceBelieve(h)
	best := 0
	for k, b := range belief {
		if b > belief[best] {
			best = k
		}
	}

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

	prior := make([]float64, len(h.patterns))
	if len(prior) >= sureSteps {
		for k := range prior {
			prior[k] = 1 / float64(len(prior))
		}
	}
	h.salt++
	room := referenceRoom(h, minFaults)
	var runs []Run
	for _, e := range entries {
		mask, same := referenceLikely(h, e.n, prior, sure)
		if room > 0 {
			more, moreSame := referenceLikely(h, e.n, belief, 0.5)
			for i := range mask {
				same[i] = same[i]&^more[i] | moreSame[i]
				mask[i] |= more[i]
			}
		}
		if mask == (bitmap{}) {
			continue
		}
		var written bitmap
		for i := range written {
			written[i] = mask[i] &^ same[i]
		}
		for i, w := range unitPages(referenceUnits(&written)) {
			same[i] &^= w
		}
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
	}
	return runs
}

func referenceUnits(m *bitmap) (units uint32) {
	for u := range unitsPerGroup {
		if m[u*UnitPages/64]>>(u*UnitPages%64)&(1<<UnitPages-1) != 0 {
			units |= 1 << u
		}
	}
	return units
}

func referenceRoom(h *History, minFaults int) int {
	n := max(h.faults, minFaults) * budget
	for _, g := range h.groups {
		for _, w := range g.predicted {
			n -= bits.OnesCount64(w)
		}
	}
	return n
}

func referenceBelieve(h *History) []float64 {
	predicted := make(map[uint64]uint32, len(h.groups))
	for n, g := range h.groups {
		if u := referenceUnits(&g.predicted); u != 0 {
			predicted[n] = u
		}
	}

	all := make(map[uint64]uint32)
	have := make([]map[uint64]uint32, len(h.patterns))
	size := make([]float64, len(h.patterns))
	for k, p := range h.patterns {
		have[k] = make(map[uint64]uint32, p.len())
		p.each(func(n uint64, _, u uint32) {
			have[k][n] = u
			all[n] |= u
			size[k] += float64(bits.OnesCount32(u &^ predicted[n]))
		})
	}
	units := 0.0
	for _, u := range all {
		units += float64(bits.OnesCount32(u))
	}

	logs := make([]float64, len(h.patterns)+1)
	for k := range h.patterns {
		hits := 0
		for _, u := range h.evidence {
			if have[k][u/unitsPerGroup]>>(u%unitsPerGroup)&1 != 0 {
				hits++
			}
		}
		logs[k] = float64(len(h.patterns)-1-k)*math.Log(decay) +
			float64(hits)*math.Log((1-stray)/max(size[k], float64(hits), 1)) +
			float64(len(h.evidence)-hits)*math.Log(stray/max(units, 1))
	}
	logs[len(h.patterns)] = math.Log(novelWeight*float64(len(h.patterns))) -
		float64(len(h.evidence))*math.Log(max(novelSpace*units, 1))
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

func referenceLikely(h *History, n uint64, belief []float64, threshold float64) (mask, same bitmap) {
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
