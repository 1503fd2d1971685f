package dedup

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"runsc-agentzip/memfile/codec"
)

func randomPage(r *rand.Rand) *codec.Page {
	p := new(codec.Page)
	for i := range p {
		p[i] = byte(r.Uint32())
	}
	return p
}

func TestSketch(t *testing.T) {
	var s Sketch
	s.Make(new(codec.Page))
	require.Zero(t, s.N, "a page of zeros has no features")
	p := new(codec.Page)
	for i := range p {
		p[i] = 7
	}
	s.Make(p)
	require.Equal(t, 1, s.N, "a page of one chunk has one feature")

	r := rand.New(rand.NewPCG(1, 2))
	p = randomPage(r)
	s.Make(p)
	require.Equal(t, Features, s.N)
	for i := 1; i < s.N; i++ {
		require.Less(t, s.Feature[i-1], s.Feature[i])
	}
	// Moved by whole chunks it is the same page, but for what falls off.
	q := new(codec.Page)
	copy(q[chunkSize*3:], p[:])
	var s2 Sketch
	s2.Make(q)
	shared := 0
	for _, f := range s2.Feature {
		for _, g := range s.Feature {
			if f == g {
				shared++
			}
		}
	}
	require.GreaterOrEqual(t, shared, Features-2)
}

func TestFind(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	const n = 3000
	table := make(Table, TableSize(n))
	pages := make([]*codec.Page, n)
	var s Sketch
	for i := range pages {
		pages[i] = randomPage(r)
		s.Make(pages[i])
		table.Add(&s, uint32(i), false)
	}
	var best [2]Match
	missed := 0
	for i, p := range pages {
		q := *p
		for range 300 { // a third of the chunks
			q[r.IntN(len(q)/3)]++
		}
		s.Make(&q)
		if k := table.Find(&s, best[:]); k == 0 || best[0].Item != uint32(i) {
			missed++
		}
		s.Make(p)
		require.Positive(t, table.Find(&s, best[:]))
		require.Equal(t, uint32(i), best[0].Item)
		// Where the table is crowded a feature may be missing.
		require.GreaterOrEqual(t, best[0].Shared, Features-2)
	}
	require.Less(t, missed, n/50)
	s.Make(randomPage(r))
	require.Zero(t, table.Find(&s, best[:]))
	require.Zero(t, table.Find(&s, nil))
}

// TestPopular has more pages share their features than a feature leads to.
func TestPopular(t *testing.T) {
	for _, replace := range []bool{false, true} {
		table := make(Table, TableSize(100))
		var s Sketch
		s.Make(randomPage(rand.New(rand.NewPCG(5, 6))))
		for i := range uint32(100) {
			table.Add(&s, i, replace)
		}
		var best [100]Match
		k := table.Find(&s, best[:])
		require.Equal(t, maxSame, k)
		for _, m := range best[:k] {
			require.Equal(t, Features, m.Shared)
		}
	}
}

// TestReplace fills a table far beyond its size: what came last is found.
func TestReplace(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 8))
	table := make(Table, TableSize(64))
	var s Sketch
	var best [1]Match
	for i := range uint32(2000) {
		s.Make(randomPage(r))
		table.Add(&s, i, true)
		require.Equal(t, 1, table.Find(&s, best[:]))
		require.Equal(t, i, best[0].Item)
	}
}

// TestAnyTable looks for sketches in tables of arbitrary bytes.
func TestAnyTable(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		table := Table(rapid.SliceOfN(rapid.Byte(), 0, 4096).Draw(t, "table"))
		var s Sketch
		s.N = rapid.IntRange(0, Features).Draw(t, "n")
		for i := range s.N {
			s.Feature[i] = rapid.Uint32().Draw(t, "feature")
		}
		check(t, table, &s)
	})
}

func check(t require.TestingT, table Table, s *Sketch) {
	var best [3]Match
	k := table.Find(s, best[:])
	for i, m := range best[:k] {
		require.GreaterOrEqual(t, m.Shared, minShared)
		require.LessOrEqual(t, m.Shared, Features*maxSame)
		if i > 0 {
			require.LessOrEqual(t, m.Shared, best[i-1].Shared)
		}
	}
}

func FuzzFind(f *testing.F) {
	table := make(Table, TableSize(4))
	var s Sketch
	s.Make(randomPage(rand.New(rand.NewPCG(9, 10))))
	table.Add(&s, 3, false)
	f.Add([]byte(table), make([]byte, 64))
	f.Fuzz(func(t *testing.T, table, page []byte) {
		var p codec.Page
		copy(p[:], page)
		var s Sketch
		s.Make(&p)
		check(t, table, &s)
		own := append(Table{}, table...)
		own.Add(&s, 1, true)
		check(t, own, &s)
	})
}

func BenchmarkMake(b *testing.B) {
	p := randomPage(rand.New(rand.NewPCG(1, 2)))
	var s Sketch
	b.ReportAllocs()
	for b.Loop() {
		s.Make(p)
	}
}

func BenchmarkFind(b *testing.B) {
	r := rand.New(rand.NewPCG(3, 4))
	const n = 100000
	table := make(Table, TableSize(n))
	sketches := make([]Sketch, n)
	for i := range sketches {
		for j := range Features {
			sketches[i].Feature[j] = r.Uint32() >> 5
		}
		sketches[i].N = Features
		table.Add(&sketches[i], uint32(i), false)
	}
	var best [2]Match
	i := 0
	b.ReportAllocs()
	for b.Loop() {
		table.Find(&sketches[i], best[:])
		i = (i + 1) % n
	}
}

// Each leads from every feature of a table to its item.
func TestEach(t *testing.T) {
	table := make(Table, TableSize(20))
	want := map[[2]uint32]bool{}
	for item := range uint32(20) {
		s := Sketch{N: 3, Feature: [Features]uint32{item, item + 100, item * 1000}}
		table.Add(&s, item, true)
		for _, f := range s.Feature[:s.N] {
			want[[2]uint32{f, item}] = true
		}
	}
	got := map[[2]uint32]bool{}
	table.Each(func(feature, item uint32) { got[[2]uint32{feature, item}] = true })
	require.Equal(t, want, got)
	Table(nil).Each(func(uint32, uint32) { t.Error("an empty table has nothing") })
}

// A table is for as many pages as its size was made for, and for no more than fit.
func TestTablePages(t *testing.T) {
	for n := range uint64(5000) {
		require.LessOrEqual(t, n, TablePages(TableSize(n)))
		require.LessOrEqual(t, TableSize(TablePages(n)), max(n, TableSize(0)))
	}
}
