package report

import (
	"cmp"
	"fmt"
	"math"
	"slices"
)

// The charts of the page. Each function returns one chart for a workload and a
// number of clones, nil if there is nothing to draw.

// drawing is what all charts are drawn from.
type drawing struct {
	report  *Report
	samples *samples
	// class is the CSS class of each system, order their order.
	class map[string]string
	order []string
	// free counts the systems that have no fixed colour.
	free int
	// ablation systems are left out of charts that are not about them.
	ablation map[string]bool
}

func (r *Report) drawing() *drawing {
	d := &drawing{report: r, samples: r.samples(), class: make(map[string]string), ablation: make(map[string]bool)}
	for _, y := range r.Systems {
		d.add(y.Name)
		d.ablation[y.Name] = y.Ablation != ""
	}
	for _, g := range d.samples.groups {
		d.add(g.system)
	}
	return d
}

// colors is how many CSS classes of colours there are; the first are those of
// the systems that most runs have, so that pages can be compared.
const colors = 9

var fixedColors = map[string]int{Stock: 0, "linux": 1, judged: 2}

func (d *drawing) add(system string) {
	if d.class[system] != "" {
		return
	}
	i, ok := fixedColors[system]
	if !ok {
		n := len(fixedColors)
		i = n + d.free%(colors-n)
		d.free++
	}
	d.class[system] = fmt.Sprintf("s%d", i)
	d.order = append(d.order, system)
}

// groups lists the systems' groups that have something to draw. If whole is set,
// ablated systems are left out unless there is no other.
func (d *drawing) groups(workload string, clones int, whole bool, has func(group) bool) []group {
	var out, ablated []group
	for _, system := range d.order {
		g := group{workload, system, clones}
		switch {
		case !has(g):
		case whole && d.ablation[system]:
			ablated = append(ablated, g)
		default:
			out = append(out, g)
		}
	}
	if len(out) == 0 {
		return ablated
	}
	return out
}

// line adds a system's line to a chart.
func (d *drawing) line(c *chart, system string, line *polyline) {
	class := d.class[system]
	if system == judged {
		class += " judged"
	}
	c.Lines = append(c.Lines, path{line.String(), class})
}

// upwards is the order to draw lines in: ablated systems lie below the whole ones.
func (d *drawing) upwards(groups []group) []group {
	out := slices.Clone(groups)
	slices.SortStableFunc(out, func(a, b group) int {
		return cmp.Compare(d.height(a.system), d.height(b.system))
	})
	return out
}

func (d *drawing) height(system string) int {
	switch {
	case system == judged:
		return 2
	case d.ablation[system]:
		return 0
	}
	return 1
}

// timelineBins is how many values of a timeline are drawn.
const timelineBins = 150

// timeline draws the memory that all clones add to the host, over the first
// repetition of each system.
func (d *drawing) timeline(workload string, clones int) *chart {
	first := make(map[group][]Point)
	for _, p := range d.report.Timeline {
		g := p.group()
		if have := first[g]; len(have) > 0 && have[0].Repetition < p.Repetition {
			continue
		} else if len(have) > 0 && have[0].Repetition > p.Repetition {
			first[g] = nil
		}
		first[g] = append(first[g], p)
	}
	groups := d.groups(workload, clones, false, func(g group) bool { return len(first[g]) > 1 })
	if len(groups) == 0 {
		return nil
	}
	end, most := 0.0, 0.0
	for _, g := range groups {
		for _, p := range first[g] {
			end = max(end, p.At)
		}
	}
	if end == 0 {
		return nil
	}
	c := &chart{Title: workload, Height: 240, Label: fmt.Sprintf("Memory over time of %s with %d clones, one line for each system", workload, clones)}
	binned := make(map[group][]*float64)
	for _, g := range groups {
		binned[g] = bin(first[g], end)
		for _, v := range binned[g] {
			if v != nil {
				most = max(most, *v)
			}
		}
	}
	left, right := c.plotX()
	bottom, top := c.plotY()
	unit, divisor := "MiB", 1.0
	if most >= 4096 {
		unit, divisor = "GiB", 1024
	}
	x, y := scale{min: 0, max: end, from: left, to: right}, upTo(most/divisor, bottom, top)
	c.Note = unit
	if clones > 1 {
		c.Note = fmt.Sprintf("%s, all %d clones together", unit, clones)
	}
	c.yAxis(y, plain)
	c.xAxis(x, plain, "seconds")
	c.Hover = &hover{Left: left, Top: top, Width: right - left, Height: bottom - top, Max: end}
	for _, g := range groups {
		c.Hover.Series = append(c.Hover.Series, hoverSeries{g.system, d.class[g.system], binned[g]})
	}
	for _, g := range d.upwards(groups) {
		var line polyline
		for i, v := range binned[g] {
			if v != nil {
				line.to(x.at((float64(i)+0.5)/timelineBins*end), y.at(*v/divisor))
			}
		}
		d.line(c, g.system, &line)
	}
	return c
}

// bin averages readings in MiB; nil where there are none. Gaps inside take the
// value before them.
func bin(points []Point, end float64) []*float64 {
	sums, counts := make([]float64, timelineBins), make([]float64, timelineBins)
	last := 0
	for _, p := range points {
		i := min(int(p.At/end*timelineBins), timelineBins-1)
		sums[i] += float64(p.UsedBytes) / (1 << 20)
		counts[i]++
		last = max(last, i)
	}
	out := make([]*float64, timelineBins)
	for i := range out[:last+1] {
		switch {
		case counts[i] > 0:
			v := math.Round(sums[i]/counts[i]*10) / 10
			out[i] = &v
		case i > 0:
			out[i] = out[i-1]
		}
	}
	return out
}

// ownedAgainstClones draws owned memory per clone for every number of clones.
func (d *drawing) ownedAgainstClones(workload string) *chart {
	rows := make(map[string][]Summary)
	var numbers []int
	most := 0.0
	for _, s := range d.report.Summary {
		if s.Workload == workload && s.OwnedBytes > 0 {
			rows[s.System] = append(rows[s.System], s)
			most = max(most, s.OwnedBytes/(1<<20))
			numbers = append(numbers, s.Clones)
		}
	}
	if len(rows) == 0 {
		return nil
	}
	slices.Sort(numbers)
	numbers = slices.Compact(numbers)
	c := &chart{Title: workload, Height: 240, Label: fmt.Sprintf("Owned memory per clone of %s against the number of clones", workload)}
	tip := func(s Summary) string {
		text := fmt.Sprintf("%s, %s: %s MiB owned per clone", s.System, count(s.Clones, "clone", "clones"), mib(s.OwnedBytes))
		if s.OwnedEstimated {
			text += " (estimated)"
		}
		if s.pooled() {
			text += fmt.Sprintf(", of it %s MiB in the page pool", mib(s.PoolShareBytes))
		}
		if s.System != Stock && s.OwnedReduction != nil {
			text += ", " + times(s.OwnedReduction.Value) + " less than stock"
		}
		return text
	}
	left, right := c.plotX()
	bottom, top := c.plotY()
	y := upTo(most, bottom, top)
	c.Note = "MiB per clone"
	c.yAxis(y, plain)
	// Numbers of clones double; they stand at equal distances, with room for
	// the bars of one.
	place := func(n int) float64 {
		i := float64(slices.Index(numbers, n))
		return left + (right-left)*(i+0.5)/float64(len(numbers))
	}
	for _, n := range numbers {
		c.Labels = append(c.Labels, label{place(n), bottom + 15, fmt.Sprint(n), "middle", "tick"})
	}
	c.Labels = append(c.Labels, label{(left + right) / 2, c.Height - 4, "clones", "middle", "title"})
	if len(numbers) == 1 {
		var systems []string
		for _, system := range d.order {
			if rows[system] != nil {
				systems = append(systems, system)
			}
		}
		slot := min((right-left)/float64(len(systems)), 70)
		start := (left+right)/2 - slot*float64(len(systems))/2
		for i, system := range systems {
			s := rows[system][0]
			at := y.at(s.OwnedBytes / (1 << 20))
			bx := start + slot*float64(i) + slot*0.12
			// The share of the pool is the lower part of the bar, if there is any.
			base := y.at(min(s.PoolShareBytes, s.OwnedBytes) / (1 << 20))
			c.Rects = append(c.Rects, rect{bx, at, slot * 0.76, base - at, d.class[system], tip(s)})
			if base < bottom {
				c.Note = "MiB per clone; pale: share of the page pool"
				c.Rects = append(c.Rects, rect{bx, base, slot * 0.76, bottom - base, d.class[system] + " pool", tip(s)})
			}
			c.Labels = append(c.Labels, label{bx + slot*0.38, at - 4, mib(s.OwnedBytes), "middle", "value"})
		}
		return c
	}
	for _, system := range d.order {
		var line polyline
		for _, s := range rows[system] {
			px, py := place(s.Clones), y.at(s.OwnedBytes/(1<<20))
			line.to(px, py)
			c.Dots = append(c.Dots, dot{px, py, 4, d.class[system], tip(s)})
		}
		if line.Len() > 0 {
			d.line(c, system, &line)
		}
	}
	return c
}

// stepTimes is the sorted times of a group's steps; kind "" is all of them.
func (d *drawing) stepTimes(g group, kind string) []float64 {
	var out []float64
	for _, t := range d.samples.steps[g] {
		if t.Seconds > 0 && (kind == "" || t.Kind == kind) {
			out = append(out, t.Seconds)
		}
	}
	slices.Sort(out)
	return out
}

// timeScale is a logarithmic scale for step times.
func (d *drawing) timeScale(groups []group, from, to float64) scale {
	low, high := math.Inf(1), 0.0
	for _, g := range groups {
		t := d.stepTimes(g, "")
		low, high = min(low, t[0]), max(high, t[len(t)-1])
	}
	if high < low*2 {
		low, high = low/2, high*2
	}
	return scale{min: low, max: high, from: from, to: to, log: true}
}

func (d *drawing) hasSteps(g group) bool { return len(d.stepTimes(g, "")) > 0 }

// latency draws the distribution of step times.
func (d *drawing) latency(workload string, clones int) *chart {
	groups := d.groups(workload, clones, true, d.hasSteps)
	if len(groups) == 0 {
		return nil
	}
	c := &chart{Title: workload, Height: 240, Note: "steps that took at most so long",
		Label: fmt.Sprintf("Distribution of step times of %s with %d clones", workload, clones)}
	left, right := c.plotX()
	bottom, top := c.plotY()
	x, y := d.timeScale(groups, left, right), scale{min: 0, max: 1, from: bottom, to: top}
	c.yAxis(y, func(v float64) string { return fmt.Sprintf("%.0f%%", 100*v) })
	c.xAxis(x, tickSeconds, "step time")
	for _, g := range groups {
		t := d.stepTimes(g, "")
		var line polyline
		line.to(x.at(t[0]), y.at(0))
		n := min(len(t), 200)
		before := y.at(0)
		for i := range n {
			q := float64(i+1) / float64(n)
			v := quantile(t, q)
			line.to(x.at(v), before)
			before = y.at(q)
			line.to(x.at(v), before)
		}
		line.to(right, y.at(1))
		d.line(c, g.system, &line)
		for _, q := range []float64{0.5, 0.95, 0.99} {
			v := quantile(t, q)
			c.Dots = append(c.Dots, dot{x.at(v), y.at(q), 3.5, d.class[g.system],
				fmt.Sprintf("%s: %s of the steps took at most %s", g.system, map[float64]string{0.5: "half", 0.95: "95 %", 0.99: "99 %"}[q], seconds(v))})
		}
	}
	return c
}

func tickSeconds(v float64) string {
	if v < 0.999 {
		return plain(v*1e3) + " ms"
	}
	return plain(v) + " s"
}

// kinds draws the spread of step times of each kind of step.
func (d *drawing) kinds(workload string, clones int) *chart {
	groups := d.groups(workload, clones, true, d.hasSteps)
	if len(groups) == 0 {
		return nil
	}
	seen := make(map[string]float64)
	for _, g := range groups {
		for _, t := range d.samples.steps[g] {
			seen[t.Kind] = 0
		}
	}
	var names []string
	for kind := range seen {
		// From the quickest kind to the slowest, by the first system.
		seen[kind] = quantile(d.stepTimes(groups[0], kind), 0.5)
		names = append(names, kind)
	}
	slices.SortFunc(names, func(a, b string) int {
		if seen[a] != seen[b] {
			if seen[a] < seen[b] {
				return -1
			}
			return 1
		}
		if a < b {
			return -1
		}
		return 1
	})
	const row, space, before = 13.0, 12.0, 76.0
	block := row*float64(len(groups)) + space
	c := &chart{Title: workload, Height: marginTop + block*float64(len(names)) + marginBottom, Note: "box: middle half; whiskers: 5 to 95 %",
		Label: fmt.Sprintf("Step times of %s with %d clones by kind of step", workload, clones)}
	_, right := c.plotX()
	x := d.timeScale(groups, before, right)
	c.xAxis(x, tickSeconds, "step time")
	for i, kind := range names {
		y := marginTop + block*float64(i) + space/2
		c.Labels = append(c.Labels, label{before - 10, y + row*float64(len(groups))/2 + 4, clip(kind, 11), "end", "name"})
		if i > 0 {
			c.Grid = append(c.Grid, segment{0, y - space/2, right, y - space/2, "grid"})
		}
		for j, g := range groups {
			t := d.stepTimes(g, kind)
			if len(t) == 0 {
				continue
			}
			class, middle := d.class[g.system], y+row*(float64(j)+0.5)
			q := func(q float64) float64 { return x.at(quantile(t, q)) }
			tip := fmt.Sprintf("%s, %s: median %s, 95 %% %s, longest %s; %s", g.system, kind, seconds(quantile(t, 0.5)), seconds(quantile(t, 0.95)), seconds(t[len(t)-1]), count(len(t), "step", "steps"))
			c.Grid = append(c.Grid, segment{q(0.05), middle, q(0.95), middle, "whisker " + class})
			c.Rects = append(c.Rects, rect{q(0.25), middle - 4, max(q(0.75)-q(0.25), 1), 8, "box " + class, tip})
			c.Grid = append(c.Grid, segment{q(0.5), middle - 5.5, q(0.5), middle + 5.5, "median " + class})
		}
	}
	return c
}

func clip(s string, n int) string {
	if r := []rune(s); len(r) > n {
		return string(r[:n-1]) + "…"
	}
	return s
}

// ablations draws what each part of the runtime is good for: owned memory and
// step time with that part switched off.
func (d *drawing) ablations(workload string, clones int) *chart {
	var rows []Summary
	found := false
	for _, s := range d.report.Summary {
		if s.Workload == workload && s.Clones == clones && (s.System == judged || d.ablation[s.System]) {
			rows = append(rows, s)
			found = found || d.ablation[s.System]
		}
	}
	if !found {
		return nil
	}
	const row, before, gap, value = 26.0, 128.0, 20.0, 46.0
	c := &chart{Title: workload, Height: 30 + row*float64(len(rows)) + 8,
		Label: fmt.Sprintf("Owned memory and step time of %s with %d clones, with parts of the runtime switched off", workload, clones)}
	width := (chartWidth - before - gap) / 2
	ownedMost, stepMost := 0.0, 0.0
	relative := true
	for _, s := range rows {
		relative = relative && s.StepTimeRatio != nil
	}
	step := func(s Summary) float64 {
		if relative {
			return s.StepTimeRatio.Value
		}
		return s.StepSeconds.Sum
	}
	for _, s := range rows {
		ownedMost, stepMost = max(ownedMost, s.OwnedBytes), max(stepMost, step(s))
	}
	ownedScale := scale{min: 0, max: max(ownedMost, 1), from: before, to: before + width - value}
	stepStart := before + width + gap
	stepScale := scale{min: 0, max: max(stepMost, 1e-9), from: stepStart, to: stepStart + width - value}
	stepTitle := "step time, stock = 1"
	if !relative {
		stepTitle = "step time, sum"
	}
	ownedTitle := "owned, MiB"
	if anyPooled(rows) {
		ownedTitle = "owned, MiB; pale: in the pool"
	}
	c.Labels = append(c.Labels, label{before, 16, ownedTitle, "start", "title"}, label{stepStart, 16, stepTitle, "start", "title"})
	for i, s := range rows {
		y := 30 + row*float64(i)
		class := d.class[s.System]
		name := "name"
		if s.System == judged {
			name = "name whole"
		}
		c.Labels = append(c.Labels, label{before - 10, y + 13, clip(s.System, 22), "end", name})
		// What is in the page pool comes first.
		ownedTip := fmt.Sprintf("%s: %s MiB owned per clone, %s less than stock", s.System, mib(s.OwnedBytes), ratioText(s.OwnedReduction, true))
		ownedStart := before
		if s.pooled() {
			ownedTip += fmt.Sprintf(", of it %s MiB in the page pool", mib(s.PoolShareBytes))
			ownedStart = ownedScale.at(min(s.PoolShareBytes, s.OwnedBytes))
			c.Rects = append(c.Rects, rect{before, y, ownedStart - before, 18, class + " pool", ownedTip})
		}
		c.Rects = append(c.Rects, rect{ownedStart, y, max(ownedScale.at(s.OwnedBytes)-ownedStart, 1), 18, class, ownedTip})
		c.Labels = append(c.Labels, label{ownedScale.at(s.OwnedBytes) + 5, y + 13, mib(s.OwnedBytes), "start", "value"})
		text := seconds(step(s))
		tip := fmt.Sprintf("%s: %s for all steps", s.System, text)
		if relative {
			text = times(s.StepTimeRatio.Value)
			tip = fmt.Sprintf("%s: steps take %s as long as stock's. %s", s.System, times(s.StepTimeRatio.Value), intervalText(s.StepTimeRatio))
		}
		c.Rects = append(c.Rects, rect{stepStart, y, max(stepScale.at(step(s))-stepStart, 1), 18, class, tip})
		c.Labels = append(c.Labels, label{stepScale.at(step(s)) + 5, y + 13, text, "start", "value"})
	}
	if relative && stepMost > 1 {
		c.Grid = append(c.Grid, segment{stepScale.at(1), 24, stepScale.at(1), c.Height - 6, "reference"})
	}
	return c
}

// restores draws how long each clone took to its first answer.
func (d *drawing) restores(workload string, clones int) *chart {
	groups := d.groups(workload, clones, false, func(g group) bool { return len(d.samples.restores(g)) > 0 })
	if len(groups) == 0 {
		return nil
	}
	const row, before = 24.0, 128.0
	c := &chart{Title: workload, Height: marginTop + row*float64(len(groups)) + marginBottom, Note: "a dot for each clone; line: median",
		Label: fmt.Sprintf("Restore times of %s with %d clones", workload, clones)}
	_, right := c.plotX()
	bottom, top := c.plotY()
	most := 0.0
	for _, g := range groups {
		for _, v := range d.samples.restores(g) {
			most = max(most, v)
		}
	}
	x := upTo(most, before, right)
	for _, v := range x.ticks(4) {
		c.Grid = append(c.Grid, segment{x.at(v), top, x.at(v), bottom, "grid"})
		c.Labels = append(c.Labels, label{x.at(v), bottom + 15, plain(v), "middle", "tick"})
	}
	c.Labels = append(c.Labels, label{(before + right) / 2, c.Height - 4, "seconds to the first answer", "middle", "title"})
	for i, g := range groups {
		y := marginTop + row*(float64(i)+0.5)
		c.Labels = append(c.Labels, label{before - 10, y + 4, clip(g.system, 22), "end", "name"})
		restores := d.samples.restores(g)
		for _, id := range sortedIDs(restores) {
			v := restores[id]
			// Dots at the same place are spread a little.
			spread := float64(id.clone%5-2) * 2
			c.Dots = append(c.Dots, dot{x.at(v), y + spread, 3, "faint " + d.class[g.system],
				fmt.Sprintf("%s, repetition %d, clone %d: %s", g.system, id.repetition, id.clone, seconds(v))})
		}
		median := distribution(inOrder(restores)).Median
		c.Grid = append(c.Grid, segment{x.at(median), y - 9, x.at(median), y + 9, "median " + d.class[g.system]})
	}
	return c
}
