package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"runsc-agentzip/pkg/fleet"
	"runsc-agentzip/tools/agentbench/report"
)

const (
	// quietLimit is the longest time that an episode waits for other programs.
	quietLimit = 15 * time.Second
	// othersLimit is the part of the processors that other programs may use
	// during an episode before that is worth mentioning.
	othersLimit = 0.1
	// settleLimit is the longest time that clones get to become small before
	// they are ended.
	settleLimit = 10 * time.Second
	// freeingTime is what the kernel takes to free all memory of what ended.
	freeingTime = time.Second
)

// episode is the turn of one system at one workload.
type episode struct {
	r    *benchmark
	key  report.Key
	sys  *contender
	work *preparedWorkload
	swap *swapSpace // nil unless the system swaps
	pool *pagePool  // nil unless the system's sandboxes share one

	began    time.Time
	clones   []*clone
	timeline *timeline
	meter    *meter

	steps atomic.Int64

	mu  sync.Mutex
	out episodeResult
}

// episodeResult is what an episode adds to the report.
type episodeResult struct {
	report.Episode
	steps    []report.Step
	memory   []report.Memory
	points   []report.Point
	problems []report.Problem
	// answers are those of each clone, one for each step and then its state.
	answers [][]string
	kept    keptPart
}

// problem notes something that fails the run or spoils its figures.
func (e *episode) problem(fatal bool, format string, a ...any) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.out.problems = append(e.out.problems, report.Problem{Key: e.key, Fatal: fatal, Text: fmt.Sprintf(format, a...)})
}

// keep notes which part of its guest memory the host still holds in a sample.
func (e *episode) keep(m *report.Memory, part float64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.out.kept[idOf(m.Key, m.Clone, m.Index)] = part
}

// scaled is a planned wait as --wait-scale makes it.
func (e *episode) scaled(d time.Duration) time.Duration {
	return time.Duration(float64(d) * e.r.cfg.waitScale)
}

// run takes the clones through their lives.
func (e *episode) run(ctx context.Context) (err error) {
	e.out.Episode = report.Episode{Key: e.key}
	e.out.kept = make(keptPart)
	defer func() { err = errors.Join(err, e.close()) }()
	if e.sys.swaps {
		if e.swap, err = openSwapSpace(ctx, e); err != nil {
			return err
		}
	}
	load, err := awaitQuietHost(ctx, quietLimit)
	if err != nil {
		return err
	}
	if !load.quiet {
		e.problem(false, "other programs used %.0f %% of the processors before the episode began: its times mean little", 100*load.busy)
	}
	cpu, err := readCPUTimes()
	if err != nil {
		return err
	}
	own := selfCPU()
	e.began = time.Now()
	e.out.Began = e.began.Sub(e.r.progress.began).Seconds()
	if e.timeline, err = startTimeline(ctx, e.key, e.began); err != nil {
		return err
	}
	defer e.timeline.stop()
	// After the timeline's first look at the host: the pool is part of what the
	// sandboxes add to it.
	if e.sys.pooled {
		if e.pool, err = e.r.startPool(ctx, e.sys); err != nil {
			return err
		}
	}

	if err := e.restore(ctx); err != nil {
		return err
	}
	if err := e.drive(ctx); err != nil {
		return err
	}
	e.out.Seconds = time.Since(e.began).Seconds()
	now, err := readCPUTimes()
	if err != nil {
		return err
	}
	e.out.CPUSeconds = (now.busy - cpu.busy).Seconds()
	own = selfCPU() - own - e.swapCPU()
	e.out.OwnCPUSeconds = own.Seconds()
	e.out.IdleCPUSeconds = load.perSecond * e.out.Seconds
	sandboxes, err := e.sandboxCPU()
	if err != nil {
		return err
	}
	if e.pool != nil {
		// Without it the sandboxes would have gone on alone, unnoticed.
		if err := e.pool.alive(); err != nil {
			return err
		}
		// The pool works for the sandboxes only. It has not been waited for, so
		// that it is not in own.
		pool, err := e.pool.CPUTime()
		if err != nil {
			return err
		}
		e.out.PoolCPUSeconds = pool.Seconds()
		sandboxes += pool
	}
	e.out.SandboxCPUSeconds = sandboxes.Seconds()
	// KSM's thread counts as others', and a guest process that ended as far as
	// the kernel does not credit it to its parent.
	others := e.out.CPUSeconds - e.out.OwnCPUSeconds - sandboxes.Seconds()
	if share := ratio(others, (now.all - cpu.all).Seconds()); share > othersLimit {
		e.problem(false, "other programs used %.0f %% of the processors during the episode: its times and processor time mean little", 100*share)
	}
	if e.out.points, e.out.PeakBytes, err = e.timeline.end(); err != nil {
		return err
	}
	e.out.TemplateOnceBytes = e.timeline.templateOnce.Load()

	if err := e.verify(ctx); err != nil {
		return err
	}
	return e.teardown(ctx)
}

// swapCPU is the processor time that swapping out has taken in the name of this
// process.
func (e *episode) swapCPU() time.Duration {
	var t time.Duration
	for _, c := range e.clones {
		if c.swap != nil {
			t += c.swap.cpuTime()
		}
	}
	return t
}

// sandboxCPU is the processor time that the clones have taken, and what was done
// for them.
func (e *episode) sandboxCPU() (time.Duration, error) {
	t := e.swapCPU()
	for _, c := range e.clones {
		cpu, err := c.sb.CPUTime()
		if err != nil {
			return 0, endedWhy(c.sb, err)
		}
		t += cpu
	}
	return t, nil
}

// restore starts the clones, one after the other.
func (e *episode) restore(ctx context.Context) error {
	for i := range e.key.Clones {
		c := &clone{e: e, index: i, plan: e.work.plan(e.key.Repetition, i)}
		if e.swap != nil {
			var err error
			if c.swap, err = e.swap.swapper(i); err != nil {
				return err
			}
		}
		e.clones = append(e.clones, c)
		e.timeline.waiting.Store(int64(i))
		took, err := c.restore(ctx)
		if err != nil {
			return fmt.Errorf("restoring %s clone %d: %w", e.key.System, i, err)
		}
		e.out.Restores = append(e.out.Restores, took.Seconds())
		if i == 0 {
			if err := e.findTemplate(c); err != nil {
				return err
			}
		}
		e.r.progress.status("%s: restored %d/%d", e, i+1, e.key.Clones)
	}
	e.timeline.waiting.Store(0)
	return nil
}

// findTemplate sees whether clones share their template, for the timeline.
func (e *episode) findTemplate(c *clone) error {
	m, err := c.sb.Memory()
	if err != nil {
		return endedWhy(c.sb, err)
	}
	if m.Template != nil {
		_, err = e.cachedTemplate(m.Template)
	}
	return err
}

// start restores the sandbox of one clone.
func (e *episode) start(ctx context.Context, clone int) (*fleet.Sandbox, error) {
	var opts []fleet.StartOption
	if e.swap != nil {
		opts = e.clones[clone].swap.startOptions()
	}
	if e.pool != nil {
		opts = append(opts, fleet.WithFlags(e.pool.flags()...))
	}
	// Of one width: runsc takes the beginning of an id for the id.
	return e.sys.rt.Restore(ctx, fmt.Sprintf("clone-%03d", clone), e.work.bundle, e.work.images[e.sys.judged], opts...)
}

// drive lets every clone take all its steps at its own pace, and measures.
func (e *episode) drive(ctx context.Context) error {
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	var err error
	if e.meter, err = startMeter(e.measure, fail); err != nil {
		return err
	}
	g, gctx := errgroup.WithContext(ctx)
	for _, c := range e.clones {
		g.Go(func() error { return c.drive(gctx) })
	}
	err = g.Wait()
	var dropped int
	e.out.memory, dropped = e.meter.end()
	if cause := context.Cause(ctx); cause != nil && !errors.Is(cause, context.Canceled) {
		return cause
	}
	if err != nil {
		return err
	}
	if dropped > 0 {
		e.problem(false, "memory was measured in %d of %d waits: the machine was too busy in the others", len(e.out.memory), len(e.out.memory)+dropped)
	}
	if e.pool != nil {
		lost := unpooled(e.out.memory)
		for _, clone := range slices.Sorted(maps.Keys(lost)) {
			e.problem(false, "clone %d was not connected to the page pool when it was measured last: %s", clone, lost[clone])
		}
	}
	for _, c := range e.clones {
		e.out.steps = append(e.out.steps, c.steps...)
		e.out.Waits += len(c.plan) + 1
	}
	return nil
}

// unpooled are the clones that had no connection to the page pool when they were
// measured last, and why.
func unpooled(samples []report.Memory) map[int]string {
	out := make(map[int]string)
	last := make(map[int]float64)
	for _, m := range samples {
		if m.Stats == nil || m.At < last[m.Clone] {
			continue
		}
		last[m.Clone] = m.At
		delete(out, m.Clone)
		if why := notConnected(m.Stats.Pool); why != "" {
			out[m.Clone] = why
		}
	}
	return out
}

// stepDone tells how far the episode is.
func (e *episode) stepDone() {
	n, all := e.steps.Add(1), 0
	for _, c := range e.clones {
		all += len(c.plan)
	}
	owned := ""
	if b, ok := e.meter.owned(); ok && b > 0 {
		owned = ", owned " + mib(b)
	}
	e.r.progress.status("%s: step %d/%d%s, all on the host %s", e, n, all, owned, mib(e.timeline.used()))
}

// verify compares everything the clones hold, outside the timed steps, and has
// the runtime check itself.
func (e *episode) verify(ctx context.Context) error {
	for i, c := range e.clones {
		e.r.progress.status("%s: verifying the state of clone %d/%d", e, i+1, e.key.Clones)
		if err := c.state(ctx); err != nil {
			return err
		}
		e.out.answers = append(e.out.answers, c.answers)
		if !e.sys.counted {
			continue
		}
		check, err := c.sb.Check(ctx)
		if err != nil {
			return fmt.Errorf("checking %s clone %d: %w", e.key.System, i, err)
		}
		for _, p := range check.Problems {
			e.problem(true, "check of clone %d: %s", i, p)
		}
	}
	return nil
}

// teardown ends the sandboxes and sees what the host gets back. They wait
// first, as they do most of the time: the digest of their state made them large.
func (e *episode) teardown(ctx context.Context) error {
	if err := e.settle(ctx); err != nil {
		return err
	}
	before, err := fleet.ReadHostMemory()
	if err != nil {
		return err
	}
	for _, c := range e.clones {
		if err := c.sb.Delete(ctx); err != nil {
			return err
		}
	}
	if err := e.stopPool(); err != nil {
		return err
	}
	if err := sleep(ctx, freeingTime); err != nil {
		return err
	}
	after, err := fleet.ReadHostMemory()
	if err != nil {
		return err
	}
	e.out.FreedBytes = int64(after.Available) - int64(before.Available)
	return nil
}

// settle lets all clones wait until they are small, or for a limit.
func (e *episode) settle(ctx context.Context) error {
	e.r.progress.status("%s: letting the clones wait", e)
	if _, err := quiesce(ctx, e.sandboxes(), e.pool, settleLimit); err != nil {
		return err
	}
	sctx, cancel := context.WithTimeout(ctx, settleLimit)
	defer cancel()
	for _, c := range e.clones {
		if c.swap != nil && c.swap.settle(sctx) != nil {
			break
		}
	}
	return ctx.Err()
}

// sandboxes are those of all clones.
func (e *episode) sandboxes() []*fleet.Sandbox {
	var sbs []*fleet.Sandbox
	for _, c := range e.clones {
		sbs = append(sbs, c.sb)
	}
	return sbs
}

// stopPool ends the page pool, if there is one.
func (e *episode) stopPool() error {
	if e.pool == nil {
		return nil
	}
	dead := e.pool.alive()
	killed, err := e.pool.stop()
	if dead != nil {
		e.problem(true, "%v", dead)
	}
	if killed {
		e.problem(false, "the page pool did not end within %v of SIGTERM and was killed", e.pool.grace)
	}
	e.pool = nil
	return err
}

// close ends what still runs and puts the host back.
func (e *episode) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var errs []error
	for _, c := range e.clones {
		if c.swap != nil {
			c.swap.close()
		}
		if c.sb != nil {
			errs = append(errs, c.sb.Delete(ctx))
		}
	}
	errs = append(errs, e.stopPool())
	if e.swap != nil {
		errs = append(errs, e.swap.close())
	}
	return errors.Join(errs...)
}

func (e *episode) String() string {
	return fmt.Sprintf("%s x%d %s rep %d/%d", e.key.Workload, e.key.Clones, e.key.System, e.key.Repetition+1, e.r.cfg.repetitions)
}
