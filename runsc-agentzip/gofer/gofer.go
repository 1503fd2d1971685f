// Package gofer keeps gofers small.
//
// A gofer is the process that opens files on the host for a sandbox. It makes garbage
// while it starts, and next to none later: its heap stays below the 4 MiB at which Go
// first collects, so that all of it stays, once for each sandbox. So a gofer collects
// its garbage once it is quiet. (Measured, anonymous memory of a gofer whose sandbox
// waits: 5.3 MiB before, 4.5 after. What remains is made by packages of runsc before
// main: 1.1 MiB of objects in 2.1 MiB of heap.)
package gofer

import (
	"os"
	"runtime/debug"
	"runtime/metrics"
	"strings"
	"time"
)

const (
	// soon and late are the shortest and the longest time between two looks: a
	// gofer that does nothing wakes up once in late.
	soon = 2 * time.Second
	late = 2 * time.Minute
	// worth is how many bytes must have been allocated for a collection to be
	// worth its 5 ms of processor time; quiet is how many may have been since the
	// last look.
	worth = 256 << 10
	quiet = 32 << 10
)

// Is tells whether args are the command line of a gofer. Those that runsc makes have
// no flag whose value is an argument of its own.
func Is(args []string) bool {
	for _, arg := range args[min(1, len(args)):] {
		if !strings.HasPrefix(arg, "-") {
			return arg == "gofer"
		}
	}
	return false
}

// Start has this process give back what it does not need whenever it is quiet, for as
// long as it runs, if it is a gofer.
func Start() {
	if !Is(os.Args) {
		return
	}
	go func() {
		var p pace
		for {
			time.Sleep(p.pause)
			if p.look(allocated()) {
				debug.FreeOSMemory()
			}
		}
	}()
}

// allocated is how many bytes this process has allocated on its heap so far.
func allocated() uint64 {
	s := []metrics.Sample{{Name: "/gc/heap/allocs:bytes"}}
	metrics.Read(s)
	return s[0].Value.Uint64()
}

// A pace decides when to look, and when to collect.
type pace struct {
	// last and collected are what had been allocated at the last look, and when
	// garbage was collected last.
	last, collected uint64
	// pause is the time until the next look.
	pause time.Duration
}

// look tells whether to collect now that so many bytes have been allocated in all.
func (p *pace) look(allocated uint64) (collect bool) {
	still := allocated-p.last <= quiet
	p.last = allocated
	switch {
	case !still:
		p.pause = soon
	case allocated-p.collected >= worth:
		p.collected = allocated
		p.pause = soon
		return true
	default:
		p.pause = min(max(2*p.pause, soon), late)
	}
	return false
}
