package pool

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
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"runsc-agentzip/pkg/control"
	"runsc-agentzip/pkg/fleet"
	"runsc-agentzip/pkg/pool/server"
)

var (
	runtimeFlag = flag.String("runtime", envOr("AGENTZIP_RUNTIME", "bin/runsc-agentzip"),
		"the runsc under test; a relative path is taken from the top of the repository")
	requireFlag = flag.Bool("require", os.Getenv("AGENTZIP_REQUIRE") != "",
		"fail, rather than skip, where something that a test needs is missing")
)

func init() {
	// Given to all tests of sandboxes alike.
	flag.String("stock", "", "unused: these tests need no stock runsc")
}

func envOr(name, def string) string {
	if v := os.Getenv(name); v != "" {
		return v
	}
	return def
}

// rootPrefix starts the name of every folder of a runtime, so that what a killed
// test run left behind can be told from everything else.
const rootPrefix = "/run/agentzip-pool-"

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
	fns []func()
}

// atExit has f run once, at the end of the test or when the tests are
// interrupted; the last is the first to run.
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

func tempDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "agentzip-pool-")
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
	if !bytes.Contains(out, []byte("-agentzip-pool")) {
		skip(t, "%s knows no pool: a stock runsc?", path)
	}
	return path
}

func deadline(d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	// The timer goes with the deadline, and a test ends before long.
	_ = cancel
	return ctx
}

// eventually waits until f returns nil.
func eventually(t testing.TB, what string, f func() error) {
	t.Helper()
	var err error
	for end := time.Now().Add(90 * time.Second); time.Now().Before(end); time.Sleep(200 * time.Millisecond) {
		if err = f(); err == nil {
			return
		}
	}
	t.Fatalf("%s: %v", what, err)
}

// ---- pools -------------------------------------------------------------------

// folder returns one for a pool's socket, which has to have a short path.
func folder(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp(filepath.Dir(rootPrefix), "agentzip-sock-")
	if err != nil {
		t.Fatal(err)
	}
	atExit(t, func() { os.RemoveAll(dir) })
	return dir
}

// A pool is "agentzip pool serve".
type pool struct {
	t      testing.TB
	binary string
	socket string
	cmd    *exec.Cmd
	log    string
}

// launchPool starts a pool.
func launchPool(t testing.TB, socket string, flags ...string) *pool {
	t.Helper()
	p := &pool{t: t, binary: binary(t), socket: socket, log: filepath.Join(tempDir(t), "pool.txt")}
	out, err := os.Create(p.log)
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	// The time-out is for a test that was killed.
	p.cmd = exec.Command(p.binary, append([]string{"agentzip", "pool", "serve", "--socket=" + socket, "--idle-exit=5m"}, flags...)...)
	p.cmd.Stdout, p.cmd.Stderr = out, out
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	atExit(t, func() {
		if t.Failed() {
			b, _ := os.ReadFile(p.log)
			var out []byte
			if p.cmd.ProcessState == nil {
				out, _ = exec.Command(p.binary, "agentzip", "pool", "stats", "--socket="+socket).CombinedOutput()
			}
			t.Logf("--- the pool's log\n%s\n%s", b, out)
		}
		p.kill()
	})
	return p
}

// startPool starts a pool and waits until it answers.
func startPool(t testing.TB, socket string, flags ...string) *pool {
	t.Helper()
	p := launchPool(t, socket, flags...)
	eventually(t, "starting a pool", func() error {
		if p.cmd.ProcessState != nil {
			t.Fatalf("the pool has ended")
		}
		_, err := p.stats()
		return err
	})
	return p
}

// kill ends the pool at once.
func (p *pool) kill() {
	if p.cmd.ProcessState == nil {
		_ = p.cmd.Process.Kill()
		_ = p.cmd.Wait()
	}
}

// end has the pool end in order.
func (p *pool) end() {
	p.t.Helper()
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		p.t.Fatal(err)
	}
	if err := p.cmd.Wait(); err != nil {
		p.t.Errorf("the pool ended with %v", err)
	}
	if _, err := os.Lstat(p.socket); !errors.Is(err, os.ErrNotExist) {
		p.t.Errorf("the pool left its socket behind (%v)", err)
	}
}

func (p *pool) stats() (s server.Stats, err error) {
	out, err := exec.Command(p.binary, "agentzip", "pool", "stats", "-json", "--socket="+p.socket).Output()
	if err != nil {
		return s, explain(err)
	}
	return s, json.Unmarshal(out, &s)
}

func explain(err error) error {
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return fmt.Errorf("%w: %s", err, exit.Stderr)
	}
	return err
}

// endByLog ends a pool that somebody else has started, by what it wrote to its log.
func endByLog(t testing.TB, socket string) {
	b, err := os.ReadFile(socket + ".log")
	if err != nil {
		return
	}
	for _, m := range regexp.MustCompile(`serving at \S+, pid (\d+)`).FindAllSubmatch(b, -1) {
		pid, _ := strconv.Atoi(string(m[1]))
		cmdline, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if err != nil || !bytes.Contains(cmdline, []byte("--socket="+socket)) {
			continue
		}
		_ = syscall.Kill(pid, syscall.SIGTERM)
		eventually(t, "ending the pool", func() error {
			if b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid)); err == nil && !bytes.Contains(b, []byte(") Z ")) {
				return fmt.Errorf("process %d lives", pid)
			}
			return nil
		})
	}
}

// ---- sandboxes -----------------------------------------------------------------

// newRuntime returns a runtime that is closed when the test ends. Its logs are
// kept under out/ if the test fails.
func newRuntime(t testing.TB, flags ...string) *fleet.Runtime {
	t.Helper()
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
		Binary: binary(t),
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
			dst := filepath.Join(repoRoot(), "out", "pool-failed", strings.ReplaceAll(t.Name(), "/", "-"), filepath.Base(root))
			os.RemoveAll(dst)
			t.Logf("logs are in %s (%v)", dst, os.CopyFS(dst, os.DirFS(logs)))
		}
	})
	return rt
}

var program struct {
	sync.Once
	dir string
	err error
}

// bundle writes the bundle that a guest is started and restored with. Its
// arguments are those of /sibling unless others are given.
func bundle(t testing.TB, annotations map[string]string, args ...string) string {
	t.Helper()
	if _, err := exec.LookPath("gcc"); err != nil {
		skip(t, "gcc is missing: apt-get install gcc libc6-dev")
	}
	program.Do(func() {
		if program.dir, program.err = os.MkdirTemp("", "agentzip-pool-guest-"); program.err != nil {
			return
		}
		undo.Lock()
		undo.fns = append(undo.fns, func() { os.RemoveAll(program.dir) })
		undo.Unlock()
		os.Chmod(program.dir, 0o755)
		for _, name := range []string{"sibling", "burst"} {
			b, err := exec.Command("gcc", "-O2", "-Wall", "-Wextra", "-Werror", "-I../integrity/guest", "-static", "-pthread",
				"-o", filepath.Join(program.dir, name), "guest/"+name+".c").CombinedOutput()
			if err != nil {
				program.err = fmt.Errorf("compiling the guest %s (gcc and libc6-dev are needed): %w\n%s", name, err, b)
				return
			}
		}
	})
	if program.err != nil {
		t.Fatal(program.err)
	}
	if len(args) == 0 {
		args = []string{"/sibling"}
	}
	dir := tempDir(t)
	if err := fleet.WriteBundle(dir, fleet.Spec{
		Rootfs:      program.dir,
		Args:        args,
		Annotations: annotations,
	}); err != nil {
		t.Fatal(err)
	}
	return dir
}

// domain are the annotations of a sandbox of the domain.
func domain(name string) map[string]string {
	return map[string]string{"dev.agentzip.domain": name}
}

// A guest is a running program that answers lines.
type guest struct {
	t  testing.TB
	sb *fleet.Sandbox
}

// start runs the program until it says that it is ready.
func start(t testing.TB, rt *fleet.Runtime, id, bundle string, opts ...fleet.StartOption) *guest {
	t.Helper()
	ctx := deadline(2 * time.Minute)
	sb, err := rt.Run(ctx, id, bundle, opts...)
	if err != nil {
		t.Fatalf("starting %s: %v", id, err)
	}
	if line, err := sb.ReadLine(ctx); err != nil || line != "READY" {
		t.Fatalf("%s: %q, %v", id, line, err)
	}
	return &guest{t, sb}
}

func restore(t testing.TB, rt *fleet.Runtime, id, bundle, image string) *guest {
	t.Helper()
	sb, err := rt.Restore(deadline(2*time.Minute), id, bundle, image)
	if err != nil {
		t.Fatalf("restoring %s: %v", id, err)
	}
	return &guest{t, sb}
}

// template returns an image of the program that bundle starts with the arguments.
func template(t testing.TB, args ...string) string {
	t.Helper()
	rt := newRuntime(t)
	g := start(t, rt, "origin", bundle(t, nil, args...))
	image := filepath.Join(tempDir(t), "image")
	if err := g.sb.Checkpoint(deadline(2*time.Minute), image, fleet.CheckpointOptions{}); err != nil {
		t.Fatal(err)
	}
	return image
}

// must has the guest do something.
func (g *guest) must(format string, args ...any) {
	g.t.Helper()
	req := fmt.Sprintf(format, args...)
	reply, err := g.sb.Request(deadline(2*time.Minute), req)
	if err != nil || reply != "OK" {
		g.t.Fatalf("%s: %s: %q, %v", g.sb.ID(), req, reply, err)
	}
}

func (g *guest) stats() control.Stats {
	g.t.Helper()
	s, err := g.sb.Stats(deadline(time.Minute))
	if err != nil {
		g.t.Fatalf("agentzip stats %s: %v", g.sb.ID(), err)
	}
	return s
}

func (g *guest) evict() {
	g.t.Helper()
	if _, err := g.sb.Evict(deadline(time.Minute)); err != nil {
		g.t.Fatalf("agentzip evict %s: %v", g.sb.ID(), err)
	}
}

// check has the runtime and the guest look at all of its memory.
func (g *guest) check() {
	g.t.Helper()
	r, err := g.sb.Check(deadline(time.Minute))
	if err != nil || len(r.Problems) != 0 {
		g.t.Errorf("agentzip check %s: %v, %q", g.sb.ID(), err, r.Problems)
	}
	g.must("check")
}

// sharing waits until the guest has at least so many pages in the pool. What the
// pool did not ask for at once, or not tell of, it finds when the pages are evicted
// the next time: the guest looks at them now and then.
func (g *guest) sharing(pages uint64) {
	g.t.Helper()
	last := time.Now()
	eventually(g.t, g.sb.ID()+" shares", func() error {
		s := g.stats()
		if s.Pages.Pool >= pages && s.Pool.State == "connected" {
			return nil
		}
		if time.Since(last) > 10*time.Second {
			g.must("check")
			last = time.Now()
		}
		return fmt.Errorf("%d pages in the pool, want %d: %+v, %+v", s.Pages.Pool, pages, s.Pages, s.Pool)
	})
}

// private checks that the guest shares nothing. Being connected has a price.
func (g *guest) private(state string) {
	g.t.Helper()
	if s := g.stats(); s.Pages.Pool != 0 || s.PoolShareBytes != 0 && state != "connected" || s.Pool.State != state {
		g.t.Errorf("%s has %d pages in the pool, a share of %d bytes, state %q: want none and %q", g.sb.ID(), s.Pages.Pool, s.PoolShareBytes, s.Pool.State, state)
	}
}
