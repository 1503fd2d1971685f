package phase

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

const idle = 200 * time.Millisecond

// A world is a sandbox whose tasks do what a test says, and a Detector that looks at
// it as the driver does.
type world struct {
	t   require.TestingT
	d   *Detector
	s   Sample
	why string
	// waiting is what the Detector believes.
	waiting bool
	resumes []string
	// faulting tasks restore memory all the time.
	faulting bool
}

func newWorld(t require.TestingT) *world {
	return &world{t: t, d: NewDetector(idle), s: Sample{Now: time.Unix(1000, 0)}}
}

// look is one look at a working sandbox, and step the time after it.
func (w *world) look() {
	if w.waiting, w.why = w.d.Working(w.s); w.waiting {
		return
	}
	w.s.Now = w.s.Now.Add(Look)
}

// run has a task run for a time, begun by the cause that the caller has counted.
func (w *world) run(length time.Duration) {
	end := w.s.Now.Add(length)
	w.s.Running = true
	for w.s.Now.Before(end) {
		if !w.waiting {
			w.look()
			continue
		}
		resumed, again := w.d.Activity(w.s)
		if w.faulting {
			w.s.Faults++
		}
		if resumed != "" {
			w.waiting = false
			w.resumes = append(w.resumes, resumed)
			continue
		}
		w.s.Now = w.s.Now.Add(min(again, end.Sub(w.s.Now)))
	}
	w.s.Running = false
	if w.waiting {
		if resumed, again := w.d.Activity(w.s); resumed != "" {
			w.waiting = false
			w.resumes = append(w.resumes, resumed)
		} else {
			require.Zero(w.t, again, "nothing runs any more")
		}
	}
}

// idle has nothing run for a time.
func (w *world) idle(length time.Duration) {
	for end := w.s.Now.Add(length); w.s.Now.Before(end); {
		if w.waiting {
			w.s.Now = end
			return
		}
		w.look()
	}
}

func (w *world) timer(length time.Duration) { w.s.Timers++; w.run(length) }
func (w *world) input(length time.Duration) { w.s.Events++; w.run(length) }

func TestPhases(t *testing.T) {
	for _, c := range []struct {
		name    string
		do      func(w *world)
		waiting bool
		why     string
		resumes []string
		beats   uint64
	}{
		{"a step and a wait", func(w *world) { w.run(time.Second); w.idle(300 * time.Millisecond) }, true, "nothing runs", nil, 0},
		{"not yet", func(w *world) { w.run(time.Second); w.idle(150 * time.Millisecond) }, false, "", nil, 0},
		{"a request", func(w *world) { w.idle(time.Second); w.input(time.Millisecond) }, false, "", []string{"input"}, 0},
		{"a process", func(w *world) { w.idle(time.Second); w.run(time.Millisecond) }, false, "", []string{"a task was started"}, 0},
		{"requests", func(w *world) {
			for range 5 {
				w.idle(3 * time.Second)
				w.input(300 * time.Millisecond)
			}
		}, false, "", []string{"input", "input", "input", "input", "input"}, 0},
		{"a heartbeat in a wait", func(w *world) {
			w.idle(time.Second)
			for range 50 {
				w.timer(2 * time.Millisecond)
				w.idle(100 * time.Millisecond)
			}
		}, true, "nothing runs", nil, 50},
		{"a request after heartbeats", func(w *world) {
			w.idle(time.Second)
			for range 5 {
				w.timer(2 * time.Millisecond)
				w.idle(100 * time.Millisecond)
			}
			w.input(time.Millisecond)
		}, false, "", []string{"input"}, 5},
		{"a heartbeat from the beginning", func(w *world) {
			for range 20 {
				w.s.Timers++
				w.idle(50 * time.Millisecond)
			}
		}, true, "only timers fire", nil, 0},
		{"a timer that begins to compute", func(w *world) { w.idle(time.Second); w.timer(time.Second) }, false, "", []string{"a task computes"}, 0},
		{"a beat that wants memory", func(w *world) { w.idle(time.Second); w.faulting = true; w.timer(Restores - 2*BeatLook) }, true, "nothing runs", nil, 1},
		{"a timer that wants memory", func(w *world) { w.idle(time.Second); w.faulting = true; w.timer(time.Second) }, false, "", []string{"memory is wanted"}, 0},
		{"half of the time", func(w *world) {
			for range 100 {
				w.timer(2 * Look)
				w.idle(2 * Look)
			}
		}, false, "", nil, 0},
		{"a client that receives", func(w *world) {
			for range 100 {
				w.s.Events++
				w.idle(50 * time.Millisecond)
			}
		}, false, "", nil, 0},
		{"a hint to wait", func(w *world) { w.run(time.Second); w.d.Hint(HintWait); w.idle(Look) }, true, "hint", nil, 0},
		{"a hint while it works", func(w *world) { w.d.Hint(HintWait); w.run(time.Second) }, false, "", nil, 0},
		{"a hint to resume", func(w *world) { w.idle(time.Second); w.d.Hint(HintResume); w.timer(time.Millisecond) }, false, "", []string{"hint"}, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t)
			c.do(w)
			require.Equal(t, c.waiting, w.waiting)
			if w.waiting {
				require.Equal(t, c.why, w.why)
			}
			require.Equal(t, c.resumes, w.resumes)
			if c.beats != 0 {
				require.InDelta(t, c.beats, w.d.Beats(), 2)
			} else {
				require.Zero(t, w.d.Beats())
			}
		})
	}
}

// TestLearnt: the idle time keeps clear of gaps that are too short to be worth it.
func TestLearnt(t *testing.T) {
	steps := func(w *world, gaps ...time.Duration) {
		for range 20 {
			for _, g := range gaps {
				w.input(500 * time.Millisecond)
				w.idle(g)
			}
		}
		w.input(time.Second)
	}
	for _, c := range []struct {
		name string
		gaps []time.Duration
		want time.Duration
	}{
		{"long waits", []time.Duration{5 * time.Second}, idle},
		{"gaps of half a second", []time.Duration{500 * time.Millisecond}, 4 * idle},
		{"gaps and waits", []time.Duration{500 * time.Millisecond, 300 * time.Millisecond, 10 * time.Second}, 4 * idle},
		{"a few gaps among waits", []time.Duration{700 * time.Millisecond, 10 * time.Second, 10 * time.Second, 10 * time.Second}, idle},
		{"hardly any gaps", []time.Duration{20 * time.Millisecond}, idle},
	} {
		w := newWorld(t)
		steps(w, c.gaps...)
		require.Equal(t, c.want, w.d.Idle(), c.name)
	}
}

// TestLearntFromWork: what takes long to evict has to wait longer to be worth it.
func TestLearntFromWork(t *testing.T) {
	w := newWorld(t)
	for range 20 {
		w.input(500 * time.Millisecond)
		w.idle(3 * time.Second)
		w.d.Evicted(2 * time.Second)
	}
	w.input(time.Second)
	require.Equal(t, MaxIdle*idle, w.d.Idle())
}

// TestAnyHistory checks, whatever happens: a sandbox with nothing but short beats in
// it waits after the idle time and keeps waiting, and one that computes does not.
func TestAnyHistory(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(t)
		for range rapid.IntRange(0, 60).Draw(t, "events") {
			length := time.Duration(rapid.Int64Range(0, int64(2*time.Second)).Draw(t, "length"))
			switch rapid.SampledFrom([]string{"run", "timer", "input", "idle", "faults", "hint"}).Draw(t, "what") {
			case "run":
				w.run(length)
			case "timer":
				w.timer(length)
			case "input":
				w.input(length)
			case "idle":
				w.idle(length)
			case "faults":
				w.s.Faults += uint64(length) % 100
			case "hint":
				w.d.Hint(Hint(length % 3))
			}
			if i := w.d.Idle(); i < idle || i > MaxIdle*idle {
				t.Fatalf("the idle time is %v", i)
			}
		}
		w.d.Hint(NoHint)
		w.input(time.Second)
		require.False(t, w.waiting, "it computes")
		for range 100 {
			w.s.Timers++
			w.idle(100 * time.Millisecond)
		}
		require.True(t, w.waiting)
		resumes := len(w.resumes)
		for range 20 {
			w.timer(Computes / 2)
			w.idle(100 * time.Millisecond)
		}
		require.True(t, w.waiting)
		require.Len(t, w.resumes, resumes)
	})
}
