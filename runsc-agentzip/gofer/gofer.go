// Package gofer keeps gofers small.
//
// A gofer is the process that opens files on the host for a sandbox. It makes garbage
// while it starts, and next to none later: its heap stays below the 4 MiB at which Go
// first collects, so that all of it stays, once for each sandbox. So a gofer collects
// its garbage once it is quiet. (Measured, anonymous memory of a gofer whose sandbox
// waits: 5.3 MiB before, 4.5 after. What remains is made by packages of runsc before
// main: 1.1 MiB of objects in 2.1 MiB of heap.)
//
// Once a process has collected, Go has it do so every two minutes. A gofer that is quiet
// has no garbage, so there is none until it is not, or until its heap has grown by
// gc.Slack.
package gofer

import (
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"strings"
	"time"

	"runsc-agentzip/runsc-agentzip/gc"
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
		var off gc.Off
		for {
			time.Sleep(p.pause)
			switch total := allocated(); {
			case p.look(total):
				off.Release()
				collect()
				off.Hold()
			case !p.still:
				off.Release()
			}
		}
	}()
}

// collect gives back what is garbage. One processor is enough for the little there is,
// and each that takes part gets a thread, which stays.
func collect() {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	debug.FreeOSMemory()
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
	// still is set if next to nothing was allocated before the last look.
	still bool
}

// look tells whether to collect now that so many bytes have been allocated in all.
func (p *pace) look(allocated uint64) (collect bool) {
	p.still = allocated-p.last <= quiet
	p.last = allocated
	switch {
	case !p.still:
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
