// Package phase decides when a sandbox is waiting, so that heavy work on its
// memory is not felt.
//
// The signal is the number of tasks that are running. A sandbox is
//
//   - working while a task runs, and until none has run for the idle time;
//   - waiting from then until a task runs again.
//
// The idle time adapts: evictions that were undone right away mean that the
// wait was too short to be worth it, and double the idle time, up to MaxBackoff
// times the configured one; a wait that was worth it halves it again. A
// Detector is pure: it is told what happens and when, so that it can be tested
// without a sandbox and without sleeping.
package phase

import "time"

// MaxBackoff is the largest factor by which the idle time grows.
const MaxBackoff = 16

// A Detector adapts the idle time. It is not safe for concurrent use.
type Detector struct {
	base   time.Duration
	factor int
}

// NewDetector returns a Detector with the given shortest idle time.
func NewDetector(idle time.Duration) *Detector {
	return &Detector{base: idle, factor: 1}
}

// Idle is how long no task must run for the sandbox to count as waiting.
func (d *Detector) Idle() time.Duration {
	return d.base * time.Duration(d.factor)
}

// A Wait is what became of one wait.
type Wait struct {
	// Length is how long it lasted, from the moment it was recognised.
	Length time.Duration
	// Work is how long the eviction took.
	Work time.Duration
	// Evicted is how many pages were evicted during it, and Undone how many of
	// the marked pages were touched before the eviction was over.
	Evicted, Undone uint64
}

// Ended tells the Detector of a wait that ended.
func (d *Detector) Ended(w Wait) {
	if w.Evicted+w.Undone == 0 {
		return
	}
	// Not worth it: most pages were wanted back at once, or the wait was
	// hardly longer than the work.
	if w.Undone > w.Evicted || w.Length <= 2*w.Work {
		d.factor = min(2*d.factor, MaxBackoff)
		return
	}
	d.factor = max(d.factor/2, 1)
}
