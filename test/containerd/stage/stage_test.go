package stage

import (
	"archive/tar"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func open(t *testing.T) *Stage {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("namespaces need root")
	}
	for _, tool := range Tools {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skip(err)
		}
	}
	s, err := New()
	if errors.Is(err, os.ErrPermission) || err != nil && strings.Contains(err.Error(), "Operation not permitted") {
		t.Skip(err)
	}
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

func TestStageIsPrivateAndEndsWithAll(t *testing.T) {
	s := open(t)
	ctx := context.Background()
	_, err := s.Output(ctx, "sh", "-c", "mkdir /run/agentzip-stage-test; echo >/etc/agentzip-stage-test; test -d /run/agentzip-stage-test")
	require.NoError(t, err)
	for _, path := range []string{"/run/agentzip-stage-test", "/etc/agentzip-stage-test"} {
		require.NoFileExists(t, path)
	}
	// Its own child stays when the first sleep is left, until the stage ends.
	d, err := s.Start("sleeper", "sh", "-c", "sleep 1000 & echo started; wait")
	require.NoError(t, err)
	require.NoError(t, d.Await(ctx, func() error {
		if d.Log() == "" {
			return errors.New("nothing printed")
		}
		return nil
	}))
	require.Contains(t, s.Processes(), "sleep 1000")
	require.NoError(t, s.Close())
	<-d.Done()
	require.NoDirExists(t, s.Dir())
	require.Empty(t, s.Processes())
}

func TestOutputCarriesStatusAndStderr(t *testing.T) {
	s := open(t)
	out, err := s.Output(context.Background(), "sh", "-c", "pwd; echo no >&2; exit 7")
	var exit *exec.ExitError
	require.ErrorAs(t, err, &exit)
	require.Equal(t, 7, exit.ExitCode())
	require.ErrorContains(t, err, "no")
	require.Equal(t, s.Dir()+"\n", out)
}

func TestWriteImage(t *testing.T) {
	dir := t.TempDir()
	root := filepath.Join(dir, "rootfs")
	require.NoError(t, os.MkdirAll(filepath.Join(root, "bin"), 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(root, "bin/a"), []byte("a"), 0o755))
	require.NoError(t, os.Symlink("a", filepath.Join(root, "bin/b")))
	file := filepath.Join(dir, "image.tar")
	require.NoError(t, WriteImage(file, "some/image:1", root, "/bin/a"))

	f, err := os.Open(file)
	require.NoError(t, err)
	defer f.Close()
	files := map[string][]byte{}
	for r := tar.NewReader(f); ; {
		h, err := r.Next()
		if err == io.EOF {
			break
		}
		require.NoError(t, err)
		files[h.Name], err = io.ReadAll(r)
		require.NoError(t, err)
	}
	var manifest []struct {
		Config   string
		RepoTags []string
		Layers   []string
	}
	require.NoError(t, json.Unmarshal(files["manifest.json"], &manifest))
	require.Len(t, manifest, 1)
	require.Equal(t, []string{"some/image:1"}, manifest[0].RepoTags)
	require.Contains(t, files, manifest[0].Config)
	names := map[string]byte{}
	for r := tar.NewReader(strings.NewReader(string(files[manifest[0].Layers[0]]))); ; {
		h, err := r.Next()
		if err == io.EOF {
			break
		}
		require.NoError(t, err)
		names[h.Name] = h.Typeflag
	}
	require.Equal(t, map[string]byte{"bin/": tar.TypeDir, "bin/a": tar.TypeReg, "bin/b": tar.TypeSymlink}, names)
}
