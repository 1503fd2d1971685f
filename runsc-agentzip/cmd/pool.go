package cmd

import (
	"encoding/json"
	"errors"
	goflag "flag"
	"fmt"
	"io"
	"io/fs"
	stdlog "log"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/google/subcommands"
	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/runsc/cmd/util"
	"gvisor.dev/gvisor/runsc/config"
	"gvisor.dev/gvisor/runsc/container"
	"gvisor.dev/gvisor/runsc/flag"

	"runsc-agentzip/memfile/template"
	"runsc-agentzip/pkg/control"
	"runsc-agentzip/pkg/pool/server"
	"runsc-agentzip/pkg/pool/wire"
	"runsc-agentzip/runsc-agentzip/attach"
)

// poolUsage is what "agentzip pool" says of itself.
const poolUsage = `agentzip pool serve --socket=PATH [flags] - keep, once, the pages that sandboxes have in common
agentzip pool stats [-json]                - what the pool holds
agentzip pool drain                        - have the pool take no more pages; those in use stay

  --socket=PATH          the pool's socket, an absolute path (default: the flag --agentzip-pool;
                         of stats and drain without that /run/runsc-agentzip/pool.sock)
  --max-bytes=N          serve: memory that the pool may hold, in bytes; 0 (default) is no limit
  --domain-max-bytes=N   serve: the same for each domain
  --keep=TIME            serve: how long a page that no sandbox refers to is kept (default 10s)
  --idle-exit=TIME       serve: end when there has been no sandbox for so long (default 0: never)
  -json                  print JSON

Sandboxes take part that were started with --agentzip-pool=PATH and a domain
(--agentzip-domain, annotation dev.agentzip.domain), before or after the pool.
Pages are shared only within a domain and among clones of one template.
`

// poolFlags are the flags of the commands of "agentzip pool".
type poolFlags struct {
	json     bool
	socket   string
	max      uint64
	perDom   uint64
	keep     time.Duration
	idleExit time.Duration
}

// maxSocket is the length of the longest path of a socket, in bytes: see
// --agentzip-pool.
const maxSocket = 99

// pool runs "agentzip pool" with the arguments that follow it.
func (a *Agentzip) pool(conf *config.Config, args []string) subcommands.ExitStatus {
	if len(args) == 0 {
		fmt.Fprint(os.Stderr, poolUsage)
		return subcommands.ExitUsageError
	}
	command := args[0]
	p := poolFlags{json: a.json}
	f := flag.NewFlagSet("agentzip pool "+command, flag.ContinueOnError)
	f.Usage = func() { fmt.Fprint(os.Stderr, poolUsage) }
	f.StringVar(&p.socket, "socket", conf.AgentzipPool, "the pool's socket")
	var run func() error
	switch command {
	case "serve":
		f.Uint64Var(&p.max, "max-bytes", 0, "memory that the pool may hold")
		f.Uint64Var(&p.perDom, "domain-max-bytes", 0, "memory that the pool may hold for a domain")
		f.DurationVar(&p.keep, "keep", server.DefaultKeep, "how long an unused page is kept")
		f.DurationVar(&p.idleExit, "idle-exit", 0, "end without sandboxes")
		run = p.serve
	case "stats":
		f.BoolVar(&p.json, "json", p.json, "print JSON")
		run = func() error { return p.stats(os.Stdout) }
	case "drain":
		run = func() error {
			_, err := attach.Ask(p.socket, "drain")
			return err
		}
	default:
		util.Fatalf("agentzip pool: unknown command %q: there are serve, stats and drain", command)
	}
	if err := f.Parse(args[1:]); err != nil {
		if errors.Is(err, goflag.ErrHelp) {
			return subcommands.ExitSuccess
		}
		return subcommands.ExitUsageError
	}
	if f.NArg() != 0 {
		util.Fatalf("agentzip pool %s: want flags only, got %q", command, f.Arg(0))
	}
	if p.socket == "" && command != "serve" {
		p.socket = defaultPool
	}
	err := p.check()
	if err == nil {
		err = run()
	}
	if err != nil {
		util.Fatalf("agentzip pool %s: %v", command, err)
	}
	return subcommands.ExitSuccess
}

func (p *poolFlags) check() error {
	switch {
	case p.socket == "":
		return errors.New("--socket=PATH is missing")
	case !filepath.IsAbs(p.socket):
		return fmt.Errorf("--socket=%s: must be an absolute path", p.socket)
	case len(p.socket) > maxSocket:
		return fmt.Errorf("--socket=%s: the path has %d bytes, and can have %d: use a shorter one, below /run for instance", p.socket, len(p.socket), maxSocket)
	case p.keep < 0:
		return fmt.Errorf("--keep=%v: must not be negative", p.keep)
	case p.idleExit < 0:
		return fmt.Errorf("--idle-exit=%v: must not be negative", p.idleExit)
	}
	return nil
}

func (p *poolFlags) stats(w io.Writer) error {
	b, err := attach.Ask(p.socket, "stats")
	if err != nil {
		return err
	}
	var s server.Stats
	if err := json.Unmarshal(b, &s); err != nil {
		return fmt.Errorf("the pool's report: %w", err)
	}
	if p.json {
		return printJSON(w, &s)
	}
	return printPool(w, &s)
}

// printPool writes s for people.
func printPool(w io.Writer, s *server.Stats) error {
	var b strings.Builder
	state := "serving"
	if s.Drained {
		state = "drained"
	}
	row := func(name, format string, args ...any) {
		fmt.Fprintf(&b, "%-12s %s\n", name, fmt.Sprintf(format, args...))
	}
	t := &s.Total
	row("pool", "%s, %d clients in %d domains, %d segments", state, t.Clients, len(s.Domains)+s.OmittedDomains, t.Segments)
	usage := func(name string, u *server.Usage) {
		row(name, "%d pages, %s held: in use %s, unused %s, index %s; own bookkeeping %s: %d candidates %s, sketches %s, patterns %s, connections %s",
			u.Pages, control.Size(u.Bytes), control.Size(u.ReferencedBytes), control.Size(u.UnreferencedBytes), control.Size(u.IndexBytes),
			control.Size(u.HeapBytes), u.Candidates, control.Size(u.CandidateBytes), control.Size(u.SketchBytes),
			control.Size(u.PatternBytes), control.Size(u.ConnectionBytes))
	}
	usage("total", t)
	row("so far", "%d offers, %d of them known; %d pages asked for, %d taken, %d without a small form, %d without room; %d offers ignored, %d violations",
		t.Offers, t.Hits, t.Wanted, t.Published, t.Rejected, t.Full, t.Ignored, t.Violations)
	row("compaction", "%d segments given up, %d pages moved, %d dropped", t.Retired, t.Moved, t.Dropped)
	for i := range s.Domains {
		usage(s.Domains[i].Name, &s.Domains[i].Usage)
		row("", "%d clients, template in use: %v", s.Domains[i].Clients, s.Domains[i].Template)
	}
	if s.OmittedDomains != 0 {
		row("", "%d more domains, which hold less", s.OmittedDomains)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

const (
	// poolNice is the pool's nice value: sandboxes go first.
	poolNice = 10
	// poolFiles is how many descriptors a pool should be able to have: one for
	// each sandbox and segment.
	poolFiles = 1 << 20
	// lockTimeout is how long a pool that is ending may take to give way.
	lockTimeout = 1500 * time.Millisecond
	// joinTimeout is for how long a sandbox is waited for that is to be
	// attached, before the next one's turn.
	joinTimeout = 2 * time.Second
	// joinEvery is how often sandboxes are looked for that are not attached,
	// and joinFirst how often in the first joinSettle of a pool: it may have
	// been started by one that is still being started.
	joinEvery  = time.Minute
	joinFirst  = 2 * time.Second
	joinSettle = 20 * time.Second
)

// A daemon is "agentzip pool serve".
type daemon struct {
	socket string
	srv    *server.Server
	log    *stdlog.Logger

	// mu protects what follows. It is a leaf.
	mu sync.Mutex
	// joining are the registrations that a goroutine attaches.
	joining map[string]bool
	// said is the last failure to attach, by registration.
	said map[string]string
}

// serve is "agentzip pool serve".
func (p *poolFlags) serve() error {
	d := &daemon{
		socket:  p.socket,
		log:     stdlog.New(os.Stderr, "", stdlog.LstdFlags),
		joining: make(map[string]bool),
		said:    make(map[string]string),
	}
	if err := attach.MakeParent(p.socket); err != nil {
		return err
	}
	lock, err := lockSocket(p.socket)
	if err != nil {
		return err
	}
	defer lock.Close()
	l, err := listen(p.socket)
	if err != nil {
		return err
	}
	defer l.Close()
	d.prepareProcess()
	d.srv = server.New(server.Options{
		MaxBytes:       p.max,
		DomainMaxBytes: p.perDom,
		Keep:           p.keep,
		OpenTemplate:   d.openTemplate,
		Quiet:          collect,
		Log:            d.log.Printf,
	})
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	served := make(chan error, 1)
	go func() { served <- d.srv.Serve(l) }()
	stop := make(chan struct{})
	defer close(stop)
	go d.joinAll(stop)
	d.log.Printf("serving at %s, pid %d", p.socket, os.Getpid())
	select {
	case s := <-signals:
		d.log.Printf("%v: ending; sandboxes keep what they have", s)
	case <-d.idle(p.idleExit, stop):
		d.log.Printf("no sandbox for %v: ending", p.idleExit)
	case err := <-served:
		_ = d.srv.Close()
		if err == nil {
			err = errors.New("the socket was closed")
		}
		return err
	}
	return errors.Join(d.srv.Close(), <-served)
}

// lockSocket keeps other pools away from the socket as long as the file is open.
func lockSocket(socket string) (*os.File, error) {
	name := socket + ".lock"
	f, err := os.OpenFile(name, os.O_CREATE|os.O_RDWR|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	for end := time.Now().Add(lockTimeout); ; time.Sleep(50 * time.Millisecond) {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return f, nil
		}
		if err != unix.EWOULDBLOCK && err != unix.EINTR {
			f.Close()
			return nil, fmt.Errorf("locking %s: %w", name, err)
		}
		// Its holder may be about to end.
		if answers(socket) || time.Now().After(end) {
			f.Close()
			return nil, fmt.Errorf("another pool serves %s (it holds %s): use that one, or end it first", socket, name)
		}
	}
}

// answers tells whether somebody listens on the socket.
func answers(socket string) bool {
	fd, err := attach.Dial(socket)
	if err != nil {
		return errors.Is(err, unix.EPROTOTYPE) || errors.Is(err, unix.EAGAIN)
	}
	unix.Close(fd)
	return true
}

// listen makes the socket, which only the own user can connect to, in place of
// one that a pool has left behind.
func listen(socket string) (*net.UnixListener, error) {
	switch st, err := os.Lstat(socket); {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return nil, err
	case st.Mode().Type() != fs.ModeSocket:
		return nil, fmt.Errorf("%s exists, and is no socket: use another path", socket)
	case answers(socket):
		return nil, fmt.Errorf("another program listens on %s: use another path, or end it first", socket)
	default:
		if err := os.Remove(socket); err != nil {
			return nil, err
		}
	}
	defer unix.Umask(unix.Umask(0o177))
	return net.ListenUnix("unixpacket", &net.UnixAddr{Name: socket, Net: "unixpacket"})
}

// collect gives memory back that is garbage. What sync.Pools hold is garbage only the
// second time.
func collect() {
	runtime.GC()
	debug.FreeOSMemory()
}

// prepareProcess makes the process fit for its task, as far as it may.
func (d *daemon) prepareProcess() {
	// The nice value is each thread's; new ones have that of the one that
	// starts them. The second time finds those started during the first.
	for range 2 {
		tasks, _ := os.ReadDir("/proc/self/task")
		for _, t := range tasks {
			if tid, err := strconv.Atoi(t.Name()); err == nil {
				_ = unix.Setpriority(unix.PRIO_PROCESS, tid, poolNice)
			}
		}
	}
	var lim unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &lim); err != nil || lim.Cur >= poolFiles {
		return
	}
	want := unix.Rlimit{Cur: poolFiles, Max: max(lim.Max, poolFiles)}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &want); err != nil {
		want = unix.Rlimit{Cur: lim.Max, Max: lim.Max}
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &want); err != nil {
			want = lim
		}
		d.log.Printf("the pool may open %d files, which limits how many sandboxes and pages it serves: raise its limit (ulimit -n, LimitNOFILE= of systemd)", want.Cur)
	}
}

// openTemplate implements server.Options.OpenTemplate.
func (d *daemon) openTemplate(dir, digest string) (server.Template, error) {
	t, err := template.Open(dir, d.log.Printf)
	if err != nil {
		return nil, err
	}
	if got := t.Info().Digest.String(); got != digest {
		_ = t.Close()
		return nil, fmt.Errorf("the template in %s is %s, and not %s: it was replaced", dir, got, digest)
	}
	v, err := template.FromFiles(t.Files())
	if err != nil {
		_ = t.Close()
		return nil, err
	}
	return v, nil
}

// idle returns a channel that is closed when there has been no sandbox for so
// long; never for 0.
func (d *daemon) idle(limit time.Duration, stop <-chan struct{}) <-chan struct{} {
	if limit == 0 {
		return nil
	}
	c := make(chan struct{})
	go func() {
		tick := time.NewTicker(min(max(limit/10, 100*time.Millisecond), 10*time.Second))
		defer tick.Stop()
		for since := time.Now(); time.Since(since) < limit; {
			select {
			case <-stop:
				return
			case <-tick.C:
			}
			if d.srv.Stats().Total.Clients != 0 {
				since = time.Now()
			}
		}
		close(c)
	}()
	return c
}

// joinAll attaches, again and again, the sandboxes that are registered and are
// not attached.
func (d *daemon) joinAll(stop <-chan struct{}) {
	for start := time.Now(); ; {
		rs, err := attach.Registrations(d.socket, d.log.Printf)
		d.say("", err)
		for i := range rs {
			if d.join(&rs[i], stop) {
				return
			}
		}
		pause := joinEvery
		if time.Since(start) < joinSettle {
			pause = joinFirst
		}
		select {
		case <-stop:
			return
		case <-time.After(pause):
		}
	}
}

// join attaches a sandbox, unless it is attached or does not answer. It returns
// true if the pool ends.
func (d *daemon) join(r *attach.Registration, stop <-chan struct{}) bool {
	key := r.Root + "\x00" + r.Name
	d.mu.Lock()
	busy := d.joining[key]
	d.joining[key] = true
	d.mu.Unlock()
	if busy {
		return false
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		err := d.attach(r)
		d.say(key, err)
		d.mu.Lock()
		defer d.mu.Unlock()
		delete(d.joining, key)
	}()
	select {
	case <-stop:
		return true
	case <-done:
	case <-time.After(joinTimeout):
	}
	return false
}

// say logs why something failed, once.
func (d *daemon) say(key string, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err == nil {
		delete(d.said, key)
		return
	}
	if msg := err.Error(); d.said[key] != msg {
		d.said[key] = msg
		d.log.Print(msg)
	}
}

// attach attaches a sandbox that is not.
func (d *daemon) attach(r *attach.Registration) error {
	id := container.FullID{SandboxID: r.Name, ContainerID: r.Name}
	// Never wait for the lock: who starts the sandbox may wait for this pool.
	c, err := container.Load(r.Root, id, container.LoadOpts{Exact: true, SkipCheck: true, TryLock: container.TryAcquire, RootContainer: true})
	if err != nil {
		return fmt.Errorf("sandbox %s below %s is not attached yet: %w", r.Name, r.Root, err)
	}
	if r.Version != wire.Version {
		return fmt.Errorf("sandbox %s below %s speaks version %d of the pool's protocol, and not %d: it shares nothing until it is started anew", r.Name, r.Root, r.Version, wire.Version)
	}
	var state control.Pool
	if err := call(c, "Pool", &state); err != nil {
		return fmt.Errorf("sandbox %s below %s: %w", r.Name, r.Root, err)
	}
	if state.State == "connected" {
		return nil
	}
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("socketpair", err)
	}
	conn := os.NewFile(uintptr(fds[1]), d.socket)
	defer conn.Close()
	if err := d.srv.Attach(fds[0], &r.Greeting); err != nil {
		return fmt.Errorf("sandbox %s below %s: %w", r.Name, r.Root, err)
	}
	if err := attach.Donate(c.Sandbox, conn, &r.Greeting); err != nil {
		return fmt.Errorf("sandbox %s below %s: %w", r.Name, r.Root, err)
	}
	d.log.Printf("attached sandbox %s below %s", r.Name, r.Root)
	return nil
}
