package bundle

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
)

func TestMergeEnv(t *testing.T) {
	got := mergeEnv([]string{"PATH=/bin", "HOME=/root"}, []string{"PATH=/x", "A=1"})
	if want := []string{"HOME=/root", "PATH=/x", "A=1"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestBundle(t *testing.T) {
	dir := t.TempDir()
	s := Spec{
		Rootfs:      dir,
		Args:        []string{"/bin/true"},
		Annotations: map[string]string{"dev.agentzip.x": "y"},
		Mounts:      []Mount{{Target: "/scratch"}, {Source: dir, Target: "/data", Options: []string{"ro"}}},
		MemoryLimit: 1 << 30,
	}
	if err := Write(filepath.Join(dir, "bundle"), s); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(filepath.Join(dir, "bundle", "config.json"))
	if err != nil {
		t.Fatal(err)
	}
	var got specs.Spec
	if err := json.Unmarshal(b, &got); err != nil {
		t.Fatal(err)
	}
	if got.Process.Cwd != "/" || got.Root.Path != dir || *got.Linux.Resources.Memory.Limit != 1<<30 || got.Annotations["dev.agentzip.x"] != "y" {
		t.Errorf("got %s", b)
	}
	n := len(got.Mounts)
	if m := got.Mounts[n-2]; m.Type != "tmpfs" || m.Source != "tmpfs" {
		t.Errorf("scratch mount: %+v", m)
	}
	if m := got.Mounts[n-1]; m.Type != "bind" || m.Source != dir || !slices.Equal(m.Options, []string{"ro"}) {
		t.Errorf("bind mount: %+v", m)
	}

	for name, tc := range map[string]struct {
		change func(*Spec)
		want   string
	}{
		"no root":        {func(s *Spec) { s.Rootfs = "" }, "no root filesystem"},
		"missing root":   {func(s *Spec) { s.Rootfs = "/no/such/dir" }, "/no/such/dir"},
		"no command":     {func(s *Spec) { s.Args = nil }, "no command"},
		"relative cwd":   {func(s *Spec) { s.Cwd = "x" }, "not absolute"},
		"relative mount": {func(s *Spec) { s.Mounts = []Mount{{Target: "x"}} }, "not absolute"},
		"missing source": {func(s *Spec) { s.Mounts = []Mount{{Source: "/no/such", Target: "/x"}} }, "/no/such"},
		"negative limit": {func(s *Spec) { s.MemoryLimit = -1 }, "negative"},
	} {
		bad := s
		tc.change(&bad)
		if err := Write(filepath.Join(dir, "bad"), bad); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: error %v, want one with %q", name, err, tc.want)
		}
	}
}

func TestBundleWithRootImage(t *testing.T) {
	dir := t.TempDir()
	image := filepath.Join(dir, "root.erofs")
	content := make([]byte, 8192)
	binary.LittleEndian.PutUint32(content[erofsSuper:], erofsMagic)
	content[erofsSuper+erofsBlockBits] = 12
	content[erofsSuper+erofsFeatures] = erofsHasSum
	if err := os.WriteFile(image, content, 0o644); err != nil {
		t.Fatal(err)
	}
	s := Spec{RootImage: image, Args: []string{"true"}, Annotations: map[string]string{"dev.agentzip.x": "y"}}
	want := map[string]string{
		"dev.agentzip.x":                 "y",
		"dev.gvisor.spec.rootfs.type":    "erofs",
		"dev.gvisor.spec.rootfs.source":  image,
		"dev.gvisor.spec.rootfs.overlay": "memory",
	}
	for _, readonly := range []bool{false, true} {
		if s.ReadonlyRootfs = readonly; readonly {
			delete(want, "dev.gvisor.spec.rootfs.overlay")
		}
		bundle := filepath.Join(dir, fmt.Sprint("bundle-", readonly))
		if err := Write(bundle, s); err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(filepath.Join(bundle, "config.json"))
		if err != nil {
			t.Fatal(err)
		}
		var got specs.Spec
		if err := json.Unmarshal(b, &got); err != nil {
			t.Fatal(err)
		}
		if !maps.Equal(got.Annotations, want) || got.Root.Readonly != readonly {
			t.Errorf("got %s", b)
		}
		if fi, err := os.Stat(filepath.Join(bundle, got.Root.Path)); err != nil || !fi.IsDir() {
			t.Errorf("root directory: %v, %v", fi, err)
		}
	}
	if len(s.Annotations) != 1 {
		t.Errorf("the caller's annotations became %v", s.Annotations)
	}
	both := s
	both.Rootfs = dir
	for want, bad := range map[string]Spec{
		"two root filesystems": both,
		"not an EROFS image":   {RootImage: os.Args[0], Args: s.Args},
		"/no/such/image":       {RootImage: "/no/such/image", Args: s.Args},
	} {
		if err := Write(filepath.Join(dir, "bad"), bad); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want one with %q", err, want)
		}
	}
}

// An image has a UUID of its own, wherever in it something differs.
func TestIdentifyImage(t *testing.T) {
	seen := map[string]int{}
	for i, at := range []int{-1, 100, 2000, 5000, 8191} {
		content := make([]byte, 8192)
		binary.LittleEndian.PutUint32(content[erofsSuper:], erofsMagic)
		content[erofsSuper+erofsBlockBits] = 12
		content[erofsSuper+erofsFeatures] = erofsHasSum
		if at >= 0 {
			content[at] = 1
		}
		path := filepath.Join(t.TempDir(), "image")
		if err := os.WriteFile(path, content, 0o644); err != nil {
			t.Fatal(err)
		}
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		if err := identifyImage(f); err != nil {
			t.Fatal(err)
		}
		f.Close()
		got, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		uuid := string(got[erofsSuper+erofsUUID:][:16])
		if other, ok := seen[uuid]; ok {
			t.Errorf("images %d and %d have the same UUID", i, other)
		}
		seen[uuid] = i
		clear(got[erofsSuper+erofsUUID:][:16])
		clear(got[erofsSuper+erofsChecksum:][:4])
		if !bytes.Equal(got, content) {
			t.Errorf("image %d: more than the UUID and the checksum was changed", i)
		}
	}
}
