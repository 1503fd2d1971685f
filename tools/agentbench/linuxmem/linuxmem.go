// Package linuxmem makes idle sandboxes small with what Linux itself offers: the
// baseline that runsc-agentzip is compared with. Every sandbox, run by a stock
// runsc, has a memory cgroup of its own, which is reclaimed while the sandbox
// waits; a zram device takes the pages as swap; KSM merges equal pages of the
// Sentries.
//
//	host, err := linuxmem.Setup(ctx, linuxmem.Options{StateFile: file})
//	defer host.Close(ctx)
//	group, err := host.Group("clone-1")
//	sb, err := rt.Restore(ctx, "clone-1", bundle, image, fleet.WithLauncher(group.Launcher()...))
//	... a step, then at the wait that follows
//	reclaimed, err := group.Reclaim(ctx)
//	usage, err := group.Usage()
//	... sb.Delete(ctx)
//	err = group.Close()
//
// # What a sandbox costs
//
// Usage.Bytes of its group (all that is charged to it and in memory: guest
// memory, Sentry, gofer, the attached runsc, page tables, page cache it brought
// in) and, by HostUsage.Share, its part of what zram holds. Zram's own table,
// 16 bytes for every page of Options.ZramBytes, exists before any sandbox does
// and is left out, in favour of this baseline.
//
// The blocks of a memfd (st_blocks) say nothing here: swapped pages count too.
// And reading a memfd brings its pages back, so whoever measures this system
// must not look at guest pages.
//
// # What is changed on the host
//
// Swap and KSM are the whole host's, so only one Host exists at a time, and none
// beside other swap. All that Setup makes or changes is recorded in
// Options.StateFile before it happens, so that RestoreHost can undo it after a
// kill at any point. Nothing of it survives a reboot. vm.swappiness and
// vm.page-cluster stay as they are: the reclaim asked for here takes everything
// whatever swappiness says, and the kernel reads no cluster ahead from a device
// that answers at once.
package linuxmem

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// DefaultAlgorithm is the compressor that zram uses: of those that every kernel
// has, the one that decompresses fastest.
const DefaultAlgorithm = "lz4"

// Options configure Setup.
type Options struct {
	// ZramBytes is the size of the swap device before compression. Default: the
	// machine's memory.
	ZramBytes uint64
	// Algorithm is the compressor, DefaultAlgorithm by default.
	Algorithm string
	// StateFile is where the changes to the host are recorded, for RestoreHost.
	// It must not exist yet; its directory must. Close removes it.
	StateFile string
	// Say, if set, receives what a user may want to know.
	Say func(format string, args ...any)

	// step, if set, is called between any two changes to the host: tests end the
	// process there.
	step func(name string)
}

// ErrInUse says that a living process has a Host.
var ErrInUse = errors.New("another process on this machine uses zram swap and KSM for a benchmark: wait until it ends")

// Host is a machine with zram swap, KSM and a place for memory cgroups. Its
// methods may be called concurrently.
type Host struct {
	file  *stateFile
	zram  int
	lock  *os.File
	memcg memcg
	step  func(string)

	mu     sync.Mutex
	closed bool
	groups map[string]*Group
}

// Setup prepares the machine. It refuses, and changes nothing, if swap is in use
// or something that it needs is missing.
func Setup(ctx context.Context, o Options) (_ *Host, err error) {
	if o.Algorithm == "" {
		o.Algorithm = DefaultAlgorithm
	}
	if o.Say == nil {
		o.Say = func(string, ...any) {}
	}
	if o.step == nil {
		o.step = func(string) {}
	}
	if o.StateFile == "" {
		return nil, errors.New("linuxmem: no state file given")
	}
	if o.ZramBytes == 0 {
		var si unix.Sysinfo_t
		if err := unix.Sysinfo(&si); err != nil {
			return nil, fmt.Errorf("linuxmem: sysinfo: %w", err)
		}
		o.ZramBytes = uint64(si.Totalram) * uint64(si.Unit)
	}
	if os.Geteuid() != 0 {
		return nil, errors.New("linuxmem: swap devices, KSM and cgroups need root: run as root, e.g. with sudo")
	}
	lock, err := lockHost()
	if err != nil {
		return nil, err
	}
	h := &Host{
		file:   &stateFile{path: o.StateFile},
		lock:   lock,
		step:   o.step,
		groups: make(map[string]*Group),
	}
	defer func() {
		if err != nil {
			// An interrupted Setup still has to clean up.
			if cerr := h.Close(context.WithoutCancel(ctx)); cerr != nil {
				err = errors.Join(err, cerr)
				lock.Close()
			}
		}
	}()
	if _, err := os.Lstat(o.StateFile); err == nil {
		return nil, fmt.Errorf("linuxmem: %s was left behind by a run that was killed: undo its changes with RestoreHost first", o.StateFile)
	}
	if h.memcg, err = check(); err != nil {
		return nil, err
	}

	id, err := newID()
	if err != nil {
		return nil, err
	}
	ksm, err := planKSM()
	if err != nil {
		return nil, err
	}
	zram, err := planZram(o.ZramBytes, id)
	if err != nil {
		return nil, err
	}
	boot, err := bootID()
	if err != nil {
		return nil, err
	}
	h.file.state = state{
		Format: stateFormat,
		BootID: boot,
		Zram:   zram,
		KSM:    ksm,
		Cgroup: h.memcg.plan(id),
	}
	if err := h.file.save(); err != nil {
		return nil, err
	}
	o.step("recorded")

	if err := h.memcg.create(&h.file.state.Cgroup, o.step); err != nil {
		return nil, err
	}
	if err := h.file.state.KSM.apply(o.step); err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("linuxmem: %w", err)
	}
	if err := addZram(ctx, h.file, o.Algorithm, o.step); err != nil {
		return nil, err
	}
	h.zram = h.file.state.Zram.Number
	o.Say("swap on /dev/zram%d (%s, %d MiB), KSM on, memory cgroups below %s",
		h.zram, o.Algorithm, o.ZramBytes>>20, h.file.state.Cgroup.Parent)
	return h, nil
}

// check finds out whether this machine can be set up, and says what it lacks.
func check() (memcg, error) {
	swaps, err := readSwaps()
	if err != nil {
		return memcg{}, err
	}
	if len(swaps) > 0 {
		var names []string
		for _, s := range swaps {
			names = append(names, s.path)
		}
		return memcg{}, fmt.Errorf("linuxmem: swap is in use on this machine (%s), which would spoil the figures and be spoilt by them: switch it off first with swapoff -a, or use another machine", strings.Join(names, ", "))
	}
	if err := checkZram(); err != nil {
		return memcg{}, err
	}
	if err := checkKSM(); err != nil {
		return memcg{}, err
	}
	return findMemcg()
}

// lockDir is locked while a Host exists. It is there on every machine, and a
// lock on it leaves nothing behind.
const lockDir = "/sys/kernel/mm"

func lockHost() (*os.File, error) {
	f, err := os.Open(lockDir)
	if err != nil {
		return nil, fmt.Errorf("linuxmem: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		if err == unix.EWOULDBLOCK {
			return nil, fmt.Errorf("linuxmem: %w", ErrInUse)
		}
		return nil, fmt.Errorf("linuxmem: locking %s: %w", lockDir, err)
	}
	return f, nil
}

// newID makes the part of the names that tells this Host's things from others'.
func newID() (string, error) {
	var b [5]byte
	if _, err := rand.Read(b[:]); err != nil {
		return "", fmt.Errorf("linuxmem: %w", err)
	}
	return hex.EncodeToString(b[:]), nil
}

// HostUsage is what the swap device and KSM hold, for all groups and whatever
// else the kernel swapped out. Sizes are in bytes.
type HostUsage struct {
	// SwapUsed is the swap space in use. Pages that hold only zeros take some
	// and need not be in zram.
	SwapUsed uint64 `json:"swap_used"`
	// ZramOrig is the memory stored in zram before compression, ZramCompressed
	// after it, and ZramTotal what the host spends on that, fragmentation
	// included.
	ZramOrig       uint64 `json:"zram_orig"`
	ZramCompressed uint64 `json:"zram_compressed"`
	ZramTotal      uint64 `json:"zram_total"`
	// KSMShared is the memory of merged pages, KSMSharing what it stands for
	// beyond that, KSMProfit what is saved after KSM's bookkeeping; the last is
	// negative while nothing was found to merge.
	KSMShared  uint64 `json:"ksm_shared"`
	KSMSharing uint64 `json:"ksm_sharing"`
	KSMProfit  int64  `json:"ksm_profit"`
}

// Share is the part of ZramTotal that falls to a group which has swapped out
// swap bytes.
func (u HostUsage) Share(swap uint64) uint64 {
	if u.SwapUsed == 0 {
		return 0
	}
	return uint64(float64(u.ZramTotal) * min(1, float64(swap)/float64(u.SwapUsed)))
}

// Usage reads what the swap device and KSM hold.
func (h *Host) Usage() (HostUsage, error) {
	var u HostUsage
	swaps, err := readSwaps()
	if err != nil {
		return u, err
	}
	for _, s := range swaps {
		if s.path == zramNode(h.zram) {
			u.SwapUsed = s.used
		}
	}
	if err := readZramUsage(h.zram, &u); err != nil {
		return u, err
	}
	if err := readKSMUsage(&u); err != nil {
		return u, err
	}
	return u, nil
}

// Close undoes everything: it removes the groups, takes the swap device away,
// puts KSM back and removes the state file. The sandboxes must have ended. What
// is still swapped out comes back into memory; if there is not enough of it, or
// ctx ends meanwhile, Close fails and may be called again. After it succeeded it
// does nothing.
func (h *Host) Close(ctx context.Context) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return nil
	}
	if h.file.saved {
		if err := h.file.undo(ctx, false, h.step); err != nil {
			return err
		}
	}
	h.closed = true
	h.lock.Close()
	return nil
}

// RestoreHost undoes what a run that was killed left behind, as recorded in its
// state file, and removes the file. It ends processes that are still in the
// groups of that run. A device that has meanwhile become someone else's, or a
// setting that someone else changed since, is left alone. Without a state file
// there is nothing to do. It returns an error that wraps ErrInUse, and touches
// nothing, while any process has a Host.
func RestoreHost(stateFile string) error {
	return restoreHost(stateFile, func(string) {})
}

func restoreHost(path string, step func(string)) error {
	if _, err := os.Lstat(path); errors.Is(err, os.ErrNotExist) {
		return removeUnfinished(path)
	}
	lock, err := lockHost()
	if err != nil {
		return err
	}
	defer lock.Close()
	f, err := loadState(path)
	if err != nil {
		return err
	}
	return f.undo(context.Background(), true, step)
}
