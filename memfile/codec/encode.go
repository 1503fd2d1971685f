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
	// zstdBasePrefix is the same with dictionary zstdBaseID, the base page.
	zstdBasePrefix = "\x28\xb5\x2f\xfd" + "\x61" + "\x01" + "\x00\x0f"
	zstdBaseID     = 1
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
// worker. It allocates when something is used for the first time, not per page.
type Encoder struct {
	mid, deep *zstd.Encoder
	words     *wordEncoder
	lz        *lzEncoder
	scratch   [scratchSize]byte
}

// lzEncoder makes TagZstdBase blobs.
type lzEncoder struct {
	matcher matcher
	writer  blockWriter
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
	if in.Base != nil && *in.Page == *in.Base {
		return TagTemplate, 0, RejectNone
	}
	if isFill(in.Page) {
		if w := binary.LittleEndian.Uint64(in.Page[:]); w != 0 {
			binary.LittleEndian.PutUint64(dst, w)
			return TagFill, 8, RejectNone
		}
		return TagZero, 0, RejectNone
	}
	if in.Base == nil {
		var blob []byte
		tag, blob, why = e.alone(in.Page, in.Tier)
		return tag, copy(dst, blob), why
	}
	return e.withBase(dst, in)
}

// The longest word delta that is taken at once. Beyond, another form is tried
// and the shorter one is taken. Of the sample, 85 % of the pages have a shorter
// word delta, and trying more on these saves 0.1 % and costs 20 us each.
const (
	acceptFast = 1024
	acceptMid  = 512
	acceptDeep = 256
)

// fastWords is how many words may differ for TierFast to make a word delta: of
// the sample, 79 % of the pages have fewer, and the rest would cost 40 us each.
const fastWords = 128

func (e *Encoder) withBase(dst []byte, in Input) (tag Tag, n int, why Reject) {
	if e.words == nil {
		e.words = new(wordEncoder)
	}
	most, accept := words, acceptDeep
	switch in.Tier {
	case TierFast:
		most, accept = fastWords, acceptFast
	case TierMid:
		accept = acceptMid
	}
	n = e.words.encode(standard(), dst, in.Page, in.Base, MaxProfitable, most)
	if n >= 0 && n <= accept {
		return TagWordDelta, n, RejectNone
	}
	tag, blob, why := e.alone(in.Page, in.Tier)
	if in.Tier != TierFast && in.Tier != TierMid {
		// Without the base a page is hardly ever shorter, but the library's
		// encoder has other ideas of what a match is worth than ours.
		t, b, w := e.zstdBase(in.Page, in.Base)
		if w == RejectNone && (why != RejectNone || len(b) < len(blob)) {
			tag, blob, why = t, b, w
		}
	}
	switch {
	case why == RejectNone && (n < 0 || len(blob) < n):
		return tag, copy(dst, blob), RejectNone
	case n >= 0:
		return TagWordDelta, n, RejectNone
	}
	return TagInvalid, 0, why
}

// alone encodes a page without a base. The blob is valid until the next call.
func (e *Encoder) alone(p *Page, tier Tier) (tag Tag, blob []byte, why Reject) {
	switch tier {
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
	}
	return profitable(tag, blob, why)
}

func profitable(tag Tag, blob []byte, why Reject) (Tag, []byte, Reject) {
	if why == RejectNone && len(blob) > MaxProfitable {
		why = RejectUnprofitable
	}
	if why != RejectNone {
		return TagInvalid, nil, why
	}
	return tag, blob, RejectNone
}

// zstdBase encodes a page with what precedes it in mind. The blob is valid
// until the next call.
func (e *Encoder) zstdBase(p, base *Page) (Tag, []byte, Reject) {
	if e.lz == nil {
		e.lz = new(lzEncoder)
	}
	m := &e.lz.matcher
	m.match(p, base)
	blob, why := e.lz.writer.write(m.seqs, m.literals), RejectNone
	if len(blob) == 0 || len(blob) >= PageSize {
		why = RejectIncompressible
	}
	return profitable(TagZstdBase, blob, why)
}

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
	out := z.EncodeAll(p[:], e.scratch[:0])
	out, ok := bytes.CutPrefix(out, []byte(zstdPrefix))
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
