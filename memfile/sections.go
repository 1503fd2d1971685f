package memfile

import (
	"sync/atomic"
	"time"
)

// sections lets an eviction wait for accesses that no lock covers, without ever
// making one of them wait. It is a two-slot counter in the manner of sleepable
// RCU (McKenney, "Sleepable RCU", LWN 2006): an access counts itself in the
// slot that is current when it begins; a waiter moves newcomers to the other
// slot and waits until it has seen each slot at zero.
//
// A newcomer may read the current slot and be late to count itself, so that a
// waiter misses it. That is harmless: its Gate comes after counting, so after
// the waiter's marks, and sees them.
type sections struct {
	current atomic.Uint32
	_       [60]byte
	n       [2]struct {
		count atomic.Int64
		_     [56]byte
	}
}

func (s *sections) enter() uint32 {
	i := s.current.Load() & 1
	s.n[i].count.Add(1)
	return i
}

func (s *sections) exit(i uint32) {
	if s.n[i].count.Add(-1) < 0 {
		panic("memfile: section closed twice")
	}
}

// wait returns true once every section that was open when it was called has
// been closed, or false at the deadline or when stop returns true. Only one
// caller at a time.
func (s *sections) wait(deadline time.Time, stop func() bool) bool {
	for range 2 {
		old := s.current.Load() & 1
		s.current.Store(old ^ 1)
		for pause := 10 * time.Microsecond; s.n[old].count.Load() != 0; {
			if stop() || time.Now().After(deadline) {
				return false
			}
			time.Sleep(pause)
			pause = min(2*pause, time.Millisecond)
		}
	}
	return true
}
