package pool

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"runsc-agentzip/pkg/fleet"
	"runsc-agentzip/pkg/pool/wire"
	"runsc-agentzip/test/harness"
)

// common is how many pages the siblings have in common besides the template's,
// and most is how many of them have to end up in the pool.
const (
	common = 20 << 20 / 4096
	most   = common * 9 / 10
)

func TestSiblingsShare(t *testing.T) {
	socket := filepath.Join(folder(t), "pool.sock")
	image := template(t)
	p := startPool(t, socket)
	rt := newRuntime(t, "--agentzip-pool="+socket)
	tenant := bundle(t, domain("tenant"))
	var gs []*guest
	for i := range 3 {
		g := restore(t, rt, fmt.Sprintf("sibling%d", i), tenant, image)
		g.must("fill 7")
		g.must("own %d", 100+i)
		gs = append(gs, g)
	}
	other := restore(t, rt, "other", bundle(t, domain("another")), image)
	alone := restore(t, rt, "alone", bundle(t, nil), image)
	// The same memory, another template: none.
	fresh := start(t, rt, "fresh", tenant)
	for _, g := range []*guest{other, alone, fresh} {
		g.must("fill 7")
	}
	for _, g := range gs {
		g.sharing(most)
	}
	other.evict()
	fresh.evict()
	alone.evict()
	other.private("connected")
	fresh.private("connected")
	alone.private("none")
	for _, g := range gs {
		g.check()
	}
	for _, g := range gs {
		g.sharing(most) // once more, after the check brought all of it back
	}

	s, err := p.stats()
	if err != nil {
		t.Fatal(err)
	}
	if s.Total.Pages < most || s.Total.Pages > common+common/10 {
		t.Errorf("the pool has %d pages, the siblings have %d in common", s.Total.Pages, common)
	}
	if s.Total.Clients != 5 || len(s.Domains) != 3 {
		t.Errorf("the pool has %d clients in %d domains: want 5 in 3", s.Total.Clients, len(s.Domains))
	}

	// Pages outlive the pool.
	p.kill()
	for _, g := range gs[:2] {
		g.check()
		g.must("own 55")
	}
	if st := gs[0].stats(); st.Pool.State != "disconnected" || st.Pool.Reason == "" {
		t.Errorf("after the pool's end: %+v", st.Pool)
	}
	if st := gs[2].stats(); st.Pages.Pool < most {
		t.Errorf("a sandbox that was not touched has %d pages of the pool left", st.Pages.Pool)
	}

	// The next pool finds them, and they find each other: one has pages of the
	// last pool, the others evict theirs anew.
	p = startPool(t, socket)
	for _, g := range append(gs, other, fresh) {
		eventually(t, g.sb.ID()+" is attached again", func() error {
			if s := g.stats(); s.Pool.State != "connected" || s.Pool.Connects != 2 {
				return fmt.Errorf("%+v", s.Pool)
			}
			return nil
		})
	}
	for _, g := range gs[:2] {
		g.check()
	}
	for _, g := range gs {
		g.sharing(most)
	}
	gs[1].must("fill 8")
	gs[2].must("fill 8")
	gs[1].sharing(most)
	gs[2].sharing(most)
	eventually(t, "the new pool has both", func() error {
		if s, err := p.stats(); err != nil || s.Total.Pages < most {
			return fmt.Errorf("%d pages, %v", s.Total.Pages, err)
		}
		return nil
	})
	for _, g := range append(gs, other, alone, fresh) {
		g.check()
	}

	// A clone that comes later finds what it needs at once.
	late := restore(t, rt, "late", tenant, image)
	late.must("fill 8")
	late.sharing(most)
	late.check()
	p.end()
	for _, g := range append(gs, late) {
		g.check()
	}
}

// TestPoolIdle: a pool ends when it is idle, and forgets
// sandboxes that are gone.
func TestPoolIdle(t *testing.T) {
	socket := filepath.Join(folder(t), "pool.sock")
	rt := newRuntime(t, "--agentzip-pool="+socket, "--agentzip-domain=tenant")
	g := start(t, rt, "one", bundle(t, nil))
	if e := g.sb.Stderr(); !strings.Contains(e, socket) || !strings.Contains(e, "agentzip pool serve") {
		t.Errorf("without a pool runsc says %q", e)
	}
	p := startPool(t, socket, "--idle-exit=1s")
	eventually(t, "the sandbox is attached", func() error {
		if s := g.stats(); s.Pool.State != "connected" {
			return fmt.Errorf("%+v", s.Pool)
		}
		return nil
	})
	files, _ := filepath.Glob(socket + ".d/*.json")
	if len(files) != 1 {
		t.Errorf("registrations: %q", files)
	}
	if err := g.sb.Delete(harness.Within(t, time.Minute)); err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Wait(); err != nil {
		t.Errorf("the idle pool ended with %v", err)
	}
	p = startPool(t, socket)
	eventually(t, "the registration is removed", func() error {
		if files, _ := filepath.Glob(socket + ".d/*"); len(files) != 0 {
			return fmt.Errorf("there is %q", files)
		}
		return nil
	})
	out, err := exec.Command(binary(t), "agentzip", "pool", "serve", "--socket="+socket).CombinedOutput()
	if err == nil || !strings.Contains(string(out), "another pool serves") {
		t.Errorf("a second pool: %v, %s", err, out)
	}
	p.end()
}

// TestRegistrations: a sandbox is registered until it is deleted, and one that is killed
// with its runsc until the next pool starts.
func TestRegistrations(t *testing.T) {
	socket := filepath.Join(folder(t), "pool.sock")
	rt := newRuntime(t, "--agentzip-pool="+socket, "--agentzip-domain=tenant")
	p := startPool(t, socket)
	b := bundle(t, nil)
	var gs []*guest
	for i := range 3 {
		gs = append(gs, start(t, rt, fmt.Sprintf("sandbox%d", i), b))
	}
	registered := func(gs ...*guest) error {
		files, _ := filepath.Glob(socket + ".d/*")
		pids := make(map[string]int)
		for _, name := range files {
			b, err := os.ReadFile(name)
			if err != nil {
				return err
			}
			var r struct {
				Name    string
				Process struct{ PID int }
			}
			if err := json.Unmarshal(b, &r); err != nil {
				return err
			}
			pids[r.Name] = r.Process.PID
		}
		want := make(map[string]int)
		for _, g := range gs {
			want[g.sb.ID()] = g.sb.Pid()
		}
		if !maps.Equal(pids, want) {
			return fmt.Errorf("registered: %v, want %v", pids, want)
		}
		return nil
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Error(err)
		}
	}
	must(registered(gs...))
	must(gs[0].sb.Delete(harness.Within(t, time.Minute)))
	must(registered(gs[1:]...))
	if s, err := p.stats(); err != nil || s.Total.Clients != 2 {
		t.Errorf("%d clients, %v", s.Total.Clients, err)
	}

	p.end()
	pid := gs[1].sb.Pid()
	for _, pid := range []int{harness.Parent(t, pid), pid} { // runsc would delete it
		must(syscall.Kill(pid, syscall.SIGKILL))
	}
	must(registered(gs[1:]...))
	p = startPool(t, socket)
	eventually(t, "the next pool knows who lives", func() error {
		s, err := p.stats()
		if err == nil && s.Total.Clients != 1 {
			err = fmt.Errorf("%d clients", s.Total.Clients)
		}
		return errors.Join(err, registered(gs[2]))
	})
	must(gs[1].sb.Delete(harness.Within(t, time.Minute)))
	must(registered(gs[2]))
	must(gs[2].sb.Delete(harness.Within(t, time.Minute)))
	must(registered())
	if _, err := p.stats(); err != nil {
		t.Error(err)
	}
	p.end()
}

func TestStartOnDemand(t *testing.T) {
	socket := filepath.Join(folder(t), "deeper", "pool.sock")
	harness.AtExit(t, func() { endByLog(t, socket) })
	rt := newRuntime(t, "--agentzip-pool="+socket, "--agentzip-pool-start", "--agentzip-domain=tenant")
	b := bundle(t, nil)
	for i := range 2 {
		g := start(t, rt, fmt.Sprintf("sandbox%d", i), b)
		if e := g.sb.Stderr(); e != "" {
			t.Errorf("runsc says %q", e)
		}
		if s := g.stats(); s.Pool.State != "connected" {
			t.Errorf("%+v", s.Pool)
		}
	}
	log, err := os.ReadFile(socket + ".log")
	if err != nil || bytes.Count(log, []byte("serving at")) != 1 {
		t.Errorf("the pool's log, %v: %s", err, log)
	}
	for file, mode := range map[string]os.FileMode{socket: 0o600, socket + ".d": 0o700, socket + ".log": 0o600} {
		if st, err := os.Lstat(file); err != nil || st.Mode().Perm() != mode {
			t.Errorf("%s: %v, %v", file, st.Mode(), err)
		}
	}
	bin := binary(t)
	if out, err := exec.Command(bin, "--agentzip-pool="+socket, "agentzip", "pool", "stats").CombinedOutput(); err != nil || !strings.Contains(string(out), "clients") {
		t.Errorf("agentzip pool stats: %v, %s", err, out)
	}
	if out, err := exec.Command(bin, "agentzip", "pool", "drain", "--socket="+socket).CombinedOutput(); err != nil {
		t.Errorf("agentzip pool drain: %v, %s", err, out)
	}
}

// TestNoPool: whatever listens on the socket, sandboxes start and say what is
// wrong.
func TestNoPool(t *testing.T) {
	rt := newRuntime(t, "--agentzip-domain=tenant")
	b := bundle(t, nil)
	for name, c := range map[string]struct {
		listen func(t *testing.T, socket string)
		want   string
	}{
		"none": {func(*testing.T, string) {}, "start one with"},
		"file": {func(t *testing.T, socket string) {
			if err := os.WriteFile(socket, nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}, "connection refused"},
		"stream": {func(t *testing.T, socket string) {
			listen(t, "unix", socket, nil)
		}, "another program"},
		"garbage": {func(t *testing.T, socket string) {
			listen(t, "unixpacket", socket, []byte("HTTP/1.1 400 Bad Request\r\n\r\n"))
		}, "no pool"},
		"silent": {func(t *testing.T, socket string) {
			listen(t, "unixpacket", socket, nil)
		}, "no answer"},
		"version": {func(t *testing.T, socket string) {
			var w wire.Writer
			w.Begin(wire.Refuse, 0)
			w.Body([]byte("the sandbox speaks version 1 of the pool's protocol"))
			listen(t, "unixpacket", socket, w.Bytes())
		}, "speaks version"},
	} {
		t.Run(name, func(t *testing.T) {
			socket := filepath.Join(folder(t), "pool.sock")
			c.listen(t, socket)
			g := start(t, rt, name, b, fleet.WithFlags("--agentzip-pool="+socket))
			if e := g.sb.Stderr(); !strings.Contains(e, socket) || !strings.Contains(e, c.want) || strings.Count(e, "\n") != 1 {
				t.Errorf("runsc says %q, and should say %q", e, c.want)
			}
			g.must("fill 3")
			g.evict()
			g.private("disconnected")
			g.check()
			if err := g.sb.Delete(harness.Within(t, time.Minute)); err != nil {
				t.Error(err)
			}
		})
	}
}

// listen answers every connection with the message, or with nothing, and keeps
// it open.
func listen(t *testing.T, network, socket string, msg []byte) {
	l, err := net.ListenUnix(network, &net.UnixAddr{Name: socket, Net: network})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			if msg != nil {
				c.Write(msg)
			}
			t.Cleanup(func() { c.Close() })
		}
	}()
}

// TestSettings: what a container must not choose, and what makes no sense, is
// refused by name.
func TestSettings(t *testing.T) {
	ctx := harness.Within(t, 2*time.Minute)
	rt := newRuntime(t)
	for i, c := range []struct {
		flags       []string
		annotations map[string]string
		want        string
	}{
		{nil, map[string]string{"dev.agentzip.pool": "/run/x"}, "dev.agentzip.pool"},
		{nil, map[string]string{"dev.agentzip.pool-start": "true"}, "dev.agentzip.pool-start"},
		{[]string{"--allow-flag-override"}, map[string]string{"dev.gvisor.flag.agentzip-pool": "/run/x"}, "dev.gvisor.flag.agentzip-pool"},
		{nil, domain(strings.Repeat("x", 129)), "at most 128"},
		{nil, domain("a\nb"), "printable"},
		{[]string{"--agentzip-pool=pool.sock"}, nil, "absolute"},
		{[]string{"--agentzip-pool=/" + strings.Repeat("x", 99)}, nil, "shorter"},
		{[]string{"--agentzip-pool-start"}, nil, "--agentzip-pool=SOCKET"},
	} {
		sb, err := rt.Run(ctx, fmt.Sprintf("bad%d", i), bundle(t, c.annotations), fleet.WithFlags(c.flags...))
		if err == nil {
			t.Errorf("%+v: the sandbox started", c)
			sb.Delete(ctx)
			continue
		}
		if !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: %v", c, err)
		}
	}
	g := start(t, rt, "domain", bundle(t, domain("tenant")))
	if e := g.sb.Stderr(); !strings.Contains(e, "--agentzip-pool") {
		t.Errorf("a domain without a pool: runsc says %q", e)
	}
	g.private("none")
}
