package integrity

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"runsc-agentzip/test/harness"
)

// runGuest runs one self-checking program and returns what it printed. Its last
// line has to begin with "OK <name>".
func runGuest(t *testing.T, m mode, name string, secs int, args ...string) string {
	t.Helper()
	b := startBox(t, m)
	cmd := append([]string{guestPath(t, name), fmt.Sprintf("--seconds=%d", secs)}, args...)
	// A program looks at the clock between rounds only, and a round under
	// eviction on a loaded machine is long.
	began := time.Now()
	out := b.exec(time.Duration(secs)*time.Second*4+90*time.Second, cmd...)
	lines := strings.Split(strings.TrimSpace(out), "\n")
	last := lines[len(lines)-1]
	if !strings.HasPrefix(last, "OK "+name) {
		t.Fatalf("%s did not say OK:\n%s", name, harness.Tail(out, 3000))
	}
	t.Logf("%s (%.1fs): %s", m.name, time.Since(began).Seconds(), last)
	b.finish()
	return out
}

func seedArg() string { return fmt.Sprintf("--seed=%d", *seedFlag) }

// modes are those that a guest program runs under.
func modes(t *testing.T) []mode { return distinct(modeForced(t), modeIdle(t), modeOff(t)) }

func TestMemtorture(t *testing.T) {
	for _, m := range modes(t) {
		t.Run(m.name, func(t *testing.T) {
			secs := seconds(15, 300)
			if !m.evicts {
				secs = seconds(5, 60)
			}
			runMemtorture(t, m, secs, 48, 3)
		})
	}
}

func runMemtorture(t *testing.T, m mode, secs, mb, threads int) {
	t.Helper()
	runGuest(t, m, "memtorture", secs, seedArg(), fmt.Sprintf("--mb=%d", mb), fmt.Sprintf("--threads=%d", threads),
		"--tmpfs="+tmpfsDir, "--overlay="+workDir)
}

// TestMemtortureSettings runs with settings other than the default ones, and on
// the other platform, which maps and unmaps by other means.
func TestMemtortureSettings(t *testing.T) {
	b := agentzipOnly(t)
	for _, c := range []struct {
		name  string
		long  bool
		flags []string
	}{
		{"ptrace", false, []string{"--platform=ptrace", forceFlag}},
		{"small units", false, []string{"--agentzip-map-unit=4096", "--agentzip-settle=0", forceFlag}},
		{"large units", true, []string{"--agentzip-map-unit=2097152", forceFlag}},
		{"deep at once", true, []string{"--agentzip-deepen-after=0", forceFlag}},
		{"many workers", true, []string{"--agentzip-workers=8", forceFlag}},
		{"small store", true, []string{"--agentzip-store-max=4194304", forceFlag}},
		{"quick idle", true, []string{"--agentzip-idle=10ms", "--agentzip-settle=1ms"}},
		{"ptrace idle", true, []string{"--platform=ptrace"}},
		{"very often", true, []string{"--agentzip-test-evict-every=50ms"}},
		{"disk overlay", true, []string{"--overlay2=root:self", forceFlag}},
		{"no directfs", true, []string{"--directfs=false", forceFlag}},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.long {
				longOnly(t)
			}
			if c.name == "disk overlay" && *rootfsFlag == "/" {
				t.Skip("its file lies in the root filesystem: needs -rootfs with a folder")
			}
			m := mode{name: c.name, binary: b.Path, flags: append([]string{"--agentzip=on"}, c.flags...), evicts: true}
			runMemtorture(t, m, seconds(6, 60), 32, 3)
		})
	}
}

// TestMemtortureLarge has more memory than a pass gets through in one go.
func TestMemtortureLarge(t *testing.T) {
	longOnly(t)
	for _, m := range distinct(modeForced(t), modeIdle(t)) {
		t.Run(m.name, func(t *testing.T) {
			runMemtorture(t, m, seconds(0, 300), 512, 6)
		})
	}
}

func TestRacer(t *testing.T) {
	for _, m := range distinct(modeForced(t), modeIdle(t)) {
		t.Run(m.name, func(t *testing.T) {
			runGuest(t, m, "racer", seconds(12, 300), seedArg())
		})
	}
}

func TestGoGuest(t *testing.T) {
	for _, m := range distinct(modeForced(t), modeIdle(t)) {
		t.Run(m.name, func(t *testing.T) {
			if m.name == "idle" {
				longOnly(t)
			}
			runGuest(t, m, "gostress", seconds(6, 120), seedArg())
		})
	}
}

// latency is how late one blocking call returned, in microseconds.
type latency struct {
	Call   string `json:"call"`
	N      int    `json:"n"`
	Min    int64  `json:"min_us"`
	Median int64  `json:"median_us"`
	P90    int64  `json:"p90_us"`
	P99    int64  `json:"p99_us"`
	Max    int64  `json:"max_us"`
}

func parseLatencies(t *testing.T, out string) map[string]latency {
	t.Helper()
	m := make(map[string]latency)
	for line := range strings.Lines(out) {
		if !strings.HasPrefix(line, "{") {
			continue
		}
		var l latency
		if err := json.Unmarshal([]byte(line), &l); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		m[l.Call] = l
	}
	return m
}

// compareLatencies returns what is wrong with how late calls return, against a
// run without eviction. Cold arguments have to be restored and the passes
// compete for the cores, so calls may be a little later, but not by a time that
// hints at a retry or at a second timeout. On a loaded machine the reference is
// spread out, and so is what is allowed.
func compareLatencies(t *testing.T, ref, m mode, base, got map[string]latency) map[string]string {
	t.Helper()
	wrong := make(map[string]string)
	t.Logf("%-22s %28s %28s", "late by (us)", ref.name+" median/p90/max", m.name+" median/p90/max")
	for _, call := range slices.Sorted(maps.Keys(base)) {
		b, g := base[call], got[call]
		t.Logf("%-22s %10d/%8d/%8d %10d/%8d/%8d", call, b.Median, b.P90, b.Max, g.Median, g.P90, g.Max)
		switch {
		case g.N == 0:
			wrong[call] = "was not measured"
		case b.N < 20 || g.N < 20:
			// Too few for figures; the program has its own limits.
		case g.Median > b.Median+30_000+b.P90:
			wrong[call] = fmt.Sprintf("returns %d us late in the median, %d us without eviction", g.Median, b.Median)
		case g.P90 > 2*b.P90+400_000:
			wrong[call] = fmt.Sprintf("the slowest tenth returns more than %d us late, %d us without eviction", g.P90, b.P90)
		}
	}
	return wrong
}

// TestBlockingCalls compares how late blocking calls return while memory is
// evicted with a run without eviction. The program itself fails on EINTR, on
// early returns and on lost wakes.
func TestBlockingCalls(t *testing.T) {
	secs := seconds(10, 120)
	ref := modeReference(t)
	measure := func(t *testing.T, m mode) map[string]latency {
		t.Helper()
		return parseLatencies(t, runGuest(t, m, "blocking", secs))
	}
	var base map[string]latency
	for _, m := range distinct(ref, modeForced(t), modeIdle(t)) {
		t.Run(m.name, func(t *testing.T) {
			got := measure(t, m)
			if base == nil {
				base = got
				return
			}
			wrong := compareLatencies(t, ref, m, base, got)
			if len(wrong) == 0 {
				return
			}
			// The machine may have been busy with something else in one of the
			// two runs: what is really late is so again.
			t.Logf("measuring again: %v", wrong)
			for call, what := range compareLatencies(t, ref, m, measure(t, ref), measure(t, m)) {
				if first, ok := wrong[call]; ok {
					t.Errorf("%s: %s; and again: %s", call, first, what)
				}
			}
		})
	}
}
