// Package containerd holds the tests that run containers through containerd (by ctr),
// through podman, and in pods through containerd's CRI, with daemons of their own in a
// private place (package stage) and without network.
//
//	go test ./test/containerd -runtime=bin/runsc-agentzip -v
//
// Pods need what Debian 12 does not have: containerd 2, gVisor's containerd-shim-runsc-v1
// and crictl, all from PATH. Without them that test is skipped, with -require, too.
package containerd
