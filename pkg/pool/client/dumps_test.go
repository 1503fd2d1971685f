package client

import (
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

	"golang.org/x/sys/unix"

	"runsc-agentzip/memfile"
	"runsc-agentzip/memfile/codec"
	"runsc-agentzip/memfile/dedup"
	"runsc-agentzip/pkg/control"
	"runsc-agentzip/pkg/pool/server"
	"runsc-agentzip/pkg/pool/wire"
)

const pageSize = codec.PageSize

// pages are those of a memory file, by number.
type pages map[uint64]*codec.Page

// readPages reads the pages of a file that are not holes.
func readPages(t testing.TB, path string) pages {
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	list := pages{}
	for off := int64(0); ; {
		off, err = f.Seek(off, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return list
		}
		end, err2 := f.Seek(off, unix.SEEK_HOLE)
		if err := errors.Join(err, err2); err != nil {
			t.Fatal(err)
		}
		b := make([]byte, (end-off)/pageSize*pageSize)
		if _, err := f.ReadAt(b, off); err != nil && err != io.EOF {
			t.Fatal(err)
		}
		for i := 0; i < len(b); i += pageSize {
			list[uint64(off)/pageSize+uint64(i)/pageSize] = (*codec.Page)(b[i:])
		}
		off = end
	}
}

func (p pages) sorted() []uint64 { return slices.Sorted(maps.Keys(p)) }

// A dumpTemplate is the template of dumps, for sandboxes and for the pool.
type dumpTemplate struct {
	numbers []uint64
	pages   pages
	table   dedup.Table
}

func newDumpTemplate(p pages) *dumpTemplate {
	d := &dumpTemplate{numbers: p.sorted(), pages: p, table: make(dedup.Table, dedup.TableSize(uint64(len(p))))}
	var s dedup.Sketch
	for i, n := range d.numbers {
		s.Make(p[n])
		d.table.Add(&s, uint32(i), false)
	}
	return d
}

func (d *dumpTemplate) Pages() uint64 { return uint64(len(d.numbers)) }

func (d *dumpTemplate) ReadPages(dst []byte, n uint64) error {
	for i := 0; i < len(dst); i += pageSize {
		copy(dst[i:], d.pages[d.numbers[n+uint64(i)/pageSize]][:])
	}
	return nil
}

func (d *dumpTemplate) Similar(s *dedup.Sketch, best []dedup.Match) int { return d.table.Find(s, best) }
func (d *dumpTemplate) Close() error                                    { return nil }

// A dumpHost is a sandbox whose memory becomes one dump after the other.
type dumpHost struct {
	memfile.Host
	t     testing.TB
	b     *memfile.Backend
	c     *Client
	pages pages
	held  map[uint64]bool
}

func (h *dumpHost) ReadAt(p []byte, off uint64) error {
	for i := 0; i < len(p); i += pageSize {
		copy(p[i:], h.pages[(off+uint64(i))/pageSize][:])
	}
	return nil
}

func (h *dumpHost) WriteAt(p []byte, off uint64) error {
	for i := 0; i < len(p); i += pageSize {
		n := (off + uint64(i)) / pageSize
		if want := h.pages[n]; want != nil && *want != codec.Page(p[i:i+pageSize]) {
			return fmt.Errorf("page %#x is restored wrong", n)
		}
		h.held[n] = true
	}
	return nil
}

func (h *dumpHost) Punch(r memfile.Range) error {
	for n := r.Start / pageSize; n < r.End/pageSize; n++ {
		delete(h.held, n)
	}
	return nil
}

func (h *dumpHost) Resident(off uint64, vec []byte) error {
	for i := range vec {
		vec[i] = 0
		if h.held[off/pageSize+uint64(i)] {
			vec[i] = 1
		}
	}
	return nil
}

func (h *dumpHost) HeldBytes() (uint64, error) { return uint64(len(h.held)) * pageSize, nil }

func (h *dumpHost) VisitEvictable(fn func(memfile.Range)) {
	var r memfile.Range
	for _, n := range h.pages.sorted() {
		if r.End != n*pageSize {
			if r.End != 0 {
				fn(r)
			}
			r = memfile.Range{Start: n * pageSize, End: n * pageSize}
		}
		r.End += pageSize
	}
	if r.End != 0 {
		fn(r)
	}
}

func (h *dumpHost) EndAccess([]memfile.Range, func(memfile.Range), time.Time, func() bool) error {
	return nil
}
func (h *dumpHost) Premap([]memfile.Range, func() bool) {}
func (h *dumpHost) Fatal(msg string)                    { panic(msg) }

// newDumpHost returns a sandbox that was restored from a template.
func newDumpHost(t testing.TB, d *dumpTemplate, size uint64) *dumpHost {
	h := &dumpHost{t: t, held: map[uint64]bool{}, pages: pages{}}
	o := memfile.DefaultOptions()
	b, err := memfile.New(h, o)
	if err != nil {
		t.Fatal(err)
	}
	h.b = b
	t.Cleanup(b.Close)
	if err := b.Extend(size * pageSize); err != nil {
		t.Fatal(err)
	}
	b.SetTemplate(d, false)
	for i := 0; i < len(d.numbers); {
		j := i + 1
		for j < len(d.numbers) && d.numbers[j] == d.numbers[j-1]+1 {
			j++
		}
		if err := b.Adopt(memfile.Range{Start: d.numbers[i] * pageSize, End: (d.numbers[j-1] + 1) * pageSize}, uint64(i)*pageSize); err != nil {
			t.Fatal(err)
		}
		i = j
	}
	return h
}

// become gives the sandbox the memory of a dump, which has what differs from the
// template.
func (h *dumpHost) become(p pages, d *dumpTemplate) {
	next := maps.Clone(p)
	for n := range h.pages {
		if next[n] == nil && d.pages[n] != nil {
			next[n] = d.pages[n] // as it was at first
		}
	}
	for _, n := range next.sorted() {
		if old := h.pages[n]; old != nil && *old == *next[n] {
			continue
		}
		if err := h.b.Gate(n*pageSize, (n+1)*pageSize); err != nil {
			h.t.Fatal(err)
		}
		h.held[n] = true
	}
	for n := range h.pages {
		if next[n] == nil {
			h.b.Drop(n*pageSize, (n+1)*pageSize)
			delete(h.held, n)
		}
	}
	h.pages = next
}

// TestPoolOfDumps prints what sandboxes own, with a pool and without, whose memory
// is that of the dumps in the folder AGENTZIP_POOL_DUMPS: NAME_tmpl.mem, their
// template's, and NAME_cCLONE.STEP.mem, with holes where it is the template's. After
// each step all evict and have time to compress.
func TestPoolOfDumps(t *testing.T) {
	dir := os.Getenv("AGENTZIP_POOL_DUMPS")
	if dir == "" {
		t.Skip("AGENTZIP_POOL_DUMPS names no folder of dumps")
	}
	templates, _ := filepath.Glob(filepath.Join(dir, os.Getenv("AGENTZIP_POOL_NAME")+"*_tmpl.mem"))
	for _, file := range templates {
		name := strings.TrimSuffix(filepath.Base(file), "_tmpl.mem")
		t.Run(name, func(t *testing.T) {
			d := newDumpTemplate(readPages(t, file))
			files, _ := filepath.Glob(filepath.Join(dir, name+"_c*.mem"))
			clones := map[string]map[string]pages{}
			steps := map[string]bool{}
			size := d.numbers[len(d.numbers)-1] + 1
			for _, f := range files {
				clone, step, ok := strings.Cut(strings.TrimSuffix(filepath.Base(f), ".mem"), ".")
				if !ok {
					continue
				}
				if clones[clone] == nil {
					clones[clone] = map[string]pages{}
				}
				p := readPages(t, f)
				for n, c := range p {
					size = max(size, n+1)
					if codec.IsZero(c) {
						delete(p, n)
					}
				}
				clones[clone][step] = p
				steps[step] = true
			}
			for _, pooled := range []bool{false, true} {
				poolOfDumps(t, d, clones, slices.Sorted(maps.Keys(steps)), size, pooled)
			}
		})
	}
}

func poolOfDumps(t *testing.T, d *dumpTemplate, clones map[string]map[string]pages, steps []string, size uint64, pooled bool) {
	s := server.New(server.Options{Log: t.Logf, Keep: time.Second, OpenTemplate: func(string, string) (server.Template, error) { return d, nil }})
	defer s.Close()
	var hosts []*dumpHost
	names := slices.Sorted(maps.Keys(clones))
	for _, name := range names {
		h := newDumpHost(t, d, size)
		if pooled {
			h.c = New(Options{Log: t.Logf})
			defer h.c.Close()
			h.b.SetPool(h.c)
			pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				t.Fatal(err)
			}
			if err := s.Attach(pair[0], &wire.Greeting{Version: wire.Version, Name: name, Domain: "d", Template: "00", TemplateDir: "/"}); err != nil {
				t.Fatal(err)
			}
			if err := h.c.Attach(pair[1]); err != nil {
				t.Fatal(err)
			}
			for h.c.Key() == nil {
				time.Sleep(time.Millisecond)
			}
		}
		hosts = append(hosts, h)
	}
	must := func(_ any, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	// share has all sandboxes do what the pool asks for, until it asks for nothing.
	share := func() {
		for quiet := 0; pooled && quiet < 20; quiet++ {
			for _, h := range hosts {
				n, err := h.b.Share(nil)
				if n != 0 {
					quiet = 0
				}
				must(n, err)
			}
			time.Sleep(2 * time.Millisecond)
		}
	}
	for _, step := range steps {
		for i, h := range hosts {
			if p := clones[names[i]][step]; p != nil {
				h.become(p, d)
				must(h.b.Evict(memfile.EvictOptions{Tier: codec.TierMid}))
				if pooled {
					must(h.b.Share(nil))
				}
			}
			must(h.b.DeepenCold(nil))
			must(h.b.Deepen(nil))
			share()
		}
		for range 2 {
			for _, h := range hosts {
				must(h.b.Deepen(nil))
			}
			share()
			time.Sleep(2 * time.Second)
		}
		share()
		var sum, all control.Stats
		own := uint64(0)
		for _, h := range hosts {
			if pooled {
				h.c.AskUsage()
				time.Sleep(20 * time.Millisecond)
				_, o := h.c.Sharing()
				own += o
			}
			st := h.b.Stats()
			if st.ResidentBytes > 1<<16 {
				t.Logf("resident %d", st.ResidentBytes)
			}
			sum.OwnedBytes += st.OwnedBytes - st.ResidentBytes
			sum.StoreBytes += st.StoreBytes
			sum.MetadataBytes += st.MetadataBytes
			sum.PoolShareBytes += st.PoolShareBytes
			sum.Pages.Pool += st.Pages.Pool
			sum.Pages.Delta += st.Pages.Delta
			sum.Pages.Compressed += st.Pages.Compressed
			all = st
		}
		_ = all
		n := float64(len(hosts))
		k := n * 1024
		t.Logf("step %s pooled %-5v owned %7.1f KiB = store %.1f + meta %.1f (client %.1f) + share %.1f; pages pool %.0f delta %.0f comp %.0f", step, pooled, float64(sum.OwnedBytes)/k,
			float64(sum.StoreBytes)/k, float64(sum.MetadataBytes)/k, float64(own)/k, float64(sum.PoolShareBytes)/k, float64(sum.Pages.Pool)/n, float64(sum.Pages.Delta)/n, float64(sum.Pages.Compressed)/n)
		if pooled {
			t.Logf("   %+v", s.Stats().Total)
		}
	}
	for _, h := range hosts {
		res, err := h.b.Check(nil)
		if err != nil || len(res.Problems) != 0 {
			t.Errorf("check: %v, %v", res.Problems, err)
		}
	}
}
