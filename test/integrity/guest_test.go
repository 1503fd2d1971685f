package integrity

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"
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
		t.Fatalf("%s did not say OK:\n%s", name, tail(out, 3000))
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
			secs := seconds(20, 300)
			if !m.evicts {
				secs = seconds(8, 60)
			}
			runGuest(t, m, "memtorture", secs, seedArg(), "--mb=48", "--threads=3", "--tmpfs="+tmpfsDir, "--overlay="+workDir)
		})
	}
}

// TestMemtortureLarge has more memory than a pass gets through in one go.
func TestMemtortureLarge(t *testing.T) {
	longOnly(t)
	for _, m := range distinct(modeForced(t), modeIdle(t)) {
		t.Run(m.name, func(t *testing.T) {
			runGuest(t, m, "memtorture", seconds(0, 300), seedArg(), "--mb=512", "--threads=6", "--tmpfs="+tmpfsDir, "--overlay="+workDir)
		})
	}
}

func TestRacer(t *testing.T) {
	for _, m := range distinct(modeForced(t), modeIdle(t)) {
		t.Run(m.name, func(t *testing.T) {
			runGuest(t, m, "racer", seconds(15, 300), seedArg())
		})
	}
}

func TestGoGuest(t *testing.T) {
	for _, m := range distinct(modeForced(t), modeIdle(t)) {
		t.Run(m.name, func(t *testing.T) {
			if m.name == "idle" {
				longOnly(t)
			}
			runGuest(t, m, "gostress", seconds(8, 120), seedArg())
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

// TestBlockingCalls compares how late blocking calls return while memory is
// evicted with a run without eviction. The program itself fails on EINTR, on
// early returns and on lost wakes.
func TestBlockingCalls(t *testing.T) {
	secs := seconds(12, 120)
	ref := modeReference(t)
	var base map[string]latency
	for _, m := range distinct(ref, modeForced(t), modeIdle(t)) {
		t.Run(m.name, func(t *testing.T) {
			got := parseLatencies(t, runGuest(t, m, "blocking", secs))
			if base == nil {
				base = got
				return
			}
			// Cold arguments have to be restored and the passes compete for the
			// cores, so calls may be a little later, but not by a time that
			// hints at a retry or at a second timeout.
			const medianSlack, p90Slack = 30_000, 250_000
			t.Logf("%-22s %28s %28s", "late by (us)", ref.name+" median/p90/max", m.name+" median/p90/max")
			for call, b := range base {
				g, ok := got[call]
				if !ok {
					t.Errorf("%s was not measured", call)
					continue
				}
				t.Logf("%-22s %10d/%8d/%8d %10d/%8d/%8d", call, b.Median, b.P90, b.Max, g.Median, g.P90, g.Max)
				if g.Median > b.Median+medianSlack {
					t.Errorf("%s: returns %d us late in the median, %d us without eviction", call, g.Median, b.Median)
				}
				if g.P90 > b.P90+p90Slack {
					t.Errorf("%s: the slowest tenth returns more than %d us late, %d us without eviction", call, g.P90, b.P90)
				}
			}
		})
	}
}
