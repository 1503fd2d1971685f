package fleet

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"runsc-agentzip/pkg/client"
)

// binaryEnv names the runsc that the end-to-end tests drive. They are skipped
// without it: they need root and a machine that can run sandboxes.
const binaryEnv = "FLEET_RUNSC"

// TestEndToEnd takes one sandbox through its whole life: run, request, exec,
// measure, checkpoint, restore twice, delete.
func TestEndToEnd(t *testing.T) {
	binary := os.Getenv(binaryEnv)
	if binary == "" {
		t.Skipf("set %s to a runsc binary to run this test", binaryEnv)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()

	rt, err := New(Options{Binary: binary, Log: testWriter{t}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := rt.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
		if _, err := os.Stat(rt.Root()); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("root directory remains: %v", err)
		}
		if err := rt.Close(); err != nil {
			t.Errorf("second Close: %v", err)
		}
	}()

	for flag, want := range map[string]bool{"network": true, "no-such-flag": false} {
		if got, err := rt.HasFlag(ctx, flag); err != nil || got != want {
			t.Errorf("flag %s: %v, %v", flag, got, err)
		}
	}

	dir := t.TempDir()
	bundle := filepath.Join(dir, "bundle")
	// A shell loop is the smallest line server every root file system has; the
	// counter shows that memory survives the checkpoint.
	spec := Spec{
		Rootfs:         "/",
		ReadonlyRootfs: true,
		Hostname:       "fleet-test",
		Args:           []string{"/bin/sh", "-c", `n=0; while read -r line; do n=$((n+1)); echo "$n $line"; done; exit 7`},
	}
	if err := WriteBundle(bundle, spec); err != nil {
		t.Fatal(err)
	}
	sb, err := rt.Run(ctx, "template", bundle)
	if err != nil {
		t.Fatal(err)
	}
	request := func(s *Sandbox, line, want string) {
		t.Helper()
		got, err := s.Request(ctx, line)
		if err != nil {
			t.Fatal(err)
		}
		if got != want {
			t.Fatalf("Request(%q) = %q, want %q", line, got, want)
		}
	}
	request(sb, "hello", "1 hello")

	res, err := sb.Exec(ctx, "/bin/sh", "-c", "hostname; echo oops >&2; exit 3")
	if err != nil {
		t.Fatal(err)
	}
	if strings.TrimSpace(res.Stdout) != "fleet-test" || strings.TrimSpace(res.Stderr) != "oops" || res.ExitCode != 3 {
		t.Fatalf("Exec = %+v", res)
	}

	m, err := sb.Memory()
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("memory: %+v", m)
	if m.GuestMemfd == 0 || m.Sentry.PSS == 0 || m.Gofer.PSS == 0 || m.Stubs.AddressSpaces == 0 {
		t.Errorf("a part of the memory was not found: %+v", m)
	}

	image := filepath.Join(dir, "image")
	if err := sb.Checkpoint(ctx, image, CheckpointOptions{}); err != nil {
		t.Fatal(err)
	}
	if !sb.Exited() {
		t.Error("sandbox still runs after the checkpoint")
	}
	if err := sb.Delete(ctx); err != nil {
		t.Fatal(err)
	}

	var clones []*Sandbox
	for _, id := range []string{"clone-1", "clone-2"} {
		c, err := rt.Restore(ctx, id, bundle, image)
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%s restored in %v", id, c.StartDuration())
		clones = append(clones, c)
	}
	ref, err := clones[0].SnapshotGuest(filepath.Join(dir, "reference"))
	if err != nil {
		t.Fatal(err)
	}
	defer ref.Close()
	request(clones[0], "again", "2 again")
	request(clones[1], "other", "2 other")
	for _, c := range clones {
		d, err := c.DiffGuest(ref)
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%s against the reference: %+v", c.ID(), d)
		// agentzip may leave equal pages out of the memory file altogether.
		if _, err := c.Stats(ctx); errors.Is(err, ErrNoAgentzip) && (d.Same == 0 || d.Same < d.Different) {
			t.Errorf("%s: clones of one image should be mostly equal: %+v", c.ID(), d)
		}
	}

	// The memory backend, where the binary has one.
	if st, err := clones[0].Stats(ctx); errors.Is(err, ErrNoAgentzip) {
		t.Logf("no agentzip commands in %s", binary)
	} else if err != nil {
		t.Errorf("Stats: %v", err)
	} else {
		if st.GuestBytes == 0 || st.OwnedBytes == 0 {
			t.Errorf("stats are empty: %+v", st)
		}
		m, err := clones[0].Memory()
		if err != nil {
			t.Error(err)
		} else if shared := m.Template != nil; shared != (st.TemplateBytes > 0) {
			t.Errorf("it says that it shares %d bytes of template, from outside it looks like %+v", st.TemplateBytes, m.Template)
		} else if shared {
			cached, err := CachedBytes(m.Template.File)
			if err != nil || cached == 0 {
				t.Errorf("cached bytes of %s: %d, %v", m.Template.File, cached, err)
			}
		}
		rep, err := clones[0].Evict(ctx)
		if err != nil {
			t.Errorf("Evict: %v", err)
		}
		chk, err := clones[0].Check(ctx)
		if err != nil || len(chk.Problems) > 0 {
			t.Errorf("Check: %+v, %v", chk, err)
		}
		t.Logf("evicted %+v, checked %+v", rep, chk)
		request(clones[0], "after eviction", "3 after eviction")
	}

	// The guest's own exit code comes through.
	if err := clones[0].CloseStdin(); err != nil {
		t.Fatal(err)
	}
	if code, err := clones[0].Wait(ctx); err != nil || code != 7 {
		t.Errorf("Wait = %d, %v, want 7", code, err)
	}
	if _, err := clones[0].Request(ctx, "gone"); err == nil {
		t.Error("Request to an ended sandbox succeeded")
	}

	// A quick command, its output and code.
	var out strings.Builder
	spec.Args = []string{"/bin/sh", "-c", "echo quick; exit 5"}
	quickBundle := filepath.Join(dir, "quick")
	if err := WriteBundle(quickBundle, spec); err != nil {
		t.Fatal(err)
	}
	q, err := rt.Run(ctx, "quick", quickBundle, WithOutput(&out, nil))
	if err != nil {
		t.Fatal(err)
	}
	if code, err := q.Wait(ctx); err != nil || code != 5 || out.String() != "quick\n" {
		t.Errorf("quick: code %d, error %v, output %q", code, err, out.String())
	}

	// runsc's own failures are errors that say why.
	spec.Args = []string{"/no/such/command"}
	badBundle := filepath.Join(dir, "bad")
	if err := WriteBundle(badBundle, spec); err != nil {
		t.Fatal(err)
	}
	if _, err := rt.Run(ctx, "bad", badBundle); err == nil || !strings.Contains(err.Error(), "/no/such/command") {
		t.Errorf("running a missing command: %v", err)
	}
}

// TestEndToEndLauncher starts a sandbox through another program.
func TestEndToEndLauncher(t *testing.T) {
	binary := os.Getenv(binaryEnv)
	if binary == "" {
		t.Skipf("set %s to a runsc binary to run this test", binaryEnv)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	rt, err := New(Options{Binary: binary, Log: testWriter{t}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := rt.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	}()
	bundle := filepath.Join(t.TempDir(), "bundle")
	if err := WriteBundle(bundle, Spec{Rootfs: "/", ReadonlyRootfs: true, Args: []string{"/bin/cat"}}); err != nil {
		t.Fatal(err)
	}

	// What the launcher does to its process is the case for runsc's and, by
	// inheritance, for the sandbox's.
	sb, err := rt.Run(ctx, "launched", bundle, WithLauncher("/bin/sh", "-c", `ulimit -c 12 && exec "$@"`, "launcher"))
	if err != nil {
		t.Fatal(err)
	}
	if got, err := sb.Request(ctx, "hello"); err != nil || got != "hello" {
		t.Errorf("Request = %q, %v", got, err)
	}
	runsc := sb.ownProcesses()[procRunsc]
	if exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", runsc.PID)); err != nil || exe != rt.Binary() {
		t.Errorf("the process that was started is %s, %v, want %s", exe, err, rt.Binary())
	}
	if identify(runsc.PID) != runsc {
		t.Error("the recorded process is another one now")
	}
	for _, pid := range []int{runsc.PID, sb.GoferPid()} {
		limits, err := os.ReadFile(fmt.Sprintf("/proc/%d/limits", pid))
		if err != nil || !strings.Contains(string(limits), "Max core file size        6144 ") {
			t.Errorf("process %d was not started through the launcher: %v\n%s", pid, err, limits)
		}
	}
	if err := sb.Delete(ctx); err != nil {
		t.Error(err)
	}

	// Its failures are errors that say why.
	if _, err := rt.Run(ctx, "refused", bundle, WithLauncher("/bin/sh", "-c", "echo no way >&2; exit 128")); err == nil || !strings.Contains(err.Error(), "no way") {
		t.Errorf("a launcher that fails: %v", err)
	}
	if _, err := rt.Run(ctx, "missing", bundle, WithLauncher("/no/such/launcher")); err == nil || !strings.Contains(err.Error(), "/no/such/launcher") {
		t.Errorf("a missing launcher: %v", err)
	}
}

// TestEndToEndIDs: runsc deletes n-10 when it is told to delete an n-1 that is gone. No
// two sandboxes get such ids.
func TestEndToEndIDs(t *testing.T) {
	binary := os.Getenv(binaryEnv)
	if binary == "" {
		t.Skipf("set %s to a runsc binary to run this test", binaryEnv)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	rt, err := New(Options{Binary: binary, Log: testWriter{t}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := rt.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	}()
	bundle := filepath.Join(t.TempDir(), "bundle")
	if err := WriteBundle(bundle, Spec{Rootfs: "/", ReadonlyRootfs: true, Args: []string{"/bin/cat"}}); err != nil {
		t.Fatal(err)
	}
	start := func(id string) *Sandbox {
		t.Helper()
		s, err := rt.Run(ctx, id, bundle)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	lives := func(s *Sandbox) {
		t.Helper()
		if got, err := s.Request(ctx, "hello"); err != nil || got != "hello" {
			t.Errorf("%s: %q, %v", s.ID(), got, err)
		}
	}

	// What it is about: if runsc does not do it any more, none of this is needed.
	victim := start("n-10")
	lives(victim)
	if _, err := rt.client.Command(ctx, "delete", "-force", "n-1"); err != nil {
		t.Error(err)
	}
	if _, err := victim.Wait(ctx); err != nil {
		t.Errorf("runsc deleted n-1, not n-10: %v", err)
	}
	if err := victim.Delete(ctx); err != nil {
		t.Error(err)
	}

	// One that has ended is not known to runsc, and is still to be deleted.
	one := start("n-1")
	if err := one.CloseStdin(); err != nil {
		t.Error(err)
	}
	if code, err := one.Wait(ctx); err != nil || code != 0 {
		t.Errorf("n-1 ended with %d, %v", code, err)
	}
	if _, err := rt.Run(ctx, "n-10", bundle); !errors.Is(err, client.ErrAmbiguous) {
		t.Errorf("n-10 besides n-1: %v", err)
	}
	if _, err := rt.Restore(ctx, "n", bundle, t.TempDir()); !errors.Is(err, client.ErrAmbiguous) {
		t.Errorf("n besides n-1: %v", err)
	}
	two := start("n-2")
	if err := one.Delete(ctx); err != nil {
		t.Error(err)
	}
	lives(two)

	// n-1 is free now, and nothing that is asked of it reaches n-10.
	ten := start("n-10")
	for name, err := range map[string]error{"Signal": one.Signal(ctx, "KILL"), "Kill": one.Kill(ctx), "Delete": one.Delete(ctx),
		"Checkpoint": one.Checkpoint(ctx, filepath.Join(t.TempDir(), "image"), CheckpointOptions{})} {
		if done := name == "Kill" || name == "Delete"; done && err != nil || !done && !errors.Is(err, client.ErrNotFound) {
			t.Errorf("%s of a sandbox that was deleted: %v", name, err)
		}
	}
	if _, err := one.Exec(ctx, "/bin/true"); !errors.Is(err, client.ErrNotFound) {
		t.Errorf("Exec in a sandbox that was deleted: %v", err)
	}
	lives(ten)
	lives(two)
}

type testWriter struct{ t *testing.T }

func (w testWriter) Write(p []byte) (int, error) {
	w.t.Logf("%s", strings.TrimRight(string(p), "\n"))
	return len(p), nil
}
