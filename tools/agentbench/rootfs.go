package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"runsc-agentzip/pkg/fleet"
)

// rootfsStamp marks a complete root file system and says how it was made.
const rootfsStamp = ".agentbench-rootfs"

// rootfsOptions say where the guest's root file system is and how to make it.
type rootfsOptions struct {
	dir string
	// packages are what it holds besides Debian's minimum.
	packages []string
	mirror   string // "" means what the machine's apt uses
	suite    string // "" means what the machine runs
	install  bool   // may debootstrap be installed with apt?
}

// prepareRootfs returns the directory of a root file system for the workload,
// making it with debootstrap unless a complete one is cached there.
func prepareRootfs(ctx context.Context, o rootfsOptions, say func(string, ...any)) (string, error) {
	dir, err := filepath.Abs(o.dir)
	if err != nil {
		return "", err
	}
	osRelease, _ := os.ReadFile("/etc/os-release")
	id, codename := distribution(string(osRelease))
	suite := o.suite
	if suite == "" {
		if id != "debian" {
			return "", fmt.Errorf("this machine runs %q, not Debian: name a Debian release and an archive with --suite and --mirror", id)
		}
		suite = codename
	}
	stamp := rootfsStampFor(suite, o.packages)
	if b, err := os.ReadFile(filepath.Join(dir, rootfsStamp)); err == nil {
		if string(b) == stamp {
			say("root filesystem: %s (cached)", o.dir)
			return dir, nil
		}
		say("root filesystem: %s was made for something else, making it anew", o.dir)
	} else if entries, err := os.ReadDir(dir); err == nil && len(entries) > 0 {
		return "", fmt.Errorf("%s exists but was not made by agentbench: move it away or choose another directory with --rootfs (demo) or --rootfs-dir (run)", dir)
	}

	src := aptSource{uri: o.mirror}
	if src.uri == "" {
		if src, err = findMirror("/etc/apt", suite); err != nil {
			return "", err
		}
	}
	debootstrap, err := findDebootstrap(ctx, o.install, say)
	if err != nil {
		return "", err
	}

	// Built aside and renamed, so that what carries the name is complete.
	tmp := dir + ".partial"
	if err := removeTree(tmp); err != nil {
		return "", err
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return "", err
	}
	say("root filesystem: installing Debian %s with %s into %s; takes a minute or two, once", suite, strings.Join(o.packages, ", "), o.dir)
	args := []string{"--variant=minbase", "--include=" + strings.Join(o.packages, ",")}
	if src.signedBy != "" {
		args = append(args, "--keyring="+src.signedBy)
	}
	args = append(args, suite, tmp, src.uri)
	if err := runDebootstrap(ctx, debootstrap, args, say); err != nil {
		return "", errors.Join(err, removeTree(tmp))
	}
	// Package lists and archives are of no use in the guest.
	for _, p := range []string{"var/cache/apt", "var/lib/apt/lists"} {
		if err := os.RemoveAll(filepath.Join(tmp, p)); err != nil {
			return "", err
		}
	}
	if err := os.WriteFile(filepath.Join(tmp, rootfsStamp), []byte(stamp), 0o644); err != nil {
		return "", err
	}
	if err := removeTree(dir); err != nil {
		return "", err
	}
	if err := os.Rename(tmp, dir); err != nil {
		return "", err
	}
	return dir, nil
}

// How the guest's root file system is given to the runtime.
const (
	rootfsFolder = "folder"
	rootfsErofs  = "erofs"
)

// parseRootfsTypes translates a list of them.
func parseRootfsTypes(list string) ([]string, error) {
	var out []string
	for s := range strings.SplitSeq(list, ",") {
		if s = strings.TrimSpace(s); s != rootfsFolder && s != rootfsErofs {
			return nil, fmt.Errorf("--rootfs-type must be %s or %s, not %q", rootfsFolder, rootfsErofs, s)
		}
		if !slices.Contains(out, s) {
			out = append(out, s)
		}
	}
	return out, nil
}

// withRootfsType has a container take its root from an image of its root directory,
// if that is what is asked for. The image is kept beside the directory, and made
// anew when something in that has changed.
func withRootfsType(ctx context.Context, s fleet.Spec, rootfsType string, say func(string, ...any)) (fleet.Spec, error) {
	if rootfsType != rootfsErofs {
		return s, nil
	}
	image := s.Rootfs + ".erofs"
	current, err := imageIsCurrent(image, s.Rootfs)
	if err != nil {
		return s, err
	}
	if !current {
		say("root filesystem: making %s", image)
		if err := fleet.MakeRootImage(ctx, image, s.Rootfs); err != nil {
			return s, err
		}
	}
	s.Rootfs, s.RootImage = "", image
	return s, nil
}

// imageIsCurrent tells whether an image was made after everything in a directory had
// changed for the last time.
func imageIsCurrent(image, dir string) (bool, error) {
	made, err := os.Stat(image)
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	} else if err != nil {
		return false, err
	}
	current := true
	err = filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		fi, err := e.Info()
		if err != nil {
			return err
		}
		// What was removed or renamed has changed its directory.
		if st := fi.Sys().(*syscall.Stat_t); !time.Unix(st.Ctim.Unix()).Before(made.ModTime()) {
			current = false
			return fs.SkipAll
		}
		return nil
	})
	return current, err
}

// rootfsStampFor is the content of the stamp of a root file system.
func rootfsStampFor(suite string, packages []string) string {
	return suite + "\n" + strings.Join(packages, " ") + "\n"
}

// debootstrapPaths are where Debian has the tool, which may not be in PATH.
var debootstrapPaths = []string{"/usr/sbin/debootstrap", "/sbin/debootstrap", "/usr/bin/debootstrap"}

// findDebootstrap finds the tool or, where allowed, installs it.
func findDebootstrap(ctx context.Context, install bool, say func(string, ...any)) (string, error) {
	look := func() string {
		for _, p := range debootstrapPaths {
			if unix.Access(p, unix.X_OK) == nil {
				return p
			}
		}
		p, _ := exec.LookPath("debootstrap")
		return p
	}
	if p := look(); p != "" {
		return p, nil
	}
	const hint = "apt-get install -y --no-install-recommends debootstrap"
	if !install {
		return "", fmt.Errorf("debootstrap is missing: %s", hint)
	}
	say("debootstrap is missing: running %s", hint)
	cmd := exec.CommandContext(ctx, "apt-get", strings.Fields(hint)[1:]...)
	cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive")
	out, err := cmd.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("debootstrap is missing and installing it failed (%w); run `apt-get update && %s`. apt-get said: %s", err, hint, tail(out, 600))
	}
	if p := look(); p != "" {
		return p, nil
	}
	return "", errors.New("apt-get installed debootstrap, but it is nowhere to be found")
}

// runDebootstrap runs it in a process group of its own, so that all of it can
// be ended, and reports progress a few times a minute.
func runDebootstrap(ctx context.Context, path string, args []string, say func(string, ...any)) error {
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM) }
	cmd.WaitDelay = 10 * time.Second
	cmd.Env = os.Environ()
	// debootstrap fetches with wget, which does not read apt's settings.
	if proxy := aptProxy(ctx); proxy != "" && os.Getenv("http_proxy") == "" {
		cmd.Env = append(cmd.Env, "http_proxy="+proxy)
	}
	// Pdeathsig goes by the thread that forks, which must not end meanwhile.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	progress := &stepWriter{say: say, every: 5 * time.Second}
	cmd.Stdout, cmd.Stderr = progress, progress
	if err := cmd.Run(); err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return fmt.Errorf("debootstrap failed: %w: %s", err, tail(progress.all.Bytes(), 800))
	}
	return nil
}

// aptProxy returns the proxy apt is told to use, if any.
func aptProxy(ctx context.Context) string {
	out, err := exec.CommandContext(ctx, "apt-config", "dump", "--format=%v%n", "Acquire::http::Proxy").Output()
	if err != nil {
		return ""
	}
	p := strings.TrimSpace(string(out))
	if p == "DIRECT" {
		return ""
	}
	return p
}

// stepWriter passes on one line of output now and then.
type stepWriter struct {
	say   func(string, ...any)
	every time.Duration
	last  time.Time
	all   bytes.Buffer
}

var _ io.Writer = (*stepWriter)(nil)

func (w *stepWriter) Write(p []byte) (int, error) {
	w.all.Write(p)
	if line := strings.TrimSpace(string(p)); line != "" && time.Since(w.last) >= w.every {
		w.last = time.Now()
		line, _, _ = strings.Cut(line, "\n")
		w.say("  %s", line)
	}
	return len(p), nil
}

// tail returns the end of an output for an error message.
func tail(b []byte, n int) string {
	s := strings.TrimSpace(string(b))
	if len(s) > n {
		s = "..." + s[len(s)-n:]
	}
	return s
}

// removeTree removes a directory that debootstrap worked in: first the mounts
// an interrupted run leaves (proc, sys), then the files. It refuses to descend
// while anything is still mounted there.
func removeTree(dir string) error {
	if _, err := os.Lstat(dir); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	var mounts []string
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) > 4 && strings.HasPrefix(f[4], dir+"/") {
			mounts = append(mounts, f[4])
		}
	}
	slices.Sort(mounts)
	for _, m := range slices.Backward(mounts) {
		if err := unix.Unmount(m, unix.MNT_DETACH); err != nil {
			return fmt.Errorf("unmounting %s: %w", m, err)
		}
	}
	return os.RemoveAll(dir)
}
