package fleet

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// pageSize is the unit in which guest memory is compared.
const pageSize = 4096

// GuestSnapshot is a copy of a sandbox's guest memory file, to compare other
// sandboxes with. A restored sandbox keeps every page at the file offset it had
// when the image was taken, so the snapshot of a clone that was just restored
// and has not worked yet is the template as the clones see it.
type GuestSnapshot struct {
	f       *os.File
	size    int64
	extents []extent
}

// extent is a range of a file that holds data, [off, end).
type extent struct{ off, end int64 }

// Close removes the snapshot.
func (g *GuestSnapshot) Close() error {
	return errors.Join(g.f.Close(), os.Remove(g.f.Name()))
}

// Bytes is the amount of memory the snapshot holds.
func (g *GuestSnapshot) Bytes() uint64 {
	var n uint64
	for _, e := range g.extents {
		n += uint64(e.end - e.off)
	}
	return n
}

// GuestDiff counts the committed pages of a sandbox by how they compare with
// the page at the same offset of a snapshot.
type GuestDiff struct {
	// Committed pages in all: the sum of those below.
	Committed uint64 `json:"committed"`
	// Same content as the snapshot's page.
	Same uint64 `json:"same"`
	// Different content, or content where the snapshot has no page.
	Different uint64 `json:"different"`
	// Zero pages that the snapshot does not have: host memory is committed,
	// but nothing would have to be kept for them.
	Zero uint64 `json:"zero"`
}

// SnapshotGuest copies the sandbox's guest memory to a new file. The sandbox
// should be idle.
func (s *Sandbox) SnapshotGuest(path string) (*GuestSnapshot, error) {
	mf, err := s.openGuestMemory()
	if err != nil {
		return nil, err
	}
	defer mf.Close()
	exts, size, err := dataExtents(mf)
	if err != nil {
		return nil, fmt.Errorf("fleet: sandbox %s: guest memory: %w", s.id, err)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, fmt.Errorf("fleet: snapshot: %w", err)
	}
	// Memory of a guest: for the owner's eyes only.
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("fleet: snapshot: %w", err)
	}
	g := &GuestSnapshot{f: f, size: size, extents: exts}
	if err := g.fill(mf); err != nil {
		g.Close()
		return nil, fmt.Errorf("fleet: snapshot: %w", err)
	}
	return g, nil
}

func (g *GuestSnapshot) fill(mf *os.File) error {
	if err := g.f.Truncate(g.size); err != nil {
		return err
	}
	buf := make([]byte, 1<<20)
	for _, e := range g.extents {
		for off := e.off; off < e.end; {
			n := min(int64(len(buf)), e.end-off)
			if err := readFull(mf, buf[:n], off); err != nil {
				return err
			}
			if _, err := g.f.WriteAt(buf[:n], off); err != nil {
				return err
			}
			off += n
		}
	}
	return nil
}

// DiffGuest compares the sandbox's guest memory with a snapshot, page by page.
func (s *Sandbox) DiffGuest(g *GuestSnapshot) (GuestDiff, error) {
	mf, err := s.openGuestMemory()
	if err != nil {
		return GuestDiff{}, err
	}
	defer mf.Close()
	d, err := g.diff(mf)
	if err != nil {
		return d, fmt.Errorf("fleet: sandbox %s: comparing guest memory: %w", s.id, err)
	}
	return d, nil
}

func (g *GuestSnapshot) diff(mf *os.File) (GuestDiff, error) {
	var d GuestDiff
	exts, _, err := dataExtents(mf)
	if err != nil {
		return d, err
	}
	var (
		buf  = make([]byte, 1<<20)
		base = make([]byte, 1<<20)
		zero [pageSize]byte
		have = &cursor{extents: g.extents}
	)
	for _, e := range exts {
		for off := e.off; off < e.end; {
			n := min(int64(len(buf)), e.end-off)
			if err := readFull(mf, buf[:n], off); err != nil {
				return d, err
			}
			if err := readFull(g.f, base[:n], off); err != nil {
				return d, err
			}
			for p := int64(0); p < n; p += pageSize {
				page, b := buf[p:p+pageSize], base[p:p+pageSize]
				d.Committed++
				switch {
				case have.contains(off + p):
					if bytes.Equal(page, b) {
						d.Same++
					} else {
						d.Different++
					}
				case bytes.Equal(page, zero[:]):
					d.Zero++
				default:
					d.Different++
				}
			}
			off += n
		}
	}
	return d, nil
}

// cursor answers, for ascending offsets, whether one lies in an extent.
type cursor struct{ extents []extent }

func (c *cursor) contains(off int64) bool {
	for len(c.extents) > 0 && c.extents[0].end <= off {
		c.extents = c.extents[1:]
	}
	return len(c.extents) > 0 && c.extents[0].off <= off
}

// openGuestMemory opens the guest's memory file of a running sandbox for
// reading. Mapping it would be wrong: reading a hole through a mapping
// allocates the page.
func (s *Sandbox) openGuestMemory() (*os.File, error) {
	pid := s.Pid()
	if pid == 0 || s.Exited() {
		return nil, fmt.Errorf("fleet: sandbox %s does not run", s.id)
	}
	fds, err := memfds(pid)
	if err != nil {
		return nil, fmt.Errorf("fleet: sandbox %s: %w", s.id, err)
	}
	for _, fd := range fds {
		if fd.name == guestMemfdName {
			f, err := os.Open(fd.path)
			if err != nil {
				return nil, fmt.Errorf("fleet: sandbox %s: guest memory: %w", s.id, err)
			}
			return f, nil
		}
	}
	return nil, fmt.Errorf("fleet: sandbox %s: process %d has no memfd named %s", s.id, pid, guestMemfdName)
}

// dataExtents lists the ranges of a file that hold data, in whole pages.
func dataExtents(f *os.File) ([]extent, int64, error) {
	fi, err := f.Stat()
	if err != nil {
		return nil, 0, err
	}
	var out []extent
	for off := int64(0); off < fi.Size(); {
		data, err := unix.Seek(int(f.Fd()), off, unix.SEEK_DATA)
		if err == unix.ENXIO {
			break // only a hole is left
		} else if err != nil {
			return nil, 0, err
		}
		hole, err := unix.Seek(int(f.Fd()), data, unix.SEEK_HOLE)
		if err == unix.ENXIO {
			break // became a hole meanwhile
		} else if err != nil {
			return nil, 0, err
		}
		data &^= pageSize - 1
		end := (hole + pageSize - 1) &^ (pageSize - 1)
		out = append(out, extent{data, end})
		off = end
	}
	return out, fi.Size(), nil
}

// readFull reads len(p) bytes; what lies beyond the end of the file is zero.
func readFull(f *os.File, p []byte, off int64) error {
	n, err := f.ReadAt(p, off)
	if err == io.EOF {
		clear(p[n:])
		return nil
	}
	return err
}
