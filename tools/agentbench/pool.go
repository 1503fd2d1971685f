package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"

	"runsc-agentzip/pkg/control"
	"runsc-agentzip/pkg/fleet"
)

const (
	// poolFlag is the runsc flag without which a runtime knows no page pool.
	poolFlag = "agentzip-pool"
	// poolDomain is the dedup domain of all sandboxes of a run.
	poolDomain = "agentbench"
	poolSocket = "pool.sock"
	// socketMax is what the path of a pool's socket must stay below, in bytes.
	socketMax = 100
	// poolStart is the longest time that a pool takes to accept connections,
	// poolGrace the time that it gets to end before it is killed.
	poolStart = 10 * time.Second
	poolGrace = 5 * time.Second
)

// pagePool is a running page pool of the runtime under test, for the sandboxes of
// one episode. It dies with this process, however that ends.
type pagePool struct {
	dir    string // nothing else is in it; removed at the end
	socket string
	grace  time.Duration
	cmd    *exec.Cmd
	output tailBuffer
	exited chan struct{} // closed when it has ended, after which cmd has its state

	stopOnce sync.Once
	killed   bool
	stopErr  error
}

// poolFlags are the runsc flags that make a sandbox use the pool at a socket.
func poolFlags(socket string) []string {
	return []string{"--" + poolFlag + "=" + socket, "--agentzip-domain=" + poolDomain}
}

// startPagePool starts a pool with its socket in dir, which it makes, and waits
// until it accepts connections. What the pool says goes to log, too, if that is
// not nil.
func startPagePool(ctx context.Context, binary, dir string, log io.Writer) (*pagePool, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	p := &pagePool{dir: dir, socket: filepath.Join(dir, poolSocket), grace: poolGrace, exited: make(chan struct{})}
	if n := len(p.socket); n >= socketMax {
		return nil, fmt.Errorf("the path of the page pool's socket, %s, has %d bytes and must have less than %d: use a shorter --work", p.socket, n, socketMax)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("page pool: %w", err)
	}
	p.cmd = exec.Command(binary, "agentzip", "pool", "serve", "--socket="+p.socket)
	var out io.Writer = &p.output
	if log != nil {
		out = io.MultiWriter(out, log)
	}
	p.cmd.Stdout, p.cmd.Stderr = out, out
	// A Ctrl-C on the terminal is for this program, which then ends the pool.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	p.cmd.WaitDelay = time.Second
	started := make(chan error)
	go func() {
		// Pdeathsig is sent when the thread that forked ends: it lives as long
		// as the pool.
		runtime.LockOSThread()
		err := p.cmd.Start()
		started <- err
		if err == nil {
			p.cmd.Wait()
			close(p.exited)
		}
	}()
	if err := <-started; err != nil {
		return nil, errors.Join(fmt.Errorf("starting the page pool: %w", err), os.RemoveAll(dir))
	}
	if err := p.awaitSocket(ctx); err != nil {
		_, serr := p.stop()
		return nil, errors.Join(err, serr)
	}
	return p, nil
}

// awaitSocket waits until the pool accepts a connection.
func (p *pagePool) awaitSocket(ctx context.Context) error {
	limit := time.NewTimer(poolStart)
	defer limit.Stop()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		c, err := net.Dial("unixpacket", p.socket)
		if err == nil {
			c.Close()
			return nil
		}
		select {
		case <-p.exited:
			return p.alive()
		case <-ctx.Done():
			return ctx.Err()
		case <-limit.C:
			return fmt.Errorf("the page pool does not accept connections after %v: %w%s", poolStart, err, p.said())
		case <-tick.C:
		}
	}
}

// flags are the runsc flags of the sandboxes that use the pool.
func (p *pagePool) flags() []string { return poolFlags(p.socket) }

// alive is an error if the pool has ended.
func (p *pagePool) alive() error {
	select {
	case <-p.exited:
		return fmt.Errorf("the page pool ended: %v%s", p.cmd.ProcessState, p.said())
	default:
		return nil
	}
}

// said is the end of what the pool wrote, to be appended to an error.
func (p *pagePool) said() string {
	if text := strings.TrimSpace(p.output.String()); text != "" {
		return "; it said: " + text
	}
	return ""
}

// CPUTime is the processor time that the pool has taken.
func (p *pagePool) CPUTime() (time.Duration, error) {
	t, err := fleet.ProcessCPUTime(p.cmd.Process.Pid)
	if err != nil {
		return 0, p.why(err)
	}
	return t, nil
}

// measure measures the pool, which serves the sandboxes. template is the file of
// the template that they share, if they do.
func (p *pagePool) measure(template *fleet.TemplateMemory, sandboxes []*fleet.Sandbox) (*fleet.PoolMemory, error) {
	file := ""
	if template != nil {
		file = template.File
	}
	m, err := fleet.MeasurePool(p.cmd.Process.Pid, file, sandboxes)
	if err != nil {
		return nil, p.why(err)
	}
	return &m, nil
}

// why explains an error that the pool's end may have caused.
func (p *pagePool) why(err error) error {
	// Its end is noticed a moment later than /proc shows it.
	select {
	case <-p.exited:
		return p.alive()
	case <-time.After(100 * time.Millisecond):
		return err
	}
}

// stop ends the pool and removes its directory. It reports whether the pool had
// to be killed. It may be called more than once.
func (p *pagePool) stop() (killed bool, err error) {
	p.stopOnce.Do(func() {
		defer func() { p.stopErr = errors.Join(p.stopErr, os.RemoveAll(p.dir)) }()
		// That it has ended already is no error here.
		p.cmd.Process.Signal(syscall.SIGTERM)
		select {
		case <-p.exited:
			return
		case <-time.After(p.grace):
		}
		p.killed = true
		p.cmd.Process.Kill()
		select {
		case <-p.exited:
		case <-time.After(poolGrace):
			p.stopErr = fmt.Errorf("the page pool, process %d, does not end", p.cmd.Process.Pid)
		}
	})
	return p.killed, p.stopErr
}

// notConnected says why a sandbox has no connection to the pool, or nothing if it
// has one.
func notConnected(p control.Pool) string {
	switch {
	case p.State == "connected":
		return ""
	case p.Reason != "":
		return p.State + ": " + p.Reason
	}
	return cmp.Or(p.State, "its stats do not tell")
}

// tailBuffer keeps the end of what is written to it.
type tailBuffer struct {
	mu  sync.Mutex
	buf []byte
}

// tailMost is how many bytes a tailBuffer keeps.
const tailMost = 4 << 10

func (t *tailBuffer) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.buf = append(t.buf, b...)
	if n := len(t.buf) - tailMost; n > 0 {
		t.buf = append(t.buf[:0], t.buf[n:]...)
	}
	return len(b), nil
}

func (t *tailBuffer) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(t.buf)
}
