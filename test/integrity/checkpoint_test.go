package integrity

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"runsc-agentzip/pkg/fleet"
	"runsc-agentzip/test/harness"
)

// daemon drives guest/daemon.c, which runs as init: only what descends from
// init survives a checkpoint.
type daemon struct {
	t  testing.TB
	sb *fleet.Sandbox
}

// daemonBundle writes the bundle that a daemon starts from and that all its
// checkpoints are restored with.
func daemonBundle(t testing.TB, mb int) string {
	t.Helper()
	return harness.Bundle(t, guestSpec(t, guestPath(t, "daemon"), fmt.Sprintf("--mb=%d", mb), seedArg()))
}

func startDaemon(t testing.TB, rt *harness.Runtime, id, bundle string) *daemon {
	t.Helper()
	return &daemon{t, rt.Start(t, id, bundle)}
}

func restoreDaemon(t testing.TB, rt *harness.Runtime, id, bundle, image string) *daemon {
	t.Helper()
	return &daemon{t, rt.Clone(t, id, bundle, image)}
}

// ask sends one request; both processes of the daemon have to answer OK. It
// does not end the test, so that it may be called from any goroutine.
func (d *daemon) ask(req string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	reply, err := d.sb.Request(ctx, req)
	if err != nil {
		return "", fmt.Errorf("%s: %s: %w", d.sb.ID(), req, err)
	}
	if strings.Count(reply, "OK ") != 2 || strings.Contains(reply, "FAIL") {
		return "", fmt.Errorf("%s: %s: %s", d.sb.ID(), req, reply)
	}
	return reply, nil
}

func (d *daemon) must(req string) string {
	d.t.Helper()
	reply, err := d.ask(req)
	if err != nil {
		d.t.Fatal(err)
	}
	return reply
}

func (d *daemon) checkpoint(m mode, image string, o fleet.CheckpointOptions) {
	d.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	began := time.Now()
	if err := d.sb.Checkpoint(ctx, image, o); err != nil {
		d.t.Fatalf("checkpoint of %s: %v", d.sb.ID(), err)
	}
	var size int64
	entries, _ := os.ReadDir(image)
	for _, e := range entries {
		if fi, err := e.Info(); err == nil {
			size += fi.Size()
		}
	}
	d.t.Logf("%s: checkpoint of %s in %.2fs, %d MiB", m.name, d.sb.ID(), time.Since(began).Seconds(), size>>20)
}

// evictedNow asserts that a good part of the memory is evicted at this moment:
// a checkpoint of what is resident would prove nothing.
func evictedNow(t testing.TB, m mode, sb *fleet.Sandbox) {
	t.Helper()
	if !m.evicts {
		return
	}
	p := harness.Stats(t, sb).Pages
	away := p.Zero + p.Pool + p.Delta + p.Compressed + p.Template
	t.Logf("before the checkpoint: %d pages evicted, %d resident", away, p.Resident+p.Raw)
	if away < (p.Resident+p.Raw)/2 || away < 1000 {
		t.Errorf("too little is evicted for the checkpoint to prove anything: %+v", p)
	}
}

// restoreModes are the ways in which an image has to restore.
func restoreModes(t testing.TB) []mode {
	ms := []mode{modeIdle(t), modeForced(t), modeOff(t)}
	if s := stockBinary(); s != nil {
		if v := harness.UnderTest(t).Version; v == s.Version {
			ms = append(ms, mode{name: "stock", binary: s.Path})
		} else {
			t.Logf("%s says %q and the runtime under test %q: an image restores under the same version only, so this is left out", s.Path, s.Version, v)
		}
	}
	return distinct(ms...)
}

// TestCheckpointMatrix checkpoints a sandbox whose memory is evicted, lets it
// run on, checkpoints it again and restores both images in every mode.
func TestCheckpointMatrix(t *testing.T) {
	mb := 48
	if *longFlag {
		mb = 256
	}
	m := modeIdle(t)
	bundle := daemonBundle(t, mb)
	images := harness.TempDir(t)
	rt := newRuntime(t, m)
	d := startDaemon(t, rt, "origin", bundle)
	d.must("verify")
	d.must("work 5000")
	d.must("stamp first")
	first := d.must("sum")
	evict(t, m, d.sb)
	evictedNow(t, m, d.sb)
	d.checkpoint(m, filepath.Join(images, "first"), fleet.CheckpointOptions{LeaveRunning: true})

	// The sandbox goes on as if nothing had happened.
	if got := d.must("sum"); got != first {
		t.Fatalf("memory changed across checkpoint --leave-running: %s, was %s", got, first)
	}
	d.must("verify")
	d.must("work 5000")
	evict(t, m, d.sb)
	d.must("verify")
	d.must("stamp second")
	second := d.must("sum")
	if second == first {
		t.Fatalf("the daemon's work changed nothing: %s", second)
	}
	evict(t, m, d.sb)
	evictedNow(t, m, d.sb)
	verifyBackend(t, m, d.sb)
	d.checkpoint(m, filepath.Join(images, "second"), fleet.CheckpointOptions{})
	harness.Delete(t, d.sb)

	for _, rm := range restoreModes(t) {
		for name, want := range map[string]string{"first": first, "second": second} {
			if name == "first" && rm.name != m.name && !*longFlag {
				continue
			}
			t.Run(rm.name+"/"+name, func(t *testing.T) {
				rt := newRuntime(t, rm)
				d := restoreDaemon(t, rt, "restored", bundle, filepath.Join(images, name))
				if got := d.must("sum"); got != want {
					t.Errorf("memory differs from what was checkpointed: %s, was %s", got, want)
				}
				if got := d.must("stamp"); !strings.Contains(got, "stamp "+name) {
					t.Errorf("stamp: %s", got)
				}
				for range 2 {
					evict(t, rm, d.sb)
					d.must("verify")
					d.must("work 5000")
				}
				d.must("verify")
				verifyBackend(t, rm, d.sb)
				harness.Delete(t, d.sb)
			})
		}
	}
}

// TestCheckpointGenerations checkpoints what was restored, again and again, in
// changing modes and with every kind of image.
func TestCheckpointGenerations(t *testing.T) {
	bundle := daemonBundle(t, 32)
	images := harness.TempDir(t)
	plan := []struct {
		m mode
		o fleet.CheckpointOptions
	}{
		{modeIdle(t), fleet.CheckpointOptions{}},
		{modeForced(t), fleet.CheckpointOptions{Compression: "flate-best-speed"}},
		{modeIdle(t), fleet.CheckpointOptions{ExcludeZeroPages: true}},
		{modeOff(t), fleet.CheckpointOptions{}},
		{modeIdle(t), fleet.CheckpointOptions{}},
	}
	if !*longFlag {
		plan = plan[:3]
	}
	image, sum := "", ""
	for gen, p := range plan {
		rt := newRuntime(t, p.m)
		id := fmt.Sprintf("gen%d", gen)
		var d *daemon
		if image == "" {
			d = startDaemon(t, rt, id, bundle)
		} else {
			d = restoreDaemon(t, rt, id, bundle, image)
			if got := d.must("sum"); got != sum {
				t.Fatalf("generation %d (%s): memory is %s, was %s", gen, p.m.name, got, sum)
			}
			if got := d.must("stamp"); !strings.Contains(got, fmt.Sprintf("stamp gen%d", gen-1)) {
				t.Errorf("generation %d: %s", gen, got)
			}
		}
		d.must("work 4000")
		evict(t, p.m, d.sb)
		d.must("work 4000")
		d.must("verify")
		d.must("stamp " + id)
		sum = d.must("sum")
		evict(t, p.m, d.sb)
		evictedNow(t, p.m, d.sb)
		verifyBackend(t, p.m, d.sb)
		image = filepath.Join(images, id)
		d.checkpoint(p.m, image, p.o)
		harness.Delete(t, d.sb)
	}
	rt := newRuntime(t, modeOff(t))
	d := restoreDaemon(t, rt, "last", bundle, image)
	if got := d.must("sum"); got != sum {
		t.Fatalf("last generation: memory is %s, was %s", got, sum)
	}
	d.must("verify")
	harness.Delete(t, d.sb)
}

// TestClones restores several sandboxes from one image at once and lets them
// work, evict and verify at the same time. None may see another's writes.
func TestClones(t *testing.T) {
	n, rounds := 3, 2
	if *longFlag {
		n, rounds = 8, 6
	}
	m := modeIdle(t)
	bundle := daemonBundle(t, 32)
	image := filepath.Join(harness.TempDir(t), "image")
	rt := newRuntime(t, m)
	origin := startDaemon(t, rt, "origin", bundle)
	origin.must("work 3000")
	origin.must("stamp origin")
	sum := origin.must("sum")
	evict(t, m, origin.sb)
	evictedNow(t, m, origin.sb)
	origin.checkpoint(m, image, fleet.CheckpointOptions{})
	harness.Delete(t, origin.sb)

	clones := make([]*daemon, n)
	errs := make([]error, n)
	var wg sync.WaitGroup
	began := time.Now()
	for i := range clones {
		wg.Go(func() {
			errs[i] = func() error {
				ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
				defer cancel()
				id := fmt.Sprintf("clone%d", i)
				sb, err := rt.Restore(ctx, id, bundle, image)
				if err != nil {
					return err
				}
				d := &daemon{t, sb}
				clones[i] = d
				got, err := d.ask("sum")
				if err != nil {
					return err
				}
				if got != sum {
					return fmt.Errorf("%s: memory is %s, was %s", id, got, sum)
				}
				for range rounds {
					// Different amounts of work: the clones part ways.
					if _, err := d.ask(fmt.Sprintf("work %d", 1000+100*i)); err != nil {
						return err
					}
					if _, err := d.ask("stamp " + id); err != nil {
						return err
					}
					if m.evicts {
						if _, err := sb.Evict(ctx); err != nil {
							return err
						}
					}
					if _, err := d.ask("verify"); err != nil {
						return err
					}
				}
				if got, err := d.ask("stamp"); err != nil || strings.Count(got, "stamp "+id) != 2 {
					return fmt.Errorf("%s: %s, %v", id, got, err)
				}
				return nil
			}()
		})
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			t.Error(err)
		}
	}
	if t.Failed() {
		return
	}
	t.Logf("%d clones restored, worked and verified in %.1fs", n, time.Since(began).Seconds())
	sums := make(map[string]bool)
	for _, d := range clones {
		sums[d.must("sum")] = true
		verifyBackend(t, m, d.sb)
		harness.Delete(t, d.sb)
	}
	if len(sums) != n {
		t.Errorf("%d clones that did different work have %d different memories", n, len(sums))
	}
}

// TestCheckpointWhileEvicting checkpoints in the middle of eviction passes and
// of work, several times, and looks at what each image holds.
func TestCheckpointWhileEvicting(t *testing.T) {
	rounds := 2
	if *longFlag {
		rounds = 10
	}
	m := modeForced(t)
	bundle := daemonBundle(t, 32)
	images := harness.TempDir(t)
	rt := newRuntime(t, m)
	d := startDaemon(t, rt, "origin", bundle)
	for i := range rounds {
		d.must("work 3000")
		sum := d.must("sum")
		// Somewhere in a pass.
		time.Sleep(time.Duration(137*(i+3)%300) * time.Millisecond)
		image := filepath.Join(images, fmt.Sprint(i))
		d.checkpoint(m, image, fleet.CheckpointOptions{LeaveRunning: true})
		d.must("work 1000")
		d.must("verify")
		crt := newRuntime(t, modeOff(t))
		c := restoreDaemon(t, crt, "copy", bundle, image)
		if got := c.must("sum"); got != sum {
			t.Errorf("round %d: image holds %s, was %s", i, got, sum)
		}
		c.must("verify")
		harness.Delete(t, c.sb)
		os.RemoveAll(image)
	}
	time.Sleep(time.Second)
	d.must("verify")
	verifyBackend(t, m, d.sb)
	harness.Delete(t, d.sb)
}

// TestPauseResume evicts around and during `runsc pause`.
func TestPauseResume(t *testing.T) {
	m := modeIdle(t)
	rt := newRuntime(t, m)
	d := startDaemon(t, rt, "paused", daemonBundle(t, 24))
	runscCmd := func(args ...string) {
		t.Helper()
		out, err := exec.Command(rt.Binary(), append([]string{"--root=" + rt.Root()}, args...)...).CombinedOutput()
		if err != nil {
			t.Fatalf("runsc %v: %v %s", args, err, out)
		}
	}
	sum := d.must("sum")
	evict(t, m, d.sb)
	for range 2 {
		runscCmd("pause", "paused")
		evict(t, m, d.sb)
		runscCmd("resume", "paused")
		if got := d.must("sum"); got != sum {
			t.Fatalf("memory is %s after a pause, was %s", got, sum)
		}
		d.must("verify")
		evict(t, m, d.sb)
	}
	d.must("verify")
	verifyBackend(t, m, d.sb)
	harness.Delete(t, d.sb)
}

// TestAccounting: what the guest and the host's tools are told about the
// guest's memory does not depend on whether it is evicted.
func TestAccounting(t *testing.T) {
	agentzipOnly(t)
	m := modeIdle(t)
	// No eviction of its own accord: the figures before have to be those of
	// resident memory.
	m.flags = append(m.flags, "--agentzip-idle=10m")
	rt := newRuntime(t, m)
	d := startDaemon(t, rt, "account", daemonBundle(t, 96))
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	figures := func() map[string]int64 {
		t.Helper()
		res, err := d.sb.Exec(ctx, "/bin/cat", "/proc/meminfo", "/proc/1/status", "/proc/1/statm")
		if err != nil || res.ExitCode != 0 {
			t.Fatalf("reading figures: %+v %v", res, err)
		}
		got := make(map[string]int64)
		for line := range strings.Lines(res.Stdout) {
			f := strings.Fields(line)
			var kb int64
			if len(f) == 3 && f[2] == "kB" {
				fmt.Sscan(f[1], &kb)
				got[strings.TrimSuffix(f[0], ":")] = kb << 10
			} else if len(f) == 7 {
				fmt.Sscan(f[1], &kb)
				got["statm resident"] = kb << 12
			}
		}
		out, err := exec.Command(rt.Binary(), "--root="+rt.Root(), "events", "--stats", "account").Output()
		if err != nil {
			t.Fatalf("runsc events: %v", err)
		}
		var ev struct {
			Data struct {
				Memory struct {
					Usage struct {
						Usage int64 `json:"usage"`
					} `json:"usage"`
				} `json:"memory"`
			} `json:"data"`
		}
		if err := json.Unmarshal(out, &ev); err != nil {
			t.Fatalf("runsc events: %v: %s", err, out)
		}
		got["events usage"] = ev.Data.Memory.Usage.Usage
		return got
	}
	d.must("verify")
	before := figures()
	evict(t, m, d.sb)
	evictedNow(t, m, d.sb)
	after := figures()
	d.must("verify")
	again := figures()
	for _, name := range []string{"MemTotal", "MemFree", "MemAvailable", "Cached", "VmSize", "VmRSS", "VmData", "statm resident", "events usage"} {
		b, a, r := before[name], after[name], again[name]
		t.Logf("%-15s %8d KiB resident, %8d evicted, %8d restored", name, b>>10, a>>10, r>>10)
		const slack = 8 << 20 // the commands that read the figures
		if a < b-slack || a > b+slack || r < b-slack || r > b+slack {
			t.Errorf("%s changes with eviction: %d, %d when evicted, %d when restored", name, b, a, r)
		}
	}
	verifyBackend(t, m, d.sb)
	harness.Delete(t, d.sb)
}

// TestStoreLimit: a full store means that pages stay resident, nothing else.
func TestStoreLimit(t *testing.T) {
	b := agentzipOnly(t)
	const limit = 2 << 20
	m := mode{name: "store limit", binary: b.Path, flags: []string{"--agentzip=on", fmt.Sprintf("--agentzip-store-max=%d", limit)}, evicts: true}
	rt := newRuntime(t, m)
	d := startDaemon(t, rt, "full", daemonBundle(t, 48))
	for range 2 {
		evict(t, m, d.sb)
		if st := harness.Stats(t, d.sb); st.StoreBytes > limit*5/4 {
			t.Errorf("the store holds %d bytes, more than its limit %d", st.StoreBytes, limit)
		}
		d.must("work 3000")
		d.must("verify")
	}
	verifyBackend(t, m, d.sb)
	harness.Delete(t, d.sb)
}
