package sentry

import (
	"errors"
	"math/rand/v2"
	"runtime/debug"
	"sync"
	"time"

	"gvisor.dev/gvisor/pkg/context"
	"gvisor.dev/gvisor/pkg/log"
	"gvisor.dev/gvisor/pkg/sentry/kernel"
	"gvisor.dev/gvisor/pkg/sentry/pgalloc"

	"runsc-agentzip/memfile"
	"runsc-agentzip/memfile/codec"
	"runsc-agentzip/memfile/template"
	"runsc-agentzip/pkg/control"
	"runsc-agentzip/pkg/phase"
	"runsc-agentzip/pkg/pressure"
)

// resumeFaults is how many accesses to evicted memory make a resume: a first
// guess at what the step will want is due. With each doubling of their number
// there is evidence for a better one, up to evidenceFaults.
const (
	resumeFaults   = 2
	evidenceFaults = 512
)

// idleFloor is how much memory must have come back since the last eviction for
// another one to be worth its scan, in bytes. It keeps a heartbeat timer in the
// guest from causing an eviction per beat.
//
// maxFloor is up to how much is left to a heartbeat that wants it back each time.
const (
	idleFloor = 1 << 20
	maxFloor  = 8 << 20
)

// A driver evicts the memory of one kernel while its tasks wait.
type driver struct {
	k    *kernel.Kernel
	f    *pgalloc.MemoryFile
	b    *memfile.Backend
	conf settings

	// template is that of the sandbox, or nil.
	template *template.Digest

	// pool is the sandbox's end of the page pool, or nil.
	pool *pacer
	// untold is how many steps the pool was not told of, told when it last was
	// told of any. They belong to run.
	untold int
	told   time.Time

	stop     chan struct{}
	stopOnce sync.Once

	// hinted has room for one hint that somebody gave.
	hinted chan phase.Hint

	// collector is held off while the heap is swapped out.
	collector collector

	// mu protects det, and what statistics say of the phase. It is a leaf.
	mu      sync.Mutex
	det     *phase.Detector
	waiting bool
	why     string
	since   time.Time
	waits   uint64
}

// settings are the driver's share of the configuration.
type settings struct {
	idle, settle, trimAfter, deepenAfter, pageoutAfter, testEvictEvery time.Duration

	prefetch bool
}

func newDriver(k *kernel.Kernel, f *pgalloc.MemoryFile, b *memfile.Backend, t *template.Digest, pool *pacer, conf settings) *driver {
	return &driver{
		k: k, f: f, b: b, template: t, pool: pool, conf: conf,
		stop:   make(chan struct{}),
		hinted: make(chan phase.Hint, 1),
		det:    phase.NewDetector(conf.idle),
		since:  time.Now(),
	}
}

// halt ends the driver's goroutines.
func (d *driver) halt() {
	d.stopOnce.Do(func() { close(d.stop) })
	d.collector.release()
}

func (d *driver) halted() bool {
	select {
	case <-d.stop:
		return true
	default:
		return false
	}
}

// sample looks at the sandbox.
func (d *driver) sample() phase.Sample {
	s := phase.Sample{
		Running: d.k.RunningTasks() != 0 || d.k.BlockedTasks() != 0,
		Faults:  d.b.DemandRestores(),
	}
	s.Timers, s.Events = d.k.IdleWakes()
	s.Now = time.Now()
	return s
}

// enter tells that the phase has changed. d.mu is locked.
func (d *driver) enter(waiting bool, why string) {
	now := time.Now()
	log.Debugf("agentzip: phase: waiting is %t (%s) after %v, %d beats so far, idle time %v", waiting, why, now.Sub(d.since), d.det.Beats(), d.det.Idle())
	if waiting && !d.waiting {
		d.b.StepEnded(d.since)
	}
	d.waiting, d.why, d.since = waiting, why, now
	if waiting {
		d.waits++
	}
	// What was hinted at has happened.
	select {
	case <-d.hinted:
	default:
	}
}

// glance is how long a task must be seen to run to count as running: longer than
// most beats.
const glance = 3 * time.Millisecond

// looksWaiting is for a sandbox that was working when it was last looked at.
func (d *driver) looksWaiting() bool {
	s := d.sample()
	if s.Running && d.sleep(glance) {
		s = d.sample()
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	waiting, why := d.det.Working(s)
	if waiting {
		d.enter(true, why)
	}
	return waiting
}

// A watch is on a sandbox that waits.
type watch struct {
	// resumed is closed when the wait is over.
	resumed chan struct{}
	// beat has an element if something ran for a moment since.
	beat chan struct{}
	// ended is closed when nobody wants to know any more.
	ended chan struct{}
}

// The pause after a beat before the next one is looked for. It bounds what a program
// that polls costs.
const (
	minBeatPause = 10 * time.Millisecond
	maxBeatPause = 50 * time.Millisecond
)

// watch watches until the sandbox resumes or the watch is ended.
func (d *driver) watch() *watch {
	w := &watch{make(chan struct{}), make(chan struct{}, 1), make(chan struct{})}
	go func() {
		pause := minBeatPause
		for d.k.WaitForTaskActivity(w.ended) {
			for again := time.Duration(0); ; {
				s := d.sample()
				d.mu.Lock()
				if w.isEnded() {
					d.mu.Unlock()
					return
				}
				var why string
				why, again = d.det.Activity(s)
				if why != "" {
					d.enter(false, why)
				}
				d.mu.Unlock()
				if why != "" {
					close(w.resumed)
					return
				}
				if again == 0 {
					break
				}
				if !w.sleep(again) {
					return
				}
			}
			select {
			case w.beat <- struct{}{}:
			default:
			}
			if !w.sleep(pause) {
				return
			}
			pause = min(pause*5/4, maxBeatPause)
		}
	}()
	return w
}

// sleep returns false if the watch has ended.
func (w *watch) sleep(t time.Duration) bool {
	select {
	case <-w.ended:
		return false
	case <-time.After(t):
		return true
	}
}

func (w *watch) isEnded() bool {
	select {
	case <-w.ended:
		return true
	default:
		return false
	}
}

// over tells whether the sandbox has resumed.
func (w *watch) over() bool {
	select {
	case <-w.resumed:
		return true
	default:
		return false
	}
}

// hint takes what somebody says of the phase.
func (d *driver) hint(h phase.Hint) {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case d.waiting == (h == phase.HintWait):
		// It is so already, and stays so.
		d.det.Hint(phase.NoHint)
	case h == phase.HintWait:
		d.det.Hint(h)
	default:
		select {
		case d.hinted <- h:
		default: // one is enough
		}
	}
}

func (d *driver) phase() control.Phase {
	d.mu.Lock()
	defer d.mu.Unlock()
	p := control.Phase{
		State:   "working",
		SinceNS: uint64(max(time.Since(d.since), 0)),
		Why:     d.why,
		Waits:   d.waits,
		Beats:   d.det.Beats(),
		IdleNS:  uint64(d.det.Idle()),
	}
	switch {
	case d.b.Inhibited():
		p.State = "inhibited"
	case d.waiting:
		p.State = "waiting"
	}
	return p
}

// sleep returns false if the driver was halted.
func (d *driver) sleep(t time.Duration) bool {
	select {
	case <-d.stop:
		return false
	case <-time.After(t):
		return true
	}
}

// run is the driver's main loop.
func (d *driver) run() {
	if d.conf.testEvictEvery > 0 {
		d.runForced()
		return
	}
	var heldAfter uint64
	// floor is idleFloor, or more if timers in the guest bring memory back: what
	// they want is left to them, after a few evictions in vain.
	floor := uint64(idleFloor)
	// quiet is the time since memory was last wanted back. A gap in which little
	// was ends a wait, but not this.
	quiet := quietTime{since: time.Now(), waits: time.Now()}
	worked := true
	// A sandbox that was restored from a template has all of it to fetch.
	resume := newResumption(d)
	for {
		for !d.looksWaiting() {
			d.relieve()
			// Not at a fixed pace, which a thread that polls may share.
			if !resume.work(phase.Look - 2*time.Millisecond + rand.N(4*time.Millisecond)) {
				return
			}
		}
		w := d.watch()
		// Until it was given back the time goes on: what timers do does not put it
		// off for ever.
		if worked || quiet.trimmed || quiet.pagedOut {
			quiet.waits, quiet.trimmed, quiet.pagedOut = time.Now(), false, false
		}
		if worked {
			quiet.notTrim = time.Time{}
		}
		// ended adds up the evictions of the wait.
		var ended memfile.EvictResult
		// beatPause is how long memory that beats bring back stays, at least: a
		// runtime that collects garbage when it is idle does so once. beaten is
		// what they have brought back, if that is what is evicted.
		beatPause := d.conf.idle
		beaten := uint64(0)
		stop := func() bool {
			select {
			case <-d.stop:
				return true
			default:
				return w.over() || len(d.hinted) != 0
			}
		}
		for again := true; again; {
			again = false
			var res memfile.EvictResult
			retry := d.f.IsAsyncLoading()
			held, err := d.b.HeldBytes()
			heldAfter = min(heldAfter, held)
			if due := err == nil && held > heldAfter+floor && !retry; due && d.takeTurn(w.resumed) {
				floor = raise(floor, beaten)
				tier := codec.TierMid
				switch {
				case process.background.governor.Busy() && !process.scarce.pressed():
					tier = codec.TierFast
				case d.conf.deepenAfter == 0:
					tier = codec.TierDeep
				}
				quiet.since, quiet.deepened, quiet.deepenedAll = time.Now(), false, false
				quiet.notBefore, quiet.vain = time.Time{}, 0
				process.background.run(func() {
					res, err = d.b.Evict(memfile.EvictOptions{Tier: tier, Settle: d.conf.settle, Stop: stop})
				})
				ended.Elapsed += res.Elapsed
				ended.Evicted += res.Evicted
				logEvict(res, err)
				resume = newResumption(d)
				d.tellStep()
				if err == nil {
					heldAfter, _ = d.b.HeldBytes()
				} else {
					heldAfter, retry = 0, true
				}
				if !retry {
					// What the pool asked for while the sandbox worked.
					d.share(stop)
				}
				d.giveTurn()
			}
			evicted := time.Now()
			var beat <-chan time.Time
			for late := true; late; {
				var work func(stop func() bool)
				var timer <-chan time.Time
				if retry {
					// Something kept the eviction from ending (loading, a save,
					// a busy memory manager, or a resume): try again if the wait
					// goes on.
					timer = time.After(max(d.conf.idle, 250*time.Millisecond))
				} else if next, due := quiet.next(d); next != nil {
					work = next
					timer = time.After(time.Until(due))
				}
				select {
				case <-d.stop:
					close(w.ended)
					return
				case <-w.resumed:
					late = false
					continue
				case <-d.hinted:
					d.resumeNow(w)
					late = false
					continue
				case <-w.beat:
					if beat == nil {
						beat = time.After(time.Until(evicted.Add(beatPause)))
					}
					continue
				case <-beat:
					beat = nil
					if held, err := d.b.HeldBytes(); err == nil && held > heldAfter+floor {
						beatPause *= 2
						beaten = held - heldAfter
						late, again = false, true
					}
					continue
				case <-d.poolReady():
					work = d.share
				case <-d.poolBacklog():
					work = d.share
				case <-timer:
					if retry {
						late, again = false, true
						continue
					}
				}
				work(stop)
				if d.b.StalePages() {
					quiet.deepened, quiet.deepenedAll = false, false
				}
			}
		}
		close(w.ended)
		if quiet.pagedOut {
			d.collector.releaseAfter(stepGrace)
		}
		d.mu.Lock()
		if ended.Evicted != 0 {
			d.det.Evicted(ended.Elapsed)
		}
		external := d.why != phase.Computing && d.why != phase.WantsMemory
		d.mu.Unlock()
		worked = external
		if external {
			floor = idleFloor
		} else if held, err := d.b.HeldBytes(); err == nil && ended.Evicted != 0 && held > heldAfter {
			floor = raise(floor, held-heldAfter)
		}
		// Work that needs its memory back shows at once.
		if !resume.work(phase.Look) {
			return
		}
	}
}

// raise returns the floor for what a heartbeat has brought back before.
func raise(floor, back uint64) uint64 {
	return max(floor, min(2*back, maxFloor))
}

// resumeNow ends a wait before anything runs: somebody knows that something is about
// to.
func (d *driver) resumeNow(w *watch) {
	s := d.sample()
	d.mu.Lock()
	known := w.over()
	if !known {
		d.det.Resumed(s)
		d.enter(false, "hint")
	}
	d.mu.Unlock()
	if !known && d.conf.prefetch {
		n, err := d.b.PrefetchNow(func() bool {
			select {
			case <-d.stop:
				return true
			default:
				return process.scarce.level() != pressure.None
			}
		})
		log.Debugf("agentzip: prefetched %d pages on a hint (%v)", n, err)
	}
}

// A quietTime is a time in which next to no memory is wanted, and what is done
// in it once.
type quietTime struct {
	since                 time.Time
	deepened, deepenedAll bool
	// waits is when the present wait began: a step that wants little memory leaves
	// garbage as well. trimmed is set when it was given back.
	waits   time.Time
	trimmed bool
	// pagedOut is set when the host was asked to swap the Sentry's heap out.
	pagedOut bool
	// notTrim is when garbage may be given back again that a task has made which
	// only a timer woke.
	notTrim time.Time
	// notBefore is when a deepening that was put off or interrupted may go on. vain is
	// how many in a row were interrupted before they had made anything smaller.
	notBefore time.Time
	vain      int
}

// deepenAllFactor is how many times longer a wait has to last for pages to be
// compressed harder that the last steps wanted. passMax is how long one deepening may
// take on a busy host, where it rests most of the time (governor.Trickle), and passPause
// how long it is until the next goes on with it: the pool and the Sentry's garbage should
// not have to wait for it.
//
// trimShare is how many times longer than what giving garbage back costs has to go by
// until what timers in the guest have done makes it due again. reopenCost is more than
// it costs to look a dropped dentry up again, which opens its file: about 10 us
// (measured: 600 files take 21 ms after a wait with dropping, 15 ms without, medians
// of 10).
const (
	deepenAllFactor = 4
	passMax         = 3 * time.Second
	passPause       = 250 * time.Millisecond
	trimShare       = 100
	reopenCost      = 40 * time.Microsecond
)

// next returns what is to be done next and when, or nil.
func (q *quietTime) next(d *driver) (work func(stop func() bool), due time.Time) {
	work, due = q.nextDeepening(d)
	if after := d.conf.trimAfter; after != 0 && !q.trimmed {
		at := q.waits.Add(after)
		if at.Before(q.notTrim) {
			at = q.notTrim
		}
		if work == nil || due.After(at) {
			return func(stop func() bool) {
				cost := d.trim(stop)
				q.trimmed = true
				q.notTrim = time.Now().Add(trimShare * cost)
			}, at
		}
	}
	// The last of all: whatever else is done needs the heap.
	if after := d.conf.pageoutAfter; work == nil && after != 0 && !q.pagedOut {
		return func(stop func() bool) {
			q.pagedOut = true
			d.pageOut(stop)
		}, q.waits.Add(after)
	}
	return work, due
}

// pageOut has the host swap the Sentry's heap out.
func (d *driver) pageOut(stop func() bool) {
	start := time.Now()
	d.collector.hold()
	if d.halted() {
		d.collector.release()
	}
	pageOut(stop)
	log.Debugf("agentzip: had the host swap out the Sentry's heap in %v", time.Since(start))
}

func (q *quietTime) nextDeepening(d *driver) (work func(stop func() bool), due time.Time) {
	after := d.conf.deepenAfter
	if after == 0 {
		return nil, time.Time{}
	}
	// First what the last steps did not want; all in a wait that lasts.
	pass, done := d.b.DeepenCold, &q.deepened
	if q.deepened {
		after *= deepenAllFactor
		pass, done = d.b.Deepen, &q.deepenedAll
	}
	if *done {
		return nil, time.Time{}
	}
	if process.scarce.pressed() {
		after = 0
	}
	due = q.since.Add(after)
	if due.Before(q.notBefore) {
		due = q.notBefore
	}
	return func(stop func() bool) {
		var n uint64
		var err error
		began := time.Now()
		most := passMax << q.vain
		process.background.run(func() {
			n, err = pass(func() bool {
				switch took := time.Since(began); {
				case stop():
					return true
				case took > passPause && len(d.poolReady()) != 0:
					return true
				default:
					return took > most && process.background.governor.Busy() && !process.scarce.pressed()
				}
			})
		})
		// What was interrupted, or takes so long on a busy host, is taken up again.
		*done = !errors.Is(err, memfile.ErrStopped)
		if *done || n != 0 {
			q.vain = 0
		} else {
			q.vain = min(q.vain+1, 6)
		}
		q.notBefore = time.Now().Add(passPause)
		if n != 0 || err != nil && !benign(err) {
			log.Debugf("agentzip: compressed %d stored pages harder in %v (%v)", n, time.Since(began), err)
		}
	}, due
}

// trim gives the host what the Sentry holds for no need: dentries that filesystems
// keep because somebody may look them up again, and what its heap has in garbage and
// free spans, half of it after a step. It takes 5-20 ms of processor time, most of
// them for a garbage collection, which runs beside everything else. It returns what
// it costs, what may have to be undone included.
func (d *driver) trim(stop func() bool) time.Duration {
	start := time.Now()
	dropped := uint64(0)
	// A kernel that was replaced by a restore has no memory.
	if _, err := d.b.HeldBytes(); err == nil {
		ctx := d.k.SupervisorContext()
		for _, fs := range d.k.VFS().GetFilesystems() {
			if t, ok := fs.Impl().(interface {
				DropCachedDentries(context.Context, func() bool) uint64
			}); ok {
				// A save goes through the same dentries.
				d.k.TryOutsideSave(func() { dropped += t.DropCachedDentries(ctx, stop) })
			}
			fs.DecRef(ctx)
		}
	}
	took := time.Since(start)
	debug.FreeOSMemory()
	log.Debugf("agentzip: dropped %d cached dentries in %v, gave back the Sentry's unused heap in %v", dropped, took, time.Since(start)-took)
	return time.Since(start) + time.Duration(dropped)*reopenCost
}

// A resumption is the return of the memory that a step wants.
type resumption struct {
	d *driver
	// due is closed after that many faults since the last time; nil if no more
	// is to be learnt from them.
	due    <-chan struct{}
	faults int
}

func newResumption(d *driver) *resumption {
	r := &resumption{d: d}
	if d.conf.prefetch {
		r.faults = resumeFaults
		r.due = d.b.AwaitResume(r.faults)
	}
	return r
}

// work fetches what becomes due during the next t, ahead of its use. It returns
// false if the driver was halted.
func (r *resumption) work(t time.Duration) bool {
	end := time.NewTimer(t)
	defer end.Stop()
	for {
		select {
		case <-r.d.stop:
			return false
		case <-end.C:
			return true
		case <-r.d.poolReady():
			// The rest has time until the sandbox waits.
			r.d.takePatterns()
		case <-process.scarce.wanted:
			r.d.relieve()
		case <-r.due:
			// Faults that happen meanwhile count towards the next time.
			if r.due = nil; r.faults < evidenceFaults {
				r.due = r.d.b.AwaitResume(r.faults)
				r.faults *= 2
			}
			r.d.prefetch()
		}
	}
}

// prefetch brings back what the step that is in progress is predicted to want,
// as long as it lasts.
func (d *driver) prefetch() {
	if process.scarce.level() != pressure.None {
		return // it would have to go again
	}
	start := time.Now()
	idle := 0
	last := start
	n, err := d.b.Prefetch(func() bool {
		select {
		case <-d.stop:
			return true
		default:
		}
		// Tasks may block for a moment in the middle of a step.
		if now := time.Now(); now.Sub(last) > time.Millisecond {
			if process.scarce.level() != pressure.None {
				return true
			}
			last = now
			if d.k.RunningTasks() == 0 {
				idle++
			} else {
				idle = 0
			}
		}
		return idle > 20
	})
	if n != 0 || err != nil {
		log.Debugf("agentzip: prefetched %d pages in %v (%v)", n, time.Since(start), err)
	}
}

// runForced evicts everything at a fixed interval, whatever the tasks do, for
// tests of integrity.
func (d *driver) runForced() {
	for n := 0; d.sleep(d.conf.testEvictEvery); n++ {
		if d.f.IsAsyncLoading() {
			continue
		}
		tier := codec.TierFast
		if n%2 == 1 {
			tier = codec.TierDeep
		}
		res, err := d.b.Evict(memfile.EvictOptions{Tier: tier, Settle: d.conf.settle})
		logEvict(res, err)
		d.tellStep()
		d.share(nil)
		if n%4 == 0 {
			_, _ = d.b.Deepen(nil)
		}
	}
}

func benign(err error) bool {
	return errors.Is(err, memfile.ErrStopped) || errors.Is(err, memfile.ErrInhibited) || errors.Is(err, memfile.ErrClosed)
}

func logEvict(res memfile.EvictResult, err error) {
	if err != nil && !benign(err) {
		log.Infof("agentzip: eviction ended early: %v", err)
	}
	if res.Marked != 0 {
		log.Debugf("agentzip: evicted %d of %d pages in %v (touched meanwhile %d, no profitable form %d, left %d)",
			res.Evicted, res.Marked, res.Elapsed, res.Aborted, res.Rejected, res.Skipped)
	}
}
