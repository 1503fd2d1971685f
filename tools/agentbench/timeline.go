package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"runsc-agentzip/pkg/fleet"
	"runsc-agentzip/tools/agentbench/report"
)

// timelineEvery is the distance of two readings of the host's memory.
const timelineEvery = 400 * time.Millisecond

// timeline follows the memory of the whole host during an episode.
type timeline struct {
	key   report.Key
	began time.Time
	// before is the memory available before the episode, ownBefore what this
	// program held then: its own growth is not the sandboxes'.
	before, ownBefore uint64
	// templateOnce is what the host caches of a template that all clones share,
	// waiting the number of clones that wait.
	templateOnce atomic.Uint64
	waiting      atomic.Int64

	mu     sync.Mutex
	points []report.Point
	err    error
	stop   func()
	done   chan struct{}
}

// startTimeline reads the host's memory until the timeline is ended.
func startTimeline(ctx context.Context, key report.Key, began time.Time) (*timeline, error) {
	host, err := fleet.ReadHostMemory()
	if err != nil {
		return nil, err
	}
	own, err := ownMemory()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	t := &timeline{key: key, began: began, before: host.Available, ownBefore: own, stop: cancel, done: make(chan struct{})}
	go func() {
		defer close(t.done)
		tick := time.NewTicker(timelineEvery)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				t.read()
			case <-ctx.Done():
				return
			}
		}
	}()
	return t, nil
}

func (t *timeline) read() {
	host, err := fleet.ReadHostMemory()
	own, oerr := ownMemory()
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := errors.Join(err, oerr); err != nil {
		t.err = err
		return
	}
	used := t.templateOnce.Load()
	// Other programs may have given back more than the sandboxes take.
	if before, now := t.before+t.ownBefore, host.Available+own; now < before {
		used += before - now
	}
	t.points = append(t.points, report.Point{Key: t.key, At: time.Since(t.began).Seconds(), UsedBytes: used, Waiting: int(t.waiting.Load())})
}

// ownMemory is the private memory that this program holds.
func ownMemory() (uint64, error) {
	b, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		return 0, err
	}
	var size, resident, shared uint64
	if _, err := fmt.Sscan(string(b), &size, &resident, &shared); err != nil {
		return 0, fmt.Errorf("/proc/self/statm: %w", err)
	}
	return (resident - min(resident, shared)) * uint64(os.Getpagesize()), nil
}

// used is the latest reading.
func (t *timeline) used() uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.points) == 0 {
		return 0
	}
	return t.points[len(t.points)-1].UsedBytes
}

// end takes a last reading and returns all of them and the largest.
func (t *timeline) end() (points []report.Point, peak uint64, err error) {
	t.stop()
	<-t.done
	t.read()
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, p := range t.points {
		peak = max(peak, p.UsedBytes)
	}
	return t.points, peak, t.err
}
