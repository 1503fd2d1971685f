package cmd

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"gvisor.dev/gvisor/runsc/flag"
)

// install runs "install" with a command line.
func install(t *testing.T, file string, args ...string) (string, error) {
	t.Helper()
	var i Install
	f := flag.NewFlagSet("install", flag.ContinueOnError)
	i.SetFlags(f)
	require.NoError(t, f.Parse(append([]string{"--config_file=" + file}, args...)))
	var out bytes.Buffer
	err := i.run(&out, f.Args())
	return out.String(), err
}

func uninstall(t *testing.T, file string, args ...string) (string, error) {
	t.Helper()
	var u Uninstall
	f := flag.NewFlagSet("uninstall", flag.ContinueOnError)
	u.SetFlags(f)
	require.NoError(t, f.Parse(append([]string{"--config_file=" + file}, args...)))
	var out bytes.Buffer
	err := u.run(&out, f.Args())
	return out.String(), err
}

func TestInstall(t *testing.T) {
	file := filepath.Join(t.TempDir(), "daemon.json")
	exe, err := os.Executable()
	require.NoError(t, err)
	content := func() string {
		b, err := os.ReadFile(file)
		require.NoError(t, err)
		return string(b)
	}

	out, err := install(t, file)
	require.NoError(t, err)
	require.Contains(t, out, "systemctl reload docker")
	require.JSONEq(t, `{"runtimes": {"agentzip": {"path": "`+exe+`"}}}`, content())

	out, err = install(t, file)
	require.NoError(t, err)
	require.Contains(t, out, "nothing had to be changed")

	out, err = install(t, file, "--pool=/run/p.sock", "--", "--platform=systrap", "--agentzip-idle=1s")
	require.NoError(t, err)
	require.Contains(t, out, "is now: "+exe+" --platform=systrap --agentzip-idle=1s --agentzip-pool=/run/p.sock")
	require.JSONEq(t, `{"runtimes": {"agentzip": {"path": "`+exe+`", "runtimeArgs": ["--platform=systrap", "--agentzip-idle=1s", "--agentzip-pool=/run/p.sock"]}}}`, content())

	out, err = install(t, file, "--clobber=false", "--", "--agentzip=off")
	require.NoError(t, err)
	require.Contains(t, out, "was not changed")

	_, err = install(t, file, "--runtime=other", "--experimental", "--cgroupdriver=systemd", "--", "--agentzip=off")
	require.NoError(t, err)
	_, err = uninstall(t, file)
	require.NoError(t, err)
	require.JSONEq(t, `{"runtimes": {"other": {"path": "`+exe+`", "runtimeArgs": ["--agentzip=off"]}}, "experimental": true, "exec-opts": ["native.cgroupdriver=systemd"]}`, content())
	_, err = uninstall(t, file)
	require.ErrorContains(t, err, `has no runtime "agentzip"`)
	_, err = uninstall(t, file, "other")
	require.ErrorContains(t, err, "--runtime=NAME")
}

// What would keep containers or dockerd from starting is refused by its name, and
// nothing is written.
func TestInstallRefuses(t *testing.T) {
	dir, err := filepath.EvalSymlinks(t.TempDir())
	require.NoError(t, err)
	file := filepath.Join(dir, "daemon.json")
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"--", "--agentzip-idel=1s"}, "-agentzip-idel"},
		{[]string{"--", "--agentzip-idle=soon"}, "-agentzip-idle"},
		{[]string{"--", "--agentzip-idle=-1s"}, "--agentzip-idle=-1s: must not be negative"},
		{[]string{"--", "--agentzip=perhaps"}, "must be on or off"},
		{[]string{"--", "--agentzip-map-unit=5000"}, "--agentzip-map-unit=5000"},
		{[]string{"--", "--agentzip-pool=here"}, "--agentzip-pool=here: must be an absolute path"},
		{[]string{"--", "--agentzip-pool-start"}, "needs --agentzip-pool"},
		{[]string{"--pool=here"}, "--agentzip-pool=here: must be an absolute path"},
		{[]string{"--", "--platform=vmware"}, "--platform=vmware"},
		{[]string{"--", "--network=nowhere"}, "-network"},
		{[]string{"--", "--debug", "now"}, `"now" is none`},
		{[]string{"eager"}, `"eager" is none`},
		{[]string{"--pool=/run/my pool.sock"}, `"--agentzip-pool=/run/my pool.sock": dockerd hands flags to a shell`},
		{[]string{"--", "--debug-log=/tmp/$HOME"}, "dockerd hands flags to a shell"},
		{[]string{"--", "--debug-log=/tmp/a;reboot"}, "dockerd hands flags to a shell"},
		{[]string{"--", "--debug", "--"}, "a second --"},
		{[]string{"--runtime="}, "--runtime is empty"},
		{[]string{"--runtime=runc"}, "--runtime=runc"},
		{[]string{"--runtime=a b"}, `--runtime="a b"`},
		{[]string{"--cgroupdriver=none"}, "--cgroupdriver=none"},
		{[]string{"--download-sidecars=ALWAYS"}, "--download-sidecars"},
		{[]string{"--sidecar-url=http://localhost/x"}, "--sidecar-url"},
	} {
		_, err := install(t, file, c.args...)
		require.ErrorContains(t, err, c.want, "%q", c.args)
		require.NoFileExists(t, file)
	}
	require.NoError(t, os.WriteFile(file, []byte("{,}"), 0o644))
	_, err = install(t, file)
	require.ErrorContains(t, err, file+": not valid JSON: line 1")
	_, err = uninstall(t, file)
	require.ErrorContains(t, err, file+": not valid JSON: line 1")
}
