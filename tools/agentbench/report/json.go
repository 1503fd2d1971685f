package report

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"strings"
)

// intervalSuffix is appended to the JSON name of a Ratio to name its interval.
const intervalSuffix = "_ci"

// MarshalJSON writes the value alone; what contains the ratio adds the interval.
func (q Ratio) MarshalJSON() ([]byte, error) {
	return json.Marshal(q.Value)
}

// UnmarshalJSON reads what MarshalJSON wrote.
func (q *Ratio) UnmarshalJSON(b []byte) error {
	q.Low, q.High = math.NaN(), math.NaN()
	return json.Unmarshal(b, &q.Value)
}

// MarshalJSON writes each Ratio as a number, its interval beside it.
func (s Summary) MarshalJSON() ([]byte, error) { return marshalRatios(s) }

// UnmarshalJSON reads what MarshalJSON wrote.
func (s *Summary) UnmarshalJSON(b []byte) error {
	type plain Summary // without the methods
	if err := json.Unmarshal(b, (*plain)(s)); err != nil {
		return err
	}
	return unmarshalIntervals(b, s)
}

// MarshalJSON writes the Ratio as a number, its interval beside it.
func (k KindSummary) MarshalJSON() ([]byte, error) { return marshalRatios(k) }

// UnmarshalJSON reads what MarshalJSON wrote.
func (k *KindSummary) UnmarshalJSON(b []byte) error {
	type plain KindSummary // without the methods
	if err := json.Unmarshal(b, (*plain)(k)); err != nil {
		return err
	}
	return unmarshalIntervals(b, k)
}

func jsonName(f reflect.StructField) (name string, omitEmpty bool) {
	name, options, _ := strings.Cut(f.Tag.Get("json"), ",")
	return name, options == "omitempty"
}

var ratioType = reflect.TypeFor[*Ratio]()

// marshalRatios marshals a struct and adds the interval after every *Ratio.
func marshalRatios(s any) ([]byte, error) {
	var out objectWriter
	v := reflect.ValueOf(s)
	for i := range v.NumField() {
		name, omitEmpty := jsonName(v.Type().Field(i))
		if omitEmpty && v.Field(i).IsZero() {
			continue
		}
		out.field(name, v.Field(i).Interface())
		if v.Field(i).Type() == ratioType {
			var interval []float64
			if q := v.Field(i).Interface().(*Ratio); q != nil && q.HasInterval() {
				interval = []float64{q.Low, q.High}
			}
			out.field(name+intervalSuffix, interval)
		}
	}
	return out.bytes()
}

// unmarshalIntervals sets the intervals of every *Ratio of the struct that s
// points to.
func unmarshalIntervals(b []byte, s any) error {
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(b, &fields); err != nil {
		return err
	}
	v := reflect.ValueOf(s).Elem()
	for i := range v.NumField() {
		if v.Field(i).Type() != ratioType || v.Field(i).IsNil() {
			continue
		}
		name, _ := jsonName(v.Type().Field(i))
		raw := fields[name+intervalSuffix]
		if raw == nil {
			continue
		}
		var interval []float64
		if err := json.Unmarshal(raw, &interval); err != nil || len(interval) != 0 && len(interval) != 2 {
			return fmt.Errorf("%s%s must be a list of two numbers or null, not %s", name, intervalSuffix, raw)
		}
		if len(interval) == 2 {
			q := v.Field(i).Interface().(*Ratio)
			q.Low, q.High = interval[0], interval[1]
		}
	}
	return nil
}

// objectWriter writes a JSON object field by field.
type objectWriter struct {
	buf bytes.Buffer
	err error
}

func (o *objectWriter) field(name string, value any) {
	b, err := json.Marshal(value)
	if err != nil && o.err == nil {
		o.err = fmt.Errorf("%s: %w", name, err)
	}
	if o.buf.Len() > 0 {
		o.buf.WriteByte(',')
	}
	fmt.Fprintf(&o.buf, "%q:%s", name, b)
}

func (o *objectWriter) bytes() ([]byte, error) {
	return fmt.Appendf(nil, "{%s}", o.buf.Bytes()), o.err
}

// encode writes the report as JSON: what people read is indented, and of the
// long lists every sample has a line, so that a difference between two files is
// one between samples.
func (r *Report) encode(w io.Writer) error {
	v := reflect.ValueOf(*r)
	sep := "{\n"
	for i := range v.NumField() {
		name, omitEmpty := jsonName(v.Type().Field(i))
		f := v.Field(i)
		if omitEmpty && f.IsZero() {
			continue
		}
		b, err := marshalField(f)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		if _, err := fmt.Fprintf(w, "%s  %q: %s", sep, name, b); err != nil {
			return err
		}
		sep = ",\n"
	}
	_, err := io.WriteString(w, "\n}\n")
	return err
}

func marshalField(f reflect.Value) ([]byte, error) {
	if f.Kind() != reflect.Slice || f.Type().Elem().Kind() != reflect.Struct {
		return json.MarshalIndent(f.Interface(), "  ", "  ")
	}
	// Lists are never null.
	var out bytes.Buffer
	sep := "[\n    "
	for i := range f.Len() {
		b, err := json.Marshal(f.Index(i).Interface())
		if err != nil {
			return nil, fmt.Errorf("[%d]: %w", i, err)
		}
		out.WriteString(sep)
		out.Write(b)
		sep = ",\n    "
	}
	if out.Len() == 0 {
		return []byte("[]"), nil
	}
	out.WriteString("\n  ]")
	return out.Bytes(), nil
}

// Write writes the report as JSON, compressed if the name of the file ends in
// ".gz". The file is replaced as a whole or not at all.
func (r *Report) Write(path string) error {
	r.Format = Format
	return writeFile(path, func(w io.Writer) error {
		if !strings.HasSuffix(path, ".gz") {
			return r.encode(w)
		}
		z := gzip.NewWriter(w)
		if err := r.encode(z); err != nil {
			return err
		}
		return z.Close()
	})
}

// writeFile replaces a file in one step.
func writeFile(path string, write func(io.Writer) error) (err error) {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return fmt.Errorf("report: %w", err)
	}
	defer func() {
		f.Close()
		if err != nil {
			os.Remove(f.Name())
			err = fmt.Errorf("report: writing %s: %w", path, err)
		}
	}()
	var buf bytes.Buffer
	if err := write(&buf); err != nil {
		return err
	}
	if _, err := buf.WriteTo(f); err != nil {
		return err
	}
	// CreateTemp's mode is for secrets.
	if err := f.Chmod(0o644); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}

// Read reads a report that Write wrote.
func Read(path string) (*Report, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("report: %w", err)
	}
	if bytes.HasPrefix(b, []byte{0x1f, 0x8b}) {
		z, err := gzip.NewReader(bytes.NewReader(b))
		if err == nil {
			b, err = io.ReadAll(z)
		}
		if err != nil {
			return nil, fmt.Errorf("report: %s: decompressing: %w", path, err)
		}
	}
	// The format comes first: other formats may not fit the types.
	var head struct {
		Format *int `json:"format"`
	}
	if err := json.Unmarshal(b, &head); err != nil {
		return nil, fmt.Errorf("report: %s is not a report of agentbench run: %w", path, err)
	}
	switch {
	case head.Format == nil:
		return nil, fmt.Errorf("report: %s is not a report of agentbench run: it has no \"format\"", path)
	case *head.Format != Format:
		return nil, fmt.Errorf("report: %s has format %d and this agentbench reads format %d: use the agentbench that wrote it, or run again", path, *head.Format, Format)
	}
	r := new(Report)
	if err := json.Unmarshal(b, r); err != nil {
		return nil, fmt.Errorf("report: %s: %w", path, err)
	}
	return r, nil
}
