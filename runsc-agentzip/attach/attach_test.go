package attach

import (
	"errors"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"runsc-agentzip/pkg/pool/wire"
	"runsc-agentzip/pkg/pressure"
)

func greeting(name string) wire.Greeting {
	return wire.Greeting{Version: wire.Version, Name: name, Domain: "tenant", Template: "ab", TemplateDir: "/t"}
}

// registration returns one of a sandbox that this process is.
func registration(t *testing.T, root, name string) Registration {
	p, err := processOf(os.Getpid())
	require.NoError(t, err)
	require.NotZero(t, p.Start)
	return Registration{Root: root, Process: p, Greeting: greeting(name)}
}

func TestRegistrations(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "deeper", "pool.sock")
	var said []string
	log := func(format string, args ...any) { said = append(said, format) }

	rs, err := Registrations(socket, log)
	require.NoError(t, err, "there is no folder")
	require.Empty(t, rs)

	a := registration(t, "/run/a", "one")
	b := registration(t, "/run/b", "one")
	require.NoError(t, a.Write(socket))
	require.NoError(t, b.Write(socket))
	require.NoError(t, a.Write(socket), "a second time")
	st, err := os.Stat(Folder(socket))
	require.NoError(t, err)
	require.Equal(t, fs.FileMode(0o700), st.Mode().Perm())
	entries, err := os.ReadDir(Folder(socket))
	require.NoError(t, err)
	require.Len(t, entries, 2)
	for _, e := range entries {
		st, err := e.Info()
		require.NoError(t, err)
		require.Equal(t, fs.FileMode(0o600), st.Mode())
	}
	rs, err = Registrations(socket, log)
	require.NoError(t, err)
	require.ElementsMatch(t, []Registration{a, b}, rs)
	require.Empty(t, said)

	require.NoError(t, a.Remove(socket))
	require.NoError(t, a.Remove(socket), "it is gone already")
	rs, err = Registrations(socket, log)
	require.NoError(t, err)
	require.Equal(t, []Registration{b}, rs)
}

func TestBadRegistrations(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "pool.sock")
	good := registration(t, "/run", "good")
	require.NoError(t, good.Write(socket))
	file := func(name, content string) string {
		path := filepath.Join(Folder(socket), name)
		require.NoError(t, os.WriteFile(path, []byte(content), 0o600))
		return path
	}
	renamed, err := os.ReadFile(good.path(socket))
	require.NoError(t, err)
	for _, path := range []string{
		file("empty.json", ""),
		file("garbage.json", "\x00\x01"),
		file("null.json", "null"),
		file("list.json", "[]"),
		file("types.json", `{"root":1}`),
		file("relative.json", `{"root":"x","name":"a","domain":"b"}`),
		file("other.json", string(renamed)),
		file("up.json", `{"root":"/run","process":{"pid":1},"name":"../up","domain":"b"}`),
		file("older.json", `{"root":"/run","name":"a","domain":"b"}`),
	} {
		rs, err := Registrations(socket, t.Logf)
		require.NoError(t, err)
		require.Equal(t, []Registration{good}, rs, path)
		require.NoFileExists(t, path)
	}
	half := file(".new-123", "{")
	_, err = Registrations(socket, t.Logf)
	require.NoError(t, err)
	require.FileExists(t, half, "somebody may be writing it")
	long := time.Now().Add(-2 * writeTime)
	require.NoError(t, os.Chtimes(half, long, long))
	_, err = Registrations(socket, t.Logf)
	require.NoError(t, err)
	require.NoFileExists(t, half, "nobody is")
}

// TestEndedForeign: only a registration that is where it belongs is removed, whatever a
// container's state says.
func TestEndedForeign(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "pool.sock")
	r := registration(t, "/run", "one")
	r.Process.PID = 1 << 30 // has ended
	require.NoError(t, r.Write(socket))
	b, err := os.ReadFile(r.path(socket))
	require.NoError(t, err)
	for _, name := range []string{
		filepath.Join(t.TempDir(), "fstab"),
		filepath.Join(Folder(socket), "two.00000000.json"),
	} {
		for _, content := range [][]byte{[]byte("no registration"), b} {
			require.NoError(t, os.WriteFile(name, content, 0o600))
			Ended(name)
			require.FileExists(t, name)
		}
	}
	Ended(r.path(socket))
	require.NoFileExists(t, r.path(socket))
}

// TestStale: what a sandbox leaves that ends without being deleted is recognised.
func TestStale(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "pool.sock")
	cmd := exec.Command("sleep", "60")
	require.NoError(t, cmd.Start())
	r := registration(t, "/run", "one")
	var err error
	r.Process, err = processOf(cmd.Process.Pid)
	require.NoError(t, err)
	require.NoError(t, r.Write(socket))
	stays := func() {
		t.Helper()
		rs, err := Registrations(socket, t.Logf)
		require.NoError(t, err)
		require.Equal(t, []Registration{r}, rs)
		Ended(r.path(socket))
		require.FileExists(t, r.path(socket))
	}
	stays()

	// A zombie is no sandbox, nor what comes after it.
	require.NoError(t, cmd.Process.Kill())
	require.Eventually(t, r.Process.gone, 10*time.Second, time.Millisecond)
	Ended(r.path(socket))
	require.NoFileExists(t, r.path(socket))
	Ended(r.path(socket))
	_ = cmd.Wait()
	require.True(t, r.Process.gone())
	_, err = processOf(cmd.Process.Pid)
	require.ErrorIs(t, err, fs.ErrNotExist)

	dead, own := r.Process, registration(t, "/run", "one").Process
	for name, change := range map[string]func(p *Process){
		"process": func(p *Process) { *p = dead },
		"start":   func(p *Process) { p.Start++ },
		"boot":    func(p *Process) { p.Boot = "another" },
	} {
		r.Process = own
		change(&r.Process)
		require.NoError(t, r.Write(socket))
		rs, err := Registrations(socket, t.Logf)
		require.NoError(t, err)
		require.Empty(t, rs, name)
		require.NoFileExists(t, r.path(socket), name)
	}

	// Elsewhere one cannot know.
	r.Process = own
	r.Process.Namespace, r.Process.PID = "pid:[1]", 1<<30
	require.NoError(t, r.Write(socket))
	stays()
}

// TestMemoryArgs: the files reach the Gauge in their order, whatever is said of them.
func TestMemoryArgs(t *testing.T) {
	file := func(content string) *os.File {
		name := filepath.Join(t.TempDir(), "file")
		require.NoError(t, os.WriteFile(name, []byte(content), 0o600))
		f, err := os.Open(name)
		require.NoError(t, err)
		t.Cleanup(func() { f.Close() })
		return f
	}
	var a MemoryArgs
	a.Files = []*os.File{
		file("max"), file("1"), file(""),
		file("1073741824"), file("1048576000"), file("active_file 1048576"),
		file("some avg10=50.00"),
	}
	a.Groups, a.Host = 2, true
	g, err := a.Gauge()
	require.NoError(t, err)
	defer g.Close()
	require.Equal(t, pressure.Reading{Level: pressure.CriticalLevel, Limit: 1 << 30, Used: 999 << 20, Above: 1}, g.Read())
	require.True(t, g.HostHigh())
	for _, bad := range []struct {
		groups int
		host   bool
	}{{2, false}, {1, true}, {3, false}, {3, true}, {-1, true}, {1 << 40, true}} {
		a.Groups, a.Host = bad.groups, bad.host
		_, err := a.Gauge()
		require.ErrorContains(t, err, "7 files", "%+v", bad)
	}
}

func TestFolderOfOthers(t *testing.T) {
	r := registration(t, "/run", "one")

	open := filepath.Join(t.TempDir(), "pool.sock")
	require.NoError(t, os.Mkdir(Folder(open), 0o700))
	require.NoError(t, os.Chmod(Folder(open), 0o777))
	require.ErrorContains(t, r.Write(open), Folder(open))
	_, err := Registrations(open, t.Logf)
	require.ErrorContains(t, err, Folder(open))

	link := filepath.Join(t.TempDir(), "pool.sock")
	require.NoError(t, os.Symlink(t.TempDir(), Folder(link)))
	require.ErrorContains(t, r.Write(link), Folder(link))
}

// serve answers each connection's first message with what answer returns, or
// ends it if that is nil.
func serve(t *testing.T, answer func(m wire.Message) []byte) string {
	socket := filepath.Join(t.TempDir(), "pool.sock")
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: socket, Net: "unixpacket"})
	require.NoError(t, err)
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			buf := make([]byte, wire.MaxMessage)
			n, err := c.Read(buf)
			m, perr := wire.Parse(buf[:n])
			if out := answer(m); err == nil && perr == nil && out != nil {
				c.Write(out)
				t.Cleanup(func() { c.Close() })
				continue
			}
			c.Close()
		}
	}()
	return socket
}

func message(typ wire.Type, body string) []byte {
	var w wire.Writer
	w.Begin(typ, 0)
	w.Body([]byte(body))
	return w.Bytes()
}

func TestConnect(t *testing.T) {
	g := greeting("one")
	greetings := make(chan *wire.Greeting, 1)
	socket := serve(t, func(m wire.Message) []byte {
		g, err := m.Greeting()
		if err != nil {
			return nil
		}
		greetings <- g
		return message(wire.Welcome, strings.Repeat("k", 32))
	})
	conn, err := connect(socket, &g)
	require.NoError(t, err)
	defer conn.Close()
	require.Equal(t, &g, <-greetings)

	// The answer is still there for the sandbox.
	buf := make([]byte, wire.MaxMessage)
	n, fd, err := wire.Receive(int(conn.Fd()), buf)
	require.NoError(t, err)
	require.Equal(t, -1, fd)
	m, err := wire.Parse(buf[:n])
	require.NoError(t, err)
	require.Equal(t, wire.Welcome, m.Type)
}

func TestConnectFails(t *testing.T) {
	g := greeting("one")
	for name, c := range map[string]struct {
		answer []byte
		want   string
	}{
		"refused": {message(wire.Refuse, "not today"), "not today"},
		"closed":  {nil, "ended the connection"},
		"garbage": {[]byte("HTTP/1.1 400"), "no pool"},
		"other":   {message(wire.Report, "x"), "report"},
		"long":    {make([]byte, wire.MaxMessage+1), "no pool"},
	} {
		_, err := connect(serve(t, func(wire.Message) []byte { return c.answer }), &g)
		require.ErrorContains(t, err, c.want, name)
		require.False(t, absent(err), name)
	}

	none := filepath.Join(t.TempDir(), "none")
	_, err := connect(none, &g)
	require.ErrorIs(t, err, unix.ENOENT)
	require.True(t, absent(err))
	require.ErrorContains(t, explain(none, err), "agentzip pool serve --socket="+none)

	file := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	_, err = connect(file, &g)
	require.ErrorIs(t, err, unix.ECONNREFUSED)

	stream := filepath.Join(t.TempDir(), "stream")
	l, err := net.Listen("unix", stream)
	require.NoError(t, err)
	defer l.Close()
	_, err = connect(stream, &g)
	require.ErrorIs(t, err, unix.EPROTOTYPE)
	require.ErrorContains(t, explain(stream, err), "another program")

	_, err = connect("/"+strings.Repeat("x", 200), &g)
	require.Error(t, err)
	g.Domain = strings.Repeat("x", 1<<20)
	_, err = connect(serve(t, func(wire.Message) []byte { return nil }), &g)
	require.ErrorContains(t, err, "too long")
}

func TestAsk(t *testing.T) {
	socket := serve(t, func(m wire.Message) []byte {
		if m.Type == wire.Admin && string(m.Body) == "stats" {
			return message(wire.Report, "{}")
		}
		return message(wire.Refuse, "no such command")
	})
	b, err := Ask(socket, "stats")
	require.NoError(t, err)
	require.Equal(t, "{}", string(b))
	_, err = Ask(socket, "dance")
	require.ErrorContains(t, err, "no such command")
	_, err = Ask(filepath.Join(t.TempDir(), "none"), "stats")
	require.True(t, errors.Is(err, unix.ENOENT))
}
