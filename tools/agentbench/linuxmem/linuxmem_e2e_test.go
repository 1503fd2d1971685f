package linuxmem

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"runsc-agentzip/pkg/fleet"
)

const (
	// e2eEnv switches the end-to-end tests on: they change the machine's swap,
	// KSM and cgroups for a while.
	e2eEnv = "LINUXMEM_E2E"
	// abandonedEnv names a directory in which tests that were killed were at work.
	abandonedEnv = "LINUXMEM_ABANDONED"
	// runscEnv names a stock runsc, for the test that runs a sandbox.
	runscEnv = "FLEET_RUNSC"
)

// stateName is what the tests' state files are called.
const stateName = "state.json"

// The test program plays other parts too.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case "enter":
			Enter(os.Args[2:])
		case "hold":
			hold()
		case "setup":
			lifeAndDeath(os.Args[2], os.Args[3], nil)
		case "setup without device files":
			lifeAndDeath(os.Args[2], os.Args[3], removeNodes)
		case "restore":
			dieAt(os.Args[3], func(step func(string)) error { return restoreHost(os.Args[2], step) })
		}
	}
	os.Exit(m.Run())
}

// held is the amount of memory that hold has.
const held = 100 << 20

// hold fills a shared memfd with data that compresses, and checks it whenever it
// is asked to.
func hold() {
	fail := func(err error) {
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
	}
	fd, err := unix.MemfdCreate("guest", 0)
	fail(err)
	fail(unix.Ftruncate(fd, held))
	mem, err := unix.Mmap(fd, 0, held, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	fail(err)
	for i := 0; i < held; i += 8 {
		binary.NativeEndian.PutUint64(mem[i:], uint64(i)>>12*0x9e3779b97f4a7c15+uint64(i&0xff))
	}
	fmt.Println("ready")
	for sc := bufio.NewScanner(os.Stdin); sc.Scan(); {
		for i := 0; i < held; i += 8 {
			if binary.NativeEndian.Uint64(mem[i:]) != uint64(i)>>12*0x9e3779b97f4a7c15+uint64(i&0xff) {
				fail(fmt.Errorf("wrong data at %d", i))
			}
		}
		fmt.Println("intact")
	}
	os.Exit(0)
}

// dieAt runs f and kills this process at its n-th step. If there are fewer it
// exits with 0.
func dieAt(n string, f func(step func(string)) error) {
	at, err := strconv.Atoi(n)
	if err == nil {
		err = f(func(name string) {
			if at--; at == 0 {
				fmt.Println(name)
				unix.Kill(os.Getpid(), unix.SIGKILL)
				select {}
			}
		})
	}
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	os.Exit(0)
}

// removeNodes is a step after which the machine is one that makes no device
// files.
func removeNodes(name string) {
	if name != "zram sized" {
		return
	}
	devices, err := zramDevices()
	if err != nil || len(devices) == 0 {
		fmt.Println("no zram devices:", err)
		os.Exit(1)
	}
	os.Remove(zramNode(devices[len(devices)-1]))
}

// lifeAndDeath is a run with one group and a process in it that outlives it.
func lifeAndDeath(stateFile, n string, first func(string)) {
	ctx := context.Background()
	dieAt(n, func(die func(string)) error {
		step := func(name string) {
			if first != nil {
				first(name)
			}
			die(name)
		}
		h, err := Setup(ctx, Options{ZramBytes: 256 << 20, StateFile: stateFile, step: step})
		if err != nil {
			return err
		}
		g, err := h.Group("one")
		if err != nil {
			return err
		}
		cmd := launch(g, "sleep", "1000")
		if err := cmd.Start(); err != nil {
			return err
		}
		if err := waitIn(g, cmd.Process.Pid); err != nil {
			return err
		}
		step("process started")
		if err := g.Close(); err == nil {
			return errors.New("a group with a process in it was closed")
		}
		if err := h.Close(ctx); err == nil {
			return errors.New("a host with a process in a group was closed")
		}
		cmd.Process.Kill()
		if err := cmd.Wait(); err == nil {
			return errors.New("sleep ended by itself")
		}
		return h.Close(ctx)
	})
}

func launch(g *Group, args ...string) *exec.Cmd {
	argv := append(g.Launcher(), args...)
	return exec.Command(argv[0], argv[1:]...)
}

// waitIn waits until a process that was launched is in its group.
func waitIn(g *Group, pid int) error {
	for range 500 {
		pids, err := processes(g.dir)
		if err != nil {
			return err
		}
		if len(pids) == 1 && pids[0] == pid {
			return nil
		}
		time.Sleep(10 * time.Millisecond)
	}
	return fmt.Errorf("process %d is not in %s", pid, g.dir)
}

// TestRemoveAbandoned undoes what a killed test left behind.
func TestRemoveAbandoned(t *testing.T) {
	dir := os.Getenv(abandonedEnv)
	if dir == "" {
		t.Skipf("set %s to the directory that a killed test had as TMPDIR", abandonedEnv)
	}
	require.NoError(t, filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err == nil && strings.TrimSuffix(e.Name(), newSuffix) == stateName {
			err = RestoreHost(filepath.Join(filepath.Dir(path), stateName))
		}
		// RestoreHost removes both files at once.
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	}))
}

// needHost skips the test unless it may change the machine, and makes sure that
// the machine is the same afterwards.
func needHost(t *testing.T) {
	if os.Getenv(e2eEnv) == "" {
		t.Skipf("set %s=1 to run this test, which sets up swap, KSM and cgroups on this machine", e2eEnv)
	}
	before := describeHost(t)
	t.Cleanup(func() { assert.Equal(t, before, describeHost(t), "the machine is not as it was") })
}

// describeHost is everything that this package may change.
func describeHost(t *testing.T) map[string]string {
	out := make(map[string]string)
	read := func(path string) {
		if s, err := readTrimmed(path); err == nil {
			out[path] = s
		}
	}
	read("/proc/swaps")
	devices, err := zramDevices()
	require.NoError(t, err)
	for _, n := range devices {
		for _, name := range []string{"diskseq", "disksize", "comp_algorithm"} {
			read(zramAttr(n, name))
		}
	}
	nodes, err := filepath.Glob("/dev/zram*")
	require.NoError(t, err)
	out["nodes"] = strings.Join(nodes, " ")
	for _, name := range []string{"run", "pages_to_scan", "sleep_millisecs"} {
		read(filepath.Join(ksmDir, name))
	}
	for _, name := range []string{"swappiness", "page-cluster"} {
		read(filepath.Join("/proc/sys/vm", name))
	}
	m, err := findMemcg()
	require.NoError(t, err)
	err = filepath.WalkDir(m.mount, func(path string, d os.DirEntry, err error) error {
		if err == nil && d.IsDir() && strings.HasPrefix(d.Name(), "agentbench-") {
			out["cgroups"] += path + " "
		}
		return nil
	})
	require.NoError(t, err)
	return out
}

func TestEndToEnd(t *testing.T) {
	needHost(t)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	file := filepath.Join(t.TempDir(), stateName)
	o := Options{ZramBytes: 512 << 20, StateFile: file, Say: t.Logf}
	h, err := Setup(ctx, o)
	require.NoError(t, err)
	defer func() { assert.NoError(t, h.Close(ctx)) }()

	_, err = Setup(ctx, Options{StateFile: file + "2"})
	assert.ErrorIs(t, err, ErrInUse)
	_, err = check()
	assert.ErrorContains(t, err, zramNode(h.zram), "swap is in use")
	assert.ErrorIs(t, RestoreHost(file), ErrInUse, "the owner is alive")

	g, err := h.Group("holder")
	require.NoError(t, err)
	_, err = h.Group("holder")
	assert.Error(t, err, "a second group of the same name")
	cmd := launch(g, "/proc/self/exe", "hold")
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	answers := bufio.NewScanner(out)
	answer := func() string {
		if !answers.Scan() {
			return "no answer"
		}
		return answers.Text()
	}
	require.Equal(t, "ready", answer())
	require.NoError(t, waitIn(g, cmd.Process.Pid), "the process id stays")
	if s, err := readTrimmed(fmt.Sprintf("/proc/%d/ksm_stat", cmd.Process.Pid)); err == nil && strings.Contains(s, "ksm_merge_any") {
		assert.Contains(t, s, "ksm_merge_any: yes")
	}

	full, err := g.Usage()
	require.NoError(t, err)
	t.Logf("full: %+v", full)
	assert.GreaterOrEqual(t, full.Shmem, uint64(held))
	assert.GreaterOrEqual(t, full.Bytes, full.Shmem+full.Anon)

	// Broken off, it has done a part.
	short, stop := context.WithTimeout(ctx, 20*time.Millisecond)
	r, err := g.Reclaim(short)
	stop()
	require.NoError(t, err)
	t.Logf("broken off: %+v", r)
	assert.False(t, r.Complete)
	assert.Less(t, r.Duration, 5*time.Second)

	r, err = g.Reclaim(ctx)
	require.NoError(t, err)
	t.Logf("reclaimed: %+v", r)
	assert.True(t, r.Complete)
	small, err := g.Usage()
	require.NoError(t, err)
	host, err := h.Usage()
	require.NoError(t, err)
	t.Logf("small: %+v, host: %+v", small, host)
	assert.Less(t, small.Bytes, full.Bytes/10)
	assert.GreaterOrEqual(t, small.Swap, uint64(held*9/10))
	assert.GreaterOrEqual(t, host.ZramOrig, uint64(held*9/10))
	assert.Less(t, host.ZramTotal, uint64(held/4))
	assert.Positive(t, host.Share(small.Swap))

	for range 2 {
		fmt.Fprintln(in, "check")
		require.Equal(t, "intact", answer())
	}
	back, err := g.Usage()
	require.NoError(t, err)
	assert.GreaterOrEqual(t, back.Shmem, uint64(held))
	// Reclaimed while it works.
	fmt.Fprintln(in, "check")
	_, err = g.Reclaim(ctx)
	require.NoError(t, err)
	require.Equal(t, "intact", answer())

	in.Close()
	require.NoError(t, cmd.Wait())
	require.NoError(t, g.Close())
	require.NoError(t, g.Close())
	require.NoError(t, h.Close(ctx))
	assert.NoFileExists(t, file)
	_, err = h.Group("late")
	assert.Error(t, err)
}

// TestSetupFails: whatever was done by then is undone.
func TestSetupFails(t *testing.T) {
	needHost(t)
	dir := t.TempDir()
	file := filepath.Join(dir, stateName)
	_, err := Setup(t.Context(), Options{ZramBytes: 64 << 20, Algorithm: "bogus", StateFile: file})
	assert.ErrorContains(t, err, "lz4", "the message names what there is")
	ctx, cancel := context.WithCancel(t.Context())
	_, err = Setup(ctx, Options{ZramBytes: 64 << 20, StateFile: file, step: func(name string) {
		if name == "zram sized" {
			cancel()
		}
	}})
	assert.Error(t, err)
	_, err = Setup(t.Context(), Options{StateFile: filepath.Join(dir, "missing", stateName)})
	assert.Error(t, err)
	_, err = Setup(t.Context(), Options{})
	assert.Error(t, err)
	require.NoError(t, os.WriteFile(file, []byte("{}"), 0o600))
	_, err = Setup(t.Context(), Options{StateFile: file})
	assert.ErrorContains(t, err, "RestoreHost")
}

// playDead runs this program in another part until it dies at its n-th step,
// which it returns, "" if it got to its end.
func playDead(t *testing.T, part, file string, n int) string {
	t.Helper()
	cmd := exec.Command("/proc/self/exe", part, file, strconv.Itoa(n))
	out, err := cmd.Output()
	step := strings.TrimSpace(string(out))
	if err == nil {
		return ""
	}
	var exit *exec.ExitError
	require.ErrorAs(t, err, &exit)
	require.Equal(t, "signal: killed", exit.String(), "%s: %s", step, exit.Stderr)
	require.NotEmpty(t, step)
	return step
}

// TestKilledAnywhere ends a run at every point between two changes.
func TestKilledAnywhere(t *testing.T) {
	for _, part := range []string{"setup", "setup without device files"} {
		t.Run(part, func(t *testing.T) { testKilledAnywhere(t, part) })
	}
}

func testKilledAnywhere(t *testing.T, part string) {
	needHost(t)
	before := describeHost(t)
	dir := t.TempDir()
	file := filepath.Join(dir, stateName)
	steps := 0
	for n := 1; ; n++ {
		step := playDead(t, part, file, n)
		require.NoError(t, RestoreHost(file), "after %q", step)
		require.NoError(t, RestoreHost(file), "again, after %q", step)
		require.Equal(t, before, describeHost(t), "after %q", step)
		entries, err := os.ReadDir(dir)
		require.NoError(t, err)
		require.Empty(t, entries, "after %q", step)
		if step == "" {
			break
		}
		t.Logf("killed at %q", step)
		steps++
	}
	assert.Greater(t, steps, 10)
}

// TestRestoreKilledAnywhere ends RestoreHost itself at every such point.
func TestRestoreKilledAnywhere(t *testing.T) {
	needHost(t)
	before := describeHost(t)
	file := filepath.Join(t.TempDir(), stateName)
	for n := 1; ; n++ {
		killAt(t, file, "process started")
		step := playDead(t, "restore", file, n)
		require.NoError(t, RestoreHost(file), "after %q", step)
		require.Equal(t, before, describeHost(t), "after %q", step)
		if step == "" {
			break
		}
		t.Logf("killed at %q", step)
	}
}

// killAt kills a run at a step with a name.
func killAt(t *testing.T, file, name string) {
	t.Helper()
	for n := 1; ; n++ {
		step := playDead(t, "setup", file, n)
		if step == name {
			return
		}
		require.NotEmpty(t, step, "no step is named %q", name)
		require.NoError(t, RestoreHost(file))
	}
}

// TestDeviceTakenByOthers: the recorded number is another device's meanwhile, or
// the device was put to another use.
func TestDeviceTakenByOthers(t *testing.T) {
	needHost(t)
	before := describeHost(t)
	file := filepath.Join(t.TempDir(), stateName)
	mkswap := func(n int) {
		out, err := exec.Command("mkswap", "-L", "precious", zramNode(n)).CombinedOutput()
		require.NoError(t, err, "%s", out)
	}
	check := func(n int) {
		t.Helper()
		require.NoError(t, RestoreHost(file))
		assert.NoFileExists(t, file)
		head, err := (&zramState{}).head(n)
		require.NoError(t, err, "the device is gone")
		label, _ := parseSwapHeader(head)
		assert.Equal(t, "precious", label)
		require.NoError(t, hotRemove(n))
		assert.Equal(t, before, describeHost(t))
	}

	// Another device with the same number and size.
	killAt(t, file, "swap on")
	f, err := loadState(file)
	require.NoError(t, err)
	z := f.state.Zram
	require.NoError(t, swapoff(t.Context(), zramNode(z.Number)))
	require.NoError(t, hotRemove(z.Number))
	n, err := hotAdd()
	require.NoError(t, err)
	require.Equal(t, z.Number, n)
	require.NoError(t, writeKernel(zramAttr(n, "disksize"), strconv.FormatUint(z.DiskBytes, 10)))
	mkswap(n)
	check(n)

	// The very device, used by another.
	killAt(t, file, "zram sized")
	mkswap(n)
	check(n)

	// A device that came while ours was about to.
	killAt(t, file, "recorded")
	_, err = hotAdd()
	require.NoError(t, err)
	require.NoError(t, writeKernel(zramAttr(n, "disksize"), strconv.FormatUint(z.DiskBytes, 10)))
	mkswap(n)
	check(n)
}

// TestKSMChangedByOthers: a setting that is not ours any more stays.
func TestKSMChangedByOthers(t *testing.T) {
	needHost(t)
	file := filepath.Join(t.TempDir(), stateName)
	before, err := readTrimmed(filepath.Join(ksmDir, "pages_to_scan"))
	require.NoError(t, err)
	killAt(t, file, "process started")
	require.NoError(t, writeKernel(filepath.Join(ksmDir, "pages_to_scan"), "123"))
	require.NoError(t, RestoreHost(file))
	now, err := readTrimmed(filepath.Join(ksmDir, "pages_to_scan"))
	require.NoError(t, err)
	assert.Equal(t, "123", now)
	require.NoError(t, writeKernel(filepath.Join(ksmDir, "pages_to_scan"), before))
}

// TestSandbox takes a sandbox of a stock runsc through it.
func TestSandbox(t *testing.T) {
	needHost(t)
	binary := os.Getenv(runscEnv)
	if binary == "" {
		t.Skipf("set %s to a stock runsc to run this test", runscEnv)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	dir := t.TempDir()
	h, err := Setup(ctx, Options{ZramBytes: 1 << 30, StateFile: filepath.Join(dir, stateName), Say: t.Logf})
	require.NoError(t, err)
	defer func() { assert.NoError(t, h.Close(ctx)) }()
	rt, err := fleet.New(fleet.Options{Binary: binary, Log: io.Discard})
	require.NoError(t, err)
	defer func() { assert.NoError(t, rt.Close()) }()
	bundle := filepath.Join(dir, "bundle")
	require.NoError(t, fleet.WriteBundle(bundle, fleet.Spec{
		Rootfs:         "/",
		ReadonlyRootfs: true,
		Mounts:         []fleet.Mount{{Target: "/mnt"}},
		Args:           []string{"/bin/sh", "-c", `yes 0123456789 | head -c 50000000 >/mnt/data; while read -r line; do set -- $(cksum /mnt/data); echo "$1"; done`},
	}))
	g, err := h.Group("sandbox")
	require.NoError(t, err)
	sb, err := rt.Run(ctx, "sandbox", bundle, fleet.WithLauncher(g.Launcher()...))
	require.NoError(t, err)
	want, err := sb.Request(ctx, "sum")
	require.NoError(t, err)

	pids, err := processes(g.dir)
	require.NoError(t, err)
	assert.Contains(t, pids, sb.Pid())
	assert.Contains(t, pids, sb.GoferPid())
	if s, err := readTrimmed(fmt.Sprintf("/proc/%d/ksm_stat", sb.Pid())); err == nil && strings.Contains(s, "ksm_merge_any") {
		assert.Contains(t, s, "ksm_merge_any: yes")
	}
	full, err := g.Usage()
	require.NoError(t, err)
	r, err := g.Reclaim(ctx)
	require.NoError(t, err)
	small, err := g.Usage()
	require.NoError(t, err)
	host, err := h.Usage()
	require.NoError(t, err)
	t.Logf("full %+v\nreclaimed %+v\nsmall %+v, share %d\nhost %+v", full, r, small, host.Share(small.Swap), host)
	assert.Greater(t, full.Bytes, uint64(50e6))
	assert.Less(t, small.Bytes+host.Share(small.Swap), full.Bytes/2)

	// Idle, then at work: it notices nothing but the time.
	got, err := sb.Request(ctx, "sum")
	require.NoError(t, err)
	assert.Equal(t, want, got)
	done := make(chan error, 1)
	go func() {
		_, err := g.Reclaim(ctx)
		done <- err
	}()
	got, err = sb.Request(ctx, "sum")
	require.NoError(t, err)
	assert.Equal(t, want, got)
	require.NoError(t, <-done)

	require.NoError(t, sb.Delete(ctx))
	require.NoError(t, g.Close())
}
