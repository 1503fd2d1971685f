// Package cloud holds the end-to-end tests of what a scheduler of agents' sandboxes
// does: package client's loop (template, clones, steps, waits, fork, deletion) with
// real sandboxes, the same loop in a shell (runsc-agentzip/examples/scheduler.sh), and
// the commands by which orchestrators call a runsc, which have to give what stock
// runsc gives. Nothing may be left behind by any of it.
//
//	go test ./test/cloud -runtime=bin/runsc-agentzip -stock=bin/runsc-stock -v
//
// Root and the go command (for the guest's program) are needed. The guests' root file
// system is the host's own, which they cannot write to.
package cloud
