package sentry

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/log"
	"gvisor.dev/gvisor/pkg/sentry/fsimpl/proc"
	"gvisor.dev/gvisor/pkg/sentry/kernel"
	"gvisor.dev/gvisor/pkg/sentry/pgalloc"
	"gvisor.dev/gvisor/runsc/boot"
	"gvisor.dev/gvisor/runsc/config"
	"gvisor.dev/gvisor/runsc/sandbox"

	"runsc-agentzip/memfile"
	"runsc-agentzip/memfile/codec"
	"runsc-agentzip/memfile/prefetch"
	"runsc-agentzip/memfile/template"
	"runsc-agentzip/pkg/control"
	"runsc-agentzip/pkg/phase"
	"runsc-agentzip/pkg/pool/client"
	"runsc-agentzip/runsc-agentzip/attach"
)

// process is the state of the sandbox process. A restore replaces the memory
// file and the kernel of the start.
var process struct {
	// opts, mapTemplate, stderr, background and pool are immutable after initSandbox.
	opts        memfile.Options
	mapTemplate bool
	stderr      int
	background  background
	// pool is this end of the page pool, or nil without pool or domain.
	pool   *pacer
	domain string
	// scarce is safe for concurrent use.
	scarce scarcity

	// mu protects what follows. It is a leaf.
	mu sync.Mutex
	// template is that of the restore in progress, until its memory file is
	// created. It is owned by that file's backend then.
	template *template.View
	// patterns are what the template's folder knows about steps, or nil. They
	// go the same way as template.
	patterns []byte
	backends map[*pgalloc.MemoryFile]*backend
	driver   *driver
}

// Register makes sandboxes that this process becomes run with the backend.
func Register() {
	boot.AgentzipInit = initSandbox
	boot.AgentzipRestore = beginRestore
	boot.AgentzipControl = newControl
	sandbox.AgentzipTemplate = openTemplate
	sandbox.AgentzipStarted = attach.Started
	sandbox.AgentzipEnded = attach.Ended
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
	process.mapTemplate = conf.AgentzipTemplate == "map"
	process.opts.TestCorrupt = uint64(conf.AgentzipTestCorrupt)
	process.stderr = -1
	if len(stdioFDs) == 3 {
		// The last word of a sandbox that dies of a corrupted page should
		// reach whoever runs the container. No harm if it cannot.
		if fd, err := unix.FcntlInt(uintptr(stdioFDs[2]), unix.F_DUPFD_CLOEXEC, lastWordFD); err == nil {
			process.stderr = fd
		}
	}
	process.background = startBackground()
	process.opts.Rest = func() time.Duration {
		if process.scarce.pressed() {
			return 0
		}
		return process.background.governor.Rest()
	}
	process.scarce.wanted = make(chan struct{}, 1)
	if conf.AgentzipPool != "" && conf.AgentzipDomain != "" {
		process.domain = conf.AgentzipDomain
		process.pool = newPacer(client.New(client.Options{Log: log.Infof}))
	}
	process.backends = make(map[*pgalloc.MemoryFile]*backend)
	pgalloc.NewPageBackend = newPageBackend
	proc.AgentzipHint = guestHint
	return nil
}

// lastWordFD is where the copy of standard error goes: above the descriptors
// that the loader numbers itself and wants to find free.
const lastWordFD = 1024

// backend is what gVisor knows as pgalloc.PageBackend.
type backend struct {
	*memfile.Backend
	template *template.View
}

// Adopt implements pgalloc.PageBackend.Adopt.
func (b *backend) Adopt(start, end, off uint64) error {
	return b.Backend.Adopt(memfile.Range{Start: start, End: end}, off)
}

// TemplateFD implements pgalloc.PageBackend.TemplateFD.
func (b *backend) TemplateFD() int {
	return b.template.PagesFD()
}

// Close implements pgalloc.PageBackend.Close.
func (b *backend) Close() {
	b.Backend.Close()
	if b.template != nil {
		_ = b.template.Close()
	}
}

func newPageBackend(f *pgalloc.MemoryFile) (pgalloc.PageBackend, error) {
	b, err := memfile.New(&host{f: f, stderr: process.stderr}, process.opts)
	if err != nil {
		return nil, err
	}
	if process.pool != nil {
		b.SetPool(process.pool)
	}
	process.mu.Lock()
	defer process.mu.Unlock()
	pb := &backend{Backend: b, template: process.template}
	process.template = nil
	if pb.template != nil {
		b.SetTemplate(pb.template, process.mapTemplate)
		if process.patterns != nil {
			// Only hints: without them the sandbox learns for itself.
			if err := b.ImportPatterns(process.patterns, prefetch.Digest(pb.template.Digest())); err != nil {
				log.Warningf("agentzip: %s beside the template is of no use: %v", prefetch.File, err)
			}
			process.patterns = nil
		}
	}
	process.backends[f] = pb
	return pb, nil
}

// openTemplate implements sandbox.AgentzipTemplate. It runs outside of the
// sandbox, in the command that restores it.
func openTemplate(conf *config.Config, dir string, opened []*os.File) ([]*os.File, sandbox.AgentzipImage, error) {
	var none sandbox.AgentzipImage
	if len(opened) < 3 {
		// An image in one file, compressed or not, is loaded as usual.
		pages := filepath.Join(dir, template.PagesFile)
		if _, err := os.Stat(pages); err == nil {
			return nil, none, fmt.Errorf("%s is there, but %s is missing: the image is incomplete; copy or make it again", pages, filepath.Join(dir, template.MetaFile))
		}
		return nil, none, nil
	}
	if !conf.Agentzip || conf.AgentzipTemplate == "load" {
		return nil, none, nil
	}
	t, err := template.Open(dir, log.Infof)
	if err != nil {
		return nil, none, err
	}
	// The folder may have got another image since the restore opened its
	// files.
	if err := t.CheckMetadata(opened[0], opened[1]); err != nil {
		_ = t.Close()
		return nil, none, err
	}
	pages, index := t.Files()
	files := []*os.File{pages, index}
	switch patterns, err := os.Open(filepath.Join(dir, prefetch.File)); {
	case err == nil:
		files = append(files, patterns)
	case !errors.Is(err, os.ErrNotExist):
		log.Warningf("agentzip: no prefetch from the first step on: %v", err)
	}
	return files, sandbox.AgentzipImage{Digest: t.Info().Digest.String(), Dir: dir}, nil
}

// beginRestore implements boot.AgentzipRestore.
func beginRestore(files []*os.File) error {
	if len(files) == 0 {
		return nil
	}
	if len(files) != 2 && len(files) != 3 {
		return fmt.Errorf("restore with %d template files, want 2 or 3", len(files))
	}
	var patterns []byte
	if len(files) == 3 {
		var err error
		if patterns, err = io.ReadAll(io.LimitReader(files[2], prefetch.ExportMax+1)); err != nil {
			log.Warningf("agentzip: reading %s beside the template: %v", prefetch.File, err)
		}
	}
	// The control server closes the files when the call returns.
	var own [2]*os.File
	for i, f := range files[:2] {
		fd, err := unix.Dup(int(f.Fd()))
		if err != nil {
			return fmt.Errorf("keeping the template's files: %w", err)
		}
		own[i] = os.NewFile(uintptr(fd), f.Name())
	}
	v, err := template.FromFiles(own[0], own[1])
	if err != nil {
		own[0].Close()
		own[1].Close()
		return fmt.Errorf("using the checkpoint as a template: %w", err)
	}
	log.Infof("agentzip: the checkpoint is a template of %d pages, digest %v", v.Pages(), v.Digest())
	process.mu.Lock()
	defer process.mu.Unlock()
	process.template, process.patterns = v, patterns
	return nil
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
	var digest *template.Digest
	if b.template != nil {
		t := b.template.Digest()
		digest = &t
	}
	// Backends of memory files that were replaced are closed by those files.
	process.backends = map[*pgalloc.MemoryFile]*backend{f: b}
	d := newDriver(k, f, b.Backend, digest, process.pool, settings{
		idle:           conf.AgentzipIdle,
		settle:         conf.AgentzipSettle,
		prefetch:       conf.AgentzipPrefetch == "on",
		trimAfter:      conf.AgentzipTrimAfter,
		deepenAfter:    conf.AgentzipDeepenAfter,
		pageoutAfter:   conf.AgentzipPageoutAfter,
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
	if process.pool != nil {
		process.pool.AskUsage() // for the next time
	}
	*out = a.d.b.Stats()
	out.Phase = a.d.phase()
	out.Pool = poolState()
	out.Pressure = pressureState()
	return nil
}

// HintArgs are the arguments of Hint.
type HintArgs struct {
	// Phase is "wait" or "resume".
	Phase string
}

// Hint tells the sandbox of what is about to happen.
func (a *Agentzip) Hint(args *HintArgs, _ *Empty) error {
	if a.d == nil {
		return errOff
	}
	return a.d.hintNamed(args.Phase)
}

// hintNamed is hint for a hint by its name.
func (d *driver) hintNamed(name string) error {
	h, ok := phase.ParseHint(name)
	if !ok {
		return fmt.Errorf("unknown phase %q: there are wait and resume", name)
	}
	d.hint(h)
	return nil
}

// guestHint is what a guest has written to /proc/agentzip.
func guestHint(name string) error {
	process.mu.Lock()
	d := process.driver
	process.mu.Unlock()
	if d == nil {
		return errOff
	}
	return d.hintNamed(name)
}

// Prefetch restores what the step in progress is predicted to want.
func (a *Agentzip) Prefetch(_ *Empty, out *control.PrefetchReport) error {
	if a.d == nil {
		return errOff
	}
	start := time.Now()
	n, err := a.d.b.PrefetchNow(nil)
	out.Pages, out.ElapsedNS = n, uint64(time.Since(start))
	return err
}

// Patterns returns what the sandbox's steps have taught about the template it
// was restored from.
func (a *Agentzip) Patterns(_ *Empty, out *[]byte) error {
	if a.d == nil {
		return errOff
	}
	if a.d.template == nil {
		return errors.New("the sandbox was not restored from a template, so nothing that it learnt is of use to others")
	}
	*out = a.d.b.ExportPatterns(prefetch.Digest(*a.d.template), prefetch.ExportMax)
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
		// Somebody who wants to prefetch does not want it to go on.
		if _, err = a.d.b.Deepen(nil); errors.Is(err, memfile.ErrStopped) {
			err = nil
		}
	}
	a.d.share(nil)
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
