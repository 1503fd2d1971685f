package codec

import (
	"bytes"
	"fmt"
	"slices"
	"testing"
	"time"
)

// coded is a word coder's blob, and what it is restored with.
type coded struct {
	m    *model
	blob []byte
	page *Page
	base *Page
}

// codedSample encodes the sample pages with the word coder.
func codedSample(t testing.TB) (delta, alone []coded) {
	differ, _ := samplePairs(t)
	e := NewEncoder().wordEncoder()
	var buf [MaxEncoded]byte
	add := func(list []coded, m *model, p, base *Page) []coded {
		if n := e.encode(m, buf[:], p, base, MaxProfitable, words); n > 0 {
			list = append(list, coded{m, bytes.Clone(buf[:n]), p, base})
		}
		return list
	}
	for _, p := range differ {
		delta = add(delta, deltaModel(), p.page, p.base)
	}
	for _, p := range samplePages(t) {
		alone = add(alone, wordsModel(), p, &zeroPage)
	}
	return delta, alone
}

var benchmarkInput input

// decoders are what the benchmark below compares.
var decoders = []struct {
	name string
	f    func(m *model, dst *Page, blob []byte, base *Page) bool
}{
	{"reference", (*model).decodeReference},
	{"decode", func(m *model, dst *Page, blob []byte, base *Page) bool {
		return m.decode(&benchmarkInput, dst, blob, base)
	}},
}

// BenchmarkWordDecoders compares the word coder's decoder with the simple one, by
// the number of words that differ. An iteration decodes every page once with each;
// what is reported is the mean of the least times of the pages: so it needs some
// iterations (-benchtime 20x), and others on the machine do not show.
func BenchmarkWordDecoders(b *testing.B) {
	delta, alone := codedSample(b)
	limits := []int{0, 8, 32, 128, words}
	for _, set := range []struct {
		name string
		list []coded
	}{{"delta", delta}, {"alone", alone}} {
		for k := range limits {
			low, high := 1, words
			if k > 0 {
				low, high = limits[k-1]+1, limits[k]
			}
			var list []coded
			total := 0
			for _, c := range set.list {
				if _, n := differing(c.page, c.base); n >= low && n <= high {
					list = append(list, c)
					total += len(c.blob)
				}
			}
			if len(list) == 0 {
				continue
			}
			b.Run(fmt.Sprintf("%s/%d-%d", set.name, low, high), func(b *testing.B) {
				var dst Page
				least := make([][]time.Duration, len(decoders))
				for d := range least {
					least[d] = slices.Repeat([]time.Duration{1 << 62}, len(list))
				}
				for b.Loop() {
					for i, c := range list {
						for d, dec := range decoders {
							start := time.Now()
							if !dec.f(c.m, &dst, c.blob, c.base) {
								b.Fatal("malformed")
							}
							least[d][i] = min(least[d][i], time.Since(start))
						}
					}
				}
				for d, dec := range decoders {
					sum := time.Duration(0)
					for _, t := range least[d] {
						sum += t
					}
					b.ReportMetric(float64(sum)/float64(len(list)), dec.name+"-ns/page")
				}
				b.ReportMetric(float64(total)/float64(len(list)), "bytes/page")
			})
		}
	}
}
