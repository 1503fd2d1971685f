package attach

import (
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"runsc-agentzip/pkg/pool/wire"
)

func greeting(name string) wire.Greeting {
	return wire.Greeting{Version: wire.Version, Name: name, Domain: "tenant", Template: "ab", TemplateDir: "/t"}
}

func TestRegistrations(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "deeper", "pool.sock")
	var said []string
	log := func(format string, args ...any) { said = append(said, format) }

	rs, err := Registrations(socket, log)
	require.NoError(t, err, "there is no folder")
	require.Empty(t, rs)

	a := Registration{Root: "/run/a", Greeting: greeting("one")}
	b := Registration{Root: "/run/b", Greeting: greeting("one")}
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
	good := Registration{Root: "/run", Greeting: greeting("good")}
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
		file("up.json", `{"root":"/run","name":"../up","domain":"b"}`),
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
}

func TestFolderOfOthers(t *testing.T) {
	r := Registration{Root: "/run", Greeting: greeting("one")}

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
