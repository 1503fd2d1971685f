package fleet

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"runsc-agentzip/pkg/client"
)

func TestRootIsNotTakenFromOthers(t *testing.T) {
	dir := t.TempDir()
	occupied := filepath.Join(dir, "occupied")
	if err := os.MkdirAll(filepath.Join(occupied, "precious"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := makeRoot(occupied); err == nil || !strings.Contains(err.Error(), "not empty") {
		t.Errorf("makeRoot of a directory with files: %v", err)
	}
	if err := Reclaim(occupied); err == nil {
		t.Error("Reclaim accepted a directory that is not a root")
	}
	if _, err := os.Stat(filepath.Join(occupied, "precious")); err != nil {
		t.Error(err)
	}

	root := filepath.Join(dir, "root")
	if err := makeRoot(root); err != nil {
		t.Fatal(err)
	}
	lock, err := lockRoot(root)
	if err != nil {
		t.Fatal(err)
	}
	if err := makeRoot(root); !errors.Is(err, ErrInUse) {
		t.Errorf("makeRoot of a locked root: %v", err)
	}
	if err := Reclaim(root); !errors.Is(err, ErrInUse) {
		t.Errorf("Reclaim of a locked root: %v", err)
	}
	lock.Close()
	if err := makeRoot(root); err == nil || !strings.Contains(err.Error(), "Reclaim") {
		t.Errorf("makeRoot of a dead root: %v", err)
	}
	if err := Reclaim(root); err != nil {
		t.Errorf("Reclaim of a root in which nothing was started: %v", err)
	}
	if err := Reclaim(root); err != nil {
		t.Errorf("Reclaim of a root that is gone: %v", err)
	}
}

// TestReclaimSparesReusedIDs makes sure that a recorded process id that now
// belongs to another process is left alone: here, this very process.
func TestReclaimSparesReusedIDs(t *testing.T) {
	root := filepath.Join(t.TempDir(), "root")
	if err := makeRoot(root); err != nil {
		t.Fatal(err)
	}
	me := identify(os.Getpid())
	if me.PID != os.Getpid() || me.Start == 0 {
		t.Fatalf("identify(self) = %+v", me)
	}
	me.Start--
	b, err := json.Marshal(record{Binary: "/nonexistent", Sandboxes: []sandboxRecord{{ID: "x", Processes: []processID{me, {}}}}})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(root, recordName), b, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := Reclaim(root); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(root); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("root remains: %v", err)
	}
}

// TestIDs: runsc takes the beginning of an id for the id, so none may be that of another
// as long as a command can name it.
func TestIDs(t *testing.T) {
	r := &Runtime{root: t.TempDir(), sandboxes: make(map[string]*Sandbox), busy: make(map[string]int)}
	enter := func(id string, want error) *Sandbox {
		t.Helper()
		s := &Sandbox{rt: r, id: id}
		if err := r.enter(s); !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", id, err, want)
		}
		return s
	}
	for _, id := range []string{"", "*", "n-?", "n-[1]", "-n", "a/b", "a b", "a\n"} {
		if err := r.enter(&Sandbox{rt: r, id: id}); err == nil {
			t.Errorf("%q is an id", id)
		}
	}
	n10, n11 := enter("n-10", nil), enter("n-11", nil)
	for _, id := range []string{"n-1", "n", "n-10.", "n-110"} {
		enter(id, client.ErrAmbiguous)
	}
	enter("n-10", client.ErrExists)

	// A command that began before the deletion may not have looked its sandbox up yet.
	release, err := n10.hold()
	if err != nil {
		t.Fatal(err)
	}
	again, err := n10.hold()
	if err != nil {
		t.Fatal(err)
	}
	r.forget(n10)
	r.forget(n11)
	again()
	enter("n-100", client.ErrAmbiguous)
	enter("n-1", client.ErrAmbiguous)
	release()
	n1 := enter("n-1", nil)
	if _, err := n10.hold(); !errors.Is(err, client.ErrNotFound) {
		t.Errorf("a command for a sandbox that was deleted: %v", err)
	}
	r.forget(n1)
	enter("n-100", nil)

	// One that got the id of another is itself.
	enter("n-2", nil)
	r.forget(r.sandboxes["n-2"])
	second := enter("n-2", nil)
	if release, err := second.hold(); err != nil {
		t.Error(err)
	} else {
		release()
	}
	if len(r.busy) != 0 {
		t.Errorf("under way: %v", r.busy)
	}
}

func TestParseMountsUnder(t *testing.T) {
	const info = `22 1 254:0 / / rw - ext4 /dev/vda rw
90 22 0:4 net:[4026532] /run/fleet-1/null-netns rw - nsfs nsfs rw
91 22 0:4 net:[4026533] /run/fleet-12/null-netns rw - nsfs nsfs rw
92 22 0:30 / /run/fleet-1/a\040b rw - tmpfs tmpfs rw
short line
`
	got := parseMountsUnder(info, "/run/fleet-1")
	want := []string{"/run/fleet-1/a b", "/run/fleet-1/null-netns"}
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestParseStat(t *testing.T) {
	st, err := parseStat([]byte("4242 (a) b (c) S 17 4242 4242 0 -1 4194560 1 2 3 4 50 60 7 8 20 0 1 0 98765 1000 200"))
	if err != nil {
		t.Fatal(err)
	}
	if want := (procStat{comm: "a) b (c", state: 'S', ppid: 17, start: 98765, ticks: 125}); st != want {
		t.Errorf("got %+v, want %+v", st, want)
	}
	for _, bad := range []string{"", "1 (x", "1 (x) S 1 2 3", "1 (x) S y 4242 4242 0 -1 4194560 1 2 3 4 50 60 7 8 20 0 1 0 98765 1000 200"} {
		if _, err := parseStat([]byte(bad)); err == nil {
			t.Errorf("parseStat(%q) succeeded", bad)
		}
	}
}

func TestParseKB(t *testing.T) {
	got := parseKB("Name:\trunsc\nRss:               12 kB\nPss_Anon: 3 kB\nThreads: 7\nBad: x kB\n")
	if len(got) != 2 || got["Rss"] != 12<<10 || got["Pss_Anon"] != 3<<10 {
		t.Errorf("got %v", got)
	}
}

func TestParseHostMemory(t *testing.T) {
	got := parseHostMemory("MemTotal: 100 kB\nMemFree:  20 kB\nMemAvailable: 60 kB\nSUnreclaim: 4 kB\nKernelStack:   2 kB\nPageTables: 9 kB\nPercpu: 1 kB\nHugePages_Total:  7\n")
	if want := (HostMemory{Total: 100 << 10, Free: 20 << 10, Available: 60 << 10, Kernel: 7 << 10}); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

func TestParseMappedPSS(t *testing.T) {
	const smaps = `55d0-55d1 r-xp 00001000 fe:00 77 /img/pages.img
Size:                  8 kB
Pss:                   4 kB
Pss_Dirty:             2 kB
VmFlags: rd ex
55d2-55d3 r--s 00001000 fe:00 77 /other root/img/pages.img
Pss:                   8 kB
55d4-55d5 r--s 00001000 fe:00 77 /img/other
Pss:                   16 kB
55d6-55d7 rw-p 00000000 00:00 0
Pss:                   32 kB
55d8-55d9 r--s 00001000 00:21 12 /img/pages.img
Pss:                   64 kB
`
	if got, want := parseMappedPSS(smaps, "/img/pages.img", 77), uint64(76<<10); got != want {
		t.Errorf("got %d, want %d", got, want)
	}
}

func TestCachedBytes(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	if err := os.WriteFile(path, make([]byte, 10*pageSize+1), 0o600); err != nil {
		t.Fatal(err)
	}
	if got, err := CachedBytes(path); err != nil || got != 10*pageSize+1 {
		t.Errorf("a file just written: %d, %v", got, err)
	}
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if got, err := CachedBytes(path); err != nil || got != 0 {
		t.Errorf("an empty file: %d, %v", got, err)
	}
	if _, err := CachedBytes(path + "x"); err == nil {
		t.Error("a missing file has cached bytes")
	}
}

func TestHostCountsNothingTwice(t *testing.T) {
	m := Memory{
		GuestMemfd: 1000, OtherMemfd: 100,
		Sentry:   ProcMemory{PSS: 99999, PSSAnon: 10, PSSFile: 50, PSSShmem: 99999, PageTables: 1},
		Gofer:    ProcMemory{PSSAnon: 3, PSSFile: 4, PageTables: 2},
		Stubs:    ProcMemory{PSSAnon: 5, PSSFile: 300, PageTables: 6},
		Client:   ProcMemory{PSSAnon: 99999},
		Template: &TemplateMemory{MappedPSS: 310},
	}
	if got, want := m.Host(), uint64(1000+100+61+9+311-310); got != want {
		t.Errorf("Host = %d, want %d", got, want)
	}
	if got := m.Overhead(); got != m.Host()-1000 {
		t.Errorf("Overhead = %d", got)
	}
}

// TestGuestDiff compares two memfds as it compares a clone with its template.
func TestGuestDiff(t *testing.T) {
	memfd := func(pages map[int64]byte) *os.File {
		fd, err := unix.MemfdCreate("test", 0)
		if err != nil {
			t.Skip(err)
		}
		f := os.NewFile(uintptr(fd), "test")
		t.Cleanup(func() { f.Close() })
		if err := f.Truncate(64 * pageSize); err != nil {
			t.Fatal(err)
		}
		for page, fill := range pages {
			if _, err := f.WriteAt(bytes.Repeat([]byte{fill}, pageSize), page*pageSize); err != nil {
				t.Fatal(err)
			}
		}
		return f
	}
	template := memfd(map[int64]byte{0: 1, 1: 2, 5: 3, 6: 0, 40: 4})
	snap, err := os.Create(filepath.Join(t.TempDir(), "snap"))
	if err != nil {
		t.Fatal(err)
	}
	exts, size, err := dataExtents(template)
	if err != nil {
		t.Fatal(err)
	}
	g := &GuestSnapshot{f: snap, size: size, extents: exts}
	defer g.Close()
	if err := g.fill(template); err != nil {
		t.Fatal(err)
	}
	if g.Bytes() != 5*pageSize {
		t.Errorf("snapshot holds %d bytes, want 5 pages", g.Bytes())
	}
	// 0 and 40 unchanged, 1 changed, 5 dropped, 6 zero in both, 7 new, 30 new
	// but zero.
	d, err := g.diff(memfd(map[int64]byte{0: 1, 1: 9, 6: 0, 7: 7, 30: 0, 40: 4}))
	if err != nil {
		t.Fatal(err)
	}
	if want := (GuestDiff{Committed: 6, Same: 3, Different: 2, Zero: 1}); d != want {
		t.Errorf("got %+v, want %+v", d, want)
	}
}

func TestUniqueAddressSpaces(t *testing.T) {
	me, parent := os.Getpid(), os.Getppid()
	if _, err := os.Stat("/proc/self/maps"); err != nil {
		t.Skip(err)
	}
	if got := uniqueAddressSpaces([]int{me, parent, me}); !slices.Equal(got, []int{me, parent}) {
		t.Errorf("got %v, want %v", got, []int{me, parent})
	}
}

func TestTailBuffer(t *testing.T) {
	b := tailBuffer{limit: 5}
	for _, s := range []string{"abc", "def", "", "0123456789"} {
		if n, err := b.Write([]byte(s)); n != len(s) || err != nil {
			t.Fatalf("Write = %d, %v", n, err)
		}
	}
	if got := b.String(); got != "56789" {
		t.Errorf("got %q", got)
	}
}
