package pool

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"syscall"
	"testing"
	"time"
)

var killsFlag = flag.Int("kills", 10, "how often TestChaos kills the pool")

// TestChaos kills the pool again and again while siblings work: no byte of theirs
// is lost, none of them ends, and they share once more with the pool that stays.
func TestChaos(t *testing.T) {
	clones := 8
	if testing.Short() {
		clones = 2
	}
	socket := filepath.Join(folder(t), "pool.sock")
	image := template(t, "/burst")
	// Quick enough that pages come and go between two kills.
	rt := newRuntime(t, "--agentzip-pool="+socket, "--agentzip-idle=20ms", "--agentzip-settle=5ms", "--agentzip-deepen-after=150ms")
	tenant := bundle(t, domain("tenant"), "/burst")
	p := startPool(t, socket)
	var gs []*guest
	for i := range clones {
		g := restore(t, rt, fmt.Sprintf("clone%d", i), tenant, image)
		g.must("go %d", i+1)
		gs = append(gs, g)
	}

	most := uint64(0) // pages that a sandbox had in a pool which was then killed
	for n := range *killsFlag {
		// Some pools are killed before they serve, or while they ask for pages.
		life := 3 * time.Second
		if n%4 == 1 {
			life = 200 * time.Millisecond
		}
		time.Sleep(rand.N(life))
		g := gs[n%clones]
		most = max(most, g.stats().Pages.Pool)
		p.sigkill()
		g.must("alive")
		if n%2 == 1 {
			time.Sleep(rand.N(time.Second))
		}
		p = launchPool(t, socket)
	}

	for _, g := range gs {
		eventually(t, g.sb.ID()+" is attached again", func() error {
			g.must("alive")
			if s := g.stats(); s.Pool.State != "connected" || *killsFlag > 0 && s.Pool.Connects < 2 {
				return fmt.Errorf("%+v", s.Pool)
			}
			return nil
		})
	}
	for _, g := range gs {
		g.check()
	}
	// They rest, and have what they have in common in the pool.
	for _, g := range gs {
		g.sharing(1)
	}
	for _, g := range gs {
		g.check()
		s := g.stats()
		if s.ChecksumFailures != 0 {
			t.Errorf("%s: %d checksum failures", g.sb.ID(), s.ChecksumFailures)
		}
		t.Logf("%s: %d connections, %d pages found, %d given; %d evicted, %d restored",
			g.sb.ID(), s.Pool.Connects, s.Pool.Found, s.Pool.Published, s.EvictedPagesTotal, s.RestoredPagesTotal)
	}
	s, err := p.stats()
	if err != nil || s.Total.Pages == 0 || s.Total.Clients != clones || s.Total.Violations != 0 {
		t.Errorf("the last pool: %+v, %v", s.Total, err)
	}
	t.Logf("the last pool has %d pages; a sandbox had up to %d in one that was killed", s.Total.Pages, most)
	if *killsFlag >= 10 && most == 0 {
		t.Error("no sandbox that was looked at had a page in a pool that was killed")
	}
	p.end()
	for _, g := range gs {
		g.check()
	}
}

// sigkill kills the pool, and tells if it has ended by itself.
func (p *pool) sigkill() {
	p.t.Helper()
	if err := p.cmd.Process.Kill(); err != nil {
		p.t.Fatal(err)
	}
	_ = p.cmd.Wait()
	if ws := p.cmd.ProcessState.Sys().(syscall.WaitStatus); ws.Signal() != syscall.SIGKILL {
		p.t.Fatalf("the pool ended by itself: %v", p.cmd.ProcessState)
	}
}
