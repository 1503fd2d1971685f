// Package gc holds Go's garbage collector off in a process that makes no garbage
// for a while. Once a process has collected, Go has it do so every two minutes, which
// takes processor time, and brings its whole heap into memory if that was swapped out.
package gc

import (
	"runtime/debug"
	"runtime/metrics"
)

// Slack is by how many bytes the memory of the Go runtime may grow, while its collector
// is held off, until it collects all the same.
const Slack = 16 << 20

// An Off has the collector of this process held off between Hold and Release. Its zero
// value does not. There should be one in a process; it is not safe for concurrent use.
type Off struct {
	held    bool
	percent int
	limit   int64
}

// Held tells whether Hold was called since the last Release.
func (o *Off) Held() bool { return o.held }

// Hold holds the collector off, if it is not. It may have to wait for a collection to
// end.
func (o *Off) Hold() {
	if o.held {
		return
	}
	s := []metrics.Sample{{Name: "/memory/classes/total:bytes"}, {Name: "/memory/classes/heap/released:bytes"}}
	metrics.Read(s)
	o.held = true
	o.limit = debug.SetMemoryLimit(int64(s[0].Value.Uint64()-s[1].Value.Uint64()) + Slack)
	o.percent = debug.SetGCPercent(-1)
}

// Release lets it go on as before.
func (o *Off) Release() {
	if !o.held {
		return
	}
	o.held = false
	debug.SetGCPercent(o.percent)
	debug.SetMemoryLimit(o.limit)
}
