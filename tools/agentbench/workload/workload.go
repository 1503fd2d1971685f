// Package workload defines what agentbench's sandboxes do: which Debian
// packages their root file system holds, which program is the container's init,
// and which steps each clone takes with which waits between them.
//
// # Protocol
//
// The init process is a tool server. It builds its working set, writes one JSON
// line when it is ready, and then answers each line of its standard input, a
// request, with one line, a reply: {"ok": true, "result": ...} or {"ok": false,
// "error": "..."}. Every server knows these requests:
//
//	{"op": "ping"}    answers at once, touching little
//	{"op": "settle"}  gives garbage back: a checkpoint follows
//	{"op": "state"}   digests everything the sandbox holds
//	{"op": "exec", "args": {"argv": [...], "cwd": "...", "stdin": "..."}}
//	                  runs a command: {"code": N, "stdout": "...", "stderr": "..."}
//	{"op": "step", "name": KIND, "args": {...}}
//
// Results depend on the requests so far and on nothing else: not on time,
// addresses, process ids or the runtime below. That is what lets two systems be
// compared by their answers.
package workload

import (
	"encoding/json"
	"time"

	"runsc-agentzip/pkg/fleet"
)

// Workload is one kind of agent's sandbox.
type Workload struct {
	// Name is what the user calls it; Summary is one line about it.
	Name, Summary string
	// Rootfs names the package set of the guest's root file system; workloads
	// with the same set share one. Packages is its content.
	Rootfs   string
	Packages []string
	// EstimatedBytes is the guest memory of one stock clone at its largest, to
	// see before a run whether the clones fit.
	EstimatedBytes uint64

	// Cycle is how many steps of a plan use about all that its steps use: the
	// programs and files of the root file system.
	Cycle int

	// Spec describes the container.
	Spec func(rootfs string, seed uint64) fleet.Spec
	// Install puts the guest's programs into the root file system.
	Install func(rootfs string) error
	// Plan returns the steps of one clone; it depends on its arguments only.
	// Steps that every clone takes first, such as starting its servers, are in
	// it, in addition to the n asked for.
	Plan func(seed uint64, clone, n int) []Step
}

// Step is one request and the wait before it.
type Step struct {
	// Kind groups steps of the same nature.
	Kind string
	// Request is one line of JSON.
	Request json.RawMessage
	// Wait is how long the clone waits before this step, the model's thinking
	// time, before it is scaled.
	Wait time.Duration
}
