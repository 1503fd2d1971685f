package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"runsc-agentzip/pkg/fleet"
	"runsc-agentzip/tools/agentbench/linuxmem"
)

// runDir holds the files of one run: bundles, images, snapshots, and the list
// of fleet roots it uses. It is locked while the run lives, so that the next
// run can tell what a killed one left behind.
type runDir struct {
	path string
	lock *os.File
}

const (
	runPrefix = "run-"
	runLock   = "lock"
	runRoots  = "roots.json"
)

// newRunDir makes a run directory below parent.
func newRunDir(parent string) (*runDir, error) {
	parent, err := filepath.Abs(parent)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(parent, 0o755); err != nil {
		return nil, err
	}
	path, err := os.MkdirTemp(parent, runPrefix)
	if err != nil {
		return nil, err
	}
	lock, err := tryLock(filepath.Join(path, runLock))
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(path))
	}
	return &runDir{path: path, lock: lock}, nil
}

// reserveRoot records a root directory for a fleet.Runtime before it exists.
func (d *runDir) reserveRoot(name string) (string, error) {
	parent := "/run"
	if unix.Access(parent, unix.W_OK) != nil {
		parent = d.path
	}
	root := filepath.Join(parent, "agentbench-"+strings.TrimPrefix(filepath.Base(d.path), runPrefix)+"-"+name)
	roots, err := readRoots(d.path)
	if err != nil {
		return "", err
	}
	b, err := json.Marshal(append(roots, root))
	if err != nil {
		return "", err
	}
	return root, os.WriteFile(filepath.Join(d.path, runRoots), b, 0o600)
}

// poolDir is where a run's page pool has its socket: below the run's directory
// unless the path would be too long for a socket. What takes its place is named
// after the run, too, so that reclaim finds it.
func poolDir(run string) string {
	dir := filepath.Join(run, "pool")
	if len(filepath.Join(dir, poolSocket)) < socketMax {
		return dir
	}
	return filepath.Join("/run", "agentbench-"+strings.TrimPrefix(filepath.Base(run), runPrefix)+"-pool")
}

// remove deletes a run's directories.
func remove(run string) error {
	return errors.Join(os.RemoveAll(poolDir(run)), os.RemoveAll(run))
}

// end deletes the directory, unless err says that something could not be undone
// whose record it holds: then it is only unlocked, for reclaim to find.
func (d *runDir) end(err error) error {
	defer d.lock.Close()
	if err != nil {
		return fmt.Errorf("%w\nwhat is left is recorded in %s: run `agentbench reclaim --work %s`", err, d.path, filepath.Dir(d.path))
	}
	return remove(d.path)
}

func readRoots(dir string) ([]string, error) {
	b, err := os.ReadFile(filepath.Join(dir, runRoots))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	var roots []string
	if err := json.Unmarshal(b, &roots); err != nil {
		return nil, fmt.Errorf("%s: %w", filepath.Join(dir, runRoots), err)
	}
	return roots, nil
}

// errLocked says that another process holds a lock.
var errLocked = errors.New("locked by another process")

func tryLock(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		if err == unix.EWOULDBLOCK {
			return nil, fmt.Errorf("%s: %w", path, errLocked)
		}
		return nil, err
	}
	return f, nil
}

// reclaimRuns cleans up after runs below parent that were killed.
func reclaimRuns(parent string, say func(string, ...any)) error {
	parent, err := filepath.Abs(parent)
	if err != nil {
		return err
	}
	dirs, err := filepath.Glob(filepath.Join(parent, runPrefix+"*"))
	if err != nil {
		return err
	}
	for _, dir := range dirs {
		lock, err := tryLock(filepath.Join(dir, runLock))
		if errors.Is(err, errLocked) {
			continue // alive
		} else if err != nil {
			return err
		}
		say("cleaning up after an earlier run that was killed: %s", dir)
		roots, err := readRoots(dir)
		if err != nil {
			lock.Close()
			return err
		}
		for _, root := range roots {
			if err := fleet.Reclaim(root); err != nil {
				lock.Close()
				return err
			}
		}
		// After the sandboxes: their memory may be swapped out.
		if err := linuxmem.RestoreHost(filepath.Join(dir, swapState)); err != nil {
			lock.Close()
			return err
		}
		err = remove(dir)
		lock.Close()
		if err != nil {
			return err
		}
	}
	return nil
}

func runReclaim(_ context.Context, args []string, _, stderr io.Writer) error {
	fs := flag.NewFlagSet("reclaim", flag.ContinueOnError)
	fs.SetOutput(stderr)
	work := fs.String("work", "out/agentbench", "the `directory` that the killed run was given with --work")
	if err := fs.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return err
		}
		return errUsage
	}
	if fs.NArg() > 0 {
		fmt.Fprintf(stderr, "agentbench reclaim: unexpected argument %q\n", fs.Arg(0))
		return errUsage
	}
	return reclaimRuns(*work, newProgress(stderr).say)
}
