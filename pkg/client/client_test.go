package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"runsc-agentzip/memfile/template"
)

// A fake stands for runsc: a shell script that writes down how it was called and
// keeps state files as runsc does.
type fake struct {
	*Client
	t   *testing.T
	dir string
}

// prelude sets $root, $log, $cmd, $pidfile and the positional parameters after the
// command. add and del keep the state files.
const prelude = `#!/bin/sh
{ for a in "$@"; do printf '%s\n' "$a"; done; echo "=end="; } >"$DIR/call.$$.new" && mv "$DIR/call.$$.new" "$DIR/call.$(date +%s%N).$$"
root= log= cmd= pidfile=
while [ $# -gt 0 ]; do
	case "$1" in
	--root=*) root=${1#--root=} ;;
	--log=*) log=${1#--log=} ;;
	-*) ;;
	*) cmd=$1; shift; break ;;
	esac
	shift
done
last= prev=
for a in "$@"; do if [ "$prev" = --internal-pid-file ]; then pidfile=$a; fi; prev=$a last=$a; done
mkdir -p "$root"
add() { : >"$root/${1}_sandbox:$1.state"; }
begun() { : >"$DIR/begun"; }
del() { rm -f "$root/${1}_sandbox:$1.state"; }
fail() { echo "$1" >&2; if [ -n "$log" ]; then printf '{"msg":"%s","level":"error"}' "$1" >>"$log"; fi; exit 128; }
`

// newFake returns a Client of a script that ends with body.
func newFake(t *testing.T, body string, flags ...string) *fake {
	t.Helper()
	// Not t.TempDir(), which is usually below /tmp.
	dir, err := os.MkdirTemp("/var/tmp", "client-test-")
	if err != nil {
		t.Skip(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	// What a Client leaves of its own would be found here.
	temp := filepath.Join(dir, "temp")
	if err := os.Mkdir(temp, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("TMPDIR", temp)
	t.Setenv("DIR", dir)
	binary := filepath.Join(dir, "runsc")
	if err := os.WriteFile(binary, []byte(prelude+body), 0o755); err != nil {
		t.Fatal(err)
	}
	c, err := New(Options{Binary: binary, Root: filepath.Join(dir, "root"), Flags: flags})
	if err != nil {
		t.Fatal(err)
	}
	f := &fake{c, t, dir}
	t.Cleanup(func() {
		if left, _ := os.ReadDir(temp); len(left) > 0 {
			t.Errorf("left in the folder for temporary files: %v", left)
		}
	})
	return f
}

// add makes sandboxes be there.
func (f *fake) add(ids ...string) {
	f.t.Helper()
	if err := os.MkdirAll(f.root, 0o755); err != nil {
		f.t.Fatal(err)
	}
	for _, id := range ids {
		if err := os.WriteFile(filepath.Join(f.root, id+"_sandbox:"+id+".state"), nil, 0o600); err != nil {
			f.t.Fatal(err)
		}
	}
}

// whenBegun returns a context that ends once the script has called begun.
func (f *fake) whenBegun() context.Context {
	file := filepath.Join(f.dir, "begun")
	os.Remove(file)
	ctx, cancel := context.WithCancel(f.t.Context())
	go func() {
		for ; ctx.Err() == nil; time.Sleep(time.Millisecond) {
			if _, err := os.Stat(file); err == nil {
				cancel()
			}
		}
	}()
	return ctx
}

// there returns the ids of those that are there.
func (f *fake) there() []string {
	f.t.Helper()
	ids, err := f.ids()
	if err != nil {
		f.t.Fatal(err)
	}
	slices.Sort(ids)
	return ids
}

// calls returns the arguments of each call so far, in order.
func (f *fake) calls() [][]string {
	f.t.Helper()
	files, _ := filepath.Glob(filepath.Join(f.dir, "call.*[0-9]"))
	slices.Sort(files)
	var all [][]string
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			f.t.Fatal(err)
		}
		args := strings.Split(strings.TrimSuffix(string(b), "\n=end=\n"), "\n")
		for i, a := range args {
			// The names of the Client's temporary files are random.
			if j := strings.Index(a, filepath.Join(f.dir, "temp")); j >= 0 {
				args[i] = a[:j] + "TEMP/" + filepath.Base(a)
			}
		}
		all = append(all, args)
	}
	return all
}

func (f *fake) forget() {
	files, _ := filepath.Glob(filepath.Join(f.dir, "call.*"))
	for _, file := range files {
		os.Remove(file)
	}
}

const happy = `
case "$cmd" in
run|restore) add "$last" ;;
delete) del "$last" ;;
state) status=running; [ -e "$DIR/ended" ] && status=stopped
	printf '{"id":"%s","status":"%s","bundle":"/bundle","pid":7}' "$last" $status ;;
list) echo null ;;
wait) echo '{"id":"a","exitStatus":3}' ;;
exec) echo 42 >"$pidfile"; cat; exit 5 ;;
agentzip) case "$1" in
	hint) ;;
	template) case "$*" in *leave-running*) ;; *create*) touch "$DIR/ended" ;; esac; echo '{"pages":4,"digest":"d"}' ;;
	stats) echo '{"owned_bytes":9,"pages":{"resident":4}}' ;;
	*) echo '{"pages":4,"digest":"d"}' ;;
	esac ;;
esac
`

// Global flags come before the command, and its own before the id.
func TestArguments(t *testing.T) {
	f := newFake(t, happy, "--network=none", "--agentzip-idle=1s")
	ctx := t.Context()
	f.add("a")
	tpl := Template{Dir: "/image", Bundle: "/bundle"}
	global := []string{"--root=" + f.root, "--network=none", "--agentzip-idle=1s"}
	logged := append(slices.Clone(global), "--log=TEMP/log")
	state := append(slices.Clone(global), "state", "a")
	ignore := func(_ any, err error) error { return err }
	for _, tc := range []struct {
		name string
		call func() error
		want [][]string
	}{
		{"run", func() error { return f.Run(ctx, "/bundle", Start{ID: "new"}) },
			[][]string{append(slices.Clone(logged), "run", "--detach", "--bundle", "/bundle", "new")}},
		{"run with flags", func() error { return f.Run(ctx, "/bundle", Start{ID: "other", Flags: []string{"--debug"}}) },
			[][]string{append(slices.Clone(global), "--debug", "--log=TEMP/log", "run", "--detach", "--bundle", "/bundle", "other")}},
		{"restore", func() error { return f.Restore(ctx, tpl, Start{ID: "clone"}) },
			[][]string{append(slices.Clone(logged), "restore", "--detach", "--bundle", "/bundle", "--image-path", "/image", "clone")}},
		{"exec", func() error {
			return ignore(f.Exec(ctx, "a", ExecOptions{Args: []string{"ls", "-l", "--", "x y"}, Env: []string{"A=1", "B=2 3"}, Cwd: "/w", User: "1:2"}))
		}, [][]string{append(slices.Clone(global), "--log=TEMP/log", "exec", "--internal-pid-file", "TEMP/pid", "--env", "A=1", "--env", "B=2 3", "--cwd", "/w", "--user", "1:2", "a", "ls", "-l", "--", "x y")}},
		{"hint", func() error { return f.Hint(ctx, "a", Wait) }, [][]string{append(slices.Clone(global), "agentzip", "hint", "-phase=wait", "a")}},
		{"stats", func() error { return ignore(f.Stats(ctx, "a")) }, [][]string{append(slices.Clone(global), "agentzip", "stats", "-json", "a")}},
		{"evict", func() error { return ignore(f.Evict(ctx, "a")) }, [][]string{append(slices.Clone(global), "agentzip", "evict", "-json", "a")}},
		{"check", func() error { return ignore(f.Check(ctx, "a")) }, [][]string{append(slices.Clone(global), "agentzip", "check", "-json", "a")}},
		{"prefetch", func() error { return ignore(f.Prefetch(ctx, "a")) }, [][]string{append(slices.Clone(global), "agentzip", "prefetch", "-json", "a")}},
		{"patterns", func() error { return f.SavePatterns(ctx, "a", "/image") }, [][]string{append(slices.Clone(global), "agentzip", "prefetch", "-save", "/image", "a")}},
		{"state", func() error { return ignore(f.State(ctx, "a")) }, [][]string{state}},
		{"list", func() error { return ignore(f.List(ctx)) }, [][]string{append(slices.Clone(global), "list", "--format", "json")}},
		{"wait", func() error { return ignore(f.Wait(ctx, "a")) }, [][]string{append(slices.Clone(global), "wait", "a")}},
		{"signal", func() error { return f.Signal(ctx, "a", "TERM") }, [][]string{append(slices.Clone(global), "kill", "a", "TERM")}},
		{"template", func() error { return ignore(f.CreateTemplate(ctx, "a", "/image", TemplateOptions{})) },
			[][]string{state, append(slices.Clone(global), "agentzip", "template", "create", "-json", "--image-path=/image", "a"), state}},
		{"settle", func() error {
			return ignore(f.CreateTemplate(ctx, "a", "/image", TemplateOptions{SettleCommand: "sync; gc", SettleTimeout: -1, LeaveRunning: true}))
		}, [][]string{state, append(slices.Clone(global), "agentzip", "template", "create", "-json", "--image-path=/image", "--settle-cmd=sync; gc", "--settle-timeout=0s", "--leave-running", "a")}},
		{"info", func() error { return ignore(f.TemplateInfo(ctx, "/image")) }, [][]string{append(slices.Clone(global), "agentzip", "template", "info", "-json", "/image")}},
		{"verify", func() error { return ignore(f.VerifyTemplate(ctx, "/image")) }, [][]string{append(slices.Clone(global), "agentzip", "template", "verify", "-json", "/image")}},
		{"fork", func() error { return ignore(f.Fork(ctx, "a", "/fork", Starts("g"), 1)) },
			[][]string{state, append(slices.Clone(global), "agentzip", "template", "create", "-json", "--image-path=/fork", "--leave-running", "a"),
				append(slices.Clone(logged), "restore", "--detach", "--bundle", "/bundle", "--image-path", "/fork", "g")}},
		{"command", func() error { return ignore(f.Command(ctx, "events", "--stats", "a")) }, [][]string{append(slices.Clone(global), "events", "--stats", "a")}},
		{"delete", func() error { return f.Delete(ctx, "a") }, [][]string{append(slices.Clone(global), "delete", "--force", "a")}},
		{"delete again", func() error { return f.Delete(ctx, "a") }, nil},
	} {
		f.forget()
		if err := tc.call(); err != nil {
			t.Errorf("%s: %v", tc.name, err)
		}
		if got := f.calls(); !reflect.DeepEqual(got, tc.want) {
			t.Errorf("%s:\n got %q\nwant %q", tc.name, got, tc.want)
		}
	}
}

func TestAnswers(t *testing.T) {
	f := newFake(t, happy)
	ctx := t.Context()
	f.add("a")
	if s, err := f.Stats(ctx, "a"); err != nil || s.OwnedBytes != 9 || s.Pages.Resident != 4 {
		t.Errorf("%+v, %v", s, err)
	}
	if s, err := f.State(ctx, "a"); err != nil || !reflect.DeepEqual(s, State{ID: "a", Status: Running, Bundle: "/bundle", Pid: 7}) {
		t.Errorf("%+v, %v", s, err)
	}
	if l, err := f.List(ctx); err != nil || len(l) != 0 {
		t.Errorf("%+v, %v", l, err)
	}
	if code, err := f.Wait(ctx, "a"); err != nil || code != 3 {
		t.Errorf("%d, %v", code, err)
	}
	res, err := f.Exec(ctx, "a", ExecOptions{Args: []string{"cat"}, Stdin: strings.NewReader("from stdin")})
	if err != nil || res != (ExecResult{Stdout: "from stdin", ExitCode: 5}) {
		t.Errorf("%+v, %v", res, err)
	}
	tpl, err := f.CreateTemplate(ctx, "a", "image", TemplateOptions{})
	wd, _ := os.Getwd()
	if err != nil || tpl.Dir != filepath.Join(wd, "image") || tpl.Bundle != "/bundle" || tpl.Info.Digest != "d" {
		t.Errorf("%+v, %v", tpl, err)
	}
	// A scheduler may write it down.
	b, err := json.Marshal(tpl)
	var again Template
	if err != nil || json.Unmarshal(b, &again) != nil || again != tpl {
		t.Errorf("%s became %+v, %v", b, again, err)
	}
}

func TestNew(t *testing.T) {
	f := newFake(t, happy)
	for _, tc := range []struct {
		o    Options
		want string
		is   error
	}{
		{Options{Binary: filepath.Join(f.dir, "missing")}, "does not exist", os.ErrNotExist},
		{Options{Binary: "no-such-runsc"}, "no-such-runsc", exec.ErrNotFound},
		{Options{Binary: f.binary, Flags: []string{"--network", "none"}}, `"none" is not a flag`, nil},
		{Options{Binary: f.binary, Flags: []string{"-root=/x"}}, "Options.Root", nil},
	} {
		if _, err := New(tc.o); err == nil || !strings.Contains(err.Error(), tc.want) || tc.is != nil && !errors.Is(err, tc.is) {
			t.Errorf("%+v: %v, want one with %q", tc.o, err, tc.want)
		}
	}
	t.Setenv("PATH", f.dir+":"+os.Getenv("PATH"))
	t.Setenv("XDG_RUNTIME_DIR", "/some/where")
	if c, err := New(Options{Binary: "runsc"}); err != nil || c.Binary() != f.binary || c.Root() != "/some/where/runsc" {
		t.Errorf("%+v, %v", c, err)
	}
	// The binary may go away later.
	os.Remove(f.binary)
	var ce *CommandError
	if _, err := f.List(t.Context()); !errors.As(err, &ce) || ce.Command != "list" || !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%v", err)
	}
	if err := f.Run(t.Context(), "/b", Start{ID: "a"}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%v", err)
	}
	f.add("a")
	if _, err := f.Exec(t.Context(), "a", ExecOptions{Args: []string{"x"}}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%v", err)
	}
}

func TestFailures(t *testing.T) {
	f := newFake(t, `
case "$cmd$last" in
agentzipjson) echo '{"owned_bytes":' ;;
agentzipgone) fail "agentzip stats: there is no container \"gone\" below --root=/x" ;;
agentzipold) echo "Usage: runsc <flags> <subcommand> <subcommand args>" >&2; exit 2 ;;
stategone) fail "FetchSpec failed: loading container: file does not exist" ;;
restoretaken) fail "creating container: cannot lock container metadata file: container already exists" ;;
restoreflag) exit 2 ;;
restoresays) echo guest >&2; fail "starting container: it says" ;;
"") echo "flag provided but not defined: -nonsense" >&2; exit 2 ;;
*) echo first >&2; echo "it says why" >&2; exit 128 ;;
esac
`)
	ctx := t.Context()
	ids := []string{"json", "gone", "old", "other"}
	f.add(ids...)
	_, err := f.Stats(ctx, "other")
	var ce *CommandError
	var exit *exec.ExitError
	if !errors.As(err, &ce) || ce.Command != "agentzip" || ce.Stderr != "first\nit says why" || !errors.As(err, &exit) || exit.ExitCode() != 128 {
		t.Errorf("%#v", err)
	}
	for _, named := range []error{ErrNotFound, ErrExists, ErrNoAgentzip} {
		if errors.Is(err, named) {
			t.Errorf("%v is taken for %v", err, named)
		}
	}
	if _, err := f.Stats(ctx, "json"); err == nil || !strings.Contains(err.Error(), "no valid JSON") || !strings.Contains(err.Error(), "agentzip stats") {
		t.Errorf("%v", err)
	}
	// It went away between the look and the command.
	if _, err := f.Stats(ctx, "gone"); !errors.Is(err, ErrNotFound) {
		t.Errorf("%v", err)
	}
	if _, err := f.State(ctx, "gone"); !errors.Is(err, ErrNotFound) {
		t.Errorf("%v", err)
	}
	if _, err := f.Stats(ctx, "old"); !errors.Is(err, ErrNoAgentzip) {
		t.Errorf("%v", err)
	}
	tpl := Template{Dir: "/i", Bundle: "/b"}
	if err := f.Restore(ctx, tpl, Start{ID: "taken"}); !errors.Is(err, ErrExists) {
		t.Errorf("%v", err)
	}
	if err := f.Restore(ctx, tpl, Start{ID: "says"}); !errors.As(err, &ce) || ce.Stderr != "starting container: it says" {
		t.Errorf("%v", err)
	}
	if err := f.Restore(ctx, tpl, Start{ID: "flag", Flags: []string{"--nonsense"}}); err == nil || !strings.Contains(err.Error(), "not defined: -nonsense") {
		t.Errorf("%v", err)
	}
	if err := f.Restore(ctx, Template{Dir: "/i"}, Start{ID: "x"}); err == nil || !strings.Contains(err.Error(), "bundle") {
		t.Errorf("%v", err)
	}
	if _, err := f.Exec(ctx, "other", ExecOptions{}); err == nil {
		t.Error("no command, no error")
	}
	slices.Sort(ids)
	if got := f.there(); !slices.Equal(got, ids) {
		t.Errorf("there are %q, want %q", got, ids)
	}
}

// runsc takes the beginning of an id for the id. Nothing here does.
func TestIDs(t *testing.T) {
	f := newFake(t, happy)
	ctx := t.Context()
	f.add("clone-10", "z")
	tpl := Template{Dir: "/i", Bundle: "/b"}
	// Every method that takes one.
	all := map[string]func(id string) error{
		"exec":     func(id string) error { _, err := f.Exec(ctx, id, ExecOptions{Args: []string{"x"}}); return err },
		"hint":     func(id string) error { return f.Hint(ctx, id, Wait) },
		"stats":    func(id string) error { _, err := f.Stats(ctx, id); return err },
		"state":    func(id string) error { _, err := f.State(ctx, id); return err },
		"wait":     func(id string) error { _, err := f.Wait(ctx, id); return err },
		"signal":   func(id string) error { return f.Signal(ctx, id, "TERM") },
		"template": func(id string) error { _, err := f.CreateTemplate(ctx, id, "/i", TemplateOptions{}); return err },
		"fork":     func(id string) error { _, err := f.Fork(ctx, id, "/i", Starts("q"), 1); return err },
		"patterns": func(id string) error { return f.SavePatterns(ctx, id, "/i") },
	}
	for name, call := range all {
		if err := call("clone-1"); !errors.Is(err, ErrNotFound) {
			t.Errorf("%s of an abbreviation: %v", name, err)
		}
		for _, id := range []string{"", "-x", "a/b", "a b", "*"} {
			if err := call(id); err == nil || !strings.Contains(err.Error(), "invalid sandbox id") {
				t.Errorf("%s of %q: %v", name, id, err)
			}
		}
	}
	for _, call := range []func(context.Context, string) error{f.Kill, f.Delete} {
		if err := call(ctx, "clone-1"); err != nil {
			t.Errorf("%v", err)
		}
	}
	for id, want := range map[string]error{"clone-1": ErrAmbiguous, "clone-100": ErrAmbiguous, "clone-10": ErrExists, "z": ErrExists} {
		if err := f.Run(ctx, "/b", Start{ID: id}); !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", id, err, want)
		}
		if err := f.RestoreAll(ctx, tpl, Starts("ok", id), 2); !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", id, err, want)
		}
	}
	if err := f.RestoreAll(ctx, tpl, Starts("d-1", "d-2", "d-10"), 2); !errors.Is(err, ErrAmbiguous) {
		t.Errorf("%v", err)
	}
	if err := f.RestoreAll(ctx, tpl, Starts("d", "e", "d"), 2); !errors.Is(err, ErrExists) {
		t.Errorf("%v", err)
	}
	if n := len(f.calls()); n != 0 {
		t.Errorf("runsc was called %d times: %q", n, f.calls())
	}
	// Somebody else has made such ids: runsc cannot tell which is meant.
	f.add("clone-1")
	if _, err := f.State(ctx, "clone-1"); !errors.Is(err, ErrAmbiguous) {
		t.Errorf("%v", err)
	}
	if err := f.Delete(ctx, "clone-1"); !errors.Is(err, ErrAmbiguous) {
		t.Errorf("%v", err)
	}
	if _, err := f.State(ctx, "clone-10"); err != nil {
		t.Errorf("%v", err)
	}
}

func TestExec(t *testing.T) {
	f := newFake(t, `
case "$cmd" in
kill) printf '%s ' "$@" >"$DIR/killed"; kill -9 "$(cat "$DIR/running")"; exit ;;
esac
shift $(($# - 1))
case "$1" in
own) fail "executing processes for container: no such file" ;;
panic) echo "panic: oh" >&2; exit 2 ;;
same) echo 5 >"$pidfile"; exit 128 ;;
killed) echo 5 >"$pidfile"; kill -9 $$ ;;
ends) echo 5 >"$pidfile"; fail "waiting on pid 5: EOF" ;;
much) echo 5 >"$pidfile"; head -c 16777220 /dev/zero; exit 0 ;;
bg) echo 5 >"$pidfile"; echo out; sleep 90 & echo $! >"$DIR/bg"; exit 0 ;;
long) echo $$ >"$DIR/running"; echo 77 >"$pidfile"; echo begun; exec sleep 90 ;;
starting) exec sleep 90 ;;
esac
`)
	ctx := t.Context()
	f.add("a")
	run := func(ctx context.Context, what string) (ExecResult, error) {
		return f.Exec(ctx, "a", ExecOptions{Args: []string{what}})
	}
	var ce *CommandError
	if _, err := run(ctx, "own"); !errors.As(err, &ce) || ce.Command != "exec" || !strings.Contains(ce.Stderr, "no such file") {
		t.Errorf("%v", err)
	}
	if _, err := run(ctx, "panic"); !errors.As(err, &ce) || ce.Stderr != "panic: oh" {
		t.Errorf("%v", err)
	}
	if res, err := run(ctx, "same"); err != nil || res.ExitCode != 128 {
		t.Errorf("%+v, %v", res, err)
	}
	if _, err := run(ctx, "killed"); !errors.As(err, &ce) || !strings.Contains(err.Error(), "killed") {
		t.Errorf("runsc was killed: %v", err)
	}
	// A reader that never returns does not keep Exec.
	silent, pipe := io.Pipe()
	defer pipe.Close()
	if res, err := f.Exec(ctx, "a", ExecOptions{Args: []string{"same"}, Stdin: silent}); err != nil || res.ExitCode != 128 {
		t.Errorf("%+v, %v", res, err)
	}
	if _, err := run(ctx, "ends"); !errors.As(err, &ce) || !strings.Contains(ce.Stderr, "waiting on pid") {
		t.Errorf("%v", err)
	}
	if res, err := run(ctx, "much"); err != nil || len(res.Stdout) != MaxOutput || !res.Truncated || res.ExitCode != 0 {
		t.Errorf("%d bytes, %v, %v", len(res.Stdout), res.Truncated, err)
	}
	started := time.Now()
	if res, err := run(ctx, "bg"); err != nil || res.Stdout != "out\n" || res.ExitCode != 0 {
		t.Errorf("%+v, %v", res, err)
	}
	if d := time.Since(started); d > time.Minute {
		t.Errorf("waited %v for a process in the background", d)
	}
	if err := syscall.Kill(readPid(filepath.Join(f.dir, "bg")), syscall.SIGKILL); err != nil {
		t.Error(err)
	}
	// A context that ends has the command killed in the sandbox, unless it is to go on.
	for _, leave := range []bool{true, false} {
		ended, cancel := context.WithCancel(ctx)
		defer cancel()
		started := time.Now()
		_, err := f.Exec(ended, "a", ExecOptions{Args: []string{"long"}, LeaveRunning: leave, Stdout: writer(func([]byte) { cancel() })})
		if !errors.Is(err, context.Canceled) || !errors.As(err, &ce) || time.Since(started) > time.Minute {
			t.Errorf("%v after %v", err, time.Since(started))
		}
		want := "--pgid 77 a KILL "
		if leave {
			want = ""
		}
		if b, _ := os.ReadFile(filepath.Join(f.dir, "killed")); string(b) != want {
			t.Errorf("killed %q, want %q", b, want)
		}
	}
	brief, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
	defer cancel()
	if _, err := run(brief, "starting"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v", err)
	}
}

type writer func(p []byte)

func (w writer) Write(p []byte) (int, error) { w(p); return len(p), nil }

// Whatever happens to a start, nothing is left of it.
func TestStartAndContext(t *testing.T) {
	f := newFake(t, `
case "$cmd$last" in
runslow) begun; sleep 0.5; add slow ;;
runbad) begun; sleep 0.5; fail "starting container: bad" ;;
runhangs) begun; sleep 30 ;;
deleteslow) del slow ;;
agentzipt) begun; sleep 0.5; echo '{"digest":"whole"}' ;;
statet) status=running; [ -e "$DIR/begun" ] && status=stopped; printf '{"bundle":"/b","status":"%s"}' $status ;;
esac
`)
	f.add("t")
	for _, id := range []string{"slow", "bad"} {
		err := f.Run(f.whenBegun(), "/b", Start{ID: id})
		if !errors.Is(err, context.Canceled) {
			t.Errorf("%s: %v", id, err)
		}
		if got := f.there(); !slices.Equal(got, []string{"t"}) {
			t.Errorf("%s: there are %q", id, got)
		}
	}
	before := grace
	grace = 200 * time.Millisecond
	defer func() { grace = before }()
	err := f.Run(f.whenBegun(), "/b", Start{ID: "hangs"})
	if !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "it was killed") {
		t.Errorf("%v", err)
	}
	grace = before
	// Half a template is worth nothing, a whole one is.
	if tpl, err := f.CreateTemplate(f.whenBegun(), "t", "/i", TemplateOptions{}); err != nil || tpl.Info.Digest != "whole" {
		t.Errorf("%+v, %v", tpl, err)
	}
	f.forget()
	over, cancel := context.WithCancel(t.Context())
	cancel()
	if err := f.Run(over, "/b", Start{ID: "x"}); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	if _, err := f.List(over); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	if n := len(f.calls()); n != 0 {
		t.Errorf("%d calls with a context that was over", n)
	}
}

func TestRestoreAll(t *testing.T) {
	f := newFake(t, `
case "$cmd$last" in
restorexbad*) sleep 0.3; fail "starting container: $last is no good" ;;
restore*) begun; sleep 0.1; add "$last" ;;
deletestuck) fail "destroying container: stuck" ;;
delete*) del "$last" ;;
esac
`)
	ctx := t.Context()
	tpl := Template{Dir: "/i", Bundle: "/b"}
	f.add("there")
	if err := f.RestoreAll(ctx, tpl, Starts("a", "b", "c", "d", "e"), 2); err != nil {
		t.Fatal(err)
	}
	if got := f.there(); !slices.Equal(got, []string{"a", "b", "c", "d", "e", "there"}) {
		t.Errorf("there are %q", got)
	}
	err := f.RestoreAll(ctx, tpl, Starts("k", "l", "stuck", "xbad", "n", "o", "p", "q", "r", "v"), 2)
	var re *RestoreError
	if !errors.As(err, &re) || re.Clones != 10 || len(re.Failed) != 1 || re.Failed[0].ID != "xbad" || len(re.Left) != 1 || re.Left[0].ID != "stuck" {
		t.Errorf("%+v", re)
	}
	var ce *CommandError
	if !errors.As(err, &ce) || ce.Command != "restore" {
		t.Errorf("%v", err)
	}
	for _, want := range []string{"1 of 10 clones", "xbad is no good", "stuck: "} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not say %q", err, want)
		}
	}
	if got := f.there(); !slices.Equal(got, []string{"a", "b", "c", "d", "e", "stuck", "there"}) {
		t.Errorf("there are %q", got)
	}
	// Not one more than needed was begun: there were 2 at a time.
	for _, call := range f.calls() {
		if slices.Contains([]string{"p", "q", "r", "v"}, call[len(call)-1]) {
			t.Errorf("called after the failure: %q", call)
		}
	}
	if err := f.RestoreAll(f.whenBegun(), tpl, Starts("k", "l", "m", "n", "o", "p"), 2); !errors.Is(err, context.Canceled) || !errors.As(err, &re) {
		t.Errorf("%v", err)
	}
	if got := f.there(); !slices.Equal(got, []string{"a", "b", "c", "d", "e", "stuck", "there"}) {
		t.Errorf("there are %q", got)
	}
	if err := f.RestoreAll(ctx, tpl, nil, 0); err != nil {
		t.Errorf("%v", err)
	}
}

// A fork says what it would fail of before it makes a template, and keeps a good
// template when the clones fail.
func TestFork(t *testing.T) {
	f := newFake(t, strings.Replace(happy, "run|restore)", "restore) case \"$last\" in ybad) fail no ;; esac; add \"$last\" ;;\nrun)", 1))
	ctx := t.Context()
	f.add("a", "b")
	if _, err := f.Fork(ctx, "a", "/fork", Starts("b"), 1); !errors.Is(err, ErrExists) || len(f.calls()) != 0 {
		t.Errorf("%v after %q", err, f.calls())
	}
	tpl, err := f.Fork(ctx, "a", "/fork", Starts("x", "ybad"), 1)
	var re *RestoreError
	if !errors.As(err, &re) || tpl.Dir != "/fork" || tpl.Bundle != "/bundle" {
		t.Errorf("%+v, %v", tpl, err)
	}
	if got := f.there(); !slices.Equal(got, []string{"a", "b"}) {
		t.Errorf("there are %q", got)
	}
	if err := f.RestoreAll(ctx, tpl, Starts("x", "y"), 1); err != nil {
		t.Error(err)
	}
}

func TestKill(t *testing.T) {
	f := newFake(t, `
case "$cmd$last" in
killKILL) case "$1" in ended|unreaped) fail "sandbox is not running" ;; stubborn) fail "no way" ;; esac; touch "$DIR/killed" ;;
stateended) echo '{"status":"stopped"}' ;;
statelives) if [ -e "$DIR/looked" ]; then echo '{"status":"stopped"}'; else touch "$DIR/looked"; echo '{"status":"running"}'; fi ;;
stateforever) echo '{"status":"running"}' ;;
statestubborn) echo '{"status":"running"}' ;;
stateunreaped) pid=$(cat "$DIR/unreaped"); if [ -e "/proc/$pid" ]; then echo "{\"status\":\"running\",\"pid\":$pid}"; else echo '{"status":"stopped"}'; fi ;;
esac
`)
	f.add("ended", "lives", "forever", "stubborn", "unreaped")
	ctx := t.Context()

	// Its parent takes longer to notice than Kill waits for one that does not end.
	unreaped := exec.Command("true")
	if err := unreaped.Start(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(f.dir, "unreaped"), []byte(strconv.Itoa(unreaped.Process.Pid)), 0o600); err != nil {
		t.Fatal(err)
	}
	noticed := time.AfterFunc(3*time.Second, func() { unreaped.Wait() })
	if err := f.Kill(ctx, "unreaped"); err != nil || noticed.Stop() {
		t.Errorf("%v", err)
	}
	for _, id := range []string{"lives", "ended", "never-was"} {
		if err := f.Kill(ctx, id); err != nil {
			t.Errorf("%s: %v", id, err)
		}
	}
	if err := f.Kill(ctx, "stubborn"); err == nil || !strings.Contains(err.Error(), "no way") {
		t.Errorf("%v", err)
	}
	soon, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
	defer cancel()
	if err := f.Kill(soon, "forever"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v", err)
	}
}

func TestCleanup(t *testing.T) {
	f := newFake(t, happy)
	if err := f.Cleanup(); err != nil {
		t.Error(err)
	}
	f.add("a")
	if err := f.Cleanup(); err == nil || !strings.Contains(err.Error(), "holds sandboxes: a") {
		t.Errorf("%v", err)
	}
	if err := f.Delete(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	precious := filepath.Join(f.root, "precious")
	if err := os.WriteFile(precious, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := f.Cleanup(); err == nil {
		t.Error("a folder that holds something else was removed")
	}
	if err := os.Remove(precious); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := f.Cleanup(); err != nil {
			t.Error(err)
		}
	}
}

// One Client serves many goroutines.
func TestConcurrently(t *testing.T) {
	f := newFake(t, happy)
	ctx := t.Context()
	var wg sync.WaitGroup
	for i := range 12 {
		wg.Go(func() {
			id := fmt.Sprintf("s%02d", i)
			if err := f.Run(ctx, "/b", Start{ID: id}); err != nil {
				t.Error(err)
			}
			if res, err := f.Exec(ctx, id, ExecOptions{Args: []string{"x"}, Stdin: strings.NewReader(id)}); err != nil || res.Stdout != id {
				t.Errorf("%+v, %v", res, err)
			}
			if _, err := f.Stats(ctx, id); err != nil {
				t.Error(err)
			}
			if err := f.Delete(ctx, id); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if got := f.there(); len(got) != 0 {
		t.Errorf("there are %q", got)
	}
}

// TemplateInfo is what the runtime prints of template.Info, which this package
// does not import.
func TestTemplateInfoHasAllFields(t *testing.T) {
	names := func(v any) (all []string) {
		for f := range reflect.TypeOf(v).Fields() {
			all = append(all, f.Name+" "+string(f.Tag))
		}
		return all
	}
	if got, want := names(TemplateInfo{}), names(template.Info{}); !slices.Equal(got, want) {
		t.Errorf("fields %q, want %q", got, want)
	}
	b, err := json.Marshal(template.Info{Pages: 1, Bytes: 4096, Digest: template.Digest{1, 2}, Created: time.Unix(5, 0).UTC(), IndexBytes: 7})
	if err != nil {
		t.Fatal(err)
	}
	var got TemplateInfo
	if err := json.Unmarshal(b, &got); err != nil || got.Digest != (template.Digest{1, 2}).String() || got.Pages != 1 || !got.Created.Equal(time.Unix(5, 0)) {
		t.Errorf("%s became %+v, %v", b, got, err)
	}
}

// Another module can use this package and bundle, and gets nothing of gVisor.
func TestImportable(t *testing.T) {
	if _, err := exec.LookPath("go"); err != nil {
		t.Skip(err)
	}
	top, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	sum, err := os.ReadFile(filepath.Join(top, "go.sum"))
	if err != nil {
		t.Skip(err)
	}
	dir := t.TempDir()
	for name, text := range map[string]string{
		"go.mod": "module example.com/scheduler\n\ngo 1.26.3\n\nrequire runsc-agentzip v0.0.0\n\nreplace runsc-agentzip => " + top + "\n",
		"go.sum": string(sum),
		"main.go": `package main

import (
	"fmt"

	"runsc-agentzip/pkg/bundle"
	"runsc-agentzip/pkg/client"
)

func main() {
	fmt.Println(client.New(client.Options{}))
	fmt.Println(bundle.Write("/nowhere", bundle.Spec{}))
}
`,
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	run := func(args ...string) string {
		cmd := exec.Command("go", args...)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "GOFLAGS=-mod=mod", "GOPROXY=off", "GOWORK=off", "CGO_ENABLED=0")
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("go %q: %v\n%s", args, err, out)
		}
		return string(out)
	}
	run("vet", ".")
	for dep := range strings.FieldsSeq(run("list", "-deps", "-f", "{{if not .Standard}}{{.ImportPath}}{{end}}", ".")) {
		switch dep {
		case "example.com/scheduler", "runsc-agentzip/pkg/client", "runsc-agentzip/pkg/bundle", "runsc-agentzip/pkg/control", "github.com/opencontainers/runtime-spec/specs-go":
		default:
			t.Errorf("it depends on %s", dep)
		}
	}
}
func TestFindBinary(t *testing.T) {
	// Not t.TempDir(), which is usually below /tmp.
	dir, err := os.MkdirTemp("/var/tmp", "client-test-")
	if err != nil {
		t.Skip(err)
	}
	defer os.RemoveAll(dir)
	good := filepath.Join(dir, "runsc")
	plain := filepath.Join(dir, "plain")
	link := filepath.Join(dir, "link")
	for path, mode := range map[string]os.FileMode{good: 0o755, plain: 0o644} {
		if err := os.WriteFile(path, nil, mode); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(good, link); err != nil {
		t.Fatal(err)
	}
	tmp, err := os.MkdirTemp("/tmp", "client-test-")
	if err != nil {
		t.Skip(err)
	}
	defer os.RemoveAll(tmp)
	inTmp := filepath.Join(tmp, "runsc")
	if err := os.WriteFile(inTmp, nil, 0o755); err != nil {
		t.Fatal(err)
	}
	linkToTmp := filepath.Join(dir, "link-to-tmp")
	if err := os.Symlink(inTmp, linkToTmp); err != nil {
		t.Fatal(err)
	}
	linkFromTmp := filepath.Join(tmp, "link")
	if err := os.Symlink(good, linkFromTmp); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct{ path, want, wantErr string }{
		{good, good, ""},
		{link, good, ""},
		{linkFromTmp, good, ""},
		{"", "", "no runsc binary given"},
		{plain, "", "not an executable file"},
		{dir, "", "not an executable file"},
		{filepath.Join(dir, "missing"), "", "does not exist"},
		{inTmp, "", "lies under /tmp"},
		{linkToTmp, "", "lies under /tmp"},
	} {
		got, err := FindBinary(tc.path)
		if tc.wantErr == "" {
			if err != nil || got != tc.want {
				t.Errorf("FindBinary(%q) = %q, %v, want %q", tc.path, got, err, tc.want)
			}
		} else if err == nil || !strings.Contains(err.Error(), tc.wantErr) {
			t.Errorf("FindBinary(%q): error %v, want one with %q", tc.path, err, tc.wantErr)
		}
	}
}

func TestCommandErrorIsShort(t *testing.T) {
	err := &CommandError{Command: "run", Err: errors.New("exit status 2"), Stderr: "flag provided but not defined: -x\nUsage: runsc <flags> <subcommand> <subcommand args>\nmany lines"}
	if got, want := err.Error(), "runsc run: exit status 2: flag provided but not defined: -x"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestTail(t *testing.T) {
	b := tail{limit: 8}
	for range 10 {
		fmt.Fprint(&b, "abc")
	}
	if got := b.String(); got != "bcabcabc" {
		t.Errorf("got %q", got)
	}
}
