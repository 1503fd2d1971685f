package memfile

import (
	"sync"
	"sync/atomic"
)

// waiters lets accesses wait for pages that are committing or busy. Pages share
// shards, so a wake-up may be meant for another page.
type waiters struct {
	// waiting is incremented by a waiter before it looks at its page again, so
	// that whoever changes a page and then reads zero has nobody to wake.
	waiting atomic.Int64
	shards  [64]struct {
		mu   sync.Mutex
		cond sync.Cond
	}
}

func (w *waiters) init() {
	for i := range w.shards {
		w.shards[i].cond.L = &w.shards[i].mu
	}
}

// wait returns when the page's word is in a state that does not need waiting for.
func (w *waiters) wait(t *table, page uint64) {
	s := &w.shards[page%uint64(len(w.shards))]
	s.mu.Lock()
	w.waiting.Add(1)
	for {
		if st := t.load(page) & stateMask; st != committing && st != busy {
			break
		}
		s.cond.Wait()
	}
	w.waiting.Add(-1)
	s.mu.Unlock()
}

// wake wakes those who wait for a page in [first, end), whose words have been
// changed.
func (w *waiters) wake(first, end uint64) {
	if w.waiting.Load() == 0 {
		return
	}
	if end-first > uint64(len(w.shards)) {
		end = first + uint64(len(w.shards))
	}
	for p := first; p < end; p++ {
		s := &w.shards[p%uint64(len(w.shards))]
		s.mu.Lock()
		s.cond.Broadcast()
		s.mu.Unlock()
	}
}
