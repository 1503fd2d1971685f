// Package fleet drives sandboxes through one runsc binary: it starts and
// restores them, talks to them, checkpoints them, measures what they cost the
// host and cleans up whatever it started.
//
// It uses runsc's command line, runsc's state file (for process ids) and /proc,
// nothing else, so the same code drives a stock runsc and runsc-agentzip. A
// typical use:
//
//	rt, err := fleet.New(fleet.Options{Binary: "bin/runsc-agentzip"})
//	if err != nil { ... }
//	defer rt.Close()
//	err = fleet.WriteBundle(dir, fleet.Spec{Rootfs: root, Args: []string{"/usr/bin/python3", "server.py"}})
//	sb, err := rt.Run(ctx, "template", dir)
//	reply, err := sb.Request(ctx, `{"op":"ping"}`)
//	err = sb.Checkpoint(ctx, image, fleet.CheckpointOptions{})
//	clone, err := rt.Restore(ctx, "clone-1", dir, image)
//
// Commands that end by themselves, exec among them, go through package client, which
// is the one for programs that keep sandboxes.
//
// # Ids
//
// runsc takes the beginning of an id for the id, if only one sandbox's begins so. A
// sandbox that has ended is not known to runsc any more, so "runsc delete n-1" would
// delete n-10 then. So no id of a Runtime's sandboxes, those included that have ended
// and were not deleted, may be the beginning of another's: Run and Restore fail with an
// error that wraps client.ErrAmbiguous. Give ids of one length. What a Sandbox asks
// runsc to do once it was deleted fails with client.ErrNotFound.
//
// # Lifetime
//
// Sandboxes are attached: they live no longer than the process that started
// them, even if that process is killed with SIGKILL. Close ends them in order;
// what a killed process leaves behind (a root directory and one mount) is
// removed by Reclaim.
package fleet

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"runsc-agentzip/pkg/client"
)

// DefaultFlags are the global runsc flags every command gets before
// Options.Flags: no network, no cgroups to manage, the systrap platform, and
// all writes of the guest kept in memory, where they can be checkpointed.
var DefaultFlags = []string{
	"--network=none",
	"--ignore-cgroups",
	"--platform=systrap",
	"--overlay2=all:memory",
}

// ErrNoAgentzip is returned by Stats, Evict and Check when the binary is a
// runsc without the agentzip commands.
var ErrNoAgentzip = client.ErrNoAgentzip

// CommandError is the failure of one runsc command.
type CommandError = client.CommandError

// Options configure a Runtime.
type Options struct {
	// Binary is the runsc to drive. It must not live under /tmp: the sandbox
	// process covers /tmp with its own root and could not execute itself.
	Binary string

	// Root is runsc's private state directory (--root). It must be missing or
	// empty; Close removes it. A caller that may be killed chooses and records
	// it, to Reclaim it later. Default: a fresh directory.
	Root string

	// Flags are extra global runsc flags. They come after DefaultFlags, so a
	// later value wins (--ignore-cgroups=false, --platform=ptrace).
	Flags []string

	// Log, if set, receives one line per runsc command and what runsc and the
	// guests write to stderr.
	Log io.Writer
}

// Runtime drives one runsc binary with one private root directory. Its methods
// may be called concurrently.
type Runtime struct {
	binary string
	root   string
	flags  []string
	client *client.Client // for commands that end by themselves
	lock   *os.File
	spawn  *spawner

	logMu sync.Mutex
	log   io.Writer

	mu        sync.Mutex
	closed    bool
	sandboxes map[string]*Sandbox
	// busy counts, by id, the commands under way that name a sandbox.
	busy map[string]int
}

// New checks the machine and the binary and returns a Runtime.
func New(o Options) (*Runtime, error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("fleet: sandboxes need root (namespaces, mounts): run as root, e.g. with sudo")
	}
	bin, err := client.FindBinary(o.Binary)
	if err != nil {
		return nil, err
	}
	root := o.Root
	if root == "" {
		if root, err = os.MkdirTemp(defaultRootParent(), "fleet-"); err != nil {
			return nil, fmt.Errorf("fleet: creating a root directory: %w", err)
		}
	} else {
		if root, err = filepath.Abs(root); err != nil {
			return nil, fmt.Errorf("fleet: root: %w", err)
		}
		if err := makeRoot(root); err != nil {
			return nil, err
		}
	}
	lock, err := lockRoot(root)
	if err != nil {
		return nil, err
	}
	r := &Runtime{
		binary:    bin,
		root:      root,
		flags:     slices.Concat([]string{"--root=" + root}, DefaultFlags, o.Flags),
		lock:      lock,
		spawn:     newSpawner(),
		log:       o.Log,
		sandboxes: make(map[string]*Sandbox),
		busy:      make(map[string]int),
	}
	r.client, err = client.New(client.Options{
		Binary: bin,
		Root:   root,
		Flags:  slices.Concat(DefaultFlags, o.Flags),
		Trace:  func(args []string) { r.logf("runsc %s", strings.Join(args, " ")) },
	})
	if err == nil {
		err = r.saveRecord()
	}
	if err != nil {
		r.Close()
		return nil, err
	}
	return r, nil
}

// Binary returns the resolved path of the runsc binary.
func (r *Runtime) Binary() string { return r.binary }

// Root returns the private state directory.
func (r *Runtime) Root() string { return r.root }

// Version returns the binary's version string. A checkpoint image restores only
// under a runsc of the version that made it.
func (r *Runtime) Version(ctx context.Context) (string, error) {
	out, err := r.client.Command(ctx, "--version")
	if err != nil {
		return "", err
	}
	first, _, _ := strings.Cut(string(out), "\n")
	return strings.TrimSpace(strings.TrimPrefix(first, "runsc version ")), nil
}

// makeRoot creates the root directory a caller chose, or makes sure that it
// holds nothing: Close removes it.
func makeRoot(root string) error {
	if err := os.MkdirAll(root, 0o711); err != nil {
		return fmt.Errorf("fleet: creating the root directory: %w", err)
	}
	entries, err := os.ReadDir(root)
	if err != nil {
		return fmt.Errorf("fleet: root directory: %w", err)
	}
	if len(entries) == 0 {
		return nil
	}
	if !slices.ContainsFunc(entries, func(e os.DirEntry) bool { return e.Name() == lockName }) {
		return fmt.Errorf("fleet: root directory %s is not empty", root)
	}
	lock, err := lockRoot(root)
	if err != nil {
		return err
	}
	lock.Close()
	return fmt.Errorf("fleet: root directory %s was left behind by a process that died: clean it up with Reclaim", root)
}

// defaultRootParent prefers /run, as runsc does: paths stay short, which
// matters because control sockets live in the root directory and a socket
// address holds 107 bytes.
func defaultRootParent() string {
	if unix.Access("/run", unix.W_OK) == nil {
		return "/run"
	}
	return os.TempDir()
}

// Sandboxes returns the sandboxes that were started and not deleted, by id.
func (r *Runtime) Sandboxes() []*Sandbox {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := make([]*Sandbox, 0, len(r.sandboxes))
	for _, s := range r.sandboxes {
		out = append(out, s)
	}
	slices.SortFunc(out, func(a, b *Sandbox) int { return strings.Compare(a.id, b.id) })
	return out
}

// Close kills and deletes every sandbox of this Runtime, unmounts what runsc
// left in the root directory and removes it. It may be called more than once
// and after any failure; only the first call does anything.
func (r *Runtime) Close() error {
	r.mu.Lock()
	if r.closed {
		r.mu.Unlock()
		return nil
	}
	r.closed = true
	r.mu.Unlock()

	// Several at a time: most of a deletion is waiting for processes to end.
	var (
		wg   sync.WaitGroup
		mu   sync.Mutex
		errs []error
		sem  = make(chan struct{}, 4)
	)
	for _, s := range r.Sandboxes() {
		wg.Add(1)
		go func() {
			defer wg.Done()
			sem <- struct{}{}
			defer func() { <-sem }()
			ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
			defer cancel()
			if err := s.Delete(ctx); err != nil {
				mu.Lock()
				errs = append(errs, err)
				mu.Unlock()
			}
		}()
	}
	wg.Wait()
	r.spawn.stop()
	if err := removeRoot(r.root); err != nil {
		errs = append(errs, err)
	}
	r.lock.Close()
	return errors.Join(errs...)
}

// isClosed reports whether Close was called.
func (r *Runtime) isClosed() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.closed
}

// args builds a full argument list for one runsc command.
func (r *Runtime) args(args ...string) []string {
	return slices.Concat(r.flags, args)
}

func (r *Runtime) logf(format string, args ...any) {
	if r.log == nil {
		return
	}
	r.logMu.Lock()
	defer r.logMu.Unlock()
	fmt.Fprintf(r.log, format+"\n", args...)
}

// logWriter serializes writes to Options.Log.
type logWriter struct{ r *Runtime }

func (w logWriter) Write(p []byte) (int, error) {
	w.r.logMu.Lock()
	defer w.r.logMu.Unlock()
	return w.r.log.Write(p)
}

// spawner starts processes from one OS thread that lives as long as the
// Runtime. Pdeathsig fires when the *thread* that forked ends, so starting
// attached runsc processes from arbitrary goroutines could kill sandboxes at
// random.
type spawner struct {
	work chan func()
	once sync.Once
}

func newSpawner() *spawner {
	s := &spawner{work: make(chan func())}
	go func() {
		// Never unlocked: the thread ends with the goroutine.
		runtime.LockOSThread()
		for f := range s.work {
			f()
		}
	}()
	return s
}

// start starts cmd so that it dies with this process.
func (s *spawner) start(cmd *exec.Cmd) error {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	done := make(chan error, 1)
	s.work <- func() { done <- cmd.Start() }
	return <-done
}

func (s *spawner) stop() { s.once.Do(func() { close(s.work) }) }

// The files that fleet itself keeps in the root directory.
const (
	lockName   = "fleet.lock"
	recordName = "fleet.json"
)

// record is what Reclaim needs to know about a Runtime that died.
type record struct {
	Binary    string          `json:"binary"`
	Flags     []string        `json:"flags"`
	Sandboxes []sandboxRecord `json:"sandboxes"`
}

type sandboxRecord struct {
	ID        string      `json:"id"`
	Processes []processID `json:"processes"`
}

// lockRoot takes the lock that tells a living Runtime's root from a dead one's.
func lockRoot(root string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(root, lockName), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("fleet: root directory: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		if err == unix.EWOULDBLOCK {
			return nil, fmt.Errorf("fleet: root directory %s is in use: %w", root, ErrInUse)
		}
		return nil, fmt.Errorf("fleet: locking %s: %w", root, err)
	}
	return f, nil
}

// ErrInUse says that a root directory belongs to a living Runtime.
var ErrInUse = errors.New("another process drives sandboxes with it")

// saveRecord writes what Reclaim would need, replacing the file atomically.
func (r *Runtime) saveRecord() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	rec := record{Binary: r.binary, Flags: r.flags}
	for _, s := range r.sandboxes {
		rec.Sandboxes = append(rec.Sandboxes, sandboxRecord{ID: s.id, Processes: s.ownProcesses()})
	}
	b, err := json.Marshal(rec)
	if err != nil {
		return fmt.Errorf("fleet: %w", err)
	}
	path := filepath.Join(r.root, recordName)
	if err := os.WriteFile(path+".new", b, 0o600); err != nil {
		return fmt.Errorf("fleet: recording sandboxes: %w", err)
	}
	return os.Rename(path+".new", path)
}

// Reclaim cleans up the root directory of a Runtime whose process died before
// it could Close: it kills the recorded processes that still exist (a reused
// process id is told apart by its start time), deletes the recorded sandboxes,
// unmounts and removes the directory. It returns an error wrapping ErrInUse,
// and touches nothing, if the Runtime is alive. A missing root is fine.
func Reclaim(root string) error {
	if _, err := os.Stat(root); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	b, err := os.ReadFile(filepath.Join(root, recordName))
	if errors.Is(err, os.ErrNotExist) {
		// Nothing was started yet if only the lock file is there.
		if entries, err := os.ReadDir(root); err == nil && (len(entries) == 0 || len(entries) == 1 && entries[0].Name() == lockName) {
			lock, err := lockRoot(root)
			if err != nil {
				return err
			}
			defer lock.Close()
			return removeRoot(root)
		}
		return fmt.Errorf("fleet: %s has no %s: not a root directory of this package, leaving it alone", root, recordName)
	} else if err != nil {
		return fmt.Errorf("fleet: %w", err)
	}
	var rec record
	if err := json.Unmarshal(b, &rec); err != nil {
		return fmt.Errorf("fleet: %s: %w", filepath.Join(root, recordName), err)
	}
	lock, err := lockRoot(root)
	if err != nil {
		return err
	}
	defer lock.Close()
	for _, s := range rec.Sandboxes {
		for _, p := range s.Processes {
			p.kill()
		}
		// runsc would kill whoever has the id of a process of the sandbox now. Its
		// state files go with the root directory then.
		reused := slices.ContainsFunc(s.Processes, processID.reused)
		if _, err := client.FindBinary(rec.Binary); err == nil && !reused {
			ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
			// Best effort: its processes are gone; this removes state files
			// and a control socket that did not fit into the root directory.
			exec.CommandContext(ctx, rec.Binary, slices.Concat(rec.Flags, []string{"delete", "-force", s.ID})...).Run()
			cancel()
		}
	}
	return removeRoot(root)
}

// removeRoot unmounts what runsc mounts in its root (null-netns) and removes
// the directory. It never descends into something that is still mounted.
func removeRoot(root string) error {
	mounts, err := mountsUnder(root)
	if err != nil {
		return fmt.Errorf("fleet: %w", err)
	}
	// Deepest first.
	slices.Reverse(mounts)
	for _, m := range mounts {
		if err := unix.Unmount(m, unix.MNT_DETACH); err != nil && err != unix.EINVAL && err != unix.ENOENT {
			return fmt.Errorf("fleet: unmounting %s: %w", m, err)
		}
	}
	if err := os.RemoveAll(root); err != nil {
		return fmt.Errorf("fleet: removing the root directory: %w", err)
	}
	return nil
}

// mountsUnder returns the mount points at or below dir, sorted.
func mountsUnder(dir string) ([]string, error) {
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	return parseMountsUnder(string(b), dir), nil
}

func parseMountsUnder(mountinfo, dir string) []string {
	unescape := strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)
	var out []string
	for line := range strings.Lines(mountinfo) {
		f := strings.Fields(line)
		if len(f) < 5 {
			continue
		}
		mp := unescape.Replace(f[4])
		if mp == dir || strings.HasPrefix(mp, dir+"/") {
			out = append(out, mp)
		}
	}
	slices.Sort(out)
	return out
}
