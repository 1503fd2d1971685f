package workload

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"
)

// A trace says what clones do, instead of a workload's own plan: recorded from
// real agents, or written by hand. It is a JSON file:
//
//	{
//	  "workload": "swe",
//	  "clones": [
//	    {"steps": [
//	      {"kind": "explore", "argv": ["git", "log", "--oneline", "-n", "20"], "cwd": "/srv/repo", "wait_seconds": 2.5},
//	      {"kind": "count", "argv": ["wc", "-l"], "stdin": "one\ntwo\n", "wait_seconds": 0.4},
//	      {"kind": "repl", "request": {"op": "step", "name": "repl", "args": {"code": "print(len(files))"}}, "wait_seconds": 7}
//	    ]}
//	  ]
//	}
//
// "workload" names the workload whose template the clones are restored from:
// its root file system, server and data. "name" and "summary" are optional and
// what reports say; the name, by default the file's without its ending, may hold
// letters, digits and ". _ -", and begins with a letter or digit. Clone c takes the steps of entry c of "clones"; clones
// beyond the list begin again at its start. A step is a command ("argv", and if
// wanted "cwd" and "stdin") or a line for the tool server ("request"), comes
// after a wait of "wait_seconds", and belongs to a "kind", by default the
// command's name or "request". A field that is not one of these is an error.
//
// Answers are compared between systems, so commands should say the same each
// time: no dates, process ids or durations. A command that leaves a process in
// the background has to redirect its output, else it lasts as long as the
// process.
type trace struct {
	Name     string       `json:"name"`
	Summary  string       `json:"summary"`
	Workload string       `json:"workload"`
	Clones   []traceClone `json:"clones"`
}

type traceClone struct {
	Steps []json.RawMessage `json:"steps"`
}

type traceStep struct {
	Kind        string          `json:"kind"`
	Argv        []string        `json:"argv"`
	Cwd         string          `json:"cwd"`
	Stdin       string          `json:"stdin"`
	Request     json.RawMessage `json:"request"`
	WaitSeconds *float64        `json:"wait_seconds"`
}

// maxWait is the longest wait that a trace may ask for; a longer one is a
// mistake in the unit.
const maxWait = 24 * time.Hour

// traceName is what a trace may be called: files and directories are named after
// it, which are removed at the end of a run.
var traceName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]*$`)

// LoadTrace reads a trace and returns the workload that replays it. Its Plan
// returns all steps of a clone's entry, or the first n if n is positive and
// less.
func LoadTrace(file string) (Workload, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return Workload{}, err
	}
	w, err := parseTrace(b)
	if err != nil {
		return Workload{}, fmt.Errorf("%s: %w", file, err)
	}
	if w.Name == "" {
		w.Name = strings.TrimSuffix(filepath.Base(file), filepath.Ext(file))
		if !traceName.MatchString(w.Name) {
			return Workload{}, fmt.Errorf(`%s: the name of the file does not do as one for the workload: give the trace a "name", of letters, digits and any of . _ - after the first`, file)
		}
	}
	return w, nil
}

func parseTrace(b []byte) (Workload, error) {
	var t trace
	if err := decodeStrictly(b, &t); err != nil {
		return Workload{}, err
	}
	if t.Name != "" && !traceName.MatchString(t.Name) {
		return Workload{}, fmt.Errorf(`field "name" is %q: it has to begin with a letter or digit and hold nothing but those and . _ -`, t.Name)
	}
	if t.Workload == "" {
		return Workload{}, fmt.Errorf(`field "workload" is missing: it names the template, one of %s`, strings.Join(Names(), ", "))
	}
	w, err := Get(t.Workload)
	if err != nil {
		return Workload{}, fmt.Errorf(`field "workload": %w`, err)
	}
	if len(t.Clones) == 0 {
		return Workload{}, errors.New(`field "clones" is missing or empty: there is nothing to replay`)
	}
	plans := make([][]Step, len(t.Clones))
	for c, clone := range t.Clones {
		if len(clone.Steps) == 0 {
			return Workload{}, fmt.Errorf(`clone %d: field "steps" is missing or empty`, c)
		}
		for i, raw := range clone.Steps {
			s, err := parseTraceStep(raw)
			if err != nil {
				return Workload{}, fmt.Errorf("clone %d, step %d: %w", c, i, err)
			}
			plans[c] = append(plans[c], s)
		}
	}
	w.Name = t.Name
	w.Summary = t.Summary
	if w.Summary == "" {
		w.Summary = fmt.Sprintf("a trace of %d clones, replayed on the template of %s", len(plans), t.Workload)
	}
	w.Plan = func(_ uint64, clone, n int) []Step {
		steps := plans[clone%len(plans)]
		if n > 0 && n < len(steps) {
			steps = steps[:n]
		}
		return steps
	}
	return w, nil
}

func parseTraceStep(raw json.RawMessage) (Step, error) {
	var t traceStep
	if err := decodeStrictly(raw, &t); err != nil {
		return Step{}, err
	}
	s := Step{Kind: t.Kind}
	switch {
	case t.WaitSeconds == nil:
		return Step{}, errors.New(`field "wait_seconds" is missing`)
	case *t.WaitSeconds < 0:
		return Step{}, fmt.Errorf(`field "wait_seconds" is %v: a wait cannot be negative`, *t.WaitSeconds)
	case *t.WaitSeconds > maxWait.Seconds():
		return Step{}, fmt.Errorf(`field "wait_seconds" is %v, more than %v: is it in seconds?`, *t.WaitSeconds, maxWait)
	}
	s.Wait = time.Duration(math.Round(*t.WaitSeconds * float64(time.Second)))
	if t.Request != nil {
		if t.Argv != nil || t.Cwd != "" || t.Stdin != "" {
			return Step{}, errors.New(`field "request" excludes "argv", "cwd" and "stdin"`)
		}
		var r struct {
			Op string `json:"op"`
		}
		if err := json.Unmarshal(t.Request, &r); err != nil || r.Op == "" {
			return Step{}, errors.New(`field "request" has to be an object with "op", a request of the tool server's protocol`)
		}
		// One line, as the protocol wants it.
		var line bytes.Buffer
		if err := json.Compact(&line, t.Request); err != nil {
			return Step{}, err
		}
		s.Request = line.Bytes()
		if s.Kind == "" {
			s.Kind = "request"
		}
		return s, nil
	}
	if len(t.Argv) == 0 {
		return Step{}, errors.New(`field "argv" is missing or empty: a step needs a command or a "request"`)
	}
	if t.Argv[0] == "" {
		return Step{}, errors.New(`field "argv" begins with an empty string: it is the command's name`)
	}
	a := args{"argv": t.Argv}
	if t.Cwd != "" {
		if !strings.HasPrefix(t.Cwd, "/") {
			return Step{}, fmt.Errorf(`field "cwd" is %q, not an absolute path`, t.Cwd)
		}
		a["cwd"] = t.Cwd
	}
	if t.Stdin != "" {
		a["stdin"] = t.Stdin
	}
	s.Request = request("exec", "", a)
	if s.Kind == "" {
		s.Kind = filepath.Base(t.Argv[0])
	}
	return s, nil
}

// decodeStrictly decodes one JSON value without unknown fields.
func decodeStrictly(b []byte, v any) error {
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		var syntax *json.SyntaxError
		if errors.As(err, &syntax) {
			return fmt.Errorf("line %d: %w", 1+bytes.Count(b[:min(int(syntax.Offset), len(b))], []byte("\n")), err)
		}
		var kind *json.UnmarshalTypeError
		if errors.As(err, &kind) {
			return fmt.Errorf("field %q is a %s, not a %s", kind.Field, kind.Value, kind.Type)
		}
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return errors.New("the JSON ends too early")
		}
		return errors.New(strings.TrimPrefix(err.Error(), "json: "))
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("there is more after the JSON value")
	}
	return nil
}
