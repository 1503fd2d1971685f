package memfile

import (
	"encoding/binary"
	"fmt"

	"runsc-agentzip/memfile/arena"
	"runsc-agentzip/memfile/codec"
)

// A blob in the store is a header and the encoded page. The header repeats what
// the page table says, so that a wrong handle is found out before it is
// decoded, and holds the checksum of the page that decoding must give.
//
//	bytes 0-7   codec.Sum of the page
//	bytes 8-12  page number
//	byte  13    codec.Tag
//	bytes 14-15 length of the encoded page
const blobHeader = 16

func putHeader(h []byte, sum, page uint64, tag codec.Tag, n int) {
	binary.LittleEndian.PutUint64(h, sum)
	binary.LittleEndian.PutUint64(h[8:], page&(1<<40-1)|uint64(tag)<<40|uint64(n)<<48)
}

// errCorrupt is what reading a stored page fails with when what was read is
// not what was stored.
type errCorrupt struct {
	page uint64
	tag  codec.Tag
	what string
}

func (e *errCorrupt) Error() string {
	return fmt.Sprintf("stored page at memory file offset %#x (%v): %s", e.page<<pageShift, e.tag, e.what)
}

// load decodes the page that w, the word of an evicted page, refers to, and
// verifies it.
func (b *Backend) load(r *restorer, dst *codec.Page, page uint64, w word) error {
	tag, h := tagOf(w), handleOf(w)
	var base *codec.Page
	switch tag {
	case codec.TagZero:
		clear(dst[:])
		return nil
	case codec.TagTemplate:
		if err := b.readTemplate(dst[:], page); err != nil {
			return &errCorrupt{page, tag, err.Error()}
		}
		return nil
	case codec.TagWordDelta, codec.TagZstdBase:
		base = &r.base
		if err := b.readTemplate(base[:], page); err != nil {
			return &errCorrupt{page, tag, err.Error()}
		}
	}
	sum, blob, err := b.blob(page, tag, h)
	if err != nil {
		return err
	}
	if err := r.dec.Decode(dst, tag, blob, base); err != nil {
		return &errCorrupt{page, tag, err.Error()}
	}
	if got := codec.Sum(dst); got != sum {
		return &errCorrupt{page, tag, fmt.Sprintf("checksum mismatch: stored %#016x, decoded %#016x", sum, got)}
	}
	return nil
}

// blob returns the checksum and the encoded bytes of a stored page, which are
// valid until the handle is freed.
func (b *Backend) blob(page uint64, tag codec.Tag, h arena.Handle) (sum uint64, enc []byte, err error) {
	all, err := b.store.Bytes(h)
	if err != nil {
		return 0, nil, &errCorrupt{page, tag, err.Error()}
	}
	if len(all) < blobHeader {
		return 0, nil, &errCorrupt{page, tag, fmt.Sprintf("blob of %d bytes", len(all))}
	}
	sum = binary.LittleEndian.Uint64(all)
	v := binary.LittleEndian.Uint64(all[8:])
	if v&(1<<40-1) != page || codec.Tag(v>>40) != tag || int(v>>48) != len(all)-blobHeader {
		return 0, nil, &errCorrupt{page, tag, fmt.Sprintf("header %#x is that of the page at %#x (%v, %d bytes)", v, (v&(1<<40-1))<<pageShift, codec.Tag(v>>40), v>>48)}
	}
	return sum, all[blobHeader:], nil
}
