package template

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/zeebo/xxh3"
	"golang.org/x/sys/unix"

	"runsc-agentzip/memfile/codec"
	"runsc-agentzip/memfile/dedup"
)

const testPages = 300

// writeImage fills dir with an image of so many pages.
func writeImage(t testing.TB, dir string, pages int, seed uint64) {
	t.Helper()
	b := make([]byte, pages*PageSize)
	r := rand.NewChaCha8([32]byte{byte(seed), 1})
	_, _ = r.Read(b)
	put(t, filepath.Join(dir, PagesFile), b)
	put(t, filepath.Join(dir, StateFile), fmt.Appendf(nil, "state %d", seed))
	put(t, filepath.Join(dir, MetaFile), fmt.Appendf(nil, "meta %d", seed))
}

func put(t testing.TB, path string, b []byte) {
	t.Helper()
	if err := os.WriteFile(path, b, 0o644); err != nil {
		t.Fatal(err)
	}
}

func get(t testing.TB, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// A logger keeps what Open has to say.
type logger struct {
	mu    sync.Mutex
	lines []string
}

func (l *logger) log(format string, args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines = append(l.lines, fmt.Sprintf(format, args...))
}

func (l *logger) count(s string) (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, line := range l.lines {
		if strings.Contains(line, s) {
			n++
		}
	}
	return n
}

// What Open logs.
const (
	logIndexed  = "indexed"
	logInMemory = "could not be kept"
	logVerified = "verified"
	logNotNoted = "could not be noted"
)

// openOK opens dir and returns what Open logged.
func openOK(t testing.TB, dir string) (*Template, *logger) {
	t.Helper()
	var l logger
	tpl, err := Open(dir, l.log)
	if err != nil {
		t.Fatalf("Open: %v", err)
	}
	t.Cleanup(func() { _ = tpl.Close() })
	return tpl, &l
}

// openFails wants Open to fail with the error and to mention all of the words.
func openFails(t *testing.T, dir string, want error, words ...string) {
	t.Helper()
	var l logger
	tpl, err := Open(dir, l.log)
	if err == nil {
		_ = tpl.Close()
		t.Fatalf("Open succeeded; it logged %q", l.lines)
	}
	check(t, err, want, words...)
	if t.Failed() {
		return
	}
	t.Log(err)
}

func check(t *testing.T, err, want error, words ...string) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("error %q is not %q", err, want)
	}
	for _, w := range words {
		if !strings.Contains(fmt.Sprint(err), w) {
			t.Errorf("error %q does not mention %q", err, w)
		}
	}
}

// view returns a View of tpl that has descriptors of its own, as in a sandbox.
func view(t testing.TB, tpl *Template) *View {
	t.Helper()
	p, x := tpl.Files()
	v, err := FromFiles(dup(t, p), dup(t, x))
	if err != nil {
		t.Fatalf("FromFiles: %v", err)
	}
	t.Cleanup(func() {
		if v.index.data != nil {
			_ = v.Close()
		}
	})
	return v
}

func dup(t testing.TB, f *os.File) *os.File {
	t.Helper()
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	return os.NewFile(uintptr(fd), f.Name())
}

// image returns a folder with an image that has an index.
func indexed(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	writeImage(t, dir, testPages, 1)
	tpl, _ := openOK(t, dir)
	_ = tpl.Close()
	return dir
}

func TestRoundTrip(t *testing.T) {
	dir := t.TempDir()
	writeImage(t, dir, testPages, 1)
	if err := os.Chmod(filepath.Join(dir, PagesFile), 0o640); err != nil {
		t.Fatal(err)
	}
	tpl, l := openOK(t, dir)
	if l.count(logIndexed) != 1 || len(l.lines) != 1 {
		t.Errorf("first Open logged %q", l.lines)
	}
	info := tpl.Info()
	if info.Pages != testPages || info.Bytes != testPages*PageSize || info.IndexBytes != headerSize+sectionsAlign+dedup.TableSize(testPages) || time.Since(info.Created) > time.Minute {
		t.Errorf("Info: %+v", info)
	}
	if st, err := os.Stat(filepath.Join(dir, IndexFile)); err != nil || st.Mode() != 0o640 {
		t.Errorf("index: %v, %v", st.Mode(), err)
	}
	again, l := openOK(t, dir)
	if len(l.lines) != 0 || again.Info() != info {
		t.Errorf("second Open logged %q and returned %+v, not %+v", l.lines, again.Info(), info)
	}
	if got, err := Verify(dir); err != nil || got != info {
		t.Errorf("Verify: %+v, %v", got, err)
	}

	v := view(t, tpl)
	raw := get(t, filepath.Join(dir, PagesFile))
	if v.Pages() != testPages || v.Digest() != info.Digest {
		t.Errorf("View: %d pages, digest %v", v.Pages(), v.Digest())
	}
	for n := range uint64(testPages) {
		if got, want := v.Sum(n), codec.Sum((*codec.Page)(raw[n*PageSize:])); got != want {
			t.Fatalf("Sum(%d) = %#x, want %#x", n, got, want)
		}
	}
	for _, c := range []struct{ n, count uint64 }{{0, testPages}, {0, 0}, {testPages, 0}, {testPages - 1, 1}, {17, 16}} {
		dst := make([]byte, c.count*PageSize)
		if err := v.ReadPages(dst, c.n); err != nil || !bytes.Equal(dst, raw[c.n*PageSize:][:len(dst)]) {
			t.Errorf("ReadPages(%d pages, %d): %v", c.count, c.n, err)
		}
	}
	for _, c := range []struct{ n, bytes uint64 }{{testPages, PageSize}, {1 << 60, PageSize}, {testPages - 1, 2 * PageSize}, {0, 1}} {
		if err := v.ReadPages(make([]byte, c.bytes), c.n); err == nil {
			t.Errorf("ReadPages(%d bytes, %d) succeeded", c.bytes, c.n)
		}
	}
	mem, err := unix.Mmap(v.PagesFD(), 0, testPages*PageSize, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(mem, raw) {
		t.Error("mapped pages differ")
	}
	_ = unix.Munmap(mem)
	if err := v.Close(); err != nil {
		t.Error(err)
	}

	var back Info
	if b, err := json.Marshal(info); err != nil || json.Unmarshal(b, &back) != nil || back != info {
		t.Errorf("Info through JSON: %+v, %s, %v", back, b, err)
	}
}

// What a sandbox is given cannot be used to write.
func TestReadOnly(t *testing.T) {
	dir := indexed(t)
	ro := readOnly(t, dir)
	for _, dir := range []string{dir, ro} {
		tpl, _ := openOK(t, dir)
		p, x := tpl.Files()
		for _, f := range []*os.File{p, x} {
			fd := int(f.Fd())
			flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
			if err != nil || flags&unix.O_ACCMODE != unix.O_RDONLY || flags&unix.O_NONBLOCK != 0 {
				t.Errorf("%s: flags %#x, %v", f.Name(), flags, err)
			}
			if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
				t.Errorf("%s: descriptor flags %#x, %v", f.Name(), flags, err)
			}
			if _, err := unix.Pwrite(fd, []byte{1}, 0); err == nil {
				t.Errorf("%s: pwrite succeeded", f.Name())
			}
			if err := unix.Ftruncate(fd, 0); err == nil {
				t.Errorf("%s: ftruncate succeeded", f.Name())
			}
			if err := unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, PageSize); err == nil {
				t.Errorf("%s: fallocate succeeded", f.Name())
			}
			if m, err := unix.Mmap(fd, 0, PageSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err == nil {
				_ = unix.Munmap(m)
				t.Errorf("%s: writable mapping succeeded", f.Name())
			}
			m, err := unix.Mmap(fd, 0, PageSize, unix.PROT_READ, unix.MAP_SHARED)
			if err != nil {
				t.Fatal(err)
			}
			if err := unix.Mprotect(m, unix.PROT_READ|unix.PROT_WRITE); err == nil {
				t.Errorf("%s: mprotect succeeded", f.Name())
			}
			_ = unix.Munmap(m)
		}
	}
}

func TestBadImage(t *testing.T) {
	pages := func(dir string) string { return filepath.Join(dir, PagesFile) }
	for _, c := range []struct {
		name  string
		spoil func(t *testing.T, dir string)
		want  error
		words []string
	}{
		{"truncated", func(t *testing.T, dir string) {
			try(t, os.Truncate(pages(dir), (testPages-1)*PageSize))
		}, ErrTruncated, []string{PagesFile, "checkpoint again"}},
		{"truncated inside a page", func(t *testing.T, dir string) {
			try(t, os.Truncate(pages(dir), testPages*PageSize-1))
		}, ErrTruncated, []string{PagesFile}},
		{"emptied", func(t *testing.T, dir string) {
			try(t, os.Truncate(pages(dir), 0))
		}, ErrTruncated, []string{PagesFile}},
		{"grown", func(t *testing.T, dir string) {
			try(t, os.Truncate(pages(dir), (testPages+1)*PageSize))
		}, ErrModified, []string{PagesFile}},
		{"one byte flipped, mtime preserved", func(t *testing.T, dir string) {
			st, err := os.Stat(pages(dir))
			try(t, err)
			flip(t, pages(dir), 77*PageSize+1234)
			try(t, os.Chtimes(pages(dir), st.ModTime(), st.ModTime()))
		}, ErrModified, []string{PagesFile, fmt.Sprintf("%#x", 77*PageSize), "checkpoint again"}},
		{"replaced by one with a byte flipped", func(t *testing.T, dir string) {
			b := get(t, pages(dir))
			b[77*PageSize] ^= 1
			put(t, pages(dir)+".new", b)
			try(t, os.Rename(pages(dir)+".new", pages(dir)))
		}, ErrModified, []string{PagesFile, fmt.Sprintf("%#x", 77*PageSize)}},
		{"state of another image", func(t *testing.T, dir string) {
			put(t, filepath.Join(dir, StateFile), []byte("state 2"))
		}, ErrMismatch, []string{StateFile, IndexFile}},
		{"metadata of another image", func(t *testing.T, dir string) {
			put(t, filepath.Join(dir, MetaFile), []byte("meta 2"))
		}, ErrMismatch, []string{MetaFile, IndexFile}},
		{"another image beside an old index", func(t *testing.T, dir string) {
			writeImage(t, dir, testPages, 2)
		}, ErrMismatch, []string{StateFile, IndexFile, "delete the index"}},
		{"no pages", func(t *testing.T, dir string) {
			try(t, os.Remove(pages(dir)))
		}, ErrNotTemplate, []string{dir0, PagesFile, "--compression=none"}},
		{"no state", func(t *testing.T, dir string) {
			try(t, os.Remove(filepath.Join(dir, StateFile)))
		}, ErrNotTemplate, []string{StateFile}},
		{"no metadata", func(t *testing.T, dir string) {
			try(t, os.Remove(filepath.Join(dir, MetaFile)))
		}, ErrNotTemplate, []string{MetaFile}},
		{"no folder", func(t *testing.T, dir string) {
			try(t, os.RemoveAll(dir))
		}, fs.ErrNotExist, []string{dir0}},
		{"pages are a folder", func(t *testing.T, dir string) {
			try(t, os.Remove(pages(dir)))
			try(t, os.Mkdir(pages(dir), 0o755))
		}, anyError, []string{PagesFile, "not a regular file"}},
		{"pages are a pipe", func(t *testing.T, dir string) {
			try(t, os.Remove(pages(dir)))
			try(t, unix.Mkfifo(pages(dir), 0o644))
		}, anyError, []string{PagesFile, "not a regular file"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := indexed(t)
			before := get(t, filepath.Join(dir, IndexFile))
			c.spoil(t, dir)
			words := make([]string, len(c.words))
			for i, w := range c.words {
				words[i] = strings.ReplaceAll(w, dir0, dir)
			}
			if c.want == anyError {
				tpl, err := Open(dir, nil)
				if err == nil {
					_ = tpl.Close()
					t.Fatal("Open succeeded")
				}
				check(t, err, err, words...)
				return
			}
			for range 2 {
				openFails(t, dir, c.want, words...)
			}
			_, err := Verify(dir)
			check(t, err, c.want, words...)
			if c.name == "no folder" {
				return
			}
			// A refused image is not blessed by a new index, and nothing is
			// left behind.
			if !bytes.Equal(get(t, filepath.Join(dir, IndexFile)), before) {
				t.Error("the index has changed")
			}
			if n := len(temps(t, dir)); n != 0 {
				t.Errorf("%d temporary files are left", n)
			}
		})
	}
}

const dir0 = "<dir>"

var anyError = errors.New("any error")

func try(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// flip changes one bit of a file in place.
func flip(t testing.TB, path string, off int64) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	try(t, err)
	defer f.Close()
	var b [1]byte
	_, err = f.ReadAt(b[:], off)
	try(t, err)
	b[0] ^= 0x10
	_, err = f.WriteAt(b[:], off)
	try(t, err)
}

func temps(t *testing.T, dir string) []string {
	t.Helper()
	all, err := filepath.Glob(filepath.Join(dir, tempPrefix+"*"))
	try(t, err)
	return all
}

// An image without index that is obviously not whole.
func TestBadImageWithoutIndex(t *testing.T) {
	for _, size := range []int64{0, 1, PageSize - 1, testPages*PageSize - 1} {
		dir := t.TempDir()
		writeImage(t, dir, testPages, 1)
		try(t, os.Truncate(filepath.Join(dir, PagesFile), size))
		openFails(t, dir, ErrTruncated, PagesFile)
		_, err := Verify(dir)
		check(t, err, fs.ErrNotExist, IndexFile)
	}
}

// rehash makes the checksum of a header fit it.
func rehash(b []byte) {
	binary.LittleEndian.PutUint64(b[headerSumAt:], xxh3.Hash(b[:headerSumAt]))
}

func TestBadIndex(t *testing.T) {
	le := binary.LittleEndian
	for _, c := range []struct {
		name  string
		spoil func(b []byte) []byte
		want  error
		words []string
	}{
		{"empty", func(b []byte) []byte { return nil }, ErrIndex, nil},
		{"truncated header", func(b []byte) []byte { return b[:100] }, ErrIndex, nil},
		{"truncated checksums", func(b []byte) []byte { return b[:len(b)-1] }, ErrIndex, nil},
		{"grown", func(b []byte) []byte { return append(b, 0) }, ErrIndex, nil},
		{"magic", func(b []byte) []byte { b[0] ^= 1; return b }, ErrIndex, nil},
		{"zeroes", func(b []byte) []byte { clear(b); return b }, ErrIndex, nil},
		{"version", func(b []byte) []byte { le.PutUint32(b[8:], 2); rehash(b); return b }, ErrVersion, []string{"2", "1"}},
		{"bit of the header", func(b []byte) []byte { b[57] ^= 1; return b }, ErrIndex, []string{"header"}},
		{"bit of the checksums", func(b []byte) []byte { b[headerSize+8] ^= 1; return b }, ErrIndex, []string{"checksum"}},
		{"page size", func(b []byte) []byte { le.PutUint32(b[16:], 16384); rehash(b); return b }, ErrIndex, []string{"16384"}},
		{"page count", func(b []byte) []byte { le.PutUint64(b[24:], 1<<62); rehash(b); return b }, ErrIndex, nil},
		{"section outside", func(b []byte) []byte { le.PutUint64(b[sectionsAt+8:], 1<<63); rehash(b); return b }, ErrIndex, nil},
		{"section over the header", func(b []byte) []byte { le.PutUint64(b[sectionsAt+8:], 0); rehash(b); return b }, ErrIndex, nil},
		{"section too long", func(b []byte) []byte { le.PutUint64(b[sectionsAt+16:], 1<<63); rehash(b); return b }, ErrIndex, nil},
		{"reserved", func(b []byte) []byte { b[200] = 1; rehash(b); return b }, ErrIndex, []string{"reserved"}},
		{"no sections", func(b []byte) []byte { le.PutUint32(b[20:], 0); rehash(b); return b }, ErrIndex, nil},
		{"many sections", func(b []byte) []byte { le.PutUint32(b[20:], 60); rehash(b); return b }, ErrIndex, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := indexed(t)
			path := filepath.Join(dir, IndexFile)
			bad := c.spoil(get(t, path))
			put(t, path, bad)
			words := append([]string{path, "delete"}, c.words...)
			openFails(t, dir, c.want, words...)
			_, err := Verify(dir)
			check(t, err, c.want, words...)
			if !bytes.Equal(get(t, path), bad) {
				t.Error("the index has changed")
			}
			// The same in the sandbox.
			p, _, err := openFile(filepath.Join(dir, PagesFile))
			try(t, err)
			defer p.Close()
			x, _, err := openFile(path)
			try(t, err)
			defer x.Close()
			_, err = FromFiles(p, x)
			check(t, err, c.want)
			// What the message says to do helps.
			try(t, os.Remove(path))
			openOK(t, dir)
		})
	}
	t.Run("digest", func(t *testing.T) {
		dir := indexed(t)
		path := filepath.Join(dir, IndexFile)
		b := get(t, path)
		b[136] ^= 1
		rehash(b)
		put(t, path, b)
		_, err := Verify(dir)
		check(t, err, ErrIndex, path, "digest")
	})
	t.Run("folder", func(t *testing.T) {
		dir := indexed(t)
		path := filepath.Join(dir, IndexFile)
		try(t, os.Remove(path))
		try(t, os.Mkdir(path, 0o755))
		openFails(t, dir, ErrIndex, path, "not a regular file")
	})
	t.Run("pipe", func(t *testing.T) {
		dir := indexed(t)
		path := filepath.Join(dir, IndexFile)
		try(t, os.Remove(path))
		try(t, unix.Mkfifo(path, 0o644))
		openFails(t, dir, ErrIndex, path, "not a regular file")
	})
	t.Run("loop", func(t *testing.T) {
		dir := indexed(t)
		path := filepath.Join(dir, IndexFile)
		try(t, os.Remove(path))
		try(t, os.Symlink(IndexFile, path))
		openFails(t, dir, ErrIndex, path)
	})
}

// Sections of an unknown kind are ignored, unless they may not be.
func TestUnknownSection(t *testing.T) {
	dir := indexed(t)
	path := filepath.Join(dir, IndexFile)
	old := get(t, path)
	h, err := decodeHeader(old, uint64(len(old)))
	try(t, err)
	more := []byte("something")
	at := (len(old) + sectionsAlign - 1) / sectionsAlign * sectionsAlign
	s := section{kind: 99, offset: uint64(at), length: uint64(len(more)), sum: xxh3.Hash(more), record: 4}
	for _, c := range []struct {
		flags uint32
		want  error
	}{{0, nil}, {flagCritical, ErrIndex}} {
		s.flags = c.flags
		g := h
		g.sections = append(append([]section{}, h.sections...), s)
		g.size = uint64(at + len(more))
		b := append(g.encode(), old[headerSize:]...)
		b = append(b, make([]byte, at-len(b))...)
		put(t, path, append(b, more...))
		if c.want != nil {
			openFails(t, dir, c.want, "kind 99")
			continue
		}
		tpl, _ := openOK(t, dir)
		if v := view(t, tpl); v.Pages() != testPages {
			t.Errorf("%d pages", v.Pages())
		}
		// A new fingerprint keeps the section.
		now := time.Now()
		try(t, os.Chtimes(filepath.Join(dir, PagesFile), now, now))
		_, l := openOK(t, dir)
		if l.count(logVerified) != 1 || !bytes.Contains(get(t, path), more) {
			t.Errorf("refreshing lost the section; log %q", l.lines)
		}
	}
}

// An unchanged image that was copied, moved or touched is verified once.
func TestRefresh(t *testing.T) {
	for _, c := range []struct {
		name string
		move func(t *testing.T, dir string) string
	}{
		{"touched", func(t *testing.T, dir string) string {
			at := time.Unix(1e9, 0)
			try(t, os.Chtimes(filepath.Join(dir, PagesFile), at, at))
			return dir
		}},
		{"copied", func(t *testing.T, dir string) string {
			to := t.TempDir()
			for _, f := range []string{StateFile, MetaFile, PagesFile, IndexFile} {
				put(t, filepath.Join(to, f), get(t, filepath.Join(dir, f)))
			}
			return to
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := indexed(t)
			tpl, _ := openOK(t, dir)
			info := tpl.Info()
			dir = c.move(t, dir)
			tpl, l := openOK(t, dir)
			if l.count(logVerified) != 1 || len(l.lines) != 1 || tpl.Info() != info {
				t.Errorf("first Open logged %q and returned %+v, not %+v", l.lines, tpl.Info(), info)
			}
			t.Log(l.lines[0])
			tpl, l = openOK(t, dir)
			if len(l.lines) != 0 || tpl.Info() != info {
				t.Errorf("second Open logged %q and returned %+v, not %+v", l.lines, tpl.Info(), info)
			}
			if got, err := Verify(dir); err != nil || got != info {
				t.Errorf("Verify: %+v, %v", got, err)
			}
		})
	}
}

// readOnly returns another path of dir where nobody can write.
func readOnly(t testing.TB, dir string) string {
	t.Helper()
	ro := t.TempDir()
	if err := unix.Mount(dir, ro, "", unix.MS_BIND, ""); err != nil {
		t.Skipf("cannot mount: %v", err)
	}
	t.Cleanup(func() { _ = unix.Unmount(ro, unix.MNT_DETACH) })
	if err := unix.Mount("", ro, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		t.Skipf("cannot mount read-only: %v", err)
	}
	return ro
}

func TestReadOnlyFolder(t *testing.T) {
	dir := t.TempDir()
	writeImage(t, dir, testPages, 1)
	ro := readOnly(t, dir)
	tpl, l := openOK(t, ro)
	if l.count(logInMemory) != 1 {
		t.Errorf("Open logged %q", l.lines)
	}
	t.Log(l.lines)
	sealed(t, tpl)
	try(t, view(t, tpl).ReadPages(make([]byte, testPages*PageSize), 0))

	// The index that somebody who may write made is used.
	tpl, _ = openOK(t, dir)
	info := tpl.Info()
	tpl, l = openOK(t, ro)
	if len(l.lines) != 0 || tpl.Info() != info {
		t.Errorf("Open with index logged %q and returned %+v, not %+v", l.lines, tpl.Info(), info)
	}

	now := time.Now()
	try(t, os.Chtimes(filepath.Join(dir, PagesFile), now, now))
	tpl, l = openOK(t, ro)
	if l.count(logVerified) != 1 || l.count(logNotNoted) != 1 || tpl.Info() != info {
		t.Errorf("Open with a stale index logged %q and returned %+v, not %+v", l.lines, tpl.Info(), info)
	}
	t.Log(l.lines)
	try(t, view(t, tpl).ReadPages(make([]byte, testPages*PageSize), 0))

	flip(t, filepath.Join(dir, PagesFile), 5)
	openFails(t, ro, ErrModified, PagesFile, "0x0")
}

func sealed(t *testing.T, tpl *Template) {
	t.Helper()
	_, x := tpl.Files()
	const want = unix.F_SEAL_WRITE | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL
	if seals, err := unix.FcntlInt(x.Fd(), unix.F_GET_SEALS, 0); err != nil || seals&want != want {
		t.Errorf("the index in memory has seals %#x (%v), want %#x", seals, err, want)
	}
}

func TestDiskFull(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, fmt.Sprintf("size=%d", (testPages+14)*PageSize)); err != nil {
		t.Skipf("cannot mount: %v", err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	writeImage(t, dir, testPages, 1)
	fill := filepath.Join(dir, "fill")
	f, err := os.Create(fill)
	try(t, err)
	for err == nil {
		_, err = f.Write(make([]byte, PageSize))
	}
	_ = f.Close()

	tpl, l := openOK(t, dir)
	if l.count(logInMemory) != 1 || l.count("no space") != 1 {
		t.Errorf("Open logged %q", l.lines)
	}
	t.Log(l.lines)
	sealed(t, tpl)
	try(t, view(t, tpl).ReadPages(make([]byte, testPages*PageSize), 0))
	if n := len(temps(t, dir)); n != 0 {
		t.Errorf("%d temporary files are left", n)
	}
	if _, err := os.Stat(filepath.Join(dir, IndexFile)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("there is an index: %v", err)
	}

	try(t, os.Remove(fill))
	tpl, l = openOK(t, dir)
	if l.count(logIndexed) != 1 || l.count(logInMemory) != 0 {
		t.Errorf("Open with room logged %q", l.lines)
	}
	info := tpl.Info()

	// Full again, with a stale index: the index stays as it is.
	f, err = os.Create(fill)
	for err == nil {
		_, err = f.Write(make([]byte, PageSize))
	}
	_ = f.Close()
	now := time.Now()
	try(t, os.Chtimes(filepath.Join(dir, PagesFile), now, now))
	tpl, l = openOK(t, dir)
	if l.count(logNotNoted) != 1 || tpl.Info() != info {
		t.Errorf("Open with a stale index logged %q and returned %+v, not %+v", l.lines, tpl.Info(), info)
	}
}

// TestSimilar finds pages by what they share with others, and does without if
// there are no sketches or they are damaged.
func TestSimilar(t *testing.T) {
	dir := indexed(t)
	raw := get(t, filepath.Join(dir, PagesFile))
	path := filepath.Join(dir, IndexFile)
	similar := func(n int) int {
		tpl, _ := openOK(t, dir)
		v := view(t, tpl)
		var p codec.Page
		copy(p[16:], raw[n*PageSize:(n+1)*PageSize]) // moved
		var s dedup.Sketch
		s.Make(&p)
		var best [2]dedup.Match
		for _, m := range best[:v.Similar(&s, best[:])] {
			if m.Item == uint32(n) {
				return m.Shared
			}
		}
		return 0
	}
	if got := similar(7); got < dedup.Features-2 {
		t.Errorf("%d features of the page are found", got)
	}
	good := get(t, path)
	h, err := decodeHeader(good, uint64(len(good)))
	try(t, err)

	tpl, _ := openOK(t, dir)
	v := view(t, tpl)
	bad := bytes.Clone(good)
	for i := h.sections[1].offset; i < h.size; i++ {
		bad[i] ^= 0x5a
	}
	// In place: a sandbox that runs has it mapped.
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	try(t, err)
	_, err = f.WriteAt(bad, 0)
	try(t, errors.Join(err, f.Close()))
	var p codec.Page
	var s dedup.Sketch
	var best [2]dedup.Match
	for n := range testPages {
		copy(p[:], raw[n*PageSize:])
		s.Make(&p)
		for _, m := range best[:v.Similar(&s, best[:])] {
			if m.Item >= testPages {
				t.Errorf("page %d", m.Item)
			}
		}
	}
	openFails(t, dir, ErrIndex, path, "sketches")
	_, err = Verify(dir)
	check(t, err, ErrIndex, "sketches")

	// As an older build writes it.
	h.size = headerSize + h.sections[0].length
	h.sections = h.sections[:1]
	put(t, path, append(h.encode(), good[headerSize:h.size]...))
	if got := similar(7); got != 0 {
		t.Errorf("%d features of the page are found without sketches", got)
	}
	_, err = Verify(dir)
	try(t, err)
}

// Sandboxes that run are not disturbed by what happens to the folder.
func TestDeleted(t *testing.T) {
	dir := indexed(t)
	raw := get(t, filepath.Join(dir, PagesFile))
	tpl, _ := openOK(t, dir)
	v := view(t, tpl)
	_ = tpl.Close()
	try(t, os.RemoveAll(dir))
	try(t, os.Mkdir(dir, 0o755))
	writeImage(t, dir, testPages, 2)
	dst := make([]byte, len(raw))
	if err := v.ReadPages(dst, 0); err != nil || !bytes.Equal(dst, raw) {
		t.Errorf("ReadPages: %v", err)
	}
}

// What happens in place under a View is an error, not a crash or a wrong byte.
func TestChangedInUse(t *testing.T) {
	dir := indexed(t)
	pages := filepath.Join(dir, PagesFile)
	raw := get(t, pages)
	tpl, _ := openOK(t, dir)
	v := view(t, tpl)
	dst := make([]byte, 4*PageSize)

	flip(t, pages, 10*PageSize+3)
	err := v.ReadPages(dst, 8)
	check(t, err, ErrModified, fmt.Sprintf("%#x", 10*PageSize))
	try(t, v.ReadPages(dst, 11))
	flip(t, pages, 10*PageSize+3)

	try(t, os.Truncate(pages, 12*PageSize+100))
	try(t, v.ReadPages(dst, 8))
	check(t, v.ReadPages(dst, 9), ErrTruncated)
	check(t, v.ReadPages(dst, 20), ErrTruncated)
	p, x := tpl.Files()
	_, err = FromFiles(p, x)
	check(t, err, ErrTruncated)
	put(t, pages, raw)
	try(t, v.ReadPages(dst, 9))

	try(t, os.Truncate(filepath.Join(dir, IndexFile), 0))
	check(t, v.ReadPages(dst, 0), ErrTruncated, "index")
	if s := v.Sum(0); s != 0 {
		t.Errorf("Sum = %#x", s)
	}
}

func TestCheckMetadata(t *testing.T) {
	dir := indexed(t)
	tpl, _ := openOK(t, dir)
	open2 := func() (*os.File, *os.File) {
		a, err := os.Open(filepath.Join(dir, StateFile))
		try(t, err)
		b, err := os.Open(filepath.Join(dir, MetaFile))
		try(t, err)
		t.Cleanup(func() { _ = a.Close(); _ = b.Close() })
		return a, b
	}
	a, b := open2()
	try(t, tpl.CheckMetadata(a, b))
	check(t, tpl.CheckMetadata(b, a), ErrMismatch, StateFile)
	other := filepath.Join(dir, "other")
	put(t, other, []byte("meta 1"))
	try(t, os.Rename(other, filepath.Join(dir, MetaFile)))
	try(t, tpl.CheckMetadata(a, b))
	a, b = open2()
	check(t, tpl.CheckMetadata(a, b), ErrMismatch, MetaFile)
}

// Only one of many makes the index, in one process and in several.
func TestConcurrentOpen(t *testing.T) {
	for _, stale := range []bool{false, true} {
		name := map[bool]string{false: "build", true: "verify"}[stale]
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			writeImage(t, dir, 8*testPages, 1)
			want := logIndexed
			if stale {
				openOK(t, dir)
				now := time.Now()
				try(t, os.Chtimes(filepath.Join(dir, PagesFile), now, now))
				want = logVerified
			}
			var l logger
			var wg sync.WaitGroup
			for range 8 {
				wg.Go(func() {
					tpl, err := Open(dir, l.log)
					if err != nil {
						t.Error(err)
						return
					}
					if err := view(t, tpl).ReadPages(make([]byte, PageSize), 7); err != nil {
						t.Error(err)
					}
					_ = tpl.Close()
				})
			}
			wg.Wait()
			if l.count(want) != 1 {
				t.Errorf("it was done %d times: %q", l.count(want), l.lines)
			}
		})
	}
}

const helperEnv = "TEMPLATE_TEST_OPEN"

func TestMain(m *testing.M) {
	if dir := os.Getenv(helperEnv); dir != "" {
		tpl, err := Open(dir, func(format string, args ...any) { fmt.Printf(format+"\n", args...) })
		if err != nil {
			fmt.Println("FAILED:", err)
			os.Exit(1)
		}
		_ = tpl.Close()
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func TestConcurrentProcesses(t *testing.T) {
	self, err := os.Executable()
	try(t, err)
	dir := t.TempDir()
	writeImage(t, dir, 40*testPages, 1)
	var l logger
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			c := exec.Command(self)
			c.Env = append(os.Environ(), helperEnv+"="+dir)
			out, err := c.CombinedOutput()
			if err != nil {
				t.Errorf("%v: %s", err, out)
			}
			l.log("%s", out)
		})
	}
	wg.Wait()
	if n := l.count(logIndexed); n != 1 {
		t.Errorf("the index was made %d times: %q", n, l.lines)
	}
}

// What a process leaves that dies while it writes the index is removed.
func TestLeftovers(t *testing.T) {
	dir := t.TempDir()
	writeImage(t, dir, testPages, 1)
	put(t, filepath.Join(dir, tempPrefix+"123"), []byte("half"))
	openOK(t, dir)
	if left := temps(t, dir); len(left) != 0 {
		t.Errorf("left: %q", left)
	}
}

// A sandbox that holds the descriptor holds no lock.
func TestUnlocked(t *testing.T) {
	dir := t.TempDir()
	writeImage(t, dir, testPages, 1)
	openOK(t, dir)
	f, err := os.Open(filepath.Join(dir, PagesFile))
	try(t, err)
	defer f.Close()
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		t.Errorf("pages are locked: %v", err)
	}
}
