package fleet

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"runsc-agentzip/pkg/client"
	"runsc-agentzip/pkg/control"
)

// maxLine bounds one line of guest output: the guest is not trusted to end it.
const maxLine = 64 << 20

// StartOption adjusts how Run and Restore start a sandbox.
type StartOption func(*startConfig)

type startConfig struct {
	stdin          io.Reader
	stdout, stderr io.Writer
	launcher       []string
	flags          []string
}

// WithStdin feeds the container from r instead of Request and WriteLine.
func WithStdin(r io.Reader) StartOption { return func(c *startConfig) { c.stdin = r } }

// WithOutput copies the container's output to the writers; nil leaves the
// default. With stdout set, Request and ReadLine are not available.
func WithOutput(stdout, stderr io.Writer) StartOption {
	return func(c *startConfig) { c.stdout, c.stderr = stdout, stderr }
}

// WithLauncher starts runsc through a program that prepares the process (joins a
// cgroup, say) and then becomes runsc: argv is put in front of runsc's command
// line. It must end in exec, so that the process id stays the same, and exit with
// 128, as runsc does, if it cannot. Every process of the sandbox descends from
// this one.
func WithLauncher(argv ...string) StartOption {
	return func(c *startConfig) { c.launcher = argv }
}

// WithFlags starts the sandbox with further global runsc flags, after those of
// the Runtime.
func WithFlags(flags ...string) StartOption {
	return func(c *startConfig) { c.flags = append(c.flags, flags...) }
}

// Sandbox is one running (or ended) sandbox. Its methods may be called
// concurrently; requests are answered one at a time.
type Sandbox struct {
	rt    *Runtime
	id    string
	image string // absolute; "" unless restored
	cmd   *exec.Cmd
	took  time.Duration

	stdin  *os.File // nil with WithStdin
	lines  chan string
	stderr *tailBuffer

	reqMu  sync.Mutex
	desync bool // under reqMu: a request was abandoned half-way

	exited   chan struct{} // closed when the attached runsc ended
	exitCode int           // valid once exited is closed
	waitErr  error
	stopRead chan struct{} // closed by Delete: nobody reads lines any more

	procMu    sync.Mutex
	processes []processID // runsc, sandbox, gofer

	deleteOnce sync.Once
	deleteErr  error
}

// Run starts a sandbox from a bundle and returns once its command runs, or
// right after it ended if it is quick. Its stdin and stdout are driven with
// Request unless options say otherwise.
func (r *Runtime) Run(ctx context.Context, id, bundle string, opts ...StartOption) (*Sandbox, error) {
	return r.start(ctx, id, "", opts, "run", "--bundle", bundle, id)
}

// Restore starts a sandbox from a checkpoint image, with the bundle (or an
// equivalent one) the checkpointed sandbox was started with. The new sandbox
// gets stdio of its own.
func (r *Runtime) Restore(ctx context.Context, id, bundle, imageDir string, opts ...StartOption) (*Sandbox, error) {
	imageDir, err := filepath.Abs(imageDir)
	if err != nil {
		return nil, fmt.Errorf("fleet: image: %w", err)
	}
	return r.start(ctx, id, imageDir, opts, "restore", "--bundle", bundle, "--image-path", imageDir, id)
}

func (r *Runtime) start(ctx context.Context, id, image string, opts []StartOption, args ...string) (*Sandbox, error) {
	var cfg startConfig
	for _, o := range opts {
		o(&cfg)
	}
	s := &Sandbox{
		rt:       r,
		id:       id,
		image:    image,
		exited:   make(chan struct{}),
		stopRead: make(chan struct{}),
		stderr:   &tailBuffer{limit: 64 << 10},
	}
	if err := r.enter(s); err != nil {
		return nil, err
	}

	began := time.Now()
	if err := s.spawn(cfg, args); err != nil {
		r.forget(s)
		return nil, err
	}
	if err := s.waitRunning(ctx, args[0]); err != nil {
		// The failure matters, not how the clean-up went.
		dctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 30*time.Second)
		defer cancel()
		s.Delete(dctx)
		return nil, err
	}
	s.took = time.Since(began)
	return s, nil
}

// enter puts a sandbox that is about to be started into the Runtime's books, unless
// runsc could take its id for another's or the other way round.
func (r *Runtime) enter(s *Sandbox) error {
	// runsc looks for files with an id as a pattern, whatever is in it.
	if !client.ValidID(s.id) {
		return fmt.Errorf("fleet: invalid sandbox id %q", s.id)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return errors.New("fleet: the runtime is closed")
	}
	if _, dup := r.sandboxes[s.id]; dup || r.busy[s.id] != 0 {
		return fmt.Errorf("fleet: sandbox %s exists already: %w", s.id, client.ErrExists)
	}
	for other := range r.sandboxes {
		if err := distinct(s.id, other); err != nil {
			return err
		}
	}
	for other := range r.busy {
		if err := distinct(s.id, other); err != nil {
			return err
		}
	}
	r.sandboxes[s.id] = s
	return nil
}

// distinct fails if one id is the beginning of the other, which is another.
func distinct(a, b string) error {
	if a != b && (strings.HasPrefix(a, b) || strings.HasPrefix(b, a)) {
		return fmt.Errorf("fleet: %s and %s: %w", a, b, client.ErrAmbiguous)
	}
	return nil
}

// hold has the sandbox's id mean no other until release is called. It fails if the
// sandbox was deleted.
func (s *Sandbox) hold() (release func(), err error) {
	r := s.rt
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.sandboxes[s.id] != s {
		return nil, fmt.Errorf("fleet: sandbox %s was deleted: %w", s.id, client.ErrNotFound)
	}
	r.busy[s.id]++
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.busy[s.id]--; r.busy[s.id] == 0 {
			delete(r.busy, s.id)
		}
	}, nil
}

// command runs a runsc command that ends by itself and whose last argument but those
// of after is the sandbox's id.
func (s *Sandbox) command(ctx context.Context, args []string, after ...string) error {
	release, err := s.hold()
	if err != nil {
		return err
	}
	defer release()
	_, err = s.rt.client.Command(ctx, slices.Concat(args, []string{s.id}, after)...)
	return err
}

// spawn starts the attached runsc process and the goroutines around it.
func (s *Sandbox) spawn(cfg startConfig, args []string) error {
	argv := slices.Concat(cfg.launcher, []string{s.rt.binary}, s.rt.args(cfg.flags...), args)
	s.cmd = exec.Command(argv[0], argv[1:]...)
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	// Pipes of our own rather than exec's: deadlines then work on them, and
	// waiting for the process does not wait for the pipes.
	var ours, theirs []*os.File
	closeAll := func(fs []*os.File) {
		for _, f := range fs {
			f.Close()
		}
	}
	pipe := func() (rd, wr *os.File, err error) {
		if rd, wr, err = os.Pipe(); err != nil {
			closeAll(ours)
			closeAll(theirs)
			err = fmt.Errorf("fleet: %w", err)
		}
		return rd, wr, err
	}
	inR, inW, err := pipe()
	if err != nil {
		return err
	}
	theirs, ours = append(theirs, inR), append(ours, inW)
	outR, outW, err := pipe()
	if err != nil {
		return err
	}
	theirs, ours = append(theirs, outW), append(ours, outR)
	errR, errW, err := pipe()
	if err != nil {
		return err
	}
	theirs, ours = append(theirs, errW), append(ours, errR)

	s.cmd.Stdin, s.cmd.Stdout, s.cmd.Stderr = inR, outW, errW
	s.rt.logf("runsc %s", strings.Join(args, " "))
	err = s.rt.spawn.start(s.cmd)
	closeAll(theirs)
	if err != nil {
		closeAll(ours)
		return &CommandError{Command: args[0], Err: err}
	}
	s.addProcess(s.cmd.Process.Pid)
	// A crash from here on is covered by the record.
	if err := s.rt.saveRecord(); err != nil {
		s.rt.logf("%v", err)
	}

	if cfg.stdin != nil {
		go func() {
			io.Copy(inW, cfg.stdin)
			inW.Close()
		}()
	} else {
		s.stdin = inW
	}

	errSinks := []io.Writer{s.stderr}
	if cfg.stderr != nil {
		errSinks = append(errSinks, cfg.stderr)
	} else if s.rt.log != nil {
		errSinks = append(errSinks, logWriter{s.rt})
	}
	var readers sync.WaitGroup
	readers.Go(func() {
		defer errR.Close()
		io.Copy(io.MultiWriter(errSinks...), errR)
	})
	if cfg.stdout != nil {
		readers.Go(func() {
			defer outR.Close()
			io.Copy(cfg.stdout, outR)
		})
	} else {
		s.lines = make(chan string, 16)
		go s.readLines(outR)
	}

	go func() {
		s.waitErr = s.cmd.Wait()
		s.exitCode = s.cmd.ProcessState.ExitCode()
		if s.stdin != nil {
			s.stdin.Close()
		}
		// Output is complete before Wait returns; a process that still holds
		// the pipes (there should be none) cannot hold it up for long.
		done := make(chan struct{})
		go func() { readers.Wait(); close(done) }()
		select {
		case <-done:
		case <-time.After(2 * time.Second):
			errR.Close()
			outR.Close()
		}
		close(s.exited)
	}()
	return nil
}

// readLines feeds the line protocol until the guest's stdout ends.
func (s *Sandbox) readLines(f *os.File) {
	defer f.Close()
	defer close(s.lines)
	sc := bufio.NewScanner(f)
	sc.Buffer(make([]byte, 64<<10), maxLine)
	for sc.Scan() {
		select {
		case s.lines <- sc.Text():
		case <-s.stopRead:
			return
		}
	}
	if err := sc.Err(); err != nil && !errors.Is(err, os.ErrClosed) {
		s.rt.logf("sandbox %s: stdout: %v", s.id, err)
	}
}

// stateFile is the part of runsc's own state file that is used here.
type stateFile struct {
	Status   string `json:"status"`
	GoferPid int    `json:"goferPid"`
	Sandbox  struct {
		Pid int `json:"pid"`
	} `json:"sandbox"`
}

// waitRunning waits until runsc's state file says that the container runs. The
// file is read directly because starting `runsc state` over and over costs
// more than starting the sandbox.
func (s *Sandbox) waitRunning(ctx context.Context, command string) error {
	path := filepath.Join(s.rt.root, s.id+"_sandbox:"+s.id+".state")
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		var st stateFile
		if b, err := os.ReadFile(path); err == nil && json.Unmarshal(b, &st) == nil && st.Status == string(specs.StateRunning) {
			s.addProcess(st.Sandbox.Pid)
			s.addProcess(st.GoferPid)
			if err := s.rt.saveRecord(); err != nil {
				s.rt.logf("%v", err)
			}
			return nil
		}
		select {
		case <-s.exited:
			// Ended before it was seen running: either a quick command, or
			// runsc itself failed, for which it uses this code.
			if s.exitCode == runscFailed || s.exitCode < 0 {
				return &CommandError{Command: command, Err: s.waitErr, Stderr: s.stderr.String()}
			}
			return nil
		case <-ctx.Done():
			return &CommandError{Command: command, Err: ctx.Err(), Stderr: s.stderr.String()}
		case <-tick.C:
		}
	}
}

// runscFailed is the exit code runsc reserves for its own failures.
const runscFailed = 128

// ID returns the sandbox's id.
func (s *Sandbox) ID() string { return s.id }

// StartDuration is how long Run or Restore took until the guest ran.
func (s *Sandbox) StartDuration() time.Duration { return s.took }

// Stderr returns the last 64 KiB of what runsc and the guest wrote to stderr.
func (s *Sandbox) Stderr() string { return s.stderr.String() }

// Request sends one line to the guest's stdin and returns the next line of its
// stdout. If ctx ends first the reply is lost and replies can no longer be
// matched to requests: later requests fail.
func (s *Sandbox) Request(ctx context.Context, line string) (string, error) {
	s.reqMu.Lock()
	defer s.reqMu.Unlock()
	if err := s.writeLine(ctx, line); err != nil {
		return "", err
	}
	reply, err := s.readLine(ctx)
	if err != nil {
		s.desync = true
	}
	return reply, err
}

// WriteLine sends one line to the guest's stdin.
func (s *Sandbox) WriteLine(ctx context.Context, line string) error {
	s.reqMu.Lock()
	defer s.reqMu.Unlock()
	return s.writeLine(ctx, line)
}

// ReadLine returns the next line of the guest's stdout. After the last one it
// fails with an error that wraps io.EOF.
func (s *Sandbox) ReadLine(ctx context.Context) (string, error) {
	s.reqMu.Lock()
	defer s.reqMu.Unlock()
	return s.readLine(ctx)
}

// CloseStdin ends the guest's standard input.
func (s *Sandbox) CloseStdin() error {
	if s.stdin == nil {
		return nil
	}
	if err := s.stdin.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
		return fmt.Errorf("fleet: sandbox %s: %w", s.id, err)
	}
	return nil
}

func (s *Sandbox) writeLine(ctx context.Context, line string) error {
	if s.stdin == nil {
		return fmt.Errorf("fleet: sandbox %s: its stdin is fed by a reader", s.id)
	}
	if strings.ContainsRune(line, '\n') {
		return fmt.Errorf("fleet: sandbox %s: a request must be one line", s.id)
	}
	if s.desync {
		return fmt.Errorf("fleet: sandbox %s: an earlier request was abandoned, so replies can no longer be matched", s.id)
	}
	// The pipe may be full because the guest does not read.
	stop := context.AfterFunc(ctx, func() { s.stdin.SetWriteDeadline(time.Now()) })
	_, err := s.stdin.WriteString(line + "\n")
	stop()
	if err == nil {
		return nil
	}
	s.desync = true // part of the line may be on its way
	if ctx.Err() != nil {
		return fmt.Errorf("fleet: sandbox %s: sending a request: %w", s.id, ctx.Err())
	}
	if errors.Is(err, syscall.EPIPE) || errors.Is(err, os.ErrClosed) {
		return s.endedError()
	}
	return fmt.Errorf("fleet: sandbox %s: sending a request: %w", s.id, err)
}

func (s *Sandbox) readLine(ctx context.Context) (string, error) {
	if s.lines == nil {
		return "", fmt.Errorf("fleet: sandbox %s: its stdout goes to a writer", s.id)
	}
	select {
	case line, ok := <-s.lines:
		if !ok {
			return "", s.endedError()
		}
		return line, nil
	case <-ctx.Done():
		return "", fmt.Errorf("fleet: sandbox %s: waiting for a reply: %w", s.id, ctx.Err())
	}
}

// endedError says how the sandbox ended. It wraps io.EOF.
func (s *Sandbox) endedError() error {
	select {
	case <-s.exited:
	case <-time.After(2 * time.Second):
		return fmt.Errorf("fleet: sandbox %s closed its standard streams but still runs: %w", s.id, io.EOF)
	}
	msg := fmt.Sprintf("fleet: sandbox %s ended with exit code %d", s.id, s.exitCode)
	if t := strings.TrimSpace(s.stderr.String()); t != "" {
		msg += ": " + t
	}
	return fmt.Errorf("%s: %w", msg, io.EOF)
}

// ExecResult is the outcome of a command run inside a sandbox.
type ExecResult = client.ExecResult

// ExecSpec describes a command to run inside a sandbox.
type ExecSpec = client.ExecOptions

// Exec runs a command inside the sandbox and waits for it. A non-zero exit
// code is not an error.
func (s *Sandbox) Exec(ctx context.Context, args ...string) (ExecResult, error) {
	return s.ExecCommand(ctx, ExecSpec{Args: args})
}

// ExecCommand is Exec with more control: see client.Client.Exec. If ctx ends first
// the command goes on in the sandbox, where a test can look at what hangs.
func (s *Sandbox) ExecCommand(ctx context.Context, e ExecSpec) (ExecResult, error) {
	e.LeaveRunning = true
	release, err := s.hold()
	if err != nil {
		return ExecResult{}, err
	}
	defer release()
	return s.rt.client.Exec(ctx, s.id, e)
}

// CheckpointOptions adjust Checkpoint.
type CheckpointOptions struct {
	// LeaveRunning keeps the sandbox running afterwards.
	LeaveRunning bool
	// Compression of the image: "none" (the default: only such an image can
	// serve as a template) or "flate-best-speed".
	Compression string
	// ExcludeZeroPages leaves committed pages that hold only zeros out.
	ExcludeZeroPages bool
}

// Checkpoint saves the sandbox to imageDir, which is created. Unless
// LeaveRunning is set the sandbox has ended when it returns.
func (s *Sandbox) Checkpoint(ctx context.Context, imageDir string, o CheckpointOptions) error {
	if err := os.MkdirAll(imageDir, 0o755); err != nil {
		return fmt.Errorf("fleet: checkpoint: %w", err)
	}
	if o.Compression == "" {
		o.Compression = "none"
	}
	args := []string{"checkpoint", "--compression=" + o.Compression, "--image-path", imageDir}
	if o.LeaveRunning {
		args = append(args, "--leave-running")
	}
	if o.ExcludeZeroPages {
		args = append(args, "--exclude-committed-zero-pages")
	}
	if err := s.command(ctx, args); err != nil {
		return err
	}
	if !o.LeaveRunning {
		if _, err := s.Wait(ctx); err != nil {
			return err
		}
	}
	return nil
}

// Stats asks the sandbox's memory backend what it holds.
func (s *Sandbox) Stats(ctx context.Context) (control.Stats, error) {
	return agentzip(ctx, s, s.rt.client.Stats)
}

// Evict forces everything eligible out of guest memory and reports.
func (s *Sandbox) Evict(ctx context.Context) (control.EvictReport, error) {
	return agentzip(ctx, s, s.rt.client.Evict)
}

// Check runs the online consistency check. Problems found are in the report,
// not in the error.
func (s *Sandbox) Check(ctx context.Context) (control.CheckReport, error) {
	return agentzip(ctx, s, s.rt.client.Check)
}

func agentzip[T any](ctx context.Context, s *Sandbox, f func(ctx context.Context, id string) (T, error)) (v T, err error) {
	release, err := s.hold()
	if err != nil {
		return v, err
	}
	v, err = f(ctx, s.id)
	release()
	return v, s.explain(err)
}

// explain adds to the failure of an agentzip command what the Runtime knows.
func (s *Sandbox) explain(err error) error {
	if err == nil {
		return nil
	}
	if errors.Is(err, ErrNoAgentzip) {
		return fmt.Errorf("fleet: %s: %w", s.rt.binary, ErrNoAgentzip)
	}
	// If the sandbox just died, how it died is the better message; the
	// attached runsc notices a moment later than its control socket.
	select {
	case <-s.exited:
		return errors.Join(err, s.endedError())
	case <-time.After(500 * time.Millisecond):
		return err
	}
}

// Wait waits until the sandbox has ended and returns the container's exit
// code. Everything written to WithOutput has arrived by then.
func (s *Sandbox) Wait(ctx context.Context) (int, error) {
	select {
	case <-s.exited:
	case <-ctx.Done():
		return 0, fmt.Errorf("fleet: sandbox %s: %w", s.id, ctx.Err())
	}
	if s.exitCode < 0 {
		return s.exitCode, &CommandError{Command: "run", Err: s.waitErr, Stderr: s.stderr.String()}
	}
	return s.exitCode, nil
}

// Exited reports whether the sandbox has ended.
func (s *Sandbox) Exited() bool {
	select {
	case <-s.exited:
		return true
	default:
		return false
	}
}

// Signal sends a signal, e.g. "TERM", to the container's init process.
func (s *Sandbox) Signal(ctx context.Context, sig string) error {
	return s.command(ctx, []string{"kill"}, sig)
}

// Kill ends the sandbox at once and waits for it.
func (s *Sandbox) Kill(ctx context.Context) error {
	if s.Exited() {
		return nil
	}
	err := s.Signal(ctx, "KILL")
	select {
	case <-s.exited:
		return nil
	case <-time.After(10 * time.Second):
	case <-ctx.Done():
	}
	// runsc could not, or the sandbox does not react.
	for _, p := range s.ownProcesses() {
		p.kill()
	}
	select {
	case <-s.exited:
		return nil
	case <-time.After(10 * time.Second):
		return fmt.Errorf("fleet: sandbox %s does not end: %w", s.id, err)
	}
}

// Delete ends the sandbox if it still runs and removes every trace of it. It
// may be called more than once.
func (s *Sandbox) Delete(ctx context.Context) error {
	s.deleteOnce.Do(func() { s.deleteErr = s.delete(ctx) })
	return s.deleteErr
}

func (s *Sandbox) delete(ctx context.Context) error {
	close(s.stopRead)
	if s.cmd == nil || s.cmd.Process == nil {
		s.rt.forget(s)
		return nil
	}
	// -force kills; a container that is gone already is no error to it.
	err := s.command(ctx, []string{"delete", "-force"})
	select {
	case <-s.exited:
	case <-time.After(10 * time.Second):
	}
	// Whatever is left. Normally nothing.
	for _, p := range s.ownProcesses() {
		p.kill()
	}
	select {
	case <-s.exited:
	case <-time.After(10 * time.Second):
		return fmt.Errorf("fleet: sandbox %s: its runsc process %d does not end", s.id, s.cmd.Process.Pid)
	}
	s.rt.forget(s)
	return err
}

// forget drops a sandbox from the Runtime's books.
func (r *Runtime) forget(s *Sandbox) {
	r.mu.Lock()
	if r.sandboxes[s.id] == s {
		delete(r.sandboxes, s.id)
	}
	r.mu.Unlock()
	if err := r.saveRecord(); err != nil {
		r.logf("%v", err)
	}
}

// Processes of a sandbox, in the order they are recorded.
const (
	procRunsc   = iota // the attached runsc run/restore
	procSandbox        // the Sentry
	procGofer
)

func (s *Sandbox) addProcess(pid int) {
	p := processID{}
	if pid > 0 {
		p = identify(pid)
	}
	s.procMu.Lock()
	s.processes = append(s.processes, p)
	s.procMu.Unlock()
}

func (s *Sandbox) ownProcesses() []processID {
	s.procMu.Lock()
	defer s.procMu.Unlock()
	return append([]processID(nil), s.processes...)
}

// Pid returns the process id of the sandbox (the Sentry), 0 if it never ran.
func (s *Sandbox) Pid() int {
	if ps := s.ownProcesses(); len(ps) > procSandbox {
		return ps[procSandbox].PID
	}
	return 0
}

// GoferPid returns the process id of the gofer, 0 if there is none.
func (s *Sandbox) GoferPid() int {
	if ps := s.ownProcesses(); len(ps) > procGofer {
		return ps[procGofer].PID
	}
	return 0
}

// tailBuffer keeps the last bytes written to it.
type tailBuffer struct {
	limit int
	mu    sync.Mutex
	buf   []byte
}

func (t *tailBuffer) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.buf = append(t.buf, p...)
	if n := len(t.buf) - t.limit; n > 0 {
		t.buf = append(t.buf[:0], t.buf[n:]...)
	}
	return len(p), nil
}

func (t *tailBuffer) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(t.buf)
}
