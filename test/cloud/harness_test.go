package cloud

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
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"runsc-agentzip/pkg/bundle"
	"runsc-agentzip/pkg/client"
)

var (
	runtimeFlag = flag.String("runtime", envOr("AGENTZIP_RUNTIME", "bin/runsc-agentzip"),
		"the runsc under test; a relative path is taken from the top of the repository")
	stockFlag = flag.String("stock", envOr("AGENTZIP_STOCK", "bin/runsc-stock"),
		"the unpatched runsc to compare with")
	requireFlag = flag.Bool("require", os.Getenv("AGENTZIP_REQUIRE") != "",
		"fail, rather than skip, where something that a test needs is missing")
)

func envOr(name, def string) string {
	if v := os.Getenv(name); v != "" {
		return v
	}
	return def
}

// rootPrefix starts the name of every folder of a runtime, so that what a killed test
// run left behind can be told from everything else.
const rootPrefix = "/run/agentzip-cloud-"

// bounded is how long anything may take here, on a machine that is busy.
const bounded = 3 * time.Minute

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
	// On SIGTERM the go command goes first and the pipe that we print into breaks;
	// dying of that would leave sandboxes.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	// Sandboxes are detached here: they outlive a run that was killed. They are told
	// by the name of their folder, which is all that is needed to remove them.
	if stale, _ := filepath.Glob(rootPrefix + "*"); os.Geteuid() == 0 {
		for _, root := range stale {
			if err := removeStale(root); err != nil {
				fmt.Fprintf(os.Stderr, "removing what a killed run left: %v\n", err)
			}
		}
	}
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

// removeStale removes the sandboxes of a run that was killed. A folder in use is
// left alone: its run holds a lock beside it.
func removeStale(path string) error {
	root, isLock := strings.CutSuffix(path, lockSuffix)
	if _, err := os.Lstat(root); isLock == (err == nil) {
		return nil // the lock of a folder, which comes for itself, or of none
	}
	lock, err := lockRoot(root)
	if errors.Is(err, syscall.EWOULDBLOCK) {
		return nil
	} else if err != nil {
		return err
	}
	defer lock.Close()
	if isLock {
		return os.Remove(path)
	}
	c, err := client.New(client.Options{Binary: repoPath(*runtimeFlag), Root: root})
	if err != nil {
		return err
	}
	return sweep(c)
}

const lockSuffix = ".lock"

// lockRoot takes a lock that says that a run uses the folder.
func lockRoot(root string) (*os.File, error) {
	f, err := os.OpenFile(root+lockSuffix, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// sweep deletes all sandboxes of a Client and its folder.
func sweep(c *client.Client) error {
	ctx, cancel := context.WithTimeout(context.Background(), bounded)
	defer cancel()
	all, err := c.List(ctx)
	for _, s := range all {
		err = errors.Join(err, c.Delete(ctx, s.ID))
	}
	return errors.Join(err, c.Cleanup(), os.Remove(c.Root()+lockSuffix))
}

var undo struct {
	sync.Mutex
	fns []func()
}

// atExit has f run once, when the tests end or are interrupted; the last is the first
// to run.
func atExit(f func()) (now func()) {
	once := sync.OnceFunc(f)
	undo.Lock()
	undo.fns = append(undo.fns, once)
	undo.Unlock()
	return once
}

func undoAll() {
	undo.Lock()
	defer undo.Unlock()
	for _, f := range slices.Backward(undo.fns) {
		f()
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

func within(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), bounded)
	t.Cleanup(cancel)
	return ctx
}

// whole is for all of a test, which calls a runtime a hundred times.
func whole(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 4*bounded)
	t.Cleanup(cancel)
	return ctx
}

// binary returns the path of a runsc, or skips.
func binary(t testing.TB, path string) string {
	t.Helper()
	if os.Geteuid() != 0 {
		skip(t, "sandboxes need root: run the tests as root")
	}
	path = repoPath(path)
	if _, err := client.FindBinary(path); errors.Is(err, os.ErrNotExist) {
		skip(t, "%v", err)
	} else if err != nil {
		t.Fatal(err)
	}
	return path
}

// flags are the global flags that every sandbox here is started with.
var flags = []string{"--network=none", "--ignore-cgroups", "--platform=systrap", "--overlay2=all:memory"}

// newRoot makes a folder for a runtime's state, which has to be gone when the test
// ends, with all processes that have its name in their command line.
func newRoot(t testing.TB, runtime string) string {
	t.Helper()
	root, err := os.MkdirTemp(filepath.Dir(rootPrefix), filepath.Base(rootPrefix))
	if err != nil {
		t.Fatal(err)
	}
	lock, err := lockRoot(root)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(atExit(func() {
		defer lock.Close()
		if _, err := os.Lstat(root); errors.Is(err, os.ErrNotExist) {
			os.Remove(root + lockSuffix)
		} else {
			t.Errorf("left behind: %s", root)
			if c, err := client.New(client.Options{Binary: runtime, Root: root}); err != nil {
				t.Error(err)
			} else if err := sweep(c); err != nil {
				t.Errorf("removing it: %v", err)
			}
		}
		if left := await(func() []string { return processes(root) }); len(left) > 0 {
			t.Errorf("left behind: %q", left)
		}
	}))
	return root
}

// await calls f until it returns nothing, for some seconds at most.
func await(f func() []string) (left []string) {
	for start := time.Now(); ; time.Sleep(50 * time.Millisecond) {
		if left = f(); len(left) == 0 || time.Since(start) > 10*time.Second {
			return left
		}
	}
}

// processes returns the command lines that have a text in them.
func processes(text string) []string {
	files, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	var out []string
	for _, file := range files {
		if b, err := os.ReadFile(file); err == nil && bytes.Contains(b, []byte(text)) {
			out = append(out, string(bytes.ReplaceAll(b, []byte{0}, []byte{' '})))
		}
	}
	return out
}

// newClient returns a Client of the runtime under test. Its temporary files have a
// folder of their own, which has to be empty at the end.
func newClient(t testing.TB) *client.Client {
	t.Helper()
	path := binary(t, *runtimeFlag)
	out, err := exec.Command(path, "flags").CombinedOutput()
	if err != nil {
		t.Fatalf("%s flags: %v: %s", path, err, out)
	}
	if !bytes.Contains(out, []byte("-agentzip-idle")) {
		skip(t, "%s knows no agentzip: a stock runsc?", path)
	}
	temp := t.TempDir()
	t.(*testing.T).Setenv("TMPDIR", temp)
	t.Cleanup(func() {
		if left, err := os.ReadDir(temp); err != nil || len(left) > 0 {
			t.Errorf("temporary files: %v, %v", left, err)
		}
	})
	c, err := client.New(client.Options{
		Binary: path,
		Root:   newRoot(t, path),
		Flags:  flags,
		Trace:  func(args []string) { t.Logf("runsc %q", args) },
	})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// ---- the guest ---------------------------------------------------------------------

var guest struct {
	sync.Once
	path string
	err  error
}

// toolserver returns where the guest finds its program.
func toolserver(t testing.TB) string {
	t.Helper()
	guest.Do(func() {
		// Not in TMPDIR, which is the test's.
		dir, err := os.MkdirTemp("/var/tmp", "agentzip-cloud-guest-")
		if err != nil {
			guest.err = err
			return
		}
		atExit(func() { os.RemoveAll(dir) })
		guest.path = filepath.Join(dir, "toolserver")
		cmd := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-o", guest.path, "./guest/toolserver")
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		out, err := cmd.CombinedOutput()
		if err == nil {
			err = os.Chmod(dir, 0o755)
		}
		if err != nil {
			guest.err = fmt.Errorf("building toolserver (the go command is needed): %w\n%s", err, out)
		}
	})
	if guest.err != nil {
		t.Fatal(guest.err)
	}
	return guest.path
}

// newBundle writes a bundle with the host's root file system.
func newBundle(t testing.TB, args ...string) string {
	t.Helper()
	dir := t.TempDir()
	if err := bundle.Write(dir, bundle.Spec{Rootfs: "/", Args: args, Hostname: "cloud"}); err != nil {
		t.Fatal(err)
	}
	return dir
}
