package memfile

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"runsc-agentzip/memfile/codec"
)

func never() bool { return false }

func TestTable(t *testing.T) {
	var tab table
	defer tab.close()
	require.Zero(t, tab.pages())
	require.Zero(t, tab.heldBytes())
	tab.visit(func(first, end uint64) bool { t.Errorf("visits %d-%d", first, end); return true })
	tab.extend(1)
	require.EqualValues(t, tableChunk, tab.pages())
	tab.store(5, candidate)
	// Words are what they are while the table grows.
	stop := make(chan struct{})
	reader := inBackground(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			if tab.load(5) != candidate || tab.load(6) != resident || tab.load(tab.pages()-2) != resident {
				t.Error("the table changed while it grew")
				return
			}
		}
	})
	for n := uint64(1); n <= 40; n++ {
		tab.extend(n*tableChunk - 1)
		require.EqualValues(t, n*tableChunk, tab.pages())
		tab.store(n*tableChunk-1, raw)
	}
	close(stop)
	<-reader
	tab.extend(3)
	require.EqualValues(t, 40*tableChunk, tab.pages(), "the table shrank")
	for n := uint64(1); n <= 40; n++ {
		require.Equal(t, raw, tab.load(n*tableChunk-1))
	}
}

func TestTableVisit(t *testing.T) {
	var tab table
	defer tab.close()
	tab.extend(3 * tableChunk)
	used := []uint64{0, groupPages - 1, groupPages, tableChunk - 1, tableChunk, 3*tableChunk - 1}
	for _, p := range used {
		tab.store(p, candidate)
	}
	// Adopted pages are visited, too, but need not be written.
	adopted := []uint64{5 * groupPages, 5*groupPages + 700}
	tab.adopt(adopted[0], adopted[1]+1)
	visited := func(visit func(func(first, end uint64) bool), pages []uint64) (seen []uint64) {
		last := uint64(0)
		visit(func(first, end uint64) bool {
			require.GreaterOrEqual(t, first, last)
			require.EqualValues(t, groupPages, end-first)
			last = end
			for _, p := range pages {
				if first <= p && p < end {
					seen = append(seen, p)
				}
			}
			return true
		})
		return seen
	}
	require.Equal(t, used, visited(tab.visitWritten, append(slices.Clone(used), adopted...)))
	all := append(slices.Clone(used), adopted...)
	slices.Sort(all)
	require.Equal(t, all, visited(tab.visit, all))
	for _, visit := range []func(func(first, end uint64) bool){tab.visit, tab.visitWritten} {
		calls := 0
		visit(func(_, _ uint64) bool { calls++; return false })
		require.Equal(t, 1, calls, "visits after the end")
	}
}

// TestTableMemory: what is as it was adopted, or never used, takes half a byte per
// page at most, and what a step used is given back after it.
func TestTableMemory(t *testing.T) {
	var tab table
	defer tab.close()
	const n = 60000
	tab.extend(n)
	require.LessOrEqual(t, tab.heldBytes(), uint64(1<<10), "of the first GiB")
	tab.adopt(100, 100+n)
	held := tab.heldBytes()
	require.LessOrEqual(t, held, uint64(n/2+16384))
	// Mapping it takes nothing.
	require.EqualValues(t, 100+n, tab.markFrom(100, 100+n))
	require.Equal(t, held, tab.heldBytes())

	rnd := rand.New(rand.NewPCG(1, 1))
	kept := map[uint64]word{}
	for p := uint64(100); p < 100+n; p++ {
		if !tab.cas(p, templateWord, busy) {
			t.Fatalf("page %d has word %#x", p, tab.load(p))
		}
		tab.store(p, resident)
	}
	full := tab.heldBytes()
	require.LessOrEqual(t, full, held+n*8+2*PageSize)
	for p := uint64(100); p < 100+n; p++ {
		w := templateWord
		if rnd.IntN(300) == 0 {
			w = evictedWord(codec.TagZstd, 77)
			kept[p] = w
		}
		if !tab.cas(p, resident, committing) {
			t.Fatalf("page %d has word %#x", p, tab.load(p))
		}
		tab.store(p, w)
	}
	leaves := map[uint64]bool{}
	for p := range kept {
		leaves[p/leafPages] = true
	}
	require.Equal(t, full, tab.heldBytes())
	tab.tidy(func() bool { return true }) // at once
	require.Equal(t, full, tab.heldBytes())
	tab.tidy(never)
	require.EqualValues(t, len(leaves), tab.leaves)
	require.LessOrEqual(t, tab.heldBytes(), held+uint64(len(leaves)+len(kept))*8*5/4+3*PageSize)
	for p := uint64(100); p < 100+n; p++ {
		want, ok := kept[p]
		if !ok {
			want = templateWord
		}
		if tab.load(p) != want {
			t.Fatalf("page %d has word %#x, should have %#x", p, tab.load(p), want)
		}
	}
	// What is being changed stays where it is.
	for p := range kept {
		require.True(t, tab.cas(p, kept[p], busy))
		tab.store(p, templateWord)
	}
	require.True(t, tab.cas(200, templateWord, busy))
	tab.tidy(never)
	require.EqualValues(t, 1, tab.leaves)
	require.Equal(t, busy, tab.load(200))
	tab.store(200, templateWord)
	tab.tidy(never)
	require.Zero(t, tab.leaves)
	require.LessOrEqual(t, tab.heldBytes(), held+3*PageSize)
	require.EqualValues(t, 16, unsafe.Sizeof(entry{}))
}

// packAll has tidy pack every leaf, as if most slabs were nearly empty.
func packAll(tab *table) {
	tab.mu.Lock()
	tab.slabs += 1 << 20
	tab.mu.Unlock()
	tab.tidy(never)
}

// TestTablePacked: packed leaves of every size have the words that whole ones had, and
// take no more than these; nothing is moved in vain.
func TestTablePacked(t *testing.T) {
	var tab table
	defer tab.close()
	tab.extend(tableChunk)
	// A leaf with each number of words, at both ends of it, half of them adopted.
	want := map[uint64]word{}
	changed := 0
	for n := range uint64(leafPages + 1) {
		first := n * leafPages
		if n%2 == 0 {
			tab.adopt(first, first+leafPages)
		}
		for i := range n {
			p := first + i
			if n%3 == 0 {
				p = first + leafPages - 1 - i
			}
			want[p] = evictedWord(codec.TagZstd, 9) | word(p)<<handleShift
			tab.store(p, want[p])
			changed++
		}
	}
	check := func() {
		t.Helper()
		for p := range uint64((leafPages + 1) * leafPages) {
			w, ok := want[p]
			if !ok {
				w = tab.entry(p).initial(p)
			}
			require.Equal(t, w, tab.load(p), "page %d", p)
			require.Equal(t, w&stateMask == resident, tab.skipResident(p, p+1) == p+1)
			require.Equal(t, isTemplate(w), tab.templatesFrom(p, p+1) == p+1)
		}
	}
	check()
	packAll(&tab)
	check()
	// A header each, but for the whole ones, and what is left of slabs.
	held := (changed + leafPages) * 8
	require.LessOrEqual(t, tab.slabs*PageSize, uint64(held+held/8+PageSize))

	leaves := func() (all []*leaf) {
		tab.eachLeaf(never, func(_ *entry, l *leaf) { all = append(all, l) })
		return all
	}
	before, slabs, free := leaves(), tab.slabs, len(tab.free)
	for range 3 {
		tab.tidy(never)
		tab.tidyInStep(never)
	}
	require.Equal(t, before, leaves())
	require.Equal(t, slabs, tab.slabs)
	require.Len(t, tab.free, free)

	// One that is stopped moves nothing and loses nothing; one that is stopped later
	// counts too many slabs rather than too few.
	tab.slabs += 100
	tab.tidy(func() bool { return true })
	require.Equal(t, before, leaves())
	require.Len(t, tab.free, free)
	tab.slabs -= 100
	check()

	// Pages that become the template's: those of words that the leaf has, and others.
	const first = 9 * leafPages // not adopted, nine words
	tab.adopt(first, first+leafPages)
	for p := uint64(first); p < first+leafPages; p++ {
		want[p] = templateWord
	}
	check()
	packAll(&tab)
	require.Nil(t, tab.entry(first).leaf.Load())
	check()

	// In a step whole leaves stay whole.
	tab.store(first, pinned)
	want[first] = pinned
	tab.slabs += 100
	tab.tidyInStep(never)
	_, packed := tab.entry(first).leaf.Load().packed()
	require.False(t, packed)
	_, packed = tab.entry(3 * leafPages).leaf.Load().packed()
	require.True(t, packed)
	check()
}

// TestTableCASIsSure: who alone changes a page's word never fails to, however much its
// leaf is grown by others and packed.
func TestTableCASIsSure(t *testing.T) {
	var tab table
	defer tab.close()
	tab.extend(tableChunk)
	tab.adopt(0, leafPages/2)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for p := range uint64(4) {
		p = p * leafPages / 4
		wg.Add(1)
		go func() {
			defer wg.Done()
			w := tab.load(p)
			for n := word(1); ; n++ {
				select {
				case <-stop:
					return
				default:
				}
				next := tab.entry(p).initial(p)
				if n%3 != 0 {
					next = evictedWord(codec.TagZstd, 0) | n<<handleShift
				}
				if !tab.cas(p, w, next) {
					t.Errorf("page %d has word %#x, should have %#x", p, tab.load(p), w)
					return
				}
				w = next
			}
		}()
	}
	for end := time.Now().Add(stressDuration()); time.Now().Before(end) && !t.Failed(); {
		packAll(&tab)
		runtime.Gosched()
	}
	close(stop)
	wg.Wait()
}

// TestTableModel does random operations on a table and on plain arrays.
func TestTableModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var tab table
		defer tab.close()
		tab.extend(2 * tableChunk)
		// Around the end of a chunk, and so of a block.
		const lo, n = tableChunk - 150, 300
		var words [n]word
		var isAdopted, marked [n]bool
		page := func() uint64 { return rapid.Uint64Range(0, n-1).Draw(t, "page") }
		part := func() (uint64, uint64) {
			first := page()
			return first, rapid.Uint64Range(first+1, n).Draw(t, "end")
		}
		anyWord := rapid.SampledFrom([]word{resident, resident | pinned, resident | tmapped, candidate, raw, templateWord, evictedWord(codec.TagZstd, 5), busy, committing})
		run := func(first, end uint64) uint64 {
			for first < end && words[first] == templateWord && isAdopted[first] {
				first++
			}
			return first
		}
		down := func(first, end uint64) uint64 {
			for end > first && words[end-1] == templateWord && isAdopted[end-1] {
				end--
			}
			return end
		}
		word := func(p uint64) word {
			w := anyWord.Draw(t, "word")
			if w == templateWord && !isAdopted[p] {
				return resident
			}
			return w
		}
		if rapid.Bool().Draw(t, "written before") {
			tab.store(lo, pinned)
			words[0] = pinned
		}
		for last := uint64(1); rapid.IntRange(0, 4).Draw(t, "adopt") != 0 && last < n; {
			first := rapid.Uint64Range(last, n-1).Draw(t, "first")
			last = rapid.Uint64Range(first+1, n).Draw(t, "last")
			tab.adopt(lo+first, lo+last)
			for p := first; p < last; p++ {
				words[p], isAdopted[p] = templateWord, true
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"": func(t *rapid.T) {
				written := map[uint64]bool{}
				for p := range uint64(n) {
					require.Equal(t, words[p], tab.load(lo+p), "page %d", p)
					initial := resident
					if isAdopted[p] {
						initial = templateWord
					}
					if words[p] != initial {
						written[(lo+p)/groupPages] = true
					}
				}
				tab.visitWritten(func(first, _ uint64) bool { delete(written, first/groupPages); return true })
				require.Empty(t, written, "groups are not visited")
			},
			"store": func(t *rapid.T) {
				p := page()
				words[p] = word(p)
				tab.store(lo+p, words[p])
			},
			"cas": func(t *rapid.T) {
				p := page()
				old, w := anyWord.Draw(t, "old"), word(p)
				if rapid.Bool().Draw(t, "is") {
					old = words[p]
				}
				require.Equal(t, old == words[p], tab.cas(lo+p, old, w))
				if old == words[p] {
					words[p] = w
				}
			},
			"skip": func(t *rapid.T) {
				first, end := part()
				want := first
				for want < end && words[want]&stateMask == resident {
					want++
				}
				require.Equal(t, lo+want, tab.skipResident(lo+first, lo+end))
			},
			"run": func(t *rapid.T) {
				first, end := part()
				require.Equal(t, lo+run(first, end), tab.templatesFrom(lo+first, lo+end))
				require.Equal(t, lo+down(first, end), tab.templatesTo(lo+end, lo+first))
			},
			"mark": func(t *rapid.T) {
				first, end := part()
				require.Equal(t, lo+run(first, end), tab.markFrom(lo+first, lo+end))
				for p := first; p < run(first, end); p++ {
					marked[p] = true
				}
				require.Equal(t, lo+down(first, end), tab.markTo(lo+end, lo+first))
				for p := down(first, end); p < end; p++ {
					marked[p] = true
				}
			},
			"take": func(t *rapid.T) {
				p := page()
				got := tab.takeMapped(lo + p)
				if marked[p] {
					require.True(t, got, "a mark is lost")
				}
				marked[p] = false
				require.False(t, tab.maybeMapped(lo+p))
			},
			"pack": func(t *rapid.T) {
				packAll(&tab)
				require.LessOrEqual(t, tab.slabs, uint64(2))
				for p := range uint64(n) {
					e := tab.entry(lo + p)
					if e == nil || e.leaf.Load() == nil {
						continue
					}
					if has, ok := e.leaf.Load().packed(); ok {
						require.Equal(t, has>>((lo+p)%leafPages)&1 != 0, words[p] != e.initial(lo+p), "page %d", p)
					}
				}
			},
			"tidy": func(t *rapid.T) {
				before := tab.heldBytes()
				tab.tidy(never)
				require.LessOrEqual(t, tab.heldBytes(), before+PageSize)
				want := map[uint64]bool{}
				for p := range uint64(n) {
					if isAdopted[p] && words[p] != templateWord || !isAdopted[p] && words[p] != resident {
						want[(lo+p)/leafPages] = true
					}
				}
				require.EqualValues(t, len(want), tab.leaves)
			},
		})
	})
}

// TestTableRaces has words changed by many while leaves are taken away and moved all
// the time. Who has made a page busy owns it: the model of a page has no lock but
// that.
func TestTableRaces(t *testing.T) {
	var tab table
	defer tab.close()
	tab.extend(tableChunk)
	const n = 8 * leafPages
	tab.adopt(n/2-5, n)
	var model [n]word
	for p := range model {
		model[p] = tab.load(uint64(p))
	}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	var changes, moves atomic.Uint64
	for range 3 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			rnd := rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64()))
			for {
				select {
				case <-stop:
					return
				default:
				}
				p := rnd.Uint64N(n)
				w := tab.load(p)
				if w == frozen {
					t.Error("a frozen word is seen")
					return
				}
				if w&stateMask == busy || !tab.cas(p, w, busy) {
					continue
				}
				if model[p] != w {
					t.Errorf("page %d has word %#x, should have %#x", p, w, model[p])
					return
				}
				switch rnd.IntN(4) {
				case 0:
					w = evictedWord(codec.TagZstd, 0) | word(rnd.Uint64N(handleMask))<<handleShift
				case 1:
					w = resident | pinned
				default:
					w = tab.entry(p).initial(p)
				}
				model[p] = w
				tab.store(p, w)
				changes.Add(1)
			}
		}()
	}
	for end := time.Now().Add(stressDuration()); time.Now().Before(end) && !t.Failed(); {
		tab.tidy(never)
		// As if slabs were sparse.
		tab.mu.Lock()
		tab.slabs += 100
		tab.mu.Unlock()
		tab.tidy(never)
		tab.mu.Lock()
		tab.slabs = tab.leaves // no longer known
		tab.mu.Unlock()
		moves.Add(1)
	}
	close(stop)
	wg.Wait()
	t.Logf("%d changes, %d times tidy", changes.Load(), moves.Load())
	for p := range model {
		require.Equal(t, model[p], tab.load(uint64(p)), "page %d", p)
	}
}

// TestTableMarkRaces has pages of the template mapped, restored, written to and
// evicted, with the locks and the order that MemoryManager has, while leaves come
// and go: nobody writes to a page that an application may still see in the template.
func TestTableMarkRaces(t *testing.T) {
	b := &Backend{}
	b.table.extend(tableChunk)
	tab := &b.table
	defer tab.close()
	const n = 4
	tab.adopt(0, n)
	var pages [n]struct {
		templateMu sync.Mutex
		mapped     bool
		_          [64]byte
	}
	var passMu sync.Mutex
	stop := make(chan struct{})
	var wg sync.WaitGroup
	var mapped, written, flagged atomic.Uint64
	loop := func(fn func(p uint64)) {
		wg.Add(1)
		go func() {
			defer wg.Done()
			rnd := rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64()))
			for !t.Failed() {
				select {
				case <-stop:
					return
				default:
					fn(rnd.Uint64N(n))
				}
				if rnd.IntN(4) == 0 {
					runtime.Gosched() // with few processors they would hardly meet
				}
			}
		}()
	}
	for range 2 {
		loop(func(p uint64) {
			pg := &pages[p]
			pg.templateMu.Lock()
			defer pg.templateMu.Unlock()
			if tab.markFrom(p, p+1) == p+1 {
				pg.mapped = true
				mapped.Add(1)
			}
		})
	}
	loop(func(p uint64) {
		// Gate, restore.
		w := tab.load(p)
		if isTemplate(w) {
			w, ok := b.claim(p)
			if !ok {
				return
			}
			b.finish(p, w)
		}
		w = tab.load(p)
		pg := &pages[p]
		if w&tmapped != 0 {
			flagged.Add(1)
			pg.templateMu.Lock()
			pg.mapped = false
			b.ClearTemplateMapped(p<<pageShift, (p+1)<<pageShift)
			pg.templateMu.Unlock()
		}
		pg.templateMu.Lock()
		if pg.mapped {
			t.Error(fmt.Sprintf("page %d is written to while it is mapped from the template; word %#x", p, tab.load(p)))
		}
		pg.templateMu.Unlock()
		written.Add(1)
		// Evict.
		passMu.Lock()
		defer passMu.Unlock()
		if !tab.cas(p, resident, committing) {
			t.Error(fmt.Sprintf("page %d has word %#x", p, tab.load(p)))
		}
		tab.store(p, templateWord)
	})
	loop(func(p uint64) {
		passMu.Lock()
		defer passMu.Unlock()
		if p == 0 {
			packAll(tab)
		} else {
			tab.tidy(never)
		}
	})
	time.Sleep(stressDuration())
	close(stop)
	wg.Wait()
	t.Logf("mapped %d times, written to %d times, %d of them marked", mapped.Load(), written.Load(), flagged.Load())
}

// TestTableAfterWait: whatever a step or a check has touched of the template, what is
// equal to it again takes no leaves once the pass is over.
func TestTableAfterWait(t *testing.T) {
	opts := DefaultOptions()
	h := newFakeHost(t, 4096, &opts)
	pmas := h.adopt(t, rand.New(rand.NewPCG(1, 1)), 2000)
	b := h.backend
	tab := &b.table
	evict := func(stop func() bool) {
		t.Helper()
		_, err := b.Evict(EvictOptions{Stop: stop})
		if stop == nil {
			require.NoError(t, err)
		} else {
			require.ErrorIs(t, err, ErrStopped)
		}
	}
	touch := func() {
		t.Helper()
		before := tab.leaves
		for _, p := range pmas {
			if p.adopted {
				require.NoError(t, b.Gate(p.Start, p.End))
			}
		}
		require.Greater(t, tab.leaves, before)
	}
	// Pages beside the template's have words of their own as soon as they were
	// evicted, and so the leaves on which they are.
	evict(nil)
	lean := tab.heldBytes()
	wantTidy := func(what string) {
		t.Helper()
		for p := uint64(0); p < tab.pages(); p += leafPages {
			e := tab.entry(p)
			if e == nil {
				p += blockPages - leafPages
			} else if l := e.leaf.Load(); l != nil && e.changed(l) == 0 {
				t.Fatalf("%s: the leaf of page %#x is left", what, p<<pageShift)
			}
		}
	}
	want := func(what string) {
		t.Helper()
		wantTidy(what)
		require.LessOrEqual(t, tab.heldBytes(), lean+2*PageSize, what)
	}
	want("evicted")
	for range 3 {
		touch()
		evict(nil)
		want("touched")
	}

	res, err := b.Check(nil)
	require.NoError(t, err)
	require.Empty(t, res.Problems)
	require.GreaterOrEqual(t, res.Stored, uint64(2000))
	want("checked")

	// There may be no eviction after one that was stopped.
	touch()
	enough := b.stats.evictedTotal.Load() + 1000
	evict(func() bool { return b.stats.evictedTotal.Load() >= enough })
	wantTidy("stopped")
	h.verifyAll(t)
	h.verifyBackend(t)
}

// TestTemplateBackedWhileRestored: a page that is marked as mapped from the template is
// reported so at every moment of its restore.
func TestTemplateBackedWhileRestored(t *testing.T) {
	b := &Backend{}
	b.table.extend(1)
	tab := &b.table
	defer tab.close()
	tab.adopt(0, 1)
	var turn, asked atomic.Uint64 // odd: to be restored, even: done
	done := make(chan struct{})
	finished := inBackground(func() {
		for {
			select {
			case <-done:
				return
			default:
			}
			n := turn.Load()
			if n%2 == 0 {
				runtime.Gosched()
				continue
			}
			w, _ := b.claim(0)
			b.finish(0, w)
			turn.Store(n + 1)
		}
	})
	for end := time.Now().Add(stressDuration()); time.Now().Before(end) && !t.Failed(); {
		if tab.markFrom(0, 1) != 1 {
			t.Fatalf("the page has word %#x", tab.load(0))
		}
		n := turn.Add(1)
		for turn.Load() == n {
			if !b.TemplateBacked(0) {
				t.Errorf("not the template's; then the word is %#x", tab.load(0))
			}
			asked.Add(1)
		}
		for turn.Load() == n {
			runtime.Gosched()
		}
		if !tab.cas(0, resident|tmapped, busy) {
			t.Fatalf("the page has word %#x", tab.load(0))
		}
		tab.store(0, templateWord)
	}
	close(done)
	<-finished
	t.Logf("restored %d times, asked %d times", turn.Load()/2, asked.Load())
}
