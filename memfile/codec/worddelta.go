package codec

import (
	"encoding/binary"
	"math/bits"
)

// TagWordDelta: the 8-byte words in which a page differs from its base.
//
// A blob is the final state of the range coder and the stride (3 bytes), the
// coded symbols, and bytes that are not worth coding, the first at the end of
// the blob and the last next to the symbols. The symbols are, per differing
// word: the gap since the last one, the op, and what the op needs.

const words = PageSize / 8

func word(p *Page, i int) uint64       { return binary.LittleEndian.Uint64(p[i*8:]) }
func putWord(p *Page, i int, v uint64) { binary.LittleEndian.PutUint64(p[i*8:], v) }

// past returns a word of the page, or of the base, which precedes it.
func past(p, base *Page, i int) uint64 {
	if i < 0 {
		p, i = base, i+words
	}
	return word(p, i)
}

// wordEncoder makes TagWordDelta blobs.
type wordEncoder struct {
	// codes are the symbols so far.
	codes [maxCodes]code
	n     int
	// tail holds bytes that are not coded, the first at its end.
	tail [words * 8]byte
	t    int

	stride int
	ops    [words]op
	// seen and near hold where a word, or its six high bytes, were last seen,
	// by hash: a number that is 0 for none and origin for the page's first word.
	seen, near [256]uint16

	// coded is room for what ransEncode writes.
	coded [MaxEncoded]byte
}

// maxCodes is enough for a gap, an op, a distance, a span, their plain bits and
// two bytes of every word.
const maxCodes = words*8 + 2

func hashWord(v uint64) uint8 { return uint8(v * 0x9e3779b97f4a7c15 >> 56) }

// bitmap has a bit for every word.
type bitmap [words / 64]uint64

// differing returns in which words two pages differ.
func differing(p, base *Page) (m bitmap, n int) {
	for line := range PageSize / 64 {
		a, b := p[line*64:][:64], base[line*64:][:64]
		d0 := binary.LittleEndian.Uint64(a[0:]) ^ binary.LittleEndian.Uint64(b[0:])
		d1 := binary.LittleEndian.Uint64(a[8:]) ^ binary.LittleEndian.Uint64(b[8:])
		d2 := binary.LittleEndian.Uint64(a[16:]) ^ binary.LittleEndian.Uint64(b[16:])
		d3 := binary.LittleEndian.Uint64(a[24:]) ^ binary.LittleEndian.Uint64(b[24:])
		d4 := binary.LittleEndian.Uint64(a[32:]) ^ binary.LittleEndian.Uint64(b[32:])
		d5 := binary.LittleEndian.Uint64(a[40:]) ^ binary.LittleEndian.Uint64(b[40:])
		d6 := binary.LittleEndian.Uint64(a[48:]) ^ binary.LittleEndian.Uint64(b[48:])
		d7 := binary.LittleEndian.Uint64(a[56:]) ^ binary.LittleEndian.Uint64(b[56:])
		if d0|d1|d2|d3|d4|d5|d6|d7 == 0 {
			continue
		}
		x := (d0|-d0)>>63 | (d1|-d1)>>63<<1 | (d2|-d2)>>63<<2 | (d3|-d3)>>63<<3 |
			(d4|-d4)>>63<<4 | (d5|-d5)>>63<<5 | (d6|-d6)>>63<<6 | (d7|-d7)>>63<<7
		m[line/8] |= x << (line % 8 * 8)
		n += bits.OnesCount64(x)
	}
	return m, n
}

// findStride returns the distance at which differing words resemble earlier
// words most.
func findStride(p *Page, changed *bitmap, n int) int {
	// 64 words tell as much as 512.
	skip := 1 + n/64
	var score [maxStride + 1]int
	k := 0
	for c, m := range changed {
		for ; m != 0; m &= m - 1 {
			if k++; k < skip {
				continue
			}
			k = 0
			i := c*64 + bits.TrailingZeros64(m)
			if i < maxStride {
				continue
			}
			x := word(p, i)
			before := p[(i-maxStride)*8:][:maxStride*8]
			for s := 1; s <= maxStride; s++ {
				y := binary.LittleEndian.Uint64(before[(maxStride-s)*8:])
				score[s] += bits.Len64(zigzag(x - y))
			}
		}
	}
	best := 1
	for s := 2; s <= maxStride; s++ {
		if score[s] < score[best] {
			best = s
		}
	}
	return best
}

// encode writes a blob of at most limit bytes to dst and returns its length, or
// -1 if it would be longer or if more than maxChanged words differ.
func (e *wordEncoder) encode(m *model, dst []byte, p, base *Page, limit, maxChanged int) int {
	changed, n := differing(p, base)
	if n > maxChanged || !e.symbols(m, p, base, &changed, n, limit) {
		return -1
	}
	return e.finish(dst, limit)
}

// symbols turns a page into symbols and bytes. It reports false when these need
// more than limit bytes; not every time that happens.
func (e *wordEncoder) symbols(m *model, p, base *Page, changed *bitmap, n, limit int) bool {
	stride := findStride(p, changed, n)
	e.stride = stride
	e.n, e.t = 0, len(e.tail)
	clear(e.ops[:])
	clear(e.seen[:])
	clear(e.near[:])
	if n >= everyFrom {
		for j := range words {
			e.enter(word(base, j), j-words)
		}
	}
	var (
		slide      [slides]uint64
		value      [2]uint64
		gap0, gap1 = 1, 1
		last, prev = -1, opNone
		again      int
		up         op
		done       int
	)
	for c := range changed {
		for mask := changed[c]; mask != 0; mask &= mask - 1 {
			i := c*64 + bits.TrailingZeros64(mask)
			x, y := word(p, i), word(base, i)

			gap := i - last
			if gap0 != 1 || gap != 1 {
				context := e.endRun(m, last, prev, gap0)
				switch gap {
				case gap0:
					e.code(m, context, gapSame)
				case gap1:
					e.code(m, context, gapBefore)
					gap0, gap1 = gap, gap0
				default:
					gap0, gap1 = gap, gap0
					sym, extra := bucket(gap)
					e.code(m, context, gapFirst+sym)
					e.plain(gap, extra)
				}
			}

			// The op that costs least.
			if n >= everyFrom {
				for ; done < i; done++ {
					e.enter(word(p, done), done)
				}
			}
			up = opNone
			if i >= stride {
				up = e.ops[i-stride]
			}
			context := opContextOf(prev, up, gap)
			costs := m.costs[m.tables[context]&0xffff:][:numOps]
			d := x - y
			best, bestCost := opNone, uint32(1<<30)
			var distance, symbol int
			var rest uint64
			try := func(o op, more uint32) {
				if cost := uint32(costs[o]) + more; cost < bestCost {
					best, bestCost = o, cost
				}
			}
			switch d {
			case slide[0]:
				try(opSlide0, 0)
			case slide[1]:
				try(opSlide1, 0)
			case slide[2]:
				try(opSlide2, 0)
			}
			if x == 0 {
				try(opZero, 0)
			}
			var atStride, atAgain uint64
			if i >= stride {
				if atStride = word(p, i-stride); atStride == x {
					try(opStride, 0)
				}
			}
			if again != 0 && i-again >= -words {
				if atAgain = past(p, base, i-again); atAgain == x {
					try(opAgain, 0)
				}
			}
			hx, hn := hashWord(x), hashWord(x>>16)
			if best == opNone {
				if j := int(e.seen[hx]) - origin; j >= -words && past(p, base, j) == x {
					try(opCopy, 8*costBit)
					distance = i - j
				}
				// Differences from predictions.
				var v [numOps]uint64
				valid := uint32(1<<opBase | 1<<opPlain | 1<<opOtherSub)
				v[opBase] = x ^ y
				v[opPlain] = x
				v[opOtherSub] = zigzag(x - value[1])
				if i > 0 {
					v[opPrevSub] = zigzag(x - word(p, i-1))
					valid |= 1 << opPrevSub
				}
				if i >= stride {
					v[opStrideXor] = x ^ atStride
					v[opStrideSub] = zigzag(x - atStride)
					valid |= 1<<opStrideXor | 1<<opStrideSub
				}
				if again != 0 && i-again >= -words {
					v[opAgainXor] = x ^ atAgain
					valid |= 1 << opAgainXor
				}
				more := &m.spanCosts[up]
				for o := opSpan; o < numOps; o++ {
					if valid>>o&1 == 0 {
						continue
					}
					sym := 0
					if o < opSub {
						sym = xorSpan(v[o])
					} else {
						sym = byteLen(v[o])
					}
					if cost := uint32(costs[o]) + uint32(more[int(o-opSpan)*spanCount+sym]); cost < bestCost {
						best, bestCost, symbol = o, cost, sym
					}
				}
				rest = v[best]
				if best < opSub {
					rest >>= spans[symbol].first * 8
				}
				if j := int(e.near[hn]) - origin; j >= -words && past(p, base, j)>>16 == x>>16 {
					before := best
					try(opNear, m.nearCost)
					if best != before {
						distance = i - j
					}
				}
			}
			if n < everyFrom {
				e.seen[hx], e.near[hn] = uint16(i+origin), uint16(i+origin)
			}

			e.code(m, context, int(best))
			switch {
			case best == opCopy:
				e.distance(m, best, distance)
				again = distance
			case best == opNear:
				e.distance(m, best, distance)
				e.literal(m, best, x&0xffff, 2)
			case best >= opSpan:
				e.code(m, spanContextOf(best, up), symbol)
				e.literal(m, best, rest, byteLen(rest))
			}
			switch best {
			case opSlide0:
			case opSlide1:
				slide[0], slide[1] = d, slide[0]
			case opSlide2:
				slide[0], slide[1], slide[2] = d, slide[0], slide[1]
			default:
				slide[0], slide[1], slide[2] = d, slide[0], slide[1]
				value[0], value[1] = x, value[0]
			}
			e.ops[i] = best
			last, prev = i, best
			if len(e.tail)-e.t > limit {
				return false
			}
		}
	}
	if last < words-1 {
		e.code(m, e.endRun(m, last, prev, gap0), gapEnd)
	}
	return true
}

// endRun returns the context of a gap, and before that says that one comes if
// the last gap was 1.
func (e *wordEncoder) endRun(m *model, last int, prev op, gap int) int {
	up := opNone
	if j := last + 1 - e.stride; j >= 0 {
		up = e.ops[j]
	}
	if gap == 1 {
		e.code(m, opContextOf(prev, up, 1), int(opNone))
	}
	return gapContextOf(prev, up)
}

// Where this many words differ, opCopy and opNear may take any word of the page
// or the base; where fewer differ only words that differ, because the time for
// the rest is not worth it.
const everyFrom = 64

const origin = words + 1

func (e *wordEncoder) enter(v uint64, i int) {
	e.seen[hashWord(v)] = uint16(i + origin)
	e.near[hashWord(v>>16)] = uint16(i + origin)
}

// finish makes a blob of what symbols found.
func (e *wordEncoder) finish(dst []byte, limit int) int {
	tail := e.tail[e.t:]
	room := limit - 3 - len(tail)
	if room < 0 {
		return -1
	}
	at, state := ransEncode(e.coded[len(e.coded)-room:], e.codes[:e.n])
	if at < 0 {
		return -1
	}
	state |= uint32(e.stride-1) << stateBits
	dst[0], dst[1], dst[2] = byte(state), byte(state>>8), byte(state>>16)
	o := 3
	o += copy(dst[o:], e.coded[len(e.coded)-room+at:])
	return o + copy(dst[o:], tail)
}

func (e *wordEncoder) code(m *model, context, sym int) {
	e.codes[e.n] = m.codes[int(m.tables[context]&0xffff)+sym]
	e.n++
}

func (e *wordEncoder) plain(v, n int) {
	if n > 0 {
		e.codes[e.n] = plainCode(v, n)
		e.n++
	}
}

func (e *wordEncoder) distance(m *model, o op, d int) {
	sym, extra := bucket(d)
	e.code(m, distContextOf(o), sym)
	e.plain(d, extra)
}

// literal writes n bytes of v: the first and the last by their statistics, if
// they have any, and what is between as it is.
func (e *wordEncoder) literal(m *model, o op, v uint64, n int) {
	if n == 0 {
		return
	}
	context := byteContextOf(o, n)
	if t := m.tables[context]; t != plainTable {
		e.codes[e.n] = m.codes[int(t&0xffff)+int(byte(v))]
		e.n++
		v >>= 8
		n--
		if n == 0 {
			return
		}
	}
	if t := m.tables[context+1]; t != plainTable {
		n--
		e.codes[e.n] = m.codes[int(t&0xffff)+int(byte(v>>(8*n)))]
		e.n++
	}
	e.t -= n
	for i := range n {
		e.tail[e.t+i] = byte(v >> (8 * i))
	}
}
