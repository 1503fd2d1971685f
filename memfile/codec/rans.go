package codec

import "math/bits"

// A static range coder (rANS) for symbols whose probabilities both sides know
// beforehand. Nothing of them is stored in a blob, which is what makes it pay on
// blobs of some ten bytes, and coding a symbol costs a table look-up and a
// multiplication.
//
// Between two symbols the state is at least ransLow and has stateBits bits. It
// ends, for the decoder, at exactly ransLow, where the encoder began.
const (
	probBits  = 10
	probOne   = 1 << probBits
	ransLow   = 1 << 12
	stateBits = 12 + 8
)

// code is a symbol's interval of probOne.
type code uint32

func makeCode(start, width int) code { return code(start<<16 | width) }

// plainCode codes the n low bits of v as they are; n is at most probBits.
func plainCode(v, n int) code {
	return makeCode(v&(1<<n-1)<<(probBits-n), 1<<(probBits-n))
}

// ransEncode codes symbols such that they are decoded in their order. The bytes
// are at the end of dst; it returns where they begin and the final state, and
// -1 if dst is too short.
func ransEncode(dst []byte, symbols []code) (at int, state uint32) {
	x := uint32(ransLow)
	at = len(dst)
	for i := len(symbols) - 1; i >= 0; i-- {
		start, width := uint32(symbols[i]>>16), uint32(symbols[i]&0xffff)
		for x >= width<<(stateBits-probBits) {
			at--
			if at < 0 {
				return -1, 0
			}
			dst[at] = byte(x)
			x >>= 8
		}
		q := uint32(uint64(x) * uint64(reciprocals[width]) >> 31)
		x = q<<probBits + x - q*width + start
	}
	return at, x
}

// reciprocals[n] is 1<<31 / n rounded up: exact enough to divide a state by n.
var reciprocals = func() (r [probOne + 1]uint32) {
	for n := uint64(1); n <= probOne; n++ {
		r[n] = uint32((1<<31 + n - 1) / n)
	}
	return r
}()

// ransPlain decodes n bits that plainCode coded.
func ransPlain(in []byte, pos int, x uint32, n int) (v, newPos int, newX uint32) {
	shift := probBits - n
	slot := x & (probOne - 1)
	x = x>>probBits<<shift + slot&(1<<shift-1)
	for x < ransLow && pos < len(in) {
		x = x<<8 | uint32(in[pos])
		pos++
	}
	return int(slot >> shift), pos, x
}

// symbol decodes a symbol of table t from in[pos:] and state x. At the end of
// in it returns an arbitrary symbol and a state that no encoder ends with.
func (m *model) symbol(in []byte, pos int, x uint32, t table) (sym uint32, newPos int, newX uint32) {
	slot := x & (probOne - 1)
	sym = uint32(m.symbols[uint32(t)>>16<<probBits+slot])
	c := uint32(m.codes[uint32(t)&0xffff+sym])
	x = c&0xffff*(x>>probBits) + slot - c>>16
	for x < ransLow && pos < len(in) {
		x = x<<8 | uint32(in[pos])
		pos++
	}
	return sym, pos, x
}

// byteLen is the number of bytes that v needs.
func byteLen(v uint64) int { return (bits.Len64(v) + 7) / 8 }

// zigzag maps numbers near zero to small ones.
func zigzag(v uint64) uint64   { return v<<1 ^ uint64(int64(v)>>63) }
func unzigzag(v uint64) uint64 { return v>>1 ^ -(v & 1) }
