package template

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"runsc-agentzip/test/harness"
)

// TestReplacedDuringRestore puts another image in the place of the one that is
// being restored, while the restore waits for its index. The two are of clones
// of one template, so the metadata of one fits the pages of the other: the clone
// has to have the memory of one of them, with the kernel state of the same, or
// be refused.
func TestReplacedDuringRestore(t *testing.T) {
	b := bundle(t, "server", "--mb=32")
	parent, _ := makeImage(t, modeIdle(t), b)
	rt := newRuntime(t, modeIdle(t))
	var images, sums [2]string
	for i := range images {
		g := restore(t, rt, fmt.Sprintf("parent%d", i), b, parent)
		if i == 1 {
			g.must("step")
		}
		sums[i] = g.must("sum")
		images[i] = filepath.Join(harness.TempDir(t), "image")
		g.checkpoint(images[i], checkpointOptions)
		g.end()
	}
	if sums[0] == sums[1] {
		t.Fatal("a step changes nothing")
	}
	if out, err := command(t, rt.Binary(), "agentzip", "template", "info", images[1]); err != nil {
		t.Fatalf("template info: %v: %s", err, out)
	}

	// Whoever makes an index holds this lock; so do we, and the restore waits.
	pages, err := os.Open(filepath.Join(images[0], "pages.img"))
	try(t, err)
	defer pages.Close()
	try(t, unix.Flock(int(pages.Fd()), unix.LOCK_EX))
	type result struct {
		g   *guest
		err error
	}
	done := make(chan result, 1)
	go func() {
		g, err := tryRestore(t, rt, "clone", b, images[0])
		done <- result{g, err}
	}()
	time.Sleep(2 * time.Second)
	try(t, os.Rename(images[0], images[0]+".old"))
	try(t, os.Rename(images[1], images[0]))
	try(t, unix.Flock(int(pages.Fd()), unix.LOCK_UN))
	r := <-done
	if r.err != nil {
		t.Logf("refused: %v", r.err)
		return
	}
	// The restore had opened the first image's metadata by then.
	got := r.g.must("sum")
	r.g.end()
	if got != sums[0] {
		t.Errorf("the clone has the kernel state of an image whose memory is %s, and %s: that of the image that took its place (%s)", sums[0], got, sums[1])
	}
}
