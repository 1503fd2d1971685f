package harness

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// childEnv has TestChild be a suite of its own, that waits in a test.
const childEnv = "AGENTZIP_HARNESS_CHILD"

func TestMain(m *testing.M) { os.Exit(Main(m, "harness")) }

func TestChild(t *testing.T) {
	if os.Getenv(childEnv) == "" {
		t.Skip("it is for TestInterrupted and TestKilled")
	}
	AtExit(nil, func() { fmt.Println("1") })
	var dirs []string
	for _, dir := range []string{TempDir(t), CoveredTempDir(t)} {
		if err := os.WriteFile(filepath.Join(dir, "file"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		dirs = append(dirs, filepath.Dir(dir))
	}
	t.Run("ended", func(t *testing.T) { AtExit(t, func() { fmt.Println("0") }) })
	AtExit(t, func() { fmt.Println("2") })
	AtExit(t, func() { fmt.Println("3") })
	fmt.Println(strings.Join(dirs, " "))
	_, _ = io.Copy(io.Discard, os.Stdin)
}

// child starts one and waits until it has what there is to remove: its folder, and the
// one below /tmp.
func child(t *testing.T) (cmd *exec.Cmd, dir, covered string, out *bufio.Reader) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd = exec.Command(self, "-test.run=^TestChild$")
	cmd.Env = append(os.Environ(), childEnv+"=1")
	// It ends when we do.
	if _, err := cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	pipe, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	out = bufio.NewReader(pipe)
	for {
		line, err := out.ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		if strings.HasPrefix(line, "/") {
			dir, covered, _ = strings.Cut(strings.TrimSpace(line), " ")
			return cmd, dir, covered, out
		}
	}
}

// there tells whether a folder is there.
func there(t *testing.T, dir string) bool {
	t.Helper()
	_, err := os.Lstat(dir)
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	return err == nil
}

func TestInterrupted(t *testing.T) {
	cmd, dir, covered, out := child(t)
	for _, d := range []string{dir, covered} {
		if !there(t, filepath.Join(d, "1", "file")) {
			t.Fatalf("%s is empty", d)
		}
	}
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	var lines []string
	for {
		line, err := out.ReadString('\n')
		if err != nil {
			break
		}
		lines = append(lines, strings.TrimSpace(line))
	}
	if want := []string{"3", "2", "1"}; !slices.Equal(lines, want) {
		t.Errorf("done: %q, want %q", lines, want)
	}
	if err := cmd.Wait(); err == nil || cmd.ProcessState.ExitCode() != 1 {
		t.Errorf("it ended with %v", err)
	}
	if there(t, dir) || there(t, covered) {
		t.Errorf("%s or %s is there", dir, covered)
	}
}

// TestKilled: what a killed run has left is removed, and nothing of one that runs.
func TestKilled(t *testing.T) {
	own, ownCovered := TempDir(t), CoveredTempDir(t)
	lives, hers, hersCovered, _ := child(t)
	killed, dir, covered, _ := child(t)
	check := func(want bool, dirs ...string) {
		t.Helper()
		for _, d := range dirs {
			if there(t, d) != want {
				t.Errorf("%s: there is %v, want %v", d, !want, want)
			}
		}
	}
	removeAbandoned()
	check(true, own, ownCovered, hers, hersCovered, dir, covered)
	_ = killed.Process.Kill()
	_ = killed.Wait()
	removeAbandoned()
	check(false, dir, covered)
	check(true, own, ownCovered, hers, hersCovered)
	_ = lives.Process.Kill()
	_ = lives.Wait()
	removeAbandoned()
	check(false, hers, hersCovered)
	check(true, own, ownCovered)
}

// TestKilledWithMounts: what a killed run has mounted is unmounted, and nothing else is.
// Nothing is removed that is mounted still.
func TestKilledWithMounts(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("mounting needs root")
	}
	try := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	tmpfs := func(dir string) {
		t.Helper()
		if err := os.Mkdir(dir, 0o755); err != nil && !os.IsExist(err) {
			t.Fatal(err)
		}
		if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=1m"); err == unix.EPERM {
			t.Skip("nothing can be mounted here")
		} else if err != nil {
			t.Fatal(err)
		}
	}
	file := func(dir string) string {
		t.Helper()
		path := filepath.Join(dir, "precious")
		try(os.WriteFile(path, nil, 0o600))
		return path
	}

	// The host's, which shares its mounts with those it is bound to.
	host := filepath.Join(TempDir(t), "host")
	tmpfs(host)
	AtExit(t, func() {
		if err := unix.Unmount(host, unix.MNT_DETACH); err != nil {
			t.Errorf("unmounting %s: %v", host, err)
		}
	})
	try(unix.Mount("", host, "", unix.MS_SHARED, ""))
	below := filepath.Join(host, "below")
	tmpfs(below)
	deep := filepath.Join(below, "deep")
	tmpfs(deep)
	precious := []string{file(host), file(below), file(deep)}
	kept := func() {
		t.Helper()
		for _, path := range precious {
			if !there(t, path) {
				t.Fatalf("%s is gone", path)
			}
		}
	}

	killed, dir, _, _ := child(t)
	in := filepath.Join(dir, "1")
	tmpfs(filepath.Join(in, `a b\c`))
	tmpfs(filepath.Join(in, `a b\c`))
	tmpfs(filepath.Join(in, `a b\c`, "d"))
	bound, hidden := filepath.Join(in, "bound"), filepath.Join(in, "hidden")
	for _, d := range []string{bound, hidden} {
		try(os.Mkdir(d, 0o755))
		try(unix.Mount(host, d, "", unix.MS_BIND|unix.MS_REC, ""))
	}
	// Or what covers it would cover all that share with it.
	try(unix.Mount("", hidden, "", unix.MS_PRIVATE, ""))
	tmpfs(hidden)
	tmpfs(filepath.Join(hidden, "below"))
	try(os.Symlink(host, filepath.Join(in, "link")))
	AtExit(t, func() { _ = unmountBelow(dir) })
	mounted := func() int {
		t.Helper()
		mounts, err := mountsBelow(dir)
		try(err)
		return len(mounts)
	}
	const all = 3 + 3 + 3 + 2
	if n := mounted(); n != all {
		t.Fatalf("%d mounts, want %d", n, all)
	}

	removeAbandoned()
	if n := mounted(); n != all {
		t.Errorf("of %d mounts of a run that lives, %d are left", all, n)
	}
	_ = killed.Process.Kill()
	_ = killed.Wait()
	withoutMounting(t, func() { removeAbandoned() })
	if n := mounted(); n != all || !there(t, filepath.Join(in, "file")) {
		t.Errorf("who cannot unmount left %d mounts of %d", n, all)
	}
	kept()
	try(os.Chown(dir, 1, 1))
	removeAbandoned()
	if n := mounted(); n != all || !there(t, filepath.Join(in, "file")) {
		t.Errorf("in another user's folder there are %d mounts of %d", n, all)
	}
	kept()
	try(os.Chown(dir, 0, 0))
	removeAbandoned()
	if n := mounted(); n != 0 || there(t, dir) {
		t.Errorf("%s is there, with %d mounts", dir, n)
	}
	kept()
}

// withoutMounting calls f on a thread that cannot mount or unmount.
func withoutMounting(t *testing.T, f func()) {
	t.Helper()
	done := make(chan error)
	go func() {
		// Never unlocked: the thread ends with the goroutine.
		runtime.LockOSThread()
		header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var caps [2]unix.CapUserData
		err := unix.Capget(&header, &caps[0])
		if err == nil {
			caps[0].Effective &^= 1 << unix.CAP_SYS_ADMIN
			err = unix.Capset(&header, &caps[0])
		}
		if err == nil {
			f()
		}
		done <- err
	}()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

func TestParseMounts(t *testing.T) {
	const info = `22 1 254:0 / / rw - ext4 /dev/vda rw
90 22 0:4 / /run/a rw - tmpfs tmpfs rw
91 22 0:4 / /run/ab rw - tmpfs tmpfs rw
92 90 0:4 / /run/a/x\040y\134z\011\012 rw - tmpfs tmpfs rw
92 90 0:4 / /run/a/x-1 rw - tmpfs tmpfs rw
93 90 0:4 / /run/a/x rw - tmpfs tmpfs rw
93 90 0:4 / /run/a/x rw - tmpfs tmpfs rw
94 93 0:4 / /run/a/x/\09\ rw - tmpfs tmpfs rw
95 22 0:4 / /srv/run/a rw - tmpfs tmpfs rw
short line
`
	want := []string{"/run/a", "/run/a/x", "/run/a/x", "/run/a/x y\\z\t\n", "/run/a/x-1", `/run/a/x/\09\`}
	if got := parseMounts(info, "/run/a"); !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestAtExit(t *testing.T) {
	var order []int
	for i := range 2 {
		t.Run("", func(t *testing.T) {
			AtExit(t, func() { order = append(order, i*10) })
			AtExit(t, func() { order = append(order, i*10+1) })
		})
	}
	if want := []int{1, 0, 11, 10}; !slices.Equal(order, want) {
		t.Errorf("done: %v, want %v", order, want)
	}
	undo.Lock()
	defer undo.Unlock()
	if n := len(undo.fns); n != 0 {
		t.Errorf("%d are left to do", n)
	}
}

func TestProcesses(t *testing.T) {
	cmd := exec.Command("sleep", "60")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p, ok := readProcess(cmd.Process.Pid)
	if !ok || p.Zombie || p.Parent != os.Getpid() || !p.lives() || Parent(t, p.PID) != os.Getpid() {
		t.Errorf("%+v, %v", p, ok)
	}
	other := p
	other.start += "1"
	if other.lives() {
		t.Error("a process that began at another time is taken for it")
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err == nil {
		t.Error("it was not killed")
	}
	if p.lives() {
		t.Error("it lives")
	}
}
