package cloud

import (
	"context"
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
	"testing"
	"time"

	"runsc-agentzip/pkg/client"
	"runsc-agentzip/pkg/control"
	"runsc-agentzip/test/harness"
)

// cloud is a Client with helpers for a test.
type cloud struct {
	*client.Client
	t    *testing.T
	tool string
}

func newCloud(t *testing.T) *cloud {
	c := newClient(t)
	return &cloud{c, t, programs.Path(t, "toolserver")}
}

func (c *cloud) must(err error) {
	c.t.Helper()
	if err != nil {
		c.t.Fatal(err)
	}
}

// ask has the tool server of a sandbox answer. It may be called by any goroutine.
func (c *cloud) ask(id string, words ...string) string {
	c.t.Helper()
	res, err := c.Exec(within(c.t), id, client.ExecOptions{Args: append([]string{c.tool, "ask"}, words...)})
	if err != nil || res.ExitCode != 0 || res.Truncated {
		c.t.Errorf("%s: %q: %+v, %v", id, words, res, err)
	}
	return strings.TrimSuffix(res.Stdout, "\n")
}

func (c *cloud) expect(id, want string, words ...string) {
	c.t.Helper()
	if got := c.ask(id, words...); got != want {
		c.t.Errorf("%s: %q gives %q, want %q", id, words, got, want)
	}
}

// each calls f for all ids at once.
func each(ids []string, f func(id string)) {
	var wg sync.WaitGroup
	for _, id := range ids {
		wg.Go(func() { f(id) })
	}
	wg.Wait()
}

func (c *cloud) stats(id string) control.Stats {
	c.t.Helper()
	s, err := c.Stats(within(c.t), id)
	if err != nil {
		c.t.Errorf("%s: %v", id, err)
	}
	if s.ChecksumFailures != 0 {
		c.t.Errorf("%s: %d checksum failures", id, s.ChecksumFailures)
	}
	return s
}

// listed returns the ids of all sandboxes.
func (c *cloud) listed() (ids []string) {
	c.t.Helper()
	all, err := c.List(within(c.t))
	c.must(err)
	for _, s := range all {
		ids = append(ids, s.ID)
	}
	slices.Sort(ids)
	return ids
}

// finish deletes everything and has nothing left.
func (c *cloud) finish() {
	c.t.Helper()
	for _, id := range c.listed() {
		// Twice: deleting what is gone is no error.
		for range 2 {
			if err := c.Delete(within(c.t), id); err != nil {
				c.t.Error(err)
			}
		}
	}
	if left := c.listed(); len(left) > 0 {
		c.t.Errorf("not deleted: %q", left)
	}
	if left := await(func() []string { return harness.CommandLines(c.Root()) }); len(left) > 0 {
		c.t.Errorf("processes left: %q", left)
	}
	if entries, err := os.ReadDir(c.Root()); err != nil || slices.ContainsFunc(entries, func(e os.DirEntry) bool { return e.Name() != "null-netns" }) {
		c.t.Errorf("left in %s: %v, %v", c.Root(), entries, err)
	}
	c.must(c.Cleanup())
}

const (
	mib = 1 << 20
	// What the template has in its memory, and what a step adds.
	templateMiB, stepMiB = 24, 8
)

// template starts a tool server and makes a template of it.
func (c *cloud) template() client.Template {
	c.t.Helper()
	ctx := whole(c.t)
	c.must(c.Run(ctx, newBundle(c.t, c.tool, "serve"), client.Start{ID: "seed"}))
	c.ask("seed", "grow", fmt.Sprint(templateMiB), "template")
	c.ask("seed", "put", "who", "seed")
	tpl, err := c.CreateTemplate(ctx, "seed", filepath.Join(harness.CoveredTempDir(c.t), "template"),
		client.TemplateOptions{SettleCommand: c.tool + " ask collect", SettleTimeout: time.Minute})
	c.must(err)
	if s, err := c.State(ctx, "seed"); err != nil || s.Status != client.Stopped {
		c.t.Errorf("the sandbox of the template is %+v, %v", s, err)
	}
	c.must(c.Delete(ctx, "seed"))
	return tpl
}

// TestScheduler is the whole loop.
func TestScheduler(t *testing.T) {
	c := newCloud(t)
	ctx := whole(t)
	tpl := c.template()
	for name, look := range map[string]func(context.Context, string) (client.TemplateInfo, error){"info": c.TemplateInfo, "verify": c.VerifyTemplate} {
		if info, err := look(ctx, tpl.Dir); err != nil || info != tpl.Info || info.Bytes < templateMiB*mib {
			t.Errorf("%s: %+v, %v, want %+v", name, info, err, tpl.Info)
		}
	}

	clones := []string{"clone-a", "clone-b", "clone-c", "clone-d"}
	c.must(c.RestoreAll(ctx, tpl, client.Starts(clones...), 2))
	if got := c.listed(); !slices.Equal(got, clones) {
		t.Errorf("there are %q, want %q", got, clones)
	}

	// A step: the same command, with what is each clone's own.
	var mu sync.Mutex
	sums := map[string]string{}
	held := map[string]uint64{}
	each(clones, func(id string) {
		c.expect(id, "seed", "get", "who")
		before := c.ask(id, "sum")
		c.expect(id, "OK", "put", "who", id)
		c.expect(id, "OK", "grow", fmt.Sprint(stepMiB), id)
		c.expect(id, id, "get", "who")
		res, err := c.Exec(within(t), id, client.ExecOptions{
			Args: []string{"/bin/sh", "-c", `read -r x; echo "$x $WHO $(pwd) $(id -u):$(id -g)"; ` + c.tool + ` ask get nothing; exit $?`},
			Env:  []string{"WHO=" + id}, Cwd: "/usr", User: "7:8", Stdin: strings.NewReader("in-" + id + "\n"),
		})
		if want := "in-" + id + " " + id + " /usr 7:8\n"; err != nil || res.Stdout != want || res.Stderr != "ERR nothing is known of nothing\n" || res.ExitCode != 3 {
			t.Errorf("%s: %+v, %v", id, res, err)
		}
		after := c.ask(id, "sum")
		s := c.stats(id)
		mu.Lock()
		defer mu.Unlock()
		if !strings.HasPrefix(before, fmt.Sprint(templateMiB*mib)) || !strings.HasPrefix(after, fmt.Sprint((templateMiB+stepMiB)*mib)) {
			t.Errorf("%s: %q became %q", id, before, after)
		}
		for other, sum := range sums {
			if sum == after {
				t.Errorf("%s and %s have the same memory", id, other)
			}
		}
		sums[id], held[id] = after, s.ResidentBytes
	})

	// The models think.
	each(clones, func(id string) {
		c.must(c.Hint(within(t), id, client.Wait))
		var s control.Stats
		for start := time.Now(); ; time.Sleep(100 * time.Millisecond) {
			// Half of what it has beyond its template, at most.
			if s = c.stats(id); s.Phase.State == "waiting" && s.OwnedBytes < (s.GuestBytes-s.TemplateBytes)/2 {
				break
			}
			if time.Since(start) > time.Minute {
				t.Errorf("%s is not evicted: %+v", id, s)
				return
			}
		}
		t.Logf("%s: of %s, %s of them the template's, %s was in memory after the step, %s is owned now", id,
			control.Size(s.GuestBytes), control.Size(s.TemplateBytes), control.Size(held[id]), control.Size(s.OwnedBytes))
		if s.EvictedPagesTotal == 0 || s.TemplateBytes == 0 || s.GuestBytes < (templateMiB+stepMiB)*mib {
			t.Errorf("%s: %+v", id, s)
		}
	})
	if rep, err := c.Evict(ctx, "clone-a"); err != nil || rep.OwnedAfter == 0 {
		t.Errorf("%+v, %v", rep, err)
	}
	if rep, err := c.Check(ctx, "clone-a"); err != nil || len(rep.Problems) > 0 || rep.CheckedPages == 0 {
		t.Errorf("%+v, %v", rep, err)
	}

	// They have answered.
	each(clones, func(id string) {
		c.must(c.Hint(within(t), id, client.Resume))
		c.expect(id, sums[id], "sum")
		c.expect(id, id, "get", "who")
	})
	if _, err := c.Prefetch(ctx, "clone-a"); err != nil {
		t.Error(err)
	}
	if err := c.SavePatterns(ctx, "clone-a", tpl.Dir); err != nil {
		t.Error(err)
	}

	// A clone's clones begin where it is, and are their own.
	c.expect("clone-b", "OK", "put", "fork", "here")
	fork, err := c.Fork(ctx, "clone-b", filepath.Join(harness.CoveredTempDir(t), "fork"), client.Starts("child-x", "child-y"), 2)
	c.must(err)
	if fork.Bundle != tpl.Bundle || fork.Info.Digest == tpl.Info.Digest {
		t.Errorf("%+v", fork)
	}
	c.expect("clone-b", "OK", "put", "fork", "gone-on")
	c.expect("child-x", "OK", "put", "who", "child-x")
	for id, want := range map[string][2]string{"clone-b": {"clone-b", "gone-on"}, "child-x": {"child-x", "here"}, "child-y": {"clone-b", "here"}} {
		c.expect(id, want[0], "get", "who")
		c.expect(id, want[1], "get", "fork")
		c.expect(id, sums["clone-b"], "sum")
	}
	// The fork's template may go while they run, and be verified before.
	if _, err := c.VerifyTemplate(ctx, fork.Dir); err != nil {
		t.Error(err)
	}
	c.must(os.RemoveAll(fork.Dir))
	c.expect("child-y", sums["clone-b"], "sum")

	// How one ends is known to who waits for it.
	code := make(chan string)
	go func() {
		n, err := c.Wait(within(t), "child-x")
		code <- fmt.Sprint(n, err)
	}()
	for len(harness.CommandLines("wait\x00child-x")) == 0 {
		time.Sleep(10 * time.Millisecond)
	}
	time.Sleep(500 * time.Millisecond)
	for range 2 {
		c.must(c.Kill(ctx, "child-x"))
	}
	if got := <-code; got != "137 <nil>" {
		t.Errorf("a killed sandbox ends with %s", got)
	}
	if s, err := c.State(ctx, "child-x"); err != nil || s.Status != client.Stopped {
		t.Errorf("%+v, %v", s, err)
	}
	if _, err := c.Stats(ctx, "child-x"); err == nil || errors.Is(err, client.ErrNotFound) {
		t.Errorf("stats of a sandbox that ended: %v", err)
	}
	c.finish()
	if _, err := c.Stats(ctx, "child-x"); !errors.Is(err, client.ErrNotFound) {
		t.Errorf("%v", err)
	}
}

// TestFailures: what fails says why, and leaves nothing.
func TestFailures(t *testing.T) {
	c := newCloud(t)
	ctx := whole(t)
	tpl := c.template()
	c.must(c.Restore(ctx, tpl, client.Start{ID: "here"}))

	for name, tc := range map[string]struct {
		err  error
		is   error
		want string
	}{
		"no such sandbox": {c.Hint(ctx, "nowhere", client.Wait), client.ErrNotFound, "nowhere"},
		"taken":           {c.Restore(ctx, tpl, client.Start{ID: "here"}), client.ErrExists, "here"},
		"beginning":       {c.Restore(ctx, tpl, client.Start{ID: "her"}), client.ErrAmbiguous, "her"},
		"no template":     {c.Restore(ctx, client.Template{Dir: harness.CoveredTempDir(t), Bundle: tpl.Bundle}, client.Start{ID: "new"}), nil, "checkpoint.img"},
		"no bundle":       {c.Run(ctx, harness.CoveredTempDir(t), client.Start{ID: "new"}), nil, "config.json"},
		"no command":      {c.Run(ctx, newBundle(t, "/no/such/command"), client.Start{ID: "new"}), nil, "/no/such/command"},
		"no such flag":    {c.Run(ctx, tpl.Bundle, client.Start{ID: "new", Flags: []string{"--no-such-flag"}}), nil, "no-such-flag"},
		"bad hint":        {c.Hint(ctx, "here", "sleep"), nil, "sleep"},
	} {
		if tc.err == nil || !strings.Contains(tc.err.Error(), tc.want) || tc.is != nil && !errors.Is(tc.err, tc.is) {
			t.Errorf("%s: %v, want %q", name, tc.err, tc.want)
		}
		t.Logf("%s: %v", name, tc.err)
	}
	_, err := c.CreateTemplate(ctx, "here", filepath.Join(harness.CoveredTempDir(t), "t"), client.TemplateOptions{SettleCommand: "echo it is broken; exit 9", LeaveRunning: true})
	if err == nil || !strings.Contains(err.Error(), "status 9") || !strings.Contains(err.Error(), "it is broken") {
		t.Errorf("a settle command that fails: %v", err)
	}
	if _, err := c.CreateTemplate(ctx, "here", tpl.Dir, client.TemplateOptions{}); err == nil || !strings.Contains(err.Error(), "never overwritten") {
		t.Errorf("a template in place of another: %v", err)
	}
	if _, err := c.Exec(ctx, "here", client.ExecOptions{Args: []string{"/no/such/tool"}}); err == nil || !strings.Contains(err.Error(), "/no/such/tool") {
		t.Errorf("a tool that is not there: %v", err)
	}
	for _, code := range []int{0, 1, 127, 128, 255} {
		res, err := c.Exec(ctx, "here", client.ExecOptions{Args: []string{"/bin/sh", "-c", fmt.Sprint("exit ", code)}})
		if err != nil || res.ExitCode != code {
			t.Errorf("exit code %d: %+v, %v", code, res, err)
		}
	}

	// Runsc would take "cloneless" for one that is not there.
	c.must(c.Restore(ctx, tpl, client.Start{ID: "cloneless"}))
	c.must(c.Delete(ctx, "clone"))
	c.must(c.Kill(ctx, "clone"))
	c.expect("cloneless", "seed", "get", "who")

	// All or none.
	starts := client.Starts("n-1", "n-2", "n-3", "n-4")
	starts[2].Flags = []string{"--agentzip-idle=soon"}
	err = c.RestoreAll(ctx, tpl, starts, 2)
	var re *client.RestoreError
	if !errors.As(err, &re) || len(re.Failed) != 1 || re.Failed[0].ID != "n-3" || len(re.Left) != 0 || !strings.Contains(err.Error(), "agentzip-idle") {
		t.Errorf("%v", err)
	}
	t.Logf("%v", err)
	soon, cancel := context.WithTimeout(ctx, 150*time.Millisecond)
	defer cancel()
	if err := c.RestoreAll(soon, tpl, client.Starts("n-1", "n-2", "n-3", "n-4", "n-5", "n-6"), 3); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v", err)
	} else {
		t.Logf("%v", err)
	}
	if got := c.listed(); !slices.Equal(got, []string{"cloneless", "here"}) {
		t.Errorf("there are %q", got)
	}

	// A step that takes too long is ended where it runs, with its children.
	soon, cancel = context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	res, err := c.Exec(soon, "here", client.ExecOptions{Args: []string{"/bin/sh", "-c", "echo begun; sleep 3333 & sleep 4444"}})
	if !errors.Is(err, context.DeadlineExceeded) || res.Stdout != "begun\n" {
		t.Errorf("%+v, %v", res, err)
	}
	if left := await(func() (left []string) {
		out, err := c.Command(ctx, "ps", "--format=json", "here")
		c.must(err)
		ps, err := c.Exec(ctx, "here", client.ExecOptions{Args: []string{"/bin/sh", "-c", `cat /proc/[0-9]*/cmdline | tr "\0" " "`}})
		c.must(err)
		if strings.Contains(ps.Stdout, "sleep 3333") || strings.Contains(ps.Stdout, "sleep 4444") {
			left = append(left, string(out), ps.Stdout)
		}
		return left
	}); len(left) > 0 {
		t.Errorf("the command goes on: %q", left)
	}

	// A sandbox whose process dies takes its commands with it, without an exit code.
	c.must(c.Restore(ctx, tpl, client.Start{ID: "dies"}))
	dies, err := c.State(ctx, "dies")
	c.must(err)
	if dies.Pid <= 1 {
		t.Fatalf("%+v", dies)
	}
	res, err = c.Exec(ctx, "dies", client.ExecOptions{
		Args:   []string{"/bin/sh", "-c", "echo begun; sleep 1000"},
		Stdout: writer(func([]byte) error { syscall.Kill(dies.Pid, syscall.SIGKILL); return nil }),
	})
	var ce *client.CommandError
	if !errors.As(err, &ce) || ce.Command != "exec" || ce.Stderr == "" {
		t.Errorf("%+v, %v", res, err)
	}
	t.Logf("a command in a sandbox that dies: %+v, %v", res, err)
	c.must(c.Kill(ctx, "dies"))

	// A step may leave something running, which holds its output open.
	res, err = c.Exec(ctx, "here", client.ExecOptions{Args: []string{"/bin/sh", "-c", "sleep 1000 & echo started"}})
	if err != nil || res.Stdout != "started\n" || res.ExitCode != 0 {
		t.Errorf("%+v, %v", res, err)
	}
	c.finish()
}

// TestStdio drives a clone over pipes of its own.
func TestStdio(t *testing.T) {
	c := newCloud(t)
	ctx := whole(t)
	b := newBundle(t, "/bin/sh", "-c", `n=0; while read -r x; do n=$((n+1)); echo "$n $x"; echo "err $n" >&2; done`)
	c.must(c.Run(ctx, b, client.Start{ID: "seed"}))
	// Its standard input was empty, so it has ended or is about to.
	for s := (client.State{}); s.Status != client.Stopped; time.Sleep(50 * time.Millisecond) {
		var err error
		s, err = c.State(ctx, "seed")
		c.must(err)
	}
	c.must(c.Delete(ctx, "seed"))

	type pipes struct{ in, out, err *os.File }
	start := func(id string, f func(client.Start) error) pipes {
		t.Helper()
		var p pipes
		s := client.Start{ID: id}
		for _, e := range []struct {
			theirs **os.File
			ours   **os.File
			in     bool
		}{{&s.Stdin, &p.in, true}, {&s.Stdout, &p.out, false}, {&s.Stderr, &p.err, false}} {
			r, w, err := os.Pipe()
			c.must(err)
			if *e.theirs, *e.ours = w, r; e.in {
				*e.theirs, *e.ours = r, w
			}
			defer (*e.theirs).Close()
			ours := *e.ours
			t.Cleanup(func() { ours.Close() })
		}
		c.must(f(s))
		return p
	}
	step := func(p pipes, in, out, errOut string) {
		t.Helper()
		for _, f := range []*os.File{p.in, p.out, p.err} {
			c.must(f.SetDeadline(time.Now().Add(time.Minute)))
		}
		fmt.Fprintln(p.in, in)
		for f, want := range map[*os.File]string{p.out: out, p.err: errOut} {
			got := make([]byte, len(want))
			if n, err := f.Read(got); err != nil || string(got[:n]) != want {
				t.Errorf("%q, %v, want %q", got[:n], err, want)
			}
		}
	}
	p := start("origin", func(s client.Start) error { return c.Run(ctx, b, s) })
	step(p, "a", "1 a\n", "err 1\n")
	tpl, err := c.CreateTemplate(ctx, "origin", filepath.Join(harness.CoveredTempDir(t), "t"), client.TemplateOptions{LeaveRunning: true})
	c.must(err)
	q := start("clone", func(s client.Start) error { return c.Restore(ctx, tpl, s) })
	step(q, "b", "2 b\n", "err 2\n")
	step(p, "c", "2 c\n", "err 2\n")
	step(q, "d", "3 d\n", "err 3\n")

	// Commands that share files go on where the last has ended, as on a host.
	in, err := os.CreateTemp(harness.CoveredTempDir(t), "in")
	c.must(err)
	defer in.Close()
	out, err := os.CreateTemp(harness.CoveredTempDir(t), "out")
	c.must(err)
	defer out.Close()
	_, err = in.WriteString("skipped\nread\n")
	c.must(err)
	for range 2 {
		_, err = in.Seek(int64(len("skipped\n")), 0)
		c.must(err)
		res, err := c.Exec(ctx, "clone", client.ExecOptions{Args: []string{"/bin/sh", "-c", "cat; echo err >&2"}, Stdin: in, Stdout: out, Stderr: out})
		if err != nil || res != (client.ExecResult{}) {
			t.Errorf("%+v, %v", res, err)
		}
	}
	// The two of one command may come in either order.
	got, err := os.ReadFile(out.Name())
	if lines := strings.SplitAfter(string(got), "\n"); err != nil || strings.Count(string(got), "read\n") != 2 || strings.Count(string(got), "err\n") != 2 || len(lines) != 5 {
		t.Errorf("%q, %v", got, err)
	}
	c.finish()
}

// TestShell runs the same loop as a shell script.
func TestShell(t *testing.T) {
	out := shell(t, "", 0)
	lines := strings.Split(out, "\n")
	for _, want := range []string{
		"seed: step 1, ", "clone-001: step 2, ", "clone-004 waits: owns ", "clone-004: step 3, ",
		"fork-1: step 4, ", "fork-2: step 4, ", "clone-001: step 4, ",
	} {
		if !slices.ContainsFunc(lines, func(l string) bool { return strings.HasPrefix(l, want) }) {
			t.Errorf("it does not print %q", want)
		}
	}
	// A grandchild knows what its parent did, and not its sibling.
	for _, want := range []string{"by seed clone-003 clone-003 ", "by seed clone-001 clone-001 fork-2 ", "by seed clone-001 clone-001 clone-001 "} {
		if n := strings.Count(out, want+"\n"); n != 1 {
			t.Errorf("it prints %q %d times", want, n)
		}
	}
}

// TestShellInterrupted ends the script in the middle, while it restores, and when
// nobody reads what it prints any more.
func TestShellInterrupted(t *testing.T) {
	for at, sig := range map[string]syscall.Signal{"index ": syscall.SIGTERM, "clone-001: step 2": syscall.SIGTERM, "clone-002: step 2": syscall.SIGPIPE} {
		if out := shell(t, at, sig); strings.Contains(out, "clone-004: step 3") {
			t.Errorf("it was not interrupted: %s", out)
		}
	}
}

// shell runs the script and returns what it prints. Once it has printed a text it is
// ended with a signal, unless that is 0: SIGPIPE is what comes of it when its output is
// closed. Nothing may be left of it.
func shell(t *testing.T, until string, sig syscall.Signal) string {
	t.Helper()
	roots := func() []string {
		all, _ := filepath.Glob("/run/scheduler.*")
		return all
	}
	temp, before := harness.CoveredTempDir(t), roots()
	cmd := exec.CommandContext(whole(t), "sh", harness.RepoPath("runsc-agentzip/examples/scheduler.sh"))
	cmd.Env = append(os.Environ(), "RUNSC="+harness.UnderTest(t).Path, "CLONES=4", "TMPDIR="+temp)
	// So that it can clean up, also when we are killed. The thread must not end before.
	terminate := func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.Cancel = terminate
	cmd.WaitDelay = time.Minute
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
	var out, errOut strings.Builder
	cmd.Stdout = writer(func(p []byte) error {
		out.Write(p)
		switch seen := until != "" && strings.Contains(out.String(), until); {
		case seen && sig == syscall.SIGPIPE:
			return io.ErrClosedPipe
		case seen:
			terminate()
		}
		return nil
	})
	cmd.Stderr = &errOut
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	harness.AtExit(t, func() {
		terminate()
		select {
		case <-ended:
		case <-time.After(bounded):
		}
	})
	err := cmd.Wait()
	close(ended)
	t.Logf("\n%s%s", out.String(), errOut.String())
	var exit *exec.ExitError
	if until == "" && err != nil || until != "" && (!errors.As(err, &exit) || exit.ExitCode() != 128+int(sig)) {
		t.Errorf("%v", err)
	}
	if left, err := os.ReadDir(temp); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
	// Others may be running it, or have been killed.
	left := slices.DeleteFunc(roots(), func(root string) bool { return slices.Contains(before, root) })
	if len(left) > 0 {
		t.Errorf("left behind: %q", left)
	}
	// The bundle is in their command lines.
	if p := await(func() []string { return harness.CommandLines(temp) }); len(p) > 0 {
		t.Errorf("left behind: %q", p)
	}
	return out.String()
}

type writer func(p []byte) error

func (w writer) Write(p []byte) (int, error) { return len(p), w(p) }
