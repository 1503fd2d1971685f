package phase

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
	roundsFlag = flag.Int("rounds", 3, "how often each shape of program is asked for short and for long work")
	waitFlag   = flag.Duration("wait", 1500*time.Millisecond, "how long a sandbox is left alone after an answer")

	longFlag countFlag
)

func init() {
	flag.Var(&longFlag, "long", "measure what waiting sandboxes cost: 16, or so many with -long=N")
	// Given to all tests of sandboxes alike.
	flag.String("stock", "", "unused: these tests need no stock runsc")
}

// A countFlag is a flag that is given with or without a number.
type countFlag int

const countDefault = 16

func (c *countFlag) String() string   { return strconv.Itoa(int(*c)) }
func (c *countFlag) IsBoolFlag() bool { return true }

func (c *countFlag) Set(s string) error {
	switch s {
	case "true":
		*c = countDefault
		return nil
	case "false":
		*c = 0
		return nil
	}
	n, err := strconv.Atoi(s)
	if err != nil || n < 0 {
		return errors.New("want a number of sandboxes")
	}
	*c = countFlag(n)
	return nil
}

func envOr(name, def string) string {
	if v := os.Getenv(name); v != "" {
		return v
	}
	return def
}

// rootPrefix starts the name of every folder of a runtime, so that what a killed
// test run left behind can be told from everything else.
const rootPrefix = "/run/agentzip-phase-"

// python is the interpreter of the host, whose root filesystem is the guests' too.
const python = "/usr/bin/python3"

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

func TestMain(m *testing.M) {
	flag.Parse()
	// Sandboxes do not outlive a run that was killed, their folders do. They are left
	// alone: process ids that runsc wrote down there may be other processes' by now.
	if stale, _ := filepath.Glob(rootPrefix + "*"); len(stale) != 0 {
		fmt.Fprintf(os.Stderr, "left behind by a run that was killed, or in use by another: %s\n", strings.Join(stale, " "))
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
	printTable(os.Stdout)
	os.Exit(code)
}

// ---- what must not outlive the tests ----------------------------------------

var undo struct {
	sync.Mutex
	fns []func()
}

// atExit has f run once, at the end of the test or when the tests are
// interrupted; the last is the first to run. With a nil t it is the end of all tests.
func atExit(t testing.TB, f func()) {
	once := sync.OnceFunc(f)
	undo.Lock()
	undo.fns = append(undo.fns, once)
	undo.Unlock()
	if t != nil {
		t.Cleanup(once)
	}
}

func undoAll() {
	undo.Lock()
	defer undo.Unlock()
	for i := len(undo.fns) - 1; i >= 0; i-- {
		undo.fns[i]()
	}
	undo.fns = nil
}

func tempDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "agentzip-phase-")
	if err != nil {
		t.Fatal(err)
	}
	atExit(t, func() { os.RemoveAll(dir) })
	return dir
}

func skip(t testing.TB, format string, args ...any) {
	t.Helper()
	if *requireFlag {
		t.Fatalf(format, args...)
	}
	t.Skipf(format, args...)
}

// binary returns the runsc to test, or skips.
func binary(t testing.TB) string {
	t.Helper()
	if os.Geteuid() != 0 {
		skip(t, "sandboxes need root: run the tests as root")
	}
	path := *runtimeFlag
	if !filepath.IsAbs(path) {
		path = filepath.Join(repoRoot(), path)
	}
	out, err := exec.Command(path, "flags").CombinedOutput()
	if errors.Is(err, os.ErrNotExist) {
		skip(t, "%s does not exist: run `make build` or name a runsc with -runtime", path)
	}
	if err != nil {
		t.Fatalf("%s flags: %v: %s", path, err, out)
	}
	if !bytes.Contains(out, []byte("-agentzip-idle")) {
		skip(t, "%s recognises no waits: a stock runsc?", path)
	}
	return path
}

func deadline(d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	// The timer goes with the deadline, and a test ends before long.
	_ = cancel
	return ctx
}

// ---- guest programs -------------------------------------------------------------

var guests struct {
	sync.Once
	dir string
	err error
}

// guestPath returns where the guest finds a program: goguest, server.py, server.js.
func guestPath(t testing.TB, name string) string {
	t.Helper()
	if _, err := os.Stat(python); err != nil {
		skip(t, "%s is missing: apt-get install python3", python)
	}
	// Before the first sandbox starts: it need not notice files that appear later.
	guests.Do(func() {
		if guests.dir, guests.err = os.MkdirTemp("", "agentzip-phase-guest-"); guests.err != nil {
			return
		}
		atExit(nil, func() { os.RemoveAll(guests.dir) })
		if guests.err = os.Chmod(guests.dir, 0o755); guests.err != nil {
			return
		}
		for _, script := range []string{"server.py", "server.js"} {
			b, err := os.ReadFile(filepath.Join("guest", script))
			if err == nil {
				err = os.WriteFile(filepath.Join(guests.dir, script), b, 0o644)
			}
			if err != nil {
				guests.err = err
				return
			}
		}
		cmd := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-o", filepath.Join(guests.dir, "goguest"), "./guest/goguest")
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if b, err := cmd.CombinedOutput(); err != nil {
			guests.err = fmt.Errorf("building goguest (the go command is needed): %w\n%s", err, b)
		}
	})
	if guests.err != nil {
		t.Fatal(guests.err)
	}
	return filepath.Join(guests.dir, name)
}

// server are the arguments that start server.py.
func server(t testing.TB, args ...string) []string {
	// Bytecode would be written, to the sandbox's memory.
	return append([]string{python, "-B", guestPath(t, "server.py")}, args...)
}

// ---- sandboxes -----------------------------------------------------------------

// newRuntime returns a runtime that is closed when the test ends. Its logs are
// kept under out/ if the test fails.
func newRuntime(t testing.TB, flags ...string) *fleet.Runtime {
	t.Helper()
	path := binary(t)
	root, err := os.MkdirTemp(filepath.Dir(rootPrefix), filepath.Base(rootPrefix))
	if err != nil {
		t.Fatal(err)
	}
	logs := tempDir(t)
	logFile, err := os.Create(filepath.Join(logs, "fleet.txt"))
	if err != nil {
		t.Fatal(err)
	}
	rt, err := fleet.New(fleet.Options{
		Binary: path,
		Root:   root,
		Flags:  append([]string{"--debug", "--debug-log=" + logs + "/", "--panic-log=" + logs + "/panic.txt"}, flags...),
		Log:    logFile,
	})
	if err != nil {
		os.RemoveAll(root)
		t.Fatal(err)
	}
	atExit(t, func() {
		if err := rt.Close(); err != nil {
			t.Errorf("cleaning up: %v", err)
		}
		logFile.Close()
		if t.Failed() {
			dst := filepath.Join(repoRoot(), "out", "phase-failed", strings.ReplaceAll(t.Name(), "/", "-"))
			os.RemoveAll(dst)
			t.Logf("logs are in %s (%v)", dst, os.CopyFS(dst, os.DirFS(logs)))
		}
	})
	return rt
}

// A guest is a sandbox with a program in it.
type guest struct {
	t  testing.TB
	rt *fleet.Runtime
	sb *fleet.Sandbox
	// ask has the program compute for so many milliseconds and returns when it
	// has answered. It may be called by another goroutine than the test's.
	ask func(ms int) error
	// beats is set if something in the program runs now and then.
	beats bool
}

// in returns the guest for a subtest.
func (g *guest) in(t testing.TB) *guest {
	sub := *g
	sub.t = t
	return &sub
}

// start runs a program that writes READY to its standard output. Unless ask is
// replaced it answers lines from its standard input.
func start(t testing.TB, rt *fleet.Runtime, id string, args ...string) *guest {
	t.Helper()
	g := launch(t, rt, id, args...)
	if line, err := g.sb.ReadLine(deadline(time.Minute)); err != nil || line != "READY" {
		t.Fatalf("%s: %q, %v, want READY", id, line, err)
	}
	return g
}

// launch runs a program.
func launch(t testing.TB, rt *fleet.Runtime, id string, args ...string) *guest {
	t.Helper()
	guestPath(t, "")
	dir := tempDir(t)
	if err := fleet.WriteBundle(dir, fleet.Spec{
		Rootfs:   "/",
		Args:     args,
		Hostname: "phase",
		Env:      []string{"LC_ALL=C.UTF-8", "HOME=/var/tmp"},
		Mounts:   []fleet.Mount{{Target: "/dev/shm", Options: []string{"mode=1777"}}},
	}); err != nil {
		t.Fatal(err)
	}
	sb, err := rt.Run(deadline(2*time.Minute), id, dir)
	if err != nil {
		t.Fatalf("starting %s: %v", id, err)
	}
	g := &guest{t: t, rt: rt, sb: sb}
	g.ask = func(ms int) error { return g.line(fmt.Sprintf("work %d", ms), "OK") }
	return g
}

// line sends a line and checks the answer.
func (g *guest) line(line, want string) error {
	got, err := g.sb.Request(deadline(time.Minute), line)
	if err == nil && got != want {
		err = fmt.Errorf("%s: the guest answered %q, want %q", line, got, want)
	}
	return err
}

// number sends a line and returns the number that is the answer.
func (g *guest) number(line string) int {
	g.t.Helper()
	got, err := g.sb.Request(deadline(time.Minute), line)
	if err != nil {
		g.t.Fatal(err)
	}
	n, err := strconv.Atoi(got)
	if err != nil {
		g.t.Fatalf("%s: the guest answered %q, want a number", line, got)
	}
	return n
}

// exec runs a command in the sandbox, which has to succeed.
func (g *guest) exec(args ...string) (string, error) {
	res, err := g.sb.Exec(deadline(time.Minute), args...)
	if err == nil && res.ExitCode != 0 {
		err = fmt.Errorf("%q in the sandbox: exit code %d: %s", args, res.ExitCode, res.Stderr)
	}
	return strings.TrimSpace(res.Stdout), err
}

// hint runs "agentzip hint".
func (g *guest) hint(phase string) {
	g.t.Helper()
	cmd := exec.Command(g.rt.Binary(), "--root="+g.rt.Root(), "agentzip", "hint", "--phase="+phase, g.sb.ID())
	if b, err := cmd.CombinedOutput(); err != nil {
		g.t.Fatalf("agentzip hint --phase=%s: %v: %s", phase, err, b)
	}
}

// ---- what the runtime says -------------------------------------------------------

// A sample is what the runtime said of the phase at a time between asked and at.
type sample struct {
	asked, at time.Time
	control.Phase
}

// changed is when the state began.
func (s sample) changed() time.Time { return s.at.Add(-time.Duration(s.SinceNS)) }

func (s sample) waiting() bool { return s.State == "waiting" }

func (s sample) String() string {
	return fmt.Sprintf("%s for %v (%s; waits %d, beats %d, idle %v)", s.State, time.Duration(s.SinceNS).Round(time.Millisecond),
		s.Why, s.Waits, s.Beats, time.Duration(s.IdleNS))
}

// look asks for the phase.
func (g *guest) look() sample {
	g.t.Helper()
	s := sample{asked: time.Now()}
	stats, err := g.sb.Stats(deadline(time.Minute))
	if err != nil {
		g.t.Fatalf("agentzip stats %s: %v", g.sb.ID(), err)
	}
	s.at, s.Phase = time.Now(), stats.Phase
	return s
}

// pollInterval is the time between two looks, without what a look takes.
const pollInterval = 50 * time.Millisecond

// watch looks until stop says that it is enough, at least once.
func (g *guest) watch(stop func(sample) bool) []sample {
	g.t.Helper()
	var out []sample
	for {
		s := g.look()
		out = append(out, s)
		if stop(s) {
			return out
		}
		time.Sleep(pollInterval)
	}
}

// watchFor looks for so long.
func (g *guest) watchFor(d time.Duration) []sample {
	g.t.Helper()
	end := time.Now().Add(d)
	return g.watch(func(s sample) bool { return s.at.After(end) })
}

// during looks as long as f runs.
func (g *guest) during(f func() error) ([]sample, error) {
	g.t.Helper()
	done := make(chan error, 1)
	go func() { done <- f() }()
	var err error
	ended := false
	samples := g.watch(func(sample) bool {
		select {
		case err = <-done:
			ended = true
		default:
		}
		return ended
	})
	return samples, err
}

// settleTime is how long an idle sandbox may take until it has to wait, whatever it
// did before: far longer than -wait.
const settleTime = 10 * time.Second

// settle returns the first look at which the sandbox waits.
func (g *guest) settle() sample {
	g.t.Helper()
	last, ok := g.waitingFor(0)
	if !ok {
		g.t.Fatalf("%s is idle and not recognised as waiting within %v: %v", g.sb.ID(), settleTime, last)
	}
	return last
}

// waitingFor returns the first look at which the sandbox waits for so long, or else
// the last one of settleTime.
func (g *guest) waitingFor(d time.Duration) (last sample, ok bool) {
	g.t.Helper()
	calm := func(s sample) bool { return s.waiting() && s.SinceNS >= uint64(d) }
	end := time.Now().Add(settleTime)
	samples := g.watch(func(s sample) bool { return calm(s) || s.at.After(end) })
	last = samples[len(samples)-1]
	return last, calm(last)
}

// history is a list of samples as a person reads it, times from a start. Of those
// that say the same it has the first and the last.
func history(start time.Time, samples []sample) string {
	same := func(a, b sample) bool { return a.State == b.State && a.Waits == b.Waits && a.Why == b.Why }
	var b strings.Builder
	for i, s := range samples {
		if i > 0 && i < len(samples)-1 && same(s, samples[i-1]) && same(s, samples[i+1]) {
			continue
		}
		fmt.Fprintf(&b, "\n  %6d ms: %v", s.at.Sub(start).Milliseconds(), s)
	}
	return b.String()
}
