package report

import (
	_ "embed"
	"encoding/json"
	"fmt"
	"html/template"
	"io"
	"maps"
	"math"
	"slices"
	"strings"
)

var (
	//go:embed page.html.tmpl
	pageTemplate string
	//go:embed page.css
	pageStyle string
	//go:embed page.js
	pageScript string
)

// page is what the template shows.
type page struct {
	*Report
	Style  template.CSS
	Script template.JS

	Systems  []pageSystem
	Tiles    []tile
	Goals    []pageGoal
	Sections []section
	Tables   [][]Summary
	// Fatal and Notes are Problems by gravity.
	Fatal, Notes []Problem
	// More is how many mismatches are not shown.
	More        int
	Definitions []definition
}

type pageSystem struct {
	System
	Class string
}

type tile struct {
	Name, Value, Text string
	// Class is "good" or "behind" for figures that have a goal, or "bad".
	Class string
}

// pageGoal is one goal for one row, with the places on a bar in percent.
type pageGoal struct {
	Workload         string
	Clones           int
	Name, Verdict    string
	Met              bool
	Value, Low, High float64
	Goal             float64
	Measured         bool
}

// section is a heading and charts, for each number of clones if it matters.
type section struct {
	ID, Title, Text string
	Views           []view
}

type view struct {
	Clones int
	Charts []*chart
}

type definition struct{ Name, Text string }

// mostMismatches is how many differing answers the page shows.
const mostMismatches = 20

// WriteHTML writes the report as one page that needs nothing else. The file is
// replaced as a whole or not at all.
func (r *Report) WriteHTML(path string) error {
	return writeFile(path, r.html)
}

func (r *Report) html(w io.Writer) error {
	t, err := template.New("page").Funcs(template.FuncMap{
		"mib": mib, "micros": func(ns float64) string { return digits(ns/1000) + " µs" }, "size": func(n uint64) string { return size(float64(n)) }, "seconds": seconds, "elapsed": elapsed, "times": times, "margin": margin, "interval": intervalText,
		"count": count, "short": func(b json.RawMessage) string { return shortened(b) }, "join": strings.Join,
		"json":    func(v any) (string, error) { b, err := json.Marshal(v); return string(b), err },
		"tail":    tailName,
		"outputs": func(s Summary) string { return s.outputs() },
		"pooled":  anyPooled, "pool": poolText,
		"foreseen": foreseen, "inPercent": inPercent,
		"class": r.drawing().classOf, "kinds": kindNames, "chartWidth": func() float64 { return chartWidth },
	}).Parse(pageTemplate)
	if err != nil {
		return err
	}
	return t.Execute(w, r.page())
}

func (d *drawing) classOf(system string) string { return d.class[system] }

func kindNames(rows []Summary) []string {
	names := make(map[string]bool)
	for _, s := range rows {
		for kind := range s.Kinds {
			names[kind] = true
		}
	}
	return slices.Sorted(maps.Keys(names))
}

// A foresight is how well steps of a kind were foreseen.
type foresight struct {
	System, Kind, By string
	*PrefetchSummary
}

// foreseen lists what is known of it.
func foreseen(rows []Summary) (list []foresight) {
	for _, s := range rows {
		for _, kind := range slices.Sorted(maps.Keys(s.Kinds)) {
			if p := s.Kinds[kind].Prefetch; p != nil {
				list = append(list, foresight{s.System, kind, "own steps", p})
			}
			if p := s.Kinds[kind].Siblings; p != nil {
				list = append(list, foresight{s.System, kind, "siblings'", p})
			}
		}
	}
	return list
}

func inPercent(v *float64) string {
	if v == nil {
		return "-"
	}
	return fmt.Sprintf("%.0f %%", 100**v)
}

func (r *Report) page() *page {
	d := r.drawing()
	p := &page{Report: r, Style: template.CSS(pageStyle), Script: template.JS(pageScript), Tables: r.pageTables()}
	known := make(map[string]System)
	for _, y := range r.Systems {
		known[y.Name] = y
	}
	for _, name := range d.order {
		y := known[name]
		y.Name = name
		p.Systems = append(p.Systems, pageSystem{y, d.class[name]})
	}
	for _, problem := range r.Problems {
		if problem.Fatal {
			p.Fatal = append(p.Fatal, problem)
		} else {
			p.Notes = append(p.Notes, problem)
		}
	}
	p.More = max(0, len(r.Mismatches)-mostMismatches)
	p.Tiles = r.tiles()
	p.Goals = r.pageGoals()
	if len(r.Summary) > 0 && !slices.ContainsFunc(r.Systems, func(y System) bool { return y.Name == Stock }) {
		p.Goals = nil
		p.Notes = append(p.Notes, Problem{Text: "The run lacks stock: there is nothing to compare the systems with, and no goal can be judged."})
	}
	p.Sections = d.sections()
	for _, name := range slices.Sorted(maps.Keys(r.Definitions)) {
		p.Definitions = append(p.Definitions, definition{name, r.Definitions[name]})
	}
	return p
}

// Shown are the mismatches that the page shows.
func (p *page) Shown() []Mismatch { return p.Mismatches[:len(p.Mismatches)-p.More] }

// pageTables are the rows of the tables. Stock is not compared with itself.
func (r *Report) pageTables() [][]Summary {
	tables := r.tables()
	for _, rows := range tables {
		for i := range rows {
			s := &rows[i]
			if s.System != Stock {
				continue
			}
			s.OwnedReduction, s.HostReduction, s.OwnedReductionLong, s.UsedReduction = nil, nil, nil, nil
			s.StepTimeRatio, s.StepP99Ratio, s.RestoreRatio, s.CPURatio, s.HostCPURatio = nil, nil, nil, nil, nil
			s.Kinds = maps.Clone(s.Kinds)
			for name, kind := range s.Kinds {
				kind.Ratio = nil
				s.Kinds[name] = kind
			}
		}
	}
	return tables
}

// tiles are the figures that a reader looks for first: those of the judged
// system, as geometric means over workloads and numbers of clones.
func (r *Report) tiles() []tile {
	var out []tile
	add := func(name, suffix string, of func(Summary) *Ratio, class func(float64) string) {
		var logs []float64
		low, high := math.Inf(1), math.Inf(-1)
		for _, s := range r.Summary {
			if q := of(s); s.System == judged && q != nil && q.Value > 0 {
				logs = append(logs, math.Log(q.Value))
				low, high = min(low, q.Value), max(high, q.Value)
			}
		}
		if len(logs) == 0 {
			return
		}
		v := math.Exp(mean(logs))
		text := suffix
		if len(logs) > 1 {
			text += fmt.Sprintf("; %s to %s", times(low), times(high))
		}
		out = append(out, tile{name, times(v), text, class(v)})
	}
	none := func(float64) string { return "" }
	goalClass := func(met func(float64) bool) func(float64) string {
		return func(v float64) string {
			if met(v) {
				return "good"
			}
			return "behind"
		}
	}
	add("Owned memory", fmt.Sprintf("less than stock, goal %.3gx", GoalOwnedReduction), func(s Summary) *Ratio { return s.OwnedReduction },
		goalClass(func(v float64) bool { return v >= GoalOwnedReduction }))
	add("Host memory", "less than stock, everything counted", func(s Summary) *Ratio { return s.HostReduction }, none)
	add("Step time", fmt.Sprintf("of stock's, goal %.3gx", GoalStepTimeRatio), func(s Summary) *Ratio { return s.StepTimeRatio },
		goalClass(func(v float64) bool { return v <= GoalStepTimeRatio }))
	add("Restore", "of stock's time to the first answer", func(s Summary) *Ratio { return s.RestoreRatio }, none)

	compared, differ, missing := 0, 0, 0
	for _, s := range r.Summary {
		compared, differ, missing = compared+s.Compared, differ+s.Differ, missing+s.Missing
	}
	switch {
	case differ > 0:
		out = append(out, tile{"Answers", fmt.Sprint(differ), fmt.Sprintf("differ, of %d compared", compared), "bad"})
	case missing > 0:
		out = append(out, tile{"Answers", fmt.Sprint(missing), fmt.Sprintf("missing; %d compared are equal", compared), "behind"})
	case compared > 0:
		out = append(out, tile{"Answers", "equal", fmt.Sprintf("all %d, in every system", compared), "good"})
	}
	return out
}

func (r *Report) pageGoals() []pageGoal {
	var out []pageGoal
	for _, s := range r.Summary {
		for i, g := range s.goals() {
			x := pageGoal{Workload: s.Workload, Clones: s.Clones, Name: g.name, Verdict: g.brief(), Met: g.met}
			if q := g.measured; q != nil {
				x.Measured = true
				end, aim := GoalOwnedReduction*1.5, GoalOwnedReduction
				start := 0.0
				if i == 1 {
					start, end, aim = 0.9, 1.8, GoalStepTimeRatio
				}
				place := func(v float64) float64 { return math.Round(1000*min(max((v-start)/(end-start), 0), 1)) / 10 }
				x.Value, x.Goal = place(q.Value), place(aim)
				x.Low, x.High = x.Value, x.Value
				if q.HasInterval() {
					x.Low, x.High = place(q.Low), place(q.High)
				}
			}
			out = append(out, x)
		}
	}
	return out
}

func (d *drawing) sections() []section {
	var workloads []string
	var numbers []int
	for _, s := range d.report.Summary {
		if !slices.Contains(workloads, s.Workload) {
			workloads = append(workloads, s.Workload)
		}
		numbers = append(numbers, s.Clones)
	}
	slices.Sort(numbers)
	numbers = slices.Compact(numbers)
	// The largest number of clones comes first: it is the one that matters.
	slices.Reverse(numbers)
	perNumber := func(draw func(string, int) *chart) []view {
		var views []view
		for _, n := range numbers {
			v := view{Clones: n}
			for _, w := range workloads {
				if c := draw(w, n); c != nil {
					v.Charts = append(v.Charts, c)
				}
			}
			if len(v.Charts) > 0 {
				views = append(views, v)
			}
		}
		return views
	}
	owned := view{}
	for _, w := range workloads {
		if c := d.ownedAgainstClones(w); c != nil {
			owned.Charts = append(owned.Charts, c)
		}
	}
	sections := []section{
		{"timeline", "Memory over time", "What all sandboxes together add to the host while they wait and work, by the memory the host has available; the first repetition of each system.", perNumber(d.timeline)},
		{"owned", "Owned memory against the number of clones", "What has to be kept for one clone beyond the template, mean over its waits.", []view{owned}},
		{"latency", "Step times", "The part of all steps that was answered within a time; dots: half, 95 % and 99 %. A line further left is quicker.", perNumber(d.latency)},
		{"kinds", "Step times by kind of step", "", perNumber(d.kinds)},
		{"ablation", "What each part is good for", "Owned memory per clone and step time with one part of the runtime switched off.", perNumber(d.ablations)},
		{"restore", "Restore", "From the restore command to the first answer; the clones of an episode are restored one after the other.", perNumber(d.restores)},
	}
	return slices.DeleteFunc(sections, func(s section) bool { return len(s.Views) == 0 || len(s.Views[0].Charts) == 0 })
}
