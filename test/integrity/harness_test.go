package integrity

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"runsc-agentzip/pkg/control"
	"runsc-agentzip/pkg/fleet"
)

var (
	runtimeFlag = flag.String("runtime", envOr("AGENTZIP_RUNTIME", "bin/runsc-agentzip"),
		"the runsc under test; a relative path is taken from the top of the repository")
	stockFlag = flag.String("stock", envOr("AGENTZIP_STOCK", "bin/runsc-stock"),
		"an unpatched runsc of the same version, to compare with; --agentzip=off stands in if it is missing")
	rootfsFlag = flag.String("rootfs", envOr("AGENTZIP_ROOTFS", "/"),
		"the guests' root filesystem; never written to")
	longFlag    = flag.Bool("long", false, "run the long tests too")
	requireFlag = flag.Bool("require", os.Getenv("AGENTZIP_REQUIRE") != "",
		"fail, rather than skip, where a package that a test needs is missing")
	seedFlag    = flag.Uint64("seed", 0, "seed of the guest programs (0: a new one each time)")
	secondsFlag = flag.Int("seconds", 0, "how long each guest program runs (0: what the test says)")
)

func envOr(name, def string) string {
	if v := os.Getenv(name); v != "" {
		return v
	}
	return def
}

// rootPrefix starts the name of every runtime's root directory, so that what a
// killed test run left behind can be told from everything else.
const rootPrefix = "/run/agentzip-integrity-"

// repoRoot is the directory that holds go.mod.
func repoRoot() string {
	dir, err := os.Getwd()
	if err != nil {
		return "."
	}
	for d := dir; d != "/"; d = filepath.Dir(d) {
		if _, err := os.Stat(filepath.Join(d, "go.mod")); err == nil {
			return d
		}
	}
	return dir
}

// repoPath resolves a path that was given from the top of the repository.
func repoPath(p string) string {
	if p == "" || filepath.IsAbs(p) {
		return p
	}
	return filepath.Join(repoRoot(), p)
}

func TestMain(m *testing.M) {
	flag.Parse()
	*rootfsFlag = repoPath(*rootfsFlag)
	if *seedFlag == 0 {
		*seedFlag = uint64(time.Now().UnixNano()) % 1_000_000
	}
	if os.Geteuid() == 0 {
		// A run that was killed could not clean up.
		stale, _ := filepath.Glob(rootPrefix + "*")
		for _, dir := range stale {
			if err := fleet.Reclaim(dir); err != nil && !errors.Is(err, fleet.ErrInUse) {
				fmt.Fprintf(os.Stderr, "reclaiming %s: %v\n", dir, err)
			}
		}
	}
	// Neither Ctrl-C nor a terminated CI job leaves sandboxes behind.
	sigs := make(chan os.Signal, 1)
	signal.Notify(sigs, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	go func() {
		s := <-sigs
		fmt.Fprintf(os.Stderr, "%v: removing sandboxes\n", s)
		closeAllRuntimes()
		removeScratch()
		os.Exit(1)
	}()
	code := m.Run()
	closeAllRuntimes()
	removeScratch()
	os.Exit(code)
}

// ---- what must not outlive the tests ----------------------------------------

var open struct {
	sync.Mutex
	runtimes map[*fleet.Runtime]bool
	undo     map[int]func()
	next     int
}

func closeAllRuntimes() {
	open.Lock()
	var rts []*fleet.Runtime
	for rt := range open.runtimes {
		rts = append(rts, rt)
	}
	var undo []func()
	for _, f := range open.undo {
		undo = append(undo, f)
	}
	open.Unlock()
	for _, rt := range rts {
		rt.Close()
	}
	for _, f := range undo {
		f()
	}
}

// atExit has f run at the end of the test, or when the tests are interrupted.
func atExit(t testing.TB, f func()) {
	once := sync.OnceFunc(f)
	open.Lock()
	if open.undo == nil {
		open.undo = make(map[int]func())
	}
	id := open.next
	open.next++
	open.undo[id] = once
	open.Unlock()
	t.Cleanup(func() {
		once()
		open.Lock()
		delete(open.undo, id)
		open.Unlock()
	})
}

var scratch struct {
	sync.Mutex
	dirs []string
}

// scratchDir makes a directory that lasts until the tests end.
func scratchDir(pattern string) (string, error) {
	dir, err := os.MkdirTemp("", pattern)
	if err == nil {
		scratch.Lock()
		scratch.dirs = append(scratch.dirs, dir)
		scratch.Unlock()
	}
	return dir, err
}

func removeScratch() {
	scratch.Lock()
	defer scratch.Unlock()
	for _, d := range scratch.dirs {
		os.RemoveAll(d)
	}
}

// ---- runtimes and modes --------------------------------------------------------

// mode is one way to run a sandbox.
type mode struct {
	name   string
	binary string
	flags  []string
	// evicts says that the backend is on: its statistics can be asked for and
	// must show that pages went and came back.
	evicts bool
}

// runscInfo is what is known about a runsc.
type runscInfo struct {
	path     string
	version  string
	agentzip bool
	err      error
}

var probed sync.Map // path -> *runscInfo

// probe runs the binary once to see what it is.
func probe(path string) *runscInfo {
	if b, ok := probed.Load(path); ok {
		return b.(*runscInfo)
	}
	b := &runscInfo{path: path}
	if _, err := os.Stat(path); err != nil {
		b.err = err
	} else if out, err := exec.Command(path, "flags").CombinedOutput(); err != nil {
		b.err = fmt.Errorf("%s flags: %w: %s", path, err, out)
	} else {
		b.agentzip = bytes.Contains(out, []byte("-agentzip"))
		v, _ := exec.Command(path, "--version").Output()
		b.version, _, _ = strings.Cut(string(v), "\n")
	}
	probed.Store(path, b)
	return b
}

// underTest returns the runsc to test, or skips.
func underTest(t testing.TB) *runscInfo {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("sandboxes need root: run the tests as root")
	}
	b := probe(repoPath(*runtimeFlag))
	if errors.Is(b.err, os.ErrNotExist) {
		t.Skipf("%s does not exist: run `make build` or name a runsc with -runtime", b.path)
	}
	if b.err != nil {
		t.Fatal(b.err)
	}
	return b
}

// stockBinary returns an unpatched runsc, or nil if there is none.
func stockBinary() *runscInfo {
	if *stockFlag == "" {
		return nil
	}
	b := probe(repoPath(*stockFlag))
	if b.err != nil || b.agentzip {
		return nil
	}
	return b
}

// forceFlag makes the backend evict everything it may, over and over.
const forceFlag = "--agentzip-test-evict-every=300ms"

// modeForced evicts all the time, whatever the guest does.
func modeForced(t testing.TB) mode {
	b := underTest(t)
	if !b.agentzip {
		return mode{name: "stock", binary: b.path}
	}
	return mode{name: "forced", binary: b.path, flags: []string{"--agentzip=on", forceFlag}, evicts: true}
}

// modeIdle evicts when the backend itself decides to: while the guest waits.
func modeIdle(t testing.TB) mode {
	b := underTest(t)
	if !b.agentzip {
		return mode{name: "stock", binary: b.path}
	}
	return mode{name: "idle", binary: b.path, flags: []string{"--agentzip=on"}, evicts: true}
}

// modeOff is the patched binary with the backend off.
func modeOff(t testing.TB) mode {
	b := underTest(t)
	if !b.agentzip {
		return mode{name: "stock", binary: b.path}
	}
	return mode{name: "off", binary: b.path, flags: []string{"--agentzip=off"}}
}

// modeReference is what results are compared with.
func modeReference(t testing.TB) mode {
	underTest(t)
	if s := stockBinary(); s != nil {
		return mode{name: "stock", binary: s.path}
	}
	return modeOff(t)
}

// distinct drops modes that are the same: all are, with a stock binary.
func distinct(modes ...mode) []mode {
	var out []mode
	for _, m := range modes {
		if !slices.ContainsFunc(out, func(o mode) bool { return o.name == m.name }) {
			out = append(out, m)
		}
	}
	return out
}

// newRuntime returns a runtime that is closed, and checked for leftovers, when
// the test ends. Its logs are kept under out/ if the test fails.
func newRuntime(t testing.TB, m mode) *fleet.Runtime {
	t.Helper()
	root, err := os.MkdirTemp(filepath.Dir(rootPrefix), filepath.Base(rootPrefix)+strconv.Itoa(os.Getpid())+"-")
	if err != nil {
		t.Fatal(err)
	}
	logs, err := scratchDir("agentzip-logs-")
	if err != nil {
		t.Fatal(err)
	}
	logFile, err := os.OpenFile(filepath.Join(logs, "fleet.txt"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		t.Fatal(err)
	}
	rt, err := fleet.New(fleet.Options{
		Binary: m.binary,
		Root:   root,
		Flags: append([]string{
			"--debug-log=" + logs + "/",
			"--panic-log=" + logs + "/panic.txt",
		}, m.flags...),
		Log: logFile,
	})
	if err != nil {
		os.RemoveAll(root)
		t.Fatal(err)
	}
	open.Lock()
	if open.runtimes == nil {
		open.runtimes = make(map[*fleet.Runtime]bool)
	}
	open.runtimes[rt] = true
	open.Unlock()
	runtimeLogs.Store(rt, logs)
	t.Cleanup(func() {
		procs := processesOf(rt)
		if err := rt.Close(); err != nil {
			t.Errorf("cleaning up: %v", err)
		}
		open.Lock()
		delete(open.runtimes, rt)
		open.Unlock()
		assertGone(t, root, procs)
		logFile.Close()
		if t.Failed() {
			keepLogs(t, logs)
		}
		runtimeLogs.Delete(rt)
		os.RemoveAll(logs)
	})
	return rt
}

// runtimeLogs finds the directory of a runtime's logs.
var runtimeLogs sync.Map // *fleet.Runtime -> string

// keepLogs copies the logs of a failed test where they can be looked at, and
// shows the ends of those that explain a dead sandbox.
func keepLogs(t testing.TB, logs string) {
	dst := filepath.Join(repoRoot(), "out", "integrity-failed", strings.ReplaceAll(t.Name(), "/", "-"))
	os.RemoveAll(dst)
	if err := os.CopyFS(dst, os.DirFS(logs)); err != nil {
		t.Logf("keeping the logs: %v", err)
		return
	}
	t.Logf("logs are in %s", dst)
	entries, _ := os.ReadDir(dst)
	for _, e := range entries {
		b, err := os.ReadFile(filepath.Join(dst, e.Name()))
		if err != nil || len(b) == 0 {
			continue
		}
		switch {
		case e.Name() == "panic.txt":
			t.Logf("--- panic\n%s", b[:min(len(b), 6000)])
		case e.Name() == "fleet.txt":
			t.Logf("--- end of %s\n%s", e.Name(), tail(string(b), 2500))
		case strings.Contains(e.Name(), ".boot."):
			if w := warnings(string(b)); w != "" {
				t.Logf("--- warnings in %s\n%s", e.Name(), tail(w, 4000))
			}
		}
	}
}

// boring are warnings that every sandbox starts with.
var boring = []string{
	"cgroup mount for controller", "--allow-suid", "product_name", "Host limit is lower",
	"SECCOMP WARNING", "No precompiled program", "ignoring unknown mount option",
}

// warnings picks what may explain a failure out of a sentry's log.
func warnings(log string) string {
	var out strings.Builder
	for line := range strings.Lines(log) {
		if slices.ContainsFunc(boring, func(s string) bool { return strings.Contains(line, s) }) {
			continue
		}
		if line[0] == 'W' || line[0] == 'E' || line[0] == 'F' || strings.Contains(line, "panic:") ||
			strings.Contains(line, "FATAL") || strings.Contains(line, "fatal error") {
			out.WriteString(line)
		}
	}
	return out.String()
}

func tail(s string, n int) string {
	if len(s) > n {
		return "..." + s[len(s)-n:]
	}
	return s
}

// procID tells a process from a later one with the same number.
type procID struct {
	pid   int
	start string
}

func readProc(pid int) (ppid int, start string, ok bool) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, "", false
	}
	i := bytes.LastIndexByte(b, ')')
	if i < 0 {
		return 0, "", false
	}
	f := strings.Fields(string(b[i+1:]))
	if len(f) < 20 || f[0] == "Z" {
		return 0, "", false
	}
	ppid, _ = strconv.Atoi(f[1])
	return ppid, f[19], true
}

// processesOf lists the sandboxes' processes and all their descendants.
func processesOf(rt *fleet.Runtime) []procID {
	type info struct {
		ppid  int
		start string
	}
	all := make(map[int]info)
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil {
			if ppid, start, ok := readProc(pid); ok {
				all[pid] = info{ppid, start}
			}
		}
	}
	roots := make(map[int]bool)
	for _, s := range rt.Sandboxes() {
		roots[s.Pid()], roots[s.GoferPid()] = true, true
	}
	delete(roots, 0)
	var out []procID
	for pid, in := range all {
		for p := pid; p > 1; p = all[p].ppid {
			if roots[p] {
				out = append(out, procID{pid, in.start})
				break
			}
		}
	}
	return out
}

// assertGone fails the test if a process, a mount or a directory of a closed
// runtime is still there.
func assertGone(t testing.TB, root string, procs []procID) {
	t.Helper()
	var left []string
	for deadline := time.Now().Add(5 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		left = nil
		for _, p := range procs {
			if _, start, ok := readProc(p.pid); ok && start == p.start {
				left = append(left, fmt.Sprintf("process %d", p.pid))
			}
		}
		entries, _ := os.ReadDir("/proc")
		for _, e := range entries {
			if _, err := strconv.Atoi(e.Name()); err != nil {
				continue
			}
			if cl, err := os.ReadFile("/proc/" + e.Name() + "/cmdline"); err == nil && bytes.Contains(cl, []byte(root)) {
				left = append(left, fmt.Sprintf("process %s (%s)", e.Name(), bytes.ReplaceAll(cl, []byte{0}, []byte{' '})))
			}
		}
		if len(left) == 0 || time.Now().After(deadline) {
			break
		}
	}
	if mi, err := os.ReadFile("/proc/self/mountinfo"); err == nil && bytes.Contains(mi, []byte(root)) {
		left = append(left, "a mount below "+root)
	}
	if _, err := os.Lstat(root); err == nil {
		left = append(left, root)
	}
	if len(left) > 0 {
		t.Errorf("left behind: %s", strings.Join(left, ", "))
	}
}

// ---- sandboxes -------------------------------------------------------------------

// Where the guest finds things.
const (
	tmpfsDir = "/dev/shm" // a tmpfs
	workDir  = "/var/tmp" // the overlay, in memory
)

// guestPath is where a guest finds a self-checking program. Bind mounts do not
// work on top of the host's own root, but there the programs are visible where
// they are. The mount point exists in every Debian root, so that nothing has to
// be created in it.
func guestPath(t testing.TB, name string) string {
	dir := guestPrograms(t)
	if *rootfsFlag != "/" {
		dir = "/srv"
	}
	return filepath.Join(dir, name)
}

// needs skips the test if a command is missing in the root filesystem.
func needs(t testing.TB, paths ...string) {
	t.Helper()
	for _, p := range paths {
		if m, _ := filepath.Glob(filepath.Join(*rootfsFlag, p)); len(m) == 0 {
			msg := fmt.Sprintf("%s is missing in %s: install the packages that this package's documentation lists", p, *rootfsFlag)
			if *requireFlag {
				t.Fatal(msg)
			}
			t.Skip(msg)
		}
	}
}

var guests struct {
	sync.Once
	dir string
	err error
}

// guestPrograms compiles guest/ and returns the directory of the programs.
func guestPrograms(t testing.TB) string {
	t.Helper()
	if _, err := exec.LookPath("gcc"); err != nil {
		if *requireFlag {
			t.Fatal("gcc is missing: apt-get install gcc libc6-dev")
		}
		t.Skip("gcc is missing: apt-get install gcc libc6-dev")
	}
	guests.Do(func() {
		guests.dir, guests.err = scratchDir("agentzip-guests-")
		if guests.err != nil {
			return
		}
		os.Chmod(guests.dir, 0o755)
		srcs, _ := filepath.Glob("guest/*.c")
		for _, src := range srcs {
			out := filepath.Join(guests.dir, strings.TrimSuffix(filepath.Base(src), ".c"))
			b, err := exec.Command("gcc", "-O2", "-Wall", "-Wextra", "-Werror", "-static", "-pthread", "-o", out, src).CombinedOutput()
			if err != nil {
				guests.err = fmt.Errorf("compiling %s (gcc and libc6-dev are needed): %w\n%s", src, err, b)
				return
			}
		}
		cmd := exec.Command("go", "build", "-o", filepath.Join(guests.dir, "gostress"), "./guest/gostress")
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if b, err := cmd.CombinedOutput(); err != nil {
			guests.err = fmt.Errorf("building gostress: %w\n%s", err, b)
		}
	})
	if guests.err != nil {
		t.Fatal(guests.err)
	}
	return guests.dir
}

// guestSpec is a container with the given command.
func guestSpec(t testing.TB, args ...string) fleet.Spec {
	// Before the sandbox starts: it need not notice files that appear later.
	guestPrograms(t)
	mounts := []fleet.Mount{{Target: tmpfsDir, Options: []string{"mode=1777"}}}
	if *rootfsFlag != "/" {
		mounts = append(mounts, fleet.Mount{Source: guestPrograms(t), Target: "/srv", Options: []string{"rbind", "ro"}})
	}
	return fleet.Spec{
		Rootfs:   *rootfsFlag,
		Args:     args,
		Hostname: "integrity",
		Cwd:      "/",
		Env:      []string{"HOME=/var/tmp", "LC_ALL=C.UTF-8", "TMPDIR=/var/tmp"},
		Mounts:   mounts,
		Capabilities: append([]string{"CAP_SYS_PTRACE", "CAP_IPC_LOCK", "CAP_SYS_NICE", "CAP_SYS_RESOURCE", "CAP_SYS_ADMIN"},
			fleet.DefaultCapabilities...),
	}
}

// box is one running sandbox of a test.
type box struct {
	t    testing.TB
	m    mode
	rt   *fleet.Runtime
	sb   *fleet.Sandbox
	done func() // stops the poller
}

// startBox starts a sandbox whose init only waits; commands are run in it.
func startBox(t testing.TB, m mode) *box {
	t.Helper()
	rt := newRuntime(t, m)
	bundle := t.TempDir()
	if err := fleet.WriteBundle(bundle, guestSpec(t, "/bin/sleep", "infinity")); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	sb, err := rt.Run(ctx, "box", bundle)
	if err != nil {
		t.Fatalf("starting a sandbox (%s): %v", m.name, err)
	}
	b := &box{t: t, m: m, rt: rt, sb: sb}
	b.done = pollStats(t, m, sb)
	t.Cleanup(b.done)
	return b
}

// pollStats asks for statistics, and now and then for a consistency check, while
// the guest works: both promise to be harmless at any time.
func pollStats(t testing.TB, m mode, sb *fleet.Sandbox) (stop func()) {
	if !m.evicts {
		return func() {}
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for i := 0; ; i++ {
			select {
			case <-ctx.Done():
				return
			case <-time.After(2500 * time.Millisecond):
			}
			st, err := sb.Stats(ctx)
			if ctx.Err() != nil || sb.Exited() {
				return
			}
			if err != nil {
				t.Errorf("agentzip stats while the guest works: %v", err)
				return
			}
			if st.ChecksumFailures != 0 {
				t.Errorf("agentzip stats: %d checksum failures", st.ChecksumFailures)
			}
			if i%3 == 2 {
				rep, err := sb.Check(ctx)
				if ctx.Err() != nil || sb.Exited() {
					return
				}
				if err != nil {
					t.Errorf("agentzip check while the guest works: %v", err)
					return
				}
				reportProblems(t, rep)
			}
		}
	}()
	return sync.OnceFunc(func() { cancel(); <-done })
}

func reportProblems(t testing.TB, rep control.CheckReport) {
	for _, p := range rep.Problems {
		t.Errorf("agentzip check: %s", p)
	}
}

// exec runs a command in the sandbox and returns what it printed. It must exit
// with 0 within the timeout.
func (b *box) exec(timeout time.Duration, args ...string) string {
	b.t.Helper()
	res, err := b.try(timeout, args...)
	if err != nil {
		b.t.Fatalf("%s: %v\nstdout: %s\nstderr: %s", strings.Join(args, " "), err, tail(res.Stdout, 3000), tail(res.Stderr, 3000))
	}
	if res.ExitCode != 0 {
		b.t.Fatalf("%s: exit code %d\nstdout: %s\nstderr: %s", strings.Join(args, " "), res.ExitCode, tail(res.Stdout, 3000), tail(res.Stderr, 3000))
	}
	return res.Stdout
}

// sh runs a shell script that stops at the first failing command.
func (b *box) sh(timeout time.Duration, script string) string {
	b.t.Helper()
	return b.exec(timeout, "/bin/bash", "-euo", "pipefail", "-c", script)
}

// try is exec without judging the exit code.
func (b *box) try(timeout time.Duration, args ...string) (fleet.ExecResult, error) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	res, err := b.sb.Exec(ctx, args...)
	if err != nil && ctx.Err() != nil {
		err = fmt.Errorf("did not end within %v: %w\n%s", timeout, err, stacks(b.rt, b.sb))
	}
	return res, err
}

// stacks asks a sandbox that hangs where it is.
func stacks(rt *fleet.Runtime, sb *fleet.Sandbox) string {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, rt.Binary(), "--root="+rt.Root(), "debug", "--stacks", sb.ID()).CombinedOutput()
	dst := filepath.Join(repoRoot(), "out", "integrity-failed")
	if os.MkdirAll(dst, 0o755) == nil {
		f := filepath.Join(dst, fmt.Sprintf("stacks-%d.txt", time.Now().Unix()))
		if os.WriteFile(f, out, 0o644) == nil {
			return fmt.Sprintf("sentry stacks are in %s (%v)", f, err)
		}
	}
	return string(out)
}

// evict evicts everything that is eligible; without a backend it just waits a
// little, so that the same test runs under a stock runsc.
func (b *box) evict() {
	b.t.Helper()
	evict(b.t, b.m, b.sb)
}

func evict(t testing.TB, m mode, sb *fleet.Sandbox) {
	t.Helper()
	if !m.evicts {
		time.Sleep(200 * time.Millisecond)
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	rep, err := sb.Evict(ctx)
	if err != nil {
		t.Fatalf("agentzip evict: %v", err)
	}
	t.Logf("evict: marked %d, evicted %d, aborted %d, rejected %d, skipped %d pages in %v; owned %d -> %d MiB",
		rep.MarkedPages, rep.EvictedPages, rep.AbortedPages, rep.RejectedPages, rep.SkippedPages,
		time.Duration(rep.ElapsedNS).Round(time.Millisecond), rep.OwnedBefore>>20, rep.OwnedAfter>>20)
}

// finish checks the backend's books while the sandbox still runs and ends it.
func (b *box) finish() {
	b.t.Helper()
	b.done()
	verifyBackend(b.t, b.m, b.sb)
	if mem, err := b.sb.Memory(); err == nil {
		b.t.Logf("%s: the memory file holds %d MiB of the host's memory", b.m.name, mem.GuestMemfd>>20)
	}
	endSandbox(b.t, b.sb)
}

func endSandbox(t testing.TB, sb *fleet.Sandbox) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := sb.Delete(ctx); err != nil {
		t.Errorf("deleting the sandbox: %v", err)
	}
}

// verifyBackend asserts that the run proved something: pages were evicted, came
// back, and everything that is stored is consistent.
func verifyBackend(t testing.TB, m mode, sb *fleet.Sandbox) {
	t.Helper()
	if !m.evicts {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	rep, err := sb.Check(ctx)
	if err != nil {
		t.Fatalf("agentzip check: %v", err)
	}
	reportProblems(t, rep)
	st, err := sb.Stats(ctx)
	if err != nil {
		t.Fatalf("agentzip stats: %v", err)
	}
	t.Logf("%s: evicted %d pages, restored %d, aborted %d; now %d MiB of guest memory in %d MiB; checked %d of %d stored pages; rejects %v",
		m.name, st.EvictedPagesTotal, st.RestoredPagesTotal, st.Faults.Aborted, st.GuestBytes>>20, st.OwnedBytes>>20,
		rep.CheckedPages, rep.StoredPages, st.Rejects)
	if st.EvictedPagesTotal == 0 {
		t.Error("no page was ever evicted: this run proves nothing")
	}
	if st.RestoredPagesTotal == 0 {
		t.Error("no page was ever restored: this run proves nothing")
	}
	if st.ChecksumFailures != 0 {
		t.Errorf("%d checksum failures", st.ChecksumFailures)
	}
}

// seconds picks the length of a guest program's run.
func seconds(ci, long int) int {
	switch {
	case *secondsFlag > 0:
		return *secondsFlag
	case *longFlag:
		return long
	default:
		return ci
	}
}

// longOnly skips a test that has no place in CI.
func longOnly(t testing.TB) {
	t.Helper()
	if !*longFlag {
		t.Skip("runs with -long only")
	}
}
