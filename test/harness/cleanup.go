package harness

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// undo is what is left to do before the tests end.
var undo struct {
	sync.Mutex
	fns []*func()
}

// AtExit has f run once, at the end of the test or when the suite is interrupted; the
// last is the first to run. Without a test it is at the end of all.
func AtExit(t testing.TB, f func()) {
	once := sync.OnceFunc(f)
	undo.Lock()
	undo.fns = append(undo.fns, &once)
	undo.Unlock()
	if t == nil {
		return
	}
	t.Cleanup(func() {
		once()
		undo.Lock()
		defer undo.Unlock()
		undo.fns = slices.DeleteFunc(undo.fns, func(p *func()) bool { return p == &once })
	})
}

// undoAll does what is left. When it has begun no test gets anything new: a test that
// asks for it waits until the process has ended.
func undoAll() {
	undo.Lock()
	for len(undo.fns) != 0 {
		last := *undo.fns[len(undo.fns)-1]
		undo.fns = undo.fns[:len(undo.fns)-1]
		last()
	}
	for _, s := range scratches {
		s.Lock()
		if s.lock != nil {
			if err := remove(s.dir); err != nil {
				fmt.Fprintf(os.Stderr, "cleaning up: %v\n", err)
			}
		}
	}
}

func scratchPrefix() string { return "agentzip-test-" + suite + "-" }

// scratch is a folder of this run, made when it is first needed.
type scratch struct {
	// parent is where those of all runs are.
	parent string

	sync.Mutex
	dir string
	// lock is the folder, locked as long as the run lives.
	lock *os.File
	// made counts the folders in it.
	made int
}

var (
	// common is not below /tmp, which a sandbox may cover with its own, and which may be
	// memory.
	common = &scratch{parent: "/var/tmp"}
	// covered is where that is what is wanted.
	covered = &scratch{parent: "/tmp"}

	scratches = []*scratch{common, covered}
)

// RunDir makes a folder that is there as long as the suite runs. It is as that of
// TempDir.
func RunDir() (string, error) { return common.mkdir() }

func (s *scratch) mkdir() (string, error) {
	s.Lock()
	defer s.Unlock()
	for s.lock == nil {
		dir, err := os.MkdirTemp(s.parent, scratchPrefix())
		if err != nil {
			return "", err
		}
		// Another run may have taken it for abandoned just now.
		if s.lock, err = lockDir(dir); err != nil {
			return "", err
		}
		s.dir = dir
	}
	s.made++
	dir := filepath.Join(s.dir, fmt.Sprint(s.made))
	// Guests may not be root.
	for _, d := range []string{s.dir, dir} {
		if err := os.Mkdir(d, 0o755); err != nil && !os.IsExist(err) {
			return "", err
		}
		if err := os.Chmod(d, 0o755); err != nil {
			return "", err
		}
	}
	return dir, nil
}

// lockDir locks a folder. It returns nil if it is locked or gone.
func lockDir(dir string) (*os.File, error) {
	f, err := os.Open(dir)
	if os.IsNotExist(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err == nil {
		if _, err := os.Lstat(dir); err == nil {
			return f, nil
		}
	} else if err != unix.EWOULDBLOCK {
		f.Close()
		return nil, fmt.Errorf("locking %s: %w", dir, err)
	}
	f.Close()
	return nil, nil
}

// removeAbandoned removes the folders of the suite's runs that have ended.
func removeAbandoned() {
	for _, s := range scratches {
		dirs, _ := filepath.Glob(filepath.Join(s.parent, scratchPrefix()+"*"))
		for _, dir := range dirs {
			lock, err := lockDir(dir)
			if err == nil && lock != nil {
				err = remove(dir)
				lock.Close()
			}
			if err != nil {
				fmt.Fprintf(os.Stderr, "removing what a killed run left: %v\n", err)
			}
		}
	}
}

// TempDir is t.TempDir for what has to go when the suite is interrupted, too: images
// are large. It is readable by all, and not below /tmp, which a sandbox may cover with
// its own.
func TempDir(t testing.TB) string {
	t.Helper()
	return common.tempDir(t)
}

// CoveredTempDir is TempDir below /tmp, where programs that use a sandbox put their
// files: what they give it has to be found there.
func CoveredTempDir(t testing.TB) string {
	t.Helper()
	return covered.tempDir(t)
}

func (s *scratch) tempDir(t testing.TB) string {
	t.Helper()
	dir, err := s.mkdir()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := remove(dir); err != nil {
			t.Errorf("cleaning up: %v", err)
		}
	})
	return dir
}
