package containerd

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"runsc-agentzip/pkg/control"
	"runsc-agentzip/test/containerd/stage"
)

var (
	runtimeFlag = flag.String("runtime", envOr("AGENTZIP_RUNTIME", "bin/runsc-agentzip"),
		"the runsc under test; a relative path is taken from the top of the repository")
	requireFlag = flag.Bool("require", os.Getenv("AGENTZIP_REQUIRE") != "",
		"fail, rather than skip, where something that a test needs is missing")
)

const imageName = "localhost/agentzip-test:1"

func envOr(name, def string) string {
	if v := os.Getenv(name); v != "" {
		return v
	}
	return def
}

func TestMain(m *testing.M) {
	if mib := os.Getenv(guestEnv); mib != "" {
		runGuest(mib)
	}
	flag.Parse()
	// On SIGTERM the go command goes first and the pipe that we print into breaks;
	// dying of that would leave the stage's folder.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	if os.Geteuid() == 0 {
		if err := stage.RemoveAbandoned(); err != nil {
			fmt.Fprintf(os.Stderr, "removing what a killed run left: %v\n", err)
		}
	}
	os.Exit(m.Run())
}

// TestRemoveAbandoned clears what a killed run left, for CI to call by name; TestMain
// has done it.
func TestRemoveAbandoned(t *testing.T) {}

func repository(t *testing.T) string {
	t.Helper()
	dir, err := os.Getwd()
	require.NoError(t, err)
	for ; dir != "/"; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir
		}
	}
	t.Fatal("not inside the repository: no go.mod above the working folder")
	return ""
}

// host is a stage with the runtime under test in it.
type host struct {
	*stage.Stage
	t   *testing.T
	ctx context.Context
	// runtime is the binary's path.
	runtime string
	rootfs  string
}

// open makes a stage that is closed when the test ends, also on SIGTERM, Ctrl-C
// and shortly before the test's own time-out.
func open(t *testing.T, tools ...string) *host {
	t.Helper()
	skip := t.Skipf
	if *requireFlag {
		skip = t.Fatalf
	}
	if os.Geteuid() != 0 {
		skip("containers need root: run the tests as root")
	}
	for _, tool := range append(slices.Clone(stage.Tools), tools...) {
		if _, err := exec.LookPath(tool); err != nil {
			skip("%v: make deps installs the packages that have it", err)
		}
	}
	runtime := *runtimeFlag
	if !filepath.IsAbs(runtime) {
		runtime = filepath.Join(repository(t), runtime)
	}
	if _, err := os.Stat(runtime); err != nil {
		skip("%v: run `make build` or name a runsc with -runtime", err)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	t.Cleanup(stop)
	if deadline, ok := t.Deadline(); ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(ctx, deadline.Add(-time.Minute))
		t.Cleanup(cancel)
	}
	s, err := stage.New()
	require.NoError(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(s.Logs())
		}
		require.NoError(t, s.Close())
	})
	h := &host{Stage: s, t: t, ctx: ctx, runtime: s.Path("runsc-agentzip")}
	require.NoError(t, stage.CopyFile(runtime, h.runtime))
	self, err := os.Executable()
	require.NoError(t, err)
	h.rootfs, err = s.Rootfs(ctx, self)
	require.NoError(t, err)
	require.NoError(t, stage.WriteImage(s.Path("image.tar"), imageName, h.rootfs, "/bin/sleep", "1000000"))
	return h
}

func (h *host) must(name string, args ...string) string {
	h.t.Helper()
	out, err := h.Output(h.ctx, name, args...)
	require.NoError(h.t, err)
	return out
}

// status checks that a command ended with the status.
func (h *host) status(want int, name string, args ...string) {
	h.t.Helper()
	_, err := h.Output(h.ctx, name, args...)
	var exit *exec.ExitError
	require.ErrorAs(h.t, err, &exit)
	require.Equal(h.t, want, exit.ExitCode(), "%v", err)
}

// eventually waits for at most a minute until f returns nil.
func (h *host) eventually(f func() error) {
	h.t.Helper()
	var err error
	for start := time.Now(); time.Since(start) < time.Minute && h.ctx.Err() == nil; time.Sleep(100 * time.Millisecond) {
		if err = f(); err == nil {
			return
		}
	}
	h.t.Fatal(errors.Join(err, context.Cause(h.ctx)))
}

// contains waits until the file has the text, n times.
func (h *host) contains(file, text string, n int) {
	h.t.Helper()
	h.eventually(func() error {
		content, err := os.ReadFile(file)
		if err == nil && strings.Count(string(content), text) < n {
			err = fmt.Errorf("%s does not have %q %d times: %q", filepath.Base(file), text, n, content)
		}
		return err
	})
}

func (h *host) stats(root, id string) (s control.Stats) {
	h.t.Helper()
	out := h.must(h.runtime, "--root", root, "agentzip", "stats", "-json", id)
	require.NoError(h.t, json.Unmarshal([]byte(out), &s), out)
	return s
}

// requireFlagOf checks that the sandbox of the container has been given a flag.
func (h *host) requireFlagOf(id, flag string) {
	h.t.Helper()
	for _, line := range h.Processes() {
		// The container's id is the last argument.
		if strings.HasPrefix(line, "runsc-sandbox ") && strings.HasSuffix(line, " "+id) {
			require.Contains(h.t, strings.Fields(line), flag)
			return
		}
	}
	h.t.Fatalf("no sandbox of %s runs: %q", id, h.Processes())
}

// startContainerd starts one and returns its socket. more is put at the end of its
// configuration.
func (h *host) startContainerd(more string) (socket string) {
	h.t.Helper()
	socket = h.Path("containerd.sock")
	config := fmt.Sprintf("version = 2\nroot = %q\nstate = %q\n%s\n[grpc]\n  address = %q\n", h.Path("ctrd"), h.Path("ctrd-state"), more, socket)
	require.NoError(h.t, os.WriteFile(h.Path("containerd.toml"), []byte(config), 0o644))
	d, err := h.Start("containerd", "containerd", "--config", h.Path("containerd.toml"))
	require.NoError(h.t, err)
	require.NoError(h.t, d.Await(h.ctx, func() error {
		_, err := h.Output(h.ctx, "ctr", "--address", socket, "version")
		return err
	}))
	return socket
}
