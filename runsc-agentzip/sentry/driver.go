package sentry

import (
	"errors"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"gvisor.dev/gvisor/pkg/log"
	"gvisor.dev/gvisor/pkg/sentry/kernel"
	"gvisor.dev/gvisor/pkg/sentry/pgalloc"

	"runsc-agentzip/memfile"
	"runsc-agentzip/memfile/codec"
	"runsc-agentzip/memfile/template"
	"runsc-agentzip/pkg/control"
	"runsc-agentzip/pkg/phase"
)

// pollInterval is how often a driver looks whether a working sandbox has
// stopped working. A waiting one costs no polling: the kernel tells when it
// begins to work.
const pollInterval = 20 * time.Millisecond

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
const idleFloor = 1 << 20

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

	// waiting and since are the phase, for statistics: since is in Unix
	// nanoseconds.
	waiting atomic.Bool
	since   atomic.Int64
}

// settings are the driver's share of the configuration.
type settings struct {
	idle, settle, trimAfter, deepenAfter, testEvictEvery time.Duration

	prefetch bool
}

func newDriver(k *kernel.Kernel, f *pgalloc.MemoryFile, b *memfile.Backend, t *template.Digest, pool *pacer, conf settings) *driver {
	d := &driver{k: k, f: f, b: b, template: t, pool: pool, conf: conf, stop: make(chan struct{})}
	d.since.Store(time.Now().UnixNano())
	return d
}

// halt ends the driver's goroutines.
func (d *driver) halt() {
	d.stopOnce.Do(func() { close(d.stop) })
}

func (d *driver) setWaiting(w bool) {
	if d.waiting.Swap(w) != w {
		d.since.Store(time.Now().UnixNano())
	}
}

func (d *driver) phase() control.Phase {
	p := control.Phase{State: "working", SinceNS: uint64(max(time.Now().UnixNano()-d.since.Load(), 0))}
	switch {
	case d.b.Inhibited():
		p.State = "inhibited"
	case d.waiting.Load():
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
	det := phase.NewDetector(d.conf.idle)
	var heldAfter uint64
	// quiet is the time since memory was last wanted back. A timer in the guest
	// that beats now and then ends a wait, but not this.
	quiet := quietTime{since: time.Now()}
	// activity is closed when a task runs; it is nil while one does, as far as
	// is known.
	var activity <-chan struct{}
	// A sandbox that was restored from a template has all of it to fetch.
	resume := newResumption(d)
	for {
		// Working.
		if d.k.RunningTasks() != 0 {
			d.setWaiting(false)
			if !resume.work(pollInterval) {
				return
			}
			continue
		}
		// No task runs. It is a wait if none does for the idle time. Nothing
		// is missed between two looks: activity ends the timer.
		if activity == nil {
			activity = d.watchActivity()
		}
		select {
		case <-d.stop:
			return
		case <-activity:
			activity = nil
			continue
		case <-time.After(det.Idle()):
		}
		d.setWaiting(true)
		waitStart := time.Now()
		stop := func() bool {
			select {
			case <-activity:
				return true
			case <-d.stop:
				return true
			default:
				return false
			}
		}
		var work time.Duration
		var res memfile.EvictResult
		retry := d.f.IsAsyncLoading()
		held, err := d.b.HeldBytes()
		if due := err == nil && held > heldAfter+idleFloor && !retry; due && d.takeTurn(activity) {
			workStart := time.Now()
			tier := codec.TierMid
			switch {
			case process.background.governor.Busy():
				tier = codec.TierFast
			case d.conf.deepenAfter == 0:
				tier = codec.TierDeep
			}
			quiet = quietTime{since: waitStart}
			process.background.run(func() {
				res, err = d.b.Evict(memfile.EvictOptions{Tier: tier, Settle: d.conf.settle, Stop: stop})
			})
			work = time.Since(workStart)
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
		for late := !retry; late; {
			work, due := quiet.next(d)
			var timer <-chan time.Time
			if work != nil {
				timer = time.After(time.Until(due))
			}
			select {
			case <-activity:
				late = false
			case <-d.stop:
				return
			case <-d.poolReady():
				work = d.share
			case <-d.poolBacklog():
				work = d.share
			case <-timer:
			}
			if late {
				work(stop)
				if d.b.StalePages() {
					quiet.deepened, quiet.deepenedAll = false, false
				}
			}
		}
		if retry {
			// Something kept the eviction from ending (loading, a save, a
			// busy memory manager, or activity): try again if the wait goes
			// on.
			select {
			case <-activity:
			case <-d.stop:
				return
			case <-time.After(max(det.Idle(), 250*time.Millisecond)):
				continue
			}
		}
		activity = nil
		length := time.Since(waitStart)
		d.setWaiting(false)
		// Work that needs its memory back shows at once.
		if !resume.work(pollInterval) {
			return
		}
		det.Ended(phase.Wait{Length: length, Work: work, Evicted: res.Evicted, Undone: res.Aborted + res.Skipped})
	}
}

// A quietTime is a time in which next to no memory is wanted, and what is done
// in it once.
type quietTime struct {
	since                          time.Time
	trimmed, deepened, deepenedAll bool
	// notBefore is when a deepening that was put off or interrupted may go on.
	notBefore time.Time
}

// deepenAllFactor is how many times longer a wait has to last for pages to be
// compressed harder that the last steps wanted. busyPause is how long compression
// stays away from a busy host.
const (
	deepenAllFactor = 4
	busyPause       = time.Second
)

// next returns what is to be done next and when, or nil.
func (q *quietTime) next(d *driver) (work func(stop func() bool), due time.Time) {
	work, due = q.nextDeepening(d)
	if after := d.conf.trimAfter; after != 0 && !q.trimmed && (work == nil || due.After(q.since.Add(after))) {
		return func(func() bool) {
			q.trimmed = true
			trim()
		}, q.since.Add(after)
	}
	return work, due
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
	due = q.since.Add(after)
	if due.Before(q.notBefore) {
		due = q.notBefore
	}
	return func(stop func() bool) {
		var n uint64
		var err error
		process.background.run(func() {
			n, err = pass(func() bool { return stop() || process.background.governor.Busy() })
		})
		// Only what activity interrupted, or a busy host, is taken up again.
		*done = !errors.Is(err, memfile.ErrStopped)
		q.notBefore = time.Now().Add(busyPause)
		if n != 0 || err != nil && !benign(err) {
			log.Debugf("agentzip: compressed %d stored pages harder (%v)", n, err)
		}
	}, due
}

// trim gives the host what the Sentry's own heap does not need: half of it is
// garbage and free spans after a step. It is a garbage collection, 5-20 ms of
// processor time, which runs beside everything else.
func trim() {
	start := time.Now()
	debug.FreeOSMemory()
	log.Debugf("agentzip: gave back the Sentry's unused heap in %v", time.Since(start))
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

// watchActivity returns a channel that is closed when a task runs.
func (d *driver) watchActivity() <-chan struct{} {
	c := make(chan struct{})
	go func() {
		if d.k.WaitForTaskActivity(d.stop) {
			close(c)
		}
	}()
	return c
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
