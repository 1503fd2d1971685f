// Package readme holds the test that runs the commands of README.md as they stand
// there: as root, with real sandboxes and a dockerd of its own, in a private place
// (package test/containerd/stage) where /usr/local/bin, /etc and /run may be written to.
//
//	go test ./test/readme -runtime=bin/runsc-agentzip -v
//
// A command that README.md has and the test does not know is a failure, as is one that
// the test knows and README.md no longer has. Those that are not run are listed with
// the reason and with what covers them.
package readme
