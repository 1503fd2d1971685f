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

// A Pattern is the set of pages that one step wanted.
type Pattern struct {
	groups map[uint64]*memory
}

// A memory is what a pattern has of one group.
type memory struct {
	pages bitmap
	// same pages were the template's again, or still, when the step ended, and no
	// fault tells that they were written to meanwhile. wrote has the pages that a
	// fault told so of.
	same, wrote bitmap
	// order is the place of the group in the order in which the step wanted
	// groups, from 1.
	order uint32
}
