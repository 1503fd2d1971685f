package harness

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
)

// childEnv has TestChild be a suite of its own, that waits in a test.
const childEnv = "AGENTZIP_HARNESS_CHILD"

func TestMain(m *testing.M) { os.Exit(Main(m, "harness")) }

func TestChild(t *testing.T) {
	if os.Getenv(childEnv) == "" {
		t.Skip("it is for TestInterrupted and TestKilled")
	}
	AtExit(nil, func() { fmt.Println("1") })
	dir := TempDir(t)
	if err := os.WriteFile(filepath.Join(dir, "file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	t.Run("ended", func(t *testing.T) { AtExit(t, func() { fmt.Println("0") }) })
	AtExit(t, func() { fmt.Println("2") })
	AtExit(t, func() { fmt.Println("3") })
	fmt.Println(filepath.Dir(dir))
	_, _ = io.Copy(io.Discard, os.Stdin)
}

// child starts one and waits until it has what there is to remove.
func child(t *testing.T) (cmd *exec.Cmd, dir string, out *bufio.Reader) {
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
			return cmd, strings.TrimSpace(line), out
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
	cmd, dir, out := child(t)
	if !there(t, filepath.Join(dir, "1", "file")) {
		t.Fatalf("%s is empty", dir)
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
	if there(t, dir) {
		t.Errorf("%s is there", dir)
	}
}

// TestKilled: what a killed run has left is removed, and nothing of one that runs.
func TestKilled(t *testing.T) {
	own := TempDir(t)
	lives, hers, _ := child(t)
	killed, dir, _ := child(t)
	removeAbandoned(common.parent, scratchPrefix())
	for _, d := range []string{own, hers, dir} {
		if !there(t, d) {
			t.Errorf("%s is gone", d)
		}
	}
	_ = killed.Process.Kill()
	_ = killed.Wait()
	removeAbandoned(common.parent, scratchPrefix())
	if there(t, dir) || !there(t, own) || !there(t, hers) {
		t.Errorf("%s should be gone, %s and %s should not", dir, own, hers)
	}
	_ = lives.Process.Kill()
	_ = lives.Wait()
	removeAbandoned(common.parent, scratchPrefix())
	if there(t, hers) || !there(t, own) {
		t.Errorf("%s should be gone, %s should not", hers, own)
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
