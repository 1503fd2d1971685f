package pressure

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"runsc-agentzip/pkg/fleet"
	"runsc-agentzip/test/harness"
)

// limit is that of most sandboxes here, in bytes, and touched is how much memory they
// use, in MiB: compressed, it fits in by a margin.
const (
	limit   = 128 * mib
	touched = 192
)

func TestFill(t *testing.T) {
	t.Run("stock", func(t *testing.T) {
		newHost(t, stock(t)).start(t, "stock", limit).killed(touched, "fill %d 1", touched)
	})
	t.Run("off", func(t *testing.T) {
		newHost(t, agentzip(t), "--agentzip=off").start(t, "off", limit).killed(touched, "fill %d 1", touched)
	})
	t.Run("agentzip", func(t *testing.T) {
		g := newHost(t, agentzip(t)).start(t, "one", limit)
		g.must("fill %d 1", touched)
		g.must("verify")
		g.pressed(touched)
	})
}

func TestThreads(t *testing.T) {
	g := newHost(t, agentzip(t)).start(t, "threads", limit)
	g.must("fill %d 4", touched)
	g.must("verify")
	g.pressed(touched)
}

// TestFiles: what is written to tmpfs, or read there, causes no faults of the
// application.
func TestFiles(t *testing.T) {
	t.Run("write", testWriteFiles)
	t.Run("read", testReadFiles)
}

func testWriteFiles(t *testing.T) {
	g := newHost(t, agentzip(t)).start(t, "files", limit)
	g.must("files %d", touched)
	g.must("verify")
	g.pressed(touched)
}

// testReadFiles writes them slowly: each part is evicted before the next.
func testReadFiles(t *testing.T) {
	g := newHost(t, agentzip(t)).start(t, "files", limit)
	for range 4 {
		g.must("files %d", touched/4)
		g.evicted()
	}
	g.must("verify")
	g.pressed(touched)
}

// TestReads: nor does what the kernel reads into the application's memory.
func TestReads(t *testing.T) {
	g := newHost(t, agentzip(t)).start(t, "reads", limit)
	g.must("read %d", touched)
	g.must("verify")
	g.pressed(touched)
}

// TestFork: children share the memory first, then have a third each of their own.
func TestFork(t *testing.T) {
	g := newHost(t, agentzip(t)).start(t, "fork", limit)
	g.must("fill %d 1", touched/2)
	g.must("fork 3")
	g.must("verify")
	g.pressed(touched)
}

// TestIncompressible: nothing helps, so it ends as under stock, and soon.
func TestIncompressible(t *testing.T) {
	g := newHost(t, agentzip(t)).start(t, "random", limit)
	msg := g.killed(touched, "random %d", touched)
	for _, want := range []string{`container "random" was killed (SIGKILL)`, "needed more memory than the limit", "raise the limit"} {
		if !strings.Contains(msg, want) {
			t.Errorf("runsc says %q, and should say %q", msg, want)
		}
	}
}

// TestClone: a clone may be given less memory than its template has, and may look at and
// change all of it.
func TestClone(t *testing.T) {
	h := newHost(t, agentzip(t))
	origin := h.start(t, "origin", 0)
	origin.must("fill %d 1", touched)
	image := filepath.Join(harness.TempDir(t), "image")
	if err := origin.sb.Checkpoint(harness.Within(t, time.Minute), image, fleet.CheckpointOptions{}); err != nil {
		t.Fatal(err)
	}
	g := h.restore(t, "clone", limit, image)
	g.must("verify")
	g.must("again")
	g.must("verify")
	g.pressed(touched)
}

// TestParent: the limit of the cgroup above counts as the sandbox's own would.
func TestParent(t *testing.T) {
	t.Run("stock", func(t *testing.T) {
		h := newHost(t, stock(t))
		h.pod(t, limit)
		h.start(t, "stock", 0).killed(touched, "fill %d 1", touched)
	})
	t.Run("agentzip", func(t *testing.T) {
		h := newHost(t, agentzip(t))
		h.pod(t, limit)
		g := h.start(t, "one", 0)
		g.limit = limit
		g.must("fill %d 1", touched)
		g.must("verify")
		if p := g.stats().Pressure; p.Above != 1 {
			t.Errorf("%+v", p)
		}
		g.pressed(touched)
	})
}

// TestSiblings: two sandboxes use more than they may together, one of which would be
// allowed all of it by its own limit.
func TestSiblings(t *testing.T) {
	h := newHost(t, agentzip(t))
	h.pod(t, 2*limit)
	gs := []*guest{h.start(t, "limited", 4*limit), h.start(t, "unlimited", 0)}
	done := make(chan error, len(gs))
	for _, g := range gs {
		g.limit = 2 * limit
		go func() {
			err := g.ask("fill %d 1", touched)
			if err == nil {
				err = g.ask("verify")
			}
			done <- err
		}()
	}
	for range gs {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	for _, g := range gs {
		if p := g.stats().Pressure; p.Above != 1 {
			t.Errorf("%s: %+v", g.sb.ID(), p)
		}
		g.pressed(touched)
	}
}

// TestUpdate: a limit comes, is lowered and goes while the sandbox runs.
func TestUpdate(t *testing.T) {
	h := newHost(t, agentzip(t))
	g := h.start(t, "update", 0)
	g.must("fill %d 1", touched)
	update := func(limit int64) {
		t.Helper()
		h.setLimit(t, "update", limit)
		g.limit = limit
		harness.Eventually(t, 10*time.Second, 50*time.Millisecond, "the sandbox follows the limit", func() error {
			if got := g.stats().Pressure.LimitBytes; got != uint64(limit) {
				return fmt.Errorf("the limit is %d, and the sandbox's is %d", limit, got)
			}
			return nil
		})
	}
	if p := g.stats().Pressure; p.LimitBytes != 0 || p.Evictions != 0 {
		t.Errorf("at first: %+v", p)
	}
	update(2 * limit)
	g.must("again")
	g.must("verify")
	g.evicted()
	update(limit)
	before := g.stats().Pressure.Evictions
	g.must("verify")
	g.must("again")
	after := g.stats().Pressure.Evictions
	if after == before {
		t.Errorf("under the lower limit there was no eviction: %d", after)
	}
	update(0)
	g.must("verify")
	if p := g.stats().Pressure; p.Level != "none" || p.Evictions > after+1 {
		t.Errorf("without a limit: %+v, after %d evictions", p, after)
	}
	update(2 * limit)
	g.must("again")
	g.must("verify")
	g.pressed(touched)
}

func TestStats(t *testing.T) {
	g := newHost(t, agentzip(t)).start(t, "stats", limit)
	if p := g.stats().Pressure; p.LimitBytes != limit || p.Evictions != 0 || p.UsedBytes == 0 || p.UsedBytes > limit {
		t.Errorf("at first: %+v", p)
	}
	done := make(chan error, 1)
	go func() { done <- g.ask("fill %d 1", touched) }()
	levels := make(map[string]int)
	for working := true; working; {
		select {
		case err := <-done:
			if err != nil {
				t.Fatal(err)
			}
			working = false
		case <-time.After(50 * time.Millisecond):
			p := g.stats().Pressure
			levels[p.Level]++
			if p.LimitBytes != limit || p.UsedBytes > limit {
				t.Errorf("%+v", p)
			}
		}
	}
	t.Logf("levels seen: %v", levels)
	if levels["high"]+levels["critical"] == 0 {
		t.Errorf("no pressure was seen: %v", levels)
	}
	g.pressed(touched)
}

// TestAmple: nothing is done for a sandbox that is far below its limit.
func TestAmple(t *testing.T) {
	g := newHost(t, agentzip(t)).start(t, "ample", 2048*mib)
	g.must("fill %d 1", touched)
	g.must("verify")
	p := g.end(touched).Pressure
	if p.Level != "none" || p.LimitBytes != 2048*mib || p.Evictions != 0 || p.ThrottledNS != 0 {
		t.Errorf("%+v", p)
	}
}

func TestUnlimited(t *testing.T) {
	g := newHost(t, agentzip(t)).start(t, "unlimited", 0)
	g.must("fill %d 1", touched)
	p := g.end(touched).Pressure
	if p.Level != "none" || p.LimitBytes != 0 || p.UsedBytes != 0 || p.Evictions != 0 || p.ThrottledNS != 0 {
		t.Errorf("%+v", p)
	}
}
