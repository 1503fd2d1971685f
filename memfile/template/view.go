package template

import (
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"

	"runsc-agentzip/memfile/codec"
	"runsc-agentzip/memfile/dedup"
)

// A View reads a template through two descriptors. It opens nothing and needs no
// system calls but fstat, mmap, munmap, pread and close. Its methods may be
// called concurrently, except Close.
type View struct {
	pages *os.File
	fd    int
	index *index
}

// FromFiles returns a View of the template whose Files are given. It checks the
// index in full and the size of pages, and reads no page. The View owns both
// files unless there is an error.
func FromFiles(pages, index *os.File) (*View, error) {
	x, err := mapIndex(index)
	if err != nil {
		return nil, fmt.Errorf("template index: %w", err)
	}
	fd := int(pages.Fd())
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		_ = x.close()
		return nil, fmt.Errorf("template pages: %w", os.NewSyscallError("fstat", err))
	}
	if err := checkSize(uint64(st.Size), x.pages); err != nil {
		_ = x.close()
		return nil, fmt.Errorf("template pages: %w", err)
	}
	_ = index.Close()
	return &View{pages: pages, fd: fd, index: x}, nil
}

// checkSize compares the size of pages.img with the index.
func checkSize(size, pages uint64) error {
	switch want := pages * PageSize; {
	case size < want:
		return fmt.Errorf("%w: %d bytes are left of the %d that were indexed", ErrTruncated, size, want)
	case size > want:
		return fmt.Errorf("%w: it has grown to %d bytes from the %d that were indexed", ErrModified, size, want)
	}
	return nil
}

// Pages is the number of pages in pages.img.
func (v *View) Pages() uint64 { return v.index.pages }

// PagesFD is the descriptor of pages.img, for mappings. It is read-only if Open
// opened it.
func (v *View) PagesFD() int { return v.fd }

// Digest is the digest of the template.
func (v *View) Digest() Digest { return v.index.digest }

// Sum returns the codec.Sum that the n-th page of pages.img must have. If
// somebody has truncated the index, it returns 0, which no page is likely to
// have.
func (v *View) Sum(n uint64) (sum uint64) {
	if n >= v.index.pages {
		panic(fmt.Sprintf("template page %d of %d", n, v.index.pages))
	}
	if v.index.guard(func() { sum = v.index.sum(n) }) != nil {
		return 0
	}
	return sum
}

// Similar puts pages that resemble the one that s is the sketch of into best and
// returns how many there are, which is 0 if the template has no sketches. What
// it finds is a guess: compare the pages.
func (v *View) Similar(s *dedup.Sketch, best []dedup.Match) (n int) {
	if v.index.guard(func() { n = v.index.sketches.Find(s, best) }) != nil {
		return 0
	}
	k := 0
	for _, m := range best[:n] {
		if uint64(m.Item) < v.index.pages {
			best[k] = m
			k++
		}
	}
	return k
}

// ReadPages fills dst, whose length is a multiple of PageSize, with pages.img
// from the n-th page on. Each page matches its checksum if there is no error;
// otherwise the content of dst is undefined. Errors wrap ErrTruncated or
// ErrModified if the image is not what it was.
func (v *View) ReadPages(dst []byte, n uint64) error {
	count := uint64(len(dst)) / PageSize
	if uint64(len(dst))%PageSize != 0 || n > v.index.pages || count > v.index.pages-n {
		return fmt.Errorf("template pages: cannot read %d bytes from page %d of %d", len(dst), n, v.index.pages)
	}
	off := n * PageSize
	if err := preadFull(v.fd, dst, off); err != nil {
		return fmt.Errorf("template pages: %w", err)
	}
	if bad, err := v.index.differs(dst, n); err != nil {
		return fmt.Errorf("template index: %w", err)
	} else if bad >= 0 {
		return fmt.Errorf("template pages: %w: the page at byte %#x is not the one that was indexed", ErrModified, off+uint64(bad)*PageSize)
	}
	return nil
}

// Close frees what the View holds. Nothing may use it any more.
func (v *View) Close() error {
	err := v.index.close()
	if cerr := v.pages.Close(); err == nil {
		err = cerr
	}
	return err
}

// differs returns which of the pages in b, the first of which is the n-th of
// pages.img, is the first that does not match its checksum, or -1.
func (x *index) differs(b []byte, n uint64) (bad int, err error) {
	bad = -1
	err = x.guard(func() {
		for i := 0; i < len(b)/PageSize; i++ {
			if codec.Sum((*codec.Page)(b[i*PageSize:])) != x.sum(n+uint64(i)) {
				bad = i
				return
			}
		}
	})
	return bad, err
}

func (x *index) contains(addr uintptr) bool {
	start := uintptr(unsafe.Pointer(unsafe.SliceData(x.data)))
	return addr >= start && addr < start+uintptr(len(x.data))
}

// preadFull reads len(b) bytes. It does not use os.File, which would ask the
// runtime's poller in a process that may not have one.
func preadFull(fd int, b []byte, off uint64) error {
	for len(b) > 0 {
		n, err := unix.Pread(fd, b, int64(off))
		switch {
		case err == unix.EINTR:
			continue
		case err != nil:
			return fmt.Errorf("reading at byte %#x: %w", off, os.NewSyscallError("pread", err))
		case n == 0:
			return fmt.Errorf("%w: it ends at byte %#x", ErrTruncated, off)
		}
		b, off = b[n:], off+uint64(n)
	}
	return nil
}
