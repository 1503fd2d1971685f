package codec

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math"
	"os"
	"strings"
	"testing"
)

// Training the models: they are made from the counts of symbols on the sample
// pages. Contexts that are alike share a table.

// counts are how often every symbol was seen in every context.
type counts [numContexts][]float64

func newCounts() *counts {
	c := new(counts)
	for i := range c {
		c[i] = make([]float64, alphabet(i))
	}
	return c
}

// trainingModel gives every context a table of its own. Its codes are not codes
// but say which symbol they stand for.
const trainingMark = 1 << 31

func trainingModel(c *counts) *model {
	m := &model{}
	for i := range c {
		m.tables[i] = table(len(m.codes))
		sum := 0.0
		for _, n := range c[i] {
			sum += n
		}
		for _, n := range c[i] {
			m.codes = append(m.codes, code(trainingMark|len(m.codes)))
			m.costs = append(m.costs, uint16(min(costBit*math.Log2((sum+1e-9)/(n+1e-9)), costBit*probBits)))
		}
	}
	m.averages()
	return m
}

// count encodes pages and counts what was coded.
func count(m *model, pairs []pair) *counts {
	where := make([]struct{ context, sym int }, 0, len(m.codes))
	for i := range numContexts {
		for s := range alphabet(i) {
			where = append(where, struct{ context, sym int }{i, s})
		}
	}
	c := newCounts()
	e := new(wordEncoder)
	for _, p := range pairs {
		changed, n := differing(p.page, p.base)
		if !e.symbols(m, p.page, p.base, &changed, n, MaxProfitable) {
			continue
		}
		for _, x := range e.codes[:e.n] {
			if x&trainingMark != 0 {
				w := where[x&^trainingMark]
				c[w.context][w.sym]++
			}
		}
	}
	return c
}

// smooth adds to every context a little of the sum over its kind, so that rare
// contexts get sensible tables.
func smooth(c *counts, weight float64) *counts {
	out := newCounts()
	for _, group := range groups() {
		sum := make([]float64, alphabet(group[0]))
		total := 0.0
		for _, i := range group {
			for s, n := range c[i] {
				sum[s] += n
				total += n
			}
		}
		for _, i := range group {
			for s, n := range c[i] {
				out[i][s] = n + weight*(sum[s]+0.05)/(total+0.05*float64(len(sum)))
			}
		}
	}
	return out
}

// groups returns the contexts of each kind.
func groups() [][]int {
	span := func(from, n int) (r []int) {
		for i := range n {
			r = append(r, from+i)
		}
		return r
	}
	xor := int(opSub-opLiteral) * int(numOps) // opNear has no spans
	return [][]int{
		span(gapContext, gapContexts),
		span(opContext, opContexts),
		span(spanContext, xor),
		span(spanContext+xor, spanContexts-xor),
		span(distContext, distContexts),
		span(byteContext, byteContexts),
	}
}

// How many tables each group may have.
var tablesPerGroup = []int{6, 24, 6, 6, 2, 12}

func entropy(c []float64) float64 {
	sum, e := 0.0, 0.0
	for _, n := range c {
		if n > 0 {
			e -= n * math.Log2(n)
			sum += n
		}
	}
	if sum > 0 {
		e += sum * math.Log2(sum)
	}
	return e
}

// cluster merges contexts into at most n sets, always the two whose union costs
// least.
func cluster(c *counts, group []int, n int) [][]int {
	type set struct {
		members []int
		counts  []float64
		bits    float64
	}
	var sets []*set
	for _, i := range group {
		sets = append(sets, &set{[]int{i}, c[i], entropy(c[i])})
	}
	union := func(a, b *set) []float64 {
		u := make([]float64, len(a.counts))
		for i := range u {
			u[i] = a.counts[i] + b.counts[i]
		}
		return u
	}
	loss := make([][]float64, len(sets))
	for i := range sets {
		loss[i] = make([]float64, len(sets))
		for j := range i {
			loss[i][j] = entropy(union(sets[i], sets[j])) - sets[i].bits - sets[j].bits
		}
	}
	for alive := len(sets); alive > n; alive-- {
		bi, bj, best := 0, 0, math.Inf(1)
		for i := range sets {
			for j := range i {
				if sets[i] != nil && sets[j] != nil && loss[i][j] < best {
					bi, bj, best = i, j, loss[i][j]
				}
			}
		}
		u := union(sets[bi], sets[bj])
		sets[bj] = &set{append(sets[bj].members, sets[bi].members...), u, entropy(u)}
		sets[bi] = nil
		for k := range sets {
			if k != bj && sets[k] != nil {
				loss[max(k, bj)][min(k, bj)] = entropy(union(sets[k], sets[bj])) - sets[k].bits - sets[bj].bits
			}
		}
	}
	var r [][]int
	for _, s := range sets {
		if s != nil {
			r = append(r, s.members)
		}
	}
	return r
}

// quantize turns counts into widths that fill probOne; none is 0.
func quantize(c []float64) []uint16 {
	sum := 0.0
	for _, n := range c {
		sum += n
	}
	w := make([]uint16, len(c))
	rest := probOne
	for i, n := range c {
		w[i] = uint16(max(1, math.Round(n/sum*probOne)))
		rest -= int(w[i])
	}
	for rest != 0 {
		// Change the width at which it costs least.
		best, at := math.Inf(1), 0
		step := 1
		if rest < 0 {
			step = -1
		}
		for i, n := range c {
			if int(w[i])+step < 1 {
				continue
			}
			cost := n * math.Log2(float64(w[i])/float64(int(w[i])+step))
			if cost < best {
				best, at = cost, i
			}
		}
		w[at] = uint16(int(w[at]) + step)
		rest -= step
	}
	return w
}

// train makes a model from pages.
func train(pairs []pair) (tables *[numContexts]uint8, widths [][]uint16) {
	c := newCounts()
	for i := range c {
		for s := range c[i] {
			c[i][s] = 1
		}
	}
	for range 6 {
		c = smooth(count(trainingModel(c), pairs), 16)
	}
	tables = new([numContexts]uint8)
	for g, group := range groups() {
		if group[0] == byteContext {
			// Leave bytes alone that are not worth a table.
			var rest []int
			for _, i := range group {
				sum := 0.0
				for _, n := range c[i] {
					sum += n
				}
				if 8*sum-entropy(c[i]) < 0.15*8*sum {
					tables[i] = noTable
				} else {
					rest = append(rest, i)
				}
			}
			group = rest
		}
		for _, set := range cluster(c, group, tablesPerGroup[g]) {
			sum := make([]float64, alphabet(set[0]))
			for _, i := range set {
				tables[i] = uint8(len(widths))
				for s, n := range c[i] {
					sum[s] += n
				}
			}
			widths = append(widths, quantize(sum))
		}
	}
	return tables, widths
}

func (m *model) total(t *testing.T, pairs []pair) (total float64) {
	e := new(wordEncoder)
	var buf [PageSize]byte
	var got Page
	for _, p := range pairs {
		n := e.encode(m, buf[:], p.page, p.base, MaxProfitable, words)
		if n < 0 {
			total += PageSize
			continue
		}
		total += float64(n)
		if !m.decode(new(input), &got, buf[:n], p.base) || got != *p.page {
			t.Fatal("wrong page")
		}
	}
	return total / float64(len(pairs))
}

// TestTrain reports what the models are worth on pages they were not trained on.
// With AGENTZIP_TRAIN=1 it writes modeldata.go.
func TestTrain(t *testing.T) {
	differ, _ := samplePairs(t)
	var alone []pair
	for i, p := range samplePages(t) {
		alone = append(alone, pair{p, new(Page), i / 8})
	}
	var b strings.Builder
	b.WriteString("// Made by TestTrain; see there.\n\npackage codec\n")
	for _, c := range []struct {
		name  string
		pairs []pair
	}{{"delta", differ}, {"words", alone}} {
		// Pages of one place in different clones are alike, so they go together.
		var half [2][]pair
		for _, p := range c.pairs {
			half[p.at/50%2] = append(half[p.at/50%2], p)
		}
		var cross float64
		for h := range half {
			cross += newModel(train(half[h])).total(t, half[1-h]) / 2
		}
		list, widths := train(c.pairs)
		t.Logf("%s: %.1f bytes/page on other pages, %.1f on the pages trained on; %d tables",
			c.name, cross, newModel(list, widths).total(t, c.pairs), len(widths))
		var numbers []byte
		for _, w := range widths {
			for _, v := range w {
				numbers = binary.AppendUvarint(numbers, uint64(v))
			}
		}
		for _, d := range []struct {
			name string
			data []byte
		}{{"Tables", list[:]}, {"Widths", numbers}} {
			fmt.Fprintf(&b, "\nconst %s%s = \"\"", c.name, d.name)
			for s := hex.EncodeToString(d.data); s != ""; {
				n := min(len(s), 120)
				fmt.Fprintf(&b, " +\n\t%q", s[:n])
				s = s[n:]
			}
			b.WriteString("\n")
		}
	}
	if os.Getenv("AGENTZIP_TRAIN") == "" {
		return
	}
	if err := os.WriteFile("modeldata.go", []byte(b.String()), 0o644); err != nil {
		t.Fatal(err)
	}
}
