package report

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/aclements/go-moremath/stats"
)

// significance is the chance to call noise a difference, over a whole Comparison
// in which nothing differs.
const significance = 0.05

// leastChange is the least change of times and processor times that counts as a
// difference if one of the runs has one repetition only: less may be what its one
// episode had in common, such as the machine's speed at that time.
const leastChange = 0.05

// Comparison says what differs between two runs.
type Comparison struct {
	A ComparedRun `json:"a"`
	B ComparedRun `json:"b"`
	// Warnings are what a reader must know to judge the differences.
	Warnings []string `json:"warnings"`
	// Paired: the clones of both runs took the same steps, so that each is
	// compared with itself.
	Paired  bool        `json:"paired"`
	Figures []Comparand `json:"figures"`
	// NotCompared lists what only one run has, or what cannot be compared.
	NotCompared []NotCompared     `json:"not_compared"`
	Definitions map[string]string `json:"definitions"`
}

// ComparedRun names one of the two runs.
type ComparedRun struct {
	Date    time.Time `json:"date"`
	Commit  string    `json:"commit,omitempty"`
	Machine Machine   `json:"machine"`
	Error   string    `json:"error,omitempty"`
}

// Verdict is what a comparison of one figure comes to.
type Verdict string

const (
	Better  Verdict = "better"
	Worse   Verdict = "worse"
	Same    Verdict = "same"    // no difference beyond noise
	Unknown Verdict = "unknown" // too few samples to tell
)

// Comparand is one figure of one workload, system and number of clones in both
// runs. Less is better for all of them.
type Comparand struct {
	Workload string `json:"workload"`
	System   string `json:"system"`
	Clones   int    `json:"clones"`
	Figure   string `json:"figure"`

	A float64 `json:"a"`
	B float64 `json:"b"`
	// Change is B/A-1, Interval its 95 % confidence interval.
	Change   float64   `json:"change"`
	Interval []float64 `json:"change_ci"`
	// Samples is how many clones (of all repetitions) the confidence comes from,
	// for cpu_ratio how many repetitions; the smaller number of the two runs.
	Samples int `json:"samples"`
	// P is the chance of such a difference by noise alone, and AdjustedP the
	// same in view of the number of figures compared, by which Verdict is given.
	// Both are null if Verdict is Unknown.
	P         *float64 `json:"p"`
	AdjustedP *float64 `json:"p_adjusted"`
	// MinChange is the least change that counts, besides P.
	MinChange float64 `json:"min_change,omitempty"`
	Verdict   Verdict `json:"verdict"`
}

// NotCompared is something that only one run has or that cannot be compared.
type NotCompared struct {
	Workload string `json:"workload"`
	System   string `json:"system"`
	Clones   int    `json:"clones"`
	// Figure is "" for all figures.
	Figure string `json:"figure,omitempty"`
	Reason string `json:"reason"`
}

var comparedDefinitions = map[string]string{
	"owned_bytes":     "mean memory owned per clone over all waits",
	"host_bytes":      "mean memory that a clone adds to the host over all waits",
	"step_time_ratio": "sum of step times over stock's in the same run, so that the machine's speed cancels out",
	"step_seconds":    "mean step time, if both runs lack stock",
	"step_p99_ratio":  "99th percentile of a clone's step times (of fewer than 100, the slowest) over stock's of the same clone in the same run, geometric mean over the clones",
	"restore_ratio":   "sum of restore times over stock's in the same run",
	"restore_seconds": "mean restore time, if both runs lack stock",
	"cpu_ratio":       "processor time of the sandboxes of an episode over stock's in the same run",
	"cpu_seconds":     "mean processor time of the sandboxes of an episode, if both runs lack stock",
	"p":               "t-test over clones (of each repetition; for cpu figures over repetitions) of the logarithm of the figure, whose spread is found by leaving out one clone at a time (jackknife); paired if the clones of both runs took the same steps, Welch's otherwise; clones of unequal weight count as correspondingly fewer",
	"p_adjusted":      "p after Benjamini and Hochberg's correction for the number of figures compared; below 0.05 a difference is beyond noise, of times and processor times with one repetition only if it is 5 % or more, too (min_change). Noise that a whole run or episode has in common, such as another program at that time, is not covered: repeat the runs to rule it out",
}

// estimate is the logarithm of a figure of one run, and what each unit
// contributes to it: the mean of parts is total, and their spread is that of n
// independent samples.
type estimate struct {
	total float64
	parts map[unit]float64
	// effective is how many units of equal weight would tell as much about the
	// spread.
	effective float64
}

// logRatio estimates the ratio of the sums of pairs.
func logRatio(pairs map[unit]pair) estimate {
	var all pair
	units := sortedUnits(pairs)
	for _, u := range units {
		all = pair{all.top + pairs[u].top, all.bottom + pairs[u].bottom}
	}
	e := estimate{total: math.Log(all.top / all.bottom), parts: make(map[unit]float64)}
	n := float64(len(units))
	mean, squares := 0.0, 0.0
	for _, u := range units {
		p := pairs[u]
		e.parts[u] = -(n - 1) * math.Log((all.top-p.top)/(all.bottom-p.bottom))
		mean += e.parts[u] / n
		squares += p.bottom * p.bottom
	}
	e.effective = all.bottom * all.bottom / squares
	for u := range e.parts {
		e.parts[u] += e.total - mean
	}
	return e
}

// logMean estimates the geometric mean of the pairs' ratios.
func logMean(pairs map[unit]pair) estimate {
	e := estimate{parts: make(map[unit]float64), effective: float64(len(pairs))}
	for _, u := range sortedUnits(pairs) {
		e.parts[u] = math.Log(pairs[u].top / pairs[u].bottom)
		e.total += e.parts[u] / float64(len(pairs))
	}
	return e
}

func (e estimate) list() []float64 {
	var out []float64
	for _, u := range sortedUnits(e.parts) {
		out = append(out, e.parts[u])
	}
	return out
}

func (e estimate) valid() bool {
	return !math.IsNaN(e.total) && !math.IsInf(e.total, 0) && len(e.parts) > 0
}

// perUnit sums up the samples of each unit, over their number.
func perUnit(m map[stepID]float64) map[unit]pair {
	sums := make(map[unit]pair)
	for _, id := range sortedIDs(m) {
		p := sums[id.unit]
		sums[id.unit] = pair{p.top + m[id], p.bottom + 1}
	}
	return sums
}

// slowest is the 99th percentile of each unit's step times under both systems.
func (s *samples) slowest(top, bottom group) map[unit]pair {
	out := make(map[unit]pair)
	t, b := s.pairedTimes(top, bottom)
	for u := range t {
		out[u] = pair{distribution(t[u]).P99, distribution(b[u]).P99}
	}
	return out
}

// comparable lists the figures of a group that one run can tell, by name.
func (s *samples) comparable(g group) map[string]estimate {
	out := make(map[string]estimate)
	add := func(name string, e estimate) {
		if e.valid() {
			out[name] = e
		}
	}
	of := func(value func(wait) float64) map[stepID]float64 {
		m := make(map[stepID]float64)
		for id, w := range s.waits[g] {
			m[id] = value(w)
		}
		return m
	}
	add("owned_bytes", logRatio(perUnit(of(func(w wait) float64 { return w.owned }))))
	add("host_bytes", logRatio(perUnit(of(func(w wait) float64 { return w.host }))))
	stepTimes := make(map[stepID]float64)
	for id, t := range s.steps[g] {
		stepTimes[id] = t.Seconds
	}
	add("step_seconds", logRatio(perUnit(stepTimes)))
	add("restore_seconds", logRatio(perUnit(s.restores(g))))
	add("cpu_seconds", logRatio(perUnit(s.cpu(g))))
	stock := group{g.workload, Stock, g.clones}
	if g == stock {
		return out
	}
	add("step_time_ratio", logRatio(s.stepPairs(g, stock, "")))
	add("step_p99_ratio", logMean(s.slowest(g, stock)))
	add("restore_ratio", logRatio(s.restorePairs(g, stock)))
	add("cpu_ratio", logRatio(s.cpuPairs(g, stock)))
	return out
}

// Compare says what differs between the runs a and b.
func Compare(a, b *Report) *Comparison {
	c := &Comparison{
		A: a.compared(), B: b.compared(), Warnings: []string{}, Figures: []Comparand{}, NotCompared: []NotCompared{},
		Definitions: comparedDefinitions,
	}
	sa, sb := a.samples(), b.samples()
	c.Paired = c.compareSettings(a, b, sa, sb)

	for _, g := range sa.groups {
		if !slices.Contains(sb.groups, g) {
			c.skip(g, "", "only in A")
			continue
		}
		fa, fb := sa.comparable(g), sb.comparable(g)
		once := len(sa.episodes[g]) < 2 || len(sb.episodes[g]) < 2
		stock := group{g.workload, Stock, g.clones}
		hasA, hasB := slices.Contains(sa.groups, stock), slices.Contains(sb.groups, stock)
		for _, name := range []string{"owned_bytes", "host_bytes"} {
			c.compareFigure(g, name, fa, fb, once)
		}
		switch {
		case g == stock:
			c.compareStock(g, fa, fb)
		case hasA && hasB:
			for _, name := range []string{"step_time_ratio", "step_p99_ratio", "restore_ratio", "cpu_ratio"} {
				c.compareFigure(g, name, fa, fb, once)
			}
		case hasA || hasB:
			c.skip(g, "times", fmt.Sprintf("only %s has stock to compare times with", map[bool]string{true: "A", false: "B"}[hasA]))
		default:
			c.warn("neither run has stock with workload %s and %s: times are compared as they are, and the machine's speed with them", g.workload, count(g.clones, "clone", "clones"))
			for _, name := range []string{"step_seconds", "restore_seconds", "cpu_seconds"} {
				c.compareFigure(g, name, fa, fb, once)
			}
		}
	}
	for _, g := range sb.groups {
		if !slices.Contains(sa.groups, g) {
			c.skip(g, "", "only in B")
		}
	}
	c.judge()
	return c
}

func (r *Report) compared() ComparedRun {
	return ComparedRun{Date: r.Date, Commit: r.Commit, Machine: r.Machine, Error: r.Error}
}

// warn adds a warning that is not there yet.
func (c *Comparison) warn(format string, args ...any) {
	if text := fmt.Sprintf(format, args...); !slices.Contains(c.Warnings, text) {
		c.Warnings = append(c.Warnings, text)
	}
}

func (c *Comparison) skip(g group, figure, reason string) {
	c.NotCompared = append(c.NotCompared, NotCompared{g.workload, g.system, g.clones, figure, reason})
}

// compareSettings warns of everything that makes the runs different but the
// runtime, and says whether the clones took the same steps.
func (c *Comparison) compareSettings(a, b *Report, sa, sb *samples) (same bool) {
	differs := func(what string, a, b reflect.Value) bool {
		found := false
		for i := range a.NumField() {
			name, _ := jsonName(a.Type().Field(i))
			if x, y := a.Field(i).Interface(), b.Field(i).Interface(); !reflect.DeepEqual(x, y) {
				// What was measured how often is seen in the figures.
				if name == "clones" || name == "repetitions" {
					continue
				}
				c.warn("%s differs: %s is %v in A and %v in B", what, name, x, y)
				found = true
			}
		}
		return found
	}
	for i, r := range []*Report{a, b} {
		if r.Error != "" {
			c.warn("run %c is incomplete: %s", 'A'+i, r.Error)
		}
	}
	pool := make(map[string]bool)
	for _, y := range a.Systems {
		pool[y.Name] = y.Pool
	}
	for _, y := range b.Systems {
		if had, ok := pool[y.Name]; ok && had != y.Pool {
			c.warn("the sandboxes of system %s had a page pool in %s only", y.Name, map[bool]string{true: "A", false: "B"}[had])
		}
	}
	differs("the machine", reflect.ValueOf(a.Machine), reflect.ValueOf(b.Machine))
	same = !differs("the configuration", reflect.ValueOf(a.Config), reflect.ValueOf(b.Config))
	for _, g := range sa.groups {
		for id, t := range sa.steps[g] {
			if u, ok := sb.steps[g][id]; ok && t.Kind != u.Kind {
				c.warn("the steps of workload %s differ", g.workload)
				same = false
				break
			}
		}
	}
	if !same {
		c.warn("the clones of the two runs did not do the same, so that only large differences are seen, and some of them may be differences of the work")
	}
	return same
}

// compareStock tells how much the machine's speed differs.
func (c *Comparison) compareStock(g group, fa, fb map[string]estimate) {
	x, ok := c.comparand(g, "step_seconds", fa, fb)
	if ok && x.P != nil && *x.P < 0.01 && math.Abs(x.Change) > 0.03 {
		c.warn("%s, %s: stock's own steps took %s as long in B as in A: the machine was not equally fast, which ratios to stock make up for only roughly",
			g.workload, count(g.clones, "clone", "clones"), times(1+x.Change))
	}
}

func (c *Comparison) compareFigure(g group, name string, fa, fb map[string]estimate, once bool) {
	x, ok := c.comparand(g, name, fa, fb)
	if !ok {
		_, inA := fa[name]
		_, inB := fb[name]
		if inA != inB {
			c.skip(g, name, fmt.Sprintf("only measured in %s", map[bool]string{true: "A", false: "B"}[inA]))
		}
		return
	}
	if once && !strings.HasSuffix(name, "_bytes") {
		x.MinChange = leastChange
	}
	c.Figures = append(c.Figures, x)
}

// comparand compares one figure; the verdict has to wait until all p-values are
// known.
func (c *Comparison) comparand(g group, name string, fa, fb map[string]estimate) (Comparand, bool) {
	a, inA := fa[name]
	b, inB := fb[name]
	if !inA || !inB {
		return Comparand{}, false
	}
	x := Comparand{
		Workload: g.workload, System: g.system, Clones: g.clones, Figure: name,
		A: math.Exp(a.total), B: math.Exp(b.total), Change: math.Exp(b.total-a.total) - 1,
		Samples: min(len(a.parts), len(b.parts)), Verdict: Unknown,
	}
	if x.Samples < 2 {
		return x, true
	}
	paired := c.Paired && slices.Equal(sortedUnits(a.parts), sortedUnits(b.parts))
	p, margin := test(a, b, paired)
	difference := b.total - a.total
	low, high := math.Exp(difference-margin)-1, math.Exp(difference+margin)-1
	if math.IsNaN(p) || math.IsNaN(low) || math.IsInf(high, 0) {
		return x, true
	}
	x.P, x.Interval = &p, []float64{low, high}
	return x, true
}

// test returns the probability of at least such a difference between b and a if
// there is none, and the half width of the difference's 95 % interval.
func test(a, b estimate, paired bool) (p, margin float64) {
	difference := b.total - a.total
	var deviation, dof float64
	partsA, partsB := a.list(), b.list()
	if paired {
		changes := make([]float64, len(partsA))
		for i := range changes {
			changes[i] = partsB[i] - partsA[i]
		}
		deviation = stats.StdDev(changes) / math.Sqrt(float64(len(changes)))
		dof = min(a.effective, b.effective) - 1
	} else {
		va, vb := stats.Variance(partsA)/float64(len(partsA)), stats.Variance(partsB)/float64(len(partsB))
		deviation = math.Sqrt(va + vb)
		dof = (va + vb) * (va + vb) / (va*va/(a.effective-1) + vb*vb/(b.effective-1))
	}
	switch {
	case math.Abs(difference) < 1e-9:
		// Rounding; with no noise at all it would be found significant.
		p = 1
	case deviation > 0:
		p = 2 * (1 - stats.TDist{V: max(dof, 1)}.CDF(math.Abs(difference)/deviation))
	}
	// Without noise, any other difference is one, and is known exactly.
	if deviation > 0 {
		margin = -stats.InvCDF(stats.TDist{V: max(dof, 1)})((1-confidence)/2) * deviation
	}
	return p, margin
}

// judge gives the verdicts. The p-values are corrected by Benjamini and
// Hochberg's procedure: if nothing differs, the chance that anything is found is
// significance; the figures are correlated, which it bears.
func (c *Comparison) judge() {
	var tested []*Comparand
	for i := range c.Figures {
		if c.Figures[i].P != nil {
			tested = append(tested, &c.Figures[i])
		}
	}
	slices.SortStableFunc(tested, func(a, b *Comparand) int { return cmp.Compare(*a.P, *b.P) })
	adjusted := 1.0
	for i, x := range slices.Backward(tested) {
		adjusted = min(adjusted, *x.P*float64(len(tested))/float64(i+1))
		q := adjusted
		x.AdjustedP = &q
		switch {
		case adjusted >= significance, math.Abs(x.Change) < x.MinChange:
			x.Verdict = Same
		case x.Change < 0:
			x.Verdict = Better
		default:
			x.Verdict = Worse
		}
	}
}

// Count is how many figures got a verdict.
func (c *Comparison) Count(v Verdict) int {
	n := 0
	for _, x := range c.Figures {
		if x.Verdict == v {
			n++
		}
	}
	return n
}

// Write writes the comparison as JSON. The file is replaced as a whole or not at
// all.
func (c *Comparison) Write(path string) error {
	return writeFile(path, func(w io.Writer) error {
		e := json.NewEncoder(w)
		e.SetIndent("", "  ")
		return e.Encode(c)
	})
}

// Print writes the comparison for a terminal that is width columns wide.
func (c *Comparison) Print(out io.Writer, width int) error {
	width = max(width, 60)
	w := new(bytes.Buffer)
	fmt.Fprintf(w, "A: %s\nB: %s\n", c.A, c.B)
	for _, text := range c.Warnings {
		paragraph(w, width, "  ", "note: "+text)
	}
	sameTable := func(a, b Comparand) bool { return a.Workload == b.Workload && a.Clones == b.Clones }
	var rows []Comparand
	for i, x := range c.Figures {
		rows = append(rows, x)
		if i+1 < len(c.Figures) && sameTable(x, c.Figures[i+1]) {
			continue
		}
		fmt.Fprintf(w, "\n%s, %s\n", x.Workload, count(x.Clones, "clone", "clones"))
		printTable(w, width, comparisonColumns(rows))
		rows = nil
	}
	if len(c.NotCompared) > 0 {
		fmt.Fprintln(w, "\nnot compared:")
		for _, n := range c.NotCompared {
			figure := ""
			if n.Figure != "" {
				figure = ", " + n.Figure
			}
			paragraph(w, width, "    ", fmt.Sprintf("  %s, %s, %s%s: %s", n.Workload, n.System, count(n.Clones, "clone", "clones"), figure, n.Reason))
		}
	}
	fmt.Fprintln(w)
	if len(c.Figures) == 0 {
		fmt.Fprintln(w, "the runs have nothing in common")
	} else {
		line := fmt.Sprintf("of %s, B is worse in %d and better in %d; no difference beyond noise in %d",
			count(len(c.Figures), "figure", "figures"), c.Count(Worse), c.Count(Better), c.Count(Same))
		if n := c.Count(Unknown); n > 0 {
			line += fmt.Sprintf("; too few samples to tell in %d", n)
		}
		paragraph(w, width, "  ", line)
		paragraph(w, width, "", "Less is better for every figure; times are relative to stock's in the same run unless in seconds. p is corrected for the number of figures; "+
			"beyond noise means p < 0.05, and for times and CPU with one repetition a change of 5 % or more. Noise common to a whole episode or run is not in p.")
	}
	_, err := w.WriteTo(out)
	return err
}

func (r ComparedRun) String() string {
	commit := r.Commit
	if commit == "" {
		commit = "unknown"
	}
	return fmt.Sprintf("%s, commit %s, %s, %d CPUs, %s", r.Date.Format("2006-01-02 15:04"), commit, r.Machine.CPU, r.Machine.CPUs, r.Machine.Kernel)
}

// comparedNames are the figures as people read them.
var comparedNames = map[string]string{
	"owned_bytes": "owned MiB", "host_bytes": "host MiB", "step_time_ratio": "step time", "step_seconds": "step time, s",
	"step_p99_ratio": "slow steps", "restore_ratio": "restore", "restore_seconds": "restore, s", "cpu_ratio": "CPU", "cpu_seconds": "CPU, s",
}

func comparisonColumns(rows []Comparand) []*column {
	system, figure := &column{head: "system", left: true}, &column{head: "figure", left: true}
	a, b, change := &column{head: "A"}, &column{head: "B"}, &column{head: "change"}
	interval, p := &column{head: "95 % interval", spare: 1}, &column{head: "p"}
	verdict := &column{head: "", left: true}
	add := func(c *column, text string) { c.cells = append(c.cells, text) }
	last := ""
	for _, x := range rows {
		if x.System == last {
			add(system, "")
		} else {
			add(system, x.System)
		}
		last = x.System
		add(figure, comparedNames[x.Figure])
		format := times
		switch {
		case strings.HasSuffix(x.Figure, "_bytes"):
			format = mib
		case strings.HasSuffix(x.Figure, "_seconds"):
			format = digits
		}
		add(a, format(x.A))
		add(b, format(x.B))
		add(change, percent(x.Change))
		if x.P == nil {
			add(interval, "")
			add(p, "")
			add(verdict, "too few samples")
			continue
		}
		add(interval, percent(x.Interval[0])+" .. "+percent(x.Interval[1]))
		if *x.AdjustedP < 0.001 {
			add(p, "<0.001")
		} else {
			add(p, fmt.Sprintf("%.3f", *x.AdjustedP))
		}
		switch {
		case x.Verdict == Same && *x.AdjustedP < significance:
			add(verdict, "below 5 %")
		default:
			add(verdict, map[Verdict]string{Better: "better", Worse: "WORSE", Same: "no difference"}[x.Verdict])
		}
	}
	return []*column{system, figure, a, b, change, interval, p, verdict}
}

func percent(v float64) string {
	switch a := math.Abs(100 * v); {
	case a < 0.05:
		return "0 %"
	case a < 99.95:
		return fmt.Sprintf("%+.1f %%", 100*v)
	}
	return fmt.Sprintf("%+.0f %%", 100*v)
}
