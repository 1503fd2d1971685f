package linuxmem

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// memcg is the memory controller as this process sees it.
type memcg struct {
	// mount is where its hierarchy is mounted, own the directory of the cgroup
	// that this process is in.
	mount, own string
	v2         bool
}

// cgroupState describes what is made in the cgroup hierarchy.
type cgroupState struct {
	// Parent is the directory that holds one cgroup for each sandbox. Whatever
	// is in it is ours.
	Parent string `json:"parent"`
	// Enabled is the directory whose children were given the memory controller
	// for this (cgroup v2), "" if they had it.
	Enabled string `json:"enabled,omitempty"`
}

const (
	procsFile   = "cgroup.procs"
	subtreeFile = "cgroup.subtree_control"
)

func findMemcg() (memcg, error) {
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return memcg{}, fmt.Errorf("linuxmem: %w", err)
	}
	own, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return memcg{}, fmt.Errorf("linuxmem: %w", err)
	}
	m, err := parseMemcg(string(mounts), string(own))
	if err != nil {
		return memcg{}, err
	}
	if m.v2 {
		controllers, err := readTrimmed(filepath.Join(m.mount, "cgroup.controllers"))
		if err != nil {
			return memcg{}, err
		}
		if !slices.Contains(strings.Fields(controllers), "memory") {
			return memcg{}, noMemcg("cgroup v2 at " + m.mount + " does not have the controller")
		}
		return m, nil
	}
	if !hasFileIn(m.own, "memory.memsw.usage_in_bytes") {
		return memcg{}, fmt.Errorf("linuxmem: the memory cgroup %s does not account swap: boot with swapaccount=1", m.own)
	}
	return m, nil
}

func noMemcg(why string) error {
	return fmt.Errorf("linuxmem: no memory cgroups here: %s: use a kernel that has CONFIG_MEMCG, and boot it without cgroup_disable=memory", why)
}

func hasFileIn(dir, name string) bool {
	_, err := os.Stat(filepath.Join(dir, name))
	return err == nil
}

// parseMemcg finds the memory controller's hierarchy, v1 before v2: on a machine
// that mounts both, the controllers that v1 has are missing from v2.
func parseMemcg(mountinfo, selfCgroup string) (memcg, error) {
	unescape := strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)
	var v1, v2 struct{ root, mount string }
	for line := range strings.Lines(mountinfo) {
		before, after, ok := strings.Cut(line, " - ")
		f, fs := strings.Fields(before), strings.Fields(after)
		if !ok || len(f) < 5 || len(fs) < 3 {
			continue
		}
		to := &v2
		switch {
		case fs[0] == "cgroup" && slices.Contains(strings.Split(fs[2], ","), "memory"):
			to = &v1
		case fs[0] != "cgroup2":
			continue
		}
		if to.mount == "" {
			to.root, to.mount = unescape.Replace(f[3]), unescape.Replace(f[4])
		}
	}
	var path1, path2 string
	for line := range strings.Lines(selfCgroup) {
		f := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
		switch {
		case len(f) != 3:
		case slices.Contains(strings.Split(f[1], ","), "memory"):
			path1 = f[2]
		case f[0] == "0":
			path2 = f[2]
		}
	}
	m, root, path := memcg{mount: v1.mount}, v1.root, path1
	if v1.mount == "" {
		m, root, path = memcg{mount: v2.mount, v2: true}, v2.root, path2
	}
	switch {
	case m.mount == "":
		return m, noMemcg("no cgroup file system with it is mounted")
	case path == "":
		return m, noMemcg("this process is in none")
	}
	// The mount may show a part of the hierarchy only, as it does in containers.
	rel, err := filepath.Rel(root, path)
	if err != nil || rel == ".." || strings.HasPrefix(rel, "../") {
		return m, fmt.Errorf("linuxmem: this process's memory cgroup %s is not below %s, which is what is mounted at %s: run it on the host or in a container with a cgroup namespace of its own", path, root, m.mount)
	}
	m.own = filepath.Join(m.mount, rel)
	return m, nil
}

// plan decides where the groups will be.
//
// With cgroup v1 that is below this process's own cgroup. With v2 a cgroup that
// holds processes cannot give controllers to children, so it is below the
// nearest ancestor that does already, or else below the root, which may.
func (m memcg) plan(id string) cgroupState {
	name := "agentbench-" + id
	if !m.v2 {
		return cgroupState{Parent: filepath.Join(m.own, name)}
	}
	for dir := m.own; ; dir = filepath.Dir(dir) {
		if givesMemory(dir) {
			return cgroupState{Parent: filepath.Join(dir, name)}
		}
		if dir == m.mount {
			return cgroupState{Parent: filepath.Join(dir, name), Enabled: dir}
		}
	}
}

// givesMemory reports whether children of a v2 cgroup have the memory
// controller.
func givesMemory(dir string) bool {
	s, err := readTrimmed(filepath.Join(dir, subtreeFile))
	return err == nil && slices.Contains(strings.Fields(s), "memory")
}

// create makes the directory that the groups will be in.
func (m memcg) create(s *cgroupState, step func(string)) error {
	if s.Enabled != "" {
		if err := writeKernel(filepath.Join(s.Enabled, subtreeFile), "+memory"); err != nil {
			return fmt.Errorf("%w (a cgroup that holds processes cannot have memory cgroups below it: move this container's processes into a cgroup of their own)", err)
		}
		step("memory controller enabled")
	}
	if err := os.Mkdir(s.Parent, 0o755); err != nil {
		return fmt.Errorf("linuxmem: making a memory cgroup: %w", err)
	}
	step("parent cgroup made")
	if m.v2 {
		if err := writeKernel(filepath.Join(s.Parent, subtreeFile), "+memory"); err != nil {
			return err
		}
		if !hasFileIn(s.Parent, "memory.reclaim") {
			return errors.New("linuxmem: memory cgroups lack memory.reclaim: use Linux 5.19 or newer")
		}
	}
	return nil
}

// groups lists the directories of the groups that exist.
func (s *cgroupState) groups() ([]string, error) {
	entries, err := os.ReadDir(s.Parent)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, fmt.Errorf("linuxmem: %w", err)
	}
	var out []string
	for _, e := range entries {
		if e.IsDir() {
			out = append(out, filepath.Join(s.Parent, e.Name()))
		}
	}
	return out, nil
}

// empty makes sure that no process is left in any group.
func (s *cgroupState) empty(kill bool) error {
	dirs, err := s.groups()
	if err != nil {
		return err
	}
	for _, dir := range dirs {
		for wait := time.Now().Add(busyWait); ; time.Sleep(20 * time.Millisecond) {
			pids, err := processes(dir)
			if err != nil {
				return err
			}
			if len(pids) == 0 {
				break
			}
			if time.Now().After(wait) || !kill && !anyEnding(pids) {
				return groupBusy(dir, pids)
			}
			if kill {
				killIn(dir, pids)
			}
		}
	}
	return nil
}

func groupBusy(dir string, pids []int) error {
	return fmt.Errorf("linuxmem: memory cgroup %s still has processes %v: end the sandbox first", dir, pids)
}

// undo removes the groups, which must be empty.
func (s *cgroupState) undo(step func(string)) error {
	dirs, err := s.groups()
	if err != nil {
		return err
	}
	for _, dir := range dirs {
		if err := removeGroup(dir); err != nil {
			return err
		}
		step("group removed")
	}
	if err := removeGroup(s.Parent); err != nil {
		return err
	}
	step("parent cgroup removed")
	// Someone else may have come to need the controller meanwhile; only the root
	// is ever changed, where it costs nothing to leave it on.
	if s.Enabled != "" && givesMemory(s.Enabled) {
		if dirs, err := (&cgroupState{Parent: s.Enabled}).groups(); err != nil {
			return err
		} else if slices.ContainsFunc(dirs, givesMemory) {
			return nil
		}
		return writeKernel(filepath.Join(s.Enabled, subtreeFile), "-memory")
	}
	return nil
}

// removeGroup removes a cgroup without processes. Those that just ended may need
// a moment to leave it.
func removeGroup(dir string) error {
	for wait := time.Now().Add(busyWait); ; time.Sleep(20 * time.Millisecond) {
		err := os.Remove(dir)
		if err == nil || errors.Is(err, os.ErrNotExist) {
			return nil
		}
		if !errors.Is(err, unix.EBUSY) {
			return fmt.Errorf("linuxmem: removing a memory cgroup: %w", err)
		}
		pids, perr := processes(dir)
		if perr != nil {
			return perr
		}
		if len(pids) > 0 && !anyEnding(pids) || time.Now().After(wait) {
			return groupBusy(dir, pids)
		}
	}
}

// processes lists what is in a cgroup; nothing if there is no such cgroup.
func processes(dir string) ([]int, error) {
	f, err := os.Open(filepath.Join(dir, procsFile))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, fmt.Errorf("linuxmem: %w", err)
	}
	defer f.Close()
	var out []int
	sc := bufio.NewScanner(f)
	for sc.Scan() {
		pid, err := strconv.Atoi(sc.Text())
		if err != nil {
			return nil, fmt.Errorf("linuxmem: %s: %w", f.Name(), err)
		}
		out = append(out, pid)
	}
	// The cgroup may have been removed meanwhile.
	if err := sc.Err(); err != nil && !errors.Is(err, unix.ENODEV) {
		return nil, fmt.Errorf("linuxmem: %w", err)
	}
	return out, nil
}

// anyEnding reports whether one of the processes has been killed or has ended
// and is only waiting to be gone.
func anyEnding(pids []int) bool {
	return slices.ContainsFunc(pids, func(pid int) bool {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			return true
		}
		_, rest, _ := strings.Cut(string(b[strings.LastIndexByte(string(b), ')')+1:]), " ")
		return strings.HasPrefix(rest, "Z") || strings.HasPrefix(rest, "X")
	})
}

// killIn ends processes that are in a cgroup.
func killIn(dir string, pids []int) {
	for _, pid := range pids {
		// The descriptor pins the process, so that nothing can take its id
		// between the second look into the cgroup and the signal.
		fd, err := unix.PidfdOpen(pid, 0)
		if err != nil {
			continue
		}
		if now, err := processes(dir); err == nil && slices.Contains(now, pid) {
			unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0)
		}
		unix.Close(fd)
	}
}

// Group is the memory cgroup of one sandbox. Its methods may be called
// concurrently.
type Group struct {
	host *Host
	name string
	dir  string
}

// Group makes a memory cgroup. The name must do as a file name.
func (h *Host) Group(name string) (*Group, error) {
	if name == "" || name == "." || name == ".." || strings.ContainsAny(name, "/\n") {
		return nil, fmt.Errorf("linuxmem: %q cannot be the name of a group", name)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return nil, errors.New("linuxmem: the host was closed")
	}
	if h.groups[name] != nil {
		return nil, fmt.Errorf("linuxmem: group %s exists already", name)
	}
	g := &Group{host: h, name: name, dir: filepath.Join(h.file.state.Cgroup.Parent, name)}
	if err := os.Mkdir(g.dir, 0o755); err != nil {
		return nil, fmt.Errorf("linuxmem: making a memory cgroup: %w", err)
	}
	h.groups[name] = g
	h.step("group made")
	return g, nil
}

// Name returns the group's name.
func (g *Group) Name() string { return g.name }

// Launcher is the beginning of a command line that runs a program in the group
// with KSM on, under the process id that the launcher was started with. It needs
// a program that hands the command "enter" to Enter.
func (g *Group) Launcher() []string {
	return []string{"/proc/self/exe", "enter", "--cgroup", g.dir, "--ksm", "--"}
}

// Usage is what a group holds, in bytes.
type Usage struct {
	// Bytes is all that is charged to the group and in memory: the sum of the
	// parts below and little else.
	Bytes uint64 `json:"bytes"`
	// Anon is private memory, Shmem shared memory (guest memory is), File the
	// cached pages of files without it, Kernel page tables and the like.
	Anon   uint64 `json:"anon"`
	Shmem  uint64 `json:"shmem"`
	File   uint64 `json:"file"`
	Kernel uint64 `json:"kernel"`
	// Swap is what is swapped out, before compression; not part of Bytes.
	Swap uint64 `json:"swap"`
}

// Usage reads what the group holds.
func (g *Group) Usage() (Usage, error) {
	stat, err := readTrimmed(filepath.Join(g.dir, "memory.stat"))
	if err != nil {
		return Usage{}, err
	}
	u, err := parseStat(stat, g.host.memcg.v2)
	if err != nil {
		return u, fmt.Errorf("linuxmem: group %s: %w", g.name, err)
	}
	if u.Bytes, err = g.bytes(); err != nil {
		return u, err
	}
	if g.host.memcg.v2 {
		u.Swap, err = g.number("memory.swap.current")
	} else {
		u.Kernel, err = g.number("memory.kmem.usage_in_bytes")
	}
	return u, err
}

// bytes is Usage.Bytes.
func (g *Group) bytes() (uint64, error) {
	if g.host.memcg.v2 {
		return g.number("memory.current")
	}
	return g.number("memory.usage_in_bytes")
}

func (g *Group) number(name string) (uint64, error) {
	s, err := readTrimmed(filepath.Join(g.dir, name))
	if err != nil {
		return 0, err
	}
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("linuxmem: group %s: %s: %w", g.name, name, err)
	}
	return n, nil
}

// parseStat reads a group's memory.stat: all but Bytes, and Swap or Kernel where
// it is not there.
func parseStat(text string, v2 bool) (Usage, error) {
	values := make(map[string]uint64)
	for line := range strings.Lines(text) {
		name, value, ok := strings.Cut(strings.TrimSpace(line), " ")
		if !ok {
			continue
		}
		n, err := strconv.ParseUint(value, 10, 64)
		if err != nil {
			return Usage{}, fmt.Errorf("memory.stat: %w", err)
		}
		values[name] = n
	}
	anon, shmem, cache, swap := "total_rss", "total_shmem", "total_cache", "total_swap"
	if v2 {
		anon, shmem, cache, swap = "anon", "shmem", "file", ""
	}
	for _, name := range []string{anon, shmem, cache, swap} {
		if _, ok := values[name]; !ok && name != "" {
			return Usage{}, fmt.Errorf("memory.stat has no %s", name)
		}
	}
	return Usage{
		Anon:  values[anon],
		Shmem: values[shmem],
		// Shared memory counts as a file.
		File:   values[cache] - min(values[cache], values[shmem]),
		Kernel: values["kernel"],
		Swap:   values[swap],
	}, nil
}

// Reclaimed is what one Reclaim did.
type Reclaimed struct {
	// Before and After are Usage.Bytes.
	Before   uint64        `json:"before"`
	After    uint64        `json:"after"`
	Duration time.Duration `json:"duration"`
	// CPU is the processor time that the kernel took for it, all of it in the
	// name of this process.
	CPU time.Duration `json:"cpu"`
	// Complete: the kernel went through everything. False if ctx ended first.
	Complete bool `json:"complete"`
}

// Reclaim makes the kernel take all memory from the group that it can: pages are
// swapped out, cached pages of files dropped. The sandbox goes on running and
// finds everything where it left it. Reclaim takes seconds for a hundred
// megabytes, on a thread of low priority; it stops when ctx ends, which is no
// error.
func (g *Group) Reclaim(ctx context.Context) (Reclaimed, error) {
	var (
		r   Reclaimed
		err error
	)
	if r.Before, err = g.bytes(); err != nil {
		return r, err
	}
	file, value := "memory.force_empty", "0"
	if g.host.memcg.v2 {
		file, value = "memory.reclaim", strconv.FormatUint(r.Before, 10)
	}
	f, err := os.OpenFile(filepath.Join(g.dir, file), os.O_WRONLY, 0)
	if err != nil {
		return r, fmt.Errorf("linuxmem: group %s: %w", g.name, err)
	}
	defer f.Close()
	began := time.Now()
	_, err = interruptible(ctx, func() (int, error) {
		defer lowerPriority()()
		before := threadCPU()
		defer func() { r.CPU += threadCPU() - before }()
		return unix.Write(int(f.Fd()), []byte(value))
	})
	r.Duration = time.Since(began)
	switch {
	case err == nil, errors.Is(err, unix.EAGAIN):
		// EAGAIN is v2's way of saying that it was not all of it, which is
		// normal: some of it is in use.
		r.Complete = true
	case ctx.Err() != nil && errors.Is(err, ctx.Err()):
	default:
		return r, fmt.Errorf("linuxmem: group %s: reclaiming its memory: %w", g.name, err)
	}
	r.After, err = g.bytes()
	return r, err
}

// reclaimNice is the nice value of the thread that reclaims. The kernel compresses
// on it, and in one sandbox's wait that must not keep others from working.
const reclaimNice = 10

// lowerPriority lets this thread, to which the goroutine must be locked, give way
// to others until restore is called.
func lowerPriority() (restore func()) {
	tid := unix.Gettid()
	// The system call's result is 20 less the nice value.
	before, err := unix.Getpriority(unix.PRIO_PROCESS, tid)
	if err != nil || 20-before >= reclaimNice || unix.Setpriority(unix.PRIO_PROCESS, tid, reclaimNice) != nil {
		return func() {}
	}
	return func() {
		if unix.Setpriority(unix.PRIO_PROCESS, tid, 20-before) != nil {
			// Locked once more, the thread ends with the goroutine.
			runtime.LockOSThread()
		}
	}
}

// threadCPU is the processor time that this thread has taken.
func threadCPU() time.Duration {
	var u unix.Rusage
	if unix.Getrusage(unix.RUSAGE_THREAD, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// Close removes the cgroup. Its processes must have ended. After it succeeded it
// does nothing.
func (g *Group) Close() error {
	g.host.mu.Lock()
	defer g.host.mu.Unlock()
	if g.host.groups[g.name] != g {
		return nil
	}
	if err := removeGroup(g.dir); err != nil {
		return err
	}
	delete(g.host.groups, g.name)
	g.host.step("group removed")
	return nil
}
