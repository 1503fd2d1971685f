package prefetch

import "math/bits"

// A bitmap has a bit for each page of a group.
type bitmap [GroupPages / 64]uint64

func (m *bitmap) set(i uint64)      { m[i/64] |= 1 << (i % 64) }
func (m *bitmap) has(i uint64) bool { return m[i/64]>>(i%64)&1 != 0 }

func (m *bitmap) count() (n int) {
	for _, w := range m {
		n += bits.OnesCount64(w)
	}
	return n
}

// unitPages returns the pages of the units that have a bit in units.
func unitPages(units uint32) (m bitmap) {
	for ; units != 0; units &= units - 1 {
		u := bits.TrailingZeros32(units)
		m[u*UnitPages/64] |= (1<<UnitPages - 1) << (u * UnitPages % 64)
	}
	return m
}

// units returns a bit for each unit that has a page in m.
func (m *bitmap) units() (units uint32) {
	for u := range unitsPerGroup {
		if m[u*UnitPages/64]>>(u*UnitPages%64)&(1<<UnitPages-1) != 0 {
			units |= 1 << u
		}
	}
	return units
}

// A memory is what a pattern has of one group.
type memory struct {
	// A page's score is twice its bit in hi plus its bit in lo; those with hi
	// belong to the pattern.
	hi, lo bitmap
	// order is the place of the group in the order in which the last step of
	// the kind wanted groups, from 1.
	order uint32
}

func (m *memory) empty() bool { return m.hi == bitmap{} && m.lo == bitmap{} }

// learn raises the scores of the pages in hit and lowers those in miss.
func (m *memory) learn(hit, miss *bitmap) {
	for i := range m.hi {
		hi, lo, t, f := m.hi[i], m.lo[i], hit[i], miss[i]&^hit[i]
		same := ^(t | f)
		m.hi[i] = t | f&hi&lo | same&hi
		m.lo[i] = t&(hi|lo) | f&hi&^lo | same&lo
	}
}

// A Pattern is what steps of one kind want.
type Pattern struct {
	groups map[uint64]*memory
	weight float64
}

// An outcome is what a step tells of one group: pages that it wanted, pages
// that it did not want although they were predicted, and pages of which it tells
// nothing.
type outcome struct {
	hit, miss, unknown bitmap
	order              uint32
}

// similarity is the share of the pages in the pattern or in the step that are in
// both.
func (p *Pattern) similarity(step map[uint64]*outcome) float64 {
	both, either := 0, 0
	for n, o := range step {
		m := p.groups[n]
		for i := range o.hit {
			have := uint64(0)
			if m != nil {
				have = m.hi[i]
			}
			both += bits.OnesCount64(have & o.hit[i])
			either += bits.OnesCount64((have | o.hit[i]) &^ o.unknown[i])
		}
	}
	for n, m := range p.groups {
		if step[n] == nil {
			either += m.hi.count()
		}
	}
	if either == 0 {
		return 0
	}
	return float64(both) / float64(either)
}

// learn learns from a step of the pattern's kind.
func (p *Pattern) learn(step map[uint64]*outcome) {
	for n, o := range step {
		m := p.groups[n]
		if m == nil {
			m = new(memory)
			p.groups[n] = m
		}
		// All that the step did not want is a miss, predicted or not.
		var miss bitmap
		for i := range miss {
			miss[i] = ^(o.hit[i] | o.unknown[i])
		}
		m.learn(&o.hit, &miss)
		if o.order != 0 {
			m.order = o.order
		}
	}
	all := bitmap{}
	for i := range all {
		all[i] = ^uint64(0)
	}
	for n, m := range p.groups {
		if step[n] == nil {
			m.learn(new(bitmap), &all)
		}
		if m.empty() {
			delete(p.groups, n)
		}
	}
}

// newPattern begins a pattern with a step. Pages of which the step tells nothing
// were predicted, and are in it until shown to be wrong.
func newPattern(step map[uint64]*outcome) *Pattern {
	p := &Pattern{groups: make(map[uint64]*memory, len(step))}
	for n, o := range step {
		m := &memory{order: o.order}
		for i := range m.hi {
			m.hi[i] = o.hit[i] | o.unknown[i]
		}
		if !m.empty() {
			p.groups[n] = m
		}
	}
	return p
}
