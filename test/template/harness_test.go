package template

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"runsc-agentzip/pkg/control"
	"runsc-agentzip/pkg/fleet"
	"runsc-agentzip/test/harness"
)

var (
	longFlag = flag.Bool("long", false, "run the long tests too, and the others for longer")
	seedFlag = harness.SeedFlag()
	xflags   = flag.String("xflags", "", "further flags for the runsc under test, separated by spaces")
)

func TestMain(m *testing.M) { os.Exit(harness.Main(m, "template")) }

// ---- runtimes and modes --------------------------------------------------------

// mode is one way to run a sandbox.
type mode struct {
	name   string
	binary string
	flags  []string
	// evicts says that the backend is on.
	evicts bool
	// maps says that applications map the template.
	maps bool
}

// underTest returns the runsc to test, or skips.
func underTest(t testing.TB) *harness.Runsc {
	t.Helper()
	return harness.UnderTest(t, "agentzip-template")
}

// modeStock is what results are compared with. It restores the same images.
func modeStock(t testing.TB) mode {
	t.Helper()
	b := harness.Stock(t)
	if v := underTest(t).Version; b.Version != v {
		harness.Skip(t, "%s says %q and the runsc under test %q: an image is restored by the version that wrote it only", b.Path, b.Version, v)
	}
	return mode{name: "stock", binary: b.Path}
}

// haveStock tells whether modeStock would skip.
func haveStock(t testing.TB) bool {
	b, err := harness.FindStock()
	return err == nil && b.Version == underTest(t).Version
}

func agentzip(t testing.TB, name string, flags ...string) mode {
	b := underTest(t)
	return mode{
		name:   name,
		binary: b.Path,
		flags:  append(append([]string{"--agentzip=on"}, flags...), strings.Fields(*xflags)...),
		evicts: true,
		maps:   true,
	}
}

// modeForced evicts all the time, whatever the guest does.
func modeForced(t testing.TB) mode {
	return agentzip(t, "forced", "--agentzip-test-evict-every=300ms")
}

// modeIdle evicts when the backend itself decides to: while the guest waits.
func modeIdle(t testing.TB) mode { return agentzip(t, "idle") }

// modeCopy copies each page of the template when it is used, instead of mapping
// it.
func modeCopy(t testing.TB) mode {
	m := agentzip(t, "copy", "--agentzip-template=copy", "--agentzip-test-evict-every=300ms")
	m.maps = false
	return m
}

// modeLoad reads the whole checkpoint, as a stock runsc does, and evicts.
func modeLoad(t testing.TB) mode {
	m := agentzip(t, "load", "--agentzip-template=load", "--agentzip-test-evict-every=300ms")
	m.maps = false
	return m
}

// runtime is a harness.Runtime with its mode.
type runtime struct {
	*harness.Runtime
	m mode
}

// patience is how long a start, a restore or a checkpoint may take.
const patience = 3 * time.Minute

func newRuntime(t testing.TB, m mode) *runtime {
	t.Helper()
	return &runtime{harness.NewRuntime(t, harness.Options{
		Binary:   m.binary,
		Flags:    m.flags,
		Logs:     harness.Warnings,
		Patience: patience,
	}), m}
}

// ---- guests --------------------------------------------------------------------

// programs are those of this suite, and those of test/integrity that check themselves
// in the same way.
var programs = harness.Programs{C: []string{"guest/*.c", "../integrity/guest/daemon.c", "../integrity/guest/racer.c", "../integrity/guest/memtorture.c"}}

// bundle writes the bundle that a program is started and restored with.
func bundle(t testing.TB, program string, args ...string) string {
	t.Helper()
	// Its root is the host's, so that is where it finds the program.
	return harness.Bundle(t, fleet.Spec{
		Rootfs:   "/",
		Args:     append([]string{programs.Path(t, program)}, args...),
		Hostname: "template",
		Cwd:      "/",
		Env:      []string{"HOME=/var/tmp", "LC_ALL=C.UTF-8", "TMPDIR=/var/tmp"},
		Mounts:   []fleet.Mount{{Target: "/dev/shm", Options: []string{"mode=1777"}}},
		Capabilities: append([]string{"CAP_SYS_PTRACE", "CAP_IPC_LOCK", "CAP_SYS_NICE", "CAP_SYS_RESOURCE", "CAP_SYS_ADMIN"},
			fleet.DefaultCapabilities...),
	})
}

func seedArg() string { return fmt.Sprintf("--seed=%d", *seedFlag) }

// guest is a running program that answers lines.
type guest struct {
	t      testing.TB
	rt     *runtime
	sb     *fleet.Sandbox
	bundle string
}

// start runs a program until it says that it is ready.
func start(t testing.TB, rt *runtime, id, bundle string) *guest {
	t.Helper()
	return &guest{t, rt, rt.Start(t, id, bundle), bundle}
}

// restore starts a clone.
func restore(t testing.TB, rt *runtime, id, bundle, image string) *guest {
	t.Helper()
	return &guest{t, rt, rt.Clone(t, id, bundle, image), bundle}
}

// tryRestore is restore for any goroutine.
func tryRestore(t testing.TB, rt *runtime, id, bundle, image string) (*guest, error) {
	sb, err := rt.Restore(harness.Within(t, patience), id, bundle, image)
	if err != nil {
		return nil, err
	}
	return &guest{t, rt, sb, bundle}, nil
}

// restoreAll restores n clones at once.
func restoreAll(t testing.TB, rt *runtime, n int, bundle, image string) []*guest {
	t.Helper()
	gs := make([]*guest, n)
	each(t, n, func(i int) (err error) {
		gs[i], err = tryRestore(t, rt, fmt.Sprintf("clone%d", i), bundle, image)
		return err
	})
	return gs
}

// each runs f for 0 to n-1 at once and ends the test if one fails.
func each(t testing.TB, n int, f func(i int) error) {
	t.Helper()
	errs := make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { errs[i] = f(i) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// ask sends one request. It does not end the test, so that it may be called
// from any goroutine.
func (g *guest) ask(req string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	reply, err := g.sb.Request(ctx, req)
	if err != nil {
		if ctx.Err() != nil {
			err = fmt.Errorf("%w\n%s", err, g.rt.Stacks(g.sb))
		}
		return "", fmt.Errorf("%s: %s: %s: %w", g.rt.m.name, g.sb.ID(), req, err)
	}
	if !strings.HasPrefix(reply, "OK") || strings.Contains(reply, "FAIL") {
		return "", fmt.Errorf("%s: %s: %s: %s", g.rt.m.name, g.sb.ID(), req, reply)
	}
	return reply, nil
}

func (g *guest) must(req string) string {
	g.t.Helper()
	reply, err := g.ask(req)
	if err != nil {
		g.t.Fatal(err)
	}
	return reply
}

func (g *guest) checkpoint(image string, o fleet.CheckpointOptions) {
	g.t.Helper()
	if err := g.sb.Checkpoint(harness.Within(g.t, patience), image, o); err != nil {
		g.t.Fatalf("checkpoint of %s: %v", g.sb.ID(), err)
	}
}

func (g *guest) end() {
	g.t.Helper()
	harness.Delete(g.t, g.sb)
}

func (g *guest) stats() control.Stats {
	g.t.Helper()
	return harness.Stats(g.t, g.sb)
}

// evict evicts everything that is eligible; without a backend it does nothing.
func (g *guest) evict() error {
	if !g.rt.m.evicts {
		return nil
	}
	_, err := g.sb.Evict(harness.Within(g.t, 2*time.Minute))
	if err != nil {
		return fmt.Errorf("agentzip evict %s: %w", g.sb.ID(), err)
	}
	return nil
}

func (g *guest) mustEvict() {
	g.t.Helper()
	if err := g.evict(); err != nil {
		g.t.Fatal(err)
	}
}

// check runs the backend's own check. It does not end the test.
func (g *guest) check() error {
	if !g.rt.m.evicts {
		return nil
	}
	rep, err := g.sb.Check(harness.Within(g.t, 2*time.Minute))
	if err != nil && strings.Contains(err.Error(), "too busy") {
		// What had to be looked at at rest could not be.
		err = nil
	}
	if err != nil {
		return fmt.Errorf("agentzip check %s: %w", g.sb.ID(), err)
	}
	if len(rep.Problems) != 0 {
		return fmt.Errorf("agentzip check %s: %s", g.sb.ID(), strings.Join(rep.Problems, "; "))
	}
	return nil
}

// usesTemplate asserts that the clone is what the test is about: with hardly
// anything of its own, most of its pages being the template's.
func (g *guest) usesTemplate() {
	g.t.Helper()
	if !g.rt.m.evicts || g.rt.m.name == "load" {
		return
	}
	st := g.stats()
	// A program that runs has used some of them already.
	p := st.Pages
	if got := p.Template + st.Faults.Demand + st.Faults.Prefetched; got < (p.Zero+p.Delta+p.Compressed+p.Raw)*2 || got < 1000 {
		g.t.Errorf("%s got too few pages from the template for the test to prove anything: %+v %+v", g.sb.ID(), p, st.Faults)
	}
}

// settle waits until a program that says "OK NAME ..." and ends has done so, and
// returns that line.
func (g *guest) finish(timeout time.Duration) (string, error) {
	ctx := harness.Within(g.t, timeout)
	line, err := g.sb.ReadLine(ctx)
	if err != nil {
		return "", fmt.Errorf("%s: %s: %w\n%s", g.rt.m.name, g.sb.ID(), err, g.rt.Stacks(g.sb))
	}
	if !strings.HasPrefix(line, "OK ") {
		return "", fmt.Errorf("%s: %s: %s", g.rt.m.name, g.sb.ID(), line)
	}
	return line, nil
}

// ---- images --------------------------------------------------------------------

// makeImage starts a program, has it answer the requests, and checkpoints it.
func makeImage(t testing.TB, m mode, bundle string, requests ...string) (image string, replies []string) {
	t.Helper()
	rt := newRuntime(t, m)
	g := start(t, rt, "origin", bundle)
	for _, r := range requests {
		replies = append(replies, g.must(r))
	}
	image = filepath.Join(harness.TempDir(t), "image")
	g.checkpoint(image, checkpointOptions)
	g.end()
	return image, replies
}

// imageSize is the size of the pages of an image.
func imageSize(t testing.TB, image string) int64 {
	t.Helper()
	fi, err := os.Stat(filepath.Join(image, "pages.img"))
	if err != nil {
		t.Fatal(err)
	}
	return fi.Size()
}

// pick is short in CI and long with -long.
func pick[T any](ci, long T) T {
	if *longFlag {
		return long
	}
	return ci
}

// longOnly skips a test that has no place in CI.
func longOnly(t testing.TB) {
	t.Helper()
	if !*longFlag {
		t.Skip("runs with -long only")
	}
}

func writeJSON(t testing.TB, path string, v any) {
	t.Helper()
	b, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, append(b, '\n'), 0o644); err != nil {
		t.Fatal(err)
	}
}

// checkpointOptions are those of a checkpoint that can be a template.
var checkpointOptions = fleet.CheckpointOptions{}

func removeImage(t testing.TB, image string) {
	t.Helper()
	if err := os.RemoveAll(image); err != nil {
		t.Fatal(err)
	}
}
