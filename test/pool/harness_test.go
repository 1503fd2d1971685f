package pool

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"syscall"
	"testing"
	"time"

	"runsc-agentzip/pkg/control"
	"runsc-agentzip/pkg/fleet"
	"runsc-agentzip/pkg/pool/server"
	"runsc-agentzip/test/harness"
)

func TestMain(m *testing.M) { os.Exit(harness.Main(m, "pool")) }

// binary returns the runsc to test, or skips.
func binary(t testing.TB) string {
	t.Helper()
	return harness.UnderTest(t, "agentzip-pool").Path
}

// eventually waits until f returns nil.
func eventually(t testing.TB, what string, f func() error) {
	t.Helper()
	harness.Eventually(t, 90*time.Second, 200*time.Millisecond, what, f)
}

// ---- pools -------------------------------------------------------------------

// folder returns one for a pool's socket, which has to have a short path.
func folder(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("/run", "agentzip-sock-")
	if err != nil {
		t.Fatal(err)
	}
	harness.AtExit(t, func() { os.RemoveAll(dir) })
	return dir
}

// A pool is "agentzip pool serve".
type pool struct {
	t      testing.TB
	binary string
	socket string
	cmd    *exec.Cmd
	log    string
}

// launchPool starts a pool.
func launchPool(t testing.TB, socket string, flags ...string) *pool {
	t.Helper()
	p := &pool{t: t, binary: binary(t), socket: socket, log: filepath.Join(harness.TempDir(t), "pool.txt")}
	out, err := os.Create(p.log)
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	// The time-out is for a test that was killed.
	p.cmd = exec.Command(p.binary, append([]string{"agentzip", "pool", "serve", "--socket=" + socket, "--idle-exit=5m"}, flags...)...)
	p.cmd.Stdout, p.cmd.Stderr = out, out
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	harness.AtExit(t, func() {
		if t.Failed() {
			b, _ := os.ReadFile(p.log)
			var out []byte
			if p.cmd.ProcessState == nil {
				out, _ = exec.Command(p.binary, "agentzip", "pool", "stats", "--socket="+socket).CombinedOutput()
			}
			t.Logf("--- the pool's log\n%s\n%s", b, out)
		}
		p.kill()
	})
	return p
}

// startPool starts a pool and waits until it answers.
func startPool(t testing.TB, socket string, flags ...string) *pool {
	t.Helper()
	p := launchPool(t, socket, flags...)
	eventually(t, "starting a pool", func() error {
		if p.cmd.ProcessState != nil {
			t.Fatalf("the pool has ended")
		}
		_, err := p.stats()
		return err
	})
	return p
}

// kill ends the pool at once.
func (p *pool) kill() {
	if p.cmd.ProcessState == nil {
		_ = p.cmd.Process.Kill()
		_ = p.cmd.Wait()
	}
}

// end has the pool end in order.
func (p *pool) end() {
	p.t.Helper()
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		p.t.Fatal(err)
	}
	if err := p.cmd.Wait(); err != nil {
		p.t.Errorf("the pool ended with %v", err)
	}
	if _, err := os.Lstat(p.socket); !errors.Is(err, os.ErrNotExist) {
		p.t.Errorf("the pool left its socket behind (%v)", err)
	}
}

func (p *pool) stats() (s server.Stats, err error) {
	out, err := exec.Command(p.binary, "agentzip", "pool", "stats", "-json", "--socket="+p.socket).Output()
	if err != nil {
		return s, explain(err)
	}
	return s, json.Unmarshal(out, &s)
}

func explain(err error) error {
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return fmt.Errorf("%w: %s", err, exit.Stderr)
	}
	return err
}

// endByLog ends a pool that somebody else has started, by what it wrote to its log.
func endByLog(t testing.TB, socket string) {
	b, err := os.ReadFile(socket + ".log")
	if err != nil {
		return
	}
	for _, m := range regexp.MustCompile(`serving at \S+, pid (\d+)`).FindAllSubmatch(b, -1) {
		pid, _ := strconv.Atoi(string(m[1]))
		cmdline, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if err != nil || !bytes.Contains(cmdline, []byte("--socket="+socket)) {
			continue
		}
		_ = syscall.Kill(pid, syscall.SIGTERM)
		eventually(t, "ending the pool", func() error {
			if b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid)); err == nil && !bytes.Contains(b, []byte(") Z ")) {
				return fmt.Errorf("process %d lives", pid)
			}
			return nil
		})
	}
}

// ---- sandboxes -----------------------------------------------------------------

func newRuntime(t testing.TB, flags ...string) *harness.Runtime {
	t.Helper()
	return harness.NewRuntime(t, harness.Options{Binary: binary(t), Flags: flags, Logs: harness.AllLogs})
}

var programs = harness.Programs{C: []string{"guest/*.c"}}

// bundle writes the bundle that a guest is started and restored with. Its
// arguments are those of /sibling unless others are given.
func bundle(t testing.TB, annotations map[string]string, args ...string) string {
	t.Helper()
	if len(args) == 0 {
		args = []string{"/sibling"}
	}
	return harness.Bundle(t, fleet.Spec{
		Rootfs:      programs.Dir(t),
		Args:        args,
		Annotations: annotations,
	})
}

// domain are the annotations of a sandbox of the domain.
func domain(name string) map[string]string {
	return map[string]string{"dev.agentzip.domain": name}
}

// A guest is a running program that answers lines.
type guest struct {
	t  testing.TB
	sb *fleet.Sandbox
}

// start runs the program until it says that it is ready.
func start(t testing.TB, rt *harness.Runtime, id, bundle string, opts ...fleet.StartOption) *guest {
	t.Helper()
	return &guest{t, rt.Start(t, id, bundle, opts...)}
}

func restore(t testing.TB, rt *harness.Runtime, id, bundle, image string) *guest {
	t.Helper()
	return &guest{t, rt.Clone(t, id, bundle, image)}
}

// template returns an image of the program that bundle starts with the arguments.
func template(t testing.TB, args ...string) string {
	t.Helper()
	rt := newRuntime(t)
	g := start(t, rt, "origin", bundle(t, nil, args...))
	image := filepath.Join(harness.TempDir(t), "image")
	if err := g.sb.Checkpoint(harness.Within(t, 2*time.Minute), image, fleet.CheckpointOptions{}); err != nil {
		t.Fatal(err)
	}
	return image
}

// must has the guest do something.
func (g *guest) must(format string, args ...any) {
	g.t.Helper()
	req := fmt.Sprintf(format, args...)
	reply, err := g.sb.Request(harness.Within(g.t, 2*time.Minute), req)
	if err != nil || reply != "OK" {
		g.t.Fatalf("%s: %s: %q, %v", g.sb.ID(), req, reply, err)
	}
}

func (g *guest) stats() control.Stats {
	g.t.Helper()
	return harness.Stats(g.t, g.sb)
}

func (g *guest) evict() {
	g.t.Helper()
	if _, err := g.sb.Evict(harness.Within(g.t, time.Minute)); err != nil {
		g.t.Fatalf("agentzip evict %s: %v", g.sb.ID(), err)
	}
}

// check has the runtime and the guest look at all of its memory.
func (g *guest) check() {
	g.t.Helper()
	harness.Check(g.t, g.sb)
	g.must("check")
}

// sharing waits until the guest has at least so many pages in the pool. What the
// pool did not ask for at once, or not tell of, it finds when the pages are evicted
// the next time: the guest looks at them now and then.
func (g *guest) sharing(pages uint64) {
	g.t.Helper()
	last := time.Now()
	eventually(g.t, g.sb.ID()+" shares", func() error {
		s := g.stats()
		if s.Pages.Pool >= pages && s.Pool.State == "connected" {
			return nil
		}
		if time.Since(last) > 10*time.Second {
			g.must("check")
			last = time.Now()
		}
		return fmt.Errorf("%d pages in the pool, want %d: %+v, %+v", s.Pages.Pool, pages, s.Pages, s.Pool)
	})
}

// private checks that the guest shares nothing. Being connected has a price.
func (g *guest) private(state string) {
	g.t.Helper()
	if s := g.stats(); s.Pages.Pool != 0 || s.PoolShareBytes != 0 && state != "connected" || s.Pool.State != state {
		g.t.Errorf("%s has %d pages in the pool, a share of %d bytes, state %q: want none and %q", g.sb.ID(), s.Pages.Pool, s.PoolShareBytes, s.Pool.State, state)
	}
}
