package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"runsc-agentzip/pkg/control"
	"runsc-agentzip/pkg/fleet"
)

func TestFindMirror(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := findMirror(dir, "bookworm"); err == nil {
		t.Error("a machine without apt sources has a mirror")
	}
	write("sources.list", "# deb http://commented.example/debian bookworm main\ndeb cdrom:[disc]/ bookworm main\ndeb [arch=amd64 signed-by=/k.gpg] http://other.example/debian trixie main # note\n")
	write("sources.list.d/debian.sources", `Types: deb
# a comment
URIs: http://disabled.example/debian
Suites: bookworm
Components: main
Enabled: no

Types: deb-src
URIs: http://src.example/debian
Suites: bookworm
Components: main

Types: deb
URIs: http://security.example/debian
Suites: bookworm-security
Components: main

Types: deb deb-src
URIs: http://first.example/debian
 http://second.example/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/x.gpg
`)
	got, err := findMirror(dir, "bookworm")
	if err != nil {
		t.Fatal(err)
	}
	want := aptSource{uri: "http://first.example/debian", suites: []string{"bookworm", "bookworm-updates"}, components: []string{"main"}, signedBy: "/usr/share/keyrings/x.gpg"}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
	got, err = findMirror(dir, "trixie")
	if err != nil || got.uri != "http://other.example/debian" || got.signedBy != "/k.gpg" {
		t.Errorf("one-line entry with options: %+v, %v", got, err)
	}
}

func TestDistribution(t *testing.T) {
	id, code := distribution("PRETTY_NAME=\"Debian GNU/Linux 12 (bookworm)\"\nVERSION_CODENAME=bookworm\nID=debian\n")
	if id != "debian" || code != "bookworm" {
		t.Errorf("got %q, %q", id, code)
	}
}

func TestQuantile(t *testing.T) {
	v := []float64{5, 1, 4, 2, 3}
	for q, want := range map[float64]float64{0: 1, 0.5: 3, 0.95: 5, 1: 5, 0.2: 1, 0.21: 2} {
		if got := quantile(v, q); got != want {
			t.Errorf("quantile(%v) = %v, want %v", q, got, want)
		}
	}
	if quantile(nil, 0.5) != 0 || mean(nil) != 0 || ratio(1, 0) != 0 {
		t.Error("empty input must give 0")
	}
	if !slices.Equal(v, []float64{5, 1, 4, 2, 3}) {
		t.Error("quantile changed its input")
	}
}

func TestPlanStep(t *testing.T) {
	kinds := make(map[string]bool)
	for round := range 2 * len(stepCycle) {
		lines := make(map[string]bool)
		for clone := range 8 {
			a, b := planStep(1, clone, round), planStep(1, clone, round)
			if a.line() != b.line() {
				t.Fatalf("plan is not reproducible: %s, %s", a.line(), b.line())
			}
			if a.Name != stepCycle[round%len(stepCycle)] {
				t.Errorf("round %d is %s", round, a.Name)
			}
			kinds[a.Name] = true
			lines[a.line()] = true
		}
		if len(lines) < 4 {
			t.Errorf("round %d: 8 clones have only %d different requests", round, len(lines))
		}
	}
	if len(kinds) < 5 {
		t.Errorf("only %d kinds of steps", len(kinds))
	}
	if planStep(1, 0, 0).line() == planStep(2, 0, 0).line() && planStep(1, 1, 1).line() == planStep(2, 1, 1).line() {
		t.Error("the seed changes nothing")
	}
}

func TestPlanGroups(t *testing.T) {
	const gib = 1 << 30
	for _, tc := range []struct {
		available, per uint64
		clones         int
		mode           string
		together       bool
		err            string
	}{
		{20 * gib, gib, 8, "auto", true, ""},
		{20 * gib, gib, 8, "off", false, ""},
		{20 * gib, gib, 10, "auto", false, ""},
		{20 * gib, gib, 10, "on", false, "--interleave=off or --clones 9"},
		{20 * gib, gib, 19, "auto", false, "--clones 18"},
		{gib, gib, 1, "auto", false, "not even one"},
	} {
		together, err := planGroups(tc.available, tc.per, tc.clones, tc.mode)
		if together != tc.together || (err == nil) != (tc.err == "") || err != nil && !strings.Contains(err.Error(), tc.err) {
			t.Errorf("%+v: got %v, %v", tc, together, err)
		}
	}
}

func TestParseCPUTimes(t *testing.T) {
	got, err := parseCPUTimes("cpu  100 0 50 800 50 10 20 30 0 0\ncpu0 1 2 3\n")
	if err != nil {
		t.Fatal(err)
	}
	if want := (cpuTimes{all: 10600 * time.Millisecond, busy: 2100 * time.Millisecond}); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	if _, err := parseCPUTimes("intr 1"); err == nil {
		t.Error("garbage was accepted")
	}
}

func TestDemoFlags(t *testing.T) {
	c, err := parseDemoFlags(nil, io.Discard)
	if err != nil || c.clones != 8 || c.wait != 3*time.Second || c.json != "out/demo.json" {
		t.Errorf("defaults: %+v, %v", c, err)
	}
	for _, args := range [][]string{
		{"--clones", "0"}, {"--rounds", "0"}, {"--wait", "-1s"}, {"--step-timeout", "0"},
		{"--interleave", "maybe"}, {"--nonsense"}, {"extra"},
	} {
		var out bytes.Buffer
		if _, err := parseDemoFlags(args, &out); !errors.Is(err, errUsage) {
			t.Errorf("%q: %v", args, err)
		}
		// The message names what is wrong.
		if name := strings.TrimLeft(args[0], "-"); !strings.Contains(out.String(), name) {
			t.Errorf("%q: message %q", args, out.String())
		}
	}
	if code := mainCode(context.Background(), []string{"bogus"}, io.Discard, io.Discard); code != 2 {
		t.Errorf("unknown command exits with %d", code)
	}
}

// testReport makes the samples of two clones and two rounds.
func testReport() *demoReport {
	r := newDemoReport(demoConfig{clones: 2, rounds: 2, wait: time.Second})
	r.RuntimeHasStats = true
	const mb = 1 << 20
	for clone := range 2 {
		for round := range 2 {
			for _, system := range []string{stockName, judgedName} {
				secs, committed, owned := 1.0, uint64(300*mb), uint64(100*mb)
				if system == judgedName {
					secs, owned = 1.5, 20*mb
				}
				r.Steps = append(r.Steps, stepSample{System: system, Clone: clone, Round: round, Step: stepCycle[round], Seconds: secs, CPUSeconds: secs, Output: json.RawMessage(`{"x":1}`)})
				m := memorySample{System: system, Clone: clone, Round: round, Step: stepCycle[round], When: afterWait, CommittedBytes: committed, OwnedBytes: owned, HostBytes: owned + 40*mb}
				if system == judgedName {
					m.Stats = &control.Stats{OwnedBytes: owned}
					m.Memory = fleet.Memory{GuestMemfd: 5 * mb}
				}
				r.Memory = append(r.Memory, m)
			}
		}
	}
	r.Teardowns = []teardownSample{{System: stockName, FreedBytes: 600 * mb}, {System: judgedName, FreedBytes: 200 * mb}}
	return r
}

func TestReport(t *testing.T) {
	r := testReport()
	// After the restore nothing is owned under stock; it must not count.
	r.Memory = append(r.Memory, memorySample{System: stockName, Round: restoreRound, Step: "restore", When: afterWait})
	r.finish(time.Second, nil)
	if !r.OutputsEqual || r.Compared != 4 {
		t.Errorf("equal %v, compared %d: %+v", r.OutputsEqual, r.Compared, r.Mismatches)
	}
	for _, c := range []struct {
		name      string
		got, want float64
	}{
		{"owned_reduction", r.OwnedReduction, 5},
		{"host_reduction", r.HostReduction, 140.0 / 60},
		{"host_reduction_memavailable", r.HostReductionMemFree, 3},
		{"committed_over_owned", r.CommittedOverOwned, 15},
		{"step_time_ratio", r.StepTimeRatio, 1.5},
		{"step_time_ratio_median", r.StepTimeRatioMedian, 1.5},
	} {
		if d := c.got - c.want; d > 1e-9 || d < -1e-9 {
			t.Errorf("%s = %v, want %v", c.name, c.got, c.want)
		}
	}
	if len(r.Waits) != 3 || r.Waits[0].Step != "restore" {
		t.Errorf("waits: %+v", r.Waits)
	}
	var out bytes.Buffer
	r.print(&out)
	for _, want := range []string{"5.00x", "outputs equal", "4 of 4"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the table lacks %q:\n%s", want, &out)
		}
	}

	// The JSON has the promised fields, with the promised types.
	path := filepath.Join(t.TempDir(), "sub", "demo.json")
	if err := r.write(path); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var v map[string]any
	if err := json.Unmarshal(b, &v); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"clones", "owned_reduction", "host_reduction", "step_time_ratio"} {
		if _, ok := v[name].(float64); !ok {
			t.Errorf("%s is %T", name, v[name])
		}
	}
	if eq, ok := v["outputs_equal"].(bool); !ok || !eq {
		t.Errorf("outputs_equal is %v", v["outputs_equal"])
	}
}

func TestReportFindsDifferences(t *testing.T) {
	differs := testReport()
	differs.Steps[5].Output = json.RawMessage(`{"x":2}`)
	differs.finish(time.Second, nil)
	if differs.OutputsEqual || len(differs.Mismatches) != 1 {
		t.Errorf("a different output went unnoticed: %+v", differs.Mismatches)
	}

	missing := testReport()
	missing.Steps = missing.Steps[:len(missing.Steps)-1]
	missing.finish(time.Second, nil)
	if missing.OutputsEqual {
		t.Error("a missing output went unnoticed")
	}

	failed := testReport()
	failed.finish(time.Second, errors.New("broke"))
	if failed.OutputsEqual || failed.Error == "" {
		t.Error("an incomplete run claims equal outputs")
	}

	empty := newDemoReport(demoConfig{})
	empty.finish(time.Second, nil)
	if empty.OutputsEqual {
		t.Error("an empty run claims equal outputs")
	}
}

func TestReclaimRuns(t *testing.T) {
	parent := t.TempDir()
	alive, err := newRunDir(parent)
	if err != nil {
		t.Fatal(err)
	}
	dead, err := newRunDir(parent)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := dead.reserveRoot("a"); err != nil {
		t.Fatal(err)
	}
	dead.lock.Close() // as the kernel does when the process is killed
	if err := reclaimRuns(parent, func(string, ...any) {}); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(dead.path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the dead run's directory remains: %v", err)
	}
	if _, err := os.Stat(alive.path); err != nil {
		t.Errorf("the living run's directory: %v", err)
	}
	if err := alive.end(nil); err != nil {
		t.Error(err)
	}
}

func TestRootfsIsNotTakenFromOthers(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "precious"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	_, err := prepareRootfs(context.Background(), rootfsOptions{dir: dir, suite: "bookworm", mirror: "http://127.0.0.1:1/"}, func(string, ...any) {})
	if err == nil || !strings.Contains(err.Error(), "not made by agentbench") {
		t.Errorf("got %v", err)
	}
}
