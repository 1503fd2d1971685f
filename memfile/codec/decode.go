package codec

import (
	"encoding/binary"
	"fmt"

	"github.com/klauspost/compress/s2"
	"github.com/klauspost/compress/zstd"
)

// Decoder decodes blobs. It is not safe for concurrent use; it may be kept in
// a sync.Pool.
type Decoder struct {
	z *zstdDecoder
	// scratch holds a blob behind its restored headers. Working on a copy also
	// keeps the decoders away from what lies behind the caller's blob.
	scratch input
}

// zstdDecoder decodes frames with and without a base.
type zstdDecoder struct {
	*zstd.Decoder
	// base is the decoder's dictionary: it refers to these bytes and looks at
	// them when it decodes a frame that names a dictionary, which only frames
	// with zstdBasePrefix do. So another base takes a copy of 4 KiB and no
	// allocation.
	base Page
}

// NewDecoder returns a Decoder. It costs little until a zstd blob is decoded.
func NewDecoder() *Decoder { return new(Decoder) }

// Decode restores a page into dst. base is the page that the blob was encoded
// against; TagTemplate, TagWordDelta and TagZstdBase need it, the others ignore
// it. It must not overlap dst. On success every byte of dst was written. On
// error the content of dst is undefined; the error wraps ErrCorrupt, ErrNoBase,
// ErrTag or ErrUnsupported. Any bytes may be given: it does not panic, stays
// within blob, base and dst, and allocates at most what a decoder holds anyway.
//
// Success does not mean that the page is the one that was encoded: compare Sum.
func (d *Decoder) Decode(dst *Page, tag Tag, blob []byte, base *Page) error {
	switch tag {
	case TagZero:
		if len(blob) != 0 {
			return fmt.Errorf("%w: zero page with a blob of %d bytes", ErrCorrupt, len(blob))
		}
		clear(dst[:])
		return nil
	case TagFill:
		if len(blob) != 8 {
			return fmt.Errorf("%w: fill word of %d bytes", ErrCorrupt, len(blob))
		}
		w := binary.LittleEndian.Uint64(blob)
		for i := 0; i < PageSize; i += 8 {
			binary.LittleEndian.PutUint64(dst[i:], w)
		}
		return nil
	case TagTemplate, TagWordDelta, TagZstdBase:
		if base == nil {
			return fmt.Errorf("%w: %v", ErrNoBase, tag)
		}
		if tag == TagTemplate {
			if len(blob) != 0 {
				return fmt.Errorf("%w: template page with a blob of %d bytes", ErrCorrupt, len(blob))
			}
			*dst = *base
			return nil
		}
	case TagS2, TagZstd, TagWords:
		base = nil
	case TagPool, TagCluster:
		return fmt.Errorf("%w: %v", ErrUnsupported, tag)
	default:
		return fmt.Errorf("%w: %d", ErrTag, uint8(tag))
	}
	if len(blob) == 0 || len(blob) > MaxEncoded {
		return fmt.Errorf("%w: %v blob of %d bytes", ErrCorrupt, tag, len(blob))
	}
	switch tag {
	case TagS2:
		return d.s2(dst, blob)
	case TagWordDelta:
		return d.words(dst, tag, deltaModel(), blob, base)
	case TagWords:
		return d.words(dst, tag, wordsModel(), blob, &zeroPage)
	}
	return d.zstd(dst, tag, blob, base)
}

func (d *Decoder) s2(dst *Page, blob []byte) (err error) {
	defer d.recovered(TagS2, &err)
	n := copy(d.scratch[:], s2Prefix)
	n += copy(d.scratch[n:], blob)
	out, err := s2.Decode(dst[:], d.scratch[:n])
	return finish(dst, TagS2, out, err)
}

func (d *Decoder) words(dst *Page, tag Tag, m *model, blob []byte, base *Page) (err error) {
	defer d.recovered(tag, &err)
	if !m.decode(&d.scratch, dst, blob, base) {
		err = fmt.Errorf("%w: %v of %d bytes", ErrCorrupt, tag, len(blob))
	}
	return err
}

// zeroPage is the base of TagWords.
var zeroPage Page

// zstd decodes with the base if there is one.
func (d *Decoder) zstd(dst *Page, tag Tag, blob []byte, base *Page) (err error) {
	defer d.recovered(tag, &err)
	if d.z == nil {
		d.z = newZstdDecoder()
	}
	prefix := zstdPrefix
	if base != nil {
		prefix = zstdBasePrefix
		d.z.base = *base
	}
	out, err := d.z.DecodeAll(d.frame(prefix, blob), dst[:0])
	return finish(dst, tag, out, err)
}

// frame puts headers before blob.
func (d *Decoder) frame(prefix string, blob []byte) []byte {
	n := copy(d.scratch[:], prefix)
	header := uint32(len(blob))<<3 | zstdCompressed
	d.scratch[n], d.scratch[n+1], d.scratch[n+2] = byte(header), byte(header>>8), byte(header>>16)
	n += zstdBlockHeader
	n += copy(d.scratch[n:], blob)
	return d.scratch[:n]
}

// recovered turns a panic of a decoder into an error. None is known; but what
// is at stake is the difference between one sandbox that reports a corrupt
// page and one that takes its Sentry down without a word.
func (d *Decoder) recovered(tag Tag, err *error) {
	if r := recover(); r != nil {
		d.z = nil // its state is anybody's guess
		*err = fmt.Errorf("%w: %v: decoder panicked: %v", ErrCorrupt, tag, r)
	}
}

// finish insists on exactly one page, written in place.
func finish(dst *Page, tag Tag, out []byte, err error) error {
	if err != nil {
		return fmt.Errorf("%w: %v: %v", ErrCorrupt, tag, err)
	}
	if len(out) != PageSize {
		return fmt.Errorf("%w: %v: decoded to %d bytes", ErrCorrupt, tag, len(out))
	}
	if &out[0] != &dst[0] {
		copy(dst[:], out)
	}
	return nil
}

func newZstdDecoder() *zstdDecoder {
	d := new(zstdDecoder)
	z, err := zstd.NewReader(nil,
		zstd.WithDecoderConcurrency(1),
		zstd.WithDecoderLowmem(true),
		zstd.WithDecoderMaxWindow(PageSize),
		zstd.WithDecoderMaxMemory(PageSize),
		zstd.WithDecodeAllCapLimit(true),
		zstd.WithDecoderDictRaw(zstdBaseID, d.base[:]),
	)
	if err != nil {
		panic("codec: zstd refused constant options: " + err.Error())
	}
	d.Decoder = z
	return d
}
