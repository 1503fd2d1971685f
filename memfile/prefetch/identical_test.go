package prefetch

import (
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// A pair is two Histories that are told the same: one by its methods, the other, old, by
// what they were.
type pair struct {
	new, old *History
}

func (p pair) wanted(first, end uint64) {
	p.new.Wanted(first, end)
	referenceWanted(p.old, first, end)
}

func (p pair) both(fn func(h *History)) {
	fn(p.new)
	fn(p.old)
}

func (p pair) same(first, pages uint64) {
	p.new.Same(first, pages)
	referenceSame(p.old, first, pages)
}

// predict requires that both predict the same, ask for the same pages of the template,
// and are the same then.
func (p pair) predict(t require.TestingT, minFaults int, isTemplate func(page uint64) bool) []Run {
	var asked, askedOld []uint64
	runs := p.new.Predict(minFaults, func(page uint64) bool {
		asked = append(asked, page)
		return isTemplate(page)
	})
	old := referencePredict(p.old, minFaults, func(page uint64) bool {
		askedOld = append(askedOld, page)
		return isTemplate(page)
	})
	require.Equal(t, old, runs)
	require.Equal(t, askedOld, asked)
	p.identical(t)
	return runs
}

// identical requires that both know the same.
func (p pair) identical(t require.TestingT) {
	a, b := p.new, p.old
	require.Equal(t, b.patterns, a.patterns)
	require.Equal(t, b.groups, a.groups)
	require.Equal(t, b.evidence, a.evidence)
	require.Equal(t, b.seen, a.seen)
	require.Equal(t, []any{b.salt, b.clock, b.faults, b.total}, []any{a.salt, a.clock, a.faults, a.total})
	for n := range 3 {
		require.Equal(t, referenceRoom(b, n*eager), a.room(n*eager))
	}
	if len(a.patterns) != 0 {
		belief := a.believe(a.indexed())
		require.Equal(t, referenceBelieve(b), belief[:len(a.patterns)])
	}
}

const eager = 64

// A stepper makes steps of several kinds up, of a file of so many groups.
type stepper struct {
	*rand.Rand
	groups int
	kinds  [][]bitmap
}

func newStepper(r *rand.Rand, kinds, groups int) *stepper {
	s := &stepper{Rand: r, groups: groups}
	common := s.pages()
	for range kinds {
		kind := s.pages()
		for n := range kind {
			for i := range kind[n] {
				if r.IntN(2) == 0 {
					kind[n][i] |= common[n][i]
				}
			}
		}
		s.kinds = append(s.kinds, kind)
	}
	return s
}

// pages returns random pages: many of them in whole units, and in groups that have few
// or many.
func (s *stepper) pages() []bitmap {
	ms := make([]bitmap, s.groups)
	for n := range ms {
		many := s.IntN(2) * s.IntN(4)
		for u := range unitsPerGroup {
			switch {
			case s.IntN(4) >= many:
			case s.IntN(3) == 0:
				ms[n].setUnit(u, uint16(s.Uint32()))
			case s.IntN(3) == 0:
				ms[n].setUnit(u, 0xffff<<s.IntN(UnitPages))
			default:
				ms[n].setUnit(u, 0xffff)
			}
		}
	}
	return ms
}

// step returns what a step of a kind wants, in no order: the first page and the number of
// pages of each restore. Some are left out, some of other kinds or of none.
func (s *stepper) step(kind, stray int) (restores [][2]uint64) {
	for n := range s.groups {
		for i := uint64(0); i < GroupPages; {
			from := &s.kinds[kind][n]
			if s.IntN(100) < stray {
				from = &s.kinds[s.IntN(len(s.kinds))][n]
			}
			first, end := i, min(i+1+uint64(s.IntN(2*UnitPages)), GroupPages)
			for i = first; i < end && from.has(i); i++ {
			}
			if first < i {
				restores = append(restores, [2]uint64{uint64(n)*GroupPages + first, i - first})
			} else {
				i++
			}
		}
	}
	if s.IntN(3) == 0 {
		first := uint64(s.IntN((s.groups + 2) * GroupPages))
		restores = append(restores, [2]uint64{first, uint64(s.IntN(2 * GroupPages))})
	}
	s.Shuffle(len(restores), func(i, j int) { restores[i], restores[j] = restores[j], restores[i] })
	return restores
}

// TestIdentical: Predict returns what it did before it was made fast, and leaves what it
// did, whatever the steps.
func TestIdentical(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var (
			r        = rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1))
			s        = newStepper(r, rapid.IntRange(1, 5).Draw(t, "kinds"), rapid.IntRange(1, 5).Draw(t, "groups"))
			stray    = rapid.SampledFrom([]int{0, 5, 50}).Draw(t, "stray")
			template = rapid.SampledFrom([]int{0, 0, 50, 95}).Draw(t, "template")
			seals    = rapid.IntRange(0, 2).Draw(t, "seals")
			p        = pair{New(), New()}
		)
		for range rapid.IntRange(1, MaxPatterns+4).Draw(t, "steps") {
			salt := r.Uint64()
			isTemplate := func(page uint64) bool {
				return (page/UnitPages*0x9e3779b97f4a7c15+page%3*salt)>>40%100 < uint64(template)
			}
			next, done := r.IntN(4), map[uint64]bool{}
			for i, f := range s.step(r.IntN(len(s.kinds)), stray) {
				if i == next {
					next += 1 + r.IntN(60)
					minFaults := r.IntN(2) * eager
					runs := p.predict(t, minFaults, isTemplate)
					for _, run := range runs {
						for page := run.First; page < run.End; page++ {
							done[page] = true
							if !run.Map && r.IntN(8) == 0 {
								p.both(func(h *History) { h.Used(page) })
							}
						}
					}
				}
				if !done[f[0]] {
					p.wanted(f[0], f[0]+f[1])
				}
				switch r.IntN(200) {
				case 0:
					p.both(func(h *History) { h.Wrote(f[0]) })
				case 1: // an eviction in the middle of the step
					p.same(f[0]/64*64, r.Uint64())
				case 2:
					p.both((*History).Seal)
				case 3:
					b := p.new.Export(Digest{}, r.IntN(ExportMax))
					p.both(func(h *History) { require.NoError(t, h.Import(b, Digest{})) })
				}
			}
			p.predict(t, 0, isTemplate)
			p.both((*History).EndStep)
			p.identical(t)
			for range r.IntN(40) {
				p.same(uint64(r.IntN(s.groups*GroupPages)), r.Uint64()|r.Uint64())
			}
			if r.IntN(2) < seals {
				p.both((*History).Seal)
			}
			p.identical(t)
		}
	})
}

// TestIndexIsDropped: nothing that Predict keeps for a step stays while the sandbox waits.
func TestIndexIsDropped(t *testing.T) {
	h := New()
	h.Wanted(0, 20*GroupPages)
	h.EndStep()
	h.Seal()
	before := h.MetadataBytes()
	predict := func() {
		require.NotEmpty(t, h.Predict(eager, noTemplate))
		require.NotNil(t, h.index)
	}
	predict()
	require.Greater(t, h.MetadataBytes(), before, "it counts while it is there")
	h.Seal()
	require.Nil(t, h.index, "an eviction in the middle of the step")
	h.EndStep()
	require.Equal(t, before, h.MetadataBytes())
	predict()
	h.EndStep()
	require.Nil(t, h.index)
}

// TestIdenticalRealSteps is TestIdentical for the steps of a real agent's sandbox.
func TestIdenticalRealSteps(t *testing.T) {
	p := pair{New(), New()}
	r := rand.New(rand.NewPCG(1, 2))
	isTemplate := func(page uint64) bool { return page/7*0x9e3779b97f4a7c15>>60 < 9 }
	for i, s := range realSteps(t) {
		predicted := map[uint64]bool{}
		next := 2
		for j, f := range s {
			if j == next {
				next *= 2
				for _, run := range p.predict(t, i%2*eager, isTemplate) {
					for page := run.First; page < run.End; page++ {
						predicted[page] = true
					}
				}
			}
			if !predicted[f[0]] {
				p.wanted(f[0], f[0]+f[1])
			} else if r.IntN(8) == 0 {
				p.both(func(h *History) { h.Used(f[0]) })
			}
		}
		p.both((*History).EndStep)
		last := p.new.patterns[len(p.new.patterns)-1]
		for _, n := range slices.Sorted(maps.Keys(last.open)) {
			for j := range uint64(len(bitmap{})) {
				if r.IntN(3) != 0 {
					p.same(n*GroupPages+j*64, r.Uint64()|0xffff0000ffff0000)
				}
			}
		}
		p.both((*History).Seal)
		p.identical(t)
	}
}
