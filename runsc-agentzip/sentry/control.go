package sentry

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/sentry/kernel"
	"gvisor.dev/gvisor/pkg/sentry/pgalloc"
	"gvisor.dev/gvisor/runsc/boot"
	"gvisor.dev/gvisor/runsc/config"

	"runsc-agentzip/memfile"
	"runsc-agentzip/memfile/codec"
	"runsc-agentzip/pkg/control"
)

// process is the state of the sandbox process. A restore replaces the memory
// file and the kernel of the start.
var process struct {
	// opts and stderr are immutable after initSandbox.
	opts   memfile.Options
	stderr int

	// mu protects what follows. It is a leaf.
	mu       sync.Mutex
	backends map[*pgalloc.MemoryFile]*memfile.Backend
	driver   *driver
}

// Register makes sandboxes that this process becomes run with the backend.
func Register() {
	boot.AgentzipInit = initSandbox
	boot.AgentzipControl = newControl
}

// initSandbox implements boot.AgentzipInit.
func initSandbox(conf *config.Config, stdioFDs []int) error {
	if !conf.Agentzip {
		return nil
	}
	process.opts = memfile.DefaultOptions()
	process.opts.MapUnit = uint64(conf.AgentzipMapUnit)
	process.opts.Workers = int(conf.AgentzipWorkers)
	process.opts.StoreMax = uint64(conf.AgentzipStoreMax)
	process.opts.TestCorrupt = uint64(conf.AgentzipTestCorrupt)
	process.stderr = -1
	if len(stdioFDs) == 3 {
		// The last word of a sandbox that dies of a corrupted page should
		// reach whoever runs the container. No harm if it cannot.
		if fd, err := unix.FcntlInt(uintptr(stdioFDs[2]), unix.F_DUPFD_CLOEXEC, lastWordFD); err == nil {
			process.stderr = fd
		}
	}
	process.backends = make(map[*pgalloc.MemoryFile]*memfile.Backend)
	pgalloc.NewPageBackend = newPageBackend
	return nil
}

// lastWordFD is where the copy of standard error goes: above the descriptors
// that the loader numbers itself and wants to find free.
const lastWordFD = 1024

func newPageBackend(f *pgalloc.MemoryFile) (pgalloc.PageBackend, error) {
	b, err := memfile.New(&host{f: f, stderr: process.stderr}, process.opts)
	if err != nil {
		return nil, err
	}
	process.mu.Lock()
	defer process.mu.Unlock()
	process.backends[f] = b
	return b, nil
}

// newControl implements boot.AgentzipControl.
func newControl(k *kernel.Kernel, conf *config.Config) any {
	if !conf.Agentzip {
		return &Agentzip{}
	}
	process.mu.Lock()
	defer process.mu.Unlock()
	f := k.MemoryFile()
	b := process.backends[f]
	if b == nil {
		return &Agentzip{}
	}
	if process.driver != nil {
		process.driver.halt()
	}
	// Backends of memory files that were replaced are closed by those files.
	process.backends = map[*pgalloc.MemoryFile]*memfile.Backend{f: b}
	d := newDriver(k, f, b, settings{
		idle:           conf.AgentzipIdle,
		settle:         conf.AgentzipSettle,
		deepenAfter:    conf.AgentzipDeepenAfter,
		testEvictEvery: conf.AgentzipTestEvictEvery,
	})
	process.driver = d
	go d.run()
	return &Agentzip{d: d}
}

// Agentzip is the object that answers on the control socket, as
// "Agentzip.Stats" and so on.
type Agentzip struct {
	// d is nil in a sandbox with --agentzip=off.
	d *driver
}

// errOff is what a sandbox without backend answers.
var errOff = errors.New("this sandbox runs with --agentzip=off")

// Empty is the argument of methods that need none.
type Empty struct{}

// Stats reports the sandbox's memory.
func (a *Agentzip) Stats(_ *Empty, out *control.Stats) error {
	if a.d == nil {
		return errOff
	}
	*out = a.d.b.Stats()
	out.Phase = a.d.phase()
	return nil
}

// Evict evicts all that is eligible, in the small form, and reports.
func (a *Agentzip) Evict(_ *Empty, out *control.EvictReport) error {
	if a.d == nil {
		return errOff
	}
	if err := a.d.f.AwaitLoadAll(); err != nil {
		return fmt.Errorf("loading the checkpoint: %w", err)
	}
	out.OwnedBefore = a.d.b.Stats().OwnedBytes
	start := time.Now()
	// A memory manager may be busy for a moment.
	var err error
	for range 20 {
		var res memfile.EvictResult
		res, err = a.d.b.Evict(memfile.EvictOptions{Tier: codec.TierDeep, Settle: a.d.conf.settle})
		out.MarkedPages += res.Marked
		out.EvictedPages += res.Evicted
		out.AbortedPages += res.Aborted
		out.RejectedPages += res.Rejected
		out.SkippedPages = res.Skipped
		if err == nil || benign(err) {
			break
		}
		time.Sleep(50 * time.Millisecond)
	}
	if err == nil {
		_, err = a.d.b.Deepen(nil)
	}
	out.ElapsedNS = uint64(time.Since(start))
	out.OwnedAfter = a.d.b.Stats().OwnedBytes
	return err
}

// Check verifies the store while the sandbox runs.
func (a *Agentzip) Check(_ *Empty, out *control.CheckReport) error {
	if a.d == nil {
		return errOff
	}
	start := time.Now()
	res, err := a.d.b.Check(nil)
	out.StoredPages, out.CheckedPages = res.Stored, res.Stored
	out.Problems = append([]string{}, res.Problems...)
	out.ElapsedNS = uint64(time.Since(start))
	return err
}
