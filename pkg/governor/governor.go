// Package governor decides how hard memory is compressed, by how busy the host's
// processors are.
//
// Goals:
//
//   - Steps come first. Compression runs on a thread of low priority, but it still
//     takes caches, and the other half of a core from whoever has the first. So
//     while that thread gets less than Share of a processor although it has work,
//     pages are stored in the form that is cheapest to make and to restore, and
//     harder compression takes no more than Trickle of a processor.
//   - A host that is not busy has processor time to spend on smaller forms. One that
//     is busy for good gets them in the end: what a step leaves takes tenths of a
//     second to compress, and the wait after it lasts for seconds.
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

	// Trickle is the share of a processor that harder compression of one sandbox may
	// take on a busy host.
	Trickle = 0.1

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

// measure ends the window if it is over, and begins the next. It returns how much
// processor time the thread had in one that has told that the host is busy, and how
// long the window was.
//
// Preconditions: mu is locked.
func (g *Governor) measure(now time.Time) (used, elapsed time.Duration) {
	if elapsed = now.Sub(g.began); !g.working || elapsed < window {
		return 0, 0
	}
	if all, err := g.used(); err == nil {
		used = all - g.usedBegan
		g.busy = float64(used) < Share*float64(elapsed)
		g.measured = now
	} else {
		used = 0
	}
	g.restart(now)
	if !g.busy {
		used = 0
	}
	return used, elapsed
}

// Rest tells, between two pieces of work, for how long the thread has to rest so that
// on a busy host it takes no more than Trickle of a processor; nearly always it is 0.
// The next window begins after the rest, in which nobody may ask.
func (g *Governor) Rest() time.Duration {
	if g == nil {
		return 0
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	used, elapsed := g.measure(g.now())
	rest := time.Duration(float64(used)/Trickle) - elapsed
	if rest <= 0 {
		return 0
	}
	g.began = g.began.Add(rest)
	return rest
}
