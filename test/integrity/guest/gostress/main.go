// Command gostress is a self-checking guest with a garbage collector: it keeps
// a linked structure, maps and buffers on the Go heap, churns part of it each
// round so that the collector and the scavenger work (marking, sweeping,
// MADV_DONTNEED), sleeps, and verifies digests of everything.
package main

import (
	"crypto/sha256"
	"encoding/binary"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"runtime/debug"
	"sync"
	"time"
)

// block is a buffer that carries its own digest.
type block struct {
	seed uint64
	data []byte
	sum  [sha256.Size]byte
	next *block
}

func newBlock(r *rand.Rand, next *block) *block {
	b := &block{seed: r.Uint64(), data: make([]byte, 16+r.IntN(6000)), next: next}
	fill(b.data, b.seed)
	b.sum = sha256.Sum256(b.data)
	return b
}

// fill is cheap and deterministic; the seed's low bits choose how well the
// result compresses.
func fill(p []byte, seed uint64) {
	r := rand.New(rand.NewPCG(seed, 1))
	switch seed & 3 {
	case 0:
		for i := range p {
			p[i] = byte(r.Uint32())
		}
	case 1:
		for i := range p {
			p[i] = "the quick brown fox "[(i+int(seed>>8&15))%20]
		}
	case 2:
		for i := 0; i+8 <= len(p); i += 8 {
			binary.LittleEndian.PutUint64(p[i:], 0xc000000000+seed>>40+uint64(i)*16)
		}
	}
}

func (b *block) check(where string) error {
	if got := sha256.Sum256(b.data); got != b.sum {
		want := make([]byte, len(b.data))
		fill(want, b.seed)
		for i := range want {
			if want[i] != b.data[i] {
				return fmt.Errorf("%s: block at %p (%d bytes): byte %d is %#x, want %#x", where, &b.data[0], len(b.data), i, b.data[i], want[i])
			}
		}
		return fmt.Errorf("%s: block at %p: bytes are right, the stored digest is not", where, &b.data[0])
	}
	return nil
}

// worker owns a list and a map and checks them forever.
type worker struct {
	id   int
	r    *rand.Rand
	list *block
	m    map[uint64]*block
}

func (w *worker) round() error {
	// Replace some blocks of the map, drop the head of the list, add new ones.
	for k := range w.m {
		if w.r.IntN(8) == 0 {
			delete(w.m, k)
		}
	}
	for len(w.m) < 600 {
		b := newBlock(w.r, nil)
		w.m[b.seed] = b
	}
	for range 50 {
		if w.list != nil {
			w.list = w.list.next
		}
	}
	n := 0
	for b := w.list; b != nil; b = b.next {
		n++
		if w.r.IntN(3) == 0 {
			if err := b.check("list"); err != nil {
				return fmt.Errorf("worker %d: %w", w.id, err)
			}
		}
	}
	for ; n < 1500; n++ {
		w.list = newBlock(w.r, w.list)
	}
	for k, b := range w.m {
		if k != b.seed {
			return fmt.Errorf("worker %d: map key %#x holds block %#x", w.id, k, b.seed)
		}
		if err := b.check("map"); err != nil {
			return fmt.Errorf("worker %d: %w", w.id, err)
		}
	}
	return nil
}

func main() {
	seconds := flag.Int("seconds", 10, "how long to run")
	seed := flag.Uint64("seed", 1, "seed")
	flag.Parse()

	workers := make([]*worker, 3)
	for i := range workers {
		workers[i] = &worker{id: i, r: rand.New(rand.NewPCG(*seed, uint64(i))), m: make(map[uint64]*block)}
	}
	sleeps := rand.New(rand.NewPCG(*seed, 99))
	end := time.Now().Add(time.Duration(*seconds) * time.Second)
	rounds := 0
	for ; time.Now().Before(end); rounds++ {
		var wg sync.WaitGroup
		errs := make([]error, len(workers))
		for i, w := range workers {
			wg.Go(func() { errs[i] = w.round() })
		}
		wg.Wait()
		for _, err := range errs {
			if err != nil {
				fmt.Printf("FAIL gostress: %v\n", err)
				os.Exit(1)
			}
		}
		switch rounds % 4 {
		case 1:
			runtime.GC()
		case 3:
			debug.FreeOSMemory()
		}
		time.Sleep(time.Duration(sleeps.IntN(900)) * time.Millisecond)
	}
	var ms runtime.MemStats
	runtime.ReadMemStats(&ms)
	fmt.Printf("OK gostress rounds=%d gcs=%d heap=%d\n", rounds, ms.NumGC, ms.HeapAlloc)
}
