// Package sentry connects the memory file backend with the Sentry it runs in:
// it gives memfile.Host the memory file and the memory managers, watches when
// tasks run and when they wait, and answers on the control socket.
//
// It is the only package that imports both gVisor and memfile.
package sentry

import (
	"fmt"
	"io"
	"os"
	"sort"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/log"
	"gvisor.dev/gvisor/pkg/sentry/memmap"
	"gvisor.dev/gvisor/pkg/sentry/mm"
	"gvisor.dev/gvisor/pkg/sentry/pgalloc"

	"runsc-agentzip/memfile"
)

// host implements memfile.Host for a MemoryFile.
type host struct {
	f *pgalloc.MemoryFile

	// stderr is a copy of the root container's standard error, or -1.
	stderr int
}

var _ memfile.Host = (*host)(nil)

// ReadAt implements memfile.Host.ReadAt.
func (h *host) ReadAt(p []byte, off uint64) error {
	for len(p) != 0 {
		n, err := unix.Pread(h.f.FD(), p, int64(off))
		switch {
		case err == unix.EINTR:
			continue
		case err != nil:
			return err
		case n == 0:
			return io.ErrUnexpectedEOF
		}
		p, off = p[n:], off+uint64(n)
	}
	return nil
}

// WriteAt implements memfile.Host.WriteAt. It writes through the descriptor
// and not through the Sentry's mapping, where a lack of memory would be a
// SIGBUS.
func (h *host) WriteAt(p []byte, off uint64) error {
	for len(p) != 0 {
		n, err := unix.Pwrite(h.f.FD(), p, int64(off))
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return err
		}
		p, off = p[n:], off+uint64(n)
	}
	return nil
}

// Punch implements memfile.Host.Punch.
func (h *host) Punch(r memfile.Range) error {
	return h.f.Punch(memmap.FileRange{Start: r.Start, End: r.End})
}

// Resident implements memfile.Host.Resident.
func (h *host) Resident(off uint64, vec []byte) error {
	return h.f.Resident(off, vec)
}

// HeldBytes implements memfile.Host.HeldBytes.
func (h *host) HeldBytes() (uint64, error) {
	return h.f.HeldBytes()
}

// VisitEvictable implements memfile.Host.VisitEvictable.
func (h *host) VisitEvictable(fn func(memfile.Range)) {
	h.f.VisitEvictable(func(fr memmap.FileRange) {
		fn(memfile.Range{Start: fr.Start, End: fr.End})
	})
}

// EndAccess implements memfile.Host.EndAccess.
func (h *host) EndAccess(marked []memfile.Range, unmark func(memfile.Range), deadline time.Time, stop func() bool) error {
	frs := make([]memmap.FileRange, len(marked))
	for i, r := range marked {
		frs[i] = memmap.FileRange{Start: r.Start, End: r.End}
	}
	return mm.UnmapFile(h.f, frs, func(fr memmap.FileRange) {
		unmark(memfile.Range{Start: fr.Start, End: fr.End})
	}, deadline, func() bool { return !stop() })
}

// Premap implements memfile.Host.Premap.
func (h *host) Premap(ranges []memfile.Range, stop func() bool) {
	frs := make([]memmap.FileRange, len(ranges))
	for i, r := range ranges {
		frs[i] = memmap.FileRange{Start: r.Start, End: r.End}
	}
	sort.Slice(frs, func(i, j int) bool { return frs[i].Start < frs[j].Start })
	mm.PremapFile(h.f, frs, stop)
}

// Fatal implements memfile.Host.Fatal. The message goes where somebody may see
// it: the log, the container's standard error, and the panic report.
func (h *host) Fatal(msg string) {
	msg = "runsc-agentzip: FATAL: " + msg
	log.Warningf("%s", msg)
	if h.stderr >= 0 {
		_, _ = unix.Write(h.stderr, []byte(msg+"\n"))
	}
	fmt.Fprintln(os.Stderr, msg)
	// Not a panic in this goroutine: deferred calls would wait for locks that
	// it holds, and for the page that it was restoring.
	go panic(msg)
	select {}
}
