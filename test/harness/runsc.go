package harness

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
)

// Runsc is a runsc binary.
type Runsc struct {
	// Path is absolute.
	Path string
	// Version is what it says that it is. An image is restored only by the version
	// that wrote it.
	Version string

	flags string
}

// Has tells whether it has a global flag, whose name is given without dashes.
func (r *Runsc) Has(flag string) bool { return strings.Contains(r.flags, "-"+flag) }

var probed sync.Map // path -> func() (*Runsc, error)

// probe runs the binary once to see what it is.
func probe(path string) (*Runsc, error) {
	f, _ := probed.LoadOrStore(path, sync.OnceValues(func() (*Runsc, error) {
		if _, err := os.Stat(path); err != nil {
			return nil, err
		}
		out, err := exec.Command(path, "flags").CombinedOutput()
		if err != nil {
			return nil, fmt.Errorf("%s flags: %w: %s", path, err, out)
		}
		r := &Runsc{Path: path, flags: string(out)}
		v, _ := exec.Command(path, "--version").Output()
		r.Version, _, _ = strings.Cut(string(v), "\n")
		return r, nil
	}))
	return f.(func() (*Runsc, error))()
}

// FindUnderTest returns the runsc that -runtime names. The error wraps os.ErrNotExist if
// there is none.
func FindUnderTest() (*Runsc, error) {
	path := RepoPath(*runtimeFlag)
	r, err := probe(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("run `make build` or name a runsc with -runtime: %w", err)
	}
	return r, err
}

// UnderTest is FindUnderTest for a test that is skipped without root, without that
// runsc, and if it lacks one of the global flags, as a stock runsc does.
func UnderTest(t testing.TB, flags ...string) *Runsc {
	t.Helper()
	NeedRoot(t)
	r, err := FindUnderTest()
	switch {
	case errors.Is(err, os.ErrNotExist):
		Skip(t, "%v", err)
	case err != nil:
		t.Fatal(err)
	}
	for _, f := range flags {
		if !r.Has(f) {
			Skip(t, "%s has no flag --%s: a stock runsc?", r.Path, f)
		}
	}
	return r
}

var errNoStock = errors.New("there is no stock runsc")

// FindStock returns the unpatched runsc that -stock names.
func FindStock() (*Runsc, error) {
	if *stockFlag == "" {
		return nil, errNoStock
	}
	path := RepoPath(*stockFlag)
	r, err := probe(path)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return nil, fmt.Errorf("%w: %s does not exist: run `make stock` or name one with -stock", errNoStock, path)
	case err != nil:
		return nil, err
	case r.Has("agentzip"):
		return nil, fmt.Errorf("%w: %s is another", errNoStock, path)
	}
	return r, nil
}

// Stock is FindStock for a test that is skipped without one.
func Stock(t testing.TB) *Runsc {
	t.Helper()
	NeedRoot(t)
	r, err := FindStock()
	switch {
	case errors.Is(err, errNoStock):
		Skip(t, "%v", err)
	case err != nil:
		t.Fatal(err)
	}
	return r
}
