package codec

import (
	"encoding/binary"
	"math/bits"
)

// TagWordDelta lists the 8-byte words in which a page differs from its base:
//
//	8 bytes            bit n: line n (64 bytes) has a differing word
//	1 byte per line    bit n: word n of the line differs; never 0
//	per differing word a control byte, and for the kind "span" its bytes
//
// A control byte below spanBase says that the word differs from the base by
// one of the last differences, most recent first: pointers into an object that
// moved all differ by the same amount. Any other says which span of the word's
// bytes differs; the XOR of these bytes follows.
const (
	lines        = PageSize / 64
	deltaHeader  = lines / 8
	recentDeltas = 3
	spanBase     = recentDeltas
	spanEnd      = spanBase + 64
)

// recent is a move-to-front list of differences.
type recent [recentDeltas]uint64

func (r *recent) push(d uint64) { r[2], r[1], r[0] = r[1], r[0], d }

func word(p *Page, i int) uint64 { return binary.LittleEndian.Uint64(p[i*8:]) }

// wordDelta encodes p against base into dst. It gives up and returns -1 as soon
// as the blob is longer than limit; dst must have room for limit and 16 bytes
// more.
func wordDelta(dst []byte, p, base *Page, limit int) int {
	_ = dst[limit+15]
	var changed uint64
	for l := range lines {
		a, b := p[l*64:l*64+64], base[l*64:l*64+64]
		var d uint64
		for w := 0; w < 64; w += 8 {
			d |= binary.LittleEndian.Uint64(a[w:]) ^ binary.LittleEndian.Uint64(b[w:])
		}
		if d != 0 {
			changed |= 1 << l
		}
	}
	binary.LittleEndian.PutUint64(dst, changed)
	masks := deltaHeader
	o := masks + bits.OnesCount64(changed)
	if o > limit {
		return -1
	}
	var r recent
	for ; changed != 0; changed &= changed - 1 {
		l := bits.TrailingZeros64(changed)
		var mask byte
		for w := range 8 {
			a, b := word(p, l*8+w), word(base, l*8+w)
			if a == b {
				continue
			}
			mask |= 1 << w
			switch d := a - b; d {
			case r[0]:
				dst[o] = 0
				o++
			case r[1]:
				dst[o] = 1
				o++
				r[0], r[1] = d, r[0]
			case r[2]:
				dst[o] = 2
				o++
				r.push(d)
			default:
				r.push(d)
				x := a ^ b
				first := bits.TrailingZeros64(x) / 8
				n := 8 - bits.LeadingZeros64(x)/8 - first
				dst[o] = byte(spanBase + first*8 + n - 1)
				binary.LittleEndian.PutUint64(dst[o+1:], x>>(8*first))
				o += 1 + n
			}
			if o > limit {
				return -1
			}
		}
		dst[masks] = mask
		masks++
	}
	return o
}

// unWordDelta restores a page. It reports false for a malformed blob.
func unWordDelta(dst *Page, blob []byte, base *Page) bool {
	if len(blob) < deltaHeader {
		return false
	}
	changed := binary.LittleEndian.Uint64(blob)
	masks := blob[deltaHeader:]
	n := bits.OnesCount64(changed)
	if len(masks) < n {
		return false
	}
	in := masks[n:]
	masks = masks[:n]
	*dst = *base
	var r recent
	for _, mask := range masks {
		if mask == 0 {
			return false
		}
		l := bits.TrailingZeros64(changed) * 64
		changed &= changed - 1
		for m := uint(mask); m != 0; m &= m - 1 {
			if len(in) == 0 {
				return false
			}
			at := dst[l+bits.TrailingZeros(m)*8:][:8]
			b := binary.LittleEndian.Uint64(at)
			c := int(in[0])
			in = in[1:]
			switch {
			case c == 0:
				b += r[0]
			case c == 1:
				r[0], r[1] = r[1], r[0]
				b += r[0]
			case c == 2:
				r.push(r[2])
				b += r[0]
			case c < spanEnd:
				first, n := (c-spanBase)/8, (c-spanBase)%8+1
				if first+n > 8 || len(in) < n {
					return false
				}
				var x uint64
				if len(in) >= 8 {
					x = binary.LittleEndian.Uint64(in) & (^uint64(0) >> (64 - 8*n))
				} else {
					for i, v := range in[:n] {
						x |= uint64(v) << (8 * i)
					}
				}
				in = in[n:]
				a := b ^ x<<(8*first)
				r.push(a - b)
				b = a
			default:
				return false
			}
			binary.LittleEndian.PutUint64(at, b)
		}
	}
	return len(in) == 0
}

func putWord(p *Page, i int, v uint64) { binary.LittleEndian.PutUint64(p[i*8:], v) }
