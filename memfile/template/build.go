package template

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/zeebo/xxh3"
	"golang.org/x/sys/unix"

	"runsc-agentzip/memfile/codec"
	"runsc-agentzip/memfile/dedup"
)

// readSize is how much of pages.img is read at a time: small enough for the
// caches of a core, large enough for the system call not to count.
const readSize = 256 << 10

// ctimeGrain is how far apart two changes of a file must be for its ctime to
// tell. Kernels take it from a clock that ticks every 10 ms at worst.
const ctimeGrain = 20 * time.Millisecond

// stable calls read, which reads all pages, and returns an error unless
// pages.img is the same as when it was opened before, during and some time after
// that.
func (im *image) stable(read func() error) error {
	fd := int(im.pages.Fd())
	// A change right after the reading would go unnoticed if it got the same
	// ctime. A ctime in the future is some other clock's.
	if age := time.Since(time.Unix(0, im.id.ctime)); age >= 0 && age < ctimeGrain {
		time.Sleep(ctimeGrain - age)
	}
	_ = unix.Fadvise(fd, 0, 0, unix.FADV_SEQUENTIAL)
	err := read()
	_ = unix.Fadvise(fd, 0, 0, unix.FADV_NORMAL)
	if err != nil {
		return err
	}
	id, err := identify(fd)
	if err != nil {
		return fmt.Errorf("%s: %w", im.pagesPath(), err)
	}
	if id != im.id {
		return fmt.Errorf("%s: %w", im.pagesPath(), errChanged)
	}
	return nil
}

// eachChunk calls fn for all pages of pages.img in order, many at a time; n is
// the number of the first.
func (im *image) eachChunk(pages uint64, fn func(b []byte, n uint64) error) error {
	buf := make([]byte, readSize)
	for n := uint64(0); n < pages; {
		b := buf[:min(readSize, (pages-n)*PageSize)]
		if err := preadFull(int(im.pages.Fd()), b, n*PageSize); err != nil {
			return fmt.Errorf("%s: %w", im.pagesPath(), err)
		}
		if err := fn(b, n); err != nil {
			return err
		}
		n += uint64(len(b)) / PageSize
	}
	return nil
}

// sumPages reads all pages and returns the header and the sections of a new
// index: the checksums, and the sketches with what is before them for alignment.
func (im *image) sumPages() (h *header, sums, sketches []byte, err error) {
	if im.id.size == 0 || im.id.size%PageSize != 0 {
		return nil, nil, nil, fmt.Errorf("%s: %w: it has %d bytes, which are not whole pages of %d", im.pagesPath(), ErrTruncated, im.id.size, PageSize)
	}
	pages := uint64(im.id.size) / PageSize
	sums = make([]byte, pages*sumSize)
	gap := -len(sums) & (sectionsAlign - 1)
	sketches = make([]byte, uint64(gap)+dedup.TableSize(pages))
	table := dedup.Table(sketches[gap:])
	err = im.stable(func() error {
		return im.eachChunk(pages, func(b []byte, n uint64) error {
			var s dedup.Sketch
			for ; len(b) > 0; b, n = b[PageSize:], n+1 {
				p := (*codec.Page)(b)
				binary.LittleEndian.PutUint64(sums[n*sumSize:], codec.Sum(p))
				s.Make(p)
				table.Add(&s, uint32(n), false)
			}
			return nil
		})
	})
	if err != nil {
		return nil, nil, nil, err
	}
	h = &header{
		pages:   pages,
		size:    headerSize + uint64(len(sums)+len(sketches)),
		created: time.Now().UnixNano(),
		print:   im.id.print(),
		state:   im.state.sum,
		meta:    im.meta.sum,
		digest:  digestOf(pages, im.state.sum, im.meta.sum, sums),
		sections: []section{{
			kind:   sectionSums,
			flags:  flagCritical,
			offset: headerSize,
			length: uint64(len(sums)),
			sum:    xxh3.Hash(sums),
			record: sumSize,
		}, {
			kind:   sectionSketches,
			offset: headerSize + uint64(len(sums)+gap),
			length: uint64(len(table)),
			sum:    xxh3.Hash(table),
			record: sketchSize,
		}},
	}
	return h, sums, sketches, nil
}

// verify reads all pages and compares them with x.
func (im *image) verify(x *index) error {
	return im.stable(func() error {
		return im.eachChunk(x.pages, func(b []byte, n uint64) error {
			bad, err := x.differs(b, n)
			if err != nil {
				return im.indexError(err)
			}
			if bad >= 0 {
				return fmt.Errorf("%s: %w: the page at byte %#x is not the one that was indexed; %s",
					im.pagesPath(), ErrModified, (n+uint64(bad))*PageSize, im.advice())
			}
			return nil
		})
	})
}

// An output is a file that will become the index in the folder.
type output struct {
	f *os.File
}

const tempPrefix = "." + IndexFile + "."

// create creates an output in the folder of im, which must be locked.
func (im *image) create() (*output, error) {
	// What a process left that died here. With the image locked, nobody is
	// still writing them.
	if old, err := os.ReadDir(im.dir); err == nil {
		for _, e := range old {
			if strings.HasPrefix(e.Name(), tempPrefix) {
				_ = os.Remove(filepath.Join(im.dir, e.Name()))
			}
		}
	}
	f, err := os.CreateTemp(im.dir, tempPrefix+"*")
	if err != nil {
		return nil, err
	}
	return &output{f}, nil
}

// commit writes the parts, one after the other, and makes them the index. The
// output is discarded if that fails.
func (o *output) commit(im *image, parts ...[]byte) (err error) {
	defer o.discard()
	for _, p := range parts {
		if _, err := o.f.Write(p); err != nil {
			return err
		}
	}
	// Whoever may read the pages may read the index.
	if err := o.f.Chmod(im.mode); err != nil {
		return err
	}
	_ = o.f.Chown(im.uid, im.gid)
	if err := o.f.Sync(); err != nil {
		return err
	}
	if err := os.Rename(o.f.Name(), im.indexPath()); err != nil {
		return err
	}
	_ = o.f.Close()
	o.f = nil
	if d, err := os.Open(im.dir); err == nil {
		_ = d.Sync()
		_ = d.Close()
	}
	return nil
}

// discard removes the output unless it was committed. o may be nil.
func (o *output) discard() {
	if o == nil || o.f == nil {
		return
	}
	_ = os.Remove(o.f.Name())
	_ = o.f.Close()
	o.f = nil
}

// inMemory returns a file in memory with the parts one after the other. Nobody
// can change it any more, and the descriptor is read-only.
func inMemory(parts ...[]byte) (_ *os.File, err error) {
	fd, err := unix.MemfdCreate("agentzip-template-index", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, os.NewSyscallError("memfd_create", err)
	}
	w := os.NewFile(uintptr(fd), "memfd:"+IndexFile)
	defer w.Close()
	for _, p := range parts {
		if _, err := w.Write(p); err != nil {
			return nil, err
		}
	}
	const seals = unix.F_SEAL_SEAL | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_WRITE
	if _, err := unix.FcntlInt(w.Fd(), unix.F_ADD_SEALS, seals); err != nil {
		return nil, errors.Join(errors.New("sealing the index in memory"), err)
	}
	r, _, err := openFile(fmt.Sprintf("/proc/self/fd/%d", w.Fd()))
	return r, err
}
