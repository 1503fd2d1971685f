package linuxmem

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// stateFormat is the version of the state file's format.
const stateFormat = 1

// state is all that has to be known to undo a Setup. Every part of it is on disk
// before the change that it describes is made.
type state struct {
	Format int `json:"format"`
	// BootID tells whether the machine was restarted, which undoes everything.
	BootID string      `json:"boot_id"`
	Zram   zramState   `json:"zram"`
	KSM    ksmState    `json:"ksm"`
	Cgroup cgroupState `json:"cgroup"`
}

// stateFile keeps a state on disk.
type stateFile struct {
	path  string
	saved bool
	state state
}

// newSuffix marks a state file that is being written.
const newSuffix = ".new"

// save replaces the file, so that either the old or the new state is there
// whatever happens.
func (f *stateFile) save() error {
	b, err := json.MarshalIndent(f.state, "", "  ")
	if err != nil {
		return fmt.Errorf("linuxmem: recording changes to the host: %w", err)
	}
	err = writeSynced(f.path+newSuffix, b)
	if err == nil {
		err = os.Rename(f.path+newSuffix, f.path)
	}
	if err != nil {
		os.Remove(f.path + newSuffix)
		return fmt.Errorf("linuxmem: recording changes to the host: %w", err)
	}
	f.saved = true
	if err := syncDir(filepath.Dir(f.path)); err != nil {
		return fmt.Errorf("linuxmem: recording changes to the host: %w", err)
	}
	return nil
}

func writeSynced(path string, b []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// loadState reads a state file.
func loadState(path string) (*stateFile, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("linuxmem: %w", err)
	}
	f := &stateFile{path: path, saved: true}
	if err := json.Unmarshal(b, &f.state); err != nil {
		return nil, fmt.Errorf("linuxmem: %s: %w", path, err)
	}
	if f.state.Format != stateFormat {
		return nil, fmt.Errorf("linuxmem: %s has format %d, this program knows %d: undo the changes with the version that made them", path, f.state.Format, stateFormat)
	}
	return f, nil
}

// remove deletes the file.
func (f *stateFile) remove() error {
	if err := removeUnfinished(f.path); err != nil {
		return err
	}
	if err := os.Remove(f.path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("linuxmem: %w", err)
	}
	f.saved = false
	return nil
}

// removeUnfinished deletes what a kill during save leaves beside the file.
func removeUnfinished(path string) error {
	if err := os.Remove(path + newSuffix); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("linuxmem: %w", err)
	}
	return nil
}

// undo takes back every recorded change that is still in place, then removes the
// file. A part that fails does not keep the others from being undone, but the
// file stays, for another try. Processes in the groups are ended if kill is set
// and are an error otherwise.
func (f *stateFile) undo(ctx context.Context, kill bool, step func(string)) error {
	boot, err := bootID()
	if err != nil {
		return err
	}
	if boot != f.state.BootID {
		return f.remove()
	}
	if err := f.state.Cgroup.empty(kill); err != nil {
		return err
	}
	step("groups emptied")
	err = errors.Join(
		f.state.Zram.undo(ctx, step),
		f.state.Cgroup.undo(step),
		f.state.KSM.undo(step),
	)
	if err != nil {
		return err
	}
	return f.remove()
}

// bootID names this run of the kernel.
func bootID() (string, error) {
	return readTrimmed("/proc/sys/kernel/random/boot_id")
}

// readTrimmed reads a small file of the kernel's.
func readTrimmed(path string) (string, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return "", fmt.Errorf("linuxmem: %w", err)
	}
	return strings.TrimSpace(string(b)), nil
}

// writeKernel writes to a file of the kernel's, which must exist.
func writeKernel(path, value string) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return fmt.Errorf("linuxmem: %w", err)
	}
	_, err = f.WriteString(value)
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("linuxmem: setting %s: %w", path, err)
	}
	return nil
}
