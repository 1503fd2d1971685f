// Package attach connects sandboxes with the host: with its page pool, and with the
// files that tell how scarce memory is (memory.go). It runs outside of them: in the
// command that starts or restores one, and in the pool.
//
// The sandbox has no way to the pool's socket of its own. Whoever attaches it
// connects, says in the Hello which domain and template it belongs to, and hands
// the connection over through the sandbox's control socket. The pool thereby
// knows the domain from somebody it can trust, whatever the sandbox says later.
//
// A Registration beside the socket says the same of each sandbox that may be
// attached, until it is deleted. A pool reads them when it starts, so sandboxes find
// their way to one that was started, or started again, after them.
//
// Nothing here is needed for a sandbox to run. What fails is a warning.
package attach

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/log"
	"gvisor.dev/gvisor/pkg/urpc"
	"gvisor.dev/gvisor/runsc/config"
	"gvisor.dev/gvisor/runsc/sandbox"
	"gvisor.dev/gvisor/runsc/specutils"

	"runsc-agentzip/pkg/pool/wire"
)

const (
	// answerTimeout is how long a pool may take to answer a Hello.
	answerTimeout = time.Second
	// startTimeout is how long a pool may take to start.
	startTimeout = 2 * time.Second
	// retryPause is how long to wait before another try to connect.
	retryPause = 10 * time.Millisecond
	// maxReason is how much of a refusal is shown, in bytes.
	maxReason = 1000
	// IdleExit is when a pool that was started on demand ends.
	IdleExit = 10 * time.Minute
)

// Args is the argument of the method Agentzip.Attach of a sandbox: the
// connection, whose Hello was sent, is the only file.
type Args struct {
	urpc.FilePayload
	// Domain and Template are what the Hello says. The sandbox refuses a
	// connection that is not for its own.
	Domain, Template string
}

// Started implements sandbox.AgentzipStarted.
func Started(conf *config.Config, s *sandbox.Sandbox, image sandbox.AgentzipImage) {
	if !conf.Agentzip {
		return
	}
	giveMemory(s)
	socket := conf.AgentzipPool
	switch {
	case conf.AgentzipDomain == "":
		if socket != "" {
			log.Debugf("agentzip: no --agentzip-domain (annotation dev.agentzip.domain), so sandbox %q shares nothing through the pool", s.ID)
		}
		return
	case socket == "":
		warn("sandbox %q shares nothing: it has a domain, but the runtime no pool: start one with \"agentzip pool serve --socket=PATH\" and give the runtime --agentzip-pool=PATH", s.ID)
		return
	}
	if err := start(conf, s, image); err != nil {
		warn("sandbox %q shares nothing through the pool at %s, and runs on without: %v", s.ID, socket, err)
	}
}

// warn tells of a failure that is none of the container's.
func warn(format string, args ...any) {
	msg := "agentzip: " + fmt.Sprintf(format, args...)
	log.Warningf("%s", msg)
	fmt.Fprintf(os.Stderr, "runsc-agentzip: warning: %s\n", msg)
}

func start(conf *config.Config, s *sandbox.Sandbox, image sandbox.AgentzipImage) error {
	root, err := filepath.Abs(conf.RootDir)
	if err != nil {
		return err
	}
	r := Registration{Root: root, Greeting: wire.Greeting{
		Version:  wire.Version,
		Name:     s.ID,
		Sandbox:  s.ID + " below " + root,
		Domain:   conf.AgentzipDomain,
		Template: image.Digest,
	}}
	if image.Digest != "" {
		if r.TemplateDir, err = filepath.Abs(image.Dir); err != nil {
			return err
		}
	}
	if r.Process, err = processOf(s.Pid.Load()); err != nil {
		return err
	}
	// First, so that a pool that starts now attaches it if this fails.
	if err := r.Write(conf.AgentzipPool); err != nil {
		// There may be one of an earlier sandbox with this ID.
		_ = os.Remove(r.path(conf.AgentzipPool))
		return err
	}
	s.AgentzipRegistration = r.path(conf.AgentzipPool)
	conn, err := connect(conf.AgentzipPool, &r.Greeting)
	if err != nil && absent(err) && conf.AgentzipPoolStart {
		conn, err = startPool(conf.AgentzipPool, &r.Greeting)
	}
	if err != nil {
		return explain(conf.AgentzipPool, err)
	}
	defer conn.Close()
	return Donate(s, conn, &r.Greeting)
}

// Donate gives a connection, whose greeting was g, to a sandbox. The caller keeps
// its own copy.
func Donate(s *sandbox.Sandbox, conn *os.File, g *wire.Greeting) error {
	args := &Args{FilePayload: urpc.FilePayload{Files: []*os.File{conn}}, Domain: g.Domain, Template: g.Template}
	if err := s.Call("Agentzip.Attach", args, nil); err != nil {
		return fmt.Errorf("handing the connection over: %w", err)
	}
	return nil
}

// absent tells whether an attempt to connect failed because there is no pool.
func absent(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ECONNREFUSED)
}

// explain adds what to do about a failed attempt to connect.
func explain(socket string, err error) error {
	switch {
	case absent(err):
		return fmt.Errorf("%w: start one with \"runsc-agentzip agentzip pool serve --socket=%s\", which the sandbox then joins, or give the runtime --agentzip-pool-start", err, socket)
	case errors.Is(err, unix.EPROTOTYPE):
		return fmt.Errorf("%w: another program listens there: give --agentzip-pool another path", err)
	case errors.Is(err, unix.EACCES) || errors.Is(err, unix.EPERM):
		return fmt.Errorf("%w: only root and the pool's own user may use it", err)
	}
	return err
}

// connect connects to a pool, greets it and looks at its answer, which it
// leaves for the sandbox to receive. The connection blocks, so that taking its
// descriptor out of an os.File, here and in the sandbox, changes nothing about it.
func connect(socket string, g *wire.Greeting) (*os.File, error) {
	fd, err := Dial(socket)
	if err != nil {
		return nil, err
	}
	err = greet(fd, g)
	if err == nil {
		err = os.NewSyscallError("fcntl", unix.SetNonblock(fd, false))
	}
	if err != nil {
		unix.Close(fd)
		return nil, err
	}
	return os.NewFile(uintptr(fd), socket), nil
}

// Dial connects to the pool's socket. The descriptor does not block.
func Dial(socket string) (int, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return -1, os.NewSyscallError("socket", err)
	}
	for end := time.Now().Add(answerTimeout); ; time.Sleep(retryPause) {
		err = unix.Connect(fd, &unix.SockaddrUnix{Name: socket})
		// Not yet accepted ones fill the queue.
		if err != unix.EINTR && (err != unix.EAGAIN || time.Now().After(end)) {
			break
		}
	}
	if err != nil {
		unix.Close(fd)
		return -1, os.NewSyscallError("connect", err)
	}
	// Pages come from whoever listens: not from just anybody.
	cred, err := unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
	if err == nil && cred.Uid != 0 && int(cred.Uid) != os.Geteuid() {
		err = fmt.Errorf("the program that listens belongs to user %d: a pool has to be root's", cred.Uid)
	}
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// greet sends the Hello and waits for the Welcome.
func greet(fd int, g *wire.Greeting) error {
	var w wire.Writer
	if err := g.Hello(&w); err != nil {
		return err
	}
	if err := wire.Send(fd, w.Bytes(), -1); err != nil {
		return fmt.Errorf("greeting the pool: %w", err)
	}
	if err := await(fd); err != nil {
		return err
	}
	buf := make([]byte, wire.MaxMessage)
	n, _, err := unix.Recvfrom(fd, buf, unix.MSG_PEEK|unix.MSG_DONTWAIT)
	if err != nil {
		return fmt.Errorf("the pool's answer: %w", err)
	}
	if n == 0 {
		return errors.New("the pool ended the connection at once: see its log")
	}
	m, err := wire.Parse(buf[:n])
	switch {
	case err != nil:
		return fmt.Errorf("what listens there is no pool: %w", err)
	case m.Type == wire.Refuse:
		return fmt.Errorf("the pool refused: %q", m.Body[:min(len(m.Body), maxReason)])
	case m.Type != wire.Welcome:
		return fmt.Errorf("what listens there is no pool of this version: it answers with %v", m.Type)
	}
	return nil
}

// await waits until there is something to receive.
func await(fd int) error {
	for end := time.Now().Add(answerTimeout); ; {
		left := time.Until(end)
		if left < 0 {
			return fmt.Errorf("no answer within %v: the pool is overloaded (it attaches sandboxes later), or what listens there is none", answerTimeout)
		}
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, int(left/time.Millisecond)+1)
		if err != nil && err != unix.EINTR {
			return os.NewSyscallError("poll", err)
		}
		if n > 0 {
			return nil
		}
	}
}

// startPool starts a pool that lives on, and connects to it as soon as it can.
func startPool(socket string, g *wire.Greeting) (*os.File, error) {
	if err := MakeParent(socket); err != nil {
		return nil, err
	}
	name := socket + ".log"
	out, err := os.OpenFile(name, os.O_CREATE|os.O_APPEND|os.O_WRONLY|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("starting a pool: %w", err)
	}
	defer out.Close()
	// It must not keep alive what it happens to inherit.
	if err := sandbox.SetCloExeOnAllFDs(); err != nil {
		return nil, fmt.Errorf("starting a pool: %w", err)
	}
	cmd := exec.Command(specutils.ExePath, "agentzip", "pool", "serve", "--socket="+socket, fmt.Sprintf("--idle-exit=%v", IdleExit), fmt.Sprintf("--max-bytes=%d", onDemandBytes()))
	cmd.Args[0] = "runsc-agentzip"
	cmd.Dir = "/"
	cmd.Stderr = out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("starting a pool: %w", err)
	}
	log.Infof("agentzip: started a pool at %s, pid %d", socket, cmd.Process.Pid)
	// One that ends at once, because another was quicker, is no zombie.
	go func() { _ = cmd.Wait() }()
	for end := time.Now().Add(startTimeout); ; time.Sleep(retryPause) {
		conn, err := connect(socket, g)
		if err == nil || !absent(err) {
			return conn, err
		}
		if time.Now().After(end) {
			return nil, fmt.Errorf("the pool that was started does not answer after %v: %s says why", startTimeout, name)
		}
	}
}

// onDemandBytes limits a pool that nobody has configured, to a quarter of the
// host's memory.
func onDemandBytes() uint64 {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return 4 << 30
	}
	return info.Totalram * uint64(info.Unit) / 4
}

// MakeParent makes the folder that the socket is to be in, for root only.
func MakeParent(socket string) error {
	return os.MkdirAll(filepath.Dir(socket), 0o700)
}

// Ask sends a pool a command, "stats" or "drain", and returns its report.
func Ask(socket, command string) ([]byte, error) {
	fd, err := Dial(socket)
	if err != nil {
		return nil, explain(socket, err)
	}
	defer unix.Close(fd)
	var w wire.Writer
	w.Begin(wire.Admin, 0)
	w.Body([]byte(command))
	if err := wire.Send(fd, w.Bytes(), -1); err != nil {
		return nil, fmt.Errorf("asking the pool: %w", err)
	}
	if err := await(fd); err != nil {
		return nil, err
	}
	buf := make([]byte, wire.MaxMessage)
	n, got, err := wire.Receive(fd, buf)
	if err != nil {
		return nil, fmt.Errorf("the pool's answer: %w", err)
	}
	if got >= 0 {
		unix.Close(got)
	}
	m, err := wire.Parse(buf[:n])
	switch {
	case err != nil:
		return nil, fmt.Errorf("what listens there is no pool: %w", err)
	case m.Type == wire.Refuse:
		return nil, fmt.Errorf("the pool refused: %q", m.Body[:min(len(m.Body), maxReason)])
	case m.Type != wire.Report:
		return nil, fmt.Errorf("what listens there is no pool of this version: it answers with %v", m.Type)
	}
	return m.Body, nil
}
