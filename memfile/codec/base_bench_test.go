package codec

import (
	"bytes"
	"runtime"
	"syscall"
	"testing"
)

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

// benchmarkPairs encodes pages and decodes what came of it.
func benchmarkPairs(b *testing.B, pairs []pair, encode func(dst []byte, p pair) (Tag, int, Reject)) {
	buf := make([]byte, PageSize)
	b.Run("encode", func(b *testing.B) {
		encode(buf, pairs[0])
		total, rejected, i := 0, 0, 0
		b.ReportAllocs()
		defer cpu(b)()
		for b.Loop() {
			_, n, why := encode(buf, pairs[i])
			if why != RejectNone {
				n = PageSize
				rejected++
			}
			total += n
			if i++; i == len(pairs) {
				i = 0
			}
		}
		b.ReportMetric(float64(total)/float64(b.N), "bytes/page")
		b.ReportMetric(100*float64(rejected)/float64(b.N), "%rejected")
	})
	b.Run("decode", func(b *testing.B) {
		type job struct {
			tag  Tag
			blob []byte
			base *Page
		}
		var jobs []job
		for _, p := range pairs {
			if tag, n, why := encode(buf, p); why == RejectNone {
				jobs = append(jobs, job{tag, bytes.Clone(buf[:n]), p.base})
			}
		}
		if len(jobs) == 0 {
			b.Skip("rejected")
		}
		d := NewDecoder()
		var out Page
		i := 0
		b.ReportAllocs()
		defer cpu(b)()
		for b.Loop() {
			if err := d.Decode(&out, jobs[i].tag, jobs[i].blob, jobs[i].base); err != nil {
				b.Fatal(err)
			}
			if i++; i == len(jobs) {
				i = 0
			}
		}
	})
}

// BenchmarkSampleBase encodes the sample pages that differ from their template
// pages; "same" those that do not; "all" both.
func BenchmarkSampleBase(b *testing.B) {
	differ, same := samplePairs(b)
	for _, set := range []struct {
		name  string
		pairs []pair
	}{{"differ", differ}, {"same", same}, {"all", append(append([]pair{}, differ...), same...)}} {
		b.Run(set.name, func(b *testing.B) {
			for _, tier := range tiers {
				benchmarkTier(b, set.pairs, tier)
			}
		})
	}
}

// BenchmarkForms runs single forms: on pages of which few words differ, and on
// all.
func BenchmarkForms(b *testing.B) {
	differ, _ := samplePairs(b)
	e := NewEncoder()
	for _, set := range []struct {
		name string
		most int
	}{{"le32", 32}, {"le128", 128}, {"all", words}} {
		var few []pair
		for _, p := range differ {
			if _, n := differing(p.page, p.base); n <= set.most {
				few = append(few, p)
			}
		}
		b.Run(set.name+"/word-delta", func(b *testing.B) {
			benchmarkPairs(b, few, func(dst []byte, p pair) (Tag, int, Reject) {
				n := e.wordEncoder().encode(deltaModel(), dst, p.page, p.base, MaxProfitable, words)
				if n < 0 {
					return TagInvalid, 0, RejectUnprofitable
				}
				return TagWordDelta, n, RejectNone
			})
		})
		b.Run(set.name+"/zstd-base", func(b *testing.B) {
			benchmarkPairs(b, few, func(dst []byte, p pair) (Tag, int, Reject) {
				tag, blob, why := e.zstd(TagZstdBase, p.page, p.base)
				return tag, copy(dst, blob), why
			})
		})
	}
	alone := alonePairs(samplePages(b)...)
	b.Run("alone/words", func(b *testing.B) {
		benchmarkPairs(b, alone, func(dst []byte, p pair) (Tag, int, Reject) {
			n := e.wordEncoder().encode(wordsModel(), dst, p.page, &zeroPage, MaxProfitable, words)
			if n < 0 {
				return TagInvalid, 0, RejectUnprofitable
			}
			return TagWords, n, RejectNone
		})
	})
	b.Run("alone/zstd", func(b *testing.B) {
		benchmarkPairs(b, alone, func(dst []byte, p pair) (Tag, int, Reject) {
			tag, blob, why := e.zstd(TagZstd, p.page, nil)
			return tag, copy(dst, blob), why
		})
	})
	b.Run("models", func(b *testing.B) {
		for b.Loop() {
			newModel(unpackModel(deltaTables, deltaWidths))
		}
	})
}
