package codec

import (
	"encoding/binary"
	"math/bits"
)

// A matcher finds what a page repeats of itself and of a base that precedes it,
// as sequences in the sense of zstd: literals, then a copy of earlier bytes.
// The zstd encoder of the library spends more on entering a new dictionary than
// on a page (twice 256 KiB of tables); here a base costs about a microsecond.
type matcher struct {
	// buf holds the base and the page.
	buf [2*PageSize + 16]byte
	// long and short hold places in buf by the hash of the bytes there.
	long  [1 << longBits]uint16
	short [1 << shortBits]uint16

	seqs     []sequence
	literals []byte
	room     struct {
		seqs     [PageSize/minMatch + 1]sequence
		literals [PageSize]byte
	}
}

// sequence is a number of literals, the length of a copy, and zstd's value of
// the offset: 1 to 3 for one of the last offsets, others plus 3.
type sequence struct {
	literals, length, offset uint16
}

const (
	longBits  = 11
	shortBits = 12
	minMatch  = 4
	longMatch = 8
)

func hashLong(v uint64) uint64  { return v * 0xcf1bbcdcb7a56463 >> (64 - longBits) }
func hashShort(v uint64) uint64 { return v << 24 * 0x9e3779b185ebca87 >> (64 - shortBits) }

func (z *matcher) at(i int) uint64 { return binary.LittleEndian.Uint64(z.buf[i:]) }

// common returns how many bytes from i on are the same as from j on, j < i.
func (z *matcher) common(i, j int) int {
	const end = 2 * PageSize
	start := i
	for i+8 <= end {
		if x := z.at(i) ^ z.at(j); x != 0 {
			return i - start + bits.TrailingZeros64(x)>>3
		}
		i += 8
		j += 8
	}
	for i < end && z.buf[i] == z.buf[j] {
		i++
		j++
	}
	return i - start
}

// match finds the sequences of p, with base before it unless base is nil.
// Literals after the last sequence are in z.literals only.
func (z *matcher) match(p, base *Page) {
	z.seqs, z.literals = z.room.seqs[:0], z.room.literals[:0]
	clear(z.long[:])
	clear(z.short[:])
	*(*Page)(z.buf[PageSize:]) = *p
	low := PageSize // the lowest place that may be copied from
	if base != nil {
		low = 0
		*(*Page)(z.buf[:]) = *base
		// Every fourth place finds any copy of 11 bytes. Shorter ones are
		// found at the same place of the base only.
		for i := 0; i+8 <= PageSize; i += 4 {
			z.long[hashLong(z.at(i))] = uint16(i)
		}
	}
	const end = 2 * PageSize
	last := [3]int{1, 4, 8}
	anchor := PageSize
	for i := PageSize; i+8 <= end; {
		n, from, g := z.find(i, low, &last)
		if n == 0 {
			i += 1 + (i-anchor)>>6
			continue
		}
		// Perhaps there is a better one a byte later.
		for n < enough && i+9 <= end {
			n2, from2, g2 := z.find(i+1, low, &last)
			if g2 <= g+4 {
				break
			}
			i, n, from, g = i+1, n2, from2, g2
		}
		for i > anchor && from > low && z.buf[i-1] == z.buf[from-1] {
			i, from, n = i-1, from-1, n+1
		}
		z.emit(anchor, i, n, i-from, &last)
		// Enter a few of the places that were skipped.
		stop := i + n
		for k := i + 2; k < min(stop, end-7); k += 3 {
			v := z.at(k)
			z.long[hashLong(v)], z.short[hashShort(v)] = uint16(k), uint16(k)
		}
		i = stop
		anchor = i
	}
	z.literals = append(z.literals, z.buf[anchor:end]...)
}

// enough is a length at which looking for a better match is no use.
const enough = 32

// find returns the match at i that gains most, in quarters of a byte, and enters
// i in the tables.
func (z *matcher) find(i, low int, last *[3]int) (n, from, gain int) {
	v := z.at(i)
	if j := i - last[0]; j >= low && uint32(z.at(j)) == uint32(v) {
		n, from = z.common(i, j), j
		gain = n*4 - 2
	}
	if j := i - last[1]; j >= low && uint32(z.at(j)) == uint32(v) {
		if m := z.common(i, j); m > n {
			n, from, gain = m, j, m*4-2
		}
	}
	if j := i - last[2]; j >= low && uint32(z.at(j)) == uint32(v) {
		if m := z.common(i, j); m > n {
			n, from, gain = m, j, m*4-2
		}
	}
	hl, hs := hashLong(v), hashShort(v)
	jl, js := int(z.long[hl]), int(z.short[hs])
	z.long[hl], z.short[hs] = uint16(i), uint16(i)
	if n >= enough {
		return n, from, gain
	}
	if low == 0 {
		if j := i - PageSize; uint32(z.at(j)) == uint32(v) {
			if m := z.common(i, j); m*4-13 > gain {
				n, from, gain = m, j, m*4-13
			}
		}
	}
	if jl >= low && z.at(jl) == v && jl < i {
		m := z.common(i, jl)
		if g := m*4 - bits.Len(uint(i-jl)); g > gain {
			return m, jl, g
		}
		return n, from, gain
	}
	if n < longMatch && js >= PageSize && uint32(z.at(js)) == uint32(v) && js < i {
		m := z.common(i, js)
		if g := m*4 - bits.Len(uint(i-js)); g > gain {
			return m, js, g
		}
	}
	return n, from, gain
}

// emit appends the literals from anchor to i and a copy.
func (z *matcher) emit(anchor, i, n, offset int, last *[3]int) {
	n0 := len(z.literals)
	if k := i - anchor; k <= 16 && n0+16 <= PageSize {
		// A short copy of a fixed length is faster than an exact one.
		to := z.room.literals[n0 : n0+16]
		copy(to, z.buf[anchor:anchor+16])
		z.literals = z.room.literals[:n0+k]
	} else {
		z.literals = append(z.literals, z.buf[anchor:i]...)
	}
	value := offset + 3
	// Without literals the last offset cannot be meant: the others move up,
	// and the third is the last less one.
	shift := 0
	if i == anchor {
		shift = 1
	}
	switch {
	case offset == last[0] && shift == 0:
		value = 1
	case offset == last[1]:
		value = 2 - shift
		last[0], last[1] = offset, last[0]
	case offset == last[2]:
		value = 3 - shift
		last[0], last[1], last[2] = offset, last[0], last[1]
	case offset == last[0]-1 && shift == 1:
		value = 3
		last[0], last[1], last[2] = offset, last[0], last[1]
	default:
		last[0], last[1], last[2] = offset, last[0], last[1]
	}
	z.seqs = append(z.seqs, sequence{uint16(i - anchor), uint16(n), uint16(value)})
}
