package codec

import (
	"encoding/binary"
	"encoding/hex"
	"math"
	"math/bits"
	"sync"
)

// The model of TagWordDelta: which symbols there are, what their probabilities
// depend on, and the tables made from the numbers in modeldata.go.

// op is how a word is written that differs from the base's.
type op = uint8

const (
	// Nothing is written for the word, because it equals the base's.
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

// Symbols of a gap, the distance from one differing word to the next.
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

// model holds the tables. Contexts with similar statistics share one. A table
// has room for 256 symbols and is known by the place of its first.
type model struct {
	tables [numContexts]uint16
	// codes and costs are the encoder's, for every symbol; the decoder uses
	// codes too.
	codes []code
	costs []uint16 // in 1/64 bit
	// symbols says whose interval it is, probOne entries per table.
	symbols []uint8
}

const (
	tableSize = 256
	costBit   = 64
	// plainTable stands for a table of equally probable bytes: these are not
	// coded at all.
	plainTable = 0xffff
)

// newModel makes the tables. tables are their numbers for every context, or
// plainTable; widths the widths of the symbols' intervals.
func newModel(tables *[numContexts]uint16, widths [][]uint16) *model {
	m := &model{
		codes:   make([]code, len(widths)*tableSize),
		costs:   make([]uint16, len(widths)*tableSize),
		symbols: make([]uint8, len(widths)*probOne),
	}
	for c, t := range tables {
		m.tables[c] = t
		if t != plainTable {
			m.tables[c] *= tableSize
		}
	}
	for t, w := range widths {
		start := 0
		for sym, width := range w {
			m.codes[t*tableSize+sym] = makeCode(start, int(width))
			m.costs[t*tableSize+sym] = uint16(math.Round(costBit * math.Log2(probOne/float64(width))))
			for range width {
				m.symbols[t*probOne+start] = uint8(sym)
				start++
			}
		}
		if start != probOne {
			panic("codec: intervals do not fill a table")
		}
	}
	return m
}

// standard is the model that blobs are made with.
var standard = sync.OnceValue(func() *model { return newModel(unpackModel(modelTables, modelWidths)) })

// unpackModel reads the hexadecimal strings of modeldata.go: a byte per
// context, 255 for plainTable; and the widths of one table after another, as
// varints.
func unpackModel(tables, widths string) (*[numContexts]uint16, [][]uint16) {
	raw, err := hex.DecodeString(tables)
	if err != nil || len(raw) != numContexts {
		panic("codec: bad list of tables")
	}
	list := new([numContexts]uint16)
	size := map[uint16]int{}
	for c, t := range raw {
		list[c] = uint16(t)
		if t == 255 {
			list[c] = plainTable
			continue
		}
		size[list[c]] = alphabet(c)
	}
	raw, err = hex.DecodeString(widths)
	if err != nil {
		panic("codec: bad tables")
	}
	all := make([][]uint16, len(size))
	for t := range all {
		all[t] = make([]uint16, size[uint16(t)])
		for i := range all[t] {
			v, n := binary.Uvarint(raw)
			all[t][i] = uint16(v)
			raw = raw[max(n, 0):]
		}
	}
	return list, all
}
