package codec

import (
	"bytes"
	"runtime"
	"syscall"
	"testing"
)

// BenchmarkWordDelta runs the word coder alone on the sample pages.
func BenchmarkWordDelta(b *testing.B) {
	pairs := samplePairs(b)
	m := standard()
	for _, c := range []struct {
		name    string
		changed int
	}{{"le32", 32}, {"le128", 128}, {"all", words}} {
		var few []pair
		for _, p := range pairs {
			if _, n := differing(p.page, p.base); n <= c.changed {
				few = append(few, p)
			}
		}
		e := new(wordEncoder)
		var buf [PageSize]byte
		b.Run(c.name+"/encode", func(b *testing.B) {
			total, i := 0, 0
			b.ReportAllocs()
			defer cpu(b)()
			for b.Loop() {
				n := e.encode(m, buf[:], few[i].page, few[i].base, MaxProfitable, words)
				if n < 0 {
					n = PageSize
				}
				total += n
				if i++; i == len(few) {
					i = 0
				}
			}
			b.ReportMetric(float64(total)/float64(b.N), "bytes/page")
		})
		b.Run(c.name+"/decode", func(b *testing.B) {
			type job struct {
				blob []byte
				base *Page
			}
			var jobs []job
			for _, p := range few {
				if n := e.encode(m, buf[:], p.page, p.base, MaxProfitable, words); n >= 0 {
					jobs = append(jobs, job{bytes.Clone(buf[:n]), p.base})
				}
			}
			var out Page
			i := 0
			b.ReportAllocs()
			defer cpu(b)()
			for b.Loop() {
				if !m.decode(&out, jobs[i].blob, jobs[i].base) {
					b.Fatal("corrupt")
				}
				if i++; i == len(jobs) {
					i = 0
				}
			}
		})
	}
}

// cpu reports the processor time per iteration, which says more than the time
// on the clock when the machine is shared. Call the result when done.
func cpu(b *testing.B) func() {
	runtime.LockOSThread()
	now := func() int64 {
		const thread = 1 // RUSAGE_THREAD
		var u syscall.Rusage
		syscall.Getrusage(thread, &u)
		return u.Utime.Nano() + u.Stime.Nano()
	}
	start := now()
	return func() {
		b.ReportMetric(float64(now()-start)/float64(b.N), "cpu-ns/op")
		runtime.UnlockOSThread()
	}
}
