package control

import (
	"fmt"
	"io"
	"sort"
	"time"
)

// Size formats a number of bytes for people.
func Size(n uint64) string {
	switch {
	case n >= 10<<30:
		return fmt.Sprintf("%.1f GiB", float64(n)/(1<<30))
	case n >= 1<<20:
		return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20))
	case n >= 1<<10:
		return fmt.Sprintf("%.1f KiB", float64(n)/(1<<10))
	}
	return fmt.Sprintf("%d B", n)
}

// Fprint writes s for people, one line per subject.
func Fprint(w io.Writer, s *Stats) {
	ratio := "-"
	if s.OwnedBytes != 0 {
		ratio = fmt.Sprintf("%.1fx", float64(s.GuestBytes)/float64(s.OwnedBytes))
	}
	row := func(name, format string, args ...any) {
		fmt.Fprintf(w, "%-10s %s\n", name, fmt.Sprintf(format, args...))
	}
	row("guest", "%s committed", Size(s.GuestBytes))
	row("owned", "%s (%s smaller): in memory %s, stored %s, bookkeeping %s, pool share %s",
		Size(s.OwnedBytes), ratio, Size(s.ResidentBytes), Size(s.StoreBytes), Size(s.MetadataBytes), Size(s.PoolShareBytes))
	row("template", "%s shared", Size(s.TemplateBytes))
	row("pages", "resident %d, template %d, zero %d, pool %d, delta %d, compressed %d, raw %d",
		s.Pages.Resident, s.Pages.Template, s.Pages.Zero, s.Pages.Pool, s.Pages.Delta, s.Pages.Compressed, s.Pages.Raw)
	row("faults", "demand %d pages, prefetched %d, touched while candidate %d; restore mean %v, max %v",
		s.Faults.Demand, s.Faults.Prefetched, s.Faults.Aborted, s.RestoreNS.mean(), time.Duration(s.RestoreNS.MaxNS).Round(time.Microsecond))
	if p := s.Prefetch; p.Patterns != 0 || p.PredictedPages != 0 {
		precision, recall := "-", "-"
		if p.SampledPages != 0 {
			precision, recall = fmt.Sprintf("%.0f %%", 100*p.Precision), fmt.Sprintf("%.0f %%", 100*p.Recall)
		}
		row("prefetch", "precision %s, recall %s; %d pages restored ahead in steps, %d on demand; %d steps remembered",
			precision, recall, p.PredictedPages, p.WantedPages, p.Patterns)
	}
	row("evictions", "%d, %d pages so far, mean %v", s.EvictNS.Count, s.EvictedPagesTotal, s.EvictNS.mean())
	why := ""
	if s.Phase.Why != "" {
		why = " (" + s.Phase.Why + ")"
	}
	row("phase", "%s for %v%s", s.Phase.State, time.Duration(s.Phase.SinceNS).Round(time.Millisecond), why)
	if p := s.Pressure; p.LimitBytes != 0 {
		whose := ""
		if p.Above != 0 {
			whose = " by all in a cgroup above"
		}
		row("memory limit", "%s of %s used%s, pressure %s (%d evictions while working, faults waited %v)", Size(p.UsedBytes), Size(p.LimitBytes), whose, p.Level, p.Evictions, time.Duration(p.ThrottledNS).Round(time.Millisecond))
	}
	switch s.Pool.State {
	case "", "none":
	default:
		state := s.Pool.State
		if s.Pool.Reason != "" {
			state += " (" + s.Pool.Reason + ")"
		}
		row("pool", "%s; %d pages found, %d given, %d offers dropped, %d connections so far",
			state, s.Pool.Found, s.Pool.Published, s.Pool.OfferedDropped, s.Pool.Connects)
	}
	if o := s.Overhead; o.Sum() != 0 {
		row("overhead", "%s besides guest memory: Sentry %s, gofer %s, stubs %s, page tables %s, kernel %s, files %s",
			Size(o.Sum()), Size(o.SentryPrivate), Size(o.Gofer), Size(o.Stubs), Size(o.PageTables), Size(o.Kernel), Size(o.Files))
		row("host", "%s in all", Size(s.HostBytes))
	}
	row("sentry", "%s resident", Size(s.SentryRSSBytes))
	causes := make([]string, 0, len(s.Rejects))
	for c := range s.Rejects {
		causes = append(causes, c)
	}
	sort.Strings(causes)
	for _, c := range causes {
		row("rejects", "%s: %d", c, s.Rejects[c])
	}
	stages := make([]string, 0, len(s.Stages))
	for c := range s.Stages {
		stages = append(stages, c)
	}
	sort.Strings(stages)
	for _, c := range stages {
		n := s.Stages[c]
		row("stage", "%s: %d tries, %d taken (%s), %d in vain", c, n.Tries, n.Wins, Size(n.Bytes), n.Rejects)
	}
	if s.OrphanBlobs != 0 || s.MovedBlobs != 0 {
		row("store", "%d pages kept for others, %d moved so far", s.OrphanBlobs, s.MovedBlobs)
	}
	if s.ChecksumFailures != 0 {
		row("CHECKSUM", "%d failures", s.ChecksumFailures)
	}
}

func (h *Histogram) mean() time.Duration {
	if h.Count == 0 {
		return 0
	}
	return time.Duration(h.SumNS / h.Count).Round(time.Microsecond)
}
