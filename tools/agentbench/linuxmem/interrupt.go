package linuxmem

import (
	"context"
	"errors"
	"os"
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// interruptible makes a system call that may take many seconds and gives up with
// EINTR when its thread gets a signal. It is broken off when ctx ends; the error
// is then ctx's.
func interruptible(ctx context.Context, call func() (int, error)) (int, error) {
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	type result struct {
		n   int
		err error
	}
	thread := make(chan int, 1)
	done := make(chan result, 1)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		thread <- unix.Gettid()
		for {
			n, err := call()
			if !errors.Is(err, unix.EINTR) {
				done <- result{n, err}
				return
			}
			// The Go runtime uses signals too.
			if ctx.Err() != nil {
				done <- result{0, ctx.Err()}
				return
			}
		}
	}()
	tid := <-thread
	select {
	case r := <-done:
		return r.n, r.err
	case <-ctx.Done():
	}
	// Again until it is heard: a signal that comes before the call has begun is
	// lost. Go programs ignore this one unless they ask for it.
	for {
		unix.Tgkill(os.Getpid(), tid, unix.SIGURG)
		select {
		case r := <-done:
			return r.n, r.err
		case <-time.After(5 * time.Millisecond):
		}
	}
}
