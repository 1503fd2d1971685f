package codec

import (
	"encoding/binary"
	"math/bits"

	"github.com/klauspost/compress/huff0"
)

// blockWriter writes what a matcher found as the content of a zstd block
// (RFC 8878, 3.1.1.3). The decoder is the library's.
type blockWriter struct {
	huff    huff0.Scratch
	streams [3]stream
	out     []byte
	room    [PageSize * 3]byte
}

// Kinds of symbols, in the order of their tables.
const (
	litLengths = iota
	offsets
	matchLengths
)

// stream is one of the three kinds of symbols of a block's sequences.
type stream struct {
	codes [PageSize/minMatch + 1]uint8
	count [53]uint16
	norm  [53]int16
	table fseTable
	// header is the description of a table made for this block.
	header  [96]byte
	headerN int
}

// maxCode are the highest codes of each kind.
var maxCode = [3]int{35, 31, 52}

// interval is what a code stands for: the numbers from here on that differ in so
// many bits. These follow the code.
type interval struct {
	from uint32
	bits uint8
}

var literalCodes = makeIntervals(16, 0, []uint8{1, 1, 1, 1, 2, 2, 3, 3, 4, 6, 7, 8, 9, 10, 11, 12})
var matchCodes = makeIntervals(32, 3, []uint8{1, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 7, 8, 9, 10, 11, 12})

// makeIntervals makes intervals from a number on: first some of a single number,
// then those with bits.
func makeIntervals(single int, from uint32, more []uint8) []interval {
	var r []interval
	for i := range single + len(more) {
		b := interval{from: from}
		if i >= single {
			b.bits = more[i-single]
		}
		r = append(r, b)
		from += 1 << b.bits
	}
	return r
}

// The codes of short lengths; a match's is that of the length less 3.
var literalCode, matchCode [256]uint8

func init() {
	for c, b := range literalCodes {
		for i := b.from; i < b.from+1<<b.bits && i < 256; i++ {
			literalCode[i] = uint8(c)
		}
	}
	for c, b := range matchCodes {
		for i := b.from; i < b.from+1<<b.bits && i-3 < 256; i++ {
			matchCode[i-3] = uint8(c)
		}
	}
}

func literalCodeOf(n uint16) uint8 {
	if n < 256 {
		return literalCode[n]
	}
	return uint8(bits.Len16(n)) + 18
}

func matchCodeOf(n uint16) uint8 {
	if n < 256+3 {
		return matchCode[n-3]
	}
	return uint8(bits.Len16(n-3)) + 35
}

// The distributions that need not be described.
var predefined = [3]struct {
	log  uint8
	norm []int16
}{
	{6, []int16{4, 3, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 3, 2, 1, 1, 1, 1, 1, -1, -1, -1, -1}},
	{5, []int16{1, 1, 1, 1, 1, 1, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1}},
	{6, []int16{1, 4, 3, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1}},
}

var predefinedTables = func() (t [3]fseTable) {
	for i, p := range predefined {
		t[i].build(p.norm, p.log)
	}
	return t
}()

// fseTable codes symbols with a finite state machine (RFC 8878, 4.1).
type fseTable struct {
	log    uint8
	states [1 << maxLog]uint16
	change [53]struct {
		bits uint32 // to write, in the upper half, after adding the state
		find int32
	}
}

// maxLog is the greatest table that is made. 6 loses nothing on as few
// sequences as a page has.
const maxLog = 6

func (t *fseTable) build(norm []int16, log uint8) {
	t.log = log
	size := 1 << log
	var symbols [1 << maxLog]uint8
	var cumulated [54]int
	high := size
	total := 0
	for s, n := range norm {
		cumulated[s] = total
		c := &t.change[s]
		switch n {
		case 0:
			c.bits = (uint32(log)+1)<<16 - uint32(size)
			c.find = 0
		case -1, 1:
			if n < 0 {
				high--
				symbols[high] = uint8(s)
			}
			c.bits = uint32(log)<<16 - uint32(size)
			c.find = int32(total) - 1
			total++
		default:
			most := uint32(log) - uint32(bits.Len16(uint16(n-1))-1)
			c.bits = most<<16 - uint32(n)<<most
			c.find = int32(total) - int32(n)
			total += int(n)
		}
	}
	// Spread the symbols over the states.
	step := size>>1 + size>>3 + 3
	at := 0
	for s, n := range norm {
		for range n {
			symbols[at] = uint8(s)
			at = (at + step) & (size - 1)
			for at >= high {
				at = (at + step) & (size - 1)
			}
		}
	}
	for u := range size {
		s := symbols[u]
		t.states[cumulated[s]] = uint16(size + u)
		cumulated[s]++
	}
}

// start returns the state that a decoder reads the symbol in.
func (t *fseTable) start(s uint8) uint32 {
	c := &t.change[s]
	n := (c.bits + 1<<15) >> 16
	return uint32(t.states[int32((n<<16-c.bits)>>n)+c.find])
}

// next writes the bits that lead from the symbol's state to state.
func (t *fseTable) next(w *bitWriter, state uint32, s uint8) uint32 {
	c := &t.change[s]
	n := (state + c.bits) >> 16
	w.add(state, uint8(n))
	return uint32(t.states[int32(state>>n)+c.find])
}

// bitWriter writes bits to out, the lowest first.
type bitWriter struct {
	out []byte
	at  int
	v   uint64
	n   uint8
}

// add takes at most 16 bits; out must have room for 8 bytes more.
func (w *bitWriter) add(v uint32, n uint8) {
	w.v |= uint64(v&(1<<n-1)) << (w.n & 63)
	w.n += n
}

// flush must be called before 64 bits have gathered.
func (w *bitWriter) flush() {
	binary.LittleEndian.PutUint64(w.out[w.at:], w.v)
	w.at += int(w.n >> 3)
	w.v >>= w.n & 56
	w.n &= 7
}

// close writes the bits of the last byte too.
func (w *bitWriter) close() {
	w.flush()
	if w.n > 0 {
		w.at++
	}
}

// write returns the block, or nil if it is far from being smaller than a page.
// The result is valid until the next call.
func (b *blockWriter) write(seqs []sequence, literals []byte) []byte {
	b.out = b.writeLiterals(b.room[:0], literals)
	switch n := len(seqs); {
	case n < 128:
		b.out = append(b.out, byte(n))
	default:
		b.out = append(b.out, byte(n>>8+128), byte(n))
	}
	if len(seqs) == 0 {
		return b.out
	}
	for i := range b.streams {
		clear(b.streams[i].count[:])
	}
	ll, of, ml := &b.streams[litLengths], &b.streams[offsets], &b.streams[matchLengths]
	for i, s := range seqs {
		l, o, m := literalCodeOf(s.literals), uint8(bits.Len16(s.offset)-1), matchCodeOf(s.length)
		ll.codes[i], of.codes[i], ml.codes[i] = l, o, m
		ll.count[l]++
		of.count[o]++
		ml.count[m]++
	}
	mode := len(b.out)
	b.out = append(b.out, 0)
	var tables [3]*fseTable
	for i := range b.streams {
		t, m := b.streams[i].choose(i, len(seqs))
		tables[i] = t
		b.out[mode] |= m << (6 - 2*i)
		b.out = append(b.out, b.streams[i].header[:b.streams[i].headerN]...)
	}

	// From the last sequence to the first. A sequence takes at most 7 bytes.
	start := len(b.out)
	if start+len(seqs)*7+16 > cap(b.out) {
		return nil
	}
	w := bitWriter{out: b.out[:cap(b.out)], at: start}
	n := len(seqs) - 1
	llState := tables[litLengths].start(ll.codes[n])
	ofState := tables[offsets].start(of.codes[n])
	mlState := tables[matchLengths].start(ml.codes[n])
	for {
		s := seqs[n]
		l, o, m := ll.codes[n], of.codes[n], ml.codes[n]
		w.add(uint32(s.literals)-literalCodes[l].from, literalCodes[l].bits)
		w.add(uint32(s.length)-matchCodes[m].from, matchCodes[m].bits)
		w.flush()
		w.add(uint32(s.offset), o)
		n--
		if n < 0 {
			break
		}
		ofState = tables[offsets].next(&w, ofState, of.codes[n])
		mlState = tables[matchLengths].next(&w, mlState, ml.codes[n])
		llState = tables[litLengths].next(&w, llState, ll.codes[n])
		w.flush()
	}
	w.flush()
	w.add(mlState, tables[matchLengths].log)
	w.add(ofState, tables[offsets].log)
	w.add(llState, tables[litLengths].log)
	w.add(1, 1) // the mark of the end
	w.close()
	b.out = b.out[:w.at]
	return b.out
}

// choose returns the table that codes a stream in the fewest bits, and its
// mode. header is what describes it.
func (s *stream) choose(kind, n int) (*fseTable, uint8) {
	const (
		modePredefined = 0
		modeRLE        = 1
		modeCompressed = 2
	)
	s.headerN = 0
	most, top, different := 0, 0, 0
	for c, k := range s.count[:maxCode[kind]+1] {
		if k > 0 {
			top = c
			different++
		}
		if int(s.count[c]) > int(s.count[most]) {
			most = c
		}
	}
	p := &predefined[kind]
	if int(s.count[most]) == n {
		if n > 2 || most >= len(p.norm) {
			s.header[0], s.headerN = byte(most), 1
			s.table.single(uint8(most))
			return &s.table, modeRLE
		}
		return &predefinedTables[kind], modePredefined
	}
	given := 1 << 30
	if top < len(p.norm) {
		given = cost(s.count[:top+1], p.norm, p.log)
	}
	log := uint8(max(5, min(maxLog, bits.Len(uint(n))-2)))
	if different > 1<<log {
		log = maxLog // which is enough for all
	}
	norm := s.norm[:top+1]
	normalize(norm, s.count[:top+1], n, log)
	s.headerN = writeNorm(s.header[:], norm, log)
	if given <= cost(s.count[:top+1], norm, log)+s.headerN*8*64 {
		s.headerN = 0
		return &predefinedTables[kind], modePredefined
	}
	s.table.build(norm, log)
	return &s.table, modeCompressed
}

// single makes a table of one symbol, which takes no bits.
func (t *fseTable) single(s uint8) {
	t.log = 0
	t.states[0], t.states[1] = 1, 1
	t.change[s].bits = 0
	t.change[s].find = 0
}

// log64 is 64 times the binary logarithm, of up to 64.
var log64 = func() (l [1<<maxLog + 1]int) {
	for i := 1; i < len(l); i++ {
		// By repeated squaring, as exact as is needed.
		x, r := float64(i), 0
		for k := range 7 {
			for x >= 2 {
				x /= 2
				r += 64 >> k
			}
			x *= x
		}
		l[i] = r
	}
	return l
}()

// cost is the number of bits, times 64, that symbols take.
func cost(count []uint16, norm []int16, log uint8) int {
	bits := 0
	for s, n := range count {
		if n == 0 {
			continue
		}
		w := int(norm[s])
		if w < 0 {
			w = 1
		}
		if w == 0 {
			return 1 << 30
		}
		bits += int(n) * (int(log)*64 - log64[w])
	}
	return bits
}

// normalize scales counts so that their sum is 1<<log; none that occurs
// becomes 0.
func normalize(norm []int16, count []uint16, n int, log uint8) {
	size := 1 << log
	rest := size
	for s, c := range count {
		norm[s] = 0
		if c > 0 {
			norm[s] = int16(max(1, (int(c)*size+n/2)/n))
			rest -= int(norm[s])
		}
	}
	for ; rest > 0; rest-- {
		best, at := -1, 0
		for s, c := range count {
			if c > 0 {
				if g := int(c) * (log64[min(int(norm[s])+1, size)] - log64[norm[s]]); g > best {
					best, at = g, s
				}
			}
		}
		norm[at]++
	}
	for ; rest < 0; rest++ {
		best, at := 1<<30, 0
		for s, c := range count {
			if norm[s] > 1 {
				if g := int(c) * (log64[norm[s]] - log64[norm[s]-1]); g < best {
					best, at = g, s
				}
			}
		}
		norm[at]--
	}
}

// writeNorm writes the description of a table and returns its length.
func writeNorm(dst []byte, norm []int16, log uint8) int {
	w := bitWriter{out: dst}
	w.add(uint32(log-5), 4)
	remaining := 1<<log + 1
	threshold := 1 << log
	n := log + 1
	for s := 0; remaining > 1; {
		v := int(norm[s])
		s++
		most := 2*threshold - 1 - remaining
		if v < 0 {
			remaining--
		} else {
			remaining -= v
		}
		v++
		if v >= threshold {
			v += most
		}
		if v < most {
			w.add(uint32(v), n-1)
		} else {
			w.add(uint32(v), n)
		}
		w.flush()
		for remaining < threshold {
			n--
			threshold >>= 1
		}
		if norm[s-1] == 0 {
			// How many more zeros: 2 bits each for up to 3.
			run := 0
			for s+run < len(norm) && norm[s+run] == 0 {
				run++
			}
			s += run
			for ; run >= 3; run -= 3 {
				w.add(3, 2)
				w.flush()
			}
			w.add(uint32(run), 2)
		}
	}
	w.close()
	return w.at
}

// writeLiterals appends the section of the literals.
func (b *blockWriter) writeLiterals(dst, literals []byte) []byte {
	const (
		raw        = 0
		rle        = 1
		compressed = 2
	)
	n := len(literals)
	var packed []byte
	var err error = huff0.ErrIncompressible
	b.huff.Reuse = huff0.ReusePolicyNone
	switch {
	case n >= 1024:
		packed, _, err = huff0.Compress4X(literals, &b.huff)
	case n > 16:
		packed, _, err = huff0.Compress1X(literals, &b.huff)
	}
	if err == nil && len(packed)+2 < n {
		c := len(packed)
		if n < 1024 && c < 1024 {
			h := compressed | n<<4 | c<<14
			dst = append(dst, byte(h), byte(h>>8), byte(h>>16))
		} else {
			h := compressed | 2<<2 | n<<4 | c<<18
			dst = append(dst, byte(h), byte(h>>8), byte(h>>16), byte(h>>24))
		}
		return append(dst, packed...)
	}
	kind := raw
	if err == huff0.ErrUseRLE {
		kind, literals = rle, literals[:1]
	}
	if n < 32 {
		dst = append(dst, byte(kind|n<<3))
	} else {
		dst = append(dst, byte(kind|1<<2|n<<4), byte(n>>4))
	}
	return append(dst, literals...)
}
