package harness

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"runsc-agentzip/pkg/fleet"
)

// Process is a process of the host's.
type Process struct {
	PID, Parent int
	// Zombie: it has ended, and its parent does not know yet.
	Zombie bool

	// start tells it from a later one with the same number.
	start string
}

func readProcess(pid int) (p Process, ok bool) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return p, false
	}
	// Its name may hold anything; what follows does not.
	f := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	if len(f) < 20 {
		return p, false
	}
	parent, err := strconv.Atoi(f[1])
	return Process{PID: pid, Parent: parent, Zombie: f[0] == "Z", start: f[19]}, err == nil
}

// lives tells whether the process has not ended yet.
func (p Process) lives() bool {
	now, ok := readProcess(p.PID)
	return ok && !now.Zombie && now.start == p.start
}

// Processes lists the processes of sandboxes: of each the Sentry, the gofer and all
// their descendants, that is, the stubs.
func Processes(sandboxes ...*fleet.Sandbox) []Process {
	all := make(map[int]Process)
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil {
			if p, ok := readProcess(pid); ok {
				all[pid] = p
			}
		}
	}
	roots := make(map[int]bool)
	for _, sb := range sandboxes {
		roots[sb.Pid()], roots[sb.GoferPid()] = true, true
	}
	delete(roots, 0) // none
	var out []Process
	for pid, p := range all {
		// What was read one after the other may look like a circle.
		for a, n := pid, 0; a > 1 && n < len(all); a, n = all[a].Parent, n+1 {
			if roots[a] {
				out = append(out, p)
				break
			}
		}
	}
	return out
}

// Parent returns the parent of a process that lives.
func Parent(t testing.TB, pid int) int {
	t.Helper()
	p, ok := readProcess(pid)
	if !ok || p.Parent <= 1 {
		t.Fatalf("process %d has no parent: %+v", pid, p)
	}
	return p.Parent
}

// CommandLines returns the command lines of all processes that have a text in them.
func CommandLines(text string) []string {
	files, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	var out []string
	for _, file := range files {
		if b, err := os.ReadFile(file); err == nil && bytes.Contains(b, []byte(text)) {
			out = append(out, string(bytes.ReplaceAll(b, []byte{0}, []byte{' '})))
		}
	}
	return out
}
