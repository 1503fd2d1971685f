package cmd

import (
	"encoding/json"
	"errors"
	goflag "flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/signal"
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

	"runsc-agentzip/pkg/census"
	"runsc-agentzip/pkg/fleet"
	"runsc-agentzip/pkg/pool/server"
	"runsc-agentzip/runsc-agentzip/attach"
)

// topUsage is what "agentzip top" says of itself.
const topUsage = `agentzip top [flags] - all sandboxes of the host and what their memory is like

  -interval=TIME         how often to ask them (default 1s)
  -n=ROUNDS              end after so many rounds; 1 prints once (default 0: go on)
  -sort=KEY              owned (default), guest, ratio, faults or id
  -pool=PATH             socket of the pool (default: the flag --agentzip-pool, or else
                         ` + defaultPool + ` if there is one)
  -json                  print JSON, one line each round

On a terminal, the keys o, g, r, f and i sort, q ends. Elsewhere, tables are printed
one after the other. Sandboxes are those below --root.
`

// defaultPool is where the systemd unit has the pool's socket.
const defaultPool = "/run/runsc-agentzip/pool.sock"

// lockWait is for how long a sandbox is waited for that another command has locked,
// and lockRetry the pause between two attempts.
const (
	lockWait  = 300 * time.Millisecond
	lockRetry = 20 * time.Millisecond
)

// shortestInterval is the least that -interval can be.
const shortestInterval = 100 * time.Millisecond

// topFlags are the flags of "agentzip top".
type topFlags struct {
	json     bool
	interval time.Duration
	rounds   int
	sort     string
	pool     string
}

// top runs "agentzip top" with the arguments that follow it.
func (a *Agentzip) top(conf *config.Config, args []string) subcommands.ExitStatus {
	t := topFlags{json: a.json}
	f := flag.NewFlagSet("agentzip top", flag.ContinueOnError)
	f.Usage = func() { fmt.Fprint(os.Stderr, topUsage) }
	f.BoolVar(&t.json, "json", t.json, "print JSON")
	f.DurationVar(&t.interval, "interval", time.Second, "how often to ask")
	f.IntVar(&t.rounds, "n", 0, "end after so many rounds")
	f.StringVar(&t.sort, "sort", string(census.ByOwned), "what to sort by")
	f.StringVar(&t.pool, "pool", conf.AgentzipPool, "the pool's socket")
	if err := f.Parse(args); err != nil {
		if errors.Is(err, goflag.ErrHelp) {
			return subcommands.ExitSuccess
		}
		return subcommands.ExitUsageError
	}
	if f.NArg() != 0 {
		util.Fatalf("agentzip top: want flags only, got %q", f.Arg(0))
	}
	if err := t.run(conf); err != nil {
		util.Fatalf("agentzip top: %v", err)
	}
	return subcommands.ExitSuccess
}

func (t *topFlags) run(conf *config.Config) error {
	key, err := census.ParseKey(t.sort)
	switch {
	case err != nil:
		return fmt.Errorf("-sort: %w", err)
	case t.interval < shortestInterval:
		return fmt.Errorf("-interval=%v: must be %v or more", t.interval, shortestInterval)
	case t.rounds < 0:
		return fmt.Errorf("-n=%d: must not be negative", t.rounds)
	}
	c, err := newCollector(conf.RootDir, t.pool)
	if err != nil {
		return err
	}
	defer c.Close()
	w := &watch{take: c.Take, interval: t.interval, rounds: t.rounds, view: census.View{Sort: key}}
	terminal := isTerminal(os.Stdout) && capable(os.Getenv("TERM"))
	w.view.Color = terminal && os.Getenv("NO_COLOR") == ""
	switch {
	case t.json:
		return w.print(func(c, _ *census.Census) error { return json.NewEncoder(os.Stdout).Encode(c) })
	case terminal && t.rounds != 1:
		return w.show(os.Stdin, os.Stdout)
	case terminal:
		w.view.Width, _ = windowSize(os.Stdout)
	}
	first := true
	return w.print(func(now, prev *census.Census) error {
		text := strings.Join(w.view.Lines(now, prev), "\n") + "\n"
		if !first {
			text = "\n" + text
		}
		first = false
		_, err := io.WriteString(os.Stdout, text)
		return err
	})
}

// ---- the sandboxes of a host ----------------------------------------------------

// newCollector returns a collector for the sandboxes below root and the pool at a
// socket, "" for the default one.
func newCollector(root, pool string) (*census.Collector, error) {
	if pool == "" {
		if st, err := os.Stat(defaultPool); err == nil && st.Mode().Type() == fs.ModeSocket {
			pool = defaultPool
		}
	} else if err := (&poolFlags{socket: pool}).check(); err != nil {
		return nil, err
	}
	l := &lister{root: root, loaded: make(map[string]loaded)}
	o := census.Options{
		Root: root,
		List: l.list,
		Find: l.find,
		Host: func() census.Host {
			m, err := fleet.ReadHostMemory()
			if err != nil {
				return census.Host{}
			}
			return census.Host{TotalBytes: m.Total, AvailableBytes: m.Available}
		},
	}
	if pool != "" {
		o.Pool = func() census.Pool { return askPool(pool) }
	}
	return census.NewCollector(o), nil
}

// askPool asks the pool what it holds. It takes about 2 s at most.
func askPool(socket string) census.Pool {
	p := census.Pool{Socket: socket}
	b, err := attach.Ask(socket, "stats")
	if err == nil {
		s := new(server.Stats)
		if err = json.Unmarshal(b, s); err == nil {
			p.Stats = s
			return p
		}
	}
	p.Reason = err.Error()
	return p
}

// lister finds sandboxes below a root. State files that have not changed are not read
// again, which also spares their locks.
type lister struct {
	// root is immutable.
	root string

	// mu protects what follows. It is a leaf.
	mu sync.Mutex
	// loaded is by ID.
	loaded map[string]loaded
}

// loaded is what a state file had.
type loaded struct {
	file   os.FileInfo
	target census.Target
}

// list implements census.Options.List.
func (l *lister) list() ([]string, error) {
	// ListSandboxes does not tell an unreadable folder from an empty one.
	if _, err := os.ReadDir(l.root); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("listing the sandboxes below --root: %w", err)
	}
	ids, err := container.ListSandboxes(l.root)
	if err != nil {
		return nil, fmt.Errorf("listing the sandboxes below --root=%s: %w", l.root, err)
	}
	there := make(map[string]bool)
	out := make([]string, 0, len(ids))
	for _, id := range ids {
		there[id.SandboxID] = true
		out = append(out, id.SandboxID)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for id := range l.loaded {
		if !there[id] {
			delete(l.loaded, id)
		}
	}
	return out, nil
}

// find implements census.Options.Find.
func (l *lister) find(id string) (census.Target, error) {
	full := container.FullID{SandboxID: id, ContainerID: id}
	for end := time.Now().Add(lockWait); ; time.Sleep(lockRetry) {
		st, err := (&container.StateFile{RootDir: l.root, ID: full}).Stat()
		if errors.Is(err, fs.ErrNotExist) {
			return census.Target{}, census.ErrGone
		} else if err != nil {
			return census.Target{}, err
		}
		l.mu.Lock()
		was := l.loaded[id]
		l.mu.Unlock()
		if was.file != nil && os.SameFile(was.file, st) && was.file.ModTime().Equal(st.ModTime()) && was.file.Size() == st.Size() {
			return was.target, nil
		}
		c, err := loadContainer(l.root, full)
		switch {
		case err == nil:
			t := census.Target{PID: c.Sandbox.Pid.Load(), Socket: c.Sandbox.GetControlSocketPath(), Paused: c.Status == container.Paused}
			l.mu.Lock()
			l.loaded[id] = loaded{st, t}
			l.mu.Unlock()
			return t, nil
		case errors.Is(err, fs.ErrNotExist):
			return census.Target{}, census.ErrGone
		// Load does not wrap the error.
		case !strings.Contains(err.Error(), container.ErrStateFileLocked.Error()):
			return census.Target{}, err
		case time.Now().After(end):
			return census.Target{}, census.ErrBusy
		}
	}
}

// loadContainer reads a state file without waiting for its lock.
func loadContainer(root string, id container.FullID) (c *container.Container, err error) {
	defer func() {
		// Load counts on the file being complete.
		if r := recover(); r != nil {
			err = fmt.Errorf("the state file of sandbox %s below --root=%s is damaged: %v", id.SandboxID, root, r)
		}
	}()
	return container.Load(root, id, container.LoadOpts{Exact: true, SkipCheck: true, TryLock: container.TryAcquire, RootContainer: true})
}

// ---- rounds -----------------------------------------------------------------------

// watch takes censuses at an interval.
type watch struct {
	take     func() (*census.Census, error)
	interval time.Duration
	// rounds is after how many to end, 0 for never.
	rounds int
	view   census.View
}

// print has each census printed, with the one before it.
func (w *watch) print(f func(now, prev *census.Census) error) error {
	var prev *census.Census
	for n := 1; ; n++ {
		start := time.Now()
		now, err := w.take()
		if err == nil {
			err = f(now, prev)
		}
		if err != nil || n == w.rounds {
			return err
		}
		prev = now
		time.Sleep(time.Until(start.Add(w.interval)))
	}
}

// show shows censuses on a terminal until q, a signal or the last round.
func (w *watch) show(in, out *os.File) error {
	s := &screen{in: in, out: out}
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGTSTP, syscall.SIGCONT, syscall.SIGWINCH)
	defer signal.Stop(signals)
	s.enter()
	defer s.leave()
	keys := s.keys()

	type result struct {
		census *census.Census
		err    error
	}
	results := make(chan result, 1)
	take := func() {
		c, err := w.take()
		results <- result{c, err}
	}
	var now, prev *census.Census
	draw := func() error {
		w.view.Width, w.view.Height = windowSize(out)
		if now == nil {
			return nil
		}
		return s.draw(w.view.Lines(now, prev))
	}
	tick := time.NewTicker(w.interval)
	defer tick.Stop()
	busy := true
	go take()
	for n := 1; ; {
		select {
		case r := <-results:
			busy = false
			if r.err != nil {
				return r.err
			}
			prev, now = now, r.census
			if n == w.rounds {
				// The last round stays in sight.
				s.leave()
				w.view.Height = 0
				_, err := io.WriteString(out, strings.Join(w.view.Lines(now, prev), "\n")+"\n")
				return err
			}
			n++
			if err := draw(); err != nil {
				return err
			}
		case <-tick.C:
			// A round that takes longer than the interval delays the next one.
			if !busy {
				busy = true
				go take()
			}
		case k := <-keys:
			switch k {
			case 'q', 'Q', 3: // Ctrl-C, where it is no signal
				return nil
			}
			for _, key := range census.Keys {
				if key[0] == k {
					w.view.Sort = key
				}
			}
			if err := draw(); err != nil {
				return err
			}
		case sig := <-signals:
			switch sig {
			case syscall.SIGTSTP:
				s.leave()
				_ = unix.Kill(os.Getpid(), unix.SIGSTOP)
			case syscall.SIGCONT:
				s.enter()
				fallthrough
			case syscall.SIGWINCH:
				if err := draw(); err != nil {
					return err
				}
			default:
				return nil
			}
		}
	}
}

// ---- the terminal ---------------------------------------------------------------

// screen is a terminal that is drawn on. One goroutine uses it.
type screen struct {
	in, out *os.File
	// on is set between enter and leave, and cooked is the state of in before, nil if
	// in is no terminal.
	on     bool
	cooked *unix.Termios
}

// Escape sequences: the other screen and back, without cursor; what draw needs.
const (
	enterScreen = "\x1b[?1049h\x1b[?25l"
	leaveScreen = "\x1b[?25h\x1b[?1049l"
	home        = "\x1b[H"
	eraseLine   = "\x1b[K"
	eraseBelow  = "\x1b[J"
)

// enter takes the terminal over, or does so once more: a shell may have had it meanwhile.
func (s *screen) enter() {
	if t, err := unix.IoctlGetTermios(int(s.in.Fd()), unix.TCGETS); err == nil {
		raw := *t
		// Keys come one by one and unseen. Ctrl-C and Ctrl-Z are signals; Ctrl-S would
		// stop the output.
		raw.Lflag &^= unix.ICANON | unix.ECHO
		raw.Iflag &^= unix.IXON
		raw.Cc[unix.VMIN], raw.Cc[unix.VTIME] = 1, 0
		if unix.IoctlSetTermios(int(s.in.Fd()), unix.TCSETS, &raw) == nil && !s.on {
			s.cooked = t
		}
	}
	s.on = true
	_, _ = io.WriteString(s.out, enterScreen)
}

// leave gives the terminal back as it was.
func (s *screen) leave() {
	if !s.on {
		return
	}
	s.on = false
	_, _ = io.WriteString(s.out, leaveScreen)
	if s.cooked != nil {
		// What was typed meanwhile is not for the shell.
		_ = unix.IoctlSetTermios(int(s.in.Fd()), unix.TCSETSF, s.cooked)
		s.cooked = nil
	}
}

// keys returns what is typed, or nil if no terminal is there to type on. It reads until
// the process ends.
func (s *screen) keys() <-chan byte {
	if s.cooked == nil {
		return nil
	}
	c := make(chan byte)
	go func() {
		var b [1]byte
		for {
			switch n, err := s.in.Read(b[:]); {
			case n == 1:
				c <- b[0]
			case err != nil && !errors.Is(err, unix.EINTR):
				return
			}
		}
	}()
	return c
}

// draw shows lines in place of those before.
func (s *screen) draw(lines []string) error {
	if !s.on {
		return nil
	}
	_, err := io.WriteString(s.out, home+strings.Join(lines, eraseLine+"\r\n")+eraseLine+eraseBelow)
	return err
}

func isTerminal(f *os.File) bool {
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

// capable tells whether a terminal, by the name in TERM, knows the escape sequences.
func capable(term string) bool { return term != "" && term != "dumb" }

// windowSize returns the columns and lines of a terminal, 80x24 if it does not say.
func windowSize(f *os.File) (width, height int) {
	ws, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ)
	if err != nil || ws.Col == 0 || ws.Row == 0 {
		return 80, 24
	}
	return int(ws.Col), int(ws.Row)
}
