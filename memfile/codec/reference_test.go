package codec

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"testing"
)

// decodeReference restores a page as decode does, without its tricks: it is what
// says which blobs are well-formed and what they mean.
func (m *model) decodeReference(dst *Page, blob []byte, base *Page) bool {
	if len(blob) < 3 {
		return false
	}
	x := uint32(blob[0]) | uint32(blob[1])<<8 | uint32(blob[2])<<16
	stride := int(x>>stateBits) + 1
	x &= 1<<stateBits - 1
	// Symbols are read from in[pos:], plain bytes from the end of in.
	in, pos := blob[3:], 0
	*dst = *base
	var (
		ops        [words]op
		slide      [slides]uint64
		value      [2]uint64
		gap0, gap1 = 1, 1
		last, prev = -1, opNone
		again      int
		sym        uint32
	)
	for last < words-1 {
		up := opNone
		if j := last + 1 - stride; j >= 0 {
			up = ops[j]
		}
		o := opNone
		if gap0 == 1 {
			sym, pos, x = m.symbolReference(in, pos, x, m.tables[opContextOf(prev, up, 1)])
			o = op(sym)
		}
		i := last + 1
		if o == opNone {
			sym, pos, x = m.symbolReference(in, pos, x, m.tables[gapContextOf(prev, up)])
			gap := gap0
			switch sym {
			case gapSame:
			case gapBefore:
				gap0, gap1 = gap1, gap0
				gap = gap0
			case gapEnd:
				return x == ransLow && pos == len(in)
			default:
				var extra, v int
				gap, extra = unbucket(int(sym) - gapFirst)
				if extra > 0 {
					v, pos, x = ransPlainReference(in, pos, x, extra)
					gap += v
				}
				gap0, gap1 = gap, gap0
			}
			if i = last + gap; i >= words {
				return false
			}
			if up = opNone; i >= stride {
				up = ops[i-stride]
			}
			sym, pos, x = m.symbolReference(in, pos, x, m.tables[opContextOf(prev, up, gap)])
			o = op(sym)
		}
		y := word(base, i)
		var w uint64
		switch o {
		case opNone:
			return false
		case opSlide0:
			w = y + slide[0]
		case opSlide1:
			slide[0], slide[1] = slide[1], slide[0]
			w = y + slide[0]
		case opSlide2:
			slide[0], slide[1], slide[2] = slide[2], slide[0], slide[1]
			w = y + slide[0]
		case opZero, opPlain:
		case opStride, opStrideXor, opStrideSub:
			if i < stride {
				return false
			}
			w = word(dst, i-stride)
		case opAgain, opAgainXor:
			if again == 0 || i-again < -words {
				return false
			}
			w = past(dst, base, i-again)
		case opCopy, opNear:
			sym, pos, x = m.symbolReference(in, pos, x, m.tables[distContextOf(o)])
			distance, extra := unbucket(int(sym))
			if extra > 0 {
				var v int
				v, pos, x = ransPlainReference(in, pos, x, extra)
				distance += v
			}
			if i-distance < -words {
				return false
			}
			w = past(dst, base, i-distance)
			if o == opCopy {
				again = distance
			}
		case opBase:
			w = y
		case opPrevSub:
			if i == 0 {
				return false
			}
			w = word(dst, i-1)
		case opOtherSub:
			w = value[1]
		}
		if o >= opLiteral {
			s := span{0, 2}
			if o >= opSpan {
				sym, pos, x = m.symbolReference(in, pos, x, m.tables[spanContextOf(o, up)])
				if o >= opSub {
					if sym > 8 {
						return false
					}
					s.n = uint8(sym)
				} else {
					s = spans[sym]
				}
			}
			var v uint64
			if n := int(s.n); n > 0 {
				context := byteContextOf(o, n)
				plain, shift := n, 0
				if t := m.tables[context]; t != plainTable {
					sym, pos, x = m.symbolReference(in, pos, x, t)
					v = uint64(sym)
					plain--
					shift = 8
				}
				if plain > 0 {
					if t := m.tables[context+1]; t != plainTable {
						sym, pos, x = m.symbolReference(in, pos, x, t)
						v |= uint64(sym) << (8*n - 8)
						plain--
					}
					if plain > 0 {
						at := len(in) - plain
						if at < pos {
							return false
						}
						var u uint64
						if at >= 8-plain {
							// The bytes before do no harm.
							u = binary.LittleEndian.Uint64(in[at+plain-8:]) >> (64 - 8*plain)
						} else {
							for k, b := range in[at:] {
								u |= uint64(b) << (8 * k)
							}
						}
						in = in[:at]
						v |= u << shift
					}
				}
			}
			switch {
			case o >= opSub:
				w += unzigzag(v)
			case o == opNear:
				w = w&^0xffff | v
			default:
				w ^= v << (8 * s.first)
			}
		}
		putWord(dst, i, w)
		if o > opSlide2 {
			slide[0], slide[1], slide[2] = w-y, slide[0], slide[1]
			value[0], value[1] = w, value[0]
		}
		ops[i] = o
		last, prev = i, o
	}
	return x == ransLow && pos == len(in)
}

// ransPlainReference decodes n bits that plainCode coded.
func ransPlainReference(in []byte, pos int, x uint32, n int) (v, newPos int, newX uint32) {
	shift := probBits - n
	slot := x & (probOne - 1)
	x = x>>probBits<<shift + slot&(1<<shift-1)
	for x < ransLow && pos < len(in) {
		x = x<<8 | uint32(in[pos])
		pos++
	}
	return int(slot >> shift), pos, x
}

// symbolReference decodes a symbol of table t from in[pos:] and state x. At the end of
// in it returns an arbitrary symbol and a state that no encoder ends with.
func (m *model) symbolReference(in []byte, pos int, x uint32, t table) (sym uint32, newPos int, newX uint32) {
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

// compareDecoders checks that both decoders agree on a blob, whatever the fast
// one's input held before.
func compareDecoders(t *testing.T, m *model, in *input, blob []byte, base *Page) bool {
	t.Helper()
	before := *base
	var want, got Page
	for i := range got {
		got[i] = 0xff
	}
	ok := m.decodeReference(&want, blob, base)
	if len(blob) > MaxEncoded {
		ok = false
	}
	if fast := m.decode(in, &got, blob[:len(blob):len(blob)], base); fast != ok {
		t.Fatalf("%d bytes %x: the decoder says %v, the reference %v", len(blob), blob, fast, ok)
	}
	if ok && got != want {
		t.Fatalf("%d bytes %x: the decoder restores another page than the reference", len(blob), blob)
	}
	if *base != before {
		t.Fatalf("%d bytes %x: the decoder changed the base", len(blob), blob)
	}
	return ok
}

// noise fills what is around a blob.
func (in *input) noise(r *rand.Rand) {
	for i := range in {
		in[i] = byte(r.Uint32())
	}
}

// damage returns a blob that was cut, lengthened or changed.
func damage(r *rand.Rand, blob []byte) []byte {
	blob = bytes.Clone(blob)
	switch r.IntN(6) {
	case 0:
		return blob[:r.IntN(len(blob)+1)]
	case 1:
		return blob[r.IntN(len(blob)+1):]
	case 2:
		for range 1 + r.IntN(20) {
			blob = append(blob, byte(r.Uint32()))
		}
	case 3:
		blob[r.IntN(len(blob))] ^= 1 << r.IntN(8)
	case 4:
		for range 1 + r.IntN(8) {
			blob[r.IntN(len(blob))] = byte(r.Uint32())
		}
	case 5:
		// Bytes of 0 make for states that are too small.
		i := r.IntN(len(blob))
		clear(blob[i:min(len(blob), i+1+r.IntN(8))])
	}
	return blob
}

func TestDecodersAgree(t *testing.T) {
	r := rand.New(rand.NewPCG(21, 22))
	var in input
	good, bad := 0, 0
	compare := func(m *model, blob []byte, base *Page) {
		in.noise(r)
		if compareDecoders(t, m, &in, blob, base) {
			good++
		} else {
			bad++
		}
	}
	both := []*model{deltaModel(), wordsModel()}
	seeds(func(tag Tag, blob []byte, at uint8) {
		if tag != TagWordDelta && tag != TagWords {
			return
		}
		for _, m := range both {
			for _, base := range []*Page{bases[at], &zeroPage} {
				compare(m, blob, base)
				for range 30 {
					compare(m, damage(r, blob), base)
				}
			}
		}
	})
	var raw [MaxEncoded + 8]byte
	for range 20000 {
		n := r.IntN(len(raw) + 1)
		if r.IntN(2) == 0 {
			n = r.IntN(64)
		}
		for i := range raw[:n] {
			raw[i] = byte(r.Uint32())
		}
		if n > 2 && r.IntN(2) == 0 {
			clear(raw[1:][:r.IntN(n)])
		}
		compare(both[r.IntN(2)], raw[:n], bases[r.IntN(len(bases))])
	}
	if good < 100 || bad < 1000 {
		t.Errorf("%d blobs were well-formed, %d not", good, bad)
	}
}

// TestDecodersAgreeOnSample does it with the sample pages.
func TestDecodersAgreeOnSample(t *testing.T) {
	delta, alone := codedSample(t)
	r := rand.New(rand.NewPCG(23, 24))
	var in input
	in.noise(r)
	for _, c := range append(delta, alone...) {
		var got Page
		if !compareDecoders(t, c.m, &in, c.blob, c.base) || !c.m.decode(&in, &got, c.blob, c.base) || got != *c.page {
			t.Fatalf("a blob of %d bytes restores another page", len(c.blob))
		}
		for range 4 {
			compareDecoders(t, c.m, &in, damage(r, c.blob), c.base)
		}
	}
}

func FuzzDecodersAgree(f *testing.F) {
	seeds(func(tag Tag, blob []byte, at uint8) {
		if tag == TagWordDelta || tag == TagWords {
			f.Add(blob, at)
		}
	})
	r := rand.New(rand.NewPCG(25, 26))
	var in input
	f.Fuzz(func(t *testing.T, blob []byte, at uint8) {
		in.noise(r)
		for _, m := range []*model{deltaModel(), wordsModel()} {
			compareDecoders(t, m, &in, blob, bases[int(at)%len(bases)])
			compareDecoders(t, m, &in, blob, &zeroPage)
		}
	})
}
