package memfile

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"runsc-agentzip/memfile/codec"
)

// A tinyHost has few pages, one lock for all accesses and no system calls, so
// that evictions and accesses meet as often as possible.
type tinyHost struct {
	mem    []byte // not of the Go heap: evictions read what others write
	access sync.RWMutex
	alloc  sync.Mutex
}

func (h *tinyHost) ReadAt(p []byte, off uint64) error  { copy(p, h.mem[off:]); return nil }
func (h *tinyHost) WriteAt(p []byte, off uint64) error { copy(h.mem[off:], p); return nil }
func (h *tinyHost) Punch(r Range) error                { clear(h.mem[r.Start:r.End]); return nil }
func (h *tinyHost) HeldBytes() (uint64, error)         { return uint64(len(h.mem)), nil }
func (h *tinyHost) Premap([]Range, func() bool)        {}
func (h *tinyHost) Fatal(msg string)                   { panic(fatalError(msg)) }

func (h *tinyHost) Resident(off uint64, vec []byte) error {
	for i := range vec {
		vec[i] = 1
	}
	return nil
}

func (h *tinyHost) VisitEvictable(fn func(Range)) {
	h.alloc.Lock()
	defer h.alloc.Unlock()
	fn(Range{0, uint64(len(h.mem))})
}

func (h *tinyHost) EndAccess([]Range, func(Range), time.Time, func() bool) error {
	h.access.Lock()
	defer h.access.Unlock()
	return nil
}

// TestNarrowRaces has a handful of pages evicted, accessed and dropped as fast
// as possible.
func TestNarrowRaces(t *testing.T) {
	const n = 3
	mem, err := unix.Mmap(-1, 0, n*PageSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(mem)
	h := &tinyHost{mem: mem}
	opts := DefaultOptions()
	opts.AccessTimeout = 10 * time.Second
	b, err := New(h, opts)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	if err := b.Extend(n * PageSize); err != nil {
		t.Fatal(err)
	}

	var model [n]struct {
		mu  sync.Mutex
		ver uint64
	}
	words := func(p uint64, fn func(w []byte)) {
		for i := p * PageSize; i < (p+1)*PageSize; i += 512 {
			fn(mem[i : i+8])
		}
	}
	// touch is called by those who may access the page.
	touch := func(p uint64, write bool) {
		m := &model[p]
		m.mu.Lock()
		defer m.mu.Unlock()
		words(p, func(w []byte) {
			if got := binary.LittleEndian.Uint64(w); got != m.ver {
				panic(fmt.Sprintf("page %d has version %d, should have %d", p, got, m.ver))
			}
		})
		if write {
			m.ver++
			words(p, func(w []byte) { binary.LittleEndian.PutUint64(w, m.ver) })
		}
	}
	gate := func(p uint64) {
		if b.NonResident().Load() != 0 {
			if err := b.Gate(p*PageSize, (p+1)*PageSize); err != nil {
				panic(err)
			}
		}
	}

	stop := make(chan struct{})
	var wg sync.WaitGroup
	loop := func(fn func(rnd *rand.Rand)) {
		wg.Add(1)
		rnd := rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64()))
		go func() {
			defer wg.Done()
			for {
				select {
				case <-stop:
					return
				default:
					fn(rnd)
				}
			}
		}()
	}
	for range 2 {
		loop(func(rnd *rand.Rand) {
			p := rnd.Uint64N(n)
			h.access.RLock()
			gate(p)
			touch(p, rnd.IntN(2) == 0)
			h.access.RUnlock()
			for range rnd.IntN(200) {
			}
		})
	}
	loop(func(rnd *rand.Rand) {
		p := rnd.Uint64N(n)
		token := b.EnterSection()
		gate(p)
		touch(p, rnd.IntN(2) == 0)
		b.ExitSection(token)
	})
	loop(func(rnd *rand.Rand) {
		p := rnd.Uint64N(n)
		token := b.EnterSection()
		model[p].mu.Lock()
		h.alloc.Lock()
		b.Drop(p*PageSize, (p+1)*PageSize)
		h.alloc.Unlock()
		clear(mem[p*PageSize : (p+1)*PageSize])
		model[p].ver = 0
		model[p].mu.Unlock()
		b.ExitSection(token)
		time.Sleep(time.Duration(rnd.IntN(30)) * time.Microsecond)
	})
	passes := 0
	loop(func(rnd *rand.Rand) {
		if _, err := b.Evict(EvictOptions{Tier: codec.Tier(rnd.IntN(3))}); err != nil {
			panic(err)
		}
		if passes++; passes%16 == 0 {
			_, _ = b.Deepen(nil)
		}
	})
	time.Sleep(stressDuration())
	close(stop)
	wg.Wait()
	t.Logf("%d passes, evicted %d, restored %d, dropped %d, aborted %d", passes,
		b.stats.evictedTotal.Load(), b.stats.restored.Load(), b.stats.dropped.Load(), b.stats.aborted.Load())
	for p := range uint64(n) {
		gate(p)
		touch(p, false)
	}
	if left := b.NonResident().Load(); left != 0 {
		t.Errorf("%d pages are counted that are not resident", left)
	}
	if res, err := b.Check(nil); err != nil || len(res.Problems) != 0 {
		t.Errorf("check: %v, %v", err, res.Problems)
	}
}
