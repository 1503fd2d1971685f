package server

import (
	"fmt"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// A sharedFD is a descriptor that is closed when the last of its users has
// released it.
type sharedFD struct {
	fd   int
	refs atomic.Int32
}

func (f *sharedFD) acquire() *sharedFD {
	f.refs.Add(1)
	return f
}

func (f *sharedFD) release() {
	if f != nil && f.refs.Add(-1) == 0 {
		unix.Close(f.fd)
	}
}

// A memory is a memfd that only the pool writes to, through mem.
type memory struct {
	// mem is mapped; writable unless finish was called.
	mem []byte
	// file is open for reading only: what sandboxes get.
	file *sharedFD
	// w is the writable descriptor that is left, to seal the memfd further, or
	// -1.
	w int
}

// newMemory makes a memfd of a fixed size that cannot be written to except
// through the mapping that is made here.
func newMemory(name string, size uint64, keepWritable bool) (_ *memory, err error) {
	w, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("memfd for %s: %w", name, err)
	}
	m := &memory{w: w}
	defer func() {
		if err != nil {
			err = fmt.Errorf("memfd for %s: %w", name, err)
			m.free()
		}
	}()
	if err := unix.Ftruncate(w, int64(size)); err != nil {
		return nil, err
	}
	if m.mem, err = unix.Mmap(w, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		return nil, err
	}
	fd, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", w), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open it for reading, for which /proc must be mounted: %w", err)
	}
	m.file = &sharedFD{fd: fd}
	m.file.acquire()
	// Whoever gets the descriptor has no business opening it for writing. It
	// would be of no use, but keep even the attempt to those with privileges.
	if err := unix.Fchmod(w, 0400); err != nil {
		return nil, err
	}
	seals := unix.F_SEAL_GROW | unix.F_SEAL_SHRINK | unix.F_SEAL_FUTURE_WRITE
	if !keepWritable {
		seals |= unix.F_SEAL_SEAL
	}
	if _, err := unix.FcntlInt(uintptr(w), unix.F_ADD_SEALS, seals); err != nil {
		return nil, fmt.Errorf("seal it, for which Linux 5.1 is needed: %w", err)
	}
	if !keepWritable {
		unix.Close(w)
		m.w = -1
	}
	return m, nil
}

// finish replaces the writable mapping by one for reading, and returns the
// writable descriptor, with which the caller seals the memfd.
func (m *memory) finish() (w int, err error) {
	ro, err := unix.Mmap(m.file.fd, 0, len(m.mem), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return -1, err
	}
	unix.Munmap(m.mem)
	m.mem = ro
	w, m.w = m.w, -1
	return w, nil
}

// free lets go of the memory.
func (m *memory) free() {
	if m.mem != nil {
		unix.Munmap(m.mem)
		m.mem = nil
	}
	if m.w >= 0 {
		unix.Close(m.w)
		m.w = -1
	}
	m.file.release()
	m.file = nil
}
