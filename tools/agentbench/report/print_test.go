package report

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
)

var update = flag.Bool("update", false, "write the golden files")

func golden(t *testing.T, name, got string) {
	t.Helper()
	file := filepath.Join("testdata", name)
	if *update {
		require.NoError(t, os.MkdirAll("testdata", 0o755))
		require.NoError(t, os.WriteFile(file, []byte(got), 0o644))
	}
	want, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, string(want), got)
}

// edgeCases are runs that are not as they should be.
func edgeCases() map[string]*Report {
	nothing := new(Report)
	nothing.Error = "no root"
	nothing.Summarize()
	noStock := without(smallFake().report(), func(k Key) bool { return k.System == Stock })
	oneSystem := without(smallFake().report(), func(k Key) bool { return k.System != "agentzip" })
	return map[string]*Report{
		"small":    smallFake().report(),
		"broken":   broken(),
		"nostock":  noStock,
		"one":      oneSystem,
		"oneclone": fake{workloads: []string{"swe"}, systems: []string{Stock, "agentzip"}, clones: []int{1}, steps: 3, repetitions: 1}.report(),
		"nothing":  nothing,
		"pool":     fake{workloads: []string{"swe"}, systems: []string{Stock, "agentzip", "agentzip-nopool"}, clones: []int{4}, steps: 5, repetitions: 1, pool: true}.report(),
	}
}

func TestPrint(t *testing.T) {
	for name, r := range edgeCases() {
		t.Run(name, func(t *testing.T) {
			var w strings.Builder
			require.NoError(t, r.Print(&w, 100))
			golden(t, name+".txt", "INVENTED FIGURES: this is the output of a test.\n"+w.String())
		})
	}
}

func TestPrintWidth(t *testing.T) {
	r := fullFake().report()
	for _, width := range []int{80, 90, 100, 120} {
		var w strings.Builder
		require.NoError(t, r.Print(&w, width))
		for line := range strings.Lines(w.String()) {
			require.LessOrEqual(t, utf8.RuneCountInString(strings.TrimSuffix(line, "\n")), width, line)
		}
	}
}

func TestGoals(t *testing.T) {
	q := func(v, low, high float64) *Ratio { return &Ratio{v, low, high} }
	for _, c := range []struct {
		owned, step         *Ratio
		wantOwned, wantStep string
	}{
		{q(9.1, 9, 9.2), q(1.02, 1, 1.04), "goal met: 9.10x (8.7x or more)", "goal met: 1.02x (1.05x or less)"},
		{q(3.4, 3, 4), q(1.68, 1.5, 1.9), "behind: 3.40x of 8.70x", "behind: 1.68x, goal 1.05x or less"},
		{q(8.6, 8.5, 8.8), q(1.04, 1, 1.1), "behind: 8.60x of 8.70x, within noise", "goal met: 1.04x (1.05x or less), within noise"},
		{nil, nil, "not measured against stock", "not measured against stock"},
	} {
		s := Summary{System: judged, OwnedReduction: c.owned, StepTimeRatio: c.step}
		g := s.goals()
		require.Equal(t, c.wantOwned, g[0].verdict())
		require.Equal(t, c.wantStep, g[1].verdict())
	}
	s := Summary{System: Stock}
	require.Empty(t, s.goals())
}
