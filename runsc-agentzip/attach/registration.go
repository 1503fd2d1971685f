package attach

import (
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"runsc-agentzip/pkg/pool/wire"
)

// registrationMax is more than any registration takes, in bytes.
const registrationMax = 64 << 10

// A Registration says that a sandbox may be attached to the pool, and with which
// greeting. It is a JSON file in Folder that only its owner can read.
type Registration struct {
	// Root is runsc's folder with the sandbox's state (--root). The sandbox's
	// ID is the greeting's name.
	Root string `json:"root"`
	wire.Greeting
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
	f, err := os.CreateTemp(dir, ".new-*")
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

// Registrations returns those for the pool at the socket. It removes files that
// are none, and tells log.
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
		if !strings.HasSuffix(e.Name(), ".json") {
			continue
		}
		name := filepath.Join(dir, e.Name())
		r, err := readRegistration(name)
		if err == nil && r.path(socket) != name {
			err = fmt.Errorf("%w: it is not named after its content", errNone)
		}
		switch {
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
	if !filepath.IsAbs(r.Root) || r.Name == "" || r.Domain == "" {
		return nil, fmt.Errorf("%w: root, name or domain is missing", errNone)
	}
	return r, nil
}
