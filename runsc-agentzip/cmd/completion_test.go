package cmd

import (
	"bytes"
	goflag "flag"
	"os/exec"
	"strings"
	"testing"

	"github.com/google/subcommands"
	"github.com/stretchr/testify/require"
	"gvisor.dev/gvisor/runsc/config"
	"gvisor.dev/gvisor/runsc/flag"
)

// TestCompletion asks bash for what it would offer.
func TestCompletion(t *testing.T) {
	if _, err := exec.LookPath("bash"); err != nil {
		t.Skip(err)
	}
	global := flag.NewFlagSet("runsc-agentzip", flag.ContinueOnError)
	config.RegisterFlags(global)
	cdr := subcommands.NewCommander(goflag.NewFlagSet("runsc-agentzip", goflag.ContinueOnError), "runsc-agentzip")
	cdr.Register(new(Agentzip), "agentzip")
	cdr.Register(new(Install), "helpers")
	cdr.Register(new(Uninstall), "internal use only")
	var script bytes.Buffer
	require.NoError(t, writeCompletion(&script, registeredWords(cdr, global)))

	for line, want := range map[string]string{
		"a":                                      "agentzip",
		"":                                       "agentzip install",
		"i":                                      "install",
		"--agentzip-pool":                        "--agentzip-pool --agentzip-pool-start",
		"-agentzip-pool-s":                       "--agentzip-pool-start",
		"--root /run/x --debug agentzip t":       "template top",
		"agentzip template ":                     "create info verify",
		"agentzip template create --s":           "--settle-cmd --settle-timeout",
		"agentzip template create --image-path ": "",
		"agentzip pool serve --max":              "--max-bytes",
		"agentzip pool s":                        "serve stats",
		"agentzip hint --p":                      "--phase",
		"agentzip hint -p":                       "--phase",
		"agentzip stats --":                      "--json",
		"agentzip prefetch -":                    "--json --save",
		"agentzip top --i":                       "--interval",
		"install --p":                            "--pool",
		"install --runtime=x --conf":             "--config_file",
		"unknown --":                             "",
	} {
		cmd := exec.Command("bash", "--norc", "-c", `eval "$1"; shift
			COMP_WORDS=(runsc-agentzip "$@") COMP_CWORD=$#
			_runsc_agentzip && echo "${COMPREPLY[@]}"
			complete -p runsc-agentzip >&2`, "bash", script.String())
		cmd.Args = append(cmd.Args, strings.Split(line, " ")...)
		out, err := cmd.Output()
		require.NoError(t, err, "%q", line)
		got := strings.TrimSpace(string(out))
		if line == "unknown --" {
			// What is no command is a flag's value, as far as can be told.
			require.Contains(t, got, "--agentzip-idle")
			continue
		}
		require.Equal(t, want, got, "%q", line)
	}
}
