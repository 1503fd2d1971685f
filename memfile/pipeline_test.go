package memfile

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/klauspost/compress/s2"
	"github.com/klauspost/compress/zstd"
	"github.com/pierrec/lz4/v4"
	"golang.org/x/sys/unix"

	"runsc-agentzip/memfile/codec"
	"runsc-agentzip/memfile/dedup"
)

// A dump is the memory of a sandbox and its template's, by page number.
type dump struct {
	name            string
	pages, template map[uint64]*codec.Page
}

// dumps reads the sample pages in the folder AGENTZIP_PAGES, and the memory
// files in AGENTZIP_DUMPS: NAME_c*.mem, and NAME_tmpl.mem for the template, with
// holes where there is no page.
func dumps(t testing.TB) (list []dump) {
	if dir := os.Getenv("AGENTZIP_PAGES"); dir != "" {
		for _, c := range []struct{ name, template string }{{"b_c0", "b_tmpl"}, {"b_c1", "b_tmpl"}, {"a_new_c0", "a_tmpl_random"}, {"a_new_c1", "a_tmpl_random"}} {
			d := dump{name: "sample " + c.name, pages: readDump(t, filepath.Join(dir, c.name+".bin"), 0)}
			at := uint64(0)
			if c.template == "a_tmpl_random" {
				at = 1 << 20 // at no page's place
			}
			d.template = readDump(t, filepath.Join(dir, c.template+".bin"), at)
			list = append(list, d)
		}
	}
	if dir := os.Getenv("AGENTZIP_DUMPS"); dir != "" {
		files, _ := filepath.Glob(filepath.Join(dir, "*_c*.mem"))
		for _, file := range files {
			name := strings.TrimSuffix(filepath.Base(file), ".mem")
			d := dump{name: name, pages: readDump(t, file, 0)}
			d.template = readDump(t, filepath.Join(dir, name[:strings.LastIndex(name, "_")]+"_tmpl.mem"), 0)
			list = append(list, d)
		}
	}
	if len(list) == 0 {
		t.Skip("neither AGENTZIP_PAGES nor AGENTZIP_DUMPS names a folder of pages")
	}
	return list
}

// readDump reads the pages of a file that are not holes. The first page gets the
// number at.
func readDump(t testing.TB, path string, at uint64) map[uint64]*codec.Page {
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	pages := map[uint64]*codec.Page{}
	for off := int64(0); ; {
		off, err = f.Seek(off, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return pages
		}
		end, err2 := f.Seek(off, unix.SEEK_HOLE)
		if err := errors.Join(err, err2); err != nil {
			t.Fatal(err)
		}
		b := make([]byte, (end-off)/PageSize*PageSize)
		if _, err := f.ReadAt(b, off); err != nil && err != io.EOF {
			t.Fatal(err)
		}
		for i := 0; i < len(b); i += PageSize {
			pages[at+uint64(off)/PageSize+uint64(i)/PageSize] = (*codec.Page)(b[i:])
		}
		off = end
	}
}

// sorted returns the numbers of pages in order.
func sorted(pages map[uint64]*codec.Page) []uint64 {
	list := make([]uint64, 0, len(pages))
	for p := range pages {
		list = append(list, p)
	}
	slices.Sort(list)
	return list
}

// A dumpTemplate is a Template with sketches.
type dumpTemplate struct {
	pages []*codec.Page
	table dedup.Table
}

func (d *dumpTemplate) Pages() uint64 { return uint64(len(d.pages)) }

func (d *dumpTemplate) ReadPages(dst []byte, n uint64) error {
	for i := 0; i < len(dst); i += PageSize {
		copy(dst[i:], d.pages[n+uint64(i)/PageSize][:])
	}
	return nil
}

func (d *dumpTemplate) Similar(s *dedup.Sketch, best []dedup.Match) int {
	return d.table.Find(s, best)
}

// A dumpHost is a Host whose file is a dump.
type dumpHost struct {
	Host
	pages map[uint64]*codec.Page
	held  map[uint64]bool
}

func (h *dumpHost) ReadAt(p []byte, off uint64) error {
	for i := 0; i < len(p); i += PageSize {
		copy(p[i:], h.pages[off>>pageShift+uint64(i)/PageSize][:])
	}
	return nil
}

func (h *dumpHost) WriteAt(p []byte, off uint64) error {
	for i := 0; i < len(p); i += PageSize {
		page := off>>pageShift + uint64(i)/PageSize
		if !bytes.Equal(p[i:i+PageSize], h.pages[page][:]) {
			return fmt.Errorf("page %#x is restored wrong", page)
		}
		h.held[page] = true
	}
	return nil
}

func (h *dumpHost) Punch(r Range) error {
	r.pages(func(p uint64) { delete(h.held, p) })
	return nil
}

func (h *dumpHost) Resident(off uint64, vec []byte) error {
	for i := range vec {
		vec[i] = 0
		if h.held[off>>pageShift+uint64(i)] {
			vec[i] = 1
		}
	}
	return nil
}

func (h *dumpHost) HeldBytes() (uint64, error) { return uint64(len(h.held)) << pageShift, nil }

func (h *dumpHost) VisitEvictable(fn func(Range)) {
	var r Range
	for _, p := range sorted(h.pages) {
		if r.End != p<<pageShift {
			if r.End != 0 {
				fn(r)
			}
			r = Range{p << pageShift, p << pageShift}
		}
		r.End += PageSize
	}
	fn(r)
}

func (h *dumpHost) EndAccess([]Range, func(Range), time.Time, func() bool) error { return nil }
func (h *dumpHost) Premap([]Range, func() bool)                                  {}
func (h *dumpHost) Fatal(msg string)                                             { panic(fatalError(msg)) }

// newDumpBackend returns a Backend for a dump all of which is in memory.
func newDumpBackend(t testing.TB, d dump, opts Options) (*Backend, *dumpHost) {
	h := &dumpHost{pages: d.pages, held: map[uint64]bool{}}
	b, err := New(h, opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Close)
	numbers, tpl := sorted(d.pages), sorted(d.template)
	if err := b.Extend((max(numbers[len(numbers)-1], tpl[len(tpl)-1]) + 1) << pageShift); err != nil {
		t.Fatal(err)
	}
	template := &dumpTemplate{table: make(dedup.Table, dedup.TableSize(uint64(len(tpl))))}
	var s dedup.Sketch
	for i, p := range tpl {
		template.pages = append(template.pages, d.template[p])
		s.Make(d.template[p])
		template.table.Add(&s, uint32(i), false)
	}
	b.SetTemplate(template, false)
	for i, p := range tpl {
		if err := b.Adopt(Range{p << pageShift, (p + 1) << pageShift}, uint64(i)<<pageShift); err != nil {
			t.Fatal(err)
		}
	}
	for _, p := range tpl {
		b.Drop(p<<pageShift, (p+1)<<pageShift)
	}
	for p := range d.pages {
		h.held[p] = true
	}
	return b, h
}

// cpuTime is the processor time that the process has used. On a shared machine
// it says more than a clock; reading the fake file, which is copying, is in it.
func cpuTime() time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// ceilingPages is how many pages of a dump the ceiling is computed for.
const ceilingPages = 1000

// ceiling prints the mean of the shortest forms there are, whatever they cost:
// those of the codec and the library's best, alone and relative to any of the
// template's page at the same place, the pages most similar in the template and
// among all before it, and its neighbours, and the library's best with all of
// these together.
func ceiling(t *testing.T, d dump) {
	template := &dumpTemplate{table: make(dedup.Table, dedup.TableSize(uint64(len(d.template))))}
	var s dedup.Sketch
	for i, p := range sorted(d.template) {
		template.pages = append(template.pages, d.template[p])
		s.Make(d.template[p])
		template.table.Add(&s, uint32(i), false)
	}
	var owned []*codec.Page
	var numbers []uint64
	for _, p := range sorted(d.pages) {
		if page := d.pages[p]; !codec.IsZero(page) && (d.template[p] == nil || *d.template[p] != *page) {
			owned, numbers = append(owned, page), append(numbers, p)
		}
	}
	options := func(more ...zstd.EOption) []zstd.EOption {
		return append(more, zstd.WithEncoderConcurrency(1), zstd.WithEncoderLevel(zstd.SpeedBestCompression),
			zstd.WithWindowSize(128<<10), zstd.WithSingleSegment(true), zstd.WithEncoderCRC(false))
	}
	z, err := zstd.NewWriter(nil, options()...)
	if err != nil {
		t.Fatal(err)
	}
	const headers = 12 // of the library's form; ours are in the page table
	own := make(dedup.Table, dedup.TableSize(uint64(len(owned))))
	enc := codec.NewEncoder()
	buf := make([]byte, 0, 2*PageSize)
	var out [codec.MaxEncoded]byte
	single, all, n := 0, 0, 0
	for i, p := range owned {
		s.Make(p)
		if i%(1+len(owned)/ceilingPages) == 0 {
			var bases []*codec.Page
			if b := d.template[numbers[i]]; b != nil {
				bases = append(bases, b)
			}
			var found [4]dedup.Match
			for _, m := range found[:template.table.Find(&s, found[:])] {
				bases = append(bases, template.pages[m.Item])
			}
			for _, m := range found[:own.Find(&s, found[:])] {
				bases = append(bases, owned[m.Item])
			}
			bases = append(bases, owned[max(i-4, 0):i]...)
			best := PageSize
			if tag, k, _ := enc.Encode(out[:], codec.Input{Page: p, Tier: codec.TierMax}); tag != codec.TagInvalid {
				best = k
			}
			best = min(best, len(z.EncodeAll(p[:], buf))-headers)
			var dict []byte
			for _, b := range bases {
				if tag, k := enc.EncodeAgainst(out[:], p, b, codec.MaxEncoded); tag != codec.TagInvalid {
					best = min(best, k)
				}
				dict = append(dict, b[:]...)
			}
			single += best
			if len(dict) != 0 {
				zd, err := zstd.NewWriter(nil, options(zstd.WithEncoderDictRaw(1, dict))...)
				if err != nil {
					t.Fatal(err)
				}
				best = min(best, len(zd.EncodeAll(p[:], buf))-headers)
			}
			all += best
			n++
		}
		own.Add(&s, uint32(i), false)
	}
	t.Logf("  %-26s %6d bytes; with any number of bases %d", "ceiling, one base", single/n, all/n)
}

// TestPipeline prints what becomes of the pages of dumps: plain libraries, each
// tier of an eviction with what each form does, and deepening with what each
// search does, and verifies every page.
func TestPipeline(t *testing.T) {
	z, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1), zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithLowerEncoderMem(true),
		zstd.WithWindowSize(PageSize), zstd.WithSingleSegment(true), zstd.WithEncoderCRC(false))
	if err != nil {
		t.Fatal(err)
	}
	var fast lz4.Compressor
	buf := make([]byte, 2*PageSize)
	for _, d := range dumps(t) {
		var owned []*codec.Page
		zero, same := 0, 0
		for _, p := range sorted(d.pages) {
			switch page := d.pages[p]; {
			case codec.IsZero(page):
				zero++
			case d.template[p] != nil && *d.template[p] == *page:
				same++
			default:
				owned = append(owned, page)
			}
		}
		n := len(owned)
		t.Logf("%s: %d pages, %d zero, %d the template's, %d others. Of these, per page:", d.name, len(d.pages), zero, same, n)
		for _, c := range []struct {
			name string
			f    func(p []byte) int
		}{
			{"lz4", func(p []byte) int { n, _ := fast.CompressBlock(p, buf); return cmp.Or(n, PageSize) }},
			{"s2", func(p []byte) int { return len(s2.Encode(buf, p)) }},
			{"zstd", func(p []byte) int { return len(z.EncodeAll(p, buf[:0])) }},
		} {
			sum := 0
			start := cpuTime()
			for _, p := range owned {
				sum += min(c.f(p[:]), PageSize)
			}
			t.Logf("  %-26s %6d bytes %8d ns", c.name, sum/n, int(cpuTime()-start)/n)
		}
		ceiling(t, d)
		for tier := range codec.Tier(codec.NumTiers) {
			b, h := newDumpBackend(t, d, DefaultOptions())
			pass := func(name string, fn func() error) {
				before := b.Stats().Stages
				start := cpuTime()
				if err := fn(); err != nil {
					t.Fatal(err)
				}
				took := cpuTime() - start
				s, st := b.Stats(), b.store.Stats()
				raw := uint64(len(h.held)) * PageSize
				t.Logf("  %-26s %6d bytes %8d ns; with slots %d, held %d, and bookkeeping %d; raw %d", name, (st.BlobBytes+raw)/uint64(n), int(took)/n,
					(st.SlotBytes+raw)/uint64(n), (st.HeldBytes+raw)/uint64(n), s.OwnedBytes/uint64(n), len(h.held))
				for _, form := range slices.Sorted(maps.Keys(s.Stages)) {
					c, o := s.Stages[form], before[form]
					tries, wins := c.Tries-o.Tries, c.Wins-o.Wins
					if tries|wins == 0 {
						continue
					}
					line := fmt.Sprintf("    %-24s %6d tries, %6d taken of %4d bytes", form, tries, wins, (c.Bytes-o.Bytes)/max(wins, 1))
					if c.NS != 0 {
						line += fmt.Sprintf(", %d ns", (c.NS-o.NS)/max(tries, 1))
					}
					t.Log(line)
				}
			}
			pass("evict "+tier.String(), func() error { _, err := b.Evict(EvictOptions{Tier: tier}); return err })
			pass("deepen", func() error { _, err := b.Deepen(nil); return err })
			res, err := b.Check(nil)
			if err != nil || len(res.Problems) != 0 {
				t.Errorf("check: %v, %v", res.Problems, err)
			}
			start := cpuTime()
			for _, p := range sorted(d.pages) {
				if err := b.Gate(p<<pageShift, (p+1)<<pageShift); err != nil {
					t.Fatal(err)
				}
			}
			t.Logf("  %-26s %21d ns", "restore", int(cpuTime()-start)/n)
		}
	}
}
