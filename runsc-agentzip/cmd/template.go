package cmd

import (
	"errors"
	goflag "flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/google/subcommands"
	"golang.org/x/sys/unix"
	sentrycontrol "gvisor.dev/gvisor/pkg/sentry/control"
	"gvisor.dev/gvisor/pkg/sentry/kernel/auth"
	"gvisor.dev/gvisor/pkg/state/statefile"
	"gvisor.dev/gvisor/runsc/cmd/util"
	"gvisor.dev/gvisor/runsc/config"
	"gvisor.dev/gvisor/runsc/container"
	"gvisor.dev/gvisor/runsc/flag"
	"gvisor.dev/gvisor/runsc/sandbox"
	"gvisor.dev/gvisor/runsc/specutils"

	"runsc-agentzip/memfile/template"
	"runsc-agentzip/pkg/control"
)

// templateUsage is what "agentzip template" says of itself.
const templateUsage = `agentzip template create --image-path=DIR [flags] ID - checkpoint a container into a template
agentzip template verify [-json] DIR                - read a template in full and compare it with its index
agentzip template info [-json] DIR                  - describe a template, making its index if it has none

  --image-path=DIR       create: folder for the template; it is made if it does not exist
  --settle-cmd=COMMAND   create: run COMMAND in the container before, with /bin/sh -c
  --settle-timeout=TIME  create: how long COMMAND may run and the container may then keep
                         working (default 30s); 0 checkpoints without waiting for quiet
  --leave-running        create: let the container go on afterwards
  -json                  print JSON

Every image of "checkpoint --compression=none" is a template.
`

// templateFlags are the flags of the commands of "agentzip template".
type templateFlags struct {
	json          bool
	imagePath     string
	settleCmd     string
	settleTimeout time.Duration
	leaveRunning  bool
}

// template runs "agentzip template" with the arguments that follow it.
func (a *Agentzip) template(conf *config.Config, args []string) subcommands.ExitStatus {
	if len(args) == 0 {
		fmt.Fprint(os.Stderr, templateUsage)
		return subcommands.ExitUsageError
	}
	command := args[0]
	t := templateFlags{json: a.json}
	f := flag.NewFlagSet("agentzip template "+command, flag.ContinueOnError)
	f.Usage = func() { fmt.Fprint(os.Stderr, templateUsage) }
	f.BoolVar(&t.json, "json", t.json, "print JSON")
	var run func(arg string) (template.Info, error)
	what := "one folder"
	switch command {
	case "create":
		f.StringVar(&t.imagePath, "image-path", "", "folder for the template")
		f.StringVar(&t.settleCmd, "settle-cmd", "", "command to run in the container before")
		f.DurationVar(&t.settleTimeout, "settle-timeout", 30*time.Second, "how long to wait for the container to be quiet")
		f.BoolVar(&t.leaveRunning, "leave-running", false, "let the container go on afterwards")
		what = "one container ID"
		run = func(id string) (template.Info, error) { return t.create(conf, id) }
	case "verify":
		run = template.Verify
	case "info":
		run = func(dir string) (template.Info, error) {
			tpl, err := template.Open(dir, logf)
			if err != nil {
				return template.Info{}, err
			}
			defer tpl.Close()
			return tpl.Info(), nil
		}
	default:
		util.Fatalf("agentzip template: unknown command %q: there are create, verify and info", command)
	}
	if err := f.Parse(args[1:]); err != nil {
		if errors.Is(err, goflag.ErrHelp) {
			return subcommands.ExitSuccess
		}
		return subcommands.ExitUsageError
	}
	if f.NArg() != 1 {
		util.Fatalf("agentzip template %s: want %s, got %d arguments", command, what, f.NArg())
	}
	info, err := run(f.Arg(0))
	if err != nil {
		util.Fatalf("agentzip template %s: %v", command, err)
	}
	if t.json {
		err = printJSON(os.Stdout, info)
	} else {
		err = printInfo(os.Stdout, info)
	}
	if err != nil {
		util.Fatalf("agentzip template %s: %v", command, err)
	}
	return subcommands.ExitSuccess
}

func logf(format string, args ...any) {
	fmt.Fprintf(os.Stderr, format+"\n", args...)
}

func printInfo(w io.Writer, i template.Info) error {
	_, err := fmt.Fprintf(w, "digest   %s\npages    %d (%s)\nindex    %s, made %s\n",
		i.Digest, i.Pages, control.Size(i.Bytes), control.Size(i.IndexBytes), i.Created.Format(time.RFC3339))
	return err
}

// create is "agentzip template create".
func (t *templateFlags) create(conf *config.Config, id string) (template.Info, error) {
	if t.imagePath == "" {
		return template.Info{}, errors.New("--image-path=DIR is missing")
	}
	if t.settleTimeout < 0 {
		return template.Info{}, fmt.Errorf("--settle-timeout=%v is negative", t.settleTimeout)
	}
	c, err := load(conf, id)
	if err != nil {
		return template.Info{}, err
	}
	// Before anything is done to the container.
	undo, err := t.makeFolder()
	if err != nil {
		return template.Info{}, err
	}
	if err := t.settle(conf, c); err != nil {
		undo()
		return template.Info{}, err
	}
	if err := c.Checkpoint(conf, t.imagePath, sandbox.CheckpointOpts{
		Compression:               statefile.CompressionLevelNone,
		Resume:                    t.leaveRunning,
		ExcludeCommittedZeroPages: true,
	}); err != nil {
		undo()
		return template.Info{}, err // which names the container
	}
	// From here on there is an image, which is worth keeping whatever happens.
	if err := t.sync(); err != nil {
		return template.Info{}, err
	}
	tpl, err := template.Open(t.imagePath, logf)
	if err != nil {
		return template.Info{}, fmt.Errorf("the checkpoint was taken, but has no index: %w", err)
	}
	defer tpl.Close()
	return tpl.Info(), nil
}

// files are the paths of the template's files, the index last.
func (t *templateFlags) files() []string {
	var paths []string
	for _, name := range []string{template.StateFile, template.MetaFile, template.PagesFile, template.IndexFile} {
		paths = append(paths, filepath.Join(t.imagePath, name))
	}
	return paths
}

// makeFolder makes the folder for the template and checks that it holds none.
// The function it returns removes what a failed checkpoint leaves.
func (t *templateFlags) makeFolder() (undo func(), err error) {
	made := false
	if _, err := os.Stat(t.imagePath); errors.Is(err, fs.ErrNotExist) {
		made = true
	}
	if err := os.MkdirAll(t.imagePath, 0o755); err != nil {
		return nil, fmt.Errorf("making the folder of the template: %w", err)
	}
	for _, p := range t.files() {
		if _, err := os.Lstat(p); err == nil {
			return nil, fmt.Errorf("%s exists: a template is never overwritten, because clones may be running on it; use another folder, or delete the old template", p)
		} else if !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
	}
	return func() {
		for _, p := range t.files() {
			_ = os.Remove(p)
		}
		if made {
			_ = os.Remove(t.imagePath)
		}
	}, nil
}

// sync makes the image durable: the index that is about to be written vouches
// for it.
func (t *templateFlags) sync() error {
	for _, p := range t.files()[:3] {
		f, err := os.Open(p)
		if err != nil {
			return fmt.Errorf("the checkpoint is not complete: %w", err)
		}
		err = f.Sync()
		_ = f.Close()
		if err != nil {
			return fmt.Errorf("writing the checkpoint: %w", err)
		}
	}
	return nil
}

// settlePoll is how often create looks whether the container is quiet.
const settlePoll = 50 * time.Millisecond

// settle runs the settle command, if any, and waits until the container is
// quiet.
func (t *templateFlags) settle(conf *config.Config, c *container.Container) error {
	start := time.Now()
	deadline := start.Add(t.settleTimeout)
	if t.settleCmd != "" {
		if err := t.runSettle(conf, c); err != nil {
			return err
		}
	}
	if t.settleTimeout == 0 {
		return nil
	}
	// Two looks in a row: the first may come before the sandbox has noticed that
	// something woke up.
	for seen := 0; ; {
		var s control.Stats
		if err := call(c, "Stats", &s); err != nil {
			return fmt.Errorf("cannot tell when container %q is quiet: %w; use --settle-timeout=0 to checkpoint it at once", c.ID, err)
		}
		// A wait from before the settle command does not count.
		if s.Phase.State == "waiting" && (t.settleCmd == "" || time.Duration(s.Phase.SinceNS) < time.Since(start)) {
			if seen++; seen == 2 {
				return nil
			}
		} else {
			seen = 0
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("container %q is not quiet after %v (%s for %v): stop what runs in it, raise --settle-timeout, or use --settle-timeout=0 to checkpoint it as it is",
				c.ID, t.settleTimeout, s.Phase.State, time.Duration(s.Phase.SinceNS).Round(time.Millisecond))
		}
		time.Sleep(settlePoll)
	}
}

// runSettle runs the settle command in the container, like "runsc exec", and
// passes on what it prints.
func (t *templateFlags) runSettle(conf *config.Config, c *container.Container) error {
	if c.Spec == nil || c.Spec.Process == nil {
		return fmt.Errorf("container %q has no process that tells how to run --settle-cmd", c.ID)
	}
	p := c.Spec.Process
	caps, err := specutils.Capabilities(conf.EnableRaw, p.Capabilities)
	if err != nil {
		return fmt.Errorf("--settle-cmd: capabilities: %w", err)
	}
	groups := make([]auth.KGID, 0, len(p.User.AdditionalGids))
	for _, g := range p.User.AdditionalGids {
		groups = append(groups, auth.KGID(g))
	}
	// Pipes of our own, because Execute changes the owner of what it is given.
	in, inW, err := os.Pipe()
	if err != nil {
		return err
	}
	_ = inW.Close()
	outR, out, err := os.Pipe()
	if err != nil {
		_ = in.Close()
		return err
	}
	defer outR.Close()
	copied := make(chan struct{})
	go func() {
		defer close(copied)
		_, _ = io.Copy(os.Stderr, outR)
	}()
	pid, err := c.Execute(conf, &sentrycontrol.ExecArgs{
		Argv:             []string{"/bin/sh", "-c", t.settleCmd},
		Envv:             p.Env,
		WorkingDirectory: p.Cwd,
		KUID:             auth.KUID(p.User.UID),
		KGID:             auth.KGID(p.User.GID),
		ExtraKGIDs:       groups,
		Capabilities:     caps,
		NoNewPrivileges:  p.NoNewPrivileges,
		FilePayload:      sentrycontrol.NewFilePayload(map[int]*os.File{0: in, 1: out, 2: out}, nil),
	})
	_ = in.Close()
	_ = out.Close()
	if err != nil {
		return fmt.Errorf("--settle-cmd: %w", err)
	}
	type result struct {
		ws  unix.WaitStatus
		err error
	}
	done := make(chan result, 1)
	go func() {
		ws, err := c.WaitPID(pid)
		done <- result{ws, err}
	}()
	var timeout <-chan time.Time
	if t.settleTimeout != 0 {
		timeout = time.After(t.settleTimeout)
	}
	var r result
	select {
	case r = <-done:
	case <-timeout:
		if err := c.SignalProcessGroup(unix.SIGKILL, pid); err != nil {
			_ = c.SignalProcess(unix.SIGKILL, pid)
		}
		return fmt.Errorf("--settle-cmd has not ended after %v, and was killed: raise --settle-timeout", t.settleTimeout)
	}
	// Not for long: something that the command left running may hold the pipe.
	select {
	case <-copied:
	case <-time.After(time.Second):
	}
	switch {
	case r.err != nil:
		return fmt.Errorf("--settle-cmd: %w", r.err)
	case r.ws.Signaled():
		return fmt.Errorf("--settle-cmd %q was killed by signal %d", t.settleCmd, r.ws.Signal())
	case r.ws.ExitStatus() != 0:
		return fmt.Errorf("--settle-cmd %q failed with status %d", t.settleCmd, r.ws.ExitStatus())
	}
	return nil
}
