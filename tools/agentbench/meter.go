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
	jobs   chan meterJob
	done   chan struct{}

	mu      sync.Mutex
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

func startMeter(clones int, measure func(context.Context, *clone, waitID) (report.Memory, error), failed func(error)) (*meter, error) {
	// A clone has at most one wait that goes on and one that just ended.
	m := &meter{measure: measure, failed: failed, jobs: make(chan meterJob, 2*clones), done: make(chan struct{})}
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
	for j := range m.jobs {
		if j.ctx.Err() != nil {
			m.drop()
			continue
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

// request asks for a measurement, which is worth something until ctx ends.
func (m *meter) request(ctx context.Context, c *clone, w waitID) {
	select {
	case m.jobs <- meterJob{ctx, c, w}:
	default:
		m.drop()
	}
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
	close(m.jobs)
	<-m.done
	return m.samples, m.dropped
}
