package codec

import (
	"math/rand/v2"
	"testing"

	"pgregory.net/rapid"
)

// zstdRoundTrip writes a page as a zstd block, shortest or not, and has the
// library decode it.
func zstdRoundTrip(t interface{ Fatalf(string, ...any) }, e *Encoder, d *Decoder, p, base *Page) {
	tag := TagZstd
	if base != nil {
		tag = TagZstdBase
	}
	_, blob, why := e.zstd(tag, p, base)
	if why != RejectNone {
		return
	}
	var got Page
	if err := d.Decode(&got, tag, blob, base); err != nil || got != *p {
		t.Fatalf("%v, %d bytes: %v", tag, len(blob), err)
	}
}

// TestManyLengths has matches of many different lengths, so that the tables of
// few sequences have many symbols.
func TestManyLengths(t *testing.T) {
	e, d := NewEncoder(), NewDecoder()
	rapid.Check(t, func(t *rapid.T) {
		r := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 2))
		base := new(Page)
		for i := range base {
			base[i] = byte(r.Uint32())
		}
		first := rapid.IntRange(4, 30).Draw(t, "first")
		step := rapid.IntRange(1, 3).Draw(t, "step")
		literals := rapid.IntRange(1, 20).Draw(t, "literals")
		p := new(Page)
		for i, n := 0, first; i < PageSize; n += 1 + r.IntN(step) {
			n := min(n, PageSize-i)
			copy(p[i:i+n], base[r.IntN(PageSize-n+1):])
			i += n
			for k := 1 + r.IntN(literals); k > 0 && i < PageSize; k-- {
				p[i] = byte(r.Uint32())
				i++
			}
		}
		zstdRoundTrip(t, e, d, p, base)
		zstdRoundTrip(t, e, d, p, nil)
	})
}

func TestZstdSynthetic(t *testing.T) {
	e, d := NewEncoder(), NewDecoder()
	all := synthetic()
	r := rand.New(rand.NewPCG(21, 22))
	for _, p := range all {
		zstdRoundTrip(t, e, d, p, nil)
		for _, base := range all {
			zstdRoundTrip(t, e, d, p, base)
		}
		for kind := range 6 {
			zstdRoundTrip(t, e, d, changed(p, r, kind, 50), p)
		}
	}
}

func TestZstdProperty(t *testing.T) {
	e, d := NewEncoder(), NewDecoder()
	rapid.Check(t, func(t *rapid.T) {
		p, base := genPage(t), genPage(t)
		zstdRoundTrip(t, e, d, p, base)
		zstdRoundTrip(t, e, d, p, nil)
	})
}

func TestZstdSample(t *testing.T) {
	pairs, _ := samplePairs(t)
	e, d := NewEncoder(), NewDecoder()
	for _, p := range pairs {
		zstdRoundTrip(t, e, d, p.page, p.base)
	}
	for _, p := range samplePages(t) {
		zstdRoundTrip(t, e, d, p, nil)
	}
}

// TestCodes checks the codes of all lengths against their intervals.
func TestCodes(t *testing.T) {
	for n := uint16(0); n <= PageSize; n++ {
		if c := literalCodes[literalCodeOf(n)]; uint32(n) < c.from || uint32(n) >= c.from+1<<c.bits {
			t.Errorf("%d literals have a code for %d and %d bits", n, c.from, c.bits)
		}
		if n < 3 {
			continue
		}
		if c := matchCodes[matchCodeOf(n)]; uint32(n) < c.from || uint32(n) >= c.from+1<<c.bits {
			t.Errorf("a match of %d has a code for %d and %d bits", n, c.from, c.bits)
		}
	}
	for n := 1; n <= 2*words; n++ {
		sym, extra := bucket(n)
		low, bits := unbucket(sym)
		if sym >= buckets || bits != extra || low > n || low+n&(1<<extra-1) != n {
			t.Errorf("bucket of %d: %d, from %d, %d bits", n, sym, low, extra)
		}
	}
	for sym, s := range spans {
		if s.n > 0 && xorSpan(^uint64(0)>>(64-8*s.n)<<(8*s.first)) != sym {
			t.Errorf("span %d: %v", sym, s)
		}
	}
}

func FuzzZstd(f *testing.F) {
	for i, p := range bases {
		f.Add(p[:200], bases[(i+1)%len(bases)][1000:1100])
	}
	e, d := NewEncoder(), NewDecoder()
	f.Fuzz(func(t *testing.T, data, other []byte) {
		var p, base Page
		copy(p[:], data)
		for i := 0; i < PageSize && len(other) > 0; i += len(other) {
			copy(base[i:], other)
		}
		zstdRoundTrip(t, e, d, &p, &base)
		zstdRoundTrip(t, e, d, &p, nil)
		copy(p[len(data)%PageSize:], base[len(other)%PageSize:])
		zstdRoundTrip(t, e, d, &p, &base)
		zstdRoundTrip(t, e, d, &p, nil)
	})
}
