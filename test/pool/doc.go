// Package pool holds the end-to-end tests of the page pool: sandboxes of one
// domain that keep equal pages once.
//
// They run real sandboxes and pools through one runsc:
//
//	go test ./test/pool -runtime=bin/runsc-agentzip
//
// Root, gcc and libc6-dev are needed. The guest programs compare their memory with
// what they have written, and say FAIL if it is anything else.
//
// TestChaos kills the pool -kills times (10) while siblings work; -short has two of
// them instead of eight.
package pool
