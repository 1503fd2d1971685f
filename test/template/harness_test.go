package template

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
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
		"an unpatched runsc of the same version, to compare with; what needs it is skipped if it is missing")
	longFlag    = flag.Bool("long", false, "run the long tests too, and the others for longer")
	requireFlag = flag.Bool("require", os.Getenv("AGENTZIP_REQUIRE") != "",
		"fail, rather than skip, where something that a test needs is missing")
	seedFlag = flag.Uint64("seed", 0, "seed of the guest programs (0: a new one each time)")
	xflags   = flag.String("xflags", "", "further flags for the runsc under test, separated by spaces")
)

func envOr(name, def string) string {
	if v := os.Getenv(name); v != "" {
		return v
	}
	return def
}

// rootPrefix starts the name of every runtime's root directory, so that what a
// killed test run left behind can be told from everything else.
const rootPrefix = "/run/agentzip-template-"

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
	if *seedFlag == 0 {
		*seedFlag = uint64(time.Now().UnixNano())%1_000_000 + 1
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
		undoAll()
		os.Exit(1)
	}()
	code := m.Run()
	undoAll()
	os.Exit(code)
}

// ---- what must not outlive the tests ----------------------------------------

var undo struct {
	sync.Mutex
	fns  map[int]func()
	next int
}

// later has f run by undoAll unless the function that it returns, which runs f
// too, was called before.
func later(f func()) func() {
	once := sync.OnceFunc(f)
	undo.Lock()
	defer undo.Unlock()
	if undo.fns == nil {
		undo.fns = make(map[int]func())
	}
	id := undo.next
	undo.next++
	undo.fns[id] = once
	return func() {
		once()
		undo.Lock()
		defer undo.Unlock()
		delete(undo.fns, id)
	}
}

func undoAll() {
	undo.Lock()
	var last int
	fns := make(map[int]func())
	for id, f := range undo.fns {
		fns[id] = f
		last = max(last, id)
	}
	undo.Unlock()
	// In reverse: sandboxes go before the folders that they use.
	for id := last; id >= 0; id-- {
		if f := fns[id]; f != nil {
			f()
		}
	}
}

// atExit has f run at the end of the test, or when the tests are interrupted.
func atExit(t testing.TB, f func()) {
	t.Cleanup(later(f))
}

// tempDir is t.TempDir for what has to go when the tests are interrupted, too:
// images are large.
func tempDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "agentzip-template-")
	if err != nil {
		t.Fatal(err)
	}
	atExit(t, func() { os.RemoveAll(dir) })
	return dir
}

// ---- runtimes and modes --------------------------------------------------------

// mode is one way to run a sandbox.
type mode struct {
	name   string
	binary string
	flags  []string
	// evicts says that the backend is on.
	evicts bool
	// maps says that applications map the template.
	maps bool
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
		b.agentzip = bytes.Contains(out, []byte("-agentzip-template"))
		v, _ := exec.Command(path, "--version").Output()
		b.version, _, _ = strings.Cut(string(v), "\n")
	}
	probed.Store(path, b)
	return b
}

func skip(t testing.TB, format string, args ...any) {
	t.Helper()
	if *requireFlag {
		t.Fatalf(format, args...)
	}
	t.Skipf(format, args...)
}

// underTest returns the runsc to test, or skips.
func underTest(t testing.TB) *runscInfo {
	t.Helper()
	if os.Geteuid() != 0 {
		skip(t, "sandboxes need root: run the tests as root")
	}
	b := probe(repoPath(*runtimeFlag))
	if errors.Is(b.err, os.ErrNotExist) {
		skip(t, "%s does not exist: run `make build` or name a runsc with -runtime", b.path)
	}
	if b.err != nil {
		t.Fatal(b.err)
	}
	if !b.agentzip {
		skip(t, "%s knows no templates: a stock runsc?", b.path)
	}
	return b
}

// modeStock is what results are compared with. It restores the same images.
func modeStock(t testing.TB) mode {
	t.Helper()
	b := probe(repoPath(*stockFlag))
	switch v := underTest(t).version; {
	case errors.Is(b.err, os.ErrNotExist):
		skip(t, "%s does not exist: run `make stock` or name a stock runsc with -stock", b.path)
	case b.err != nil:
		t.Fatal(b.err)
	case b.agentzip:
		skip(t, "%s is no stock runsc", b.path)
	case b.version != v:
		skip(t, "%s says %q and the runsc under test %q: an image is restored by the version that wrote it only", b.path, b.version, v)
	}
	return mode{name: "stock", binary: b.path}
}

// haveStock tells whether modeStock would skip.
func haveStock(t testing.TB) bool {
	b := probe(repoPath(*stockFlag))
	return b.err == nil && !b.agentzip && b.version == underTest(t).version
}

func agentzip(t testing.TB, name string, flags ...string) mode {
	b := underTest(t)
	return mode{
		name:   name,
		binary: b.path,
		flags:  append(append([]string{"--agentzip=on"}, flags...), strings.Fields(*xflags)...),
		evicts: true,
		maps:   true,
	}
}

// modeForced evicts all the time, whatever the guest does.
func modeForced(t testing.TB) mode {
	return agentzip(t, "forced", "--agentzip-test-evict-every=300ms")
}

// modeIdle evicts when the backend itself decides to: while the guest waits.
func modeIdle(t testing.TB) mode { return agentzip(t, "idle") }

// modeCopy copies each page of the template when it is used, instead of mapping
// it.
func modeCopy(t testing.TB) mode {
	m := agentzip(t, "copy", "--agentzip-template=copy", "--agentzip-test-evict-every=300ms")
	m.maps = false
	return m
}

// modeLoad reads the whole checkpoint, as a stock runsc does, and evicts.
func modeLoad(t testing.TB) mode {
	m := agentzip(t, "load", "--agentzip-template=load", "--agentzip-test-evict-every=300ms")
	m.maps = false
	return m
}

// runtime is a fleet.Runtime of a test.
type runtime struct {
	*fleet.Runtime
	m    mode
	logs string
}

// newRuntime returns a runtime that is closed, and checked for leftovers, when
// the test ends. Its logs are kept under out/ if the test fails.
func newRuntime(t testing.TB, m mode) *runtime {
	t.Helper()
	root, err := os.MkdirTemp(filepath.Dir(rootPrefix), filepath.Base(rootPrefix))
	if err != nil {
		t.Fatal(err)
	}
	logs := tempDir(t)
	logFile, err := os.OpenFile(filepath.Join(logs, "fleet.txt"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		t.Fatal(err)
	}
	frt, err := fleet.New(fleet.Options{
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
	rt := &runtime{frt, m, logs}
	closeRuntime := later(func() {
		if err := frt.Close(); err != nil {
			t.Errorf("cleaning up: %v", err)
		}
	})
	t.Cleanup(func() {
		var procs []procID
		for _, sb := range frt.Sandboxes() {
			procs = append(procs, processesOf(sb)...)
		}
		closeRuntime()
		assertGone(t, root, procs)
		logFile.Close()
		if t.Failed() {
			keepLogs(t, logs)
		}
	})
	return rt
}

// keepLogs copies the logs of a failed test where they can be looked at, and
// shows the ends of those that explain a dead sandbox.
func keepLogs(t testing.TB, logs string) {
	dst := filepath.Join(repoRoot(), "out", "template-failed", strings.ReplaceAll(t.Name(), "/", "-"))
	os.RemoveAll(dst)
	if err := os.CopyFS(dst, os.DirFS(logs)); err != nil {
		t.Logf("keeping the logs: %v", err)
		return
	}
	t.Logf("logs are in %s", dst)
	entries, _ := os.ReadDir(dst)
	for i, e := range entries {
		// The last sandboxes say most.
		if strings.Contains(e.Name(), ".boot.") && i < len(entries)-12 {
			continue
		}
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
				t.Logf("--- warnings in %s\n%s", e.Name(), tail(w, 3000))
			}
		}
	}
}

// warnings picks what may explain a failure out of a sentry's log.
func warnings(log string) string {
	var out strings.Builder
	for line := range strings.Lines(log) {
		if strings.Contains(line, "Args: [") || strings.Contains(line, "config.go") || strings.Contains(line, "limits.go") || strings.Contains(line, "filter.go") {
			continue
		}
		if line[0] == 'W' || line[0] == 'E' || line[0] == 'F' || strings.Contains(line, "panic") || strings.Contains(line, "fatal") {
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

// ---- processes ---------------------------------------------------------------

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

// processesOf lists the Sentry and the gofer of a sandbox and all their
// descendants, that is, the stubs.
func processesOf(sb *fleet.Sandbox) []procID {
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
	var out []procID
	for pid, in := range all {
		for p := pid; p > 1; p = all[p].ppid {
			if p == sb.Pid() || p == sb.GoferPid() {
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

// ---- guests --------------------------------------------------------------------

var guests struct {
	sync.Once
	dir string
	err error
}

// guestSources are compiled into one program each. Those of test/integrity
// check themselves in the same way as ours.
var guestSources = []string{"guest/*.c", "../integrity/guest/daemon.c", "../integrity/guest/racer.c", "../integrity/guest/memtorture.c"}

// guestPath is where a guest finds a program. Its root is the host's, so that
// is where the host finds it.
func guestPath(t testing.TB, name string) string {
	t.Helper()
	if _, err := exec.LookPath("gcc"); err != nil {
		skip(t, "gcc is missing: apt-get install gcc libc6-dev")
	}
	guests.Do(func() {
		guests.dir, guests.err = os.MkdirTemp("", "agentzip-template-guests-")
		if guests.err != nil {
			return
		}
		later(func() { os.RemoveAll(guests.dir) })
		os.Chmod(guests.dir, 0o755)
		for _, pattern := range guestSources {
			srcs, _ := filepath.Glob(pattern)
			for _, src := range srcs {
				out := filepath.Join(guests.dir, strings.TrimSuffix(filepath.Base(src), ".c"))
				b, err := exec.Command("gcc", "-O2", "-Wall", "-Wextra", "-Werror", "-I../integrity/guest", "-static", "-pthread", "-o", out, src).CombinedOutput()
				if err != nil {
					guests.err = fmt.Errorf("compiling %s (gcc and libc6-dev are needed): %w\n%s", src, err, b)
					return
				}
			}
		}
	})
	if guests.err != nil {
		t.Fatal(guests.err)
	}
	return filepath.Join(guests.dir, name)
}

// bundle writes the bundle that a program is started and restored with.
func bundle(t testing.TB, program string, args ...string) string {
	t.Helper()
	dir := tempDir(t)
	spec := fleet.Spec{
		Rootfs:   "/",
		Args:     append([]string{guestPath(t, program)}, args...),
		Hostname: "template",
		Cwd:      "/",
		Env:      []string{"HOME=/var/tmp", "LC_ALL=C.UTF-8", "TMPDIR=/var/tmp"},
		Mounts:   []fleet.Mount{{Target: "/dev/shm", Options: []string{"mode=1777"}}},
		Capabilities: append([]string{"CAP_SYS_PTRACE", "CAP_IPC_LOCK", "CAP_SYS_NICE", "CAP_SYS_RESOURCE", "CAP_SYS_ADMIN"},
			fleet.DefaultCapabilities...),
	}
	if err := fleet.WriteBundle(dir, spec); err != nil {
		t.Fatal(err)
	}
	return dir
}

func seedArg() string { return fmt.Sprintf("--seed=%d", *seedFlag) }

// guest is a running program that answers lines.
type guest struct {
	t      testing.TB
	rt     *runtime
	sb     *fleet.Sandbox
	bundle string
}

func deadline(d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	// The timer goes with the deadline, and a test ends before long.
	_ = cancel
	return ctx
}

// start runs a program until it says that it is ready.
func start(t testing.TB, rt *runtime, id, bundle string) *guest {
	t.Helper()
	ctx := deadline(3 * time.Minute)
	sb, err := rt.Run(ctx, id, bundle)
	if err != nil {
		t.Fatalf("starting %s: %v", id, err)
	}
	if line, err := sb.ReadLine(ctx); err != nil || line != "READY" {
		t.Fatalf("%s: %q, %v", id, line, err)
	}
	return &guest{t, rt, sb, bundle}
}

// restore starts a clone.
func restore(t testing.TB, rt *runtime, id, bundle, image string) *guest {
	t.Helper()
	g, err := tryRestore(t, rt, id, bundle, image)
	if err != nil {
		t.Fatalf("restoring %s: %v", id, err)
	}
	return g
}

// tryRestore is restore for any goroutine.
func tryRestore(t testing.TB, rt *runtime, id, bundle, image string) (*guest, error) {
	sb, err := rt.Restore(deadline(3*time.Minute), id, bundle, image)
	if err != nil {
		return nil, err
	}
	return &guest{t, rt, sb, bundle}, nil
}

// restoreAll restores n clones at once.
func restoreAll(t testing.TB, rt *runtime, n int, bundle, image string) []*guest {
	t.Helper()
	gs := make([]*guest, n)
	each(t, n, func(i int) (err error) {
		gs[i], err = tryRestore(t, rt, fmt.Sprintf("clone%d", i), bundle, image)
		return err
	})
	return gs
}

// each runs f for 0 to n-1 at once and ends the test if one fails.
func each(t testing.TB, n int, f func(i int) error) {
	t.Helper()
	errs := make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { errs[i] = f(i) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// ask sends one request. It does not end the test, so that it may be called
// from any goroutine.
func (g *guest) ask(req string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	reply, err := g.sb.Request(ctx, req)
	if err != nil {
		if ctx.Err() != nil {
			err = fmt.Errorf("%w\n%s", err, g.stacks())
		}
		return "", fmt.Errorf("%s: %s: %s: %w", g.rt.m.name, g.sb.ID(), req, err)
	}
	if !strings.HasPrefix(reply, "OK") || strings.Contains(reply, "FAIL") {
		return "", fmt.Errorf("%s: %s: %s: %s", g.rt.m.name, g.sb.ID(), req, reply)
	}
	return reply, nil
}

func (g *guest) must(req string) string {
	g.t.Helper()
	reply, err := g.ask(req)
	if err != nil {
		g.t.Fatal(err)
	}
	return reply
}

// stacks asks a sandbox that hangs where it is.
func (g *guest) stacks() string {
	ctx := deadline(20 * time.Second)
	out, err := exec.CommandContext(ctx, g.rt.Binary(), "--root="+g.rt.Root(), "debug", "--stacks", g.sb.ID()).CombinedOutput()
	file := filepath.Join(g.rt.logs, "stacks-"+g.sb.ID()+".txt")
	if werr := os.WriteFile(file, out, 0o644); werr != nil {
		return werr.Error()
	}
	return fmt.Sprintf("the Sentry's stacks are in %s (%v)", filepath.Base(file), err)
}

func (g *guest) checkpoint(image string, o fleet.CheckpointOptions) {
	g.t.Helper()
	if err := g.sb.Checkpoint(deadline(3*time.Minute), image, o); err != nil {
		g.t.Fatalf("checkpoint of %s: %v", g.sb.ID(), err)
	}
}

func (g *guest) end() {
	g.t.Helper()
	if err := g.sb.Delete(deadline(time.Minute)); err != nil {
		g.t.Errorf("deleting %s: %v", g.sb.ID(), err)
	}
}

func (g *guest) stats() control.Stats {
	g.t.Helper()
	st, err := g.sb.Stats(deadline(time.Minute))
	if err != nil {
		g.t.Fatalf("agentzip stats %s: %v", g.sb.ID(), err)
	}
	return st
}

// evict evicts everything that is eligible; without a backend it does nothing.
func (g *guest) evict() error {
	if !g.rt.m.evicts {
		return nil
	}
	_, err := g.sb.Evict(deadline(2 * time.Minute))
	if err != nil {
		return fmt.Errorf("agentzip evict %s: %w", g.sb.ID(), err)
	}
	return nil
}

func (g *guest) mustEvict() {
	g.t.Helper()
	if err := g.evict(); err != nil {
		g.t.Fatal(err)
	}
}

// check runs the backend's own check. It does not end the test.
func (g *guest) check() error {
	if !g.rt.m.evicts {
		return nil
	}
	rep, err := g.sb.Check(deadline(2 * time.Minute))
	if err != nil && strings.Contains(err.Error(), "too busy") {
		// What had to be looked at at rest could not be.
		err = nil
	}
	if err != nil {
		return fmt.Errorf("agentzip check %s: %w", g.sb.ID(), err)
	}
	if len(rep.Problems) != 0 {
		return fmt.Errorf("agentzip check %s: %s", g.sb.ID(), strings.Join(rep.Problems, "; "))
	}
	return nil
}

// usesTemplate asserts that the clone is what the test is about: with hardly
// anything of its own, most of its pages being the template's.
func (g *guest) usesTemplate() {
	g.t.Helper()
	if !g.rt.m.evicts || g.rt.m.name == "load" {
		return
	}
	st := g.stats()
	// A program that runs has used some of them already.
	p := st.Pages
	if got := p.Template + st.Faults.Demand + st.Faults.Prefetched; got < (p.Zero+p.Delta+p.Compressed+p.Raw)*2 || got < 1000 {
		g.t.Errorf("%s got too few pages from the template for the test to prove anything: %+v %+v", g.sb.ID(), p, st.Faults)
	}
}

// settle waits until a program that says "OK NAME ..." and ends has done so, and
// returns that line.
func (g *guest) finish(timeout time.Duration) (string, error) {
	ctx := deadline(timeout)
	line, err := g.sb.ReadLine(ctx)
	if err != nil {
		return "", fmt.Errorf("%s: %s: %w\n%s", g.rt.m.name, g.sb.ID(), err, g.stacks())
	}
	if !strings.HasPrefix(line, "OK ") {
		return "", fmt.Errorf("%s: %s: %s", g.rt.m.name, g.sb.ID(), line)
	}
	return line, nil
}

// ---- images --------------------------------------------------------------------

// makeImage starts a program, has it answer the requests, and checkpoints it.
func makeImage(t testing.TB, m mode, bundle string, requests ...string) (image string, replies []string) {
	t.Helper()
	rt := newRuntime(t, m)
	g := start(t, rt, "origin", bundle)
	for _, r := range requests {
		replies = append(replies, g.must(r))
	}
	image = filepath.Join(tempDir(t), "image")
	g.checkpoint(image, checkpointOptions)
	g.end()
	return image, replies
}

// imageSize is the size of the pages of an image.
func imageSize(t testing.TB, image string) int64 {
	t.Helper()
	fi, err := os.Stat(filepath.Join(image, "pages.img"))
	if err != nil {
		t.Fatal(err)
	}
	return fi.Size()
}

// pick is short in CI and long with -long.
func pick[T any](ci, long T) T {
	if *longFlag {
		return long
	}
	return ci
}

// longOnly skips a test that has no place in CI.
func longOnly(t testing.TB) {
	t.Helper()
	if !*longFlag {
		t.Skip("runs with -long only")
	}
}

func writeJSON(t testing.TB, path string, v any) {
	t.Helper()
	b, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, append(b, '\n'), 0o644); err != nil {
		t.Fatal(err)
	}
}

// checkpointOptions are those of a checkpoint that can be a template.
var checkpointOptions = fleet.CheckpointOptions{}

func removeImage(t testing.TB, image string) {
	t.Helper()
	if err := os.RemoveAll(image); err != nil {
		t.Fatal(err)
	}
}
