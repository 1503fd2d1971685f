package cmd

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestKernelMemory(t *testing.T) {
	dir := t.TempDir()
	require.Zero(t, kernelMemory(dir, false, 1), "no such cgroup")
	require.Zero(t, kernelMemory(dir, true, 1), "no such cgroup")

	write := func(name, text string) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644))
	}
	write("memory.kmem.usage_in_bytes", "5000\n")
	require.EqualValues(t, 3800, kernelMemory(dir, false, 1200))
	require.Zero(t, kernelMemory(dir, false, 6000), "page tables that the cgroup was not charged with")

	write("memory.stat", "anon 77\nkernel_stack 100\npagetables 20\npercpu 3\nsock 4\nslab 1000\n")
	require.EqualValues(t, 1107, kernelMemory(dir, true, 5))
	write("memory.stat", "anon 77\nkernel 1300\nkernel_stack 100\npagetables 20\npercpu 3\nsock 4\nslab 1000\n")
	require.EqualValues(t, 1284, kernelMemory(dir, true, 5))
}
