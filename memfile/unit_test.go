package memfile

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"runsc-agentzip/memfile/codec"
)

// A hooked host calls the function of the operation, if it is not nil, before
// or instead of it.
type hookedHost struct {
	*fakeHost
	read, write, punch func(r Range) error
	endAccess          func(unmark func(Range)) error
}

func (h *hookedHost) ReadAt(p []byte, off uint64) error {
	if h.read != nil {
		if err := h.read(Range{off, off + uint64(len(p))}); err != nil {
			return err
		}
	}
	return h.fakeHost.ReadAt(p, off)
}

func (h *hookedHost) WriteAt(p []byte, off uint64) error {
	if h.write != nil {
		if err := h.write(Range{off, off + uint64(len(p))}); err != nil {
			return err
		}
	}
	return h.fakeHost.WriteAt(p, off)
}

func (h *hookedHost) Punch(r Range) error {
	if h.punch != nil {
		if err := h.punch(r); err != nil {
			return err
		}
	}
	return h.fakeHost.Punch(r)
}

func (h *hookedHost) EndAccess(marked []Range, unmark func(Range), deadline time.Time, stop func() bool) error {
	if h.endAccess != nil {
		if err := h.endAccess(unmark); err != nil {
			return err
		}
	}
	return h.fakeHost.EndAccess(marked, unmark, deadline, stop)
}

// A fixture is a Backend with n pages in use, r, each with version 1.
type fixture struct {
	*hookedHost
	b     *Backend
	r     Range
	first uint64
}

func newFixture(tb tester, n uint64, opts Options) *fixture {
	tb.Helper()
	h := &hookedHost{fakeHost: newFakeHost(tb, 4*n+64, &opts)}
	b, err := New(h, opts)
	if err != nil {
		tb.Fatal(err)
	}
	h.backend.Close()
	h.backend = b
	if err := b.Extend(2 * tableChunk * PageSize); err != nil {
		tb.Fatal(err)
	}
	f := &fixture{hookedHost: h, b: b}
	f.r, _ = h.allocate(n, false)
	f.first = f.r.Start >> pageShift
	f.r.pages(func(p uint64) { f.set(p, version{p, 1}) })
	return f
}

// set writes a version to a page that is resident.
func (f *fixture) set(p uint64, v version) {
	f.model[p-f.lo].is = v
	content(f.page(p), v)
}

// kinds gives the pages, which are resident, contents of the kinds in turn.
func (f *fixture) kinds(kinds ...uint64) {
	i := 0
	f.r.pages(func(p uint64) {
		v := version{p, 1}
		for v.n%3 == 0 || v.hash()>>32%uint64(len(bases)) != kinds[i%len(kinds)] {
			v.n++
		}
		f.set(p, v)
		i++
	})
}

const (
	kindZero  = 0
	kindFill  = 1
	kindText  = 2
	kindRaw   = 6
	kindTight = 7
)

func (f *fixture) evict(tb tester) EvictResult {
	tb.Helper()
	res, err := f.b.Evict(EvictOptions{})
	if err != nil {
		tb.Fatal(err)
	}
	return res
}

func (f *fixture) state(p uint64) string {
	return stateNames[f.b.table.load(p)&stateMask]
}

// wantStates fails unless exactly n pages of the fixture are in the state.
func (f *fixture) wantStates(tb tester, n int, state string) {
	tb.Helper()
	got := 0
	f.r.pages(func(p uint64) {
		if f.state(p) == state {
			got++
		}
	})
	if got != n {
		tb.Errorf("%d pages are %s, should be %d", got, state, n)
	}
}

func wantError(tb tester, err error, is error, words ...string) {
	tb.Helper()
	if !errors.Is(err, is) {
		tb.Errorf("error is %v, should be %v", err, is)
		return
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			tb.Errorf("error %q does not say %q", err, w)
		}
	}
}

// inBackground returns a channel that is closed when fn has returned.
func inBackground(fn func()) <-chan struct{} {
	done := make(chan struct{})
	go func() {
		defer close(done)
		fn()
	}()
	return done
}

func wantBlocked(tb tester, done <-chan struct{}, what string) {
	tb.Helper()
	select {
	case <-done:
		tb.Errorf("%s does not wait", what)
	case <-time.After(20 * time.Millisecond):
	}
}

func wantDone(tb tester, done <-chan struct{}, what string) {
	tb.Helper()
	select {
	case <-done:
	case <-time.After(10 * time.Second):
		tb.Fatalf("%s hangs", what)
	}
}

func TestOptions(t *testing.T) {
	h := newFakeHost(t, 64, nil)
	for _, change := range []func(*Options){
		func(o *Options) { o.MapUnit = 0 },
		func(o *Options) { o.MapUnit = PageSize / 2 },
		func(o *Options) { o.MapUnit = 3 * PageSize },
		func(o *Options) { o.Workers = 0 },
		func(o *Options) { o.Restorers = 0 },
		func(o *Options) { o.StoreMax = 1 },
	} {
		opts := DefaultOptions()
		change(&opts)
		if _, err := New(h, opts); err == nil {
			t.Errorf("%+v is accepted", opts)
		}
	}
}

// TestRoundTrip evicts and restores pages of every kind in every tier.
func TestRoundTrip(t *testing.T) {
	for tier := range codec.Tier(codec.NumTiers) {
		f := newFixture(t, 64, DefaultOptions())
		f.kinds(kindZero, kindFill, kindText, 3, 4, 5, kindRaw, kindTight)
		held, _ := f.HeldBytes()
		res, err := f.b.Evict(EvictOptions{Tier: tier, Settle: time.Millisecond})
		if err != nil || res.Marked != 64 || res.Evicted != 48 || res.Rejected != 16 {
			t.Fatalf("%v: %+v, %v", tier, res, err)
		}
		f.wantStates(t, 16, "raw")
		f.wantStates(t, 48, "evicted")
		after, _ := f.HeldBytes()
		if held-after != 48*PageSize || f.b.EvictedBytes() != 48*PageSize {
			t.Errorf("%v: %d bytes were held, now %d, and %d are evicted", tier, held, after, f.b.EvictedBytes())
		}
		if !f.b.AnyEvicted(f.r.Start, f.r.End) || f.b.AnyEvicted(f.r.Start+6*PageSize, f.r.Start+8*PageSize) || f.b.AnyEvicted(f.r.End, f.r.End+PageSize) {
			t.Errorf("%v: AnyEvicted", tier)
		}
		vec := make([]byte, 66)
		vec[65] = 2
		f.b.OverlayCommitted(f.r.Start-PageSize, vec)
		n := 0
		for _, v := range vec {
			n += int(v)
		}
		if n != 48+2 {
			t.Errorf("%d pages are overlaid as committed", n-2)
		}
		s := f.b.Stats()
		if s.Pages.Zero != 8 || s.Pages.Compressed != 40 || s.Pages.Raw != 16 || s.GuestBytes != held ||
			s.OwnedBytes != s.ResidentBytes+s.StoreBytes+s.MetadataBytes || s.EvictNS.Count != 1 || s.EvictedPagesTotal != 48 {
			t.Errorf("%v: %+v", tier, s)
		}
		f.verifyBackend(t)

		// Rejected pages are not tried again until somebody has touched them.
		if res := f.evict(t); res.Marked != 0 {
			t.Errorf("%v: second eviction: %+v", tier, res)
		}
		f.verifyAll(t)
		f.verifyBackend(t)
		if s := f.b.Stats(); s.Faults.Demand != 48 || s.RestoredPagesTotal != 48 || s.RestoreNS.Count == 0 || s.Pages.Raw != 0 {
			t.Errorf("%v: %+v", tier, s)
		}
	}
}

func TestDeepen(t *testing.T) {
	f := newFixture(t, 64, DefaultOptions())
	f.evict(t)
	before := f.b.store.Stats().BlobBytes
	n, err := f.b.Deepen(nil)
	if after := f.b.store.Stats().BlobBytes; err != nil || n == 0 || after >= before {
		t.Errorf("%d pages replaced, %v; %d bytes became %d", n, err, before, after)
	}
	if n, err := f.b.Deepen(nil); n != 0 || err != nil {
		t.Errorf("again: %d pages, %v", n, err)
	}
	f.verifyBackend(t)
	f.verifyAll(t)
	f.verifyBackend(t)
}

// TestTouchedWhileEvicted has pages touched at each step of their eviction.
func TestTouchedWhileEvicted(t *testing.T) {
	touch := func(f *fixture, pages ...uint64) {
		for _, i := range pages {
			if err := f.b.Gate((f.first+i)*PageSize+1, (f.first+i)*PageSize+2); err != nil {
				panic(err)
			}
			f.touch(f.first+i, true)
		}
	}
	f := newFixture(t, 40, DefaultOptions())
	f.kinds(kindText)
	f.endAccess = func(func(Range)) error { touch(f, 0, 7); return nil }
	f.read = func(r Range) error {
		if r.Start == f.r.Start {
			touch(f, 1, 2, 9, 15)
		} else {
			touch(f, 39)
		}
		return nil
	}
	res := f.evict(t)
	if res.Aborted != 7 || res.Evicted+res.Aborted+res.Rejected != 40 {
		t.Errorf("%+v", res)
	}
	for _, i := range []uint64{0, 1, 2, 7, 9, 15, 39} {
		if s := f.state(f.first + i); s != "resident" {
			t.Errorf("page %d was touched and is %s", i, s)
		}
	}
	f.verifyBackend(t)
	f.verifyAll(t)
}

// TestWaitForCommit has pages accessed and dropped while the host frees them.
func TestWaitForCommit(t *testing.T) {
	f := newFixture(t, 4, DefaultOptions())
	f.kinds(kindText)
	var waiting []<-chan struct{}
	f.punch = func(Range) error {
		f.wantStates(t, 4, "committing")
		waiting = append(waiting,
			inBackground(func() {
				if err := f.b.Gate(f.r.Start, f.r.Start+2*PageSize); err != nil {
					t.Error(err)
				}
			}),
			inBackground(func() { f.b.Drop(f.r.Start+2*PageSize, f.r.Start+3*PageSize) }))
		wantBlocked(t, waiting[0], "Gate of a page that is being freed")
		wantBlocked(t, waiting[1], "Drop of a page that is being freed")
		return nil
	}
	f.evict(t)
	for _, done := range waiting {
		wantDone(t, done, "an access")
	}
	f.wantStates(t, 3, "resident")
	f.wantStates(t, 1, "evicted")
	f.model[f.first+2-f.lo].is = version{}
	f.verifyBackend(t)
	f.verifyAll(t)
	if f.b.stats.dropped.Load() != 1 {
		t.Errorf("%d pages dropped", f.b.stats.dropped.Load())
	}
}

// TestWaitForRestore has pages accessed and dropped while they are restored.
func TestWaitForRestore(t *testing.T) {
	f := newFixture(t, 4, DefaultOptions())
	f.kinds(kindText)
	f.evict(t)
	var waiting []<-chan struct{}
	f.write = func(Range) error {
		f.wantStates(t, 4, "busy")
		f.write = nil
		waiting = append(waiting,
			inBackground(func() { f.b.Drop(f.r.Start, f.r.Start+PageSize) }),
			inBackground(func() {
				if err := f.b.Gate(f.r.Start+PageSize, f.r.End); err != nil {
					t.Error(err)
				}
			}))
		wantBlocked(t, waiting[0], "Drop of a page that is being restored")
		wantBlocked(t, waiting[1], "Gate of a page that is being restored")
		return nil
	}
	if err := f.b.Gate(f.r.Start, f.r.End); err != nil {
		t.Fatal(err)
	}
	for _, done := range waiting {
		wantDone(t, done, "an access")
	}
	f.wantStates(t, 4, "resident")
	f.verifyBackend(t)
	f.verifyAll(t)
}

// TestPunchFails has the host free nothing, some or all of the pages and report
// an error.
func TestPunchFails(t *testing.T) {
	for _, freed := range []uint64{0, 1, 3, 4} {
		f := newFixture(t, 4, DefaultOptions())
		f.kinds(kindText, kindFill)
		f.punch = func(r Range) error {
			if freed != 0 {
				f.fakeHost.punch(Range{r.Start, r.Start + freed*PageSize})
			}
			return unix.EINTR
		}
		_, err := f.b.Evict(EvictOptions{})
		wantError(t, err, unix.EINTR, fmt.Sprintf("%#x", f.r.Start))
		if freed == 0 {
			f.wantStates(t, 4, "resident")
		} else {
			f.wantStates(t, 4, "evicted")
		}
		f.verifyBackend(t)
		f.verifyAll(t)
		f.verifyBackend(t)
	}
}

func TestReadFails(t *testing.T) {
	f := newFixture(t, 40, DefaultOptions())
	f.read = func(r Range) error {
		if r.Start != f.r.Start {
			return unix.EIO
		}
		return nil
	}
	res, err := f.b.Evict(EvictOptions{})
	wantError(t, err, unix.EIO, fmt.Sprintf("%#x", f.r.Start+batchPages*PageSize))
	if res.Skipped != 24 || res.Evicted+res.Rejected != 16 {
		t.Errorf("%+v", res)
	}
	f.verifyBackend(t)
	f.verifyAll(t)
}

// TestNoMemory has the host refuse memory for a while. In the meantime the
// pages may be dropped, and pages that need no memory be restored.
func TestNoMemory(t *testing.T) {
	opts := DefaultOptions()
	opts.Restorers = 1
	f := newFixture(t, 20, opts)
	f.kinds(kindText, kindText, kindText, kindZero)
	f.evict(t)
	f.faults.noMemory.Store(true)
	restored := inBackground(func() {
		if err := f.b.Gate(f.r.Start, f.r.End); err != nil {
			t.Error(err)
		}
	})
	for f.b.stats.noMemory.Load() == 0 {
		time.Sleep(time.Millisecond)
	}
	wantDone(t, inBackground(func() { f.b.Drop(f.r.Start, f.r.Start+PageSize) }), "Drop")
	f.fakeHost.punch(Range{f.r.Start, f.r.Start + PageSize})
	f.model[f.first-f.lo].is = version{}
	wantDone(t, inBackground(func() {
		if err := f.b.Gate(f.r.Start+3*PageSize, f.r.Start+4*PageSize); err != nil {
			t.Error(err)
		}
	}), "Gate of a zero page")
	wantBlocked(t, restored, "Gate without memory")
	f.faults.noMemory.Store(false)
	wantDone(t, restored, "Gate")
	f.wantStates(t, 20, "resident")
	f.verifyBackend(t)
	f.verifyAll(t)
}

// TestNoMemoryForLong has a restore give up, with nothing lost.
func TestNoMemoryForLong(t *testing.T) {
	opts := DefaultOptions()
	opts.NoMemoryTimeout = 5 * time.Millisecond
	f := newFixture(t, 6, opts)
	f.kinds(kindText, kindZero, kindText)
	f.evict(t)
	f.write = func(r Range) error {
		if r.Start > f.r.Start {
			return fmt.Errorf("pwrite: %w", unix.ENOSPC)
		}
		return nil
	}
	err := f.b.Gate(f.r.Start, f.r.End)
	wantError(t, err, unix.ENOSPC, fmt.Sprintf("%#x", f.r.Start+2*PageSize), "5ms", "memory limit")
	// What was restored before it failed stays.
	f.wantStates(t, 2, "resident")
	f.wantStates(t, 4, "evicted")
	f.verifyBackend(t)
	if _, err := f.b.BeginSave(); !errors.Is(err, unix.ENOSPC) || f.b.Inhibited() {
		t.Errorf("save: %v, inhibited %v", err, f.b.Inhibited())
	}
	f.verifyBackend(t)
	f.write = nil
	f.verifyAll(t)
	f.verifyBackend(t)

	// Any other error is not worth another try.
	f.evict(t)
	f.write = func(Range) error { return unix.EIO }
	wantError(t, f.b.Gate(f.r.Start, f.r.End), unix.EIO)
	f.write = nil
	f.verifyAll(t)
}

// TestStoreFull evicts more than there is room for. What does not fit stays in
// the file until there is room.
func TestStoreFull(t *testing.T) {
	opts := DefaultOptions()
	opts.StoreMax = 16 << 10
	f := newFixture(t, 64, opts)
	f.kinds(kindText, kindZero, kindText, kindText)
	res := f.evict(t)
	if res.Skipped == 0 || res.Evicted <= 16 || res.Evicted+res.Skipped != 64 {
		t.Errorf("%+v", res)
	}
	if n := f.b.Stats().Rejects["store_full"]; n != res.Skipped {
		t.Errorf("store_full is %d", n)
	}
	if n := f.b.store.Stats().HeldBytes; n > opts.StoreMax {
		t.Errorf("the store holds %d bytes", n)
	}
	f.wantStates(t, int(res.Skipped), "resident")
	f.verifyBackend(t)
	f.verifyAll(t)
	f.b.Drop(f.r.Start, f.r.End)
	f.verifyBackend(t)
	if again := f.evict(t); again.Evicted != res.Evicted {
		t.Errorf("with an empty store again: %+v", again)
	}
}

// TestWhyStopped checks what a pass that is ended from outside returns, and that
// it leaves no page in between.
func TestWhyStopped(t *testing.T) {
	always := func() bool { return true }
	f := newFixture(t, 40, DefaultOptions())
	_, err := f.b.Evict(EvictOptions{Stop: always})
	wantError(t, err, ErrStopped)

	stopped := false
	f.endAccess = func(func(Range)) error { stopped = true; return errBusy }
	_, err = f.b.Evict(EvictOptions{Stop: func() bool { return stopped }})
	wantError(t, err, ErrStopped)
	f.endAccess = nil

	stopped = false
	f.read = func(Range) error { stopped = true; return nil }
	res, err := f.b.Evict(EvictOptions{Stop: func() bool { return stopped }})
	wantError(t, err, ErrStopped)
	if res.Evicted+res.Rejected != batchPages || res.Skipped != 40-batchPages {
		t.Errorf("%+v", res)
	}
	f.read = nil
	f.verifyBackend(t)

	stopped = false
	_, err = f.b.Evict(EvictOptions{Settle: time.Hour, Stop: func() bool { s := stopped; stopped = true; return s }})
	wantError(t, err, ErrStopped)

	_, err = f.b.Deepen(always)
	wantError(t, err, ErrStopped)
	_, err = f.b.Check(always)
	wantError(t, err, ErrStopped)

	// A save ends a running eviction.
	var save <-chan struct{}
	var end func()
	f.endAccess = func(func(Range)) error {
		save = inBackground(func() { end, _ = f.b.BeginSave() })
		for !f.b.Inhibited() {
			time.Sleep(time.Millisecond)
		}
		return nil
	}
	_, err = f.b.Evict(EvictOptions{Settle: time.Hour})
	wantError(t, err, ErrInhibited)
	f.endAccess = nil
	wantDone(t, save, "BeginSave")
	_, err = f.b.Evict(EvictOptions{})
	wantError(t, err, ErrInhibited)
	_, err = f.b.Check(nil)
	wantError(t, err, ErrInhibited)
	f.wantStates(t, 40, "resident")
	end()
	end()
	f.verifyBackend(t)

	// Close does so, too.
	var closed <-chan struct{}
	f.endAccess = func(func(Range)) error {
		closed = inBackground(f.b.Close)
		for !f.b.closed.Load() {
			time.Sleep(time.Millisecond)
		}
		return nil
	}
	_, err = f.b.Evict(EvictOptions{Settle: time.Hour})
	wantError(t, err, ErrClosed)
	wantDone(t, closed, "Close")
}

func TestClosed(t *testing.T) {
	f := newFixture(t, 40, DefaultOptions())
	f.evict(t)
	f.b.havePinned.Store(true)
	f.b.Close()
	f.b.Close()
	f.b.Drop(f.r.Start, f.r.End)
	_, err := f.b.Evict(EvictOptions{})
	wantError(t, err, ErrClosed)
	_, err = f.b.Deepen(nil)
	wantError(t, err, ErrClosed)
	_, err = f.b.Check(nil)
	wantError(t, err, ErrClosed)
	_, err = f.b.BeginSave()
	wantError(t, err, ErrClosed)
	_, err = f.b.HeldBytes()
	wantError(t, err, ErrClosed)
	if s := f.b.Stats(); s.OwnedBytes != 0 {
		t.Errorf("%+v", s)
	}
}

// TestBusy has accesses that do not end in time.
func TestBusy(t *testing.T) {
	opts := DefaultOptions()
	opts.AccessTimeout = 10 * time.Millisecond
	f := newFixture(t, 8, opts)
	s := f.newSpace()
	s.mu.RLock()
	_, err := f.b.Evict(EvictOptions{})
	wantError(t, err, errBusy)
	s.mu.RUnlock()
	f.verifyBackend(t)

	token := f.b.EnterSection()
	for range 3 {
		if _, err := f.b.Evict(EvictOptions{}); err == nil || !strings.Contains(err.Error(), "file operation") {
			t.Errorf("eviction with an open section: %v", err)
		}
	}
	f.wantStates(t, 8, "resident")
	f.b.ExitSection(token)
	if n := f.b.Stats().Rejects["pass_gave_up_busy"]; n != 4 {
		t.Errorf("gave up %d times", n)
	}
	if res := f.evict(t); res.Evicted+res.Rejected != 8 {
		t.Errorf("%+v", res)
	}
}

func TestLocked(t *testing.T) {
	f := newFixture(t, 8, DefaultOptions())
	f.kinds(kindText)
	s := f.newSpace()
	s.locked = []Range{{f.r.Start - 8*PageSize, f.r.Start + 3*PageSize}}
	if res := f.evict(t); res.Locked != 3 || res.Evicted != 5 || res.Skipped != 0 {
		t.Errorf("%+v", res)
	}
	if n := f.b.Stats().Rejects["locked_by_application"]; n != 3 {
		t.Errorf("counted %d", n)
	}
	f.verifyBackend(t)
}

func TestPin(t *testing.T) {
	f := newFixture(t, 8, DefaultOptions())
	f.kinds(kindText)
	f.evict(t)
	if err := f.b.Pin(f.r.Start+PageSize, f.r.Start+3*PageSize); err != nil {
		t.Fatal(err)
	}
	f.touch(f.first+1, true)
	for range 2 {
		f.evict(t)
		f.wantStates(t, 2, "resident")
		f.touch(f.first+2, false)
		// Gate does not end it.
		if err := f.b.Gate(f.r.Start, f.r.End); err != nil {
			t.Fatal(err)
		}
	}
	f.evict(t)
	f.verifyBackend(t)
	f.b.Drop(f.r.Start+PageSize, f.r.Start+2*PageSize)
	f.evict(t)
	f.wantStates(t, 1, "resident")

	f.faults.noMemory.Store(true)
	f.b.opts.NoMemoryTimeout = 1
	wantError(t, f.b.Pin(f.r.Start, f.r.End), unix.ENOMEM)
	f.faults.noMemory.Store(false)
	f.verifyBackend(t)
}

// TestFreedBetweenVisits frees pages after the Backend has asked which are in
// use and before it marks them.
func TestFreedBetweenVisits(t *testing.T) {
	f := newFixture(t, 8, DefaultOptions())
	f.kinds(kindText)
	visits := 0
	v := &visitHost{f.hookedHost, func() {
		if visits++; visits == 2 {
			f.decRef(Range{f.r.Start, f.r.Start + 3*PageSize})
		}
	}}
	f.b.host = v
	if res := f.evict(t); res.Marked != 5 || res.Evicted != 5 {
		t.Errorf("%+v", res)
	}
	f.wantStates(t, 3, "resident")
	f.verifyBackend(t)
}

type visitHost struct {
	*hookedHost
	before func()
}

func (h *visitHost) VisitEvictable(fn func(Range)) {
	h.before()
	h.hookedHost.VisitEvictable(fn)
}

func TestSections(t *testing.T) {
	never := func() bool { return false }
	soon := func() time.Time { return time.Now().Add(5 * time.Millisecond) }
	var s sections
	if !s.wait(soon(), never) {
		t.Error("nothing to wait for")
	}
	// One that is open is waited for, in whichever slot it is, also by a wait
	// after one that gave up; a newcomer is not.
	for range 4 {
		a := s.enter()
		for range 3 {
			if s.wait(soon(), never) {
				t.Error("an open section was not waited for")
			}
		}
		s.exit(a)
		if !s.wait(soon(), never) {
			t.Error("a closed section was waited for")
		}
	}
	a := s.enter()
	waited := make(chan bool)
	go func() { waited <- s.wait(time.Now().Add(time.Minute), never) }()
	for s.current.Load() == a {
		time.Sleep(100 * time.Microsecond)
	}
	b := s.enter()
	s.exit(a)
	// The wait moves on to the newcomer's slot: it may not know that it is one.
	for s.current.Load() != a {
		time.Sleep(100 * time.Microsecond)
	}
	s.exit(b)
	if !<-waited {
		t.Error("wait gave up")
	}

	c := s.enter()
	if s.wait(time.Now().Add(time.Minute), func() bool { return true }) {
		t.Error("an open section was not waited for")
	}
	d := s.enter() // nested
	s.exit(d)
	s.exit(c)
	func() {
		defer func() {
			if recover() == nil {
				t.Error("a section can be closed twice")
			}
		}()
		s.exit(c)
	}()
}

// TestWindow checks what Window promises against random page states.
func TestWindow(t *testing.T) {
	var tab table
	tab.extend(2 * tableChunk)
	defer tab.close()
	const base, n = tableChunk - 64, 128
	rapid.Check(t, func(t *rapid.T) {
		b := &Backend{opts: Options{MapUnit: PageSize << rapid.IntRange(0, 6).Draw(t, "unit")}}
		b.table.chunks.Store(tab.chunks.Load())
		unit := b.mapUnit() / PageSize
		states := rapid.SliceOfN(rapid.SampledFrom([]word{resident, resident, resident, resident | pinned, candidate, raw, evicted, busy, committing}), n, n).Draw(t, "states")
		for i, w := range states {
			tab.store(base+uint64(i), w)
		}
		limFirst := rapid.Uint64Range(0, n-1).Draw(t, "limFirst")
		limLast := rapid.Uint64Range(limFirst+1, n).Draw(t, "limLast")
		needFirst := rapid.Uint64Range(limFirst, limLast-1).Draw(t, "needFirst")
		needLast := rapid.Uint64Range(needFirst+1, min(limLast, needFirst+20)).Draw(t, "needLast")
		// An access need not be aligned.
		needStart := (base+needFirst)*PageSize + rapid.SampledFrom([]uint64{0, 1, PageSize - 1}).Draw(t, "startOff")
		needEnd := (base+needLast)*PageSize - rapid.SampledFrom([]uint64{0, 1, PageSize - 1}).Draw(t, "endOff")
		if needEnd <= needStart {
			needStart, needEnd = (base+needFirst)*PageSize, (base+needLast)*PageSize
		}
		limStart, limEnd := (base+limFirst)*PageSize, (base+limLast)*PageSize

		start, end := b.Window(needStart, needEnd, limStart, limEnd)
		if start%PageSize != 0 || end%PageSize != 0 {
			t.Fatalf("%#x-%#x is not aligned", start, end)
		}
		if start > needStart || end < needEnd {
			t.Fatalf("%#x-%#x does not include %#x-%#x", start, end, needStart, needEnd)
		}
		if start < limStart || end > limEnd {
			t.Fatalf("%#x-%#x exceeds %#x-%#x", start, end, limStart, limEnd)
		}
		ustart, uend := b.Unit(needStart, needEnd, limStart, limEnd)
		if ustart != max(needStart/PageSize/unit*unit*PageSize, limStart) || uend != min((needEnd+unit*PageSize-1)/PageSize/unit*unit*PageSize, limEnd) {
			t.Fatalf("the unit of %#x-%#x in %#x-%#x is %#x-%#x", needStart, needEnd, limStart, limEnd, ustart, uend)
		}
		if start > ustart || end < uend {
			t.Fatalf("%#x-%#x does not include the unit %#x-%#x", start, end, ustart, uend)
		}
		isResident := func(p uint64) bool { return states[p-base]&stateMask == resident }
		for p := start / PageSize; p < end/PageSize; p++ {
			if (p < ustart/PageSize || p >= uend/PageSize) && !isResident(p) {
				t.Fatalf("%#x-%#x has page %#x, which is not resident, beyond the unit %#x-%#x", start, end, p*PageSize, ustart, uend)
			}
		}
		if start > limStart && isResident(start/PageSize-1) || end < limEnd && isResident(end/PageSize) {
			t.Fatalf("%#x-%#x leaves out a resident neighbour", start, end)
		}
	})
}

// TestWindowIsBounded checks that an access to a large resident area does not
// look at all of it.
func TestWindowIsBounded(t *testing.T) {
	b := &Backend{opts: DefaultOptions()}
	if err := b.Extend(4 * tableChunk * PageSize); err != nil {
		t.Fatal(err)
	}
	defer b.table.close()
	if unit := b.mapUnit(); unit != 128<<10 {
		t.Errorf("the unit of a file of 4 GiB is %d", unit)
	}
	need := uint64(2 * tableChunk * PageSize)
	start, end := b.Window(need, need+PageSize, 0, 4*tableChunk*PageSize)
	if start != need-windowMax*PageSize || end != need+(windowMax+32)*PageSize {
		t.Errorf("%#x-%#x for %#x", start, end, need)
	}
}

func TestPagesOf(t *testing.T) {
	for _, c := range [][4]uint64{
		{0, 1, 0, 1}, {0, PageSize, 0, 1}, {0, PageSize + 1, 0, 2},
		{PageSize - 1, PageSize + 1, 0, 2}, {PageSize, PageSize, 1, 1},
		{1 << 51, 1<<51 + 1, 1 << 39, 1<<39 + 1},
	} {
		if first, last := pagesOf(c[0], c[1]); first != c[2] || last != c[3] {
			t.Errorf("bytes %#x-%#x are pages %#x-%#x", c[0], c[1], first, last)
		}
	}
}

// TestWord checks that the parts of a word do not overlap.
func TestWord(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		tag := codec.Tag(rapid.Uint8().Draw(t, "tag"))
		h := rapid.Uint64Range(0, handleMask).Draw(t, "handle")
		w := evictedWord(tag, 0) | h<<handleShift
		for _, flag := range []word{0, tmapped, deep, pinned} {
			v := w | flag
			if v&stateMask != evicted || tagOf(v) != tag || uint64(handleOf(v)) != h {
				t.Fatalf("word %#x has state %d, tag %v, handle %#x", v, v&stateMask, tagOf(v), handleOf(v))
			}
		}
	})
}

// TestTemplateMapped follows the mark of a page that may be mapped from the
// template through everything that may happen to the page.
func TestTemplateMapped(t *testing.T) {
	opts := DefaultOptions()
	opts.MapUnit = PageSize
	h := newFakeHost(t, 256, &opts)
	s := h.newSpace()
	s.extents = h.adopt(t, rand.New(rand.NewPCG(1, 1)), 32)
	b := h.backend
	r := s.extents[0].Range
	p := r.Start >> pageShift
	one := Range{r.Start, r.Start + PageSize}
	tmap := func() {
		t.Helper()
		if _, _, _, ok := b.TemplateWindow(one.Start, one.Start, one.End); !ok {
			t.Fatal("the page cannot be mapped from the template")
		}
	}
	want := func(state word, mapped bool, what string) {
		t.Helper()
		w := b.table.load(p)
		marked := w&tmapped != 0
		if isTemplate(w) {
			marked = b.table.maybeMapped(p)
		}
		if w&stateMask != state || marked != mapped {
			t.Errorf("%s: the page has word %#x, marked: %v", what, w, marked)
		}
	}
	want(evicted, false, "adopted")
	if !b.TemplateBacked(one.Start) {
		t.Error("an adopted page is not the template's")
	}
	tmap()
	want(evicted, true, "mapped")
	if mapped, err := b.GateMapped(one.Start, one.End); !mapped || err != nil {
		t.Errorf("GateMapped: %v, %v", mapped, err)
	}
	want(resident, true, "restored")
	if !b.TemplateBacked(one.Start) {
		t.Error("a page that may be mapped from the template can be written to")
	}
	if _, _, _, ok := b.TemplateWindow(one.Start, one.Start, one.End); ok {
		t.Error("a resident page can be mapped from the template")
	}
	// An eviction that does not come to its end must not lose the mark.
	h.faults.busyIn.Store(1024)
	_, err := b.Evict(EvictOptions{})
	wantError(t, err, errBusy)
	h.faults.busyIn.Store(0)
	want(resident, true, "not evicted")
	hh := &hookedHost{fakeHost: h}
	hh.endAccess = func(unmark func(Range)) error {
		want(candidate, true, "marked")
		if err := b.Gate(one.Start, one.End); err != nil {
			t.Fatal(err)
		}
		want(resident, true, "touched")
		return nil
	}
	b.host = hh
	if _, err := b.Evict(EvictOptions{}); err != nil {
		t.Fatal(err)
	}
	want(resident, true, "touched")
	if err := b.Pin(one.Start, one.End); err != nil {
		t.Fatal(err)
	}
	want(resident, true, "pinned")
	b.ClearTemplateMapped(one.Start, one.End)
	want(resident, false, "cleared")
	if w := b.table.load(p); w&pinned == 0 {
		t.Error("no longer pinned")
	}
	b.Drop(one.Start, one.End)
	want(resident, false, "dropped")
	if b.TemplateBacked(one.Start) {
		t.Error("a dropped page is still the template's")
	}

	// A page that a whole eviction has unmapped everywhere has no mark.
	hh.endAccess = nil
	content(h.page(p), version{p, 1})
	if _, err := b.Evict(EvictOptions{}); err != nil {
		t.Fatal(err)
	}
	want(evicted, false, "evicted again")
	tmap()
	b.Drop(one.Start, one.End)
	want(resident, false, "dropped while mapped")
	h.model[p-h.lo].is = version{}
	h.punch(one)
	h.verifyAll(t)
}

func TestAdoptRefuses(t *testing.T) {
	opts := DefaultOptions()
	h := newFakeHost(t, 256, &opts)
	r := Range{h.lo << pageShift, (h.lo + 4) << pageShift}
	if err := h.backend.Adopt(r, 0); err == nil {
		t.Error("pages are adopted from no template")
	}
	h.template = make(fakeTemplate, 8)
	h.backend.SetTemplate(h.template, false)
	for _, off := range []uint64{5 * PageSize, 8 * PageSize, 1 << 50} {
		if err := h.backend.Adopt(r, off); err == nil {
			t.Errorf("pages are adopted from beyond the end, from %#x", off)
		}
	}
	if err := h.backend.Adopt(r, 4*PageSize); err != nil {
		t.Error(err)
	}
	if _, _, _, ok := h.backend.TemplateWindow(r.Start, r.Start, r.End); ok {
		t.Error("pages are mapped although they must not be")
	}
}

// TestStatsNames keeps the names of causes, which other programs read, from
// changing.
func TestStatsNames(t *testing.T) {
	var names []string
	for i := range numRejects {
		names = append(names, rejectName(i))
	}
	golden(t, "testdata/rejects.json", names)
}

// golden compares v, as JSON, with a file.
func golden(t *testing.T, file string, v any) {
	t.Helper()
	got, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	want, err := os.ReadFile(file)
	if err != nil || string(got)+"\n" != string(want) {
		t.Errorf("%s has (%v)\n%s\nshould be\n%s", file, err, want, got)
	}
}

func TestHistogram(t *testing.T) {
	var h histogram
	if s := h.snapshot(); s.Count != 0 || s.Buckets != nil {
		t.Errorf("%+v", s)
	}
	for _, d := range []time.Duration{-1, 0, 1, 2, 3, 1023, 1024, 1 << 62} {
		h.add(d)
	}
	s := h.snapshot()
	want := make([]uint64, 48)
	want[0], want[1], want[9], want[10], want[47] = 3, 2, 1, 1, 1
	if s.Count != 8 || s.MaxNS != 1<<62 || fmt.Sprint(s.Buckets) != fmt.Sprint(want) {
		t.Errorf("%+v", s)
	}
}
