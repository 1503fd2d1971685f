package server

import (
	"runtime"
	"slices"
	"sync"
	"time"

	"runsc-agentzip/pkg/pool/wire"
)

const (
	// turnLease is after how long a turn passes to another that waits for it.
	// An eviction takes less than a second of processor time, mostly.
	turnLease = 5 * time.Second
	// maxTurnQueue is how many connections may wait for a turn. Others have
	// theirs at once.
	maxTurnQueue = 64 << 10
)

// turns limits how many sandboxes of the host evict memory at the same time:
// half of the processors are left to those that work. Without a limit, the more
// sandboxes wait the less the others get, whatever the priorities, since each has
// a thread of its own. First come, first served, whatever the domain.
//
// A connection that has its turn is a holder; one that has asked is in the queue.
// It is neither before it asks, after it is done, and after its lease has ended.
type turns struct {
	// most is how many have their turn. It is immutable.
	most int

	// mu protects what follows. conn.mu follows it.
	mu      sync.Mutex
	holders []holder // the oldest first
	queue   []*conn
	timer   *time.Timer
	granted uint64
	lapsed  uint64
}

type holder struct {
	c     *conn
	since time.Time
}

func (t *turns) init() { t.most = max(1, runtime.NumCPU()/2) }

func (t *turns) holds(c *conn) bool {
	return slices.ContainsFunc(t.holders, func(h holder) bool { return h.c == c })
}

// take is for a connection that would like to have its turn.
func (t *turns) take(c *conn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case t.holds(c):
		c.sendTurn()
	case slices.Contains(t.queue, c):
	case len(t.queue) >= maxTurnQueue:
		c.sendTurn()
	default:
		t.queue = append(t.queue, c)
		t.next()
	}
}

// give is for a connection that has had its turn, or does not want it.
func (t *turns) give(c *conn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.holders = slices.DeleteFunc(t.holders, func(h holder) bool { return h.c == c })
	t.queue = slices.DeleteFunc(t.queue, func(o *conn) bool { return o == c })
	t.next()
}

// next gives turns to those that wait. t.mu must be held.
func (t *turns) next() {
	now := time.Now()
	for len(t.queue) > 0 {
		if len(t.holders) >= t.most {
			if now.Sub(t.holders[0].since) < turnLease {
				break
			}
			t.holders = t.holders[1:]
			t.lapsed++
		}
		c := t.queue[0]
		t.queue = slices.Delete(t.queue, 0, 1)
		if c.sendTurn() {
			t.holders = append(t.holders, holder{c, now})
			t.granted++
		}
	}
	if t.timer != nil {
		t.timer.Stop()
		t.timer = nil
	}
	if len(t.queue) == 0 {
		return
	}
	t.timer = time.AfterFunc(time.Until(t.holders[0].since.Add(turnLease)), func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.next()
	})
}

func (t *turns) stop() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.queue = nil
	if t.timer != nil {
		t.timer.Stop()
	}
}

// sendTurn tells a connection that it has its turn.
func (c *conn) sendTurn() bool {
	var w wire.Writer
	w.Begin(wire.Turn, 1)
	return c.push(packet{msg: w.Bytes()}, false)
}
