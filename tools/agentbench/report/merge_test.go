package report

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// mergeable is a run with one episode of each of two systems.
func mergeable(clones int, stock, agentzip float64) *Report {
	r := &Report{Format: Format, Date: time.Unix(int64(clones), 0).UTC(), Commit: "c", Command: []string{"run"}, Seconds: 10,
		Config:    Config{Clones: []int{clones}, Steps: 1, Repetitions: 1},
		Workloads: []Workload{{Name: "swe"}},
		Systems:   []System{{Name: Stock, SHA256: "1"}, {Name: "agentzip", SHA256: "2"}},
	}
	for i, s := range []string{Stock, "agentzip"} {
		k := Key{Workload: "swe", System: s, Clones: clones}
		r.Episodes = append(r.Episodes, Episode{Key: k, Order: i})
		for c := range clones {
			r.Steps = append(r.Steps, Step{Key: k, Clone: c, Kind: "look", Seconds: []float64{stock, agentzip}[i], Output: "x"})
		}
	}
	r.Summarize()
	r.Definitions["of samples"] = "kept"
	return r
}

func TestMerge(t *testing.T) {
	a, b := mergeable(8, 1, 1.5), mergeable(4, 2, 2)
	a.Machine.MapTouchNS, b.Machine.MapTouchNS = 15000, 16000 // measured twice
	m, err := Merge(a, b)
	require.NoError(t, err)
	require.Equal(t, []int{4, 8}, m.Config.Clones)
	require.Equal(t, 20.0, m.Seconds)
	require.Equal(t, []string{"run", "+", "run"}, m.Command)
	require.Len(t, m.Systems, 2)
	require.Len(t, m.Workloads, 1)
	require.Len(t, m.Summary, 4)
	for i, e := range m.Episodes {
		require.Equal(t, i, e.Order)
	}
	for _, s := range m.Summary {
		if s.System == "agentzip" {
			require.Equal(t, map[int]float64{8: 1.5, 4: 1}[s.Clones], s.StepTimeRatio.Value)
		}
	}
	require.Empty(t, m.Problems)
	require.Equal(t, "kept", m.Definitions["of samples"])
	require.Len(t, a.Episodes, 2, "the reports are left alone")

	// The same binaries, built before something else was committed and copied.
	b.Commit, b.Systems[0].Binary = "d", "/copy"
	m, err = Merge(a, b)
	require.NoError(t, err)
	require.Len(t, m.Problems, 1)
	require.Contains(t, m.Problems[0].Text, "commit c with [8] clones, and d with [4] clones")
	b.Commit = "c"

	b.Config.Steps = 3
	m, err = Merge(a, b)
	require.NoError(t, err)
	require.Len(t, m.Problems, 1)
	require.Contains(t, m.Problems[0].Text, "steps for each clone 1 with [8] clones, and 3 with [4] clones")
}

func TestMergeRefuses(t *testing.T) {
	for want, change := range map[string]func(*Report){
		"another machine":   func(r *Report) { r.Machine.CPUs = 7 },
		"another binary":    func(r *Report) { r.Systems[1].SHA256 = "3" },
		"at commit":         func(r *Report) { r.Commit, r.Systems[0].SHA256 = "d", "" },
		"not the same":      func(r *Report) { r.Systems[1].Flags = []string{"-x"} },
		"in more than one ": func(r *Report) { *r = *mergeable(8, 1, 1) },
	} {
		b := mergeable(4, 1, 1)
		change(b)
		_, err := Merge(mergeable(8, 1, 1), b)
		require.ErrorContains(t, err, want)
	}
	_, err := Merge()
	require.Error(t, err)
}
