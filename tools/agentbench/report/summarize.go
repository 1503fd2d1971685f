package report

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
)

// definitions explains the figures of Summary by their JSON name.
var definitions = map[string]string{
	"owned_bytes":          "memory kept for one clone beyond the template it was restored from; mean over all waits of all clones that were measured, late in the wait (definition of waits). stock: committed guest pages whose content differs from the template's page at the same offset, compared from outside (a page that the template lacks counts unless it is all zeros). agentzip: owned_bytes of its stats: memory file, compressed store, bookkeeping and its share of the pool. linux: estimated from what stays in memory and what the compressed swap device takes",
	"owned_estimated":      "owned_bytes is not counted page by page but estimated",
	"owned_outside_bytes":  "owned_bytes estimated without asking the runtime",
	"pool_share_bytes":     "the part of owned_bytes that is the clone's share of the page pool, by its stats: each page it uses divided by the number of its users, and an equal part of what the pool holds besides; mean over the same waits. 0 without a pool",
	"pool_outside_bytes":   "what the page pool held as seen without asking the runtime, per clone: the allocated blocks of its memory files and its anonymous memory; mean over the same waits. A check of pool_share_bytes",
	"host_bytes":           "all memory that one clone adds to the host, in the same waits: guest memory, Sentry, gofer, stubs and page tables, its part of the swap device, and an equal part of the page pool and of what the host caches of a template that all clones share, which counts once",
	"peak_bytes":           "the most memory that all clones together added to the host at one time, by MemAvailable (timeline, used_bytes) as read every 0.4 s; mean over repetitions",
	"owned_reduction":      "stock's mean owned_bytes over this system's, over the waits that were measured with both: the same wait of the same clone in the same repetition",
	"host_reduction":       "the same for host_bytes",
	"used_bytes_mean":      "what all clones together added to the host by MemAvailable (timeline, used_bytes), per clone, mean over all the time from the first restore to the end of the last wait, when clones work included; mean over repetitions. It depends on no one's accounting, but includes what other programs took or gave back, and what the kernel caches for the sandboxes",
	"used_reduction":       "stock's used_bytes_mean over this system's, same repetitions",
	"waits_measured":       "waits in which memory was measured: those that owned_bytes and host_bytes are means over",
	"waits_unmeasured":     "waits in which it was not: those shorter than 0.5 s, and those in which the machine was too busy; 0 where the report does not know",
	"owned_reduction_long": fmt.Sprintf("owned_reduction over waits that had lasted at least %d s when they were measured", LongWait),
	"step_seconds":         "wall time of tool steps, from the request to the answer",
	"prefetch":             "of the steps of a kind: pages restored on demand (wanted) and ahead (predicted), mean per step; precision: the share of the pages restored ahead that were used, by samples that are restored and not mapped; recall: the share of pages restored and used that were restored ahead; last_fault_seconds: from the end of the wait to the last restore on demand. Steps before and after which memory was measured, of clones that had taken steps before",
	"prefetch_siblings":    "the same for the first step of a clone, foreseen by what its siblings have learnt",
	"step_time_ratio":      "sum of step_seconds over stock's sum for the same steps: the same step of the same clone in the same repetition",
	"step_p99_ratio":       "99th percentile of step_seconds over stock's 99th percentile for the same steps; of fewer than 100 steps that is the slowest step over stock's slowest. The percentiles are by nearest rank",
	"kinds":                "step_seconds and step_time_ratio of each kind of step",
	"restore_seconds":      "time from the restore command to the first answer of the clone; clones are restored one after the other",
	"restore_ratio":        "sum of restore_seconds over stock's",
	"cpu_seconds":          "processor time of the sandboxes' processes (Sentry, gofer, stubs) from their restore to the end of the episode, of linux also what moving their memory to swap took, with a page pool also that of the pool; mean over repetitions. Guest processes that ended are in it only as far as the kernel credits them to parents that waited for them; the commands that restore, and KSM's thread, are in host_cpu_seconds only",
	"pool_cpu_seconds":     "the part of cpu_seconds that the page pool took",
	"cpu_ratio":            "sum of cpu_seconds over stock's, same repetitions",
	"host_cpu_seconds":     "processor time the whole host spent during an episode, other programs included, less what agentbench used itself and what the host spent in the second before; mean over repetitions. A check of cpu_seconds where nothing else ran",
	"host_cpu_ratio":       "sum of host_cpu_seconds over stock's, same repetitions",
	"outputs_equal":        "every answer is equal to the reference system's (stock if it ran), the digest of everything a clone holds at the end included, and no answer is missing",
	"outputs_missing":      "steps taken under one of the two systems only",
	"_ci":                  "95 % confidence interval by bootstrap. What is resampled is whole clones (one clone in one repetition), since the steps and waits of a clone are not independent; for cpu ratios and used_reduction, repetitions. null with fewer than two of them. It covers differences between clones, not a machine that is slower during a whole episode",
	"null ratios":          "stock did not run this workload with this number of clones, or the figure could not be measured",
}

// group is what a row of the summary is about.
type group struct {
	workload, system string
	clones           int
}

func (k Key) group() group { return group{k.Workload, k.System, k.Clones} }

// unit is one clone in one repetition, the smallest part of a group whose
// figures may be taken for independent of the others'.
type unit struct{ repetition, clone int }

// stepID names a step, or the wait after it, within a group.
type stepID struct {
	unit
	index int
}

// wait is what a clone cost in one wait.
type wait struct {
	owned, host, outside, idle float64
	// pool is the clone's share of the page pool, poolOutside an equal part of
	// what the pool held.
	pool, poolOutside float64
	estimated         bool
	samples           float64
}

// samples is a Report's raw samples by group.
type samples struct {
	groups   []group
	steps    map[group]map[stepID]Step
	waits    map[group]map[stepID]wait
	episodes map[group]map[int]Episode
	// used is the mean over time of what the timeline shows per clone, by
	// repetition.
	used map[group]map[stepID]float64
	// differ are the steps whose answers are in Mismatches.
	differ map[group]map[stepID]bool
}

func at[K, K2 comparable, V any](m map[K]map[K2]V, k K) map[K2]V {
	if m[k] == nil {
		m[k] = make(map[K2]V)
	}
	return m[k]
}

func (r *Report) samples() *samples {
	s := &samples{
		steps:    make(map[group]map[stepID]Step),
		waits:    make(map[group]map[stepID]wait),
		episodes: make(map[group]map[int]Episode),
		used:     make(map[group]map[stepID]float64),
		differ:   make(map[group]map[stepID]bool),
	}
	seen := make(map[group]bool)
	add := func(g group) {
		if !seen[g] {
			seen[g] = true
			s.groups = append(s.groups, g)
		}
	}
	for _, e := range r.Episodes {
		add(e.group())
		at(s.episodes, e.group())[e.Repetition] = e
	}
	for _, t := range r.Steps {
		add(t.group())
		at(s.steps, t.group())[stepID{unit{t.Repetition, t.Clone}, t.Index}] = t
	}
	for _, m := range r.Memory {
		add(m.group())
		waits, id := at(s.waits, m.group()), stepID{unit{m.Repetition, m.Clone}, m.Index}
		// A wait that was measured more than once counts once, with the mean.
		w := waits[id]
		n := w.samples
		mean := func(have float64, more float64) float64 { return (have*n + more) / (n + 1) }
		poolOutside := 0.0
		if m.Pool != nil {
			poolOutside = float64(m.Pool.Own()) / float64(max(m.Clones, 1))
		}
		waits[id] = wait{
			owned: mean(w.owned, float64(m.OwnedBytes)), host: mean(w.host, float64(m.HostBytes)),
			outside: mean(w.outside, float64(m.OwnedOutsideBytes)), idle: mean(w.idle, m.IdleSeconds),
			pool: mean(w.pool, float64(m.PoolShareBytes)), poolOutside: mean(w.poolOutside, poolOutside),
			estimated: w.estimated || m.OwnedEstimated, samples: n + 1,
		}
	}
	lines := make(map[Key][]Point)
	for _, p := range r.Timeline {
		lines[p.Key] = append(lines[p.Key], p)
	}
	for k, points := range lines {
		if v := meanOverTime(points) / float64(max(k.Clones, 1)); v > 0 {
			at(s.used, k.group())[stepID{unit: unit{repetition: k.Repetition}}] = v
		}
	}
	for _, m := range r.Mismatches {
		at(s.differ, m.group())[stepID{unit{m.Repetition, m.Clone}, m.Index}] = true
	}

	// Rows come in the order of the lists of workloads and systems.
	workloads, systems := make(map[string]int), make(map[string]int)
	for i, w := range r.Workloads {
		workloads[w.Name] = i - len(r.Workloads)
	}
	for i, y := range r.Systems {
		systems[y.Name] = i - len(r.Systems)
	}
	slices.SortStableFunc(s.groups, func(a, b group) int {
		return cmp.Or(
			cmp.Compare(workloads[a.workload], workloads[b.workload]), cmp.Compare(a.workload, b.workload),
			cmp.Compare(a.clones, b.clones),
			cmp.Compare(systems[a.system], systems[b.system]), cmp.Compare(a.system, b.system))
	})
	return s
}

// meanOverTime is the mean of a timeline's used bytes from the start of the episode
// to the last point, each pair of points joined by a line.
func meanOverTime(points []Point) float64 {
	points = slices.Clone(points)
	slices.SortStableFunc(points, func(a, b Point) int { return cmp.Compare(a.At, b.At) })
	var area, last, value float64
	for i, p := range points {
		v := float64(p.UsedBytes)
		if i == 0 {
			value = v
		}
		area += (p.At - last) * (value + v) / 2
		last, value = p.At, v
	}
	if last <= 0 {
		return 0
	}
	return area / last
}

// reference is the system that answers are compared with: stock, or the first
// that took steps with the same workload and number of clones.
func (s *samples) reference(g group) group {
	stock := group{g.workload, Stock, g.clones}
	if len(s.steps[stock]) > 0 {
		return stock
	}
	for _, o := range s.groups {
		if o.workload == g.workload && o.clones == g.clones && len(s.steps[o]) > 0 {
			return o
		}
	}
	return g
}

// pair is a figure of one unit under the two systems compared.
type pair struct{ top, bottom float64 }

// paired sums, by unit, what value says of everything that both systems
// measured. value's second result says whether it is to be counted.
func paired[V any](top, bottom map[stepID]V, value func(V) (float64, bool)) map[unit]pair {
	sums := make(map[unit]pair)
	for _, id := range sortedIDs(top) {
		b, ok := bottom[id]
		if !ok {
			continue
		}
		topValue, topOK := value(top[id])
		bottomValue, bottomOK := value(b)
		if topOK && bottomOK {
			p := sums[id.unit]
			sums[id.unit] = pair{p.top + topValue, p.bottom + bottomValue}
		}
	}
	return sums
}

func (s *samples) stepPairs(top, bottom group, kind string) map[unit]pair {
	return paired(s.steps[top], s.steps[bottom], func(t Step) (float64, bool) {
		return t.Seconds, kind == "" || t.Kind == kind
	})
}

func (s *samples) waitPairs(top, bottom group, value func(wait) float64, minIdle float64) map[unit]pair {
	return paired(s.waits[top], s.waits[bottom], func(w wait) (float64, bool) {
		return value(w), w.idle >= minIdle
	})
}

func counted(v float64) (float64, bool) { return v, true }

// restores is the time to the first answer of each clone that has one.
func (s *samples) restores(g group) map[stepID]float64 {
	out := make(map[stepID]float64)
	for repetition, e := range s.episodes[g] {
		for clone, v := range e.Restores {
			if v > 0 {
				out[stepID{unit: unit{repetition, clone}}] = v
			}
		}
	}
	return out
}

func (s *samples) restorePairs(top, bottom group) map[unit]pair {
	return paired(s.restores(top), s.restores(bottom), counted)
}

// cpu is, for each repetition, the processor time that the sandboxes of an
// episode took.
func (s *samples) cpu(g group) map[stepID]float64 {
	return s.perEpisode(g, func(e Episode) float64 { return e.SandboxCPUSeconds })
}

// hostCPU is, for each repetition, the processor time that the host spent beyond
// what it would have without the sandboxes.
func (s *samples) hostCPU(g group) map[stepID]float64 {
	return s.perEpisode(g, func(e Episode) float64 { return e.CPUSeconds - e.OwnCPUSeconds - e.IdleCPUSeconds })
}

// perEpisode is a figure of each repetition's episode, if it is positive.
func (s *samples) perEpisode(g group, value func(Episode) float64) map[stepID]float64 {
	out := make(map[stepID]float64)
	for repetition, e := range s.episodes[g] {
		if v := value(e); v > 0 {
			out[stepID{unit: unit{repetition: repetition}}] = v
		}
	}
	return out
}

func (s *samples) cpuPairs(top, bottom group) map[unit]pair {
	return paired(s.cpu(top), s.cpu(bottom), counted)
}

// pairedTimes are the times of the steps that both systems took, by unit.
func (s *samples) pairedTimes(top, bottom group) (t, b map[unit][]float64) {
	t, b = make(map[unit][]float64), make(map[unit][]float64)
	for _, id := range sortedIDs(s.steps[top]) {
		if other, ok := s.steps[bottom][id]; ok {
			t[id.unit] = append(t[id.unit], s.steps[top][id].Seconds)
			b[id.unit] = append(b[id.unit], other.Seconds)
		}
	}
	return t, b
}

// Summarize fills Summary and Definitions from the raw samples.
func (r *Report) Summarize() {
	r.Definitions = maps.Clone(definitions)
	r.Summary = []Summary{}
	s := r.samples()
	for _, g := range s.groups {
		r.Summary = append(r.Summary, s.summary(g))
	}
}

func (s *samples) summary(g group) Summary {
	stock := group{g.workload, Stock, g.clones}
	out := Summary{Workload: g.workload, System: g.system, Clones: g.clones, Repetitions: len(s.episodes[g]), Kinds: make(map[string]KindSummary)}

	var owned, host, outside, pool, poolOutside []float64
	for _, w := range inOrder(s.waits[g]) {
		owned = append(owned, w.owned)
		host = append(host, w.host)
		pool, poolOutside = append(pool, w.pool), append(poolOutside, w.poolOutside)
		if w.outside > 0 {
			outside = append(outside, w.outside)
		}
		out.OwnedEstimated = out.OwnedEstimated || w.estimated
	}
	out.OwnedBytes, out.HostBytes, out.OwnedOutsideBytes = mean(owned), mean(host), mean(outside)
	out.PoolShareBytes, out.PoolOutsideBytes = mean(pool), mean(poolOutside)

	ownedOf, hostOf := func(w wait) float64 { return w.owned }, func(w wait) float64 { return w.host }
	out.OwnedReduction = ratioOfSums(s.waitPairs(stock, g, ownedOf, 0))
	out.HostReduction = ratioOfSums(s.waitPairs(stock, g, hostOf, 0))
	out.OwnedReductionLong = ratioOfSums(s.waitPairs(stock, g, ownedOf, LongWait))

	out.UsedBytesMean = mean(inOrder(s.used[g]))
	out.UsedReduction = ratioOfSums(paired(s.used[stock], s.used[g], counted))
	out.WaitsMeasured = len(s.waits[g])
	for _, e := range s.episodes[g] {
		out.WaitsUnmeasured += e.Waits
	}
	out.WaitsUnmeasured = max(0, out.WaitsUnmeasured-out.WaitsMeasured)

	times, byKind := []float64(nil), make(map[string][]float64)
	own, siblings := make(map[string][]*StepPrefetch), make(map[string][]*StepPrefetch)
	for _, t := range inOrder(s.steps[g]) {
		switch p := t.Prefetch; {
		case p == nil:
		case t.Index > 0:
			own[t.Kind] = append(own[t.Kind], p)
		case p.Patterns > 0:
			siblings[t.Kind] = append(siblings[t.Kind], p)
		}
		times = append(times, t.Seconds)
		byKind[t.Kind] = append(byKind[t.Kind], t.Seconds)
	}
	out.StepSeconds = distribution(times)
	out.StepTimeRatio = ratioOfSums(s.stepPairs(g, stock, ""))
	out.StepP99Ratio = ratioOfQuantiles(0.99, s, g, stock)
	for kind, v := range byKind {
		k := KindSummary{StepSeconds: distribution(v), Prefetch: summarizePrefetch(own[kind]), Siblings: summarizePrefetch(siblings[kind])}
		// An empty kind would select all steps.
		if kind != "" {
			k.Ratio = ratioOfSums(s.stepPairs(g, stock, kind))
		}
		out.Kinds[kind] = k
	}

	var peaks []float64
	for _, e := range s.episodes[g] {
		if e.PeakBytes > 0 {
			peaks = append(peaks, float64(e.PeakBytes))
		}
	}
	// The order of maps must not reach the last digit of a sum.
	slices.Sort(peaks)
	out.PeakBytes = mean(peaks)
	out.CPUSeconds = mean(inOrder(s.cpu(g)))
	out.PoolCPUSeconds = mean(inOrder(s.perEpisode(g, func(e Episode) float64 { return e.PoolCPUSeconds })))
	out.RestoreSeconds = distribution(inOrder(s.restores(g)))
	out.RestoreRatio = ratioOfSums(s.restorePairs(g, stock))
	out.CPURatio = ratioOfSums(s.cpuPairs(g, stock))
	out.HostCPUSeconds = mean(inOrder(s.hostCPU(g)))
	out.HostCPURatio = ratioOfSums(paired(s.hostCPU(g), s.hostCPU(stock), counted))

	s.compareOutputs(g, &out)
	return out
}

// summarizePrefetch puts steps together, or returns nil if there are none.
func summarizePrefetch(steps []*StepPrefetch) *PrefetchSummary {
	if len(steps) == 0 {
		return nil
	}
	out := &PrefetchSummary{Steps: len(steps)}
	var wanted, predicted, sampled, used uint64
	var last []float64
	for _, p := range steps {
		wanted, predicted = wanted+p.Wanted, predicted+p.Predicted
		sampled, used = sampled+p.Sampled, used+p.Used
		if p.LastFaultSeconds > 0 {
			last = append(last, p.LastFaultSeconds)
		}
	}
	n := float64(len(steps))
	out.WantedPages, out.PredictedPages = float64(wanted)/n, float64(predicted)/n
	out.LastFaultSeconds = distribution(last)
	if sampled > 0 {
		precision := float64(used) / float64(sampled)
		out.Precision = &precision
		if right := precision * float64(predicted); right+float64(wanted) > 0 {
			recall := right / (right + float64(wanted))
			out.Recall = &recall
		}
	}
	return out
}

// compareOutputs pairs every answer with the reference system's.
func (s *samples) compareOutputs(g group, out *Summary) {
	ref := s.reference(g)
	if ref == g {
		out.Reference = true
		out.OutputsEqual = len(s.steps[g]) > 0 && len(s.differ[g]) == 0
		out.Differ = len(s.differ[g])
		return
	}
	for id, t := range s.steps[g] {
		want, ok := s.steps[ref][id]
		switch {
		case !ok:
			out.Missing++
		case t.Output != want.Output:
			out.Compared++
			out.Differ++
		default:
			out.Compared++
			if s.differ[g][id] {
				out.Differ++
			}
		}
	}
	for id := range s.steps[ref] {
		if _, ok := s.steps[g][id]; !ok {
			out.Missing++
		}
	}
	// A step whose answer differed may have ended its clone without a sample.
	for id := range s.differ[g] {
		if _, ok := s.steps[g][id]; !ok {
			out.Differ++
		}
	}
	out.OutputsEqual = out.Compared > 0 && out.Differ == 0 && out.Missing == 0
}

// sortedIDs lists the keys by repetition, clone and index, so that sums do not
// depend on the order of maps.
func sortedIDs[V any](m map[stepID]V) []stepID {
	return slices.SortedFunc(maps.Keys(m), func(a, b stepID) int {
		return cmp.Or(compareUnits(a.unit, b.unit), cmp.Compare(a.index, b.index))
	})
}

// inOrder lists the values in the order of sortedIDs.
func inOrder[V any](m map[stepID]V) []V {
	var out []V
	for _, id := range sortedIDs(m) {
		out = append(out, m[id])
	}
	return out
}

func compareUnits(a, b unit) int {
	return cmp.Or(cmp.Compare(a.repetition, b.repetition), cmp.Compare(a.clone, b.clone))
}

func sortedUnits[V any](m map[unit]V) []unit {
	return slices.SortedFunc(maps.Keys(m), compareUnits)
}

func distribution(values []float64) Seconds {
	sorted := slices.Sorted(slices.Values(values))
	return Seconds{
		Count: len(sorted), Median: quantile(sorted, 0.5), P95: quantile(sorted, 0.95),
		P99: quantile(sorted, 0.99), Sum: sum(sorted),
	}
}

// quantile returns the q-quantile of sorted values by the nearest-rank method,
// 0 for none.
func quantile(sorted []float64, q float64) float64 {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[rank(q, len(sorted))-1]
}

// rank is the place, from 1, of the q-quantile among n sorted values.
func rank(q float64, n int) int {
	// 0.99*100 is a little more than 99 in floating point.
	return min(max(int(math.Ceil(q*float64(n)-1e-9)), 1), n)
}

func sum(values []float64) float64 {
	var s float64
	for _, v := range values {
		s += v
	}
	return s
}

func mean(values []float64) float64 {
	if len(values) == 0 {
		return 0
	}
	return sum(values) / float64(len(values))
}
