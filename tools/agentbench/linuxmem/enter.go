package linuxmem

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"
)

// enterFailed is Enter's exit code: the one that runsc uses for failures of its
// own, so that whoever started a runsc this way sees one.
const enterFailed = 128

// Enter is the command behind Group.Launcher, with the arguments
//
//	--cgroup DIR [--ksm] -- COMMAND [ARGUMENT...]
//
// It moves this process into the cgroup, lets KSM merge its memory, and becomes
// the command. It does not return.
func Enter(args []string) {
	fmt.Fprintf(os.Stderr, "enter: %v\n", enter(args))
	os.Exit(enterFailed)
}

func enter(args []string) error {
	fs := flag.NewFlagSet("enter", flag.ContinueOnError)
	fs.SetOutput(io.Discard)
	cgroup := fs.String("cgroup", "", "directory of the memory cgroup")
	ksm := fs.Bool("ksm", false, "let KSM merge the memory of the command")
	if err := fs.Parse(args); err != nil {
		return err
	}
	if *cgroup == "" || fs.NArg() == 0 {
		return errors.New("usage: enter --cgroup DIR [--ksm] -- COMMAND [ARGUMENT...]")
	}
	path, err := exec.LookPath(fs.Arg(0))
	if err != nil {
		return err
	}
	// 0 is the process that writes it.
	if err := writeKernel(filepath.Join(*cgroup, procsFile), "0"); err != nil {
		return err
	}
	if *ksm {
		// Kept across exec, and by children.
		if err := unix.Prctl(unix.PR_SET_MEMORY_MERGE, 1, 0, 0, 0); err != nil {
			return fmt.Errorf("prctl PR_SET_MEMORY_MERGE: %w", err)
		}
	}
	return fmt.Errorf("%s: %w", path, syscall.Exec(path, fs.Args(), os.Environ()))
}
