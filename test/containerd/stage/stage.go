// Package stage gives a test a private place on the machine in which it can run
// daemons and write to the folders that only one program of a machine may have:
// namespaces of its own for processes, mounts and the network, an empty /run, and
// writable copies of /etc and /usr/local/bin that nobody else sees.
//
// A Stage is open from New until Close, which ends whatever runs in it and removes
// all that it left on the machine: its folder, its cgroups. If the test is killed
// its processes end, too, since the stage's first process ends when the pipe to the
// test does; what is left in the file system is removed by the next RemoveAbandoned.
//
// It needs root, unshare, nsenter and busybox. No network is there, but for
// the loopback device.
package stage

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

const (
	// parent is not /tmp: the Sentry mounts its own /tmp, which would hide a binary
	// kept there.
	parent = "/var/tmp"
	prefix = "agentzip-stage-"
	// ownerFile holds the id of the process that made the folder.
	ownerFile = "owner.pid"
)

// setup runs as the first process of a stage, in its folder. The overlays' upper
// halves are in memory: the machine's folders stay as they are. That dash has
// something to do after cat keeps it from becoming cat, so that it goes on reaping
// what others left.
const setup = `set -e
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/lock /run/stage
for dir in /etc /usr/local/bin; do
	name=$(basename $dir)
	mkdir -p /run/stage/$name/upper /run/stage/$name/work
	mount -t overlay -o lowerdir=$dir,upperdir=/run/stage/$name/upper,workdir=/run/stage/$name/work overlay $dir
done
busybox ip link set lo up
echo ready
cat >/dev/null
exit 0
`

// Tools are the programs that a Stage itself needs.
var Tools = []string{"unshare", "nsenter", "busybox"}

// A Stage is a private place. Its methods may be called from several goroutines.
type Stage struct {
	dir   string
	first *exec.Cmd
	// life keeps the first process running until it is closed.
	life io.Closer
	// pid is the first process, as the machine numbers it.
	pid int

	// Preconditions: mu is held to use what follows it.
	mu   sync.Mutex
	logs []string
}

// New makes a stage with a folder below /var/tmp.
func New() (*Stage, error) {
	dir, err := os.MkdirTemp(parent, prefix)
	if err != nil {
		return nil, fmt.Errorf("stage: %w", err)
	}
	s := &Stage{dir: dir}
	if err := s.open(); err != nil {
		return nil, fmt.Errorf("stage: %w", errors.Join(err, s.Close()))
	}
	return s, nil
}

func (s *Stage) open() error {
	if err := os.Chmod(s.dir, 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(s.Path(ownerFile), []byte(strconv.Itoa(os.Getpid())), 0o644); err != nil {
		return err
	}
	s.first = exec.Command("unshare", "--mount", "--propagation", "private", "--pid", "--net", "--fork", "--kill-child", "--mount-proc", "sh", "-c", setup)
	s.first.Dir = s.dir
	// A Ctrl-C at the terminal is the test's to handle.
	s.first.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	life, err := s.first.StdinPipe()
	if err != nil {
		return err
	}
	s.life = life
	stdout, err := s.first.StdoutPipe()
	if err != nil {
		return err
	}
	// A file, which no process that the stage leaves to itself keeps a reader of.
	stderr, err := os.Create(s.Path("setup.log"))
	if err != nil {
		return err
	}
	defer stderr.Close()
	s.first.Stderr = stderr
	if err := s.first.Start(); err != nil {
		return err
	}
	ready := make([]byte, len("ready\n"))
	if _, err := io.ReadFull(stdout, ready); err != nil {
		text, _ := os.ReadFile(s.Path("setup.log"))
		return fmt.Errorf("setting up namespaces failed: %w: %s", err, bytes.TrimSpace(text))
	}
	children, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%[1]d/children", s.first.Process.Pid))
	if err != nil {
		return err
	}
	if s.pid, err = strconv.Atoi(strings.TrimSpace(string(children))); err != nil {
		return fmt.Errorf("unshare has the children %q, want one", children)
	}
	return nil
}

// Dir is the stage's folder, which has the same path inside and outside.
func (s *Stage) Dir() string { return s.dir }

// Path is a file in the stage's folder.
func (s *Stage) Path(name ...string) string {
	return filepath.Join(append([]string{s.dir}, name...)...)
}

// Cgroup is the path, below every controller's root, of a cgroup that Close removes
// with all below it.
func (s *Stage) Cgroup() string { return "/" + filepath.Base(s.dir) }

// Command is exec.CommandContext inside, with the stage's folder as its working
// folder. Ending ctx ends the waiting for it; what it runs may last until Close.
func (s *Stage) Command(ctx context.Context, name string, args ...string) *exec.Cmd {
	argv := []string{"--target", strconv.Itoa(s.pid), "--mount", "--pid", "--net", "--wdns=" + s.dir, "--", name}
	cmd := exec.CommandContext(ctx, "nsenter", append(argv, args...)...)
	cmd.Env = append(os.Environ(), "HOME="+s.dir, "DOCKER_HOST=", "DOCKER_CONTEXT=", "DOCKER_CONFIG=",
		"XDG_RUNTIME_DIR=", "CONTAINERD_ADDRESS=", "TMPDIR="+s.dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.WaitDelay = 5 * time.Second
	return cmd
}

// Output runs a command inside for at most two minutes. It returns what the command
// printed; an error carries what it printed to stderr, and is an *exec.ExitError
// underneath if it ended with a status.
func (s *Stage) Output(ctx context.Context, name string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, 2*time.Minute, errors.New("it did not end within two minutes"))
	defer cancel()
	var stdout, stderr bytes.Buffer
	cmd := s.Command(ctx, name, args...)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return stdout.String(), fmt.Errorf("%s %s: %w: %s", filepath.Base(name), strings.Join(args, " "),
			errors.Join(err, context.Cause(ctx)), strings.TrimSpace(stderr.String()))
	}
	return stdout.String(), nil
}

// A Daemon is a program that runs until the stage is closed or it is stopped.
type Daemon struct {
	name, log string
	cmd       *exec.Cmd
	done      chan struct{}
}

// Start starts a program whose output goes to the file NAME.log.
func (s *Stage) Start(name, program string, args ...string) (*Daemon, error) {
	d := &Daemon{name: name, log: s.Path(name + ".log"), done: make(chan struct{})}
	// Appended to, since a sandbox that is restored starts at the offset 0 again.
	log, err := os.OpenFile(d.log, os.O_CREATE|os.O_TRUNC|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, fmt.Errorf("stage: %w", err)
	}
	defer log.Close()
	d.cmd = s.Command(context.Background(), program, args...)
	d.cmd.Stdout, d.cmd.Stderr = log, log
	if err := d.cmd.Start(); err != nil {
		return nil, fmt.Errorf("stage: starting %s: %w", name, err)
	}
	go func() {
		d.cmd.Wait()
		close(d.done)
	}()
	s.mu.Lock()
	s.logs = append(s.logs, d.log)
	s.mu.Unlock()
	return d, nil
}

// Done is closed when the program has ended.
func (d *Daemon) Done() <-chan struct{} { return d.done }

// ExitCode is the program's, once it has ended.
func (d *Daemon) ExitCode() int { return d.cmd.ProcessState.ExitCode() }

// Log is what the program has printed so far.
func (d *Daemon) Log() string {
	text, err := os.ReadFile(d.log)
	if err != nil {
		return err.Error()
	}
	return string(text)
}

// Signal sends a signal to the program, not to nsenter, which only waits for it.
func (d *Daemon) Signal(sig syscall.Signal) error {
	children, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%[1]d/children", d.cmd.Process.Pid))
	if err != nil {
		return fmt.Errorf("%s: %w", d.name, err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(children)))
	if err != nil {
		return fmt.Errorf("%s: nsenter has the children %q, want one", d.name, children)
	}
	return syscall.Kill(pid, sig)
}

// Await polls ready until it returns nil, for at most a minute, while the program
// runs.
func (d *Daemon) Await(ctx context.Context, ready func() error) error {
	for start := time.Now(); ; {
		err := ready()
		if err == nil {
			return nil
		}
		select {
		case <-d.done:
			return fmt.Errorf("%s ended: %w; it printed:\n%s", d.name, err, tail(d.Log()))
		case <-ctx.Done():
			return fmt.Errorf("%s: %w", d.name, context.Cause(ctx))
		case <-time.After(100 * time.Millisecond):
		}
		if time.Since(start) > time.Minute {
			return fmt.Errorf("%s is not ready after a minute: %w; it printed:\n%s", d.name, err, tail(d.Log()))
		}
	}
}

// Logs are the ends of what the programs printed, for a failure's message.
func (s *Stage) Logs() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var b strings.Builder
	for _, log := range s.logs {
		text, _ := os.ReadFile(log)
		fmt.Fprintf(&b, "--- the end of %s\n%s", filepath.Base(log), tail(string(text)))
	}
	return b.String()
}

// tail returns the last lines, but for what daemons say on an ordinary day.
func tail(text string) string {
	var lines []string
	for line := range strings.Lines(text) {
		if !strings.Contains(line, "level=info ") {
			lines = append(lines, line)
		}
	}
	return strings.Join(lines[max(0, len(lines)-25):], "")
}

// Processes returns the command lines of what runs inside.
func (s *Stage) Processes() []string {
	var lines []string
	ours, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", s.pid))
	if err != nil {
		return nil
	}
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		if _, err := strconv.Atoi(e.Name()); err != nil {
			continue
		}
		// A sandbox's Sentry is in a process namespace of its own below the stage's,
		// and then so is what it says of itself.
		ns, err := os.Readlink("/proc/" + e.Name() + "/ns/pid_for_children")
		if err != nil {
			continue
		}
		content, err := os.ReadFile("/proc/" + e.Name() + "/cmdline")
		line := string(bytes.TrimSpace(bytes.ReplaceAll(content, []byte{0}, []byte{' '})))
		if err == nil && line != "" && (ns == ours || strings.Contains(line, s.dir)) {
			lines = append(lines, line)
		}
	}
	return lines
}

// Close ends all processes and removes what is left. It may be called again.
func (s *Stage) Close() error {
	if s.life != nil {
		s.life.Close()
		s.life = nil
		if s.first.Process != nil {
			// The first process takes all others of its namespace with it.
			stuck := time.AfterFunc(20*time.Second, func() { s.first.Process.Kill() })
			s.first.Wait()
			stuck.Stop()
		}
	}
	return remove(s.dir)
}

// RemoveAbandoned removes what stages left whose test was killed. Nothing can be
// done against SIGKILL but by the next run.
func RemoveAbandoned() error {
	dirs, err := filepath.Glob(filepath.Join(parent, prefix+"*"))
	if err != nil {
		return err
	}
	var errs []error
	for _, dir := range dirs {
		content, err := os.ReadFile(filepath.Join(dir, ownerFile))
		pid, _ := strconv.Atoi(string(content))
		if err != nil || pid <= 1 || syscall.Kill(pid, 0) == nil {
			continue
		}
		errs = append(errs, remove(dir))
	}
	return errors.Join(errs...)
}

// remove removes a stage's cgroups and its folder.
func remove(dir string) error {
	roots, _ := filepath.Glob("/sys/fs/cgroup/*/" + filepath.Base(dir))
	unified, _ := filepath.Glob("/sys/fs/cgroup/" + filepath.Base(dir))
	var errs []error
	for _, root := range append(roots, unified...) {
		errs = append(errs, removeCgroup(root))
	}
	return errors.Join(append(errs, os.RemoveAll(dir))...)
}

// removeCgroup removes a cgroup and those below it, the deepest first.
func removeCgroup(root string) error {
	var dirs []string
	filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		if err == nil && e.IsDir() {
			dirs = append(dirs, path)
		}
		return nil
	})
	var errs []error
	for _, dir := range slices.Backward(dirs) {
		// A process that has ended holds its cgroup for a moment longer.
		err := syscall.Rmdir(dir)
		for start := time.Now(); errors.Is(err, syscall.EBUSY) && time.Since(start) < 10*time.Second; {
			time.Sleep(20 * time.Millisecond)
			err = syscall.Rmdir(dir)
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, fmt.Errorf("rmdir %s: %w", dir, err))
		}
	}
	return errors.Join(errs...)
}
