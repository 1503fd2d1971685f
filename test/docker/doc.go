// Package docker holds the tests that run containers through a real dockerd
// whose runtime is the binary under test. It has no code of its own.
package docker
