package codec

import "encoding/binary"

// The decoder of TagWordDelta and TagWords. A page of 400 words takes about 1000
// symbols, each of which needs the state that the last one left: that chain is
// two thirds of the time. The rest is branches that cannot be foreseen. So a byte
// is taken from the input without one (see next), the bytes of a word need one per
// coded byte, and a word is made from its prediction, whatever that is, without
// any. (Tried, and not faster: one table of symbol, width and start, which is four
// times as large and slower when the caches are cold; next written out where it is
// used; all symbols first and then all words; looking at a table's most probable
// symbol first.)

// input holds a blob without its first bytes, from input[inputBefore]. Around it
// there is room to read several bytes at once, and from places where a malformed
// blob has none; what is there does not matter.
type input [inputBefore + inputMask + 1]byte

const (
	inputBefore = 8
	// inputMask is applied to places: they are beyond the blob, and beyond
	// this, only when it is certain that the blob will be refused.
	inputMask = 1<<12 - 1
)

// The array's size follows from the mask, which must cover the longest blob.
const _ = uint(inputMask - MaxEncoded)

// opRule is how a word follows from an earlier one, or from the base's: it is
//
//	(word & mask + added) ^ literal, or with difference + literal
//
// where added is one of the last differences or values.
type opRule struct {
	mask uint64
	// lowest is the first word that may be meant; negative ones are the base's.
	lowest int
	// difference has all bits set if the literal is added, or none.
	difference uint64
}

var opRules = func() (r [numOps]opRule) {
	for o := range r {
		r[o] = opRule{mask: ^uint64(0), lowest: -words}
		if op(o) >= opSub {
			r[o].difference = ^uint64(0)
		}
	}
	r[opNear].mask = ^uint64(0xffff)
	for _, o := range []op{opZero, opPlain, opOtherSub} {
		r[o].mask = 0
	}
	for _, o := range []op{opStride, opStrideXor, opStrideSub, opPrevSub} {
		r[o].lowest = 0
	}
	return r
}()

// literal is how the bytes of a word are written.
type literal struct {
	// first and last are the tables of the bytes that are coded, or plainTable.
	first, last table
	// plain is how many bytes are not coded.
	plain uint8
	// plainAt and lastAt are where they and the last byte are from the first on,
	// and at where that is in the word, in bits.
	plainAt, lastAt, at uint8
	// invalid is for symbols that are not used.
	invalid bool
}

// literalOf returns what follows the symbol of a span, or opNear.
func (m *model) literalOf(o op, sym int) literal {
	n := 2
	l := literal{first: plainTable, last: plainTable}
	switch {
	case o >= opSub:
		n = sym
	case o >= opSpan:
		n, l.at = int(spans[sym].n), spans[sym].first*8
	}
	if n > 8 {
		return literal{invalid: true}
	}
	l.plain = uint8(n)
	if n == 0 {
		return l
	}
	context := byteContextOf(o, n)
	if l.first = m.tables[context]; l.first != plainTable {
		l.plain--
		l.plainAt = 8
	}
	if l.plain > 0 {
		if l.last = m.tables[context+1]; l.last != plainTable {
			l.plain--
			l.lastAt = uint8(8*n - 8)
		}
	}
	return l
}

// decode restores a page. It reports false for a malformed blob, and may be given
// any, and any in.
//
// The symbols are read from pos, the plain bytes before end. Where pos passes end
// it stays beyond it, because the one only grows and the other only shrinks; so
// it is enough to look at them when the page is complete.
func (m *model) decode(in *input, dst *Page, blob []byte, base *Page) bool {
	if len(blob) < 3 || len(blob) > MaxEncoded {
		return false
	}
	x := uint32(blob[0]) | uint32(blob[1])<<8 | uint32(blob[2])<<16
	stride := int(x>>stateBits) + 1
	x &= 1<<stateBits - 1
	pos, end := 0, copy(in[inputBefore:], blob[3:])
	*dst = *base

	// from says how far after the word, in words, an op's other word is; those of
	// the base are before the page.
	const nowhere = -2*words - 1
	from := [numOps]int{
		opSlide0: -words, opSlide1: -words, opSlide2: -words,
		opStride: -stride, opStrideXor: -stride, opStrideSub: -stride,
		opAgain: nowhere, opAgainXor: nowhere,
		opPrevSub: -1,
		opZero:    -words, opPlain: -words, opOtherSub: -words, opBase: -words,
	}
	var (
		// added[opSlide0] and the next two are the last differences to the base,
		// added[opOtherSub] is the last value but one, value the last.
		added [numOps]uint64
		value uint64
		pages = [2]*Page{base, dst}
		// The ops so far, behind as many opNone as a stride may reach back.
		ops        [maxStride + words]op
		gap0, gap1 = 1, 1
		prev       = opNone
		sym        uint32
	)
	for i := 0; i < words; i++ {
		up := ops[i+maxStride-stride]
		o := opNone
		if gap0 == 1 {
			sym, x, pos = m.next(in, m.tables[opContextOf(prev, up, 1)], x, pos)
			o = op(sym)
		}
		if o == opNone {
			sym, x, pos = m.next(in, m.tables[gapContextOf(prev, up)], x, pos)
			gap := gap0
			switch sym {
			case gapSame:
			case gapBefore:
				gap0, gap1 = gap1, gap0
				gap = gap0
			case gapEnd:
				return x == ransLow && pos == end
			default:
				var extra, v int
				gap, extra = unbucket(int(sym) - gapFirst)
				if extra > 0 {
					v, x, pos = nextPlain(in, x, pos, extra)
					gap += v
				}
				gap0, gap1 = gap, gap0
			}
			if i += gap - 1; i >= words {
				return false
			}
			up = ops[i+maxStride-stride]
			sym, x, pos = m.next(in, m.tables[opContextOf(prev, up, gap)], x, pos)
			if o = op(sym); o == opNone {
				return false
			}
		}
		ops[i+maxStride] = o
		prev = o

		var v uint64
		if o >= opCopy {
			span := uint32(0)
			if o >= opSpan {
				span, x, pos = m.next(in, m.tables[spanContextOf(o, up)], x, pos)
			} else {
				sym, x, pos = m.next(in, m.tables[distContextOf(o)], x, pos)
				distance, extra := unbucket(int(sym))
				if extra > 0 {
					var v int
					v, x, pos = nextPlain(in, x, pos, extra)
					distance += v
				}
				from[o] = -distance
				if o == opCopy {
					from[opAgain], from[opAgainXor] = -distance, -distance
				}
			}
			if o != opCopy {
				l := &m.literals[o-opLiteral][span]
				if l.invalid {
					return false
				}
				if l.first != plainTable {
					sym, x, pos = m.next(in, l.first, x, pos)
					v = uint64(sym)
				}
				if l.last != plainTable {
					sym, x, pos = m.next(in, l.last, x, pos)
					v |= uint64(sym) << (l.lastAt & 63)
				}
				// Because of inputBefore these are the 8 bytes before end.
				u := binary.LittleEndian.Uint64(in[end&inputMask:]) >> (64 - 8*uint(l.plain))
				end -= int(l.plain)
				v = (v | u<<(l.plainAt&63)) << (l.at & 63)
			}
		}

		rule := &opRules[o]
		j := i + from[o]
		if j < rule.lowest {
			return false
		}
		w := word(pages[uint(j+words)/words&1], j&(words-1))&rule.mask + added[o]
		w = w ^ v&^rule.difference + unzigzag(v)&rule.difference
		y := word(base, i)
		putWord(dst, i, w)
		switch {
		case o > opSlide2:
			added[opSlide0], added[opSlide1], added[opSlide2] = w-y, added[opSlide0], added[opSlide1]
			added[opOtherSub], value = value, w
		case o == opSlide1:
			added[opSlide0], added[opSlide1] = added[opSlide1], added[opSlide0]
		case o == opSlide2:
			added[opSlide0], added[opSlide1], added[opSlide2] = added[opSlide2], added[opSlide0], added[opSlide1]
		}
	}
	return x == ransLow && pos == end
}
