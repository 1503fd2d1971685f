package pressure

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	"runsc-agentzip/pkg/fleet"
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
	image := filepath.Join(tempDir(t), "image")
	if err := origin.sb.Checkpoint(deadline(time.Minute), image, fleet.CheckpointOptions{}); err != nil {
		t.Fatal(err)
	}
	g := h.restore(t, "clone", limit, image)
	g.must("verify")
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
