package template

import (
	"flag"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"text/tabwriter"
	"time"

	"runsc-agentzip/test/harness"
)

var benchJSON = flag.String("benchjson", "", "write what the benchmarks measured to this file, too")

// A sample is one clone's, or one round's, measurements.
type sample struct {
	// FirstMS is the time from the start of `restore` to the guest's first
	// answer.
	FirstMS float64 `json:"first_ms"`
	// AllMS is the same for the last of the clones that were started at once.
	AllMS float64 `json:"all_ms"`
	// Owned is the guest memory that a clone has for itself, in whatever form,
	// with the backend's metadata; Host what it adds to the host's memory, the
	// Sentry and shared mappings in proportion included. Bytes per clone.
	OwnedRestored float64 `json:"owned_restored"`
	HostRestored  float64 `json:"host_restored"`
	OwnedStep     float64 `json:"owned_step"`
	HostStep      float64 `json:"host_step"`
	// StepMS is how long the first step took.
	StepMS float64 `json:"step_ms"`
}

// A row is all rounds of one runtime with one template and one number of clones.
type row struct {
	Runtime     string   `json:"runtime"`
	TemplateMiB int64    `json:"template_mib"`
	Clones      int      `json:"clones"`
	Samples     []sample `json:"samples"`
}

func (r *row) column(f func(sample) float64) []float64 {
	var v []float64
	for _, s := range r.Samples {
		v = append(v, f(s))
	}
	slices.Sort(v)
	return v
}

func median(v []float64) float64 {
	if len(v) == 0 {
		return math.NaN()
	}
	return (v[(len(v)-1)/2] + v[len(v)/2]) / 2
}

// spread prints a median with the range.
func spread(v []float64, unit float64) string {
	return fmt.Sprintf("%.1f (%.1f-%.1f)", median(v)/unit, v[0]/unit, v[len(v)-1]/unit)
}

// owned is what a clone has for itself and what it costs the host.
func owned(g *guest) (own, host float64, err error) {
	m, err := g.sb.Memory()
	if err != nil {
		return 0, 0, err
	}
	own = float64(m.GuestMemfd)
	if g.rt.m.evicts {
		st, err := g.sb.Stats(harness.Within(g.t, time.Minute))
		if err != nil {
			return 0, 0, err
		}
		own = float64(st.OwnedBytes)
	}
	return own, float64(m.Host()), nil
}

// measure restores n clones at once and has them answer and work. The sample is
// that of a typical clone: the median of n.
func measure(b *testing.B, rt *runtime, bundle, image string, n int) sample {
	b.Helper()
	samples := make([]sample, n)
	clones := make([]*guest, n)
	began := time.Now()
	var mu sync.Mutex
	var all time.Duration
	each(b, n, func(i int) error {
		t := time.Now()
		g, err := tryRestore(b, rt, fmt.Sprintf("bench%d", i), bundle, image)
		if err != nil {
			return err
		}
		clones[i] = g
		if _, err := g.ask("ping"); err != nil {
			return err
		}
		samples[i].FirstMS = float64(time.Since(t).Microseconds()) / 1000
		mu.Lock()
		all = max(all, time.Since(began))
		mu.Unlock()
		return nil
	})
	// A stock runsc goes on reading after the guest has started; what it owns
	// then is what it owns.
	time.Sleep(time.Second)
	each(b, n, func(i int) (err error) {
		samples[i].OwnedRestored, samples[i].HostRestored, err = owned(clones[i])
		return err
	})
	each(b, n, func(i int) error {
		t := time.Now()
		_, err := clones[i].ask("step")
		samples[i].StepMS = float64(time.Since(t).Microseconds()) / 1000
		return err
	})
	// The guest waits for the next step, as an agent for its model.
	time.Sleep(2 * time.Second)
	each(b, n, func(i int) (err error) {
		samples[i].OwnedStep, samples[i].HostStep, err = owned(clones[i])
		return err
	})
	for _, g := range clones {
		g.end()
	}
	pick := func(f func(sample) float64) float64 {
		r := row{Samples: samples}
		return median(r.column(f))
	}
	return sample{
		FirstMS:       pick(func(s sample) float64 { return s.FirstMS }),
		AllMS:         float64(all.Microseconds()) / 1000,
		OwnedRestored: pick(func(s sample) float64 { return s.OwnedRestored }),
		HostRestored:  pick(func(s sample) float64 { return s.HostRestored }),
		OwnedStep:     pick(func(s sample) float64 { return s.OwnedStep }),
		HostStep:      pick(func(s sample) float64 { return s.HostStep }),
		StepMS:        pick(func(s sample) float64 { return s.StepMS }),
	}
}

// A case of a benchmark: a template and how many clones of it.
type benchCase struct {
	mb     int
	clones int
}

// compare measures all cases, in turn with the stock runsc and the one under
// test, once per iteration.
func compare(b *testing.B, name string, cases []benchCase) {
	stock, ours := modeStock(b), modeIdle(b)
	ours.name = "agentzip"
	images, bundles := make(map[int]string), make(map[int]string)
	sizes := make(map[int]int64)
	for _, c := range cases {
		if _, ok := images[c.mb]; ok {
			continue
		}
		bundles[c.mb] = bundle(b, "server", fmt.Sprintf("--mb=%d", c.mb*9/10), fmt.Sprintf("--tmpfs=%d", c.mb/10))
		images[c.mb], _ = makeImage(b, ours, bundles[c.mb])
		sizes[c.mb] = imageSize(b, images[c.mb])
		began := time.Now()
		if out, err := command(b, ours.binary, "agentzip", "template", "info", images[c.mb]); err != nil {
			b.Fatalf("template info: %v: %s", err, out)
		}
		b.Logf("template of %d MiB: its index took %v to make, once", sizes[c.mb]>>20, time.Since(began).Round(time.Millisecond))
	}
	rows := make([][2]*row, len(cases))
	for i, c := range cases {
		rows[i] = [2]*row{
			{Runtime: stock.name, TemplateMiB: sizes[c.mb] >> 20, Clones: c.clones},
			{Runtime: ours.name, TemplateMiB: sizes[c.mb] >> 20, Clones: c.clones},
		}
	}
	rts := [2]*runtime{newRuntime(b, stock), newRuntime(b, ours)}
	round := 0
	for b.Loop() {
		for i, c := range cases {
			for k := range 2 {
				// Neither always goes first.
				k ^= round & 1
				rows[i][k].Samples = append(rows[i][k].Samples, measure(b, rts[k], bundles[c.mb], images[c.mb], c.clones))
			}
		}
		round++
	}
	b.ReportMetric(0, "ns/op")
	report(b, name, rows)
}

func report(b *testing.B, name string, rows [][2]*row) {
	var out strings.Builder
	w := tabwriter.NewWriter(&out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(w, "template\tclones\truntime\tfirst answer, ms\tall answered, ms\towned, MiB\thost, MiB\tstep, ms\towned after it, MiB\thost after it, MiB\t\n")
	const mib = 1 << 20
	for _, pair := range rows {
		for _, r := range pair {
			fmt.Fprintf(w, "%d MiB\t%d\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t\n", r.TemplateMiB, r.Clones, r.Runtime,
				spread(r.column(func(s sample) float64 { return s.FirstMS }), 1),
				spread(r.column(func(s sample) float64 { return s.AllMS }), 1),
				spread(r.column(func(s sample) float64 { return s.OwnedRestored }), mib),
				spread(r.column(func(s sample) float64 { return s.HostRestored }), mib),
				spread(r.column(func(s sample) float64 { return s.StepMS }), 1),
				spread(r.column(func(s sample) float64 { return s.OwnedStep }), mib),
				spread(r.column(func(s sample) float64 { return s.HostStep }), mib))
		}
		s, a := pair[0], pair[1]
		ratio := func(f func(sample) float64) float64 { return median(s.column(f)) / median(a.column(f)) }
		first := ratio(func(s sample) float64 { return s.FirstMS })
		share := 100 * median(a.column(func(s sample) float64 { return s.OwnedRestored })) / float64(a.TemplateMiB<<20)
		fmt.Fprintf(w, "\t\t\t%.1fx\t%.1fx\t%.1f %% of it\t%.1fx\t%.1fx\t%.1fx\t%.1fx\t\n", first,
			ratio(func(s sample) float64 { return s.AllMS }), share,
			ratio(func(s sample) float64 { return s.HostRestored }),
			ratio(func(s sample) float64 { return s.StepMS }),
			ratio(func(s sample) float64 { return s.OwnedStep }),
			ratio(func(s sample) float64 { return s.HostStep }))
		b.ReportMetric(first, fmt.Sprintf("x-first/%dMiB/%d", a.TemplateMiB, a.Clones))
	}
	w.Flush()
	load, _ := os.ReadFile("/proc/loadavg")
	fmt.Printf("%s: medians (ranges) of %d rounds, per clone; load average %s\n%s", name, len(rows[0][0].Samples), strings.TrimSpace(string(load)), out.String())
	if *benchJSON != "" {
		var flat []*row
		for _, p := range rows {
			flat = append(flat, p[0], p[1])
		}
		writeJSON(b, *benchJSON, map[string]any{"benchmark": name, "rows": flat})
	}
}

// BenchmarkClones restores 1 to 8 clones at once of a template of 300 MiB.
func BenchmarkClones(b *testing.B) {
	compare(b, "clones", []benchCase{{300, 1}, {300, 2}, {300, 4}, {300, 8}})
}

// BenchmarkTemplateSize restores clones of templates of 100 to 600 MiB: what
// that costs must not grow with them.
func BenchmarkTemplateSize(b *testing.B) {
	compare(b, "template size", []benchCase{{100, 1}, {300, 1}, {600, 1}})
}
