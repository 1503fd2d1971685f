package report

import (
	"bytes"
	"fmt"
	"io"
	"slices"
	"strings"
	"unicode/utf8"
)

// column is a column of a table in the terminal.
type column struct {
	head string
	left bool
	// spare is the order in which columns are left out when the terminal is too
	// narrow, from 1; 0 for those that stay.
	spare int
	cells []string
}

func (c *column) width() int {
	w := utf8.RuneCountInString(c.head)
	for _, cell := range c.cells {
		w = max(w, utf8.RuneCountInString(cell))
	}
	return w
}

// printTable writes a table of at most width columns, if it can be made to fit.
// It returns the heads of the columns that it left out.
func printTable(w io.Writer, width int, columns []*column) (left []string) {
	gap := 2
	total := func() int {
		n := -gap
		for _, c := range columns {
			n += c.width() + gap
		}
		return n
	}
	if total() > width {
		gap = 1
	}
	most := slices.MaxFunc(columns, func(a, b *column) int { return a.spare - b.spare }).spare
	for next := 1; total() > width && next <= most; next++ {
		i := slices.IndexFunc(columns, func(c *column) bool { return c.spare == next })
		if i < 0 {
			continue
		}
		left = append(left, columns[i].head)
		columns = slices.Delete(slices.Clone(columns), i, i+1)
	}
	line := func(cell func(*column) string) {
		var b strings.Builder
		for i, c := range columns {
			if i > 0 {
				b.WriteString(strings.Repeat(" ", gap))
			}
			text := cell(c)
			pad := strings.Repeat(" ", c.width()-utf8.RuneCountInString(text))
			if c.left {
				b.WriteString(text + pad)
			} else {
				b.WriteString(pad + text)
			}
		}
		fmt.Fprintln(w, strings.TrimRight(b.String(), " "))
	}
	line(func(c *column) string { return c.head })
	fmt.Fprintln(w, strings.Repeat("-", total()))
	for i := range columns[0].cells {
		line(func(c *column) string { return c.cells[i] })
	}
	return left
}

// paragraph writes text wrapped at width; lines after the first are indented.
func paragraph(w io.Writer, width int, indent, text string) {
	line := ""
	for word := range strings.FieldsSeq(text) {
		switch {
		case line == "":
			line = word
		case utf8.RuneCountInString(line)+1+utf8.RuneCountInString(word) > width:
			fmt.Fprintln(w, line)
			line = indent + word
		default:
			line += " " + word
		}
	}
	fmt.Fprintln(w, line)
}

// Print writes the summary as tables for a terminal that is width columns wide.
func (r *Report) Print(out io.Writer, width int) error {
	width = max(width, 60)
	w := new(bytes.Buffer)
	if r.Error != "" {
		paragraph(w, width, "  ", "INCOMPLETE: "+r.Error)
	}
	left := []string{}
	for _, rows := range r.tables() {
		first := rows[0]
		repetitions := 0
		for _, s := range rows {
			repetitions = max(repetitions, s.Repetitions)
		}
		fmt.Fprintf(w, "\n%s, %s, %s\n", first.Workload, count(first.Clones, "clone", "clones"), count(repetitions, "repetition", "repetitions"))
		left = printTable(w, width, summaryColumns(rows))
		for _, s := range rows {
			for _, g := range s.goals() {
				line := fmt.Sprintf("%s: %s: %s", s.System, g.name, g.verdict())
				if q := s.OwnedReductionLong; g.name == "owned reduction" && q != nil {
					line += fmt.Sprintf("; in waits of %d s and more %s", LongWait, times(q.Value))
				}
				paragraph(w, width, "  ", line)
			}
		}
	}
	if len(r.Summary) == 0 {
		fmt.Fprintln(w, "nothing was measured")
	} else {
		fmt.Fprintln(w)
		legend := "owned and host: MiB per clone, mean over the waits; owned leaves the template out, host is all that a clone adds to the host (~: estimated). " +
			"less: times less than stock. Step time (sum), p99 of the steps or the slowest of less than 100, restore (median) and CPU are stock's in seconds, the others' relative to them. ±: 95 % confidence."
		if anyPooled(r.Summary) && !slices.Contains(left, "in pool") {
			legend += " in pool: the part of owned that is the clone's share of the page pool."
		}
		if !slices.Contains(left, "used") {
			legend += " used: what the host's available memory fell by, MiB per clone, mean over all the time, and times less than stock."
		}
		paragraph(w, width, "", legend)
		if len(left) > 0 {
			paragraph(w, width, "", fmt.Sprintf("A wider terminal also shows: %s.", strings.Join(left, ", ")))
		}
	}

	section := func(title string, n int, line func(i int) string) {
		const most = 8
		if n == 0 {
			return
		}
		fmt.Fprintf(w, "\n%s\n", title)
		for i := range min(n, most) {
			paragraph(w, width, "    ", "  "+line(i))
		}
		if n > most {
			fmt.Fprintf(w, "  and %d more, all in the JSON\n", n-most)
		}
	}
	section("ANSWERS THAT DIFFER: "+fmt.Sprint(len(r.Mismatches)), len(r.Mismatches), func(i int) string {
		m := r.Mismatches[i]
		return fmt.Sprintf("%s: clone %d, step %d (%s): %s answered %s, %s %s", m.Key, m.Clone, m.Index, m.Kind, m.Reference, shortened(m.Want), m.System, shortened(m.Got))
	})
	// What fails the run comes first.
	problems := slices.Clone(r.Problems)
	slices.SortStableFunc(problems, func(a, b Problem) int {
		if a.Fatal == b.Fatal {
			return 0
		}
		if a.Fatal {
			return -1
		}
		return 1
	})
	section("PROBLEMS: "+fmt.Sprint(len(problems)), len(problems), func(i int) string {
		text := problems[i].Text
		if problems[i].Fatal {
			text = "FATAL: " + text
		}
		if k := problems[i].Key; k != (Key{}) {
			text = fmt.Sprintf("%s: %s", k, text)
		}
		return text
	})
	_, err := w.WriteTo(out)
	return err
}

// tables splits the summary into the rows of each workload and number of clones.
func (r *Report) tables() [][]Summary {
	var out [][]Summary
	for i, s := range r.Summary {
		if i == 0 || s.Workload != r.Summary[i-1].Workload || s.Clones != r.Summary[i-1].Clones {
			out = append(out, nil)
		}
		out[len(out)-1] = append(out[len(out)-1], s)
	}
	return out
}

// String names an episode for people.
func (k Key) String() string {
	return fmt.Sprintf("%s, %s, %s, repetition %d", k.Workload, k.System, count(k.Clones, "clone", "clones"), k.Repetition)
}

func shortened(text []byte) string {
	const most = 120
	if runes := []rune(string(text)); len(runes) > most {
		return string(runes[:most]) + "..."
	}
	return string(text)
}

func summaryColumns(rows []Summary) []*column {
	system := &column{head: "system", left: true}
	owned := &column{head: "owned"}
	ownedLess := &column{head: "less"}
	pool := &column{head: "in pool", spare: 2}
	host := &column{head: "host"}
	hostLess := &column{head: "less"}
	step := &column{head: "step time"}
	used := &column{head: "used", spare: 1}
	p99 := &column{head: tailName(rows), spare: 5}
	restore := &column{head: "restore", spare: 4}
	cpu := &column{head: "CPU", spare: 3}
	outputs := &column{head: "outputs", left: true}
	// Reports of old know the host's only.
	hostCPU := !slices.ContainsFunc(rows, func(s Summary) bool { return s.CPUSeconds > 0 })
	if hostCPU {
		cpu.head = "host CPU"
	}
	add := func(c *column, text string) { c.cells = append(c.cells, text) }
	for _, s := range rows {
		add(system, s.System)
		estimated := ""
		if s.OwnedEstimated {
			estimated = "~"
		}
		add(owned, estimated+mib(s.OwnedBytes))
		add(pool, poolText(s))
		add(host, mib(s.HostBytes))
		// relative writes a time of stock's, or of a system that has no stock
		// to be compared with, as it is.
		relative := func(c *column, q *Ratio, value float64, interval bool) {
			if s.System == Stock || q == nil {
				add(c, seconds(value))
			} else {
				add(c, ratioText(q, interval))
			}
		}
		if s.System == Stock {
			add(ownedLess, "")
			add(hostLess, "")
		} else {
			add(ownedLess, ratioText(s.OwnedReduction, false))
			add(hostLess, ratioText(s.HostReduction, false))
		}
		if s.System == Stock || s.UsedReduction == nil {
			add(used, mib(s.UsedBytesMean))
		} else {
			add(used, mib(s.UsedBytesMean)+" "+times(s.UsedReduction.Value))
		}
		relative(step, s.StepTimeRatio, s.StepSeconds.Sum, true)
		relative(p99, s.StepP99Ratio, s.StepSeconds.P99, false)
		relative(restore, s.RestoreRatio, s.RestoreSeconds.Median, false)
		if hostCPU {
			relative(cpu, s.HostCPURatio, s.HostCPUSeconds, false)
		} else {
			relative(cpu, s.CPURatio, s.CPUSeconds, false)
		}
		add(outputs, s.outputs())
	}
	columns := []*column{system, owned, ownedLess, pool, host, hostLess, used, step, p99, restore, cpu, outputs}
	if !anyPooled(rows) {
		columns = slices.DeleteFunc(columns, func(c *column) bool { return c == pool })
	}
	return columns
}

// anyPooled says whether any of the rows' systems had a page pool.
func anyPooled(rows []Summary) bool { return slices.ContainsFunc(rows, Summary.pooled) }

func (s Summary) pooled() bool { return s.PoolShareBytes > 0 || s.PoolOutsideBytes > 0 }

// poolText is a clone's share of the page pool, or nothing without one.
func poolText(s Summary) string {
	if !s.pooled() {
		return ""
	}
	return mib(s.PoolShareBytes)
}

// tailName is what the 99th percentile of the rows' step times is called: of
// fewer than 100 it is the slowest.
func tailName(rows []Summary) string {
	if slices.ContainsFunc(rows, func(s Summary) bool { return s.StepSeconds.Count < 100 }) {
		return "slowest"
	}
	return "p99"
}
