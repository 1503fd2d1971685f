package observe

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"testing"
	"time"

	"runsc-agentzip/pkg/fleet"
	"runsc-agentzip/test/harness"
)

// bounded is how long a command may take here that asks sandboxes of which some do not
// answer: a hundred times as long as it should, since the machine may be busy. One that
// waits for them would never end.
const bounded = time.Minute

func TestMain(m *testing.M) { os.Exit(harness.Main(m, "observe")) }

func newRuntime(t testing.TB) *harness.Runtime {
	t.Helper()
	return harness.NewRuntime(t, harness.Options{Binary: harness.UnderTest(t, "agentzip-idle").Path, Patience: bounded})
}

// start runs a shell that echoes lines.
func start(t testing.TB, rt *harness.Runtime, id string, opts ...fleet.StartOption) *fleet.Sandbox {
	t.Helper()
	return rt.Start(t, id, harness.Bundle(t, fleet.Spec{
		Rootfs:         "/",
		ReadonlyRootfs: true,
		Args:           []string{"/bin/sh", "-c", "echo READY; while read line; do echo $line; done"},
		Hostname:       "observe",
	}), opts...)
}

// command prepares `runsc-agentzip agentzip ARGS` for the sandboxes of a runtime.
func command(ctx context.Context, rt *harness.Runtime, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, rt.Binary(), append([]string{"--root=" + rt.Root(), "agentzip"}, args...)...)
	cmd.WaitDelay = time.Second
	return cmd
}

// output runs a command and returns what it prints.
func output(t testing.TB, rt *harness.Runtime, args ...string) string {
	t.Helper()
	start := time.Now()
	var out, errOut bytes.Buffer
	cmd := command(harness.Within(t, bounded), rt, args...)
	cmd.Stdout, cmd.Stderr = &out, &errOut
	if err := cmd.Run(); err != nil {
		t.Fatalf("agentzip %q: %v: %s%s", args, err, out.Bytes(), errOut.Bytes())
	}
	if errOut.Len() != 0 {
		t.Errorf("agentzip %q says %s", args, errOut.Bytes())
	}
	t.Logf("agentzip %q took %v", args, time.Since(start).Round(time.Millisecond))
	return out.String()
}

// freeze stops a sandbox's process until the test ends or thaw is called.
func freeze(t testing.TB, pid int) (thaw func()) {
	t.Helper()
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	thaw = sync.OnceFunc(func() { _ = syscall.Kill(pid, syscall.SIGCONT) })
	harness.AtExit(t, thaw)
	return thaw
}

// killForGood kills a sandbox's process and keeps runsc, its parent, from removing
// what is left, as if that were killed, too.
func killForGood(t testing.TB, sb *fleet.Sandbox) {
	t.Helper()
	freeze(t, harness.Parent(t, sb.Pid()))
	if err := syscall.Kill(sb.Pid(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
}
