// Package integrity holds the end-to-end tests that no byte of a guest's memory
// ever changes and that no application can see its memory being evicted.
//
// They run real sandboxes through one runsc binary:
//
//	go test ./test/integrity -runtime=bin/runsc-agentzip
//
// With a stock runsc as -runtime everything that concerns eviction is left
// out, and the tests prove that they themselves are right. -long adds what
// takes too long for every change. Root is needed, and for some tests Debian
// packages (stress-ng memtester redis-server sqlite3 git python3
// libpython3.11-testsuite gcc g++ make libc6-dev); a test whose package is
// missing is skipped, or fails with -require. test/rootfs/build.sh makes a root
// filesystem that has them all, for -rootfs.
//
// The self-checking programs in guest/ run in the sandboxes and on a plain
// Linux alike.
package integrity
