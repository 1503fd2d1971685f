package arena

import (
	"math/rand/v2"
	"testing"
)

func filled(b *testing.B, blobs int) (*Arena, []Handle, *rand.Rand) {
	a := newArena(b, 0)
	r := rand.New(rand.NewPCG(8, 8))
	handles := make([]Handle, blobs)
	for i := range handles {
		h, mem, err := a.Alloc(blobSize(r))
		if err != nil {
			b.Fatal(err)
		}
		clear(mem)
		handles[i] = h
	}
	r.Shuffle(len(handles), func(i, j int) { handles[i], handles[j] = handles[j], handles[i] })
	return a, handles, r
}

// BenchmarkAlloc fills an arena from empty, page faults included.
func BenchmarkAlloc(b *testing.B) {
	b.ReportAllocs()
	a := newArena(b, 0)
	r := rand.New(rand.NewPCG(8, 8))
	handles := make([]Handle, 0, 50000)
	for b.Loop() {
		if len(handles) == cap(handles) {
			b.StopTimer()
			for _, h := range handles {
				a.Free(h)
			}
			handles = handles[:0]
			b.StartTimer()
		}
		h, mem, err := a.Alloc(blobSize(r))
		if err != nil {
			b.Fatal(err)
		}
		clear(mem)
		handles = append(handles, h)
	}
}

// BenchmarkReplace frees a blob at random and makes another.
func BenchmarkReplace(b *testing.B) {
	a, handles, r := filled(b, 50000)
	b.ReportAllocs()
	i := 0
	for b.Loop() {
		a.Free(handles[i])
		h, mem, err := a.Alloc(blobSize(r))
		if err != nil {
			b.Fatal(err)
		}
		mem[0] = 1
		handles[i] = h
		if i++; i == len(handles) {
			i = 0
		}
	}
	s := a.Stats()
	b.ReportMetric(float64(s.HeldBytes+s.MetadataBytes)/float64(s.BlobBytes), "held/blob-bytes")
}

func BenchmarkBytes(b *testing.B) {
	a, handles, _ := filled(b, 50000)
	b.ReportAllocs()
	i := 0
	for b.Loop() {
		if _, err := a.Bytes(handles[i]); err != nil {
			b.Fatal(err)
		}
		if i++; i == len(handles) {
			i = 0
		}
	}
}

func BenchmarkBytesParallel(b *testing.B) {
	a, handles, _ := filled(b, 50000)
	b.RunParallel(func(pb *testing.PB) {
		i := rand.IntN(len(handles))
		for pb.Next() {
			if _, err := a.Bytes(handles[i]); err != nil {
				b.Fatal(err)
			}
			if i++; i == len(handles) {
				i = 0
			}
		}
	})
}

// BenchmarkFreeAll is what a wake-up costs: per blob, in random order, with the
// return of memory to the host.
func BenchmarkFreeAll(b *testing.B) {
	b.ReportAllocs()
	var a *Arena
	var handles []Handle
	for b.Loop() {
		if len(handles) == 0 {
			b.StopTimer()
			a, handles, _ = filled(b, 50000)
			b.StartTimer()
		}
		a.Free(handles[0])
		handles = handles[1:]
	}
}

func BenchmarkCheck(b *testing.B) {
	a, handles, _ := filled(b, 50000)
	for b.Loop() {
		if err := a.Check(nil); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(len(handles)), "ns/blob")
}
