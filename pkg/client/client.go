// Package client drives sandboxes through the command line of runsc-agentzip: it
// is what a scheduler of agents' sandboxes imports.
//
//	c, err := client.New(client.Options{Root: "/run/agents", Flags: []string{"--network=none", "--overlay2=all:memory"}})
//	err = c.Run(ctx, bundle, client.Start{ID: "seed"})
//	tpl, err := c.CreateTemplate(ctx, "seed", dir, client.TemplateOptions{SettleCommand: "sync"})
//	err = c.RestoreAll(ctx, tpl, client.Starts("a", "b", "c", "d"), 2)
//	step, err := c.Exec(ctx, "a", client.ExecOptions{Args: []string{"make", "test"}})
//	err = c.Hint(ctx, "a", client.Wait)           // the model thinks now
//	stats, err := c.Stats(ctx, "a")               // what "a" costs meanwhile
//	tpl2, err := c.Fork(ctx, "a", dir2, client.Starts("e", "f"), 2)
//	err = c.Delete(ctx, "a")
//
// It starts the binary, reads the JSON that it prints and adds no protocol of its
// own: what it does, a shell can do, and both may drive the same sandboxes. It
// needs nothing of gVisor and, beyond the standard library, only package control
// for the types of reports. Package bundle writes bundles; any other will do.
//
// # State
//
// A Client keeps none. Sandboxes are detached: they outlive the Client and its
// process, and any Client with the same Options.Root sees them. All methods may be
// called concurrently, also by several processes, as long as an id has one owner:
// runsc looks ids up by name, so whoever deletes a sandbox while another calls a
// method on it may have the call fail with ErrNotFound.
//
// # Ids
//
// runsc takes the beginning of an id for the id, if only one sandbox's begins so:
// "runsc delete --force clone-1" deletes clone-10 if clone-1 is gone, and cannot
// tell which is meant if it is not. Methods here want the whole id, or fail with
// ErrNotFound, and a sandbox is not started under an id that begins with another's
// or with which another's begins (ErrAmbiguous). Give ids of one length.
//
// # Errors and contexts
//
// A command of runsc's that failed is a *CommandError, which has what runsc said.
// ErrNotFound, ErrExists and ErrNoAgentzip can be told with errors.Is. Unless a
// method says something else, a context that ends kills the command and the error
// wraps the context's; what the command had asked the sandbox for may still happen.
//
// # Relation to package fleet
//
// Package fleet drives sandboxes for measurements: attached, so that none survives
// a killed benchmark, with lines over standard input and output, and with the means
// to measure memory from outside. Its short commands go through this package.
package client

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"
)

var (
	// ErrNotFound says that there is no sandbox with the id.
	ErrNotFound = errors.New("there is no such sandbox")
	// ErrExists says that there is one, which a new one was to have. It is left alone.
	ErrExists = errors.New("there is a sandbox with this id")
	// ErrAmbiguous says that the id is the beginning of another's, or the other way
	// round, so that runsc could not tell them apart.
	ErrAmbiguous = errors.New("one id is the beginning of another")
	// ErrNoAgentzip says that the binary is a runsc without the agentzip commands.
	ErrNoAgentzip = errors.New("this runsc has no agentzip commands (a stock binary?)")
)

// Options say which runtime to drive, and how.
type Options struct {
	// Binary is the path of runsc-agentzip, or a name to look up in PATH. Default:
	// "runsc-agentzip". It must not lie below /tmp: see FindBinary.
	Binary string
	// Root is the folder with the runtime's state (--root), which the first sandbox
	// creates. Default: runsc's own, /var/run/runsc, or runsc below
	// XDG_RUNTIME_DIR where that is set.
	Root string
	// Flags are further global flags. They come before the command, as runsc wants
	// them: "--network=none", "--overlay2=all:memory", "--agentzip-pool=PATH".
	// Each is one argument, --name=value.
	// --log has no effect on Run, Restore and Exec, which tell runsc's messages
	// from the guest's by a log of their own; the error has them.
	Flags []string
	// Trace, if set, is called with each command before it is run, without the
	// global flags. It may be called concurrently and must not change args.
	Trace func(args []string)
}

// A Client drives sandboxes. Its methods may be called concurrently.
type Client struct {
	binary, root string
	flags        []string
	trace        func([]string)
}

// New returns a Client. It looks for the binary, but runs nothing.
func New(o Options) (*Client, error) {
	if o.Binary == "" {
		o.Binary = "runsc-agentzip"
	}
	binary, err := FindBinary(o.Binary)
	if err != nil {
		return nil, err
	}
	root := o.Root
	if root == "" {
		root = "/var/run/runsc"
		if dir := os.Getenv("XDG_RUNTIME_DIR"); dir != "" {
			root = filepath.Join(dir, "runsc")
		}
	}
	if root, err = filepath.Abs(root); err != nil {
		return nil, fmt.Errorf("client: root: %w", err)
	}
	for _, f := range o.Flags {
		if !strings.HasPrefix(f, "-") {
			return nil, fmt.Errorf("client: %q is not a flag: give each as one argument, --name=value", f)
		}
		if name, _, _ := strings.Cut(strings.TrimLeft(f, "-"), "="); name == "root" {
			return nil, fmt.Errorf("client: %s is among the flags: Options.Root is for it", f)
		}
	}
	trace := o.Trace
	if trace == nil {
		trace = func([]string) {}
	}
	return &Client{binary: binary, root: root, flags: slices.Concat([]string{"--root=" + root}, o.Flags), trace: trace}, nil
}

// Binary returns the resolved path of the binary.
func (c *Client) Binary() string { return c.binary }

// Root returns the folder with the runtime's state.
func (c *Client) Root() string { return c.root }

// FindBinary resolves the path of a runsc, looking a name without a slash up in
// PATH, and refuses what could not work: a missing file (the error wraps
// os.ErrNotExist, or exec.ErrNotFound for a name), one that is not executable, one
// below /tmp, which the sandbox process covers with its own, so that it could not
// execute itself.
func FindBinary(path string) (string, error) {
	if path == "" {
		return "", errors.New("client: no runsc binary given")
	}
	if !strings.Contains(path, "/") {
		found, err := exec.LookPath(path)
		if err != nil {
			return "", fmt.Errorf("client: runsc binary: %w", err)
		}
		path = found
	}
	abs, err := filepath.Abs(path)
	if err != nil {
		return "", fmt.Errorf("client: runsc binary %s: %w", path, err)
	}
	real, err := filepath.EvalSymlinks(abs)
	if errors.Is(err, os.ErrNotExist) {
		return "", fmt.Errorf("client: runsc binary %s does not exist: build it first (make build): %w", path, os.ErrNotExist)
	} else if err != nil {
		return "", fmt.Errorf("client: runsc binary %s: %w", path, err)
	}
	if strings.HasPrefix(real, "/tmp/") {
		return "", fmt.Errorf("client: runsc binary %s lies under /tmp, which the sandbox process covers with its own root, so it could not execute itself: copy it elsewhere, e.g. to /usr/local/bin", real)
	}
	fi, err := os.Stat(real)
	if err != nil {
		return "", fmt.Errorf("client: runsc binary: %w", err)
	}
	if !fi.Mode().IsRegular() || fi.Mode()&0o111 == 0 {
		return "", fmt.Errorf("client: %s is not an executable file (mode %v)", path, fi.Mode())
	}
	return real, nil
}

// CommandError is the failure of one runsc command. Where it is known why,
// errors.Is finds ErrNotFound, ErrExists or ErrNoAgentzip in it.
type CommandError struct {
	Command string // runsc's command: "run", "checkpoint", "agentzip", ...
	Err     error  // an *exec.ExitError, the context's error, or why it was not started
	Stderr  string // what runsc said, at most the last 64 KiB of it
}

// Error has all of it but usage texts.
func (e *CommandError) Error() string {
	if e.Stderr == "" {
		return fmt.Sprintf("runsc %s: %v", e.Command, e.Err)
	}
	// A usage error comes with a page of text that says nothing more.
	msg, _, _ := strings.Cut(e.Stderr, "\nUsage:")
	return fmt.Sprintf("runsc %s: %v: %s", e.Command, e.Err, strings.TrimSpace(msg))
}

// Unwrap returns Err.
func (e *CommandError) Unwrap() error { return e.Err }

// Is tells the failures that have a name. runsc ends with its message; what is
// before may be a guest's.
func (e *CommandError) Is(target error) bool {
	last := e.Stderr[strings.LastIndexByte(e.Stderr, '\n')+1:]
	switch target {
	case ErrNotFound:
		return strings.Contains(last, ": there is no container ") ||
			strings.Contains(last, "loading container") && strings.HasSuffix(last, ": file does not exist")
	case ErrExists:
		return strings.Contains(last, "container already exists")
	case ErrNoAgentzip:
		return e.Command == "agentzip" && strings.Contains(e.Stderr, "Usage:") && strings.Contains(e.Stderr, "<subcommand>")
	}
	return false
}

// Command runs any command of the runtime's with the global flags before it, waits
// for it and returns what it wrote to its standard output: for "events", "update",
// "pause" (which makes system calls in the guest fail with EINTR; a sandbox that
// waits needs none) and whatever else has no method here, but not for what starts
// something that goes on, which would keep its output open: that fails 2 s after the
// command has ended. Its standard input is empty. An abbreviated id is not noticed.
func (c *Client) Command(ctx context.Context, args ...string) ([]byte, error) {
	cmd := c.command(ctx, nil, args)
	var out bytes.Buffer
	said := tail{limit: maxStderr}
	cmd.Stdout, cmd.Stderr = &out, &said
	if err := cmd.Run(); err != nil {
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		return out.Bytes(), failure(args, err, said.String())
	}
	return out.Bytes(), nil
}

// maxStderr bounds CommandError.Stderr: a settle command's output comes with it.
const maxStderr = 64 << 10

// outputDelay is how long after the end of a command its output is read on, if
// something that it left behind holds it open.
const outputDelay = 2 * time.Second

// command prepares a command. It runs in a process group of its own: a Ctrl-C on
// the terminal is for the program that uses this package, which then cleans up with
// these very commands.
func (c *Client) command(ctx context.Context, flags, args []string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, c.binary, slices.Concat(c.flags, flags, args)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.WaitDelay = outputDelay
	c.trace(args)
	return cmd
}

func failure(args []string, err error, said string) error {
	name := ""
	if len(args) > 0 {
		name = args[0]
	}
	return &CommandError{Command: name, Err: err, Stderr: strings.TrimSpace(said)}
}

// grace is how long a command that must not be killed half-way may go on after the
// end of its context.
var grace = 30 * time.Second

// toEnd runs a command that leaves processes or files of which nobody knows if it
// is killed: it goes on for a while when the context has ended. cut is whether even
// that was too short.
func (c *Client) toEnd(ctx context.Context, cmd *exec.Cmd) (cut bool, err error) {
	if err := ctx.Err(); err != nil {
		return false, err
	}
	if err := cmd.Start(); err != nil {
		return false, err
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	select {
	case err := <-done:
		return false, err
	case <-ctx.Done():
	}
	timer := time.NewTimer(grace)
	defer timer.Stop()
	select {
	case err := <-done:
		return false, err
	case <-timer.C:
	}
	_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
	<-done
	return true, ctx.Err()
}

// tail keeps the last bytes written to it.
type tail struct {
	limit int
	b     []byte
}

func (t *tail) Write(p []byte) (int, error) {
	t.b = append(t.b, p...)
	if n := len(t.b) - t.limit; n > 0 {
		t.b = append(t.b[:0], t.b[n:]...)
	}
	return len(p), nil
}

func (t *tail) String() string { return string(t.b) }

// ValidID tells whether runsc takes a text for an id, and not for a flag. It may hold
// letters, digits and any of _+.-, and not begin with -.
func ValidID(id string) bool { return validID.MatchString(id) }

var validID = regexp.MustCompile(`^[\w+.][\w+.-]*$`)

// ids returns the ids of all containers, stopped ones included, by the names of
// runsc's state files. Starting `runsc list` to know one would cost as much as what
// is to be done.
func (c *Client) ids() ([]string, error) {
	entries, err := os.ReadDir(c.root)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, fmt.Errorf("client: root: %w", err)
	}
	var ids []string
	for _, e := range entries {
		if name, ok := strings.CutSuffix(e.Name(), ".state"); ok {
			if i := strings.LastIndex(name, "_sandbox:"); i > 0 {
				ids = append(ids, name[:i])
			}
		}
	}
	return ids, nil
}

// find fails unless runsc would take the id for the sandbox of exactly that id.
func (c *Client) find(id string) error {
	if !ValidID(id) {
		return fmt.Errorf("client: invalid sandbox id %q", id)
	}
	ids, err := c.ids()
	if err != nil {
		return err
	}
	if !slices.Contains(ids, id) {
		return fmt.Errorf("client: %s below %s: %w", id, c.root, ErrNotFound)
	}
	for _, other := range ids {
		if other != id && strings.HasPrefix(other, id) {
			return fmt.Errorf("client: %s and %s: %w", id, other, ErrAmbiguous)
		}
	}
	return nil
}

// free fails if a sandbox cannot get the id.
func (c *Client) free(id string, taken ...string) error {
	if !ValidID(id) {
		return fmt.Errorf("client: invalid sandbox id %q", id)
	}
	ids, err := c.ids()
	if err != nil {
		return err
	}
	for _, other := range append(ids, taken...) {
		if other == id {
			return fmt.Errorf("client: %s: %w", id, ErrExists)
		}
		if strings.HasPrefix(other, id) || strings.HasPrefix(id, other) {
			return fmt.Errorf("client: %s and %s: %w", id, other, ErrAmbiguous)
		}
	}
	return nil
}

// commandJSON runs a command and decodes what it prints.
func commandJSON[T any](ctx context.Context, c *Client, args ...string) (T, error) {
	out, err := c.Command(ctx, args...)
	return decoded[T](out, err, args)
}

// commandToEnd is commandJSON for a command that must not be killed half-way.
func commandToEnd[T any](ctx context.Context, c *Client, args ...string) (T, error) {
	cmd := c.command(context.WithoutCancel(ctx), nil, args)
	var out bytes.Buffer
	said := tail{limit: maxStderr}
	cmd.Stdout, cmd.Stderr = &out, &said
	cut, err := c.toEnd(ctx, cmd)
	if err != nil {
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		if cut {
			err = fmt.Errorf("%w, and it had not ended %v later: it was killed", err, grace)
		}
		err = failure(args, err, said.String())
	}
	return decoded[T](out.Bytes(), err, args)
}

// decoded decodes what a command printed, whatever its exit code: `agentzip check`
// exits non-zero to say that there are problems, and still prints the report.
func decoded[T any](out []byte, err error, args []string) (v T, _ error) {
	jsonErr := json.Unmarshal(out, &v)
	if jsonErr == nil {
		return v, nil
	}
	var zero T
	if err != nil {
		return zero, err
	}
	return zero, fmt.Errorf("client: runsc %s printed no valid JSON: %w", strings.Join(args, " "), jsonErr)
}
