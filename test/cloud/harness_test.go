package cloud

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"runsc-agentzip/pkg/bundle"
	"runsc-agentzip/pkg/client"
	"runsc-agentzip/test/harness"
)

// rootPrefix starts the name of every folder of a runtime, so that what a killed test
// run left behind can be told from everything else. It is not what package harness
// takes for its own: the sandboxes here are detached, and outlive a run that was killed.
// It may not hold "detach": "runsc exec --detach" calls itself without the arguments
// that do.
const rootPrefix = "/run/agentzip-scheduler-"

// bounded is how long anything may take here, on a machine that is busy.
const bounded = 3 * time.Minute

func TestMain(m *testing.M) {
	flag.Parse()
	if os.Geteuid() == 0 {
		// Sandboxes are told by the name of their folder, which is all that is needed to
		// remove them.
		stale, _ := filepath.Glob(rootPrefix + "*")
		for _, path := range stale {
			if err := removeStale(path); err != nil {
				fmt.Fprintf(os.Stderr, "removing what a killed run left: %v\n", err)
			}
		}
	}
	os.Exit(harness.Main(m, "cloud"))
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
	r, err := harness.FindUnderTest()
	if err != nil {
		return err
	}
	return sweep(r.Path, root)
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

// sweep deletes all sandboxes of a folder, and the folder. Commands that have begun are
// awaited: the folder must not go under a sandbox that is just being started, since
// nobody would know of it then. The lock, which is the caller's, goes last.
func sweep(binary, root string) error {
	c, err := client.New(client.Options{Binary: binary, Root: root})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), bounded)
	defer cancel()
	// A process that is about to become a runsc is not known to be one yet.
	for quiet := 0; quiet < 3; time.Sleep(50 * time.Millisecond) {
		all, err := c.List(ctx)
		for _, s := range all {
			err = errors.Join(err, c.Delete(ctx, s.ID))
		}
		left := harness.CommandLines(root)
		switch quiet++; {
		case ctx.Err() != nil:
			return errors.Join(err, fmt.Errorf("%s: there are %d sandboxes and these processes: %q", root, len(all), left))
		case err != nil || len(all) > 0 || len(left) > 0:
			quiet = 0
		}
	}
	return errors.Join(c.Cleanup(), os.Remove(root+lockSuffix))
}

func within(t testing.TB) context.Context { return harness.Within(t, bounded) }

// whole is for all of a test, which calls a runtime a hundred times.
func whole(t testing.TB) context.Context { return harness.Within(t, 4*bounded) }

// flags are the global flags that every sandbox here is started with.
var flags = []string{"--network=none", "--ignore-cgroups", "--platform=systrap", "--overlay2=all:memory"}

// newRoot makes a folder for a runtime's state, which has to be gone when the test
// ends, with all processes that have its name in their command line. The test has to call
// begin before each command of the runtime's: once the folder is being removed it does
// not return.
func newRoot(t testing.TB, runtime string) (root string, begin func()) {
	t.Helper()
	root, err := os.MkdirTemp(filepath.Dir(rootPrefix), filepath.Base(rootPrefix))
	if err != nil {
		t.Fatal(err)
	}
	lock, err := lockRoot(root)
	if err != nil {
		t.Fatal(err)
	}
	var ended atomic.Bool
	harness.AtExit(t, func() {
		ended.Store(true)
		defer lock.Close()
		if _, err := os.Lstat(root); errors.Is(err, os.ErrNotExist) {
			os.Remove(root + lockSuffix)
		} else {
			t.Errorf("left behind: %s", root)
			if err := sweep(runtime, root); err != nil {
				t.Errorf("removing it: %v", err)
			}
		}
		if left := await(func() []string { return harness.CommandLines(root) }); len(left) > 0 {
			t.Errorf("left behind: %q", left)
		}
	})
	return root, func() {
		if ended.Load() {
			select {}
		}
	}
}

// await calls f until it returns nothing, for some seconds at most.
func await(f func() []string) (left []string) {
	for start := time.Now(); ; time.Sleep(50 * time.Millisecond) {
		if left = f(); len(left) == 0 || time.Since(start) > 10*time.Second {
			return left
		}
	}
}

// newClient returns a Client of the runtime under test. Its temporary files have a
// folder of their own, which has to be empty at the end.
func newClient(t *testing.T) *client.Client {
	t.Helper()
	r := harness.UnderTest(t, "agentzip-idle")
	temp := harness.CoveredTempDir(t)
	t.Setenv("TMPDIR", temp)
	t.Cleanup(func() {
		if left, err := os.ReadDir(temp); err != nil || len(left) > 0 {
			t.Errorf("temporary files: %v, %v", left, err)
		}
	})
	root, begin := newRoot(t, r.Path)
	c, err := client.New(client.Options{
		Binary: r.Path,
		Root:   root,
		Flags:  flags,
		Trace: func(args []string) {
			begin()
			t.Logf("runsc %q", args)
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// ---- the guest ---------------------------------------------------------------------

var programs = harness.Programs{Go: []string{"guest/toolserver"}}

// newBundle writes a bundle with the host's root file system.
func newBundle(t testing.TB, args ...string) string {
	t.Helper()
	dir := harness.CoveredTempDir(t)
	if err := bundle.Write(dir, bundle.Spec{Rootfs: "/", Args: args, Hostname: "cloud"}); err != nil {
		t.Fatal(err)
	}
	return dir
}
