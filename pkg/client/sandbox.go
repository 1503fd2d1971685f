package client

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"runsc-agentzip/pkg/control"
)

// Start says how a sandbox is started. Only ID is needed.
type Start struct {
	// ID is the new sandbox's: letters, digits and any of _ + - . in it.
	ID string
	// Stdin, Stdout and Stderr become those of the container's command, /dev/null
	// where they are nil. The sandbox holds them itself: the caller may close its
	// own, and a pipe that nobody reads any more breaks. A regular file is read and
	// written from its beginning, unless it was opened with O_APPEND.
	Stdin, Stdout, Stderr *os.File
	// Flags are further global flags for this sandbox, after those of the Client.
	Flags []string
}

// Starts returns a Start for each id.
func Starts(ids ...string) []Start {
	s := make([]Start, len(ids))
	for i, id := range ids {
		s[i].ID = id
	}
	return s
}

// Run starts a sandbox with the command of a bundle. It returns when the command
// has been started. A failure leaves nothing behind.
//
// If ctx ends first, the start goes on to its end, and what it started is deleted
// before Run returns the context's error: a runtime that is killed half-way leaves
// processes of which nobody knows. If that takes more than 30 s it is killed all
// the same, and the error says so.
func (c *Client) Run(ctx context.Context, bundle string, s Start) error {
	bundle, err := filepath.Abs(bundle)
	if err != nil {
		return fmt.Errorf("client: bundle: %w", err)
	}
	return c.start(ctx, s, "run", "--detach", "--bundle", bundle, s.ID)
}

// start runs a command that starts a detached sandbox.
func (c *Client) start(ctx context.Context, s Start, args ...string) error {
	if err := c.free(s.ID); err != nil {
		return err
	}
	dir, log, err := c.ownLog()
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	// Not ctx: see toEnd.
	whole := context.WithoutCancel(ctx)
	cmd := c.command(whole, append(s.Flags[:len(s.Flags):len(s.Flags)], "--log="+log), args)
	// Anything but a file would be copied by a goroutine of ours, for as long as the
	// sandbox lives. A nil *os.File in the interface would not be nil.
	for _, f := range []struct {
		file *os.File
		set  func(*os.File)
	}{
		{s.Stdin, func(f *os.File) { cmd.Stdin = f }},
		{s.Stdout, func(f *os.File) { cmd.Stdout = f }},
		{s.Stderr, func(f *os.File) { cmd.Stderr = f }},
	} {
		if f.file != nil {
			f.set(f.file)
		}
	}
	cut, err := c.toEnd(ctx, cmd)
	switch {
	case cut:
		return failure(args, fmt.Errorf("%w, and it had not ended %v later: it was killed and may have left processes", ctx.Err(), grace), logged(log))
	case err != nil && ctx.Err() != nil:
		// It failed by itself, or was not begun: nothing is there.
		return failure(args, ctx.Err(), logged(log))
	case err != nil:
		said := logged(log)
		if said == "" {
			// It ended before it opened its log, most likely because of a global flag.
			// What it has to say would have gone to the guest's standard error.
			var out tail
			out.limit = maxStderr
			again := c.command(whole, s.Flags, []string{"--version"})
			again.Stdout, again.Stderr = &out, &out
			if again.Run() != nil {
				said = out.String()
			}
		}
		return failure(args, err, said)
	case ctx.Err() != nil:
		// It succeeded, so the sandbox is ours.
		undo, cancel := context.WithTimeout(whole, grace)
		defer cancel()
		return failure(args, errors.Join(ctx.Err(), c.Delete(undo, s.ID)), "")
	}
	return nil
}

// ownLog makes a folder in which runsc can put a log, with nothing but its errors.
func (c *Client) ownLog() (dir, log string, err error) {
	dir, err = os.MkdirTemp("", "agentzip-client-")
	if err != nil {
		return "", "", fmt.Errorf("client: %w", err)
	}
	return dir, filepath.Join(dir, "log"), nil
}

// logged returns the messages in a log of runsc's.
func logged(path string) string {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	var msgs []string
	for d := json.NewDecoder(io.LimitReader(f, maxStderr)); ; {
		var entry struct {
			Msg string `json:"msg"`
		}
		if d.Decode(&entry) != nil {
			return strings.Join(msgs, "\n")
		}
		msgs = append(msgs, entry.Msg)
	}
}

// ExecOptions describe a command to run in a sandbox.
type ExecOptions struct {
	// Args is the command. Args[0] is looked up in the container's PATH.
	Args []string
	// Env is added to the container's environment.
	Env []string
	// Cwd is the working directory, the container's by default.
	Cwd string
	// User is UID or UID:GID, the container's by default.
	User string
	// Stdin is what the command reads, nothing by default. What is no file may be read
	// from once more after Exec has returned.
	Stdin io.Reader
	// Stdout and Stderr get what the command writes, in place of ExecResult.
	Stdout, Stderr io.Writer
	// LeaveRunning lets the command go on when ctx ends: to look at one that hangs.
	LeaveRunning bool
}

// MaxOutput is how many bytes of each output an ExecResult holds.
const MaxOutput = 16 << 20

// ExecResult is the outcome of a command.
type ExecResult struct {
	// Stdout and Stderr are what it wrote, the first MaxOutput bytes each, unless
	// ExecOptions had a writer. Truncated says that there was more.
	Stdout, Stderr string
	Truncated      bool
	// ExitCode is the command's, 128 and the signal's number if one ended it.
	ExitCode int
}

// Exec runs a command in a sandbox and waits for it. That it failed is no error but
// its exit code; an error says that it was not run, or that how it ended is not
// known.
//
// If ctx ends first, the command's process group is killed in the sandbox. What has
// left the group goes on, and so does a command that was just being started.
// Output that a process in the background keeps open is read for 2 s longer.
//
// Processes that Exec started do not survive CreateTemplate: in a clone only what
// descends from the container's own command is there.
func (c *Client) Exec(ctx context.Context, id string, o ExecOptions) (ExecResult, error) {
	if len(o.Args) == 0 {
		return ExecResult{}, errors.New("client: exec: no command given")
	}
	if err := c.find(id); err != nil {
		return ExecResult{}, err
	}
	dir, log, err := c.ownLog()
	if err != nil {
		return ExecResult{}, err
	}
	defer os.RemoveAll(dir)
	// Written when the command has been started.
	pidFile := filepath.Join(dir, "pid")
	args := []string{"exec", "--internal-pid-file", pidFile}
	for _, kv := range o.Env {
		args = append(args, "--env", kv)
	}
	if o.Cwd != "" {
		args = append(args, "--cwd", o.Cwd)
	}
	if o.User != "" {
		args = append(args, "--user", o.User)
	}
	args = append(append(args, id), o.Args...)
	cmd := c.command(ctx, []string{"--log=" + log}, args)
	var out, errOut head
	cmd.Stdout, cmd.Stderr = &out, &errOut
	if o.Stdout != nil {
		cmd.Stdout = o.Stdout
	}
	if o.Stderr != nil {
		cmd.Stderr = o.Stderr
	}
	// The sandbox would have offsets of its own in regular files, from 0 on: it gets
	// pipes.
	if f, ok := o.Stdin.(*os.File); ok && !regular(f) {
		cmd.Stdin = f
	} else if o.Stdin != nil {
		// Nobody waits for the copy: a Reader that blocks would keep Exec.
		in, err := cmd.StdinPipe()
		if err != nil {
			return ExecResult{}, failure(args, err, "")
		}
		go func() {
			_, _ = io.Copy(in, o.Stdin)
			in.Close()
		}()
	}
	if regular(cmd.Stdout) {
		cmd.Stdout = struct{ io.Writer }{cmd.Stdout}
	}
	if regular(cmd.Stderr) {
		cmd.Stderr = struct{ io.Writer }{cmd.Stderr}
	}
	cmd.Cancel = func() error {
		if pid := readPid(pidFile); pid != 0 && !o.LeaveRunning && c.killGroup(context.WithoutCancel(ctx), id, pid) == nil {
			return nil
		}
		return cmd.Process.Kill()
	}
	err = cmd.Run()
	res := ExecResult{Stdout: out.String(), Stderr: errOut.String(), Truncated: out.more || errOut.more, ExitCode: cmd.ProcessState.ExitCode()}
	if errors.Is(err, exec.ErrWaitDelay) && ctx.Err() == nil {
		err = nil
	}
	if err != nil && ctx.Err() != nil {
		return res, failure(args, ctx.Err(), logged(log))
	}
	var exit *exec.ExitError
	if err != nil && (!errors.As(err, &exit) || res.ExitCode < 0) {
		// It was not run, or was killed: not by what it ran.
		return res, failure(args, err, logged(log))
	}
	// Its log tells runsc's own failures from a command that exits with the same
	// code; without the file it failed so early that it had no log.
	if said := logged(log); said != "" || err != nil && readPid(pidFile) == 0 {
		if said == "" {
			said = errOut.String()
		}
		if err == nil {
			err = errors.New("it reports an error")
		}
		return res, failure(args, err, said)
	}
	return res, nil
}

// regular tells whether a reader or a writer is a regular file.
func regular(v any) bool {
	f, ok := v.(*os.File)
	if !ok {
		return false
	}
	fi, err := f.Stat()
	return err == nil && fi.Mode().IsRegular()
}

// killGroup kills a process of a sandbox and its group.
func (c *Client) killGroup(ctx context.Context, id string, pid int) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	_, err := c.Command(ctx, "kill", "--pgid", strconv.Itoa(pid), id, "KILL")
	if err != nil {
		_, err = c.Command(ctx, "kill", "--pid", strconv.Itoa(pid), id, "KILL")
	}
	return err
}

func readPid(file string) int {
	b, err := os.ReadFile(file)
	if err != nil {
		return 0
	}
	pid, _ := strconv.Atoi(strings.TrimSpace(string(b)))
	return pid
}

// head keeps the first MaxOutput bytes written to it.
type head struct {
	strings.Builder
	more bool
}

func (h *head) Write(p []byte) (int, error) {
	n := len(p)
	if room := MaxOutput - h.Len(); n > room {
		p, h.more = p[:room], true
	}
	h.Builder.Write(p)
	return n, nil
}

// Phase is what a sandbox is told about its agent.
type Phase string

const (
	// Wait: the agent waits for its model, so the sandbox's memory may go.
	Wait Phase = "wait"
	// Resume: the next step is on its way, so what it will want should come back.
	Resume Phase = "resume"
)

// Hint tells a sandbox what it would find out by itself a moment later: that a wait
// begins (which spares the idle time, 200 ms by default) or ends (which brings
// memory back before the first access). It returns at once; Stats says what came
// of it.
func (c *Client) Hint(ctx context.Context, id string, p Phase) error {
	if err := c.find(id); err != nil {
		return err
	}
	_, err := c.Command(ctx, "agentzip", "hint", "-phase="+string(p), id)
	return err
}

// Stats returns what a sandbox's memory costs, and in which form it is held.
func (c *Client) Stats(ctx context.Context, id string) (control.Stats, error) {
	return agentzip[control.Stats](ctx, c, id, "stats")
}

// Evict evicts everything that can be evicted now, waits for it and reports.
func (c *Client) Evict(ctx context.Context, id string) (control.EvictReport, error) {
	return agentzip[control.EvictReport](ctx, c, id, "evict")
}

// Check decodes and verifies every stored page while the sandbox runs. Problems
// found are in the report, not in the error.
func (c *Client) Check(ctx context.Context, id string) (control.CheckReport, error) {
	return agentzip[control.CheckReport](ctx, c, id, "check")
}

// Prefetch brings back what the next step is expected to use, and waits for it.
func (c *Client) Prefetch(ctx context.Context, id string) (control.PrefetchReport, error) {
	return agentzip[control.PrefetchReport](ctx, c, id, "prefetch")
}

func agentzip[T any](ctx context.Context, c *Client, id, verb string) (T, error) {
	if err := c.find(id); err != nil {
		var zero T
		return zero, err
	}
	return commandJSON[T](ctx, c, "agentzip", verb, "-json", id)
}

// State is what the runtime knows about a container, with the names of the OCI
// runtime specification.
type State struct {
	Version string `json:"ociVersion"`
	ID      string `json:"id"`
	// Status is one of Created, Running, Paused and Stopped.
	Status string `json:"status"`
	// Pid is the process id of the sandbox on the host.
	Pid int `json:"pid"`
	// Bundle is the folder of the bundle.
	Bundle      string            `json:"bundle"`
	Annotations map[string]string `json:"annotations"`
}

// The statuses of a container.
const (
	Created = "created"
	Running = "running"
	Paused  = "paused"
	Stopped = "stopped"
)

// State returns the state of one container.
func (c *Client) State(ctx context.Context, id string) (State, error) {
	if err := c.find(id); err != nil {
		return State{}, err
	}
	return commandJSON[State](ctx, c, "state", id)
}

// List returns the states of all containers below Root, stopped ones included.
func (c *Client) List(ctx context.Context) ([]State, error) {
	return commandJSON[[]State](ctx, c, "list", "--format", "json")
}

// Wait waits until the container's own command has ended, and returns its exit
// code, 128 and the signal's number if one ended it. It has to be called before
// the end: the code of a sandbox that has ended is not known any more, and a
// *CommandError.
func (c *Client) Wait(ctx context.Context, id string) (int, error) {
	if err := c.find(id); err != nil {
		return 0, err
	}
	res, err := commandJSON[struct {
		ExitStatus int `json:"exitStatus"`
	}](ctx, c, "wait", id)
	return res.ExitStatus, err
}

// Signal sends a signal, such as "TERM", to the container's command.
func (c *Client) Signal(ctx context.Context, id, signal string) error {
	if err := c.find(id); err != nil {
		return err
	}
	_, err := c.Command(ctx, "kill", id, signal)
	return err
}

// Kill ends a sandbox at once, and returns when it has ended. One that has ended
// before, or does not exist, is no error. Its state is there until Delete.
func (c *Client) Kill(ctx context.Context, id string) error {
	if err := c.Signal(ctx, id, "KILL"); err != nil {
		// Most likely it has ended, or is about to.
		if c.endedBefore(ctx, id, time.Now().Add(2*time.Second)) == nil {
			return nil
		}
		return err
	}
	return c.ended(ctx, id)
}

// ended waits until a sandbox has ended.
func (c *Client) ended(ctx context.Context, id string) error {
	return c.endedBefore(ctx, id, time.Time{})
}

// endedBefore waits until a sandbox has ended. At a deadline, if there is one, it
// fails unless the sandbox's process is a zombie: runsc says that it runs until its
// parent has taken note of its end, usually the host's process 1, which may take
// its time.
func (c *Client) endedBefore(ctx context.Context, id string, deadline time.Time) error {
	for pause := 10 * time.Millisecond; ; pause = min(2*pause, 200*time.Millisecond) {
		s, err := c.State(ctx, id)
		if errors.Is(err, ErrNotFound) || err == nil && s.Status == Stopped {
			return nil
		} else if err != nil {
			return err
		}
		if !deadline.IsZero() && time.Now().After(deadline) && !zombie(s.Pid) {
			return fmt.Errorf("client: %s has not ended: process %d runs", id, s.Pid)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("client: waiting for the end of %s: %w", id, ctx.Err())
		case <-time.After(pause):
		}
	}
}

// zombie tells whether a process has ended and its parent does not know yet.
func zombie(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	// The state follows the name, which may hold anything.
	i := bytes.LastIndexByte(b, ')')
	return err == nil && i > 0 && bytes.HasPrefix(b[i+1:], []byte(" Z "))
}

// Delete ends a sandbox, if it runs, and removes every trace of it. It may be
// called again: a sandbox that does not exist is no error. After a failure it can
// be repeated. What Root holds besides sandboxes stays: runsc keeps a mount there,
// null-netns, for all to come.
func (c *Client) Delete(ctx context.Context, id string) error {
	err := c.find(id)
	if err == nil {
		_, err = c.Command(ctx, "delete", "--force", id)
	}
	if errors.Is(err, ErrNotFound) {
		return nil
	}
	return err
}

// Cleanup removes Root, when no container is left there, with what runsc keeps
// mounted in it. It fails, and removes nothing, if there is one. No sandbox may be
// started meanwhile. A Root that is missing is no error.
func (c *Client) Cleanup() error {
	ids, err := c.ids()
	if err != nil {
		return err
	}
	if len(ids) > 0 {
		return fmt.Errorf("client: %s holds sandboxes: %s", c.root, strings.Join(ids, ", "))
	}
	// It is mounted again and again, and at worst not at all.
	for syscall.Unmount(filepath.Join(c.root, "null-netns"), syscall.MNT_DETACH) == nil {
	}
	// Only if there is only what runsc puts there: Root may be a folder that was given
	// by mistake.
	entries, err := os.ReadDir(c.root)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	} else if err != nil {
		return fmt.Errorf("client: root: %w", err)
	}
	for _, e := range entries {
		if e.Name() != "null-netns" && !strings.HasSuffix(e.Name(), ".lock") {
			return fmt.Errorf("client: root: %s is not runsc's: nothing in %s was removed", e.Name(), c.root)
		}
	}
	for _, e := range entries {
		if err := os.Remove(filepath.Join(c.root, e.Name())); err != nil {
			return fmt.Errorf("client: root: %w", err)
		}
	}
	if err := os.Remove(c.root); err != nil {
		return fmt.Errorf("client: root: %w", err)
	}
	return nil
}
