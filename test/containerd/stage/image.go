package stage

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
)

// Rootfs makes a root file system of busybox in the folder rootfs of the stage, with
// the file extra, if there is one, at /extra.
func (s *Stage) Rootfs(ctx context.Context, extra string) (string, error) {
	rootfs := s.Path("rootfs")
	for _, dir := range []string{"bin", "dev", "etc", "proc", "sys", "tmp", "root"} {
		if err := os.MkdirAll(filepath.Join(rootfs, dir), 0o755); err != nil {
			return "", fmt.Errorf("stage: %w", err)
		}
	}
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		return "", fmt.Errorf("stage: %w", err)
	}
	if err := CopyFile(busybox, filepath.Join(rootfs, "bin/busybox")); err != nil {
		return "", fmt.Errorf("stage: %w", err)
	}
	if extra != "" {
		if err := CopyFile(extra, filepath.Join(rootfs, "extra")); err != nil {
			return "", fmt.Errorf("stage: %w", err)
		}
	}
	if _, err := s.Output(ctx, "chroot", rootfs, "/bin/busybox", "--install", "-s", "/bin"); err != nil {
		return "", fmt.Errorf("stage: is busybox a static one? %w", err)
	}
	return rootfs, nil
}

// CopyFile copies a program.
func CopyFile(from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o755)
	if err != nil {
		return err
	}
	if _, err := io.Copy(out, in); err != nil {
		out.Close()
		return err
	}
	return out.Close()
}

// WriteImage writes an archive with one image of one layer, as `docker save` does,
// which docker load, ctr images import and podman load take. Without a command
// of its own a container of the image runs args.
func WriteImage(file, name, rootfs string, args ...string) error {
	var layer bytes.Buffer
	w := tar.NewWriter(&layer)
	if err := w.AddFS(os.DirFS(rootfs)); err != nil {
		return fmt.Errorf("stage: %w", err)
	}
	if err := w.Close(); err != nil {
		return fmt.Errorf("stage: %w", err)
	}
	sum := sha256.Sum256(layer.Bytes())
	config, err := json.Marshal(map[string]any{
		"architecture": "amd64",
		"os":           "linux",
		"config":       map[string]any{"Cmd": args, "Env": []string{"PATH=/bin"}},
		"rootfs":       map[string]any{"type": "layers", "diff_ids": []string{"sha256:" + hex.EncodeToString(sum[:])}},
	})
	if err != nil {
		return fmt.Errorf("stage: %w", err)
	}
	manifest, err := json.Marshal([]map[string]any{{"Config": "config.json", "RepoTags": []string{name}, "Layers": []string{"layer.tar"}}})
	if err != nil {
		return fmt.Errorf("stage: %w", err)
	}
	var archive bytes.Buffer
	w = tar.NewWriter(&archive)
	for _, f := range []struct {
		name    string
		content []byte
	}{{"config.json", config}, {"layer.tar", layer.Bytes()}, {"manifest.json", manifest}} {
		if err := w.WriteHeader(&tar.Header{Name: f.name, Mode: 0o644, Size: int64(len(f.content))}); err != nil {
			return fmt.Errorf("stage: %w", err)
		}
		if _, err := w.Write(f.content); err != nil {
			return fmt.Errorf("stage: %w", err)
		}
	}
	if err := w.Close(); err != nil {
		return fmt.Errorf("stage: %w", err)
	}
	if err := os.WriteFile(file, archive.Bytes(), 0o644); err != nil {
		return fmt.Errorf("stage: %w", err)
	}
	return nil
}
