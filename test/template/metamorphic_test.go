package template

import (
	"fmt"
	"testing"
	"time"

	"runsc-agentzip/test/harness"
)

// TestMetamorphic runs one random program, guest/meta.c, whose memory depends on
// nothing but its seed and the number of its operations: straight through under
// a stock runsc; and in clones of templates, under all kinds of eviction, with
// another checkpoint in the middle whose clone goes on. All have to end with the
// same memory.
func TestMetamorphic(t *testing.T) {
	ops := [3]int{pick(600, 4000), pick(600, 4000), pick(400, 4000)}
	for i := range pick(1, 8) {
		seed := *seedFlag + uint64(i)*1000
		t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
			b := bundle(t, "meta", fmt.Sprintf("--seed=%d", seed), fmt.Sprintf("--mb=%d", pick(24, 64)))

			// What has to come out: after each part, what was read on the way
			// and what there is.
			var want [3][2]string
			ref := start(t, newRuntime(t, modeStock(t)), "reference", b)
			began := time.Now()
			for k, n := range ops {
				want[k] = [2]string{ref.must(fmt.Sprintf("run %d", n)), ref.must("digest")}
			}
			ref.end()
			t.Logf("stock: %d operations in %.1fs; %s", ops[0]+ops[1]+ops[2], time.Since(began).Seconds(), want[2][1])

			// advance does part k in pieces, with what a test can do to the
			// memory between them.
			advance := func(t *testing.T, g *guest, k int) {
				t.Helper()
				reply, pieces := "", 4
				for i := range pieces {
					n := ops[k] / pieces
					if i == 0 {
						n += ops[k] % pieces
					}
					reply = g.must(fmt.Sprintf("run %d", n))
					g.mustEvict()
				}
				digest := g.must("digest")
				if got := [2]string{reply, digest}; got != want[k] {
					t.Fatalf("part %d under %s: %v, want %v", k, g.rt.m.name, got, want[k])
				}
			}

			origin := start(t, newRuntime(t, modeIdle(t)), "origin", b)
			advance(t, origin, 0)
			first := harness.TempDir(t)
			origin.checkpoint(first, checkpointOptions)
			origin.end()
			modes := []mode{modeForced(t), modeIdle(t), modeCopy(t), modeLoad(t)}
			if *longFlag {
				modes = append(modes, modeStock(t),
					agentzip(t, "unit4k", "--agentzip-map-unit=4096", "--agentzip-test-evict-every=50ms"),
					agentzip(t, "unit2m", "--agentzip-map-unit=2097152", "--agentzip-test-evict-every=100ms"))
			}
			for _, m := range modes {
				t.Run(m.name, func(t *testing.T) {
					rt := newRuntime(t, m)
					g := restore(t, rt, "second", b, first)
					if got := g.must("digest"); got != want[0][1] {
						t.Fatalf("the clone has %s, the template %s", got, want[0][1])
					}
					advance(t, g, 1)
					if err := g.check(); err != nil {
						t.Fatal(err)
					}
					second := harness.TempDir(t)
					g.checkpoint(second, checkpointOptions)
					g.end()
					g = restore(t, rt, "third", b, second)
					advance(t, g, 2)
					if err := g.check(); err != nil {
						t.Fatal(err)
					}
					g.end()
				})
			}
		})
	}
}
