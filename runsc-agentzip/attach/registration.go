package attach

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/log"

	"runsc-agentzip/pkg/pool/wire"
)

// registrationMax is more than any registration takes, in bytes.
const registrationMax = 64 << 10

// newPrefix starts the names of registrations that are being written.
const newPrefix = ".new-"

// A Registration says that a sandbox may be attached to the pool, and with which
// greeting. It is a JSON file in Folder that only its owner can read.
type Registration struct {
	// Root is runsc's folder with the sandbox's state (--root). The sandbox's
	// ID is the greeting's name.
	Root string `json:"root"`
	// Process is the sandbox's.
	Process Process `json:"process"`
	wire.Greeting
}

// A Process tells a process from all others, earlier and later ones.
type Process struct {
	PID int `json:"pid"`
	// Start is when it started, in clock ticks since the host did.
	Start uint64 `json:"start"`
	// Boot is the kernel's boot id, and Namespace the PID namespace that PID is of.
	Boot      string `json:"boot"`
	Namespace string `json:"namespace"`
}

// processOf returns what tells the process pid, which must live, from others.
func processOf(pid int) (Process, error) {
	p := Process{PID: pid}
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err == nil {
		p.Boot = strings.TrimSpace(string(boot))
		p.Namespace, err = os.Readlink("/proc/self/ns/pid")
	}
	if err == nil {
		p.Start, err = startTime(pid)
	}
	return p, err
}

// startTime returns when a process started, as Process.Start. For one that has ended,
// a zombie included, the error wraps fs.ErrNotExist.
func startTime(pid int) (uint64, error) {
	name := fmt.Sprintf("/proc/%d/stat", pid)
	b, err := os.ReadFile(name)
	if errors.Is(err, unix.ESRCH) {
		return 0, &fs.PathError{Op: "read", Path: name, Err: fs.ErrNotExist}
	}
	if err != nil {
		return 0, err
	}
	// The second field is the name, in parentheses, of which it may have some itself.
	f := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	if len(f) < 20 {
		return 0, fmt.Errorf("%s: %q", name, b)
	}
	if f[0] == "Z" || f[0] == "X" {
		return 0, &fs.PathError{Op: "read", Path: name, Err: fs.ErrNotExist}
	}
	return strconv.ParseUint(f[19], 10, 64)
}

// gone tells whether the process has ended. It is false where that cannot be told: in
// another PID namespace.
func (p *Process) gone() bool {
	self, err := processOf(os.Getpid())
	switch {
	case err != nil:
		return false
	case self.Boot != p.Boot:
		return true
	case self.Namespace != p.Namespace:
		return false
	}
	start, err := startTime(p.PID)
	if err != nil {
		return errors.Is(err, fs.ErrNotExist)
	}
	return start != p.Start
}

// Folder is where the registrations for the pool at the socket are.
func Folder(socket string) string { return socket + ".d" }

// path is the registration's file: sandboxes below two roots may have one ID.
func (r *Registration) path(socket string) string {
	h := fnv.New32a()
	io.WriteString(h, r.Root)
	return filepath.Join(Folder(socket), fmt.Sprintf("%s.%08x.json", r.Name, h.Sum32()))
}

// Write makes or replaces the registration for the pool at the socket. A pool
// need not run.
func (r *Registration) Write(socket string) error {
	dir := Folder(socket)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("registering for the pool: %w", err)
	}
	if err := checkFolder(dir); err != nil {
		return err
	}
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	// CreateTemp makes files that only the owner can read.
	f, err := os.CreateTemp(dir, newPrefix+"*")
	if err != nil {
		return fmt.Errorf("registering for the pool: %w", err)
	}
	_, err = f.Write(b)
	err = errors.Join(err, f.Close())
	if err == nil {
		err = os.Rename(f.Name(), r.path(socket))
	}
	if err != nil {
		_ = os.Remove(f.Name())
		return fmt.Errorf("registering for the pool: %w", err)
	}
	return nil
}

// Remove removes the registration, unless it has been replaced by another.
func (r *Registration) Remove(socket string) error {
	if now, err := readRegistration(r.path(socket)); err == nil && *now != *r {
		return nil
	}
	err := os.Remove(r.path(socket))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// Ended implements sandbox.AgentzipEnded: it removes the registration in the file name,
// unless it is that of another sandbox with the same ID, which lives. What is no
// registration, or not where it belongs, stays: name is from a file that somebody may
// have changed.
func Ended(name string) {
	r, err := readRegistration(name)
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	if err == nil {
		socket, ok := strings.CutSuffix(filepath.Dir(name), Folder(""))
		if !ok || r.path(socket) != name {
			err = fmt.Errorf("%s: not the registration of sandbox %q", name, r.Name)
		} else if !r.Process.gone() {
			return
		} else if err = os.Remove(name); errors.Is(err, fs.ErrNotExist) {
			return
		}
	}
	if err != nil {
		log.Warningf("agentzip: the page pool still knows a sandbox that was deleted: %v", err)
	}
}

// checkFolder refuses a folder that others may have filled: registrations decide
// who shares with whom.
func checkFolder(dir string) error {
	var st unix.Stat_t
	if err := unix.Lstat(dir, &st); err != nil {
		return &fs.PathError{Op: "lstat", Path: dir, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR || int(st.Uid) != os.Geteuid() || st.Mode&0o022 != 0 {
		return fmt.Errorf("%s is not a folder that only user %d can write to: remove it, or use another socket", dir, os.Geteuid())
	}
	return nil
}

// errNone is wrapped by errors about files that are no registrations.
var errNone = errors.New("no registration of a sandbox")

// writeTime is more than it takes to write a registration.
const writeTime = time.Minute

// Registrations returns those for the pool at the socket. It removes those of sandboxes
// that have ended without being deleted, and files that are none, and tells log.
func Registrations(socket string, log func(format string, args ...any)) ([]Registration, error) {
	dir := Folder(socket)
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err == nil {
		err = checkFolder(dir)
	}
	if err != nil {
		return nil, err
	}
	var out []Registration
	for _, e := range entries {
		name := filepath.Join(dir, e.Name())
		if !strings.HasSuffix(e.Name(), ".json") {
			// Whoever began to write it may have been killed.
			if st, err := e.Info(); err == nil && strings.HasPrefix(e.Name(), newPrefix) && time.Since(st.ModTime()) > writeTime {
				_ = os.Remove(name)
			}
			continue
		}
		r, err := readRegistration(name)
		if err == nil && r.path(socket) != name {
			err = fmt.Errorf("%w: it is not named after its content", errNone)
		}
		switch {
		case err == nil && r.Process.gone():
			log("sandbox %s below %s has ended: removing its registration", r.Name, r.Root)
			if err := r.Remove(socket); err != nil {
				log("%v", err)
			}
		case err == nil:
			out = append(out, *r)
		case errors.Is(err, errNone):
			log("removing %s: %v", name, err)
			_ = os.Remove(name)
		case !errors.Is(err, fs.ErrNotExist):
			log("%v", err)
		}
	}
	return out, nil
}

func readRegistration(name string) (*Registration, error) {
	f, err := os.OpenFile(name, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, registrationMax))
	if err != nil {
		return nil, err
	}
	r := new(Registration)
	if err := json.Unmarshal(b, r); err != nil {
		return nil, fmt.Errorf("%w: %v", errNone, err)
	}
	if !filepath.IsAbs(r.Root) || r.Name == "" || r.Domain == "" || r.Process.PID <= 0 {
		return nil, fmt.Errorf("%w: root, name, domain or process is missing", errNone)
	}
	return r, nil
}
