package sentry

import (
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/log"

	"runsc-agentzip/memfile"
	"runsc-agentzip/memfile/prefetch"
	"runsc-agentzip/pkg/control"
	"runsc-agentzip/pkg/pool/wire"
	"runsc-agentzip/runsc-agentzip/attach"
)

// A sandbox tells the pool what it has learnt about steps after so many of them,
// and not more often than that.
const (
	tellSteps = 4
	tellPause = time.Minute
)

// turnPatience is how long a sandbox waits for its turn. On a host that is busy all
// the time the line only grows: memory has to come back, too. (16 clones on two
// processors that could not keep up held three times as much without a limit, and
// their steps took three quarters of the time.)
const turnPatience = time.Second

// errNoPool is what a sandbox that cannot be attached answers.
var errNoPool = errors.New("this sandbox was started without --agentzip-pool or without --agentzip-domain")

// Attach gives the sandbox a connection to the page pool, in place of an earlier
// one.
func (a *Agentzip) Attach(args *attach.Args, _ *struct{}) error {
	if a.d == nil {
		return errOff
	}
	if process.pool == nil {
		return errNoPool
	}
	if len(args.Files) != 1 {
		return fmt.Errorf("attaching to the pool with %d files, want 1", len(args.Files))
	}
	// Whoever attaches may know this sandbox by an ID that was another's.
	digest := ""
	if a.d.template != nil {
		digest = a.d.template.String()
	}
	if args.Domain != process.domain || args.Template != digest {
		return fmt.Errorf("the connection to the pool is for domain %q and template %q, this sandbox has %q and %q", args.Domain, args.Template, process.domain, digest)
	}
	// The control server closes the file when the call returns.
	fd, err := unix.Dup(int(args.Files[0].Fd()))
	if err != nil {
		return fmt.Errorf("keeping the connection to the pool: %w", err)
	}
	return process.pool.Attach(fd)
}

// Pool reports the sandbox's side of the page pool.
func (a *Agentzip) Pool(_ *Empty, out *control.Pool) error {
	if a.d == nil {
		return errOff
	}
	*out = poolState()
	return nil
}

func poolState() control.Pool {
	if process.pool == nil {
		return control.Pool{State: "none"}
	}
	s := process.pool.State()
	p := control.Pool{
		State:          "disconnected",
		Reason:         s.Reason,
		Connects:       s.Connects,
		Found:          s.Found,
		Published:      s.Published,
		OfferedDropped: s.Dropped,
	}
	if s.Connected {
		p.State, p.Reason = "connected", ""
	}
	return p
}

// poolReady is signalled when the pool asks for something. It is nil, and never
// ready, without a pool.
func (d *driver) poolReady() <-chan struct{} {
	if d.pool == nil {
		return nil
	}
	return d.pool.Ready()
}

// poolBacklog is ready when it is time to go on with what the pool has asked for.
// It is nil, and never ready, if there is nothing.
func (d *driver) poolBacklog() <-chan time.Time {
	if d.pool == nil {
		return nil
	}
	return d.pool.backlog()
}

// share does what the pool asks for, until stop, which may be nil.
func (d *driver) share(stop func() bool) {
	if d.pool == nil {
		return
	}
	d.takePatterns()
	d.pool.begin()
	start := time.Now()
	var n uint64
	var err error
	process.background.run(func() { n, err = d.b.Share(stop) })
	if err != nil && !errors.Is(err, memfile.ErrStopped) {
		d.pool.putOff()
	}
	if n != 0 || err != nil && !benign(err) {
		log.Debugf("agentzip: shared %d pages in %v (%v)", n, time.Since(start), err)
	}
	d.pool.AskUsage()
}

// takePatterns takes over what siblings have learnt about steps, in a sandbox
// that knows nothing itself.
func (d *driver) takePatterns() {
	b := d.pool.Patterns()
	if b == nil || d.template == nil || !d.conf.prefetch || d.b.Stats().Prefetch.Patterns != 0 {
		return
	}
	// Only hints, and from another sandbox: without them this one learns for
	// itself.
	if err := d.b.ImportPatterns(b, prefetch.Digest(*d.template)); err != nil {
		log.Infof("agentzip: what the pool knows about steps is of no use: %v", err)
	}
}

// tellStep counts a step that has ended, and tells the pool about steps if it is
// time to.
func (d *driver) tellStep() {
	if d.pool == nil || d.template == nil || !d.conf.prefetch {
		return
	}
	d.untold++
	if d.untold < tellSteps || time.Since(d.told) < tellPause || !d.pool.State().Connected {
		return
	}
	d.pool.SendPatterns(d.b.ExportPatterns(prefetch.Digest(*d.template), wire.MaxPatterns))
	d.untold, d.told = 0, time.Now()
}

// takeTurn waits until it is this sandbox's turn to evict: without it, the more
// sandboxes of a host wait, the less of the processors would those get that work.
// (Deepening takes no turn: on a busy host it rests most of the time, see package
// governor.) It returns false if the wait ends first. Without a pool it is always
// this sandbox's turn, and after turnPatience it goes without.
func (d *driver) takeTurn(activity <-chan struct{}) bool {
	if d.pool == nil {
		return true
	}
	select {
	case <-d.pool.TakeTurn():
		return true
	case <-time.After(turnPatience):
		return true
	case <-activity:
	case <-d.stop:
	}
	d.pool.GiveTurn()
	return false
}

// giveTurn ends the turn.
func (d *driver) giveTurn() {
	if d.pool != nil {
		d.pool.GiveTurn()
	}
}
