// Command runsc-agentzip is runsc, the OCI runtime of gVisor, with a memory
// file backend that evicts guest memory into compressed storage while the
// sandbox waits.
//
// It takes every flag and command of runsc. Its own are the flags that begin
// with --agentzip and the command "agentzip".
package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"gvisor.dev/gvisor/runsc/cli/maincli"
	"gvisor.dev/gvisor/runsc/cmd/util"
	"gvisor.dev/gvisor/runsc/version"

	"runsc-agentzip/runsc-agentzip/cmd"
	"runsc-agentzip/runsc-agentzip/gofer"
	"runsc-agentzip/runsc-agentzip/sentry"
)

func main() {
	_ = version.Version() // set by the linker, so it has to be referenced
	if err := checkHome(); err != nil {
		fmt.Fprintf(os.Stderr, "runsc-agentzip: %v\n", err)
		os.Exit(128)
	}
	warnNotRoot()
	// Sandbox processes and gofers are this binary again ("boot", "gofer"), so what
	// is registered here reaches the Sentry.
	sentry.Register()
	gofer.Start()
	maincli.ExtraCommands = map[util.SubCommand]string{
		new(cmd.Agentzip):  "agentzip",
		new(cmd.Install):   "helpers",
		new(cmd.Uninstall): "helpers",
	}
	maincli.Main()
}

// warnNotRoot says in advance why most commands fail for other users: runsc's
// own messages are about the first thing that they lack.
func warnNotRoot() {
	if os.Geteuid() == 0 {
		return
	}
	for _, arg := range os.Args[1:] {
		switch arg {
		case "run", "create", "restore", "checkpoint", "agentzip":
			fmt.Fprintf(os.Stderr, "runsc-agentzip: user %d is not root, which %q needs unless the sandbox is rootless\n", os.Geteuid(), arg)
		}
		if !strings.HasPrefix(arg, "-") {
			return
		}
	}
}

// checkHome refuses to run from below /tmp: the sandbox process makes its
// chroot there, and could then not start the binary again.
func checkHome() error {
	exe, err := os.Executable()
	if err != nil {
		return nil
	}
	if real, err := filepath.EvalSymlinks(exe); err == nil {
		exe = real
	}
	if strings.HasPrefix(exe, "/tmp/") {
		return fmt.Errorf("the binary is %s, and cannot be below /tmp: the sandbox mounts its root over that folder; move it, for instance to /usr/local/bin", exe)
	}
	return nil
}
