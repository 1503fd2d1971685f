package main

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"runsc-agentzip/tools/agentbench/report"
)

// meter measures the memory of clones, one at a time, without getting into the
// way of those that work: on a thread of its own that runs only when a processor
// has nothing else to do, as do the commands that it starts.
//
// A measurement that has not ended when the clone's wait does is dropped: it
// would show a clone that works already.
type meter struct {
	measure func(context.Context, *clone, waitID) (report.Memory, error)
	// failed is told what ends the episode.
	failed func(error)
	done   chan struct{}

	mu     sync.Mutex
	wanted sync.Cond // jobs or ended changed
	jobs   []meterJob
	ended  bool

	samples []report.Memory
	dropped int
}

type meterJob struct {
	ctx   context.Context
	clone *clone
	wait  waitID
}

// waitID names a wait of a clone.
type waitID struct {
	// index is the step that it follows.
	index int
	since time.Time
}

func startMeter(measure func(context.Context, *clone, waitID) (report.Memory, error), failed func(error)) (*meter, error) {
	m := &meter{measure: measure, failed: failed, done: make(chan struct{})}
	m.wanted.L = &m.mu
	started := make(chan error)
	go func() {
		defer close(m.done)
		// Never unlocked: the thread, and its policy, end with the goroutine.
		runtime.LockOSThread()
		err := unix.SchedSetAttr(0, &unix.SchedAttr{Policy: unix.SCHED_IDLE}, 0)
		started <- err
		if err == nil {
			m.run()
		}
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("lowering the priority of measurements: %w", err)
	}
	return m, nil
}

// collectEvery is the number of measurements after which garbage is collected.
const collectEvery = 8

func (m *meter) run() {
	n := 0
	for {
		j, ok := m.next()
		if !ok {
			return
		}
		s, err := m.measure(j.ctx, j.clone, j.wait)
		switch {
		case j.ctx.Err() != nil:
			m.drop()
		case err != nil:
			m.failed(fmt.Errorf("measuring %s clone %d: %w", j.clone.e.key.System, j.clone.index, err))
		default:
			m.mu.Lock()
			m.samples = append(m.samples, s)
			m.mu.Unlock()
		}
		if n++; n%collectEvery == 0 {
			collectGarbage()
		}
	}
}

// collectGarbage collects on another thread. A collection stops all goroutines
// for a moment, those that time steps included, and that moment would be long
// if this thread, which hardly runs on a busy machine, had a part in it. For
// this reason the collector does not run by itself during a run.
func collectGarbage() {
	done := make(chan struct{})
	go func() {
		runtime.GC()
		close(done)
	}()
	<-done
}

// next waits for a job: the one asked for last, which has the most time left.
func (m *meter) next() (meterJob, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for {
		for len(m.jobs) > 0 {
			last := len(m.jobs) - 1
			j := m.jobs[last]
			m.jobs = m.jobs[:last]
			if j.ctx.Err() == nil {
				return j, true
			}
			m.dropped++
		}
		if m.ended {
			return meterJob{}, false
		}
		m.wanted.Wait()
	}
}

// request asks for a measurement, which is worth something until ctx ends.
func (m *meter) request(ctx context.Context, c *clone, w waitID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.jobs = append(m.jobs, meterJob{ctx, c, w})
	m.wanted.Signal()
}

func (m *meter) drop() {
	m.mu.Lock()
	m.dropped++
	m.mu.Unlock()
}

// owned is the mean of what the clones owned when each was last measured.
func (m *meter) owned() (bytes uint64, ok bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	last := make(map[int]uint64)
	for _, s := range m.samples {
		last[s.Clone] = s.OwnedBytes
	}
	if len(last) == 0 {
		return 0, false
	}
	for _, v := range last {
		bytes += v
	}
	return bytes / uint64(len(last)), true
}

// end ends the measuring, for which no clone may be driven any more, and returns
// the samples and the number of those that were dropped.
func (m *meter) end() ([]report.Memory, int) {
	m.mu.Lock()
	m.ended = true
	m.wanted.Signal()
	m.mu.Unlock()
	<-m.done
	return m.samples, m.dropped
}
