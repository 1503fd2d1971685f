package phase

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"text/tabwriter"
	"time"

	"runsc-agentzip/test/harness"
)

// A shape is one way in which programs are built.
type shape struct {
	name string
	// beats says that something runs in the background.
	beats bool
	start func(t testing.TB, rt *harness.Runtime, id string) *guest
}

const node = "/usr/bin/node"

var shapes = []shape{
	{"stdio server", false, func(t testing.TB, rt *harness.Runtime, id string) *guest {
		return start(t, rt, id, server(t, "stdio")...)
	}},
	{"unix socket server", false, func(t testing.TB, rt *harness.Runtime, id string) *guest {
		return client(start(t, rt, id, server(t, "unix", "/dev/shm/server")...), "unix", "/dev/shm/server")
	}},
	{"tcp server", false, func(t testing.TB, rt *harness.Runtime, id string) *guest {
		return client(start(t, rt, id, server(t, "tcp", "7001")...), "tcp", "127.0.0.1:7001")
	}},
	{"exec per step", false, execPerStep},
	{"asyncio", true, func(t testing.TB, rt *harness.Runtime, id string) *guest {
		return start(t, rt, id, server(t, "asyncio")...)
	}},
	{"node", true, func(t testing.TB, rt *harness.Runtime, id string) *guest {
		if _, err := os.Stat(node); err != nil {
			// Not among the packages that are always installed.
			t.Skipf("%s is missing", node)
		}
		return start(t, rt, id, node, guestPath(t, "server.js"))
	}},
	{"go server", true, func(t testing.TB, rt *harness.Runtime, id string) *guest {
		return start(t, rt, id, guestPath(t, "goguest"), "serve")
	}},
	{"shell and client", false, func(t testing.TB, rt *harness.Runtime, id string) *guest {
		// The shell waits for its child, the client for the server, the server
		// for somebody from outside.
		g := start(t, rt, id, "/bin/sh", "-c",
			strings.Join(server(t, "desk", "7002"), " ")+" & while "+guestPath(t, "goguest")+" wait tcp 127.0.0.1:7002; do :; done")
		g.ask = func(ms int) error {
			if _, err := g.exec(guestPath(t, "goguest"), "ask", "tcp", "127.0.0.1:7002", fmt.Sprintf("answer %d", ms)); err != nil {
				return err
			}
			if line, err := g.sb.ReadLine(harness.Within(g.t, time.Minute)); err != nil || line != "DONE" {
				return fmt.Errorf("the client said %q, %v, want DONE", line, err)
			}
			return nil
		}
		return g
	}},
	{"polling thread", true, func(t testing.TB, rt *harness.Runtime, id string) *guest {
		return start(t, rt, id, server(t, "polling")...)
	}},
}

// execPerStep starts a sandbox whose root process sleeps; each request is a process.
func execPerStep(t testing.TB, rt *harness.Runtime, id string) *guest {
	g := launch(t, rt, id, "/bin/sleep", "infinity")
	g.ask = func(ms int) error {
		_, err := g.exec(python, "-B", "-S", "-c", fmt.Sprintf(
			"import time\nend = time.process_time() + %d / 1000\nwhile time.process_time() < end: sum(range(20000))", ms))
		return err
	}
	return g
}

// client makes requests reach a server in the sandbox by a client that is started
// for each.
func client(g *guest, network, addr string) *guest {
	program := guestPath(g.t, "goguest")
	g.ask = func(ms int) error {
		answer, err := g.exec(program, "ask", network, addr, fmt.Sprintf("work %d", ms))
		if err == nil && answer != "OK" {
			err = fmt.Errorf("the server answered %q, want OK", answer)
		}
		return err
	}
	return g
}

// ---- the table ---------------------------------------------------------------

// A row is what became of all rounds of a shape.
type row struct {
	shape                       string
	waits, missed, falseResumes int
	resumes, missedResumes      int
	passed                      int
	// repeated counts the rounds that were repeated, by the reason.
	repeated map[string]int
	// reactions are the times from an answer to the wait that was recognised.
	reactions []time.Duration
	beats     uint64
	why       map[string]int
	// idle is the longest idle time.
	idle time.Duration
}

var table struct {
	sync.Mutex
	rows []*row
}

func printTable(w io.Writer) {
	table.Lock()
	defer table.Unlock()
	if len(table.rows) == 0 {
		return
	}
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "shape\twaits\tmissed waits\tfalse resumes\tmedian reaction\tmost\tresumes\tmissed resumes\ttaken for beats\trepeated\tbeats\tidle time\twhy")
	for _, r := range table.rows {
		slices.Sort(r.reactions)
		median, most := "-", "-"
		if n := len(r.reactions); n != 0 {
			median, most = fmt.Sprint(r.reactions[n/2].Round(time.Millisecond)), fmt.Sprint(r.reactions[n-1].Round(time.Millisecond))
		}
		fmt.Fprintf(tw, "%s\t%d\t%d\t%d\t%s\t%s\t%d\t%d\t%d\t%s\t%d\t%v\t%s\n", r.shape, r.waits, r.missed, r.falseResumes, median, most,
			r.resumes, r.missedResumes, r.passed, list(r.repeated), r.beats, r.idle, list(r.why))
	}
	tw.Flush()
}

// list is what was counted as a person reads it.
func list(counts map[string]int) string {
	var out []string
	for _, k := range slices.Sorted(maps.Keys(counts)) {
		out = append(out, fmt.Sprintf("%d %s", counts[k], k))
	}
	return cmp.Or(strings.Join(out, ", "), "-")
}

// ---- rounds ------------------------------------------------------------------

// shortWork and longWork are what a program is asked to compute, in milliseconds.
// The latter is seen working.
const (
	shortWork = 5
	longWork  = 300
)

// An outcome is what became of one request and the wait after it.
type outcome struct {
	missedWait, missedResume bool
	// passed: the request was taken for a beat.
	passed       bool
	falseResumes int
	reaction     time.Duration
	beats        uint64
	last         sample
	text         string
}

// problem names the first decision that was wrong, or is "".
func (o outcome) problem() string {
	switch {
	case o.missedResume:
		return "missed resume"
	case o.missedWait:
		return "missed wait"
	case o.falseResumes != 0:
		return "false resume"
	}
	return ""
}

// calmTime is how long a sandbox has waited when a round begins. A model takes longer
// to answer, and an eviction is over: TestEarly is for what comes meanwhile.
const calmTime = time.Second

// round sends one request to a sandbox that waits, and leaves it alone afterwards.
func round(g *guest, ms int) outcome {
	g.t.Helper()
	before, ok := g.waitingFor(calmTime)
	if !ok {
		return outcome{missedWait: true, last: before, text: fmt.Sprintf("idle for %v, and no wait that lasts %v: %v", settleTime, calmTime, before)}
	}
	begun := time.Now()
	var answered time.Time
	during, err := g.during(func() error {
		err := g.ask(ms)
		answered = time.Now()
		return err
	})
	if err != nil {
		g.t.Fatal(err)
	}
	after := g.watchFor(time.Until(answered.Add(*waitFlag)))
	var o outcome
	o.judge(before, during, after, answered, ms, g.beats)
	o.text = fmt.Sprintf("%d ms of work, answered after %d ms; before: %v%s", ms, answered.Sub(begun).Milliseconds(),
		before, history(begun, append(during, after...)))
	return o
}

// judge compares what was seen with what was: a resume at the request, work until
// the answer, one wait from then on. In a program in which something beats, a request
// that comes amid a beat and is no more work than one may pass for it.
func (o *outcome) judge(before sample, during, after []sample, answered time.Time, ms int, beats bool) {
	// Only what was said before the answer is of the time of the work. The guest
	// may wait still when a look is taken early.
	working := false
	for _, s := range during {
		switch {
		case !s.at.Before(answered):
		case s.State == "working":
			working = true
		case working && s.waiting():
			o.falseResumes++
			working = false
		}
	}
	o.missedResume = ms >= longWork && !working

	// The last looks of during may be later than the answer.
	rest := slices.DeleteFunc(slices.Concat(during, after), func(s sample) bool { return s.asked.Before(answered) })
	first := slices.IndexFunc(rest, func(s sample) bool { return s.waiting() && s.Waits > before.Waits })
	o.last = rest[len(rest)-1]
	if first < 0 {
		// It waits, but in the old wait: what was missed is the resume.
		if o.last.waiting() && beats && ms < longWork {
			o.passed = true
		} else if o.last.waiting() {
			o.missedResume = true
		} else {
			o.missedWait = true
		}
		return
	}
	f := rest[first]
	o.reaction = max(f.changed().Sub(answered), 0)
	// A request is one resume and one wait.
	o.falseResumes += int(o.last.Waits - before.Waits - 1)
	if !o.last.waiting() {
		o.falseResumes++
	}
	o.beats = o.last.Beats - f.Beats
}

func TestShapes(t *testing.T) {
	rounds := *roundsFlag
	if testing.Short() {
		rounds = 1
	}
	for _, s := range shapes {
		t.Run(s.name, func(t *testing.T) {
			g := s.start(t, newRuntime(t), "shape")
			g.beats = s.beats
			r := &row{shape: s.name, why: make(map[string]int), repeated: make(map[string]int)}
			table.Lock()
			table.rows = append(table.rows, r)
			table.Unlock()
			for range rounds {
				for _, ms := range []int{shortWork, longWork} {
					o := round(g, ms)
					if p := o.problem(); p != "" {
						r.repeated[p]++
						t.Logf("repeated, %s: %s", p, o.text)
						o = round(g, ms)
					}
					r.add(o)
					if p := o.problem(); p != "" {
						t.Errorf("%s: %s", p, o.text)
					}
				}
			}
			t.Logf("%d waits, %d missed, %d false resumes, %d missed resumes, repeated: %s; reactions %v", r.waits, r.missed,
				r.falseResumes, r.missedResumes, list(r.repeated), r.reactions)
		})
	}
}

func (r *row) add(o outcome) {
	if o.passed {
		r.passed++
		return
	}
	r.waits++
	r.resumes++
	r.falseResumes += o.falseResumes
	if o.missedResume {
		r.missedResumes++
	}
	r.idle = max(r.idle, time.Duration(o.last.IdleNS))
	if o.missedWait {
		r.missed++
		return
	}
	r.beats += o.beats
	r.why[o.last.Why]++
	if !o.missedResume {
		r.reactions = append(r.reactions, o.reaction)
	}
}
