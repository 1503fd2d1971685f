package containerd

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"runsc-agentzip/test/containerd/stage"
)

// ctr is containerd's own client, and its shim for runc with our runtime for runc.
type ctr struct {
	*host
	socket string
}

const namespace = "agentzip"

func (c *ctr) args(args ...string) []string {
	return append([]string{"--address", c.socket, "--namespace", namespace}, args...)
}

// run are the arguments of a run of the container, up to its flags.
func (c *ctr) run(id string, flags ...string) []string {
	return append(c.args("run", "--runc-binary", c.runtime, "--runc-root", c.Path("root"), "--cgroup", c.Cgroup()+"/"+id), flags...)
}

// root is where the runtime keeps its containers.
func (c *ctr) root() string { return filepath.Join(c.Path("root"), namespace) }

func (c *ctr) log(id string) string { return c.Path(id + ".out") }

// detach starts a container in the background, which prints into log(id).
func (c *ctr) detach(id string, flags []string, command ...string) {
	c.t.Helper()
	flags = append([]string{"--detach", "--log-uri", "file://" + c.log(id)}, flags...)
	c.must("ctr", append(c.run(id, append(flags, imageName, id)...), command...)...)
}

// kill ends a container by a signal and removes it.
func (c *ctr) kill(id, signal string) {
	c.t.Helper()
	c.must("ctr", c.args("tasks", "kill", "--signal", signal, id)...)
	c.eventually(func() error {
		for line := range strings.Lines(c.must("ctr", c.args("tasks", "list")...)) {
			if f := strings.Fields(line); f[0] == id && f[2] != "STOPPED" {
				return fmt.Errorf("%s after %s: %s", id, signal, line)
			}
		}
		return nil
	})
	c.must("ctr", c.args("tasks", "delete", id)...)
	c.must("ctr", c.args("containers", "delete", id)...)
}

func TestCtr(t *testing.T) {
	h := open(t, "containerd", "ctr")
	socket := h.startContainerd(`disabled_plugins = ["io.containerd.grpc.v1.cri"]`)
	h.must("ctr", "--address", socket, "--namespace", namespace, "images", "import", h.Path("image.tar"))
	for _, test := range []struct {
		name string
		run  func(*ctr)
	}{
		{"Run", (*ctr).testRun},
		{"ExecAndKill", (*ctr).testExecAndKill},
		{"MemoryLimit", (*ctr).testMemoryLimit},
		{"Annotation", (*ctr).testAnnotation},
		{"Template", (*ctr).testTemplate},
	} {
		t.Run(test.name, func(t *testing.T) {
			sub := *h
			sub.t = t
			test.run(&ctr{&sub, socket})
		})
	}
	// Nothing but the daemon itself is left of the containers.
	for _, line := range h.Processes() {
		require.False(t, strings.HasPrefix(line, "runsc-sandbox ") || strings.HasPrefix(line, "runsc-gofer "), line)
	}
}

func (c *ctr) testRun() {
	out := c.must("ctr", c.run("run", "--rm", imageName, "run", "sh", "-c", "echo hello; dmesg | head -1; id -u")...)
	lines := strings.Split(strings.TrimSpace(out), "\n")
	require.Len(c.t, lines, 3, out)
	require.Equal(c.t, "hello", lines[0])
	require.Contains(c.t, lines[1], "gVisor")
	require.Equal(c.t, "0", lines[2])
	c.status(7, "ctr", c.run("status", "--rm", imageName, "status", "sh", "-c", "exit 7")...)
}

func (c *ctr) testExecAndKill() {
	c.detach("exec", nil, "sh", "-c", "trap 'echo got TERM; exit 5' TERM; echo up; while :; do sleep 0.1; done")
	c.contains(c.log("exec"), "up", 1)
	out := c.must("ctr", c.args("tasks", "exec", "--exec-id", "e1", "exec", "sh", "-c", "echo $((6*7)); ps | grep -c trap")...)
	require.Equal(c.t, "42", strings.Fields(out)[0])
	c.status(9, "ctr", c.args("tasks", "exec", "--exec-id", "e2", "exec", "sh", "-c", "exit 9")...)
	c.kill("exec", "SIGTERM")
	c.contains(c.log("exec"), "got TERM", 1)

	c.detach("killed", nil, "sleep", "1000")
	c.kill("killed", "SIGKILL")
}

// testMemoryLimit: what compresses lives in less memory than it is.
func (c *ctr) testMemoryLimit() {
	c.detach("limit", []string{"--memory-limit", fmt.Sprint(128 << 20), "--env", guestEnv + "=200"}, "/extra")
	c.contains(c.log("limit"), "ready", 1)
	out := c.must("ctr", c.args("tasks", "exec", "--exec-id", "e1", "limit", "grep", "MemTotal", "/proc/meminfo")...)
	require.Equal(c.t, "131072", strings.Fields(out)[1], out)
	c.must("ctr", c.args("tasks", "kill", "--signal", "SIGUSR1", "limit")...)
	c.contains(c.log("limit"), "equal", 1)
	s := c.stats(c.root(), "limit")
	require.EqualValues(c.t, 128<<20, s.Pressure.LimitBytes)
	require.NotZero(c.t, s.Pressure.Evictions)
	require.Greater(c.t, s.GuestBytes, uint64(200<<20))
	c.kill("limit", "SIGKILL")
}

func (c *ctr) testAnnotation() {
	c.detach("annotated", []string{"--annotation", "dev.agentzip.idle=351ms"}, "sleep", "1000")
	c.requireFlagOf("annotated", "--agentzip-idle=351ms")
	c.kill("annotated", "SIGKILL")

	_, err := c.Output(c.ctx, "ctr", c.run("wrong", "--rm", "--annotation", "dev.agentzip.idle=soon", imageName, "wrong", "true")...)
	require.ErrorContains(c.t, err, "dev.agentzip.idle")
}

// testTemplate: ctr makes a template of a running container. It has no command that
// restores one: `ctr containers checkpoint` asks for CRIU's flags. The runtime does,
// with the bundle that containerd made.
func (c *ctr) testTemplate() {
	c.detach("origin", []string{"--env", guestEnv + "=32"}, "/extra")
	c.contains(c.log("origin"), "ready", 1)
	c.must("ctr", c.args("tasks", "checkpoint", "--image-path", c.Path("template"), "origin")...)
	require.FileExists(c.t, c.Path("template", "pages.img"))
	c.must(c.runtime, "agentzip", "template", "info", c.Path("template"))
	c.must(c.runtime, "agentzip", "template", "verify", c.Path("template"))

	// It travels as an image, as README.md has it.
	require.NoError(c.t, os.MkdirAll(c.Path("layer"), 0o755))
	require.NoError(c.t, os.CopyFS(c.Path("layer/template"), os.DirFS(c.Path("template"))))
	const image = "localhost/template:1"
	require.NoError(c.t, stage.WriteImage(c.Path("template.tar"), image, c.Path("layer"), "none"))
	c.must("ctr", c.args("images", "import", c.Path("template.tar"))...)
	require.NoError(c.t, os.MkdirAll(c.Path("mount"), 0o755))
	c.must("ctr", c.args("images", "mount", image, c.Path("mount"))...)
	c.must("cp", "-r", c.Path("mount/template"), c.Path("shipped"))
	c.must("ctr", c.args("images", "unmount", c.Path("mount"))...)
	c.must(c.runtime, "agentzip", "template", "verify", c.Path("shipped"))

	bundle := c.Path("ctrd-state/io.containerd.runtime.v2.task", namespace, "origin")
	for _, dir := range []string{"template", "shipped"} {
		id := "clone-" + dir
		clone, err := c.Start(id, c.runtime, "--root", c.Path("clones"), "restore", "--bundle", bundle, "--image-path", c.Path(dir), id)
		require.NoError(c.t, err)
		require.NoError(c.t, clone.Await(c.ctx, func() error {
			_, err := c.Output(c.ctx, c.runtime, "--root", c.Path("clones"), "kill", id, "USR1")
			return err
		}))
		c.contains(c.Path(id+".log"), "equal", 1)
		s := c.stats(c.Path("clones"), id)
		require.Greater(c.t, s.TemplateBytes, uint64(32<<20))
		c.must(c.runtime, "--root", c.Path("clones"), "kill", id, "KILL")
		<-clone.Done()
	}

	// The origin has gone on.
	c.must("ctr", c.args("tasks", "kill", "--signal", "SIGUSR1", "origin")...)
	c.contains(c.log("origin"), "equal", 1)
	c.kill("origin", "SIGKILL")
	require.NoError(c.t, os.RemoveAll(c.Path("template")))
}
