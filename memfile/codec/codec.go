// Package codec turns guest pages into compact blobs and back.
//
// It is the bottom layer of the memory file backend: it knows what a page is
// and how a blob is encoded, and nothing of page tables, storage or sandboxes.
// The caller keeps, for every stored page, the [Tag], the blob and the page's
// checksum ([Sum]); a blob does not say of itself how it is encoded, and its
// length never stands for anything but its length.
//
// # Forms
//
//	TagZero       no blob; every byte is zero
//	TagFill       8 bytes; the page repeats this word
//	TagS2         an S2 block without its length prefix (it is always 4096)
//	TagZstd       the content of one zstd block; the frame header (7 bytes) and
//	              the block header (3 bytes) are the same for every page of a
//	              given blob length, so they are cut off here and put back by
//	              the decoder
//	TagWords      a word coder's, see below
//
// And relative to a base, a page that encoder and decoder have: the template's
// page at the same place, or one that a search found (EncodeAgainst):
//
//	TagTemplate   no blob; the page equals its base
//	TagWordDelta  a word coder's, for the words that differ from the base's
//	TagZstdBase   as TagZstd, with the base as dictionary
//
// Cutting constant headers off saves 10 bytes of ~920 per zstd page, and also
// means that hostile bytes cannot choose a window, a dictionary, a content
// size, skippable frames or several blocks: those parts are written by the
// decoder itself. The other tags are reserved, so that numbers already used in
// images and statistics keep their meaning, and are refused until they are
// implemented.
//
// # The word coder
//
// What differs from the template are pointers into heaps that moved, counters,
// hashes and floats: 8-byte words that resemble others. Of the words that differ
// the coder writes how each follows from what is known before it (the base's
// word and the last differences to the base, the words 1 and one stride before,
// a copied word), and the bytes in which it does not. What that is depends on
// what it was for the last word and for the word one stride before, and is coded
// with the probabilities that it had in this context on the sample pages
// (modeldata.go, made by TestTrain), by a static range coder. So a blob says
// nothing of its own statistics, which would be longer than most blobs, and
// there are no tables to build when it is read. A model trained on one half of
// the sample's places costs 2 % more on the other half than one trained on
// that; between parts with other programs in them it is 5 to 16 %. In bytes
// per page on those of the sample that differ from the template: 283, against
// 774 for a plain list of words with the same ideas of moved pointers, 834 for
// runs of XORed bytes, and 364 to 398 for the library's zstd with the base as
// dictionary, depending on the level.
//
// Blobs can be read with the model they were written with only: the numbers in
// modeldata.go are part of the format.
//
// # zstd with a base
//
// The library's encoder can take a base as dictionary, but spends 25 us on
// entering it, an allocation, and 512 KiB of tables. So matches are found here
// (lz.go) and written as a zstd block (zstdblock.go), with the library's Huffman
// coder. This is also 7 % shorter than zstd fastest on pages without a base, and
// as short as the library's best level. The decoder is the library's; its
// dictionary is a buffer that the base is copied to.
//
// # Tiers
//
// Measured on 15636 non-zero real guest pages that differ from their template
// (V8 and CPython heaps, page cache of a tool sandbox), one core of a shared
// x86-64 VM; read ratios, not times. Rejected pages count as 4096 bytes.
//
//	tier      form                            bytes  encode  decode  rejected
//	TierFast  s2                               1365  4.7 us  2.3 us     4.2 %
//	TierMid   zstd fastest, plain literals     1028   12 us    4 us     1.2 %
//	TierDeep  zstd fastest                      940   21 us  7.2 us     1.0 %
//	TierMax   words, zstd of our own            785   40 us   11 us     0.6 %
//
// TierMid keeps zstd's entropy-coded sequences and leaves out the Huffman
// stage of the literals; it has no tag of its own because the decoder is the
// same. lz4 loses to s2 in size and in encoding time (6 % larger, 6.3 us); it
// decodes 1-2 us faster, which does not show beside a page fault. The higher
// levels of the library's zstd give pages 2, 3 and 6 % smaller, but their
// encoders hold 1.4, 4.5 and 36 MB, more than they would save in a sandbox.
// Transposing a page into byte planes before zstd makes it 32 % larger.
//
// With a base, on the 9711 of them that have one:
//
//	tier      forms                           bytes  encode  decode  rejected
//	TierFast  word delta up to 128 words, s2    473  2.7 us  1.2 us     5.5 %
//	TierMid   word delta, zstd                  273  9.2 us  3.0 us     0.9 %
//	TierDeep  word delta, zstd with base        265   17 us  3.3 us     0.9 %
//	TierMax   all                               264   24 us  3.3 us     0.9 %
//	none      TierDeep without the base         936   20 us    7 us     1.6 %
//
// Another 19 % of the pages of those places equal the base (TagTemplate, 0.15 us
// and 0.07 us). By the number of words that differ, a word delta alone is
//
//	words     pages   bytes  encode  decode
//	up to 32   61 %      48  1.3 us  0.4 us
//	up to 128  80 %      67  2.3 us  0.9 us
//	all       100 %     283  7.2 us  3.1 us
//
// A word delta is taken at once if it is short (acceptFast and the like);
// otherwise it competes with what the tier does without a base and, from
// TierDeep on, with TagZstdBase. So apart from these limits no page is longer
// with a base than without. No allocation is made per page.
//
// The shortest of all forms, those of this package and 16 of the library's
// (four levels of zstd; alone, with the base, of the difference and of the XOR),
// is 262 bytes per page (TestCeiling, every fifth page): TierDeep is 0.8 % above
// it, TierMid 3.7 %. Of the library's forms alone the shortest are 335.
//
// # No clusters
//
// Several pages could be stored as one, to be restored together. On 43988 pages
// of language servers started after the restore, and 20788 of other pages without
// a page in the template, in bytes per page without headers:
//
//	                                     16 KiB         64 KiB
//	library's zstd, default          865    1070     814     999
//	library's zstd, better           847    1053     793     979
//	library's zstd, best (150 us)    806    1009     746     926
//	TierMax, page by page                888   1164
//	and relative to the page before      839   1096
//	or to another                        805   1080
//
// Units of 16 KiB gain nothing over pages that may refer to the page before them,
// and make four pages be decoded for one. Those of 64 KiB gain a few per cent and
// make it sixteen. So TagCluster stays reserved.
//
// # Memory
//
// Bytes of heap held, amd64 (see TestMemory):
//
//	Encoder  TierFast without base         5376, and 16 KiB in a pool of the library
//	         plus any base, or TierMax    27 Ki for the word coder
//	         plus TierMid                310 Ki
//	         plus TierDeep               324 Ki
//	         plus TierDeep with base      70 Ki for zstd blocks; also TierMax
//	Decoder  without zstd blobs           4864
//	         with zstd blobs               44 Ki, most of it in pools of the library
//	Models   of word deltas, of words     109 Ki each, once per process (0.2 ms)
//
// All of it is created on first use. The zstd states live until the Encoder or
// the Decoder is dropped; neither has goroutines or finalizers, so both can be
// kept in a sync.Pool or simply be let go when a sandbox falls asleep.
//
// # Concurrency
//
// Encoder and Decoder are for one goroutine at a time and take no locks.
// Functions without a receiver are safe for concurrent use.
package codec

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/zeebo/xxh3"
)

// PageSize is the unit of everything in this package.
const PageSize = 4096

// Page is the content of one guest page.
type Page = [PageSize]byte

// MaxProfitable is the length of the longest blob that Encode returns. A page
// that needs more is rejected and should stay as it is.
//
// Three quarters of a page: above it a page gives back less than a quarter of
// itself, of which the caller's header, the slot's rounding and the bookkeeping
// take a few per cent, while its restore costs as much as any other's. The
// exact value hardly matters, because real pages are rarely near it: of the
// sample, TierDeep has 0.5 % between it and a whole page, and TierFast 3.7 %,
// most of which a deeper tier takes later.
const MaxProfitable = PageSize * 3 / 4

// MaxEncoded is the room Encode needs in its destination.
const MaxEncoded = MaxProfitable

// Tag says how a blob is encoded. The numbers are part of stored formats:
// they are never reused or renumbered.
type Tag uint8

const (
	// TagInvalid is the zero Tag; it is never a valid representation.
	TagInvalid Tag = 0
	// TagZero is a page of zeros, without a blob.
	TagZero Tag = 1
	// TagFill is a page that repeats one 8-byte word, which is the blob.
	TagFill Tag = 2
	// TagS2 is an S2 block without its length prefix.
	TagS2 Tag = 3
	// TagZstd is the content of a compressed zstd block, without headers.
	TagZstd Tag = 4

	// TagTemplate is a page equal to its base, without a blob.
	TagTemplate Tag = 5
	// TagPool is a page held by the host-wide pool. This package reserves the
	// number; what it says of the page is up to the caller.
	TagPool Tag = 6
	// TagWordDelta is the words in which a page differs from a base page.
	TagWordDelta Tag = 7
	// TagZstdBase is TagZstd with a base page as dictionary.
	TagZstdBase Tag = 8
	// TagCluster is a page inside a blob that holds several pages. Reserved,
	// not implemented: see the package comment.
	TagCluster Tag = 9

	// TagWords is TagWordDelta against a page of zeros, with other statistics.
	TagWords Tag = 10
)

// NumTags is one more than the highest Tag, for arrays of counters.
const NumTags = 11

var tagNames = [NumTags]string{
	TagInvalid:   "invalid",
	TagZero:      "zero",
	TagFill:      "fill",
	TagS2:        "s2",
	TagZstd:      "zstd",
	TagTemplate:  "template",
	TagPool:      "pool",
	TagWordDelta: "word-delta",
	TagZstdBase:  "zstd-base",
	TagCluster:   "cluster",
	TagWords:     "words",
}

// String returns a stable name, fit for counters.
func (t Tag) String() string {
	if int(t) < len(tagNames) {
		return tagNames[t]
	}
	return fmt.Sprintf("tag-%d", uint8(t))
}

// A Count says what came of a form: how often it was made, how often it was
// taken, how many bytes it then had, and how often it had too many to be of use.
type Count struct {
	Tries, Wins, Bytes, Rejects uint64
}

// Tier is how much work Encode may put into a page.
type Tier uint8

const (
	// TierFast is for the entry into a wait: the least time per page.
	TierFast Tier = 0
	// TierMid takes about twice the time of TierFast and gets most of what
	// TierDeep gets.
	TierMid Tier = 1
	// TierDeep is for pages that have been cold for a while.
	TierDeep Tier = 2

	// TierMax is for pages that have been stored for a while, and for those
	// that lower tiers have no profitable form for. It alone writes TagWords,
	// which a caller must be prepared for: hence it is not counted in NumTiers.
	TierMax Tier = 3
)

// NumTiers is the number of tiers up to TierDeep, for arrays of counters.
const NumTiers = 3

// String returns a stable name, fit for counters.
func (t Tier) String() string {
	switch t {
	case TierFast:
		return "fast"
	case TierMid:
		return "mid"
	case TierDeep:
		return "deep"
	case TierMax:
		return "max"
	}
	return fmt.Sprintf("tier-%d", uint8(t))
}

// Reject is why Encode returned no representation.
type Reject uint8

const (
	// RejectNone: the page was encoded.
	RejectNone Reject = 0
	// RejectIncompressible: the compressor found nothing to gain.
	RejectIncompressible Reject = 1
	// RejectUnprofitable: the blob would be longer than MaxProfitable.
	RejectUnprofitable Reject = 2
	// RejectForm: the compressor produced a valid result of a shape the
	// decoder of this package does not accept. It does not happen with the
	// library version the tests ran with; after an upgrade it would cost
	// memory, not data.
	RejectForm Reject = 3
)

// NumRejects is the number of causes, for arrays of counters.
const NumRejects = 4

// String returns a stable name, fit for counters.
func (r Reject) String() string {
	switch r {
	case RejectNone:
		return "none"
	case RejectIncompressible:
		return "incompressible"
	case RejectUnprofitable:
		return "unprofitable"
	case RejectForm:
		return "form"
	}
	return fmt.Sprintf("reject-%d", uint8(r))
}

var (
	// ErrCorrupt is wrapped by every error about the bytes of a blob.
	ErrCorrupt = errors.New("codec: corrupt blob")
	// ErrNoBase is wrapped by errors about a blob that needs a base page when
	// none is given.
	ErrNoBase = errors.New("codec: representation needs a base page")
	// ErrUnsupported is wrapped by errors about reserved tags.
	ErrUnsupported = errors.New("codec: representation not supported")
	// ErrTag is wrapped by errors about tags that do not exist.
	ErrTag = errors.New("codec: invalid tag")
)

// Sum returns the checksum that is stored beside every representation
// (XXH3, 64 bits). It guards against bugs and bit flips, not against an
// adversary.
func Sum(p *Page) uint64 { return xxh3.Hash(p[:]) }

// IsZero reports whether every byte of p is zero. It leaves at the first word
// that is not.
func IsZero(p *Page) bool {
	return binary.LittleEndian.Uint64(p[:]) == 0 && isFill(p)
}

// isFill reports whether p repeats its first 8 bytes: then and only then is it
// equal to itself shifted by a word. The runtime's vectorized comparison makes
// this faster than a loop over words, also when the first bytes already differ.
func isFill(p *Page) bool {
	return binary.LittleEndian.Uint64(p[:]) == binary.LittleEndian.Uint64(p[8:]) &&
		bytes.Equal(p[8:], p[:PageSize-8])
}
