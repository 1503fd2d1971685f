package census

import (
	"bufio"
	"errors"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"runsc-agentzip/pkg/control"
)

var (
	headLine   = regexp.MustCompile(`^# (HELP|TYPE) ([a-z_]+) (.+)$`)
	sampleLine = regexp.MustCompile(`^([a-z_]+)(?:\{(.*)\})? (\S+)$`)
	labelText  = regexp.MustCompile(`^([a-z_]+)="((?:[^"\\]|\\\\|\\"|\\n)*)"(?:,|$)`)
)

// checkMetrics is what `promtool check metrics` looks for, and our own rules: each
// family has one HELP and one TYPE, which come first, and its samples, none twice, follow
// at once; names have their units and counters end in _total; histograms are complete,
// ordered and cumulative.
func checkMetrics(out string) error {
	if !strings.HasSuffix(out, "\n") {
		return errors.New("the last line is incomplete")
	}
	var family, kind, help string
	seen := make(map[string]bool)    // families
	samples := make(map[string]bool) // of all
	type series struct {
		le, value []float64
		sum       bool
		count     float64
	}
	var hist map[string]*series
	finish := func() error {
		for labels, s := range hist {
			n := len(s.le)
			switch {
			case n == 0 || !s.sum || s.count < 0:
				return fmt.Errorf("%s{%s} is incomplete", family, labels)
			case !math.IsInf(s.le[n-1], 1) || s.value[n-1] != s.count:
				return fmt.Errorf("%s{%s}: the last bucket is %v with %v of %v", family, labels, s.le[n-1], s.value[n-1], s.count)
			case !slices.IsSorted(s.le) || !slices.IsSorted(s.value):
				return fmt.Errorf("%s{%s}: the buckets are in disorder", family, labels)
			}
		}
		return nil
	}
	count := 0
	for _, line := range strings.Split(strings.TrimSuffix(out, "\n"), "\n") {
		if m := headLine.FindStringSubmatch(line); m != nil {
			if m[1] == "HELP" {
				if err := finish(); err != nil {
					return err
				}
				if family != "" && count == 0 {
					return fmt.Errorf("%s has no samples", family)
				}
				family, kind, help, count, hist = m[2], "", m[3], 0, map[string]*series{}
				if seen[family] {
					return fmt.Errorf("%s is there twice", family)
				}
				seen[family] = true
				if !strings.HasPrefix(family, "agentzip_") || !strings.HasSuffix(help, ".") {
					return fmt.Errorf("%s, %q", family, help)
				}
				continue
			}
			if m[2] != family || kind != "" {
				return fmt.Errorf("%q is out of place", line)
			}
			kind = m[3]
			if total := strings.HasSuffix(family, "_total"); total != (kind == counter) {
				return fmt.Errorf("%s is a %s", family, kind)
			}
			for _, unit := range []string{"ns", "ms", "milliseconds", "kib", "mib", "kilobytes", "percent", "minutes"} {
				if slices.Contains(strings.Split(family, "_"), unit) {
					return fmt.Errorf("%s has no base unit", family)
				}
			}
			continue
		}
		m := sampleLine.FindStringSubmatch(line)
		if m == nil {
			return fmt.Errorf("%q is no sample", line)
		}
		count++
		name, labels := m[1], m[2]
		value, err := strconv.ParseFloat(m[3], 64)
		if err != nil {
			return err
		}
		if math.IsNaN(value) || value < 0 && kind != gauge {
			return fmt.Errorf("%q", line)
		}
		if samples[name+"{"+labels] {
			return fmt.Errorf("%q is there twice", line)
		}
		samples[name+"{"+labels] = true
		var others []string
		le := ""
		for rest := labels; rest != ""; {
			l := labelText.FindStringSubmatch(rest)
			if l == nil {
				return fmt.Errorf("%q has bad labels", line)
			}
			rest = rest[len(l[0]):]
			if l[1] == "le" {
				le = l[2]
			} else {
				others = append(others, l[1]+"="+l[2])
			}
		}
		if kind != histogram {
			if name != family || le != "" {
				return fmt.Errorf("%q is out of place", line)
			}
			continue
		}
		key := strings.Join(others, ",")
		if hist[key] == nil {
			hist[key] = &series{count: -1}
		}
		s := hist[key]
		switch strings.TrimPrefix(name, family) {
		case "_bucket":
			bound, err := strconv.ParseFloat(le, 64)
			if err != nil {
				return err
			}
			s.le, s.value = append(s.le, bound), append(s.value, value)
		case "_sum":
			s.sum = true
		case "_count":
			s.count = value
		default:
			return fmt.Errorf("%q is out of place", line)
		}
	}
	return finish()
}

func metricsOf(t require.TestingT, c *Census) string {
	var b strings.Builder
	require.NoError(t, WriteMetrics(&b, c))
	return b.String()
}

func TestGoldenMetrics(t *testing.T) {
	now, _ := usual()
	now.Sandboxes = append(now.Sandboxes, Sandbox{ID: "paused", State: OK, Paused: true, Stats: &control.Stats{Phase: control.Phase{State: "waiting"}}})
	out := metricsOf(t, now)
	require.NoError(t, checkMetrics(out))
	golden(t, "metrics.txt", out)

	out = metricsOf(t, &Census{Pool: &Pool{Reason: "none"}})
	require.NoError(t, checkMetrics(out))
	golden(t, "metrics-empty.txt", out)
}

func TestAnyMetrics(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		if err := checkMetrics(metricsOf(t, anyCensus(t, "root"))); err != nil {
			t.Fatal(err)
		}
	})
}

// TestCheckMetrics: what checks the metrics notices something.
func TestCheckMetrics(t *testing.T) {
	const good = "# HELP agentzip_a_seconds Text.\n# TYPE agentzip_a_seconds histogram\n" +
		"agentzip_a_seconds_bucket{sandbox=\"a\",le=\"1\"} 2\nagentzip_a_seconds_bucket{sandbox=\"a\",le=\"+Inf\"} 3\n" +
		"agentzip_a_seconds_sum{sandbox=\"a\"} 2.5\nagentzip_a_seconds_count{sandbox=\"a\"} 3\n"
	require.NoError(t, checkMetrics(good))
	for _, change := range [][2]string{
		{"} 2\n", "} 4\n"}, {"+Inf", "2"}, {"_count{sandbox=\"a\"} 3", "_count{sandbox=\"a\"} 2"}, {" histogram", " counter"},
		{"agentzip_a_seconds_sum{sandbox=\"a\"} 2.5\n", ""}, {`"a",le="1"`, `"a"b",le="1"`}, {"# HELP agentzip_a_seconds Text.\n", ""}, {"2.5", "x"}, {"3\n", "3"},
	} {
		bad := strings.Replace(good, change[0], change[1], 1)
		if change[0] == "3\n" {
			bad = strings.TrimSuffix(good, "\n")
		}
		require.Error(t, checkMetrics(bad), bad)
	}
	for _, bad := range []string{
		good + good,
		"# HELP agentzip_a Text.\n# TYPE agentzip_a counter\nagentzip_a 1\n",
		"# HELP agentzip_a_ms Text.\n# TYPE agentzip_a_ms gauge\nagentzip_a_ms 1\n",
		"# HELP agentzip_a Text.\n# TYPE agentzip_a gauge\nagentzip_a 1\nagentzip_a 1\n",
		"# HELP agentzip_a Text.\n# TYPE agentzip_a gauge\n" + good,
	} {
		require.Error(t, checkMetrics(bad), bad)
	}
}

// TestDistribution: an observation is counted in the buckets whose bound is above it.
func TestDistribution(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		first := rapid.IntRange(0, 40).Draw(t, "first")
		last := first + rapid.IntRange(0, 20).Draw(t, "last")
		h := control.Histogram{SumNS: 5}
		for _, ns := range rapid.SliceOf(rapid.Uint64Range(1, 1<<62)).Draw(t, "ns") {
			b := int(math.Log2(float64(ns)))
			for ns>>b == 0 {
				b--
			}
			for len(h.Buckets) <= b {
				h.Buckets = append(h.Buckets, 0)
			}
			h.Buckets[b]++
			h.Count++
		}
		var w strings.Builder
		m := &metrics{w: bufio.NewWriter(&w)}
		m.family("x_seconds", histogram, "X.")
		m.distribution(&h, first, last, "a")
		require.NoError(t, m.w.Flush())
		require.NoError(t, checkMetrics(w.String()))
		for i := first; i <= last; i++ {
			var want uint64
			for b, n := range h.Buckets {
				if b < i {
					want += n
				}
			}
			require.Contains(t, w.String(), fmt.Sprintf("_bucket{sandbox=\"a\",le=\"%s\"} %d\n", seconds(1<<i), want))
		}
	})
}
