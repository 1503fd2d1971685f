package template

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"runsc-agentzip/test/harness"
)

// Clones have what the sandbox had that the checkpoint was taken of, byte for
// byte, and keep what they make of it.

// TestKinds restores 1 and 8 clones of a family of processes with every kind of
// memory. Each verifies all of it, works, has its pages evicted and verifies
// again.
func TestKinds(t *testing.T) {
	mb := pick(24, 160)
	b := bundle(t, "kinds", fmt.Sprintf("--mb=%d", mb), seedArg())
	image, replies := makeImage(t, modeIdle(t), b, "work 4000", "verify", "sum")
	sum := replies[2]
	t.Logf("the template has %d MiB", imageSize(t, image)>>20)
	for _, c := range []struct {
		m      mode
		clones int
		rounds int
	}{
		{modeIdle(t), 1, pick(3, 20)},
		{modeForced(t), 1, pick(3, 20)},
		{modeForced(t), 8, pick(1, 10)},
		{modeIdle(t), 8, pick(1, 10)},
		{modeCopy(t), pick(1, 4), pick(1, 10)},
		{agentzip(t, "unit4k", "--agentzip-map-unit=4096", "--agentzip-test-evict-every=300ms"), pick(0, 2), 5},
		{agentzip(t, "unit2m", "--agentzip-map-unit=2097152", "--agentzip-test-evict-every=300ms"), pick(0, 2), 5},
	} {
		if c.clones == 0 {
			continue
		}
		t.Run(fmt.Sprintf("%s/%d", c.m.name, c.clones), func(t *testing.T) {
			began := time.Now()
			rt := newRuntime(t, c.m)
			clones := restoreAll(t, rt, c.clones, b, image)
			clones[0].usesTemplate()
			each(t, c.clones, func(i int) error {
				return live(clones[i], sum, c.rounds, 1500+200*i)
			})
			t.Logf("%d clones restored, worked and verified in %.1fs", c.clones, time.Since(began).Seconds())
			sums := make(map[string]bool)
			each(t, c.clones, func(i int) error { return clones[i].check() })
			for _, g := range clones {
				sums[g.must("sum")] = true
				g.end()
			}
			if len(sums) != c.clones {
				t.Errorf("%d clones that did different work have %d different memories", c.clones, len(sums))
			}
		})
	}
}

// live has a clone of guest/kinds.c prove that it is right and work.
func live(g *guest, sum string, rounds, work int) error {
	got, err := g.ask("sum")
	if err != nil {
		return err
	}
	if got != sum {
		return fmt.Errorf("%s: memory is %s, was %s", g.sb.ID(), got, sum)
	}
	// The same again out of what has been evicted meanwhile.
	if err := g.evict(); err != nil {
		return err
	}
	if _, err := g.ask("verify"); err != nil {
		return err
	}
	for range rounds {
		for _, req := range []string{fmt.Sprintf("work %d", work), "verify"} {
			if _, err := g.ask(req); err != nil {
				return err
			}
		}
		if err := g.evict(); err != nil {
			return err
		}
		if _, err := g.ask("verify"); err != nil {
			return err
		}
	}
	return nil
}

// TestRunning checkpoints programs in the middle of their work, with their
// threads and processes at each other's pages, and has clones go on with it.
func TestRunning(t *testing.T) {
	secs := pick(14, 90)
	for _, c := range []struct {
		program string
		args    []string
		m       mode
		clones  int
	}{
		{"racer", []string{fmt.Sprintf("--seconds=%d", secs), seedArg(), "--pages=2048"}, modeForced(t), pick(2, 4)},
		{"memtorture", []string{fmt.Sprintf("--seconds=%d", secs), seedArg(), "--mb=32", "--threads=3", "--tmpfs=/dev/shm", "--overlay=/var/tmp"}, modeForced(t), pick(1, 4)},
		{"racer", []string{fmt.Sprintf("--seconds=%d", secs), seedArg(), "--pages=8192"}, modeIdle(t), pick(0, 4)},
		{"memtorture", []string{fmt.Sprintf("--seconds=%d", secs), seedArg(), "--mb=32", "--threads=3", "--tmpfs=/dev/shm", "--overlay=/var/tmp"}, modeCopy(t), pick(0, 2)},
	} {
		if c.clones == 0 {
			continue
		}
		t.Run(c.program+"/"+c.m.name, func(t *testing.T) {
			b := bundle(t, c.program, c.args...)
			image := harness.TempDir(t)
			origin := newRuntime(t, modeIdle(t))
			sb, err := origin.Run(harness.Within(t, time.Minute), "origin", b)
			if err != nil {
				t.Fatal(err)
			}
			// It says nothing until it has ended. Some seconds are left for the
			// clones: a program looks at the clock, which goes on.
			time.Sleep(5 * time.Second)
			o := &guest{t, origin, sb, b}
			o.checkpoint(image, checkpointOptions)
			o.end()
			rt := newRuntime(t, c.m)
			clones := restoreAll(t, rt, c.clones, b, image)
			clones[0].usesTemplate()
			each(t, c.clones, func(i int) error {
				line, err := clones[i].finish(time.Duration(secs)*time.Second*4 + 2*time.Minute)
				if err != nil {
					return err
				}
				t.Logf("%s: %s", clones[i].sb.ID(), line)
				code, err := clones[i].sb.Wait(harness.Within(t, time.Minute))
				if err == nil && code != 0 {
					err = fmt.Errorf("exit code %d", code)
				}
				return err
			})
		})
	}
}

// TestGenerations checkpoints clones and restores what they wrote, again and
// again: pages of the first template, of what differs from it and of none of
// that end up in the next.
func TestGenerations(t *testing.T) {
	b := bundle(t, "kinds", fmt.Sprintf("--mb=%d", pick(24, 96)), seedArg())
	image, replies := makeImage(t, modeIdle(t), b, "sum")
	sum := replies[0]
	plan := []mode{modeIdle(t), modeForced(t)}
	if *longFlag {
		plan = append(plan, modeCopy(t), modeForced(t), modeLoad(t), modeIdle(t), modeForced(t))
	}
	if haveStock(t) {
		plan = append(plan, modeStock(t))
	}
	for gen, m := range plan {
		rt := newRuntime(t, m)
		g := restore(t, rt, fmt.Sprintf("gen%d", gen), b, image)
		if err := errors.Join(live(g, sum, 1, 2500), g.evict(), g.check()); err != nil {
			t.Fatalf("generation %d: %v", gen, err)
		}
		sum = g.must("sum")
		if m.evicts {
			g.mustEvict()
		}
		if gen+1 == len(plan) {
			g.end()
			break
		}
		next := harness.TempDir(t)
		g.checkpoint(next, checkpointOptions)
		g.end()
		// The new image is complete by itself.
		removeImage(t, image)
		image = next
	}
}
