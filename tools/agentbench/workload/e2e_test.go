package workload

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"runsc-agentzip/pkg/fleet"
)

// The end-to-end test needs root, runsc binaries (a list as in PATH; the first
// is what the others are compared with) and a directory with a root file system
// per package set, named after the set.
const (
	runtimesEnv = "WORKLOAD_RUNTIMES"
	rootfsEnv   = "WORKLOAD_ROOTFS"
	// stepsEnv changes the number of steps.
	stepsEnv = "WORKLOAD_STEPS"
)

// TestEndToEnd runs every workload under each runtime: a template, a
// checkpoint, two clones that take turns. All answers have to be the same under
// all runtimes.
func TestEndToEnd(t *testing.T) {
	if os.Getenv(runtimesEnv) == "" || os.Getenv(rootfsEnv) == "" {
		t.Skipf("set %s and %s to run this test", runtimesEnv, rootfsEnv)
	}
	steps := 10
	if s := os.Getenv(stepsEnv); s != "" {
		n, err := strconv.Atoi(s)
		require.NoError(t, err)
		steps = n
	}
	replay, err := LoadTrace("testdata/trace.json")
	require.NoError(t, err)
	for _, w := range append(all(), replay) {
		t.Run(w.Name, func(t *testing.T) {
			var want []string
			for _, binary := range filepath.SplitList(os.Getenv(runtimesEnv)) {
				got := rehearse(t, w, binary, filepath.Join(os.Getenv(rootfsEnv), w.Rootfs), steps)
				if want == nil {
					want = got
				}
				require.Equal(t, want, got, "answers under %s differ", binary)
			}
		})
	}
}

const clones = 2

// rehearse runs one workload under one runtime and returns all answers.
func rehearse(t *testing.T, w Workload, binary, rootfs string, steps int) []string {
	ctx, cancel := context.WithTimeout(context.Background(), 8*time.Minute)
	defer cancel()
	rt, err := fleet.New(fleet.Options{Binary: binary})
	require.NoError(t, err)
	defer func() { require.NoError(t, rt.Close()) }()
	name := filepath.Base(binary)
	if _, err := os.Stat(rootfs); err != nil {
		t.Skipf("no root file system for %s: %v", w.Name, err)
	}
	require.NoError(t, w.Install(rootfs))
	// Not t.TempDir, which may be in memory: images are large.
	dir, err := os.MkdirTemp(os.Getenv(rootfsEnv), "e2e-")
	require.NoError(t, err)
	defer os.RemoveAll(dir)
	bundle := filepath.Join(dir, "bundle")
	const seed = 7
	require.NoError(t, fleet.WriteBundle(bundle, w.Spec(rootfs, seed)))

	var answers []string
	ask := func(sb *fleet.Sandbox, line string) string {
		t.Helper()
		answer, err := sb.Request(ctx, line)
		require.NoError(t, err, "%s\n%s", line, sb.Stderr())
		var reply struct {
			OK    bool   `json:"ok"`
			Error string `json:"error"`
		}
		require.NoError(t, json.Unmarshal([]byte(answer), &reply))
		require.True(t, reply.OK, "%s: %s: %s\n%s", sb.ID(), line, reply.Error, sb.Stderr())
		answers = append(answers, answer)
		return answer
	}
	mem := func(sb *fleet.Sandbox) float64 {
		if st, err := sb.Stats(ctx); err == nil {
			return float64(st.GuestBytes) / (1 << 20)
		}
		m, err := sb.Memory()
		require.NoError(t, err)
		return float64(m.GuestMemfd) / (1 << 20)
	}

	start := time.Now()
	sb, err := rt.Run(ctx, "template", bundle)
	require.NoError(t, err)
	ready, err := sb.ReadLine(ctx)
	require.NoError(t, err, sb.Stderr())
	t.Logf("%s %s: ready after %.1f s: %s", w.Name, name, time.Since(start).Seconds(), ready)
	answers = append(answers, ready)
	ask(sb, `{"op":"settle"}`)
	t.Logf("%s %s: template of %.0f MiB", w.Name, name, mem(sb))
	image := filepath.Join(dir, "image")
	require.NoError(t, sb.Checkpoint(ctx, image, fleet.CheckpointOptions{ExcludeZeroPages: true}))
	require.NoError(t, sb.Delete(ctx))

	var sandboxes []*fleet.Sandbox
	var plans [][]Step
	for c := range clones {
		sb, err := rt.Restore(ctx, fmt.Sprintf("clone-%d", c), bundle, image)
		require.NoError(t, err)
		sandboxes = append(sandboxes, sb)
		plans = append(plans, w.Plan(seed, c, steps))
		ask(sb, `{"op":"ping"}`)
	}
	for i := range max(len(plans[0]), len(plans[1])) {
		for c, sb := range sandboxes {
			if i >= len(plans[c]) {
				continue // a trace may have more for one than for the other
			}
			s := plans[c][i]
			start := time.Now()
			answer := ask(sb, string(s.Request))
			t.Logf("%s %s: clone %d step %2d %-8s %5.2f s %4.0f MiB  %.300s", w.Name, name, c, i, s.Kind, time.Since(start).Seconds(), mem(sb), answer)
			// Time to evict, for runtimes that do while a sandbox waits.
			time.Sleep(min(s.Wait/10, 500*time.Millisecond))
		}
	}
	for _, sb := range sandboxes {
		start := time.Now()
		answer := ask(sb, `{"op":"state"}`)
		t.Logf("%s %s: state after %.1f s: %s", w.Name, name, time.Since(start).Seconds(), answer)
		require.Contains(t, ask(sb, `{"op":"exec","args":{"argv":["echo","hello"]}}`), `"stdout": "hello\n"`)
		exit, err := sb.Request(ctx, `{"op":"none"}`)
		require.NoError(t, err)
		require.True(t, strings.Contains(exit, "unknown op"), exit)
	}
	return answers
}
