package fleet

import (
	"bytes"
	"fmt"
	"os"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

// heldMemfd makes a memory file of some pages and returns a descriptor of it,
// opened again for reading only if readonly is set.
func heldMemfd(t *testing.T, name string, pages int, readonly bool) *os.File {
	t.Helper()
	fd, err := unix.MemfdCreate(name, 0)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), name)
	if _, err := f.Write(bytes.Repeat([]byte{1}, pages*pageSize)); err != nil {
		t.Fatal(err)
	}
	if readonly {
		again, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", fd))
		if err != nil {
			t.Fatal(err)
		}
		f.Close()
		f = again
	}
	t.Cleanup(func() { f.Close() })
	return f
}

func TestMemfdsWritable(t *testing.T) {
	heldMemfd(t, "own", 1, false)
	heldMemfd(t, "foreign", 2, true)
	// One that is open in both ways is the process's own.
	both := heldMemfd(t, "both", 3, false)
	again, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", both.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	fds, err := memfds(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]memfd{"own": {allocated: pageSize, writable: true}, "foreign": {allocated: 2 * pageSize}, "both": {allocated: 3 * pageSize, writable: true}} {
		i := slices.IndexFunc(fds, func(m memfd) bool { return m.name == name })
		if i < 0 || fds[i].allocated != want.allocated || fds[i].writable != want.writable {
			t.Errorf("%s is %+v in %+v", name, want, fds)
		}
	}
}

func TestMeasurePool(t *testing.T) {
	before, err := MeasurePool(os.Getpid(), "", nil)
	if err != nil {
		t.Fatal(err)
	}
	heldMemfd(t, "segment", 10, false)
	// This process is the pool and a sandbox at once: what both hold counts once.
	self := &Sandbox{id: "self", exited: make(chan struct{})}
	for range 2 {
		self.addProcess(os.Getpid())
	}
	ended := &Sandbox{id: "ended", exited: make(chan struct{})}
	m, err := MeasurePool(os.Getpid(), "", []*Sandbox{self, ended})
	if err != nil {
		t.Fatal(err)
	}
	if got := m.Memfd - before.Memfd; got != 10*pageSize {
		t.Errorf("the pool grew by %d bytes", got)
	}
	if m.Process.PSSAnon == 0 || m.Own() != m.Memfd+m.Process.PSSAnon || m.Host() <= m.Own() {
		t.Errorf("measured %+v", m)
	}
	m = PoolMemory{Memfd: 1, Process: ProcMemory{PSSAnon: 2, PSSFile: 4, PSSShmem: 8, PageTables: 16}, TemplatePSS: 3}
	if m.Host() != 1+2+1+16 {
		t.Errorf("%+v adds %d to the host", m, m.Host())
	}
	if _, err := MeasurePool(1<<30, "", nil); err == nil {
		t.Error("a process that does not exist was measured")
	}
}

func TestProcessCPUTime(t *testing.T) {
	if _, err := ProcessCPUTime(os.Getpid()); err != nil {
		t.Error(err)
	}
	if _, err := ProcessCPUTime(1 << 30); err == nil {
		t.Error("a process that does not exist has processor time")
	}
}

func TestHasFlag(t *testing.T) {
	const text = "  -agentzip-pool string\n    \tsocket of the pool, used with -agentzip-domain\n  -bool\n"
	for name, want := range map[string]bool{"agentzip-pool": true, "bool": true, "agentzip": false, "agentzip-domain": false, "pool": false} {
		if got := hasFlag(text, name); got != want {
			t.Errorf("%s: %v", name, got)
		}
	}
}
