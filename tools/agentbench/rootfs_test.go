package main

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// An image is made anew after any change in its folder.
func TestImageIsCurrent(t *testing.T) {
	dir := t.TempDir()
	image := dir + ".erofs"
	t.Cleanup(func() { os.Remove(image) })
	file := filepath.Join(dir, "a", "file")
	require.NoError(t, os.Mkdir(filepath.Dir(file), 0o755))
	require.NoError(t, os.WriteFile(file, []byte("x"), 0o644))
	current := func() bool {
		t.Helper()
		ok, err := imageIsCurrent(image, dir)
		require.NoError(t, err)
		return ok
	}
	made := func() {
		t.Helper()
		// Clocks of file systems have steps of some milliseconds.
		time.Sleep(30 * time.Millisecond)
		require.NoError(t, os.WriteFile(image, nil, 0o644))
		require.True(t, current())
		time.Sleep(30 * time.Millisecond)
	}
	require.False(t, current(), "there is none")
	for name, change := range map[string]func() error{
		"content": func() error { return os.WriteFile(file, []byte("y"), 0o644) },
		"mode":    func() error { return os.Chmod(file, 0o600) },
		"old":     func() error { return os.Chtimes(file, time.Unix(1, 0), time.Unix(1, 0)) },
	} {
		made()
		require.NoError(t, change(), name)
		require.False(t, current(), name)
	}
	made()
	require.NoError(t, os.Rename(file, file+"2"))
	require.False(t, current(), "renamed")
	made()
	require.NoError(t, os.Remove(file+"2"))
	require.False(t, current(), "removed")
}

// TestMissingDebootstrap: without the tool, the message says how to get it, and what
// went wrong if getting it did.
func TestMissingDebootstrap(t *testing.T) {
	defer func(paths []string) { debootstrapPaths = paths }(debootstrapPaths)
	debootstrapPaths = nil
	dir := t.TempDir()
	t.Setenv("PATH", dir)
	var said []string
	find := func(install bool) (string, error) {
		return findDebootstrap(t.Context(), install, func(format string, args ...any) { said = append(said, fmt.Sprintf(format, args...)) })
	}
	const command = "apt-get install -y --no-install-recommends debootstrap"

	_, err := find(false)
	require.ErrorContains(t, err, "debootstrap is missing: "+command)
	require.Empty(t, said, "nothing may be installed")

	_, err = find(true)
	require.ErrorContains(t, err, command)
	require.ErrorContains(t, err, "apt-get")
	require.Len(t, said, 1)

	script := func(text string) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, "apt-get"), []byte("#!/bin/sh\n"+text), 0o755))
	}
	script("echo E: no such package >&2; exit 100\n")
	_, err = find(true)
	require.ErrorContains(t, err, "E: no such package")
	require.ErrorContains(t, err, "apt-get update && "+command)

	script("exit 0\n")
	_, err = find(true)
	require.ErrorContains(t, err, "nowhere to be found")

	tool := filepath.Join(dir, "debootstrap")
	script(": >" + tool + "; /bin/chmod 755 " + tool + "\n")
	found, err := find(true)
	require.NoError(t, err)
	require.Equal(t, tool, found)
}
