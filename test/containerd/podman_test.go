package containerd

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// podman has no daemon: conmon keeps a container.
type podman struct{ *host }

func (p *podman) args(args ...string) []string {
	return append([]string{"--root", p.Path("podman"), "--runroot", p.Path("podman-run"), "--tmpdir", p.Path("podman-tmp"),
		"--cgroup-manager", "cgroupfs", "--events-backend", "file", "--runtime", p.runtime}, args...)
}

func (p *podman) run(flags ...string) []string {
	return append(p.args("run", "--network", "none", "--cgroup-parent", p.Cgroup()), flags...)
}

func TestPodman(t *testing.T) {
	h := open(t, "podman", "conmon")
	p := &podman{h}
	p.must("podman", p.args("load", "--input", p.Path("image.tar"))...)

	out := p.must("podman", p.run("--rm", imageName, "sh", "-c", "echo hello; dmesg | head -1; id -u")...)
	lines := strings.Split(strings.TrimSpace(out), "\n")
	require.Len(t, lines, 3, out)
	require.Equal(t, "hello", lines[0])
	require.Contains(t, lines[1], "gVisor")
	p.status(7, "podman", p.run("--rm", imageName, "sh", "-c", "exit 7")...)

	id := strings.TrimSpace(p.must("podman", p.run("--detach", "--memory", "128m", "--annotation", "dev.agentzip.idle=351ms",
		"--env", guestEnv+"=200", imageName, "/extra")...))
	printed := func(text string) {
		t.Helper()
		h.eventually(func() error {
			if out := p.must("podman", p.args("logs", id)...); !strings.Contains(out, text) {
				return fmt.Errorf("the container did not print %q but %q", text, out)
			}
			return nil
		})
	}
	printed("ready")
	p.requireFlagOf(id, "--agentzip-idle=351ms")
	out = p.must("podman", p.args("exec", id, "grep", "MemTotal", "/proc/meminfo")...)
	require.Equal(t, "131072", strings.Fields(out)[1], out)
	p.status(9, "podman", p.args("exec", id, "sh", "-c", "exit 9")...)
	p.must("podman", p.args("kill", "--signal", "USR1", id)...)
	printed("equal")
	// The runtime's own default: podman names no --root.
	s := p.stats("/run/runsc", id)
	require.EqualValues(t, 128<<20, s.Pressure.LimitBytes)
	require.NotZero(t, s.Pressure.Evictions)

	p.must("podman", p.args("kill", id)...)
	require.Equal(t, "137", strings.TrimSpace(p.must("podman", p.args("wait", id)...)))
	p.must("podman", p.args("rm", id)...)

	_, err := p.Output(p.ctx, "podman", p.run("--rm", "--annotation", "dev.agentzip.idle=soon", imageName, "true")...)
	require.ErrorContains(t, err, "dev.agentzip.idle")
}
