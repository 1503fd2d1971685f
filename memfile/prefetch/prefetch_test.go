package prefetch

import (
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

// TestRepeat: what one step wanted is predicted for the next, in the order in
// which groups were first wanted.
func TestRepeat(t *testing.T) {
	h := New()
	for range 2 {
		h.Wanted(5*GroupPages, 5*GroupPages+100)
		h.Wanted(10, 20)
		require.Empty(t, h.Predict(), "two steps have to agree")
		h.EndStep()
	}
	runs := h.Predict()
	require.Len(t, pages(runs), 110)
	require.Equal(t, uint64(5*GroupPages), runs[0].First)
}

// TestForgets: pages that are no longer used stop being predicted.
func TestForgets(t *testing.T) {
	h := New()
	for range 2 {
		h.Wanted(0, 64)
		h.EndStep()
	}
	require.Len(t, pages(h.Predict()), 64)
	for step := 0; len(h.Predict()) != 0; step++ {
		require.Less(t, step, 4*SampleEvery, "useless pages are predicted for ever")
		h.EndStep()
	}
}

// TestSamples: used samples keep their pages predicted, and give the precision.
func TestSamples(t *testing.T) {
	h := New()
	for range 2 {
		h.Wanted(0, GroupPages)
		h.EndStep()
	}
	for range 50 {
		samples := 0
		for _, r := range h.Predict() {
			if !r.Map {
				samples++
				h.Used(r.First)
			}
		}
		require.Equal(t, unitsPerGroup/SampleEvery, samples)
		h.EndStep()
	}
	q := h.Quality()
	require.Equal(t, 1.0, q.Precision())
	require.Greater(t, q.Recall(), 0.9)
}

// TestModel: predicted pages are exactly those with a high score and not yet
// wanted, runs do not overlap, and nothing is predicted that was never wanted.
func TestModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		h := New()
		ever := map[uint64]bool{}
		for range rapid.IntRange(1, 20).Draw(t, "steps") {
			for range rapid.IntRange(0, 5).Draw(t, "touches") {
				first := rapid.Uint64Range(0, 3*GroupPages).Draw(t, "first")
				n := rapid.Uint64Range(1, 40).Draw(t, "n")
				h.Wanted(first, first+n)
				for p := first; p < first+n; p++ {
					ever[p] = true
				}
			}
			seen := map[uint64]bool{}
			for _, r := range h.Predict() {
				require.Less(t, r.First, r.End)
				for p := r.First; p < r.End; p++ {
					require.False(t, seen[p], "page %d twice", p)
					seen[p] = true
					require.True(t, ever[p], "page %d was never wanted", p)
				}
			}
			h.EndStep()
		}
	})
}

func BenchmarkWanted(b *testing.B) {
	h := New()
	for i := 0; b.Loop(); i++ {
		p := uint64(i) % 100000 * UnitPages
		h.Wanted(p, p+UnitPages)
	}
}

func BenchmarkPredict(b *testing.B) {
	h := New()
	for range 2 {
		h.Wanted(0, 25000)
		h.EndStep()
	}
	for b.Loop() {
		h.Predict()
	}
}
