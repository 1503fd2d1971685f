package docker

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

var runtimeFlag = flag.String("runtime", "", "the runtime binary to test (default $AGENTZIP_RUNTIME, else bin/runsc-agentzip)")

func TestMain(m *testing.M) {
	if mib := os.Getenv(holderEnv); mib != "" {
		runHolder(mib)
	}
	flag.Parse()
	// On SIGTERM the go command goes first and the pipe that we print into
	// breaks; dying of that would leave the daemons. (Ignoring the signal would
	// make them inherit that.)
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	os.Exit(m.Run())
}

// holdMiB is what the memory-holding container holds.
const holdMiB = 64

func TestDocker(t *testing.T) {
	runtime := findRuntime(t)

	// End early enough, on the test's own time-out as on Ctrl-C, for the
	// daemons to be stopped and removed.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	t.Cleanup(stop)
	if deadline, ok := t.Deadline(); ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(ctx, deadline.Add(-2*time.Minute))
		t.Cleanup(cancel)
	}

	d := startDaemon(ctx, t, runtime)
	rootfs := makeRootfs(t, d)
	importImage(t, d, rootfs)

	for _, test := range []struct {
		name string
		run  func(*testing.T)
	}{
		{"Run", func(t *testing.T) { testRun(t, d) }},
		{"MemoryLimit", func(t *testing.T) { testMemoryLimit(t, d) }},
		{"Files", func(t *testing.T) { testFiles(t, d) }},
		{"ExecAndPause", func(t *testing.T) { testExecAndPause(t, d) }},
		{"HoldCheckpointRestore", func(t *testing.T) { testHold(t, d) }},
		{"Update", func(t *testing.T) { testUpdate(t, d) }},
		{"Copy", func(t *testing.T) { testCopy(t, d) }},
		{"RunArgsOff", func(t *testing.T) { testRunArgsOff(t, d) }},
		{"Install", func(t *testing.T) { testInstall(t, d) }},
		{"Annotation", func(t *testing.T) { testAnnotation(t, d, rootfs) }},
	} {
		if ctx.Err() != nil {
			t.Fatal(context.Cause(ctx))
		}
		t.Run(test.name, test.run)
	}
}

// TestRemoveAbandoned clears what a killed run left, for CI to call by name.
func TestRemoveAbandoned(t *testing.T) {
	removeAbandoned(t)
}

// findRuntime returns the binary under test. A missing prerequisite skips the
// test, unless the binary was named: whoever names it wants the test to run.
func findRuntime(t *testing.T) string {
	t.Helper()
	path := *runtimeFlag
	if path == "" {
		path = os.Getenv("AGENTZIP_RUNTIME")
	}
	giveUp := t.Fatalf
	if path == "" {
		giveUp = t.Skipf
		path = "bin/runsc-agentzip"
	}
	// go test starts the test in its package's folder; a relative path is
	// meant from the repository.
	if !filepath.IsAbs(path) {
		path = filepath.Join(repository(t), path)
	}
	path, err := filepath.EvalSymlinks(path)
	if err != nil {
		giveUp("no runtime to test: %v (make build makes it)", err)
	}
	if os.Geteuid() != 0 {
		giveUp("dockerd and runsc need root")
	}
	for _, tool := range []string{"dockerd", "docker", "containerd", "ctr", "busybox"} {
		if _, err := exec.LookPath(tool); err != nil {
			giveUp("%v: install docker.io and busybox-static (make deps does)", err)
		}
	}
	return path
}

func repository(t *testing.T) string {
	t.Helper()
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for ; dir != "/"; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir
		}
	}
	t.Fatal("not inside the repository: no go.mod above the working folder")
	return ""
}

// makeRootfs makes a root filesystem of busybox and this test binary.
func makeRootfs(t *testing.T, d *daemon) string {
	t.Helper()
	rootfs := d.path("rootfs")
	for _, dir := range []string{"bin", "dev", "etc", "proc", "sys", "tmp", "root"} {
		if err := os.MkdirAll(filepath.Join(rootfs, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		t.Fatal(err)
	}
	copyFile(t, busybox, filepath.Join(rootfs, "bin/busybox"))
	d.mustOutput(t, "chroot", rootfs, "/bin/busybox", "--install", "-s", "/bin")
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	copyFile(t, self, filepath.Join(rootfs, holderPath))
	return rootfs
}

func importImage(t *testing.T, d *daemon, rootfs string) {
	t.Helper()
	archive := d.path("image.tar")
	d.mustOutput(t, "tar", "-C", rootfs, "-cf", archive, ".")
	d.mustOutput(t, d.docker, "import", archive, imageName)
	if err := os.Remove(archive); err != nil {
		t.Fatal(err)
	}
}

func testRun(t *testing.T, d *daemon) {
	// dmesg is the Sentry's own: the container does not run on the host's
	// kernel.
	got := d.mustRun(t, "sh", "-c", "echo hello; dmesg | head -1; id -u")
	lines := strings.Split(strings.TrimSpace(got), "\n")
	if len(lines) != 3 || lines[0] != "hello" || !strings.Contains(lines[1], "gVisor") || lines[2] != "0" {
		t.Errorf("output %q, want hello, gVisor's boot message, 0", got)
	}

	_, err := d.run("sh", "-c", "echo to-stderr >&2; exit 7")
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 7 || !strings.Contains(err.Error(), "to-stderr") {
		t.Errorf("want exit status 7 and the container's stderr, got %v", err)
	}
}

func testMemoryLimit(t *testing.T, d *daemon) {
	got := d.mustOutput(t, d.docker, "run", "--rm", "--network", "none", "--runtime", runtimeName,
		"-m", "256m", imageName, "grep", "MemTotal", "/proc/meminfo")
	if fields := strings.Fields(got); len(fields) != 3 || fields[1] != "262144" {
		t.Errorf("-m 256m: the guest sees %q, want 262144 kB", got)
	}
	if !d.patched {
		return
	}
	// Compressed, half of it is left: without evicting while it works the
	// container would be killed.
	id := d.mustHoldWithin(t, runtimeName, "256m", 400)
	d.mustVerify(t, id, 1)
	s := d.stats(t, id)
	if s.Pressure.LimitBytes != 256<<20 || s.Pressure.Evictions == 0 {
		t.Errorf("-m 256m: 400 MiB were filled and compared under pressure %+v", s.Pressure)
	}
	t.Logf("-m 256m: held and compared 400 MiB: %+v", s.Pressure)
	d.mustOutput(t, d.docker, "rm", "--force", id)
}

func testFiles(t *testing.T, d *daemon) {
	shared := d.path("shared")
	if err := os.MkdirAll(shared, 0o755); err != nil {
		t.Fatal(err)
	}
	d.write(t, "shared/in", "from the host")
	d.mustOutput(t, d.docker, "run", "--rm", "--network", "none", "--runtime", runtimeName,
		"-v", shared+":/shared", "--tmpfs", "/scratch", imageName, "sh", "-ec", `
		cp /shared/in /scratch/a; cat /scratch/a > /shared/out
		dd if=/dev/urandom of=/scratch/big bs=64k count=64 2>/dev/null
		cp /scratch/big /root/big; cmp /scratch/big /root/big; truncate -s 100 /scratch/big; cmp -n 100 /scratch/big /root/big`)
	if got, err := d.read("shared/out"); err != nil || string(got) != "from the host" {
		t.Errorf("file written through the bind mount: %q, %v", got, err)
	}
}

func testExecAndPause(t *testing.T, d *daemon) {
	id := d.mustStart(t, "--env", "FROM_RUN=yes", "--hostname", "box")
	got := d.mustOutput(t, d.docker, "exec", "--env", "MORE=too", id, "sh", "-c", "echo $FROM_RUN $MORE $(hostname)")
	if strings.TrimSpace(got) != "yes too box" {
		t.Errorf("exec printed %q", got)
	}
	var exit *exec.ExitError
	if _, err := d.output(d.docker, "exec", id, "sh", "-c", "exit 9"); !errors.As(err, &exit) || exit.ExitCode() != 9 {
		t.Errorf("exec: want exit status 9, got %v", err)
	}
	cmd := d.command(d.ctx, d.docker, "exec", "--interactive", id, "sh", "-c", "cat; cat > /root/copied < /dev/null")
	cmd.Stdin = strings.NewReader("through stdin")
	if got, err := cmd.Output(); err != nil || string(got) != "through stdin" {
		t.Errorf("exec with stdin: %q, %v", got, err)
	}
	d.mustOutput(t, d.docker, "pause", id)
	d.mustOutput(t, d.docker, "unpause", id)
	if got := d.mustOutput(t, d.docker, "exec", id, "echo", "alive"); strings.TrimSpace(got) != "alive" {
		t.Errorf("exec after unpause printed %q", got)
	}
	d.mustOutput(t, d.docker, "rm", "--force", id)
}

// testHold takes a container that holds memory through everything that may
// happen to it: an idle time (in which the patched binary evicts it), a
// checkpoint, a restore and an idle time again, comparing every byte each time.
func testHold(t *testing.T, d *daemon) {
	id := d.mustHold(t, runtimeName)
	if d.patched {
		d.awaitEvicted(t, id)
	}
	d.mustVerify(t, id, 1)
	if d.patched {
		if s := d.stats(t, id); s.RestoredPagesTotal == 0 {
			t.Errorf("every page was read after eviction, but restored_pages_total is 0: %+v", s)
		}
		// The image is taken of a sandbox with evicted pages.
		d.awaitEvicted(t, id)
	}
	d.mustOutput(t, d.docker, "checkpoint", "create", id, "cp1")
	d.mustOutput(t, d.docker, "start", "--checkpoint", "cp1", id)
	d.mustVerify(t, id, 2)
	if d.patched {
		d.awaitEvicted(t, id)
		d.mustVerify(t, id, 3)
		if s := d.stats(t, id); s.ChecksumFailures != 0 {
			t.Errorf("checksum_failures is %d", s.ChecksumFailures)
		}
		d.mustAgentzip(t, "check", id)
	}
	d.mustOutput(t, d.docker, "rm", "--force", id)
}

// testRunArgsOff: with --agentzip=off in daemon.json's runtimeArgs, nothing is
// ever evicted.
func testRunArgsOff(t *testing.T, d *daemon) {
	if !d.patched {
		t.Skip("the runtime under test is a stock runsc")
	}
	id := d.mustHold(t, runtimeOffName)
	time.Sleep(2 * time.Second)
	d.mustVerify(t, id, 1)
	d.mustOutput(t, d.docker, "rm", "--force", id)
}

// testUpdate changes the memory limit of a container that runs, both ways.
func testUpdate(t *testing.T, d *daemon) {
	if !d.patched {
		t.Skip("the runtime under test is a stock runsc, which cannot go below what it holds")
	}
	id := d.mustHold(t, runtimeName)
	update := func(limit string) {
		t.Helper()
		d.mustOutput(t, d.docker, "update", "--memory", limit, "--memory-swap", limit, id)
	}
	limit := func(want uint64) {
		t.Helper()
		var s stats
		for start := time.Now(); time.Since(start) < 30*time.Second; time.Sleep(200 * time.Millisecond) {
			// It looks for a new limit while it works.
			d.mustOutput(t, d.docker, "exec", id, "sh", "-c", "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done")
			if s = d.stats(t, id); s.Pressure.LimitBytes == want {
				return
			}
		}
		t.Fatalf("docker update: the sandbox has the limit %d, want %d", s.Pressure.LimitBytes, want)
	}
	d.awaitEvicted(t, id)
	round := 0
	for _, c := range []struct {
		name  string
		bytes uint64
	}{{"300m", 300 << 20}, {"1g", 1 << 30}} {
		update(c.name)
		limit(c.bytes)
		round++
		d.mustVerify(t, id, round)
		got := d.mustOutput(t, d.docker, "inspect", "--format", "{{.HostConfig.Memory}}", id)
		if strings.TrimSpace(got) != fmt.Sprint(c.bytes) {
			t.Errorf("docker update --memory %s: docker inspect says %s", c.name, got)
		}
	}
	d.mustOutput(t, d.docker, "rm", "--force", id)
}

// testCopy copies a file into a container. Out of one, see testInstall.
func testCopy(t *testing.T, d *daemon) {
	d.write(t, "to-copy", "copied in")
	id := strings.TrimSpace(d.mustOutput(t, d.docker, "create", "--network", "none", "--runtime", runtimeName,
		imageName, "cat", "/root/copy"))
	d.mustOutput(t, d.docker, "cp", d.path("to-copy"), id+":/root/copy")
	if got := d.mustOutput(t, d.docker, "start", "--attach", id); strings.TrimSpace(got) != "copied in" {
		t.Errorf("the container reads %q from the file that was copied into it", got)
	}
	d.mustOutput(t, d.docker, "rm", "--force", id)
}

// testInstall has daemon.json changed while dockerd runs: a second runtime with other
// flags, which old versions of Docker have instead of annotations.
func testInstall(t *testing.T, d *daemon) {
	if !d.patched {
		t.Skip("the runtime under test is a stock runsc")
	}
	const name = "agentzip-eager"
	before, err := d.read("daemon.json")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := d.output(d.runtime, append(d.installArgs(name), "--agentzip-idel=1s")...); err == nil || !strings.Contains(err.Error(), "agentzip-idel") {
		t.Errorf("install with a flag that does not exist: %v", err)
	}
	if _, err := d.output(d.runtime, "--agentzip-idle=1s", "install", "--config_file="+d.path("daemon.json")); err == nil || !strings.Contains(err.Error(), "install -- --agentzip-idle=1s") {
		t.Errorf("install with a flag before it: %v", err)
	}
	if after, _ := d.read("daemon.json"); !bytes.Equal(before, after) {
		t.Fatalf("an install that was refused changed daemon.json to %s", after)
	}
	// What its containers write is on the host, where docker cp finds it.
	flags := []string{"--agentzip-idle=50ms", "--overlay2=none"}
	d.install(t, name, flags...)
	d.install(t, name, flags...)
	d.reload(t)
	var id string
	for start := time.Now(); ; time.Sleep(100 * time.Millisecond) {
		if id, err = d.output(d.docker, "run", "--detach", "--network", "none", "--runtime", name, imageName, "sleep", "3600"); err == nil {
			break
		}
		if time.Since(start) > 30*time.Second {
			t.Fatalf("dockerd does not run the runtime that it was told of: %v", err)
		}
	}
	id = strings.TrimSpace(id)
	started := ""
	for _, pid := range processesNaming(id) {
		if line := commandLine(pid); strings.HasPrefix(line, "runsc-sandbox ") {
			started = line
		}
	}
	if !strings.Contains(started, "--agentzip-idle=50ms") {
		t.Errorf("the sandbox was started as %q, want --agentzip-idle=50ms", started)
	}
	d.mustOutput(t, d.docker, "exec", id, "sh", "-c", "echo made inside > /root/made")
	d.mustOutput(t, d.docker, "cp", id+":/root/made", d.path("copied-out"))
	if got, err := d.read("copied-out"); err != nil || string(got) != "made inside\n" {
		t.Errorf("docker cp brought %q, %v out of the container", got, err)
	}
	d.mustOutput(t, d.docker, "rm", "--force", id)

	d.mustOutput(t, d.runtime, "uninstall", "--config_file="+d.path("daemon.json"), "--runtime="+name)
	if after, _ := d.read("daemon.json"); !bytes.Equal(before, after) {
		t.Errorf("install and uninstall left daemon.json as %s", after)
	}
	d.reload(t)
	for start := time.Now(); ; time.Sleep(100 * time.Millisecond) {
		if _, err := d.output(d.docker, "run", "--rm", "--network", "none", "--runtime", name, imageName, "true"); err != nil {
			if !strings.Contains(err.Error(), name) {
				t.Errorf("a runtime that was removed: %v", err)
			}
			break
		}
		if time.Since(start) > 30*time.Second {
			t.Fatal("dockerd still runs the runtime that was removed")
		}
	}
	// The others are as they were.
	d.mustRun(t, "true")
}

// testAnnotation passes an OCI annotation the two ways that Docker's stack has:
// through containerd, and through docker run where its version can.
func testAnnotation(t *testing.T, d *daemon, rootfs string) {
	// A stock runsc ignores annotations that it does not know; the patched
	// one must refuse a wrong value by name.
	const annotation = "dev.agentzip.mode"
	check := func(t *testing.T, run func(value string) (string, error)) {
		t.Helper()
		if got, err := run("off"); err != nil || strings.TrimSpace(got) != "annotated" {
			t.Errorf("%s=off: %q, %v", annotation, got, err)
		}
		got, err := run("perhaps")
		switch {
		case d.patched && err == nil:
			t.Errorf("%s=perhaps was accepted: %q", annotation, got)
		case d.patched && !strings.Contains(err.Error(), annotation):
			t.Errorf("the message for a wrong value does not name %s: %v", annotation, err)
		case !d.patched && err != nil:
			t.Error(err)
		}
	}
	t.Run("containerd", func(t *testing.T) {
		n := 0
		check(t, func(value string) (string, error) {
			n++
			return d.output("ctr", "--address", d.containerdSocket(), "--namespace", "agentzip", "run",
				"--rm", "--rootfs", "--cgroup", fmt.Sprintf("%s/ctr%d", d.cgroup(), n),
				"--runc-binary", d.runtime, "--runc-root", d.path("ctr-root"),
				"--annotation", annotation+"="+value, rootfs, fmt.Sprintf("annotated%d", n), "/bin/echo", "annotated")
		})
	})
	t.Run("docker", func(t *testing.T) {
		version := d.mustOutput(t, d.docker, "version", "--format", "{{.Server.APIVersion}}")
		var major, minor int
		if _, err := fmt.Sscanf(version, "%d.%d", &major, &minor); err != nil {
			t.Fatalf("API version %q: %v", version, err)
		}
		if major == 1 && minor < 43 {
			t.Skipf("docker run --annotation needs API 1.43, this dockerd has %s", strings.TrimSpace(version))
		}
		check(t, func(value string) (string, error) {
			return d.output(d.docker, "run", "--rm", "--network", "none", "--runtime", runtimeName,
				"--annotation", annotation+"="+value, imageName, "echo", "annotated")
		})
	})
}

// stats are the fields of `agentzip stats -json` that this test looks at, under
// the names that other programs rely on.
type stats struct {
	GuestBytes         uint64 `json:"guest_bytes"`
	OwnedBytes         uint64 `json:"owned_bytes"`
	EvictedPagesTotal  uint64 `json:"evicted_pages_total"`
	RestoredPagesTotal uint64 `json:"restored_pages_total"`
	ChecksumFailures   uint64 `json:"checksum_failures"`
	Pressure           struct {
		LimitBytes  uint64 `json:"limit_bytes"`
		UsedBytes   uint64 `json:"used_bytes"`
		Evictions   uint64 `json:"evictions"`
		ThrottledNS uint64 `json:"throttled_ns"`
	} `json:"pressure"`
}

func (d *daemon) stats(t *testing.T, id string) (s stats) {
	t.Helper()
	out := d.mustAgentzip(t, "stats", "-json", id)
	if err := json.Unmarshal([]byte(out), &s); err != nil {
		t.Fatalf("stats -json: %v in %q", err, out)
	}
	return s
}

// mustAgentzip runs one of our own commands on a container of dockerd's, whose
// state lies in a folder that dockerd chose.
func (d *daemon) mustAgentzip(t *testing.T, args ...string) string {
	t.Helper()
	id := args[len(args)-1]
	roots, _ := filepath.Glob(d.path("exec/runtime-*/moby"))
	for _, root := range roots {
		if states, _ := filepath.Glob(filepath.Join(root, id+"*")); len(states) > 0 {
			return d.mustOutput(t, d.runtime, append([]string{"--root", root, "agentzip"}, args...)...)
		}
	}
	t.Fatalf("no runtime root under %s knows container %s; there are %q", d.path("exec"), id, roots)
	return ""
}

// awaitEvicted waits until the idle holder's memory has shrunk. A quarter of
// its pages is noise, which has to stay.
func (d *daemon) awaitEvicted(t *testing.T, id string) {
	t.Helper()
	const held = holdMiB << 20
	var s stats
	for start := time.Now(); time.Since(start) < time.Minute; time.Sleep(200 * time.Millisecond) {
		s = d.stats(t, id)
		if s.EvictedPagesTotal > 0 && s.GuestBytes >= held && s.OwnedBytes <= s.GuestBytes-held/2 {
			t.Logf("evicted after %v: %d MiB of guest memory owns %d MiB", time.Since(start).Round(time.Millisecond), s.GuestBytes>>20, s.OwnedBytes>>20)
			return
		}
	}
	t.Fatalf("the idle container was not evicted within a minute: %+v", s)
}

func (d *daemon) command(ctx context.Context, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env = d.env()
	// A Ctrl-C at the terminal is ours to handle, not the client's.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.WaitDelay = 5 * time.Second
	return cmd
}

// output runs a command; its error carries what it printed to stderr.
func (d *daemon) output(name string, args ...string) (string, error) {
	return d.outputContext(d.ctx, name, args...)
}

func (d *daemon) outputContext(ctx context.Context, name string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	var stdout, stderr bytes.Buffer
	cmd := d.command(ctx, name, args...)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return stdout.String(), fmt.Errorf("%s %s: %w: %s", filepath.Base(name), strings.Join(args, " "), errors.Join(err, context.Cause(ctx)), strings.TrimSpace(stderr.String()))
	}
	return stdout.String(), nil
}

func (d *daemon) mustOutput(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := d.output(name, args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// run runs a container to its end.
func (d *daemon) run(args ...string) (string, error) {
	return d.output(d.docker, append([]string{"run", "--rm", "--network", "none", "--runtime", runtimeName, imageName}, args...)...)
}

func (d *daemon) mustRun(t *testing.T, args ...string) string {
	t.Helper()
	out, err := d.run(args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// mustStart starts a container that does nothing, and returns its id.
func (d *daemon) mustStart(t *testing.T, flags ...string) string {
	t.Helper()
	args := append([]string{"run", "--detach", "--network", "none", "--runtime", runtimeName}, flags...)
	return strings.TrimSpace(d.mustOutput(t, d.docker, append(args, imageName, "sleep", "3600")...))
}

// mustHold starts a container that holds memory, and waits until it does.
func (d *daemon) mustHold(t *testing.T, runtime string) string {
	t.Helper()
	return d.mustHoldWithin(t, runtime, "512m", holdMiB)
}

// mustHoldWithin is mustHold with a limit of Docker's and a number of MiB.
func (d *daemon) mustHoldWithin(t *testing.T, runtime, limit string, mib int) string {
	t.Helper()
	id := strings.TrimSpace(d.mustOutput(t, d.docker, "run", "--detach", "--network", "none", "--runtime", runtime,
		"-m", limit, "--env", fmt.Sprintf("%s=%d", holderEnv, mib), imageName, holderPath))
	d.awaitLog(t, id, "ready")
	return id
}

// mustVerify makes the holder compare its memory, for the round-th time.
func (d *daemon) mustVerify(t *testing.T, id string, round int) {
	t.Helper()
	d.mustOutput(t, d.docker, "kill", "--signal", "USR1", id)
	d.awaitLog(t, id, fmt.Sprintf("verify %d ok", round))
}

// awaitLog waits for a line of a container's output.
func (d *daemon) awaitLog(t *testing.T, id, line string) {
	t.Helper()
	var out string
	for start := time.Now(); time.Since(start) < time.Minute; time.Sleep(100 * time.Millisecond) {
		out = d.mustOutput(t, d.docker, "logs", id)
		for l := range strings.Lines(out) {
			if strings.TrimSpace(l) == line {
				return
			}
		}
		if strings.Contains(out, "WRONG") {
			break
		}
		if running := d.mustOutput(t, d.docker, "inspect", "--format", "{{.State.Running}}", id); strings.TrimSpace(running) != "true" {
			break
		}
	}
	stderr, _ := d.command(d.ctx, d.docker, "logs", id).CombinedOutput()
	t.Fatalf("the container did not print %q; it printed %q", line, stderr)
}
