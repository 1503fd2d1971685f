// Package pressure holds the end-to-end tests of sandboxes under a memory limit:
// programs whose memory compresses live on where stock runsc is killed, and others
// end as they do there.
//
// They run real sandboxes in memory cgroups of their own, below the top of the
// hierarchy, and print what each of them took:
//
//	go test ./test/pressure -runtime=bin/runsc-agentzip -stock=bin/runsc-stock -v
//
// Root, gcc, libc6-dev and a memory controller are needed. The guest program compares
// its memory with what it has written, and says FAIL if it is anything else.
package pressure
