package workload

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestLoadTrace(t *testing.T) {
	w, err := LoadTrace("testdata/trace.json")
	require.NoError(t, err)
	require.Equal(t, "bugfix", w.Name)
	require.Equal(t, "base", w.Rootfs)
	require.NotNil(t, w.Spec)
	first, second := w.Plan(1, 0, 0), w.Plan(1, 1, 0)
	require.Len(t, first, 7)
	require.Len(t, second, 5)
	require.Equal(t, first, w.Plan(9, 2, 100), "clones beyond the list begin again")
	require.Equal(t, first[:3], w.Plan(1, 0, 3))

	require.Equal(t, Step{
		Kind:    "explore",
		Request: json.RawMessage(`{"op":"exec","args":{"argv":["git","log","--oneline","-n","20"],"cwd":"/srv/repo"}}`),
		Wait:    2500 * time.Millisecond,
	}, first[0])
	require.Equal(t, "test", first[5].Kind)
	require.JSONEq(t, `{"op":"step","name":"test","args":{"commands":[["python3","-m","pytest","-q","networkx/algorithms/tests/test_planarity.py"]],"cwd":"/srv/repo"}}`, string(first[5].Request))
	require.Equal(t, "git", second[4].Kind, "by default, the command's name")
	require.Contains(t, string(second[3].Request), `"stdin":"import networkx`)
	for _, s := range append(first, second...) {
		require.NotContains(t, string(s.Request), "\n")
	}
}

func TestLoadTraceErrors(t *testing.T) {
	step := func(s string) string { return `{"workload": "swe", "clones": [{"steps": [` + s + `]}]}` }
	good := `{"argv": ["ls"], "wait_seconds": 1}`
	for _, test := range []struct{ name, file, want string }{
		{"empty", ``, `the JSON ends too early`},
		{"cut off", `{"workload": "swe"`, `the JSON ends too early`},
		{"syntax", "{\n\"workload\" \"swe\"}", `line 2: invalid character '"' after object key`},
		{"unknown field", `{"workload": "swe", "clone": []}`, `unknown field "clone"`},
		{"more", step(good) + `{}`, `there is more after the JSON value`},
		{"no workload", `{"clones": []}`, `field "workload" is missing: it names the template, one of swe, lsp, lsp-late, data, build`},
		{"unknown workload", `{"workload": "x"}`, `field "workload": unknown workload "x": there are swe, lsp, lsp-late, data, build`},
		{"wrong type", `{"workload": 3}`, `field "workload" is a number, not a string`},
		{"name is a path", `{"name": "../../..", "workload": "swe"}`, `field "name" is "../../..": it has to begin with a letter or digit and hold nothing but those and . _ -`},
		{"name is a parent", `{"name": "..", "workload": "swe"}`, `field "name" is "..": it has to begin with a letter or digit and hold nothing but those and . _ -`},
		{"absolute name", `{"name": "/etc", "workload": "swe"}`, `field "name" is "/etc": it has to begin with a letter or digit and hold nothing but those and . _ -`},
		{"name of two lines", `{"name": "a\n", "workload": "swe"}`, `field "name" is "a\n": it has to begin with a letter or digit and hold nothing but those and . _ -`},
		{"no clones", `{"workload": "swe"}`, `field "clones" is missing or empty: there is nothing to replay`},
		{"no steps", `{"workload": "swe", "clones": [{"steps": [` + good + `]}, {}]}`, `clone 1: field "steps" is missing or empty`},
		{"unknown step field", step(good + `, {"argv": ["ls"], "wait": 1}`), `clone 0, step 1: unknown field "wait"`},
		{"no wait", step(`{"argv": ["ls"]}`), `clone 0, step 0: field "wait_seconds" is missing`},
		{"negative wait", step(`{"argv": ["ls"], "wait_seconds": -0.5}`), `clone 0, step 0: field "wait_seconds" is -0.5: a wait cannot be negative`},
		{"endless wait", step(`{"argv": ["ls"], "wait_seconds": 1e12}`), `clone 0, step 0: field "wait_seconds" is 1e+12, more than 24h0m0s: is it in seconds?`},
		{"wait is text", step(`{"argv": ["ls"], "wait_seconds": "1s"}`), `clone 0, step 0: field "wait_seconds" is a string, not a float64`},
		{"no command", step(`{"wait_seconds": 1}`), `clone 0, step 0: field "argv" is missing or empty: a step needs a command or a "request"`},
		{"empty argv", step(`{"argv": [], "wait_seconds": 1}`), `clone 0, step 0: field "argv" is missing or empty: a step needs a command or a "request"`},
		{"empty command", step(`{"argv": [""], "wait_seconds": 1}`), `clone 0, step 0: field "argv" begins with an empty string: it is the command's name`},
		{"relative cwd", step(`{"argv": ["ls"], "cwd": "src", "wait_seconds": 1}`), `clone 0, step 0: field "cwd" is "src", not an absolute path`},
		{"both", step(`{"argv": ["ls"], "request": {"op": "ping"}, "wait_seconds": 1}`), `clone 0, step 0: field "request" excludes "argv", "cwd" and "stdin"`},
		{"request without op", step(`{"request": {}, "wait_seconds": 1}`), `clone 0, step 0: field "request" has to be an object with "op", a request of the tool server's protocol`},
		{"request is text", step(`{"request": "ping", "wait_seconds": 1}`), `clone 0, step 0: field "request" has to be an object with "op", a request of the tool server's protocol`},
	} {
		t.Run(test.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "my.json")
			require.NoError(t, os.WriteFile(path, []byte(test.file), 0o644))
			_, err := LoadTrace(path)
			require.EqualError(t, err, path+": "+test.want)
		})
	}
	_, err := LoadTrace("testdata/none.json")
	require.ErrorIs(t, err, os.ErrNotExist)
}

func TestLoadTraceName(t *testing.T) {
	path := filepath.Join(t.TempDir(), "mine.json")
	require.NoError(t, os.WriteFile(path, []byte(`{"workload": "data", "clones": [{"steps": [{"argv": ["/bin/ls"], "wait_seconds": 0}]}]}`), 0o644))
	w, err := LoadTrace(path)
	require.NoError(t, err)
	require.Equal(t, "mine", w.Name)
	require.Equal(t, "a trace of 1 clones, replayed on the template of data", w.Summary)
	require.Equal(t, "ls", w.Plan(0, 0, 0)[0].Kind)

	for _, name := range []string{"...json", ".json", "-x.json", "my trace.json", "..json"} {
		bad := filepath.Join(filepath.Dir(path), name)
		require.NoError(t, os.Rename(path, bad))
		_, err = LoadTrace(bad)
		require.ErrorContains(t, err, `the name of the file does not do`, name)
		path = bad
	}
}
