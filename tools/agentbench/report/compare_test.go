package report

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func compareFake(seed uint64) fake {
	f := smallFake()
	f.workloads, f.seed = []string{"swe"}, seed
	return f
}

func TestCompareWithItself(t *testing.T) {
	for name, r := range edgeCases() {
		c := Compare(r, r)
		require.Zero(t, c.Count(Better)+c.Count(Worse), name)
		require.Empty(t, c.NotCompared, name)
		for _, x := range c.Figures {
			require.Zero(t, x.Change)
		}
	}
	c := Compare(edgeCases()["oneclone"], edgeCases()["oneclone"])
	require.Equal(t, len(c.Figures), c.Count(Unknown), "one clone cannot tell")
}

func TestCompareScaled(t *testing.T) {
	a, b := compareFake(1).report(), compareFake(1).report()
	for i := range b.Steps {
		if b.Steps[i].System != Stock {
			b.Steps[i].Seconds *= 1.2
		}
	}
	c := Compare(a, b)
	require.True(t, c.Paired)
	require.Empty(t, c.Warnings)
	for _, x := range c.Figures {
		switch x.Figure {
		case "step_time_ratio", "step_p99_ratio":
			require.Equal(t, Worse, x.Verdict)
			require.InDelta(t, 0.2, x.Change, 1e-9)
		default:
			require.Equal(t, Same, x.Verdict)
		}
	}

	// A slower machine is not a worse runtime.
	for i := range b.Steps {
		if b.Steps[i].System == Stock {
			b.Steps[i].Seconds *= 1.2
		}
	}
	c = Compare(a, b)
	require.Zero(t, c.Count(Worse))
	require.Len(t, c.Warnings, 1)
	require.Contains(t, c.Warnings[0], "stock's own steps took 1.20x as long in B")
}

// TestCompareOnce: of one episode, small changes of times say nothing.
func TestCompareOnce(t *testing.T) {
	for slower, want := range map[float64]Verdict{1.03: Same, 1.06: Worse} {
		f := compareFake(1)
		a := f.report()
		f.repetitions = 1
		a, b := without(a, func(k Key) bool { return k.Repetition > 0 }), f.report()
		for i := range b.Steps {
			if b.Steps[i].System != Stock {
				b.Steps[i].Seconds *= slower
			}
		}
		for i := range b.Memory {
			b.Memory[i].OwnedBytes = b.Memory[i].OwnedBytes * 102 / 100
		}
		c := Compare(a, b)
		seen := 0
		for _, x := range c.Figures {
			switch x.Figure {
			case "step_time_ratio":
				seen++
				require.Less(t, *x.AdjustedP, significance)
				require.Equal(t, want, x.Verdict)
			case "owned_bytes":
				seen++
				require.Equal(t, Worse, x.Verdict, "memory is not a matter of the machine's speed")
			}
		}
		require.Equal(t, 5, seen)
		var w strings.Builder
		require.NoError(t, c.Print(&w, 100))
		require.Equal(t, want == Same, strings.Contains(w.String(), "below 5 %"), w.String())
	}
}

// TestCompareNoise counts how often noise is called a difference.
func TestCompareNoise(t *testing.T) {
	const runs = 300
	for name, c := range map[string]struct {
		repetitions int
		unpaired    bool
	}{"paired": {2, false}, "unpaired": {2, true}, "one repetition": {1, false}} {
		t.Run(name, func(t *testing.T) {
			wrong, figures, small := 0, 0, 0
			for seed := range uint64(runs) {
				fa, fb := compareFake(2*seed+10), compareFake(2*seed+11)
				fa.repetitions, fb.repetitions = c.repetitions, c.repetitions
				a, b := fa.raw(), fb.raw()
				if c.unpaired {
					b.Config.Seed++
				}
				c := Compare(a, b)
				if c.Count(Better)+c.Count(Worse) > 0 {
					wrong++
				}
				for _, x := range c.Figures {
					if x.P != nil {
						figures++
						if *x.P < 0.05 {
							small++
						}
					}
				}
			}
			t.Logf("a difference was found in %d of %d comparisons; p < 0.05 for %d of %d figures", wrong, runs, small, figures)
			// 5 % are expected; 300 comparisons may have 2.5 % more.
			require.LessOrEqual(t, wrong, runs*75/1000)
			require.LessOrEqual(t, small, figures*6/100)
		})
	}
}

// TestCompareFinds counts how often differences that are there are found.
func TestCompareFinds(t *testing.T) {
	const runs = 40
	found := make(map[string]int)
	for seed := range uint64(runs) {
		f := compareFake(2*seed + 11)
		f.slow, f.bigger = 1.2, 0.8
		for _, x := range Compare(compareFake(2*seed+10).raw(), f.raw()).Figures {
			if x.System != "agentzip" {
				continue
			}
			switch {
			case x.Figure == "owned_bytes" && x.Verdict == Better, x.Figure == "step_time_ratio" && x.Verdict == Worse:
				found[x.Figure]++
			}
		}
	}
	require.GreaterOrEqual(t, found["owned_bytes"], runs*95/100)
	require.GreaterOrEqual(t, found["step_time_ratio"], runs*80/100)
}

func TestCompareDifferentRuns(t *testing.T) {
	a := smallFake().report()
	b := fake{workloads: []string{"swe", "lsp"}, systems: []string{Stock, "agentzip"}, clones: []int{4}, steps: 12, repetitions: 1, seed: 9}.report()
	b.Machine.CPUs, b.Config.Seed, b.Error = 64, 7, "stopped"
	c := Compare(a, b)
	require.False(t, c.Paired)
	text := strings.Join(c.Warnings, "\n")
	require.Contains(t, text, "the machine differs: cpus is 2 in A and 64 in B")
	require.Contains(t, text, "the configuration differs: seed is 1 in A and 7 in B")
	require.Contains(t, text, "run B is incomplete: stopped")
	require.Contains(t, c.NotCompared, NotCompared{"swe", "linux", 4, "", "only in A"})
	require.Contains(t, c.NotCompared, NotCompared{"lsp", "agentzip", 4, "", "only in B"})

	// One run without stock, then both.
	drop := func(k Key) bool { return k.System == Stock }
	one := Compare(a, without(a, drop))
	require.Contains(t, one.NotCompared, NotCompared{"swe", "agentzip", 4, "times", "only A has stock to compare times with"})
	both := Compare(without(a, drop), without(a, drop))
	require.Contains(t, strings.Join(both.Warnings, "\n"), "neither run has stock with workload swe and 4 clones")
	require.True(t, strings.Contains(figureNames(both), "step_seconds"), figureNames(both))
	require.False(t, strings.Contains(figureNames(both), "ratio"), figureNames(both))
}

func figureNames(c *Comparison) string {
	var names []string
	for _, x := range c.Figures {
		names = append(names, x.Figure)
	}
	return strings.Join(names, " ")
}

func TestComparisonPrint(t *testing.T) {
	a := smallFake().report()
	f := smallFake()
	f.seed, f.slow, f.bigger = 2, 1.3, 0.7
	b := f.report()
	b.Machine.Kernel = "0.1-fake"
	b = without(b, func(k Key) bool { return k.Workload == "data" && k.System == "linux" })
	c := Compare(a, b)
	var w strings.Builder
	require.NoError(t, c.Print(&w, 100))
	golden(t, "compare.txt", "INVENTED FIGURES: this is the output of a test.\n"+w.String())

	w.Reset()
	require.NoError(t, Compare(a, new(Report)).Print(&w, 80))
	require.Contains(t, w.String(), "the runs have nothing in common")

	path := filepath.Join(t.TempDir(), "c.json")
	require.NoError(t, c.Write(path))
	raw, err := os.ReadFile(path)
	require.NoError(t, err)
	back := new(Comparison)
	require.NoError(t, json.Unmarshal(raw, back))
	require.Equal(t, c, back)
}
