package control

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the golden files")

func golden(t *testing.T, name, got string) {
	t.Helper()
	file := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s has\n%s\nand should be\n%s", file, want, got)
	}
}

// full returns a Stats with a different value in each field.
func full() *Stats {
	s := new(Stats)
	n := uint64(0)
	var fill func(v reflect.Value)
	fill = func(v reflect.Value) {
		for i := range v.NumField() {
			n++
			switch f := v.Field(i); f.Kind() {
			case reflect.Uint64:
				f.SetUint(n * 1234567)
			case reflect.Float64:
				f.SetFloat(1 / float64(n))
			case reflect.String:
				f.SetString("waiting")
			case reflect.Struct:
				fill(f)
			case reflect.Slice:
				f.Set(reflect.ValueOf([]uint64{0, 1, n}))
			case reflect.Map:
				if f.Type() == reflect.TypeFor[map[string]Stage]() {
					f.Set(reflect.ValueOf(map[string]Stage{"zstd": {Tries: n, Wins: 1, Bytes: 700, Rejects: 3, NS: 12345}, "words": {Tries: 2}}))
					continue
				}
				f.Set(reflect.ValueOf(map[string]uint64{"store_full": n, "incompressible": 2}))
			default:
				panic(fmt.Sprintf("field of type %v", f.Type()))
			}
		}
	}
	fill(reflect.ValueOf(s).Elem())
	return s
}

func TestFprint(t *testing.T) {
	for name, s := range map[string]*Stats{
		"empty.txt": {Phase: Phase{State: "working"}},
		"full.txt":  full(),
	} {
		var w strings.Builder
		Fprint(&w, s)
		golden(t, name, w.String())
	}
}

// TestNames keeps the names in JSON, which other programs read, from changing.
func TestNames(t *testing.T) {
	out, err := json.MarshalIndent(map[string]any{
		"stats": full(), "evict": EvictReport{}, "check": CheckReport{Problems: []string{}},
	}, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "names.json", string(out)+"\n")

	// What is written can be read.
	var back struct{ Stats Stats }
	if err := json.Unmarshal(out, &back); err != nil || !reflect.DeepEqual(back.Stats, *full()) {
		t.Errorf("%+v came back, %v", back.Stats, err)
	}
}

func TestSize(t *testing.T) {
	for n, want := range map[uint64]string{
		0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 1536: "1.5 KiB", 1 << 20: "1.0 MiB",
		3 << 29: "1536.0 MiB", 10<<30 - 1: "10240.0 MiB", 10 << 30: "10.0 GiB", 1 << 60: "1073741824.0 GiB",
	} {
		if got := Size(n); got != want {
			t.Errorf("Size(%d) = %q, should be %q", n, got, want)
		}
	}
}

func TestMean(t *testing.T) {
	for _, c := range []struct {
		h    Histogram
		want string
	}{
		{Histogram{}, "0s"},
		{Histogram{Count: 1, SumNS: 499}, "0s"},
		{Histogram{Count: 3, SumNS: 4_500_000}, "1.5ms"},
	} {
		if got := c.h.mean().String(); got != c.want {
			t.Errorf("mean of %+v is %s, should be %s", c.h, got, c.want)
		}
	}
}
