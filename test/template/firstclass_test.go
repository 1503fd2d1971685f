package template

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"runsc-agentzip/pkg/fleet"
	"runsc-agentzip/test/harness"
)

// Everything that one may do with a sandbox one may do with a clone.

// command runs a program and returns all that it printed.
func command(t testing.TB, path string, args ...string) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.WaitDelay = 5 * time.Second
	out, err := cmd.CombinedOutput()
	if ctx.Err() != nil {
		t.Errorf("%s %v did not end", path, args)
	}
	return string(out), err
}

// runsc runs a command for which fleet has no method on a runtime's sandboxes.
func (rt *runtime) runsc(t testing.TB, args ...string) string {
	t.Helper()
	out, err := command(t, rt.Binary(), append([]string{"--root=" + rt.Root()}, args...)...)
	if err != nil {
		t.Fatalf("runsc %v: %v: %s", args, err, out)
	}
	return out
}

// TestCommands uses what the command line has on one clone, while another one
// works.
func TestCommands(t *testing.T) {
	b := bundle(t, "kinds", fmt.Sprintf("--mb=%d", pick(32, 128)), seedArg())
	image, replies := makeImage(t, modeIdle(t), b, "work 1000", "sum")
	sum := replies[1]
	size := uint64(imageSize(t, image))
	rt := newRuntime(t, modeIdle(t))
	other := restore(t, rt, "other", b, image)
	g := restore(t, rt, "clone", b, image)

	st := g.stats()
	t.Logf("right after restore: owned %d KiB of a template of %d MiB, %+v", st.OwnedBytes>>10, size>>20, st.Pages)
	if st.TemplateBytes != size {
		t.Errorf("template_bytes is %d, pages.img has %d", st.TemplateBytes, size)
	}
	if st.OwnedBytes > size*3/100+4<<20 {
		t.Errorf("a clone that has not worked owns %d bytes of a template of %d", st.OwnedBytes, size)
	}
	g.usesTemplate()

	// Reading all of it changes nothing that would have to be stored.
	if got := g.must("sum"); got != sum {
		t.Fatalf("the clone has %s, the template %s", got, sum)
	}
	g.mustEvict()
	st = g.stats()
	t.Logf("after reading all of it and an eviction: owned %d KiB, %+v", st.OwnedBytes>>10, st.Pages)
	if n := st.Pages.Delta + st.Pages.Compressed; n > 2000 {
		t.Errorf("%d pages are stored after nothing but reads", n)
	}
	g.usesTemplate()

	working := make(chan error, 1)
	go func() {
		for range pick(4, 30) {
			for _, req := range []string{"work 1500", "verify"} {
				if _, err := other.ask(req); err != nil {
					working <- err
					return
				}
			}
		}
		working <- nil
	}()
	for range pick(2, 10) {
		g.must("work 2000")
		g.mustEvict()
		if err := g.check(); err != nil {
			t.Error(err)
		}
		rep, err := g.sb.Exec(harness.Within(t, time.Minute), "/bin/sh", "-c", "echo exec; exit 7")
		if err != nil || rep.ExitCode != 7 || rep.Stdout != "exec\n" {
			t.Errorf("exec: %+v, %v", rep, err)
		}
		g.must("verify")
	}
	// A whole self-checking program beside what was restored.
	rep, err := g.sb.Exec(harness.Within(t, 3*time.Minute), programs.Path(t, "memtorture"), "--seconds=2", "--mb=8", "--threads=2", "--tmpfs=/dev/shm", "--overlay=/var/tmp", seedArg())
	if err != nil || rep.ExitCode != 0 || !strings.Contains(rep.Stdout, "OK memtorture") {
		t.Errorf("exec of memtorture: %+v, %v", rep, err)
	}
	rt.runsc(t, "pause", "clone")
	time.Sleep(300 * time.Millisecond)
	rt.runsc(t, "resume", "clone")
	g.must("verify")
	if out := rt.runsc(t, "state", "clone"); !strings.Contains(out, `"running"`) {
		t.Errorf("state: %s", out)
	}
	if out := rt.runsc(t, "ps", "clone"); strings.Count(out, "kinds") < 4 {
		t.Errorf("ps: %s", out)
	}

	if err := g.sb.Kill(harness.Within(t, time.Minute)); err != nil {
		t.Errorf("kill: %v", err)
	}
	if !g.sb.Exited() {
		t.Error("the clone outlived SIGKILL")
	}
	g.end()
	if err := <-working; err != nil {
		t.Error(err)
	}
	// Its place can be taken.
	again := restore(t, rt, "clone", b, image)
	if got := again.must("sum"); got != sum {
		t.Errorf("the next clone has %s, the template %s", got, sum)
	}
	again.end()
	other.end()
}

// TestCheckpointOfClone checkpoints a clone that goes on, deletes the image that
// it came from, and restores the new one under both runscs.
func TestCheckpointOfClone(t *testing.T) {
	b := bundle(t, "kinds", fmt.Sprintf("--mb=%d", pick(24, 96)), seedArg())
	first, replies := makeImage(t, modeIdle(t), b, "sum")
	rt := newRuntime(t, modeForced(t))
	g := restore(t, rt, "clone", b, first)
	if err := live(g, replies[0], 1, 2000); err != nil {
		t.Fatal(err)
	}
	// A clone that has not worked at all, too.
	idle := restore(t, rt, "idle", b, first)
	sum := g.must("sum")
	second, third := harness.TempDir(t), harness.TempDir(t)
	g.checkpoint(second, fleet.CheckpointOptions{LeaveRunning: true})
	idle.checkpoint(third, fleet.CheckpointOptions{LeaveRunning: true, ExcludeZeroPages: true})
	removeImage(t, first)
	for _, c := range []*guest{g, idle} {
		for _, req := range []string{"verify", "work 2000", "verify"} {
			c.must(req)
		}
		c.mustEvict()
		c.must("verify")
		if err := c.check(); err != nil {
			t.Error(err)
		}
		c.end()
	}
	modes := []mode{modeForced(t), agentzip(t, "off", "--agentzip=off")}
	modes[1].evicts, modes[1].maps = false, false
	if haveStock(t) {
		modes = append(modes, modeStock(t))
	}
	for _, m := range modes {
		for _, c := range []struct{ image, sum string }{{second, sum}, {third, replies[0]}} {
			rt := newRuntime(t, m)
			g := restore(t, rt, "next", b, c.image)
			if err := live(g, c.sum, 1, 1000); err != nil {
				t.Errorf("%s: %v", m.name, err)
			}
			g.end()
		}
	}
}

// TestImageGone takes the image away from under running clones.
func TestImageGone(t *testing.T) {
	b := bundle(t, "kinds", fmt.Sprintf("--mb=%d", pick(24, 96)), seedArg())
	image, replies := makeImage(t, modeIdle(t), b, "sum")
	// Something else that could be in its place.
	b2 := bundle(t, "kinds", fmt.Sprintf("--mb=%d", pick(24, 96)), "--seed=4711")
	other, replies2 := makeImage(t, modeIdle(t), b2, "sum")
	for _, m := range []mode{modeForced(t), modeIdle(t)} {
		if m.name == "idle" && !*longFlag {
			continue
		}
		for _, c := range []struct {
			name string
			do   func(dir string) error
		}{
			{"deleted", os.RemoveAll},
			{"renamed", func(dir string) error { return os.Rename(dir, dir+".old") }},
			{"replaced", func(dir string) error {
				// File by file, as a copy tool that is careful would.
				for _, f := range imageFiles {
					if f == "pages.azidx" {
						continue
					}
					if err := copyFile(filepath.Join(other, f), filepath.Join(dir, f+".new")); err != nil {
						return err
					}
					if err := os.Rename(filepath.Join(dir, f+".new"), filepath.Join(dir, f)); err != nil {
						return err
					}
				}
				return os.Remove(filepath.Join(dir, "pages.azidx"))
			}},
		} {
			t.Run(m.name+"/"+c.name, func(t *testing.T) {
				dir := filepath.Join(harness.TempDir(t), "image")
				if err := os.CopyFS(dir, os.DirFS(image)); err != nil {
					t.Fatal(err)
				}
				rt := newRuntime(t, m)
				clones := restoreAll(t, rt, 2, b, dir)
				// One has used nothing yet, the other everything.
				if got := clones[1].must("sum"); got != replies[0] {
					t.Fatalf("a clone has %s, the template %s", got, replies[0])
				}
				if err := c.do(dir); err != nil {
					t.Fatal(err)
				}
				each(t, 2, func(i int) error { return live(clones[i], replies[0], pick(1, 4), 1500) })
				if c.name == "replaced" {
					g := restore(t, rt, "other", b2, dir)
					if got := g.must("sum"); got != replies2[0] {
						t.Errorf("a clone of the image in its place has %s, not %s", got, replies2[0])
					}
					g.end()
				} else if _, err := tryRestore(t, rt, "none", b, dir); err == nil {
					t.Error("an image that is not there was restored")
				} else if !strings.Contains(err.Error(), dir) {
					t.Errorf("the message does not name the folder: %v", err)
				} else {
					t.Logf("restoring it again: %v", err)
				}
				each(t, 2, func(i int) error { return clones[i].check() })
				// A checkpoint of such a clone is complete.
				next := harness.TempDir(t)
				sum := clones[0].must("sum")
				clones[0].checkpoint(next, checkpointOptions)
				clones[0].end()
				clones[1].end()
				g := restore(t, rt, "next", b, next)
				if err := live(g, sum, 1, 500); err != nil {
					t.Error(err)
				}
				g.end()
			})
		}
	}
}

// TestFirstUse restores many clones at once of an image that has no index yet.
func TestFirstUse(t *testing.T) {
	b := bundle(t, "kinds", "--mb=16", seedArg())
	image, replies := makeImage(t, modeIdle(t), b, "sum")
	os.Remove(filepath.Join(image, "pages.azidx"))
	rt := newRuntime(t, modeForced(t))
	clones := restoreAll(t, rt, pick(4, 8), b, image)
	for _, g := range clones {
		g.usesTemplate()
		if got := g.must("sum"); got != replies[0] {
			t.Errorf("%s has %s, the template %s", g.sb.ID(), got, replies[0])
		}
		g.end()
	}
	onlyImageFiles(t, image)
}

// onlyImageFiles fails if something was left in the folder of an image.
func onlyImageFiles(t testing.TB, image string) {
	t.Helper()
	entries, err := os.ReadDir(image)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		ok := false
		for _, f := range imageFiles {
			ok = ok || e.Name() == f
		}
		if !ok {
			t.Errorf("%s was left in the image's folder", e.Name())
		}
	}
}

func copyFile(from, to string) error {
	b, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	return os.WriteFile(to, b, 0o644)
}
