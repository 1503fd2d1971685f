package codec

import (
	"bytes"
	"encoding/binary"
	"fmt"

	"github.com/klauspost/compress/s2"
	"github.com/klauspost/compress/zstd"
)

// The constant beginnings of what the libraries write for a page.
const (
	// s2Prefix is the varint 4096.
	s2Prefix = "\x80\x20"
	// zstdPrefix is a frame header: magic number, single segment, no checksum,
	// no dictionary, 2-byte content size (4096, stored less 256).
	zstdPrefix = "\x28\xb5\x2f\xfd" + "\x60" + "\x00\x0f"
	// zstdBasePrefix is the same with dictionary 1.
	zstdBasePrefix = "\x28\xb5\x2f\xfd" + "\x61" + "\x01" + "\x00\x0f"
	// zstdBlockHeader is the length of a block header: bit 0 "last block",
	// bits 1-2 type, above it the length of the content.
	zstdBlockHeader = 3
	// zstdCompressed is the block header's low bits for the last block, type
	// compressed.
	zstdCompressed = 1 | 2<<1
)

// scratchSize holds whatever the libraries may write for a page: s2 asks for
// 4096 + 4096/6 + a few, zstd for the page and its headers.
const scratchSize = PageSize + PageSize/4

// Encoder encodes pages. It is not safe for concurrent use: have one per
// worker. It allocates when a tier is used for the first time, not per page.
type Encoder struct {
	mid, deep *zstd.Encoder
	based     *zstd.Encoder
	scratch   [scratchSize]byte
	alone     [scratchSize]byte
	delta     [MaxEncoded + 16]byte
}

// NewEncoder returns an Encoder. It costs little until a zstd tier is used.
func NewEncoder() *Encoder { return new(Encoder) }

// Input is what Encode works on.
type Input struct {
	// Page is the content to encode. Nobody may write to it during Encode: a
	// torn page would be encoded faithfully as a page that never existed.
	Page *Page
	// Base is a page that the decoder will have too, normally the template's
	// page at the same place, or nil. Like Page, it must not change.
	Base *Page
	// Tier limits the work. Unknown tiers count as the deepest.
	Tier Tier
}

// Encode writes a representation of in.Page to dst, which must have room for
// MaxEncoded bytes, and returns its tag and length. The length is 0 with
// TagZero and TagTemplate. If there is no profitable representation, it
// returns TagInvalid, 0 and the cause; dst may have been written to in any
// case.
func (e *Encoder) Encode(dst []byte, in Input) (tag Tag, n int, why Reject) {
	if len(dst) < MaxEncoded {
		panic(fmt.Sprintf("codec: Encode into %d bytes, need %d", len(dst), MaxEncoded))
	}
	p := in.Page
	if in.Base != nil && *p == *in.Base {
		return TagTemplate, 0, RejectNone
	}
	if isFill(p) {
		if w := binary.LittleEndian.Uint64(p[:]); w != 0 {
			binary.LittleEndian.PutUint64(dst, w)
			return TagFill, 8, RejectNone
		}
		return TagZero, 0, RejectNone
	}
	delta := -1
	if in.Base != nil {
		accept := acceptFast
		if in.Tier != TierFast {
			accept = acceptDeep
		}
		delta = wordDelta(e.delta[:], p, in.Base, MaxProfitable)
		if delta >= 0 && delta <= accept {
			return TagWordDelta, copy(dst, e.delta[:delta]), RejectNone
		}
	}
	var blob []byte
	switch in.Tier {
	case TierFast:
		tag = TagS2
		blob, why = e.s2(p)
	case TierMid:
		tag = TagZstd
		if e.mid == nil {
			e.mid = newZstdEncoder(true)
		}
		blob, why = e.zstd(e.mid, p)
	default:
		tag = TagZstd
		if e.deep == nil {
			e.deep = newZstdEncoder(false)
		}
		blob, why = e.zstd(e.deep, p)
		if in.Base != nil {
			alone := append(e.alone[:0], blob...)
			withBase, whyBase := e.zstdBase(p, in.Base)
			if whyBase == RejectNone && (why != RejectNone || len(withBase) < len(alone)) {
				tag, blob, why = TagZstdBase, withBase, RejectNone
			} else {
				blob = alone
			}
		}
	}
	if why == RejectNone && len(blob) > MaxProfitable {
		why = RejectUnprofitable
	}
	if delta >= 0 && (why != RejectNone || delta <= len(blob)) {
		return TagWordDelta, copy(dst, e.delta[:delta]), RejectNone
	}
	if why != RejectNone {
		return TagInvalid, 0, why
	}
	return tag, copy(dst, blob), RejectNone
}

// The longest word delta that is taken without trying anything else.
const (
	acceptFast = 512
	acceptDeep = 32
)

func (e *Encoder) s2(p *Page) ([]byte, Reject) {
	out := s2.Encode(e.scratch[:], p[:])
	if len(out) >= PageSize {
		// Possible: S2 wraps what it cannot compress in a literal.
		return nil, RejectIncompressible
	}
	blob, ok := bytes.CutPrefix(out, []byte(s2Prefix))
	if !ok || len(blob) == 0 {
		return nil, RejectForm
	}
	return blob, RejectNone
}

func (e *Encoder) zstd(z *zstd.Encoder, p *Page) ([]byte, Reject) {
	return cutZstd(z.EncodeAll(p[:], e.scratch[:0]), zstdPrefix)
}

func (e *Encoder) zstdBase(p, base *Page) ([]byte, Reject) {
	if e.based == nil {
		e.based = newZstdEncoder(false)
	}
	if err := e.based.ResetWithOptions(nil, zstd.WithEncoderDictRaw(1, base[:])); err != nil {
		return nil, RejectForm
	}
	return cutZstd(e.based.EncodeAll(p[:], e.scratch[:0]), zstdBasePrefix)
}

// cutZstd returns the content of the only block of a frame.
func cutZstd(out []byte, prefix string) ([]byte, Reject) {
	out, ok := bytes.CutPrefix(out, []byte(prefix))
	if !ok || len(out) <= zstdBlockHeader {
		return nil, RejectForm
	}
	blob := out[zstdBlockHeader:]
	switch header := uint32(out[0]) | uint32(out[1])<<8 | uint32(out[2])<<16; header {
	case uint32(len(blob))<<3 | zstdCompressed:
		return blob, RejectNone
	case uint32(len(blob))<<3 | 1: // a raw block
		return nil, RejectIncompressible
	default:
		// A run-length block would be a page of one byte, which isFill took.
		return nil, RejectForm
	}
}

func newZstdEncoder(rawLiterals bool) *zstd.Encoder {
	z, err := zstd.NewWriter(nil,
		zstd.WithEncoderConcurrency(1),
		zstd.WithEncoderLevel(zstd.SpeedFastest),
		zstd.WithNoEntropyCompression(rawLiterals),
		zstd.WithLowerEncoderMem(true),
		zstd.WithWindowSize(PageSize),
		zstd.WithSingleSegment(true),
		zstd.WithEncoderCRC(false), // the caller keeps Sum
	)
	if err != nil {
		panic("codec: zstd refused constant options: " + err.Error())
	}
	return z
}
