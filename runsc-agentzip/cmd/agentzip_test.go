package cmd

import (
	"testing"

	"github.com/stretchr/testify/require"
	"gvisor.dev/gvisor/runsc/container"
)

// TestChoose: a sandbox is not taken for another whose ID begins with its own.
func TestChoose(t *testing.T) {
	id := func(s string) container.FullID { return container.FullID{SandboxID: s, ContainerID: s} }
	docker := "0123456789abcdef0123456789abcdef"
	all := []container.FullID{id("agent-10"), id("agent-2"), id("agent-20"), id(docker), {SandboxID: "agent-2", ContainerID: "side"}}
	for given, want := range map[string]container.FullID{
		"agent-10":  id("agent-10"),
		"agent-2":   id("agent-2"),
		"side":      all[4],
		docker:      id(docker),
		docker[:12]: id(docker),
		docker[:31]: id(docker),
	} {
		got, err := choose(all, given)
		require.NoError(t, err, given)
		require.Equal(t, want, got, given)
	}
	for given, why := range map[string]string{
		"agent-1":   "agent-10 begins so",
		docker[:11]: docker + " begins so",
		"agent-3":   "",
		"":          "",
	} {
		_, err := choose(all, given)
		require.Error(t, err, given)
		require.Contains(t, err.Error(), why)
	}
	_, err := choose(append(all, id(docker[:12]+"9")), docker[:12])
	require.Error(t, err, "two begin so")
}
