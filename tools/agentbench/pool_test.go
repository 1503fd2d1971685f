package main

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"runsc-agentzip/pkg/control"
	"runsc-agentzip/pkg/fleet"
	"runsc-agentzip/tools/agentbench/report"
)

// fakeMemfd is what a fake pool holds in memory files.
const fakeMemfd = 64 << 10

// servePool is a page pool that serves nothing.
func servePool(how string, args []string) {
	socket, ok := "", false
	if len(args) == 4 && args[0] == "agentzip" && args[1] == "pool" && args[2] == "serve" {
		socket, ok = strings.CutPrefix(args[3], "--socket=")
	}
	if how == "fails" || !ok {
		fmt.Fprintln(os.Stderr, "fake pool: no luck with", args)
		os.Exit(3)
	}
	if how == "stubborn" {
		signal.Ignore(syscall.SIGTERM)
	}
	fd, err := unix.MemfdCreate("fake", 0)
	if err == nil {
		_, err = unix.Write(fd, make([]byte, fakeMemfd))
	}
	if err != nil {
		panic(err)
	}
	if how == "mute" {
		select {}
	}
	l, err := net.Listen("unixpacket", socket)
	if err != nil {
		panic(err)
	}
	for {
		c, err := l.Accept()
		if err != nil {
			panic(err)
		}
		c.Close()
		if how == "dies" {
			fmt.Fprintln(os.Stderr, "fake pool: enough")
			os.Exit(4)
		}
	}
}

// ownPool starts a pool, tells its process id and waits for the end.
func ownPool(dir string) {
	p, err := startPagePool(context.Background(), filepath.Join(dir, "runsc"), filepath.Join(dir, "pool"), nil)
	if err != nil {
		panic(err)
	}
	fmt.Println(p.cmd.Process.Pid)
	io.Copy(io.Discard, os.Stdin)
}

// fakePool makes a runtime whose pool behaves so, in a directory of its own. The
// pool's directory is to be "pool" there.
func fakePool(t *testing.T, how string) (dir, binary string) {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	// The names of tests would make the path of the socket too long.
	dir, err = os.MkdirTemp("", "pool-")
	require.NoError(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	binary = filepath.Join(dir, "runsc")
	script := fmt.Sprintf("#!/bin/sh\n%s=%s exec '%s' \"$@\"\n", fakePoolEnv, how, self)
	require.NoError(t, os.WriteFile(binary, []byte(script), 0o755))
	return dir, binary
}

func TestPagePool(t *testing.T) {
	dir, binary := fakePool(t, "well")
	p, err := startPagePool(t.Context(), binary, filepath.Join(dir, "pool"), nil)
	require.NoError(t, err)
	require.NoError(t, p.alive())
	assert.Equal(t, []string{"--agentzip-pool=" + filepath.Join(dir, "pool", "pool.sock"), "--agentzip-domain=agentbench"}, p.flags())

	_, err = p.CPUTime()
	require.NoError(t, err)
	m, err := p.measure(nil, nil)
	require.NoError(t, err)
	assert.EqualValues(t, fakeMemfd, m.Memfd)
	assert.Positive(t, m.Process.PSSAnon)

	for range 2 {
		killed, err := p.stop()
		require.NoError(t, err)
		assert.False(t, killed)
		assert.NoDirExists(t, p.dir)
	}
	assert.ErrorContains(t, p.alive(), "the page pool ended: signal: terminated")
	_, err = p.CPUTime()
	assert.ErrorContains(t, err, "the page pool ended")
	_, err = p.measure(nil, nil)
	assert.ErrorContains(t, err, "the page pool ended")

	// The next episode's is in the same place.
	p, err = startPagePool(t.Context(), binary, filepath.Join(dir, "pool"), nil)
	require.NoError(t, err)
	_, err = p.stop()
	require.NoError(t, err)
}

func TestPagePoolIsKilled(t *testing.T) {
	dir, binary := fakePool(t, "stubborn")
	p, err := startPagePool(t.Context(), binary, filepath.Join(dir, "pool"), nil)
	require.NoError(t, err)
	p.grace = 50 * time.Millisecond
	killed, err := p.stop()
	require.NoError(t, err)
	assert.True(t, killed)
	assert.ErrorContains(t, p.alive(), "signal: killed")
	assert.NoDirExists(t, p.dir)
}

func TestPagePoolFails(t *testing.T) {
	dir, binary := fakePool(t, "fails")
	var log bytes.Buffer
	_, err := startPagePool(t.Context(), binary, filepath.Join(dir, "pool"), &log)
	assert.ErrorContains(t, err, "the page pool ended: exit status 3; it said: fake pool: no luck with [agentzip pool serve --socket=")
	assert.Contains(t, log.String(), "no luck")
	assert.NoDirExists(t, filepath.Join(dir, "pool"))

	_, err = startPagePool(t.Context(), filepath.Join(dir, "none"), filepath.Join(dir, "pool"), nil)
	assert.ErrorIs(t, err, os.ErrNotExist)
	assert.NoDirExists(t, filepath.Join(dir, "pool"))

	_, err = startPagePool(t.Context(), binary, filepath.Join(dir, strings.Repeat("long", 30)), nil)
	assert.ErrorContains(t, err, "use a shorter --work")

	// An interrupt does not wait for one that does not get ready.
	dir, binary = fakePool(t, "mute")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = startPagePool(ctx, binary, filepath.Join(dir, "pool"), nil)
	assert.ErrorIs(t, err, context.Canceled)
	assert.NoDirExists(t, filepath.Join(dir, "pool"))
}

// TestEpisodeNotesDeadPool: a pool that ended by itself is a fault, once.
func TestEpisodeNotesDeadPool(t *testing.T) {
	dir, binary := fakePool(t, "dies")
	p, err := startPagePool(t.Context(), binary, filepath.Join(dir, "pool"), nil)
	require.NoError(t, err)
	<-p.exited
	e := &episode{pool: p}
	require.NoError(t, e.stopPool())
	require.NoError(t, e.stopPool())
	require.Len(t, e.out.problems, 1)
	assert.True(t, e.out.problems[0].Fatal)
	assert.Contains(t, e.out.problems[0].Text, "exit status 4; it said: fake pool: enough")
}

// TestPagePoolDiesWithOwner kills the process that has started a pool.
func TestPagePoolDiesWithOwner(t *testing.T) {
	dir, _ := fakePool(t, "stubborn")
	self, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), poolOwnerEnv+"="+dir)
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	defer in.Close()
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	line, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	pid, err := strconv.Atoi(strings.TrimSpace(line))
	require.NoError(t, err)
	_, err = fleet.ProcessCPUTime(pid)
	require.NoError(t, err)
	require.NoError(t, cmd.Process.Kill())
	cmd.Wait()
	require.Eventually(t, func() bool {
		_, err := fleet.ProcessCPUTime(pid)
		return err != nil
	}, 10*time.Second, 5*time.Millisecond)
}

func TestPoolDir(t *testing.T) {
	assert.Equal(t, "/w/run-12/pool", poolDir("/w/run-12"))
	assert.Equal(t, "/run/agentbench-12-pool", poolDir("/"+strings.Repeat("w", 90)+"/run-12"))
	for n := range 120 {
		assert.Less(t, len(filepath.Join(poolDir("/"+strings.Repeat("w", n)+"/run-1234567890"), poolSocket)), socketMax)
	}

	// What a killed run left is removed.
	parent, err := os.MkdirTemp("", "pool-")
	require.NoError(t, err)
	defer os.RemoveAll(parent)
	d, err := newRunDir(parent)
	require.NoError(t, err)
	require.NoError(t, os.MkdirAll(filepath.Join(poolDir(d.path), poolSocket+".d"), 0o700))
	d.lock.Close()
	require.NoError(t, reclaimRuns(parent, t.Logf))
	assert.NoDirExists(t, d.path)
}

func TestUnpooled(t *testing.T) {
	sample := func(clone int, at float64, p control.Pool) report.Memory {
		return report.Memory{Clone: clone, At: at, Stats: &control.Stats{Pool: p}}
	}
	ok, lost := control.Pool{State: "connected"}, control.Pool{State: "disconnected", Reason: "refused: other version"}
	assert.Equal(t, map[int]string{1: "disconnected: refused: other version", 2: "none", 3: "its stats do not tell"}, unpooled([]report.Memory{
		sample(0, 1, lost), sample(0, 2, ok), sample(1, 5, lost), sample(1, 4, ok),
		sample(2, 1, control.Pool{State: "none"}), sample(3, 1, control.Pool{}), {Clone: 4, At: 1},
	}))
}

func TestTailBuffer(t *testing.T) {
	var b tailBuffer
	for i := range 3000 {
		fmt.Fprintf(&b, "%d ", i)
	}
	assert.Len(t, b.String(), tailMost)
	assert.True(t, strings.HasSuffix(b.String(), " 2998 2999 "))
}
