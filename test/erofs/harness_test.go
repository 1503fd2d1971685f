package erofs

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"runsc-agentzip/pkg/fleet"
	"runsc-agentzip/test/harness"
)

// bounded is how long anything may take here, on a machine that is busy.
const bounded = 3 * time.Minute

func TestMain(m *testing.M) { os.Exit(harness.Main(m, "erofs")) }

func within(t testing.TB) context.Context { return harness.Within(t, bounded) }

// newRuntime returns a runtime that evicts all the time.
func newRuntime(t testing.TB) *harness.Runtime {
	t.Helper()
	return harness.NewRuntime(t, harness.Options{
		Binary: harness.UnderTest(t, "agentzip-idle").Path,
		Flags:  []string{"--agentzip-test-evict-every=300ms"},
	})
}

// gofers counts the gofer processes of a runtime's sandboxes.
func gofers(rt *harness.Runtime) (n int) {
	for _, line := range harness.CommandLines(rt.Root()) {
		if strings.HasPrefix(line, "runsc-gofer ") {
			n++
		}
	}
	return n
}

// ---- the root file system, as a folder and as an image --------------------------

var root struct {
	sync.Once
	folder, image string
	err           error
}

// rootfs returns a root file system as a folder and as an image of it.
func rootfs(t testing.TB) (folder, image string) {
	t.Helper()
	harness.NeedRoot(t)
	for _, tool := range []string{"mkfs.erofs", "/usr/bin/python3", "ldd", "cp"} {
		if _, err := exec.LookPath(tool); err != nil {
			harness.Skip(t, "%v: make deps installs the packages that have it", err)
		}
	}
	root.Do(func() {
		var dir string
		if dir, root.err = harness.RunDir(); root.err != nil {
			return
		}
		root.folder, root.image = filepath.Join(dir, "folder"), filepath.Join(dir, "root.erofs")
		if root.err = buildRoot(root.folder); root.err != nil {
			return
		}
		ctx, cancel := context.WithTimeout(context.Background(), bounded)
		defer cancel()
		root.err = fleet.MakeRootImage(ctx, root.image, root.folder)
	})
	if root.err != nil {
		t.Fatal(root.err)
	}
	return root.folder, root.image
}

// programs are what the guests run.
var programs = []string{"bash", "sh", "ls", "cat", "sha256sum", "sleep", "sort", "python3"}

// buildRoot copies the programs and all that they need, and adds what file systems
// get wrong.
func buildRoot(dir string) error {
	if err := buildPrograms(dir, programs); err != nil {
		return err
	}
	return buildOddities(filepath.Join(dir, "usr/odd"))
}

// buildPrograms makes a root file system of some programs and all that they need.
func buildPrograms(dir string, programs []string) error {
	for _, d := range []string{"dev", "etc", "proc", "sys", "tmp", "root", "mnt", "usr/bin", "usr/lib", "usr/lib64"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			return err
		}
	}
	for _, link := range []string{"bin", "lib", "lib64"} {
		if err := os.Symlink("usr/"+link, filepath.Join(dir, link)); err != nil {
			return err
		}
	}
	var linked []string
	if slices.Contains(programs, "python3") {
		modules, err := copyPython(dir)
		if err != nil {
			return err
		}
		linked = modules
	}
	for _, name := range programs {
		// Debian's, whatever else PATH has.
		path := "/usr/bin/" + name
		if err := copyFile(path, filepath.Join(dir, "usr/bin", name)); err != nil {
			return err
		}
		linked = append(linked, path)
	}
	out, _ := exec.Command("ldd", linked...).Output() // of a static one it complains
	libraries := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)(/\S+) \(0x[0-9a-f]+\)$`).FindAllStringSubmatch(string(out), -1) {
		libraries[m[1]] = true
	}
	for lib := range libraries {
		// /lib64/ld-linux-x86-64.so.2 is where the program looks.
		dst := lib
		if !strings.HasPrefix(dst, "/usr/") {
			dst = "/usr" + dst
		}
		if err := os.MkdirAll(filepath.Join(dir, filepath.Dir(dst)), 0o755); err != nil {
			return err
		}
		if err := copyFile(lib, filepath.Join(dir, dst)); err != nil {
			return err
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "etc/passwd"), []byte("root:x:0:0:root:/root:/bin/bash\n"), 0o644); err != nil {
		return err
	}
	return nil
}

// copyPython copies Python's library and returns the shared objects in it.
func copyPython(dir string) ([]string, error) {
	out, err := exec.Command("/usr/bin/python3", "-c", "import sysconfig; print(sysconfig.get_path('stdlib'), sysconfig.get_config_var('DESTSHARED'))").Output()
	if err != nil {
		return nil, fmt.Errorf("python3: %w", err)
	}
	stdlib := strings.Fields(string(out))
	if len(stdlib) != 2 {
		return nil, fmt.Errorf("python3 says that its library is %q", out)
	}
	if err := os.MkdirAll(filepath.Join(dir, filepath.Dir(stdlib[0])), 0o755); err != nil {
		return nil, err
	}
	if out, err := exec.Command("cp", "-a", stdlib[0], filepath.Join(dir, stdlib[0])).CombinedOutput(); err != nil {
		return nil, fmt.Errorf("cp: %w: %s", err, out)
	}
	// Python's own tests are as large as all the rest.
	for _, part := range []string{"test", "idlelib", "lib2to3", "ensurepip", "distutils"} {
		if err := os.RemoveAll(filepath.Join(dir, stdlib[0], part)); err != nil {
			return nil, err
		}
	}
	return filepath.Glob(filepath.Join(stdlib[1], "*.so"))
}

func copyFile(from, to string) error {
	b, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	return os.WriteFile(to, b, 0o755)
}

// buildOddities makes files whose sizes, kinds, names, owners and times are at the
// ends of what there is.
func buildOddities(dir string) error {
	var errs []error
	do := func(err error) { errs = append(errs, err) }
	path := func(name string) string { return filepath.Join(dir, name) }
	do(os.MkdirAll(path("deep/er/than/most"), 0o755))
	for _, size := range []int{0, 1, 4095, 4096, 4097, 65536, 1<<20 + 17} {
		b := make([]byte, size)
		for i := range b {
			b[i] = byte(i*7 + i>>9)
		}
		do(os.WriteFile(path(fmt.Sprintf("size-%d", size)), b, 0o644))
	}
	do(os.WriteFile(path("sparse"), []byte("begin"), 0o600))
	do(os.Truncate(path("sparse"), 3<<20))
	do(os.WriteFile(path("name with spaces, ünd more"), []byte("x"), 0o640))
	do(os.WriteFile(path(strings.Repeat("n", 200)), []byte("y"), 0o644))
	do(os.Symlink("size-1", path("link")))
	do(os.Symlink(strings.Repeat("long/", 200), path("long-link")))
	do(os.Link(path("size-4097"), path("hard-link")))
	do(unix.Mkfifo(path("fifo"), 0o600))
	do(os.WriteFile(path("owned"), []byte("z"), 0o644))
	do(os.Lchown(path("owned"), 70001, 131072))
	do(os.Chmod(path("owned"), 0o751|os.ModeSetuid|os.ModeSetgid))
	do(os.Mkdir(path("sticky"), 0o777))
	do(os.Chmod(path("sticky"), 0o777|os.ModeSticky))
	// A directory of many blocks.
	do(os.Mkdir(path("many"), 0o755))
	for i := range 400 {
		do(os.WriteFile(path(fmt.Sprintf("many/file-with-a-name-of-some-length-%d", i)), fmt.Appendln(nil, i), 0o644))
	}
	for name, at := range map[string]time.Time{
		"size-1": time.Unix(1, 1), "size-4096": time.Unix(1<<31+5, 999999999), "deep": time.Unix(981173106, 123456789),
	} {
		do(os.Chtimes(path(name), at, at))
	}
	// gVisor does not open a file of an image that has one of these.
	do(os.WriteFile(path("attributes"), []byte("readable"), 0o644))
	if err := unix.Setxattr(path("attributes"), "user.agentzip", []byte("value"), 0); !errors.Is(err, unix.ENOTSUP) {
		do(err)
	}
	return errors.Join(errs...)
}

// spec is a container with that root: a folder, or a file that is an image.
func spec(root string, args ...string) fleet.Spec {
	s := fleet.Spec{Args: args, Hostname: "erofs", Env: []string{"PYTHONDONTWRITEBYTECODE=1", "PYTHONHASHSEED=0", "LC_ALL=C.UTF-8"}}
	if fi, err := os.Stat(root); err == nil && fi.IsDir() {
		s.Rootfs = root
	} else {
		s.RootImage = root
	}
	return s
}

// run runs a command in a sandbox, which must succeed, and returns what it prints.
func run(t testing.TB, sb *fleet.Sandbox, args ...string) string {
	t.Helper()
	res, err := sb.Exec(within(t), args...)
	if err != nil || res.ExitCode != 0 {
		t.Fatalf("%s: %q: %v, exit code %d\n%s%s", sb.ID(), args, err, res.ExitCode, res.Stdout, res.Stderr)
	}
	return res.Stdout
}

func ask(t testing.TB, sb *fleet.Sandbox, line string) string {
	t.Helper()
	answer, err := sb.Request(within(t), line)
	if err != nil {
		t.Fatalf("%s: %q: %v\n%s", sb.ID(), line, err, sb.Stderr())
	}
	return answer
}
