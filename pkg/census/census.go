// Package census asks all sandboxes of a host what their memory is like, and shows the
// answers: as a table for people (View) and as metrics for Prometheus (WriteMetrics).
//
// A census never waits for a sandbox longer than its deadline. What does not answer is
// in it all the same, with a State and a reason: one that hangs, that was stopped or
// killed, that runs without our backend or is being started.
//
// A sandbox that has not answered in time keeps the connection it was asked on. As
// long as no answer comes there, later censuses do not ask it again and do not wait
// for it, so that observing it neither fills the queue of its control socket nor slows
// the others down.
//
// The package knows nothing of gVisor but how a call to a control socket is written:
// who uses it says which sandboxes there are (Options).
//
// Sandboxes are not trusted: the size of an answer is limited, and what it has of text
// is shown without control characters.
package census

import (
	"errors"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"runsc-agentzip/pkg/control"
	"runsc-agentzip/pkg/pool/server"
)

// State is how a sandbox has reacted to being asked.
type State string

// The states of a sandbox. Only one that is OK has Stats.
const (
	OK      State = "ok"
	Off     State = "off"     // runs with --agentzip=off
	Foreign State = "foreign" // runs in a runtime that has no such method
	Busy    State = "busy"    // another command holds its lock: it is being started or removed
	Silent  State = "silent"  // has not answered in time
	Stopped State = "stopped" // the same, and its process is stopped
	Dead    State = "dead"    // has ended, and was not deleted
	Broken  State = "broken"  // has answered with something else
)

// States are all states, in the order in which they are listed.
var States = []State{OK, Off, Foreign, Busy, Silent, Stopped, Dead, Broken}

// Census is what the sandboxes of a host and their pool have answered. It is
// immutable.
type Census struct {
	// At is when it was taken and TookNS how long that took, in nanoseconds.
	At     time.Time `json:"at"`
	TookNS uint64    `json:"took_ns"`
	// Root is the folder in which sandboxes were looked for.
	Root string `json:"root"`
	Host Host   `json:"host"`
	// Sandboxes are ordered by ID.
	Sandboxes []Sandbox `json:"sandboxes"`
	// Pool is nil if there is none.
	Pool *Pool `json:"pool,omitempty"`
}

// Host is the machine's memory in bytes. All is 0 if it is not known.
type Host struct {
	TotalBytes     uint64 `json:"total_bytes"`
	AvailableBytes uint64 `json:"available_bytes"`
}

// Sandbox is one sandbox in a census.
type Sandbox struct {
	ID  string `json:"id"`
	PID int    `json:"pid,omitempty"`
	// State is how it has reacted, and Reason why it has no Stats.
	State  State  `json:"state"`
	Reason string `json:"reason,omitempty"`
	// Paused is set after `runsc pause`.
	Paused bool `json:"paused,omitempty"`
	// At is when it answered.
	At time.Time `json:"at,omitzero"`
	// Stats is nil unless State is OK.
	Stats *control.Stats `json:"stats,omitempty"`
}

// Phase is one word for what the sandbox does: its phase, or its state if it has not
// answered.
func (s *Sandbox) Phase() string {
	switch {
	case s.State != OK:
		return string(s.State)
	case s.Paused:
		return "paused"
	case s.Stats.Phase.State == "":
		return "unknown"
	}
	return clean(s.Stats.Phase.State, maxWord)
}

// Pool is the page pool of the host.
type Pool struct {
	// Socket is where it was looked for.
	Socket string `json:"socket"`
	// Reason is why it has not answered, or "".
	Reason string `json:"reason,omitempty"`
	// Stats is nil if it has not answered.
	Stats *server.Stats `json:"stats,omitempty"`
}

// Target is where a sandbox can be asked.
type Target struct {
	PID int
	// Socket is the path of its control socket.
	Socket string
	Paused bool
}

// What Options.Find returns for a sandbox that cannot be asked.
var (
	// ErrGone: it was removed since it was listed. It is left out.
	ErrGone = errors.New("the sandbox is gone")
	// ErrBusy: another command holds its lock.
	ErrBusy = errors.New("another command holds the sandbox's lock: it is being started, checkpointed or removed")
)

// Options says what there is on a host. The functions are called concurrently.
type Options struct {
	// Root is where the sandboxes are, for messages.
	Root string
	// List returns the IDs of all sandboxes.
	List func() ([]string, error)
	// Find returns where a sandbox can be asked. It should not take longer than
	// Deadline.
	Find func(id string) (Target, error)
	// Pool asks the pool, or is nil if there is none. It has to return in a bounded
	// time of its own.
	Pool func() Pool
	// Host reads the machine's memory, or is nil.
	Host func() Host
	// Process returns the state of a process as in /proc/PID/stat, 0 if there is
	// none, and its resident set in bytes. By default it reads /proc.
	Process func(pid int) (state byte, rss uint64)
	// Deadline is how long a sandbox may take to answer, 1 s by default.
	Deadline time.Duration
	// Parallel is how many are asked at once, 64 by default.
	Parallel int
}

// Collector takes censuses. It is safe for concurrent use; censuses are taken one
// after the other.
//
// mu is held while one is taken. Nothing else is locked meanwhile.
type Collector struct {
	// opts is immutable.
	opts Options

	mu sync.Mutex
	// pending has the calls that were not answered in time, by ID and process of the
	// sandbox.
	pending map[call]*net.UnixConn
}

// call identifies the sandbox that a call was made to: another may have its ID later.
type call struct {
	id  string
	pid int
}

// NewCollector returns a Collector. List and Find are required.
func NewCollector(o Options) *Collector {
	if o.Deadline <= 0 {
		o.Deadline = time.Second
	}
	if o.Parallel <= 0 {
		o.Parallel = 64
	}
	if o.Process == nil {
		o.Process = process
	}
	return &Collector{opts: o, pending: make(map[call]*net.UnixConn)}
}

// Close gives up the calls that were not answered. The Collector can be used on.
func (c *Collector) Close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for k, conn := range c.pending {
		_ = conn.Close()
		delete(c.pending, k)
	}
}

// answer is what came of asking one sandbox. conn is its call if that is pending.
type answer struct {
	Sandbox
	gone bool
	conn *net.UnixConn
}

// Take takes a census. It fails only if the sandboxes cannot be listed.
func (c *Collector) Take() (*Census, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	start := time.Now()
	ids, err := c.opts.List()
	if err != nil {
		return nil, err
	}
	ids = slices.Compact(slices.Sorted(slices.Values(ids)))
	out := &Census{At: start, Root: c.opts.Root, Sandboxes: []Sandbox{}}

	var wg sync.WaitGroup
	if c.opts.Pool != nil {
		wg.Go(func() {
			p := c.opts.Pool()
			out.Pool = &p
		})
	}
	// Each goroutine has its own answer; pending is only read until all are done.
	answers := make([]answer, len(ids))
	turns := make(chan struct{}, c.opts.Parallel)
	for i, id := range ids {
		turns <- struct{}{}
		wg.Go(func() {
			answers[i] = c.ask(id)
			<-turns
		})
	}
	wg.Wait()

	was := c.pending
	c.pending = make(map[call]*net.UnixConn)
	for i := range answers {
		a := &answers[i]
		if a.gone {
			continue
		}
		if a.conn != nil {
			k := call{a.ID, a.PID}
			c.pending[k] = a.conn
			delete(was, k)
		}
		out.Sandboxes = append(out.Sandboxes, a.Sandbox)
	}
	for _, conn := range was {
		_ = conn.Close()
	}
	if c.opts.Host != nil {
		out.Host = c.opts.Host()
	}
	out.TookNS = uint64(time.Since(start))
	return out, nil
}

// ask asks one sandbox.
//
// Preconditions: c.mu is held by the caller of Take, and nobody writes to c.pending.
func (c *Collector) ask(id string) answer {
	a := answer{Sandbox: Sandbox{ID: id}}
	t, err := c.opts.Find(id)
	if err == nil {
		a.PID, a.Paused = t.PID, t.Paused
		deadline := time.Now().Add(c.opts.Deadline)
		a.Stats, a.conn, err = callStats(t.Socket, c.pending[call{id, t.PID}], deadline)
	}
	a.At = time.Now()
	switch {
	case err == nil:
		a.State = OK
		_, a.Stats.SentryRSSBytes = c.opts.Process(t.PID)
		return a
	case errors.Is(err, ErrGone):
		a.gone = true
		return a
	case errors.Is(err, ErrBusy):
		a.State, a.Reason = Busy, err.Error()
		return a
	case errors.Is(err, errOff):
		a.State = Off
	case errors.Is(err, errForeign):
		a.State = Foreign
	case errors.Is(err, errRefused):
		a.State = Dead
	case errors.Is(err, errSilent):
		a.State = Silent
	default:
		a.State = Broken
	}
	a.Reason = clean(err.Error(), maxReason)
	if t.PID == 0 || a.State == Off || a.State == Foreign {
		return a
	}
	// Why it has not answered, if its process shows that.
	switch state, _ := c.opts.Process(t.PID); state {
	case 0, 'Z', 'X', 'x':
		a.State, a.Reason = Dead, "the sandbox's process has ended: `runsc delete` removes what is left of it"
	case 'T', 't':
		if a.State == Silent {
			a.State, a.Reason = Stopped, "the sandbox's process is stopped: send it SIGCONT to have it go on"
		}
	}
	return a
}

// process implements Options.Process.
func process(pid int) (state byte, rss uint64) {
	dir := "/proc/" + strconv.Itoa(pid)
	b, err := os.ReadFile(dir + "/stat")
	if err != nil {
		return 0, 0
	}
	return parseStat(string(b), uint64(os.Getpagesize()))
}

// parseStat returns the state and the resident set in /proc/PID/stat.
func parseStat(stat string, page uint64) (state byte, rss uint64) {
	// The name, in parentheses, may contain anything.
	f := strings.Fields(stat[strings.LastIndexByte(stat, ')')+1:])
	const rssField = 21 // the 24th of all
	if len(f) == 0 {
		return 0, 0
	}
	if len(f) > rssField {
		n, _ := strconv.ParseUint(f[rssField], 10, 64)
		rss = n * page
	}
	return f[0][0], rss
}

const (
	// maxWord and maxReason are how much text of a sandbox is kept, in bytes.
	maxWord   = 32
	maxReason = 300
)

// clean makes text of a sandbox fit for a terminal: printable ASCII, and at most n bytes
// of it.
func clean(s string, n int) string {
	s = s[:min(len(s), n)]
	return strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' {
			return '?'
		}
		return r
	}, s)
}
