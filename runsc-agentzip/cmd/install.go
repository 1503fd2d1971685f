package cmd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/google/subcommands"
	"gvisor.dev/gvisor/pkg/sentry/platform"
	stock "gvisor.dev/gvisor/runsc/cmd"
	"gvisor.dev/gvisor/runsc/cmd/util"
	"gvisor.dev/gvisor/runsc/config"
	"gvisor.dev/gvisor/runsc/flag"

	"runsc-agentzip/pkg/daemonjson"
)

// defaultRuntime is the name that Docker knows the runtime by unless another is chosen.
const defaultRuntime = "agentzip"

// Install implements subcommands.Command for "install", in the place of runsc's own. It
// takes the same flags. What is different: the default name, and that a daemon.json with
// which containers could not start is not written.
type Install struct {
	stock.Install
	pool string
}

// Synopsis implements subcommands.Command.Synopsis.
func (*Install) Synopsis() string {
	return "adds this runtime to Docker's daemon.json, or changes its flags there"
}

// Usage implements subcommands.Command.Usage.
func (*Install) Usage() string {
	return `install [flags] [-- RUNTIME-FLAGS] - add this binary as a runtime to Docker's daemon.json

RUNTIME-FLAGS are global flags of runsc-agentzip ("runsc-agentzip flags" lists them), for
every container of this runtime; they are checked before anything is written. Several
names with other flags are several runtimes:

  runsc-agentzip install
  runsc-agentzip install --runtime=agentzip-eager -- --agentzip-idle=50ms

dockerd reads the file when it is reloaded: systemctl reload docker.

`
}

// SetFlags implements subcommands.Command.SetFlags.
func (i *Install) SetFlags(f *flag.FlagSet) {
	i.Install.SetFlags(f)
	setDefault(f, "runtime", defaultRuntime)
	// The word in backquotes is what help calls the value.
	for name, usage := range map[string]string{
		"config_file":  "Docker's configuration `file`",
		"runtime":      "`name` for docker run --runtime=NAME",
		"clobber":      "replace an entry of that name",
		"cgroupdriver": "Docker's cgroup `driver`, cgroupfs or systemd; empty leaves the setting alone",
		"experimental": "switch Docker's experimental commands on, docker checkpoint for one",
		// runsc downloads these for its releases; they have nothing to do with Docker.
		"download-sidecars": "`when` to download sidecar binaries: accepted for scripts that pass it, but ALWAYS is refused",
		"require-sidecars":  "`when` missing sidecar binaries are fatal: as the flag before",
		"sidecar-url":       "`URL` of sidecar binaries: refused",
	} {
		f.Lookup(name).Usage = usage
	}
	f.StringVar(&i.pool, "pool", "", "absolute `path` of the socket of the host's page pool: short for --agentzip-pool=PATH among the runtime's flags")
}

// setDefault gives one of runsc's flags another default.
func setDefault(f *flag.FlagSet, name, value string) {
	fl := f.Lookup(name)
	if err := fl.Value.Set(value); err != nil {
		panic(err)
	}
	fl.DefValue = value
}

// Execute implements subcommands.Command.Execute.
func (i *Install) Execute(_ context.Context, f *flag.FlagSet, _ ...any) subcommands.ExitStatus {
	if err := i.run(os.Stdout, f.Args()); err != nil {
		util.Fatalf("install: %v", err)
	}
	return subcommands.ExitSuccess
}

// run installs the runtime with the flags args.
func (i *Install) run(w io.Writer, args []string) error {
	if err := checkName(i.Runtime); err != nil {
		return err
	}
	if err := checkBefore(); err != nil {
		return err
	}
	if i.SidecarURL != "" || i.DownloadSidecars == config.SidecarReleaseAlways || i.RequireSidecars == config.SidecarReleaseAlways {
		return errors.New("--sidecar-url, --download-sidecars and --require-sidecars: only releases of gVisor's have sidecar binaries to download; leave the flag out")
	}
	if driver := i.CgroupDriver; driver != "" && driver != "cgroupfs" && driver != "systemd" {
		return fmt.Errorf("--cgroupdriver=%s: must be cgroupfs or systemd", driver)
	}
	args = slices.Clone(args)
	if i.pool != "" {
		args = append(args, "--agentzip-pool="+i.pool)
	}
	if err := checkRuntimeArgs(args); err != nil {
		return err
	}
	exe, err := os.Executable()
	if err != nil {
		return fmt.Errorf("finding the binary: %w", err)
	}
	if len(args) > 0 && !plain(exe) {
		return fmt.Errorf("dockerd starts a runtime with flags through a shell, and hands it %q as it is: move the binary to where the path has only letters, digits and %s", exe, plainOthers)
	}
	file, err := daemonjson.Read(i.ConfigFile)
	if err != nil {
		return err
	}
	old, found := file.Runtime(i.Runtime)
	want := daemonjson.Runtime{Path: exe, Args: args}
	keep := found && !i.Clobber
	if !keep {
		if err := file.SetRuntime(i.Runtime, want); err != nil {
			return err
		}
	}
	if i.Experimental {
		file.SetExperimental()
	}
	if i.CgroupDriver != "" {
		if err := file.SetCgroupDriver(i.CgroupDriver); err != nil {
			return err
		}
	}
	changed, err := file.Save()
	if err != nil {
		return err
	}
	line := func(r daemonjson.Runtime) string { return strings.Join(append([]string{r.Path}, r.Args...), " ") }
	switch {
	case keep:
		fmt.Fprintf(w, "%s: runtime %q is there and was not changed (--clobber=false): %s\n", file.Path(), i.Runtime, line(old))
	case found && old.Path == "":
		fmt.Fprintf(w, "%s: runtime %q was of another kind (see %s~)\n%s: runtime %q is now: %s\n", file.Path(), i.Runtime, file.Path(), file.Path(), i.Runtime, line(want))
	case found && line(old) != line(want):
		fmt.Fprintf(w, "%s: runtime %q was:    %s\n%s: runtime %q is now: %s\n", file.Path(), i.Runtime, line(old), file.Path(), i.Runtime, line(want))
	default:
		fmt.Fprintf(w, "%s: runtime %q is %s\n", file.Path(), i.Runtime, line(want))
	}
	if !changed {
		fmt.Fprintln(w, "nothing had to be changed")
		return nil
	}
	fmt.Fprintf(w, "dockerd knows it when it is reloaded: systemctl reload docker\n")
	return nil
}

// checkName refuses names that dockerd would refuse to start with.
func checkName(name string) error {
	switch {
	case name == "":
		return errors.New("--runtime is empty: it is the name for docker run --runtime=NAME")
	case name == "runc":
		return errors.New("--runtime=runc: dockerd keeps that name for its own")
	case strings.ContainsFunc(name, func(r rune) bool { return r <= ' ' || r == '/' || r > '~' }):
		return fmt.Errorf("--runtime=%q: must be of printable ASCII characters, without spaces and slashes", name)
	}
	return nil
}

// forInstall are the global flags that have to do with the command itself.
var forInstall = []string{"log", "log-format", "debug", "debug-log", "debug-log-format", "debug-command", "alsologtostderr", "root"}

// checkBefore refuses flags before the command's name that look as if they were for the
// containers: they would be ignored.
func checkBefore() (err error) {
	flag.CommandLine.Visit(func(f *flag.Flag) {
		// Flags of the test binary are not runsc's.
		if err == nil && !slices.Contains(forInstall, f.Name) && !strings.HasPrefix(f.Name, "test.") {
			err = fmt.Errorf("--%s before \"install\" is not for the containers: put it behind: install -- --%s=%s", f.Name, f.Name, f.Value)
		}
	})
	return err
}

// plainOthers are the characters besides letters and digits that mean nothing to a shell.
const plainOthers = "_ @ % + = : , . / -"

// plain tells whether a shell leaves s as it is. For a runtime with flags dockerd writes
// a script that calls it, without quotes.
func plain(s string) bool {
	return !strings.ContainsFunc(s, func(r rune) bool {
		return !('a' <= r && r <= 'z' || 'A' <= r && r <= 'Z' || '0' <= r && r <= '9' || r < 0x80 && r != ' ' && strings.ContainsRune(plainOthers, r))
	})
}

// checkRuntimeArgs returns an error unless every container could be started with the
// flags, as far as flags decide that.
func checkRuntimeArgs(args []string) error {
	f := flag.NewFlagSet("runsc-agentzip", flag.ContinueOnError)
	f.SetOutput(io.Discard)
	f.Usage = func() {}
	config.RegisterFlags(f)
	const hint = "(\"runsc-agentzip flags\" lists the flags; nothing was written)"
	for _, a := range args {
		if a == "--" {
			return fmt.Errorf("runtime flags: a second -- would keep dockerd's own flags from being read %s", hint)
		}
		if !plain(a) {
			return fmt.Errorf("runtime flags: %q: dockerd hands flags to a shell as they are, so they can have only letters, digits and %s %s", a, plainOthers, hint)
		}
	}
	if err := f.Parse(args); err != nil {
		return fmt.Errorf("runtime flags: %w %s", err, hint)
	}
	if f.NArg() != 0 {
		return fmt.Errorf("runtime flags: %q is none: each must be written as --NAME=VALUE %s", f.Arg(0), hint)
	}
	conf, err := config.NewFromFlags(f)
	if err != nil {
		return fmt.Errorf("runtime flags: %w %s", err, hint)
	}
	p, err := platform.Lookup(conf.Platform)
	if err != nil {
		return fmt.Errorf("runtime flags: --platform=%s: %w %s", conf.Platform, err, hint)
	}
	// The machine that is set up need not be the one that it will run on.
	device, err := p.OpenDevice(conf.PlatformDevicePath)
	if err != nil {
		fmt.Fprintf(os.Stderr, "runsc-agentzip: warning: --platform=%s does not work on this machine: %v\n", conf.Platform, err)
		return nil
	}
	if device != nil {
		device.Close()
	}
	return nil
}

// Uninstall implements subcommands.Command for "uninstall", in the place of runsc's own.
type Uninstall struct {
	stock.Uninstall
}

// Synopsis implements subcommands.Command.Synopsis.
func (*Uninstall) Synopsis() string {
	return "removes a runtime from Docker's daemon.json"
}

// Usage implements subcommands.Command.Usage.
func (*Uninstall) Usage() string {
	return "uninstall [--runtime=NAME] [--config_file=FILE] - remove a runtime from Docker's daemon.json\n\n"
}

// SetFlags implements subcommands.Command.SetFlags.
func (u *Uninstall) SetFlags(f *flag.FlagSet) {
	u.Uninstall.SetFlags(f)
	setDefault(f, "runtime", defaultRuntime)
}

// Execute implements subcommands.Command.Execute.
func (u *Uninstall) Execute(_ context.Context, f *flag.FlagSet, _ ...any) subcommands.ExitStatus {
	if err := u.run(os.Stdout, f.Args()); err != nil {
		util.Fatalf("uninstall: %v", err)
	}
	return subcommands.ExitSuccess
}

// run removes the runtime.
func (u *Uninstall) run(w io.Writer, args []string) error {
	if len(args) > 0 {
		return fmt.Errorf("%q: the runtime's name is given as --runtime=NAME", args[0])
	}
	file, err := daemonjson.Read(u.ConfigFile)
	if err != nil {
		return err
	}
	removed, err := file.RemoveRuntime(u.Runtime)
	if err != nil {
		return err
	}
	if !removed {
		return fmt.Errorf("%s has no runtime %q: --runtime=NAME names another, --config_file=FILE another file", file.Path(), u.Runtime)
	}
	if _, err := file.Save(); err != nil {
		return err
	}
	fmt.Fprintf(w, "%s: runtime %q was removed; containers that were created with it cannot be started any more\ndockerd forgets it when it is reloaded: systemctl reload docker\n", file.Path(), u.Runtime)
	return nil
}
