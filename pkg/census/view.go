package census

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"runsc-agentzip/pkg/control"
)

// Key is what the rows of a View are sorted by.
type Key string

// The keys: ID ascending, the others descending. Sandboxes that have not answered come
// last, except by ID.
const (
	ByOwned  Key = "owned"
	ByGuest  Key = "guest"
	ByRatio  Key = "ratio"
	ByFaults Key = "faults"
	ByID     Key = "id"
)

// Keys are all keys.
var Keys = []Key{ByOwned, ByGuest, ByRatio, ByFaults, ByID}

// ParseKey returns the key with a name.
func ParseKey(name string) (Key, error) {
	if k := Key(name); slices.Contains(Keys, k) {
		return k, nil
	}
	return "", fmt.Errorf("cannot sort by %q: there are owned, guest, ratio, faults and id", name)
}

// View shows a census as lines of text.
type View struct {
	// Width is how many columns there are. 0 is no limit: everything is shown.
	Width int
	// Height is how many lines there are, 0 is no limit.
	Height int
	// Color marks, with the escape sequences of terminals, what needs attention.
	Color bool
	Sort  Key
}

// row is a sandbox in a table.
type row struct {
	*Sandbox
	// faults is how many pages were restored on demand per second, -1 if that is not
	// known.
	faults float64
}

func (r *row) ok() bool { return r.State == OK }

// ratio is 0 if nothing is owned.
func (r *row) ratio() float64 {
	if !r.ok() || r.Stats.OwnedBytes == 0 {
		return 0
	}
	return float64(r.Stats.GuestBytes) / float64(r.Stats.OwnedBytes)
}

// FaultRate is how many pages a sandbox has restored on demand, per second, between
// two censuses. It is not known if one of them has no answer of that very sandbox.
func FaultRate(prev, now *Sandbox) (float64, bool) {
	if prev == nil || prev.State != OK || now.State != OK || prev.ID != now.ID || prev.PID != now.PID {
		return 0, false
	}
	seconds := now.At.Sub(prev.At).Seconds()
	was, is := prev.Stats.Faults.Demand, now.Stats.Faults.Demand
	if seconds <= 0 || is < was {
		return 0, false
	}
	return float64(is-was) / seconds, true
}

// rows returns the sandboxes of now in the order of the view.
func (v *View) rows(now, prev *Census) []row {
	was := make(map[string]*Sandbox)
	if prev != nil {
		for i := range prev.Sandboxes {
			was[prev.Sandboxes[i].ID] = &prev.Sandboxes[i]
		}
	}
	rows := make([]row, len(now.Sandboxes))
	for i := range rows {
		s := &now.Sandboxes[i]
		rows[i] = row{s, -1}
		if rate, ok := FaultRate(was[s.ID], s); ok {
			rows[i].faults = rate
		}
	}
	slices.SortStableFunc(rows, func(a, b row) int {
		if v.Sort == ByID {
			return cmp.Compare(a.ID, b.ID)
		}
		order := 0
		switch {
		case a.ok() != b.ok():
			if a.ok() {
				return -1
			}
			return 1
		case !a.ok():
		case v.Sort == ByGuest:
			order = cmp.Compare(b.Stats.GuestBytes, a.Stats.GuestBytes)
		case v.Sort == ByRatio:
			order = cmp.Compare(b.ratio(), a.ratio())
		case v.Sort == ByFaults:
			order = cmp.Compare(b.faults, a.faults)
		default:
			order = cmp.Compare(b.Stats.OwnedBytes, a.Stats.OwnedBytes)
		}
		return cmp.Or(order, cmp.Compare(a.ID, b.ID))
	})
	return rows
}

// A column of the table. Left-aligned ones are as wide as said, too.
type column struct {
	title string
	width int
	left  bool
	cell  func(r *row) string
}

const (
	// idColumn and phaseColumn are the first: a sandbox without answer has the
	// reason instead of the others.
	idColumn = iota
	phaseColumn
	// minID is the width of the column of IDs that others are not given up for.
	minID = 14
	maxID = 64
	// reasonWidth is that of the column for how the phase was recognised.
	reasonWidth = 24
)

// columns are all columns in the order in which they are shown. The width of the first
// is the view's.
var columns = []column{
	{"ID", minID, true, func(r *row) string { return clean(r.ID, maxID) }},
	{"PHASE", 9, true, func(r *row) string { return r.Phase() }},
	{"FOR", 4, false, func(r *row) string { return age(r.Stats.Phase.SinceNS) }},
	{"GUEST", 5, false, func(r *row) string { return size(r.Stats.GuestBytes) }},
	{"OWNED", 5, false, func(r *row) string { return size(r.Stats.OwnedBytes) }},
	{"RATIO", 5, false, func(r *row) string { return ratio(r.ratio()) }},
	{"STORED", 6, false, func(r *row) string { return size(r.Stats.StoreBytes) }},
	{"SHARED", 6, false, func(r *row) string { return size(r.Stats.TemplateBytes) }},
	{"SENTRY", 6, false, func(r *row) string { return size(r.Stats.SentryRSSBytes) }},
	{"FAULT/S", 7, false, func(r *row) string { return rate(r.faults) }},
	{"P/R %", 7, false, quality},
	{"LIMIT", 11, false, limit},
	{"POOL", 4, false, poolWord},
	{"RECOGNISED BY", reasonWidth, true, func(r *row) string { return cmp.Or(clean(r.Stats.Phase.Why, maxWord), "-") }},
}

// wanted are the titles of columns, those first that a narrow view keeps longest.
var wanted = []string{"ID", "PHASE", "OWNED", "GUEST", "RATIO", "FOR", "FAULT/S", "LIMIT", "P/R %", "POOL", "STORED", "SENTRY", "SHARED", "RECOGNISED BY"}

// layout chooses the columns that fit, and the width of the first.
func (v *View) layout(rows []row) []column {
	longest := len("ID")
	for i := range rows {
		longest = max(longest, min(len(rows[i].ID), maxID))
	}
	id := min(longest, minID)
	if v.Width == 0 {
		id = longest
	}
	used := -1 // no space before the first
	keep := make(map[string]bool)
	for n, title := range wanted {
		i := slices.IndexFunc(columns, func(c column) bool { return c.title == title })
		w := columns[i].width
		if i == idColumn {
			w = id
		}
		if n > phaseColumn && v.Width != 0 && used+1+w > v.Width {
			break
		}
		used += 1 + w
		keep[title] = true
	}
	var out []column
	for _, c := range columns {
		if keep[c.title] {
			out = append(out, c)
		}
	}
	if v.Width != 0 {
		id = max(1, min(longest, id+v.Width-used))
	}
	out[idColumn].width = id
	return out
}

// Escape sequences of terminals.
const (
	red     = "\x1b[31m"
	yellow  = "\x1b[33m"
	reverse = "\x1b[7m"
	plain   = "\x1b[0m"
)

// Lines returns what the view shows of now. Rates are those since prev, which may be
// nil. No line is longer than the width, and there are no more than the height.
func (v *View) Lines(now, prev *Census) []string {
	rows := v.rows(now, prev)
	var out []string
	add := func(color, line string) {
		line = strings.TrimRight(v.cut(line), " ")
		if v.Color && color != "" {
			line = color + line + plain
		}
		out = append(out, line)
	}
	add("", v.first(now))
	add("", totals(now))
	add("", poolLine(now.Pool))
	add("", "")
	if len(rows) == 0 {
		add("", "no sandboxes below --root="+clean(now.Root, maxReason))
		add("", "(Docker's --root is usually /run/docker/runtime-runc/moby)")
		return v.clip(out)
	}
	layout := v.layout(rows)
	ids := idCells(rows, layout[idColumn].width)
	add(reverse, header(layout))
	shown := rows
	if room := v.Height - len(out); v.Height != 0 && len(rows) > room {
		shown = rows[:max(0, room-1)]
	}
	for i := range shown {
		add(rows[i].color(), rows[i].line(layout, ids[i]))
	}
	if rest := rows[len(shown):]; len(rest) > 0 {
		line := fmt.Sprintf("%d more", len(rest))
		silent := 0
		for i := range rest {
			if !rest[i].ok() {
				silent++
			}
		}
		if silent != 0 {
			line += fmt.Sprintf(", %d of them without answer", silent)
		}
		add("", line)
	}
	return v.clip(out)
}

// cut shortens a line to the width.
func (v *View) cut(line string) string {
	if v.Width == 0 {
		return line
	}
	return cut(line, v.Width)
}

// clip leaves out the lines that do not fit.
func (v *View) clip(lines []string) []string {
	if v.Height != 0 {
		lines = lines[:min(len(lines), v.Height)]
	}
	return lines
}

// cut shortens s, which is ASCII, to n columns, and shows that it did.
func cut(s string, n int) string {
	if len(s) <= n {
		return s
	}
	return s[:max(n-1, 0)] + "~"[:min(n, 1)]
}

// first is the line with what the sandboxes do.
func (v *View) first(c *Census) string {
	phases := make(map[string]int)
	for i := range c.Sandboxes {
		phases[c.Sandboxes[i].Phase()]++
	}
	// Phases come first, then what has not answered.
	order := []string{"working", "waiting", "inhibited", "paused"}
	rank := func(name string) int {
		if i := slices.Index(order, name); i >= 0 {
			return i
		}
		return len(order)
	}
	names := slices.SortedFunc(maps.Keys(phases), func(a, b string) int {
		return cmp.Or(cmp.Compare(rank(a), rank(b)), cmp.Compare(a, b))
	})
	noun := "sandboxes"
	if len(c.Sandboxes) == 1 {
		noun = "sandbox"
	}
	when := time.TimeOnly
	if v.Width == 0 {
		when = time.DateTime
	}
	line := fmt.Sprintf("%s  %d %s", c.At.Format(when), len(c.Sandboxes), noun)
	for i, name := range names {
		sep := ", "
		if i == 0 {
			sep = ": "
		}
		line += fmt.Sprintf("%s%d %s", sep, phases[name], name)
	}
	if by := fmt.Sprintf("; sorted by %s", v.Sort); len(c.Sandboxes) > 1 && (v.Width == 0 || len(line)+len(by) <= v.Width) {
		line += by
	}
	return line
}

// totals is the line with the memory of all.
func totals(c *Census) string {
	var guest, owned uint64
	for i := range c.Sandboxes {
		if s := c.Sandboxes[i].Stats; s != nil {
			guest += s.GuestBytes
			owned += s.OwnedBytes
		}
	}
	line := fmt.Sprintf("guest %s, owned %s", control.Size(guest), control.Size(owned))
	if owned != 0 {
		line += fmt.Sprintf(" (%s smaller)", ratio(float64(guest)/float64(owned)))
	}
	if h := c.Host; h.TotalBytes != 0 {
		line += fmt.Sprintf("; host has %s of %s left", size(h.AvailableBytes), size(h.TotalBytes))
	}
	return line
}

// poolLine is the line about the pool.
func poolLine(p *Pool) string {
	switch {
	case p == nil:
		return "pool none"
	case p.Stats == nil:
		return fmt.Sprintf("pool at %s: %s", clean(p.Socket, maxReason), clean(p.Reason, maxReason))
	}
	state := "serving"
	if p.Stats.Drained {
		state = "drained"
	}
	t := &p.Stats.Total
	return fmt.Sprintf("pool %s, %d clients in %d domains, %d pages, %s held, %s in use",
		state, t.Clients, len(p.Stats.Domains)+p.Stats.OmittedDomains, t.Pages, control.Size(t.Bytes), control.Size(t.ReferencedBytes))
}

// header is the line of titles.
func header(layout []column) string {
	var cells []string
	for i := range layout {
		cells = append(cells, layout[i].pad(layout[i].title))
	}
	return strings.Join(cells, " ")
}

// line is the line of a sandbox.
func (r *row) line(layout []column, id string) string {
	cells := []string{layout[idColumn].pad(id)}
	for i := phaseColumn; i < len(layout); i++ {
		c := &layout[i]
		if i > phaseColumn && !r.ok() {
			cells = append(cells, r.Reason)
			break
		}
		cells = append(cells, c.pad(c.cell(r)))
	}
	return strings.Join(cells, " ")
}

// pad makes a cell as wide as its column.
func (c *column) pad(s string) string {
	s = cut(s, c.width)
	if c.left {
		return fmt.Sprintf("%-*s", c.width, s)
	}
	return fmt.Sprintf("%*s", c.width, s)
}

// color is that of the whole row: red needs attention, yellow may soon.
func (r *row) color() string {
	switch {
	case r.State == Silent || r.State == Stopped || r.State == Dead || r.State == Broken:
		return red
	case r.State == Busy:
		return yellow
	case !r.ok():
		return ""
	case r.Stats.Pressure.Level == "critical" || r.Stats.ChecksumFailures != 0:
		return red
	case r.Stats.Pressure.Level == "high" || r.Stats.Pool.State == "disconnected":
		return yellow
	}
	return ""
}

// idCells are the IDs in the width of their column. They end early, as commands
// accept them; if some then look the same, all of them keep their ends instead.
func idCells(rows []row, width int) []string {
	short := make([]string, len(rows))
	seen := make(map[string]bool)
	for i := range rows {
		short[i] = cut(clean(rows[i].ID, maxID), width)
		if seen[short[i]] {
			return middleCut(rows, width)
		}
		seen[short[i]] = true
	}
	return short
}

// middleCut leaves out the middle of long IDs.
func middleCut(rows []row, width int) []string {
	out := make([]string, len(rows))
	for i := range rows {
		s := clean(rows[i].ID, maxID)
		if tail := width / 2; len(s) > width && tail > 0 {
			s = s[:width-tail-1] + "~" + s[len(s)-tail:]
		}
		out[i] = cut(s, width)
	}
	return out
}

// ---- cells -------------------------------------------------------------------

// quality is how good prefetching is: precision and recall in percent.
func quality(r *row) string {
	p := r.Stats.Prefetch
	if p.Precision == 0 && p.Recall == 0 {
		return "-"
	}
	return fmt.Sprintf("%.0f/%.0f", 100*p.Precision, 100*p.Recall)
}

// limit is how much of the memory limit is used. "!" is high pressure, "!!" critical.
func limit(r *row) string {
	p := &r.Stats.Pressure
	if p.LimitBytes == 0 {
		return "-"
	}
	s := fmt.Sprintf("%.0f%%/%s", 100*float64(p.UsedBytes)/float64(p.LimitBytes), size(p.LimitBytes))
	switch p.Level {
	case "high":
		s += "!"
	case "critical":
		s += "!!"
	}
	return s
}

func poolWord(r *row) string {
	switch r.Stats.Pool.State {
	case "", "none":
		return "-"
	case "connected":
		return "yes"
	case "disconnected":
		return "lost"
	}
	return clean(r.Stats.Pool.State, maxWord)
}

// size is a number of bytes in at most 5 columns.
func size(n uint64) string {
	const units = "BKMGTPE"
	f, unit := float64(n), 0
	for ; f >= 1000; f /= 1024 {
		unit++
	}
	if f < 10 && unit > 0 {
		return fmt.Sprintf("%.1f%c", f, units[unit])
	}
	return fmt.Sprintf("%.0f%c", f, units[unit])
}

// age is a duration in at most 4 columns.
func age(ns uint64) string {
	switch d := time.Duration(min(ns, uint64(1)<<62)); {
	case d < 9950*time.Millisecond:
		return fmt.Sprintf("%.1fs", d.Seconds())
	case d < 100*time.Second:
		return fmt.Sprintf("%.0fs", d.Seconds())
	case d < 100*time.Minute:
		return fmt.Sprintf("%.0fm", d.Minutes())
	case d < 100*time.Hour:
		return fmt.Sprintf("%.0fh", d.Hours())
	default:
		return fmt.Sprintf("%.0fd", d.Hours()/24)
	}
}

// ratio is a quotient in at most 5 columns.
func ratio(f float64) string {
	switch {
	case f == 0:
		return "-"
	case f < 10:
		return fmt.Sprintf("%.1fx", f)
	case f < 1000:
		return fmt.Sprintf("%.0fx", f)
	}
	return ">999x"
}

// rate is a number per second, "-" if it is negative.
func rate(f float64) string {
	switch {
	case f < 0:
		return "-"
	case f == 0:
		return "0"
	case f < 10:
		return fmt.Sprintf("%.1f", f)
	case f < 100000:
		return fmt.Sprintf("%.0f", f)
	}
	return fmt.Sprintf("%.0fk", f/1000)
}
