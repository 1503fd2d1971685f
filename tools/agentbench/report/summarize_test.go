package report

import (
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func row(t *testing.T, r *Report, workload, system string, clones int) Summary {
	t.Helper()
	for _, s := range r.Summary {
		if s.Workload == workload && s.System == system && s.Clones == clones {
			return s
		}
	}
	t.Fatalf("no row %s %s %d", workload, system, clones)
	return Summary{}
}

// TestSummarizeByHand compares with figures that were computed by hand.
func TestSummarizeByHand(t *testing.T) {
	stock, az := Key{"w", Stock, 2, 0}, Key{"w", "agentzip", 2, 0}
	step := func(k Key, clone, index int, kind string, seconds float64, out string) Step {
		return Step{Key: k, Clone: clone, Index: index, Kind: kind, Seconds: seconds, Output: out}
	}
	mem := func(k Key, clone, index int, idle float64, owned, host uint64) Memory {
		return Memory{Key: k, Clone: clone, Index: index, IdleSeconds: idle, OwnedBytes: owned, HostBytes: host}
	}
	r := &Report{
		Episodes: []Episode{
			{Key: stock, Restores: []float64{2, 4}, Waits: 5, SandboxCPUSeconds: 8, CPUSeconds: 13, OwnCPUSeconds: 2, IdleCPUSeconds: 1, PeakBytes: 1000},
			// The second clone did not come up.
			{Key: az, Restores: []float64{1, 0}, SandboxCPUSeconds: 12, CPUSeconds: 23, OwnCPUSeconds: 2, IdleCPUSeconds: 1, PeakBytes: 300},
		},
		Steps: []Step{
			step(stock, 0, 0, "edit", 1, "a"), step(stock, 0, 1, "test", 2, "b"), step(stock, 1, 0, "edit", 1, "c"), step(stock, 1, 1, "test", 6, "d"),
			// The last step of the last clone is missing, and one is too many.
			step(az, 0, 0, "edit", 3, "a"), step(az, 0, 1, "test", 2, "b"), step(az, 1, 0, "edit", 1, "x"), step(az, 1, 7, "test", 99, "e"),
		},
		Memory: []Memory{
			mem(stock, 0, -1, 1, 100, 1000), mem(stock, 0, 0, 20, 300, 1000), mem(stock, 1, 0, 3, 900, 9000),
			// Two measurements of one wait, whose mean counts.
			mem(az, 0, -1, 1, 10, 500), mem(az, 0, 0, 12, 20, 500), mem(az, 0, 0, 18, 40, 500),
		},
	}
	r.Timeline = []Point{
		// 400 for 2 s, falling to 0 in 1 s, 0 for 1 s; points need not be in order.
		{Key: stock, At: 4, UsedBytes: 0}, {Key: stock, At: 2, UsedBytes: 400}, {Key: stock, At: 3, UsedBytes: 0},
		{Key: az, At: 1, UsedBytes: 50}, {Key: az, At: 5, UsedBytes: 50},
	}
	r.Summarize()
	require.Len(t, r.Summary, 2)
	require.Equal(t, Stock, r.Summary[1].System, "without lists of systems, rows are sorted by name")

	s := row(t, r, "w", "agentzip", 2)
	require.Equal(t, 20.0, s.OwnedBytes)
	require.Equal(t, 500.0, s.HostBytes)
	require.Equal(t, 300.0, s.PeakBytes)
	require.Equal(t, 25.0, s.UsedBytesMean)
	require.Equal(t, 5.0, s.UsedReduction.Value)
	require.Equal(t, 2, s.WaitsMeasured)
	require.Zero(t, s.WaitsUnmeasured, "not known")
	require.Equal(t, 10.0, s.OwnedReduction.Value)
	require.False(t, s.OwnedReduction.HasInterval(), "one clone in common")
	require.Equal(t, 2.0, s.HostReduction.Value)
	require.Equal(t, 10.0, s.OwnedReductionLong.Value)
	require.Equal(t, 1.5, s.StepTimeRatio.Value, "6 s over 4 s")
	require.True(t, s.StepTimeRatio.HasInterval())
	require.LessOrEqual(t, s.StepTimeRatio.Low, 1.0)
	require.GreaterOrEqual(t, s.StepTimeRatio.High, 5.0/3)
	require.Equal(t, 1.5, s.StepP99Ratio.Value, "3 s over 2 s")
	require.Equal(t, Seconds{Count: 4, Median: 2, P95: 99, P99: 99, Sum: 105}, s.StepSeconds)
	require.Equal(t, 2.0, s.Kinds["edit"].Ratio.Value)
	require.Equal(t, 1.0, s.Kinds["test"].Ratio.Value)
	require.Equal(t, Seconds{Count: 1, Median: 1, P95: 1, P99: 1, Sum: 1}, s.RestoreSeconds)
	require.Equal(t, 0.5, s.RestoreRatio.Value)
	require.Equal(t, 12.0, s.CPUSeconds)
	require.Equal(t, 1.5, s.CPURatio.Value)
	require.Equal(t, 20.0, s.HostCPUSeconds)
	require.Equal(t, 2.0, s.HostCPURatio.Value)
	require.Equal(t, 3, s.Compared)
	require.Equal(t, 1, s.Differ)
	require.Equal(t, 2, s.Missing)
	require.False(t, s.OutputsEqual)

	s = row(t, r, "w", Stock, 2)
	require.Equal(t, 125.0, s.UsedBytesMean)
	require.Equal(t, 3, s.WaitsMeasured)
	require.Equal(t, 2, s.WaitsUnmeasured)
	require.True(t, s.Reference)
	require.True(t, s.OutputsEqual)
	require.Equal(t, 1.0, s.StepTimeRatio.Value)
	require.Equal(t, 1.0, s.OwnedReduction.Low)
}

func TestSummarizeWithoutStock(t *testing.T) {
	r := without(smallFake().report(), func(k Key) bool { return k.System == Stock })
	require.Len(t, r.Summary, 4)
	for _, s := range r.Summary {
		require.Nil(t, s.StepTimeRatio)
		require.Nil(t, s.OwnedReduction)
		require.Nil(t, s.RestoreRatio)
		require.Nil(t, s.CPURatio)
		require.Equal(t, s.System == "linux", s.Reference, "the first system of the list")
		require.True(t, s.OutputsEqual)
		require.Positive(t, s.OwnedBytes)
	}
	b, err := json.Marshal(r.Summary[0])
	require.NoError(t, err)
	require.Contains(t, string(b), `"owned_reduction":null,"owned_reduction_ci":null`)
}

func TestSummarizeNothing(t *testing.T) {
	r := new(Report)
	r.Summarize()
	require.Empty(t, r.Summary)
	require.NotEmpty(t, r.Definitions)

	// An episode that broke before its first step.
	r.Episodes = []Episode{{Key: Key{"w", "agentzip", 2, 0}}}
	r.Error = "broke"
	r.Summarize()
	require.False(t, row(t, r, "w", "agentzip", 2).OutputsEqual)
}

// TestSummarizeOrder: the order of samples does not change a single digit.
func TestSummarizeOrder(t *testing.T) {
	a := smallFake().report()
	b := smallFake().report()
	slices.Reverse(b.Steps)
	slices.Reverse(b.Memory)
	slices.Reverse(b.Episodes)
	b.Summarize()
	ja, err := json.Marshal(a.Summary)
	require.NoError(t, err)
	jb, err := json.Marshal(b.Summary)
	require.NoError(t, err)
	require.Equal(t, string(ja), string(jb))
}

// TestIntervals counts how often the 95 % interval of the step time ratio covers
// the truth in invented runs of few clones.
func TestIntervals(t *testing.T) {
	const runs = 200
	covered := 0
	for seed := range uint64(runs) {
		f := fake{workloads: []string{"swe"}, systems: []string{Stock, "agentzip"}, clones: []int{3}, steps: 8, repetitions: 2, seed: seed}
		q := row(t, f.report(), "swe", "agentzip", 3).StepTimeRatio
		if q.Low <= fakeSystem["agentzip"].step && fakeSystem["agentzip"].step <= q.High {
			covered++
		}
	}
	require.GreaterOrEqual(t, covered, runs*90/100)
}

func TestPoolQuantile(t *testing.T) {
	units := []unit{{0, 0}, {0, 1}}
	p := newPool(units, map[unit][]float64{units[0]: {1, 2, 3}, units[1]: {10, 20}})
	for _, c := range []struct {
		q     float64
		drawn []int
		want  float64
	}{
		{0.99, []int{1, 1}, 20}, {0.99, []int{2, 0}, 3}, {0.5, []int{1, 1}, 3}, {0.5, []int{0, 2}, 10}, {0.01, []int{1, 1}, 1}, {1, []int{1, 1}, 20},
	} {
		require.Equal(t, c.want, p.quantile(c.q, c.drawn), "%v", c)
	}
	require.True(t, math.IsNaN(p.quantile(0.5, []int{0, 0})))
}

func TestQuantile(t *testing.T) {
	var v []float64
	for i := range 100 {
		v = append(v, float64(i+1))
	}
	require.Equal(t, 99.0, quantile(v, 0.99))
	require.Equal(t, 50.0, quantile(v, 0.5))
	require.Zero(t, quantile(nil, 0.5))
}

func TestJSONRoundTrip(t *testing.T) {
	for _, name := range []string{"r.json", "r.json.gz"} {
		r := broken()
		path := filepath.Join(t.TempDir(), name)
		require.NoError(t, r.Write(path))
		back, err := Read(path)
		require.NoError(t, err)
		// NaN is not equal to itself.
		for _, x := range []*Report{r, back} {
			forEachRatio(x, func(q *Ratio) {
				if !q.HasInterval() {
					q.Low, q.High = -1, -1
				}
			})
		}
		// encoding/json escapes what HTML would take for tags.
		for i := range back.Mismatches {
			require.JSONEq(t, string(r.Mismatches[i].Got), string(back.Mismatches[i].Got))
			back.Mismatches[i].Got = r.Mismatches[i].Got
		}
		// Messages of require.Equal would be megabytes.
		want, got := reflect.ValueOf(*r), reflect.ValueOf(*back)
		for i := range want.NumField() {
			require.True(t, reflect.DeepEqual(want.Field(i).Interface(), got.Field(i).Interface()), want.Type().Field(i).Name)
		}
		again := filepath.Join(t.TempDir(), name)
		back.Summarize()
		require.NoError(t, back.Write(again))
		wantJSON, _ := os.ReadFile(path)
		gotJSON, _ := os.ReadFile(again)
		require.True(t, string(wantJSON) == string(gotJSON), "everything in the summary follows from the samples")

		left, err := os.ReadDir(filepath.Dir(path))
		require.NoError(t, err)
		require.Len(t, left, 1, "temporary files")
	}
}

func forEachRatio(r *Report, do func(*Ratio)) {
	visit := func(v reflect.Value) {
		for i := range v.NumField() {
			if q, ok := v.Field(i).Interface().(*Ratio); ok && q != nil {
				do(q)
			}
		}
	}
	for i := range r.Summary {
		visit(reflect.ValueOf(r.Summary[i]))
		for _, k := range r.Summary[i].Kinds {
			visit(reflect.ValueOf(k))
		}
	}
}

// TestJSONNames keeps names that other programs read.
func TestJSONNames(t *testing.T) {
	path := filepath.Join(t.TempDir(), "r.json")
	require.NoError(t, smallFake().report().Write(path))
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	var r struct {
		Summary []map[string]any `json:"summary"`
	}
	require.NoError(t, json.Unmarshal(b, &r))
	require.Len(t, r.Summary, 6)
	s := r.Summary[1]
	for name, kind := range map[string]any{
		"workload": "", "system": "", "clones": 0.0, "owned_bytes": 0.0, "host_bytes": 0.0, "owned_reduction": 0.0, "owned_reduction_ci": []any{},
		"step_time_ratio": 0.0, "step_time_ratio_ci": []any{}, "step_seconds": map[string]any{}, "outputs_equal": false,
	} {
		require.IsType(t, kind, s[name], name)
	}
	for _, name := range []string{"median", "p95", "p99", "sum"} {
		require.IsType(t, 0.0, s["step_seconds"].(map[string]any)[name], name)
	}
	// Every figure of the summary is explained.
	for name := range s {
		switch name {
		case "workload", "system", "clones", "repetitions", "reference", "outputs_compared", "outputs_differ":
			continue
		}
		require.Contains(t, definitions, strings.TrimSuffix(name, intervalSuffix))
	}
}

func TestReadErrors(t *testing.T) {
	for content, want := range map[string]string{
		``:                          "is not a report of agentbench run",
		`[]`:                        "is not a report of agentbench run",
		`{"clones": 3}`:             `it has no "format"`,
		`{"format": 99}`:            "has format 99 and this agentbench reads format 1",
		`{"format": 1, "sum`:        "is not a report",
		"\x1f\x8b":                  "decompressing",
		`{"format": 1, "steps": 3}`: "cannot unmarshal",
		`{"format": 1, "summary": [{"step_time_ratio": 1, "step_time_ratio_ci": [1]}]}`: "step_time_ratio_ci must be a list of two numbers or null, not [1]",
	} {
		path := filepath.Join(t.TempDir(), "r.json")
		require.NoError(t, os.WriteFile(path, []byte(content), 0o644))
		_, err := Read(path)
		require.ErrorContains(t, err, want)
		require.ErrorContains(t, err, path)
	}
	_, err := Read(filepath.Join(t.TempDir(), "none"))
	require.ErrorIs(t, err, os.ErrNotExist)
}

func TestWriteError(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.Mkdir(filepath.Join(dir, "r.json"), 0o755))
	r := new(Report)
	require.Error(t, r.Write(filepath.Join(dir, "r.json")))
	require.Error(t, r.Write(filepath.Join(dir, "none", "r.json")))
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, left, 1, "temporary files")
}

func TestSummarizePool(t *testing.T) {
	f := fake{workloads: []string{"swe"}, systems: []string{Stock, "agentzip", "agentzip-nopool"}, clones: []int{4}, steps: 3, repetitions: 1, pool: true}
	r := f.report()
	s := row(t, r, "swe", "agentzip", 4)
	require.InDelta(t, s.OwnedBytes/3, s.PoolShareBytes, 1)
	require.InDelta(t, s.OwnedBytes/3+(1<<20)/4, s.PoolOutsideBytes, 1, "an equal part of the memory files and of the process")
	require.InDelta(t, s.CPUSeconds/10, s.PoolCPUSeconds, 1e-9)
	require.True(t, s.pooled())
	for _, system := range []string{Stock, "agentzip-nopool"} {
		s := row(t, r, "swe", system, 4)
		require.False(t, s.pooled())
		b, err := json.Marshal(s)
		require.NoError(t, err)
		require.NotContains(t, string(b), "pool_")
	}
	for _, name := range []string{"pool_share_bytes", "pool_outside_bytes", "pool_cpu_seconds"} {
		require.Contains(t, r.Definitions, name)
	}
	// The pool's part is drawn, and a pool in one of two runs is told.
	var w strings.Builder
	require.NoError(t, r.html(&w))
	require.Contains(t, w.String(), `class="mark s2 pool"`)
	require.Contains(t, w.String(), "of it in the pool")
	f.pool = false
	without := f.report()
	w.Reset()
	require.NoError(t, without.html(&w))
	require.NotContains(t, w.String(), "in the pool")
	require.Contains(t, strings.Join(Compare(without, r).Warnings, "\n"), "the sandboxes of system agentzip had a page pool in B only")
	require.NotContains(t, strings.Join(Compare(r, r).Warnings, "\n"), "page pool")
}

// TestReadsKeptResults: results that were kept can be read, whatever was added
// since.
func TestReadsKeptResults(t *testing.T) {
	files, err := filepath.Glob("../../../test/results/*.json.gz")
	require.NoError(t, err)
	if len(files) == 0 {
		t.Skip("there are no kept results here")
	}
	for _, file := range files {
		r, err := Read(file)
		require.NoError(t, err)
		require.NotEmpty(t, r.Summary, file)
		require.NotEmpty(t, r.Memory, file)
	}
}

// TestSummarizePrefetch: a first step is foreseen by siblings or by nobody, the others
// by the clone's own.
func TestSummarizePrefetch(t *testing.T) {
	k := Key{"w", "agentzip", 3, 0}
	step := func(clone, index int, p *StepPrefetch) Step {
		return Step{Key: k, Clone: clone, Index: index, Kind: "edit", Seconds: 1, Prefetch: p}
	}
	r := &Report{Steps: []Step{
		step(0, 0, &StepPrefetch{Wanted: 1000}),
		step(0, 1, &StepPrefetch{Patterns: 1, Wanted: 100, Predicted: 500, Sampled: 32, Used: 24, LastFaultSeconds: 0.5}),
		step(0, 2, &StepPrefetch{Patterns: 2, Wanted: 200, Predicted: 300, Sampled: 32, Used: 8}),
		step(0, 3, nil),
		step(1, 0, &StepPrefetch{Patterns: 2, Wanted: 30, Predicted: 10, LastFaultSeconds: 0.25}),
	}}
	r.Summarize()
	edit := row(t, r, "w", "agentzip", 3).Kinds["edit"]
	half, recall := 0.5, 400.0/700
	require.Equal(t, &PrefetchSummary{
		Steps: 2, Precision: &half, Recall: &recall, WantedPages: 150, PredictedPages: 400,
		LastFaultSeconds: Seconds{Count: 1, Median: 0.5, P95: 0.5, P99: 0.5, Sum: 0.5},
	}, edit.Prefetch)
	require.Equal(t, &PrefetchSummary{
		Steps: 1, WantedPages: 30, PredictedPages: 10, LastFaultSeconds: Seconds{Count: 1, Median: 0.25, P95: 0.25, P99: 0.25, Sum: 0.25},
	}, edit.Siblings)
	require.Nil(t, summarizePrefetch(nil))
}
