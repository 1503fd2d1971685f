package harness

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"runsc-agentzip/pkg/fleet"
)

// Logs is how much runsc and the Sentry log. The logs of a failed test are kept.
type Logs int

const (
	// NoLogs is for what the logs would change: what a sandbox costs. What runsc
	// writes to its standard error is kept all the same.
	NoLogs Logs = iota
	// Warnings, and more that is not too much, are logged.
	Warnings
	// AllLogs are those of --debug.
	AllLogs
)

// Options are those of a Runtime.
type Options struct {
	// Binary is the path of the runsc.
	Binary string
	// Flags are further global flags.
	Flags []string
	Logs  Logs
	// Patience is how long a start or a restore may take; two minutes unless it is
	// set.
	Patience time.Duration
	// Leftovers, if it is set, removes what else there is of the sandboxes once they
	// have ended, and returns what cannot be removed.
	Leftovers func() []string
}

// Runtime is a fleet.Runtime of a test.
type Runtime struct {
	*fleet.Runtime
	// LogDir is where the logs are.
	LogDir string

	patience time.Duration
}

// NewRuntime returns a runtime that is closed when the test ends. The test fails if
// something of it is left then.
func NewRuntime(t testing.TB, o Options) *Runtime {
	t.Helper()
	NeedRoot(t)
	logs := TempDir(t)
	flags := []string{}
	if o.Logs >= Warnings {
		flags = append(flags, "--debug-log="+logs+"/", "--panic-log="+logs+"/panic.txt")
	}
	if o.Logs >= AllLogs {
		flags = append(flags, "--debug")
	}
	log, err := os.Create(filepath.Join(logs, "fleet.txt"))
	if err != nil {
		t.Fatal(err)
	}
	root, err := os.MkdirTemp(filepath.Dir(rootPrefix()), filepath.Base(rootPrefix()))
	if err != nil {
		t.Fatal(err)
	}
	rt, err := fleet.New(fleet.Options{Binary: o.Binary, Root: root, Flags: append(flags, o.Flags...), Log: log})
	if err != nil {
		os.RemoveAll(root)
		t.Fatal(err)
	}
	AtExit(t, func() {
		processes := Processes(rt.Sandboxes()...)
		if err := rt.Close(); err != nil {
			t.Errorf("cleaning up: %v", err)
		}
		left := leftovers(root, processes)
		if o.Leftovers != nil {
			left = append(left, o.Leftovers()...)
		}
		if len(left) != 0 {
			t.Errorf("left behind: %s", strings.Join(left, ", "))
		}
		log.Close()
		if t.Failed() {
			keepLogs(t, logs)
		}
	})
	if o.Patience == 0 {
		o.Patience = 2 * time.Minute
	}
	return &Runtime{rt, logs, o.Patience}
}

// leftovers returns what is there still of a runtime that is closed. Processes may take
// a moment to end.
func leftovers(root string, processes []Process) (left []string) {
	for end := time.Now().Add(5 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		left = nil
		for _, p := range processes {
			if p.lives() {
				left = append(left, fmt.Sprintf("process %d", p.PID))
			}
		}
		for _, line := range CommandLines(root) {
			left = append(left, fmt.Sprintf("a process (%s)", line))
		}
		if len(left) == 0 || time.Now().After(end) {
			break
		}
	}
	if mounts, err := os.ReadFile("/proc/self/mountinfo"); err == nil && bytes.Contains(mounts, []byte(root)) {
		left = append(left, "a mount below "+root)
	}
	if _, err := os.Lstat(root); err == nil {
		left = append(left, root)
	}
	return left
}

// Start runs a bundle until its program says READY.
func (r *Runtime) Start(t testing.TB, id, bundle string, opts ...fleet.StartOption) *fleet.Sandbox {
	t.Helper()
	ctx := Within(t, r.patience)
	sb, err := r.Run(ctx, id, bundle, opts...)
	if err != nil {
		t.Fatalf("starting %s: %v", id, err)
	}
	if line, err := sb.ReadLine(ctx); err != nil || line != "READY" {
		t.Fatalf("%s: %q, %v, want READY\n%s", id, line, err, sb.Stderr())
	}
	return sb
}

// Clone restores a sandbox from an image, with the bundle that it was started with.
func (r *Runtime) Clone(t testing.TB, id, bundle, image string, opts ...fleet.StartOption) *fleet.Sandbox {
	t.Helper()
	sb, err := r.Restore(Within(t, r.patience), id, bundle, image, opts...)
	if err != nil {
		t.Fatalf("restoring %s: %v", id, err)
	}
	return sb
}

// Stacks asks a sandbox that hangs where it is, and says where its answer is kept.
func (r *Runtime) Stacks(sb *fleet.Sandbox) string {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, r.Binary(), "--root="+r.Root(), "debug", "--stacks", sb.ID()).CombinedOutput()
	file := filepath.Join(r.LogDir, "stacks-"+sb.ID()+".txt")
	if werr := os.WriteFile(file, out, 0o644); werr != nil {
		return werr.Error()
	}
	return fmt.Sprintf("the Sentry's stacks are in %s (%v)", filepath.Base(file), err)
}

// kept counts the runtimes whose logs were kept, by test.
var kept struct {
	sync.Mutex
	runtimes map[string]int
}

// keepLogs copies the logs of a failed test where they can be looked at, and shows the
// ends of those that explain a dead sandbox.
func keepLogs(t testing.TB, logs string) {
	kept.Lock()
	defer kept.Unlock()
	if kept.runtimes == nil {
		kept.runtimes = make(map[string]int)
	}
	dir := filepath.Join(RepoPath("out"), suite+"-failed", strings.ReplaceAll(t.Name(), "/", "-"))
	if kept.runtimes[t.Name()] == 0 {
		os.RemoveAll(dir) // an earlier run's
	}
	kept.runtimes[t.Name()]++
	dst := filepath.Join(dir, fmt.Sprint(kept.runtimes[t.Name()]))
	if err := os.CopyFS(dst, os.DirFS(logs)); err != nil {
		t.Logf("keeping the logs: %v", err)
		return
	}
	t.Logf("logs are in %s", dst)
	entries, _ := os.ReadDir(dst)
	for i, e := range entries {
		b, err := os.ReadFile(filepath.Join(dst, e.Name()))
		if err != nil || len(b) == 0 {
			continue
		}
		switch {
		case e.Name() == "panic.txt":
			t.Logf("--- panic\n%s", b[:min(len(b), 6000)])
		case e.Name() == "fleet.txt":
			t.Logf("--- end of %s\n%s", e.Name(), Tail(string(b), 2500))
		// The last sandboxes say most.
		case strings.Contains(e.Name(), ".boot.") && i >= len(entries)-12:
			if w := warnings(string(b)); w != "" {
				t.Logf("--- warnings in %s\n%s", e.Name(), Tail(w, 4000))
			}
		}
	}
}

// boring is in warnings that every sandbox starts with, and in lines that only look
// like some.
var boring = []string{
	"cgroup mount for controller", "--allow-suid", "product_name", "Host limit is lower",
	"SECCOMP WARNING", "No precompiled program", "ignoring unknown mount option",
	"Args: [", "config.go", "limits.go", "filter.go",
}

// warnings picks what may explain a failure out of a Sentry's log.
func warnings(log string) string {
	var out strings.Builder
	for line := range strings.Lines(log) {
		if slices.ContainsFunc(boring, func(s string) bool { return strings.Contains(line, s) }) {
			continue
		}
		if strings.ContainsRune("WEF", rune(line[0])) || strings.Contains(line, "panic") ||
			strings.Contains(line, "FATAL") || strings.Contains(line, "fatal") {
			out.WriteString(line)
		}
	}
	return out.String()
}

// Tail returns the last n bytes of what is longer.
func Tail(s string, n int) string {
	if len(s) > n {
		return "..." + s[len(s)-n:]
	}
	return s
}
