package codec

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"syscall"
	"testing"

	"pgregory.net/rapid"
)

// synthetic returns pages of kinds that a guest has.
func synthetic() map[string]*Page {
	r := rand.New(rand.NewPCG(1, 2))
	pages := map[string]*Page{
		"zero": {},
		"fill": {},
	}
	for i := 0; i < PageSize; i += 8 {
		binary.LittleEndian.PutUint64(pages["fill"][i:], 0xdead4badf00d0001)
	}
	one := &Page{}
	for i := range one {
		one[i] = 0xaa
	}
	pages["byte"] = one
	rnd := &Page{}
	for i := range rnd {
		rnd[i] = byte(r.Uint32())
	}
	pages["random"] = rnd
	half := *rnd
	clear(half[:PageSize/2])
	pages["half-random"] = &half
	most := *rnd
	clear(most[:PageSize/5])
	pages["mostly-random"] = &most
	heap := &Page{}
	for i := 0; i < PageSize; i += 8 {
		switch r.IntN(4) {
		case 0:
			binary.LittleEndian.PutUint64(heap[i:], 0x00007f3a_10000000+uint64(r.IntN(1<<16))*16)
		case 1:
			binary.LittleEndian.PutUint64(heap[i:], uint64(r.IntN(100)))
		}
	}
	pages["heap"] = heap
	words := []string{"return ", "self.", "import ", "def ", "value", " = ", "(", "):\n    ", "None", "index"}
	text := make([]byte, 0, PageSize+16)
	for len(text) < PageSize {
		text = append(text, words[r.IntN(len(words))]...)
	}
	pages["text"] = (*Page)(text)
	last := &Page{}
	last[PageSize-1] = 1
	pages["last-byte"] = last
	first := &Page{}
	first[0] = 1
	pages["first-byte"] = first
	return pages
}

var tiers = []Tier{TierFast, TierMid, TierDeep, TierMax}

// roundTrip encodes p in every tier and checks everything that must hold.
func roundTrip(t interface{ Fatalf(string, ...any) }, e *Encoder, d *Decoder, p *Page) {
	var buf [MaxEncoded]byte
	before := *p
	for _, tier := range tiers {
		tag, n, why := e.Encode(buf[:], Input{Page: p, Tier: tier})
		if *p != before {
			t.Fatalf("%v: Encode changed its input", tier)
		}
		if (why == RejectNone) != (tag != TagInvalid) {
			t.Fatalf("%v: tag %v with cause %v", tier, tag, why)
		}
		if why == RejectForm {
			t.Fatalf("%v: the library wrote an unknown form", tier)
		}
		if why != RejectNone {
			if n != 0 {
				t.Fatalf("%v: %v with %d bytes", tier, why, n)
			}
			continue
		}
		if n > MaxProfitable || (n == 0) != (tag == TagZero) {
			t.Fatalf("%v: %v of %d bytes", tier, tag, n)
		}
		if (tag == TagZero) != IsZero(p) {
			t.Fatalf("%v: %v, IsZero is %v", tier, tag, IsZero(p))
		}
		got := Page(bytes.Repeat([]byte{0x55}, PageSize))
		if err := d.Decode(&got, tag, buf[:n], nil); err != nil {
			t.Fatalf("%v: %v of %d bytes: %v", tier, tag, n, err)
		}
		if got != *p {
			t.Fatalf("%v: %v of %d bytes restores another page", tier, tag, n)
		}
		if Sum(&got) != Sum(p) {
			t.Fatalf("checksums differ")
		}
	}
}

func TestSynthetic(t *testing.T) {
	e, d := NewEncoder(), NewDecoder()
	want := map[string][NumTiers + 1]Tag{
		"zero":   {TagZero, TagZero, TagZero, TagZero},
		"fill":   {TagFill, TagFill, TagFill, TagFill},
		"byte":   {TagFill, TagFill, TagFill, TagFill},
		"random": {},
		"heap":   {TagS2, TagZstd, TagZstd, TagWords},
		"text":   {TagS2, TagZstd, TagZstd, TagZstd},
	}
	for name, p := range synthetic() {
		t.Run(name, func(t *testing.T) {
			roundTrip(t, e, d, p)
			tags, ok := want[name]
			for _, tier := range tiers {
				var buf [MaxEncoded]byte
				tag, n, why := e.Encode(buf[:], Input{Page: p, Tier: tier})
				t.Logf("%v: %v, %d bytes, reject %v", tier, tag, n, why)
				if ok && tag != tags[tier] {
					t.Errorf("%v: got %v, want %v", tier, tag, tags[tier])
				}
			}
		})
	}
}

func TestUnprofitable(t *testing.T) {
	var buf [MaxEncoded]byte
	p := synthetic()["mostly-random"]
	for _, tier := range tiers {
		if tag, n, why := NewEncoder().Encode(buf[:], Input{Page: p, Tier: tier}); why != RejectUnprofitable {
			t.Errorf("%v: %v, %d bytes, %v", tier, tag, n, why)
		}
	}
}

// genPage draws pages made of runs, copies of earlier parts and noise, so that
// every kind of sequence of the compressors occurs.
func genPage(t *rapid.T) *Page {
	seed := rapid.Uint64().Draw(t, "seed")
	r := rand.New(rand.NewPCG(seed, 0))
	p := new(Page)
	for i := 0; i < PageSize; {
		kind := rapid.IntRange(0, 4).Draw(t, "kind")
		n := min(rapid.IntRange(1, 700).Draw(t, "n"), PageSize-i)
		part := p[i : i+n]
		switch kind {
		case 0: // zeros
		case 1:
			b := byte(r.Uint32())
			for j := range part {
				part[j] = b
			}
		case 2:
			if i > 0 {
				off := 1 + r.IntN(i)
				for j := range part {
					part[j] = p[i-off+j]
				}
			}
		case 3:
			for j := range part {
				part[j] = byte(r.Uint32())
			}
		case 4: // a skewed alphabet, for the entropy coder
			for j := range part {
				part[j] = "aaaaaaaabbbbccde"[r.IntN(16)]
			}
		}
		i += n
	}
	return p
}

func TestRoundTripProperty(t *testing.T) {
	e, d := NewEncoder(), NewDecoder()
	rapid.Check(t, func(t *rapid.T) { roundTrip(t, e, d, genPage(t)) })
}

func TestIsZeroProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := new(Page)
		if !IsZero(p) {
			t.Fatal("a zero page is not zero")
		}
		p[rapid.IntRange(0, PageSize-1).Draw(t, "at")] = byte(rapid.IntRange(1, 255).Draw(t, "value"))
		if IsZero(p) || isFill(p) {
			t.Fatal("one byte was overlooked")
		}
	})
	for name, p := range synthetic() {
		if IsZero(p) != (name == "zero") {
			t.Errorf("IsZero(%s) = %v", name, IsZero(p))
		}
	}
}

func TestSumIsStable(t *testing.T) {
	// Stored beside blobs: a library upgrade must not change it.
	if got := Sum(new(Page)); got != 0x93d76fe148c689ba {
		t.Errorf("Sum of a zero page is %#x", got)
	}
}

// TestCorrupt checks that every truncation and many mutations of a blob give
// either an error or exactly one page, and that truncation is an error.
func TestCorrupt(t *testing.T) {
	d := NewDecoder()
	r := rand.New(rand.NewPCG(3, 4))
	forms(func(name string, p, base *Page, tag Tag, blob []byte) {
		var got Page
		for cut := range len(blob) {
			if err := d.Decode(&got, tag, blob[:cut], base); err == nil {
				if got == *p {
					t.Fatalf("%s %v: right after a cut to %d of %d", name, tag, cut, len(blob))
				}
			} else if !errors.Is(err, ErrCorrupt) {
				t.Fatalf("%s %v: %v", name, tag, err)
			}
		}
		for range 300 {
			bad := bytes.Clone(blob)
			for range 1 + r.IntN(3) {
				if len(bad) > 0 {
					bad[r.IntN(len(bad))] ^= byte(1 + r.IntN(255))
				}
			}
			if err := d.Decode(&got, tag, bad, base); err != nil && !errors.Is(err, ErrCorrupt) {
				t.Fatalf("%s %v: %v", name, tag, err)
			}
		}
		// Corruption must not stick to the decoder.
		if err := d.Decode(&got, tag, blob, base); err != nil || got != *p {
			t.Fatalf("%s %v: decoder broken by corrupt input: %v", name, tag, err)
		}
		// A blob too long is refused, also if its beginning is right.
		if err := d.Decode(&got, tag, append(bytes.Clone(blob), make([]byte, MaxEncoded)...), base); !errors.Is(err, ErrCorrupt) {
			t.Fatalf("%s %v: long blob: %v", name, tag, err)
		}
	})
}

// forms calls f with blobs of every form.
func forms(f func(name string, p, base *Page, tag Tag, blob []byte)) {
	e := NewEncoder()
	r := rand.New(rand.NewPCG(13, 14))
	try := func(name string, p, base *Page) {
		for _, tier := range tiers {
			buf := make([]byte, MaxEncoded)
			if tag, n, why := e.Encode(buf, Input{Page: p, Base: base, Tier: tier}); why == RejectNone {
				f(name, p, base, tag, buf[:n])
			}
		}
		// Also where it is not the shortest.
		if base != nil {
			if tag, blob, why := e.zstd(TagZstdBase, p, base); why == RejectNone {
				f(name, p, base, tag, bytes.Clone(blob))
			}
		}
	}
	for name, p := range synthetic() {
		try(name, p, nil)
		for kind := range 6 {
			try(fmt.Sprintf("%s, change %d", name, kind), changed(p, r, kind, 40), p)
		}
	}
}

func TestTags(t *testing.T) {
	d := NewDecoder()
	var p Page
	for tag := range Tag(255) {
		for _, blob := range [][]byte{nil, {}, {1}, make([]byte, 8), make([]byte, PageSize), make([]byte, 2*PageSize)} {
			err := d.Decode(&p, tag, blob, nil)
			switch tag {
			case TagZero, TagFill, TagS2, TagZstd, TagWords:
				if err != nil && !errors.Is(err, ErrCorrupt) {
					t.Errorf("%v: %v", tag, err)
				}
			case TagTemplate, TagWordDelta, TagZstdBase:
				if !errors.Is(err, ErrNoBase) {
					t.Errorf("%v: %v", tag, err)
				}
			case TagPool, TagCluster:
				if !errors.Is(err, ErrUnsupported) {
					t.Errorf("%v: %v", tag, err)
				}
			default:
				if !errors.Is(err, ErrTag) {
					t.Errorf("%v: %v", tag, err)
				}
			}
		}
	}
	seen := map[string]bool{}
	names := func(s string) {
		if seen[s] || s == "" {
			t.Errorf("name %q is used twice", s)
		}
		seen[s] = true
	}
	for tag := range Tag(NumTags + 1) {
		names(tag.String())
	}
	for r := range Reject(NumRejects + 1) {
		names(r.String())
	}
	for tier := range Tier(NumTiers + 2) {
		names(tier.String())
	}
}

func TestShortDestination(t *testing.T) {
	defer func() {
		if recover() == nil {
			t.Error("no panic")
		}
	}()
	NewEncoder().Encode(make([]byte, MaxEncoded-1), Input{Page: new(Page)})
}

// guarded returns a page directly in front of memory that must not be touched.
func guarded(t *testing.T) *Page {
	b, err := syscall.Mmap(-1, 0, 3*PageSize, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	if err != nil {
		t.Skip(err)
	}
	t.Cleanup(func() { syscall.Munmap(b) })
	for _, i := range []int{0, 2} {
		if err := syscall.Mprotect(b[i*PageSize:(i+1)*PageSize], syscall.PROT_NONE); err != nil {
			t.Skip(err)
		}
	}
	return (*Page)(b[PageSize:])
}

// TestGuarded runs encoders and decoders, which are assembly in part, on pages
// between unmapped neighbours, as guest pages at the end of a mapping are.
func TestGuarded(t *testing.T) {
	in, out, mem, guardedBase := guarded(t), guarded(t), guarded(t), guarded(t)
	e, d := NewEncoder(), NewDecoder()
	r := rand.New(rand.NewPCG(5, 6))
	forms(func(name string, p, base *Page, _ Tag, _ []byte) {
		*in = *p
		if base != nil {
			*guardedBase = *base
			base = guardedBase
		}
		for _, tier := range tiers {
			var buf [MaxEncoded]byte
			tag, n, why := e.Encode(buf[:], Input{Page: in, Base: base, Tier: tier})
			if why != RejectNone {
				continue
			}
			blob := mem[PageSize-n:]
			copy(blob, buf[:n])
			if err := d.Decode(out, tag, blob, base); err != nil || *out != *p {
				t.Fatalf("%v: %v", tag, err)
			}
			for range 50 {
				copy(blob, buf[:n])
				if n > 0 {
					blob[r.IntN(n)] = byte(r.Uint32())
				}
				d.Decode(out, tag, blob, base)
			}
		}
	})
}

func TestNoAllocations(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector empties pools at random")
	}
	e, d := NewEncoder(), NewDecoder()
	var buf [MaxEncoded]byte
	r := rand.New(rand.NewPCG(15, 16))
	text := synthetic()["text"]
	for _, in := range []Input{
		{Page: synthetic()["heap"]},
		{Page: text},
		{Page: changed(text, r, 2, 20), Base: text},
		{Page: changed(text, r, 3, 0), Base: text},
		{Page: text, Base: synthetic()["heap"]},
		{Page: text, Base: text},
	} {
		for _, tier := range tiers {
			in.Tier = tier
			tag, n, _ := e.Encode(buf[:], in)
			var out Page
			d.Decode(&out, tag, buf[:n], in.Base)
			if got := testing.AllocsPerRun(100, func() { e.Encode(buf[:], in) }); got >= 1 {
				t.Errorf("%v: Encode allocates %v times per page", tier, got)
			}
			if got := testing.AllocsPerRun(100, func() { d.Decode(&out, tag, buf[:n], in.Base) }); got >= 1 {
				t.Errorf("%v: Decode allocates %v times per page", tier, got)
			}
		}
	}
}

// held returns the heap that f's result keeps alive.
func held(f func() any) int64 {
	var before, after runtime.MemStats
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&before)
	keep := f()
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&after)
	runtime.KeepAlive(keep)
	return int64(after.HeapAlloc) - int64(before.HeapAlloc)
}

// TestMemory keeps the figures of the package comment honest.
func TestMemory(t *testing.T) {
	pages := synthetic()
	text := pages["text"]
	shifted := changed(text, rand.New(rand.NewPCG(17, 18)), 3, 0)
	warm := func(e *Encoder, base *Page, tiers ...Tier) *Encoder {
		var buf [MaxEncoded]byte
		for _, tier := range tiers {
			for _, p := range pages {
				e.Encode(buf[:], Input{Page: p, Base: base, Tier: tier})
			}
		}
		return e
	}
	decode := func(d *Decoder, tag Tag, blob []byte, base *Page) *Decoder {
		var p Page
		if err := d.Decode(&p, tag, blob, base); err != nil {
			t.Fatal(err)
		}
		return d
	}
	encode := func(in Input) (Tag, []byte) {
		buf := make([]byte, MaxEncoded)
		tag, n, _ := NewEncoder().Encode(buf, in)
		return tag, buf[:n]
	}
	s2Tag, s2Blob := encode(Input{Page: text, Tier: TierFast})
	zTag, zBlob := encode(Input{Page: text, Tier: TierDeep})
	bTag, bBlob := encode(Input{Page: shifted, Base: text, Tier: TierDeep})
	wTag, wBlob := encode(Input{Page: changed(text, rand.New(rand.NewPCG(19, 20)), 2, 5), Base: text})
	if s2Tag != TagS2 || zTag != TagZstd || bTag != TagZstdBase || wTag != TagWordDelta {
		t.Fatal("unexpected forms", s2Tag, zTag, bTag, wTag)
	}
	decode(NewDecoder(), zTag, zBlob, nil)
	warm(NewEncoder(), text, tiers...)
	models := held(func() any {
		return []*model{newModel(unpackModel(deltaTables, deltaWidths)), newModel(unpackModel(wordsTables, wordsWidths))}
	})
	t.Logf("%-32s %7d bytes, once per process", "both models", models)
	for _, c := range []struct {
		name  string
		limit int64
		new   func() any
	}{
		{"encoder, TierFast", 8 << 10, func() any { return warm(NewEncoder(), nil, TierFast) }},
		{"encoder, TierFast, with base", 40 << 10, func() any { return warm(NewEncoder(), text, TierFast) }},
		{"encoder, TierMid", 352 << 10, func() any { return warm(NewEncoder(), nil, TierMid) }},
		{"encoder, TierDeep", 352 << 10, func() any { return warm(NewEncoder(), nil, TierDeep) }},
		{"encoder, TierDeep, with base", 500 << 10, func() any { return warm(NewEncoder(), text, TierDeep) }},
		{"encoder, TierMax, with base", 140 << 10, func() any { return warm(NewEncoder(), text, TierMax) }},
		{"encoder, all tiers, with base", 800 << 10, func() any { return warm(NewEncoder(), text, tiers...) }},
		{"decoder, s2", 8 << 10, func() any { return decode(NewDecoder(), s2Tag, s2Blob, nil) }},
		{"decoder, word delta", 8 << 10, func() any { return decode(NewDecoder(), wTag, wBlob, text) }},
		{"decoder, zstd", 52 << 10, func() any { return decode(NewDecoder(), zTag, zBlob, nil) }},
		{"decoder, zstd with base", 52 << 10, func() any { return decode(NewDecoder(), bTag, bBlob, text) }},
	} {
		got := held(c.new)
		t.Logf("%-32s %7d bytes", c.name, got)
		if got > c.limit && !raceEnabled {
			t.Errorf("%s holds %d bytes, more than %d", c.name, got, c.limit)
		}
	}
}

// TestHostileMemory feeds blobs that announce as much as the format lets them
// and checks that the decoder does not grow.
func TestHostileMemory(t *testing.T) {
	d := NewDecoder()
	r := rand.New(rand.NewPCG(7, 8))
	feed := func(n int) {
		var p Page
		for range n {
			blob := make([]byte, 1+r.IntN(200))
			for i := range blob {
				blob[i] = byte(r.Uint32())
			}
			d.Decode(&p, TagZstd, blob, nil)
			blob[0] |= 0x0f // long literals
			d.Decode(&p, TagZstd, blob, nil)
			d.Decode(&p, TagZstdBase, blob, &zeroPage)
			d.Decode(&p, TagWordDelta, blob, &zeroPage)
			d.Decode(&p, TagS2, blob, nil)
		}
	}
	feed(1)
	got := held(func() any { feed(20000); return d })
	t.Logf("growth %d bytes", got)
	if got > 256<<10 {
		t.Errorf("hostile blobs made the decoder grow by %d bytes", got)
	}
}
