package prefetch

import (
	"math"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func (m *bitmap) setUnit(u int, pages uint16) {
	m[u*UnitPages/64] |= uint64(pages) << (u * UnitPages % 64)
}

// TestSeal: a sealed pattern says what it said when it was open, and takes less.
func TestSeal(t *testing.T) {
	require.Equal(t, uintptr(sealedBytes), unsafe.Sizeof(sealed{}))
	rapid.Check(t, func(t *rapid.T) {
		unit := rapid.OneOf(rapid.Just(uint16(0)), rapid.Just(uint16(math.MaxUint16)), rapid.Uint16())
		p := &Pattern{open: map[uint64]*memory{}}
		want := map[uint64]memory{}
		for _, n := range rapid.SliceOfN(rapid.Uint64Range(0, 50), 1, 20).Draw(t, "groups") {
			m := &memory{order: rapid.Uint32().Draw(t, "order")}
			for u := range unitsPerGroup {
				m.pages.setUnit(u, unit.Draw(t, "pages"))
				m.same.setUnit(u, unit.Draw(t, "same")&m.pages.unit(u))
				if _, ok := want[n]; !ok {
					m.wrote.setUnit(u, unit.Draw(t, "wrote"))
				}
			}
			p.open[n] = m
			want[n] = memory{pages: m.pages, same: m.same, order: m.order}
		}
		open := p.bytes()
		p.seal()
		p.seal()
		require.Nil(t, p.open)
		require.Equal(t, len(want), p.len())
		require.Less(t, p.bytes(), open)
		for n := range uint64(60) {
			got, ok := p.group(n)
			m, wanted := want[n]
			require.Equal(t, wanted, ok, "group %d", n)
			require.Equal(t, m, got, "group %d", n)
		}
		seen := map[uint64]bool{}
		p.each(func(n uint64, order, units uint32) {
			m := want[n]
			require.False(t, seen[n])
			seen[n] = true
			require.Equal(t, m.order, order)
			require.Equal(t, m.pages.units(), units)
		})
		require.Len(t, seen, len(want))
	})
}

// TestSameAfterSeal: what an eviction says after the pattern was sealed changes
// nothing, and the pattern of the step after it is open again.
func TestSameAfterSeal(t *testing.T) {
	h := New()
	h.Wanted(0, 16)
	h.EndStep()
	h.Same(0, 1)
	h.Seal()
	h.Same(0, 2)
	m, ok := h.patterns[0].group(0)
	require.True(t, ok)
	require.Equal(t, uint64(1), m.same[0])

	h.Wanted(0, 16)
	h.EndStep()
	h.Same(0, 4)
	m, ok = h.patterns[1].group(0)
	require.True(t, ok)
	require.Equal(t, uint64(4), m.same[0])
	h.Wanted(16, 32)
	h.EndStep()
	require.Nil(t, h.patterns[1].open, "sealed, if nobody else did it")
}
