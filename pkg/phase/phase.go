// Package phase decides when a sandbox is waiting for the agent's model, so that
// heavy work on its memory is not felt.
//
// It is told, at moments of the caller's choice (Sample), whether a task runs, and
// how often a sandbox in which none ran was woken: by a timer of its own, or by
// something else. While every task is blocked, something else can only have come from
// outside: data on a descriptor, a connection, a process started by exec, a signal.
// That is all there is to know what a program is doing, whatever it is: an agent's
// tool server that waits for a request, an event loop with timers, a shell that
// waits for a client that waits for the model.
//
// # States
//
//   - Working: from a resume on, until for the idle time nothing came from outside
//     and no task was seen to run, but for a few moments: at most one look in
//     forgive. So a heartbeat or a thread that polls does not hide a wait, and a
//     program that computes, whatever else sleeps beside it, is not waiting.
//   - Waiting: until a resume. That is input from outside, a process that was
//     started, a task that computes for Computes, whatever woke it, or one that
//     takes memory back for Restores: the first heartbeat after an eviction takes
//     longer than it would, for want of its memory. What is shorter, and was begun
//     by a timer, is a beat and ends nothing. (So is input that comes amid a beat
//     and takes no longer to be worked off, which does not matter.)
//
// A hint makes a state begin at once. It is never needed.
//
// # The idle time
//
// Heavy work pays in a wait that lasts seconds, and is in the way in a gap between
// two calls of a tool. The idle time is the one, of the configured one and 2, 4, 8
// and 16 times that, that would have paid most over the last History gaps: one
// that lasts g seconds and is recognised after t gains g - t seconds less Cost, or
// less twice the time that evictions take of late.
//
// A Detector is pure: it is told what happens and when, so that it can be tested
// without a sandbox and without sleeping.
package phase

import "time"

const (
	// MaxIdle is the largest factor by which the idle time grows.
	MaxIdle = 16

	// Look is how often a working sandbox should be looked at.
	Look = 20 * time.Millisecond

	// forgive is how many quiet looks make up for one that saw a task run.
	forgive = 10

	// BeatLook is how often to look while something runs in a wait. Computes is
	// how long it has to run without restoring memory to be a resume, and Restores
	// how long in any case. Both are counted in looks: on a busy host, where all
	// takes longer, a beat stays a beat.
	BeatLook = 10 * time.Millisecond
	Computes = 50 * time.Millisecond
	Restores = 300 * time.Millisecond

	// HintLasts is how long a hint to wait counts while something runs still.
	HintLasts = 5 * time.Second

	// History is how many gaps are remembered. Those below minGap, which no idle
	// time would recognise, are not.
	History = 32
	minGap  = 100 * time.Millisecond

	// Cost is what an eviction and the restores that it causes cost, in seconds
	// of memory saved: gaps of less than a second are not worth it.
	Cost = 800 * time.Millisecond
)

// The reasons for a resume that need not have come from outside.
const (
	Computing   = "a task computes"
	WantsMemory = "memory is wanted"
)

// A Hint is what somebody who knows says of the phase.
type Hint int

const (
	NoHint Hint = iota
	HintWait
	HintResume
)

// ParseHint returns the hint that is called "wait" or "resume".
func ParseHint(s string) (Hint, bool) {
	switch s {
	case "wait":
		return HintWait, true
	case "resume":
		return HintResume, true
	}
	return NoHint, false
}

// A Sample is what there is to see at one moment.
type Sample struct {
	Now time.Time
	// Running tells whether a task runs, or sleeps in a way that is work.
	Running bool
	// Events and Timers count the times that something from outside and a timer,
	// respectively, woke the sandbox while no task ran.
	Events, Timers uint64
	// Faults counts accesses that had to restore memory.
	Faults uint64
}

// A Detector is the state of one sandbox. It is not safe for concurrent use.
type Detector struct {
	base time.Duration

	// gaps are the last gaps, in a ring, and n counts them. work is how long
	// evictions take, the later ones counting more.
	gaps [History]time.Duration
	n    int
	work time.Duration

	// last is the sample that was looked at last.
	last Sample
	// quiet is since when nothing happened that counts, and timersAtQuiet the
	// count of timers then. strikes is 1 if a look saw a task run that is not
	// forgiven yet, and clean the number of looks since that did not.
	quiet          time.Time
	timersAtQuiet  uint64
	strikes, clean int

	// hinted is what somebody said, since hintedAt as far as looks tell.
	hinted   Hint
	hintedAt time.Time

	// looks counts those, in a wait, since something was seen to begin to run, and
	// computing those of them before which no memory was restored.
	looks, computing int
	beats            uint64
}

// NewDetector returns a Detector with the given shortest idle time, in the working
// state.
func NewDetector(idle time.Duration) *Detector {
	return &Detector{base: idle}
}

// Idle is how long nothing has to happen for the sandbox to count as waiting: the
// time that would have paid most.
func (d *Detector) Idle() time.Duration {
	best, bestGain := d.base, time.Duration(0)
	for f := time.Duration(1); f <= MaxIdle; f *= 2 {
		t, gain := d.base*f, time.Duration(0)
		for _, g := range d.gaps[:min(d.n, History)] {
			if g > t {
				gain += g - t - max(Cost, 2*d.work)
			}
		}
		if f == 1 || gain > bestGain {
			best, bestGain = t, gain
		}
	}
	return best
}

// gap remembers a gap.
func (d *Detector) gap(g time.Duration) {
	if g >= minGap {
		d.gaps[d.n%History] = g
		d.n++
		if d.n >= 2*History {
			d.n -= History
		}
	}
}

// Hint says what the phase is about to be.
func (d *Detector) Hint(h Hint) { d.hinted, d.hintedAt = h, time.Time{} }

// Beats is how many beats there were.
func (d *Detector) Beats() uint64 { return d.beats }

// restart begins the quiet time anew.
func (d *Detector) restart(s Sample) {
	if !d.quiet.IsZero() {
		d.gap(s.Now.Sub(d.quiet))
	}
	d.quiet, d.strikes, d.clean, d.timersAtQuiet = s.Now, 0, 0, s.Timers
}

// Working is for a sandbox that was working at the last look, about every Look. It
// returns whether it is waiting now, and why.
func (d *Detector) Working(s Sample) (waiting bool, why string) {
	last := d.last
	d.last = s
	if d.hinted == HintWait {
		if d.hintedAt.IsZero() {
			d.hintedAt = s.Now
		} else if s.Now.Sub(d.hintedAt) > HintLasts {
			d.hinted = NoHint
		}
	}
	if d.quiet.IsZero() || s.Events != last.Events {
		d.restart(s)
	}
	if s.Running {
		if d.strikes > 0 {
			d.restart(s)
		}
		d.strikes, d.clean = 1, 0
		return false, ""
	}
	if d.clean++; d.clean >= forgive {
		d.strikes, d.clean = 0, 0
	}
	switch {
	case d.hinted == HintWait:
		why = "hint"
	case s.Now.Sub(d.quiet) < d.Idle():
		return false, ""
	case s.Timers != d.timersAtQuiet:
		why = "only timers fire"
	default:
		why = "nothing runs"
	}
	d.hinted = NoHint
	d.looks, d.computing = 0, 0
	return true, why
}

// Activity is for a sandbox that waits, when a task has begun to run and then as
// often as it asks for. It returns why the wait is over, or else after how long to
// call it again, or 0 if it was a beat, which is over.
func (d *Detector) Activity(s Sample) (resumed string, again time.Duration) {
	first := d.looks == 0
	last := d.last
	d.last = s
	if d.looks++; !first && s.Faults == last.Faults {
		d.computing++
	}
	switch {
	case d.hinted == HintResume:
		d.hinted = NoHint
		resumed = "hint"
	case s.Events != last.Events:
		resumed = "input"
	case first && s.Timers == last.Timers:
		// Neither: the task is new, or was stopped.
		resumed = "a task was started"
	case !s.Running:
		d.beats++
		d.looks, d.computing = 0, 0
		return "", 0
	case d.looks > int(Restores/BeatLook):
		resumed = WantsMemory
	case d.computing >= int(Computes/BeatLook):
		resumed = Computing
	default:
		return "", BeatLook
	}
	d.restart(s)
	return resumed, 0
}

// Resumed is Activity for a wait that something else has ended.
func (d *Detector) Resumed(s Sample) {
	d.last = s
	d.hinted = NoHint
	d.restart(s)
}

// Evicted tells the Detector how long the eviction of a wait took.
func (d *Detector) Evicted(took time.Duration) {
	d.work += (took - d.work) / 4
}
