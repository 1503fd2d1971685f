package codec

import (
	"encoding/binary"
	"encoding/hex"
	"math"
	"math/bits"
	"sync"
)

// The model of TagWordDelta and TagWords: which symbols there are, what their probabilities
// depend on, and the tables made from the numbers in modeldata.go.

// op is how a word is written that differs from the base's.
type op = uint8

const (
	// Nothing is written for the word, because it equals the base's. As a
	// symbol it ends a run of differing words.
	opNone op = iota

	// The word is the base's plus one of the last differences: a pointer into
	// something that moved.
	opSlide0
	opSlide1
	opSlide2

	// The word is one of these. A distance may reach into the base, as if the
	// page followed it.
	opZero   // 0
	opStride // the word one stride before
	opAgain  // the word as far back as the last opCopy went
	opCopy   // an earlier word; its distance follows
	opNear   // an earlier word but for its two low bytes; these follow too

	// A prediction and the bytes in which the word differs from it.
	opBase      // XOR with the base's word
	opPlain     // XOR with 0
	opStrideXor // XOR with the word one stride before
	opAgainXor  // XOR with the word as far back as the last opCopy went
	opStrideSub // difference to the word one stride before
	opPrevSub   // difference to the word before
	opOtherSub  // difference to the last but one word written, not counting slides

	numOps
)

const (
	opLiteral = opNear // the first that has bytes
	opSpan    = opBase // the first that has a span
	opSub     = opStrideSub

	numLiterals = int(numOps - opLiteral)
	slides      = 3
	maxStride   = 16
)

// Symbols of a gap, the distance from one differing word to the next. Within a
// run it is 1 and not written: where the last gap was 1, the next op follows, or
// opNone and then a gap.
const (
	gapSame   = 0 // as the last
	gapBefore = 1 // as the one before the last
	gapFirst  = 2 // a bucket
	gapEnd    = gapFirst + buckets
)

// buckets is the number of intervals that the numbers from 1 to 1024 are
// divided into: each has its own up to 8, and above there are four for every
// power of two.
const buckets = 8 + 4*7 + 1

// bucket returns the interval of n, and how many bits say where in it n is.
func bucket(n int) (sym, extra int) {
	if n <= 8 {
		return n - 1, 0
	}
	l := bits.Len(uint(n)) - 1
	return 8 + (l-3)*4 + n>>(l-2)&3, l - 2
}

// unbucket returns the lowest number of an interval and the number of bits.
func unbucket(sym int) (n, extra int) {
	if sym < 8 {
		return sym + 1, 0
	}
	l := (sym-8)/4 + 3
	return (4 + sym&3) << (l - 2), l - 2
}

// spanCount is the number of ways to choose a run of a word's bytes, or none.
// A span is the number of bytes for differences, which begin at the lowest.
const spanCount = 37

// spanStart[n] is the symbol of the n lowest bytes; those of n higher bytes
// follow it.
var spanStart = [9]uint8{0, 1, 9, 16, 22, 27, 31, 34, 36}

type span struct{ first, n uint8 }

// xorSpan returns the symbol of the bytes of v that are not zero, and those
// between.
func xorSpan(v uint64) int {
	if v == 0 {
		return 0
	}
	first := bits.TrailingZeros64(v) >> 3
	return int(spanStart[byteLen(v)-first]) + first
}

var spans = func() (s [spanCount]span) {
	for n := 1; n <= 8; n++ {
		for first := 0; first+n <= 8; first++ {
			s[int(spanStart[n])+first] = span{uint8(first), uint8(n)}
		}
	}
	return s
}()

// Contexts: what a symbol's probabilities depend on.
const (
	gapContexts  = int(numOps) * int(numOps)     // last op, op one stride before the next word
	opContexts   = int(numOps) * int(numOps) * 2 // last op, op one stride before, is the gap 1
	spanContexts = numLiterals * int(numOps)     // op, op one stride before
	distContexts = 2                             // opCopy, opNear
	byteContexts = numLiterals * 8 * 2           // op, number of bytes, first or last

	gapContext  = 0
	opContext   = gapContext + gapContexts
	spanContext = opContext + opContexts
	distContext = spanContext + spanContexts
	byteContext = distContext + distContexts
	numContexts = byteContext + byteContexts
)

func gapContextOf(last, up op) int { return gapContext + int(last)*int(numOps) + int(up) }

func opContextOf(last, up op, gap int) int {
	c := opContext + (int(last)*int(numOps)+int(up))*2
	if gap == 1 {
		c++
	}
	return c
}

func spanContextOf(o, up op) int { return spanContext + int(o-opLiteral)*int(numOps) + int(up) }

func distContextOf(o op) int { return distContext + int(o-opCopy) }

// byteContextOf returns the context of the first of n bytes; the one of the
// last follows.
func byteContextOf(o op, n int) int { return byteContext + (int(o-opLiteral)*8+n-1)*2 }

// alphabet is the number of symbols in a context.
func alphabet(context int) int {
	switch {
	case context < opContext:
		return gapEnd + 1
	case context < spanContext:
		return int(numOps)
	case context < distContext:
		return spanCount
	case context < byteContext:
		return buckets
	}
	return 256
}

// A table is a distribution: the place of its codes, and in the upper half its
// number.
type table uint32

// plainTable stands for equally probable bytes: these are not coded at all.
const plainTable = ^table(0)

// model holds the tables. Contexts with similar statistics share one.
type model struct {
	tables [numContexts]table
	// codes and costs are the encoder's, for every symbol; the decoder uses
	// codes too.
	codes []code
	costs []uint16 // in 1/64 bit
	// spanCosts is the cost of a span and of what its bytes cost on average,
	// for the op one stride before and the op.
	spanCosts [numOps][int(numOps-opSpan) * spanCount]uint16
	// nearCost is the cost of what follows opNear.
	nearCost uint32
	// symbols says whose interval it is, probOne entries per table.
	symbols []uint8
	// literals is how a word's bytes are written, by op and symbol of the span.
	literals [numLiterals][spanCount]literal
}

const costBit = 64

// newModel makes the tables. tables are their numbers for every context, or
// noTable; widths the widths of the symbols' intervals.
func newModel(tables *[numContexts]uint8, widths [][]uint16) *model {
	m := &model{symbols: make([]uint8, 0, len(widths)*probOne)}
	list := make([]table, len(widths))
	for t, w := range widths {
		list[t] = table(t<<16 | len(m.codes))
		start := 0
		for sym, width := range w {
			m.codes = append(m.codes, makeCode(start, int(width)))
			m.costs = append(m.costs, uint16(math.Round(costBit*math.Log2(probOne/float64(width)))))
			for range width {
				m.symbols = append(m.symbols, uint8(sym))
				start++
			}
		}
		if start != probOne {
			panic("codec: intervals do not fill a table")
		}
	}
	for c, t := range tables {
		m.tables[c] = plainTable
		if t != noTable {
			m.tables[c] = list[t]
		}
	}
	for o := opLiteral; o < numOps; o++ {
		for sym := range spanCount {
			m.literals[o-opLiteral][sym] = m.literalOf(o, sym)
		}
	}
	m.averages()
	return m
}

// noTable is a table's number in modeldata.go where there is none.
const noTable = 255

// averages makes the tables that need costs.
func (m *model) averages() {
	// mean is the cost of a byte in a context.
	means := map[table]float64{plainTable: 8 * costBit}
	mean := func(context int) float64 {
		t := m.tables[context]
		sum, ok := means[t]
		if !ok {
			for _, c := range m.costs[t&0xffff:][:256] {
				sum += float64(c) * math.Exp2(-float64(c)/costBit)
			}
			means[t] = sum
		}
		return sum
	}
	literal := func(o op, n int) float64 {
		if n == 0 {
			return 0
		}
		c := mean(byteContextOf(o, n))
		if n > 1 {
			c += mean(byteContextOf(o, n)+1) + float64(n-2)*8*costBit
		}
		return c
	}
	for o := opSpan; o < numOps; o++ {
		var literals [9]float64
		for n := range literals {
			literals[n] = literal(o, n)
		}
		for up := range m.spanCosts {
			for sym := range spanCount {
				n := int(spans[sym].n)
				if o >= opSub {
					n = min(sym, 8)
				}
				c := literals[n] + float64(m.costs[int(m.tables[spanContextOf(o, op(up))]&0xffff)+sym])
				m.spanCosts[up][int(o-opSpan)*spanCount+sym] = uint16(math.Round(c))
			}
		}
	}
	m.nearCost = uint32(8*costBit + literal(opNear, 2))
}

// The models of TagWordDelta and TagWords.
var (
	deltaModel = sync.OnceValue(func() *model { return newModel(unpackModel(deltaTables, deltaWidths)) })
	wordsModel = sync.OnceValue(func() *model { return newModel(unpackModel(wordsTables, wordsWidths)) })
)

// unpackModel reads the hexadecimal strings of modeldata.go: a byte per
// context, and the widths of one table after another as varints.
func unpackModel(tables, widths string) (*[numContexts]uint8, [][]uint16) {
	raw, err := hex.DecodeString(tables)
	if err != nil || len(raw) != numContexts {
		panic("codec: bad list of tables")
	}
	list := (*[numContexts]uint8)(raw)
	size := map[uint8]int{}
	for c, t := range list {
		if t != noTable {
			size[t] = alphabet(c)
		}
	}
	raw, err = hex.DecodeString(widths)
	if err != nil {
		panic("codec: bad tables")
	}
	all := make([][]uint16, len(size))
	for t := range all {
		all[t] = make([]uint16, size[uint8(t)])
		for i := range all[t] {
			v, n := binary.Uvarint(raw)
			all[t][i] = uint16(v)
			raw = raw[max(n, 0):]
		}
	}
	return list, all
}
