package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"time"

	"runsc-agentzip/tools/agentbench/workload"
)

// toolServerConfig is what the flags say that all commands have that measure sandboxes
// with the demo's tool server.
type toolServerConfig struct {
	runtime, stock string
	runtimeFlags   []string
	seed           uint64
	work           string
	rootfs         rootfsOptions
	stepTimeout    time.Duration
	verbose        bool
}

// toolServerFlags returns the flags of such a command.
func toolServerFlags(command, usage string, c *toolServerConfig, stderr io.Writer) (*flag.FlagSet, error) {
	w, err := workload.Get(demoRootfs)
	if err != nil {
		return nil, err
	}
	c.rootfs.packages = w.Packages
	fs := flag.NewFlagSet(command, flag.ContinueOnError)
	fs.SetOutput(stderr)
	fs.Usage = func() {
		fmt.Fprint(stderr, usage)
		fs.PrintDefaults()
	}
	fs.StringVar(&c.runtime, "runtime", "bin/runsc-agentzip", "runsc `binary` to judge; it also makes the checkpoint, if it takes part")
	fs.StringVar(&c.stock, "stock", "bin/runsc-stock", "stock runsc `binary` to compare with")
	fs.Func("runtime-flags", "extra global `flags` for --runtime, separated by spaces", func(s string) error {
		c.runtimeFlags = strings.Fields(s)
		return nil
	})
	fs.Uint64Var(&c.seed, "seed", 1, "seed of the workload")
	fs.StringVar(&c.work, "work", "out/agentbench", "`directory` for images and snapshots; emptied at the end")
	fs.StringVar(&c.rootfs.dir, "rootfs", filepath.Join("out", rootfsName(w)), "`directory` of the guest's root file system; made if missing, and kept")
	fs.StringVar(&c.rootfs.mirror, "mirror", "", "Debian archive `URL` (default: what this machine's apt uses)")
	fs.StringVar(&c.rootfs.suite, "suite", "", "Debian `release` for the root file system (default: this machine's)")
	fs.BoolVar(&c.rootfs.install, "install", true, "install debootstrap with apt-get if it is missing")
	fs.DurationVar(&c.stepTimeout, "step-timeout", 2*time.Minute, "a step that takes longer fails the run")
	fs.BoolVar(&c.verbose, "v", false, "show runsc commands and what sandboxes write to stderr")
	return fs, nil
}

// parseFlags parses a command's arguments. The flag set has said what is wrong with
// them.
func parseFlags(fs *flag.FlagSet, args []string) error {
	err := fs.Parse(args)
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		return errUsage
	}
	return err
}
