package phase

import (
	"fmt"
	"testing"
	"time"

	"runsc-agentzip/test/harness"
)

// noWait fails if a sandbox was seen to wait after it was seen working.
func noWait(t *testing.T, begun time.Time, samples []sample, answered time.Time) {
	t.Helper()
	working := false
	for _, s := range samples {
		switch {
		case !s.at.Before(answered):
		case s.State == "working":
			working = true
		case working && s.waiting():
			t.Errorf("waits while it computes:%s", history(begun, samples))
			return
		}
	}
	if !working {
		t.Errorf("not seen working while it computed:%s", history(begun, samples))
	}
}

// TestComputation has one process compute for a long time: that is never a wait,
// whatever waits beside it, and whatever started it.
func TestComputation(t *testing.T) {
	t.Run("asked", func(t *testing.T) {
		g := start(t, newRuntime(t), "computation", server(t, "helpers", "4")...)
		computation(t, g)
	})
	t.Run("exec", func(t *testing.T) {
		computation(t, execPerStep(t, newRuntime(t), "computation"))
	})
	t.Run("beside a heartbeat", func(t *testing.T) {
		computation(t, start(t, newRuntime(t), "computation", server(t, "polling")...))
	})
	t.Run("timer", func(t *testing.T) {
		g := start(t, newRuntime(t), "computation", server(t, "stdio")...)
		g.settle()
		begun := time.Now()
		if err := g.line("later 2000 1500", "OK"); err != nil {
			t.Fatal(err)
		}
		var answered time.Time
		samples, err := g.during(func() error {
			line, err := g.sb.ReadLine(harness.Within(g.t, time.Minute))
			if err == nil && line != "DONE" {
				err = fmt.Errorf("the guest said %q, want DONE", line)
			}
			answered = time.Now()
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		// A wait as long as it sleeps, then work.
		var waited bool
		for i, s := range samples {
			if s.waiting() {
				waited = true
				continue
			}
			if waited {
				samples = samples[i:]
				break
			}
		}
		if !waited {
			t.Fatalf("a program that slept for 2 s was not seen to wait:%s", history(begun, samples))
		}
		noWait(t, begun, samples, answered)
		g.settle()
	})
}

func computation(t *testing.T, g *guest) {
	t.Helper()
	before := g.settle()
	begun := time.Now()
	var answered time.Time
	samples, err := g.during(func() error {
		err := g.ask(3000)
		answered = time.Now()
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	noWait(t, begun, samples, answered)
	if after := g.settle(); after.Waits != before.Waits+1 {
		t.Errorf("%d waits were counted in and after one computation, want 1:%s", after.Waits-before.Waits, history(begun, samples))
	}
}

// TestHeartbeat leaves programs alone in which something runs now and then: one
// wait, which no beat ends.
func TestHeartbeat(t *testing.T) {
	for _, s := range shapes {
		if !s.beats {
			continue
		}
		t.Run(s.name, func(t *testing.T) {
			g := s.start(t, newRuntime(t), "heartbeat")
			// What it loads and compiles at first is work.
			if err := g.ask(longWork); err != nil {
				t.Fatal(err)
			}
			g.settle()
			earlier := g.number("beats")
			time.Sleep(100 * time.Millisecond)
			first := g.settle()
			samples := g.watchFor(3 * time.Second)
			for _, s := range samples {
				if !s.waiting() || s.Waits != first.Waits {
					t.Errorf("a beat ended the wait:%s", history(first.at, samples))
					break
				}
			}
			last := samples[len(samples)-1]
			beats := g.number("beats") - earlier
			t.Logf("%d beats since the last request, of which the runtime noticed %d in 3 s: %v", beats, last.Beats-first.Beats, last)
			if beats < 10 {
				t.Errorf("the program had %d beats in 3 s: it did not run", beats)
			}
		})
	}
}

// TestEarly sends requests in the first moments of a wait, while memory is evicted.
// That makes the idle time longer, as it should, so the waits may take longer than
// usual to be recognised; not the resumes.
func TestEarly(t *testing.T) {
	for _, s := range shapes {
		switch s.name {
		case "stdio server", "tcp server", "node", "go server", "polling thread":
		default:
			continue
		}
		t.Run(s.name, func(t *testing.T) {
			g := s.start(t, newRuntime(t), "early")
			var idle []time.Duration
			for range 4 {
				before := g.settle()
				begun := time.Now()
				var answered time.Time
				samples, err := g.during(func() error {
					err := g.ask(longWork)
					answered = time.Now()
					return err
				})
				if err != nil {
					t.Fatal(err)
				}
				noWait(t, begun, samples, answered)
				after := g.settle()
				if after.Waits == before.Waits {
					t.Errorf("a request in a wait did not end it: %v, then %v", before, after)
				}
				idle = append(idle, time.Duration(after.IdleNS))
			}
			t.Logf("idle times after requests that came early: %v", idle)
		})
	}
}

// TestLook compares a wait in which nobody looks with one in which somebody does all
// the time: asking is no activity.
func TestLook(t *testing.T) {
	g := start(t, newRuntime(t), "look", server(t, "stdio")...)
	if err := g.ask(longWork); err != nil {
		t.Fatal(err)
	}
	time.Sleep(2 * time.Second)
	first := g.look()
	if !first.waiting() {
		t.Fatalf("not recognised as waiting within 2 s: %v", first)
	}
	var last sample
	for range 30 {
		last = g.look()
	}
	time.Sleep(time.Second)
	last = g.look()
	grown, passed := time.Duration(last.SinceNS-first.SinceNS), last.at.Sub(first.at)
	t.Logf("31 looks in %v: %v, then %v", passed.Round(time.Millisecond), first, last)
	if !last.waiting() || last.Waits != first.Waits || last.Beats != first.Beats {
		t.Errorf("looking changed the phase: %v, then %v", first, last)
	}
	if d := (grown - passed).Abs(); d > 500*time.Millisecond {
		t.Errorf("the wait grew by %v in %v", grown, passed)
	}
}

// hintIdle is so long that no wait is recognised without a hint.
const hintIdle = "30s"

// within looks until the state is as wanted, which has to be soon.
func within(t *testing.T, g *guest, what string, want func(sample) bool) sample {
	t.Helper()
	begun := time.Now()
	samples := g.watch(func(s sample) bool { return want(s) || s.at.Sub(begun) > 2*time.Second })
	last := samples[len(samples)-1]
	if !want(last) {
		t.Fatalf("%s had no effect within 2 s:%s", what, history(begun, samples))
	}
	t.Logf("%s: %v after %v", what, last, last.at.Sub(begun).Round(time.Millisecond))
	return last
}

func waiting(s sample) bool { return s.waiting() }
func working(s sample) bool { return s.State == "working" }

// TestHint tells the runtime what it would take long to see.
func TestHint(t *testing.T) {
	rt := newRuntime(t, "--agentzip-idle="+hintIdle)
	g := start(t, rt, "hint", server(t, "stdio")...)

	t.Run("command", func(t *testing.T) {
		g := g.in(t)
		if err := g.ask(shortWork); err != nil {
			t.Fatal(err)
		}
		for _, s := range g.watchFor(500 * time.Millisecond) {
			if s.waiting() {
				t.Fatalf("waits without a hint: %v", s)
			}
		}
		g.hint("wait")
		first := within(t, g, "agentzip hint --phase=wait", waiting)
		time.Sleep(500 * time.Millisecond)
		if s := g.look(); !s.waiting() || s.Waits != first.Waits {
			t.Errorf("the wait that was hinted at did not last: %v, then %v", first, s)
		}
		g.hint("resume")
		within(t, g, "agentzip hint --phase=resume", working)
	})
	t.Run("input ends it", func(t *testing.T) {
		g := g.in(t)
		if err := g.ask(shortWork); err != nil {
			t.Fatal(err)
		}
		g.hint("wait")
		within(t, g, "agentzip hint --phase=wait", waiting)
		if err := g.ask(longWork); err != nil {
			t.Fatal(err)
		}
		within(t, g, "a request", working)
	})
	t.Run("file", func(t *testing.T) {
		g := g.in(t)
		// The guest answers, then writes, then waits for the next line.
		if err := g.line("hint wait", "OK"); err != nil {
			t.Fatal(err)
		}
		within(t, g, "wait, written to /proc/agentzip", waiting)
		if err := g.line("hint resume", "OK"); err != nil {
			t.Fatal(err)
		}
		within(t, g, "resume, written to /proc/agentzip", working)
	})
	t.Run("file by exec", func(t *testing.T) {
		g := g.in(t)
		if _, err := g.exec("/bin/sh", "-c", "echo wait >/proc/agentzip"); err != nil {
			t.Fatal(err)
		}
		within(t, g, "wait, written to /proc/agentzip by a process that ended", waiting)
	})
	t.Run("reading", func(t *testing.T) {
		g := g.in(t)
		if out, err := g.exec("/bin/cat", "/proc/agentzip"); err != nil || out == "" {
			t.Errorf("reading /proc/agentzip: %q, %v", out, err)
		}
	})
	t.Run("bad", func(t *testing.T) {
		g := g.in(t)
		if out, err := g.exec("/bin/sh", "-c", "echo nonsense >/proc/agentzip"); err == nil {
			t.Errorf("nonsense could be written to /proc/agentzip: %q", out)
		}
	})
}
