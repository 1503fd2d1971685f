package report

import (
	"encoding/json"
	"encoding/xml"
	"flag"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var pages = flag.String("pages", "", "a folder to leave the pages of invented runs in, to look at")

var script = regexp.MustCompile(`(?s)<script>.*?</script>|<!DOCTYPE html>`)

// wellFormed: the page is written so that it is XML but for the script.
func wellFormed(t *testing.T, page string) {
	t.Helper()
	d := xml.NewDecoder(strings.NewReader(script.ReplaceAllString(page, "")))
	d.Entity = xml.HTMLEntity
	for {
		token, err := d.Token()
		if err == io.EOF {
			return
		}
		require.NoError(t, err)
		e, ok := token.(xml.StartElement)
		if !ok {
			continue
		}
		for _, a := range e.Attr {
			require.NotContains(t, a.Value, "NaN", e)
			require.NotContains(t, a.Value, "Inf", e)
			require.NotContains(t, a.Value, "ZgotmplZ", e)
			require.NotContains(t, []string{"src", "href", "onclick"}, a.Name.Local, "nothing is loaded")
		}
	}
}

func TestHTML(t *testing.T) {
	cases := edgeCases()
	cases["full"] = fullFake().report()
	for name, r := range cases {
		t.Run(name, func(t *testing.T) {
			dir := *pages
			if dir == "" {
				dir = t.TempDir()
			}
			path := filepath.Join(dir, name+".html")
			require.NoError(t, r.WriteHTML(path))
			b, err := os.ReadFile(path)
			require.NoError(t, err)
			wellFormed(t, string(b))
			require.NotContains(t, string(b), "<no value>")
			require.Less(t, len(b), 3<<20)
		})
	}
}

func TestHTMLShowsFaults(t *testing.T) {
	var w strings.Builder
	require.NoError(t, broken().html(&w))
	require.Contains(t, w.String(), "This run is incomplete")
	require.Contains(t, w.String(), "&lt;b&gt;runsc&lt;/b&gt; &amp; co")
	require.Contains(t, w.String(), "1 answer differs")
	require.Contains(t, w.String(), "&lt;script&gt;alert(1)&lt;/script&gt; 1 failed")
	require.Contains(t, w.String(), "page 0x1f2000: checksum differs")
	require.Contains(t, w.String(), "1 DIFFER")
	require.Contains(t, w.String(), "48 MISSING")
}

// TestHTMLEscapes puts what breaks out of HTML into every text of a report.
func TestHTMLEscapes(t *testing.T) {
	const evil = `"'><script>evil()</script><b x='`
	f := smallFake()
	f.workloads, f.systems = []string{evil}, []string{Stock, "agentzip", evil}
	r := f.raw()
	for i := range r.Steps {
		r.Steps[i].Kind = evil
	}
	r.Error, r.Commit, r.Command = evil, evil, []string{evil}
	r.Machine = Machine{OS: evil, Kernel: evil, Arch: evil, CPU: evil, Virtual: evil, GoVersion: evil, Platform: evil, CPUs: 1}
	r.Config.Waits, r.Config.Trace = evil, evil
	k := Key{evil, evil, 4, 0}
	raw, err := json.Marshal(evil)
	require.NoError(t, err)
	r.Mismatches = []Mismatch{{Key: k, Kind: evil, Reference: evil, Want: raw, Got: []byte(evil)}}
	r.Problems = []Problem{{Key: k, Text: evil}, {Key: k, Text: evil, Fatal: true}}
	for i := range r.Systems {
		r.Systems[i].Summary, r.Systems[i].Version, r.Systems[i].Flags = evil, evil, []string{evil}
	}
	r.Workloads[0].Summary = evil
	r.Summarize()
	var w strings.Builder
	require.NoError(t, r.html(&w))
	wellFormed(t, w.String())
	require.NotContains(t, w.String(), "<script>evil")
	require.NotContains(t, w.String(), "<b x=")
	require.Equal(t, 1, strings.Count(w.String(), "<script>"))
}

// TestColors: a system looks the same on every page.
func TestColors(t *testing.T) {
	d := fake{systems: []string{"agentzip-noprefetch", "agentzip", "mine", Stock}}.report().drawing()
	require.Equal(t, map[string]string{"agentzip-noprefetch": "s3", "agentzip": "s2", "mine": "s4", Stock: "s0"}, d.class)
}

func TestBin(t *testing.T) {
	v := bin([]Point{{At: 0, UsedBytes: 1 << 20}, {At: 0, UsedBytes: 3 << 20}, {At: 50, UsedBytes: 7 << 20}}, 100)
	require.Equal(t, 2.0, *v[0])
	require.Equal(t, 2.0, *v[timelineBins/2-1], "the value before a gap")
	require.Equal(t, 7.0, *v[timelineBins/2])
	require.Nil(t, v[timelineBins/2+1], "after the end")
}

func TestTicks(t *testing.T) {
	require.Equal(t, []float64{0, 20, 40, 60}, upTo(47, 0, 1).ticks(4))
	require.Equal(t, []float64{0.01, 0.1, 1, 10}, scale{min: 0.008, max: 12, log: true}.ticks(4))
	require.InDeltaSlice(t, []float64{0.1, 0.3, 1}, scale{min: 0.1, max: 1.5, log: true}.ticks(4), 1e-12)
	require.Equal(t, 1.0, niceStep(0))
}
