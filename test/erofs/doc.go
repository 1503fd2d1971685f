// Package erofs holds the end-to-end tests of sandboxes whose root file system is an
// EROFS image: no gofer process, and the same for the guest as with the folder that
// the image was made of, under forced eviction, checkpointed and restored included.
// Images that are damaged, missing or not the checkpoint's are refused by name.
//
//	go test ./test/erofs -runtime=bin/runsc-agentzip -v
//
// Root and mkfs.erofs (Debian: erofs-utils) are needed. The guests' programs are
// copies of the host's own shell, coreutils and Python.
package erofs
