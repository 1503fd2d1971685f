package kernel

import (
	"sync/atomic"
	"time"
)

// idleWakes counts, by cause, the times that a blocked task went on while no other
// task ran. There is one Kernel per process.
var idleWakes struct {
	timers, events atomic.Uint64
	// slept is when the last running task blocked, or one went on while none
	// ran: nanoseconds since bootTime.
	slept atomic.Int64
}

var bootTime = time.Now()

// burstGap is how long no task must have run for a wake to be the first of a burst:
// a task that another has woken may go on only after that one has blocked.
const burstGap = 5 * time.Millisecond

// noteSleep is called when a task has blocked.
func (t *Task) noteSleep() {
	if t.k.runningTasks.Load() == 0 {
		idleWakes.slept.Store(int64(time.Since(bootTime)))
	}
}

// noteWake is called when a blocked task is about to go on, since its timer fired
// or for another reason. While all tasks are blocked, that reason can only have come
// from outside.
func (t *Task) noteWake(timer bool) {
	if t.k.runningTasks.Load() != 0 {
		return
	}
	now := int64(time.Since(bootTime))
	first := now-idleWakes.slept.Swap(now) >= int64(burstGap)
	switch {
	case timer:
		idleWakes.timers.Add(1)
	case first:
		idleWakes.events.Add(1)
	}
}

// IdleWakes returns how often a timer, and how often something from outside, has
// made a task go on while none ran.
func (k *Kernel) IdleWakes() (timers, events uint64) {
	return idleWakes.timers.Load(), idleWakes.events.Load()
}

// TryOutsideSave runs f while nobody saves the kernel, and no save begins, and
// returns true; or false if somebody does, or does something else that takes
// Kernel.extMu. Those wait for f, which should take milliseconds.
func (k *Kernel) TryOutsideSave(f func()) bool {
	if !k.extMu.TryLock() {
		return false
	}
	defer k.extMu.Unlock()
	f()
	return true
}
