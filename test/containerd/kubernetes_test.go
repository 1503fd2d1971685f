package containerd

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"
)

// kubernetesFile reads one of the files for Kubernetes.
func kubernetesFile(t *testing.T, name string) string {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(repository(t), "runsc-agentzip/kubernetes", name))
	require.NoError(t, err)
	return string(content)
}

// object is the part of a Kubernetes object that these tests look at.
type object struct {
	APIVersion string `yaml:"apiVersion"`
	Kind       string
	Metadata   struct{ Name, Namespace string }
	Handler    string
	Scheduling struct {
		NodeSelector map[string]string `yaml:"nodeSelector"`
	}
	Spec struct {
		Selector struct {
			MatchLabels map[string]string `yaml:"matchLabels"`
		}
		Template struct {
			Metadata struct{ Labels map[string]string }
			Spec     struct {
				NodeSelector map[string]string `yaml:"nodeSelector"`
				Containers   []struct {
					Command      []string
					VolumeMounts []struct {
						Name      string
						MountPath string `yaml:"mountPath"`
					} `yaml:"volumeMounts"`
				}
				Volumes []struct {
					Name     string
					HostPath struct{ Path, Type string } `yaml:"hostPath"`
				}
			}
		}
	}
}

func objects(t *testing.T, name string) (all []object) {
	t.Helper()
	for d := yaml.NewDecoder(strings.NewReader(kubernetesFile(t, name))); ; {
		var o object
		err := d.Decode(&o)
		if errors.Is(err, io.EOF) {
			return all
		}
		require.NoError(t, err, name)
		all = append(all, o)
	}
}

// TestKubernetesFiles: they parse and fit each other.
func TestKubernetesFiles(t *testing.T) {
	class := objects(t, "runtimeclass.yaml")
	require.Len(t, class, 1)
	require.Equal(t, "node.k8s.io/v1 RuntimeClass agentzip", class[0].APIVersion+" "+class[0].Kind+" "+class[0].Metadata.Name)
	require.Contains(t, kubernetesFile(t, "containerd-config.toml"), ".containerd.runtimes."+class[0].Handler+"]\n")

	pool := objects(t, "pool-daemonset.yaml")
	require.Len(t, pool, 2)
	require.Equal(t, "Namespace", pool[0].Kind)
	require.Equal(t, "DaemonSet", pool[1].Kind)
	require.Equal(t, pool[0].Metadata.Name, pool[1].Metadata.Namespace)
	spec := pool[1].Spec
	require.NotEmpty(t, spec.Selector.MatchLabels)
	require.Equal(t, spec.Selector.MatchLabels, spec.Template.Metadata.Labels)
	require.Equal(t, class[0].Scheduling.NodeSelector, spec.Template.Spec.NodeSelector)

	// Inside and outside of the pool's container the same paths mean the same.
	require.Len(t, spec.Template.Spec.Containers, 1)
	volumes := map[string]string{}
	for _, v := range spec.Template.Spec.Volumes {
		volumes[v.Name] = v.HostPath.Path
	}
	mounts := map[string]bool{}
	for _, m := range spec.Template.Spec.Containers[0].VolumeMounts {
		require.Equal(t, volumes[m.Name], m.MountPath)
		mounts[m.MountPath] = true
	}
	command := spec.Template.Spec.Containers[0].Command
	require.True(t, mounts[command[0]], command[0])
	shim := kubernetesFile(t, "runsc-agentzip.toml")
	require.Contains(t, shim, fmt.Sprintf("binary_name = %q\n", command[0]))
	socket := regexp.MustCompile(`(?m)^ *agentzip-pool = "(.*)"$`).FindStringSubmatch(shim)
	require.NotNil(t, socket)
	require.Contains(t, command, "--socket="+socket[1])
	require.True(t, mounts[filepath.Dir(socket[1])], socket[1])
}

// TestKubernetesPool runs the command of the DaemonSet.
func TestKubernetesPool(t *testing.T) {
	h := open(t)
	h.must("cp", h.runtime, "/usr/local/bin/runsc-agentzip")
	command := objects(t, "pool-daemonset.yaml")[1].Spec.Template.Spec.Containers[0].Command
	d, err := h.Start("pool", command[0], command[1:]...)
	require.NoError(t, err)
	require.NoError(t, d.Await(h.ctx, func() error {
		_, err := h.Output(h.ctx, "runsc-agentzip", "agentzip", "pool", "stats", "--socket=/run/runsc-agentzip/pool.sock")
		return err
	}))
}

// useKubernetesConfig starts containerd with the files for a node, in their places.
func (h *host) useKubernetesConfig(shimFlags, more string) (socket string) {
	h.t.Helper()
	h.must("cp", h.runtime, "/usr/local/bin/runsc-agentzip")
	require.NoError(h.t, os.WriteFile(h.Path("shim.toml"), []byte(kubernetesFile(h.t, "runsc-agentzip.toml")+shimFlags), 0o644))
	h.must("mkdir", "-p", "/etc/containerd")
	h.must("cp", h.Path("shim.toml"), "/etc/containerd/runsc-agentzip.toml")
	config, ok := strings.CutPrefix(regexp.MustCompile(`(?m)^#.*\n`).ReplaceAllString(kubernetesFile(h.t, "containerd-config.toml"), ""), "version = 2\n")
	require.True(h.t, ok, config)
	// The daemon's own folder for CNI: the machine's, if it has one, is no business of
	// the test's.
	return h.startContainerd(config + fmt.Sprintf(`
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = %q
  restrict_oom_score_adj = true
  %s
[plugins."io.containerd.grpc.v1.cri".cni]
  conf_dir = %q
`, imageName, more, h.Path("cni")))
}

// TestKubernetesConfig: containerd takes the configuration, CRI and all.
func TestKubernetesConfig(t *testing.T) {
	h := open(t, "containerd", "ctr")
	socket := h.useKubernetesConfig("", "")
	var cri []string
	for line := range strings.Lines(h.must("ctr", "--address", socket, "plugins", "list")) {
		if f := strings.Fields(line); len(f) > 2 && f[0] == "io.containerd.grpc.v1" && f[1] == "cri" {
			cri = f
		}
	}
	require.NotEmpty(t, cri, "containerd has no CRI plugin")
	require.Equal(t, "ok", cri[len(cri)-1], h.Logs())
	require.Regexp(t, `runtimes\.agentzip\.options\]\n\s*ConfigPath = ["']/etc/containerd/runsc-agentzip.toml["']\n`,
		h.must("containerd", "--config", h.Path("containerd.toml"), "config", "dump"))
}

// canRunPods tells why not, or returns nil.
func canRunPods(h *host) error {
	for _, tool := range []string{"crictl", "containerd-shim-runsc-v1"} {
		if _, err := exec.LookPath(tool); err != nil {
			return err
		}
	}
	// containerd github.com/containerd/containerd/v2 2.1.5 ...
	out := h.must("containerd", "--version")
	version := regexp.MustCompile(`\bv?(\d+)\.\d+\.\d+`).FindStringSubmatch(out)
	if version == nil {
		return fmt.Errorf("containerd --version says %q", out)
	}
	if major, _ := strconv.Atoi(version[1]); major < 2 {
		return fmt.Errorf("containerd %s does not understand the answer of gVisor's shim", version[0])
	}
	return nil
}

// TestPod starts a pod as the kubelet would, on the network of the stage. Its containers
// share one sandbox.
func TestPod(t *testing.T) {
	h := open(t, "containerd", "ctr")
	if err := canRunPods(h); err != nil {
		t.Skipf("pods need containerd 2, gVisor's containerd-shim-runsc-v1 and crictl in PATH: %v", err)
	}
	socket := h.useKubernetesConfig(fmt.Sprintf("  network = \"none\"\n  debug-log = %q\n", h.Path("runsc-logs")+"/"), "")
	h.must("ctr", "--address", socket, "--namespace", "k8s.io", "images", "import", h.Path("image.tar"))
	crictl := func(args ...string) []string {
		return append([]string{"--runtime-endpoint", "unix://" + socket, "--timeout", "60s"}, args...)
	}
	write := func(name, content string) string {
		t.Helper()
		require.NoError(t, os.WriteFile(h.Path(name), []byte(content), 0o644))
		return h.Path(name)
	}
	require.NoError(t, os.Mkdir(h.Path("logs"), 0o755))
	pod := write("pod.json", fmt.Sprintf(`{"metadata": {"name": "pod", "namespace": "default", "uid": "1"}, "log_directory": %q,
		"annotations": {"dev.agentzip.idle": "351ms"},
		"linux": {"cgroup_parent": %q, "security_context": {"namespace_options": {"network": 2, "pid": 1}}}}`, h.Path("logs"), h.Cgroup()))
	out := h.must("crictl", crictl("runp", "--runtime", "agentzip", pod)...)
	id := strings.TrimSpace(out)
	container := func(name, script string) string {
		t.Helper()
		config := write(name+".json", fmt.Sprintf(`{"metadata": {"name": %q}, "image": {"image": %q}, "log_path": %q,
			"command": ["/bin/sh", "-c", %q], "linux": {"security_context": {"namespace_options": {"network": 2, "pid": 1}}}}`,
			name, imageName, name+".log", script))
		c := strings.TrimSpace(h.must("crictl", crictl("create", id, config, pod)...))
		h.must("crictl", crictl("start", c)...)
		return c
	}
	stays := container("stays", "echo up; sleep 1000")
	ends := container("ends", "dmesg | head -1; exit 7")
	h.contains(h.Path("logs/stays.log"), "up", 1)
	h.contains(h.Path("logs/ends.log"), "gVisor", 1)
	h.eventually(func() error {
		out := h.must("crictl", crictl("inspect", "--output", "go-template", "--template", "{{.status.state}} {{.status.exitCode}}", ends)...)
		if strings.TrimSpace(out) != "CONTAINER_EXITED 7" {
			return fmt.Errorf("a container that ended is %q", out)
		}
		return nil
	})
	require.Equal(t, "42\n", h.must("crictl", crictl("exec", stays, "sh", "-c", "echo $((6*7))")...))
	h.requireFlagOf(id, "--agentzip-idle=351ms")
	// Both are one sandbox. The shim's own default for --root.
	root := "/run/containerd/runsc/k8s.io"
	require.NotZero(t, h.stats(root, id).GuestBytes)
	require.NotZero(t, h.stats(root, stays).GuestBytes)
	h.must("crictl", crictl("rmp", "--force", id)...)
	for _, line := range h.Processes() {
		require.False(t, strings.HasPrefix(line, "runsc-sandbox ") || strings.HasPrefix(line, "runsc-gofer "), line)
	}
}
