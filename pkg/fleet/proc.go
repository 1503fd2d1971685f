package fleet

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// processID names one process for good: process ids are reused, the pair of id
// and start time is not.
type processID struct {
	PID int `json:"pid"`
	// Start is the start time in clock ticks since boot.
	Start uint64 `json:"start"`
}

// identify returns the identity of a living process, a zero value if it is
// gone.
func identify(pid int) processID {
	st, err := readStat(pid)
	if err != nil {
		return processID{}
	}
	return processID{PID: pid, Start: st.start}
}

// kill ends the process if it is still the same one.
func (p processID) kill() {
	if p.PID <= 1 {
		return
	}
	// The descriptor pins the process, so nothing can take its id between the
	// look at the start time and the signal.
	fd, err := unix.PidfdOpen(p.PID, 0)
	if err != nil {
		return
	}
	defer unix.Close(fd)
	if identify(p.PID) != p {
		return
	}
	unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0)
}

// reused tells whether the process is gone and its id another's.
func (p processID) reused() bool {
	now := identify(p.PID)
	return now != (processID{}) && now != p
}

type procStat struct {
	comm  string
	state byte
	ppid  int
	start uint64
	// ticks of processor time, ended and awaited children included.
	ticks uint64
}

func readStat(pid int) (procStat, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return procStat{}, err
	}
	return parseStat(b)
}

// parseStat parses /proc/PID/stat. The command name may hold anything,
// parentheses and spaces included, so fields are counted after the last ')'.
func parseStat(b []byte) (procStat, error) {
	open, end := bytes.IndexByte(b, '('), bytes.LastIndexByte(b, ')')
	if open < 0 || end < open {
		return procStat{}, errors.New("malformed stat")
	}
	f := strings.Fields(string(b[end+1:]))
	if len(f) < 20 || len(f[0]) != 1 {
		return procStat{}, errors.New("malformed stat")
	}
	ppid, err := strconv.Atoi(f[1])
	if err != nil {
		return procStat{}, err
	}
	start, err := strconv.ParseUint(f[19], 10, 64)
	if err != nil {
		return procStat{}, err
	}
	var ticks uint64
	for _, v := range f[11:15] { // utime, stime, cutime, cstime
		n, err := strconv.ParseInt(v, 10, 64)
		if err != nil {
			return procStat{}, err
		}
		ticks += uint64(max(n, 0))
	}
	return procStat{comm: string(b[open+1 : end]), state: f[0][0], ppid: ppid, start: start, ticks: ticks}, nil
}

// descendants returns every descendant of pid, pid itself not included.
func descendants(pid int) ([]int, error) {
	t, err := readProcessTree()
	if err != nil {
		return nil, err
	}
	return t.descendants(pid), nil
}

// processTree has the children of each process.
type processTree map[int][]int

// readProcessTree looks through all processes of the host.
func readProcessTree() (processTree, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	children := make(processTree)
	for _, e := range entries {
		p, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		st, err := readStat(p)
		if err != nil || st.state == 'Z' {
			continue
		}
		children[st.ppid] = append(children[st.ppid], p)
	}
	return children, nil
}

func (t processTree) descendants(pid int) []int {
	var out []int
	for todo := []int{pid}; len(todo) > 0; {
		p := todo[0]
		todo = append(todo[1:], t[p]...)
		out = append(out, t[p]...)
	}
	return out
}

// kcmpVM is KCMP_VM of kcmp(2): do two processes share one address space?
const kcmpVM = 1

// sameAddressSpace reports whether two processes share one mm.
func sameAddressSpace(a, b int) (bool, error) {
	r, _, errno := unix.Syscall6(unix.SYS_KCMP, uintptr(a), uintptr(b), kcmpVM, 0, 0, 0)
	if errno != 0 {
		return false, errno
	}
	return r == 0, nil
}

// uniqueAddressSpaces returns one process per address space. Where the kernel
// cannot tell (kcmp missing), processes with equal memory maps count as one:
// a forked pair looks the same for a moment, so this may under-count a little.
func uniqueAddressSpaces(pids []int) []int {
	var out []int
	maps := make(map[int][]byte)
	mapsOf := func(pid int) []byte {
		if m, ok := maps[pid]; ok {
			return m
		}
		m, _ := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
		maps[pid] = m
		return m
	}
next:
	for _, p := range pids {
		for _, q := range out {
			same, err := sameAddressSpace(p, q)
			if errors.Is(err, unix.ESRCH) {
				continue
			}
			if err != nil {
				same = bytes.Equal(mapsOf(p), mapsOf(q))
			}
			if same {
				continue next
			}
		}
		out = append(out, p)
	}
	return out
}
