// Package bundle writes OCI bundles for runsc: folders with a config.json that
// names a root file system, a folder or an EROFS image, and a command.
//
//	err := bundle.Write(dir, bundle.Spec{Rootfs: root, Args: []string{"/server"}})
//
// It knows as much of the runtime specification as tool sandboxes need. Whoever
// needs more writes the file with other means: the packages that start sandboxes
// take any bundle.
package bundle

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"

	specs "github.com/opencontainers/runtime-spec/specs-go"
)

// DefaultPath is the PATH a guest gets when Spec.Env sets none.
const DefaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// DefaultCapabilities are Docker's default set.
var DefaultCapabilities = []string{
	"CAP_AUDIT_WRITE", "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER",
	"CAP_FSETID", "CAP_KILL", "CAP_MKNOD", "CAP_NET_BIND_SERVICE",
	"CAP_NET_RAW", "CAP_SETFCAP", "CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID",
	"CAP_SYS_CHROOT",
}

// Spec describes a container. The zero value of every field but Rootfs and
// Args is a working default.
type Spec struct {
	// Rootfs is the directory that becomes the guest's root; the host's "/"
	// works with ReadonlyRootfs. With runsc's flag --overlay2=all:memory guest
	// writes go to memory and never reach it; with its default they go to a file
	// that each sandbox has in this directory, where no memory can be evicted.
	Rootfs string
	// RootImage is the file of an EROFS image (MakeRootImage) that becomes the
	// guest's root instead of a directory; Rootfs must be empty then. Such a
	// sandbox has no gofer, unless a bind mount needs one. Guest writes go to
	// memory. A restore needs the same image at the same path.
	RootImage string
	// ReadonlyRootfs makes "/" read-only for the guest.
	ReadonlyRootfs bool

	// Args is the command; Args[0] is looked up in the guest's PATH.
	Args []string
	// Env is added to a default environment (PATH, HOME, TERM); an entry
	// replaces the default of the same name.
	Env []string
	// Cwd is the working directory, "/" by default.
	Cwd string
	// UID and GID the command runs as.
	UID, GID uint32
	// Hostname is the guest's host name.
	Hostname string
	// Terminal is for the console-socket protocol, which whoever starts the
	// sandbox has to speak then.
	Terminal bool

	// Annotations are OCI annotations, e.g. dev.agentzip.* settings.
	Annotations map[string]string
	// Mounts come after the default /proc, /dev and /sys.
	Mounts []Mount
	// MemoryLimit in bytes is what the guest sees as total memory and, unless
	// cgroups are ignored, what the host enforces. 0 means none.
	MemoryLimit int64
	// Capabilities default to DefaultCapabilities.
	Capabilities []string
	// NoFile is RLIMIT_NOFILE, 65536 by default.
	NoFile uint64
}

// Mount is one entry of a container's mount table.
type Mount struct {
	// Type is "bind" (default when Source is set) or "tmpfs" (default
	// otherwise), or any other type runsc knows.
	Type string
	// Source is the host path of a bind mount.
	Source string
	// Target is the path in the guest.
	Target  string
	Options []string
}

// Write writes dir/config.json. The same bundle serves any number of
// sandboxes, and a sandbox is restored with the bundle it was started with.
func Write(dir string, s Spec) error {
	spec, err := s.oci()
	if err != nil {
		return fmt.Errorf("bundle: %w", err)
	}
	b, err := json.MarshalIndent(spec, "", "  ")
	if err != nil {
		return fmt.Errorf("bundle: %w", err)
	}
	folder := dir
	if s.RootImage != "" {
		// runsc wants a root directory, of which it makes no use.
		folder = filepath.Join(dir, spec.Root.Path)
	}
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return fmt.Errorf("bundle: %w", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "config.json"), b, 0o644); err != nil {
		return fmt.Errorf("bundle: %w", err)
	}
	return nil
}

// oci translates to the runtime specification's own type.
func (s Spec) oci() (*specs.Spec, error) {
	if len(s.Args) == 0 {
		return nil, errors.New("no command given")
	}
	rootfs, annotations, err := s.root()
	if err != nil {
		return nil, err
	}
	if s.MemoryLimit < 0 {
		return nil, fmt.Errorf("memory limit %d is negative", s.MemoryLimit)
	}
	cwd := s.Cwd
	if cwd == "" {
		cwd = "/"
	}
	if !filepath.IsAbs(cwd) {
		return nil, fmt.Errorf("working directory %q is not absolute", cwd)
	}
	caps := s.Capabilities
	if caps == nil {
		caps = DefaultCapabilities
	}
	nofile := s.NoFile
	if nofile == 0 {
		nofile = 65536
	}
	spec := &specs.Spec{
		Version: specs.Version,
		Root:    &specs.Root{Path: rootfs, Readonly: s.ReadonlyRootfs},
		Process: &specs.Process{
			Terminal: s.Terminal,
			User:     specs.User{UID: s.UID, GID: s.GID},
			Args:     s.Args,
			Env:      mergeEnv([]string{"PATH=" + DefaultPath, "HOME=/root", "TERM=dumb"}, s.Env),
			Cwd:      cwd,
			Capabilities: &specs.LinuxCapabilities{
				Bounding:  caps,
				Effective: caps,
				Permitted: caps,
			},
			Rlimits: []specs.POSIXRlimit{{Type: "RLIMIT_NOFILE", Hard: nofile, Soft: nofile}},
		},
		Hostname:    s.Hostname,
		Annotations: annotations,
		Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc"},
			{Destination: "/dev", Type: "tmpfs", Source: "tmpfs"},
			{Destination: "/sys", Type: "sysfs", Source: "sysfs", Options: []string{"nosuid", "noexec", "nodev", "ro"}},
		},
		Linux: &specs.Linux{
			Namespaces: []specs.LinuxNamespace{
				{Type: specs.PIDNamespace},
				{Type: specs.NetworkNamespace},
				{Type: specs.IPCNamespace},
				{Type: specs.UTSNamespace},
				{Type: specs.MountNamespace},
			},
		},
	}
	for _, m := range s.Mounts {
		sm, err := m.oci()
		if err != nil {
			return nil, err
		}
		spec.Mounts = append(spec.Mounts, sm)
	}
	if s.MemoryLimit > 0 {
		spec.Linux.Resources = &specs.LinuxResources{Memory: &specs.LinuxMemory{Limit: &s.MemoryLimit}}
	}
	return spec, nil
}

// root returns the path of the root directory, and all annotations.
func (s Spec) root() (string, map[string]string, error) {
	switch {
	case s.Rootfs != "" && s.RootImage != "":
		return "", nil, fmt.Errorf("two root filesystems given, %s and %s", s.Rootfs, s.RootImage)
	case s.RootImage != "":
		image, err := filepath.Abs(s.RootImage)
		if err != nil {
			return "", nil, err
		}
		if err := checkRootImage(image); err != nil {
			return "", nil, err
		}
		annotations := maps.Clone(s.Annotations)
		if annotations == nil {
			annotations = make(map[string]string)
		}
		annotations[rootTypeAnnotation] = "erofs"
		annotations[rootSourceAnnotation] = image
		if !s.ReadonlyRootfs {
			annotations[rootOverlayAnnotation] = "memory"
		}
		return "rootfs", annotations, nil
	case s.Rootfs == "":
		return "", nil, errors.New("no root filesystem given")
	}
	rootfs, err := filepath.Abs(s.Rootfs)
	if err != nil {
		return "", nil, err
	}
	if fi, err := os.Stat(rootfs); err != nil {
		return "", nil, fmt.Errorf("root filesystem: %w", err)
	} else if !fi.IsDir() {
		return "", nil, fmt.Errorf("root filesystem %s is not a directory", rootfs)
	}
	return rootfs, s.Annotations, nil
}

func (m Mount) oci() (specs.Mount, error) {
	if !filepath.IsAbs(m.Target) {
		return specs.Mount{}, fmt.Errorf("mount target %q is not absolute", m.Target)
	}
	out := specs.Mount{Destination: m.Target, Type: m.Type, Source: m.Source, Options: m.Options}
	if out.Type == "" {
		out.Type = "tmpfs"
		if m.Source != "" {
			out.Type = "bind"
		}
	}
	if out.Type == "bind" {
		src, err := filepath.Abs(m.Source)
		if err != nil {
			return specs.Mount{}, err
		}
		if _, err := os.Stat(src); err != nil {
			return specs.Mount{}, fmt.Errorf("mount source: %w", err)
		}
		out.Source = src
		if len(out.Options) == 0 {
			out.Options = []string{"rbind"}
		}
	} else if out.Source == "" {
		out.Source = out.Type
	}
	return out, nil
}

// mergeEnv returns base with entries of over replacing those of the same name.
func mergeEnv(base, over []string) []string {
	name := func(kv string) string {
		for i := range len(kv) {
			if kv[i] == '=' {
				return kv[:i]
			}
		}
		return kv
	}
	replaced := make(map[string]bool, len(over))
	for _, kv := range over {
		replaced[name(kv)] = true
	}
	var out []string
	for _, kv := range base {
		if !replaced[name(kv)] {
			out = append(out, kv)
		}
	}
	return append(out, over...)
}
