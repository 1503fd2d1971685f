package memfile

import (
	"errors"
	"fmt"
	"sync/atomic"

	"runsc-agentzip/memfile/codec"
	"runsc-agentzip/pkg/pool/wire"
)

// poolMin is the length up to which an encoded page is not worth sharing: a page
// of the pool costs its owner a blob of 32 bytes and some 20 bytes of the
// client's, the pool 32 bytes of header and its part of the index, and looking it
// up 3 us.
const poolMin = 128

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
	count  codec.Count
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
	s.hash = s.hasher.Sum(in.Page)
	s.count.Tries++
	l, rec, ok := p.Find(s.key, &s.hash, s.record[:])
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
// has, or else offers it and returns 0.
func (b *Backend) shareDeepened(e *encoder, content *codec.Page, page uint64) word {
	s := &e.pooled
	p := b.pool.Load()
	if p == nil || page >= 1<<32 || !s.prepare(p) {
		return 0
	}
	s.hash = s.hasher.Sum(content)
	s.count.Tries++
	l, rec, ok := p.Find(s.key, &s.hash, s.record[:])
	if ok {
		if w := b.shareAt(s, content, page, l, &rec); w != 0 {
			b.stats.form(codec.TagPool).Add(1)
			return w
		}
	} else {
		p.Offer(s.key, &s.hash, uint32(page))
	}
	s.count.Rejects++
	return 0
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
	defer p.Flush()
	e := b.encoders.Get().(*encoder)
	defer b.putEncoder(e)
	// Not acquireRestorer: accesses should not have one less meanwhile.
	r := b.restorers.Get().(*restorer)
	defer b.restorers.Put(r)
	s := &e.pooled
	for {
		work := p.Work()
		if len(work.Want)+len(work.Published) == 0 && !work.Stale {
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
		if work.Stale && s.prepare(p) {
			k, err := b.shareStale(s, r, stop)
			n += k
			if err != nil {
				return n, err
			}
			if len(work.Want)+len(work.Published) == 0 {
				return n, nil // what is still stale has been offered
			}
		}
		if err := b.passError(stop); err != nil {
			return n, err
		}
	}
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
	if s.hasher.Sum(content) != w.Hash {
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

// replace ends a claim with another word for the page, unless that is 0.
func (b *Backend) replace(page uint64, w, neww word) {
	if neww == 0 {
		b.unclaim(page, w)
		return
	}
	b.stats.form(tagOf(neww)).Add(1)
	b.unclaim(page, neww|w&tmapped)
	b.forget(w)
}

// staleBlob tells whether the blob of a busy page of the pool should be looked
// for anew.
func (b *Backend) staleBlob(w word) bool {
	s, err := b.parse(handleOf(w))
	return err == nil && s.base.kind == basePool && b.pool.Load().Stale(PoolLoc(s.base.n))
}

// shareStale looks for the pages anew whose place in the pool goes away, and
// offers those that the pool does not have any more. They stay as they are.
func (b *Backend) shareStale(s *pooled, r *restorer, stop func() bool) (n uint64, err error) {
	b.table.visit(func(first, end uint64) bool {
		if err = b.passError(stop); err != nil {
			return false
		}
		for p := first; p < end; p++ {
			w := atomic.LoadUint64(b.table.at(p))
			if w&stateMask != evicted || tagOf(w) != codec.TagPool {
				continue
			}
			w, content, ok := b.claimStored(r, p)
			if !ok {
				continue
			}
			if tagOf(w) != codec.TagPool || !b.staleBlob(w) {
				b.unclaim(p, w)
				continue
			}
			neww := word(0)
			s.hash = s.hasher.Sum(content)
			s.count.Tries++
			if l, rec, ok := s.pool.Find(s.key, &s.hash, s.record[:]); ok {
				neww = b.shareAt(s, content, p, l, &rec)
			} else {
				s.pool.Offer(s.key, &s.hash, uint32(p))
			}
			if neww == 0 {
				s.count.Rejects++
			} else {
				n++
			}
			b.replace(p, w, neww)
		}
		return true
	})
	return n, err
}
