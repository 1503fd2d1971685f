// Command agentbench measures what a runsc binary does to the memory and the
// speed of AI-agent sandboxes, side by side with a stock runsc.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
)

// command is one subcommand.
type command struct {
	// A command without a summary is not for users.
	name, summary string
	run           func(ctx context.Context, args []string, stdout, stderr io.Writer) error
}

var commands = []command{
	{"run", "compare systems on workloads of AI agents: memory, times, outputs; with report", runRun},
	{"merge", "make one report of several that run wrote", runMerge},
	{"compare", "say what got better or worse between two reports of run", runCompare},
	{"demo", "checkpoint one sandbox, restore N, drive them under both runtimes, compare", runDemo},
	{"micro", "cost of faults on evicted memory, and of the backend when nothing is evicted", runMicro},
	{"idle", "what a sandbox that waits costs outside its guest memory, and its first command after it", runIdle},
	{"density", "how many sandboxes that wait fit in an amount of memory, counted by starting them", runDensity},
	{"reclaim", "remove what a killed demo or run left behind; the next one does it too", runReclaim},
	{"guest", "what micro runs inside its sandboxes", runGuest},
	{"enter", "", runEnter},
}

// errInterrupted says that a signal ended the run.
var errInterrupted = errors.New("interrupted")

// interrupted is errInterrupted with what became of what the run had started.
func interrupted(cleanup error) error {
	if cleanup != nil {
		return errors.Join(errInterrupted, cleanup)
	}
	return fmt.Errorf("%w; what it started has been ended and removed", errInterrupted)
}

// errUsage says that the usage text was printed already.
var errUsage = errors.New("usage")

func main() {
	ctx, stop := untilSignal()
	defer stop()
	// A reader of our output that ends must not end a measurement, nor leave behind
	// what it changed on the host: writing fails, no more. Notify, not Ignore, which
	// the commands that are started would inherit.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	os.Exit(mainCode(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

// untilSignal returns a context that ends with the first signal to end: from then on
// everything unwinds and cleans up, and more signals do not cut that short.
func untilSignal() (context.Context, context.CancelFunc) {
	return signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT)
}

func mainCode(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	usage := func(w io.Writer) {
		fmt.Fprintln(w, "usage: agentbench COMMAND [flags]\n\ncommands:")
		for _, c := range commands {
			if c.summary == "" {
				continue
			}
			fmt.Fprintf(w, "  %-8s %s\n", c.name, c.summary)
		}
		fmt.Fprintln(w, "\nagentbench COMMAND -h lists a command's flags")
	}
	if len(args) == 0 {
		usage(stderr)
		return 2
	}
	switch args[0] {
	case "help", "-h", "-help", "--help":
		usage(stdout)
		return 0
	}
	for _, c := range commands {
		if c.name != args[0] {
			continue
		}
		err := c.run(ctx, args[1:], stdout, stderr)
		switch {
		case err == nil, errors.Is(err, flag.ErrHelp):
			return 0
		case errors.Is(err, errUsage):
			return 2
		case errors.Is(err, errInterrupted):
			fmt.Fprintf(stderr, "agentbench %s: %v\n", c.name, err)
			return 130
		}
		fmt.Fprintf(stderr, "agentbench %s: %v\n", c.name, err)
		return 1
	}
	fmt.Fprintf(stderr, "agentbench: unknown command %q\n\n", args[0])
	usage(stderr)
	return 2
}
