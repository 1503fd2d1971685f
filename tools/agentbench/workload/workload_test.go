package workload

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestCatalog(t *testing.T) {
	require.Equal(t, []string{"swe", "lsp", "lsp-late", "data", "build"}, Names())
	sets := make(map[string][]string)
	for _, name := range Names() {
		w, err := Get(name)
		require.NoError(t, err)
		require.Equal(t, name, w.Name)
		require.NotEmpty(t, w.Summary)
		require.NotZero(t, w.EstimatedBytes)
		// One package set has one content.
		if packages, ok := sets[w.Rootfs]; ok {
			require.Equal(t, packages, w.Packages, name)
		}
		sets[w.Rootfs] = w.Packages
		spec := w.Spec("/root-fs", 5)
		require.Equal(t, "/root-fs", spec.Rootfs)
		require.Contains(t, spec.Args[len(spec.Args)-1], `"seed":5`)
	}
	_, err := Get("sew")
	require.EqualError(t, err, `unknown workload "sew": there are swe, lsp, lsp-late, data, build`)
}

func TestPlans(t *testing.T) {
	for _, w := range all() {
		t.Run(w.Name, func(t *testing.T) {
			const n = 40
			lines := make(map[string]bool)
			kinds := make(map[string]bool)
			total := 0
			for clone := range 8 {
				steps := w.Plan(3, clone, n)
				require.GreaterOrEqual(t, len(steps), n)
				require.Equal(t, steps, w.Plan(3, clone, n), "a plan depends on its arguments only")
				// More steps begin with the same ones.
				require.Equal(t, steps, w.Plan(3, clone, n+7)[:len(steps)])
				for _, s := range steps {
					total++
					kinds[s.Kind] = true
					require.GreaterOrEqual(t, s.Wait, waitMin)
					require.LessOrEqual(t, s.Wait, waitMax)
					require.NotContains(t, string(s.Request), "\n")
					var r struct {
						Op, Name string
						Args     map[string]any
					}
					require.NoError(t, json.Unmarshal(s.Request, &r))
					require.Equal(t, "step", r.Op)
					require.Equal(t, s.Kind, r.Name)
					lines[string(s.Request)] = true
				}
			}
			require.NotEqual(t, w.Plan(3, 0, n), w.Plan(4, 0, n))
			require.Greater(t, len(kinds), 4)
			// Clones do related things, not the same.
			require.Greater(t, float64(len(lines)), 0.6*float64(total))
			// They are out of phase from the first wait on.
			require.NotEqual(t, w.Plan(3, 0, 1)[0].Wait, w.Plan(3, 1, 1)[0].Wait)
		})
	}
}

// TestPlannedNames checks that what plans name exists in the guest's programs.
func TestPlannedNames(t *testing.T) {
	for _, w := range all() {
		var source strings.Builder
		for _, e := range guestFiles(t) {
			b, err := guest.ReadFile(e)
			require.NoError(t, err)
			source.Write(b)
		}
		for _, s := range w.Plan(1, 0, 60) {
			known := strings.Contains(source.String(), s.Kind+"=") || strings.Contains(source.String(), `"`+s.Kind+`": '''`)
			require.True(t, known, "%s: no step %s in the guest's programs", w.Name, s.Kind)
		}
	}
}

func TestWaitDistribution(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	const n = 20000
	short, median, long := 0, 0, 0
	for range n {
		d := drawWait(rng)
		require.GreaterOrEqual(t, d, waitMin)
		require.LessOrEqual(t, d, waitMax)
		if d < time.Second {
			short++
		}
		if d < waitMedian {
			median++
		}
		if d > 9*time.Second {
			long++
		}
	}
	require.InDelta(t, 0.1, float64(short)/n, 0.01)
	require.InDelta(t, 0.5, float64(median)/n, 0.02)
	require.InDelta(t, 0.1, float64(long)/n, 0.01)
}

func guestFiles(t *testing.T) []string {
	entries, err := guest.ReadDir("guest")
	require.NoError(t, err)
	var files []string
	for _, e := range entries {
		files = append(files, "guest/"+e.Name())
	}
	return files
}

// TestGuestPrograms has the machine's Python compile the guest's programs.
func TestGuestPrograms(t *testing.T) {
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("there is no python3 here")
	}
	for _, file := range guestFiles(t) {
		if filepath.Ext(file) != ".py" {
			continue
		}
		source, err := guest.ReadFile(file)
		require.NoError(t, err)
		cmd := exec.Command(python, "-c", fmt.Sprintf("import sys; compile(sys.stdin.buffer.read(), %q, 'exec')", file))
		cmd.Stdin = strings.NewReader(string(source))
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s", out)
	}
}

func TestInstall(t *testing.T) {
	root := t.TempDir()
	require.NoError(t, install(root))
	path := filepath.Join(root, guestDir, "server.py")
	first, err := os.Stat(path)
	require.NoError(t, err)
	// A file that is right stays, one that is not is replaced.
	other := filepath.Join(root, guestDir, "swe.py")
	require.NoError(t, os.WriteFile(other, []byte("old"), 0o644))
	require.NoError(t, install(root))
	second, err := os.Stat(path)
	require.NoError(t, err)
	require.True(t, os.SameFile(first, second))
	got, err := os.ReadFile(other)
	require.NoError(t, err)
	want, err := guest.ReadFile("guest/swe.py")
	require.NoError(t, err)
	require.Equal(t, want, got)
	entries, err := os.ReadDir(filepath.Join(root, guestDir))
	require.NoError(t, err)
	require.Len(t, entries, len(guestFiles(t)), "no temporary file remains")
}

// TestCycle: the steps of a cycle are of all kinds that a plan has.
func TestCycle(t *testing.T) {
	for _, name := range Names() {
		w, err := Get(name)
		require.NoError(t, err)
		kinds := make(map[string]bool)
		for seed := range uint64(20) {
			for _, s := range w.Plan(seed, 0, 100)[:w.Cycle] {
				kinds[s.Kind] = true
			}
		}
		for _, s := range w.Plan(1, 0, 100) {
			require.Contains(t, kinds, s.Kind, name)
		}
	}
}
