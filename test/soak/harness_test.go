package soak

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"runsc-agentzip/pkg/control"
	"runsc-agentzip/pkg/fleet"
	"runsc-agentzip/test/harness"
)

var (
	longFlag = flag.Bool("long", false, "ten rounds of 2,000 processes, and a soak of 30 minutes")
	soakFlag = flag.Duration("soak", 0, "how long clones work and wait (0: 20s, with -long 30m)")
	seedFlag = harness.SeedFlag()
	xflags   = flag.String("xflags", "", "further flags for the runsc under test, separated by spaces")
)

// bounded is how long one command or step may take: a hundred times as long as it
// should, since the machine may be busy.
const bounded = 5 * time.Minute

// trimAfter and deepenAfter are the flags' values here: shorter than the defaults of
// 2 s, so that a round takes less time.
const trimAfter, deepenAfter = 500 * time.Millisecond, 250 * time.Millisecond

func TestMain(m *testing.M) { os.Exit(harness.Main(m, "soak")) }

// runtime is the runsc under test.
type runtime struct {
	*harness.Runtime
	// evicts: it is no stock runsc.
	evicts bool
}

func newRuntime(t testing.TB, more ...string) runtime {
	t.Helper()
	runsc := harness.UnderTest(t)
	evicts := runsc.Has("agentzip-idle")
	var flags []string
	if evicts {
		flags = []string{"--agentzip-trim-after=" + trimAfter.String(), "--agentzip-deepen-after=" + deepenAfter.String()}
	}
	return runtime{harness.NewRuntime(t, harness.Options{
		Binary:   runsc.Path,
		Flags:    slices.Concat(flags, strings.Fields(*xflags), more),
		Patience: bounded,
	}), evicts}
}

var programs = harness.Programs{C: []string{"guest/soaker.c"}}

// bundle writes a bundle that starts the guest program. Its root is the host's, so that
// is where it finds it.
func bundle(t testing.TB, mib int) string {
	t.Helper()
	return harness.Bundle(t, fleet.Spec{
		Rootfs:   "/",
		Args:     []string{programs.Path(t, "soaker"), fmt.Sprintf("--mb=%d", mib)},
		Hostname: "soak",
		Mounts:   []fleet.Mount{{Target: "/dev/shm", Options: []string{"mode=1777"}}},
	})
}

// guest is a sandbox with the guest program in it.
type guest struct {
	*fleet.Sandbox
	evicts bool
	model  model
	// right counts the steps with the right answer.
	right int
}

func start(t testing.TB, rt runtime, id, bundle string, mib int) *guest {
	t.Helper()
	return &guest{Sandbox: rt.Start(t, id, bundle), evicts: rt.evicts, model: newModel(mib)}
}

// do has the guest take a step. It may be called on any goroutine.
func (g *guest) do(s step) error {
	ctx, cancel := context.WithTimeout(context.Background(), bounded)
	defer cancel()
	reply, err := g.Request(ctx, s.request)
	if err != nil {
		return fmt.Errorf("%s: %s: %w: %s", g.ID(), s.request, err, g.Stderr())
	}
	if want := fmt.Sprintf("OK %d", s.answer); reply != want {
		return fmt.Errorf("%s: %s: the answer is %q, not %q", g.ID(), s.request, reply, want)
	}
	g.right++
	return nil
}

// check has the runtime verify all that it stores.
func (g *guest) check() error {
	if !g.evicts {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), bounded)
	defer cancel()
	rep, err := g.Check(ctx)
	if err != nil {
		return fmt.Errorf("agentzip check %s: %w", g.ID(), err)
	}
	if len(rep.Problems) != 0 {
		return fmt.Errorf("agentzip check %s: %s", g.ID(), strings.Join(rep.Problems, "; "))
	}
	return nil
}

// ---- what a sandbox costs besides its guest memory ------------------------------

// cost is that of one sandbox. Sizes are in bytes.
type cost struct {
	// anon is the Sentry's anonymous memory without what it holds there for guest
	// memory, and gofer and stubs the other processes'.
	anon, gofer, stubs uint64
	// memfds is what the platform shares with the stubs.
	memfds     uint64
	pageTables uint64
	// spaces is how many address spaces the stubs have, processes how many there are
	// in all, the Sentry and the gofer included, and the rest is theirs.
	spaces, processes, fds, threads int
	// guest and owned are guest memory and what it costs.
	guest, owned uint64
}

func (c cost) String() string {
	kib := func(n uint64) uint64 { return n >> 10 }
	return fmt.Sprintf("KiB: Sentry %d, gofer %d, stubs %d, memfds %d, page tables %d, guest %d, owned %d; stubs %d, processes %d, descriptors %d, threads %d",
		kib(c.anon), kib(c.gofer), kib(c.stubs), kib(c.memfds), kib(c.pageTables), kib(c.guest), kib(c.owned), c.spaces, c.processes, c.fds, c.threads)
}

// outside is the sum of the parts.
func (c cost) outside() uint64 { return c.anon + c.gofer + c.stubs + c.memfds + c.pageTables }

// measure looks from the host, which the sandbox does not notice.
func (g *guest) measure() (cost, error) {
	m, err := g.Memory()
	if err != nil {
		return cost{}, fmt.Errorf("%w: %s", err, g.Stderr())
	}
	c := cost{
		anon:       m.Sentry.PSSAnon + m.Sentry.SwapPSS,
		gofer:      m.Gofer.PSSAnon + m.Gofer.SwapPSS,
		stubs:      m.Stubs.PSSAnon + m.Stubs.SwapPSS,
		memfds:     m.OtherMemfd,
		pageTables: m.Sentry.PageTables + m.Gofer.PageTables + m.Stubs.PageTables,
		spaces:     m.Stubs.AddressSpaces,
		guest:      m.GuestMemfd,
	}
	procs := harness.Processes(g.Sandbox)
	c.processes = len(procs)
	for _, p := range procs {
		for dir, n := range map[string]*int{"fd": &c.fds, "task": &c.threads} {
			entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/%s", p.PID, dir))
			if err != nil && !errors.Is(err, os.ErrNotExist) {
				return cost{}, err
			}
			*n += len(entries)
		}
	}
	return c, nil
}

// floor waits until a waiting sandbox is as small as it gets, and measures it: nothing
// has changed for a while that is longer than what is done in a wait takes to begin,
// and the runtime says that it has been a wait for as long.
func (g *guest) floor() (cost, error) {
	const every, window = 250 * time.Millisecond, time.Second
	const long = trimAfter + 4*deepenAfter + 500*time.Millisecond
	var last cost
	var cpu time.Duration
	since := time.Now()
	for end := time.Now().Add(bounded); time.Now().Before(end); time.Sleep(every) {
		c, err := g.measure()
		if err != nil {
			return c, err
		}
		now, err := g.CPUTime()
		if err != nil {
			return c, err
		}
		// A tick or two is what the Sentry's own timers take.
		if diff(c.outside(), last.outside()) > 64<<10 || diff(c.guest, last.guest) > 64<<10 || now-cpu > 20*time.Millisecond {
			since = time.Now()
		}
		last, cpu = c, now
		if time.Since(since) < window {
			continue
		}
		if !g.evicts {
			return c, nil
		}
		st, err := g.stats()
		if err != nil {
			return c, err
		}
		if st.Phase.State == "waiting" && time.Duration(st.Phase.SinceNS) > long {
			held := st.StoreBytes + st.MetadataBytes
			c.anon -= min(c.anon, held)
			c.guest, c.owned = st.GuestBytes, st.OwnedBytes
			return c, nil
		}
		since = time.Now().Add(every - window)
	}
	return last, fmt.Errorf("%s does not get quiet: %v", g.ID(), last)
}

func (g *guest) stats() (control.Stats, error) {
	ctx, cancel := context.WithTimeout(context.Background(), bounded)
	defer cancel()
	return g.Stats(ctx)
}

func diff(a, b uint64) uint64 { return max(a, b) - min(a, b) }

// grown says in what way a sandbox has grown between early waits and late ones, or "".
// Of each part it compares the medians. Memory may be 1 MiB or 5 % more: what a garbage
// collection leaves is not the same each time, and the tables fill up that the Go
// runtime keeps of the places where memory was allocated. Measured, in KiB: 8495 after
// 100 short processes, 8531 after 400, 9722 after 700, 9589 after 1,000; in another run
// 9453 after 2,100, 10397 after 16,100, 10343 after 20,100, with as many live objects in
// the heap from the second burst on. So early waits are those after a warm-up. There may
// be no more processes or descriptors, and of threads only as many as the Go runtime of
// one sandbox makes when the machine is busy.
func grown(early, late []cost) string {
	return strings.Join(append(grownMemory(early, late), more(early, late)...), ", ")
}

// grownMemory is the part of grown that is about memory.
func grownMemory(early, late []cost) (out []string) {
	for _, p := range []struct {
		name string
		of   func(cost) uint64
	}{
		{"the Sentry's memory", func(c cost) uint64 { return c.anon }},
		{"the gofer's memory", func(c cost) uint64 { return c.gofer }},
		{"the stubs' memory", func(c cost) uint64 { return c.stubs }},
		{"other memory files", func(c cost) uint64 { return c.memfds }},
		{"page tables", func(c cost) uint64 { return c.pageTables }},
		{"guest memory", func(c cost) uint64 { return c.guest }},
	} {
		before, after := median(early, p.of), median(late, p.of)
		if after > before+max(1<<20, before/20) {
			out = append(out, fmt.Sprintf("%s by %d KiB", p.name, (after-before)>>10))
		}
	}
	return out
}

// more is the part of grown that is about what is counted.
func more(early, late []cost) (out []string) {
	for _, p := range []struct {
		name  string
		of    func(cost) int
		slack int
	}{
		{"stubs", func(c cost) int { return c.spaces }, 0},
		{"processes", func(c cost) int { return c.processes }, 0},
		{"descriptors", func(c cost) int { return c.fds }, 0},
		{"threads", func(c cost) int { return c.threads }, 8},
	} {
		before, after := median(early, p.of), median(late, p.of)
		if after > before+p.slack {
			out = append(out, fmt.Sprintf("%d more %s", after-before, p.name))
		}
	}
	return out
}

func median[T cmp.Ordered](costs []cost, of func(cost) T) T {
	var all []T
	for _, c := range costs {
		all = append(all, of(c))
	}
	slices.Sort(all)
	return all[len(all)/2]
}
