// Package soak holds the end-to-end tests of what only time shows: that a sandbox which
// works and waits again and again answers right and goes back to the same size.
//
// TestBurst has one sandbox run many short processes and then wait, ten times over.
// TestSoak has clones of one template do steps of every kind between waits of random
// length for as long as -soak says. The guest program says FAIL if anything that it
// reads is not what was written; what it answers is computed by the test as well. What
// a sandbox costs besides its guest memory is measured from the host, and must not have
// grown between an early wait and the last one:
//
//	go test ./test/soak -runtime=bin/runsc-agentzip -v
//	go test ./test/soak -runtime=bin/runsc-agentzip -v -run Soak -soak=30m -timeout=0
//	go test ./test/soak -runtime=bin/runsc-stock -v -run Burst
//
// The last one shows what an unpatched runsc does. Root, gcc and libc6-dev are needed.
package soak
