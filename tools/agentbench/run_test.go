package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"runsc-agentzip/pkg/control"
	"runsc-agentzip/pkg/fleet"
	"runsc-agentzip/tools/agentbench/report"
	"runsc-agentzip/tools/agentbench/workload"
)

func names(systems []systemKind) []string {
	var out []string
	for _, s := range systems {
		out = append(out, s.name)
	}
	return out
}

func TestRunFlags(t *testing.T) {
	var out bytes.Buffer
	c, err := parseRunFlags(nil, &out)
	require.NoError(t, err)
	assert.Equal(t, []string{"stock", "linux", "agentzip"}, names(c.systems))
	assert.Equal(t, []int{8}, c.clones)
	require.Len(t, c.workloads, 1)
	assert.Equal(t, "swe", c.workloads[0].Name)

	c, err = parseRunFlags([]string{"--workload", "all", "--clones", "1, 2,4,2", "--systems", "agentzip,stock,agentzip", "--runtime-flags", "--a  --b=1"}, &out)
	require.NoError(t, err)
	assert.Equal(t, []string{"agentzip", "stock"}, names(c.systems))
	assert.Equal(t, []int{1, 2, 4}, c.clones)
	assert.Equal(t, []string{"--a", "--b=1"}, c.runtimeFlags)
	assert.Len(t, c.workloads, len(workload.Names()))

	for args, want := range map[string]string{
		"--workload nope":     "swe",
		"--workload swe,nope": `"nope"`,
		"--workload ,":        "swe",
		"--systems nope":      "stock, linux, agentzip, agentzip-nopool, agentzip-noprefetch",
		"--systems stock,":    `unknown system ""`,
		"--clones 0":          "from 1 on",
		"--clones 4,x":        `"4,x"`,
		"--steps 0":           "--steps",
		"--repetitions 0":     "--repetitions",
		"--wait-scale 0":      "--wait-scale",
		"--wait-scale -1":     "--wait-scale",
		"--wait-scale nan":    "--wait-scale",
		"--wait-scale inf":    "--wait-scale",
		"--step-timeout 0s":   "--step-timeout",
		"--seed -1":           "seed",
		"surplus":             `"surplus"`,
	} {
		out.Reset()
		_, err := parseRunFlags(strings.Fields(args), &out)
		assert.ErrorIs(t, err, errUsage, args)
		assert.Contains(t, out.String(), want, args)
	}

	c, err = parseRunFlags([]string{"--trace", "workload/testdata/trace.json"}, &out)
	require.NoError(t, err)
	require.Len(t, c.workloads, 1)
	assert.NotEmpty(t, c.workloads[0].Plan(1, 0, c.steps))

	out.Reset()
	_, err = parseRunFlags([]string{"-h"}, &out)
	assert.ErrorIs(t, err, flag.ErrHelp)
	for _, want := range append(names(systemKinds), workload.Names()...) {
		assert.Contains(t, out.String(), want)
	}
}

func TestParseSystems(t *testing.T) {
	all, err := parseSystems("all")
	require.NoError(t, err)
	assert.Equal(t, systemKinds, all)

	ablation, err := parseSystems("stock,ablation")
	require.NoError(t, err)
	assert.Equal(t, "stock", ablation[0].name)
	assert.Equal(t, "agentzip", ablation[1].name)
	for _, s := range ablation[2:] {
		assert.NotEmpty(t, s.ablation, s.name)
		assert.Equal(t, s.name == "agentzip-nopool", len(s.flags) == 0, s.name)
		assert.Equal(t, s.name != "agentzip-nopool" && s.name != "agentzip-off", s.pooled, s.name)
		assert.True(t, s.judged, s.name)
	}
	assert.Len(t, ablation, len(systemKinds)-1, "all but linux")
}

func TestTurnOrder(t *testing.T) {
	systems := []string{"a", "b", "c"}
	var got []string
	for rep := range 7 {
		got = append(got, strings.Join(turnOrder(systems, rep), ""))
	}
	assert.Equal(t, []string{"abc", "cba", "bca", "acb", "cab", "bac", "abc"}, got)
	assert.Equal(t, []string{"a", "b", "c"}, systems)
	assert.Equal(t, []string{"a"}, turnOrder([]string{"a"}, 5))
}

func TestPlanEpisodes(t *testing.T) {
	plan := planEpisodes([]string{"w", "v"}, []string{"a", "b"}, []int{2, 4}, 2)
	require.Len(t, plan, 16)
	var got []string
	for _, k := range plan[:8] {
		got = append(got, fmt.Sprintf("%s%s%d.%d", k.Workload, k.System, k.Clones, k.Repetition))
	}
	assert.Equal(t, []string{"wa2.0", "wb2.0", "wb4.0", "wa4.0", "wb2.1", "wa2.1", "wa4.1", "wb4.1"}, got)
	for _, k := range plan[8:] {
		assert.Equal(t, "v", k.Workload, "a workload's template is made once")
	}
	first := make(map[string]int)
	for i, k := range planEpisodes([]string{"w", "v", "u"}, []string{"a", "b", "c"}, []int{2, 4}, 1) {
		if i%3 == 0 {
			first[k.System]++
		}
	}
	assert.Equal(t, map[string]int{"a": 2, "b": 2, "c": 2}, first, "without repetitions too")
	assert.Equal(t, "b", referenceSystem([]string{"b", "a"}))
	assert.Equal(t, report.Stock, referenceSystem([]string{"b", report.Stock}))
}

func TestCheckFits(t *testing.T) {
	const gb = 1 << 30
	assert.NoError(t, checkFits(10*gb, gb, 9))
	assert.ErrorContains(t, checkFits(10*gb, gb, 10), "use --clones 9 or less")
	assert.ErrorContains(t, checkFits(10*gb, gb, 10), "need up to 10240 MiB of memory, and of the 10240 MiB available they may take 9216 MiB")
	assert.ErrorContains(t, checkFits(gb, gb, 1), "not even one fits")
	all, err := parseWorkloads("all")
	require.NoError(t, err)
	for _, w := range all {
		assert.LessOrEqual(t, w.EstimatedBytes, largest(all).EstimatedBytes)
	}
}

func TestSampleAt(t *testing.T) {
	for _, c := range []struct{ wait, want time.Duration }{
		{500 * time.Millisecond, 300 * time.Millisecond},
		{2500 * time.Millisecond, 1500 * time.Millisecond},
		{30 * time.Second, 29 * time.Second},
	} {
		assert.Equal(t, c.want, sampleAt(c.wait), c.wait)
	}
}

func TestAnswerSheet(t *testing.T) {
	kinds := [][]string{{"edit"}, {"test"}}
	answers := func(a, b, c, d string) [][]string { return [][]string{{a, b}, {c, d}} }
	key := func(system string, rep int) report.Key {
		return report.Key{Workload: "w", System: system, Clones: 2, Repetition: rep}
	}

	sheet := newAnswerSheet("stock")
	assert.Empty(t, sheet.add(key("linux", 0), kinds, answers(`{"a":1}`, `1`, `2`, `3`)), "nothing to compare with yet")
	differ := sheet.add(key("stock", 0), kinds, answers(`{"a":2}`, `1`, `2`, `4`))
	require.Len(t, differ, 2)
	assert.Equal(t, report.Mismatch{
		Key: key("linux", 0), Clone: 0, Index: 0, Kind: "edit", Reference: "stock",
		Want: json.RawMessage(`{"a":2}`), Got: json.RawMessage(`{"a":1}`),
	}, differ[0])
	assert.Equal(t, stateKind, differ[1].Kind)
	assert.Equal(t, 1, differ[1].Index)
	assert.Empty(t, sheet.add(key("agentzip", 0), kinds, answers(`{"a":2}`, `1`, `2`, `4`)))

	// A later turn has other answers, and a missing one is a difference.
	assert.Empty(t, sheet.add(key("stock", 1), kinds, answers(`5`, `6`, `7`, `8`)))
	differ = sheet.add(key("agentzip", 1), kinds, [][]string{{`5`, `6`}, {`7`}})
	require.Len(t, differ, 1)
	assert.Equal(t, `null`, string(differ[0].Got))
}

func TestShortened(t *testing.T) {
	w, g := shortened(`{"a":1}`, "no\xffjson")
	assert.Equal(t, `{"a":1}`, string(w))
	assert.True(t, json.Valid(g), string(g))

	long := `"` + strings.Repeat("x", 20000)
	w, g = shortened(long+`a"`, long+`b`+strings.Repeat("y", 20000)+`"`)
	for _, v := range []json.RawMessage{w, g} {
		assert.True(t, json.Valid(v))
		assert.Less(t, len(v), longestShown+100)
	}
	assert.Contains(t, string(w), `xa\"`)
	assert.Contains(t, string(g), `xby`)
	// One is all of the other's beginning.
	w, g = shortened(long, long+"more")
	assert.NotEqual(t, string(w), string(g))
}

func TestPairMemory(t *testing.T) {
	const mb = 1 << 20
	key := func(system string) report.Key {
		return report.Key{Workload: "w", System: system, Clones: 2}
	}
	memory := func(system string, clone, index int, owned, memfd, sentry uint64, st *control.Stats) report.Memory {
		return report.Memory{Key: key(system), Clone: clone, Index: index, OwnedBytes: owned, Stats: st,
			Measured: fleet.Memory{GuestMemfd: memfd, Sentry: fleet.ProcMemory{PSSAnon: sentry}}}
	}
	r := &report.Report{Memory: []report.Memory{
		memory(linuxName, 0, 3, 0, 0, 0, nil),
		memory(linuxName, 1, 3, 0, 0, 0, nil), // stock was measured in the next wait
		memory(report.Stock, 0, 3, 40*mb, 0, 20*mb, nil),
		memory(report.Stock, 1, 4, 50*mb, 0, 30*mb, nil),
		memory(judgedName, 0, 3, 9*mb, 4*mb, 31*mb, &control.Stats{}),
		memory(judgedName, 1, 3, 9*mb, 4*mb, 20*mb, &control.Stats{}),
		memory(linuxName, 2, 3, 0, 0, 0, nil), // stock has no such clone
		memory(judgedName, 1, 4, 9*mb, 4*mb, 20*mb, &control.Stats{}),
	}}
	r.Memory[7].Pool = &fleet.PoolMemory{Memfd: 5 * mb, Process: fleet.ProcMemory{PSSAnon: 3 * mb, PSSFile: 7 * mb}}
	pairMemory(r, keptPart{idOf(key(linuxName), 0, 3): 0.25, idOf(key(linuxName), 1, 3): 0.25})
	assert.EqualValues(t, 10*mb, r.Memory[0].OwnedBytes)
	assert.True(t, r.Memory[0].OwnedEstimated)
	assert.EqualValues(t, 50*mb/4, r.Memory[1].OwnedBytes)
	assert.Zero(t, r.Memory[6].OwnedBytes)
	assert.False(t, r.Memory[6].OwnedEstimated)
	assert.EqualValues(t, 40*mb, r.Memory[2].OwnedBytes)
	assert.EqualValues(t, 4*mb+6*mb, r.Memory[4].OwnedOutsideBytes)
	assert.EqualValues(t, 4*mb, r.Memory[5].OwnedOutsideBytes, "a smaller Sentry hides nothing of the memory file")
	assert.EqualValues(t, 4*mb+4*mb, r.Memory[7].OwnedOutsideBytes, "half of the pool")
}

func TestNearest(t *testing.T) {
	values := map[int]uint64{-1: 1, 4: 2, 8: 3}
	for index, want := range map[int]uint64{-1: 1, 1: 1, 2: 2, 4: 2, 6: 2, 7: 3, 20: 3} {
		got, ok := nearest(values, index)
		assert.True(t, ok)
		assert.Equal(t, want, got, index)
	}
	_, ok := nearest(nil, 0)
	assert.False(t, ok)
}

func TestPairFaults(t *testing.T) {
	key := report.Key{Workload: "w", System: judgedName, Clones: 1}
	memory := func(index int, demand, prefetched uint64) report.Memory {
		return report.Memory{Key: key, Index: index, Stats: &control.Stats{Faults: control.Faults{Demand: demand, Prefetched: prefetched}}}
	}
	r := &report.Report{
		Memory: []report.Memory{memory(-1, 5, 0), memory(0, 25, 7), memory(2, 40, 9)},
		Steps:  []report.Step{{Key: key, Index: 0}, {Key: key, Index: 1}, {Key: key, Index: 2}},
	}
	r.Memory[0].Stats.Prefetch = control.Prefetch{Patterns: 3, WantedPages: 5, PredictedPages: 6, SampledPages: 7, UsedPages: 1}
	r.Memory[1].Stats.Prefetch = control.Prefetch{Patterns: 4, WantedPages: 15, PredictedPages: 26, SampledPages: 23, UsedPages: 13}
	r.Memory[1].Stats.EvictNS.Count = 1
	r.Memory[1].Stats.ResumeNS = control.Histogram{Count: 1, SumNS: 15e8}
	pairFaults(r)
	assert.EqualValues(t, 20, r.Steps[0].DemandPages)
	assert.EqualValues(t, 7, r.Steps[0].PrefetchedPages)
	assert.Equal(t, &report.StepPrefetch{Patterns: 3, Wanted: 10, Predicted: 20, Sampled: 16, Used: 12, LastFaultSeconds: 1.5}, r.Steps[0].Prefetch)
	assert.Nil(t, r.Steps[1].Prefetch)
	assert.Zero(t, r.Steps[1].DemandPages, "the wait after it was not measured")
	assert.Zero(t, r.Steps[2].DemandPages, "the wait before it was not measured")
}

func TestVerdict(t *testing.T) {
	r := &report.Report{Problems: []report.Problem{{Text: "busy"}}}
	assert.NoError(t, verdict(r))
	r.Mismatches = make([]report.Mismatch, 2)
	assert.ErrorContains(t, verdict(r), "2 answers differ")
	r.Problems = append(r.Problems, report.Problem{Key: report.Key{System: "agentzip"}, Fatal: true, Text: "lost a page"})
	assert.ErrorContains(t, verdict(r), "lost a page")
}

func TestProgress(t *testing.T) {
	var out bytes.Buffer
	p := newProgress(&out)
	p.status("too soon")
	p.say("event %d", 1)
	assert.Regexp(t, `^\[ +0\.0s\] event 1\n$`, out.String())
	p.last = time.Now().Add(-time.Minute)
	p.status("goes on")
	assert.Contains(t, out.String(), "goes on\n")

	out.Reset()
	p.terminal = true
	p.status("one")
	p.status("two")
	p.say("three")
	assert.Regexp(t, "^"+`\r\x1b\[K\[.*\] one\r\x1b\[K\[.*\] two\r\x1b\[K\[.*\] three\n$`, out.String())
}

func TestCompareUsage(t *testing.T) {
	var out bytes.Buffer
	assert.ErrorIs(t, runCompare(t.Context(), []string{"one.json"}, &out, &out), errUsage)
	assert.Contains(t, out.String(), "two reports")
	err := runCompare(t.Context(), []string{"/no/a.json", "/no/b.json", "--json", "x"}, &out, &out)
	assert.ErrorContains(t, err, "/no/a.json")
	assert.False(t, errors.Is(err, errUsage))
}

// failingSwap fails to be removed some times.
type failingSwap int

func (f *failingSwap) Close(context.Context) error {
	if *f--; *f >= 0 {
		return errors.New("swapoff: cannot allocate memory")
	}
	return nil
}

// TestCleanupKeepsRecord: what could not be undone can be undone later.
func TestCleanupKeepsRecord(t *testing.T) {
	for fails, kept := range map[failingSwap]bool{0: false, 1: true} {
		b := newBenchmark(runConfig{}, nil, io.Discard)
		var err error
		b.dir, err = newRunDir(t.TempDir())
		require.NoError(t, err)
		b.swap = &fails
		require.NoError(t, os.WriteFile(b.swapState(), nil, 0o600))
		err = b.cleanup()
		if !kept {
			assert.NoError(t, err)
			assert.NoDirExists(t, b.dir.path)
			continue
		}
		assert.ErrorContains(t, err, "cannot allocate memory")
		assert.ErrorContains(t, err, "agentbench reclaim --work "+filepath.Dir(b.dir.path))
		assert.FileExists(t, b.swapState())
		lock, err := tryLock(filepath.Join(b.dir.path, runLock))
		require.NoError(t, err, "reclaim finds it")
		lock.Close()
	}
}

func TestWriteReport(t *testing.T) {
	dir := t.TempDir()
	write := func(cfg runConfig, failure error) (string, error) {
		var log bytes.Buffer
		b := newBenchmark(cfg, nil, &log)
		b.finish(failure)
		err := b.write(io.Discard)
		return log.String(), err
	}
	cfg := runConfig{json: filepath.Join(dir, "r.json.gz"), html: filepath.Join(dir, "r.html")}
	_, err := write(cfg, nil)
	require.NoError(t, err)
	whole, err := os.ReadFile(cfg.json)
	require.NoError(t, err)

	log, err := write(cfg, errInterrupted)
	require.NoError(t, err)
	for _, name := range []string{"r.partial.json.gz", "r.partial.html"} {
		assert.FileExists(t, filepath.Join(dir, name))
		assert.Contains(t, log, "incomplete: "+filepath.Join(dir, name))
	}
	now, err := os.ReadFile(cfg.json)
	require.NoError(t, err)
	assert.Equal(t, whole, now, "an earlier report stays")

	// What can be written is.
	cfg = runConfig{json: filepath.Join(dir, "none", "r.json"), html: filepath.Join(dir, "s.html")}
	_, err = write(cfg, nil)
	assert.ErrorContains(t, err, "none")
	assert.FileExists(t, cfg.html)
	assert.Equal(t, "out.d/run.partial", partialPath("out.d/run"))
}

func TestMergeCommand(t *testing.T) {
	var out bytes.Buffer
	assert.ErrorIs(t, runMerge(t.Context(), []string{"one.json"}, &out, &out), errUsage)
	assert.Contains(t, out.String(), "two reports or more")

	dir := t.TempDir()
	var args []string
	for n := range 2 {
		r := &report.Report{Episodes: []report.Episode{{Key: report.Key{Workload: "w", System: "stock", Clones: n + 1}}}}
		path := filepath.Join(dir, fmt.Sprint(n, ".json"))
		require.NoError(t, r.Write(path))
		args = append(args, path)
	}
	merged := filepath.Join(dir, "new", "m.json")
	require.NoError(t, runMerge(t.Context(), append(args, "--json", merged, "--html", ""), &out, &out))
	m, err := report.Read(merged)
	require.NoError(t, err)
	assert.Len(t, m.Episodes, 2)
}

// TestNotRoot: who is not root is told so at once, by each command that needs it.
func TestNotRoot(t *testing.T) {
	self, err := os.Executable()
	require.NoError(t, err)
	for _, command := range []string{"run", "demo", "micro", "idle", "density"} {
		cmd := exec.Command(self, command)
		cmd.Env = append(os.Environ(), notRootEnv+"=1")
		cmd.Dir = "/"
		out, err := cmd.CombinedOutput()
		var exit *exec.ExitError
		require.ErrorAs(t, err, &exit, "%s: %s", command, out)
		require.Equal(t, 1, exit.ExitCode(), "%s: %s", command, out)
		require.Contains(t, string(out), "agentbench "+command+": ")
		require.Contains(t, string(out), "sandboxes need root", command)
	}
}
