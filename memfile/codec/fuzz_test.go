package codec

import (
	"errors"
	"testing"
)

// fuzzEncoder is shared by the executions of one fuzzing process: they run one
// after another, and making an encoder takes longer than using it.
var fuzzEncoder = NewEncoder()

// decodeAny checks what Decode promises for any bytes.
func decodeAny(t *testing.T, d *Decoder, tag Tag, blob []byte) {
	var a, b Page
	for i := range b {
		b[i] = 0xff
	}
	errA := d.Decode(&a, tag, blob, nil)
	errB := NewDecoder().Decode(&b, tag, blob, nil)
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
}

func seeds(f *testing.F, add func(tag Tag, blob []byte)) {
	e := NewEncoder()
	for _, p := range synthetic() {
		for _, tier := range tiers {
			buf := make([]byte, MaxEncoded)
			tag, n, why := e.Encode(buf, Input{Page: p, Tier: tier})
			if why == RejectNone {
				add(tag, buf[:n])
			}
		}
	}
}

func FuzzDecode(f *testing.F) {
	seeds(f, func(tag Tag, blob []byte) { f.Add(uint8(tag), blob) })
	for tag := range uint8(NumTags + 1) {
		f.Add(tag, []byte{})
	}
	d := NewDecoder()
	f.Fuzz(func(t *testing.T, tag uint8, blob []byte) { decodeAny(t, d, Tag(tag), blob) })
}

func fuzzTag(f *testing.F, tag Tag) {
	seeds(f, func(got Tag, blob []byte) {
		if got == tag {
			f.Add(blob)
		}
	})
	d := NewDecoder()
	f.Fuzz(func(t *testing.T, blob []byte) { decodeAny(t, d, tag, blob) })
}

func FuzzDecodeFill(f *testing.F) { fuzzTag(f, TagFill) }
func FuzzDecodeS2(f *testing.F)   { fuzzTag(f, TagS2) }
func FuzzDecodeZstd(f *testing.F) { fuzzTag(f, TagZstd) }

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
