package codec

import (
	"os"
	"slices"
	"testing"

	"github.com/klauspost/compress/zstd"
)

// TestCeiling compares the tiers with the shortest of all forms, whatever they
// cost: those of this package with and without the base, and the library's zstd
// at all its levels alone, with the base as dictionary, and on the difference
// and the XOR of page and base. It takes minutes.
func TestCeiling(t *testing.T) {
	if os.Getenv("AGENTZIP_CEILING") == "" {
		t.Skip("AGENTZIP_CEILING is not set")
	}
	pairs, _ := samplePairs(t)
	if k := 1 + len(pairs)/2000; k > 1 {
		var some []pair
		for i := 0; i < len(pairs); i += k {
			some = append(some, pairs[i])
		}
		pairs = some
	}
	open := func(level zstd.EncoderLevel, more ...zstd.EOption) *zstd.Encoder {
		z, err := zstd.NewWriter(nil, append(more, zstd.WithEncoderConcurrency(1), zstd.WithEncoderLevel(level),
			zstd.WithLowerEncoderMem(true), zstd.WithWindowSize(4*PageSize), zstd.WithSingleSegment(true),
			zstd.WithEncoderCRC(false))...)
		if err != nil {
			t.Fatal(err)
		}
		return z
	}
	var buf [3 * PageSize]byte
	// length of the block alone; a page that needs too much counts whole.
	length := func(z *zstd.Encoder, p *Page, headers int) int {
		return len(z.EncodeAll(p[:], buf[:0])) - headers - zstdBlockHeader
	}
	profit := func(n int) int {
		if n < 0 || n > MaxProfitable {
			return PageSize
		}
		return n
	}
	type form struct {
		name string
		f    func(p pair) int
	}
	e := NewEncoder()
	own := func(tag Tag, base bool) func(p pair) int {
		return func(p pair) int {
			b := p.base
			if !base {
				b = nil
			}
			_, blob, why := e.zstd(tag, p.page, b)
			if why != RejectNone {
				return PageSize
			}
			return len(blob)
		}
	}
	forms := []form{
		{"word delta", func(p pair) int {
			return e.wordEncoder().encode(deltaModel(), buf[:], p.page, p.base, MaxProfitable, words)
		}},
		{"words", func(p pair) int {
			return e.wordEncoder().encode(wordsModel(), buf[:], p.page, &zeroPage, MaxProfitable, words)
		}},
		{"own zstd with base", own(TagZstdBase, true)},
		{"own zstd", own(TagZstd, false)},
	}
	for _, level := range []zstd.EncoderLevel{zstd.SpeedFastest, zstd.SpeedDefault, zstd.SpeedBetterCompression, zstd.SpeedBestCompression} {
		plain := open(level)
		based := open(level, zstd.WithEncoderDictRaw(zstdBaseID, make([]byte, PageSize)))
		forms = append(forms,
			form{"zstd " + level.String(), func(p pair) int { return length(plain, p.page, len(zstdPrefix)) }},
			form{"zstd " + level.String() + " with base", func(p pair) int {
				if err := based.ResetWithOptions(nil, zstd.WithEncoderDictRaw(zstdBaseID, p.base[:])); err != nil {
					t.Fatal(err)
				}
				return length(based, p.page, len(zstdBasePrefix))
			}},
			form{"zstd " + level.String() + " of differences", func(p pair) int {
				var d Page
				for i := range words {
					putWord(&d, i, word(p.page, i)-word(p.base, i))
				}
				return length(plain, &d, len(zstdPrefix))
			}},
			form{"zstd " + level.String() + " of XOR", func(p pair) int {
				var d Page
				for i := range words {
					putWord(&d, i, word(p.page, i)^word(p.base, i))
				}
				return length(plain, &d, len(zstdPrefix))
			}})
	}
	best := slices.Repeat([]int{PageSize}, len(pairs))
	library := slices.Clone(best)
	for k, f := range forms {
		total := 0
		for i, p := range pairs {
			n := profit(f.f(p))
			total += n
			best[i] = min(best[i], n)
			if k >= 4 {
				library[i] = min(library[i], n)
			}
		}
		t.Logf("%-32s %4d bytes/page", f.name, total/len(pairs))
	}
	mean := func(l []int) float64 {
		sum := 0
		for _, n := range l {
			sum += n
		}
		return float64(sum) / float64(len(l))
	}
	t.Logf("%-32s %.1f bytes/page", "shortest of the library's", mean(library))
	t.Logf("%-32s %.1f bytes/page", "shortest of all", mean(best))
	for _, tier := range tiers {
		total := 0
		for _, p := range pairs {
			_, n, why := e.Encode(buf[:], Input{Page: p.page, Base: p.base, Tier: tier})
			if why != RejectNone {
				n = PageSize
			}
			total += n
		}
		m := float64(total) / float64(len(pairs))
		t.Logf("%-32v %.1f bytes/page, %+.1f %%", tier, m, 100*(m/mean(best)-1))
	}
}
