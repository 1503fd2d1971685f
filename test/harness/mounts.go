package harness

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// remove removes a folder and all below it. What is mounted there is unmounted before:
// its content may be somebody else's. If that fails nothing is removed.
func remove(dir string) error {
	if err := unmountBelow(dir); err != nil {
		return err
	}
	return os.RemoveAll(dir)
}

// unmountBelow unmounts what is mounted on a folder and below it.
func unmountBelow(dir string) error {
	for {
		mounts, err := mountsBelow(dir)
		if err != nil || len(mounts) == 0 {
			return err
		}
		// Whose it is could replace a folder in it by a link to another.
		if fi, err := os.Lstat(dir); err != nil {
			return err
		} else if st, ok := fi.Sys().(*syscall.Stat_t); !ok || int(st.Uid) != os.Geteuid() {
			return fmt.Errorf("%s is another user's, and there are mounts in it: %q", dir, mounts)
		}
		// The first has those below it go along. None of them may share its mounts with
		// others (as those of a recursive bind mount of / do): they would go there, too.
		top := mounts[0]
		private := unix.MountAttr{Propagation: unix.MS_PRIVATE}
		err = unix.MountSetattr(unix.AT_FDCWD, top, unix.AT_RECURSIVE|unix.AT_SYMLINK_NOFOLLOW, &private)
		if err == nil {
			err = unix.Unmount(top, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		}
		if err != nil {
			return fmt.Errorf("unmounting %s: %w", top, err)
		}
	}
}

// mountsBelow returns the mount points at and below a folder, none before one that it is
// below.
func mountsBelow(dir string) ([]string, error) {
	// Mount points are named without symbolic links. If the folder itself is one, there
	// is none below.
	parent, err := filepath.EvalSymlinks(filepath.Dir(dir))
	if os.IsNotExist(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	info, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	return parseMounts(string(info), filepath.Join(parent, filepath.Base(dir))), nil
}

func parseMounts(info, dir string) (mounts []string) {
	for line := range strings.Lines(info) {
		if f := strings.Fields(line); len(f) > 4 {
			if m := unescape(f[4]); m == dir || strings.HasPrefix(m, dir+"/") {
				mounts = append(mounts, m)
			}
		}
	}
	slices.Sort(mounts)
	return mounts
}

// unescape decodes the octal numbers that stand for white space and backslashes.
func unescape(s string) string {
	var out strings.Builder
	for {
		before, after, found := strings.Cut(s, `\`)
		out.WriteString(before)
		if !found {
			return out.String()
		}
		s = after
		if len(s) >= 3 {
			if n, err := strconv.ParseUint(s[:3], 8, 8); err == nil {
				out.WriteByte(byte(n))
				s = s[3:]
				continue
			}
		}
		out.WriteByte('\\')
	}
}
