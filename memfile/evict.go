package memfile

import (
	"bytes"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"runsc-agentzip/memfile/arena"
	"runsc-agentzip/memfile/codec"
)

// batchPages is how many pages are read, encoded and freed together, 64 KiB.
const batchPages = 16

// An encoder is what one worker works with.
type encoder struct {
	enc  *codec.Encoder
	in   [batchPages * PageSize]byte
	base [batchPages * PageSize]byte
	out  [codec.MaxEncoded]byte
	// word has what the pages of a batch become, old what those were that are
	// committing.
	word, old [batchPages]word
	// alt and spare are for forms that compete with the one in out.
	alt, spare []byte

	// pooled looks pages up in the pool.
	pooled pooled
}

func newEncoder() *encoder {
	return &encoder{
		enc:   codec.NewEncoder(),
		alt:   make([]byte, codec.MaxEncoded),
		spare: make([]byte, codec.MaxEncoded),
	}
}

// putEncoder gives an encoder back after its counts have been added up.
func (b *Backend) putEncoder(e *encoder) {
	for tag, c := range e.enc.TakeCounts() {
		b.stats.codec[tag].add(c)
	}
	b.stats.codec[codec.TagPool].add(e.pooled.count)
	e.pooled.count = codec.Count{}
	b.encoders.Put(e)
}

// EvictOptions are the parameters of one eviction.
type EvictOptions struct {
	// Tier is how hard to compress.
	Tier codec.Tier

	// Settle is how long pages stay unmapped before they are written out. A
	// page touched meanwhile costs one remap to keep; later it costs a
	// restore.
	Settle time.Duration

	// MidStep says that a step is in progress and goes on: what it has wanted so
	// far is not all that it wants.
	MidStep bool

	// Stop, if not nil, is asked often; when it returns true the eviction
	// ends within a batch and leaves all other pages resident.
	Stop func() bool
}

// EvictResult counts the pages of one eviction.
type EvictResult struct {
	Marked, Evicted, Aborted, Rejected uint64
	// Locked pages are kept in memory by the application.
	Locked uint64
	// Skipped pages were still marked when the eviction was over: it ended
	// early, or the store had no room for them.
	Skipped uint64
	Elapsed time.Duration
}

// Evict takes every eligible page that has a profitable form out of the file.
// On error, what was evicted so far stays evicted and everything else is
// resident; no page is ever lost.
func (b *Backend) Evict(opts EvictOptions) (EvictResult, error) {
	b.waiting.Add(1)
	b.passMu.Lock()
	defer b.passMu.Unlock()
	b.waiting.Add(-1)
	start := time.Now()
	stop := b.stopFunc(opts.Stop)
	if err := b.passError(stop); err != nil {
		return EvictResult{}, err
	}
	if !opts.MidStep {
		b.history.EndStep()
	}
	abortedBefore := b.stats.aborted.Load()
	var res EvictResult
	marked, n, err := b.mark()
	res.Marked = n
	if err == nil && n != 0 {
		err = b.endAccess(marked, stop, &res)
		if err == nil && opts.Settle > 0 {
			err = b.settle(opts.Settle, stop)
		}
		if err == nil {
			err = b.writeOut(marked, opts.Tier, stop, &res)
		}
		if err == nil {
			b.history.Seal()
		}
		if p := b.pool.Load(); p != nil {
			p.Flush()
		}
	}
	for _, r := range marked {
		res.Skipped += b.unmark(r)
	}
	// Also if the eviction was stopped: there may be no other in this wait.
	if stop() {
		b.table.tidyInStep(b.closed.Load)
	} else {
		b.table.tidy(b.closed.Load)
	}
	if err == nil && !opts.MidStep {
		_ = b.pack(stop) // Or else a later pass does it.
	}
	res.Aborted = b.stats.aborted.Load() - abortedBefore
	res.Elapsed = time.Since(start)
	if n != 0 {
		b.stats.evictNS.add(res.Elapsed)
	}
	return res, err
}

// stopFunc combines the reasons for a pass to end early.
func (b *Backend) stopFunc(stop func() bool) func() bool {
	return func() bool {
		return b.inhibit.Load() != 0 || b.closed.Load() || stop != nil && stop()
	}
}

// passError returns the reason to end if stop, a stopFunc, says that there is
// one.
func (b *Backend) passError(stop func() bool) error {
	if !stop() {
		return nil
	}
	switch {
	case b.closed.Load():
		return ErrClosed
	case b.inhibit.Load() != 0:
		return ErrInhibited
	}
	return ErrStopped
}

// mark makes candidates of the resident pages that may be evicted and returns
// them as sorted ranges.
func (b *Backend) mark() (marked []Range, n uint64, err error) {
	// Which pages are in memory is asked without the allocator's lock, since
	// that may take a while. A page that is freed meanwhile is not in the
	// second visit; one that is zeroed meanwhile is stored as zero.
	var ranges []Range
	b.host.VisitEvictable(func(r Range) {
		if k := len(ranges) - 1; k >= 0 && ranges[k].End == r.Start {
			ranges[k].End = r.End
		} else {
			ranges = append(ranges, r)
		}
	})
	var inMemory []Range
	vec := make([]byte, 8192)
	for _, r := range ranges {
		for off := r.Start; off < r.End; {
			v := vec[:min(uint64(len(vec)), (r.End-off)>>pageShift)]
			if err := b.host.Resident(off, v); err != nil {
				return nil, 0, fmt.Errorf("asking which pages are in memory: %w", err)
			}
			for i := 0; i < len(v); i++ {
				if v[i]&1 == 0 {
					continue
				}
				s := i
				for i < len(v) && v[i]&1 != 0 {
					i++
				}
				inMemory = appendRange(inMemory, off+uint64(s)<<pageShift, off+uint64(i)<<pageShift)
			}
			off += uint64(len(v)) << pageShift
		}
	}

	k := 0
	b.host.VisitEvictable(func(r Range) {
		for k < len(inMemory) && inMemory[k].End <= r.Start {
			k++
		}
		for i := k; i < len(inMemory) && inMemory[i].Start < r.End; i++ {
			first, last := max(inMemory[i].Start, r.Start)>>pageShift, min(inMemory[i].End, r.End)>>pageShift
			// Counted before the first of them leaves the resident state.
			b.nonResident.Add(int64(last - first))
			skipped := int64(0)
			for p := first; p < last; p++ {
				w := b.table.load(p)
				if w&(stateMask|pinned) != resident || !b.table.cas(p, w, w|candidate) {
					skipped++
					continue
				}
				n++
				marked = appendRange(marked, p<<pageShift, (p+1)<<pageShift)
			}
			b.nonResident.Add(-skipped)
		}
	})
	return marked, n, nil
}

func appendRange(rs []Range, start, end uint64) []Range {
	if k := len(rs) - 1; k >= 0 && rs[k].End == start {
		rs[k].End = end
		return rs
	}
	return append(rs, Range{start, end})
}

// unmark makes the candidates in r resident and returns how many there were.
func (b *Backend) unmark(r Range) (n uint64) {
	for p, last := pagesOf(r.Start, r.End); p < last; p++ {
		if w := b.table.load(p); w&stateMask == candidate && b.table.cas(p, w, w&^stateMask) {
			n++
		}
	}
	b.nonResident.Add(-int64(n))
	return n
}

// endAccess returns once no access that began before the call can reach the
// marked pages.
func (b *Backend) endAccess(marked []Range, stop func() bool, res *EvictResult) error {
	deadline := time.Now().Add(b.opts.AccessTimeout)
	unmark := func(r Range) {
		n := b.unmark(r)
		res.Locked += n
		b.stats.rejects[rejectLocked].Add(n)
	}
	err := b.host.EndAccess(marked, unmark, deadline, stop)
	if err == nil && !b.sections.wait(deadline, stop) {
		err = errors.New("a file operation takes too long")
	}
	if err == nil {
		return nil
	}
	if err := b.passError(stop); err != nil {
		return err
	}
	b.stats.busyPasses.Add(1)
	return fmt.Errorf("waiting for accesses to end: %w", err)
}

func (b *Backend) settle(d time.Duration, stop func() bool) error {
	const step = 5 * time.Millisecond
	for end := time.Now().Add(d); ; {
		left := time.Until(end)
		if left <= 0 {
			return nil
		}
		if err := b.passError(stop); err != nil {
			return err
		}
		time.Sleep(min(left, step))
	}
}

// writeOut encodes, stores and frees the pages in marked that are still
// candidates.
func (b *Backend) writeOut(marked []Range, tier codec.Tier, stop func() bool, res *EvictResult) error {
	var (
		mu      sync.Mutex
		next    int
		off     uint64
		failure error
	)
	// take returns the next batch: at most batchPages pages of one range.
	take := func() (r Range, ok bool) {
		mu.Lock()
		defer mu.Unlock()
		if failure != nil || next == len(marked) {
			return Range{}, false
		}
		if failure = b.passError(stop); failure != nil {
			return Range{}, false
		}
		r.Start = max(marked[next].Start, off)
		r.End = min(r.Start+batchPages*PageSize, marked[next].End)
		off = r.End
		if off == marked[next].End {
			next++
		}
		return r, true
	}
	work := func() {
		e := b.encoders.Get().(*encoder)
		defer b.putEncoder(e)
		for {
			r, ok := take()
			if !ok {
				return
			}
			done, rejected, err := b.evictBatch(e, r, tier)
			mu.Lock()
			res.Evicted += done
			res.Rejected += rejected
			if err != nil && failure == nil {
				failure = err
			}
			mu.Unlock()
		}
	}
	var wg sync.WaitGroup
	for range b.opts.Workers - 1 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			work()
		}()
	}
	work()
	wg.Wait()
	return failure
}

// evictBatch evicts the candidates among the pages of r, at most batchPages.
func (b *Backend) evictBatch(e *encoder, r Range, tier codec.Tier) (done, rejected uint64, err error) {
	first, n := r.Start>>pageShift, int((r.End-r.Start)>>pageShift)
	in := e.in[:r.End-r.Start]
	if err := b.host.ReadAt(in, r.Start); err != nil {
		return 0, 0, fmt.Errorf("reading %d bytes at memory file offset %#x: %w", len(in), r.Start, err)
	}

	haveBase := b.readBases(e.base[:len(in)], first)

	same, sameBits := uint64(0), uint64(0)
	defer func() {
		b.stats.codec[codec.TagTemplate].add(codec.Count{Tries: same, Wins: same})
		if same != 0 {
			b.history.Same(first, sameBits)
		}
	}()
	// Encode. e.word[i] becomes the word that page i gets when it is evicted,
	// or 0. A bit in reused says that it is the form that was kept.
	reused := uint64(0)
	for i := range n {
		e.word[i] = 0
		old := b.table.load(first + uint64(i))
		if old&stateMask != candidate {
			continue
		}
		page := (*codec.Page)(in[i*PageSize:])
		input := codec.Input{Page: page, Tier: tier}
		if haveBase>>i&1 != 0 {
			input.Base = (*codec.Page)(e.base[i*PageSize:])
			if *page == *input.Base {
				same++
				sameBits |= 1 << i
				e.word[i] = evictedWord(codec.TagTemplate, 0)
				continue
			}
		}
		if handleOf(old) != 0 {
			if !b.commit(e, first, i) {
				continue
			}
			// While it is committing nobody else gives the form up; the word
			// that was looked at first may have been another.
			old = e.old[i]
			kept := handleOf(old) != 0 && b.isKept(page, first+uint64(i), old)
			b.uncommit(e, first, i)
			if kept {
				reused |= 1 << i
				e.word[i] = evicted | old&formMask
				continue
			}
		}
		hash, w := b.shareEvicted(e, &input, first+uint64(i))
		if w != 0 {
			e.word[i] = w
			continue
		}
		tag, size, why := e.enc.Encode(e.out[:], input)
		if tag == codec.TagInvalid && tier != codec.TierFast && why != codec.RejectForm {
			// Few pages come here, and a page that stays costs as much as ten
			// others: a third of them have a form after all.
			input.Tier = codec.TierMax
			tag, size, why = e.enc.Encode(e.out[:], input)
		}
		if tag == codec.TagInvalid {
			b.stats.rejects[rejectCodec+int(why)].Add(1)
			rejected += b.rejectPage(first + uint64(i))
			continue
		}
		if tag == codec.TagZero {
			e.word[i] = evictedWord(tag, 0)
			continue
		}
		h, err := b.put(codec.Sum(page), first+uint64(i), tag, baseRef{}, e.out[:size])
		if err != nil && b.dropKept() != 0 {
			h, err = b.put(codec.Sum(page), first+uint64(i), tag, baseRef{}, e.out[:size])
		}
		if err != nil {
			// Not raw: the next eviction may find room.
			b.stats.rejects[rejectStore].Add(1)
			continue
		}
		e.word[i] = evictedWord(tag, h)
		if hash != nil && size > offerMin {
			e.pooled.pool.Offer(e.pooled.key, hash, uint32(first)+uint32(i))
		}
	}

	// Commit runs of pages that are still candidates.
	commit := func(i int) bool {
		if e.word[i] == 0 || !b.commit(e, first, i) {
			return false
		}
		if reused>>i&1 != 0 && e.old[i]&formMask != e.word[i]&formMask {
			// The form was given up meanwhile (dropKept). A page gets its next
			// one from an eviction, so it cannot be another that looks the same.
			b.uncommit(e, first, i)
			return false
		}
		return true
	}
	give := func(i int) {
		if reused>>i&1 == 0 {
			b.discard(e.word[i])
		}
	}
	for i := 0; i < n; {
		if !commit(i) {
			give(i)
			i++
			continue
		}
		j := i + 1
		for j < n && commit(j) {
			j++
		}
		lo, hi := first+uint64(i), first+uint64(j)
		perr := b.host.Punch(Range{lo << pageShift, hi << pageShift})
		// If it failed, some of the pages may be gone all the same. What is
		// stored is certainly right.
		intact := perr != nil && b.isIntact(in[i*PageSize:j*PageSize], lo<<pageShift)
		for k := i; k < j; k++ {
			p := first + uint64(k)
			if intact {
				b.table.store(p, e.old[k])
				give(k)
				continue
			}
			b.stats.form(tagOf(e.word[k])).Add(1)
			b.table.store(p, e.word[k])
			if reused>>k&1 != 0 {
				b.stats.kept.Add(-1)
			} else {
				b.forgetKept(e.old[k])
			}
			done++
		}
		b.waiters.wake(lo, hi)
		if perr != nil {
			// Page j may have been claimed by nobody: only [i, j) is.
			for k := j; k < n; k++ {
				give(k)
			}
			b.stats.evictedTotal.Add(done)
			return done, rejected, fmt.Errorf("freeing memory file offsets %#x-%#x: %w", lo<<pageShift, hi<<pageShift, perr)
		}
		i = j
	}
	b.stats.evictedTotal.Add(done)
	return done, rejected, nil
}

// commit makes page i of the batch from first on committing if it is a candidate.
// Whatever an application had mapped of the page was unmapped by EndAccess, so the
// page is no longer tmapped.
func (b *Backend) commit(e *encoder, first uint64, i int) bool {
	p := first + uint64(i)
	w := b.table.load(p)
	e.old[i] = w &^ tmapped
	return w&stateMask == candidate && b.table.cas(p, w, committing)
}

// uncommit makes it a candidate again.
func (b *Backend) uncommit(e *encoder, first uint64, i int) {
	p := first + uint64(i)
	b.table.store(p, e.old[i])
	b.waiters.wake(p, p+1)
}

// isIntact tells whether the file has content at off.
func (b *Backend) isIntact(content []byte, off uint64) bool {
	now := make([]byte, len(content))
	return b.host.ReadAt(now, off) == nil && bytes.Equal(now, content)
}

// rejectPage makes a candidate raw. It returns 1 if it did, 0 if the page was
// touched meanwhile.
func (b *Backend) rejectPage(page uint64) uint64 {
	b.stats.raw.Add(1)
	w := b.table.load(page)
	if w&stateMask != candidate || !b.replaceKept(page, w, w&^(stateMask|formMask)|raw) {
		b.stats.raw.Add(-1)
		return 0
	}
	return 1
}

// CheckResult is what Check found.
type CheckResult struct {
	// Stored is how many pages were evicted when Check came to them.
	Stored uint64
	// Problems says what is wrong, at most checkMax of them.
	Problems []string
}

const checkMax = 100

// Check decodes and verifies every evicted page, verifies that every blob in
// the store belongs to exactly one page or is a root of others, that references
// are counted right, and that counters agree with the page table. The sandbox keeps
// running; a page under check delays its access by a decode.
func (b *Backend) Check(stop func() bool) (CheckResult, error) {
	b.waiting.Add(1)
	b.passMu.Lock()
	defer b.passMu.Unlock()
	b.waiting.Add(-1)
	var res CheckResult
	stop = b.stopFunc(stop)
	if b.closed.Load() {
		return res, ErrClosed
	}
	// Every page is busy for a moment, which makes leaves; and a check may be all
	// that happens in a long wait.
	defer b.table.tidy(b.closed.Load)
	problem := func(format string, args ...any) {
		if len(res.Problems) < checkMax {
			res.Problems = append(res.Problems, fmt.Sprintf(format, args...))
		}
	}
	var err error
	r := b.restorers.Get().(*restorer)
	page := (*codec.Page)(r.buf[:PageSize])
	b.table.visit(func(first, end uint64) bool {
		for p := first; p < end; p++ {
			w := b.table.load(p)
			if w&stateMask > busy {
				problem("page %#x has word %#x, which is no state", p<<pageShift, w)
				continue
			}
			if w&stateMask != evicted || !b.table.cas(p, w, w&^stateMask|busy) {
				continue
			}
			res.Stored++
			if err := b.load(r, page, p, w); err != nil {
				problem("%v", err)
			}
			b.table.store(p, w)
			b.waiters.wake(p, p+1)
		}
		err = b.passError(stop)
		return err == nil
	})
	b.restorers.Put(r)
	if err != nil {
		return res, err
	}
	// The page table and the store do not change together: a blob freed during
	// the walk must not count as lost. So the walk is repeated until nothing
	// disturbed it, and given up under load.
	for try := 0; ; try++ {
		gen, quiet := b.frees.begin()
		var stored, kept int64
		var refs map[arena.Handle]rootRefs
		if quiet {
			refs = b.rootRefs()
			err = b.store.Check(func(yield func(arena.Handle, int) bool) {
				give := func(h arena.Handle) bool {
					blob, _ := b.store.Bytes(h)
					return yield(h, len(blob))
				}
				b.table.visit(func(first, end uint64) bool {
					for p := first; p < end; p++ {
						w := b.table.load(p)
						h := handleOf(w)
						if s := w & stateMask; s == evicted || s == busy {
							stored++
						} else if h != 0 {
							kept++
						}
						if h != 0 {
							if r, ok := refs[h]; ok {
								r.owners++
								refs[h] = r
							}
							if !give(h) {
								return false
							}
						}
					}
					return true
				})
				for h, r := range refs {
					if r.owners == 0 && !give(h) {
						return
					}
				}
			})
		}
		counted, countedKept, gated := int64(b.stats.evictedPages()), b.stats.kept.Load(), b.nonResident.Load()
		if quiet && b.frees.undisturbed(gen) {
			if err != nil {
				problem("%v", err)
			}
			b.checkRoots(refs, problem)
			if counted != stored {
				problem("%d pages are evicted, counted %d", stored, counted)
			}
			if countedKept != kept {
				problem("%d pages in the file have kept their form, counted %d", kept, countedKept)
			}
			if gated < stored {
				problem("%d pages are evicted, only %d are gated", stored, gated)
			}
			return res, nil
		}
		if try == 50 || stop() {
			return res, errors.New("the sandbox is too busy for the store to be checked; its pages were checked one by one")
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// rootRefs says who refers to a root.
type rootRefs struct{ dependants, owners int }

// rootRefs returns the roots that pages depend on.
func (b *Backend) rootRefs() map[arena.Handle]rootRefs {
	refs := map[arena.Handle]rootRefs{}
	b.table.visitWritten(func(first, end uint64) bool {
		for p := first; p < end; p++ {
			w := b.table.load(p)
			if handleOf(w) == 0 || !hasBase(tagOf(w)) {
				continue
			}
			if s, err := b.parse(handleOf(w)); err == nil && s.base.kind == baseRoot {
				r := refs[arena.Handle(s.base.n)]
				r.dependants++
				refs[arena.Handle(s.base.n)] = r
			}
		}
		return true
	})
	return refs
}

// checkRoots compares the references that blobs count with those there are.
func (b *Backend) checkRoots(refs map[arena.Handle]rootRefs, problem func(string, ...any)) {
	orphans := int64(0)
	for h, r := range refs {
		s, err := b.parse(h)
		if err != nil {
			continue // said so by the store
		}
		if n := r.dependants + r.owners; s.head.refs() != n {
			problem("the root of the page at %#x has %d references, counts %d", s.head.page()<<pageShift, n, s.head.refs())
		}
		if orphan := s.head&headOrphan != 0; orphan != (r.owners == 0) {
			problem("the root of the page at %#x is an orphan: %t, and has %d owners", s.head.page()<<pageShift, orphan, r.owners)
		}
		if r.owners == 0 {
			orphans++
		}
	}
	if n := b.stats.orphans.Load(); n != orphans {
		problem("%d roots are orphans, counted %d", orphans, n)
	}
	b.table.visitWritten(func(first, end uint64) bool {
		for p := first; p < end; p++ {
			w := b.table.load(p)
			if handleOf(w) == 0 {
				continue
			}
			if _, ok := refs[handleOf(w)]; ok {
				continue
			}
			if s, err := b.parse(handleOf(w)); err == nil && s.head.refs() != 1 {
				problem("the blob of the page at %#x counts %d references but has one", p<<pageShift, s.head.refs())
			}
		}
		return true
	})
}

// frees tells Check whether a page was taken out of the store meanwhile, by
// somebody who does not hold passMu. A free is open from before the page's word
// changes until its blob is freed.
type frees struct{ opened, closed atomic.Uint64 }

func (f *frees) open()  { f.opened.Add(1) }
func (f *frees) close() { f.closed.Add(1) }

// begin returns the current generation and whether no free is open.
func (f *frees) begin() (gen uint64, quiet bool) {
	c := f.closed.Load()
	o := f.opened.Load()
	return o, o == c
}

func (f *frees) undisturbed(gen uint64) bool { return f.opened.Load() == gen }
