package sentry

import (
	"runtime"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/context"
	"gvisor.dev/gvisor/pkg/log"

	"runsc-agentzip/memfile"
	"runsc-agentzip/memfile/codec"
	"runsc-agentzip/pkg/control"
	"runsc-agentzip/pkg/pressure"
	"runsc-agentzip/runsc-agentzip/attach"
)

const (
	// throttleMax is how long a fault or a system call waits for memory at most.
	// Whatever is wrong, the application goes on, and the kernel decides.
	throttleMax = 2 * time.Second
	// throttleStep is how often a fault that waits looks again.
	throttleStep = time.Millisecond

	// throttlePasses is after how many evictions a fault goes on, whatever they have
	// freed: the first of them may have begun before it.
	throttlePasses = 2

	// reliefPause is for how long, as a multiple of what an eviction took, the
	// sandbox works undisturbed after it, unless pressure gets critical.
	reliefPause = 3
	// deepenSlice is how long pages are compressed harder before it is time to look
	// what else can be evicted.
	deepenSlice = 500 * time.Millisecond
	// futilePause is the pause after one that freed less than futileBytes although
	// manyBytes were there, and until when nobody waits for another: what is in
	// memory is in use, or has no profitable form.
	futilePause = 500 * time.Millisecond
	futileBytes = 1 << 20
	manyBytes   = 4 << 20
)

// scarcity is what a sandbox does when memory is scarce. Its zero value is that
// nothing is known of it.
type scarcity struct {
	gauge atomic.Pointer[pressure.Gauge]
	// wanted has an element if somebody wants memory to be evicted.
	wanted chan struct{}

	// evictions counts those that have ended.
	evictions, throttled atomic.Uint64
	// futile is until when evicting is known to free nothing, in Unix nanoseconds.
	futile atomic.Int64
	// notBefore is when the next eviction is due under high pressure, and idle is
	// set if the last one freed next to nothing. They belong to the driver.
	notBefore time.Time
	idle      bool
}

// level tells how scarce memory is for this sandbox.
func (s *scarcity) level() pressure.Level { return s.gauge.Load().Level() }

// pressed tells whether to save memory at the expense of speed.
func (s *scarcity) pressed() bool {
	g := s.gauge.Load()
	return g.Level() >= pressure.HighLevel || g.HostHigh()
}

// A task is an application's thread, a kernel.Task.
type task interface{ Killed() bool }

// admit is called before a fault (sysno is pgalloc.NoSyscall) or a system call is
// handled. held returns how much memory could be evicted, in bytes.
func (s *scarcity) admit(t task, sysno uintptr, held interface{ HeldBytes() (uint64, error) }) {
	g := s.gauge.Load()
	if !g.Limited() {
		return // the driver sees when that changes
	}
	l := g.Level()
	if l == pressure.None {
		return
	}
	select {
	case s.wanted <- struct{}{}:
	default:
	}
	if l != pressure.CriticalLevel || freesMemory(sysno) {
		return
	}
	if g.Read().Above != 0 {
		// Others have filled the cgroup: to hold up a sandbox with little memory
		// would not empty it.
		if n, err := held.HeldBytes(); err == nil && n < manyBytes {
			return
		}
	}
	start, passes := time.Now(), s.evictions.Load()
	for now := start; now.Sub(start) < throttleMax && now.UnixNano() >= s.futile.Load() && !t.Killed(); now = time.Now() {
		time.Sleep(throttleStep)
		if g.Level() != pressure.CriticalLevel || s.evictions.Load() >= passes+throttlePasses {
			break
		}
	}
	s.throttled.Add(uint64(time.Since(start)))
}

// freesMemory tells whether a system call can give memory back, or end who has it, and
// as a rule takes none itself: what brk and mremap add is given by faults, unless the
// task has all its future memory locked.
func freesMemory(sysno uintptr) bool {
	switch sysno {
	case unix.SYS_MUNMAP, unix.SYS_MADVISE, unix.SYS_MREMAP, unix.SYS_BRK, unix.SYS_MUNLOCK, unix.SYS_MUNLOCKALL,
		unix.SYS_SHMDT, unix.SYS_SHMCTL,
		unix.SYS_CLOSE, unix.SYS_CLOSE_RANGE, unix.SYS_DUP3, unix.SYS_UNLINKAT, unix.SYS_RENAMEAT2, unix.SYS_TRUNCATE, unix.SYS_FTRUNCATE, unix.SYS_UMOUNT2,
		unix.SYS_EXIT, unix.SYS_EXIT_GROUP, unix.SYS_KILL, unix.SYS_TKILL, unix.SYS_TGKILL:
		return true
	}
	// arm64 has only unlinkat.
	const unlink = 87
	return runtime.GOARCH == "amd64" && sysno == unlink
}

// Admit implements pgalloc.PageBackend.Admit.
func (b *backend) Admit(ctx context.Context, sysno uintptr) {
	process.scarce.admit(ctx, sysno, b.Backend)
}

// relieve evicts what a working sandbox does not use, if memory is scarce.
func (d *driver) relieve() {
	s := &process.scarce
	l := s.level()
	now := time.Now()
	switch {
	case l == pressure.None || now.UnixNano() < s.futile.Load():
		return
	case d.f.IsAsyncLoading():
		s.futile.Store(now.Add(futilePause).UnixNano())
		return
	case now.Before(s.notBefore) && (l == pressure.HighLevel || s.idle):
		return
	}
	before, err := d.b.HeldBytes()
	if err != nil {
		return
	}
	halted := func() bool {
		select {
		case <-d.stop:
			return true
		default:
			return false
		}
	}
	var res memfile.EvictResult
	deepened := uint64(0)
	process.background.run(func() {
		res, err = d.b.Evict(memfile.EvictOptions{Tier: codec.TierMid, Settle: d.conf.settle, MidStep: true, Stop: halted})
		if s.level() == pressure.CriticalLevel {
			d.b.DropKept()
		}
		// If what is left in memory is little, it is the store that has to get
		// smaller.
		if held, err := d.b.HeldBytes(); err == nil && held < d.mayHold(held)/3 && s.level() != pressure.None {
			end := time.Now().Add(deepenSlice)
			deepened, _ = d.b.Deepen(func() bool {
				return halted() || s.level() == pressure.None || time.Now().After(end)
			})
		}
	})
	took := time.Since(now)
	after, _ := d.b.HeldBytes()
	if res.Evicted<<12 < futileBytes && res.Marked<<12 >= manyBytes && deepened == 0 {
		s.futile.Store(time.Now().Add(futilePause).UnixNano())
	}
	// One that freed nothing need not be repeated at once: somebody else fills the
	// cgroup, or the store does.
	s.idle = res.Evicted<<12 < futileBytes && deepened == 0
	pause := took * reliefPause
	if s.idle {
		pause = took
		if process.scarce.gauge.Load().Read().Above != 0 && before < manyBytes {
			// Others have filled the cgroup, and will for a while.
			pause = futilePause
		}
	}
	s.evictions.Add(1)
	s.notBefore = time.Now().Add(pause)
	log.Debugf("agentzip: memory pressure is %v: evicted %d of %d pages and compressed %d harder in %v, %d -> %d bytes in memory (%v)", l, res.Evicted, res.Marked, deepened, took, before, after, err)
}

// mayHold is the limit, or what the sandbox has in memory and in the store where others
// share the limit.
func (d *driver) mayHold(held uint64) uint64 {
	if r := process.scarce.gauge.Load().Read(); r.Above == 0 {
		return r.Limit
	}
	return held + d.b.Stats().StoreBytes
}

// Memory gives the sandbox the files that tell how scarce memory is.
func (a *Agentzip) Memory(args *attach.MemoryArgs, _ *struct{}) error {
	if a.d == nil {
		return errOff
	}
	g, err := args.Gauge()
	if err != nil {
		return err
	}
	log.Infof("agentzip: the sandbox's memory limit is %d bytes (0: none), of %d cgroups", g.Read().Limit, args.Groups)
	// An earlier one may be in use; its files are few.
	process.scarce.gauge.Store(g)
	return nil
}

func pressureState() control.Pressure {
	s := &process.scarce
	g := s.gauge.Load()
	r := g.Read()
	return control.Pressure{
		Level:       r.Level.String(),
		LimitBytes:  r.Limit,
		UsedBytes:   r.Used,
		Above:       uint64(r.Above),
		Evictions:   s.evictions.Load(),
		ThrottledNS: s.throttled.Load(),
	}
}
