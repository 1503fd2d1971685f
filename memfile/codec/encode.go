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
	counts    [NumTags]Count
	scratch   [scratchSize]byte
}

// TakeCounts returns what the Encoder has counted since the last call, by the
// form's tag. A library's form counts as one of its tag.
func (e *Encoder) TakeCounts() [NumTags]Count {
	c := e.counts
	e.counts = [NumTags]Count{}
	return c
}

// tried counts a form with a blob of n bytes, or -1 if it has none.
func (e *Encoder) tried(tag Tag, n int) {
	e.counts[tag].Tries++
	if n < 0 {
		e.counts[tag].Rejects++
	}
}

func (e *Encoder) won(tag Tag, n int) {
	e.counts[tag].Wins++
	e.counts[tag].Bytes += uint64(n)
}

// orNone is the length of a form for tried.
func orNone(n int, why Reject) int {
	if why != RejectNone {
		return -1
	}
	return n
}

// lzEncoder makes zstd blocks, with and without a base.
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
	// Tier limits the work. Unknown tiers count as the last.
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
	if in.Base != nil {
		e.counts[TagTemplate].Tries++
		if *in.Page == *in.Base {
			e.won(TagTemplate, 0)
			return TagTemplate, 0, RejectNone
		}
	}
	e.counts[TagFill].Tries++
	if isFill(in.Page) {
		if w := binary.LittleEndian.Uint64(in.Page[:]); w != 0 {
			binary.LittleEndian.PutUint64(dst, w)
			e.won(TagFill, 8)
			return TagFill, 8, RejectNone
		}
		e.won(TagZero, 0)
		return TagZero, 0, RejectNone
	}
	if in.Base == nil {
		var blob []byte
		tag, blob, why = e.alone(in.Page, in.Tier)
		n = copy(dst, blob)
	} else {
		tag, n, why = e.withBase(dst, in)
	}
	if why == RejectNone {
		e.won(tag, n)
	}
	return tag, n, why
}

// The longest word delta that is taken at once. Beyond, other forms are tried
// too and the shortest is taken. Of the sample, 86 % of the pages have a word
// delta of at most acceptDeep, and trying more on these would save 0.1 % of the
// bytes and cost 20 us each.
const (
	acceptFast = 1024
	acceptMid  = 512
	acceptDeep = 256
)

// acceptWords is the same for a page without a base: of the sample, 70 % have a
// shorter one, and trying more on these would save 0.4 % of the bytes.
const acceptWords = 1024

// fastWords is how many words may differ for TierFast to make a word delta: of
// the sample, 80 % of the pages have fewer, and the others would cost 20 us each
// on average.
const fastWords = 128

// withBase encodes a page that differs from its base.
func (e *Encoder) withBase(dst []byte, in Input) (Tag, int, Reject) {
	most, accept := words, acceptDeep
	switch in.Tier {
	case TierFast:
		most, accept = fastWords, acceptFast
	case TierMid:
		accept = acceptMid
	}
	n := e.wordEncoder().encode(deltaModel(), dst, in.Page, in.Base, MaxProfitable, most)
	e.tried(TagWordDelta, n)
	if n >= 0 && n <= accept {
		return TagWordDelta, n, RejectNone
	}
	tag, blob, why := e.alone(in.Page, in.Tier)
	if n >= 0 && (why != RejectNone || len(blob) >= n) {
		tag, blob, why = TagWordDelta, dst[:n], RejectNone
	}
	if in.Tier != TierFast && in.Tier != TierMid {
		n := copy(dst, blob)
		if t, b, w := e.zstd(TagZstdBase, in.Page, in.Base); w == RejectNone && (why != RejectNone || len(b) < n) {
			return t, copy(dst, b), RejectNone
		}
		return tag, n, why
	}
	return tag, copy(dst, blob), why
}

// searchWords is how many words a page must share with another for a word delta
// to be tried on the two: of the sample, those that share fewer and have a word
// delta that is the shortest form are 1 %.
const searchWords = words / 8

// EncodeAgainst writes a representation of p relative to base, any page that
// the decoder will have, to dst. It returns TagInvalid if there is none of at
// most limit bytes. It is for bases that a search has found: unlike Encode it
// writes a blob if the pages are equal, too.
func (e *Encoder) EncodeAgainst(dst []byte, p, base *Page, limit int) (tag Tag, n int) {
	limit = min(limit, MaxEncoded)
	if len(dst) < limit {
		panic(fmt.Sprintf("codec: EncodeAgainst into %d bytes, need %d", len(dst), limit))
	}
	changed, d := differing(p, base)
	if d <= words-searchWords {
		n = -1
		w := e.wordEncoder()
		if w.symbols(deltaModel(), p, base, &changed, d, limit) {
			if n = w.finish(dst, limit); n >= 0 {
				tag, limit = TagWordDelta, n-1
			}
		}
		e.tried(TagWordDelta, n)
	}
	if tag == TagInvalid || n > acceptDeep {
		if t, blob, why := e.zstd(TagZstdBase, p, base); why == RejectNone && len(blob) <= limit {
			tag, n = t, copy(dst, blob)
		}
	}
	if tag == TagInvalid {
		return tag, 0
	}
	e.won(tag, n)
	return tag, n
}

// EncodeDelta writes the word delta of p relative to base to dst, and returns its
// length, or -1 if it has more than limit bytes. It is the quickest form.
func (e *Encoder) EncodeDelta(dst []byte, p, base *Page, limit int) int {
	limit = min(limit, MaxEncoded)
	n := e.wordEncoder().encode(deltaModel(), dst[:limit], p, base, limit, min(limit, words))
	e.tried(TagWordDelta, n)
	if n >= 0 {
		e.won(TagWordDelta, n)
	}
	return n
}

// alone encodes a page without a base. The blob is valid until the next call.
func (e *Encoder) alone(p *Page, tier Tier) (tag Tag, blob []byte, why Reject) {
	switch tier {
	case TierFast:
		return e.s2(p)
	case TierMid:
		if e.mid == nil {
			e.mid = newZstdEncoder(true)
		}
		return e.libraryZstd(e.mid, p)
	case TierDeep:
		if e.deep == nil {
			e.deep = newZstdEncoder(false)
		}
		return e.libraryZstd(e.deep, p)
	}
	n := e.wordEncoder().encode(wordsModel(), e.scratch[:], p, &zeroPage, MaxProfitable, words)
	e.tried(TagWords, n)
	if n < 0 || n > acceptWords {
		tag, blob, why = e.zstd(TagZstd, p, nil)
		if n < 0 || why == RejectNone && len(blob) <= n {
			return tag, blob, why
		}
	}
	return TagWords, e.scratch[:n], RejectNone
}

func (e *Encoder) wordEncoder() *wordEncoder {
	if e.words == nil {
		e.words = new(wordEncoder)
	}
	return e.words
}

// zstd makes a zstd block. base may be nil.
func (e *Encoder) zstd(tag Tag, p, base *Page) (_ Tag, blob []byte, why Reject) {
	defer func() { e.tried(tag, orNone(len(blob), why)) }()
	if e.lz == nil {
		e.lz = new(lzEncoder)
	}
	m := &e.lz.matcher
	m.match(p, base)
	blob = e.lz.writer.write(m.seqs, m.literals)
	if len(blob) == 0 || len(blob) >= PageSize {
		return TagInvalid, nil, RejectIncompressible
	}
	return profitable(tag, blob)
}

func profitable(tag Tag, blob []byte) (Tag, []byte, Reject) {
	if len(blob) > MaxProfitable {
		return TagInvalid, nil, RejectUnprofitable
	}
	return tag, blob, RejectNone
}

func (e *Encoder) s2(p *Page) (_ Tag, blob []byte, why Reject) {
	defer func() { e.tried(TagS2, orNone(len(blob), why)) }()
	out := s2.Encode(e.scratch[:], p[:])
	if len(out) >= PageSize {
		// Possible: S2 wraps what it cannot compress in a literal.
		return TagInvalid, nil, RejectIncompressible
	}
	blob, ok := bytes.CutPrefix(out, []byte(s2Prefix))
	if !ok || len(blob) == 0 {
		return TagInvalid, nil, RejectForm
	}
	return profitable(TagS2, blob)
}

func (e *Encoder) libraryZstd(z *zstd.Encoder, p *Page) (_ Tag, blob []byte, why Reject) {
	defer func() { e.tried(TagZstd, orNone(len(blob), why)) }()
	out := z.EncodeAll(p[:], e.scratch[:0])
	out, ok := bytes.CutPrefix(out, []byte(zstdPrefix))
	if !ok || len(out) <= zstdBlockHeader {
		return TagInvalid, nil, RejectForm
	}
	blob = out[zstdBlockHeader:]
	switch header := uint32(out[0]) | uint32(out[1])<<8 | uint32(out[2])<<16; header {
	case uint32(len(blob))<<3 | zstdCompressed:
		return profitable(TagZstd, blob)
	case uint32(len(blob))<<3 | 1: // a raw block
		return TagInvalid, nil, RejectIncompressible
	default:
		// A run-length block would be a page of one byte, which isFill took.
		return TagInvalid, nil, RejectForm
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
