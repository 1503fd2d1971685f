package cmd

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/unet"
	"gvisor.dev/gvisor/pkg/urpc"
	"gvisor.dev/gvisor/runsc/config"
	"gvisor.dev/gvisor/runsc/container"

	"runsc-agentzip/pkg/census"
	"runsc-agentzip/pkg/control"
)

// oracle has what a sandbox answers, nil for --agentzip=off.
type oracle struct{ s *control.Stats }

// Stats is the method that a census calls.
func (a *oracle) Stats(_ *struct{}, out *control.Stats) error {
	if a.s == nil {
		return errors.New("this sandbox runs with --agentzip=off")
	}
	*out = *a.s
	return nil
}

// serveSandbox has gVisor's own server answer at the control socket of a sandbox.
func serveSandbox(t *testing.T, path string, a *oracle) {
	t.Helper()
	srv := urpc.NewServer()
	if a != nil {
		// The name of the type is that of the object that is called.
		type Agentzip struct{ *oracle }
		srv.Register(&Agentzip{a})
	}
	l, err := unet.BindAndListen(path, false)
	require.NoError(t, err)
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			srv.StartHandling(c)
		}
	})
	t.Cleanup(func() {
		l.Close()
		wg.Wait()
		srv.Stop(0)
	})
}

// writeState writes the state file of a sandbox, or of a container in it.
func writeState(t *testing.T, root, id, sandbox, socket string, status container.Status) string {
	t.Helper()
	file := filepath.Join(root, id+"_sandbox:"+sandbox+".state")
	text := fmt.Sprintf(`{"id":%q,"status":%q,"sandbox":{"id":%q,"pid":%d,"controlSocketPath":%q}}`, id, status, sandbox, os.Getpid(), socket)
	require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
	return file
}

func take(t *testing.T, c *census.Collector) map[string]census.Sandbox {
	t.Helper()
	got, err := c.Take()
	require.NoError(t, err)
	out := make(map[string]census.Sandbox)
	for _, s := range got.Sandboxes {
		out[s.ID] = s
	}
	return out
}

func TestCollector(t *testing.T) {
	root, err := os.MkdirTemp("", "top") // paths of sockets are short
	require.NoError(t, err)
	t.Cleanup(func() { os.RemoveAll(root) })
	start := func(id string, a *oracle) {
		socket := filepath.Join(root, id+".sock")
		serveSandbox(t, socket, a)
		writeState(t, root, id, id, socket, container.Running)
	}
	start("on", &oracle{&control.Stats{GuestBytes: 1 << 60, Phase: control.Phase{State: "waiting"}}})
	start("off", &oracle{})
	start("other", nil)
	// A second container of a sandbox is not one more.
	writeState(t, root, "second", "on", "", container.Running)
	writeState(t, root, "dead", "dead", filepath.Join(root, "none"), container.Stopped)
	broken := writeState(t, root, "broken", "broken", "", container.Running)
	require.NoError(t, os.WriteFile(broken, []byte("{"), 0o600))

	require.NoError(t, os.WriteFile(writeState(t, root, "empty", "empty", "", container.Running), []byte("{}"), 0o600))

	c, err := newCollector(root, filepath.Join(root, "pool.sock"))
	require.NoError(t, err)
	defer c.Close()
	states := func() map[string]census.State {
		out := make(map[string]census.State)
		for id, s := range take(t, c) {
			out[id] = s.State
		}
		return out
	}
	want := map[string]census.State{"on": census.OK, "off": census.Off, "other": census.Foreign, "dead": census.Dead, "broken": census.Broken, "empty": census.Broken}
	require.Equal(t, want, states())
	s := take(t, c)["on"]
	require.EqualValues(t, 1<<60, s.Stats.GuestBytes)
	require.NotZero(t, s.Stats.SentryRSSBytes)
	require.Equal(t, os.Getpid(), s.PID)
	require.Equal(t, "waiting", s.Phase())

	now, err := c.Take()
	require.NoError(t, err)
	require.Contains(t, now.Pool.Reason, "pool serve")
	require.NotZero(t, now.Host.TotalBytes)

	// What changes is noticed, and what is gone is not there.
	writeState(t, root, "on", "on", filepath.Join(root, "on.sock"), container.Paused)
	require.Equal(t, "paused", func() string { s := take(t, c)["on"]; return s.Phase() }())
	require.NoError(t, os.Remove(broken))
	delete(want, "broken")
	require.Equal(t, want, states())

	// Another command has locked a sandbox: one that is known is asked without lock.
	for _, id := range []string{"on", "new"} {
		lock, err := os.OpenFile(filepath.Join(root, id+"_sandbox:"+id+".lock"), os.O_CREATE|os.O_RDWR, 0o600)
		require.NoError(t, err)
		defer lock.Close()
		require.NoError(t, unix.Flock(int(lock.Fd()), unix.LOCK_EX))
	}
	writeState(t, root, "new", "new", "", container.Creating)
	want["new"] = census.Busy
	require.Equal(t, want, states())
}

func TestCollectorFails(t *testing.T) {
	root := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(root, nil, 0o600))
	c, err := newCollector(root, "")
	require.NoError(t, err)
	_, err = c.Take()
	require.ErrorContains(t, err, "--root")
	_, err = newCollector(root, "pool.sock")
	require.ErrorContains(t, err, "absolute")

	c, err = newCollector(filepath.Join(t.TempDir(), "none"), "")
	require.NoError(t, err)
	require.Empty(t, take(t, c))
}

func TestTopFlags(t *testing.T) {
	for _, f := range []struct {
		flags topFlags
		want  string
	}{
		{topFlags{sort: "size", interval: time.Second}, `-sort: cannot sort by "size"`},
		{topFlags{sort: "id", interval: time.Millisecond}, "-interval=1ms"},
		{topFlags{sort: "id", interval: time.Second, rounds: -1}, "-n=-1"},
	} {
		require.ErrorContains(t, f.flags.run(&config.Config{}), f.want)
	}
}

func TestWatch(t *testing.T) {
	n := 0
	w := &watch{interval: time.Millisecond, rounds: 3, take: func() (*census.Census, error) {
		n++
		return &census.Census{TookNS: uint64(n)}, nil
	}}
	var seen [][2]uint64
	require.NoError(t, w.print(func(now, prev *census.Census) error {
		pair := [2]uint64{now.TookNS}
		if prev != nil {
			pair[1] = prev.TookNS
		}
		seen = append(seen, pair)
		return nil
	}))
	require.Equal(t, [][2]uint64{{1, 0}, {2, 1}, {3, 2}}, seen)
	fail := errors.New("no")
	w.take = func() (*census.Census, error) { return nil, fail }
	require.ErrorIs(t, w.print(nil), fail)
}

// terminal returns both ends of a terminal of 100 columns and 30 lines.
func terminal(t *testing.T) (outside, inside *os.File) {
	t.Helper()
	outside, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Skipf("there are no terminals here: %v", err)
	}
	t.Cleanup(func() { outside.Close() })
	n, err := unix.IoctlGetInt(int(outside.Fd()), unix.TIOCGPTN)
	require.NoError(t, err)
	require.NoError(t, unix.IoctlSetPointerInt(int(outside.Fd()), unix.TIOCSPTLCK, 0))
	inside, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	require.NoError(t, err)
	t.Cleanup(func() { inside.Close() })
	require.NoError(t, unix.IoctlSetWinsize(int(inside.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: 30, Col: 100}))
	return outside, inside
}

// reader collects what is written to a terminal.
type reader struct {
	f    *os.File
	text string
}

// until reads until want was written.
func (r *reader) until(t *testing.T, want string) {
	t.Helper()
	buf := make([]byte, 1<<16)
	for !strings.Contains(r.text, want) {
		n, err := r.f.Read(buf)
		require.NoError(t, err, "%q was written, and not %q", r.text, want)
		r.text += string(buf[:n])
	}
}

func TestScreen(t *testing.T) {
	outside, inside := terminal(t)
	before, err := unix.IoctlGetTermios(int(inside.Fd()), unix.TCGETS)
	require.NoError(t, err)
	c := &census.Census{Root: "/r"}
	for i := range 40 {
		c.Sandboxes = append(c.Sandboxes, census.Sandbox{ID: fmt.Sprintf("s%02d", i), State: census.OK, Stats: &control.Stats{GuestBytes: uint64(i), OwnedBytes: uint64(40 - i)}})
	}
	w := &watch{interval: time.Hour, take: func() (*census.Census, error) { return c, nil }, view: census.View{Sort: census.ByOwned}}
	done := make(chan error, 1)
	go func() { done <- w.show(inside, inside) }()
	r := &reader{f: outside}
	r.until(t, "16 more")
	require.True(t, strings.HasPrefix(r.text, enterScreen+home), "%q", r.text[:40])
	require.Contains(t, r.text, "sorted by owned")
	require.Equal(t, 29, strings.Count(r.text, "\n"))
	_, err = outside.WriteString("g")
	require.NoError(t, err)
	r.until(t, "sorted by guest")
	_, err = outside.WriteString("q")
	require.NoError(t, err)
	r.until(t, leaveScreen)
	require.NoError(t, <-done)
	after, err := unix.IoctlGetTermios(int(inside.Fd()), unix.TCGETS)
	require.NoError(t, err)
	require.Equal(t, before, after)
}

// TestScreenEnds: the terminal is also restored when something fails, and the last
// of a number of rounds stays in sight.
func TestScreenEnds(t *testing.T) {
	outside, inside := terminal(t)
	before, err := unix.IoctlGetTermios(int(inside.Fd()), unix.TCGETS)
	require.NoError(t, err)
	w := &watch{interval: time.Millisecond, rounds: 2, take: func() (*census.Census, error) { return &census.Census{Root: "/r"}, nil }}
	require.NoError(t, w.show(inside, inside))
	r := &reader{f: outside}
	r.until(t, "moby)\r\n") // a line that was not drawn
	_, last, _ := strings.Cut(r.text, leaveScreen)
	require.Contains(t, last, "0 sandboxes")

	fail := errors.New("no")
	w.take = func() (*census.Census, error) { return nil, fail }
	require.ErrorIs(t, w.show(inside, inside), fail)
	after, err := unix.IoctlGetTermios(int(inside.Fd()), unix.TCGETS)
	require.NoError(t, err)
	require.Equal(t, before, after)
}

func TestCapable(t *testing.T) {
	require.True(t, capable("xterm"))
	require.False(t, capable("dumb"))
	require.False(t, capable(""))
	f, err := os.Open("/dev/null")
	require.NoError(t, err)
	defer f.Close()
	require.False(t, isTerminal(f))
	width, height := windowSize(f)
	require.Equal(t, [2]int{80, 24}, [2]int{width, height})
}

func TestMetricsHandler(t *testing.T) {
	var fail error
	h := metricsHandler(func() (*census.Census, error) { return &census.Census{}, fail })
	get := func(method, path string) *httptest.ResponseRecorder {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(method, path, nil))
		return w
	}
	w := get("GET", "/metrics")
	require.Equal(t, http.StatusOK, w.Code)
	require.Equal(t, census.ContentType, w.Header().Get("Content-Type"))
	require.Contains(t, w.Body.String(), "agentzip_sandboxes{")
	require.Equal(t, http.StatusNotFound, get("GET", "/").Code)
	require.Equal(t, http.StatusNotFound, get("GET", "/metrics/").Code)
	require.Equal(t, http.StatusNotFound, get("GET", "/debug/pprof/").Code)
	require.Equal(t, http.StatusMethodNotAllowed, get("POST", "/metrics").Code)
	fail = errors.New("oh")
	require.Equal(t, http.StatusInternalServerError, get("GET", "/metrics").Code)
}

// TestScrapes: they wait for each other, and not too many of them.
func TestScrapes(t *testing.T) {
	inside, release := make(chan struct{}), make(chan struct{})
	h := metricsHandler(func() (*census.Census, error) {
		inside <- struct{}{}
		<-release
		return &census.Census{}, nil
	})
	codes := make(chan int, maxScrapes+1)
	for range maxScrapes + 1 {
		go func() {
			w := httptest.NewRecorder()
			h.ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
			codes <- w.Code
		}()
	}
	// One is refused, while one is at work and none of the others is.
	<-inside
	require.Equal(t, http.StatusServiceUnavailable, <-codes)
	for i := range maxScrapes {
		require.Empty(t, inside)
		release <- struct{}{}
		require.Equal(t, http.StatusOK, <-codes)
		if i < maxScrapes-1 {
			<-inside
		}
	}
}

func TestListenMetrics(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, err := listenMetrics("unix:" + path)
	require.NoError(t, err)
	st, err := os.Stat(path)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), st.Mode().Perm())
	_, err = listenMetrics("unix:" + path)
	require.ErrorContains(t, err, "another program listens")
	// One that was left behind is replaced.
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	require.NoError(t, l.Close())
	l, err = listenMetrics("unix:" + path)
	require.NoError(t, err)
	require.NoError(t, l.Close())
	require.NoError(t, os.WriteFile(path, nil, 0o600))
	_, err = listenMetrics("unix:" + path)
	require.ErrorContains(t, err, "no socket")
	for _, bad := range []string{"9090", "unix:", "unix:/" + strings.Repeat("x", 107), "127.0.0.1:nothing"} {
		_, err = listenMetrics(bad)
		require.Error(t, err, bad)
	}
	l, err = listenMetrics("127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, l.Close())
}
