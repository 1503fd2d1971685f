package erofs

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"runsc-agentzip/pkg/fleet"
	"runsc-agentzip/test/harness"
)

// lister prints all that there is to know about the files below some folders. The
// sizes and links of directories are the file system's own business.
const lister = `
import hashlib, os, stat, sys
def show(p):
    s = os.lstat(p)
    f = [p, oct(s.st_mode), s.st_uid, s.st_gid, s.st_mtime_ns]
    if not stat.S_ISDIR(s.st_mode): f += [s.st_size, s.st_nlink]
    if stat.S_ISLNK(s.st_mode): f.append(os.readlink(p))
    if stat.S_ISREG(s.st_mode): f.append(hashlib.sha256(open(p, 'rb').read()).hexdigest())
    print(*f)
for top in sys.argv[1:]:
    for d, dirs, files in os.walk(top):
        dirs.sort()
        show(d)
        for f in sorted(files + [x for x in dirs if os.path.islink(os.path.join(d, x))]): show(os.path.join(d, f))
`

// writer changes files of the root in every way, and says what it sees then. Times
// are what they are.
const writer = `
import hashlib, mmap, os, stat
os.chdir('/usr/odd')
open('size-4097', 'ab').write(b'appended')                       # a copy, of which the hard link is no part
print(os.stat('size-4097').st_size, hashlib.sha256(open('size-4097', 'rb').read()).hexdigest())
with open('size-65536', 'r+b') as f:
    m = mmap.mmap(f.fileno(), 0); m[5000:5004] = b'mmap'; m.flush()
print(hashlib.sha256(open('size-65536', 'rb').read()).hexdigest())
os.truncate('sparse', 100); print(os.stat('sparse').st_size)
os.chmod('owned', 0o600); os.chown('owned', 1, 2); s = os.stat('owned'); print(oct(s.st_mode), s.st_uid, s.st_gid)
os.unlink('size-1'); print(os.path.lexists('size-1'), os.path.exists('link'))
os.rename('many/file-with-a-name-of-some-length-7', 'moved'); print(open('moved').read(), len(os.listdir('many')))
os.makedirs('new/dir'); open('new/dir/file', 'w').write('n' * 100000); print(os.stat('new/dir/file').st_size)
os.symlink('new', 'new-link'); print(sorted(os.listdir('new-link')))
os.utime('size-4096', ns=(3, 4)); print(os.stat('size-4096').st_mtime_ns)
os.mknod('new-fifo', 0o600 | stat.S_IFIFO); print(stat.S_ISFIFO(os.stat('new-fifo').st_mode))
p = open('size-4095', 'rb'); first = p.read(10); os.unlink('size-4095'); print(first, len(p.read()))
private = mmap.mmap(os.open('size-1048593', os.O_RDONLY), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
private[0:4] = b'mine'; print(private[0:4], open('size-1048593', 'rb').read(4), hashlib.sha256(private).hexdigest())
print(open('attributes').read())
`

// python is work for the interpreter, most of whose modules are mapped from the root.
const python = `
import json, sqlite3, decimal, zlib, re, ast, inspect, collections
decimal.getcontext().prec = 200
print(decimal.Decimal(2).sqrt())
src = inspect.getsource(collections) + inspect.getsource(ast)
print(len(ast.dump(ast.parse(src))), zlib.crc32(src.encode()), len(re.findall(r'\bdef (\w+)', src)))
db = sqlite3.connect(':memory:'); db.execute('create table t(a, b)')
db.executemany('insert into t values(?, ?)', ((i, str(i) * 20) for i in range(3000)))
print(json.dumps(db.execute('select sum(a), count(distinct b) from t').fetchall()))
`

// TestSameAsFolder: programs see the same in the image as in the folder, and can
// change it, while all memory is evicted all the time.
func TestSameAsFolder(t *testing.T) {
	folder, image := rootfs(t)
	rt := newRuntime(t)
	names := []string{"folder", "image"}
	outputs := map[string][]string{}
	commands := [][]string{
		{"python3", "-c", lister, "/usr", "/etc"},
		{"sh", "-c", "cd /usr && ls -1AR | sha256sum && ls -l --full-time /usr/odd/size-* && cat /usr/odd/many/* | sha256sum"},
		{"python3", "-c", python},
		{"python3", "-c", writer},
		{"sh", "-c", "cd /usr && ls -1AR | sha256sum && cat /usr/odd/size-* | sha256sum"},
	}
	for i, root := range []string{folder, image} {
		name := names[i]
		sb, err := rt.Run(within(t), name, harness.Bundle(t, spec(root, "sleep", "infinity")))
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range commands {
			outputs[name] = append(outputs[name], run(t, sb, c...))
		}
		checkStats(t, rt, sb, name == "folder")
		if err := sb.Delete(within(t)); err != nil {
			t.Error(err)
		}
	}
	for i, want := range outputs["folder"] {
		if len(want) < 20 {
			t.Errorf("%.100q prints next to nothing: %q", commands[i], want)
		}
		if got := outputs["image"][i]; got != want {
			t.Errorf("%.100q differs:\n%s", commands[i], difference(want, got))
		}
	}
	if n := strings.Count(outputs["image"][0], "\n"); n < 1000 {
		t.Errorf("only %d files were listed", n)
	}
}

// difference shows the first lines that differ.
func difference(want, got string) string {
	w, g := strings.Split(want, "\n"), strings.Split(got, "\n")
	var b strings.Builder
	for i, n := 0, 0; i < max(len(w), len(g)) && n < 5; i++ {
		line := func(s []string) string {
			if i < len(s) {
				return s[i]
			}
			return "(nothing)"
		}
		if line(w) != line(g) {
			fmt.Fprintf(&b, "folder: %s\nimage:  %s\n", line(w), line(g))
			n++
		}
	}
	return b.String()
}

// checkStats looks at what a sandbox says that it costs, and at its memory.
func checkStats(t *testing.T, rt *harness.Runtime, sb *fleet.Sandbox, gofer bool) {
	t.Helper()
	harness.Check(t, sb)
	st := harness.Stats(t, sb)
	o := st.Overhead
	t.Logf("%s: evicted %d pages, restored %d; overhead %+v", sb.ID(), st.EvictedPagesTotal, st.RestoredPagesTotal, o)
	if st.EvictedPagesTotal == 0 || st.RestoredPagesTotal == 0 || st.ChecksumFailures != 0 {
		t.Errorf("%s: evicted %d pages, restored %d, %d checksum failures", sb.ID(), st.EvictedPagesTotal, st.RestoredPagesTotal, st.ChecksumFailures)
	}
	if (o.Gofer != 0) != gofer || (sb.GoferPid() != 0) != gofer || (gofers(rt) != 0) != gofer {
		t.Errorf("%s: gofer of %d bytes, process %d, %d in all: want some: %v", sb.ID(), o.Gofer, sb.GoferPid(), gofers(rt), gofer)
	}
	// At most the binary and all of the image, in the Sentry and in a stub.
	if o.SentryPrivate == 0 || o.Stubs == 0 || o.PageTables == 0 || o.Files == 0 || o.Files > 250<<20 {
		t.Errorf("%s: overhead %+v", sb.ID(), o)
	}
	if st.HostBytes != st.OwnedBytes+o.Sum() {
		t.Errorf("%s: %d bytes in all, want %d + %d", sb.ID(), st.HostBytes, st.OwnedBytes, o.Sum())
	}
}

// server keeps files of the root open and mapped, and says what it sees of them.
const server = `
import hashlib, mmap, os, sys
opened = open('/usr/odd/size-1048593', 'rb'); opened.seek(1000)
shared = mmap.mmap(os.open('/usr/odd/sparse', os.O_RDONLY), 0, prot=mmap.PROT_READ)
private = mmap.mmap(os.open('/usr/odd/size-65536', os.O_RDONLY), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
private[4096:4100] = b'mine'
gone = open('/usr/odd/size-4095', 'rb'); os.unlink('/usr/odd/size-4095')
directory = os.open('/usr/odd/many', os.O_RDONLY)
written = open('/usr/odd/size-4097', 'a+b'); written.write(b'more'); written.flush()
os.chdir('/usr/odd/deep/er')
memory = bytearray(os.urandom(1 << 20)) * 4
h = lambda b: hashlib.sha256(b).hexdigest()[:16]
def answer(said):
    at = opened.tell(); gone.seek(0); written.seek(0)
    out = [h(opened.read()), h(shared), h(private), h(gone.read()), h(written.read()), h(memory),
        len(os.listdir(directory)), os.getcwd(), os.path.exists('/usr/odd/size-4095'), open('/usr/odd/owned').read()]
    opened.seek(at)
    import sqlite3, xml.dom.minidom                      # not loaded before
    out.append(xml.dom.minidom.parseString('<a>b</a>').toxml())
    if said: open('/usr/odd/' + said, 'w').write(said)
    out.append(sorted(n for n in os.listdir('/usr/odd') if n.startswith('clone')))
    return out
for line in sys.stdin: print(*answer(line.strip()), flush=True)
`

// TestClones: a checkpoint is restored twice with the image, and what was open and
// mapped of it is what it was. The image may meanwhile lie behind a link.
func TestClones(t *testing.T) {
	_, image := rootfs(t)
	rt := newRuntime(t)
	link := filepath.Join(harness.TempDir(t), "root.erofs")
	if err := os.Symlink(image, link); err != nil {
		t.Fatal(err)
	}
	b := harness.Bundle(t, spec(link, "python3", "-c", server))
	sb, err := rt.Run(within(t), "template", b)
	if err != nil {
		t.Fatal(err)
	}
	want := ask(t, sb, "")
	if !strings.Contains(want, "/usr/odd/deep/er False z <?xml") || !strings.HasSuffix(want, " []") {
		t.Errorf("the template says %q", want)
	}
	checkpoint := filepath.Join(harness.TempDir(t), "checkpoint")
	if err := sb.Checkpoint(within(t), checkpoint, fleet.CheckpointOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := sb.Delete(within(t)); err != nil {
		t.Error(err)
	}
	var clones []*fleet.Sandbox
	for i := range 2 {
		c, err := rt.Restore(within(t), fmt.Sprintf("clone-%d", i), b, checkpoint)
		if err != nil {
			t.Fatal(err)
		}
		clones = append(clones, c)
	}
	for round := range 3 {
		for i, c := range clones {
			name := ""
			if round == 1 {
				name = c.ID()
			}
			wantNow := want
			if round >= 1 {
				// Each has its own file, and not the other's.
				wantNow = strings.TrimSuffix(want, "[]") + fmt.Sprintf("['clone-%d']", i)
			}
			if got := ask(t, c, name); got != wantNow {
				t.Errorf("round %d: %s says\n%s, want\n%s", round, c.ID(), got, wantNow)
			}
			if _, err := c.Evict(within(t)); err != nil {
				t.Error(err)
			}
		}
	}
	for _, c := range clones {
		checkStats(t, rt, c, false)
		if harness.Stats(t, c).TemplateBytes == 0 {
			t.Errorf("%s shares nothing with its template", c.ID())
		}
		if err := c.Delete(within(t)); err != nil {
			t.Error(err)
		}
	}
}

// TestBadImages: an image that is missing, damaged or another is refused by its name,
// when a sandbox is started and when one is restored.
func TestBadImages(t *testing.T) {
	rootfs(t) // what it needs
	rt := newRuntime(t)
	dir := harness.TempDir(t)
	folder, path := filepath.Join(dir, "folder"), filepath.Join(dir, "root.erofs")
	if err := buildPrograms(folder, []string{"sh"}); err != nil {
		t.Fatal(err)
	}
	if err := fleet.MakeRootImage(within(t), path, folder); err != nil {
		t.Fatal(err)
	}
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	put := func(content []byte) {
		t.Helper()
		if err := os.WriteFile(path+".new", content, 0o644); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(path+".new", path); err != nil {
			t.Fatal(err)
		}
	}
	flip := func(at int) []byte {
		b := bytes.Clone(good)
		b[at] ^= 0x10
		return b
	}
	b := harness.Bundle(t, spec(path, "sh", "-c", "while read line; do echo you said $line; done"))
	sb, err := rt.Run(within(t), "first", b)
	if err != nil {
		t.Fatal(err)
	}
	checkpoint := filepath.Join(dir, "checkpoint")
	if err := sb.Checkpoint(within(t), checkpoint, fleet.CheckpointOptions{}); err != nil {
		t.Fatal(err)
	}
	// The same but for one byte of a file.
	one := filepath.Join(folder, "etc/passwd")
	was, err := os.Stat(one)
	if err != nil {
		t.Fatal(err)
	}
	edit := func(shell string) {
		t.Helper()
		if err := os.WriteFile(one, []byte("root:x:0:0:root:/root:/bin/"+shell+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(one, was.ModTime(), was.ModTime()); err != nil {
			t.Fatal(err)
		}
	}
	edit("bush")
	other := filepath.Join(dir, "other.erofs")
	if err := fleet.MakeRootImage(within(t), other, folder); err != nil {
		t.Fatal(err)
	}
	another, err := os.ReadFile(other)
	if err != nil {
		t.Fatal(err)
	}
	edit("bash")

	for _, tc := range []struct {
		name    string
		content []byte // nil for none
		want    string
		restore bool // refused when restored only
	}{
		{"missing", nil, "no such file", false},
		{"empty", []byte{}, "it is empty", false},
		{"short", good[:1100], "too small", false},
		{"truncated", good[:len(good)-1], "is truncated", false},
		{"half", good[:len(good)/2/4096*4096], "is truncated", false},
		{"damaged", flip(1024 + 36), "checksum", false},
		{"not an image", bytes.Repeat([]byte("text"), 4096), "magic", false},
		{"another", another, "is not the EROFS image that the checkpoint was made with", true},
	} {
		if tc.content == nil {
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
		} else {
			put(tc.content)
		}
		refused := func(what string, err error) {
			t.Helper()
			if err == nil {
				t.Errorf("%s: %s is accepted", tc.name, what)
			} else if !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("%s: %s: error %q does not have %s and %q in it", tc.name, what, err, path, tc.want)
			}
		}
		if !tc.restore {
			_, err := rt.Run(within(t), "run-"+strings.ReplaceAll(tc.name, " ", "-"), b)
			refused("run", err)
		}
		_, err := rt.Restore(within(t), "restore-"+strings.ReplaceAll(tc.name, " ", "-"), b, checkpoint)
		refused("restore", err)
	}
	// The image made anew of the same folder is the same.
	if err := fleet.MakeRootImage(within(t), path, folder); err != nil {
		t.Fatal(err)
	}
	if again, err := os.ReadFile(path); err != nil || !bytes.Equal(again, good) {
		t.Errorf("a second image of the same folder differs (%v)", err)
	}
	sb, err = rt.Restore(within(t), "again", b, checkpoint)
	if err != nil {
		t.Fatal(err)
	}
	if got := ask(t, sb, "hello"); got != "you said hello" {
		t.Errorf("the restored sandbox says %q", got)
	}
}

// TestMounts: a folder of the host's needs a gofer again, another image does not; and
// a root without an overlay cannot be written to.
func TestMounts(t *testing.T) {
	_, image := rootfs(t)
	rt := newRuntime(t)
	dir := harness.TempDir(t)
	if err := os.WriteFile(filepath.Join(dir, "file"), []byte("of the host"), 0o644); err != nil {
		t.Fatal(err)
	}
	second := filepath.Join(harness.TempDir(t), "second.erofs")
	if err := fleet.MakeRootImage(within(t), second, dir); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		name  string
		mount fleet.Mount
		gofer bool
	}{
		{"image", fleet.Mount{Type: "erofs", Source: second, Target: "/mnt"}, false},
		{"bind", fleet.Mount{Source: dir, Target: "/mnt"}, true},
	} {
		s := spec(image, "sleep", "infinity")
		s.Mounts = []fleet.Mount{tc.mount}
		s.ReadonlyRootfs = true
		sb, err := rt.Run(within(t), tc.name, harness.Bundle(t, s))
		if err != nil {
			t.Fatalf("%s: %v", tc.name, err)
		}
		if got := run(t, sb, "cat", "/mnt/file"); got != "of the host" {
			t.Errorf("%s: the file holds %q", tc.name, got)
		}
		res, err := sb.Exec(within(t), "sh", "-c", ">/etc/file")
		if err != nil || res.ExitCode == 0 || !strings.Contains(res.Stderr, "Read-only") {
			t.Errorf("%s: writing to a read-only root: %+v, %v", tc.name, res, err)
		}
		if (sb.GoferPid() != 0) != tc.gofer || (gofers(rt) != 0) != tc.gofer {
			t.Errorf("%s: the gofer is process %d, %d in all: want one: %v", tc.name, sb.GoferPid(), gofers(rt), tc.gofer)
		}
		if err := sb.Delete(within(t)); err != nil {
			t.Error(err)
		}
	}
}
