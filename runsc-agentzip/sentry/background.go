package sentry

import (
	"runtime"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/log"

	"runsc-agentzip/pkg/governor"
)

// backgroundNice is the nice value of the thread that evicts and compresses: its
// weight is a third of that of threads with the default. It is not the lowest
// there is, since an access may have to wait for the page being written out, or
// for a lock that the thread holds for a moment.
const backgroundNice = 5

// background runs functions one after the other on a thread that gives way to
// applications, those of other sandboxes too. Its zero value runs them in place.
type background struct {
	work chan func()
	// governor watches the thread; nil with the zero value.
	governor *governor.Governor
}

// startBackground starts the thread. It must be called before seccomp filters are
// installed, which do not allow setpriority. The Go runtime never makes another
// thread from a locked one, which would inherit its priority.
func startBackground() background {
	b := background{work: make(chan func())}
	tid := make(chan int)
	go func() {
		runtime.LockOSThread()
		if err := unix.Setpriority(unix.PRIO_PROCESS, unix.Gettid(), backgroundNice); err != nil {
			log.Warningf("agentzip: evictions run at the priority of the applications: %v", err)
		}
		tid <- unix.Gettid()
		for f := range b.work {
			f()
		}
	}()
	clock := threadClock(<-tid)
	b.governor = governor.New(func() (time.Duration, error) {
		var ts unix.Timespec
		err := unix.ClockGettime(clock, &ts)
		return time.Duration(ts.Nano()), err
	})
	return b
}

// threadClock is the clock of the processor time that a thread has used
// (MAKE_THREAD_CPUCLOCK in the kernel's include/linux/posix-timers.h).
func threadClock(tid int) int32 {
	const sched, perThread = 2, 4
	return ^int32(tid)<<3 | perThread | sched
}

// run runs f, which should not pause but for the governor's rests, and returns when it
// has returned.
func (b background) run(f func()) {
	if b.work == nil {
		f()
		return
	}
	done := make(chan struct{})
	b.work <- func() {
		defer close(done)
		b.governor.Begin()
		defer b.governor.End()
		f()
	}
	<-done
}
