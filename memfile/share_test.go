package memfile

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"runsc-agentzip/memfile/codec"
	"runsc-agentzip/memfile/dedup"
	"runsc-agentzip/pkg/pool/wire"
)

// A fakePool is a pool with sandboxes of its own, which have whatever turns up in
// an offer. It counts references, and refuses to read what has none.
type fakePool struct {
	// template is that of the sandbox under test.
	template fakeTemplate

	mu      sync.Mutex
	rnd     *rand.Rand
	key     *wire.Key
	records map[PoolLoc]*fakeRecord
	index   map[wire.Hash]PoolLoc
	next    PoolLoc
	work    PoolWork
	// wanted says which pages were offered with a hash that is wanted.
	wanted map[wire.Hash][]uint32
	// full makes Publish fail, sure has every offer heard.
	full, sure bool
	// anew is set until all was offered.
	anew bool
}

type fakeRecord struct {
	b     []byte
	hash  wire.Hash
	refs  int
	stale bool
}

func newFakePool(t fakeTemplate, seed uint64) *fakePool {
	p := &fakePool{template: t, rnd: rand.New(rand.NewPCG(seed, 7)), records: map[PoolLoc]*fakeRecord{}}
	p.connect()
	return p
}

// connect begins a new connection.
func (p *fakePool) connect() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.disconnectLocked()
	p.key = new(wire.Key)
	for i := range p.key {
		p.key[i] = byte(p.rnd.Uint32())
	}
	for _, r := range p.records {
		r.stale = true
	}
	p.index = map[wire.Hash]PoolLoc{}
	p.wanted = map[wire.Hash][]uint32{}
	p.anew = true
}

func (p *fakePool) disconnect() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.disconnectLocked()
}

func (p *fakePool) disconnectLocked() {
	p.key = nil
	for _, w := range append(p.work.Published, p.work.Similar...) {
		p.records[w.Loc].refs--
	}
	p.work = PoolWork{}
}

// retire makes some records move, and others go.
func (p *fakePool) retire() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for h, l := range p.index {
		r := p.records[l]
		switch p.rnd.IntN(3) {
		case 0:
			r.stale = true
			p.index[h] = p.storeLocked(r.b, h)
		case 1:
			r.stale = true
			delete(p.index, h)
		}
	}
}

func (p *fakePool) storeLocked(b []byte, h wire.Hash) PoolLoc {
	p.next += 1 + PoolLoc(p.rnd.IntN(1000))
	p.records[p.next] = &fakeRecord{b: b, hash: h}
	return p.next
}

func (p *fakePool) Key() *wire.Key {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.key
}

func (p *fakePool) Find(key *wire.Key, h *wire.Hash, buf []byte) (PoolLoc, wire.Record, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	l, ok := p.index[*h]
	if !ok || key != p.key {
		return 0, wire.Record{}, false
	}
	if p.rnd.IntN(16) == 0 {
		// A hint that is wrong.
		for other := range p.records {
			l = other
			break
		}
	}
	rec, err := wire.ParseRecord(buf[:copy(buf, p.records[l].b)])
	if err != nil {
		return 0, wire.Record{}, false
	}
	p.records[l].refs++
	return l, rec, true
}

func (p *fakePool) Read(l PoolLoc, buf []byte) (wire.Record, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	r := p.records[l]
	if r == nil || r.refs <= 0 {
		return wire.Record{}, errors.New("read without a reference")
	}
	return wire.ParseRecord(buf[:copy(buf, r.b)])
}

func (p *fakePool) Ref(l PoolLoc) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.records[l].refs <= 0 {
		panic("reference to what may be gone")
	}
	p.records[l].refs++
}

func (p *fakePool) Unref(l PoolLoc) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.records[l].refs--; p.records[l].refs < 0 {
		panic("one reference too few")
	}
}

func (p *fakePool) Stale(l PoolLoc) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.key != nil && p.records[l].stale
}

func (p *fakePool) Offer(key *wire.Key, h *wire.Hash, page uint32) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if key != p.key || !p.sure && p.rnd.IntN(8) == 0 {
		return
	}
	if l, ok := p.index[*h]; ok {
		p.publishedLocked(*h, page, l)
		return
	}
	p.wanted[*h] = append(p.wanted[*h], page)
	p.work.Want = append(p.work.Want, wire.Page{Hash: *h, Cookie: page})
}

func (p *fakePool) Spared(int) {}

func (p *fakePool) OfferedAll(key *wire.Key) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if key == p.key {
		p.anew = false
	}
}

func (p *fakePool) Resemble(key *wire.Key, h *wire.Hash, page uint32, s *dedup.Sketch, alone bool) {
	p.Offer(key, h, page)
	p.mu.Lock()
	defer p.mu.Unlock()
	if key != p.key || s.N == 0 || s.N > dedup.Features {
		return
	}
	// Any page, mostly one that is no help.
	for l, r := range p.records {
		if p.rnd.IntN(4) == 0 {
			r.refs++
			p.work.Similar = append(p.work.Similar, PoolPlace{Hash: r.hash, Page: page, Loc: l})
			return
		}
	}
}

// publishedLocked tells where a page is, sometimes wrongly.
func (p *fakePool) publishedLocked(h wire.Hash, page uint32, l PoolLoc) {
	if p.rnd.IntN(8) == 0 {
		page = p.rnd.Uint32N(1 << 19)
	}
	p.records[l].refs++
	p.work.Published = append(p.work.Published, PoolPlace{Hash: h, Page: page, Loc: l})
}

func (p *fakePool) Work() PoolWork {
	p.mu.Lock()
	defer p.mu.Unlock()
	w := p.work
	w.Key = p.key
	w.Anew = p.key != nil && p.anew
	p.work = PoolWork{}
	for _, r := range p.records {
		w.Stale = w.Stale || p.key != nil && r.stale && r.refs > 0
	}
	return w
}

func (p *fakePool) Publish(key *wire.Key, h *wire.Hash, page, tpl uint32, data *codec.Page) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.full || key != p.key {
		return false
	}
	if wire.NewHasher(key).Sum(data) != *h {
		panic("published another page")
	}
	in := codec.Input{Page: data, Tier: codec.Tier(p.rnd.IntN(4))}
	if tpl != wire.NoPage {
		in.Base = new(codec.Page)
		_ = p.template.ReadPages(in.Base[:], uint64(tpl))
	}
	dst := make([]byte, codec.MaxEncoded)
	tag, n, _ := codec.NewEncoder().Encode(dst, in)
	if n == 0 {
		return true
	}
	rec := wire.Record{Hash: *h, Sum: codec.Sum(data), Tag: tag, HasBase: hasBase(tag), Enc: dst[:n]}
	if rec.HasBase {
		rec.Base = tpl
	}
	b := make([]byte, rec.Size())
	rec.Put(b)
	l := p.storeLocked(b, *h)
	p.index[*h] = l
	for _, c := range p.wanted[*h] {
		p.publishedLocked(*h, c, l)
	}
	delete(p.wanted, *h)
	return true
}

func (p *fakePool) Flush() {}

func (p *fakePool) Sharing() (wire.Sharing, uint64) {
	return wire.Sharing{Pages: 1000, Overhead: 24}, 7
}

// verify compares the references that the pool counts with those that there are.
func (p *fakePool) verify(tb tester, b *Backend) {
	tb.Helper()
	refs := map[PoolLoc]int{}
	b.table.visit(func(first, end uint64) bool {
		for q := first; q < end; q++ {
			w := b.table.load(q)
			if w&stateMask != evicted || handleOf(w) == 0 {
				continue
			}
			s, err := b.parse(handleOf(w))
			if err != nil {
				tb.Errorf("page %#x: %v", q<<pageShift, err)
				continue
			}
			if s.base.kind == basePool {
				refs[PoolLoc(s.base.n)]++
			}
		}
		return true
	})
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, w := range append(p.work.Published, p.work.Similar...) {
		refs[w.Loc]++
	}
	for l, r := range p.records {
		if r.refs != refs[l] {
			tb.Errorf("the pool counts %d references to %#x, there are %d", r.refs, l, refs[l])
		}
	}
}

// shared returns a fixture whose n pages of text are all in the pool.
func shared(tb tester, n uint64, opts Options) (*fixture, *fakePool) {
	tb.Helper()
	f := newFixture(tb, n, opts)
	p := newFakePool(nil, 1)
	f.b.SetPool(p)
	f.kinds(kindText)
	for range 50 {
		f.evict(tb)
		if _, err := f.b.Deepen(nil); err != nil {
			tb.Fatal(err)
		}
		if _, err := f.b.Share(nil); err != nil {
			tb.Fatal(err)
		}
		p.verify(tb, f.b)
		if f.b.stats.form(codec.TagPool).Load() == int64(n) {
			return f, p
		}
		f.gateAll(tb)
	}
	tb.Fatalf("only %d of %d pages are in the pool", f.b.stats.form(codec.TagPool).Load(), n)
	return nil, nil
}

// gateAll restores all pages and makes them forget how they were stored.
func (f *fixture) gateAll(tb tester) {
	tb.Helper()
	f.r.pages(func(p uint64) { f.gateOne(tb, p) })
	f.dropKept()
}

func TestShared(t *testing.T) {
	f, p := shared(t, 32, DefaultOptions())
	f.verifyBackend(t)
	s := f.b.Stats()
	require.EqualValues(t, 32, s.Pages.Pool)
	require.EqualValues(t, 1024, s.PoolShareBytes)
	require.NotZero(t, s.Stages["pool"].Wins)

	// Nothing is left to make smaller.
	n, err := f.b.Deepen(nil)
	require.NoError(t, err)
	require.Zero(t, n)

	// Pages that come and go keep their references straight.
	f.gateAll(t)
	p.verify(t, f.b)
	f.evict(t)
	require.NotZero(t, f.b.stats.form(codec.TagPool).Load())
	p.verify(t, f.b)
	f.gateAll(t)
}

// TestSharedAlone has pages that nobody else has taken, though the pool has them: they
// are stored here again, and not offered.
func TestSharedAlone(t *testing.T) {
	f, p := shared(t, 32, DefaultOptions())
	p.mu.Lock()
	for _, r := range p.records {
		r.stale = true
	}
	p.wanted = map[wire.Hash][]uint32{}
	p.rnd = rand.New(rand.NewPCG(1, 1))
	p.mu.Unlock()
	for f.b.stats.form(codec.TagPool).Load() != 0 {
		p.work.Stale = true
		_, err := f.b.Share(nil)
		require.NoError(t, err)
		require.True(t, f.b.StalePages())
		_, err = f.b.Deepen(nil)
		require.NoError(t, err)
		require.False(t, f.b.StalePages())
		p.verify(t, f.b)
	}
	for _, r := range p.records {
		require.Zero(t, r.refs)
	}
	require.Empty(t, p.wanted)
	f.gateAll(t)
}

// A page as short as a reference is not offered, and what is stored relative to another
// page is not given to be a base.
func TestNotOffered(t *testing.T) {
	f := newFixture(t, 32, DefaultOptions())
	p := newFakePool(nil, 1)
	f.b.SetPool(p)
	f.kinds(kindFill)
	f.evict(t)
	_, err := f.b.Deepen(nil)
	require.NoError(t, err)
	require.Empty(t, p.wanted)
	require.Empty(t, p.work.Want)
	f.gateAll(t)

	f.kinds(kindText)
	f.evict(t)
	_, err = f.b.Deepen(nil)
	require.NoError(t, err)
	s := &pooled{}
	require.True(t, s.prepare(p))
	roots, others := 0, 0
	f.r.pages(func(q uint64) {
		w, blob := f.storedOf(t, q)
		content := new(codec.Page)
		require.NoError(t, f.b.load(new(restorer), content, q, w))
		want := wire.Page{Hash: s.hasher.Sum(content), Cookie: uint32(q), Base: true}
		p.mu.Lock()
		p.wanted[want.Hash] = []uint32{uint32(q)}
		p.mu.Unlock()
		ok := f.b.publish(s, new(restorer), want)
		require.Equal(t, mayBeRoot(blob.head.tag()), ok, "%v", blob.head.tag())
		if ok {
			roots++
		} else {
			others++
		}
	})
	require.NotZero(t, roots)
	require.NotZero(t, others)
}

// anewFixture is a sandbox of three groups that has deepened its pages without a pool.
// One page in three is short.
func anewFixture(t *testing.T) (f *fixture, p *fakePool, verify func()) {
	f = newFixture(t, 3*groupPages, DefaultOptions())
	p = newFakePool(nil, 1)
	p.sure, p.full = true, true
	contents := map[uint64]codec.Page{}
	f.r.pages(func(q uint64) {
		size := 1000
		if q%3 == 0 {
			size = 100
		}
		var c codec.Page
		for i := range size {
			c[i] = byte(p.rnd.Uint32())
		}
		copy(f.page(q), c[:])
		contents[q] = c
	})
	verify = func() {
		p.verify(t, f.b)
		f.verifyBackend(t)
		f.r.pages(func(q uint64) {
			require.NoError(t, f.b.Gate(q<<pageShift, (q+1)<<pageShift))
			require.True(t, contents[q] == codec.Page(f.page(q)), "page %d", q)
		})
	}
	f.evict(t)
	_, err := f.b.Deepen(nil)
	require.NoError(t, err)
	return f, p, verify
}

// offered returns the pages that were offered since, by their numbers, and forgets them.
func (p *fakePool) offered() map[uint64]wire.Hash {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := map[uint64]wire.Hash{}
	for h, pages := range p.wanted {
		for _, q := range pages {
			all[uint64(q)] = h
		}
	}
	p.work.Want, p.wanted = nil, map[wire.Hash][]uint32{}
	return all
}

// worthOffering returns the pages that are stored in more than offerMin bytes.
func (f *fixture) worthOffering(t *testing.T, p *fakePool) map[uint64]wire.Hash {
	s := &pooled{}
	require.True(t, s.prepare(p))
	all := map[uint64]wire.Hash{}
	f.r.pages(func(q uint64) {
		if w := f.b.table.load(q); w&stateMask != evicted || handleOf(w) == 0 {
			return
		}
		w, blob := f.storedOf(t, q)
		if len(blob.enc)+blob.base.size() > offerMin {
			content := new(codec.Page)
			require.NoError(t, f.b.load(new(restorer), content, q, w))
			all[q] = s.hasher.Sum(content)
		}
	})
	require.Greater(t, len(all), groupPages)
	return all
}

// TestOfferedAnew: a pool is offered, once, all that was deepened before it came, and the
// next one all that is stored.
func TestOfferedAnew(t *testing.T) {
	f, p, verify := anewFixture(t)
	share := func() {
		_, err := f.b.Share(nil)
		require.NoError(t, err)
	}
	f.b.SetPool(p)
	want := f.worthOffering(t, p)
	share()
	require.Equal(t, want, p.offered())
	require.False(t, p.anew)
	share()
	require.Empty(t, p.offered())

	// What is not deepened is left to the deepening.
	p.anew, f.b.anew = true, anew{}
	changed := 0
	f.r.pages(func(q uint64) {
		if q%5 == 0 {
			require.NoError(t, f.b.Gate(q<<pageShift, (q+1)<<pageShift))
			changed++
		}
	})
	f.dropKept()
	f.evict(t)
	p.offered()
	undeepened := f.worthOffering(t, p)
	for q := range undeepened {
		if f.b.table.load(q)&deep != 0 {
			delete(undeepened, q)
		}
	}
	require.NotEmpty(t, undeepened)
	want = f.worthOffering(t, p)
	for q := range undeepened {
		delete(want, q)
	}
	share()
	require.Equal(t, want, p.offered())

	// Another pool is offered all, whether it is deepened or not, and what an eviction
	// has found as it was.
	p.disconnect()
	share()
	f.r.pages(func(q uint64) {
		if q%7 == 0 {
			require.NoError(t, f.b.Gate(q<<pageShift, (q+1)<<pageShift))
		}
	})
	p.connect()
	reused := f.b.Stats().Stages["kept"].Wins
	f.evict(t)
	require.Greater(t, f.b.Stats().Stages["kept"].Wins, reused)
	p.offered()
	want = f.worthOffering(t, p)
	require.Contains(t, want, firstOf(undeepened))
	share()
	require.Equal(t, want, p.offered())
	verify()
}

func firstOf(m map[uint64]wire.Hash) uint64 {
	for q := range m {
		return q
	}
	return 0
}

// TestOfferedAnewInterrupted: an offering that the guest interrupts goes on where it
// was, and one for a pool that has gone begins again for the next.
func TestOfferedAnewInterrupted(t *testing.T) {
	f, p, verify := anewFixture(t)
	f.b.SetPool(p)
	part := func() error {
		n := 0
		_, err := f.b.Share(func() bool { n++; return n > 40 })
		return err
	}
	all := func() {
		got, rounds, want := map[uint64]wire.Hash{}, 0, f.worthOffering(t, p)
		for done := false; !done; rounds++ {
			err := part()
			for q, h := range p.offered() {
				require.NotContains(t, got, q, "offered twice")
				got[q] = h
			}
			// What comes after it may be stopped, too.
			done = !p.anew
			if err != nil {
				require.ErrorIs(t, err, ErrStopped)
			}
			require.True(t, done || err != nil)
			require.Less(t, rounds, 1000)
		}
		require.Greater(t, rounds, 3)
		require.Equal(t, want, got)
		require.False(t, p.anew)
	}
	require.ErrorIs(t, part(), ErrStopped)
	require.NotEmpty(t, p.offered())
	p.connect()
	all()
	verify()
}

// TestOfferedAnewFound: what a pool has already is taken at once, and what it has wrongly
// is not.
func TestOfferedAnewFound(t *testing.T) {
	f, p, verify := anewFixture(t)
	p.full = false
	all := f.worthOffering(t, p)
	for q, h := range all {
		content := new(codec.Page)
		w, _ := f.storedOf(t, q)
		require.NoError(t, f.b.load(new(restorer), content, q, w))
		require.True(t, p.Publish(p.Key(), &h, uint32(q), wire.NoPage, content))
	}
	f.b.SetPool(p)
	n, err := f.b.Share(nil)
	require.NoError(t, err)
	require.Less(t, n, uint64(len(all))) // it gives wrong hints
	require.Greater(t, n, uint64(len(all)*3/4))
	require.EqualValues(t, n, f.b.stats.form(codec.TagPool).Load())
	require.Empty(t, p.offered())
	verify()
}

// TestSharedPageThatOthersGiveUp has pages that the pool moves and then forgets.
func TestSharedPageThatOthersGiveUp(t *testing.T) {
	f, p := shared(t, 32, DefaultOptions())
	p.connect()
	p.full = true // nobody else has them
	_, err := f.b.Share(nil)
	require.NoError(t, err)
	require.True(t, f.b.StalePages())
	require.EqualValues(t, 32, f.b.stats.form(codec.TagPool).Load())

	left := 5
	_, err = f.b.Deepen(func() bool { left--; return left < 0 })
	require.ErrorIs(t, err, ErrStopped)
	require.True(t, f.b.StalePages())
	p.verify(t, f.b)
	_, err = f.b.Deepen(nil)
	require.NoError(t, err)
	require.False(t, f.b.StalePages())
	require.Zero(t, f.b.stats.form(codec.TagPool).Load())
	p.verify(t, f.b)
	f.verifyBackend(t)
	f.gateAll(t)
}

func TestSharedPagesOutliveThePool(t *testing.T) {
	f, p := shared(t, 32, DefaultOptions())
	p.disconnect()
	n, err := f.b.Share(nil)
	require.NoError(t, err)
	require.Zero(t, n)
	f.verifyBackend(t)
	f.gateAll(t)
	f.evict(t) // alone
	require.Zero(t, f.b.stats.form(codec.TagPool).Load())
	p.verify(t, f.b)

	f, p = shared(t, 32, DefaultOptions())
	p.connect() // it has nothing, and gets everything back
	for range 50 {
		_, err := f.b.Share(nil)
		require.NoError(t, err)
		p.verify(t, f.b)
	}
	for _, r := range p.records {
		require.True(t, !r.stale || r.refs == 0)
	}
	require.EqualValues(t, 32, f.b.stats.form(codec.TagPool).Load())
	f.verifyBackend(t)
	f.gateAll(t)
}

// TestEveryBitOfTheRecord changes what the pool has of a page.
func TestEveryBitOfTheRecord(t *testing.T) {
	f, p := shared(t, 1, DefaultOptions())
	_, s := f.storedOf(t, f.first)
	rec := p.records[PoolLoc(s.base.n)]
	for i := range len(rec.b) * 8 {
		if i/8 < wire.HashSize+8 || i/8 >= 28 && i/8 < 32 {
			continue // the hash and the sum are the pool's own business, as is a base that is not used
		}
		rec.b[i/8] ^= 1 << (i % 8)
		var page codec.Page
		r := new(restorer)
		w := f.b.table.load(f.first)
		err := f.b.load(r, &page, f.first, w)
		var want codec.Page
		content(want[:], f.model[f.first-f.lo].is)
		if err == nil {
			require.Equal(t, want, page, "bit %d", i) // behind the page, or in what decodes to the same
		}
		rec.b[i/8] ^= 1 << (i % 8)
	}
	rec.refs--
	require.Contains(t, fmt.Sprint(mustPanic(func() { _ = f.b.Gate(f.r.Start, f.r.End) })), "without a reference")
	rec.refs++
	// The page is lost to the panic, not the reference.
}

func mustPanic(fn func()) (v any) {
	defer func() { v = recover() }()
	fn()
	return nil
}

// poolActions are what a pool may do in TestEvictionIsInvisible.
func (p *fakePool) actions(b *Backend) map[string]func(*rapid.T) {
	return map[string]func(*rapid.T){
		"share": func(t *rapid.T) {
			if _, err := b.Share(nil); err != nil {
				t.Fatal(err)
			}
		},
		"share interrupted": func(t *rapid.T) {
			left := rapid.IntRange(0, 20).Draw(t, "left")
			_, _ = b.Share(func() bool { left--; return left < 0 })
		},
		"pool retires":     func(t *rapid.T) { p.retire() },
		"pool ends":        func(t *rapid.T) { p.disconnect() },
		"pool comes back":  func(t *rapid.T) { p.connect() },
		"pool is full":     func(t *rapid.T) { p.mu.Lock(); p.full = true; p.mu.Unlock() },
		"pool is not full": func(t *rapid.T) { p.mu.Lock(); p.full = false; p.mu.Unlock() },
	}
}

// TestSimilar has pages that resemble those of the pool.
func TestSimilar(t *testing.T) {
	f, p := shared(t, 32, DefaultOptions())
	f.gateAll(t)
	f.r.pages(func(q uint64) {
		n := uint32(1000)
		for v := (version{q, n}); n%3 == 0 || v.hash()>>32%uint64(len(bases)) != kindText; v = (version{q, n}) {
			n++
		}
		f.set(q, version{q, n})
	})
	p.full = true // no twins
	similar := func() (n int) {
		f.r.pages(func(q uint64) {
			if w, s := f.storedOf(t, q); s.base.kind == basePool {
				require.True(t, hasBase(tagOf(w)))
				n++
			}
		})
		return n
	}
	f.evict(t)
	for range 50 {
		_, err := f.b.Share(nil)
		require.NoError(t, err)
		p.verify(t, f.b)
		f.r.pages(func(q uint64) {
			w := f.b.table.load(q)
			if _, s := f.storedOf(t, q); s.base.kind != basePool {
				b := new(codec.Page)
				require.NoError(t, f.b.load(new(restorer), b, q, w))
				var sk dedup.Sketch
				sk.Make(b)
				h := wire.NewHasher(p.key).Sum(b)
				p.Resemble(p.key, &h, uint32(q), &sk, true)
			}
		})
	}
	require.Equal(t, 32, similar())
	require.NotZero(t, f.b.Stats().Stages["search-pool"].Wins)
	f.verifyBackend(t)

	// They stay as they are, and follow their bases.
	n, err := f.b.Deepen(nil)
	require.NoError(t, err)
	require.Zero(t, n)
	for range 10 {
		p.retire()
		_, err := f.b.Share(nil)
		require.NoError(t, err)
		p.verify(t, f.b)
		f.verifyBackend(t)
	}

	// Without their bases they do without.
	p.connect()
	_, err = f.b.Share(nil)
	require.NoError(t, err)
	require.Equal(t, 32, similar())
	_, err = f.b.Deepen(nil)
	require.NoError(t, err)
	require.Zero(t, similar())
	p.verify(t, f.b)
	f.verifyBackend(t)
	f.gateAll(t)
	p.verify(t, f.b)
}
