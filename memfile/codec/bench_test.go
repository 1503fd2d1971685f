package codec

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/klauspost/compress/s2"
	"github.com/klauspost/compress/zstd"
	"github.com/pierrec/lz4/v4"
)

// samplePages reads the *.bin files in the folder AGENTZIP_PAGES (raw pages,
// one after another) and returns the non-zero ones. A page of b_cN.bin that
// equals the page of b_tmpl.bin at the same place is left out: it needs no
// blob.
func samplePages(t testing.TB) []*Page {
	dir := os.Getenv("AGENTZIP_PAGES")
	if dir == "" {
		t.Skip("AGENTZIP_PAGES names no folder of pages")
	}
	files, err := filepath.Glob(filepath.Join(dir, "*.bin"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no *.bin files in %s (%v)", dir, err)
	}
	template, _ := os.ReadFile(filepath.Join(dir, "b_tmpl.bin"))
	var pages []*Page
	for _, file := range files {
		if strings.HasSuffix(file, "_tmpl.bin") || strings.Contains(file, "tmpl_random") {
			continue
		}
		raw, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		clone := strings.HasPrefix(filepath.Base(file), "b_c")
		for i := 0; i+PageSize <= len(raw); i += PageSize {
			p := (*Page)(raw[i:])
			if IsZero(p) || clone && i+PageSize <= len(template) && bytes.Equal(p[:], template[i:i+PageSize]) {
				continue
			}
			pages = append(pages, p)
		}
	}
	return pages
}

func TestSample(t *testing.T) {
	pages := samplePages(t)
	e, d := NewEncoder(), NewDecoder()
	for _, p := range pages {
		roundTrip(t, e, d, p)
	}
	for _, tier := range tiers {
		var rejects [NumRejects]int
		var lens []int
		total := 0
		for _, p := range pages {
			var buf [MaxEncoded]byte
			_, n, why := e.Encode(buf[:], Input{Page: p, Tier: tier})
			rejects[why]++
			if why != RejectNone {
				n = PageSize
			}
			total += n
			lens = append(lens, n)
		}
		slices.Sort(lens)
		at := func(pc int) int { return lens[pc*(len(lens)-1)/100] }
		t.Logf("%-4v %d pages: %d bytes/page (rejected ones count whole), p10 %d p50 %d p90 %d p95 %d p99 %d, rejects %v",
			tier, len(pages), total/len(pages), at(10), at(50), at(90), at(95), at(99), rejects)
	}
}

// alonePairs are pages without a base.
func alonePairs(pages ...*Page) (list []pair) {
	for _, p := range pages {
		list = append(list, pair{page: p})
	}
	return list
}

// benchmarkTier encodes and decodes pages in one tier.
func benchmarkTier(b *testing.B, pairs []pair, tier Tier) {
	e := NewEncoder()
	b.Run(tier.String(), func(b *testing.B) {
		benchmarkPairs(b, pairs, func(dst []byte, p pair) (Tag, int, Reject) {
			return e.Encode(dst, Input{Page: p.page, Base: p.base, Tier: tier})
		})
	})
}

func BenchmarkSynthetic(b *testing.B) {
	all := synthetic()
	for _, name := range []string{"zero", "fill", "heap", "text", "random"} {
		b.Run(name, func(b *testing.B) {
			for _, tier := range tiers {
				benchmarkTier(b, alonePairs(all[name]), tier)
			}
		})
	}
}

func BenchmarkSample(b *testing.B) {
	pairs := alonePairs(samplePages(b)...)
	for _, tier := range tiers {
		benchmarkTier(b, pairs, tier)
	}
}

func BenchmarkHelpers(b *testing.B) {
	all := synthetic()
	for _, name := range []string{"zero", "last-byte", "heap"} {
		b.Run("IsZero/"+name, func(b *testing.B) {
			for b.Loop() {
				IsZero(all[name])
			}
		})
	}
	b.Run("Sum", func(b *testing.B) {
		for b.Loop() {
			Sum(all["heap"])
		}
	})
}

// BenchmarkCandidates is how the forms were chosen: whole library formats,
// headers included, on the sample pages.
func BenchmarkCandidates(b *testing.B) {
	pages := samplePages(b)
	dst := make([]byte, 2*PageSize)
	must := func(n int, err error) []byte {
		if err != nil {
			b.Fatal(err)
		}
		return dst[:n]
	}
	var fast lz4.Compressor
	hc := lz4.CompressorHC{Level: lz4.Level5}
	type candidate struct {
		name string
		enc  func(p []byte) []byte
		dec  func(out, blob []byte) (int, error)
	}
	lz4Dec := func(out, blob []byte) (int, error) { return lz4.UncompressBlock(blob, out) }
	s2Dec := func(out, blob []byte) (int, error) {
		r, err := s2.Decode(out, blob)
		return len(r), err
	}
	list := []candidate{
		{"lz4", func(p []byte) []byte { return must(fast.CompressBlock(p, dst)) }, lz4Dec},
		{"lz4-hc5", func(p []byte) []byte { return must(hc.CompressBlock(p, dst)) }, lz4Dec},
		{"s2", func(p []byte) []byte { return s2.Encode(dst, p) }, s2Dec},
		{"s2-better", func(p []byte) []byte { return s2.EncodeBetter(dst, p) }, s2Dec},
	}
	zd := newZstdDecoder()
	zDec := func(out, blob []byte) (int, error) {
		r, err := zd.DecodeAll(blob, out[:0])
		return len(r), err
	}
	for _, c := range []struct {
		name       string
		level      zstd.EncoderLevel
		rawLiteral bool
	}{
		{"zstd-fastest-raw-literals", zstd.SpeedFastest, true},
		{"zstd-fastest", zstd.SpeedFastest, false},
		{"zstd-default", zstd.SpeedDefault, false},
		{"zstd-better", zstd.SpeedBetterCompression, false},
	} {
		z, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1), zstd.WithEncoderLevel(c.level),
			zstd.WithNoEntropyCompression(c.rawLiteral), zstd.WithLowerEncoderMem(true),
			zstd.WithWindowSize(PageSize), zstd.WithSingleSegment(true), zstd.WithEncoderCRC(false))
		if err != nil {
			b.Fatal(err)
		}
		list = append(list, candidate{c.name, func(p []byte) []byte { return z.EncodeAll(p, dst[:0]) }, zDec})
	}
	for _, c := range list {
		b.Run(c.name+"/encode", func(b *testing.B) {
			total, i := 0, 0
			b.ReportAllocs()
			for b.Loop() {
				total += min(len(c.enc(pages[i][:])), PageSize)
				if i++; i == len(pages) {
					i = 0
				}
			}
			b.ReportMetric(float64(total)/float64(b.N), "bytes/page")
		})
		b.Run(c.name+"/decode", func(b *testing.B) {
			var blobs [][]byte
			for _, p := range pages {
				blobs = append(blobs, bytes.Clone(c.enc(p[:])))
			}
			var out Page
			i := 0
			b.ReportAllocs()
			for b.Loop() {
				if n, err := c.dec(out[:], blobs[i]); err != nil || n != PageSize {
					b.Fatal(n, err)
				}
				if i++; i == len(blobs) {
					i = 0
				}
			}
		})
	}
}
