package docker

import (
	"bytes"
	"context"
	"encoding/json"
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
	"syscall"
	"testing"
	"time"
)

const (
	// workPrefix names the folder under which everything of one run lives. It
	// is not under /tmp: the Sentry mounts its own /tmp, which would hide a
	// binary kept there.
	workParent = "/var/tmp"
	workPrefix = "agentzip-docker-"

	runtimeName    = "agentzip"
	runtimeOffName = "agentzip-off"
	imageName      = "agentzip-test:1"
)

// daemon is a containerd and a dockerd of our own, which share nothing with
// those the machine may run: own sockets, data, state and cgroup.
type daemon struct {
	ctx     context.Context
	work    string
	runtime string
	// patched tells whether runtime is runsc-agentzip and not a stock runsc.
	patched bool
	docker  string
	procs   []*process
}

// process is a daemon that we started, so that we may signal it by its id.
type process struct {
	name string
	cmd  *exec.Cmd
	done chan struct{}
}

// startDaemon brings both daemons up and registers their removal.
func startDaemon(ctx context.Context, t *testing.T, runtime string) *daemon {
	t.Helper()
	removeAbandoned(t)

	work, err := os.MkdirTemp(workParent, workPrefix)
	if err != nil {
		t.Fatal(err)
	}
	d := &daemon{ctx: ctx, work: work, runtime: runtime}
	t.Cleanup(func() { d.stop(t) })
	d.write(t, ownerFile, strconv.Itoa(os.Getpid()))

	if strings.HasPrefix(runtime, "/tmp/") {
		d.runtime = filepath.Join(work, "runsc")
		copyFile(t, runtime, d.runtime)
	}
	d.patched = isPatched(ctx, d.runtime)
	if d.docker, err = exec.LookPath("docker"); err != nil {
		t.Fatal(err)
	}

	d.write(t, "containerd.toml", fmt.Sprintf(`version = 2
root = %q
state = %q
disabled_plugins = ["io.containerd.grpc.v1.cri"]
[grpc]
  address = %q
`, d.path("ctrd"), d.path("ctrd-state"), d.containerdSocket()))
	d.start(t, "containerd", "--config", d.path("containerd.toml"))
	d.await(t, "containerd", func() error {
		_, err := d.output("ctr", "--address", d.containerdSocket(), "version")
		return err
	})

	if err := os.Mkdir(d.path("runsc-logs"), 0o755); err != nil {
		t.Fatal(err)
	}
	config, err := json.MarshalIndent(map[string]any{
		"hosts":      []string{"unix://" + d.path("docker.sock")},
		"containerd": d.containerdSocket(),
		"data-root":  d.path("data"),
		"exec-root":  d.path("exec"),
		"pidfile":    d.path("docker.pid"),
		// docker checkpoint is an experimental command.
		"experimental": true,
		// No network at all: nothing to leave behind in the host's tables.
		"bridge":         "none",
		"iptables":       false,
		"ip6tables":      false,
		"ip-forward":     false,
		"ip-masq":        false,
		"userland-proxy": false,
		"exec-opts":      []string{"native.cgroupdriver=cgroupfs"},
		"cgroup-parent":  d.cgroup(),
	}, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	d.write(t, "daemon.json", string(config))
	d.install(t, runtimeName)
	if d.patched {
		d.install(t, runtimeOffName, "--agentzip=off")
	}
	d.start(t, "dockerd", "--config-file", d.path("daemon.json"))
	d.await(t, "dockerd", func() error {
		_, err := d.output(d.docker, "version")
		return err
	})
	return d
}

// install enters the runtime into daemon.json under a name, with these flags and those
// of all runtimes of the test.
func (d *daemon) install(t *testing.T, name string, flags ...string) {
	t.Helper()
	d.mustOutput(t, d.runtime, append(d.installArgs(name), flags...)...)
}

func (d *daemon) installArgs(name string) []string {
	return []string{"install", "--config_file=" + d.path("daemon.json"), "--runtime=" + name, "--",
		"--network=none", "--platform=systrap", "--debug-log=" + d.path("runsc-logs") + "/"}
}

// reload has dockerd read daemon.json again.
func (d *daemon) reload(t *testing.T) {
	t.Helper()
	p := d.procs[len(d.procs)-1]
	if err := p.cmd.Process.Signal(syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
}

func (d *daemon) path(name string) string          { return filepath.Join(d.work, name) }
func (d *daemon) containerdSocket() string         { return d.path("containerd.sock") }
func (d *daemon) cgroup() string                   { return "/" + filepath.Base(d.work) }
func (d *daemon) logFile(name string) string       { return d.path(name + ".log") }
func (d *daemon) read(name string) ([]byte, error) { return os.ReadFile(d.path(name)) }

func (d *daemon) write(t *testing.T, name, content string) {
	t.Helper()
	if err := os.WriteFile(d.path(name), []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}

// start runs a daemon in a session of its own, so that a Ctrl-C at the terminal
// reaches only the test, which then stops the daemons in order.
func (d *daemon) start(t *testing.T, name string, args ...string) {
	t.Helper()
	log, err := os.Create(d.logFile(name))
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	cmd := exec.Command(name, args...)
	cmd.Env = d.env()
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		t.Fatalf("starting %s: %v", name, err)
	}
	p := &process{name: name, cmd: cmd, done: make(chan struct{})}
	go func() {
		cmd.Wait()
		close(p.done)
	}()
	d.procs = append(d.procs, p)
}

// await polls until the daemon that was started last answers.
func (d *daemon) await(t *testing.T, name string, ready func() error) {
	t.Helper()
	p := d.procs[len(d.procs)-1]
	deadline := time.Now().Add(60 * time.Second)
	for {
		err := ready()
		if err == nil {
			return
		}
		select {
		case <-p.done:
			t.Fatalf("%s ended while starting:\n%s", name, tail(d.logFile(name)))
		case <-d.ctx.Done():
			t.Fatalf("%s: %v", name, context.Cause(d.ctx))
		case <-time.After(100 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s did not come up: %v\n%s", name, err, tail(d.logFile(name)))
		}
	}
}

// env is the environment of every command: the user's own Docker settings must
// neither steer the test nor be changed by it.
func (d *daemon) env() []string {
	return append(os.Environ(),
		"DOCKER_HOST=unix://"+d.path("docker.sock"),
		"DOCKER_CONFIG="+d.path("config"),
		"DOCKER_CONTEXT=",
		"TMPDIR="+d.work)
}

// stop ends what runs and removes everything, whatever state the test is in. It
// must not use d.ctx, which may be what ended the test.
func (d *daemon) stop(t *testing.T) {
	if t.Failed() {
		for _, p := range d.procs {
			t.Logf("end of %s's log:\n%s", p.name, tail(d.logFile(p.name)))
		}
		logs, _ := filepath.Glob(d.path("runsc-logs/*"))
		for _, log := range logs {
			if text := sentryFailure(log); text != "" {
				t.Logf("%s:\n%s", filepath.Base(log), text)
			}
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if len(d.procs) == 2 {
		ids, err := d.outputContext(ctx, d.docker, "ps", "--all", "--quiet", "--no-trunc")
		if err == nil && len(strings.Fields(ids)) > 0 {
			if _, err := d.outputContext(ctx, d.docker, append([]string{"rm", "--force", "--volumes"}, strings.Fields(ids)...)...); err != nil {
				t.Errorf("removing containers: %v", err)
			}
		}
	}
	// dockerd writes its own id, which is the one to trust where a wrapper
	// stands between it and us.
	if pid, err := d.read("docker.pid"); err == nil {
		if n, err := strconv.Atoi(strings.TrimSpace(string(pid))); err == nil && n > 1 {
			syscall.Kill(n, syscall.SIGTERM)
		}
	}
	for _, p := range slices.Backward(d.procs) {
		p.cmd.Process.Signal(syscall.SIGTERM)
		select {
		case <-p.done:
		case <-time.After(30 * time.Second):
			t.Errorf("%s did not stop on SIGTERM", p.name)
			p.cmd.Process.Kill()
			<-p.done
		}
	}
	for _, problem := range removeWork(d.work) {
		t.Error(problem)
	}
}

const ownerFile = "owner.pid"

// removeAbandoned clears what a run left that was killed outright: nothing can
// be registered against SIGKILL, so the next run does it.
func removeAbandoned(t *testing.T) {
	works, _ := filepath.Glob(filepath.Join(workParent, workPrefix+"*"))
	for _, work := range works {
		content, err := os.ReadFile(filepath.Join(work, ownerFile))
		pid, _ := strconv.Atoi(string(content))
		if err != nil || pid > 1 && syscall.Kill(pid, 0) == nil {
			continue
		}
		t.Logf("removing what an earlier, killed run left in %s", work)
		for _, problem := range removeWork(work) {
			t.Log(problem)
		}
	}
}

// removeWork ends every process that names the folder, which is ours alone,
// then removes mounts, cgroups and the folder. It returns what should not have
// been there, or could not be removed.
func removeWork(work string) (problems []string) {
	report := func(format string, args ...any) {
		problems = append(problems, fmt.Sprintf(format, args...))
	}
	for _, pid := range processesNaming(work) {
		report("process %d was left running: %s", pid, commandLine(pid))
		syscall.Kill(pid, syscall.SIGKILL)
	}
	deadline := time.Now().Add(10 * time.Second)
	for len(processesNaming(work)) > 0 && time.Now().Before(deadline) {
		time.Sleep(50 * time.Millisecond)
	}
	// The last mounted first. Those of dockerd's and runsc's own that outlive
	// an orderly stop (null-netns, for one) are no failure.
	mounts := mountsUnder(work)
	for _, mount := range slices.Backward(mounts) {
		if err := syscall.Unmount(mount, syscall.MNT_DETACH); err != nil {
			report("umount %s: %v", mount, err)
		}
	}
	if left := mountsUnder(work); len(left) > 0 {
		report("still mounted, folder kept: %q", left)
		return problems
	}
	cgroups, _ := filepath.Glob("/sys/fs/cgroup/*/" + filepath.Base(work))
	unified, _ := filepath.Glob("/sys/fs/cgroup/" + filepath.Base(work))
	for _, root := range append(cgroups, unified...) {
		if err := removeCgroup(root); err != nil {
			report("removing cgroup: %v", err)
		}
	}
	if err := os.RemoveAll(work); err != nil {
		report("%v", err)
	}
	return problems
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
		// A dying process may hold its cgroup for a moment.
		err := syscall.Rmdir(dir)
		for range 50 {
			if err == nil || errors.Is(err, fs.ErrNotExist) {
				err = nil
				break
			}
			time.Sleep(20 * time.Millisecond)
			err = syscall.Rmdir(dir)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", dir, err))
		}
	}
	return errors.Join(errs...)
}

// processesNaming lists the processes with text in their command line, but for
// this one.
func processesNaming(text string) (pids []int) {
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err == nil && pid != os.Getpid() && strings.Contains(commandLine(pid), text) {
			pids = append(pids, pid)
		}
	}
	return pids
}

func commandLine(pid int) string {
	content, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	return string(bytes.TrimSpace(bytes.ReplaceAll(content, []byte{0}, []byte{' '})))
}

func mountsUnder(dir string) (mounts []string) {
	content, _ := os.ReadFile("/proc/self/mounts")
	for line := range strings.Lines(string(content)) {
		if fields := strings.Fields(line); len(fields) > 1 && strings.HasPrefix(fields[1], dir+"/") {
			mounts = append(mounts, fields[1])
		}
	}
	return mounts
}

// isPatched asks the binary for a flag that a stock runsc refuses.
func isPatched(ctx context.Context, runtime string) bool {
	return exec.CommandContext(ctx, runtime, "--agentzip=off", "--version").Run() == nil
}

func copyFile(t *testing.T, from, to string) {
	t.Helper()
	in, err := os.Open(from)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o755)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(out, in); err != nil {
		t.Fatal(err)
	}
	if err := out.Close(); err != nil {
		t.Fatal(err)
	}
}

// tail returns the last lines of a daemon's log, for a failure's message, but
// for what it says on an ordinary day.
func tail(path string) string {
	content, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	var lines []string
	for line := range strings.Lines(string(content)) {
		if !strings.Contains(line, " level=info ") {
			lines = append(lines, line)
		}
	}
	return strings.Join(lines[max(0, len(lines)-25):], "")
}

// sentryFailure returns what one of runsc's logs says of a Sentry's or a
// command's end, if that was not in order.
func sentryFailure(path string) string {
	content, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	// A panic or fatal error of Go's at the start of a line, or runsc's own
	// FATAL ERROR; the stacks that follow are long.
	lines := strings.Split(string(content), "\n")
	i := slices.IndexFunc(lines, func(line string) bool {
		return strings.HasPrefix(line, "panic: ") || strings.HasPrefix(line, "fatal error: ") || strings.Contains(line, "FATAL ERROR: ")
	})
	if i < 0 {
		return ""
	}
	return strings.Join(lines[i:min(len(lines), i+40)], "\n")
}
