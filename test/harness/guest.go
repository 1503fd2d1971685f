package harness

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"runsc-agentzip/pkg/control"
	"runsc-agentzip/pkg/fleet"
)

// Programs are programs of a suite's guests, which are made when the first is needed,
// once in a run. Paths are relative to the suite's folder.
type Programs struct {
	// C are patterns of C files. Each file is a program of its own, named after it.
	C []string
	// Go are folders of Go programs, named after them.
	Go []string
	// Files are copied.
	Files []string

	once sync.Once
	dir  string
	err  error
}

// Dir returns the folder of the programs. What is missing to make them skips the test.
func (p *Programs) Dir(t testing.TB) string {
	t.Helper()
	if len(p.C) != 0 {
		if _, err := exec.LookPath("gcc"); err != nil {
			Skip(t, "gcc is missing: apt-get install gcc libc6-dev")
		}
	}
	p.once.Do(func() {
		if p.dir, p.err = RunDir(); p.err == nil {
			p.err = p.build()
		}
	})
	if p.err != nil {
		t.Fatal(p.err)
	}
	return p.dir
}

// Path returns the path of a program on the host.
func (p *Programs) Path(t testing.TB, name string) string {
	t.Helper()
	return filepath.Join(p.Dir(t), name)
}

func (p *Programs) build() error {
	for _, pattern := range p.C {
		sources, err := filepath.Glob(pattern)
		if err != nil || len(sources) == 0 {
			return fmt.Errorf("%s: no files, %v", pattern, err)
		}
		for _, src := range sources {
			program := filepath.Join(p.dir, strings.TrimSuffix(filepath.Base(src), ".c"))
			out, err := exec.Command("gcc", "-O2", "-Wall", "-Wextra", "-Werror", "-I../integrity/guest", "-static", "-pthread",
				"-o", program, src).CombinedOutput()
			if err != nil {
				return fmt.Errorf("compiling %s (gcc and libc6-dev are needed): %w\n%s", src, err, out)
			}
		}
	}
	for _, dir := range p.Go {
		cmd := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-o", filepath.Join(p.dir, filepath.Base(dir)), "./"+dir)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("building %s (the go command is needed): %w\n%s", dir, err, out)
		}
	}
	for _, file := range p.Files {
		b, err := os.ReadFile(file)
		if err == nil {
			err = os.WriteFile(filepath.Join(p.dir, filepath.Base(file)), b, 0o644)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// Bundle writes a bundle that is there until the test ends.
func Bundle(t testing.TB, s fleet.Spec) string {
	t.Helper()
	dir := TempDir(t)
	if err := fleet.WriteBundle(dir, s); err != nil {
		t.Fatal(err)
	}
	return dir
}

// Within returns a context that ends after d and with the test.
func Within(t testing.TB, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

// Eventually tries every now and then until f returns nil, and ends the test if that is
// not so within d.
func Eventually(t testing.TB, d, every time.Duration, what string, f func() error) {
	t.Helper()
	var err error
	for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(every) {
		if err = f(); err == nil {
			return
		}
	}
	t.Fatalf("%s: not within %v: %v", what, d, err)
}

// Stats asks a sandbox for its statistics.
func Stats(t testing.TB, sb *fleet.Sandbox) control.Stats {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	s, err := sb.Stats(ctx)
	if err != nil {
		t.Fatalf("agentzip stats %s: %v", sb.ID(), err)
	}
	return s
}

// Check has a sandbox look at all that it stores. Each problem is an error of the
// test's.
func Check(t testing.TB, sb *fleet.Sandbox) control.CheckReport {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	r, err := sb.Check(ctx)
	if err != nil {
		t.Fatalf("agentzip check %s: %v", sb.ID(), err)
	}
	for _, p := range r.Problems {
		t.Errorf("agentzip check %s: %s", sb.ID(), p)
	}
	return r
}

// Delete ends and removes a sandbox.
func Delete(t testing.TB, sb *fleet.Sandbox) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := sb.Delete(ctx); err != nil {
		t.Errorf("deleting %s: %v", sb.ID(), err)
	}
}
