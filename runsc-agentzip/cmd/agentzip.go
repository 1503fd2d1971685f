// Package cmd holds the "agentzip" command of runsc-agentzip.
package cmd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/google/subcommands"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"gvisor.dev/gvisor/runsc/cmd/util"
	"gvisor.dev/gvisor/runsc/config"
	"gvisor.dev/gvisor/runsc/container"
	"gvisor.dev/gvisor/runsc/flag"

	"runsc-agentzip/memfile/prefetch"
	"runsc-agentzip/memfile/template"
	"runsc-agentzip/pkg/control"
	"runsc-agentzip/pkg/phase"
)

// Agentzip implements subcommands.Command for "agentzip".
type Agentzip struct {
	json bool
	// save is the folder given to prefetch, phase what is given to hint.
	save, phase string
}

// Name implements subcommands.Command.Name.
func (*Agentzip) Name() string { return "agentzip" }

// Synopsis implements subcommands.Command.Synopsis.
func (*Agentzip) Synopsis() string {
	return "show and control how a sandbox's memory is kept"
}

// Usage implements subcommands.Command.Usage.
func (*Agentzip) Usage() string {
	return `agentzip COMMAND [-json] ID - show and control how a sandbox's memory is kept.

  stats ID   memory by the form it is held in, faults, phase
  evict ID   evict everything eligible now, wait for it, and report
  check ID   verify every stored page and the store while the sandbox runs
  prefetch [-save DIR] ID
             bring back what the sandbox is expected to use next; with -save,
             write what its steps have taught to DIR, the folder of the
             template that it was restored from: sandboxes restored from there
             later know it from their first step on

  hint -phase=wait|resume ID
             say that the sandbox is about to wait for the model, or that the
             answer is on its way: what the runtime would find out a moment later.
             In the guest, writing "wait" or "resume" to /proc/agentzip does
             the same

  -json      print JSON, with the names of package control

` + topUsage + "\n" + metricsUsage + "\n" + templateUsage + "\n" + poolUsage + "\n" + completionUsage
}

// SetFlags implements subcommands.Command.SetFlags.
func (a *Agentzip) SetFlags(f *flag.FlagSet) {
	f.BoolVar(&a.json, "json", false, "print JSON")
}

// FetchSpec implements util.SubCommand.FetchSpec.
func (*Agentzip) FetchSpec(*config.Config, *flag.FlagSet) (string, *specs.Spec, error) {
	return "", nil, nil
}

// commands are the commands of "agentzip": the method to call, where the result
// goes, and how a person reads it.
var commands = map[string]func(a *Agentzip, c *container.Container, w io.Writer) error{
	"stats": (*Agentzip).stats,
	"evict": (*Agentzip).evict,
	"check": (*Agentzip).check,

	"prefetch": (*Agentzip).prefetch,
	"hint":     (*Agentzip).hint,
}

// Execute implements subcommands.Command.Execute.
func (a *Agentzip) Execute(_ context.Context, f *flag.FlagSet, args ...any) subcommands.ExitStatus {
	conf := args[0].(*config.Config)
	if f.NArg() < 1 {
		f.Usage()
		return subcommands.ExitUsageError
	}
	switch rest := f.Args()[1:]; f.Arg(0) {
	case "template":
		return a.template(conf, rest)
	case "pool":
		return a.pool(conf, rest)
	case "top":
		return a.top(conf, rest)
	case "metrics":
		return a.metrics(conf, rest)
	case "completion":
		return a.completion(rest)
	}
	run, ok := commands[f.Arg(0)]
	if !ok {
		util.Fatalf("agentzip: unknown command %q: there are stats, evict, check, prefetch, hint, top, metrics, template, pool and completion", f.Arg(0))
	}
	// Flags may follow the command too: "agentzip stats -json ID".
	rest := flag.NewFlagSet("agentzip "+f.Arg(0), flag.ContinueOnError)
	json := a.json
	a.SetFlags(rest)
	rest.BoolVar(&json, "j", json, "short for -json")
	if f.Arg(0) == "prefetch" {
		rest.StringVar(&a.save, "save", "", "folder of the template")
	}
	if f.Arg(0) == "hint" {
		rest.StringVar(&a.phase, "phase", "", "wait or resume")
	}
	if err := rest.Parse(f.Args()[1:]); err != nil {
		util.Fatalf("agentzip %s: %v", f.Arg(0), err)
	}
	a.json = a.json || json
	if rest.NArg() != 1 {
		util.Fatalf("agentzip %s: want one container ID, got %d arguments (flags go before the ID)", f.Arg(0), rest.NArg())
	}
	if _, ok := phase.ParseHint(a.phase); !ok && f.Arg(0) == "hint" {
		util.Fatalf("agentzip hint: -phase=%q: want -phase=wait or -phase=resume", a.phase)
	}
	c, err := load(conf, rest.Arg(0))
	if err != nil {
		util.Fatalf("agentzip %s: %v", f.Arg(0), err)
	}
	if err := run(a, c, os.Stdout); err != nil {
		util.Fatalf("agentzip %s: %v", f.Arg(0), err)
	}
	return subcommands.ExitSuccess
}

// load returns the container with an ID, whose sandbox runs.
//
// It is more careful than runsc, which takes the beginning of an ID for the ID if no
// other begins so: what is meant for a sandbox that has ended could go to another. Only
// what Docker prints of its IDs is enough here.
func load(conf *config.Config, id string) (*container.Container, error) {
	if _, err := os.ReadDir(conf.RootDir); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("looking for container %q: %w", id, err)
	}
	all, err := container.List(conf.RootDir)
	if err != nil {
		return nil, fmt.Errorf("looking for container %q: %w", id, err)
	}
	full, err := choose(all, id)
	if err != nil {
		return nil, fmt.Errorf("there is no container %q below --root=%s%w", id, conf.RootDir, err)
	}
	c, err := container.Load(conf.RootDir, full, container.LoadOpts{Exact: true})
	if err != nil {
		return nil, fmt.Errorf("loading container %q: %w", id, err)
	}
	if !c.IsSandboxRunning() {
		return nil, fmt.Errorf("the sandbox of container %q does not run", id)
	}
	return c, nil
}

// shortID is how many characters Docker prints of an ID, all of them hexadecimal digits.
const shortID = 12

// choose returns the one of all that id means. The error is what there is besides to say
// than that there is none.
func choose(all []container.FullID, id string) (container.FullID, error) {
	var longer []container.FullID
	for _, full := range all {
		switch {
		case full.ContainerID == id:
			return full, nil
		case strings.HasPrefix(full.ContainerID, id):
			longer = append(longer, full)
		}
	}
	if len(id) >= shortID && strings.Trim(id, "0123456789abcdef") == "" && len(longer) == 1 {
		return longer[0], nil
	}
	if len(longer) != 0 && id != "" {
		return container.FullID{}, fmt.Errorf(" (%s begins so, but an ID has to be given whole)", longer[0].ContainerID)
	}
	return container.FullID{}, errors.New("")
}

// call calls a method of sentry.Agentzip that needs no argument.
func call(c *container.Container, method string, out any) error {
	return callWith(c, method, &struct{}{}, out)
}

func callWith(c *container.Container, method string, arg, out any) error {
	err := c.Sandbox.Call("Agentzip."+method, arg, out)
	if err != nil && strings.Contains(err.Error(), "unknown method") {
		return fmt.Errorf("the sandbox was started by another runtime, without agentzip: %w", err)
	}
	return err
}

func printJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

func (a *Agentzip) stats(c *container.Container, w io.Writer) error {
	var s control.Stats
	if err := call(c, "Stats", &s); err != nil {
		return err
	}
	s.SentryRSSBytes = rss(c.Sandbox.Pid.Load())
	// The sandbox has no access to its own /proc on the host. What it says of
	// itself is worth printing without that, too.
	if err := measure(c, &s); err != nil {
		fmt.Fprintf(os.Stderr, "agentzip stats: what the sandbox costs the host could not be measured: %v\n", err)
	}
	if a.json {
		return printJSON(w, &s)
	}
	control.Fprint(w, &s)
	return nil
}

func (a *Agentzip) evict(c *container.Container, w io.Writer) error {
	var r control.EvictReport
	if err := call(c, "Evict", &r); err != nil {
		return err
	}
	if a.json {
		return printJSON(w, &r)
	}
	fmt.Fprintf(w, "evicted %d of %d pages in %.0f ms (touched meanwhile %d, no profitable form %d, left %d)\nowned %s -> %s\n",
		r.EvictedPages, r.MarkedPages, float64(r.ElapsedNS)/1e6, r.AbortedPages, r.RejectedPages, r.SkippedPages,
		control.Size(r.OwnedBefore), control.Size(r.OwnedAfter))
	return nil
}

func (a *Agentzip) check(c *container.Container, w io.Writer) error {
	var r control.CheckReport
	if err := call(c, "Check", &r); err != nil {
		return err
	}
	if a.json {
		if err := printJSON(w, &r); err != nil {
			return err
		}
	} else {
		fmt.Fprintf(w, "checked %d of %d stored pages in %.0f ms: %d problems\n", r.CheckedPages, r.StoredPages, float64(r.ElapsedNS)/1e6, len(r.Problems))
		for _, p := range r.Problems {
			fmt.Fprintln(w, p)
		}
	}
	if len(r.Problems) != 0 {
		return fmt.Errorf("%d problems found", len(r.Problems))
	}
	return nil
}

func (a *Agentzip) prefetch(c *container.Container, w io.Writer) error {
	if a.save != "" {
		return savePatterns(c, a.save, w)
	}
	var r control.PrefetchReport
	if err := call(c, "Prefetch", &r); err != nil {
		return err
	}
	if a.json {
		return printJSON(w, &r)
	}
	fmt.Fprintf(w, "brought back %d pages in %.0f ms\n", r.Pages, float64(r.ElapsedNS)/1e6)
	return nil
}

func (a *Agentzip) hint(c *container.Container, _ io.Writer) error {
	return callWith(c, "Hint", &struct{ Phase string }{a.phase}, &struct{}{})
}

// savePatterns writes what the sandbox has learnt to the folder of its template.
func savePatterns(c *container.Container, dir string, w io.Writer) error {
	tpl, err := template.Open(dir, logf)
	if err != nil {
		return err
	}
	digest := tpl.Info().Digest
	_ = tpl.Close()
	var b []byte
	if err := call(c, "Patterns", &b); err != nil {
		return err
	}
	path := filepath.Join(dir, prefetch.File)
	// What is for another template would be ignored later: say it now.
	learnt := prefetch.New()
	switch err := learnt.Import(b, prefetch.Digest(digest)); {
	case errors.Is(err, prefetch.ErrNotForTemplate):
		return fmt.Errorf("the sandbox was restored from another template than the one in %s", dir)
	case err != nil:
		return err
	case learnt.Quality().Patterns == 0:
		return fmt.Errorf("the sandbox has learnt nothing yet: it takes steps, with waits between them; %s was not written", path)
	}
	// Restores that are in progress read the old file or the new one.
	f, err := os.CreateTemp(dir, prefetch.File+".*")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	_, err = f.Write(b)
	err = errors.Join(err, f.Chmod(0o644), f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return err
	}
	fmt.Fprintf(w, "wrote %s, %s\n", path, control.Size(uint64(len(b))))
	return nil
}
