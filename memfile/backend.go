package memfile

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"runsc-agentzip/memfile/arena"
	"runsc-agentzip/memfile/codec"
	"runsc-agentzip/memfile/prefetch"
)

// A Range is a part of the memory file: bytes, Start <= offset < End. Both are
// multiples of PageSize unless said otherwise.
type Range struct{ Start, End uint64 }

// Host is the memory file and the Sentry as the Backend needs them. Offsets and
// lengths are in bytes and multiples of PageSize.
type Host interface {
	// ReadAt and WriteAt transfer all of p from and to the backing file. They
	// must not take the allocator's lock.
	ReadAt(p []byte, off uint64) error
	WriteAt(p []byte, off uint64) error

	// Punch frees the host memory behind r; the file reads as zeroes there.
	// It must not take the allocator's lock.
	Punch(r Range) error

	// Resident sets bit 0 of vec[i] if the i-th page from off is in memory.
	Resident(off uint64, vec []byte) error

	// HeldBytes is the host memory that the backing file holds.
	HeldBytes() (uint64, error)

	// VisitEvictable calls fn for ranges of pages in use that may be evicted,
	// in ascending order, with the allocator locked: no page passed to fn is
	// freed before VisitEvictable returns.
	VisitEvictable(fn func(Range))

	// EndAccess returns once every access to the marked, sorted ranges that
	// began before the call has ended: application mappings are gone, and
	// memory managers have no internal mapping in use. (The Backend itself
	// waits for sections.) It calls unmark for parts that may not be evicted
	// after all, gives up with an error at the deadline, and soon after stop
	// returns true.
	EndAccess(marked []Range, unmark func(Range), deadline time.Time, stop func() bool) error

	// Premap maps the ranges, which are resident and sorted, into every address
	// space that has them and would fault on them. It ends soon after stop
	// returns true.
	Premap(ranges []Range, stop func() bool)

	// Fatal ends the sandbox at once with the message. It does not return.
	Fatal(msg string)
}

// Options are a Backend's parameters; DefaultOptions says what they are by
// default.
type Options struct {
	// MapUnit is how many bytes around a fault are restored and mapped
	// together: a power of two, at least PageSize.
	MapUnit uint64

	// CopyUnit is how many bytes around the first write to a page of the template
	// become the application's own: a power of two, at least PageSize. It has no
	// effect beyond MapUnit.
	CopyUnit uint64

	// Workers is how many goroutines encode during an eviction.
	Workers int

	// Restorers bounds how many accesses decode at the same time. More do not
	// help: writes to one shmem file share a lock in the host.
	Restorers int

	// StoreMax limits the store, in bytes; 0 is no limit.
	StoreMax uint64

	// AccessTimeout is how long an eviction waits for accesses to end before
	// it gives up.
	AccessTimeout time.Duration

	// NoMemoryTimeout is how long a restore that the host refuses memory for
	// tries again before it fails.
	NoMemoryTimeout time.Duration

	// Rest, if not nil, tells a deepening between two pages for how long it should
	// pause.
	Rest func() time.Duration

	// TestCorrupt, if not 0, flips a bit in the blob of the n-th page stored.
	TestCorrupt uint64
}

// DefaultOptions returns the parameters used unless said otherwise.
func DefaultOptions() Options {
	return Options{
		MapUnit:         64 << 10,
		CopyUnit:        64 << 10,
		Workers:         1,
		Restorers:       8,
		AccessTimeout:   100 * time.Millisecond,
		NoMemoryTimeout: 10 * time.Second,
	}
}

// Errors of Evict, Deepen and Check.
var (
	// ErrInhibited is returned while a save keeps all pages in the file.
	ErrInhibited = errors.New("eviction is inhibited: a checkpoint is being taken")
	// ErrStopped is returned when the caller's stop function ended the work.
	ErrStopped = errors.New("stopped")
	// ErrClosed is returned after Close.
	ErrClosed = errors.New("the memory file backend is closed")
)

// A Backend evicts and restores the pages of one memory file. See the package
// comment for states and locks.
type Backend struct {
	host  Host
	opts  Options
	table table
	store *arena.Arena

	// nonResident counts the pages in any state but resident. A page is
	// counted before it leaves that state and until after it is back, so zero
	// means that no gate has anything to do.
	nonResident atomic.Int64

	// havePinned is set once a page has been pinned, which makes Drop look at
	// resident pages too.
	havePinned atomic.Bool

	sections sections
	waiters  waiters

	// restorers has what restores work with. The garbage collector takes what
	// a burst of them leaves behind. restoring bounds how many are in use.
	restorers sync.Pool
	restoring chan struct{}

	// passMu is held by an eviction, a deepening, a check and while a save
	// begins.
	passMu sync.Mutex

	// hurry counts who waits for passMu to prefetch, which ends a deepening. waiting
	// counts the evictions and checks that wait for it: a deepening makes no pauses.
	hurry, waiting atomic.Int32

	// inhibit counts the saves in progress. It changes with passMu held and is
	// read without it by running passes, which then stop.
	inhibit atomic.Int64

	frees  frees
	closed atomic.Bool

	encoders    sync.Pool
	deepWorkers sync.Pool

	// passBytes is memory that a running pass holds, beyond the pools.
	passBytes atomic.Int64

	// template and extents say which pages of the file are, or were when the
	// file was loaded, equal to which pages of a template. They are set while
	// the file is loaded and immutable afterwards.
	template    Template
	mapTemplate bool
	extents     atomic.Pointer[[]extent]

	// pool is the host's pool of pages. Once set it stays.
	pool    poolRef
	lookups lookups

	// stalePool is set when a page of the pool that others are relative to was
	// stale and not found anew: the next deepening makes them do without.
	stalePool atomic.Bool

	// anew is how far the present pool was offered what is stored. It is protected
	// by passMu.
	anew anew

	// history predicts what a resume wants. Steps end when an eviction begins.
	history *prefetch.History

	// resume is set while a wait lasts whose end is to be told of: see
	// AwaitResume.
	resume atomic.Pointer[resume]

	stats counters
}

// New returns a Backend for the file behind host, which has no pages yet.
func New(host Host, opts Options) (*Backend, error) {
	if opts.MapUnit < PageSize || opts.MapUnit&(opts.MapUnit-1) != 0 {
		return nil, fmt.Errorf("memfile: map unit of %d bytes: must be a power of two, at least %d", opts.MapUnit, PageSize)
	}
	if opts.CopyUnit < PageSize || opts.CopyUnit&(opts.CopyUnit-1) != 0 {
		return nil, fmt.Errorf("memfile: copy unit of %d bytes: must be a power of two, at least %d", opts.CopyUnit, PageSize)
	}
	if opts.Workers < 1 || opts.Restorers < 1 {
		return nil, fmt.Errorf("memfile: %d workers and %d restorers: need at least one of each", opts.Workers, opts.Restorers)
	}
	store, err := arena.New(arena.Options{MaxBytes: opts.StoreMax})
	if err != nil {
		return nil, fmt.Errorf("memfile: %w", err)
	}
	b := &Backend{
		host:      host,
		opts:      opts,
		store:     store,
		history:   prefetch.New(),
		restoring: make(chan struct{}, opts.Restorers),
	}
	b.restorers.New = func() any { return new(restorer) }
	b.encoders.New = func() any { return newEncoder() }
	b.deepWorkers.New = func() any { return new(deepWorker) }
	b.waiters.init()
	return b, nil
}

// Extend tells the Backend that the file now has size bytes. It must precede
// any access to the new pages.
func (b *Backend) Extend(size uint64) error {
	pages := (size + PageSize - 1) >> pageShift
	if pages > maxPages {
		return fmt.Errorf("memory file of %d bytes: at most %d are supported", size, uint64(maxPages)<<pageShift)
	}
	b.table.extend(pages)
	return nil
}

// NonResident is the counter that must be zero for Gate to be skipped.
func (b *Backend) NonResident() *atomic.Int64 {
	return &b.nonResident
}

// EnterSection opens a bracket around accesses that no memory manager lock
// covers; evictions wait for it. It never blocks.
func (b *Backend) EnterSection() uint32 { return b.sections.enter() }

// ExitSection closes the bracket that EnterSection returned the token of.
func (b *Backend) ExitSection(token uint32) { b.sections.exit(token) }

// Close frees the store and the page table. Afterwards Drop has no effect, Stats
// returns zeroes, Evict, Deepen, Check and BeginSave fail with ErrClosed, and
// nothing else may be used. It waits for a running pass to end and must not be
// called with a lock held that Host needs: the pass may be waiting for it.
func (b *Backend) Close() {
	b.closed.Store(true)
	b.passMu.Lock()
	defer b.passMu.Unlock()
	// A Drop that did not see closed is waited for.
	for _, quiet := b.frees.begin(); !quiet; _, quiet = b.frees.begin() {
		time.Sleep(100 * time.Microsecond)
	}
	_ = b.store.Close()
	b.table.close()
}

// pagesOf returns the pages that overlap the bytes [start, end).
func pagesOf(start, end uint64) (first, last uint64) {
	return start >> pageShift, (end + PageSize - 1) >> pageShift
}

// Gate returns with every page that overlaps the bytes [start, end) resident.
// An error means that the host had no memory for a page; those pages stay
// evicted and intact.
func (b *Backend) Gate(start, end uint64) error {
	p, last := pagesOf(start, end)
	if p = b.table.skipResident(p, last); p < last {
		return b.gateSlow(p, last, &b.stats.demand)
	}
	return nil
}

// gateSlow is Gate for pages [p, last); restored pages are added to cause.
func (b *Backend) gateSlow(p, last uint64, cause *atomic.Uint64) error {
	var pt patience
	for p < last {
		switch w := b.table.load(p); w & stateMask {
		case resident:
			p++
		case candidate, raw:
			if b.table.cas(p, w, w&^stateMask) {
				b.nonResident.Add(-1)
				if w&stateMask == candidate {
					b.stats.aborted.Add(1)
				} else {
					b.stats.raw.Add(-1)
				}
				p++
			}
		case committing, busy:
			b.waiters.wait(&b.table, p)
		case evicted:
			n, err := b.restoreRun(p, last, cause)
			p += n
			if err == nil {
				pt = patience{}
			} else if err := pt.wait(b, err); err != nil {
				return err
			}
		default:
			b.badWord(p, w)
		}
	}
	return nil
}

// badWord ends the sandbox: nobody knows what became of the page.
func (b *Backend) badWord(page uint64, w word) {
	b.host.Fatal(fmt.Sprintf("page table corrupted: the page at memory file offset %#x has word %#x", page<<pageShift, w))
	panic("memfile: Host.Fatal returned")
}

// Drop forgets the content of the pages in [start, end), which the caller is
// about to free or zero. It may be called with the allocator's lock held.
func (b *Backend) Drop(start, end uint64) {
	b.drop(start, end, 0)
}

// Decommit is Drop for pages that stay in use, and pinned if they are.
func (b *Backend) Decommit(start, end uint64) {
	b.drop(start, end, pinned)
}

// drop makes the pages in [start, end) resident; of their flags, keep stay.
func (b *Backend) drop(start, end uint64, keep word) {
	if b.nonResident.Load() == 0 && b.stats.kept.Load() == 0 && !b.havePinned.Load() {
		return
	}
	b.frees.open()
	defer b.frees.close()
	if b.closed.Load() {
		return
	}
	p, last := pagesOf(start, end)
	for p < last {
		w := b.table.load(p)
		switch w & stateMask {
		case committing, busy:
			b.waiters.wait(&b.table, p)
			continue
		case resident:
			if w&^keep == resident {
				p++
				continue
			}
			// Pinned, tmapped or with a kept form: a page that is freed is
			// none of these.
		case candidate, raw, evicted:
		default:
			b.badWord(p, w)
		}
		if !b.table.cas(p, w, resident|w&keep&^stateMask) {
			continue
		}
		switch w & stateMask {
		case resident:
			b.forgetKept(w)
		case candidate:
			b.nonResident.Add(-1)
			b.forgetKept(w)
		case raw:
			b.nonResident.Add(-1)
			b.stats.raw.Add(-1)
		case evicted:
			b.nonResident.Add(-1)
			b.forget(w)
			b.stats.dropped.Add(1)
		}
		p++
	}
}

// forget frees what the word of a page that is no longer evicted refers to.
func (b *Backend) forget(w word) {
	b.stats.form(tagOf(w)).Add(-1)
	b.discard(w)
}

// Pin makes the pages in [start, end) resident and keeps them so until they
// are dropped.
func (b *Backend) Pin(start, end uint64) error {
	b.havePinned.Store(true)
	p, last := pagesOf(start, end)
	for p < last {
		w := b.table.load(p)
		if w&stateMask != resident {
			if err := b.gateSlow(p, p+1, &b.stats.demand); err != nil {
				return err
			}
			continue
		}
		if w&pinned != 0 {
			p++
		} else if b.replaceKept(p, w, w&^formMask|pinned) {
			p++
		}
	}
	return nil
}

// windowMax bounds how far Window looks for resident neighbours, in pages each
// way: 8 MiB, a few microseconds of work.
const windowMax = 2048

// Window returns the part of the bytes [limStart, limEnd) worth mapping in one
// go for an access to [needStart, needEnd), which it includes. It is the map
// unit around the access, whatever the state of its pages, and beyond it those
// neighbours that are resident, which cost nothing. It stops at candidates:
// mapping one would end its eviction without anybody having touched it.
func (b *Backend) Window(needStart, needEnd, limStart, limEnd uint64) (uint64, uint64) {
	start, end := b.Unit(needStart, needEnd, limStart, limEnd)
	p, lo := start>>pageShift, limStart>>pageShift
	for n := 0; p > lo && n < windowMax && b.table.load(p-1)&stateMask == resident; n++ {
		p--
	}
	q, hi := end>>pageShift, limEnd>>pageShift
	if q < hi {
		q = b.table.skipResident(q, min(hi, q+windowMax))
	}
	return p << pageShift, q << pageShift
}

// Unit returns the map unit around the bytes [needStart, needEnd), limited to
// [limStart, limEnd).
func (b *Backend) Unit(needStart, needEnd, limStart, limEnd uint64) (uint64, uint64) {
	return unitAround(b.mapUnit(), needStart, needEnd, limStart, limEnd)
}

func unitAround(unit, needStart, needEnd, limStart, limEnd uint64) (uint64, uint64) {
	start, end := max(needStart&^(unit-1), limStart), limEnd
	if e := (needEnd + unit - 1) &^ (unit - 1); e >= needEnd && e < limEnd {
		end = e
	}
	return start, end
}

// maxStreak is by how many bytes a fault's own unit grows at most.
const maxStreak = 448 << 10

// Refault is for a fault on the page at byte need. If the file lacks a page of
// the map unit around it, it returns what to restore and map: the unit, and as
// many after it (or before it) as there are units in memory in a row before it
// (or after it), since memory that is walked through costs a fault per unit.
func (b *Backend) Refault(need, limStart, limEnd uint64) (start, end uint64, refault bool) {
	start, end = b.Unit(need, need+PageSize, limStart, limEnd)
	if b.table.load(need>>pageShift)&stateMask == resident {
		b.history.Used(need >> pageShift)
	}
	if !b.AnyEvicted(start, end) {
		return start, end, false
	}
	// Pages of the template are cheaper to map from there, if they are reached
	// at all.
	start, end = b.grow(b.mapUnit(), start, end, limStart, limEnd, false)
	return start, end, true
}

// CopyUp is for an application's first write to the page at byte need, which is
// the template's: it returns what to make the application's own. It grows like
// Refault, and takes the template's pages with it.
func (b *Backend) CopyUp(need, limStart, limEnd uint64) (start, end uint64) {
	b.history.Wrote(need >> pageShift)
	unit := min(b.opts.CopyUnit, b.mapUnit())
	start, end = unitAround(unit, need, need+PageSize, limStart, limEnd)
	return b.grow(unit, start, end, limStart, limEnd, true)
}

// grow extends [start, end), one unit, by as many units after it as are in memory in
// a row before it, or else the other way round. It stops at pages of the template
// unless these may be taken.
func (b *Backend) grow(unit, start, end, limStart, limEnd uint64, template bool) (uint64, uint64) {
	most := maxStreak / unit
	word := func(off uint64) word { return b.table.load(off >> pageShift) }
	inMemory := func(off uint64) bool { return word(off)&stateMask == resident }
	n := uint64(0)
	for s := start; n < most && s >= limStart+unit && inMemory(s-PageSize) && inMemory(s-unit); s -= unit {
		n++
	}
	if n > 0 {
		for ; n > 0 && end < limEnd && (template || !isTemplate(word(end))); n-- {
			end = min(end+unit, limEnd)
		}
		return start, end
	}
	for e := end; n < most && e+unit <= limEnd && inMemory(e) && inMemory(e+unit-PageSize); e += unit {
		n++
	}
	for ; n > 0 && start > limStart && (template || !isTemplate(word(start-PageSize))); n-- {
		start = max(start-min(unit, start), limStart)
	}
	return start, end
}

// AnyEvicted tells whether the file lacks a page of [start, end).
func (b *Backend) AnyEvicted(start, end uint64) bool {
	for p, last := pagesOf(start, end); p < last; p++ {
		switch b.table.load(p) & stateMask {
		case committing, evicted, busy:
			return true
		}
	}
	return false
}

// mapUnit is the configured unit, doubled while a process that touched every
// other unit of the file could end up with more than 16384 host mappings (the
// kernel's limit is 65530 by default, and the platform panics beyond it).
func (b *Backend) mapUnit() uint64 {
	unit := b.opts.MapUnit
	for size := b.table.pages() << pageShift; size/unit > 2*16384; {
		unit *= 2
	}
	return unit
}

// EvictedBytes is the size of the pages that only the store holds.
func (b *Backend) EvictedBytes() uint64 {
	return b.stats.evictedPages() << pageShift
}

// OverlayCommitted sets bit 0 of vec[i] for each evicted page, vec[0] being
// the page at byte start.
func (b *Backend) OverlayCommitted(start uint64, vec []byte) {
	p := start >> pageShift
	for i := range vec {
		switch b.table.load(p+uint64(i)) & stateMask {
		case evicted, busy, committing:
			vec[i] |= 1
		}
	}
}

// BeginSave brings every page back into the file and keeps it there until the
// returned function is called. On error, nothing is inhibited and no page is
// lost.
func (b *Backend) BeginSave() (func(), error) {
	// A running pass sees inhibit and stops.
	b.inhibit.Add(1)
	b.passMu.Lock()
	defer b.passMu.Unlock()
	if b.closed.Load() {
		b.inhibit.Add(-1)
		return nil, ErrClosed
	}
	var err error
	b.table.visit(func(first, end uint64) bool {
		for p := first; p < end; p++ {
			if s := b.table.load(p) & stateMask; s == evicted || s == busy {
				if err = b.gateSlow(p, min(p+restoreMax, end), &b.stats.saved); err != nil {
					return false
				}
			}
		}
		return true
	})
	if err != nil {
		b.inhibit.Add(-1)
		return nil, err
	}
	var once sync.Once
	return func() { once.Do(func() { b.inhibit.Add(-1) }) }, nil
}

// Inhibited tells whether a save keeps all pages in the file.
func (b *Backend) Inhibited() bool { return b.inhibit.Load() != 0 }

func tagOf(w word) codec.Tag       { return codec.Tag(w >> tagShift) }
func handleOf(w word) arena.Handle { return arena.Handle(w >> handleShift & handleMask) }

func evictedWord(tag codec.Tag, h arena.Handle) word {
	return evicted | word(tag)<<tagShift | word(h)<<handleShift
}
