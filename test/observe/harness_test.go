package observe

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

	"runsc-agentzip/pkg/fleet"
)

var (
	runtimeFlag = flag.String("runtime", envOr("AGENTZIP_RUNTIME", "bin/runsc-agentzip"),
		"the runsc under test; a relative path is taken from the top of the repository")
	requireFlag = flag.Bool("require", os.Getenv("AGENTZIP_REQUIRE") != "",
		"fail, rather than skip, where something that a test needs is missing")
)

func envOr(name, def string) string {
	if v := os.Getenv(name); v != "" {
		return v
	}
	return def
}

// rootPrefix starts the name of the folder of a runtime, so that what a killed test run
// left behind can be told from everything else.
const rootPrefix = "/run/agentzip-observe-"

// bounded is how long a command may take here that asks sandboxes of which some do not
// answer: a hundred times as long as it should, since the machine may be busy. One that
// waits for them would never end.
const bounded = time.Minute

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

// newRuntime returns a runtime with the flags, which is closed when the test ends.
func newRuntime(t testing.TB, flags ...string) *fleet.Runtime {
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
	case !bytes.Contains(out, []byte("-agentzip-idle")):
		skip(t, "%s knows no agentzip: a stock runsc?", binary)
	}
	root, err := os.MkdirTemp(filepath.Dir(rootPrefix), filepath.Base(rootPrefix))
	if err != nil {
		t.Fatal(err)
	}
	rt, err := fleet.New(fleet.Options{Binary: binary, Root: root, Flags: flags})
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

// start runs a shell that echoes lines, until it says that it is ready.
func start(t testing.TB, rt *fleet.Runtime, id string, opts ...fleet.StartOption) *fleet.Sandbox {
	t.Helper()
	bundle := t.TempDir()
	if err := fleet.WriteBundle(bundle, fleet.Spec{
		Rootfs:         "/",
		ReadonlyRootfs: true,
		Args:           []string{"/bin/sh", "-c", "echo READY; while read line; do echo $line; done"},
		Hostname:       "observe",
	}); err != nil {
		t.Fatal(err)
	}
	sb, err := rt.Run(within(t, bounded), id, bundle, opts...)
	if err != nil {
		t.Fatalf("starting %s: %v", id, err)
	}
	if line, err := sb.ReadLine(within(t, bounded)); err != nil || line != "READY" {
		t.Fatalf("%s: %q, %v", id, line, err)
	}
	return sb
}

// command prepares `runsc-agentzip agentzip ARGS` for the sandboxes of a runtime.
func command(ctx context.Context, rt *fleet.Runtime, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, rt.Binary(), append([]string{"--root=" + rt.Root(), "agentzip"}, args...)...)
	cmd.WaitDelay = time.Second
	return cmd
}

// output runs a command and returns what it prints.
func output(t testing.TB, rt *fleet.Runtime, args ...string) string {
	t.Helper()
	start := time.Now()
	var out, errOut bytes.Buffer
	cmd := command(within(t, bounded), rt, args...)
	cmd.Stdout, cmd.Stderr = &out, &errOut
	if err := cmd.Run(); err != nil {
		t.Fatalf("agentzip %q: %v: %s%s", args, err, out.Bytes(), errOut.Bytes())
	}
	if errOut.Len() != 0 {
		t.Errorf("agentzip %q says %s", args, errOut.Bytes())
	}
	t.Logf("agentzip %q took %v", args, time.Since(start).Round(time.Millisecond))
	return out.String()
}

// freeze stops a sandbox's process until the test ends or thaw is called.
func freeze(t testing.TB, pid int) (thaw func()) {
	t.Helper()
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	thaw = sync.OnceFunc(func() { _ = syscall.Kill(pid, syscall.SIGCONT) })
	atExit(t, thaw)
	return thaw
}

// killForGood kills a sandbox's process and keeps runsc, its parent, from removing
// what is left, as if that were killed, too.
func killForGood(t testing.TB, sb *fleet.Sandbox) {
	t.Helper()
	freeze(t, parent(t, sb.Pid()))
	if err := syscall.Kill(sb.Pid(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
}

// parent returns the parent of a process.
func parent(t testing.TB, pid int) int {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(line, "PPid:"); ok {
			ppid, err := strconv.Atoi(strings.TrimSpace(v))
			if err != nil || ppid <= 1 {
				t.Fatalf("%s %v", line, err)
			}
			return ppid
		}
	}
	t.Fatalf("process %d has no parent: %s", pid, b)
	return 0
}
