package census

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"runsc-agentzip/pkg/control"
	"runsc-agentzip/pkg/pool/server"
)

// long is a deadline that no test waits for, short one that some do.
const (
	long  = time.Minute
	short = 20 * time.Millisecond
)

// A fake is a control socket. answer is called for each connection, once what was
// asked has been read.
type fake struct {
	path  string
	calls atomic.Int64
}

func newFake(t *testing.T, answer func(c net.Conn)) *fake {
	t.Helper()
	// Not t.TempDir, whose path may be too long.
	dir, err := os.MkdirTemp("", "census")
	require.NoError(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	f := &fake{path: filepath.Join(dir, "s")}
	l, err := net.Listen("unix", f.path)
	require.NoError(t, err)
	var wg sync.WaitGroup
	t.Cleanup(wg.Wait)
	t.Cleanup(func() { l.Close() })
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			f.calls.Add(1)
			wg.Go(func() {
				defer c.Close()
				var req struct {
					Method string
					Arg    map[string]any
				}
				if json.NewDecoder(c).Decode(&req) == nil && req.Method == "Agentzip.Stats" && req.Arg != nil {
					answer(c)
				}
			})
		}
	})
	return f
}

func say(text string) func(c net.Conn) {
	return func(c net.Conn) { _, _ = io.WriteString(c, text) }
}

func result(t testing.TB, s *control.Stats) string {
	b, err := json.Marshal(s)
	require.NoError(t, err)
	return `{"success":true,"err":"","result":` + string(b) + `}`
}

// collector returns one for sandboxes by ID.
func collector(t *testing.T, deadline time.Duration, targets map[string]Target, process func(pid int) (byte, uint64)) *Collector {
	c := NewCollector(Options{
		Root: "/root",
		List: func() ([]string, error) {
			var ids []string
			for id := range targets {
				ids = append(ids, id)
			}
			return ids, nil
		},
		Find: func(id string) (Target, error) {
			switch id {
			case "gone":
				return Target{}, ErrGone
			case "busy":
				return Target{}, ErrBusy
			}
			return targets[id], nil
		},
		Process:  process,
		Deadline: deadline,
		Parallel: 2,
	})
	t.Cleanup(c.Close)
	return c
}

func alive(int) (byte, uint64) { return 'S', 4096 }

func TestStates(t *testing.T) {
	good := result(t, &control.Stats{GuestBytes: 7})
	for _, c := range []struct {
		answer  string
		process byte
		want    State
		reason  string
	}{
		{good, 'S', OK, ""},
		{good[:len(good)/2], 'S', Broken, "before it had answered"},
		{"", 'S', Broken, "before it had answered"},
		{"", 'Z', Dead, "has ended"},
		{"", 0, Dead, "has ended"},
		{"what?", 'S', Broken, "invalid character"},
		{`{"success":true}`, 'S', Broken, "no result"},
		{`{"success":true,"result":{"guest_bytes":"much"}}`, 'S', Broken, "guest_bytes"},
		{`{"success":true,"result":{"guest_bytes":-1}}`, 'S', Broken, "guest_bytes"},
		{`{"success":false,"err":"unknown method"}`, 'S', Foreign, "another runtime"},
		{`{"success":false,"err":"this sandbox runs with --agentzip=off"}`, 'S', Off, "agentzip=off"},
		{`{"success":false,"err":"oh\u001b[2J"}`, 'S', Broken, "oh?[2J"},
		{`{"success":false,"err":"` + strings.Repeat("x", maxAnswer) + `"}`, 'S', Broken, "longer than"},
	} {
		f := newFake(t, say(c.answer))
		col := collector(t, long, map[string]Target{"a": {PID: 1, Socket: f.path}}, func(int) (byte, uint64) { return c.process, 4096 })
		got, err := col.Take()
		require.NoError(t, err)
		require.Len(t, got.Sandboxes, 1)
		s := got.Sandboxes[0]
		require.Equal(t, c.want, s.State, "%.80s: %s", c.answer, s.Reason)
		require.Contains(t, s.Reason, c.reason)
		if c.want == OK {
			require.Equal(t, &control.Stats{GuestBytes: 7, SentryRSSBytes: 4096}, s.Stats)
			require.False(t, s.At.IsZero())
		} else {
			require.Nil(t, s.Stats)
			require.Equal(t, string(c.want), s.Phase())
		}
	}
}

// TestOthers: one that hangs, one that is dead and those that cannot be found keep
// nobody from being asked.
func TestOthers(t *testing.T) {
	release := make(chan struct{})
	hung := newFake(t, func(net.Conn) { <-release })
	defer close(release)
	fine := newFake(t, say(result(t, &control.Stats{GuestBytes: 1})))
	targets := map[string]Target{
		"busy": {}, "gone": {}, "none": {PID: 3, Socket: fine.path + "-not"}, "empty": {PID: 4},
		"hung": {PID: 1, Socket: hung.path}, "stopped": {PID: 2, Socket: hung.path},
	}
	process := func(pid int) (byte, uint64) {
		if pid == 2 {
			return 'T', 0
		}
		return 'S', 0
	}
	c := collector(t, short, targets, process)
	c.opts.Pool = func() Pool { return Pool{Socket: "/p", Reason: "none"} }
	c.opts.Host = func() Host { return Host{1, 2} }
	got, err := c.Take()
	require.NoError(t, err)
	states := map[string]State{}
	var order []string
	for _, s := range got.Sandboxes {
		states[s.ID] = s.State
		order = append(order, s.ID)
	}
	require.Equal(t, map[string]State{"busy": Busy, "none": Dead, "empty": Dead, "hung": Silent, "stopped": Stopped}, states)
	require.IsIncreasing(t, order)
	require.Equal(t, "/root", got.Root)
	require.Equal(t, &Pool{Socket: "/p", Reason: "none"}, got.Pool)
	require.Equal(t, Host{1, 2}, got.Host)

	// Those that do answer, in the same census.
	c.opts.Deadline = long
	targets["fine"] = Target{PID: 9, Socket: fine.path, Paused: true}
	got, err = c.Take()
	require.NoError(t, err)
	for _, s := range got.Sandboxes {
		if s.ID == "fine" {
			require.Equal(t, OK, s.State, s.Reason)
			require.Equal(t, "paused", s.Phase())
		}
	}
	// The hung ones were not asked again, nor waited for.
	require.EqualValues(t, 2, hung.calls.Load())
}

// TestPending: a sandbox that hangs keeps the one call, and is asked anew when it goes
// on.
func TestPending(t *testing.T) {
	release := make(chan struct{})
	f := newFake(t, func(c net.Conn) {
		<-release
		say(result(t, &control.Stats{GuestBytes: 5}))(c)
	})
	targets := map[string]Target{"a": {PID: 1, Socket: f.path}}
	c := collector(t, short, targets, alive)
	state := func() State {
		t.Helper()
		got, err := c.Take()
		require.NoError(t, err)
		require.Len(t, got.Sandboxes, 1)
		return got.Sandboxes[0].State
	}
	for range 3 {
		require.Equal(t, Silent, state())
		require.Len(t, c.pending, 1)
	}
	require.EqualValues(t, 1, f.calls.Load())
	close(release)
	c.opts.Deadline = long
	// The late answer arrives when it does.
	for state() != OK {
	}
	require.EqualValues(t, 2, f.calls.Load())
	require.Empty(t, c.pending)

	// Another sandbox with its ID is not the one that was asked.
	c.opts.Deadline = short
	hung := newFake(t, func(c net.Conn) { _, _ = c.Read(make([]byte, 1)) })
	targets["a"] = Target{PID: 1, Socket: hung.path}
	require.Equal(t, Silent, state())
	targets["a"] = Target{PID: 2, Socket: hung.path}
	require.Equal(t, Silent, state())
	require.EqualValues(t, 2, hung.calls.Load())
	require.Len(t, c.pending, 1)
	delete(targets, "a")
	got, err := c.Take()
	require.NoError(t, err)
	require.Empty(t, got.Sandboxes)
	require.Empty(t, c.pending)
}

// TestFullQueue: connecting does not wait for a process that accepts nothing.
func TestFullQueue(t *testing.T) {
	path := filepath.Join(t.TempDir(), strings.Repeat("long", 30), "s")
	require.Greater(t, len(path), maxPath)
	require.NoError(t, os.Mkdir(filepath.Dir(path), 0o700))
	dir, err := os.Open(filepath.Dir(path))
	require.NoError(t, err)
	defer dir.Close()
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	defer unix.Close(fd)
	require.NoError(t, unix.Bind(fd, &unix.SockaddrUnix{Name: fmt.Sprintf("/proc/self/fd/%d/s", dir.Fd())}))
	require.NoError(t, unix.Listen(fd, 1))
	for {
		conn, err := dial(path)
		if err != nil {
			require.ErrorIs(t, err, errSilent)
			break
		}
		defer conn.Close()
	}
	c := collector(t, long, map[string]Target{"a": {PID: 1, Socket: path}}, alive)
	got, err := c.Take()
	require.NoError(t, err)
	require.Equal(t, Silent, got.Sandboxes[0].State)
	require.Contains(t, got.Sandboxes[0].Reason, "queue is full")
}

func TestListFails(t *testing.T) {
	fail := errors.New("no")
	c := NewCollector(Options{List: func() ([]string, error) { return nil, fail }})
	_, err := c.Take()
	require.ErrorIs(t, err, fail)
}

// TestManyTakes is for the race detector.
func TestManyTakes(t *testing.T) {
	f := newFake(t, say(result(t, &control.Stats{})))
	targets := map[string]Target{"busy": {}}
	for i := range 20 {
		targets[fmt.Sprint(i)] = Target{PID: i + 1, Socket: f.path}
	}
	c := collector(t, long, targets, alive)
	c.opts.Pool = func() Pool { return Pool{Stats: new(server.Stats)} }
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			got, err := c.Take()
			if err != nil || len(got.Sandboxes) != 21 {
				t.Errorf("%d sandboxes, %v", len(got.Sandboxes), err)
			}
		})
	}
	wg.Wait()
}

func TestProcess(t *testing.T) {
	state, rss := process(os.Getpid())
	require.Contains(t, "RS", string(state))
	require.NotZero(t, rss)
	state, _ = process(-1)
	require.Zero(t, state)

	const line = "12 (a) b (c) T 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 33 22"
	state, rss = parseStat(line, 10)
	require.Equal(t, byte('T'), state)
	require.EqualValues(t, 330, rss)
	for _, bad := range []string{"", "1", "1 (a", "1 (a)", "1 (a) S"} {
		_, rss = parseStat(bad, 10)
		require.Zero(t, rss)
	}
}
