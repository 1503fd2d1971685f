package cloud

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"runsc-agentzip/pkg/bundle"
	"runsc-agentzip/pkg/client"
	"runsc-agentzip/test/harness"
)

// An orchestrator calls a runsc as containerd's shim, podman and others do: all by
// the command line.
type orchestrator struct {
	t      *testing.T
	binary string
	dir    string // for files, the same names with each runtime
	root   string
	begin  func() // before each call
	global []string
	// got is what each command came to.
	got map[string]answer
}

// answer is what can be compared between two runtimes.
type answer struct {
	Code int
	// Shape is the JSON that was printed, with types in place of values.
	Shape string
	// Said is what was written to stderr, without what is random.
	Said string
}

// call calls runsc, and writes down under a name what came of it.
func (o *orchestrator) call(name string, args ...string) []byte {
	o.t.Helper()
	o.begin()
	cmd := exec.CommandContext(within(o.t), o.binary, slices.Concat(o.global, args)...)
	cmd.Dir = o.dir
	// A file, since what is detached holds it.
	said, err := os.Create(filepath.Join(o.dir, "stderr"))
	if err != nil {
		o.t.Fatal(err)
	}
	defer said.Close()
	printed, err := os.Create(filepath.Join(o.dir, "stdout"))
	if err != nil {
		o.t.Fatal(err)
	}
	defer printed.Close()
	cmd.Stdout, cmd.Stderr = printed, said
	err = cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		o.t.Fatalf("runsc %q: %v", args, err)
	}
	out, err1 := os.ReadFile(printed.Name())
	errOut, err2 := os.ReadFile(said.Name())
	if err := errors.Join(err1, err2); err != nil {
		o.t.Fatal(err)
	}
	if _, dup := o.got[name]; dup {
		o.t.Errorf("%s is called twice", name)
	}
	o.got[name] = answer{cmd.ProcessState.ExitCode(), shapes(out), o.plain(string(errOut))}
	return out
}

// ok is call of a command that must succeed.
func (o *orchestrator) ok(name string, args ...string) []byte {
	o.t.Helper()
	out := o.call(name, args...)
	if a := o.got[name]; a.Code != 0 {
		o.t.Fatalf("%s: runsc %q: exit code %d: %s", name, args, a.Code, a.Said)
	}
	return out
}

var random = regexp.MustCompile(`\d+`)

func (o *orchestrator) plain(s string) string {
	s = strings.NewReplacer(o.dir, "DIR", o.root, "ROOT", o.binary, "RUNSC", filepath.Base(o.binary), "RUNSC").Replace(s)
	// A usage text has the runtime's own commands and flags in it.
	s, _, _ = strings.Cut(s, "Usage: ")
	return random.ReplaceAllString(s, "N")
}

// shapes is the shape of each JSON value in a text: names and types.
func shapes(text []byte) string {
	var all []string
	for d := json.NewDecoder(bytes.NewReader(text)); ; {
		var v any
		if err := d.Decode(&v); err != nil {
			if len(all) == 0 && len(bytes.TrimSpace(text)) > 0 {
				return "not JSON"
			}
			return strings.Join(all, "\n")
		}
		set := map[string]bool{}
		shape(v, "", set)
		paths := make([]string, 0, len(set))
		for p := range set {
			// "features" lists all flags, ours too.
			if !strings.Contains(p, "agentzip") {
				paths = append(paths, p)
			}
		}
		slices.Sort(paths)
		all = append(all, strings.Join(paths, "\n"))
	}
}

func shape(v any, at string, set map[string]bool) {
	switch v := v.(type) {
	case map[string]any:
		set[at+" object"] = true
		for name, e := range v {
			shape(e, at+"."+name, set)
		}
	case []any:
		set[at+" list"] = true
		for _, e := range v {
			shape(e, at+"[]", set)
		}
	default:
		set[fmt.Sprintf("%s %T", at, v)] = true
	}
}

// pid reads a file that runsc writes a process id to, and checks that it is one.
func (o *orchestrator) pid(file string) {
	o.t.Helper()
	b, err := os.ReadFile(filepath.Join(o.dir, file))
	if err != nil {
		o.t.Error(err)
		return
	}
	pid, err := strconv.Atoi(string(b))
	if err != nil || syscall.Kill(pid, 0) != nil {
		o.t.Errorf("%s has %q, which is no process", file, b)
	}
}

// console accepts a terminal on a socket, as containerd and podman do.
func (o *orchestrator) console(start func(socket string)) {
	o.t.Helper()
	socket := filepath.Join(o.dir, "console.sock")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		o.t.Fatal(err)
	}
	defer l.Close()
	start(socket)
	if err := l.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		o.t.Fatal(err)
	}
	conn, err := l.AcceptUnix()
	if err != nil {
		o.t.Errorf("nobody connected to the console socket: %v", err)
		return
	}
	defer conn.Close()
	b, oob := make([]byte, 4096), make([]byte, 4096)
	_, n, _, _, err := conn.ReadMsgUnix(b, oob)
	if err != nil {
		o.t.Error(err)
		return
	}
	msgs, err := syscall.ParseSocketControlMessage(oob[:n])
	if err != nil || len(msgs) != 1 {
		o.t.Errorf("%d messages, %v", len(msgs), err)
		return
	}
	fds, err := syscall.ParseUnixRights(&msgs[0])
	if err != nil || len(fds) != 1 {
		o.t.Errorf("descriptors %v, %v", fds, err)
		return
	}
	if err := syscall.SetNonblock(fds[0], true); err != nil {
		o.t.Error(err)
	}
	tty := os.NewFile(uintptr(fds[0]), "terminal")
	defer tty.Close()
	if err := tty.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		o.t.Fatal(err)
	}
	var seen []byte
	for !bytes.Contains(seen, []byte("a terminal\r\n")) {
		n, err := tty.Read(b)
		if err != nil {
			o.t.Errorf("the terminal has %q, %v", seen, err)
			return
		}
		seen = append(seen, b[:n]...)
	}
}

// calls is what an orchestrator does.
func (o *orchestrator) calls() {
	t := o.t
	write := func(name string, v any) string {
		b, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(o.dir, name)
		if err := os.WriteFile(path, b, 0o644); err != nil {
			t.Fatal(err)
		}
		return path
	}
	newBundle := func(name string, terminal bool, args ...string) string {
		dir := filepath.Join(o.dir, name)
		if err := bundle.Write(dir, bundle.Spec{Rootfs: "/", Args: args, Terminal: terminal, Annotations: map[string]string{"org.example.a": "b"}}); err != nil {
			t.Fatal(err)
		}
		return dir
	}

	// What it asks of the runtime before anything runs.
	if out := o.ok("version", "--version"); !bytes.HasPrefix(out, []byte("runsc version ")) || !bytes.Contains(out, []byte("\nspec: ")) {
		t.Errorf("version: %s", out)
	}
	o.ok("features", "features")
	o.ok("list of none", "list", "--format", "json")
	specDir := filepath.Join(o.dir, "spec")
	if err := os.Mkdir(specDir, 0o755); err != nil {
		t.Fatal(err)
	}
	o.ok("spec", "spec", "--bundle", specDir)
	spec, err := os.ReadFile(filepath.Join(specDir, "config.json"))
	if err != nil {
		t.Error(err)
	}
	o.got["spec file"] = answer{Shape: shapes(spec), Said: string(spec)}

	// A container's life, as containerd has it.
	b := newBundle("bundle", false, "sleep", "1000")
	o.ok("create", "create", "--bundle", b, "--pid-file", filepath.Join(o.dir, "create.pid"), "one")
	o.pid("create.pid")
	o.ok("state created", "state", "one")
	o.ok("start", "start", "one")
	o.ok("state running", "state", "one")
	o.ok("list", "list", "--format", "json")
	o.ok("list, words", "list", "--format=json")
	o.ok("ps", "ps", "--format", "json", "one")
	o.call("ps as runc has it", "ps", "-f", "json", "one")
	o.ok("events", "events", "--stats", "one")

	// What it runs in it.
	process := write("process.json", map[string]any{
		"args": []string{"/bin/sh", "-c", "exec sleep 1000"}, "cwd": "/",
		"env": []string{"PATH=/usr/bin:/bin"}, "user": map[string]any{"uid": 0, "gid": 0},
	})
	o.ok("exec detached", "exec", "--process", process, "--detach", "--pid-file", filepath.Join(o.dir, "exec.pid"), "one")
	o.pid("exec.pid")
	if out := o.ok("ps with two", "ps", "--format=json", "one"); bytes.Count(out, []byte(",")) == 0 {
		t.Errorf("ps: %s", out)
	}
	o.call("exec, exit code", "exec", "one", "/bin/sh", "-c", "echo '{\"a\":1}'; echo b >&2; exit 7")
	o.call("exec, no such command", "exec", "one", "/no/such/command")
	o.ok("pause", "pause", "one")
	o.ok("state paused", "state", "one")
	o.ok("resume", "resume", "one")

	// The end.
	o.ok("kill", "kill", "one", "KILL")
	for start := time.Now(); !bytes.Contains(o.state("one"), []byte(`"stopped"`)); time.Sleep(20 * time.Millisecond) {
		if time.Since(start) > time.Minute {
			t.Fatalf("it does not stop: %s", o.state("one"))
		}
	}
	o.ok("state stopped", "state", "one")
	o.call("kill of what ended", "kill", "one", "TERM")
	o.ok("delete", "delete", "--force", "one")
	o.ok("delete again", "delete", "--force", "one")
	o.call("delete without force", "delete", "one")
	o.call("state of none", "state", "one")
	o.call("start of none", "start", "one")

	// podman and crictl have terminals.
	o.console(func(socket string) {
		o.ok("run with a terminal", "run", "--detach", "--console-socket", socket, "--pid-file", filepath.Join(o.dir, "run.pid"),
			"--bundle", newBundle("tty", true, "/bin/sh", "-c", "test -t 0 && echo a terminal; exec sleep 1000"), "two")
	})
	o.pid("run.pid")
	o.ok("delete, running", "delete", "-force", "two")

	// The whole life in the foreground, with the container's exit code.
	o.call("run", "run", "--bundle", newBundle("short", false, "/bin/sh", "-c", "echo '[1]'; exit 9"), "three")
	o.call("state after run", "state", "three")
	o.call("no such bundle", "run", "--bundle", filepath.Join(o.dir, "nothing"), "four")
	o.call("no such command", "frobnicate")
	o.call("no such flag", "--frobnicate", "list")
	o.call("delete of what run left", "delete", "--force", "three")

	// What went wrong is in the log, as JSON, in which orchestrators look for it.
	log, err := os.ReadFile(filepath.Join(o.dir, "log.json"))
	if err != nil {
		t.Fatal(err)
	}
	o.got["log"] = answer{Shape: shapes(log)}
	if entries, err := os.ReadDir(filepath.Join(o.dir, "debug")); err != nil || len(entries) == 0 {
		t.Errorf("debug logs: %v, %v", entries, err)
	}
}

func (o *orchestrator) state(id string) []byte {
	o.begin()
	out, _ := exec.Command(o.binary, slices.Concat(o.global, []string{"state", id})...).Output()
	return out
}

// TestOrchestrators: every call gives the same fields, exit codes and messages as
// with stock runsc.
func TestOrchestrators(t *testing.T) {
	runtimes := map[string]string{"agentzip": harness.UnderTest(t).Path, "stock": harness.Stock(t).Path}
	got := map[string]map[string]answer{}
	for _, name := range []string{"stock", "agentzip"} {
		ok := t.Run(name, func(t *testing.T) {
			dir := harness.CoveredTempDir(t)
			root, begin := newRoot(t, runtimes[name])
			o := &orchestrator{t: t, binary: runtimes[name], dir: dir, root: root, begin: begin, got: map[string]answer{},
				global: append([]string{"--root", root, "--log", filepath.Join(dir, "log.json"), "--log-format", "json",
					"--debug", "--debug-log", filepath.Join(dir, "debug") + "/"}, flags...)}
			o.calls()
			got[name] = o.got
			c, err := client.New(client.Options{Binary: o.binary, Root: root})
			if err != nil {
				t.Fatal(err)
			}
			if err := c.Cleanup(); err != nil {
				t.Error(err)
			}
		})
		if !ok {
			return
		}
	}
	for call, want := range got["stock"] {
		if have, ok := got["agentzip"][call]; !ok || have != want {
			t.Errorf("%s:\nstock:    %+v\nagentzip: %+v", call, want, have)
		}
	}
	t.Logf("%d calls compared", len(got["stock"]))
}
