package codec

import (
	"bytes"
	"errors"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
)

// fuzzEncoder is shared by the executions of one fuzzing process: they run one
// after another, and making an encoder takes longer than using it.
var fuzzEncoder = NewEncoder()

// decodeAny checks what Decode promises for any bytes. base may be nil.
func decodeAny(t *testing.T, d *Decoder, tag Tag, blob []byte, base *Page) {
	var a, b, before Page
	for i := range b {
		b[i] = 0xff
	}
	if base != nil {
		before = *base
	}
	errA := d.Decode(&a, tag, blob, base)
	errB := NewDecoder().Decode(&b, tag, blob, base)
	if base != nil && *base != before {
		t.Fatalf("%v changed the base", tag)
	}
	if (errA == nil) != (errB == nil) {
		t.Fatalf("a used decoder says %v, a new one %v", errA, errB)
	}
	if errA != nil {
		if !errors.Is(errA, ErrCorrupt) && !errors.Is(errA, ErrTag) && !errors.Is(errA, ErrNoBase) && !errors.Is(errA, ErrUnsupported) {
			t.Fatalf("untyped error: %v", errA)
		}
		return
	}
	// Not a byte may be left as it was before.
	if a != b {
		t.Fatalf("the result of %v depends on what was in the page", tag)
	}
	// What was restored is a page like any other.
	roundTrip(t, fuzzEncoder, d, &a)
	if base != nil {
		roundTripBase(t, fuzzEncoder, d, &a, base)
	}
}

// bases are the base pages that fuzzing chooses from: fixed, so that the kept
// inputs go on to mean the same.
var bases = func() []*Page {
	all := synthetic()
	names := slices.Sorted(maps.Keys(all))
	var list []*Page
	for _, name := range names {
		list = append(list, all[name])
	}
	return list
}()

// seeds adds blobs of every form; at says which of bases is the base.
func seeds(add func(tag Tag, blob []byte, at uint8)) {
	e := NewEncoder()
	r := rand.New(rand.NewPCG(11, 12))
	for at, base := range bases {
		for kind := range 6 {
			for _, b := range []*Page{nil, base} {
				p := changed(base, r, kind, 30)
				for _, tier := range tiers {
					buf := make([]byte, MaxEncoded)
					tag, n, why := e.Encode(buf, Input{Page: p, Base: b, Tier: tier})
					if why == RejectNone {
						add(tag, buf[:n], uint8(at))
					}
				}
				// Forms that were not the shortest.
				if tag, blob, why := e.zstd(TagZstdBase, p, base); why == RejectNone {
					add(tag, bytes.Clone(blob), uint8(at))
				}
			}
		}
	}
}

func FuzzDecode(f *testing.F) {
	seeds(func(tag Tag, blob []byte, at uint8) {
		if at%3 == 0 {
			f.Add(uint8(tag), blob, at)
		}
	})
	for tag := range uint8(NumTags + 1) {
		f.Add(tag, []byte{}, uint8(0))
	}
	d := NewDecoder()
	f.Fuzz(func(t *testing.T, tag uint8, blob []byte, at uint8) {
		decodeAny(t, d, Tag(tag), blob, nil)
		decodeAny(t, d, Tag(tag), blob, bases[int(at)%len(bases)])
	})
}

func fuzzTag(f *testing.F, tag Tag) {
	seeds(func(got Tag, blob []byte, at uint8) {
		if got == tag {
			f.Add(blob)
		}
	})
	d := NewDecoder()
	f.Fuzz(func(t *testing.T, blob []byte) { decodeAny(t, d, tag, blob, nil) })
}

func fuzzBaseTag(f *testing.F, tag Tag) {
	seeds(func(got Tag, blob []byte, at uint8) {
		if got == tag {
			f.Add(blob, at)
		}
	})
	d := NewDecoder()
	f.Fuzz(func(t *testing.T, blob []byte, at uint8) {
		decodeAny(t, d, tag, blob, bases[int(at)%len(bases)])
	})
}

func FuzzDecodeFill(f *testing.F)      { fuzzTag(f, TagFill) }
func FuzzDecodeS2(f *testing.F)        { fuzzTag(f, TagS2) }
func FuzzDecodeZstd(f *testing.F)      { fuzzTag(f, TagZstd) }
func FuzzDecodeWords(f *testing.F)     { fuzzTag(f, TagWords) }
func FuzzDecodeTemplate(f *testing.F)  { fuzzBaseTag(f, TagTemplate) }
func FuzzDecodeWordDelta(f *testing.F) { fuzzBaseTag(f, TagWordDelta) }
func FuzzDecodeZstdBase(f *testing.F)  { fuzzBaseTag(f, TagZstdBase) }

// FuzzRoundTripBase encodes pages that the fuzzer shapes against bases that it
// shapes too, or that are the page with a few bytes changed.
func FuzzRoundTripBase(f *testing.F) {
	for i, p := range bases {
		// Short ones: the fuzzer shortens what it finds, byte by byte.
		f.Add(p[:200], bases[(i+1)%len(bases)][1000:1100], uint16(i*300))
	}
	e, d := NewEncoder(), NewDecoder()
	f.Fuzz(func(t *testing.T, data, other []byte, shift uint16) {
		var p, base Page
		for i := 0; i < PageSize && len(data) > 0; i += len(data) {
			copy(p[i:], data)
		}
		copy(base[:], other)
		roundTripBase(t, e, d, &p, &base)
		base = p
		copy(base[int(shift)%PageSize:], other)
		roundTripBase(t, e, d, &p, &base)
		copy(base[int(shift)%PageSize:], p[:])
		roundTripBase(t, e, d, &p, &base)
	})
}

// FuzzRoundTrip encodes pages that the fuzzer shapes.
func FuzzRoundTrip(f *testing.F) {
	for _, p := range synthetic() {
		f.Add(p[:])
	}
	e, d := NewEncoder(), NewDecoder()
	f.Fuzz(func(t *testing.T, data []byte) {
		var p Page
		copy(p[:], data)
		roundTrip(t, e, d, &p)
		if len(data) > 0 { // the same, repeated over the page
			for i := 0; i < PageSize; i += len(data) {
				copy(p[i:], data)
			}
			roundTrip(t, e, d, &p)
		}
	})
}
