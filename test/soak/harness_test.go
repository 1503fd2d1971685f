package soak

import (
	"bytes"
	"cmp"
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
	requireFlag = flag.Bool("require", os.Getenv("AGENTZIP_REQUIRE") != "",
		"fail, rather than skip, where something that a test needs is missing")
	longFlag = flag.Bool("long", false, "ten rounds of 2,000 processes, and a soak of 30 minutes")
	soakFlag = flag.Duration("soak", 0, "how long clones work and wait (0: 20s, with -long 30m)")
	seedFlag = flag.Uint64("seed", 0, "seed of the steps and waits (0: a new one each time)")
	xflags   = flag.String("xflags", "", "further flags for the runsc under test, separated by spaces")
)

func envOr(name, def string) string {
	if v := os.Getenv(name); v != "" {
		return v
	}
	return def
}

// rootPrefix starts the name of the folder of a runtime, so that what a killed test run
// left behind can be told from everything else.
const rootPrefix = "/run/agentzip-soak-"

// bounded is how long one command or step may take: a hundred times as long as it
// should, since the machine may be busy.
const bounded = 5 * time.Minute

// trimAfter and deepenAfter are the flags' values here: shorter than the defaults of
// 2 s, so that a round takes less time.
const trimAfter, deepenAfter = 500 * time.Millisecond, 250 * time.Millisecond

func repoPath(p string) string {
	if filepath.IsAbs(p) {
		return p
	}
	dir, err := os.Getwd()
	if err != nil {
		return p
	}
	for d := dir; d != "/"; d = filepath.Dir(d) {
		if _, err := os.Stat(filepath.Join(d, "go.mod")); err == nil {
			return filepath.Join(d, p)
		}
	}
	return filepath.Join(dir, p)
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

var undo struct {
	sync.Mutex
	fns []func()
}

// atExit has f run once, at the end of the test or when the tests are interrupted; the
// last is the first to run.
func atExit(t testing.TB, f func()) {
	once := sync.OnceFunc(f)
	undo.Lock()
	undo.fns = append(undo.fns, once)
	undo.Unlock()
	t.Cleanup(once)
}

func undoAll() {
	undo.Lock()
	defer undo.Unlock()
	for i := len(undo.fns) - 1; i >= 0; i-- {
		undo.fns[i]()
	}
	undo.fns = nil
}

func skip(t testing.TB, format string, args ...any) {
	t.Helper()
	if *requireFlag {
		t.Fatalf(format, args...)
	}
	t.Skipf(format, args...)
}

func within(t testing.TB, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

// tempDir makes a folder that goes when the tests are interrupted, too. It is not below
// /tmp, which a sandbox covers with its own.
func tempDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("/var/tmp", "agentzip-soak-")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	atExit(t, func() { os.RemoveAll(dir) })
	return dir
}

// runtime is the runsc under test.
type runtime struct {
	*fleet.Runtime
	// evicts: it is no stock runsc.
	evicts bool
}

func newRuntime(t testing.TB) runtime {
	t.Helper()
	binary := repoPath(*runtimeFlag)
	if os.Geteuid() != 0 {
		skip(t, "sandboxes need root: run the tests as root")
	}
	out, err := exec.Command(binary, "flags").CombinedOutput()
	switch {
	case errors.Is(err, os.ErrNotExist):
		skip(t, "%s does not exist: run `make build` or name a runsc with -runtime", binary)
	case err != nil:
		t.Fatalf("%s flags: %v: %s", binary, err, out)
	}
	rt := runtime{evicts: bytes.Contains(out, []byte("-agentzip-idle"))}
	var flags []string
	if rt.evicts {
		flags = []string{"--agentzip-trim-after=" + trimAfter.String(), "--agentzip-deepen-after=" + deepenAfter.String()}
	}
	root, err := os.MkdirTemp(filepath.Dir(rootPrefix), filepath.Base(rootPrefix))
	if err != nil {
		t.Fatal(err)
	}
	rt.Runtime, err = fleet.New(fleet.Options{Binary: binary, Root: root, Flags: append(flags, strings.Fields(*xflags)...)})
	if err != nil {
		os.RemoveAll(root)
		t.Fatal(err)
	}
	atExit(t, func() {
		if err := rt.Close(); err != nil {
			t.Errorf("cleaning up: %v", err)
		}
	})
	return rt
}

// bundle compiles the guest program and writes a bundle that starts it. Its root is the
// host's, so that is where it finds it.
func bundle(t testing.TB, mib int) string {
	t.Helper()
	if _, err := exec.LookPath("gcc"); err != nil {
		skip(t, "gcc is missing: apt-get install gcc libc6-dev")
	}
	dir := tempDir(t)
	program := filepath.Join(dir, "soaker")
	out, err := exec.Command("gcc", "-O2", "-Wall", "-Wextra", "-Werror", "-I../integrity/guest", "-static", "-pthread", "-o", program, "guest/soaker.c").CombinedOutput()
	if err != nil {
		t.Fatalf("compiling guest/soaker.c (gcc and libc6-dev are needed): %v\n%s", err, out)
	}
	if err := fleet.WriteBundle(dir, fleet.Spec{
		Rootfs:   "/",
		Args:     []string{program, fmt.Sprintf("--mb=%d", mib)},
		Hostname: "soak",
		Mounts:   []fleet.Mount{{Target: "/dev/shm", Options: []string{"mode=1777"}}},
	}); err != nil {
		t.Fatal(err)
	}
	return dir
}

// guest is a sandbox with the guest program in it.
type guest struct {
	*fleet.Sandbox
	evicts bool
	model  model
	// right counts the steps with the right answer.
	right int
}

func start(t testing.TB, rt runtime, id, bundle string, mib int) *guest {
	t.Helper()
	ctx := within(t, bounded)
	sb, err := rt.Run(ctx, id, bundle)
	if err != nil {
		t.Fatalf("starting %s: %v", id, err)
	}
	if line, err := sb.ReadLine(ctx); err != nil || line != "READY" {
		t.Fatalf("%s: %q, %v", id, line, err)
	}
	return &guest{Sandbox: sb, evicts: rt.evicts, model: newModel(mib)}
}

// do has the guest take a step. It may be called on any goroutine.
func (g *guest) do(s step) error {
	ctx, cancel := context.WithTimeout(context.Background(), bounded)
	defer cancel()
	reply, err := g.Request(ctx, s.request)
	if err != nil {
		return fmt.Errorf("%s: %s: %w: %s", g.ID(), s.request, err, g.Stderr())
	}
	if want := fmt.Sprintf("OK %d", s.answer); reply != want {
		return fmt.Errorf("%s: %s: the answer is %q, not %q", g.ID(), s.request, reply, want)
	}
	g.right++
	return nil
}

// check has the runtime verify all that it stores.
func (g *guest) check() error {
	if !g.evicts {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), bounded)
	defer cancel()
	rep, err := g.Check(ctx)
	if err != nil {
		return fmt.Errorf("agentzip check %s: %w", g.ID(), err)
	}
	if len(rep.Problems) != 0 {
		return fmt.Errorf("agentzip check %s: %s", g.ID(), strings.Join(rep.Problems, "; "))
	}
	return nil
}

// ---- what a sandbox costs besides its guest memory ------------------------------

// cost is that of one sandbox. Sizes are in bytes.
type cost struct {
	// anon is the Sentry's anonymous memory without what it holds there for guest
	// memory, and gofer and stubs the other processes'.
	anon, gofer, stubs uint64
	// memfds is what the platform shares with the stubs.
	memfds     uint64
	pageTables uint64
	// spaces is how many address spaces the stubs have, processes how many there are
	// in all, the Sentry and the gofer included, and the rest is theirs.
	spaces, processes, fds, threads int
	// guest and owned are guest memory and what it costs.
	guest, owned uint64
}

func (c cost) String() string {
	kib := func(n uint64) uint64 { return n >> 10 }
	return fmt.Sprintf("KiB: Sentry %d, gofer %d, stubs %d, memfds %d, page tables %d, guest %d, owned %d; stubs %d, processes %d, descriptors %d, threads %d",
		kib(c.anon), kib(c.gofer), kib(c.stubs), kib(c.memfds), kib(c.pageTables), kib(c.guest), kib(c.owned), c.spaces, c.processes, c.fds, c.threads)
}

// outside is the sum of the parts.
func (c cost) outside() uint64 { return c.anon + c.gofer + c.stubs + c.memfds + c.pageTables }

// processes lists the Sentry, its descendants and the gofer.
func (g *guest) processes() ([]int, error) {
	children := map[int][]int{}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		// The name of a process may hold anything; what follows it does not.
		b, _ := os.ReadFile(filepath.Join("/proc", e.Name(), "stat"))
		f := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
		if len(f) < 2 {
			continue
		}
		if ppid, err := strconv.Atoi(f[1]); err == nil {
			children[ppid] = append(children[ppid], pid)
		}
	}
	all := []int{g.Pid(), g.GoferPid()}
	for i := 0; i < len(all); i++ {
		all = append(all, children[all[i]]...)
	}
	return all, nil
}

// measure looks from the host, which the sandbox does not notice.
func (g *guest) measure() (cost, error) {
	m, err := g.Memory()
	if err != nil {
		return cost{}, fmt.Errorf("%w: %s", err, g.Stderr())
	}
	c := cost{
		anon:       m.Sentry.PSSAnon + m.Sentry.SwapPSS,
		gofer:      m.Gofer.PSSAnon + m.Gofer.SwapPSS,
		stubs:      m.Stubs.PSSAnon + m.Stubs.SwapPSS,
		memfds:     m.OtherMemfd,
		pageTables: m.Sentry.PageTables + m.Gofer.PageTables + m.Stubs.PageTables,
		spaces:     m.Stubs.AddressSpaces,
		guest:      m.GuestMemfd,
	}
	procs, err := g.processes()
	if err != nil {
		return cost{}, err
	}
	c.processes = len(procs)
	for _, pid := range procs {
		for dir, n := range map[string]*int{"fd": &c.fds, "task": &c.threads} {
			entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/%s", pid, dir))
			if err != nil && !errors.Is(err, os.ErrNotExist) {
				return cost{}, err
			}
			*n += len(entries)
		}
	}
	return c, nil
}

// floor waits until a waiting sandbox is as small as it gets, and measures it: nothing
// has changed for a while that is longer than what is done in a wait takes to begin,
// and the runtime says that it has been a wait for as long.
func (g *guest) floor() (cost, error) {
	const every, window = 250 * time.Millisecond, time.Second
	const long = trimAfter + 4*deepenAfter + 500*time.Millisecond
	var last cost
	var cpu time.Duration
	since := time.Now()
	for end := time.Now().Add(bounded); time.Now().Before(end); time.Sleep(every) {
		c, err := g.measure()
		if err != nil {
			return c, err
		}
		now, err := g.CPUTime()
		if err != nil {
			return c, err
		}
		// A tick or two is what the Sentry's own timers take.
		if diff(c.outside(), last.outside()) > 64<<10 || diff(c.guest, last.guest) > 64<<10 || now-cpu > 20*time.Millisecond {
			since = time.Now()
		}
		last, cpu = c, now
		if time.Since(since) < window {
			continue
		}
		if !g.evicts {
			return c, nil
		}
		st, err := g.stats()
		if err != nil {
			return c, err
		}
		if st.Phase.State == "waiting" && time.Duration(st.Phase.SinceNS) > long {
			held := st.StoreBytes + st.MetadataBytes
			c.anon -= min(c.anon, held)
			c.guest, c.owned = st.GuestBytes, st.OwnedBytes
			return c, nil
		}
		since = time.Now().Add(every - window)
	}
	return last, fmt.Errorf("%s does not get quiet: %v", g.ID(), last)
}

func (g *guest) stats() (control.Stats, error) {
	ctx, cancel := context.WithTimeout(context.Background(), bounded)
	defer cancel()
	return g.Stats(ctx)
}

func diff(a, b uint64) uint64 { return max(a, b) - min(a, b) }

// grown says in what way a sandbox has grown between early waits and late ones, or "".
// Of each part it compares the medians. Memory may be 1 MiB or 5 % more: what a garbage
// collection leaves is not the same each time, and the tables fill up that the Go
// runtime keeps of the places where memory was allocated. Measured, in KiB: 8495 after
// 100 short processes, 8531 after 400, 9722 after 700, 9589 after 1,000; in another run
// 9453 after 2,100, 10397 after 16,100, 10343 after 20,100, with as many live objects in
// the heap from the second burst on. So early waits are those after a warm-up. There may
// be no more processes or descriptors, and of threads only as many as the Go runtime of
// one sandbox makes when the machine is busy.
func grown(early, late []cost) string {
	var out []string
	for _, p := range []struct {
		name string
		of   func(cost) uint64
	}{
		{"the Sentry's memory", func(c cost) uint64 { return c.anon }},
		{"the gofer's memory", func(c cost) uint64 { return c.gofer }},
		{"the stubs' memory", func(c cost) uint64 { return c.stubs }},
		{"other memory files", func(c cost) uint64 { return c.memfds }},
		{"page tables", func(c cost) uint64 { return c.pageTables }},
		{"guest memory", func(c cost) uint64 { return c.guest }},
	} {
		before, after := median(early, p.of), median(late, p.of)
		if after > before+max(1<<20, before/20) {
			out = append(out, fmt.Sprintf("%s by %d KiB", p.name, (after-before)>>10))
		}
	}
	for _, p := range []struct {
		name  string
		of    func(cost) int
		slack int
	}{
		{"stubs", func(c cost) int { return c.spaces }, 0},
		{"processes", func(c cost) int { return c.processes }, 0},
		{"descriptors", func(c cost) int { return c.fds }, 0},
		{"threads", func(c cost) int { return c.threads }, 8},
	} {
		before, after := median(early, p.of), median(late, p.of)
		if after > before+p.slack {
			out = append(out, fmt.Sprintf("%d more %s", after-before, p.name))
		}
	}
	return strings.Join(out, ", ")
}

func median[T cmp.Ordered](costs []cost, of func(cost) T) T {
	var all []T
	for _, c := range costs {
		all = append(all, of(c))
	}
	slices.Sort(all)
	return all[len(all)/2]
}
