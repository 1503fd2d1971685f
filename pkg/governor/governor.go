// Package governor decides how hard memory is compressed, by how busy the host's
// processors are.
//
// Goals:
//
//   - Steps come first. Compression runs on a thread of low priority, but it still
//     takes caches, and the other half of a core from whoever has the first. So
//     while that thread gets less than Share of a processor although it has work,
//     pages are stored in the form that is cheapest to make and to restore, and
//     harder compression wants a processor for no more than Trickle of the time.
//   - A host that is not busy has processor time to spend on smaller forms. One that
//     is busy for good gets them in the end: what one wait does not suffice for the
//     next one goes on with. (Measured on two busy processors: 3252 pages in 1.7 s.)
//
// What the thread gets is all that a sandbox can see of the host: files such as
// /proc/pressure/cpu are out of its reach. It is measured while the thread works.
// Compression of other sandboxes counts, which is right: they share what is left.
package governor

import (
	"sync"
	"time"
)

const (
	// Share is the share of a processor below which the host is busy. A thread
	// that has a processor to itself gets more than 0.9, one that competes with
	// a thread of equal priority 0.5.
	Share = 0.6

	// Trickle is the share of the time in which harder compression of one sandbox
	// wants a processor on a busy host, where it gets less than Share of one: what
	// many sandboxes want at once grows with their number, but not without bound.
	Trickle = 0.2

	// maxRest bounds a rest, after a window that was longer than it should be.
	maxRest = 500 * time.Millisecond

	// window is the time over which the share is taken: a few time slices of the
	// scheduler.
	window = 40 * time.Millisecond

	// memory is for how long the last measurement counts when there is no work.
	memory = 10 * time.Second
)

// A Governor watches one thread. Its methods may be called concurrently. A nil
// Governor is one for which the host is never busy.
type Governor struct {
	// used is the processor time that the thread has had.
	used func() (time.Duration, error)
	now  func() time.Time

	mu sync.Mutex
	// working is set between Begin and End; began and usedBegan are the start of
	// the window.
	working   bool
	began     time.Time
	usedBegan time.Duration
	// busy is what the last window told, at the time measured.
	busy     bool
	measured time.Time
}

// New returns a Governor that reads the thread's processor time with used.
func New(used func() (time.Duration, error)) *Governor {
	return &Governor{used: used, now: time.Now}
}

// Begin tells that the thread has begun to work without pause.
func (g *Governor) Begin() {
	if g == nil {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.restart(g.now())
}

// restart begins a window.
func (g *Governor) restart(now time.Time) {
	used, err := g.used()
	g.working = err == nil
	g.began, g.usedBegan = now, used
}

// End tells that the thread works no longer.
func (g *Governor) End() {
	if g == nil {
		return
	}
	g.Busy()
	g.mu.Lock()
	defer g.mu.Unlock()
	g.working = false
}

// Busy tells whether steps should not be disturbed at present.
func (g *Governor) Busy() bool {
	if g == nil {
		return false
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	now := g.now()
	g.measure(now)
	return g.busy && now.Sub(g.measured) < memory
}

// measure ends the window if it is over, and begins the next. It returns how long the
// window was if it has told that the host is busy, and else 0.
//
// Preconditions: mu is locked.
func (g *Governor) measure(now time.Time) (busy time.Duration) {
	elapsed := now.Sub(g.began)
	if !g.working || elapsed < window {
		return 0
	}
	if used, err := g.used(); err == nil {
		g.busy = float64(used-g.usedBegan) < Share*float64(elapsed)
		g.measured = now
		if g.busy {
			busy = elapsed
		}
	}
	g.restart(now)
	return busy
}

// Rest tells, between two pieces of work, for how long the thread has to rest so that
// on a busy host it wants a processor for no more than Trickle of the time; nearly
// always it is 0. The next window begins after the rest, in which nobody may ask.
func (g *Governor) Rest() time.Duration {
	if g == nil {
		return 0
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	elapsed := g.measure(g.now())
	if elapsed == 0 {
		return 0
	}
	rest := min(time.Duration(float64(elapsed)/Trickle)-elapsed, maxRest)
	g.began = g.began.Add(rest)
	return rest
}
