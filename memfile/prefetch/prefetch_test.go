package prefetch

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func pages(runs []Run) map[uint64]bool {
	m := map[uint64]bool{}
	for _, r := range runs {
		for p := r.First; p < r.End; p++ {
			m[p] = true
		}
	}
	return m
}

// use reports the samples in runs that fulfil is as used, and returns how many
// units have samples.
func use(h *History, runs []Run, is func(page uint64) bool) int {
	units := map[uint64]bool{}
	for _, r := range runs {
		for p := r.First; p < r.End; p++ {
			if !r.Map && is(p) {
				units[p/UnitPages] = true
				h.Used(p)
			}
		}
	}
	return len(units)
}

// TestRepeat: what one step wanted is predicted for the next, once there is some
// evidence that it is of the same kind, in the order in which groups were first
// wanted.
func TestRepeat(t *testing.T) {
	h := New()
	require.Empty(t, h.Predict(0, noTemplate), "nothing is known")
	h.Wanted(5*GroupPages, 5*GroupPages+100)
	h.Wanted(10, 20)
	h.EndStep()

	h.Wanted(5*GroupPages, 5*GroupPages+16)
	h.Wanted(10, 16)
	runs := h.Predict(0, noTemplate)
	require.Len(t, pages(runs), 110-16-6)
	require.Equal(t, uint64(5*GroupPages+16), runs[0].First)
	require.Empty(t, h.Predict(0, noTemplate), "the same pages again")
}

// TestKinds: the first faults of a step tell which of several kinds it is of, and
// only what that kind wants is predicted.
func TestKinds(t *testing.T) {
	h := New()
	// Each kind wants what all want (half of group 0) and a group of its own.
	const kinds, common = 4, GroupPages / 2
	base := func(kind int) uint64 { return uint64(10+10*kind) * GroupPages }
	touch := func(first, end uint64) {
		for p := first; p < end; p += UnitPages {
			h.Wanted(p, p+UnitPages)
		}
	}
	for range 3 {
		for k := range kinds {
			touch(0, common)
			touch(base(k), base(k)+GroupPages)
			h.EndStep()
		}
	}
	for k := range kinds {
		touch(0, 3*UnitPages)
		runs := h.Predict(0, noTemplate)
		require.Len(t, pages(runs), common-3*UnitPages, "what all want is likely and nothing else")
		for p := range pages(runs) {
			require.Less(t, p, uint64(common))
		}
		use(h, runs, func(uint64) bool { return true })
		touch(base(k), base(k)+5*UnitPages)
		runs = h.Predict(0, noTemplate)
		use(h, runs, func(uint64) bool { return true })
		got := pages(runs)
		require.Len(t, got, GroupPages-5*UnitPages, "kind %d", k)
		for p := range got {
			require.True(t, p >= base(k) && p < base(k)+GroupPages)
		}
		h.EndStep()
	}
}

// TestNovel: a step like no other gets no predictions, whatever its first faults
// have in common with known ones.
func TestNovel(t *testing.T) {
	h := New()
	for i := range uint64(6) {
		h.Wanted(i%2*8*GroupPages, (i%2*8+4)*GroupPages)
		h.EndStep()
	}
	for i := range uint64(10) {
		h.Wanted((100+i)*GroupPages, (100+i)*GroupPages+UnitPages)
	}
	require.Empty(t, h.Predict(0, noTemplate))
}

// TestForgets: pages that are no longer used stop being predicted.
func TestForgets(t *testing.T) {
	h := New()
	step := func(also bool) map[uint64]bool {
		h.Wanted(GroupPages, GroupPages+4)
		h.Wanted(GroupPages+32, GroupPages+36)
		runs := h.Predict(0, noTemplate)
		use(h, runs, func(p uint64) bool { return p >= GroupPages })
		got := pages(runs)
		for p := uint64(GroupPages); p < GroupPages+256; p++ {
			if !got[p] {
				h.Wanted(p, p+1)
			}
		}
		if also {
			h.Wanted(0, 128)
		}
		h.EndStep()
		return got
	}
	for range 4 {
		step(true)
	}
	for n := 0; ; n++ {
		got := step(false)
		if !got[0] && !got[127] {
			require.True(t, got[GroupPages+100])
			return
		}
		require.Less(t, n, 2*MaxPatterns, "useless pages are predicted for ever")
	}
}

// TestSamples: used samples keep their pages predicted, and give the precision.
func TestSamples(t *testing.T) {
	h := New()
	const groups = 8
	h.Wanted(0, groups*GroupPages)
	h.EndStep()
	for range 30 {
		for u := range uint64(40) { // evidence
			h.Wanted(u*UnitPages, u*UnitPages+1)
		}
		n := use(h, h.Predict(0, noTemplate), func(uint64) bool { return true })
		require.InDelta(t, groups*unitsPerGroup/SampleEvery, n, 2)
		h.EndStep()
	}
	q := h.Quality()
	require.Equal(t, 1.0, q.Precision())
	require.Greater(t, q.Recall(), 0.9)
}

// TestBudget: few faults justify few predictions.
func TestBudget(t *testing.T) {
	h := New()
	h.Wanted(0, 20*GroupPages)
	h.EndStep()
	h.Wanted(0, 1)
	h.Wanted(UnitPages, UnitPages+1)
	n := len(pages(h.Predict(0, noTemplate)))
	require.Greater(t, n, budget)
	require.LessOrEqual(t, n, 2*budget+GroupPages)
	for u := range uint64(100) {
		h.Wanted(u*UnitPages, u*UnitPages+1)
	}
	require.Greater(t, len(pages(h.Predict(0, noTemplate))), 5000)
}

// TestRecent: what the last steps wanted is known, and no more.
func TestRecent(t *testing.T) {
	h := New()
	for i := range uint64(4) {
		h.Wanted(GroupPages+10*i, GroupPages+10*i+5)
		h.EndStep()
	}
	recent := h.Recent(1)
	for p := uint64(0); p < 3*GroupPages; p++ {
		off := p - GroupPages
		require.Equal(t, off >= 20 && off < 25 || off >= 30 && off < 35, recent(p), "page %d", p)
	}
	require.False(t, h.Recent(2)(2*GroupPages))
}

// TestModel: nothing is predicted twice in a step, nor a page that the step has
// wanted already, nor one that was never wanted; runs are not empty.
func TestModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		h := New()
		ever := map[uint64]bool{}
		for range rapid.IntRange(1, 20).Draw(t, "steps") {
			wanted, seen := map[uint64]bool{}, map[uint64]bool{}
			for range rapid.IntRange(0, 5).Draw(t, "touches") {
				first := rapid.Uint64Range(0, 3*GroupPages).Draw(t, "first")
				n := rapid.Uint64Range(1, 40).Draw(t, "n")
				h.Wanted(first, first+n)
				for p := first; p < first+n; p++ {
					ever[p], wanted[p] = true, true
				}
				for _, r := range h.Predict(0, noTemplate) {
					require.Less(t, r.First, r.End)
					for p := r.First; p < r.End; p++ {
						require.False(t, seen[p], "page %d twice", p)
						seen[p] = true
						require.True(t, ever[p], "page %d was never wanted", p)
						require.False(t, wanted[p], "page %d is there already", p)
					}
					if rapid.Bool().Draw(t, "used") {
						h.Used(r.First)
					}
				}
			}
			h.EndStep()
			require.LessOrEqual(t, h.Quality().Patterns, uint64(MaxPatterns))
		}
	})
}

func TestBitmaps(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		units := rapid.Uint32().Draw(t, "units")
		m := unitPages(units)
		require.Equal(t, units, m.units())
		for i := range uint64(GroupPages) {
			require.Equal(t, units>>(i/UnitPages)&1 == 1, m.has(i))
		}
		for i := range m {
			m[i] = rapid.Uint64().Draw(t, "pages") & rapid.Uint64().Draw(t, "and")
		}
		require.Equal(t, referenceUnits(&m), m.units())
	})
}

func TestExport(t *testing.T) {
	learnt := New()
	for k := range uint64(3) {
		for range 2 {
			learnt.Wanted(k*100*GroupPages, k*100*GroupPages+700)
			learnt.EndStep()
		}
	}
	tpl := Digest{1, 2, 3}
	b := learnt.Export(tpl, ExportMax)
	sibling := New()
	require.NoError(t, sibling.Import(b, tpl))
	require.Equal(t, b, sibling.Export(tpl, ExportMax))
	require.Less(t, len(learnt.Export(tpl, len(b)-1)), len(b))
	require.NoError(t, New().Import(learnt.Export(tpl, len(b)-1), tpl), "what fits")
	for u := range uint64(6) {
		sibling.Wanted(200*GroupPages+u*UnitPages, 200*GroupPages+u*UnitPages+1)
	}
	require.Len(t, pages(sibling.Predict(0, noTemplate)), 700-6, "a sibling knows the first step already")

	require.ErrorIs(t, New().Import(b, Digest{9}), ErrNotForTemplate)
	for i := range b {
		bad := append([]byte(nil), b...)
		bad[i] ^= 4
		require.Error(t, New().Import(bad, tpl), "byte %d", i)
		require.Error(t, New().Import(b[:i], tpl), "%d bytes", i)
	}
	require.Error(t, New().Import(append(b, 0), tpl))

	// No more than there is room for.
	for range 10 {
		require.NoError(t, sibling.Import(b, tpl))
	}
	require.Equal(t, uint64(MaxPatterns), sibling.Quality().Patterns)
}

func FuzzImport(f *testing.F) {
	h := New()
	h.Wanted(0, 100)
	h.EndStep()
	f.Add(h.Export(Digest{}, ExportMax))
	f.Add([]byte(exportMagic))
	f.Fuzz(func(t *testing.T, b []byte) {
		h := New()
		if h.Import(seal(b), Digest{}) != nil {
			return
		}
		h.Wanted(0, 16)
		h.Predict(0, noTemplate)
		h.EndStep()
		require.NoError(t, New().Import(h.Export(Digest{}, ExportMax), Digest{}))
	})
}

func BenchmarkWanted(b *testing.B) {
	h := New()
	for i := 0; b.Loop(); i++ {
		p := uint64(i) % 100000 * UnitPages
		h.Wanted(p, p+UnitPages)
	}
}

// BenchmarkPredict has the Predict calls of a step, of one of several kinds of which
// MaxPatterns were learnt, or the first of them: now, and before it was made fast.
func BenchmarkPredict(b *testing.B) {
	r := rand.New(rand.NewPCG(1, 2))
	s := newStepper(r, 4, 118)
	var synthetic [][][2]uint64
	for k := range MaxPatterns + 8 {
		synthetic = append(synthetic, s.step(k%4, 5))
	}
	for name, steps := range map[string][][][2]uint64{
		// 60,000 pages, of which a step wants 10,000 to 15,000.
		"synthetic": synthetic,
		"recorded":  realSteps(b),
	} {
		b.Run(name, func(b *testing.B) {
			for _, calls := range []int{1, 8} {
				b.Run(fmt.Sprint("calls=", calls, "/now"), func(b *testing.B) { benchmarkPredict(b, steps, calls, (*History).Predict) })
				b.Run(fmt.Sprint("calls=", calls, "/before"), func(b *testing.B) { benchmarkPredict(b, steps, calls, referencePredict) })
			}
		})
	}
}

func benchmarkPredict(b *testing.B, steps [][][2]uint64, calls int, predict func(h *History, minFaults int, isTemplate func(uint64) bool) []Run) {
	h := New()
	for _, s := range steps[:MaxPatterns] {
		for _, f := range s {
			h.Wanted(f[0], f[0]+f[1])
		}
		h.EndStep()
	}
	h.Seal()
	steps = steps[MaxPatterns:]
	before, most := h.MetadataBytes(), uint64(0)
	n := 0
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		b.StopTimer()
		s := steps[i%len(steps)]
		done := map[uint64]bool{}
		for call := range calls {
			// Evidence doubles from call to call.
			from, to := 0, len(s)>>(7-call)
			if call != 0 {
				from = len(s) >> (8 - call)
			}
			for _, f := range s[from:to] {
				if !done[f[0]] {
					h.Wanted(f[0], f[0]+f[1])
				}
			}
			b.StartTimer()
			runs := predict(h, eager, noTemplate)
			b.StopTimer()
			for _, r := range runs {
				n += int(r.End - r.First)
				for p := r.First; p < r.End; p++ {
					done[p] = true
				}
			}
		}
		most = max(most, h.MetadataBytes())
		h.learn.Lock()
		h.mu.Lock()
		h.beginStep()
		h.mu.Unlock()
		h.learn.Unlock()
		b.StartTimer()
	}
	b.ReportMetric(float64(n)/float64(b.N), "pages/op")
	b.ReportMetric(float64(most-before), "metadata-B")
}

func BenchmarkEndStep(b *testing.B) {
	h := New()
	for i := uint64(0); b.Loop(); i++ {
		k := i % 6
		h.Wanted(k*12000, k*12000+25000)
		h.EndStep()
	}
}

// BenchmarkSame is of the pages of one eviction.
func BenchmarkSame(b *testing.B) {
	h := New()
	h.Wanted(0, 25000)
	h.EndStep()
	for b.Loop() {
		for p := uint64(0); p < 25000; p += 64 {
			h.Same(p, 0x00ffffff00ffffff)
		}
	}
}

// BenchmarkRecordedSteps has what faults and evictions tell of recorded steps.
func BenchmarkRecordedSteps(b *testing.B) {
	steps := realSteps(b)
	h := New()
	for i := 0; b.Loop(); i++ {
		for _, f := range steps[i%len(steps)] {
			h.Wanted(f[0], f[0]+f[1])
		}
		h.EndStep()
		h.Seal()
	}
}

func noTemplate(uint64) bool { return false }

// TestSame has steps that write to some of the template's pages and read others
// that are restored with them.
func TestSame(t *testing.T) {
	isTemplate := func(p uint64) bool { return p < 200 }
	step := func(h *History) {
		h.Wanted(96, 112)
		h.Wrote(100)
		h.Wanted(128, 144)
		h.Wanted(304, 320)
		h.EndStep()
		h.Same(96, 0xffff)
		h.Same(128, 0xffff)
		h.Same(304, 0xffff)
	}
	h := New()
	for range sureSteps {
		step(h)
	}
	h.Wanted(310, 311)
	got := pages(h.Predict(64, isTemplate))
	require.True(t, got[100], "it was written to")
	require.True(t, got[101], "its neighbour was")
	require.False(t, got[130], "it was read where the template has it")
	require.True(t, got[311], "it is not the template's now")
	h.EndStep()

	// Siblings learn it, too.
	digest := Digest{1}
	sibling := New()
	require.NoError(t, sibling.Import(h.Export(digest, ExportMax), digest))
	got = pages(sibling.Predict(64, isTemplate))
	require.True(t, got[100])
	require.False(t, got[130])

	// A page that changes in most steps is restored.
	h = New()
	for i := range 2 * sureSteps {
		h.Wanted(128, 144)
		h.EndStep()
		if i%2 == 0 {
			h.Same(128, 0xffff)
		}
	}
	require.True(t, pages(h.Predict(64, isTemplate))[130])
}
