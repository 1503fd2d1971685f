package memfile

import (
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime/pprof"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"runsc-agentzip/memfile/codec"
)

var stressTime = flag.Duration("stress", 2*time.Second, "how long each stress test runs")

func stressDuration() time.Duration {
	if testing.Short() {
		return *stressTime / 8
	}
	return *stressTime
}

// A stress runs goroutines that do at random what a Sentry does.
type stress struct {
	h *fakeHost

	// world is locked for writing while a save pauses everybody, as the
	// kernel is paused for a checkpoint.
	world sync.RWMutex

	spaces []*space
	files  []*file
	pool   *fakePool // or nil

	stop chan struct{}
	wg   sync.WaitGroup
	ops  [16]struct {
		n uint64
		_ [56]byte
	}
}

// A file is a tmpfs file: its pages are accessed through mappings that no
// memory manager knows of, under a lock of its own and inside of a section.
type file struct {
	mu   sync.RWMutex // dataMu
	data Range        // holds a reference; empty if End is 0
}

// TestStress lets everything happen at the same time, with and without
// failures of the host, and checks every byte that anybody sees.
func TestStress(t *testing.T) {
	d := stressDuration()
	for _, c := range []struct {
		name   string
		opts   func(*Options)
		faults func(*faults)
	}{
		{"plain", func(*Options) {}, func(*faults) {}},
		{"tight", func(o *Options) {
			// Few restorers, a small unit and a store that is always full.
			o.Restorers, o.MapUnit, o.StoreMax, o.Workers = 1, PageSize, 1<<20, 2
		}, func(*faults) {}},
		{"template", func(o *Options) { o.Workers = 3 }, func(*faults) {}},
		{"pool", func(o *Options) { o.Workers = 2 }, func(*faults) {}},
		{"faults", func(o *Options) {
			o.NoMemoryTimeout = 5 * time.Millisecond
			o.StoreMax = 2 << 20
		}, func(f *faults) {
			f.noMemoryIn.Store(100)
			f.readIn.Store(20)
			f.punchIn.Store(50)
			f.busyIn.Store(20)
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			opts := DefaultOptions()
			opts.MapUnit = 16 << 10
			opts.AccessTimeout = 20 * time.Millisecond
			c.opts(&opts)
			h := newFakeHost(t, 1024, &opts)
			c.faults(&h.faults)
			s := newStress(h)
			if c.name != "plain" && c.name != "tight" {
				rnd := rand.New(rand.NewPCG(1, 2))
				for _, p := range h.adopt(t, rnd, 500) {
					sp := s.space(rnd)
					sp.extents = append(sp.extents, p)
				}
			}
			if c.name == "pool" || c.name == "faults" {
				s.share()
				defer func() { s.pool.verify(t, h.backend) }()
			}
			s.run(t, d)
		})
	}
}

func newStress(h *fakeHost) *stress {
	h.slow = true
	s := &stress{h: h, stop: make(chan struct{})}
	for range 4 {
		s.spaces = append(s.spaces, h.newSpace())
	}
	for range 3 {
		s.files = append(s.files, new(file))
	}
	return s
}

// share gives the Backend a pool that comes and goes.
func (s *stress) share() {
	b := s.h.backend
	s.pool = newFakePool(s.h.template, 1)
	b.SetPool(s.pool)
	s.loop(func(rnd *rand.Rand) {
		end := time.Now().Add(time.Duration(rnd.IntN(20)) * time.Millisecond)
		_, _ = b.Share(func() bool { return time.Now().After(end) })
		time.Sleep(time.Duration(rnd.IntN(2000)) * time.Microsecond)
	})
	s.loop(func(rnd *rand.Rand) {
		switch rnd.IntN(10) {
		case 0:
			s.pool.connect()
		case 1:
			s.pool.disconnect()
			time.Sleep(time.Duration(rnd.IntN(10)) * time.Millisecond)
			s.pool.connect()
		case 2, 3:
			s.pool.retire()
		}
		time.Sleep(time.Duration(rnd.IntN(20)) * time.Millisecond)
	})
}

// loop starts a goroutine that calls fn until the end.
func (s *stress) loop(fn func(rnd *rand.Rand)) {
	s.wg.Add(1)
	rnd := rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64()))
	go func() {
		defer s.wg.Done()
		for {
			select {
			case <-s.stop:
				return
			default:
				fn(rnd)
			}
		}
	}()
}

func (s *stress) run(t *testing.T, d time.Duration) {
	watchdog := time.AfterFunc(d+time.Minute, func() {
		_ = pprof.Lookup("goroutine").WriteTo(os.Stderr, 2)
		panic("the stress test hangs")
	})
	defer watchdog.Stop()
	h, b := s.h, s.h.backend
	user := func(fn func(rnd *rand.Rand)) {
		s.loop(func(rnd *rand.Rand) {
			s.world.RLock()
			defer s.world.RUnlock()
			fn(rnd)
		})
	}
	for range 3 {
		user(s.application)
		user(s.sentry)
	}
	user(s.fileUser)
	user(s.fileUser)
	user(s.pinner)
	user(func(rnd *rand.Rand) {
		h.release(1 + rnd.IntN(64))
		time.Sleep(time.Duration(rnd.IntN(2000)) * time.Microsecond)
	})

	var mu sync.Mutex
	outcomes := map[string]int{}
	note := func(format string, args ...any) {
		mu.Lock()
		defer mu.Unlock()
		outcomes[fmt.Sprintf(format, args...)]++
	}
	benign := func(op string, err error) {
		if err == nil {
			note("%s", op)
			return
		}
		for _, is := range []error{ErrStopped, ErrInhibited, errBusy, unix.EIO, unix.EINTR, unix.ENOMEM} {
			if errors.Is(err, is) {
				note("%s: %v", op, is)
				return
			}
		}
		for _, says := range []string{"too long", "too busy"} {
			if strings.Contains(err.Error(), says) {
				note("%s: %s", op, says)
				return
			}
		}
		panic(fmt.Sprintf("%s: %v", op, err))
	}
	for i := range 2 {
		s.loop(func(rnd *rand.Rand) {
			opts := EvictOptions{Tier: codec.Tier(rnd.IntN(3))}
			if i == 1 {
				opts.Settle = time.Duration(rnd.IntN(3000)) * time.Microsecond
				end := time.Now().Add(time.Duration(rnd.IntN(20)) * time.Millisecond)
				opts.Stop = func() bool { return time.Now().After(end) }
			}
			res, err := b.Evict(opts)
			if n := res.Evicted + res.Aborted + res.Rejected + res.Locked + res.Skipped; n > res.Marked {
				panic(fmt.Sprintf("%d of %d pages are accounted for: %+v", n, res.Marked, res))
			}
			benign("evict", err)
			time.Sleep(time.Duration(rnd.IntN(3000)) * time.Microsecond)
		})
	}
	if p, ok := any(b).(interface {
		Prefetch(stop func() bool) (uint64, error)
	}); ok {
		s.loop(func(rnd *rand.Rand) {
			end := time.Now().Add(time.Duration(rnd.IntN(5)) * time.Millisecond)
			_, err := p.Prefetch(func() bool { return time.Now().After(end) })
			benign("prefetch", err)
			time.Sleep(time.Duration(rnd.IntN(20)) * time.Millisecond)
		})
	}
	s.loop(func(rnd *rand.Rand) {
		_, err := b.Deepen(nil)
		benign("deepen", err)
		time.Sleep(time.Duration(rnd.IntN(10)) * time.Millisecond)
	})
	s.loop(func(rnd *rand.Rand) {
		res, err := b.Check(nil)
		benign("check", err)
		for _, p := range res.Problems {
			panic("check: " + p)
		}
		_ = b.Stats()
		time.Sleep(time.Duration(rnd.IntN(20)) * time.Millisecond)
	})
	s.loop(func(rnd *rand.Rand) {
		select {
		case <-s.stop:
		case <-time.After(time.Duration(rnd.IntN(400)) * time.Millisecond):
			benign("save", s.save())
		}
	})

	time.Sleep(d)
	close(s.stop)
	s.wg.Wait()

	t.Logf("outcomes %v; template reads %d, evicted %d, restored %d, dropped %d, aborted %d, out of memory %d, rejects %v, stages %v, moved %d",
		outcomes, h.templateReads.Load(), b.stats.evictedTotal.Load(), b.stats.restored.Load(), b.stats.dropped.Load(), b.stats.aborted.Load(), b.stats.noMemory.Load(), b.Stats().Rejects, b.Stats().Stages, b.stats.moved.Load())
	h.faults.noMemoryIn.Store(0)
	h.faults.readIn.Store(0)
	h.faults.punchIn.Store(0)
	h.faults.busyIn.Store(0)
	h.verifyBackend(t)
	if _, err := b.Evict(EvictOptions{}); err != nil {
		t.Error(err)
	}
	h.verifyBackend(t)
	h.verifyAll(t)
	h.verifyBackend(t)
	if b.stats.evictedTotal.Load() == 0 {
		t.Error("nothing happened")
	}
}

// TestStressTemplate concentrates on pages of a template: two address spaces map
// them, write to them in place, share them copy-on-write and stop sharing them,
// while every page that is equal to the template's goes back to it.
func TestStressTemplate(t *testing.T) {
	opts := DefaultOptions()
	opts.MapUnit = 2 * PageSize
	h := newFakeHost(t, 512, &opts)
	s := newStress(h)
	s.spaces = s.spaces[:2]
	rnd := rand.New(rand.NewPCG(1, 2))
	for _, p := range h.adopt(t, rnd, 96) {
		sp := s.space(rnd)
		sp.extents = append(sp.extents, p)
	}
	for range 3 {
		s.loop(func(rnd *rand.Rand) {
			sp := s.space(rnd)
			child := s.space(rnd)
			switch rnd.IntN(24) {
			case 0:
				if child != sp {
					sp.fork(rnd.IntN(8), child)
				}
			case 1:
				sp.munmap(rnd)
			case 2, 3:
				_ = sp.copyIO(rnd, 8, true)
			case 4, 5, 6:
				_ = sp.copyIO(rnd, 8, false)
			case 7, 8, 9, 10:
				time.Sleep(time.Duration(rnd.IntN(300)) * time.Microsecond)
			default:
				sp.mu.RLock()
				var r Range
				if len(sp.extents) != 0 {
					r = part(rnd, sp.extents[rnd.IntN(len(sp.extents))].Range, 4)
				}
				sp.mu.RUnlock()
				write := rnd.IntN(6) == 0
				r.pages(func(p uint64) { sp.access(p, write) })
			}
		})
	}
	s.loop(func(rnd *rand.Rand) {
		h.release(16)
		time.Sleep(time.Millisecond)
	})
	s.loop(func(rnd *rand.Rand) {
		if _, err := h.backend.Evict(EvictOptions{Tier: codec.Tier(rnd.IntN(3))}); err != nil {
			panic(err)
		}
		time.Sleep(time.Duration(rnd.IntN(1000)) * time.Microsecond)
	})
	time.Sleep(stressDuration())
	close(s.stop)
	s.wg.Wait()
	b := h.backend
	t.Logf("template reads %d, evicted %d, restored %d, dropped %d, aborted %d", h.templateReads.Load(), b.stats.evictedTotal.Load(), b.stats.restored.Load(), b.stats.dropped.Load(), b.stats.aborted.Load())
	h.verifyBackend(t)
	h.verifyAll(t)
	h.verifyBackend(t)
	if h.templateReads.Load() == 0 || b.stats.evictedTotal.Load() == 0 {
		t.Error("nothing happened")
	}
}

func (s *stress) space(rnd *rand.Rand) *space { return s.spaces[rnd.IntN(len(s.spaces))] }

// application is what application threads do: loads and stores.
func (s *stress) application(rnd *rand.Rand) {
	sp := s.space(rnd)
	sp.mu.RLock()
	if len(sp.extents) == 0 {
		sp.mu.RUnlock()
		s.mmap(rnd, sp)
		return
	}
	r := sp.extents[rnd.IntN(len(sp.extents))].Range
	sp.mu.RUnlock()
	if rnd.IntN(50) == 0 {
		time.Sleep(time.Duration(rnd.IntN(3000)) * time.Microsecond)
	}
	write := rnd.IntN(3) == 0
	part(rnd, r, 8).pages(func(p uint64) { sp.access(p, write) })
}

// sentry is what system calls do to address spaces.
func (s *stress) sentry(rnd *rand.Rand) {
	sp := s.space(rnd)
	switch rnd.IntN(16) {
	case 0:
		s.mmap(rnd, sp)
	case 1:
		sp.munmap(rnd)
	case 2: // as fork does
		child := s.space(rnd)
		if child != sp {
			sp.fork(rnd.IntN(8), child)
			child.munmap(rnd)
		}
	case 3: // as madvise(MADV_DONTNEED) on part of a huge page does
		sp.mu.Lock()
		if len(sp.extents) != 0 {
			if p := sp.extents[rnd.IntN(len(sp.extents))]; !p.private {
				s.h.decommit(part(rnd, p.Range, 16))
			}
		}
		sp.mu.Unlock()
	case 4: // mlock, until the next munmap
		sp.mu.Lock()
		if len(sp.extents) != 0 {
			sp.locked = append(sp.locked[:0], part(rnd, sp.extents[rnd.IntN(len(sp.extents))].Range, 16))
		}
		sp.mu.Unlock()
	case 5:
		_ = sp.copyIO(rnd, 64, true)
	default:
		_ = sp.copyIO(rnd, 16, rnd.IntN(4) == 0)
	}
	if rnd.IntN(20) == 0 {
		time.Sleep(time.Duration(rnd.IntN(1000)) * time.Microsecond)
	}
}

func (s *stress) mmap(rnd *rand.Rand, sp *space) {
	if r, ok := s.h.allocate(1+rnd.Uint64N(64), rnd.IntN(20) == 0); ok {
		sp.mmap(r, rnd.IntN(3) != 0)
	} else {
		sp.munmap(rnd)
	}
}

// fileUser reads, writes, truncates and maps tmpfs files.
func (s *stress) fileUser(rnd *rand.Rand) {
	f := s.files[rnd.IntN(len(s.files))]
	switch rnd.IntN(12) {
	case 0: // truncate
		f.mu.Lock()
		if f.data.End != 0 {
			s.h.decRef(f.data)
		}
		f.data = Range{}
		f.mu.Unlock()
	case 1: // mmap
		f.mu.RLock()
		r := f.data
		if r.End != 0 {
			s.h.incRef(r)
		}
		f.mu.RUnlock()
		if r.End != 0 {
			s.space(rnd).mmap(r, false)
		}
	default:
		defer s.h.enter()()
		f.mu.Lock()
		defer f.mu.Unlock()
		if f.data.End == 0 {
			f.data, _ = s.h.allocate(1+rnd.Uint64N(32), false)
			return
		}
		r := part(rnd, f.data, 8)
		if s.h.gate(r) != nil {
			return
		}
		if rnd.IntN(100) == 0 {
			// Somebody slow, such as a write-back to a file server.
			time.Sleep(time.Duration(rnd.IntN(5000)) * time.Microsecond)
		}
		r.pages(func(p uint64) { s.h.touch(p, rnd.IntN(3) == 0) })
	}
}

// pinner holds pages for longer than any lock.
func (s *stress) pinner(rnd *rand.Rand) {
	r, ok := s.h.allocate(1+rnd.Uint64N(8), false)
	if !ok {
		return
	}
	r.pages(func(p uint64) {
		exit := s.h.enter()
		if s.h.gate(Range{p << pageShift, (p + 1) << pageShift}) == nil {
			s.h.write(p)
		}
		exit()
	})
	time.Sleep(time.Duration(rnd.IntN(3000)) * time.Microsecond)
	if s.h.backend.Pin(r.Start, r.End) == nil {
		for range 20 {
			r.pages(func(p uint64) { s.h.touch(p, rnd.IntN(2) == 0) })
			time.Sleep(time.Duration(rnd.IntN(500)) * time.Microsecond)
		}
	}
	s.h.decRef(r)
}

// save is what a checkpoint does: it pauses everybody and reads the file
// directly.
func (s *stress) save() error {
	s.world.Lock()
	defer s.world.Unlock()
	end, err := s.h.backend.BeginSave()
	if err != nil {
		return err
	}
	defer end()
	for i := range s.h.use {
		if s.h.use[i].refs != 0 {
			s.h.read(s.h.lo + uint64(i))
		}
	}
	if _, err := s.h.backend.Evict(EvictOptions{}); !errors.Is(err, ErrInhibited) {
		panic(fmt.Sprintf("eviction during a save: %v", err))
	}
	return nil
}
