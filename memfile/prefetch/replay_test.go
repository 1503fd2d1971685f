package prefetch

import (
	"compress/gzip"
	"encoding/json"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

// A replay counts what predictions do to recorded steps.
type replay struct {
	// wanted pages were touched; predicted ones restored ahead, and useful if
	// they were touched.
	wanted, predicted, useful int
	// restores is how many restores on demand were left, of recorded ones.
	restores, recorded int
}

// replaySteps lets h predict steps, each a list of restores on demand (first
// page and number of pages) in the order in which they happened. What is
// predicted is restored at once.
func replaySteps(h *History, steps [][][2]uint64) (res replay) {
	for _, s := range steps {
		touched := map[uint64]bool{}
		for _, r := range s {
			for p := r[0]; p < r[0]+r[1]; p++ {
				touched[p] = true
			}
		}
		predicted := map[uint64]bool{}
		nomap := map[uint64]bool{}
		res.wanted += len(touched)
		next, faults, inc := 2, 0, 2
		for _, f := range s {
			res.recorded++
			var missing []uint64
			sample := false
			for p := f[0]; p < f[0]+f[1]; p++ {
				if !predicted[p] {
					missing = append(missing, p)
				}
				if nomap[p] {
					sample = true
				}
			}
			if sample {
				for p := f[0]; p < f[0]+f[1]; p++ {
					if nomap[p] {
						h.Used(p)
						for q := p / 16 * 16; q < p/16*16+16; q++ {
							delete(nomap, q)
						}
					}
				}
			}
			if len(missing) > 0 {
				res.restores++
				h.Wanted(missing[0], missing[len(missing)-1]+1)
				faults++
				if faults >= next && inc <= 512 {
					next = faults + inc
					inc *= 2
					for _, run := range h.Predict(0, noTemplate) {
						for p := run.First; p < run.End; p++ {
							predicted[p] = true
							res.predicted++
							if touched[p] {
								res.useful++
							}
							if !run.Map {
								nomap[p] = true
							}
						}
					}
				}
			}
		}
		h.EndStep()
	}
	return res
}

// realSteps returns the recorded steps of a real agent's sandbox.
func realSteps(t testing.TB) (steps [][][2]uint64) {
	f, err := os.Open("testdata/steps-swe.json.gz")
	require.NoError(t, err)
	defer f.Close()
	z, err := gzip.NewReader(f)
	require.NoError(t, err)
	require.NoError(t, json.NewDecoder(z).Decode(&steps))
	return steps
}

// TestRealSteps: predictions are worth their cost on the steps of a real agent's
// sandbox. The limits are a little below what is reached.
func TestRealSteps(t *testing.T) {
	steps := realSteps(t)
	h := New()
	r := replaySteps(h, steps)
	precision, recall := float64(r.useful)/float64(r.predicted), float64(r.useful)/float64(r.wanted)
	left := float64(r.restores) / float64(r.recorded)
	t.Logf("precision %.2f, recall %.2f, restores on demand left: %.2f", precision, recall, left)
	require.Greater(t, precision, 0.45)
	require.Greater(t, recall, 0.5)
	require.Less(t, left, 0.45)
	q := h.Quality()
	require.InDelta(t, precision, q.Precision(), 0.1, "what samples tell")
	require.InDelta(t, recall, q.Recall(), 0.1, "what samples tell")

	// A sibling that knows them from the first step on does better.
	sibling := New()
	require.NoError(t, sibling.Import(h.Export(Digest{}, ExportMax), Digest{}))
	r = replaySteps(sibling, steps[:9])
	alone := replaySteps(New(), steps[:9])
	t.Logf("first nine steps: %d restores on demand of %d, with a sibling's patterns %d", alone.restores, alone.recorded, r.restores)
	require.Less(t, r.restores, alone.restores)
}
