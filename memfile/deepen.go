package memfile

import (
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"runsc-agentzip/memfile/arena"
	"runsc-agentzip/memfile/codec"
	"runsc-agentzip/memfile/dedup"
	"runsc-agentzip/pkg/pool/wire"
)

// Deepening stores pages again in the smallest form there is, with the codec's
// highest tier and, where that leaves much, relative to a page found elsewhere:
//
//   - the root that precedes the page in the file. Neighbours in the file are
//     neighbours on a heap. This alone saves 5 to 6 % of the bytes, about what
//     units of 16 KiB would (see package codec), with one other page to decode;
//   - the page of the template whose sketch is most similar;
//   - the root among those of this pass whose sketch is most similar.
//
// See package dedup for what each gains.
const (
	// searchFrom is the length from which a search is worth its time. Searching
	// for shorter ones too would save 0.1 % of the bytes, and only from 1024 on
	// a third of the time and cost 3 %.
	searchFrom = 256
	// searchFromBase is the same for pages that the template has a page for at
	// their place. If that is no good base, neighbours rarely are.
	searchFromBase = 512
	// maxTries is how many bases that a search found are tried.
	maxTries = 2
	// ownSketches is how many roots of a pass have their sketch kept.
	ownSketches = 8192
	// compactGroups is after how many groups blobs are moved together: what
	// has been replaced leaves slabs half empty, and a wait may end any time.
	compactGroups = 8
)

// A deepener is what the workers of one deepening share.
type deepener struct {
	b    *Backend
	stop func() bool

	// groups are the first pages of the groups to visit.
	groups   []uint64
	next     atomic.Int64
	replaced atomic.Uint64

	errOnce sync.Once
	failed  atomic.Bool
	err     error

	// compactMu is held by the worker that moves blobs.
	compactMu sync.Mutex

	// restMu is held by the worker that pauses, so that the others do so, too.
	restMu sync.Mutex

	// own finds roots of this pass.
	ownMu sync.Mutex
	own   dedup.Table

	// cold leaves out what the last steps wanted. stalePool is set if pages of the
	// pool that others depend on may be stale. Both are immutable.
	cold, stalePool bool
}

// A deepWorker is what one worker of a deepening works with.
type deepWorker struct {
	*deepener
	e *encoder
	r *restorer

	sketch    dedup.Sketch
	found     [2]dedup.Match
	candidate codec.Page

	// root is the last root that the worker has come across, if rootBlob is
	// not 0; its content is in rootPage if rootLoaded is set.
	root       uint64
	rootBlob   arena.Handle
	rootLoaded bool
	rootPage   codec.Page
}

// Deepen stores pages that are not in the smallest form yet again, where that
// makes them at least a twentieth smaller, and then moves blobs together. It
// returns how many pages it replaced, and ErrStopped also if somebody wants to
// prefetch meanwhile. What cannot be read is left as it is: the
// sandbox ends when it is needed, if ever, and not before.
func (b *Backend) Deepen(stop func() bool) (replaced uint64, err error) {
	return b.deepenPass(stop, false)
}

// DeepenCold is Deepen for pages that the last steps did not want: what the next
// one may want stays in a form that is quicker to restore, and is not compressed
// anew in each wait.
func (b *Backend) DeepenCold(stop func() bool) (replaced uint64, err error) {
	return b.deepenPass(stop, true)
}

func (b *Backend) deepenPass(stop func() bool, cold bool) (replaced uint64, err error) {
	b.passMu.Lock()
	defer b.passMu.Unlock()
	d := &deepener{b: b, cold: cold}
	d.stop = b.stopFunc(func() bool { return b.hurry.Load() != 0 || stop != nil && stop() })
	if err := b.passError(d.stop); err != nil {
		return 0, err
	}
	d.stalePool = b.stalePool.Swap(false)
	defer func() {
		if err != nil && d.stalePool {
			b.stalePool.Store(true) // not all of them were seen to
		}
	}()
	// First what the last step has left.
	b.table.tidy(d.stop)
	if err := b.compact(d.stop); err != nil {
		return 0, err
	}
	b.table.visitWritten(func(first, end uint64) bool {
		d.groups = append(d.groups, first)
		return true
	})
	size := int(dedup.TableSize(ownSketches))
	if own, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE); err == nil {
		d.own = own
		b.passBytes.Add(int64(size))
		defer func() {
			b.passBytes.Add(-int64(size))
			_ = unix.Munmap(own)
		}()
	}
	var wg sync.WaitGroup
	for range min(b.opts.Workers, len(d.groups)) - 1 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			d.work()
		}()
	}
	d.work()
	wg.Wait()
	if d.err == nil {
		d.err = b.pack(d.stop)
	}
	if p := b.pool.Load(); p != nil {
		p.Flush()
	}
	return d.replaced.Load(), d.err
}

// work visits groups until there are no more.
func (d *deepener) work() {
	b := d.b
	w := b.deepWorkers.Get().(*deepWorker)
	w.deepener, w.rootBlob = d, 0
	w.e = b.encoders.Get().(*encoder)
	// Not acquireRestorer: accesses should not have one less meanwhile.
	w.r = b.restorers.Get().(*restorer)
	// Each time takes a look at the whole table.
	every := max(compactGroups, int64(len(d.groups)/32))
	for !d.failed.Load() {
		i := d.next.Add(1) - 1
		if i >= int64(len(d.groups)) {
			break
		}
		w.group(d.groups[i])
		if i%every == every-1 && d.compactMu.TryLock() {
			if err := b.compact(d.stop); err != nil {
				d.fail(err)
			}
			d.compactMu.Unlock()
			w.rootBlob = 0 // it may be elsewhere
		}
	}
	b.restorers.Put(w.r)
	b.putEncoder(w.e)
	w.deepener, w.e, w.r = nil, nil, nil
	b.deepWorkers.Put(w)
}

func (d *deepener) fail(err error) {
	d.errOnce.Do(func() { d.err = err })
	d.failed.Store(true)
}

// restStep is how soon a pause ends when there is a reason to.
const restStep = 5 * time.Millisecond

// rest pauses for as long as Options.Rest says, unless the pass is to stop or somebody
// waits for it to end. No page may be busy.
func (d *deepener) rest() {
	b := d.b
	if b.opts.Rest == nil {
		return
	}
	d.restMu.Lock()
	defer d.restMu.Unlock()
	left := b.opts.Rest()
	if left <= 0 {
		return
	}
	for end := time.Now().Add(left); left > 0 && b.waiting.Load() == 0 && !d.stop(); left = time.Until(end) {
		time.Sleep(min(left, restStep))
	}
}

// group visits the pages of a group.
func (d *deepWorker) group(first uint64) {
	b := d.b
	wanted := func(uint64) bool { return false }
	if d.cold {
		wanted = b.history.Recent(first / groupPages)
	}
	for p := first; p < first+groupPages; p++ {
		w := b.table.load(p)
		if w&stateMask != evicted || handleOf(w) == 0 || tagOf(w) == codec.TagPool && !d.stalePool || w&deep == 0 && wanted(p) {
			continue
		}
		if w&deep != 0 {
			if mayBeRoot(tagOf(w)) {
				d.root, d.rootBlob, d.rootLoaded = p, handleOf(w), false
				continue
			}
			if tagOf(w) != codec.TagPool && (!hasBase(tagOf(w)) || b.stats.orphans.Load() == 0 && !d.stalePool) {
				continue
			}
		}
		d.rest()
		if err := b.passError(d.stop); err != nil {
			d.fail(err)
			return
		}
		w, ok := b.claim(p)
		if !ok {
			continue
		}
		s, err := b.blob(p, tagOf(w), handleOf(w))
		if err != nil {
			b.unclaim(p, w|deep)
			continue
		}
		// Nor is a page of the pool kept for long whose segment goes away.
		orphan := s.base.kind == baseRoot && b.isOrphan(arena.Handle(s.base.n)) ||
			s.base.kind == basePool && b.pool.Load().Stale(PoolLoc(s.base.n))
		if w&deep != 0 && !orphan {
			b.unclaim(p, w)
			continue
		}
		neww := d.page(p, w, &s, orphan)
		b.unclaim(p, neww|deep)
		if neww != w {
			b.forget(w)
			d.replaced.Add(1)
		}
	}
}

// isOrphan tells whether the page of a root, to which the caller has a
// reference, has left the store.
func (b *Backend) isOrphan(root arena.Handle) bool {
	all, err := b.store.Bytes(root)
	return err == nil && len(all) >= blobHeader && blobHead(atomic.LoadUint64(headAt(all)))&headOrphan != 0
}

// page stores a busy page again, in a smaller form, and returns the word for it,
// or w if there is no form that is much smaller. With away, any form is better
// than the present one.
func (d *deepWorker) page(p uint64, w word, s *stored, away bool) word {
	b, e := d.b, d.e
	page := (*codec.Page)(d.r.buf[:])
	if b.load(d.r, page, p, w) != nil {
		return w
	}
	old := len(s.enc) + s.base.size()
	var hash *wire.Hash
	if !away {
		// It may have been stored while there was no pool, or what the pool said
		// of it may have been lost.
		var neww word
		if hash, neww = b.shareDeepened(e, page, p, old); neww != 0 {
			return neww
		}
	}
	limit := old * 19 / 20
	if away {
		limit = codec.MaxEncoded
	}

	input := codec.Input{Page: page, Tier: codec.TierMax}
	same := b.readBases(e.base[:PageSize], p) != 0
	if same {
		input.Base = (*codec.Page)(e.base[:])
	}
	tag, size, _ := e.enc.Encode(e.out[:], input)
	if tag == codec.TagTemplate || tag == codec.TagZero {
		// An eviction would have found out; all that can be said is that the
		// template is not what it was, or that it can be read again.
		return w
	}
	best, base := e.out[:size], baseRef{}
	sketched := false
	if tag == codec.TagInvalid {
		size = limit
	}
	from := searchFrom
	if same {
		from = searchFromBase
	}
	if size > from {
		d.sketch.Make(page)
		sketched = true
		// A base must save a sixteenth, and what naming it takes.
		most := min(size*15/16, limit) - blobBase
		if t, n, r := d.search(p, page, most); t != codec.TagInvalid {
			tag, best, base = t, e.alt[:n], r
		}
	}
	neww := w
	if tag != codec.TagInvalid && len(best)+base.size() <= limit {
		h, err := b.put(codec.Sum(page), p, tag, base, best)
		if err == nil {
			b.stats.form(tag).Add(1)
			neww = evictedWord(tag, h)
			old = len(best) + base.size()
		}
	}
	if hash != nil && old > offerMin {
		e.pooled.offer(hash, page, p, old, tagOf(neww))
	}
	if neww == w && base.kind == baseRoot {
		b.unref(arena.Handle(base.n), false)
	}
	if mayBeRoot(tagOf(neww)) {
		d.root, d.rootBlob, d.rootPage, d.rootLoaded = p, handleOf(neww), *page, true
		if sketched && d.own != nil {
			d.ownMu.Lock()
			d.own.Add(&d.sketch, uint32(p), true)
			d.ownMu.Unlock()
		}
	}
	return neww
}

// search tries the bases that promise most and returns the form of at most
// limit bytes that it found, in e.alt, or TagInvalid. If the base is a root, the
// caller has a reference to it.
func (d *deepWorker) search(p uint64, page *codec.Page, limit int) (tag codec.Tag, n int, base baseRef) {
	b, e := d.b, d.e
	tries := 0
	// try encodes relative to a base, and tells whether that is better.
	try := func(st stage, c *codec.Page) bool {
		tries++
		start := time.Now()
		t, k := e.enc.EncodeAgainst(e.spare[:], page, c, limit)
		b.stats.stages[st].tried(k, time.Since(start))
		if t == codec.TagInvalid {
			return false
		}
		tag, n, limit = t, k, k-1
		e.alt, e.spare = e.spare, e.alt
		return true
	}
	won := stageTemplate

	if search, ok := b.template.(Searcher); ok {
		for _, m := range d.found[:search.Similar(&d.sketch, d.found[:])] {
			if x, ok := b.extentOf(p); ok && uint64(m.Item) == x.tpl+p-x.page {
				continue // tried already
			}
			if b.readTemplatePage(&d.candidate, uint64(m.Item)) == nil && try(stageTemplate, &d.candidate) {
				base, won = baseRef{baseTemplate, uint64(m.Item)}, stageTemplate
			}
			break
		}
	}
	root, rootBlob := uint64(0), arena.Handle(0)
	st := stageOwn
	if d.own != nil {
		d.ownMu.Lock()
		k := d.own.Find(&d.sketch, d.found[:])
		d.ownMu.Unlock()
		for _, m := range d.found[:k] {
			q := uint64(m.Item)
			if q == p || q == d.root && d.rootBlob != 0 {
				continue
			}
			if h, ok := d.loadRoot(q, &d.candidate); ok {
				if try(stageOwn, &d.candidate) {
					root, rootBlob = q, h
				}
				break
			}
		}
	}
	if tries < maxTries && d.rootBlob != 0 && d.root != p {
		if !d.rootLoaded {
			h, ok := d.loadRoot(d.root, &d.rootPage)
			d.rootLoaded = ok && h == d.rootBlob
			if !d.rootLoaded {
				d.rootBlob = 0
			}
		}
		if d.rootLoaded && try(stageNeighbour, &d.rootPage) {
			root, rootBlob, st = d.root, d.rootBlob, stageNeighbour
		}
	}
	if rootBlob != 0 {
		if !b.share(root, rootBlob) {
			// It has left the store, or has enough dependants. The buffers of
			// a shorter form that may have been found before are gone, too.
			if root == d.root {
				d.rootBlob = 0
			}
			return codec.TagInvalid, 0, baseRef{}
		}
		base, won = baseRef{baseRoot, uint64(rootBlob)}, st
	}
	if tag != codec.TagInvalid {
		b.stats.stages[won].won(n)
	}
	return tag, n, base
}

// loadRoot puts the page q into dst, if it is stored as a root that may have more
// dependants, and returns its blob.
func (d *deepWorker) loadRoot(q uint64, dst *codec.Page) (arena.Handle, bool) {
	b := d.b
	if q >= b.table.pages() {
		return 0, false
	}
	w, ok := b.claim(q)
	if !ok {
		return 0, false
	}
	defer b.unclaim(q, w)
	if !mayBeRoot(tagOf(w)) {
		return 0, false
	}
	if s, err := b.parse(handleOf(w)); err == nil && s.head.refs() > maxDependants {
		return 0, false
	}
	if b.load(d.r, dst, q, w) != nil {
		return 0, false
	}
	return handleOf(w), true
}
