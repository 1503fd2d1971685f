package integrity

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"runsc-agentzip/pkg/fleet"
	"runsc-agentzip/test/harness"
)

// Wrong input has to end in a non-zero exit code and a message that names the
// thing. The tests print what they got, so that a person can judge the wording.

// refused asserts that a command failed and that its message holds every word.
func refused(t *testing.T, what string, out string, err error, words ...string) {
	t.Helper()
	t.Logf("%s:\n%s", what, head(strings.TrimSpace(out), 1500))
	if err == nil {
		t.Errorf("%s was accepted", what)
	}
	for _, w := range words {
		if !strings.Contains(strings.ToLower(out), strings.ToLower(w)) {
			t.Errorf("%s: the message does not mention %q", what, w)
		}
	}
	// A stock runsc answers some damaged images with a stack trace.
	if strings.Contains(out, "goroutine ") && harness.UnderTest(t).Has("agentzip") {
		t.Errorf("%s: the message is a stack trace", what)
	}
}

func head(s string, n int) string {
	if len(s) > n {
		return s[:n] + "..."
	}
	return s
}

// runsc runs the binary under test with a private root and returns everything
// it printed. Whatever container it may have started is removed.
func runsc(t *testing.T, path string, attr *syscall.SysProcAttr, args ...string) (string, error) {
	t.Helper()
	// With what runsc mounts in it, it is removed when the test ends.
	root := harness.TempDir(t)
	if attr != nil && attr.Credential != nil {
		os.Chown(root, int(attr.Credential.Uid), int(attr.Credential.Gid))
	}
	global := []string{"--root=" + root, "--network=none", "--ignore-cgroups", "--overlay2=all:memory"}
	harness.AtExit(t, func() {
		exec.Command(harness.UnderTest(t).Path, append(global, "delete", "-force", "bad")...).Run()
	})
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var out bytes.Buffer
	cmd := exec.CommandContext(ctx, path, append(global, args...)...)
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.SysProcAttr = attr
	cmd.WaitDelay = 5 * time.Second
	err := cmd.Run()
	if ctx.Err() != nil {
		t.Errorf("%v did not end within a minute", args)
	}
	return out.String(), err
}

// quickBundle is a container that says that it ran: no refused one may.
func quickBundle(t *testing.T, annotations map[string]string) string {
	t.Helper()
	return harness.Bundle(t, fleet.Spec{Rootfs: *rootfsFlag, Args: []string{"/bin/echo", "the guest ran"}, Annotations: annotations})
}

func noGuest(t *testing.T, out string) {
	t.Helper()
	if strings.Contains(out, "the guest ran") {
		t.Error("the guest ran all the same")
	}
}

func agentzipOnly(t *testing.T) *harness.Runsc {
	t.Helper()
	b := harness.UnderTest(t)
	if !b.Has("agentzip") {
		t.Skip("a stock runsc has nothing of this")
	}
	return b
}

func TestBadFlags(t *testing.T) {
	b := agentzipOnly(t)
	for _, c := range []struct {
		flag  string
		words []string
	}{
		{"--agentzip=maybe", []string{"agentzip", "maybe", "on", "off"}},
		{"--agentzip=", []string{"agentzip"}},
		{"--agentzip-idle=soon", []string{"agentzip-idle", "soon"}},
		{"--agentzip-idle=-5s", []string{"agentzip-idle", "-5s"}},
		{"--agentzip-settle=-1ms", []string{"agentzip-settle", "-1ms"}},
		{"--agentzip-map-unit=5000", []string{"agentzip-map-unit", "5000"}},
		{"--agentzip-map-unit=4194304", []string{"agentzip-map-unit", "4194304"}},
		{"--agentzip-workers=0", []string{"agentzip-workers", "0"}},
		{"--agentzip-workers=1000", []string{"agentzip-workers", "1000"}},
		{"--agentzip-store-max=lots", []string{"agentzip-store-max", "lots"}},
		{"--agentzip-test-evict-every=banana", []string{"agentzip-test-evict-every", "banana"}},
		{"--agentzip-no-such-setting=1", []string{"agentzip-no-such-setting"}},
	} {
		t.Run(strings.TrimLeft(c.flag, "-"), func(t *testing.T) {
			out, err := runsc(t, b.Path, nil, c.flag, "run", "--bundle", quickBundle(t, nil), "bad")
			// The usage text lists every flag; only what comes before it is the
			// message.
			msg, _, _ := strings.Cut(out, "Usage")
			refused(t, c.flag, msg, err, c.words...)
			noGuest(t, out)
		})
	}
}

func TestBadAnnotations(t *testing.T) {
	b := agentzipOnly(t)
	for _, c := range []struct{ name, value string }{
		{"dev.agentzip.mode", "maybe"},
		{"dev.agentzip.idle", "soon"},
		{"dev.agentzip.settle", "-1ms"},
		{"dev.agentzip.map-unit", "5000"},
		{"dev.agentzip.workers", "1000"},
		{"dev.agentzip.no-such-setting", "1"},
		{"dev.agentzip.", "1"},
	} {
		t.Run(c.name+"="+c.value, func(t *testing.T) {
			out, err := runsc(t, b.Path, nil, "run", "--bundle", quickBundle(t, map[string]string{c.name: c.value}), "bad")
			refused(t, "annotation "+c.name+"="+c.value, out, err, c.name)
			noGuest(t, out)
		})
	}
	t.Run("good", func(t *testing.T) {
		for _, a := range []map[string]string{
			{"dev.agentzip.idle": "1s", "dev.agentzip.map-unit": "4096"},
			{"dev.agentzip.mode": "off"},
			{"dev.other": "1", "agentzip": "x"},
		} {
			out, err := runsc(t, b.Path, nil, "run", "--bundle", quickBundle(t, a), "bad")
			if err != nil || !strings.Contains(out, "the guest ran") {
				t.Errorf("annotations %v: %v\n%s", a, err, out)
			}
		}
	})
}

func TestUnknownContainer(t *testing.T) {
	b := agentzipOnly(t)
	for _, verb := range []string{"stats", "evict", "check"} {
		t.Run(verb, func(t *testing.T) {
			out, err := runsc(t, b.Path, nil, "agentzip", verb, "no-such-container")
			refused(t, "agentzip "+verb+" of an unknown container", out, err, "no-such-container")
		})
	}
	t.Run("no id", func(t *testing.T) {
		out, err := runsc(t, b.Path, nil, "agentzip", "stats")
		refused(t, "agentzip stats without an id", out, err, "container ID")
	})
	t.Run("unknown verb", func(t *testing.T) {
		out, err := runsc(t, b.Path, nil, "agentzip", "shrink", "x")
		refused(t, "agentzip shrink", out, err, "shrink")
	})
}

// TestOffCommands: with the backend off the commands say so.
func TestOffCommands(t *testing.T) {
	agentzipOnly(t)
	b := startBox(t, modeOff(t))
	for _, verb := range []string{"stats", "evict", "check"} {
		out, err := exec.Command(b.rt.Binary(), "--root="+b.rt.Root(), "agentzip", verb, b.sb.ID()).CombinedOutput()
		refused(t, "agentzip "+verb+" with --agentzip=off", string(out), err, "off")
	}
	b.exec(time.Minute, "/bin/true")
	b.finish()
}

// copyRunsc puts a copy of the binary into dir; a hard link where possible.
func copyRunsc(t *testing.T, from, dir string) string {
	t.Helper()
	to := filepath.Join(dir, "runsc-copy")
	if os.Link(from, to) == nil {
		return to
	}
	src, err := os.Open(from)
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	dst, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY, 0o755)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(dst, src); err != nil {
		t.Fatal(err)
	}
	if err := dst.Close(); err != nil {
		t.Fatal(err)
	}
	return to
}

func TestBinaryUnderTmp(t *testing.T) {
	b := agentzipOnly(t)
	dir, err := os.MkdirTemp("/tmp", "agentzip-binary-")
	if err != nil {
		t.Fatal(err)
	}
	harness.AtExit(t, func() { os.RemoveAll(dir) })
	path := copyRunsc(t, b.Path, dir)
	out, err := runsc(t, path, nil, "run", "--bundle", quickBundle(t, nil), "bad")
	refused(t, "a binary under /tmp", out, err, "/tmp", path)
	noGuest(t, out)
}

func TestNotRoot(t *testing.T) {
	b := agentzipOnly(t)
	// The repository may lie where nobody may look.
	dir := harness.TempDir(t)
	path := copyRunsc(t, b.Path, dir)
	bundle := filepath.Join(dir, "bundle")
	if err := fleet.WriteBundle(bundle, fleet.Spec{Rootfs: *rootfsFlag, Args: []string{"/bin/echo", "the guest ran"}}); err != nil {
		t.Fatal(err)
	}
	nobody := &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	out, err := runsc(t, path, nobody, "run", "--bundle", bundle, "bad")
	refused(t, "run as nobody", out, err, "root")
	noGuest(t, out)
	out, err = runsc(t, path, nobody, "agentzip", "stats", "bad")
	refused(t, "agentzip stats as nobody", out, err)
}

// ---- images --------------------------------------------------------------------

// badImage copies an image, changes it and expects the restore to be refused
// before the guest does anything.
func badImage(t *testing.T, m mode, bundle, image string, change func(dir string) error, words ...string) {
	t.Helper()
	dir := filepath.Join(harness.TempDir(t), "image")
	if err := os.CopyFS(dir, os.DirFS(image)); err != nil {
		t.Fatal(err)
	}
	if err := change(dir); err != nil {
		t.Fatal(err)
	}
	rt := newRuntime(t, m)
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	sb, err := rt.Restore(ctx, "bad", bundle, dir)
	if err == nil {
		// A pages file may be loaded in the background; the damage then has to
		// end the sandbox before it answers with anything.
		d := &daemon{t, sb}
		reply, aerr := d.ask("verify")
		if aerr == nil {
			t.Fatalf("the image was restored and the guest answered %q", reply)
		}
		if strings.Contains(aerr.Error(), "FAIL") {
			t.Errorf("the guest got wrong memory: %v", aerr)
		}
		code, werr := sb.Wait(ctx)
		err = fmt.Errorf("restored, then ended with exit code %d (%v): %w", code, werr, aerr)
	}
	if errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("restoring hangs")
	}
	refused(t, "the image", err.Error(), err, words...)
}

func TestBadImages(t *testing.T) {
	m := modeIdle(t)
	bundle := daemonBundle(t, 16)
	image := filepath.Join(harness.TempDir(t), "image")
	rt := newRuntime(t, m)
	d := startDaemon(t, rt, "origin", bundle)
	d.must("work 100")
	evict(t, m, d.sb)
	d.checkpoint(m, image, fleet.CheckpointOptions{})
	harness.Delete(t, d.sb)
	entries, err := os.ReadDir(image)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		fi, _ := e.Info()
		t.Logf("image: %s %d bytes", e.Name(), fi.Size())
	}

	truncate := func(name string, part float64) func(string) error {
		return func(dir string) error {
			f := filepath.Join(dir, name)
			fi, err := os.Stat(f)
			if err != nil {
				return err
			}
			return os.Truncate(f, int64(float64(fi.Size())*part))
		}
	}
	// The stock runsc's messages often leave out which file is wrong.
	names := func(file string) []string {
		if m.evicts {
			return []string{file}
		}
		return nil
	}
	t.Run("pages truncated", func(t *testing.T) {
		badImage(t, m, bundle, image, truncate("pages.img", 0.5), names("pages.img")...)
	})
	t.Run("pages empty", func(t *testing.T) {
		badImage(t, m, bundle, image, truncate("pages.img", 0), names("pages.img")...)
	})
	t.Run("pages missing", func(t *testing.T) {
		badImage(t, m, bundle, image, func(dir string) error { return os.Remove(filepath.Join(dir, "pages.img")) }, "pages.img")
	})
	t.Run("metadata truncated", func(t *testing.T) {
		badImage(t, m, bundle, image, truncate("pages_meta.img", 0.5), names("pages_meta.img")...)
	})
	t.Run("state truncated", func(t *testing.T) {
		badImage(t, m, bundle, image, truncate("checkpoint.img", 0.7), names("checkpoint.img")...)
	})
	t.Run("state empty", func(t *testing.T) {
		badImage(t, m, bundle, image, truncate("checkpoint.img", 0), names("checkpoint.img")...)
	})
	t.Run("no image", func(t *testing.T) {
		badImage(t, m, bundle, image, func(dir string) error { return os.Remove(filepath.Join(dir, "checkpoint.img")) }, "checkpoint.img")
	})
	t.Run("not an image", func(t *testing.T) {
		badImage(t, m, bundle, image, func(dir string) error {
			return os.WriteFile(filepath.Join(dir, "checkpoint.img"), bytes.Repeat([]byte("no image "), 10000), 0o644)
		}, names("checkpoint.img")...)
	})
	t.Run("other version", func(t *testing.T) {
		badImage(t, m, bundle, image, func(dir string) error { return setImageVersion(dir, "release-19990101.0") },
			"version", "release-19990101.0")
	})
	// The unchanged image is fine: the refusals above are due to the changes.
	t.Run("unchanged", func(t *testing.T) {
		rt := newRuntime(t, m)
		d := restoreDaemon(t, rt, "good", bundle, image)
		d.must("verify")
		harness.Delete(t, d.sb)
	})
}

// setImageVersion rewrites the runsc version in an image's header: a magic
// number, the length of a JSON map, the map.
func setImageVersion(dir, version string) error {
	path := filepath.Join(dir, "checkpoint.img")
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if len(b) < 16 || uint64(len(b)-16) < binary.BigEndian.Uint64(b[8:]) {
		return fmt.Errorf("%s has no header", path)
	}
	n := binary.BigEndian.Uint64(b[8:])
	var meta map[string]string
	if err := json.Unmarshal(b[16:16+n], &meta); err != nil {
		return err
	}
	if _, ok := meta["runsc_version"]; !ok {
		return fmt.Errorf("%s names no version: %v", path, meta)
	}
	meta["runsc_version"] = version
	js, err := json.Marshal(meta)
	if err != nil {
		return err
	}
	out := binary.BigEndian.AppendUint64(bytes.Clone(b[:8]), uint64(len(js)))
	return os.WriteFile(path, append(append(out, js...), b[16+n:]...), 0o644)
}

// ---- damage and want of memory ----------------------------------------------------

// TestCorruption flips a bit in a stored page: the guest must never see it. The
// sandbox dies with a message that names the page.
func TestCorruption(t *testing.T) {
	b := agentzipOnly(t)
	m := mode{name: "corrupt", binary: b.Path, flags: []string{"--agentzip=on", "--agentzip-test-corrupt=2000"}, evicts: true}
	bundle := daemonBundle(t, 32)
	rt := newRuntime(t, m)
	d := startDaemon(t, rt, "victim", bundle)
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	if _, err := d.sb.Evict(ctx); err != nil {
		t.Fatal(err)
	}
	rep, err := d.sb.Check(ctx)
	t.Logf("check: %v %v", rep.Problems, err)
	if err == nil && len(rep.Problems) == 0 {
		t.Error("agentzip check does not see the damaged page")
	}
	reply, err := d.ask("verify")
	if err == nil {
		t.Fatalf("the guest lives on: %s", reply)
	}
	if strings.Contains(err.Error(), "FAIL") {
		t.Fatalf("the guest got wrong memory: %v", err)
	}
	code, werr := d.sb.Wait(ctx)
	t.Logf("the sandbox ended with exit code %d, %v\n%v", code, werr, err)
	if code == 0 {
		t.Error("exit code 0")
	}
	msg := err.Error() + d.sb.Stderr() + logsOf(rt)
	line := regexp.MustCompile(`(?m)^.*guest memory.*$`).FindString(msg)
	t.Logf("message: %s", line)
	if !strings.Contains(line, "page") || !(strings.Contains(line, "checksum") || strings.Contains(line, "corrupt")) {
		t.Error("no message names the page and what is wrong with it")
	}
}

// logsOf returns what the runtime's processes have logged so far.
func logsOf(rt *harness.Runtime) string {
	var out strings.Builder
	files, _ := filepath.Glob(filepath.Join(rt.LogDir, "*"))
	for _, f := range files {
		b, _ := os.ReadFile(f)
		out.Write(b)
	}
	return out.String()
}

// memcgV1 returns the memory cgroup of this process, or "".
func memcgV1() string {
	b, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(b)) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(f) == 3 && f[1] == "memory" {
			// The path may be one of another cgroup namespace.
			for _, dir := range []string{"/sys/fs/cgroup/memory" + f[2], "/sys/fs/cgroup/memory"} {
				if _, err := os.Stat(dir + "/memory.limit_in_bytes"); err == nil {
					return dir
				}
			}
		}
	}
	return ""
}

// memcgPrefix starts the names of the cgroups that the tests make. The process id of the
// tests follows.
const memcgPrefix = "agentzip-integrity-"

// removeCgroups removes the cgroups of runs that were killed.
func removeCgroups() {
	parent := memcgV1()
	if parent == "" {
		return
	}
	dirs, _ := filepath.Glob(filepath.Join(parent, memcgPrefix+"*"))
	for _, dir := range dirs {
		pid, _, _ := strings.Cut(strings.TrimPrefix(filepath.Base(dir), memcgPrefix), "-")
		if _, err := os.Stat(filepath.Join("/proc", pid)); !errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err := os.Remove(dir); err != nil {
			fmt.Fprintf(os.Stderr, "removing what a killed run left: %v\n", err)
		}
	}
}

// TestMemoryLimit lets a restore run into the limit of a memory cgroup: the
// guest's memory fits while it is evicted, and not when all comes back. The
// sandbox may die of that, but not show wrong data, and others live on.
func TestMemoryLimit(t *testing.T) {
	m := modeIdle(t)
	parent := memcgV1()
	if parent == "" {
		t.Skip("no cgroup v1 memory controller: nothing can be limited here")
	}
	dir, err := os.MkdirTemp(parent, fmt.Sprintf("%s%d-", memcgPrefix, os.Getpid()))
	if err != nil {
		t.Skipf("creating a memory cgroup: %v", err)
	}
	harness.AtExit(t, func() {
		// It empties a moment after its processes have ended.
		for range 100 {
			if err = os.Remove(dir); err == nil || errors.Is(err, os.ErrNotExist) {
				return
			}
			time.Sleep(50 * time.Millisecond)
		}
		t.Errorf("removing the cgroup: %v", err)
	})
	write := func(dir, file, value string) error {
		return os.WriteFile(filepath.Join(dir, file), []byte(value), 0)
	}
	usage := func() int64 {
		var n int64
		b, _ := os.ReadFile(filepath.Join(dir, "memory.usage_in_bytes"))
		fmt.Sscan(string(b), &n)
		return n
	}

	bundle := daemonBundle(t, 160)
	witnessBundle := daemonBundle(t, 8)
	rt := newRuntime(t, m)
	witness := startDaemon(t, rt, "witness", witnessBundle)

	// Children start in the group of the process that starts them.
	self := fmt.Sprint(os.Getpid())
	back := func() {
		if err := write(parent, "cgroup.procs", self); err != nil {
			t.Errorf("moving back to %s: %v", parent, err)
		}
	}
	harness.AtExit(t, back)
	if err := write(dir, "cgroup.procs", self); err != nil {
		t.Skipf("entering a memory cgroup: %v", err)
	}
	d := startDaemon(t, rt, "limited", bundle)
	back()
	d.must("verify")
	full := usage()
	evict(t, m, d.sb)
	small := usage()
	limit := small + (full-small)/3
	if !m.evicts {
		limit = full / 2
	}
	t.Logf("cgroup: %d MiB with all memory resident, %d MiB with it evicted, limit %d MiB", full>>20, small>>20, limit>>20)
	if m.evicts && small > full*3/4 {
		t.Errorf("eviction returned too little to the host")
	}
	if err := write(dir, "memory.limit_in_bytes", fmt.Sprint(limit)); err != nil {
		t.Logf("setting the limit: %v (nothing can be reclaimed)", err)
		write(dir, "memory.limit_in_bytes", fmt.Sprint(full-(full-small)/2))
	}

	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	reply, err := d.sb.Request(ctx, "verify")
	switch {
	case err == nil && strings.Count(reply, "OK ") == 2:
		t.Logf("the sandbox survived: %s", reply)
	case strings.Contains(reply, "FAIL") || (err != nil && strings.Contains(err.Error(), "FAIL")):
		t.Errorf("the guest saw wrong memory: %s %v", reply, err)
	case errors.Is(err, context.DeadlineExceeded):
		t.Errorf("the sandbox hangs: %s", rt.Stacks(d.sb))
	default:
		code, werr := d.sb.Wait(ctx)
		t.Logf("the sandbox died with exit code %d (%v)\nrequest: %q %v\nstderr: %s", code, werr, reply, err, harness.Tail(d.sb.Stderr(), 2000))
		if code == 0 {
			t.Error("exit code 0")
		}
		if msg := d.sb.Stderr() + reply; m.evicts && !strings.Contains(msg, "memory") {
			t.Error("nothing tells the user that the memory limit ended the sandbox")
		}
		oom, _ := os.ReadFile(filepath.Join(dir, "memory.oom_control"))
		t.Logf("memory.oom_control:\n%s", oom)
	}
	// Removing it works, and nothing else was hit.
	harness.Delete(t, d.sb)
	witness.must("verify")
	harness.Delete(t, witness.sb)
}
