package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"runsc-agentzip/pkg/fleet"
	"runsc-agentzip/tools/agentbench/linuxmem"
	"runsc-agentzip/tools/agentbench/workload"
)

// The end-to-end tests need root and the two binaries.
const (
	runtimeEnv = "AGENTBENCH_RUNTIME"
	stockEnv   = "AGENTBENCH_STOCK"
	// childEnv makes the test binary run the benchmark in a directory, with the systems
	// in childSystemsEnv.
	childEnv        = "AGENTBENCH_TEST_RUN"
	childSystemsEnv = "AGENTBENCH_TEST_SYSTEMS"
	// notRootEnv makes it agentbench, started by another user than root.
	notRootEnv = "AGENTBENCH_TEST_NOT_ROOT"
	// fakePoolEnv makes it a page pool that behaves in some way, poolOwnerEnv a
	// program that starts one.
	fakePoolEnv  = "AGENTBENCH_TEST_POOL"
	poolOwnerEnv = "AGENTBENCH_TEST_POOL_OWNER"
)

// TestMain lets the test binary be all programs that the tests need: the guest's
// tool server, the launcher of the system linux, and a benchmark to be killed.
func TestMain(m *testing.M) {
	switch {
	case os.Getpid() == 1:
		serveTools(os.Stdin, os.Stdout)
	case len(os.Args) > 1 && os.Args[1] == "enter":
		linuxmem.Enter(os.Args[2:])
	case os.Getenv(fakePoolEnv) != "":
		servePool(os.Getenv(fakePoolEnv), os.Args[1:])
	case os.Getenv(poolOwnerEnv) != "":
		ownPool(os.Getenv(poolOwnerEnv))
	case os.Getenv(childEnv) != "":
		ctx, stop := untilSignal()
		defer stop()
		b := newBenchmark(testConfig(os.Getenv(childEnv), os.Getenv(childSystemsEnv), time.Minute), nil, os.Stderr)
		fmt.Fprintln(os.Stderr, b.run(ctx))
	case os.Getenv(notRootEnv) != "":
		if os.Geteuid() == 0 {
			const nobody = 65534
			if err := errors.Join(syscall.Setgroups(nil), syscall.Setgid(nobody), syscall.Setuid(nobody)); err != nil {
				fmt.Fprintln(os.Stderr, err)
				os.Exit(3)
			}
		}
		os.Exit(mainCode(context.Background(), os.Args[1:], os.Stdout, os.Stderr))
	default:
		os.Exit(m.Run())
	}
}

// serveTools is a tool server whose steps write to more and more memory.
func serveTools(in io.Reader, out io.Writer) {
	heap := make([]uint64, 4<<20)
	touch := func(seed uint64) uint64 {
		r := rand.New(rand.NewPCG(seed, 1))
		var sum uint64
		for i := range heap[:1<<19] {
			heap[i] = heap[i]*3 + r.Uint64()>>52
			sum += heap[i]
		}
		return sum
	}
	touch(0)
	fmt.Fprintln(out, `{"ready": true}`)
	for lines := bufio.NewScanner(in); lines.Scan(); {
		var q struct {
			Op   string
			Args struct{ Seed uint64 }
		}
		var result any = map[string]any{}
		if err := json.Unmarshal(lines.Bytes(), &q); err != nil {
			panic(err)
		}
		switch q.Op {
		case "step":
			result = touch(q.Args.Seed)
		case "state":
			var sum uint64
			for _, v := range heap {
				sum = sum*31 + v
			}
			result = sum
		}
		b, err := json.Marshal(map[string]any{"ok": true, "result": result})
		if err != nil {
			panic(err)
		}
		fmt.Fprintf(out, "%s\n", b)
	}
}

// testWorkload waits before each step.
func testWorkload(wait time.Duration) workload.Workload {
	return workload.Workload{
		Name: "test", Summary: "the tests' own", Rootfs: "test", EstimatedBytes: 64 << 20,
		Spec: func(rootfs string, seed uint64) fleet.Spec {
			return fleet.Spec{Rootfs: rootfs, Args: []string{"/server"}}
		},
		Install: func(string) error { return nil },
		Plan: func(seed uint64, clone, n int) []workload.Step {
			var out []workload.Step
			for i := range n {
				q := fmt.Sprintf(`{"op":"step","args":{"seed":%d}}`, seed*1000+uint64(clone)*100+uint64(i))
				out = append(out, workload.Step{Kind: []string{"odd", "even"}[i%2], Request: json.RawMessage(q), Wait: wait})
			}
			return out
		},
	}
}

// testConfig is a small run in a directory that holds nothing else.
func testConfig(dir, systems string, wait time.Duration) runConfig {
	kinds, err := parseSystems(systems)
	if err != nil {
		panic(err)
	}
	return runConfig{
		workloads: []workload.Workload{testWorkload(wait)}, systems: kinds,
		clones: []int{2}, steps: 4, repetitions: 1, seed: 1, waitScale: 1,
		runtime: os.Getenv(runtimeEnv), stock: os.Getenv(stockEnv),
		work: filepath.Join(dir, "work"), rootfsDir: dir, rootfs: rootfsOptions{suite: "none"},
		stepTimeout: time.Minute, skip: true,
	}
}

// testDir makes a directory with a root file system that holds the test binary
// only. It is not below /tmp, which a sandbox covers with its own.
func testDir(t *testing.T) string {
	if os.Getenv(runtimeEnv) == "" || os.Getenv(stockEnv) == "" {
		t.Skipf("set %s and %s to runsc binaries to run this test", runtimeEnv, stockEnv)
	}
	dir, err := os.MkdirTemp("/var/tmp", "agentbench-test-")
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, os.RemoveAll(dir)) })
	rootfs := filepath.Join(dir, "rootfs-test")
	for _, d := range []string{"proc", "dev", "sys", "tmp"} {
		require.NoError(t, os.MkdirAll(filepath.Join(rootfs, d), 0o755))
	}
	self, err := os.Executable()
	require.NoError(t, err)
	b, err := os.ReadFile(self)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(rootfs, "server"), b, 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(rootfs, rootfsStamp), []byte(rootfsStampFor("none", nil)), 0o644))
	return dir
}

// assertNothingLeft makes sure that a run in dir left nothing on the machine.
func assertNothingLeft(t *testing.T, dir string, before []string) {
	t.Helper()
	runs, err := filepath.Glob(filepath.Join(dir, "work", "*"))
	require.NoError(t, err)
	assert.Empty(t, runs)
	assert.Equal(t, before, machineState(t))
}

// machineState is what a run must leave as it found it.
func machineState(t *testing.T) []string {
	t.Helper()
	var out []string
	for _, pattern := range []string{"/run/agentbench-*", "/sys/fs/cgroup/memory/agentbench-*", "/sys/fs/cgroup/memory/*/*/agentbench-*", "/sys/fs/cgroup/agentbench-*"} {
		found, err := filepath.Glob(pattern)
		require.NoError(t, err)
		out = append(out, found...)
	}
	swaps, err := os.ReadFile("/proc/swaps")
	require.NoError(t, err)
	return append(out, string(swaps))
}

func TestRunEndToEnd(t *testing.T) {
	dir := testDir(t)
	before := machineState(t)
	var log bytes.Buffer
	systems := "stock,linux,agentzip,agentzip-nopool,agentzip-notemplate,agentzip-off"
	cfg := testConfig(dir, systems, 600*time.Millisecond)
	cfg.workloads[0].Cycle = 2
	b := newBenchmark(cfg, nil, &log)
	err := b.run(t.Context())
	t.Logf("%s", &log)
	require.NoError(t, err)
	assertNothingLeft(t, dir, before)

	r := b.report
	require.NoError(t, verdict(r))
	taking := make(map[string]int)
	for _, e := range r.Episodes {
		taking[e.System]++
		assert.Len(t, e.Restores, 2)
		assert.Equal(t, 2*5, e.Waits)
		assert.Positive(t, e.SandboxCPUSeconds)
		assert.Positive(t, e.CPUSeconds)
		assert.Positive(t, e.OwnCPUSeconds)
		assert.LessOrEqual(t, e.PoolCPUSeconds, e.SandboxCPUSeconds)
	}
	pooled := make(map[string]bool)
	for _, s := range r.Systems {
		pooled[s.Name] = s.Pool
		assert.Equal(t, slices.Contains([]string{"agentzip", "agentzip-notemplate"}, s.Name), s.Pool, s.Name)
	}
	for _, p := range r.Problems {
		assert.NotContains(t, p.Text, "not connected to the page pool")
	}
	for _, s := range []string{"stock", "agentzip", "agentzip-nopool", "agentzip-notemplate", "agentzip-off"} {
		assert.Equal(t, 1, taking[s], s)
	}
	assert.Len(t, r.Steps, len(r.Episodes)*2*4)
	for _, s := range r.Steps {
		assert.GreaterOrEqual(t, s.WaitSeconds, 0.6)
		assert.Less(t, s.Seconds, 60.0)
	}
	measured := make(map[string]int)
	for _, m := range r.Memory {
		measured[m.System]++
		assert.GreaterOrEqual(t, m.IdleSeconds, 0.3)
		assert.Positive(t, m.CommittedBytes)
		assert.Positive(t, m.HostBytes)
		if assert.Equal(t, pooled[m.System], m.Pool != nil, m.System) && m.Pool != nil {
			assert.Positive(t, m.Pool.Process.PSSAnon)
			assert.LessOrEqual(t, m.PoolShareBytes, m.OwnedBytes)
		}
		assert.Equal(t, m.System == linuxName, m.SwapBytes > 0, "%s: %d bytes of swap", m.System, m.SwapBytes)
	}
	for s, n := range taking {
		// Others may keep the machine too busy for some.
		assert.Positive(t, measured[s], "no memory samples of %s", s)
		assert.LessOrEqual(t, measured[s], n*2*5)
	}
	assert.NotEmpty(t, r.Timeline)
	for _, s := range r.Summary {
		assert.True(t, s.OutputsEqual, s.System)
	}
}

func TestRunInterruptedEndToEnd(t *testing.T) {
	dir := testDir(t)
	before := machineState(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	log := &triggerWriter{on: "step 1/8", do: cancel}
	b := newBenchmark(testConfig(dir, "linux,agentzip", 600*time.Millisecond), nil, log)
	b.progress.terminal = true // so that every step is told
	err := b.run(ctx)
	assert.ErrorIs(t, err, errInterrupted)
	assertNothingLeft(t, dir, before)
	assert.NotEmpty(t, b.report.Error)
}

// startChild starts a run in dir, whose waits are long, as a process of its own, and
// returns it once the clones of these systems wait. started is false if the machine
// cannot run them.
func startChild(t *testing.T, dir, systems string) (cmd *exec.Cmd, output func() string, started bool) {
	self, err := os.Executable()
	require.NoError(t, err)
	cmd = exec.Command(self)
	cmd.Env = append(os.Environ(), childEnv+"="+dir, childSystemsEnv+"="+systems)
	stderr, err := cmd.StderrPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	var text strings.Builder
	lines := bufio.NewScanner(stderr)
	for !started && lines.Scan() {
		fmt.Fprintln(&text, lines.Text())
		started = strings.Contains(lines.Text(), "checkpointed in")
	}
	if started {
		time.Sleep(4 * time.Second)
	}
	return cmd, func() string {
		for lines.Scan() {
			fmt.Fprintln(&text, lines.Text())
		}
		cmd.Wait()
		return text.String()
	}, started
}

// TestRunSignalledEndToEnd ends a run by signals, as Ctrl-C does and who stops a
// service: it says so, and leaves nothing.
func TestRunSignalledEndToEnd(t *testing.T) {
	for _, s := range []os.Signal{os.Interrupt, syscall.SIGTERM} {
		dir := testDir(t)
		before := machineState(t)
		cmd, output, started := startChild(t, dir, "agentzip")
		if started {
			assert.NotEqual(t, before, machineState(t), "it was ended too early or too late")
			require.NoError(t, cmd.Process.Signal(s))
		}
		text := output()
		t.Logf("%v: %s", s, text)
		require.True(t, started)
		assert.Contains(t, text, errInterrupted.Error())
		assertNothingLeft(t, dir, before)
	}
}

// TestRunKilledEndToEnd kills a run outright; the next one finds and removes
// what it left.
func TestRunKilledEndToEnd(t *testing.T) {
	for _, systems := range []string{"linux", "agentzip"} {
		t.Run(systems, func(t *testing.T) {
			dir := testDir(t)
			before := machineState(t)
			cmd, output, started := startChild(t, dir, systems)
			cmd.Process.Kill()
			t.Log(output())
			if !started && systems == linuxName {
				t.Skip("the machine cannot run the system linux")
			}
			require.True(t, started)
			assert.NotEqual(t, before, machineState(t), "it was killed too early or too late")
			var log bytes.Buffer
			err := newBenchmark(testConfig(dir, "agentzip", 100*time.Millisecond), nil, &log).run(t.Context())
			t.Logf("%s", &log)
			require.NoError(t, err)
			assertNothingLeft(t, dir, before)
		})
	}
}

// triggerWriter does something when a text is written to it.
type triggerWriter struct {
	on string
	do func()
}

func (w *triggerWriter) Write(b []byte) (int, error) {
	if strings.Contains(string(b), w.on) {
		w.do()
	}
	return len(b), nil
}

// foreignSwap has the host use a swap device that no benchmark has made, until the test
// ends. It returns the device's path.
func foreignSwap(t *testing.T) string {
	t.Helper()
	const control = "/sys/class/zram-control/"
	if unix.Access(control+"hot_remove", unix.W_OK) != nil {
		t.Skip("the machine has no zram to make a swap device of")
	}
	n, err := os.ReadFile(control + "hot_add")
	require.NoError(t, err)
	number := strings.TrimSpace(string(n))
	device := "/dev/zram" + number
	t.Cleanup(func() {
		// Some program may look at a device that has just come.
		assert.Eventually(t, func() bool {
			return os.WriteFile(control+"hot_remove", []byte(number), 0) == nil
		}, 10*time.Second, 50*time.Millisecond)
	})
	require.NoError(t, os.WriteFile("/sys/block/zram"+number+"/disksize", []byte("16M"), 0))
	if _, err := os.Lstat(device); err != nil {
		// A machine that makes no device files.
		text, err := os.ReadFile("/sys/block/zram" + number + "/dev")
		require.NoError(t, err)
		var major, minor uint32
		_, err = fmt.Sscanf(string(text), "%d:%d", &major, &minor)
		require.NoError(t, err)
		require.NoError(t, unix.Mknod(device, unix.S_IFBLK|0o600, int(unix.Mkdev(major, minor))))
		t.Cleanup(func() { assert.NoError(t, os.Remove(device)) })
	}
	for _, command := range []string{"mkswap", "swapon"} {
		out, err := exec.Command(command, device).CombinedOutput()
		require.NoError(t, err, "%s: %s", command, out)
	}
	t.Cleanup(func() {
		out, err := exec.Command("swapoff", device).CombinedOutput()
		assert.NoError(t, err, "%s", out)
	})
	return device
}

// TestForeignSwapEndToEnd: a host with swap in use does not run the system linux, is told
// so before anything starts, and keeps its swap.
func TestForeignSwapEndToEnd(t *testing.T) {
	dir := testDir(t)
	device := foreignSwap(t)
	before := machineState(t)
	require.Contains(t, strings.Join(before, "\n"), device)

	cfg := testConfig(dir, "stock,linux", 100*time.Millisecond)
	cfg.skip = false
	var log bytes.Buffer
	b := newBenchmark(cfg, nil, &log)
	err := b.run(t.Context())
	require.ErrorContains(t, err, "swap is in use on this machine")
	require.ErrorContains(t, err, device)
	require.ErrorContains(t, err, "swapoff")
	assert.Empty(t, b.report.Episodes)
	assertNothingLeft(t, dir, before)

	// Asked to, it does without.
	cfg.skip = true
	log.Reset()
	b = newBenchmark(cfg, nil, &log)
	err = b.run(t.Context())
	t.Logf("%s", &log)
	require.NoError(t, err)
	assert.Contains(t, log.String(), "swap is in use on this machine")
	for _, e := range b.report.Episodes {
		assert.Equal(t, "stock", e.System)
	}
	assert.NotEmpty(t, b.report.Episodes)
	assertNothingLeft(t, dir, before)
}
