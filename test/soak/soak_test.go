package soak

import (
	"context"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
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

// TestBurst: a burst of short processes, then a wait; the sandbox is as small as after
// the burst before, each time.
func TestBurst(t *testing.T) {
	const mib = 4
	rounds, processes := 6, 300
	if *longFlag {
		rounds, processes = 10, 2000
	}
	rt := newRuntime(t)
	g := start(t, rt, "burst", bundle(t, mib), mib)
	seed := *seedFlag
	t.Logf("seed %d", seed)
	var costs []cost
	// The first rounds are not compared: they are what makes the sandbox as large as it
	// stays.
	const warm = 3
	for round := range warm + rounds {
		n := processes
		if round == 0 {
			n = 100
			if err := g.do(crowd(seed)); err != nil {
				t.Fatal(err)
			}
		}
		began := time.Now()
		if err := g.do(burst(seed+uint64(round), n, widest)); err != nil {
			t.Fatal(err)
		}
		took := time.Since(began)
		if err := g.do(g.model.sum()); err != nil {
			t.Fatal(err)
		}
		c, err := g.floor()
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("round %2d: %d processes in %.1f s, small after %.1f s; %v", round, n, took.Seconds(), (time.Since(began) - took).Seconds(), c)
		costs = append(costs, c)
	}
	costs = costs[warm:]
	// One garbage collection leaves half a MiB more than another.
	few := len(costs) / 2
	if what := grown(costs[:few], costs[len(costs)-few:]); what != "" {
		t.Errorf("after %d more bursts of %d processes the sandbox has grown: %s", rounds-few, processes, what)
	}
	// The program's memory is the same in all waits, and so is what it takes.
	owned := func(c cost) uint64 { return c.owned }
	if before, after := median(costs[:few], owned), median(costs[len(costs)-few:], owned); after > before+256<<10 {
		t.Errorf("after %d more bursts of %d processes the sandbox owns %d KiB instead of %d KiB", rounds-few, processes, after>>10, before>>10)
	}
	if err := g.check(); err != nil {
		t.Error(err)
	}
}

// TestPageOut: a sandbox whose Sentry has its heap swapped out in each wait, as far as
// the host has swap, and collects no garbage until it resumes, goes on as ever.
func TestPageOut(t *testing.T) {
	const mib, rounds = 4, 4
	if !harness.UnderTest(t).Has("agentzip-pageout-after") {
		harness.Skip(t, "the runtime has no --agentzip-pageout-after")
	}
	logs := harness.TempDir(t)
	rt := newRuntime(t, "--agentzip-pageout-after=750ms", "--debug", "--debug-log="+logs+"/")
	g := start(t, rt, "pageout", bundle(t, mib), mib)
	outs := func() (n int) {
		files, err := filepath.Glob(filepath.Join(logs, "*"))
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			b, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			n += strings.Count(string(b), "had the host swap out the Sentry's heap")
		}
		return n
	}
	r := rand.New(rand.NewPCG(*seedFlag, 0))
	for round := range rounds {
		before := outs()
		for _, k := range kinds {
			if err := g.do(k(g.model, r.Uint64(), r)); err != nil {
				t.Fatal(err)
			}
		}
		if err := g.do(g.model.sum()); err != nil {
			t.Fatal(err)
		}
		harness.Eventually(t, bounded, 100*time.Millisecond, fmt.Sprintf("in round %d the heap is swapped out", round), func() error {
			if n := outs(); n <= before {
				return fmt.Errorf("%d times so far", n)
			}
			return nil
		})
	}
	if err := g.do(g.model.sum()); err != nil {
		t.Fatal(err)
	}
	if err := g.check(); err != nil {
		t.Error(err)
	}
}

// TestSoak: clones of one template take steps of all kinds between waits of random
// length. All answers are right, and the last wait costs what an early one did.
func TestSoak(t *testing.T) {
	const mib, clones = 8, 8
	lasts := *soakFlag
	if lasts == 0 {
		lasts = 20 * time.Second
		if *longFlag {
			lasts = 30 * time.Minute
		}
	}
	t.Logf("seed %d, %v", *seedFlag, lasts)
	rt := newRuntime(t)
	bundle := bundle(t, mib)
	origin := start(t, rt, "origin", bundle, mib)
	if err := origin.do(origin.model.sum()); err != nil {
		t.Fatal(err)
	}
	image := filepath.Join(harness.TempDir(t), "image")
	if err := origin.Checkpoint(harness.Within(t, bounded), image, fleet.CheckpointOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := origin.Delete(harness.Within(t, bounded)); err != nil {
		t.Fatal(err)
	}
	var all []*guest
	for i := range clones {
		id := fmt.Sprintf("clone%d", i)
		all = append(all, &guest{Sandbox: rt.Clone(t, id, bundle, image), evicts: rt.evicts, model: slices.Clone(origin.model)})
	}

	rands := make([]*rand.Rand, clones)
	for i := range rands {
		rands[i] = rand.New(rand.NewPCG(*seedFlag, uint64(i)))
	}
	// Every kind of step has its turn before the first look.
	each(t, all, func(_ context.Context, i int, g *guest) error {
		if err := g.do(crowd(rands[i].Uint64())); err != nil {
			return err
		}
		for _, k := range kinds {
			if err := g.do(k(g.model, rands[i].Uint64(), rands[i])); err != nil {
				return err
			}
		}
		return nil
	})
	// A quarter of the time makes the clones as large as they stay. One that is larger
	// later has not been so, or it grows: then it does so again.
	work(t, all, rands, lasts/4)
	early := floors(t, all)
	suspects := make([]bool, clones)
	for again := false; ; again = true {
		work(t, all, rands, lasts-lasts/4)
		// All that a clone holds is looked at: what is stored, by the runtime itself,
		// and then, by the guest, what comes back of it.
		for _, g := range all {
			if err := g.check(); err != nil {
				t.Error(err)
			}
			if err := g.do(g.model.sum()); err != nil {
				t.Error(err)
			}
		}
		late := floors(t, all)
		for i, g := range all {
			if what := more(early[i], late[i]); what != nil {
				t.Errorf("%s has %s", g.ID(), strings.Join(what, ", "))
			}
			what := grownMemory(early[i], late[i])
			if what == nil {
				continue
			}
			t.Logf("%s is larger: %s", g.ID(), what)
			if again && suspects[i] {
				t.Errorf("%s has grown each time: %s", g.ID(), what)
			}
			suspects[i] = true
		}
		if again || !slices.Contains(suspects, true) {
			break
		}
		early = late
	}
	var steps int
	var evicted, restored uint64
	for _, g := range all {
		if err := g.check(); err != nil {
			t.Error(err)
		}
		steps += g.right
		if !g.evicts {
			continue
		}
		st, err := g.stats()
		if err != nil {
			t.Fatal(err)
		}
		if st.EvictedPagesTotal == 0 || st.RestoredPagesTotal == 0 || st.Phase.Waits < 3 {
			t.Errorf("%s proves nothing: %d pages evicted, %d restored in %d waits", g.ID(), st.EvictedPagesTotal, st.RestoredPagesTotal, st.Phase.Waits)
		}
		evicted += st.EvictedPagesTotal
		restored += st.RestoredPagesTotal
	}
	t.Logf("%d steps, all answers right; %d pages evicted, %d restored", steps, evicted, restored)
}

// work has all guests take steps of random kinds, each at its own pace.
func work(t *testing.T, all []*guest, rands []*rand.Rand, lasts time.Duration) {
	t.Helper()
	end := time.Now().Add(lasts)
	stopReports := report(t, all, min(lasts, 5*time.Minute)/2)
	defer stopReports()
	each(t, all, func(ctx context.Context, i int, g *guest) error {
		r := rands[i]
		for {
			// 0.1 to 8 s, each factor of two as often as any other.
			wait := time.Duration(float64(100*time.Millisecond) * math.Pow(80, r.Float64()))
			select {
			case <-ctx.Done():
				return nil
			case <-time.After(min(wait, time.Until(end))):
			}
			if !time.Now().Before(end) {
				return nil
			}
			if err := g.do(kinds[r.IntN(len(kinds))](g.model, r.Uint64(), r)); err != nil {
				return err
			}
		}
	})
}

// each runs f for all guests at once and ends the test if one fails; the others end
// then, too.
func each(t *testing.T, all []*guest, f func(ctx context.Context, i int, g *guest) error) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	errs := make([]error, len(all))
	var wg sync.WaitGroup
	for i, g := range all {
		wg.Go(func() {
			if errs[i] = f(ctx, i, g); errs[i] != nil {
				cancel()
			}
		})
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			t.Error(err)
		}
	}
	if t.Failed() {
		t.FailNow()
	}
}

// looks is how often floors looks: what one garbage collection leaves is up to a MiB
// more than what the next one does, and grown compares medians.
const looks = 3

// floors measures each guest in several waits of all, with a small step before each.
func floors(t *testing.T, all []*guest) [][]cost {
	t.Helper()
	out := make([][]cost, len(all))
	for look := range looks {
		each(t, all, func(_ context.Context, i int, g *guest) error {
			if look != 0 {
				if err := g.do(g.model.sum()); err != nil {
					return err
				}
			}
			c, err := g.floor()
			out[i] = append(out[i], c)
			return err
		})
		for i, g := range all {
			t.Logf("%s: %v", g.ID(), out[i][look])
		}
	}
	return out
}

// report says now and then what all guests cost, whatever they do.
func report(t *testing.T, all []*guest, every time.Duration) (stop func()) {
	done, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		began := time.Now()
		tick := time.NewTicker(every)
		defer tick.Stop()
		for {
			select {
			case <-done:
				return
			case <-tick.C:
			}
			var sum, guest uint64
			counts := map[string]int{}
			for _, g := range all {
				c, err := g.measure()
				if err != nil {
					continue // its step says why
				}
				sum += c.outside()
				guest += c.guest
				counts["processes"] += c.processes
				counts["descriptors"] += c.fds
				counts["threads"] += c.threads
			}
			var text []string
			for _, k := range slices.Sorted(maps.Keys(counts)) {
				text = append(text, fmt.Sprintf("%d %s", counts[k], k))
			}
			t.Logf("after %v: memory files of guests %d MiB, all else %d MiB, %s", time.Since(began).Round(time.Second), guest>>20, sum>>20, strings.Join(text, ", "))
		}
	}()
	return func() {
		close(done)
		<-stopped
	}
}
