package sentry

import (
	"runtime"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/log"
)

// backgroundNice is the nice value of the thread that evicts and compresses: its
// weight is a tenth of that of threads with the default. It is not the lowest
// there is, since an access may have to wait for the page being written out.
const backgroundNice = 10

// background runs functions one after the other on a thread that gives way to
// applications, those of other sandboxes too. Its zero value runs them in place.
type background struct {
	work chan func()
}

// startBackground starts the thread. It must be called before seccomp filters are
// installed, which do not allow setpriority. The Go runtime never makes another
// thread from a locked one, which would inherit its priority.
func startBackground() background {
	b := background{work: make(chan func())}
	go func() {
		runtime.LockOSThread()
		if err := unix.Setpriority(unix.PRIO_PROCESS, unix.Gettid(), backgroundNice); err != nil {
			log.Warningf("agentzip: evictions run at the priority of the applications: %v", err)
		}
		for f := range b.work {
			f()
		}
	}()
	return b
}

// run runs f and returns when it has returned.
func (b background) run(f func()) {
	if b.work == nil {
		f()
		return
	}
	done := make(chan struct{})
	b.work <- func() {
		defer close(done)
		f()
	}
	<-done
}
