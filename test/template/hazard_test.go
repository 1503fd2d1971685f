package template

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

// The known hazard: an application that goes on seeing the template's copy of a
// page after the page was written to.

// scenarios asks guest/hazard.c what it can do.
func scenarios(t testing.TB, g *guest) []string {
	t.Helper()
	list := strings.Fields(strings.TrimPrefix(g.must("list"), "OK list"))
	if len(list) < 30 {
		t.Fatalf("only %d scenarios: %v", len(list), list)
	}
	return list
}

// hazards runs every scenario n times on pages that are the template's, and
// after each round has the pages become the template's again.
func hazards(g *guest, rounds, n int) error {
	list := scenarios(g.t, g)
	unsupported := ""
	for round := range rounds {
		used := 0
		for _, s := range list {
			n := n
			if s == "pause" || s == "busy" {
				// They take up to a second each.
				n = min(n, pick(1, 3))
			}
			reply, err := g.ask(fmt.Sprintf("run %s %d", s, n))
			if err != nil {
				return fmt.Errorf("round %d: %w", round, err)
			}
			if _, u, ok := strings.Cut(reply, "unsupported: "); ok {
				unsupported = u
			}
			// The program has 512 slots.
			if used += n; used+n > 400 {
				if _, err := g.ask("reset"); err != nil {
					return err
				}
				used = 0
			}
		}
		for _, req := range []string{"verify", "reset"} {
			if _, err := g.ask(req); err != nil {
				return fmt.Errorf("round %d: %w", round, err)
			}
		}
		if err := g.evict(); err != nil {
			return err
		}
		if _, err := g.ask("verify"); err != nil {
			return fmt.Errorf("round %d, after an eviction: %w", round, err)
		}
		if err := g.check(); err != nil {
			return err
		}
	}
	if unsupported != "none" {
		g.t.Logf("%s: refused by this kernel: %s", g.rt.m.name, unsupported)
	}
	return nil
}

func TestHazards(t *testing.T) {
	b := bundle(t, "hazard", seedArg())
	image, _ := makeImage(t, modeIdle(t), b)
	modes := []mode{modeIdle(t), modeForced(t)}
	if *longFlag {
		modes = append(modes, modeCopy(t), modeLoad(t), agentzip(t, "unit4k", "--agentzip-map-unit=4096", "--agentzip-test-evict-every=50ms"),
			agentzip(t, "unit2m", "--agentzip-map-unit=2097152", "--agentzip-test-evict-every=100ms"))
	}
	if haveStock(t) {
		// The scenarios themselves are right.
		modes = append(modes, modeStock(t))
	}
	for _, m := range modes {
		t.Run(m.name, func(t *testing.T) {
			began := time.Now()
			g := restore(t, newRuntime(t, m), "clone", b, image)
			g.usesTemplate()
			rounds, n := pick(2, 20), pick(6, 10)
			if m.name == "stock" {
				rounds = pick(1, 5)
			}
			if err := hazards(g, rounds, n); err != nil {
				t.Fatal(err)
			}
			t.Logf("%d rounds in %.1fs", rounds, time.Since(began).Seconds())
			if m.evicts {
				st := g.stats()
				t.Logf("evicted %d pages, restored %d; now %+v", st.EvictedPagesTotal, st.RestoredPagesTotal, st.Pages)
				if m.maps && m.name == "idle" {
					// What was written back is the template's again.
					g.must("reset")
					g.mustEvict()
					g.usesTemplate()
				}
			}
			g.end()
		})
	}
}
