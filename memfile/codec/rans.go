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

// next decodes a symbol of table t from state x and what is at pos. Beyond the
// end of a blob it goes on with what is there; no encoder ends with a pos there.
//
// That a byte is needed is like the toss of a coin, so there must be no branch
// that says so; and there is none only in a function, because in a loop the
// compiler makes no conditional move of what an address depends on. A second byte
// is needed after some symbols less probable than 1/256, and a third never, except
// after a first state below ransLow, which no encoder writes: what a symbol leaves
// of a state is at least ransLow >> probBits.
//
//go:noinline
func (m *model) next(in *input, t table, x uint32, pos int) (sym, newX uint32, newPos int) {
	slot := x & (probOne - 1)
	sym = uint32(m.symbols[uint32(t)>>16<<probBits+slot])
	c := uint32(m.codes[uint32(t)&0xffff+sym])
	x = c&0xffff*(x>>probBits) + (slot - c>>16)
	more := x<<8 | uint32(in[inputBefore+pos&inputMask])
	before := x
	pos += int((x - ransLow) >> 31)
	if before < ransLow {
		x = more
	}
	if x < ransLow {
		x, pos = refill(in, x, pos)
	}
	return sym, x, pos
}

// refill reads bytes until x is a state between two symbols, or there are no more.
func refill(in *input, x uint32, pos int) (newX uint32, newPos int) {
	for x < ransLow && pos <= inputMask {
		x = x<<8 | uint32(in[inputBefore+pos&inputMask])
		pos++
	}
	return x, pos
}

// nextPlain decodes n bits that plainCode coded.
func nextPlain(in *input, x uint32, pos, n int) (v int, newX uint32, newPos int) {
	shift := probBits - n
	slot := x & (probOne - 1)
	x, pos = refill(in, x>>probBits<<shift+slot&(1<<shift-1), pos)
	return int(slot >> shift), x, pos
}

// byteLen is the number of bytes that v needs.
func byteLen(v uint64) int { return (bits.Len64(v) + 7) / 8 }

// zigzag maps numbers near zero to small ones.
func zigzag(v uint64) uint64   { return v<<1 ^ uint64(int64(v)>>63) }
func unzigzag(v uint64) uint64 { return v>>1 ^ -(v & 1) }
