package fleet

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ProcMemory is what the kernel says a set of address spaces holds, in bytes.
// The Pss values share a page's cost among the processes that map it.
type ProcMemory struct {
	AddressSpaces int    `json:"address_spaces"`
	RSS           uint64 `json:"rss"`
	PSS           uint64 `json:"pss"`
	PSSAnon       uint64 `json:"pss_anon"`
	PSSFile       uint64 `json:"pss_file"`
	PSSShmem      uint64 `json:"pss_shmem"`
	Private       uint64 `json:"private"`
	SwapPSS       uint64 `json:"swap_pss"`
	PageTables    uint64 `json:"page_tables"`
}

func (p *ProcMemory) add(o ProcMemory) {
	p.AddressSpaces += o.AddressSpaces
	p.RSS += o.RSS
	p.PSS += o.PSS
	p.PSSAnon += o.PSSAnon
	p.PSSFile += o.PSSFile
	p.PSSShmem += o.PSSShmem
	p.Private += o.Private
	p.SwapPSS += o.SwapPSS
	p.PageTables += o.PageTables
}

// Memory is what one sandbox costs the host, measured from outside, in bytes.
// Parts are read one after the other while the sandbox may be running.
type Memory struct {
	// GuestMemfd is the host memory allocated to the guest's memory file
	// (st_blocks), mapped anywhere or not. Swapped pages count too.
	GuestMemfd uint64 `json:"guest_memfd"`
	// OtherMemfd is the same for every other memfd of the sandbox: platform
	// and bookkeeping.
	OtherMemfd uint64 `json:"other_memfd"`
	// PoolMemfd is the same for memfds of a page pool that the sandbox holds.
	// It shares them with others, so they are not in Host: MeasurePool counts
	// them once.
	PoolMemfd uint64 `json:"pool_memfd,omitempty"`

	Sentry ProcMemory `json:"sentry"`
	Gofer  ProcMemory `json:"gofer"`
	// Stubs are the host processes that guest processes run in. Those that
	// share one address space are counted once.
	Stubs ProcMemory `json:"stubs"`
	// Template is set if the sandbox maps pages of the image it was restored
	// from instead of having copied them.
	Template *TemplateMemory `json:"template,omitempty"`

	// Client is the attached `runsc run` or `restore` process. A container
	// manager that starts sandboxes detached does not have it, so it is not
	// part of Host.
	Client ProcMemory `json:"client"`
}

// TemplateMemory is a sandbox's use of a shared template.
type TemplateMemory struct {
	// File is the image's file that the sandbox maps.
	File string `json:"file"`
	// MappedPSS is this sandbox's proportional part of what is mapped of it.
	MappedPSS uint64 `json:"mapped_pss"`
}

// Host is what the sandbox adds to the host's memory: the memfds, what its
// processes hold besides them, and their page tables. Files that several
// sandboxes map, such as the binary, count in proportion; mapped shared memory
// is left out of the processes' part because the memfds are counted whole.
//
// A shared template is not in it, not even in part: what the host has to hold
// of it does not depend on which pages are mapped at the moment. Whoever adds
// up sandboxes adds CachedBytes of the template once.
func (m Memory) Host() uint64 {
	n := m.GuestMemfd + m.OtherMemfd
	for _, p := range []ProcMemory{m.Sentry, m.Gofer, m.Stubs} {
		n += p.PSSAnon + p.PSSFile + p.PageTables
	}
	if m.Template != nil {
		n -= min(n, m.Template.MappedPSS)
	}
	return n
}

// Overhead is Host without the guest's memory file.
func (m Memory) Overhead() uint64 { return m.Host() - m.GuestMemfd }

// guestMemfdName is what the Sentry calls the guest's memory file.
const guestMemfdName = "runsc-memory"

// Memory measures the sandbox.
func (s *Sandbox) Memory() (Memory, error) {
	t, err := readProcessTree()
	if err != nil {
		return Memory{}, fmt.Errorf("fleet: sandbox %s: %w", s.id, err)
	}
	return s.memory(t)
}

// MeasureAll measures sandboxes. It looks for their processes once for all, which
// makes it much quicker for many than Memory; a process that starts after that is left
// out.
func MeasureAll(sandboxes []*Sandbox) ([]Memory, error) {
	t, err := readProcessTree()
	if err != nil {
		return nil, fmt.Errorf("fleet: %w", err)
	}
	out := make([]Memory, len(sandboxes))
	for i, s := range sandboxes {
		if out[i], err = s.memory(t); err != nil {
			return nil, err
		}
	}
	return out, nil
}

func (s *Sandbox) memory(t processTree) (Memory, error) {
	pid := s.Pid()
	if pid == 0 || s.Exited() {
		return Memory{}, fmt.Errorf("fleet: sandbox %s does not run", s.id)
	}
	m, err := measureSandbox(t, pid, s.GoferPid(), s.sharedTemplate(pid))
	if err != nil {
		return Memory{}, fmt.Errorf("fleet: sandbox %s: %w", s.id, err)
	}
	if m.Client, err = processMemory(s.cmd.Process.Pid); err != nil && !gone(err) {
		return Memory{}, fmt.Errorf("fleet: sandbox %s: %w", s.id, err)
	}
	return m, nil
}

// MeasureSandbox measures the sandbox of a Sentry and a gofer, 0 for none. template
// is the file of a shared template's pages that the Sentry maps, "" for none.
// Client is left out.
func MeasureSandbox(sentry, gofer int, template string) (Memory, error) {
	t, err := readProcessTree()
	if err != nil {
		return Memory{}, err
	}
	return measureSandbox(t, sentry, gofer, template)
}

func measureSandbox(t processTree, sentry, gofer int, template string) (Memory, error) {
	var m Memory
	fds, err := memfds(sentry)
	if err != nil {
		return Memory{}, err
	}
	for _, fd := range fds {
		switch {
		case fd.name == guestMemfdName:
			m.GuestMemfd += fd.allocated
		case !fd.writable:
			m.PoolMemfd += fd.allocated
		default:
			m.OtherMemfd += fd.allocated
		}
	}
	if template != "" {
		m.Template = &TemplateMemory{File: template}
	}
	addTemplate := func(pid int) error {
		if template == "" {
			return nil
		}
		pss, err := mappedPSS(pid, template)
		m.Template.MappedPSS += pss
		return err
	}
	if m.Sentry, err = processMemory(sentry); err != nil {
		return Memory{}, err
	}
	if err := addTemplate(sentry); err != nil {
		return Memory{}, err
	}
	// A gofer may be absent (EROFS root), a stub may end meanwhile.
	if gofer != 0 {
		if m.Gofer, err = processMemory(gofer); err != nil && !gone(err) {
			return Memory{}, fmt.Errorf("gofer: %w", err)
		}
	}
	for _, p := range uniqueAddressSpaces(t.descendants(sentry)) {
		pm, err := processMemory(p)
		if err == nil {
			err = addTemplate(p)
		}
		if gone(err) {
			continue
		} else if err != nil {
			return Memory{}, fmt.Errorf("stub: %w", err)
		}
		m.Stubs.add(pm)
	}
	return m, nil
}

// MappedTemplate returns the file of a template's pages that a Sentry keeps open,
// which it does only to share it, or "". The path is one of the Sentry's own
// /proc entries, since the file may have been renamed, or be in another mount
// namespace. The guest may have files of that name open as well: the template is the
// one of which most is mapped.
func MappedTemplate(sentry int) string {
	dir := fmt.Sprintf("/proc/%d/fd", sentry)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return ""
	}
	var found []string
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		if target, err := os.Readlink(path); err == nil && strings.TrimSuffix(filepath.Base(target), " (deleted)") == pagesFile {
			found = append(found, path)
		}
	}
	var best string
	var most uint64
	for _, path := range found {
		pss := uint64(0)
		if len(found) > 1 {
			pss, _ = mappedPSS(sentry, path)
		}
		if best == "" || pss > most {
			best, most = path, pss
		}
	}
	return best
}

// pagesFile is what runsc calls the part of an image that holds the pages.
const pagesFile = "pages.img"

// sharedTemplate returns the pages file of the image that the sandbox was
// restored from if the Sentry keeps it open, which it does only to share it.
func (s *Sandbox) sharedTemplate(pid int) string {
	if s.image == "" {
		return ""
	}
	path := filepath.Join(s.image, pagesFile)
	want, err := os.Stat(path)
	if err != nil {
		return ""
	}
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return ""
	}
	for _, e := range entries {
		if fi, err := os.Stat(filepath.Join(dir, e.Name())); err == nil && os.SameFile(want, fi) {
			return path
		}
	}
	return ""
}

// mappedPSS sums the proportional set size of a process's mappings of a file.
func mappedPSS(pid int, path string) (uint64, error) {
	fi, err := os.Stat(path)
	if err != nil {
		return 0, err
	}
	var ino uint64
	if st, ok := fi.Sys().(*syscall.Stat_t); ok {
		ino = st.Ino
	}
	if target, err := os.Readlink(path); err == nil {
		path = target // see MappedTemplate
	}
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps", pid))
	if err != nil {
		return 0, err
	}
	return parseMappedPSS(string(b), path, ino), nil
}

// parseMappedPSS looks for mappings of a file in the text of /proc/PID/smaps.
// A path may be shown relative to another root, and an overlay file system may
// show another inode: either is enough.
func parseMappedPSS(smaps, path string, ino uint64) uint64 {
	var total uint64
	ours := false
	for line := range strings.Lines(smaps) {
		f := strings.Fields(line)
		// A mapping begins: 7f00-7f10 r--s 00000000 fe:00 4242 /a/path
		if len(f) >= 5 && strings.Contains(f[0], "-") && !strings.HasSuffix(f[0], ":") {
			_, name, _ := strings.Cut(line, f[4])
			name = strings.TrimSpace(name)
			n, _ := strconv.ParseUint(f[4], 10, 64)
			ours = name == path || n != 0 && n == ino && filepath.Base(name) == filepath.Base(path)
			continue
		}
		if ours && len(f) == 3 && f[0] == "Pss:" {
			if n, err := strconv.ParseUint(f[1], 10, 64); err == nil {
				total += n << 10
			}
		}
	}
	return total
}

// CachedBytes is how much of a file the host holds in its page cache.
func CachedBytes(path string) (uint64, error) {
	f, err := os.Open(path)
	if err != nil {
		return 0, fmt.Errorf("fleet: %w", err)
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return 0, fmt.Errorf("fleet: %w", err)
	}
	// A window at a time, to bound the vector.
	const window = 1 << 30
	var pages uint64
	for off := int64(0); off < fi.Size(); off += window {
		n := int(min(window, fi.Size()-off))
		// Mapping does not touch the pages, so it does not change the answer.
		m, err := unix.Mmap(int(f.Fd()), off, n, unix.PROT_READ, unix.MAP_SHARED)
		if err != nil {
			return 0, fmt.Errorf("fleet: mapping %s: %w", path, err)
		}
		vec := make([]byte, (n+pageSize-1)/pageSize)
		_, _, errno := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(&m[0])), uintptr(n), uintptr(unsafe.Pointer(&vec[0])))
		unix.Munmap(m)
		if errno != 0 {
			return 0, fmt.Errorf("fleet: mincore of %s: %w", path, errno)
		}
		for _, v := range vec {
			pages += uint64(v & 1)
		}
	}
	return min(pages*pageSize, uint64(fi.Size())), nil
}

// gone reports whether a /proc access failed because the process ended.
func gone(err error) bool {
	return errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ESRCH)
}

// memfd is one distinct memfd that a process has open.
type memfd struct {
	name      string
	path      string // /proc/PID/fd/N
	ino       uint64
	allocated uint64 // st_blocks in bytes
	size      int64
	// writable: the process may write to it. A sandbox writes to every memfd of
	// its own; those of a page pool it has read-only.
	writable bool
}

// memfds lists the memfds of a process, each once.
func memfds(pid int) ([]memfd, error) {
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var out []memfd
	seen := make(map[uint64]int)
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		target, err := os.Readlink(path)
		if err != nil {
			continue // closed meanwhile
		}
		name, ok := strings.CutPrefix(target, "/memfd:")
		if !ok {
			continue
		}
		var st syscall.Stat_t
		if err := syscall.Stat(path, &st); err != nil {
			continue
		}
		// The link's own mode says how the descriptor was opened.
		var link syscall.Stat_t
		if err := syscall.Lstat(path, &link); err != nil {
			continue
		}
		writable := link.Mode&0o200 != 0
		if i, ok := seen[st.Ino]; ok {
			out[i].writable = out[i].writable || writable
			continue
		}
		seen[st.Ino] = len(out)
		out = append(out, memfd{
			name:      strings.TrimSuffix(name, " (deleted)"),
			path:      path,
			ino:       st.Ino,
			allocated: uint64(st.Blocks) * 512,
			size:      st.Size,
			writable:  writable,
		})
	}
	return out, nil
}

// processMemory measures one address space.
func processMemory(pid int) (ProcMemory, error) {
	rollup, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		return ProcMemory{}, err
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return ProcMemory{}, err
	}
	r, s := parseKB(string(rollup)), parseKB(string(status))
	return ProcMemory{
		AddressSpaces: 1,
		RSS:           r["Rss"],
		PSS:           r["Pss"],
		PSSAnon:       r["Pss_Anon"],
		PSSFile:       r["Pss_File"],
		PSSShmem:      r["Pss_Shmem"],
		Private:       r["Private_Clean"] + r["Private_Dirty"],
		SwapPSS:       r["SwapPss"],
		PageTables:    s["VmPTE"],
	}, nil
}

// parseKB collects the "Name:   123 kB" lines of a /proc file, in bytes.
func parseKB(text string) map[string]uint64 {
	out := make(map[string]uint64)
	for line := range strings.Lines(text) {
		name, rest, ok := strings.Cut(line, ":")
		if !ok {
			continue
		}
		f := strings.Fields(rest)
		if len(f) != 2 || f[1] != "kB" {
			continue
		}
		n, err := strconv.ParseUint(f[0], 10, 64)
		if err != nil {
			continue
		}
		out[name] = n << 10
	}
	return out
}

// HostMemory is a part of /proc/meminfo, in bytes.
type HostMemory struct {
	Total     uint64 `json:"total"`
	Free      uint64 `json:"free"`
	Available uint64 `json:"available"`
	// Kernel is what the kernel holds for itself and cannot give back, page tables
	// left out: unreclaimable slabs, stacks of threads, memory per processor.
	Kernel uint64 `json:"kernel"`
}

// ReadHostMemory reads what the machine has and has left.
func ReadHostMemory() (HostMemory, error) {
	b, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return HostMemory{}, fmt.Errorf("fleet: %w", err)
	}
	return parseHostMemory(string(b)), nil
}

func parseHostMemory(meminfo string) HostMemory {
	m := parseKB(meminfo)
	return HostMemory{
		Total: m["MemTotal"], Free: m["MemFree"], Available: m["MemAvailable"],
		Kernel: m["SUnreclaim"] + m["KernelStack"] + m["Percpu"],
	}
}

// CPUTime is the processor time the sandbox's living processes have used:
// Sentry, gofer and stubs. That of guest processes that ended is included as
// far as the kernel credits it to their parent.
func (s *Sandbox) CPUTime() (time.Duration, error) {
	pid := s.Pid()
	if pid == 0 || s.Exited() {
		return 0, fmt.Errorf("fleet: sandbox %s does not run", s.id)
	}
	pids, err := descendants(pid)
	if err != nil {
		return 0, fmt.Errorf("fleet: sandbox %s: %w", s.id, err)
	}
	pids = append(pids, pid)
	if g := s.GoferPid(); g != 0 {
		pids = append(pids, g)
	}
	var ticks uint64
	for _, p := range pids {
		// Processes may end meanwhile.
		if st, err := readStat(p); err == nil {
			ticks += st.ticks
		}
	}
	return time.Duration(ticks) * cpuTick, nil
}

// cpuTick is the unit of processor time in /proc: USER_HZ is 100 in the kernel's
// interface on every Linux platform that gVisor supports.
const cpuTick = time.Second / 100
