package wire

import (
	"encoding/binary"
	"errors"
	"fmt"

	"runsc-agentzip/memfile/codec"
)

// A Record is a page in a segment. It begins at a multiple of Align.
//
//	bytes 0-15   Hash
//	bytes 16-23  codec.Sum of the page
//	byte  24     codec.Tag
//	byte  25     1 if the base is the template's page, otherwise 0
//	bytes 26-27  length of the encoded page
//	bytes 28-31  number of the template's page that is the base
//	bytes 32-    the encoded page
type Record struct {
	Hash Hash
	Sum  uint64
	Tag  codec.Tag
	// HasBase is set if the page is encoded relative to page Base of the
	// template; otherwise it has no base.
	HasBase bool
	Base    uint32
	Enc     []byte
}

const (
	// RecordHeader is what precedes the encoded page, in bytes.
	RecordHeader = 32
	// MaxRecord is the size of the longest record, in bytes.
	MaxRecord = RecordHeader + codec.MaxEncoded
)

// ErrRecord is wrapped by errors about bytes that are no record.
var ErrRecord = errors.New("not a page of the pool")

// Size is what the record takes in a segment, in bytes.
func (r *Record) Size() int { return (RecordHeader + len(r.Enc) + Align - 1) &^ (Align - 1) }

// Put writes the record to dst, which has Size bytes.
func (r *Record) Put(dst []byte) {
	copy(dst, r.Hash[:])
	binary.LittleEndian.PutUint64(dst[16:], r.Sum)
	dst[24], dst[25] = byte(r.Tag), 0
	if r.HasBase {
		dst[25] = 1
	}
	binary.LittleEndian.PutUint16(dst[26:], uint16(len(r.Enc)))
	binary.LittleEndian.PutUint32(dst[28:], r.Base)
	copy(dst[RecordHeader:], r.Enc)
}

// ParseRecord reads the record that b begins with; b may be longer. Enc is a
// part of b.
func ParseRecord(b []byte) (Record, error) {
	if len(b) < RecordHeader {
		return Record{}, fmt.Errorf("%w: %d bytes", ErrRecord, len(b))
	}
	r := Record{
		Hash:    Hash(b[:HashSize]),
		Sum:     binary.LittleEndian.Uint64(b[16:]),
		Tag:     codec.Tag(b[24]),
		HasBase: b[25] == 1,
		Base:    binary.LittleEndian.Uint32(b[28:]),
	}
	n := int(binary.LittleEndian.Uint16(b[26:]))
	relative := r.Tag == codec.TagWordDelta || r.Tag == codec.TagZstdBase
	alone := r.Tag == codec.TagFill || r.Tag == codec.TagS2 || r.Tag == codec.TagZstd || r.Tag == codec.TagWords
	if b[25] > 1 || n == 0 || n > codec.MaxEncoded || RecordHeader+n > len(b) || r.HasBase != relative || !relative && !alone {
		return Record{}, fmt.Errorf("%w: tag %v, base %d, %d bytes of %d", ErrRecord, r.Tag, b[25], n, len(b))
	}
	r.Enc = b[RecordHeader : RecordHeader+n]
	return r, nil
}
