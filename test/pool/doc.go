// Package pool holds the end-to-end tests of the page pool: sandboxes of one
// domain that keep equal pages once.
//
// They run real sandboxes and pools through one runsc:
//
//	go test ./test/pool -runtime=bin/runsc-agentzip
//
// Root, gcc and libc6-dev are needed. The guest program compares its memory with
// what it has written, and says FAIL if it is anything else.
package pool
