// Package phase holds the end-to-end tests of how a sandbox's waits are recognised.
//
// They run real programs in real sandboxes through one runsc:
//
//	go test ./test/phase -runtime=bin/runsc-agentzip
//
// Root, python3 in the host's root filesystem (the guests' too) and the go command
// are needed; with node there is one shape of program more. -require fails, rather
// than skips, where one of the former is missing.
//
// TestShapes runs the shapes of programs that agents' sandboxes have: tool servers
// on standard input and on sockets, a `runsc exec` per step, event loops, programs
// with threads that poll, a shell that waits for a client. Each is asked to work for
// a moment (5 ms) and for longer (300 ms), -rounds times each (3; 1 with -short),
// and left alone for -wait (1.5s) after each answer. What is counted:
//
//   - a wait is missed if none is recognised in that time;
//   - a resume is missed if no new wait was counted after a request, or if the
//     sandbox was not seen working while it worked for 300 ms;
//     (A request of 5 ms that came amid a beat of the program passes for one: that
//     is counted, and no mistake);
//   - a resume is false if a wait ended before the next request.
//
// None may be. A round with one is repeated once, since the machine may be loaded,
// and counted as repeated. Times are reported and not judged. TestMain prints a
// table of it all.
//
// The other tests are of long computations, which are no waits, whatever else is idle
// and whatever started them; of timers that beat in a wait and do not end it; of
// hints; and of asking for the phase, which is no activity.
//
// TestIdleCost, with -long, measures the processor time of sandboxes that wait: 16,
// or as many as -long=N says.
package phase
