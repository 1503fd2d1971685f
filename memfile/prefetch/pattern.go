package prefetch

import (
	"cmp"
	"maps"
	"math"
	"math/bits"
	"slices"
)

// A bitmap has a bit for each page of a group.
type bitmap [GroupPages / 64]uint64

func (m *bitmap) set(i uint64)      { m[i/64] |= 1 << (i % 64) }
func (m *bitmap) has(i uint64) bool { return m[i/64]>>(i%64)&1 != 0 }

// setRange sets bits [first, end).
func (m *bitmap) setRange(first, end uint64) {
	for first < end {
		next := min(end, (first/64+1)*64)
		m[first/64] |= math.MaxUint64 >> (64 - (next - first)) << (first % 64)
		first = next
	}
}

// unitsPerWord is how many units the pages of a word of a bitmap are of.
const unitsPerWord = 64 / UnitPages

// firstPages has the first page of each unit of a word, and diagonal a bit for each unit
// that is as many places before its first page as the unit's number is greater than 0:
// by these, spread and gather move the bits of units apart and together.
const (
	firstPages = 1 | 1<<UnitPages | 1<<(2*UnitPages) | 1<<(3*UnitPages)
	diagonal   = 1 | 1<<(UnitPages-1) | 1<<(2*(UnitPages-1)) | 1<<(3*(UnitPages-1))
)

// spread returns the pages of the units that have one of the unitsPerWord lowest bits
// in units.
func spread(units uint32) uint64 {
	return uint64(units&(1<<unitsPerWord-1)) * diagonal & firstPages * (1<<UnitPages - 1)
}

// gather returns a bit for each unit that has a page in w.
func gather(w uint64) uint32 {
	w |= w >> 8
	w |= w >> 4
	w |= w >> 2
	w |= w >> 1
	w &= firstPages
	return uint32(w|w>>(UnitPages-1)|w>>(2*(UnitPages-1))|w>>(3*(UnitPages-1))) & (1<<unitsPerWord - 1)
}

// unitPages returns the pages of the units that have a bit in units.
func unitPages(units uint32) (m bitmap) {
	for i := range m {
		m[i] = spread(units >> (i * unitsPerWord))
	}
	return m
}

// units returns a bit for each unit that has a page in m.
func (m *bitmap) units() (units uint32) {
	for i, w := range m {
		units |= gather(w) << (i * unitsPerWord)
	}
	return units
}

// A Pattern is the set of pages that one step wanted.
//
// It is open while it becomes known what the step has left of these pages, and
// sealed from then on: patterns are most of what a History holds, and a sealed one
// takes 40 to 60 bytes a group, a fifth of an open one.
type Pattern struct {
	// open has the groups until the Pattern is sealed.
	open map[uint64]*memory

	// groups are in ascending order of their numbers. masks has what they do not
	// have room for.
	groups []sealed
	masks  []uint16
}

// A memory is what a pattern has of one group.
type memory struct {
	pages bitmap
	// same pages were the template's again, or still, when the step ended, and no
	// fault tells that they were written to meanwhile. wrote has the pages that a
	// fault told so of; it is needed for that only, and not kept.
	same, wrote bitmap
	// order is the place of the group in the order in which the step wanted
	// groups, from 1.
	order uint32
}

// A sealed is a memory with a bit for each unit instead of each page: units that
// have pages, those that have all, and those that the template has all or none of
// the pages of. For each of the others masks has its pages, and those of them that
// are the template's.
type sealed struct {
	number, order                   uint32
	units, whole, allSame, noneSame uint32
	// first is where its masks begin.
	first uint32
}

// sealedBytes is the size of a sealed.
const sealedBytes = 28

// unit returns the bits of unit u.
func (m *bitmap) unit(u int) uint16 {
	return uint16(m[u*UnitPages/64] >> (u * UnitPages % 64))
}

// seal makes the Pattern small. It must not change any more.
func (p *Pattern) seal() { *p = *p.sealed() }

// sealed returns the Pattern if it is sealed, or a copy that is.
func (p *Pattern) sealed() *Pattern {
	if p.open == nil {
		return p
	}
	groups := make([]sealed, 0, len(p.open))
	var masks []uint16
	for _, n := range slices.Sorted(maps.Keys(p.open)) {
		m := p.open[n]
		s := sealed{number: uint32(n), order: m.order, first: uint32(len(masks))}
		for u := range unitsPerGroup {
			pages, same, bit := m.pages.unit(u), m.same.unit(u), uint32(1)<<u
			if pages == 0 {
				continue
			}
			s.units |= bit
			if pages == math.MaxUint16 {
				s.whole |= bit
			} else {
				masks = append(masks, pages)
			}
			switch same &= pages; same {
			case pages:
				s.allSame |= bit
			case 0:
				s.noneSame |= bit
			default:
				masks = append(masks, same)
			}
		}
		groups = append(groups, s)
	}
	return &Pattern{groups: groups, masks: slices.Clip(masks)}
}

// word returns word i of the pages that the pattern has of the group, and of those of
// them that are the template's. masks are the pattern's.
func (s *sealed) word(masks []uint16, i int) (pages, same uint64) {
	shift := i * unitsPerWord
	units := s.units >> shift & (1<<unitsPerWord - 1)
	if units == 0 {
		return 0, 0
	}
	partial, mixed := s.units&^s.whole, s.units&^(s.allSame|s.noneSame)
	if (partial|mixed)>>shift&units == 0 {
		return spread(units), spread(s.allSame >> shift)
	}
	before := uint32(1)<<shift - 1
	masks = masks[int(s.first)+bits.OnesCount32(partial&before)+bits.OnesCount32(mixed&before):]
	for ; units != 0; units &= units - 1 {
		u := bits.TrailingZeros32(units)
		bit := uint32(1) << (shift + u)
		p, left := uint64(math.MaxUint16), uint64(0)
		if partial&bit != 0 {
			p, masks = uint64(masks[0]), masks[1:]
		}
		switch {
		case s.allSame&bit != 0:
			left = p
		case mixed&bit != 0:
			left, masks = uint64(masks[0]), masks[1:]
		}
		pages |= p << (u * UnitPages)
		same |= left << (u * UnitPages)
	}
	return pages, same
}

// unseal returns what was sealed.
func (p *Pattern) unseal(s *sealed) (m memory) {
	m.order = s.order
	for i := range m.pages {
		m.pages[i], m.same[i] = s.word(p.masks, i)
	}
	return m
}

// group returns what the Pattern has of group n, or false.
func (p *Pattern) group(n uint64) (memory, bool) {
	if p.open != nil {
		if m := p.open[n]; m != nil {
			return *m, true
		}
		return memory{}, false
	}
	i, ok := slices.BinarySearchFunc(p.groups, n, func(s sealed, n uint64) int { return cmp.Compare(uint64(s.number), n) })
	if !ok {
		return memory{}, false
	}
	return p.unseal(&p.groups[i]), true
}

// each calls fn with the number, the order and the units of each group.
func (p *Pattern) each(fn func(n uint64, order, units uint32)) {
	for n, m := range p.open {
		fn(n, m.order, m.pages.units())
	}
	for i := range p.groups {
		fn(uint64(p.groups[i].number), p.groups[i].order, p.groups[i].units)
	}
}

// len is how many groups there are.
func (p *Pattern) len() int { return len(p.open) + len(p.groups) }

// bytes is about how much memory the Pattern takes.
func (p *Pattern) bytes() uint64 {
	return uint64(len(p.open))*230 + uint64(cap(p.groups))*sealedBytes + uint64(cap(p.masks))*2 + 80
}
