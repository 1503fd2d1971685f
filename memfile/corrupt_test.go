package memfile

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"

	"runsc-agentzip/memfile/arena"
	"runsc-agentzip/memfile/codec"
)

// fatal runs fn and returns the message that Host.Fatal ended it with, or "".
func fatal(fn func()) (msg string) {
	defer func() {
		switch r := recover().(type) {
		case nil:
		case fatalError:
			msg = string(r)
		default:
			panic(r)
		}
	}()
	fn()
	return ""
}

// blobOf returns the blob of an evicted page, to write to.
func (f *fixture) blobOf(tb tester, p uint64) []byte {
	tb.Helper()
	blob, err := f.b.store.Bytes(handleOf(f.b.table.load(p)))
	if err != nil {
		tb.Fatal(err)
	}
	return blob
}

// gateFatally gates a page that cannot be restored. It fails unless the sandbox
// ends with a message that has the page's offset and the words, and the file
// still has no content for the page.
func (f *fixture) gateFatally(tb tester, p uint64, words ...string) {
	tb.Helper()
	w := f.b.table.load(p)
	msg := fatal(func() {
		err := f.b.Gate(p<<pageShift, (p+1)<<pageShift)
		tb.Errorf("Gate of a corrupt page returned %v", err)
	})
	for _, word := range append(words, fmt.Sprintf("%#x", p<<pageShift), "the sandbox is killed") {
		if !strings.Contains(msg, word) {
			tb.Errorf("message %q does not say %q", msg, word)
		}
	}
	if state := f.state(p); state == "resident" {
		tb.Errorf("page %#x is %s", p<<pageShift, state)
	}
	if !bytes.Equal(f.page(p), make([]byte, PageSize)) {
		tb.Errorf("page %#x has been written to", p<<pageShift)
	}
	// A living sandbox is needed for the next case.
	f.b.table.store(p, w)
}

// TestEveryBitOfABlob flips each bit of stored pages of each form. Either the
// flip is found, or it does not matter.
func TestEveryBitOfABlob(t *testing.T) {
	for _, c := range []struct {
		tier codec.Tier
		tag  codec.Tag
		kind uint64
	}{
		{codec.TierFast, codec.TagFill, kindFill},
		{codec.TierFast, codec.TagS2, 5},
		{codec.TierDeep, codec.TagZstd, 5},
		{codec.TierDeep, codec.TagZstd, kindText},
	} {
		f := newFixture(t, 2, DefaultOptions())
		f.kinds(c.kind)
		if _, err := f.b.Evict(EvictOptions{Tier: c.tier}); err != nil {
			t.Fatal(err)
		}
		w := f.b.table.load(f.first)
		if w&stateMask != evicted || tagOf(w) != c.tag {
			t.Fatalf("%v: the page has word %#x", c.tag, w)
		}
		blob := f.blobOf(t, f.first)
		r := f.b.acquireRestorer()
		var page, want codec.Page
		content(want[:], f.model[f.first-f.lo].is)
		harmless := 0
		for bit := range len(blob) * 8 {
			blob[bit/8] ^= 1 << (bit % 8)
			err := f.b.load(r, &page, f.first, w)
			var corrupt *errCorrupt
			switch {
			case err == nil && page == want:
				harmless++
			case err == nil:
				t.Errorf("%v: bit %d of %d flipped gives another page", c.tag, bit, len(blob)*8)
			case !errors.As(err, &corrupt):
				t.Errorf("%v: bit %d: %v", c.tag, bit, err)
			}
			blob[bit/8] ^= 1 << (bit % 8)
		}
		f.b.releaseRestorer(r)
		if harmless > len(blob)*8/10 {
			t.Errorf("%v: %d of %d flips do not matter", c.tag, harmless, len(blob)*8)
		}

		// And the whole way, for one bit of each part.
		for at, word := range map[int]string{
			0:                    "checksum mismatch",
			8:                    "header",
			13:                   "header",
			14:                   "header",
			blobHeader:           "",
			len(blob) - 1:        "",
			(16 + len(blob)) / 2: "",
		} {
			blob[at] ^= 4
			if f.b.load(f.b.restorers.Get().(*restorer), &page, f.first, w) != nil {
				f.gateFatally(t, f.first, word, c.tag.String())
			}
			blob[at] ^= 4
		}
		f.verifyAll(t)
	}
}

// TestWrongHandle has pages refer to blobs that are not theirs.
func TestWrongHandle(t *testing.T) {
	f := newFixture(t, 8, DefaultOptions())
	f.kinds(kindText)
	f.evict(t)
	get := func(i uint64) word { return f.b.table.load(f.first + i) }
	set := func(i uint64, w word) { f.b.table.store(f.first+i, w) }
	good := get(0)
	other := handleOf(get(1))
	freed := handleOf(get(2))
	f.b.Drop((f.first+2)<<pageShift, (f.first+3)<<pageShift)
	f.model[f.first+2-f.lo].is = version{}

	for name, h := range map[string]arena.Handle{
		"another page's":   other,
		"a freed blob's":   freed,
		"inside of a blob": handleOf(good) + 1,
		"none":             0,
		"beyond the store": handleMask,
	} {
		set(0, evictedWord(tagOf(good), h))
		words := []string{"s2"}
		if name == "another page's" {
			words = append(words, fmt.Sprintf("that of the page at %#x", (f.first+1)<<pageShift))
		} else {
			words = append(words, "bad handle")
		}
		t.Log(name)
		f.gateFatally(t, f.first, words...)
	}
	for _, tag := range []codec.Tag{codec.TagFill, codec.TagZstd, codec.TagInvalid, codec.TagPool, codec.TagTemplate, 200} {
		set(0, evictedWord(tag, handleOf(good)))
		f.gateFatally(t, f.first, tag.String())
	}
	set(0, good)
	f.verifyBackend(t)
	f.verifyAll(t)

	// A freed blob's place that another page has taken.
	f.evict(t)
	stale := get(3)
	if err := f.b.Gate((f.first+3)<<pageShift, (f.first+4)<<pageShift); err != nil {
		t.Fatal(err)
	}
	r, _ := f.allocate(8, false)
	r.pages(func(p uint64) { f.set(p, version{p, 1}) })
	f.evict(t)
	w := get(3)
	if stale != w {
		set(3, stale)
		f.gateFatally(t, f.first+3)
		set(3, w)
	}
	f.verifyAll(t)
}

func TestBadWord(t *testing.T) {
	f := newFixture(t, 2, DefaultOptions())
	for _, w := range []word{6, 7, 7 | 3<<tagShift} {
		f.b.table.store(f.first, w)
		f.b.nonResident.Add(1)
		for name, fn := range map[string]func(){
			"Gate": func() { _ = f.b.Gate(f.r.Start, f.r.End) },
			"Drop": func() { f.b.Drop(f.r.Start, f.r.End) },
			"Pin":  func() { _ = f.b.Pin(f.r.Start, f.r.End) },
		} {
			msg := fatal(fn)
			if !strings.Contains(msg, "page table corrupted") || !strings.Contains(msg, fmt.Sprintf("%#x", f.r.Start)) || !strings.Contains(msg, fmt.Sprintf("%#x", w)) {
				t.Errorf("%s of word %#x: %q", name, w, msg)
			}
		}
		res, err := f.b.Check(nil)
		if err != nil || len(res.Problems) != 1 || !strings.Contains(res.Problems[0], "no state") {
			t.Errorf("check: %v, %v", res, err)
		}
		f.b.table.store(f.first, resident)
		f.b.nonResident.Add(-1)
	}
}

// TestTestCorrupt checks the option with which the whole is tested.
func TestTestCorrupt(t *testing.T) {
	opts := DefaultOptions()
	opts.TestCorrupt = 3
	f := newFixture(t, 8, opts)
	f.kinds(kindText)
	f.evict(t)
	res, err := f.b.Check(nil)
	if err != nil || len(res.Problems) != 1 || res.Stored != 8 {
		t.Fatalf("%+v, %v", res, err)
	}
	// Compressing it harder must neither end the sandbox nor make it look good.
	if _, err := f.b.Deepen(nil); err != nil {
		t.Fatal(err)
	}
	if res, err = f.b.Check(nil); err != nil || len(res.Problems) != 1 {
		t.Fatalf("%+v, %v", res, err)
	}
	f.gateFatally(t, f.first+2)
	if n := f.b.stats.checksumFailures.Load(); n != 1 {
		t.Errorf("%d checksum failures", n)
	}
}

// TestCheckFinds has Check look at what is wrong in each way.
func TestCheckFinds(t *testing.T) {
	for name, c := range map[string]struct {
		damage func(f *fixture)
		word   string
	}{
		"references": {func(f *fixture) { atomic.AddUint64(headAt(f.blobOf(t, f.first)), uint64(headRef)) }, "references"},
		"checksum":   {func(f *fixture) { f.blobOf(t, f.first)[0]++ }, "checksum mismatch"},
		"page":       {func(f *fixture) { binary.LittleEndian.PutUint32(f.blobOf(t, f.first)[8:], 7) }, "header"},
		"leak":       {func(f *fixture) { _, _, _ = f.b.store.Alloc(100) }, "leaked"},
		"two pages":  {func(f *fixture) { f.b.table.store(f.first, f.b.table.load(f.first+1)) }, "live twice"},
		"count":      {func(f *fixture) { f.b.stats.form(codec.TagS2).Add(1) }, "counted"},
		"gate":       {func(f *fixture) { f.b.nonResident.Add(-1) }, "gated"},
	} {
		f := newFixture(t, 8, DefaultOptions())
		f.kinds(kindText)
		f.evict(t)
		c.damage(f)
		res, err := f.b.Check(nil)
		if err != nil || len(res.Problems) == 0 || !strings.Contains(strings.Join(res.Problems, "\n"), c.word) {
			t.Errorf("%s: %q, %v", name, res.Problems, err)
		}
		f.wantStates(t, 8, "evicted")
	}
}

// TestManyProblems checks that a report has an end.
func TestManyProblems(t *testing.T) {
	f := newFixture(t, 200, DefaultOptions())
	f.kinds(kindText)
	f.evict(t)
	f.r.pages(func(p uint64) { f.blobOf(t, p)[0]++ })
	res, err := f.b.Check(nil)
	if err != nil || res.Stored != 200 || len(res.Problems) != checkMax {
		t.Errorf("%d problems in %d pages, %v", len(res.Problems), res.Stored, err)
	}
}

// A brokenTemplate cannot be read where it says.
type brokenTemplate struct {
	fakeTemplate
	bad uint64
}

func (b brokenTemplate) ReadPages(dst []byte, n uint64) error {
	if n <= b.bad && b.bad < n+uint64(len(dst))>>pageShift {
		return errors.New("template page was modified")
	}
	return b.fakeTemplate.ReadPages(dst, n)
}

// TestBrokenTemplate has a template that is not what it was.
func TestBrokenTemplate(t *testing.T) {
	f := newFixture(t, 4, DefaultOptions())
	r, _ := f.allocate(20, false)
	r.pages(func(p uint64) { f.fakeHost.template = append(f.fakeHost.template, p) })
	f.b.SetTemplate(brokenTemplate{f.fakeHost.template, 5}, true)
	if err := f.b.Adopt(r, 0); err != nil {
		t.Fatal(err)
	}
	first := r.Start >> pageShift
	f.gateFatally(t, first+5, "template page was modified")
	// Others are as good as ever.
	if err := f.b.Gate(r.Start, r.Start+5*PageSize); err != nil {
		t.Fatal(err)
	}
	for i := range uint64(5) {
		f.model[first+i-f.lo].is = version{first + i, 1}
		f.touch(first+i, false)
	}
	// A page that depends on a base is fatal without it, too.
	w := f.b.table.load(first + 5)
	for _, tag := range []codec.Tag{codec.TagWordDelta, codec.TagZstdBase} {
		h, err := f.b.put(0, first+5, tag, baseRef{}, []byte{1, 2, 3})
		if err != nil {
			t.Fatal(err)
		}
		f.b.table.store(first+5, evictedWord(tag, h))
		f.gateFatally(t, first+5, "template page was modified", tag.String())
	}
	f.b.table.store(first+5, w)
	// One that never was the template's cannot be.
	f.b.table.store(f.first, evictedWord(codec.TagTemplate, 0))
	f.fakeHost.punch(Range{f.r.Start, f.r.Start + PageSize})
	f.gateFatally(t, f.first, "the template has no page for it")
}
