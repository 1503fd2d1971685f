package census

import (
	"bufio"
	"cmp"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"

	"runsc-agentzip/pkg/control"
	"runsc-agentzip/pkg/pool/server"
)

// ContentType is what WriteMetrics writes.
const ContentType = "text/plain; version=0.0.4; charset=utf-8"

// maxCauses is how many causes of rejects of a sandbox become metrics: there are a few,
// unless the sandbox makes some up.
const maxCauses = 32

// WriteMetrics writes a census in the text format of Prometheus. Sandboxes without
// answer have agentzip_up 0 and nothing else.
func WriteMetrics(w io.Writer, c *Census) error {
	m := &metrics{w: bufio.NewWriter(w)}
	m.host(c)
	m.pool(c.Pool)
	m.sandboxes(c)
	return m.w.Flush()
}

// metrics writes families of metrics. Errors are kept by w.
type metrics struct {
	w    *bufio.Writer
	name string
}

// The types of families.
const (
	gauge     = "gauge"
	counter   = "counter"
	histogram = "histogram"
)

// family begins a family, whose samples follow.
func (m *metrics) family(name, kind, help string) {
	m.name = "agentzip_" + name
	_, _ = m.w.WriteString("# HELP " + m.name + " " + help + "\n# TYPE " + m.name + " " + kind + "\n")
}

// sample writes one sample of the family. labels are names and values in turn.
func (m *metrics) sample(suffix, value string, labels ...string) {
	_, _ = m.w.WriteString(m.name + suffix)
	for i := 0; i+1 < len(labels); i += 2 {
		sep := ","
		if i == 0 {
			sep = "{"
		}
		_, _ = m.w.WriteString(sep + labels[i] + `="` + escape(labels[i+1]) + `"`)
	}
	if len(labels) > 1 {
		_, _ = m.w.WriteString("}")
	}
	_, _ = m.w.WriteString(" " + value + "\n")
}

// escape makes text fit for the value of a label.
func escape(s string) string {
	s = clean(s, maxReason)
	s = strings.ReplaceAll(s, `\`, `\\`)
	return strings.ReplaceAll(s, `"`, `\"`)
}

func count(n uint64) string   { return strconv.FormatUint(n, 10) }
func float(f float64) string  { return strconv.FormatFloat(f, 'g', -1, 64) }
func seconds(n uint64) string { return float(float64(n) / 1e9) }
func truth(b bool) string {
	if b {
		return "1"
	}
	return "0"
}

func (m *metrics) host(c *Census) {
	m.family("census_duration_seconds", gauge, "How long it took to ask all sandboxes.")
	m.sample("", seconds(c.TookNS))
	m.family("sandboxes", gauge, "Sandboxes on this host, by how they have answered.")
	states := make(map[State]uint64)
	for i := range c.Sandboxes {
		states[c.Sandboxes[i].State]++
	}
	for _, s := range States {
		m.sample("", count(states[s]), "state", string(s))
	}
	if c.Host.TotalBytes == 0 {
		return
	}
	m.family("host_memory_bytes", gauge, "Memory of the host.")
	m.sample("", count(c.Host.TotalBytes))
	m.family("host_memory_available_bytes", gauge, "Memory of the host that is left, file cache that can be given back included.")
	m.sample("", count(c.Host.AvailableBytes))
}

func (m *metrics) pool(p *Pool) {
	if p == nil {
		return
	}
	m.family("pool_up", gauge, "Whether the host's page pool has answered.")
	m.sample("", truth(p.Stats != nil))
	if p.Stats == nil {
		return
	}
	for _, f := range []struct {
		name, kind, help string
		value            func(u *server.Usage) uint64
	}{
		{"pool_clients", gauge, "Sandboxes that are connected.", func(u *server.Usage) uint64 { return uint64(max(0, u.Clients)) }},
		{"pool_stored_pages", gauge, "Pages that the pool holds.", func(u *server.Usage) uint64 { return u.Pages }},
		{"pool_bytes", gauge, "Memory of the pool's pages and index.", func(u *server.Usage) uint64 { return u.Bytes }},
		{"pool_index_bytes", gauge, "Memory of the index.", func(u *server.Usage) uint64 { return u.IndexBytes }},
		{"pool_heap_bytes", gauge, "Estimate of the memory of the pool's own bookkeeping.", func(u *server.Usage) uint64 { return u.HeapBytes }},
		{"pool_referenced_bytes", gauge, "Size of the pages that sandboxes refer to.", func(u *server.Usage) uint64 { return u.ReferencedBytes }},
		{"pool_unreferenced_bytes", gauge, "Size of the pages that no sandbox refers to.", func(u *server.Usage) uint64 { return u.UnreferencedBytes }},
		{"pool_candidate_pages", gauge, "Pages that one sandbox only has offered.", func(u *server.Usage) uint64 { return u.Candidates }},
		{"pool_segments", gauge, "Segments that hold the pages.", func(u *server.Usage) uint64 { return u.Segments }},
		{"pool_offered_pages_total", counter, "Pages that sandboxes have offered.", func(u *server.Usage) uint64 { return u.Offers }},
		{"pool_known_pages_total", counter, "Offered pages that the pool had.", func(u *server.Usage) uint64 { return u.Hits }},
		{"pool_ignored_pages_total", counter, "Offered pages that were not remembered.", func(u *server.Usage) uint64 { return u.Ignored }},
		{"pool_wanted_pages_total", counter, "Pages that were asked for.", func(u *server.Usage) uint64 { return u.Wanted }},
		{"pool_taken_pages_total", counter, "Pages that the pool took.", func(u *server.Usage) uint64 { return u.Published }},
		{"pool_rejected_pages_total", counter, "Pages that had no form worth keeping.", func(u *server.Usage) uint64 { return u.Rejected }},
		{"pool_full_pages_total", counter, "Pages that found no room.", func(u *server.Usage) uint64 { return u.Full }},
		{"pool_moved_pages_total", counter, "Pages that were moved to give memory back.", func(u *server.Usage) uint64 { return u.Moved }},
		{"pool_dropped_pages_total", counter, "Pages that were given up.", func(u *server.Usage) uint64 { return u.Dropped }},
		{"pool_violations_total", counter, "What sandboxes did that the protocol forbids.", func(u *server.Usage) uint64 { return u.Violations }},
	} {
		m.family(f.name, f.kind, f.help)
		m.sample("", count(f.value(&p.Stats.Total)))
	}
	m.family("pool_domains", gauge, "Domains within which pages are shared.")
	m.sample("", count(uint64(len(p.Stats.Domains)+max(0, p.Stats.OmittedDomains))))
	m.family("pool_drained", gauge, "Whether the pool takes no more pages.")
	m.sample("", truth(p.Stats.Drained))
}

// values are the families that have one sample for each sandbox. value returns "" for
// none.
var values = []struct {
	name, kind, help string
	value            func(s *control.Stats) string
}{
	{"guest_bytes", gauge, "Memory that the guest has committed, in whatever form it is held.", func(s *control.Stats) string { return count(s.GuestBytes) }},
	{"owned_bytes", gauge, "Memory that this costs: resident, stored, bookkeeping and share of the pool.", func(s *control.Stats) string { return count(s.OwnedBytes) }},
	{"resident_bytes", gauge, "Host memory of the sandbox's memory file.", func(s *control.Stats) string { return count(s.ResidentBytes) }},
	{"store_bytes", gauge, "Memory of the compressed store.", func(s *control.Stats) string { return count(s.StoreBytes) }},
	{"metadata_bytes", gauge, "Memory of page table and bookkeeping.", func(s *control.Stats) string { return count(s.MetadataBytes) }},
	{"pool_share_bytes", gauge, "The sandbox's share of the pool's memory.", func(s *control.Stats) string { return count(s.PoolShareBytes) }},
	{"template_bytes", gauge, "Size of the shared template, which is not owned.", func(s *control.Stats) string { return count(s.TemplateBytes) }},
	{"sentry_resident_memory_bytes", gauge, "Resident set of the sandbox's process, its mappings of guest memory included.", func(s *control.Stats) string { return count(s.SentryRSSBytes) }},

	{"demand_restored_pages_total", counter, "Pages restored because something touched them.", func(s *control.Stats) string { return count(s.Faults.Demand) }},
	{"prefetched_pages_total", counter, "Pages restored ahead of use.", func(s *control.Stats) string { return count(s.Faults.Prefetched) }},
	{"aborted_pages_total", counter, "Pages touched while they were being evicted.", func(s *control.Stats) string { return count(s.Faults.Aborted) }},
	{"evicted_pages_total", counter, "Pages evicted.", func(s *control.Stats) string { return count(s.EvictedPagesTotal) }},
	{"restored_pages_total", counter, "Pages restored, for whatever reason.", func(s *control.Stats) string { return count(s.RestoredPagesTotal) }},
	{"checksum_failures_total", counter, "Stored pages that were found damaged.", func(s *control.Stats) string { return count(s.ChecksumFailures) }},
	{"orphan_pages", gauge, "Stored pages kept because others depend on them.", func(s *control.Stats) string { return count(s.OrphanBlobs) }},
	{"moved_pages_total", counter, "Stored pages moved to give memory back.", func(s *control.Stats) string { return count(s.MovedBlobs) }},

	{"prefetch_precision_ratio", gauge, "Part of the prefetched pages that were used.", func(s *control.Stats) string { return float(s.Prefetch.Precision) }},
	{"prefetch_recall_ratio", gauge, "Part of the wanted pages that were prefetched.", func(s *control.Stats) string { return float(s.Prefetch.Recall) }},
	{"prefetch_patterns", gauge, "Kinds of steps that are told apart.", func(s *control.Stats) string { return count(s.Prefetch.Patterns) }},

	{"phase_duration_seconds", gauge, "How long the phase has lasted.", func(s *control.Stats) string { return seconds(s.Phase.SinceNS) }},
	{"waits_total", counter, "Waits so far, the present one included.", func(s *control.Stats) string { return count(s.Phase.Waits) }},
	{"heartbeats_total", counter, "Times in which something ran in a wait without ending it.", func(s *control.Stats) string { return count(s.Phase.Beats) }},
	{"idle_threshold_seconds", gauge, "How long nothing has to happen for a wait to be recognised.", func(s *control.Stats) string { return seconds(s.Phase.IdleNS) }},

	{"memory_limit_bytes", gauge, "Limit of the sandbox's memory cgroup, absent without one.", func(s *control.Stats) string {
		if s.Pressure.LimitBytes == 0 {
			return ""
		}
		return count(s.Pressure.LimitBytes)
	}},
	{"memory_used_bytes", gauge, "What is used of the limit, file cache left out; absent without a limit.", func(s *control.Stats) string {
		if s.Pressure.LimitBytes == 0 {
			return ""
		}
		return count(s.Pressure.UsedBytes)
	}},
	{"memory_pressure", gauge, "Pressure by the memory limit: 0 none, 1 high, 2 critical.", func(s *control.Stats) string {
		switch s.Pressure.Level {
		case "high":
			return "1"
		case "critical":
			return "2"
		}
		return "0"
	}},
	{"pressure_evictions_total", counter, "Evictions that pressure caused while the sandbox worked.", func(s *control.Stats) string { return count(s.Pressure.Evictions) }},
	{"throttled_seconds_total", counter, "Time that the sandbox has waited for memory.", func(s *control.Stats) string { return seconds(s.Pressure.ThrottledNS) }},

	{"sandbox_pool_connected", gauge, "Whether the sandbox is connected with the pool, absent without a pool or domain.", func(s *control.Stats) string {
		if s.Pool.State == "" || s.Pool.State == "none" {
			return ""
		}
		return truth(s.Pool.State == "connected")
	}},
	{"sandbox_pool_connects_total", counter, "Connections with the pool so far.", func(s *control.Stats) string { return count(s.Pool.Connects) }},
	{"sandbox_pool_found_pages_total", counter, "Pages that the sandbox has found in the pool.", func(s *control.Stats) string { return count(s.Pool.Found) }},
	{"sandbox_pool_published_pages_total", counter, "Pages that the sandbox has given to the pool.", func(s *control.Stats) string { return count(s.Pool.Published) }},
	{"sandbox_pool_unoffered_pages_total", counter, "Pages that were not offered because the pool was slow.", func(s *control.Stats) string { return count(s.Pool.OfferedDropped) }},
}

// forms are the forms that pages are held in.
var forms = []struct {
	name  string
	value func(p *control.Pages) uint64
}{
	{"resident", func(p *control.Pages) uint64 { return p.Resident }},
	{"template", func(p *control.Pages) uint64 { return p.Template }},
	{"zero", func(p *control.Pages) uint64 { return p.Zero }},
	{"pool", func(p *control.Pages) uint64 { return p.Pool }},
	{"delta", func(p *control.Pages) uint64 { return p.Delta }},
	{"compressed", func(p *control.Pages) uint64 { return p.Compressed }},
	{"raw", func(p *control.Pages) uint64 { return p.Raw }},
}

// histograms are the distributions, with the powers of two, in nanoseconds, of their
// first and last bound. A family has the same bounds at all times.
var histograms = []struct {
	name, help  string
	first, last int
	value       func(s *control.Stats) *control.Histogram
}{
	{"restore_duration_seconds", "Time that one restore on demand took.", 11, 27, func(s *control.Stats) *control.Histogram { return &s.RestoreNS }},
	{"evict_duration_seconds", "Time that one eviction took.", 20, 34, func(s *control.Stats) *control.Histogram { return &s.EvictNS }},
	{"resume_duration_seconds", "Time from a resume to its last restore on demand, of those that had any.", 17, 34, func(s *control.Stats) *control.Histogram { return &s.ResumeNS }},
}

func (m *metrics) sandboxes(c *Census) {
	if len(c.Sandboxes) == 0 {
		return
	}
	m.family("up", gauge, "Whether the sandbox has answered.")
	for i := range c.Sandboxes {
		s := &c.Sandboxes[i]
		m.sample("", truth(s.State == OK), "sandbox", s.ID)
	}
	var answered []*Sandbox
	for i := range c.Sandboxes {
		if s := &c.Sandboxes[i]; s.State == OK {
			answered = append(answered, s)
		}
	}
	if len(answered) == 0 {
		return
	}
	m.family("phase", gauge, "1 for the phase that the sandbox is in, 0 for the others.")
	for _, s := range answered {
		for _, phase := range []string{"working", "waiting", "inhibited", "paused"} {
			m.sample("", truth(s.Phase() == phase), "sandbox", s.ID, "phase", phase)
		}
	}
	for _, f := range values {
		begun := false
		for _, s := range answered {
			v := f.value(s.Stats)
			if v == "" {
				continue
			}
			if !begun {
				m.family(f.name, f.kind, f.help)
				begun = true
			}
			m.sample("", v, "sandbox", s.ID)
		}
	}
	m.family("pages", gauge, "Committed pages of the guest by the form they are held in.")
	for _, s := range answered {
		for _, f := range forms {
			m.sample("", count(f.value(&s.Stats.Pages)), "sandbox", s.ID, "form", f.name)
		}
	}
	m.rejects(answered)
	for _, f := range histograms {
		m.family(f.name, histogram, f.help)
		for _, s := range answered {
			m.distribution(f.value(s.Stats), f.first, f.last, s.ID)
		}
	}
}

// rejects writes why pages stayed resident.
func (m *metrics) rejects(answered []*Sandbox) {
	begun := false
	for _, s := range answered {
		seen := make(map[string]bool)
		for _, cause := range slices.Sorted(maps.Keys(s.Stats.Rejects)) {
			name := cmp.Or(clean(cause, maxWord), "unknown")
			// Causes that were made up may look the same.
			if seen[name] || len(seen) == maxCauses {
				continue
			}
			seen[name] = true
			if !begun {
				m.family("rejected_pages_total", counter, "Pages that stayed resident, by cause.")
				begun = true
			}
			m.sample("", count(s.Stats.Rejects[cause]), "sandbox", s.ID, "cause", name)
		}
	}
}

// distribution writes a histogram with the bounds 2^first to 2^last nanoseconds.
//
// A bound belongs to its bucket for Prometheus, and to the next one in a
// control.Histogram. The nanosecond is neglected. The count is that of the buckets, so
// that it agrees with them: they are read while the sandbox runs.
func (m *metrics) distribution(h *control.Histogram, first, last int, id string) {
	var sum uint64
	next := 0
	upTo := func(end int) {
		for ; next < min(end, len(h.Buckets)); next++ {
			sum += h.Buckets[next]
		}
	}
	for i := first; i <= last; i++ {
		upTo(i) // bucket i-1 ends at 2^i
		m.sample("_bucket", count(sum), "sandbox", id, "le", seconds(1<<i))
	}
	upTo(len(h.Buckets))
	m.sample("_bucket", count(sum), "sandbox", id, "le", "+Inf")
	m.sample("_sum", seconds(h.SumNS), "sandbox", id)
	m.sample("_count", count(sum), "sandbox", id)
}
