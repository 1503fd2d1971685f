package template

import (
	"bufio"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"runsc-agentzip/pkg/fleet"
	"runsc-agentzip/test/harness"
)

// No clone's writes are ever seen by a sibling or in the template, and nothing
// that a sandbox holds would let it write there.

// imageFiles are the files of an image with its index.
var imageFiles = []string{"checkpoint.img", "pages_meta.img", "pages.img", "pages.azidx"}

// fileID tells a file, whatever its name.
type fileID struct{ dev, ino uint64 }

func idOf(t testing.TB, path string) fileID {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	return fileID{st.Dev, st.Ino}
}

// digestOf says what a file holds and when it last changed.
func digestOf(t testing.TB, path string) string {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		t.Fatal(err)
	}
	fi, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("%x %d bytes, changed %v", h.Sum(nil), fi.Size(), fi.ModTime())
}

func TestIsolation(t *testing.T) {
	n := 8
	b := bundle(t, "kinds", fmt.Sprintf("--mb=%d", pick(24, 96)), seedArg())
	image, replies := makeImage(t, modeIdle(t), b, "sum")
	rt := newRuntime(t, modeForced(t))
	// Two that do not write: one reads all of it now, the other at the end.
	early := restore(t, rt, "early", b, image)
	if got := early.must("sum"); got != replies[0] {
		t.Fatalf("a clone has %s, the template %s", got, replies[0])
	}
	before := make(map[string]string)
	for _, f := range imageFiles {
		before[f] = digestOf(t, filepath.Join(image, f))
	}
	late := restore(t, rt, "late", b, image)
	clones := restoreAll(t, rt, n, b, image)
	each(t, n, func(i int) error {
		return live(clones[i], replies[0], pick(1, 5), 2000)
	})
	for _, g := range clones {
		inspect(t, g.sb, image)
	}
	for _, g := range []*guest{early, late} {
		if got := g.must("sum"); got != replies[0] {
			t.Errorf("%s, which has not written, has %s now, the template %s", g.sb.ID(), got, replies[0])
		}
		g.must("verify")
		inspect(t, g.sb, image)
	}
	for _, f := range imageFiles {
		if after := digestOf(t, filepath.Join(image, f)); after != before[f] {
			t.Errorf("%s: %s before and %s after %d clones wrote", f, before[f], after, n)
		}
	}
	if out, err := command(t, underTest(t).Path, "agentzip", "template", "verify", image); err != nil {
		t.Errorf("template verify: %v: %s", err, out)
	}
}

// inspect looks from outside at all descriptors and mappings of a sandbox that
// refer to the image.
func inspect(t *testing.T, sb *fleet.Sandbox, image string) {
	t.Helper()
	names := make(map[fileID]string)
	for _, f := range imageFiles {
		names[idOf(t, filepath.Join(image, f))] = f
	}
	// The processes that end meanwhile are no matter; the Sentry does not.
	var fds, maps int
	procs := slices.DeleteFunc(harness.Processes(sb), func(p harness.Process) bool { return p.Zombie })
	for _, p := range procs {
		what := "stub"
		switch p.PID {
		case sb.Pid():
			what = "Sentry"
		case sb.GoferPid():
			what = "gofer"
		}
		n, err := inspectFDs(t, p.PID, what, names)
		if err != nil && (what == "Sentry" || !errors.Is(err, os.ErrNotExist)) {
			t.Errorf("%s %d: %v", what, p.PID, err)
		}
		if what == "Sentry" {
			fds += n
		}
		n, err = inspectMaps(t, p.PID, what, names)
		if err != nil && (what == "Sentry" || !errors.Is(err, os.ErrNotExist) && !errors.Is(err, unix.ESRCH)) {
			t.Errorf("%s %d: %v", what, p.PID, err)
		}
		if what == "stub" {
			maps += n
		}
	}
	if fds == 0 || len(procs) < 3 {
		t.Errorf("%s: %d processes, no descriptor of the template: this proves nothing", sb.ID(), len(procs))
	}
	if maps == 0 {
		t.Errorf("%s: no stub has mapped the template: this proves nothing", sb.ID())
	}
}

// templateFile returns what a descriptor of a process is, or "".
func templateFile(pid int, fd string, names map[fileID]string) string {
	path := fmt.Sprintf("/proc/%d/fd/%s", pid, fd)
	var st unix.Stat_t
	if unix.Stat(path, &st) != nil {
		return ""
	}
	if n, ok := names[fileID{st.Dev, st.Ino}]; ok {
		return n
	}
	// The index of an image in a folder that cannot be written to.
	if link, _ := os.Readlink(path); strings.Contains(link, "agentzip-template-index") {
		return link
	}
	return ""
}

func inspectFDs(t *testing.T, pid int, what string, names map[fileID]string) (found int, err error) {
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		return 0, err
	}
	for _, e := range entries {
		name := templateFile(pid, e.Name(), names)
		if name == "" {
			continue
		}
		found++
		info, err := os.ReadFile(fmt.Sprintf("/proc/%d/fdinfo/%s", pid, e.Name()))
		if err != nil {
			continue
		}
		var flags int64 = -1
		for line := range strings.Lines(string(info)) {
			if v, ok := strings.CutPrefix(line, "flags:"); ok {
				flags, _ = strconv.ParseInt(strings.TrimSpace(v), 8, 64)
			}
		}
		if flags < 0 || flags&unix.O_ACCMODE != unix.O_RDONLY {
			t.Errorf("%s %d: descriptor %s of %s has flags %#o: it is not read-only", what, pid, e.Name(), name, flags)
		}
		if what == "Sentry" {
			tryToWrite(t, pid, e.Name(), name)
		}
	}
	return found, nil
}

// inspectMaps looks at the mappings of image files. Those that are shared must
// not be writable nor become so ("mw" says that mprotect may).
func inspectMaps(t *testing.T, pid int, what string, names map[fileID]string) (found int, err error) {
	f, err := os.Open(fmt.Sprintf("/proc/%d/smaps", pid))
	if err != nil {
		return 0, err
	}
	defer f.Close()
	inodes := make(map[uint64]string)
	for id, n := range names {
		inodes[id.ino] = n
	}
	var header, name string
	sc := bufio.NewScanner(f)
	for sc.Scan() {
		line := sc.Text()
		fields := strings.Fields(line)
		if len(fields) >= 5 && strings.Contains(fields[0], "-") && !strings.HasSuffix(fields[0], ":") {
			header, name = line, ""
			ino, _ := strconv.ParseUint(fields[4], 10, 64)
			if n, ok := inodes[ino]; ok && ino != 0 && strings.Contains(line, ".img") || strings.Contains(line, ".azidx") || strings.Contains(line, "agentzip-template-index") {
				name = n
				if name == "" {
					name = "index"
				}
				found++
				if strings.Contains(fields[1], "w") {
					t.Errorf("%s %d: a mapping of %s is writable: %s", what, pid, name, line)
				}
			}
			continue
		}
		if name != "" && strings.HasPrefix(line, "VmFlags:") {
			shared := strings.Contains(strings.Fields(header)[1], "s")
			for _, fl := range fields[1:] {
				if fl == "wr" || fl == "mw" && shared {
					t.Errorf("%s %d: a mapping of %s could be made writable (%s): %s", what, pid, name, fl, header)
				}
			}
		}
	}
	return found, sc.Err()
}

// tryToWrite takes a copy of a descriptor out of the Sentry and does what one
// that was taken over would do with it.
func tryToWrite(t *testing.T, pid int, fd, name string) {
	t.Helper()
	n, _ := strconv.Atoi(fd)
	pidfd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		t.Errorf("pidfd_open: %v", err)
		return
	}
	defer unix.Close(pidfd)
	own, err := unix.PidfdGetfd(pidfd, n, 0)
	if err != nil {
		t.Errorf("pidfd_getfd: %v", err)
		return
	}
	defer unix.Close(own)
	junk := []byte("written through the sandbox's descriptor")
	mprotect := func() error {
		m, err := unix.Mmap(own, 0, 4096, unix.PROT_READ, unix.MAP_SHARED)
		if err != nil {
			t.Errorf("%s: a mapping for reading: %v", name, err)
			return err
		}
		defer unix.Munmap(m)
		return unix.Mprotect(m, unix.PROT_READ|unix.PROT_WRITE)
	}
	for _, c := range []struct {
		what string
		f    func() error
	}{
		{"write", func() error { _, err := unix.Write(own, junk); return err }},
		{"pwrite", func() error { _, err := unix.Pwrite(own, junk, 0); return err }},
		{"ftruncate", func() error { return unix.Ftruncate(own, 0) }},
		{"fallocate", func() error { return unix.Fallocate(own, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, 4096) }},
		{"a writable shared mapping", func() error {
			m, err := unix.Mmap(own, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
			if err == nil {
				unix.Munmap(m)
			}
			return err
		}},
		{"mprotect of a shared mapping", mprotect},
		{"write after F_SETFL", func() error {
			_, _ = unix.FcntlInt(uintptr(own), unix.F_SETFL, unix.O_RDWR)
			_, err := unix.Pwrite(own, junk, 0)
			return err
		}},
	} {
		if c.f() == nil {
			t.Errorf("the Sentry's descriptor %s of %s allows %s", fd, name, c.what)
		}
	}
}
