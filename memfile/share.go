package memfile

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"runsc-agentzip/memfile/codec"
	"runsc-agentzip/memfile/dedup"
	"runsc-agentzip/pkg/pool/wire"
)

// poolMin is the length up to which an encoded page is not worth sharing: a page
// of the pool costs its owner a blob of 32 bytes and some 20 bytes of the
// client's, the pool 32 bytes of header and its part of the index, and looking it
// up 3 us.
const poolMin = 128

// offerMin is the length up to which an encoded page is not offered: as long as
// nobody else has it, the pool remembers it for nothing, in 26 bytes, and two that
// share a page of that length have some 50 bytes less each. (Of the pages of four
// clones that worked on one Python project, 1 % of those longer than 64 bytes had a
// twin, of the shorter ones 17 %.)
//
// similarMin is the length from which on a page is offered with its sketch, and
// similarMinBase the same for pages that are stored relative to another already:
// what siblings have done to that page has rarely enough in common.
const (
	offerMin       = 256
	similarMin     = 384
	similarMinBase = 1536
)

// A poolRef is the pool, if there is one.
type poolRef struct{ p atomic.Pointer[Pool] }

// Load returns the pool or nil.
func (r *poolRef) Load() Pool {
	if p := r.p.Load(); p != nil {
		return *p
	}
	return nil
}

// SetPool gives the Backend the pool to share pages with. Later calls have no
// effect.
func (b *Backend) SetPool(p Pool) {
	b.pool.p.CompareAndSwap(nil, &p)
}

// HasPool tells whether a pool was set.
func (b *Backend) HasPool() bool { return b.pool.Load() != nil }

// pooled is what a worker needs to look pages up in the pool.
type pooled struct {
	pool   Pool
	key    *wire.Key
	hasher *wire.Hasher
	hash   wire.Hash

	dec    codec.Decoder
	base   codec.Page
	page   codec.Page
	record [wire.MaxRecord]byte
	sketch dedup.Sketch
	count  codec.Count
}

// offer offers a page that is stored in size bytes, with the tag.
func (s *pooled) offer(h *wire.Hash, content *codec.Page, page uint64, size int, tag codec.Tag) {
	least := similarMin
	if !mayBeRoot(tag) {
		least = similarMinBase
	}
	if size <= least {
		s.pool.Offer(s.key, h, uint32(page))
		return
	}
	s.sketch.Make(content)
	s.pool.Resemble(s.key, h, uint32(page), &s.sketch, mayBeRoot(tag))
}

// prepare returns whether there is a pool to ask.
func (s *pooled) prepare(p Pool) bool {
	if p == nil {
		return false
	}
	key := p.Key()
	if key == nil {
		return false
	}
	if key != s.key {
		s.hasher = wire.NewHasher(key)
	}
	s.pool, s.key = p, key
	return true
}

// An eviction asks the pool for every page as long as one in lookupRatio is found:
// asking takes 3 us, compressing three to ten times that. Otherwise it asks for one
// in lookupSample, to find out when that changes, and leaves the others to the
// deepening: most pages that are evicted are wanted back by the next step, so it
// does not pay to spend much on them.
const (
	lookupRatio  = 16
	lookupSample = 8
)

// lookups decides which pages an eviction asks for.
type lookups struct {
	n atomic.Uint32
	// found is the share of pages found of late, in 1/65536.
	found atomic.Uint32
}

func (l *lookups) due() bool {
	return l.found.Load() >= 65536/lookupRatio || l.n.Add(1)%lookupSample == 0
}

// note counts a lookup. Two that race count as one, which is as good.
func (l *lookups) note(found bool) {
	const decay = 64
	f := l.found.Load()
	f -= f / decay
	if found {
		f += 65536 / decay
	}
	l.found.Store(f)
}

// shareEvicted is for an eviction: it returns the word for a page that the pool
// has, or else its hash if the page may be worth offering. The hash is valid
// until the next call.
func (b *Backend) shareEvicted(e *encoder, in *codec.Input, page uint64) (*wire.Hash, word) {
	s := &e.pooled
	p := b.pool.Load()
	if p == nil || page >= 1<<32 || codec.IsZero(in.Page) || !s.prepare(p) {
		return nil, 0
	}
	if in.Base != nil {
		if n := e.enc.EncodeDelta(e.out[:], in.Page, in.Base, poolMin); n >= 0 {
			if h, err := b.put(codec.Sum(in.Page), page, codec.TagWordDelta, baseRef{}, e.out[:n]); err == nil {
				return nil, evictedWord(codec.TagWordDelta, h)
			}
			return nil, 0
		}
	}
	if !b.lookups.due() {
		return nil, 0
	}
	s.hash = s.hasher.Sum(in.Page)
	s.count.Tries++
	l, rec, ok := p.Find(s.key, &s.hash, s.record[:])
	b.lookups.note(ok)
	if !ok {
		s.count.Rejects++
		return &s.hash, 0
	}
	if w := b.shareAt(s, in.Page, page, l, &rec); w != 0 {
		return nil, w
	}
	s.count.Rejects++
	return nil, 0
}

// shareDeepened is for a deepening: it returns the word for a page that the pool
// has, or else its hash if the page, which is stored in size bytes, may be worth
// offering once it is in the smallest form. The hash is valid until the next call.
func (b *Backend) shareDeepened(e *encoder, content *codec.Page, page uint64, size int) (*wire.Hash, word) {
	s := &e.pooled
	p := b.pool.Load()
	if p == nil || size <= offerMin || page >= 1<<32 || !s.prepare(p) {
		return nil, 0
	}
	s.hash = s.hasher.Sum(content)
	s.count.Tries++
	l, rec, ok := p.Find(s.key, &s.hash, s.record[:])
	if ok {
		if w := b.shareAt(s, content, page, l, &rec); w != 0 {
			b.stats.form(codec.TagPool).Add(1)
			return nil, w
		}
	}
	s.count.Rejects++
	if ok {
		return nil, 0
	}
	return &s.hash, 0
}

// shareAt returns the word for a page with the content if that is what rec, the
// record at l, decodes to, and 0 otherwise. It uses up the caller's reference to
// l.
func (b *Backend) shareAt(s *pooled, content *codec.Page, page uint64, l PoolLoc, rec *wire.Record) word {
	if b.decodeRecord(&s.dec, &s.page, &s.base, rec) == nil && s.page == *content {
		h, err := b.put(codec.Sum(content), page, codec.TagPool, baseRef{basePool, uint64(l)}, nil)
		if err == nil {
			s.count.Wins++
			s.count.Bytes += uint64(len(rec.Enc))
			return evictedWord(codec.TagPool, h) | deep
		}
	}
	s.pool.Unref(l)
	return 0
}

// decodeRecord decodes a page of the pool; base is room for its base.
func (b *Backend) decodeRecord(dec *codec.Decoder, dst, base *codec.Page, rec *wire.Record) error {
	if !rec.HasBase {
		base = nil
	} else if err := b.readTemplatePage(base, uint64(rec.Base)); err != nil {
		return err
	}
	return dec.Decode(dst, rec.Tag, rec.Enc, base)
}

// loadShared decodes a page of the pool into dst and verifies it.
func (b *Backend) loadShared(r *restorer, dst *codec.Page, s *stored) error {
	p := b.pool.Load()
	if p == nil {
		return errors.New("there is no pool")
	}
	rec, err := p.Read(PoolLoc(s.base.n), r.record[:])
	if err != nil {
		return fmt.Errorf("the pool's page at %#x: %w", s.base.n, err)
	}
	r.root = 0 // its page may be in r.base
	if err := b.decodeRecord(&r.dec, dst, &r.base, &rec); err != nil {
		return fmt.Errorf("the pool's page at %#x: %w", s.base.n, err)
	}
	if got := codec.Sum(dst); got != s.sum {
		return fmt.Errorf("the pool's page at %#x: checksum mismatch: stored %#016x, decoded %#016x", s.base.n, s.sum, got)
	}
	return nil
}

// Share does what the pool asks for: it gives it pages that other sandboxes have
// too, and replaces what is stored here of pages that the pool has. It returns
// how many pages it published or replaced.
func (b *Backend) Share(stop func() bool) (n uint64, err error) {
	b.passMu.Lock()
	defer b.passMu.Unlock()
	stop = b.stopFunc(stop)
	if err := b.passError(stop); err != nil {
		return 0, err
	}
	p := b.pool.Load()
	if p == nil {
		return 0, nil
	}
	if n, err = b.doWork(p, stop); err == nil && n >= packShared {
		err = b.pack(stop)
	}
	p.Flush()
	return n, err
}

// packShared is how many pages have to be replaced for the blobs that are left to be
// moved together. Each time takes a look at all slabs.
const packShared = 32

// doWork is Share for the caller, who holds passMu.
func (b *Backend) doWork(p Pool, stop func() bool) (n uint64, err error) {
	e := b.encoders.Get().(*encoder)
	defer b.putEncoder(e)
	// Not acquireRestorer: accesses should not have one less meanwhile.
	r := b.restorers.Get().(*restorer)
	defer b.restorers.Put(r)
	s := &e.pooled
	for {
		work := p.Work()
		some := len(work.Want)+len(work.Published)+len(work.Similar) != 0
		if !some && !work.Stale && !work.Anew {
			return n, nil
		}
		for _, w := range work.Published {
			// All of them: each has a reference to give up.
			if b.passError(stop) != nil || !s.prepare(p) || !b.shareStored(s, r, w) {
				p.Unref(w.Loc)
				continue
			}
			n++
		}
		for _, w := range work.Similar {
			if b.passError(stop) == nil && s.prepare(p) && b.storeSimilar(e, r, w) {
				n++
			}
			p.Unref(w.Loc)
		}
		for i, w := range work.Want {
			if err := b.passError(stop); err != nil {
				return n, err
			}
			if s.prepare(p) && s.key == work.Key && b.publish(s, r, w) {
				n++
			}
			if i%64 == 63 {
				p.Flush()
			}
		}
		if work.Anew && s.prepare(p) {
			k, err := b.offerAnew(s, r, stop)
			n += k
			p.Flush()
			if err != nil {
				return n, err
			}
		}
		if work.Stale && s.prepare(p) {
			k, err := b.shareStale(s, r, stop)
			n += k
			if err != nil {
				return n, err
			}
			if !some {
				return n, nil // what is still stale has been offered
			}
		}
		if err := b.passError(stop); err != nil {
			return n, err
		}
	}
}

// anewPart is how many pages are looked at for each PoolWork.Anew, 10 us each: about
// as many offers as the pool's socket takes at once.
const anewPart = 256

// anew is how far a pool was offered what is stored.
type anew struct {
	// key is that of the pool. replaced is set if it is not the first one.
	key      *wire.Key
	replaced bool
	// next is the page to go on with.
	next uint64
}

// offerAnew offers the next pages that are stored to a pool that may not have been
// offered them. When an earlier pool has gone all are offered: siblings that wait may
// not deepen anything for long. A first pool is left to the deepening for what is not
// deepened yet, which makes many pages too short for being offered. It returns how many
// pages the pool had.
func (b *Backend) offerAnew(s *pooled, r *restorer, stop func() bool) (n uint64, err error) {
	a := &b.anew
	if a.key != s.key {
		*a = anew{key: s.key, replaced: a.key != nil}
	}
	left, more := anewPart, false
	b.table.visitWritten(func(first, end uint64) bool {
		if err = b.passError(stop); err != nil {
			a.next, more = max(first, a.next), true
			return false
		}
		for p := max(first, a.next); p < min(end, 1<<32); p++ {
			w := b.table.load(p)
			if w&stateMask != evicted || handleOf(w) == 0 || tagOf(w) == codec.TagPool || w&deep == 0 && !a.replaced {
				continue
			}
			if err = b.passError(stop); err != nil || left == 0 {
				a.next, more = p, true
				return false
			}
			left--
			if b.offerStored(s, r, p) {
				n++
			}
		}
		return true
	})
	if !more {
		a.next = 1 << 32
		s.pool.OfferedAll(a.key)
	}
	return n, err
}

// offerStored offers a page as it is stored, if that is long enough, or replaces it and
// returns true if the pool has it.
func (b *Backend) offerStored(s *pooled, r *restorer, page uint64) bool {
	w, ok := b.claim(page)
	if !ok {
		return false
	}
	var old stored
	size := 0
	if handleOf(w) != 0 && tagOf(w) != codec.TagPool {
		if s, err := b.parse(handleOf(w)); err == nil {
			old, size = s, len(s.enc)+s.base.size()
		}
	}
	content := (*codec.Page)(r.buf[:])
	if size <= offerMin || b.load(r, content, page, w) != nil {
		// What cannot be read ends the sandbox when it is needed.
		b.unclaim(page, w)
		return false
	}
	based := old.base.kind == basePool
	s.hash = s.hasher.Sum(content)
	s.count.Tries++
	l, rec, ok := s.pool.Find(s.key, &s.hash, s.record[:])
	neww := word(0)
	if ok {
		neww = b.shareAt(s, content, page, l, &rec)
	}
	if neww == 0 {
		s.count.Rejects++
	}
	b.replace(page, w, neww) // content is a copy
	if ok {
		return neww != 0
	}
	if w&deep == 0 || based {
		// The deepening looks for a base, or it has one.
		s.pool.Offer(s.key, &s.hash, uint32(page))
	} else {
		s.offer(&s.hash, content, page, size, tagOf(w))
	}
	return false
}

// claimStored makes a page busy if it has a blob, and decodes it.
func (b *Backend) claimStored(r *restorer, page uint64) (word, *codec.Page, bool) {
	if page >= b.table.pages() {
		return 0, nil, false
	}
	w, ok := b.claim(page)
	if !ok {
		return 0, nil, false
	}
	content := (*codec.Page)(r.buf[:])
	if handleOf(w) == 0 || b.load(r, content, page, w) != nil {
		// What cannot be read ends the sandbox when it is needed.
		b.unclaim(page, w)
		return 0, nil, false
	}
	return w, content, true
}

// publish gives the pool a page, if it is still what was offered.
func (b *Backend) publish(s *pooled, r *restorer, w wire.Page) bool {
	page := uint64(w.Cookie)
	word, content, ok := b.claimStored(r, page)
	if !ok {
		return false
	}
	b.unclaim(page, word) // content is a copy
	if w.Base && !mayBeRoot(tagOf(word)) || s.hasher.Sum(content) != w.Hash {
		return false
	}
	tpl := wire.NoPage
	if x, ok := b.extentOf(page); ok {
		tpl = uint32(x.tpl + page - x.page)
	}
	return s.pool.Publish(s.key, &w.Hash, w.Cookie, tpl, content)
}

// shareStored replaces what is stored of a page by a reference to the pool, if
// the pool has the same. If it returns false, the caller still has its reference.
func (b *Backend) shareStored(s *pooled, r *restorer, at PoolPlace) bool {
	page := uint64(at.Page)
	w, content, ok := b.claimStored(r, page)
	if !ok {
		return false
	}
	neww := word(0)
	if tagOf(w) != codec.TagPool || b.staleBlob(w) {
		s.count.Tries++
		if rec, err := s.pool.Read(at.Loc, s.record[:]); err == nil {
			s.pool.Ref(at.Loc)
			neww = b.shareAt(s, content, page, at.Loc, &rec)
		}
		if neww == 0 {
			s.count.Rejects++
		}
	}
	b.replace(page, w, neww)
	if neww != 0 {
		s.pool.Unref(at.Loc) // the caller's
	}
	return neww != 0
}

// storeSimilar stores a page relative to a page of the pool that resembles it, if
// that is much shorter. The caller keeps its reference.
func (b *Backend) storeSimilar(e *encoder, r *restorer, at PoolPlace) bool {
	s := &e.pooled
	page := uint64(at.Page)
	w, content, ok := b.claimStored(r, page)
	if !ok {
		return false
	}
	old, err := b.parse(handleOf(w))
	neww := word(0)
	if err == nil && tagOf(w) != codec.TagPool && old.base.kind != basePool && b.loadPoolBase(&s.dec, &s.page, at.Loc, s.record[:]) == nil {
		// As for bases of this sandbox's own.
		limit := (len(old.enc)+old.base.size())*15/16 - blobBase
		start := time.Now()
		tag, n := e.enc.EncodeAgainst(e.alt, content, &s.page, limit)
		b.stats.stages[stagePool].tried(n, time.Since(start))
		if tag != codec.TagInvalid {
			if h, err := b.put(codec.Sum(content), page, tag, baseRef{basePool, uint64(at.Loc)}, e.alt[:n]); err == nil {
				s.pool.Ref(at.Loc)
				b.stats.stages[stagePool].won(n)
				s.pool.Spared(len(old.enc) + old.base.size() - n - blobBase)
				neww = evictedWord(tag, h) | deep
			}
		}
	}
	b.replace(page, w, neww)
	return neww != 0
}

// loadPoolBase decodes a page of the pool that others are relative to: it has no
// base itself.
func (b *Backend) loadPoolBase(dec *codec.Decoder, dst *codec.Page, l PoolLoc, buf []byte) error {
	p := b.pool.Load()
	if p == nil {
		return errors.New("there is no pool")
	}
	rec, err := p.Read(l, buf)
	if err == nil && rec.HasBase {
		err = errors.New("it depends on another")
	}
	if err == nil {
		err = dec.Decode(dst, rec.Tag, rec.Enc, nil)
	}
	if err == nil && codec.Sum(dst) != rec.Sum {
		err = errors.New("checksum mismatch")
	}
	return err
}

// replace ends a claim with another word for the page, unless that is 0.
func (b *Backend) replace(page uint64, w, neww word) {
	if neww == 0 {
		b.unclaim(page, w)
		return
	}
	b.stats.form(tagOf(neww)).Add(1)
	b.unclaim(page, neww)
	b.forget(w)
}

// staleBlob tells whether the blob of a busy page refers to a page of the pool that
// should be looked for anew.
func (b *Backend) staleBlob(w word) bool {
	s, err := b.parse(handleOf(w))
	return err == nil && s.base.kind == basePool && b.pool.Load().Stale(PoolLoc(s.base.n))
}

// shareStale looks for pages of the pool anew whose place goes away. What the pool
// does not have any more is offered, if it is a page of this sandbox, and else left
// to the next deepening to do without. Until then all stays as it is.
func (b *Backend) shareStale(s *pooled, r *restorer, stop func() bool) (n uint64, err error) {
	b.table.visitWritten(func(first, end uint64) bool {
		if err = b.passError(stop); err != nil {
			return false
		}
		for p := first; p < end; p++ {
			w := b.table.load(p)
			if w&stateMask != evicted || tagOf(w) != codec.TagPool && !hasBase(tagOf(w)) {
				continue
			}
			w, ok := b.claim(p)
			if !ok {
				continue
			}
			if handleOf(w) == 0 || !b.staleBlob(w) {
				b.unclaim(p, w)
				continue
			}
			moved := false
			if hasBase(tagOf(w)) {
				if moved = b.moveBase(s, w); !moved {
					b.stalePool.Store(true)
				}
				b.unclaim(p, w)
			} else {
				moved = b.findAnew(s, r, p, w)
			}
			if moved {
				n++
			}
		}
		return true
	})
	return n, err
}

// findAnew looks for a busy page of the pool by its hash, and ends the claim. What is
// where it was nobody else has taken: the next deepening stores it here.
func (b *Backend) findAnew(s *pooled, r *restorer, page uint64, w word) bool {
	content := (*codec.Page)(r.buf[:])
	if b.load(r, content, page, w) != nil {
		// What cannot be read ends the sandbox when it is needed.
		b.unclaim(page, w)
		return false
	}
	neww := word(0)
	s.hash = s.hasher.Sum(content)
	s.count.Tries++
	if l, rec, ok := s.pool.Find(s.key, &s.hash, s.record[:]); ok && b.refersTo(w, l) {
		s.pool.Unref(l)
		b.stalePool.Store(true)
	} else if ok {
		neww = b.shareAt(s, content, page, l, &rec)
	} else {
		// If nobody else has it either, the next deepening stores it here: it
		// would keep all of its old segment alive.
		s.pool.Offer(s.key, &s.hash, uint32(page))
		b.stalePool.Store(true)
	}
	if neww == 0 {
		s.count.Rejects++
	}
	b.replace(page, w, neww)
	return neww != 0
}

// refersTo tells whether the blob of a busy page refers to the pool's page at l.
func (b *Backend) refersTo(w word, l PoolLoc) bool {
	s, err := b.parse(handleOf(w))
	return err == nil && s.base == baseRef{basePool, uint64(l)}
}

// StalePages tells whether pages depend on what the pool does not have any more,
// which the next deepening is to end.
func (b *Backend) StalePages() bool { return b.stalePool.Load() }

// moveBase makes the blob of a busy page refer to the place that its base has now.
func (b *Backend) moveBase(s *pooled, w word) bool {
	blob, err := b.parse(handleOf(w))
	if err != nil || b.loadPoolBase(&s.dec, &s.base, PoolLoc(blob.base.n), s.record[:]) != nil {
		return false
	}
	s.hash = s.hasher.Sum(&s.base)
	l, rec, ok := s.pool.Find(s.key, &s.hash, s.record[:])
	if !ok {
		return false
	}
	if PoolLoc(blob.base.n) == l || rec.HasBase || s.dec.Decode(&s.page, rec.Tag, rec.Enc, nil) != nil || s.page != s.base {
		s.pool.Unref(l)
		return false
	}
	all, err := b.store.Bytes(handleOf(w))
	if err != nil {
		s.pool.Unref(l)
		return false
	}
	putBase(all, uint64(l))
	s.pool.Unref(PoolLoc(blob.base.n))
	return true
}
