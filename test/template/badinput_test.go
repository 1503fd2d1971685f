package template

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"runsc-agentzip/pkg/fleet"
	"runsc-agentzip/test/harness"
)

// A wrong image is refused before the guest runs, with a message that names the
// thing, or it does no harm.

// A sick image is a copy of a good one that something was done to.
type sick struct {
	name string
	// indexed says whether the image is to have an index before.
	indexed bool
	do      func(t *testing.T, dir string)
	// words that the message has to hold; none if the image has to work.
	words []string
	// known is why the message does not hold them: refused it has to be all the
	// same.
	known string
}

// flip changes one bit of a file and nothing else that a user can tell: size,
// times and inode stay.
func flip(t *testing.T, path string, off int64) {
	t.Helper()
	fi, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if off < 0 {
		off += fi.Size()
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var b [1]byte
	if _, err := f.ReadAt(b[:], off); err != nil {
		t.Fatal(err)
	}
	b[0] ^= 0x20
	if _, err := f.WriteAt(b[:], off); err != nil {
		t.Fatal(err)
	}
	if err := os.Chtimes(path, fi.ModTime(), fi.ModTime()); err != nil {
		t.Fatal(err)
	}
}

func truncate(t *testing.T, path string, by int64) {
	t.Helper()
	fi, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, max(fi.Size()-by, 0)); err != nil {
		t.Fatal(err)
	}
}

func try(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// patchIndex changes the header of an index and makes its checksum fit again,
// where fix says so.
func patchIndex(t *testing.T, dir string, off int, v uint32) {
	t.Helper()
	path := filepath.Join(dir, "pages.azidx")
	b, err := os.ReadFile(path)
	try(t, err)
	binary.LittleEndian.PutUint32(b[off:], v)
	try(t, os.WriteFile(path, b, 0o644))
}

func TestBadImage(t *testing.T) {
	const (
		shortPages = "that there are fewer pages than the metadata says is noticed in the sandbox, which says I/O error; only its log tells why"
		noMetadata = "without pages_meta.img the pages are not looked at, and runsc misses them in checkpoint.img"
	)
	b := bundle(t, "kinds", "--mb=12", seedArg())
	image, replies := makeImage(t, modeIdle(t), b, "sum")
	// Another image of the same program, and so of about the same size.
	b2 := bundle(t, "kinds", "--mb=12", "--seed=4711")
	other, _ := makeImage(t, modeIdle(t), b2)
	pages := imageSize(t, image)

	in := func(dir, f string) string { return filepath.Join(dir, f) }
	from := func(f string) func(*testing.T, string) {
		return func(t *testing.T, dir string) { try(t, copyFile(in(other, f), in(dir, f))) }
	}
	index := func(content []byte) func(*testing.T, string) {
		return func(t *testing.T, dir string) { try(t, os.WriteFile(in(dir, "pages.azidx"), content, 0o644)) }
	}
	cases := []sick{
		{"pages short by a page", true, func(t *testing.T, d string) { truncate(t, in(d, "pages.img"), 4096) }, []string{"pages.img", "truncated"}, ""},
		{"pages short by a byte", true, func(t *testing.T, d string) { truncate(t, in(d, "pages.img"), 1) }, []string{"pages.img", "truncated"}, ""},
		{"half of the pages", true, func(t *testing.T, d string) { truncate(t, in(d, "pages.img"), pages/2) }, []string{"pages.img", "truncated"}, ""},
		{"no pages", true, func(t *testing.T, d string) { truncate(t, in(d, "pages.img"), pages) }, []string{"pages.img", "truncated"}, ""},
		{"pages longer by a page", true, func(t *testing.T, d string) { try(t, os.Truncate(in(d, "pages.img"), pages+4096)) }, []string{"pages.img"}, ""},
		{"unindexed, pages short by a page", false, func(t *testing.T, d string) { truncate(t, in(d, "pages.img"), 4096) }, []string{"truncated"}, shortPages},
		{"unindexed, pages short by a byte", false, func(t *testing.T, d string) { truncate(t, in(d, "pages.img"), 1) }, []string{"pages.img", "truncated"}, ""},
		{"unindexed, half of the pages", false, func(t *testing.T, d string) { truncate(t, in(d, "pages.img"), pages/2/4096*4096) }, []string{"truncated"}, shortPages},
		{"unindexed, no pages", false, func(t *testing.T, d string) { truncate(t, in(d, "pages.img"), pages) }, []string{"pages.img", "truncated"}, ""},

		{"a bit of the first page", true, func(t *testing.T, d string) { flip(t, in(d, "pages.img"), 17) }, []string{"pages.img", "0x0"}, ""},
		{"a bit in the middle", true, func(t *testing.T, d string) { flip(t, in(d, "pages.img"), pages/2) }, []string{"pages.img", fmt.Sprintf("%#x", pages/2/4096*4096)}, ""},
		{"the last bit", true, func(t *testing.T, d string) { flip(t, in(d, "pages.img"), -1) }, []string{"pages.img", fmt.Sprintf("%#x", pages-4096)}, ""},
		{"a bit of the state", true, func(t *testing.T, d string) { flip(t, in(d, "checkpoint.img"), 3000) }, []string{"checkpoint.img"}, ""},
		{"a bit of the metadata", true, func(t *testing.T, d string) { flip(t, in(d, "pages_meta.img"), -20) }, []string{"pages_meta.img"}, ""},

		{"metadata of another image", true, from("pages_meta.img"), []string{"pages_meta.img", "another image"}, ""},
		{"state of another image", true, from("checkpoint.img"), []string{"checkpoint.img", "another image"}, ""},
		{"pages of another image", true, from("pages.img"), []string{"pages.img"}, ""},
		{"index of another image", false, func(t *testing.T, d string) { try(t, copyFile(in(other, "pages.azidx"), in(d, "pages.azidx"))) }, []string{"pages.azidx", "another image"}, ""},
		{"another image beside the index", true, func(t *testing.T, d string) {
			for _, f := range imageFiles[:3] {
				from(f)(t, d)
			}
		}, []string{"pages.azidx", "another image"}, ""},

		{"no metadata", true, func(t *testing.T, d string) { try(t, os.Remove(in(d, "pages_meta.img"))) }, []string{"pages_meta.img"}, noMetadata},
		{"no pages file", true, func(t *testing.T, d string) { try(t, os.Remove(in(d, "pages.img"))) }, []string{"pages.img"}, ""},
		{"no state", true, func(t *testing.T, d string) { try(t, os.Remove(in(d, "checkpoint.img"))) }, []string{"checkpoint.img"}, ""},

		{"index of another version", true, func(t *testing.T, d string) { patchIndex(t, d, 8, 99) }, []string{"pages.azidx", "version", "99"}, ""},
		{"index with a bit flipped in its header", true, func(t *testing.T, d string) { flip(t, in(d, "pages.azidx"), 140) }, []string{"pages.azidx"}, ""},
		{"index with a bit flipped in its checksums", true, func(t *testing.T, d string) { flip(t, in(d, "pages.azidx"), -5) }, []string{"pages.azidx"}, ""},
		{"index cut short", true, func(t *testing.T, d string) { truncate(t, in(d, "pages.azidx"), 8) }, []string{"pages.azidx"}, ""},
		{"empty index", false, index(nil), []string{"pages.azidx"}, ""},
		{"index of rubbish", false, index(bytes.Repeat([]byte("rubbish "), 4000)), []string{"pages.azidx"}, ""},
		{"index that is a folder", false, func(t *testing.T, d string) { try(t, os.Mkdir(in(d, "pages.azidx"), 0o755)) }, []string{"pages.azidx"}, ""},
		{"index that is a pipe", false, func(t *testing.T, d string) { try(t, unix.Mkfifo(in(d, "pages.azidx"), 0o644)) }, []string{"pages.azidx"}, ""},
		{"index that leads to itself", false, func(t *testing.T, d string) { try(t, os.Symlink("pages.azidx", in(d, "pages.azidx"))) }, []string{"pages.azidx"}, ""},

		// These are as good as the image they were made from.
		{"copied with its index", true, func(*testing.T, string) {}, nil, ""},
		{"touched", true, func(t *testing.T, d string) {
			now := time.Now()
			try(t, os.Chtimes(in(d, "pages.img"), now, now))
		}, nil, ""},
		{"rewritten with the same content", true, func(t *testing.T, d string) {
			try(t, copyFile(in(image, "pages.img"), in(d, "p")))
			try(t, os.Rename(in(d, "p"), in(d, "pages.img")))
		}, nil, ""},
		{"remains of an interrupted first use", false, func(t *testing.T, d string) {
			try(t, os.WriteFile(in(d, ".pages.azidx.1234"), []byte("half an index"), 0o600))
		}, nil, ""},
	}
	// The good one has an index from here on, and so has the other.
	for _, d := range []string{image, other} {
		if out, err := command(t, underTest(t).Path, "agentzip", "template", "info", d); err != nil {
			t.Fatalf("template info: %v: %s", err, out)
		}
	}
	rt := newRuntime(t, modeForced(t))
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			dir := filepath.Join(harness.TempDir(t), "image")
			try(t, os.CopyFS(dir, os.DirFS(image)))
			if !c.indexed {
				try(t, os.Remove(filepath.Join(dir, "pages.azidx")))
			} else if out, err := command(t, underTest(t).Path, "agentzip", "template", "info", dir); err != nil {
				// The copy is verified and known from here on.
				t.Fatalf("template info: %v: %s", err, out)
			}
			c.do(t, dir)
			began := time.Now()
			g, err := tryRestore(t, rt, "sick", b, dir)
			if len(c.words) == 0 {
				try(t, err)
				if err := live(g, replies[0], 1, 300); err != nil {
					t.Error(err)
				}
				g.end()
				onlyImageFiles(t, dir)
				return
			}
			if err == nil {
				reply, aerr := g.ask("sum")
				t.Errorf("the image was accepted; the guest says %s, %v", reply, aerr)
				g.end()
				return
			}
			t.Logf("after %v: %v", time.Since(began).Round(time.Millisecond), err)
			msg := strings.ToLower(err.Error())
			for _, w := range c.words {
				if !strings.Contains(msg, strings.ToLower(w)) {
					if c.known != "" {
						t.Skipf("the message does not mention %q: %s", w, c.known)
					}
					t.Errorf("the message does not mention %q", w)
				}
			}
			if strings.Contains(msg, "goroutine ") {
				t.Error("the message is a stack trace")
			}
		})
	}
}

// TestTruncatedInPlace cuts the image short under a running clone. What is gone
// cannot be had back, but no guest may go on with something else in its place.
func TestTruncatedInPlace(t *testing.T) {
	b := bundle(t, "kinds", "--mb=12", seedArg())
	image, replies := makeImage(t, modeIdle(t), b, "sum")
	for _, used := range []bool{false, true} {
		t.Run(fmt.Sprintf("used=%v", used), func(t *testing.T) {
			dir := filepath.Join(harness.TempDir(t), "image")
			try(t, os.CopyFS(dir, os.DirFS(image)))
			g := restore(t, newRuntime(t, modeForced(t)), "clone", b, dir)
			if used {
				if got := g.must("sum"); got != replies[0] {
					t.Fatalf("the clone has %s, the template %s", got, replies[0])
				}
			}
			truncate(t, filepath.Join(dir, "pages.img"), imageSize(t, image)/2)
			reply, err := g.ask("verify")
			if err == nil {
				t.Fatalf("half of the memory is gone, and the guest says %s", reply)
			}
			_, _ = g.sb.Wait(harness.Within(t, 20*time.Second))
			t.Logf("%v", err)
			// Either the sandbox was killed, or the program by SIGBUS.
			if msg := g.sb.Stderr() + err.Error(); !strings.Contains(msg, "truncated") && !strings.Contains(msg, "unexpected signal 7") {
				t.Errorf("the message does not say that the image was truncated: %s", msg)
			}
			g.end()
		})
	}
}

// TestOtherVersion restores an image with a runsc that says it is another
// version: it is the one under test but for that.
func TestOtherVersion(t *testing.T) {
	b := bundle(t, "kinds", "--mb=8", seedArg())
	image, _ := makeImage(t, modeIdle(t), b)
	info := underTest(t)
	version := strings.TrimPrefix(info.Version, "runsc version ")
	bin, err := os.ReadFile(info.Path)
	try(t, err)
	changed := []byte(version[:len(version)-1] + "~")
	if n := bytes.Count(bin, []byte(version)); n == 0 {
		t.Skipf("%q is not in the binary", version)
	}
	// Not below /tmp, where the sandbox's root is mounted.
	path := filepath.Join(harness.TempDir(t), "runsc")
	try(t, os.WriteFile(path, bytes.ReplaceAll(bin, []byte(version), changed), 0o755))
	m := modeIdle(t)
	m.binary = path
	g, err := tryRestore(t, newRuntime(t, m), "clone", b, image)
	if err == nil {
		t.Error("it was accepted")
		g.end()
		return
	}
	t.Log(err)
	for _, w := range []string{"version", version, string(changed)} {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("the message does not mention %q", w)
		}
	}
}

// TestCompressedImage: a checkpoint that cannot be a template is restored like
// any other.
func TestCompressedImage(t *testing.T) {
	b := bundle(t, "kinds", "--mb=8", seedArg())
	rt := newRuntime(t, modeIdle(t))
	g := start(t, rt, "origin", b)
	sum := g.must("sum")
	image := harness.TempDir(t)
	g.checkpoint(image, fleet.CheckpointOptions{Compression: "flate-best-speed"})
	g.end()
	g = restore(t, rt, "clone", b, image)
	if err := live(g, sum, 1, 500); err != nil {
		t.Error(err)
	}
	if st := g.stats(); st.TemplateBytes != 0 {
		t.Errorf("template_bytes is %d", st.TemplateBytes)
	}
	g.end()
}

// mountTmpfs mounts a file system of the given size.
func mountTmpfs(t *testing.T, size int64) string {
	t.Helper()
	dir := harness.TempDir(t)
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, fmt.Sprintf("size=%d,mode=755", size)); err != nil {
		harness.Skip(t, "mounting a tmpfs: %v", err)
	}
	harness.AtExit(t, func() { unix.Unmount(dir, unix.MNT_DETACH) })
	return dir
}

// TestNoPlaceForIndex uses images in folders where an index cannot be kept: it
// is made in memory then, and is as read-only as a file would be.
func TestNoPlaceForIndex(t *testing.T) {
	b := bundle(t, "kinds", "--mb=12", seedArg())
	image, replies := makeImage(t, modeIdle(t), b, "sum")
	os.Remove(filepath.Join(image, "pages.azidx"))
	var size int64
	for _, f := range imageFiles[:3] {
		fi, err := os.Stat(filepath.Join(image, f))
		try(t, err)
		size += (fi.Size() + 4095) &^ 4095
	}
	for _, c := range []struct {
		name string
		make func(t *testing.T) string
	}{
		{"read-only folder", func(t *testing.T) string {
			dir := mountTmpfs(t, size+1<<20)
			try(t, os.CopyFS(dir, os.DirFS(image)))
			try(t, unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""))
			return dir
		}},
		{"disk full at once", func(t *testing.T) string {
			dir := mountTmpfs(t, size)
			try(t, os.CopyFS(dir, os.DirFS(image)))
			return dir
		}},
		{"disk full in the middle", func(t *testing.T) string {
			// Room for the header and a part of the checksums.
			dir := mountTmpfs(t, size+2*4096)
			try(t, os.CopyFS(dir, os.DirFS(image)))
			return dir
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := c.make(t)
			rt := newRuntime(t, modeForced(t))
			clones := restoreAll(t, rt, 2, b, dir)
			each(t, 2, func(i int) error { return live(clones[i], replies[0], 1, 500) })
			for _, g := range clones {
				inspect(t, g.sb, withoutIndex(t, dir))
				g.end()
			}
			if out, err := command(t, underTest(t).Path, "agentzip", "template", "info", dir); err != nil || !strings.Contains(out, "digest") {
				t.Errorf("template info: %v: %s", err, out)
			} else {
				t.Logf("template info: %s", out)
				if !strings.Contains(out, "could not be kept") {
					t.Error("nothing says that the index could not be kept")
				}
			}
			if _, err := os.Stat(filepath.Join(dir, "pages.azidx")); err == nil {
				t.Error("there is an index")
			}
			onlyImageFiles(t, dir)
		})
	}
}

// withoutIndex is for inspect, which wants all files of an image: the index is
// found by its name there.
func withoutIndex(t *testing.T, dir string) string {
	t.Helper()
	view := harness.TempDir(t)
	for _, f := range imageFiles[:3] {
		try(t, os.Symlink(filepath.Join(dir, f), filepath.Join(view, f)))
	}
	try(t, os.WriteFile(filepath.Join(view, "pages.azidx"), nil, 0o644))
	return view
}

// TestTemplateCommands: what "agentzip template" makes is a template, it finds
// what is wrong with one, and it overwrites none.
func TestTemplateCommands(t *testing.T) {
	b := bundle(t, "kinds", "--mb=12", seedArg())
	rt := newRuntime(t, modeIdle(t))
	g := start(t, rt, "origin", b)
	g.must("work 500")
	sum := g.must("sum")
	dir := filepath.Join(harness.TempDir(t), "new", "template")
	rt.runsc(t, "agentzip", "template", "create", "--image-path="+dir, "--leave-running", "--settle-cmd=true", "origin")
	g.must("verify")
	g.must("work 500")
	onlyImageFiles(t, dir)
	if out, err := command(t, rt.Binary(), "--root="+rt.Root(), "agentzip", "template", "create", "--image-path="+dir, "origin"); err == nil || !strings.Contains(out, dir) {
		t.Errorf("a template was overwritten, or the message does not name it: %v: %s", err, out)
	}
	g.must("verify")
	g.end()
	g = restore(t, rt, "clone", b, dir)
	if err := live(g, sum, 1, 500); err != nil {
		t.Error(err)
	}
	g.end()
	rt.runsc(t, "agentzip", "template", "verify", dir)
	flip(t, filepath.Join(dir, "pages.img"), 12345)
	out, err := command(t, rt.Binary(), "agentzip", "template", "verify", dir)
	if err == nil || !strings.Contains(out, "pages.img") || !strings.Contains(out, "0x3000") {
		t.Errorf("verify of an image with a flipped bit: %v: %s", err, out)
	}
	t.Logf("verify: %s", out)
	if out, err := command(t, rt.Binary(), "agentzip", "template", "info", dir+"-none"); err == nil || !strings.Contains(out, dir+"-none") {
		t.Errorf("info of nothing: %v: %s", err, out)
	}
}
