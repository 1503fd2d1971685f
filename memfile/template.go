package memfile

import (
	"fmt"
	"sort"

	"runsc-agentzip/memfile/codec"
	"runsc-agentzip/memfile/dedup"
)

// A Template is an immutable sequence of pages that many sandboxes share.
type Template interface {
	// Pages is how many there are.
	Pages() uint64
	// ReadPages fills dst with pages from page n on, or fails if they are not
	// what they were when the template was made.
	ReadPages(dst []byte, n uint64) error
}

// A Searcher is a Template that finds pages which resemble another.
type Searcher interface {
	// Similar puts pages that resemble the one that s is the sketch of into
	// best, the most similar first, and returns how many there are.
	Similar(s *dedup.Sketch, best []dedup.Match) int
}

// An extent says that n pages of the file from page on are those of the
// template from tpl on.
type extent struct{ page, n, tpl uint64 }

// SetTemplate gives the Backend the template that Adopt refers to. With mapped,
// applications may map its pages; otherwise each is copied when it is used.
//
// Preconditions: the file has no pages yet.
func (b *Backend) SetTemplate(t Template, mapped bool) {
	b.template = t
	b.mapTemplate = mapped
	// Gates have something to do for as long as pages may be tmapped.
	b.nonResident.Add(1)
}

// HasTemplate tells whether pages of the file may be equal to a template's.
func (b *Backend) HasTemplate() bool { return b.template != nil }

// Adopt makes the pages of r, whose content is not in the file, evicted pages
// equal to those of the template from byte off on. Ranges are adopted in
// ascending order while the file is loaded.
func (b *Backend) Adopt(r Range, off uint64) error {
	e := extent{r.Start >> pageShift, (r.End - r.Start) >> pageShift, off >> pageShift}
	if b.template == nil || e.tpl+e.n > b.template.Pages() {
		return fmt.Errorf("pages.img has no pages at offsets %#x-%#x: the image is truncated or mixed with files of another; make or copy it again", off, off+r.End-r.Start)
	}
	var es []extent
	if p := b.extents.Load(); p != nil {
		es = *p
	}
	if k := len(es) - 1; k >= 0 && es[k].page+es[k].n == e.page && es[k].tpl+es[k].n == e.tpl {
		es[k].n += e.n
	} else {
		es = append(es, e)
	}
	b.extents.Store(&es)
	b.nonResident.Add(int64(e.n))
	b.stats.form(codec.TagTemplate).Add(int64(e.n))
	b.table.adopt(e.page, e.page+e.n)
	return nil
}

// extentOf returns the extent that has the page, or false.
func (b *Backend) extentOf(page uint64) (extent, bool) {
	p := b.extents.Load()
	if p == nil {
		return extent{}, false
	}
	es := *p
	i := sort.Search(len(es), func(i int) bool { return es[i].page+es[i].n > page })
	if i == len(es) || es[i].page > page {
		return extent{}, false
	}
	return es[i], true
}

// readTemplate fills dst with the template's pages for the file's pages from
// page on, which must be in one extent.
func (b *Backend) readTemplate(dst []byte, page uint64) error {
	e, ok := b.extentOf(page)
	if !ok || page+uint64(len(dst))>>pageShift > e.page+e.n {
		return fmt.Errorf("the template has no page for it")
	}
	return b.template.ReadPages(dst, e.tpl+page-e.page)
}

// readTemplatePage fills dst with page n of the template.
func (b *Backend) readTemplatePage(dst *codec.Page, n uint64) error {
	if b.template == nil || n >= b.template.Pages() {
		return fmt.Errorf("the template has no page %d", n)
	}
	return b.template.ReadPages(dst[:], n)
}

// readBases fills dst with the template's pages for the file's pages from page
// on, as far as there are any, and returns a bit for each page that was filled.
// A template that cannot be read is no base; whether that is fatal is decided
// when a page depends on it.
func (b *Backend) readBases(dst []byte, page uint64) (have uint64) {
	if b.template == nil {
		return 0
	}
	n := uint64(len(dst)) >> pageShift
	for i := uint64(0); i < n; {
		e, ok := b.extentOf(page + i)
		if !ok {
			i++
			continue
		}
		k := min(n-i, e.page+e.n-(page+i))
		if b.template.ReadPages(dst[i<<pageShift:(i+k)<<pageShift], e.tpl+page+i-e.page) == nil {
			have |= (1<<k - 1) << i
		}
		i += k
	}
	return have
}

// templateRun returns how many of the pages from page on, whose words are
// given, can be read from the template in one go.
func (b *Backend) templateRun(page uint64, words []word) uint64 {
	if tagOf(words[0]) != codec.TagTemplate {
		return 0
	}
	e, ok := b.extentOf(page)
	if !ok {
		return 0
	}
	k := uint64(1)
	for k < uint64(len(words)) && page+k < e.page+e.n && tagOf(words[k]) == codec.TagTemplate {
		k++
	}
	return k
}

// isTemplate tells whether w is that of a page that only the template has.
func isTemplate(w word) bool {
	return w&stateMask == evicted && tagOf(w) == codec.TagTemplate
}

// TemplateWindow is for an application's read of the page at byte need, which
// is private to the memory managers that map it. If the page is the template's,
// and enough of its neighbours in [limStart, limEnd) are, it returns the range
// to map and where it begins in the template, in bytes. It marks the pages as
// mapped before it returns.
//
// The rule that keeps such mappings from becoming stale: a page is marked before the
// mapping is made, while it is the template's (table.markMapped). Whoever makes it
// resident turns the mark into the word's tmapped bit, which is cleared only by
// ClearTemplateMapped, after the memory manager that may write to the page has
// replaced its mapping (or by an eviction, which unmaps the page everywhere, and when
// the page is freed). Whoever is about to write to a resident page in place looks at
// the bit first (GateMapped).
func (b *Backend) TemplateWindow(need, limStart, limEnd uint64) (start, end, off uint64, ok bool) {
	p := need >> pageShift
	if !b.mapTemplate {
		return 0, 0, 0, false
	}
	e, ok := b.extentOf(p)
	if !ok || !isTemplate(b.table.load(p)) {
		return 0, 0, 0, false
	}
	lo, hi := max(e.page, limStart>>pageShift), min(e.page+e.n, limEnd>>pageShift)
	first := b.table.templatesTo(p, max(lo, p-min(p, windowMax)))
	last := b.table.templatesFrom(p+1, min(hi, p+1+windowMax))
	// A mapping smaller than a unit is only worth its cost if there is nothing
	// more to map.
	unit := b.mapUnit() >> pageShift
	if last-first < unit {
		u := p &^ (unit - 1)
		if first > max(u, limStart>>pageShift) || last < min(u+unit, limEnd>>pageShift) {
			return 0, 0, 0, false
		}
	}
	if last = b.table.markFrom(p, last); last == p {
		return 0, 0, 0, false
	}
	first = b.table.markTo(p, first)
	return first << pageShift, last << pageShift, (e.tpl + first - e.page) << pageShift, true
}

// pieceMin is up to how many neighbouring pages of the template are copied along
// with pages on both sides: mapping them apart costs two calls into the
// application's address space, some 30 us each, and copying a page 8 us.
const pieceMin = 8

// Piece is for a fault on one of the pages of [start, end). It returns the end of
// the part from start on that should be mapped in the same way, and whether that is
// from the template; if not, its pages are to be restored.
func (b *Backend) Piece(start, end uint64) (pieceEnd uint64, template bool) {
	if !b.mapTemplate {
		return end, false
	}
	p, last := start>>pageShift, end>>pageShift
	// run is the end of the pages from p on that are the template's.
	run := func(p uint64) uint64 {
		if e, ok := b.extentOf(p); ok && p < last {
			return b.table.templatesFrom(p, min(last, e.page+e.n))
		}
		return p
	}
	q := run(p)
	if q-p > pieceMin || q == last && q > p {
		return q << pageShift, true
	}
	// Page q was not the template's, whatever it is by now: the piece has it.
	for p = q + 1; p < last; p = q + 1 {
		if q = run(p); q-p > pieceMin {
			break
		}
	}
	return min(p, last) << pageShift, false
}

// MapTemplate is TemplateWindow for exactly the pages in [start, end), if all of
// them are the template's.
func (b *Backend) MapTemplate(start, end uint64) (off uint64, ok bool) {
	p, last := start>>pageShift, end>>pageShift
	e, ok := b.extentOf(p)
	if !b.mapTemplate || !ok || last > e.page+e.n {
		return 0, false
	}
	if b.table.markFrom(p, last) < last {
		return 0, false
	}
	return (e.tpl + start>>pageShift - e.page) << pageShift, true
}

// ReadTemplate fills dst with the pages from byte start on, as far as they are the
// template's and not in the file, and returns how many bytes that are. start and
// the length of dst are multiples of PageSize.
func (b *Backend) ReadTemplate(dst []byte, start uint64) (n uint64) {
	p := start >> pageShift
	e, ok := b.extentOf(p)
	if !ok {
		return 0
	}
	n = b.table.templatesFrom(p, min(p+uint64(len(dst))>>pageShift, e.page+e.n)) - p
	if n == 0 || b.template.ReadPages(dst[:n<<pageShift], e.tpl+p-e.page) != nil {
		return 0 // whether that is fatal is for the restore to say
	}
	return n << pageShift
}

// GateMapped is Gate, and tells whether one of the pages may be mapped from the
// template by an application.
func (b *Backend) GateMapped(start, end uint64) (mapped bool, err error) {
	for p, last := pagesOf(start, end); p < last; p++ {
		w := b.table.load(p)
		if w&stateMask != resident {
			if err := b.gateSlow(p, last, &b.stats.demand); err != nil {
				return mapped, err
			}
			w = b.table.load(p)
		}
		mapped = mapped || w&tmapped != 0
	}
	return mapped, nil
}

// TemplateBacked tells whether the page at byte off is the template's or may be
// mapped from it.
func (b *Backend) TemplateBacked(off uint64) bool {
	// A restore sets the word's flag before it takes the mark away: if that has gone,
	// the word that is loaded after it has the flag.
	marked := b.table.maybeMapped(off >> pageShift)
	w := b.table.load(off >> pageShift)
	return w&tmapped != 0 || isTemplate(w) || w&stateMask == busy && marked
}

// ClearTemplateMapped tells that the only memory manager that may write to the
// pages in [start, end), which are resident, has no mapping of the template's
// copies any more.
func (b *Backend) ClearTemplateMapped(start, end uint64) {
	for p, last := pagesOf(start, end); p < last; p++ {
		for {
			w := b.table.load(p)
			if w&tmapped == 0 || w&stateMask == evicted || w&stateMask == busy || b.table.cas(p, w, w&^tmapped) {
				break
			}
		}
	}
}
