package observe

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"runsc-agentzip/pkg/census"
	"runsc-agentzip/pkg/fleet"
	"runsc-agentzip/test/harness"
)

// want are the states that top -json should say.
func checkJSON(t *testing.T, line string, want map[string]census.State) {
	t.Helper()
	var c census.Census
	if err := json.Unmarshal([]byte(line), &c); err != nil {
		t.Fatalf("%v: %s", err, line)
	}
	got := make(map[string]census.State)
	for _, s := range c.Sandboxes {
		got[s.ID] = s.State
		if s.State == census.OK && (s.Stats.GuestBytes == 0 || s.Stats.SentryRSSBytes == 0 || s.Stats.Phase.State == "") {
			t.Errorf("%s: %+v", s.ID, s.Stats)
		}
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("%v, should be %v", got, want)
	}
}

// up returns agentzip_up by sandbox.
func up(metrics string) map[string]string {
	out := make(map[string]string)
	for _, m := range regexp.MustCompile(`(?m)^agentzip_up\{sandbox="([^"]*)"\} (.*)$`).FindAllStringSubmatch(metrics, -1) {
		out[m[1]] = m[2]
	}
	return out
}

func checkMetrics(t *testing.T, metrics string, want map[string]string) {
	t.Helper()
	if got := up(metrics); fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("up: %v, should be %v", got, want)
	}
	for id, up := range want {
		for _, sample := range []string{
			`agentzip_guest_bytes{sandbox="` + id + `"} `,
			`agentzip_pages{sandbox="` + id + `",form="resident"} `,
			`agentzip_evict_duration_seconds_bucket{sandbox="` + id + `",le="+Inf"} `,
		} {
			if strings.Contains(metrics, "\n"+sample) != (up == "1") {
				t.Errorf("%s is up: %s; and %s:\n%s", id, up, sample, metrics)
			}
		}
	}
}

// row returns the row of a sandbox in the last table.
func row(text, id string) string {
	rows := regexp.MustCompile(`(?m)^`+regexp.QuoteMeta(id)+` .*$`).FindAllString(text, -1)
	if len(rows) == 0 {
		return ""
	}
	return rows[len(rows)-1]
}

// TestTroubled: one sandbox is killed and one stopped, and the third is seen.
func TestTroubled(t *testing.T) {
	rt := newRuntime(t)
	if out := output(t, rt, "top", "-n=1"); !strings.Contains(out, "no sandboxes below --root="+rt.Root()) {
		t.Error(out)
	}
	fine := start(t, rt, "fine")
	killed := start(t, rt, "killed")
	frozen := start(t, rt, "frozen")
	checkJSON(t, output(t, rt, "top", "-n=1", "-json"), map[string]census.State{"fine": census.OK, "killed": census.OK, "frozen": census.OK})
	checkMetrics(t, output(t, rt, "metrics"), map[string]string{"fine": "1", "killed": "1", "frozen": "1"})

	// One that has been serving all the time.
	get := serve(t, rt)
	checkMetrics(t, get(), map[string]string{"fine": "1", "killed": "1", "frozen": "1"})

	killForGood(t, killed)
	thaw := freeze(t, frozen.Pid())
	out := output(t, rt, "top", "-n=2", "-interval=100ms", "-sort=id")
	t.Log(out)
	if n := strings.Count(out, "3 sandboxes"); n != 2 {
		t.Errorf("%d tables", n)
	}
	for id, want := range map[string]string{"fine": " (working|waiting) ", "killed": " dead .*`runsc delete`", "frozen": " stopped .*SIGCONT"} {
		if r := row(out, id); !regexp.MustCompile(want).MatchString(r) {
			t.Errorf("%q should have %q", r, want)
		}
	}
	for range 3 {
		checkMetrics(t, get(), map[string]string{"fine": "1", "killed": "0", "frozen": "0"})
	}
	checkMetrics(t, output(t, rt, "metrics"), map[string]string{"fine": "1", "killed": "0", "frozen": "0"})

	// What goes on is seen again.
	thaw()
	harness.Eventually(t, bounded, 20*time.Millisecond, "the sandbox goes on, and is seen", func() error {
		if is := up(get())["frozen"]; is != "1" {
			return fmt.Errorf("up is %q", is)
		}
		return nil
	})
	for _, sb := range []*fleet.Sandbox{fine, frozen} {
		if line, err := sb.Request(harness.Within(t, bounded), "hello"); err != nil || line != "hello" {
			t.Errorf("%s: %q, %v", sb.ID(), line, err)
		}
	}
	checkJSON(t, output(t, rt, "top", "-n=1", "-json"), map[string]census.State{"fine": census.OK, "killed": census.Dead, "frozen": census.OK})

	if err := frozen.Delete(harness.Within(t, bounded)); err != nil {
		t.Error(err)
	}
	checkMetrics(t, get(), map[string]string{"fine": "1", "killed": "0"})
}

// serve has `agentzip metrics` serve until the test ends, and returns what gets them.
func serve(t *testing.T, rt *harness.Runtime) (get func() string) {
	t.Helper()
	socket := filepath.Join(rt.Root(), "metrics.sock")
	cmd := command(context.Background(), rt, "metrics", "-listen=unix:"+socket)
	stderr, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	harness.AtExit(t, func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		kill := time.AfterFunc(bounded, func() { _ = cmd.Process.Kill() })
		defer kill.Stop()
		rest, _ := io.ReadAll(stderr)
		if err := cmd.Wait(); err != nil {
			t.Errorf("agentzip metrics ended with %v: %s", err, rest)
		}
		if _, err := os.Lstat(socket); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("its socket is left: %v", err)
		}
	})
	if line, err := bufio.NewReader(stderr).ReadString('\n'); err != nil || !strings.Contains(line, "serving") {
		t.Fatalf("%q, %v", line, err)
	}
	client := &http.Client{
		Timeout: bounded,
		Transport: &http.Transport{
			DisableKeepAlives: true,
			DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				return new(net.Dialer).DialContext(ctx, "unix", socket)
			},
		},
	}
	fetch := func(path string) (int, string) {
		t.Helper()
		r, err := client.Get("http://sandboxes" + path)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Body.Close()
		b, err := io.ReadAll(r.Body)
		if err != nil {
			t.Fatal(err)
		}
		return r.StatusCode, string(b)
	}
	if code, _ := fetch("/"); code != http.StatusNotFound {
		t.Errorf("/ answers with %d", code)
	}
	return func() string {
		t.Helper()
		code, body := fetch("/metrics")
		if code != http.StatusOK {
			t.Fatalf("%d: %s", code, body)
		}
		return body
	}
}

// TestKinds: sandboxes without our backend are seen as such.
func TestKinds(t *testing.T) {
	rt := newRuntime(t)
	start(t, rt, "on")
	start(t, rt, "off", fleet.WithFlags("--agentzip=off"))
	checkJSON(t, output(t, rt, "top", "-n=1", "-json"), map[string]census.State{"on": census.OK, "off": census.Off})
	checkMetrics(t, output(t, rt, "metrics"), map[string]string{"on": "1", "off": "0"})
	if r := row(output(t, rt, "top", "-n=1"), "off"); !strings.Contains(r, "--agentzip=off") {
		t.Errorf("%q", r)
	}
}

// TestTerminal: on a terminal, top ends with q and with Ctrl-C, and leaves the terminal
// as it was.
func TestTerminal(t *testing.T) {
	rt := newRuntime(t)
	start(t, rt, "one")
	for name, key := range map[string]string{"q": "q", "Ctrl-C": "\x03"} {
		t.Run(name, func(t *testing.T) { testTerminal(t, rt, key) })
	}
}

func testTerminal(t *testing.T, rt *harness.Runtime, key string) {
	outside, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		harness.Skip(t, "there are no terminals here: %v", err)
	}
	defer outside.Close()
	n, err := unix.IoctlGetInt(int(outside.Fd()), unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(int(outside.Fd()), unix.TIOCSPTLCK, 0)
	}
	if err != nil {
		t.Fatal(err)
	}
	inside, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer inside.Close()
	if err := unix.IoctlSetWinsize(int(inside.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: 24, Col: 80}); err != nil {
		t.Fatal(err)
	}
	before, err := unix.IoctlGetTermios(int(inside.Fd()), unix.TCGETS)
	if err != nil {
		t.Fatal(err)
	}
	cmd := command(harness.Within(t, bounded), rt, "top", "-interval=100ms")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = inside, inside, inside
	cmd.Env = append(os.Environ(), "TERM=xterm", "NO_COLOR=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()

	// Reading ends when both we and top have closed the inside.
	text := make(chan string, 100)
	go func() {
		defer close(text)
		buf := make([]byte, 1<<16)
		for {
			n, err := outside.Read(buf)
			if err != nil {
				return
			}
			text <- string(buf[:n])
		}
	}()
	seen := ""
	for strings.Count(seen, "\none ") < 2 {
		select {
		case s := <-text:
			seen += s
		case err := <-ended:
			t.Fatalf("top ended with %v: %q", err, seen)
		}
	}
	if _, err := outside.WriteString(key); err != nil {
		t.Fatal(err)
	}
	for err, running := error(nil), true; running; {
		select {
		case s := <-text:
			seen += s
		case err = <-ended:
			running = false
			if err != nil {
				t.Errorf("top ended with %v", err)
			}
		}
	}
	after, err := unix.IoctlGetTermios(int(inside.Fd()), unix.TCGETS)
	if err != nil {
		t.Fatal(err)
	}
	if *after != *before {
		t.Errorf("the terminal was %+v and is %+v", before, after)
	}
	inside.Close()
	for s := range text {
		seen += s
	}
	if !strings.HasPrefix(seen, "\x1b[?1049h\x1b[?25l") || !strings.HasSuffix(seen, "\x1b[?25h\x1b[?1049l") {
		t.Errorf("the screen was not left as it was: %q", seen)
	}
	if strings.Contains(seen, "\x1b[7m") {
		t.Errorf("there are colors despite NO_COLOR: %q", seen)
	}
}
