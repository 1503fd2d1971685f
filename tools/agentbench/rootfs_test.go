package main

import (
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
