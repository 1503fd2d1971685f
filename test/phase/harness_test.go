package phase

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"runsc-agentzip/pkg/control"
	"runsc-agentzip/pkg/fleet"
	"runsc-agentzip/test/harness"
)

var (
	roundsFlag = flag.Int("rounds", 3, "how often each shape of program is asked for short and for long work")
	waitFlag   = flag.Duration("wait", 1500*time.Millisecond, "how long a sandbox is left alone after an answer")

	longFlag countFlag
)

func init() {
	flag.Var(&longFlag, "long", "measure what waiting sandboxes cost: 16, or so many with -long=N")
}

// A countFlag is a flag that is given with or without a number.
type countFlag int

const countDefault = 16

func (c *countFlag) String() string   { return strconv.Itoa(int(*c)) }
func (c *countFlag) IsBoolFlag() bool { return true }

func (c *countFlag) Set(s string) error {
	switch s {
	case "true":
		*c = countDefault
		return nil
	case "false":
		*c = 0
		return nil
	}
	n, err := strconv.Atoi(s)
	if err != nil || n < 0 {
		return errors.New("want a number of sandboxes")
	}
	*c = countFlag(n)
	return nil
}

// python is the interpreter of the host, whose root filesystem is the guests' too.
const python = "/usr/bin/python3"

func TestMain(m *testing.M) {
	code := harness.Main(m, "phase")
	printTable(os.Stdout)
	os.Exit(code)
}

// ---- guest programs -------------------------------------------------------------

var programs = harness.Programs{Go: []string{"guest/goguest"}, Files: []string{"guest/server.py", "guest/server.js"}}

// guestPath returns where the guest finds a program: goguest, server.py, server.js.
func guestPath(t testing.TB, name string) string {
	t.Helper()
	if _, err := os.Stat(python); err != nil {
		harness.Skip(t, "%s is missing: apt-get install python3", python)
	}
	return programs.Path(t, name)
}

// server are the arguments that start server.py.
func server(t testing.TB, args ...string) []string {
	// Bytecode would be written, to the sandbox's memory.
	return append([]string{python, "-B", guestPath(t, "server.py")}, args...)
}

// ---- sandboxes -----------------------------------------------------------------

func newRuntime(t testing.TB, flags ...string) *harness.Runtime {
	t.Helper()
	return harness.NewRuntime(t, harness.Options{
		Binary: harness.UnderTest(t, "agentzip-idle").Path,
		Flags:  flags,
		Logs:   harness.AllLogs,
	})
}

// A guest is a sandbox with a program in it.
type guest struct {
	t  testing.TB
	rt *harness.Runtime
	sb *fleet.Sandbox
	// ask has the program compute for so many milliseconds and returns when it
	// has answered. It may be called by another goroutine than the test's.
	ask func(ms int) error
	// beats is set if something in the program runs now and then.
	beats bool
}

// in returns the guest for a subtest.
func (g *guest) in(t testing.TB) *guest {
	sub := *g
	sub.t = t
	return &sub
}

// start runs a program that writes READY to its standard output. Unless ask is
// replaced it answers lines from its standard input.
func start(t testing.TB, rt *harness.Runtime, id string, args ...string) *guest {
	t.Helper()
	return newGuest(t, rt, rt.Start(t, id, bundle(t, args...)))
}

// launch runs a program.
func launch(t testing.TB, rt *harness.Runtime, id string, args ...string) *guest {
	t.Helper()
	sb, err := rt.Run(harness.Within(t, 2*time.Minute), id, bundle(t, args...))
	if err != nil {
		t.Fatalf("starting %s: %v", id, err)
	}
	return newGuest(t, rt, sb)
}

func bundle(t testing.TB, args ...string) string {
	t.Helper()
	// Before the first sandbox starts: it need not notice files that appear later.
	guestPath(t, "")
	return harness.Bundle(t, fleet.Spec{
		Rootfs:   "/",
		Args:     args,
		Hostname: "phase",
		Env:      []string{"LC_ALL=C.UTF-8", "HOME=/var/tmp"},
		Mounts:   []fleet.Mount{{Target: "/dev/shm", Options: []string{"mode=1777"}}},
	})
}

func newGuest(t testing.TB, rt *harness.Runtime, sb *fleet.Sandbox) *guest {
	g := &guest{t: t, rt: rt, sb: sb}
	g.ask = func(ms int) error { return g.line(fmt.Sprintf("work %d", ms), "OK") }
	return g
}

// line sends a line and checks the answer.
func (g *guest) line(line, want string) error {
	got, err := g.sb.Request(harness.Within(g.t, time.Minute), line)
	if err == nil && got != want {
		err = fmt.Errorf("%s: the guest answered %q, want %q", line, got, want)
	}
	return err
}

// number sends a line and returns the number that is the answer.
func (g *guest) number(line string) int {
	g.t.Helper()
	got, err := g.sb.Request(harness.Within(g.t, time.Minute), line)
	if err != nil {
		g.t.Fatal(err)
	}
	n, err := strconv.Atoi(got)
	if err != nil {
		g.t.Fatalf("%s: the guest answered %q, want a number", line, got)
	}
	return n
}

// exec runs a command in the sandbox, which has to succeed.
func (g *guest) exec(args ...string) (string, error) {
	res, err := g.sb.Exec(harness.Within(g.t, time.Minute), args...)
	if err == nil && res.ExitCode != 0 {
		err = fmt.Errorf("%q in the sandbox: exit code %d: %s", args, res.ExitCode, res.Stderr)
	}
	return strings.TrimSpace(res.Stdout), err
}

// hint runs "agentzip hint".
func (g *guest) hint(phase string) {
	g.t.Helper()
	cmd := exec.Command(g.rt.Binary(), "--root="+g.rt.Root(), "agentzip", "hint", "--phase="+phase, g.sb.ID())
	if b, err := cmd.CombinedOutput(); err != nil {
		g.t.Fatalf("agentzip hint --phase=%s: %v: %s", phase, err, b)
	}
}

// ---- what the runtime says -------------------------------------------------------

// A sample is what the runtime said of the phase at a time between asked and at.
type sample struct {
	asked, at time.Time
	control.Phase
}

// changed is when the state began.
func (s sample) changed() time.Time { return s.at.Add(-time.Duration(s.SinceNS)) }

func (s sample) waiting() bool { return s.State == "waiting" }

func (s sample) String() string {
	return fmt.Sprintf("%s for %v (%s; waits %d, beats %d, idle %v)", s.State, time.Duration(s.SinceNS).Round(time.Millisecond),
		s.Why, s.Waits, s.Beats, time.Duration(s.IdleNS))
}

// look asks for the phase.
func (g *guest) look() sample {
	g.t.Helper()
	s := sample{asked: time.Now()}
	stats := harness.Stats(g.t, g.sb)
	s.at, s.Phase = time.Now(), stats.Phase
	return s
}

// pollInterval is the time between two looks, without what a look takes.
const pollInterval = 50 * time.Millisecond

// watch looks until stop says that it is enough, at least once.
func (g *guest) watch(stop func(sample) bool) []sample {
	g.t.Helper()
	var out []sample
	for {
		s := g.look()
		out = append(out, s)
		if stop(s) {
			return out
		}
		time.Sleep(pollInterval)
	}
}

// watchFor looks for so long.
func (g *guest) watchFor(d time.Duration) []sample {
	g.t.Helper()
	end := time.Now().Add(d)
	return g.watch(func(s sample) bool { return s.at.After(end) })
}

// during looks as long as f runs.
func (g *guest) during(f func() error) ([]sample, error) {
	g.t.Helper()
	done := make(chan error, 1)
	go func() { done <- f() }()
	var err error
	ended := false
	samples := g.watch(func(sample) bool {
		select {
		case err = <-done:
			ended = true
		default:
		}
		return ended
	})
	return samples, err
}

// settleTime is how long an idle sandbox may take until it has to wait, whatever it
// did before: far longer than -wait.
const settleTime = 10 * time.Second

// settle returns the first look at which the sandbox waits.
func (g *guest) settle() sample {
	g.t.Helper()
	last, ok := g.waitingFor(0)
	if !ok {
		g.t.Fatalf("%s is idle and not recognised as waiting within %v: %v", g.sb.ID(), settleTime, last)
	}
	return last
}

// waitingFor returns the first look at which the sandbox waits for so long, or else
// the last one of settleTime.
func (g *guest) waitingFor(d time.Duration) (last sample, ok bool) {
	g.t.Helper()
	calm := func(s sample) bool { return s.waiting() && s.SinceNS >= uint64(d) }
	end := time.Now().Add(settleTime)
	samples := g.watch(func(s sample) bool { return calm(s) || s.at.After(end) })
	last = samples[len(samples)-1]
	return last, calm(last)
}

// history is a list of samples as a person reads it, times from a start. Of those
// that say the same it has the first and the last.
func history(start time.Time, samples []sample) string {
	same := func(a, b sample) bool { return a.State == b.State && a.Waits == b.Waits && a.Why == b.Why }
	var b strings.Builder
	for i, s := range samples {
		if i > 0 && i < len(samples)-1 && same(s, samples[i-1]) && same(s, samples[i+1]) {
			continue
		}
		fmt.Fprintf(&b, "\n  %6d ms: %v", s.at.Sub(start).Milliseconds(), s)
	}
	return b.String()
}
