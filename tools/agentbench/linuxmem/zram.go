package linuxmem

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// zramControl is where zram devices are added and removed.
const zramControl = "/sys/class/zram-control"

// zramState describes the swap device.
type zramState struct {
	// Existing are the devices that were there before ours.
	Existing []int `json:"existing"`
	// Number is ours, noDevice while it is being added.
	Number int `json:"number"`
	// DiskSeq is the kernel's own name for this incarnation of the device; ""
	// where the kernel (before 5.15) gives none.
	DiskSeq string `json:"diskseq,omitempty"`
	// DiskBytes is the size that it gets.
	DiskBytes uint64 `json:"disk_bytes"`
	// Label is in its swap header.
	Label string `json:"label"`
	// NodeMade says that the device file was made here, since nothing else on
	// this machine makes any.
	NodeMade bool `json:"node_made,omitempty"`
}

// noDevice is the Number of a device that is not known to exist.
const noDevice = -1

// busyWait is how long something may stay busy that is about to be free: udev
// looks into new devices, ended processes take a moment to leave their cgroup.
const busyWait = 10 * time.Second

func zramNode(n int) string { return fmt.Sprintf("/dev/zram%d", n) }

func zramAttr(n int, name string) string { return fmt.Sprintf("/sys/block/zram%d/%s", n, name) }

func checkZram() error {
	if _, err := os.Stat(zramControl); err != nil {
		return fmt.Errorf("linuxmem: no zram here (%s is missing): load it with modprobe zram, or use a kernel that has CONFIG_ZRAM (some distributions' kernels for virtual machines lack it; Debian's linux-image-amd64 has it)", zramControl)
	}
	if err := unix.Access(filepath.Join(zramControl, "hot_remove"), unix.W_OK); err != nil {
		return fmt.Errorf("linuxmem: %s cannot be written to (%w): run it on the host or in a privileged container", zramControl, err)
	}
	if _, err := exec.LookPath("mkswap"); err != nil {
		return errors.New("linuxmem: mkswap is missing: install the package util-linux")
	}
	return nil
}

// planZram describes the device that addZram will add.
func planZram(size uint64, id string) (zramState, error) {
	existing, err := zramDevices()
	if err != nil {
		return zramState{}, err
	}
	page := uint64(os.Getpagesize())
	return zramState{
		Existing: existing,
		Number:   noDevice,
		// As the kernel rounds it.
		DiskBytes: (size + page - 1) / page * page,
		// A label holds 16 bytes.
		Label: "agb-" + id,
	}, nil
}

// zramDevices lists the numbers of the devices that exist.
func zramDevices() ([]int, error) {
	entries, err := os.ReadDir("/sys/block")
	if err != nil {
		return nil, fmt.Errorf("linuxmem: %w", err)
	}
	out := []int{}
	for _, e := range entries {
		if s, ok := strings.CutPrefix(e.Name(), "zram"); ok {
			if n, err := strconv.Atoi(s); err == nil {
				out = append(out, n)
			}
		}
	}
	slices.Sort(out)
	return out, nil
}

// addZram adds the planned device and swaps on it.
func addZram(ctx context.Context, f *stateFile, algorithm string, step func(string)) error {
	n, err := hotAdd()
	if err != nil {
		return err
	}
	step("zram added")
	z := &f.state.Zram
	z.Number = n
	// Before 5.15 there is none; the label then has to do.
	z.DiskSeq, _ = readTrimmed(zramAttr(n, "diskseq"))
	if err := f.save(); err != nil {
		return err
	}
	step("zram recorded")

	choices, err := readTrimmed(zramAttr(n, "comp_algorithm"))
	if err != nil {
		return err
	}
	if known := strings.Fields(strings.NewReplacer("[", "", "]", "").Replace(choices)); !slices.Contains(known, algorithm) {
		return fmt.Errorf("linuxmem: this kernel's zram cannot compress with %q, only with %s", algorithm, strings.Join(known, ", "))
	}
	if err := writeKernel(zramAttr(n, "comp_algorithm"), algorithm); err != nil {
		return err
	}
	if err := writeKernel(zramAttr(n, "disksize"), strconv.FormatUint(z.DiskBytes, 10)); err != nil {
		return err
	}
	step("zram sized")

	if err := f.ensureNode(step); err != nil {
		return err
	}
	out, err := exec.CommandContext(ctx, "mkswap", "-L", z.Label, zramNode(n)).CombinedOutput()
	if err != nil {
		return fmt.Errorf("linuxmem: mkswap %s: %w: %s", zramNode(n), err, bytes.TrimSpace(out))
	}
	step("swap made")
	if err := swapon(zramNode(n)); err != nil {
		return fmt.Errorf("linuxmem: swapon %s: %w", zramNode(n), err)
	}
	step("swap on")
	return nil
}

// hotAdd adds a device: reading the file does that, so it is read exactly once.
func hotAdd() (int, error) {
	f, err := os.Open(filepath.Join(zramControl, "hot_add"))
	if err != nil {
		return 0, fmt.Errorf("linuxmem: adding a zram device: %w", err)
	}
	defer f.Close()
	var buf [32]byte
	n, err := f.Read(buf[:])
	if err != nil {
		return 0, fmt.Errorf("linuxmem: adding a zram device: %w", err)
	}
	num, err := strconv.Atoi(strings.TrimSpace(string(buf[:n])))
	if err != nil {
		return 0, fmt.Errorf("linuxmem: adding a zram device: %w", err)
	}
	return num, nil
}

// ensureNode makes the device file where neither devtmpfs nor udev does.
func (f *stateFile) ensureNode(step func(string)) error {
	z := &f.state.Zram
	node := zramNode(z.Number)
	for wait := time.Now().Add(time.Second); ; time.Sleep(20 * time.Millisecond) {
		if _, err := os.Stat(node); err == nil {
			return nil
		}
		if time.Now().After(wait) {
			break
		}
	}
	dev, err := zramDev(z.Number)
	if err != nil {
		return err
	}
	z.NodeMade = true
	if err := f.save(); err != nil {
		return err
	}
	step("node recorded")
	if err := unix.Mknod(node, unix.S_IFBLK|0o600, int(dev)); err != nil {
		return fmt.Errorf("linuxmem: making %s: %w", node, err)
	}
	step("node made")
	return nil
}

// zramDev returns the device number.
func zramDev(n int) (uint64, error) {
	s, err := readTrimmed(zramAttr(n, "dev"))
	if err != nil {
		return 0, err
	}
	var major, minor uint32
	if _, err := fmt.Sscanf(s, "%d:%d", &major, &minor); err != nil {
		return 0, fmt.Errorf("linuxmem: device number %q of zram%d: %w", s, n, err)
	}
	return unix.Mkdev(major, minor), nil
}

// swapPriority puts our device before any that someone may add later.
const swapPriority = 100

// Flags of swapon(2) from linux/swap.h.
const swapFlagPrefer = 0x8000

func swapon(path string) error {
	p, err := unix.BytePtrFromString(path)
	if err != nil {
		return err
	}
	if _, _, errno := unix.Syscall(unix.SYS_SWAPON, uintptr(unsafe.Pointer(p)), swapFlagPrefer|swapPriority, 0); errno != 0 {
		return errno
	}
	return nil
}

func swapoff(ctx context.Context, path string) error {
	p, err := unix.BytePtrFromString(path)
	if err != nil {
		return err
	}
	_, err = interruptible(ctx, func() (int, error) {
		if _, _, errno := unix.Syscall(unix.SYS_SWAPOFF, uintptr(unsafe.Pointer(p)), 0, 0); errno != 0 {
			return 0, errno
		}
		return 0, nil
	})
	return err
}

// undo removes the device if it is there and still ours.
func (z *zramState) undo(ctx context.Context, step func(string)) error {
	n, err := z.find()
	if err != nil {
		return err
	}
	if n != noDevice {
		swaps, err := readSwaps()
		if err != nil {
			return err
		}
		for _, s := range swaps {
			if s.path != zramNode(n) {
				continue
			}
			if err := swapoff(ctx, s.path); err != nil {
				return z.swapoffError(s, err)
			}
			step("swap off")
		}
		if err := hotRemove(n); err != nil {
			return err
		}
		step("zram removed")
	}
	return z.removeNode()
}

func (z *zramState) swapoffError(s swap, err error) error {
	if errors.Is(err, unix.ENOMEM) {
		var si unix.Sysinfo_t
		if serr := unix.Sysinfo(&si); serr == nil {
			return fmt.Errorf("linuxmem: swapoff %s: what is swapped out does not fit into memory: it needs %d MiB and %d MiB are free: end programs, then try again", s.path, s.used>>20, uint64(si.Freeram)*uint64(si.Unit)>>20)
		}
	}
	return fmt.Errorf("linuxmem: swapoff %s, which holds %d MiB: %w", s.path, s.used>>20, err)
}

// find returns the number of our device, noDevice if it is gone.
//
// A number alone says little: the device may have been removed and its number
// given to another, or, as long as it was unused, have been taken by a program
// that looked for an unused one. Whoever took it gave it another size or put
// something else on it.
func (z *zramState) find() (int, error) {
	devices, err := zramDevices()
	if err != nil {
		return 0, err
	}
	n := z.Number
	adding := n == noDevice
	if adding {
		// The kernel gives the lowest free number. Killed after the device was
		// added and before that was recorded, it is unused.
		for n = 0; slices.Contains(z.Existing, n); n++ {
		}
	}
	if !slices.Contains(devices, n) {
		return noDevice, nil
	}
	if z.DiskSeq != "" {
		if seq, err := readTrimmed(zramAttr(n, "diskseq")); err == nil && seq != z.DiskSeq {
			return noDevice, nil
		}
	}
	s, err := readTrimmed(zramAttr(n, "disksize"))
	if err != nil {
		return 0, err
	}
	size, err := strconv.ParseUint(s, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("linuxmem: disksize of zram%d: %w", n, err)
	}
	switch {
	case size == 0:
		return n, nil
	case adding || size != z.DiskBytes:
		return noDevice, nil
	}
	head, err := z.head(n)
	if err != nil {
		return 0, err
	}
	label, isSwap := parseSwapHeader(head)
	switch {
	case isSwap && label == z.Label:
		return n, nil
	case bytes.Equal(head, make([]byte, len(head))):
		return n, nil // killed before mkswap
	}
	return noDevice, nil
}

// head reads the first page of the device.
func (z *zramState) head(n int) ([]byte, error) {
	dev, err := zramDev(n)
	if err != nil {
		return nil, err
	}
	buf := make([]byte, os.Getpagesize())
	if z.NodeMade {
		// That was recorded before it was done.
		if err := unix.Mknod(zramNode(n), unix.S_IFBLK|0o600, int(dev)); err != nil && err != unix.EEXIST {
			return nil, fmt.Errorf("linuxmem: making %s: %w", zramNode(n), err)
		}
	}
	f, err := os.Open(zramNode(n))
	if errors.Is(err, os.ErrNotExist) {
		// Killed before a device file was made: nothing was written yet.
		return buf, nil
	} else if err != nil {
		return nil, fmt.Errorf("linuxmem: %w", err)
	}
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return nil, fmt.Errorf("linuxmem: %s: %w", f.Name(), err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFBLK || uint64(st.Rdev) != dev {
		return nil, fmt.Errorf("linuxmem: %s is not the device file of zram%d", f.Name(), n)
	}
	if _, err := io.ReadFull(f, buf); err != nil {
		return nil, fmt.Errorf("linuxmem: reading %s: %w", f.Name(), err)
	}
	return buf, nil
}

// parseSwapHeader returns the label of a swap device, given its first page
// (union swap_header of linux/swap.h).
func parseSwapHeader(page []byte) (label string, ok bool) {
	const (
		magic        = "SWAPSPACE2"
		versionStart = 1024
		labelStart   = versionStart + 3*4 + 16
		labelEnd     = labelStart + 16
	)
	if len(page) < labelEnd+len(magic) || string(page[len(page)-len(magic):]) != magic {
		return "", false
	}
	if binary.NativeEndian.Uint32(page[versionStart:]) != 1 {
		return "", false
	}
	label, _, _ = strings.Cut(string(page[labelStart:labelEnd]), "\x00")
	return label, true
}

// hotRemove resets and removes a device that is not swapped on.
func hotRemove(n int) error {
	for wait := time.Now().Add(busyWait); ; time.Sleep(50 * time.Millisecond) {
		err := writeKernel(filepath.Join(zramControl, "hot_remove"), strconv.Itoa(n))
		if err == nil || errors.Is(err, unix.ENODEV) {
			return nil
		}
		if !errors.Is(err, unix.EBUSY) {
			return err
		}
		if time.Now().After(wait) {
			return fmt.Errorf("linuxmem: %s cannot be removed, some program keeps it open: %w", zramNode(n), err)
		}
	}
}

// removeNode removes the device file if it was made here.
func (z *zramState) removeNode() error {
	if !z.NodeMade {
		return nil
	}
	// With the device back under the same number the file is of use to someone.
	if _, err := os.Stat(zramAttr(z.Number, "dev")); err == nil {
		return nil
	}
	if err := os.Remove(zramNode(z.Number)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("linuxmem: %w", err)
	}
	return nil
}

// swap is one line of /proc/swaps; sizes are in bytes.
type swap struct {
	path       string
	size, used uint64
}

func readSwaps() ([]swap, error) {
	b, err := os.ReadFile("/proc/swaps")
	if err != nil {
		if errors.Is(err, os.ErrNotExist) {
			return nil, errors.New("linuxmem: this kernel cannot swap: use one that has CONFIG_SWAP")
		}
		return nil, fmt.Errorf("linuxmem: %w", err)
	}
	return parseSwaps(string(b))
}

func parseSwaps(text string) ([]swap, error) {
	unescape := strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)
	var out []swap
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		if len(f) == 0 || f[0] == "Filename" {
			continue
		}
		if len(f) < 5 {
			return nil, fmt.Errorf("linuxmem: /proc/swaps: unexpected line %q", line)
		}
		// A deleted file's name is followed by a remark: count from the end.
		size, err := strconv.ParseUint(f[len(f)-3], 10, 64)
		if err != nil {
			return nil, fmt.Errorf("linuxmem: /proc/swaps: %w", err)
		}
		used, err := strconv.ParseUint(f[len(f)-2], 10, 64)
		if err != nil {
			return nil, fmt.Errorf("linuxmem: /proc/swaps: %w", err)
		}
		out = append(out, swap{path: unescape.Replace(f[0]), size: size << 10, used: used << 10})
	}
	return out, nil
}

func readZramUsage(n int, u *HostUsage) error {
	s, err := readTrimmed(zramAttr(n, "mm_stat"))
	if err != nil {
		return err
	}
	return parseMMStat(s, u)
}

// parseMMStat reads the first three columns of a zram device's mm_stat.
func parseMMStat(text string, u *HostUsage) error {
	f := strings.Fields(text)
	if len(f) < 3 {
		return fmt.Errorf("linuxmem: zram's mm_stat: unexpected text %q", text)
	}
	for i, v := range []*uint64{&u.ZramOrig, &u.ZramCompressed, &u.ZramTotal} {
		n, err := strconv.ParseUint(f[i], 10, 64)
		if err != nil {
			return fmt.Errorf("linuxmem: zram's mm_stat: %w", err)
		}
		*v = n
	}
	return nil
}
