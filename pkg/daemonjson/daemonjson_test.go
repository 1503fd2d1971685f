package daemonjson

import (
	"encoding/json"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func read(t *testing.T, content string) (*File, string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "daemon.json")
	require.NoError(t, os.WriteFile(path, []byte(content), 0o640))
	f, err := Read(path)
	require.NoError(t, err)
	return f, path
}

func text(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	return string(b)
}

func TestInstallAndRemove(t *testing.T) {
	path := filepath.Join(t.TempDir(), "docker", "daemon.json")
	f, err := Read(path)
	require.NoError(t, err)
	require.NoError(t, f.SetRuntime("a", Runtime{Path: "/bin/a", Args: []string{"--b=<&>"}}))
	changed, err := f.Save()
	require.NoError(t, err)
	require.True(t, changed)
	require.Equal(t, "{\n    \"runtimes\": {\n        \"a\": {\n            \"path\": \"/bin/a\",\n            \"runtimeArgs\": [\n                \"--b=<&>\"\n            ]\n        }\n    }\n}\n", text(t, path))
	require.NoFileExists(t, path+"~")

	f, err = Read(path)
	require.NoError(t, err)
	require.NoError(t, f.SetRuntime("a", Runtime{Path: "/bin/a", Args: []string{"--b=<&>"}}))
	changed, err = f.Save()
	require.NoError(t, err)
	require.False(t, changed, "nothing is new")

	removed, err := f.RemoveRuntime("b")
	require.NoError(t, err)
	require.False(t, removed)
	removed, err = f.RemoveRuntime("a")
	require.NoError(t, err)
	require.True(t, removed)
	_, err = f.Save()
	require.NoError(t, err)
	require.JSONEq(t, `{"runtimes": {}}`, text(t, path), "for dockerd to forget it")
}

func TestKeepsTheRest(t *testing.T) {
	before := "{\n  \"zeta\": 1e2,\n  \"big\": 12345678901234567890,\n  \"html\": \"<&>\",\n  \"runtimes\": {\n    \"z\": {\n      \"path\": \"z\",\n      \"own\": [1, 2.50]\n    }\n  },\n  \"alpha\": null\n}"
	f, path := read(t, before)
	require.NoError(t, f.SetRuntime("a", Runtime{Path: "a"}))
	_, err := f.Save()
	require.NoError(t, err)
	require.Equal(t, "{\n  \"zeta\": 1e2,\n  \"big\": 12345678901234567890,\n  \"html\": \"<&>\",\n  \"runtimes\": {\n    \"z\": {\n      \"path\": \"z\",\n      \"own\": [\n        1,\n        2.50\n      ]\n    },\n    \"a\": {\n      \"path\": \"a\"\n    }\n  },\n  \"alpha\": null\n}\n", text(t, path))
	require.Equal(t, before, text(t, path+"~"), "the previous version")
	fi, err := os.Stat(path)
	require.NoError(t, err)
	require.Equal(t, fs.FileMode(0o640), fi.Mode())
}

func TestSettings(t *testing.T) {
	f, path := read(t, `{"exec-opts": ["other=1", "native.cgroupdriver=systemd"], "experimental": false}`)
	require.NoError(t, f.SetCgroupDriver("cgroupfs"))
	f.SetExperimental()
	_, err := f.Save()
	require.NoError(t, err)
	require.JSONEq(t, `{"exec-opts": ["other=1", "native.cgroupdriver=cgroupfs"], "experimental": true}`, text(t, path))
	f, err = Read(path)
	require.NoError(t, err)
	require.NoError(t, f.SetCgroupDriver("cgroupfs"))
	f.SetExperimental()
	changed, err := f.Save()
	require.NoError(t, err)
	require.False(t, changed)
}

func TestRefusals(t *testing.T) {
	for content, want := range map[string]string{
		"{\n  \"a\": 1,\n}":                   "not valid JSON: line 3",
		"{\"a\": 1":                           "not valid JSON: line 1",
		"{} {}":                               "not valid JSON",
		"[]":                                  "it must be an object, in braces",
		"null":                                "it must be an object, in braces",
		"{\"runtimes\": []}":                  `the setting "runtimes": it must be an object, in braces`,
		"{\"runtimes\": {\"a\":{},\"a\":{}}}": `"a" is there twice`,
		"{\"x\": 1, \"x\": 2}":                `"x" is there twice`,
	} {
		path := filepath.Join(t.TempDir(), "daemon.json")
		require.NoError(t, os.WriteFile(path, []byte(content), 0o644))
		_, err := Read(path)
		require.ErrorContains(t, err, want)
		require.ErrorContains(t, err, path)
		require.ErrorContains(t, err, "nothing was changed")
	}
	f, _ := read(t, `{"default-runtime": "a", "runtimes": {"a": {"path": "a"}}}`)
	_, err := f.RemoveRuntime("a")
	require.ErrorContains(t, err, `"a" is the default-runtime`)
}

// A link stays one: the file that it leads to is changed.
func TestLink(t *testing.T) {
	f, path := read(t, "{}")
	link := filepath.Join(t.TempDir(), "link.json")
	require.NoError(t, os.Symlink(path, link))
	f, err := Read(link)
	require.NoError(t, err)
	require.NoError(t, f.SetRuntime("a", Runtime{Path: "a"}))
	_, err = f.Save()
	require.NoError(t, err)
	require.Contains(t, text(t, path), `"a"`)
	target, err := os.Readlink(link)
	require.NoError(t, err)
	require.Equal(t, path, target)

	require.NoError(t, os.Remove(path))
	_, err = Read(link)
	require.ErrorContains(t, err, link+" is a link to "+path)
}

// Whatever else a file has survives that a runtime is added and removed.
func TestMetamorphic(t *testing.T) {
	dir := t.TempDir()
	rapid.Check(t, func(t *rapid.T) {
		value := rapid.OneOf(rapid.Just[any](nil), rapid.Map(rapid.Bool(), func(b bool) any { return b }),
			rapid.Map(rapid.String(), func(s string) any { return s }), rapid.Map(rapid.Float64Range(-1e300, 1e300), func(f float64) any { return f }))
		settings := rapid.MapOf(rapid.String(), value).Draw(t, "settings")
		others := rapid.MapOf(rapid.String(), rapid.Map(rapid.String(), func(p string) any { return map[string]any{"path": p} })).Draw(t, "runtimes")
		name := rapid.String().Filter(func(s string) bool { _, ok := others[s]; return !ok }).Draw(t, "name")
		delete(settings, runtimesKey)
		delete(settings, defaultKey)
		if len(others) > 0 {
			settings[runtimesKey] = others
		}
		before, err := json.Marshal(settings)
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(dir, "daemon.json")
		if err := os.WriteFile(path, before, 0o644); err != nil {
			t.Fatal(err)
		}
		step := func(do func(*File) error) map[string]any {
			f, err := Read(path)
			if err == nil {
				err = do(f)
			}
			if err == nil {
				_, err = f.Save()
			}
			if err != nil {
				t.Fatal(err)
			}
			b, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			var all map[string]any
			if err := json.Unmarshal(b, &all); err != nil {
				t.Fatal(err)
			}
			return all
		}
		r := Runtime{Path: rapid.String().Draw(t, "path"), Args: rapid.SliceOf(rapid.String()).Draw(t, "args")}
		with := step(func(f *File) error { return f.SetRuntime(name, r) })
		if _, ok := with[runtimesKey].(map[string]any)[name]; !ok {
			t.Fatalf("%q is not in %v", name, with)
		}
		var want map[string]any
		if err := json.Unmarshal(before, &want); err != nil {
			t.Fatal(err)
		}
		got := step(func(f *File) error { _, err := f.RemoveRuntime(name); return err })
		if want[runtimesKey] == nil {
			want[runtimesKey] = map[string]any{}
		}
		if !reflect.DeepEqual(got, want) {
			t.Fatalf("%v became %v", want, got)
		}
	})
}
