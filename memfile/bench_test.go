package memfile

import (
	"fmt"
	"math/rand/v2"
	"os"
	"testing"

	"runsc-agentzip/memfile/codec"
)

// benchPages returns about n pages like those of a program: its own executable
// (code, read-only data, tables), heap-like words, text and zeroes.
func benchPages(b *testing.B, n int) [][]byte {
	exe, err := os.Executable()
	if err != nil {
		b.Fatal(err)
	}
	file, err := os.ReadFile(exe)
	if err != nil {
		b.Fatal(err)
	}
	rnd := rand.New(rand.NewPCG(3, 4))
	pages := make([][]byte, n)
	for i := range pages {
		p := make([]byte, PageSize)
		switch i % 8 {
		case 0: // zero
		case 1, 2, 3:
			copy(p, file[rnd.IntN(len(file)/PageSize)*PageSize:])
		case 4, 5:
			for j := 0; j < PageSize; j += 8 {
				if rnd.IntN(2) == 0 {
					v := 0x7f3200000000 + rnd.Uint64N(1<<20)*16
					for k := range 8 {
						p[j+k] = byte(v >> (8 * k))
					}
				}
			}
		case 6:
			content(p, version{uint64(i), 1})
		case 7:
			copy(p, bases[2+rnd.IntN(3)][:])
			for range 64 {
				p[rnd.IntN(PageSize)] = byte(rnd.Uint32())
			}
		}
		pages[i] = p
	}
	return pages
}

// benchFixture returns a Backend with n such pages, and what fills them.
func benchFixture(b *testing.B, n uint64, opts Options) (f *fixture, fill func()) {
	f = newFixture(b, n, opts)
	pages := benchPages(b, int(n))
	fill = func() {
		for i, p := range pages {
			copy(f.page(f.first+uint64(i)), p)
		}
	}
	fill()
	return f, fill
}

// BenchmarkEvict evicts 16 MiB at a time, mark to freed, on one core.
func BenchmarkEvict(b *testing.B) {
	for tier := range codec.Tier(codec.NumTiers) {
		b.Run(tier.String(), func(b *testing.B) {
			const n = 4096
			f, fill := benchFixture(b, n, DefaultOptions())
			var evicted, held, owned uint64
			for b.Loop() {
				b.StopTimer()
				f.b.Drop(f.r.Start, f.r.End)
				fill()
				before := f.b.Stats().OwnedBytes
				b.StartTimer()
				res, err := f.b.Evict(EvictOptions{Tier: tier})
				if err != nil {
					b.Fatal(err)
				}
				evicted += res.Evicted
				b.StopTimer()
				held += before
				owned += f.b.Stats().OwnedBytes
				b.StartTimer()
			}
			b.ReportMetric(float64(evicted)/b.Elapsed().Seconds(), "pages/s")
			b.ReportMetric(100*float64(held-owned)/float64(held), "%saved")
		})
	}
}

// BenchmarkDeepen stores 4096 evicted pages as small as it gets. Nothing is
// allocated per page.
func BenchmarkDeepen(b *testing.B) {
	for _, workers := range []int{1, 2} {
		b.Run(fmt.Sprintf("workers-%d", workers), func(b *testing.B) {
			const n = 4096
			opts := DefaultOptions()
			opts.Workers = workers
			f, fill := benchFixture(b, n, opts)
			b.ReportAllocs()
			replaced := uint64(0)
			for b.Loop() {
				b.StopTimer()
				f.b.Drop(f.r.Start, f.r.End)
				fill()
				if _, err := f.b.Evict(EvictOptions{Tier: codec.TierMid}); err != nil {
					b.Fatal(err)
				}
				b.StartTimer()
				k, err := f.b.Deepen(nil)
				if err != nil {
					b.Fatal(err)
				}
				replaced += k
			}
			b.ReportMetric(float64(replaced)/b.Elapsed().Seconds(), "replaced/s")
		})
	}
}

// BenchmarkRestore restores 16 MiB in units of different sizes, on one core.
func BenchmarkRestore(b *testing.B) {
	for _, tier := range []codec.Tier{codec.TierFast, codec.TierDeep} {
		for _, unit := range []uint64{4, 16, 64, 256} {
			b.Run(fmt.Sprintf("%v/%dKiB", tier, unit), func(b *testing.B) {
				const n = 4096
				f, fill := benchFixture(b, n, DefaultOptions())
				before := f.b.stats.restored.Load()
				for b.Loop() {
					b.StopTimer()
					f.b.Drop(f.r.Start, f.r.End)
					fill()
					if _, err := f.b.Evict(EvictOptions{Tier: tier}); err != nil {
						b.Fatal(err)
					}
					b.StartTimer()
					for off := f.r.Start; off < f.r.End; off += unit << 10 {
						if err := f.b.Gate(off, off+unit<<10); err != nil {
							b.Fatal(err)
						}
					}
				}
				restored := f.b.stats.restored.Load() - before
				b.ReportMetric(float64(restored)/b.Elapsed().Seconds(), "pages/s")
				b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(b.N)/float64(n*PageSize/(unit<<10)), "us/unit")
			})
		}
	}
}

// BenchmarkGate is what each copy to or from an application pays: with nothing
// evicted, with something else evicted, and for a page and for 64 KiB.
func BenchmarkGate(b *testing.B) {
	f, _ := benchFixture(b, 64, DefaultOptions())
	gate := func(b *testing.B, bytes uint64) {
		for b.Loop() {
			if f.b.NonResident().Load() != 0 {
				if err := f.b.Gate(f.r.Start, f.r.Start+bytes); err != nil {
					b.Fatal(err)
				}
			}
		}
	}
	b.Run("nothing", func(b *testing.B) { gate(b, PageSize) })
	f.b.nonResident.Add(1)
	b.Run("page", func(b *testing.B) { gate(b, PageSize) })
	b.Run("64KiB", func(b *testing.B) { gate(b, 64<<10) })
	b.Run("parallel", func(b *testing.B) {
		b.RunParallel(func(pb *testing.PB) {
			for pb.Next() {
				if err := f.b.Gate(f.r.Start, f.r.Start+PageSize); err != nil {
					b.Error(err)
				}
			}
		})
	})
	f.b.nonResident.Add(-1)
}

// BenchmarkSection is what each file operation pays.
func BenchmarkSection(b *testing.B) {
	var s sections
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			s.exit(s.enter())
		}
	})
}

// BenchmarkWindow is what a fault pays, next to 8 MiB of resident pages each
// way and next to evicted ones.
func BenchmarkWindow(b *testing.B) {
	be := &Backend{opts: DefaultOptions()}
	if err := be.Extend(tableChunk * PageSize); err != nil {
		b.Fatal(err)
	}
	defer be.table.close()
	need, end := uint64(tableChunk/2*PageSize), uint64(tableChunk*PageSize)
	b.Run("resident", func(b *testing.B) {
		for b.Loop() {
			be.Window(need, need+PageSize, 0, end)
		}
	})
	for p := uint64(0); p < tableChunk; p++ {
		be.table.store(p, evicted)
	}
	b.Run("evicted", func(b *testing.B) {
		for b.Loop() {
			be.Window(need, need+PageSize, 0, end)
		}
	})
}

// BenchmarkCheck verifies 16 MiB of stored pages.
func BenchmarkCheck(b *testing.B) {
	f, _ := benchFixture(b, 4096, DefaultOptions())
	if _, err := f.b.Evict(EvictOptions{}); err != nil {
		b.Fatal(err)
	}
	n := uint64(0)
	for b.Loop() {
		res, err := f.b.Check(nil)
		if err != nil || len(res.Problems) != 0 {
			b.Fatal(res, err)
		}
		n += res.Stored
	}
	b.ReportMetric(float64(n)/b.Elapsed().Seconds(), "pages/s")
}
