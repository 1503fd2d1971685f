package integrity

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"runsc-agentzip/pkg/fleet"
	"runsc-agentzip/test/harness"
)

var (
	rootfsFlag = flag.String("rootfs", cmp.Or(os.Getenv("AGENTZIP_ROOTFS"), "/"),
		"the guests' root filesystem; never written to")
	longFlag    = flag.Bool("long", false, "run the long tests too")
	seedFlag    = harness.SeedFlag()
	secondsFlag = flag.Int("seconds", 0, "how long each guest program runs (0: what the test says)")
)

func TestMain(m *testing.M) {
	flag.Parse()
	*rootfsFlag = harness.RepoPath(*rootfsFlag)
	removeCgroups()
	os.Exit(harness.Main(m, "integrity"))
}

// ---- runtimes and modes --------------------------------------------------------

// mode is one way to run a sandbox.
type mode struct {
	name   string
	binary string
	flags  []string
	// evicts says that the backend is on: its statistics can be asked for and
	// must show that pages went and came back.
	evicts bool
}

// stockBinary returns an unpatched runsc, or nil if there is none: --agentzip=off stands
// in for it.
func stockBinary() *harness.Runsc {
	b, err := harness.FindStock()
	if err != nil {
		return nil
	}
	return b
}

// forceFlag makes the backend evict everything it may, over and over.
const forceFlag = "--agentzip-test-evict-every=300ms"

// modeForced evicts all the time, whatever the guest does.
func modeForced(t testing.TB) mode {
	b := harness.UnderTest(t)
	if !b.Has("agentzip") {
		return mode{name: "stock", binary: b.Path}
	}
	return mode{name: "forced", binary: b.Path, flags: []string{"--agentzip=on", forceFlag}, evicts: true}
}

// modeIdle evicts when the backend itself decides to: while the guest waits.
func modeIdle(t testing.TB) mode {
	b := harness.UnderTest(t)
	if !b.Has("agentzip") {
		return mode{name: "stock", binary: b.Path}
	}
	return mode{name: "idle", binary: b.Path, flags: []string{"--agentzip=on"}, evicts: true}
}

// modeOff is the patched binary with the backend off.
func modeOff(t testing.TB) mode {
	b := harness.UnderTest(t)
	if !b.Has("agentzip") {
		return mode{name: "stock", binary: b.Path}
	}
	return mode{name: "off", binary: b.Path, flags: []string{"--agentzip=off"}}
}

// modeReference is what results are compared with.
func modeReference(t testing.TB) mode {
	harness.UnderTest(t)
	if s := stockBinary(); s != nil {
		return mode{name: "stock", binary: s.Path}
	}
	return modeOff(t)
}

// distinct drops modes that are the same: all are, with a stock binary.
func distinct(modes ...mode) []mode {
	var out []mode
	for _, m := range modes {
		if !slices.ContainsFunc(out, func(o mode) bool { return o.name == m.name }) {
			out = append(out, m)
		}
	}
	return out
}

func newRuntime(t testing.TB, m mode) *harness.Runtime {
	t.Helper()
	return harness.NewRuntime(t, harness.Options{Binary: m.binary, Flags: m.flags, Logs: harness.Warnings})
}

// ---- sandboxes -------------------------------------------------------------------

// Where the guest finds things.
const (
	tmpfsDir = "/dev/shm" // a tmpfs
	workDir  = "/var/tmp" // the overlay, in memory
)

// guestPath is where a guest finds a self-checking program. Bind mounts do not
// work on top of the host's own root, but there the programs are visible where
// they are. The mount point exists in every Debian root, so that nothing has to
// be created in it.
func guestPath(t testing.TB, name string) string {
	dir := programs.Dir(t)
	if *rootfsFlag != "/" {
		dir = "/srv"
	}
	return filepath.Join(dir, name)
}

// needs skips the test if a command is missing in the root filesystem.
func needs(t testing.TB, paths ...string) {
	t.Helper()
	for _, p := range paths {
		if m, _ := filepath.Glob(filepath.Join(*rootfsFlag, p)); len(m) == 0 {
			harness.Skip(t, "%s is missing in %s: install the packages that this package's documentation lists", p, *rootfsFlag)
		}
	}
}

var programs = harness.Programs{C: []string{"guest/*.c"}, Go: []string{"guest/gostress"}}

// guestSpec is a container with the given command.
func guestSpec(t testing.TB, args ...string) fleet.Spec {
	// Before the sandbox starts: it need not notice files that appear later.
	dir := programs.Dir(t)
	mounts := []fleet.Mount{{Target: tmpfsDir, Options: []string{"mode=1777"}}}
	if *rootfsFlag != "/" {
		mounts = append(mounts, fleet.Mount{Source: dir, Target: "/srv", Options: []string{"rbind", "ro"}})
	}
	return fleet.Spec{
		Rootfs:   *rootfsFlag,
		Args:     args,
		Hostname: "integrity",
		Cwd:      "/",
		Env:      []string{"HOME=/var/tmp", "LC_ALL=C.UTF-8", "TMPDIR=/var/tmp"},
		Mounts:   mounts,
		Capabilities: append([]string{"CAP_SYS_PTRACE", "CAP_IPC_LOCK", "CAP_SYS_NICE", "CAP_SYS_RESOURCE", "CAP_SYS_ADMIN"},
			fleet.DefaultCapabilities...),
	}
}

// box is one running sandbox of a test.
type box struct {
	t    testing.TB
	m    mode
	rt   *harness.Runtime
	sb   *fleet.Sandbox
	done func() // stops the poller
}

// startBox starts a sandbox whose init only waits; commands are run in it.
func startBox(t testing.TB, m mode) *box {
	t.Helper()
	rt := newRuntime(t, m)
	bundle := harness.Bundle(t, guestSpec(t, "/bin/sleep", "infinity"))
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	sb, err := rt.Run(ctx, "box", bundle)
	if err != nil {
		t.Fatalf("starting a sandbox (%s): %v", m.name, err)
	}
	b := &box{t: t, m: m, rt: rt, sb: sb}
	b.done = pollStats(t, m, sb)
	t.Cleanup(b.done)
	return b
}

// pollStats asks for statistics, and now and then for a consistency check, while
// the guest works: both promise to be harmless at any time.
func pollStats(t testing.TB, m mode, sb *fleet.Sandbox) (stop func()) {
	if !m.evicts {
		return func() {}
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for i := 0; ; i++ {
			select {
			case <-ctx.Done():
				return
			case <-time.After(2500 * time.Millisecond):
			}
			st, err := sb.Stats(ctx)
			if ctx.Err() != nil || sb.Exited() {
				return
			}
			if err != nil {
				t.Errorf("agentzip stats while the guest works: %v", err)
				return
			}
			if st.ChecksumFailures != 0 {
				t.Errorf("agentzip stats: %d checksum failures", st.ChecksumFailures)
			}
			if i%3 == 2 {
				rep, err := sb.Check(ctx)
				if ctx.Err() != nil || sb.Exited() {
					return
				}
				if err != nil {
					t.Errorf("agentzip check while the guest works: %v", err)
					return
				}
				for _, p := range rep.Problems {
					t.Errorf("agentzip check: %s", p)
				}
			}
		}
	}()
	return sync.OnceFunc(func() { cancel(); <-done })
}

// exec runs a command in the sandbox and returns what it printed. It must exit
// with 0 within the timeout.
func (b *box) exec(timeout time.Duration, args ...string) string {
	b.t.Helper()
	res, err := b.try(timeout, args...)
	if err != nil {
		b.t.Fatalf("%s: %v\nstdout: %s\nstderr: %s", strings.Join(args, " "), err, harness.Tail(res.Stdout, 3000), harness.Tail(res.Stderr, 3000))
	}
	if res.ExitCode != 0 {
		b.t.Fatalf("%s: exit code %d\nstdout: %s\nstderr: %s", strings.Join(args, " "), res.ExitCode, harness.Tail(res.Stdout, 3000), harness.Tail(res.Stderr, 3000))
	}
	return res.Stdout
}

// sh runs a shell script that stops at the first failing command.
func (b *box) sh(timeout time.Duration, script string) string {
	b.t.Helper()
	return b.exec(timeout, "/bin/bash", "-euo", "pipefail", "-c", script)
}

// try is exec without judging the exit code.
func (b *box) try(timeout time.Duration, args ...string) (fleet.ExecResult, error) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	res, err := b.sb.Exec(ctx, args...)
	if err != nil && ctx.Err() != nil {
		err = fmt.Errorf("did not end within %v: %w\n%s", timeout, err, b.rt.Stacks(b.sb))
	}
	return res, err
}

// evict evicts everything that is eligible; without a backend it just waits a
// little, so that the same test runs under a stock runsc.
func (b *box) evict() {
	b.t.Helper()
	evict(b.t, b.m, b.sb)
}

func evict(t testing.TB, m mode, sb *fleet.Sandbox) {
	t.Helper()
	if !m.evicts {
		time.Sleep(200 * time.Millisecond)
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	rep, err := sb.Evict(ctx)
	if err != nil {
		t.Fatalf("agentzip evict: %v", err)
	}
	t.Logf("evict: marked %d, evicted %d, aborted %d, rejected %d, skipped %d pages in %v; owned %d -> %d MiB",
		rep.MarkedPages, rep.EvictedPages, rep.AbortedPages, rep.RejectedPages, rep.SkippedPages,
		time.Duration(rep.ElapsedNS).Round(time.Millisecond), rep.OwnedBefore>>20, rep.OwnedAfter>>20)
}

// finish checks the backend's books while the sandbox still runs and ends it.
func (b *box) finish() {
	b.t.Helper()
	b.done()
	verifyBackend(b.t, b.m, b.sb)
	if mem, err := b.sb.Memory(); err == nil {
		b.t.Logf("%s: the memory file holds %d MiB of the host's memory", b.m.name, mem.GuestMemfd>>20)
	}
	harness.Delete(b.t, b.sb)
}

// verifyBackend asserts that the run proved something: pages were evicted, came
// back, and everything that is stored is consistent.
func verifyBackend(t testing.TB, m mode, sb *fleet.Sandbox) {
	t.Helper()
	if !m.evicts {
		return
	}
	rep := harness.Check(t, sb)
	st := harness.Stats(t, sb)
	t.Logf("%s: evicted %d pages, restored %d, aborted %d; now %d MiB of guest memory in %d MiB; checked %d of %d stored pages; rejects %v",
		m.name, st.EvictedPagesTotal, st.RestoredPagesTotal, st.Faults.Aborted, st.GuestBytes>>20, st.OwnedBytes>>20,
		rep.CheckedPages, rep.StoredPages, st.Rejects)
	if st.EvictedPagesTotal == 0 {
		t.Error("no page was ever evicted: this run proves nothing")
	}
	if st.RestoredPagesTotal == 0 {
		t.Error("no page was ever restored: this run proves nothing")
	}
	if st.ChecksumFailures != 0 {
		t.Errorf("%d checksum failures", st.ChecksumFailures)
	}
}

// seconds picks the length of a guest program's run.
func seconds(ci, long int) int {
	switch {
	case *secondsFlag > 0:
		return *secondsFlag
	case *longFlag:
		return long
	default:
		return ci
	}
}

// longOnly skips a test that has no place in CI.
func longOnly(t testing.TB) {
	t.Helper()
	if !*longFlag {
		t.Skip("runs with -long only")
	}
}
