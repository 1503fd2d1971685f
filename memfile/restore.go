package memfile

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"runsc-agentzip/memfile/codec"
)

// restoreMax is how many pages one restore handles together, 64 KiB: enough to
// amortise the write, few enough that an access to one of them does not wait
// long.
const restoreMax = 16

// A restorer is what one restore works with.
type restorer struct {
	dec   codec.Decoder
	buf   [restoreMax * PageSize]byte
	words [restoreMax]word
}

func (b *Backend) acquireRestorer() *restorer {
	r := <-b.restorers
	if r == nil {
		r = new(restorer)
	}
	return r
}

// restoreRun restores evicted pages from page first on, up to last or the
// first page in another state, at most restoreMax. It returns how many it
// restored, which is 0 if it lost a race for the first page.
func (b *Backend) restoreRun(first, last uint64, cause *atomic.Uint64) (uint64, error) {
	start := time.Now()
	r := b.acquireRestorer()
	defer func() { b.restorers <- r }()

	// Claim.
	n := uint64(0)
	for ; n < restoreMax && first+n < last; n++ {
		at := b.table.at(first + n)
		w := atomic.LoadUint64(at)
		if w&stateMask != evicted || !atomic.CompareAndSwapUint64(at, w, w&^stateMask|busy) {
			break
		}
		r.words[n] = w
	}

	// Decode, and write what is not zero in runs.
	runStart := uint64(0)
	for i := uint64(0); i <= n; i++ {
		if i < n && tagOf(r.words[i]) != codec.TagZero {
			if err := b.load(&r.dec, (*codec.Page)(r.buf[i*PageSize:]), first+i, r.words[i]); err != nil {
				b.corrupt(err)
			}
			continue
		}
		if i > runStart {
			if err := b.write(r.buf[runStart*PageSize:i*PageSize], (first+runStart)<<pageShift); err != nil {
				// What has been written is as good as what is stored; pages
				// in the file and in the store both would only count double.
				for j := range n {
					if j < runStart {
						b.finish(first+j, r.words[j])
					} else {
						atomic.StoreUint64(b.table.at(first+j), r.words[j])
					}
				}
				b.waiters.wake(first, first+n)
				return runStart, err
			}
		}
		runStart = i + 1
	}

	// Publish.
	for i := range n {
		b.finish(first+i, r.words[i])
	}
	b.waiters.wake(first, first+n)
	cause.Add(n)
	if cause == &b.stats.demand && n != 0 {
		b.stats.restoreNS.add(time.Since(start))
	}
	return n, nil
}

// finish makes a busy page, whose word was w and whose content is in the file
// again, resident.
func (b *Backend) finish(page uint64, w word) {
	b.frees.open()
	defer b.frees.close()
	atomic.StoreUint64(b.table.at(page), resident)
	b.nonResident.Add(-1)
	b.stats.restored.Add(1)
	b.forget(w)
}

// write is Host.WriteAt, trying again for as long as the host has no memory.
func (b *Backend) write(p []byte, off uint64) error {
	deadline := time.Now().Add(b.opts.NoMemoryTimeout)
	for pause := time.Millisecond; ; pause = min(2*pause, 250*time.Millisecond) {
		err := b.host.WriteAt(p, off)
		if err == nil {
			return nil
		}
		if !errors.Is(err, unix.ENOMEM) && !errors.Is(err, unix.ENOSPC) {
			return fmt.Errorf("writing %d restored bytes at memory file offset %#x: %w", len(p), off, err)
		}
		b.stats.noMemory.Add(1)
		if time.Now().After(deadline) {
			return fmt.Errorf("no host memory for %d bytes at memory file offset %#x after %v: %w; raise the memory limit of the sandbox or run fewer of them", len(p), off, b.opts.NoMemoryTimeout, err)
		}
		time.Sleep(pause)
	}
}

// corrupt ends the sandbox: a page cannot be given back as it was.
func (b *Backend) corrupt(err error) {
	b.stats.checksumFailures.Add(1)
	b.host.Fatal(fmt.Sprintf("guest memory cannot be restored: %v; the sandbox is killed rather than continue with wrong memory", err))
	panic("memfile: Host.Fatal returned")
}
