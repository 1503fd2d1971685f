// Package observe holds the end-to-end tests of what shows all sandboxes of a host:
// `agentzip top` and `agentzip metrics`. Of three real sandboxes one is killed and one
// stopped, and the third is still seen, in bounded time.
//
//	go test ./test/observe -runtime=bin/runsc-agentzip -v
//
// Root is needed. The guests are the host's own shell.
package observe
