package memfile

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"runsc-agentzip/memfile/arena"
	"runsc-agentzip/memfile/codec"
	"runsc-agentzip/pkg/pool/wire"
)

// restoreMax is how many pages one restore handles together, 64 KiB: enough to
// amortise the write, few enough that an access to one of them does not wait
// long.
const restoreMax = 16

// A restorer is what one restore works with.
type restorer struct {
	dec   codec.Decoder
	base  codec.Page
	buf   [restoreMax * PageSize]byte
	words [restoreMax]word
	// record is what the pool has of a page.
	record [wire.MaxRecord]byte

	// root is the blob of the root that was needed last, or 0, and rootPage
	// the page that it is of. See loadNext.
	root     arena.Handle
	rootPage *codec.Page
}

// acquireRestorer waits until it may hand out a restorer.
func (b *Backend) acquireRestorer() *restorer {
	b.restoring <- struct{}{}
	return b.restorers.Get().(*restorer)
}

func (b *Backend) releaseRestorer(r *restorer) {
	b.restorers.Put(r)
	<-b.restoring
}

// restoreRun restores evicted pages from page first on, up to last or the
// first page in another state, at most restoreMax. It returns how many it
// restored, which is 0 if it lost a race for the first page. It tries once: a
// page may not stay busy while somebody waits for the host to have memory.
func (b *Backend) restoreRun(first, last uint64, cause *atomic.Uint64) (uint64, error) {
	start := time.Now()
	r := b.acquireRestorer()
	defer b.releaseRestorer(r)
	r.root = 0

	// Claim.
	n := uint64(0)
	for ; n < restoreMax && first+n < last; n++ {
		w, ok := b.claim(first + n)
		if !ok {
			break
		}
		r.words[n] = w
	}

	// Decode, and write what is not zero in runs.
	runStart, loaded := uint64(0), uint64(0)
	for i := uint64(0); i <= n; i++ {
		if i < n && tagOf(r.words[i]) != codec.TagZero {
			if i < loaded {
				continue
			}
			k := b.templateRun(first+i, r.words[i:n])
			if k > 1 {
				if err := b.readTemplate(r.buf[i*PageSize:(i+k)*PageSize], first+i); err != nil {
					b.corrupt(&errCorrupt{first + i, codec.TagTemplate, err.Error()})
				}
				loaded = i + k
			} else if err := b.loadNext(r, (*codec.Page)(r.buf[i*PageSize:]), first+i, r.words[i]); err != nil {
				b.corrupt(err)
			}
			continue
		}
		if i > runStart {
			if err := b.host.WriteAt(r.buf[runStart*PageSize:i*PageSize], (first+runStart)<<pageShift); err != nil {
				// What has been written is as good as what is stored; pages
				// in the file and in the store both would only count double.
				for j := range n {
					if j < runStart {
						b.finish(first+j, r.words[j])
					} else {
						b.table.store(first+j, r.words[j])
					}
				}
				b.waiters.wake(first, first+n)
				cause.Add(runStart)
				return runStart, fmt.Errorf("writing %d restored bytes at memory file offset %#x: %w", (i-runStart)*PageSize, (first+runStart)<<pageShift, err)
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
		b.demanded(first, first+n, time.Since(start))
	}
	return n, nil
}

// finish makes a busy page, whose word was w and whose content is in the file
// again, resident.
func (b *Backend) finish(page uint64, w word) {
	b.frees.open()
	defer b.frees.close()
	b.stats.restored.Add(1)
	if b.inhibit.Load() == 0 && b.keepable(w) {
		b.stats.kept.Add(1)
		b.stats.form(tagOf(w)).Add(-1)
		b.table.store(page, resident|w&formMask)
		b.nonResident.Add(-1)
		return
	}
	flag := resident
	if isTemplate(w) && b.table.maybeMapped(page) {
		// The word has the flag before the mark goes: TemplateBacked is to find one
		// of them at any time.
		flag = tmapped
		b.table.store(page, w&^stateMask|busy|flag)
		b.table.takeMapped(page)
	}
	b.table.store(page, resident|flag)
	b.nonResident.Add(-1)
	b.forget(w)
}

// A patience decides for how long a gate whose restores fail tries again. The
// zero value is ready for use.
type patience struct {
	deadline time.Time
	pause    time.Duration
}

// wait returns nil after a pause if a restore that failed with err should be
// tried again, or the error that the gate fails with. In the meantime the pages
// are evicted: whoever wants to drop them, and so to give the host memory, need
// not wait.
func (pt *patience) wait(b *Backend, err error) error {
	if !errors.Is(err, unix.ENOMEM) && !errors.Is(err, unix.ENOSPC) {
		return err
	}
	b.stats.noMemory.Add(1)
	if pt.deadline.IsZero() {
		pt.deadline = time.Now().Add(b.opts.NoMemoryTimeout)
		pt.pause = time.Millisecond
	}
	if time.Now().After(pt.deadline) {
		return fmt.Errorf("no host memory for %v: %w; raise the memory limit of the sandbox or run fewer of them", b.opts.NoMemoryTimeout, err)
	}
	time.Sleep(pt.pause)
	pt.pause = min(2*pt.pause, 250*time.Millisecond)
	return nil
}

// corrupt ends the sandbox: a page cannot be given back as it was.
func (b *Backend) corrupt(err error) {
	b.stats.checksumFailures.Add(1)
	b.host.Fatal(fmt.Sprintf("guest memory cannot be restored: %v; the sandbox is killed rather than continue with wrong memory", err))
	panic("memfile: Host.Fatal returned")
}
