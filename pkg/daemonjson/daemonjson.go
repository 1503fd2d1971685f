// Package daemonjson edits the runtimes in Docker's configuration, daemon.json.
//
// A broken daemon.json keeps dockerd from starting, so a File changes the entries that
// it is told to change and keeps everything else as it is: the order of settings,
// numbers digit by digit, settings that it does not know. It is written in one step, with
// the previous version beside it.
package daemonjson

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
)

// A Runtime is an OCI runtime as daemon.json names it.
type Runtime struct {
	// Path is the binary.
	Path string `json:"path"`
	// Args are its global flags.
	Args []string `json:"runtimeArgs,omitempty"`
}

// A File is a daemon.json that has been read.
type File struct {
	path string
	// original is what the file has, nil if there is none.
	original []byte
	// mode is what a new version gets, owned by uid and gid.
	mode     fs.FileMode
	uid, gid int
	top      object
	runtimes object
	changed  bool
}

// Names of settings.
const (
	runtimesKey = "runtimes"
	defaultKey  = "default-runtime"
	execOptsKey = "exec-opts"
	cgroupOpt   = "native.cgroupdriver="
)

// Read reads the file. One that does not exist, or is empty, has no settings.
func Read(path string) (*File, error) {
	// Where it is a link, what it leads to is rewritten, not the link.
	if real, err := filepath.EvalSymlinks(path); err == nil {
		path = real
	} else if target, err := os.Readlink(path); err == nil {
		return nil, fmt.Errorf("%s is a link to %s, which is not there: make that file, with {} in it, or remove the link", path, target)
	}
	f := &File{path: path, mode: 0o644, uid: -1, gid: -1}
	content, err := os.ReadFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return f, nil
	case err != nil:
		return nil, err
	}
	fi, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	f.mode = fi.Mode().Perm()
	if st, ok := fi.Sys().(*syscall.Stat_t); ok {
		f.uid, f.gid = int(st.Uid), int(st.Gid)
	}
	f.original = content
	if len(bytes.TrimSpace(content)) == 0 {
		return f, nil
	}
	if err := json.Unmarshal(content, &f.top); err != nil {
		return nil, fmt.Errorf("%s: %w; nothing was changed, correct it first", path, where(content, err))
	}
	if raw, ok := f.top.get(runtimesKey); ok && string(raw) != "null" {
		if err := json.Unmarshal(raw, &f.runtimes); err != nil {
			return nil, fmt.Errorf("%s: the setting %q: %w; nothing was changed, correct it first", path, runtimesKey, err)
		}
	}
	return f, nil
}

// where adds the line of a syntax error.
func where(content []byte, err error) error {
	var syntax *json.SyntaxError
	if !errors.As(err, &syntax) {
		return err
	}
	before := content[:min(int(syntax.Offset), len(content))]
	return fmt.Errorf("not valid JSON: line %d: %w", 1+bytes.Count(before, []byte("\n")), err)
}

// Path is the file that Save writes.
func (f *File) Path() string { return f.path }

// Runtime returns the entry of a name.
func (f *File) Runtime(name string) (r Runtime, ok bool) {
	raw, ok := f.runtimes.get(name)
	if ok {
		// An entry of another form is one that differs from all of ours.
		_ = json.Unmarshal(raw, &r)
	}
	return r, ok
}

// SetRuntime adds the entry or replaces it. An equal one stays as it is written.
func (f *File) SetRuntime(name string, r Runtime) error {
	raw, err := encode(r)
	if err != nil {
		return err
	}
	if old, ok := f.runtimes.get(name); ok && equal(old, raw) {
		return nil
	}
	f.runtimes.set(name, raw)
	f.changed = true
	return nil
}

// RemoveRuntime removes the entry, and tells whether there was one. It is an error to
// remove the default, without which dockerd does not start.
func (f *File) RemoveRuntime(name string) (bool, error) {
	if _, ok := f.runtimes.get(name); !ok {
		return false, nil
	}
	if raw, ok := f.top.get(defaultKey); ok {
		var def string
		if json.Unmarshal(raw, &def) == nil && def == name {
			return false, fmt.Errorf("%s: %q is the %s, without which dockerd does not start: change or remove that setting first", f.path, name, defaultKey)
		}
	}
	f.runtimes.remove(name)
	f.changed = true
	return true, nil
}

// SetExperimental switches Docker's experimental commands on.
func (f *File) SetExperimental() {
	const key = "experimental"
	if raw, ok := f.top.get(key); ok && string(raw) == "true" {
		return
	}
	f.top.set(key, json.RawMessage("true"))
	f.changed = true
}

// SetCgroupDriver sets Docker's cgroup driver, cgroupfs or systemd.
func (f *File) SetCgroupDriver(driver string) error {
	var opts []string
	if raw, ok := f.top.get(execOptsKey); ok {
		if err := json.Unmarshal(raw, &opts); err != nil {
			return fmt.Errorf("%s: the setting %q: %w", f.path, execOptsKey, err)
		}
	}
	want := slices.DeleteFunc(slices.Clone(opts), func(o string) bool { return strings.HasPrefix(o, cgroupOpt) })
	want = append(want, cgroupOpt+driver)
	if slices.Equal(slices.Sorted(slices.Values(opts)), slices.Sorted(slices.Values(want))) {
		return nil
	}
	raw, err := encode(want)
	if err != nil {
		return err
	}
	f.top.set(execOptsKey, raw)
	f.changed = true
	return nil
}

// Save writes the file if anything in it has changed, and tells whether it did. What it
// was before is kept as PATH~.
func (f *File) Save() (bool, error) {
	if !f.changed {
		return false, nil
	}
	// Also if there is none left: a dockerd that is reloaded forgets the runtimes of
	// before only if the setting is there.
	if _, had := f.top.get(runtimesKey); had || len(f.runtimes) != 0 {
		raw, err := encode(f.runtimes)
		if err != nil {
			return false, err
		}
		f.top.set(runtimesKey, raw)
	}
	raw, err := encode(f.top)
	if err != nil {
		return false, err
	}
	var b bytes.Buffer
	if err := json.Indent(&b, raw, "", f.indent()); err != nil {
		return false, err
	}
	b.WriteByte('\n')
	if err := os.MkdirAll(filepath.Dir(f.path), 0o755); err != nil {
		return false, err
	}
	if f.original != nil {
		if err := f.write(f.path+"~", f.original); err != nil {
			return false, fmt.Errorf("keeping the previous version: %w", err)
		}
	}
	return true, f.write(f.path, b.Bytes())
}

// indent is what the file's lines of the first level begin with.
func (f *File) indent() string {
	for line := range strings.Lines(string(f.original)) {
		if text := strings.TrimLeft(line, " \t"); strings.HasPrefix(text, `"`) && len(text) < len(line) {
			return line[:len(line)-len(text)]
		}
	}
	return "    "
}

// write replaces a file by one with the content.
func (f *File) write(path string, content []byte) (err error) {
	w, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = w.Close()
			_ = os.Remove(w.Name())
		}
	}()
	if _, err := w.Write(content); err != nil {
		return err
	}
	if err := w.Chmod(f.mode); err != nil {
		return err
	}
	if f.uid >= 0 {
		// Only root may give a file away; the user's own stay the user's.
		_ = w.Chown(f.uid, f.gid)
	}
	if err := errors.Join(w.Sync(), w.Close()); err != nil {
		return err
	}
	return os.Rename(w.Name(), path)
}

// encode is json.Marshal that leaves <, > and & as they are.
func encode(v any) (json.RawMessage, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return nil, err
	}
	return bytes.TrimSpace(b.Bytes()), nil
}

// equal tells whether two JSON texts say the same.
func equal(a, b json.RawMessage) bool {
	var x, y any
	if json.Unmarshal(a, &x) != nil || json.Unmarshal(b, &y) != nil {
		return false
	}
	p, err1 := json.Marshal(x)
	q, err2 := json.Marshal(y)
	return err1 == nil && err2 == nil && bytes.Equal(p, q)
}

// An object is a JSON object that keeps the order of its members.
type object []member

type member struct {
	key   string
	value json.RawMessage
}

func (o object) index(key string) int {
	return slices.IndexFunc(o, func(m member) bool { return m.key == key })
}

func (o object) get(key string) (json.RawMessage, bool) {
	if i := o.index(key); i >= 0 {
		return o[i].value, true
	}
	return nil, false
}

func (o *object) set(key string, value json.RawMessage) {
	if i := o.index(key); i >= 0 {
		(*o)[i].value = value
	} else {
		*o = append(*o, member{key, value})
	}
}

func (o *object) remove(key string) {
	*o = slices.DeleteFunc(*o, func(m member) bool { return m.key == key })
}

// UnmarshalJSON implements json.Unmarshaler.
func (o *object) UnmarshalJSON(b []byte) error {
	d := json.NewDecoder(bytes.NewReader(b))
	t, err := d.Token()
	if err != nil {
		return err
	}
	if t != json.Delim('{') {
		return errors.New("it must be an object, in braces")
	}
	*o = nil
	for d.More() {
		t, err := d.Token()
		if err != nil {
			return err
		}
		m := member{key: t.(string)}
		if err := d.Decode(&m.value); err != nil {
			return err
		}
		if o.index(m.key) >= 0 {
			return fmt.Errorf("%q is there twice", m.key)
		}
		*o = append(*o, m)
	}
	if _, err := d.Token(); err != nil && err != io.EOF {
		return err
	}
	return nil
}

// MarshalJSON implements json.Marshaler.
func (o object) MarshalJSON() ([]byte, error) {
	var b bytes.Buffer
	b.WriteByte('{')
	for i, m := range o {
		if i > 0 {
			b.WriteByte(',')
		}
		key, err := encode(m.key)
		if err != nil {
			return nil, err
		}
		b.Write(key)
		b.WriteByte(':')
		b.Write(m.value)
	}
	b.WriteByte('}')
	return b.Bytes(), nil
}
