package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"runsc-agentzip/pkg/control"
	"runsc-agentzip/pkg/fleet"
)

const (
	beforeWait = "before_wait" // right after the clone's step
	afterWait  = "after_wait"

	// restoreRound is the wait between the restore and the first step.
	restoreRound = -1
)

// demoReport is what out/demo.json holds. Byte figures are per sandbox unless
// their name says otherwise; figures that could not be measured are 0.
type demoReport struct {
	Clones      int     `json:"clones"`
	Rounds      int     `json:"rounds"`
	Seed        uint64  `json:"seed"`
	WaitSeconds float64 `json:"wait_seconds"`
	Runtime     string  `json:"runtime"`
	Stock       string  `json:"stock"`
	// RuntimeHasStats: the judged runtime answers `agentzip stats`. Without
	// it both systems are measured from outside, the same way.
	RuntimeHasStats bool `json:"runtime_has_stats"`
	// Interleaved: both systems' sandboxes were alive together.
	Interleaved    bool    `json:"interleaved"`
	ElapsedSeconds float64 `json:"elapsed_seconds"`
	// Error says why the run is incomplete.
	Error string `json:"error,omitempty"`

	OutputsEqual bool       `json:"outputs_equal"`
	Compared     int        `json:"outputs_compared"`
	Mismatches   []mismatch `json:"mismatches"`

	// The headline figures; Definitions explains them.
	OwnedReduction       float64 `json:"owned_reduction"`
	HostReduction        float64 `json:"host_reduction"`
	HostReductionMemFree float64 `json:"host_reduction_memavailable"`
	CommittedOverOwned   float64 `json:"committed_over_owned"`
	StepTimeRatio        float64 `json:"step_time_ratio"`
	StepTimeRatioMedian  float64 `json:"step_time_ratio_median"`
	StateTimeRatio       float64 `json:"state_time_ratio"`
	RestoreTimeRatio     float64 `json:"restore_time_ratio"`
	CPUTimeRatio         float64 `json:"step_cpu_ratio"`
	OwnedStockBytes      float64 `json:"owned_stock_bytes"`
	OwnedBytes           float64 `json:"owned_bytes"`
	// OwnedOutsideBytes estimates OwnedBytes without asking the runtime.
	OwnedOutsideBytes float64 `json:"owned_outside_bytes"`
	// PoolBytes is what the page pool of all agentzip sandboxes together holds,
	// PoolShareBytes the part of OwnedBytes that is in it.
	PoolBytes      float64 `json:"pool_bytes"`
	PoolShareBytes float64 `json:"pool_share_bytes"`
	// PoolProblems are sandboxes that had no connection to it at the end of a wait.
	PoolProblems []string          `json:"pool_problems"`
	Definitions  map[string]string `json:"definitions"`

	// Versions of the two binaries. Only equal ones can share an image;
	// StockTemplate is filled if they could not.
	Versions       map[string]string `json:"versions"`
	SharedImage    bool              `json:"shared_image"`
	Template       templateReport    `json:"template"`
	StockTemplate  templateReport    `json:"stock_template"`
	ReferenceBytes uint64            `json:"reference_bytes"`

	Waits     []waitSummary `json:"waits"`
	StepTimes []stepSummary `json:"step_times"`

	Restores      []restoreSample  `json:"restores"`
	Steps         []stepSample     `json:"steps"`
	States        []stepSample     `json:"states"`
	Memory        []memorySample   `json:"memory"`
	Batches       []batchSample    `json:"batches"`
	Settles       []settleSample   `json:"settles"`
	Teardowns     []teardownSample `json:"teardowns"`
	CheckProblems []string         `json:"check_problems"`
}

var demoDefinitions = map[string]string{
	"committed":                   "guest memory committed by one sandbox, template included. stock: st_blocks of its memory file; agentzip: guest_bytes of its stats",
	"owned":                       "stock: committed pages whose content differs from the template's page at the same offset (a page that the template lacks counts unless it is all zeros), compared from outside with a fresh clone's memory file; agentzip: owned_bytes of its stats (memory file, compressed store, metadata, pool share)",
	"owned_outside":               "agentzip owned memory estimated without its stats: st_blocks of the memory file plus what its Sentry's anonymous memory and other memfds exceed the stock Sentry's by, and an equal part of pool",
	"pool":                        "what the page pool of all agentzip sandboxes together holds, seen from outside: st_blocks of its memory files and its process's anonymous memory. pool_share is a sandbox's part of it by its stats, which is in owned",
	"host":                        "all memory one sandbox adds to the host: memfds by st_blocks, anonymous and file PSS of Sentry, gofer and stubs, page tables; files such as the binary count in proportion; a page pool in equal parts; a template that the sandboxes share counts once, as much of it as the page cache holds, in equal parts",
	"owned_reduction":             "stock owned over agentzip owned, both averaged over all sandboxes and all waits after steps, measured at the end of the wait",
	"host_reduction":              "stock host over agentzip host, averaged in the same way",
	"host_reduction_memavailable": "MemAvailable that returns when all stock sandboxes are ended, over the same for agentzip, at the end of the run; a shared template, which MemAvailable takes for free memory, is added once. It includes what other programs did meanwhile",
	"committed_over_owned":        "agentzip committed over agentzip owned: what compression does to the sandbox's whole memory, template included",
	"step_time_ratio":             "sum of step wall times, agentzip over stock",
	"step_time_ratio_median":      "median over all steps of agentzip's time over stock's for the same step of the same clone; less sensitive than the sum to other load on the machine",
	"state_time_ratio":            "the same for the final digest of everything a sandbox holds, which touches most of its memory at once",
	"restore_time_ratio":          "sum of restore times, agentzip over stock",
	"step_cpu_ratio":              "processor time used by the stepping sandbox during its steps, agentzip over stock",
}

type templateReport struct {
	Ready             json.RawMessage `json:"ready,omitempty"`
	StartSeconds      float64         `json:"start_seconds"`
	CheckpointSeconds float64         `json:"checkpoint_seconds"`
	MemfdBytes        uint64          `json:"memfd_bytes"`
	ImageBytes        uint64          `json:"image_bytes"`
}

type mismatch struct {
	Clone    int             `json:"clone"`
	Round    int             `json:"round"`
	Step     string          `json:"step"`
	Stock    json.RawMessage `json:"stock"`
	Agentzip json.RawMessage `json:"agentzip"`
}

type restoreSample struct {
	System  string  `json:"system"`
	Clone   int     `json:"clone"`
	Seconds float64 `json:"seconds"`
}

type stepSample struct {
	System string `json:"system"`
	Clone  int    `json:"clone"`
	Round  int    `json:"round"`
	Step   string `json:"step"`
	// IdleSeconds is how long the sandbox had waited before the step.
	IdleSeconds float64         `json:"idle_seconds"`
	Seconds     float64         `json:"seconds"`
	CPUSeconds  float64         `json:"cpu_seconds"`
	Output      json.RawMessage `json:"output"`
}

type memorySample struct {
	System         string  `json:"system"`
	Clone          int     `json:"clone"`
	Round          int     `json:"round"`
	Step           string  `json:"step"`
	When           string  `json:"when"`
	IdleSeconds    float64 `json:"idle_seconds"`
	CommittedBytes uint64  `json:"committed_bytes"`
	OwnedBytes     uint64  `json:"owned_bytes"`
	// HostBytes includes this sandbox's part of TemplateOnceBytes.
	HostBytes uint64 `json:"host_bytes"`
	// TemplateOnceBytes is what the host caches of a template that all
	// sandboxes of this system share; 0 if they copied it.
	TemplateOnceBytes uint64       `json:"template_once_bytes"`
	Memory            fleet.Memory `json:"measured"`
	// Pool is what the page pool held; HostBytes has an equal part of it.
	Pool  *fleet.PoolMemory `json:"pool,omitempty"`
	Diff  *fleet.GuestDiff  `json:"diff,omitempty"`
	Stats *control.Stats    `json:"stats,omitempty"`
}

type settleSample struct {
	System  string  `json:"system"`
	Round   int     `json:"round"`
	Seconds float64 `json:"seconds"`
	Quiet   bool    `json:"quiet"`
}

// batchSample says how busy the machine was while one system's sandboxes took
// their steps, as fractions of all its processors.
type batchSample struct {
	System  string  `json:"system"`
	Round   int     `json:"round"`
	Seconds float64 `json:"seconds"`
	Busy    float64 `json:"busy"`
	// Own is this program, its runsc commands and its sandboxes.
	Own float64 `json:"own"`
	// Others is the rest. Guest processes that ended are in it in part.
	Others float64 `json:"others"`
}

type teardownSample struct {
	System          string `json:"system"`
	AvailableBefore uint64 `json:"memavailable_before"`
	AvailableAfter  uint64 `json:"memavailable_after"`
	FreedBytes      int64  `json:"freed_bytes"`
	// TemplateOnceBytes is the shared template, which is not in FreedBytes.
	TemplateOnceBytes uint64 `json:"template_once_bytes"`
}

// waitSummary is one row of the memory table: means over the sandboxes.
type waitSummary struct {
	Round int    `json:"round"`
	Step  string `json:"step"`

	Stock    waitMemory `json:"stock"`
	Agentzip waitMemory `json:"agentzip"`

	OwnedReduction float64 `json:"owned_reduction"`
	HostReduction  float64 `json:"host_reduction"`
}

// waitMemory is the memory of one system around one wait.
type waitMemory struct {
	IdleSeconds     float64 `json:"idle_seconds"`
	CommittedBytes  float64 `json:"committed_bytes"`
	OwnedBytes      float64 `json:"owned_bytes"`
	HostBytes       float64 `json:"host_bytes"`
	OwnedBefore     float64 `json:"owned_before_bytes"`
	HostBefore      float64 `json:"host_before_bytes"`
	CommittedBefore float64 `json:"committed_before_bytes"`
}

// stepSummary is one row of the time table.
type stepSummary struct {
	Step           string  `json:"step"`
	Samples        int     `json:"samples"`
	StockMedian    float64 `json:"stock_median"`
	StockP95       float64 `json:"stock_p95"`
	AgentzipMedian float64 `json:"agentzip_median"`
	AgentzipP95    float64 `json:"agentzip_p95"`
	Ratio          float64 `json:"sum_ratio"`
	Equal          int     `json:"outputs_equal"`
}

func newDemoReport(c demoConfig) *demoReport {
	return &demoReport{
		Clones: c.clones, Rounds: c.rounds, Seed: c.seed, WaitSeconds: c.wait.Seconds(),
		Runtime: c.runtime, Stock: c.stock, Definitions: demoDefinitions,
		// Lists are never null in the JSON.
		Versions:   make(map[string]string),
		Mismatches: []mismatch{}, CheckProblems: []string{}, PoolProblems: []string{},
	}
}

func (r *demoReport) restoreSeconds(system string) []float64 {
	var out []float64
	for _, s := range r.Restores {
		if s.System == system {
			out = append(out, s.Seconds)
		}
	}
	return out
}

// finish computes everything that follows from the samples.
func (r *demoReport) finish(elapsed time.Duration, err error) {
	r.ElapsedSeconds = elapsed.Seconds()
	if err != nil {
		r.Error = err.Error()
	}
	r.compareOutputs()
	r.summarizeWaits()
	r.summarizeSteps()

	// Figures after steps: every wait but the one after the restore and the
	// one after the final digest.
	after := func(system string) (committed, owned, host, outside []float64) {
		for _, m := range r.Memory {
			if m.System == system && m.When == afterWait && m.Round >= 0 && m.Round < r.Rounds {
				committed = append(committed, float64(m.CommittedBytes))
				owned = append(owned, float64(m.OwnedBytes))
				host = append(host, float64(m.HostBytes))
				outside = append(outside, float64(m.Memory.OtherMemfd+m.Memory.Sentry.PSSAnon))
			}
		}
		return
	}
	_, stockOwned, stockHost, stockOther := after(stockName)
	committed, owned, host, other := after(judgedName)
	r.OwnedStockBytes, r.OwnedBytes = mean(stockOwned), mean(owned)
	r.OwnedReduction = ratio(mean(stockOwned), mean(owned))
	r.HostReduction = ratio(mean(stockHost), mean(host))
	if r.RuntimeHasStats {
		r.CommittedOverOwned = ratio(mean(committed), mean(owned))
		var memfd, pool, share []float64
		for _, m := range r.Memory {
			if m.System == judgedName && m.When == afterWait && m.Round >= 0 && m.Round < r.Rounds {
				memfd = append(memfd, float64(m.Memory.GuestMemfd))
				if m.Pool != nil {
					pool = append(pool, float64(m.Pool.Own()))
				}
				if m.Stats == nil {
					continue
				}
				share = append(share, float64(m.Stats.PoolShareBytes))
				if why := notConnected(m.Stats.Pool); m.Pool != nil && why != "" {
					r.PoolProblems = append(r.PoolProblems, fmt.Sprintf("clone %d, round %d: %s", m.Clone, m.Round, why))
				}
			}
		}
		r.PoolBytes, r.PoolShareBytes = mean(pool), mean(share)
		r.OwnedOutsideBytes = mean(memfd) + max(0, mean(other)-mean(stockOther)) + r.PoolBytes/float64(max(r.Clones, 1))
	}

	r.StepTimeRatio = sumRatio(r.Steps, func(s stepSample) float64 { return s.Seconds })
	r.StepTimeRatioMedian = r.pairedMedian()
	r.CPUTimeRatio = sumRatio(r.Steps, func(s stepSample) float64 { return s.CPUSeconds })
	r.StateTimeRatio = sumRatio(r.States, func(s stepSample) float64 { return s.Seconds })
	r.RestoreTimeRatio = ratio(sum(r.restoreSeconds(judgedName)), sum(r.restoreSeconds(stockName)))
	freed := make(map[string]float64)
	for _, t := range r.Teardowns {
		freed[t.System] = float64(t.FreedBytes) + float64(t.TemplateOnceBytes)
	}
	if freed[stockName] > 0 && freed[judgedName] > 0 {
		r.HostReductionMemFree = freed[stockName] / freed[judgedName]
	}
}

func sumRatio(samples []stepSample, value func(stepSample) float64) float64 {
	total := make(map[string]float64)
	for _, s := range samples {
		total[s.System] += value(s)
	}
	return ratio(total[judgedName], total[stockName])
}

// pairedMedian is the median, over all steps, of the time a step took under
// agentzip over the time the same step of the same clone took under stock.
func (r *demoReport) pairedMedian() float64 {
	stock := make(map[outputKey]float64)
	for _, s := range r.Steps {
		if s.System == stockName {
			stock[outputKey{s.Clone, s.Round, s.Step}] = s.Seconds
		}
	}
	var ratios []float64
	for _, s := range r.Steps {
		if t := stock[outputKey{s.Clone, s.Round, s.Step}]; s.System == judgedName && t > 0 {
			ratios = append(ratios, s.Seconds/t)
		}
	}
	return quantile(ratios, 0.5)
}

// othersLoad is the share of the machine that other programs used on average
// while a system's sandboxes took their steps.
func (r *demoReport) othersLoad(system string) float64 {
	var v []float64
	for _, b := range r.Batches {
		if b.System == system {
			v = append(v, b.Others)
		}
	}
	return mean(v)
}

// templateOnce is the latest measurement of the template that a system's
// sandboxes share.
func (r *demoReport) templateOnce(system string) uint64 {
	for _, m := range slices.Backward(r.Memory) {
		if m.System == system {
			return m.TemplateOnceBytes
		}
	}
	return 0
}

type outputKey struct {
	clone, round int
	step         string
}

// compareOutputs pairs every answer with the other system's. Outputs count as
// equal only if every step has a partner and there is at least one.
func (r *demoReport) compareOutputs() {
	outputs := map[string]map[outputKey]json.RawMessage{stockName: {}, judgedName: {}}
	for _, s := range slices.Concat(r.Steps, r.States) {
		outputs[s.System][outputKey{s.Clone, s.Round, s.Step}] = s.Output
	}
	r.Mismatches = []mismatch{}
	r.Compared = 0
	for k, stock := range outputs[stockName] {
		az, ok := outputs[judgedName][k]
		if ok {
			r.Compared++
		}
		if !ok || string(stock) != string(az) {
			r.Mismatches = append(r.Mismatches, mismatch{k.clone, k.round, k.step, stock, az})
		}
	}
	slices.SortFunc(r.Mismatches, func(a, b mismatch) int {
		if a.Round != b.Round {
			return a.Round - b.Round
		}
		return a.Clone - b.Clone
	})
	r.OutputsEqual = r.Error == "" && len(r.Mismatches) == 0 && r.Compared > 0 && len(outputs[stockName]) == len(outputs[judgedName])
}

func (r *demoReport) summarizeWaits() {
	type key struct {
		round int
		step  string
	}
	var order []key
	for _, m := range r.Memory {
		if k := (key{m.Round, m.Step}); m.When == afterWait && !slices.Contains(order, k) {
			order = append(order, k)
		}
	}
	slices.SortStableFunc(order, func(a, b key) int { return a.round - b.round })
	pick := func(k key, system, when string, value func(memorySample) float64) float64 {
		var v []float64
		for _, m := range r.Memory {
			if m.System == system && m.When == when && m.Round == k.round && m.Step == k.step {
				v = append(v, value(m))
			}
		}
		return mean(v)
	}
	r.Waits = []waitSummary{}
	for _, k := range order {
		side := func(system string) waitMemory {
			return waitMemory{
				IdleSeconds:     pick(k, system, afterWait, func(m memorySample) float64 { return m.IdleSeconds }),
				CommittedBytes:  pick(k, system, afterWait, func(m memorySample) float64 { return float64(m.CommittedBytes) }),
				OwnedBytes:      pick(k, system, afterWait, func(m memorySample) float64 { return float64(m.OwnedBytes) }),
				HostBytes:       pick(k, system, afterWait, func(m memorySample) float64 { return float64(m.HostBytes) }),
				OwnedBefore:     pick(k, system, beforeWait, func(m memorySample) float64 { return float64(m.OwnedBytes) }),
				HostBefore:      pick(k, system, beforeWait, func(m memorySample) float64 { return float64(m.HostBytes) }),
				CommittedBefore: pick(k, system, beforeWait, func(m memorySample) float64 { return float64(m.CommittedBytes) }),
			}
		}
		w := waitSummary{Round: k.round, Step: k.step, Stock: side(stockName), Agentzip: side(judgedName)}
		w.OwnedReduction = ratio(w.Stock.OwnedBytes, w.Agentzip.OwnedBytes)
		w.HostReduction = ratio(w.Stock.HostBytes, w.Agentzip.HostBytes)
		r.Waits = append(r.Waits, w)
	}
}

func (r *demoReport) summarizeSteps() {
	unequal := make(map[outputKey]bool)
	for _, m := range r.Mismatches {
		unequal[outputKey{m.Clone, m.Round, m.Step}] = true
	}
	r.StepTimes = []stepSummary{}
	add := func(name string, samples []stepSample, match func(stepSample) bool) {
		var stock, az []float64
		equal := 0
		for _, s := range samples {
			if !match(s) {
				continue
			}
			if s.System == stockName {
				stock = append(stock, s.Seconds)
				continue
			}
			az = append(az, s.Seconds)
			if !unequal[outputKey{s.Clone, s.Round, s.Step}] {
				equal++
			}
		}
		r.StepTimes = append(r.StepTimes, stepSummary{
			Step: name, Samples: len(az), Equal: equal, Ratio: ratio(sum(az), sum(stock)),
			StockMedian: quantile(stock, 0.5), StockP95: quantile(stock, 0.95),
			AgentzipMedian: quantile(az, 0.5), AgentzipP95: quantile(az, 0.95),
		})
	}
	var names []string
	for _, s := range r.Steps {
		if !slices.Contains(names, s.Step) {
			names = append(names, s.Step)
		}
	}
	for _, name := range names {
		add(name, r.Steps, func(s stepSample) bool { return s.Step == name })
	}
	add("all steps", r.Steps, func(stepSample) bool { return true })
	add("full state", r.States, func(stepSample) bool { return true })
}

// write stores the report as JSON.
func (r *demoReport) write(path string) error {
	b, err := json.MarshalIndent(r, "", " ")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, append(b, '\n'), 0o644)
}

// print writes the table that people read.
func (r *demoReport) print(w io.Writer) {
	m := func(bytes float64) string {
		if bytes == 0 {
			return "-"
		}
		return fmt.Sprintf("%.1f", bytes/(1<<20))
	}
	x := func(v float64) string {
		if v == 0 {
			return "-"
		}
		return fmt.Sprintf("%.2fx", v)
	}
	together := "both systems alive together, in alternating batches"
	if !r.Interleaved {
		together = "one system after the other"
	}
	fmt.Fprintf(w, "\n%d sandboxes per system restored from one %s checkpoint, %d tool steps each, waits of %.3gs or more; %s\n",
		r.Clones, mib(r.Template.ImageBytes), r.Rounds, r.WaitSeconds, together)
	fmt.Fprintf(w, "agentzip = %s, stock = %s\n", r.Runtime, r.Stock)

	rule := strings.Repeat("-", 112)
	fmt.Fprintf(w, "\nMEMORY PER SANDBOX (MiB, mean of %d)\n", r.Clones)
	fmt.Fprintf(w, "%-11s|%27s |%45s |%20s\n", "", "stock, end of wait", "agentzip, before wait -> end of wait", "reduction")
	fmt.Fprintf(w, "%-11s|%9s%9s%9s |%9s%18s%18s |%10s%10s\n", "wait after", "guest", "owned", "host", "guest", "owned", "host", "owned", "host")
	fmt.Fprintln(w, rule)
	for _, s := range r.Waits {
		fmt.Fprintf(w, "%-11s|%9s%9s%9s |%9s%18s%18s |%10s%10s\n", s.Step,
			m(s.Stock.CommittedBytes), m(s.Stock.OwnedBytes), m(s.Stock.HostBytes),
			m(s.Agentzip.CommittedBytes),
			m(s.Agentzip.OwnedBefore)+" -> "+m(s.Agentzip.OwnedBytes),
			m(s.Agentzip.HostBefore)+" -> "+m(s.Agentzip.HostBytes),
			x(s.OwnedReduction), x(s.HostReduction))
	}
	fmt.Fprintln(w, rule)
	fmt.Fprintf(w, "%-11s|%9s%9s%9s |%9s%18s%18s |%10s%10s\n", "steps, mean", "", m(r.OwnedStockBytes), "", "", m(r.OwnedBytes), "", x(r.OwnedReduction), x(r.HostReduction))
	fmt.Fprintln(w, "guest = all memory the guest has committed, template included; stock owned = the part that differs from the template")
	if r.RuntimeHasStats {
		fmt.Fprintf(w, "agentzip owned = memory file + compressed store + metadata + pool share, from its stats; estimated from outside: %s\n", m(r.OwnedOutsideBytes))
		if r.PoolBytes > 0 {
			fmt.Fprintf(w, "the page pool holds %s for all %d agentzip sandboxes together, %s each; their stats count %s each\n", m(r.PoolBytes), r.Clones, m(r.PoolBytes/float64(r.Clones)), m(r.PoolShareBytes))
		}
		fmt.Fprintf(w, "agentzip guest over owned (compression of everything, template included): %s\n", x(r.CommittedOverOwned))
	} else {
		fmt.Fprintln(w, "this runtime has no agentzip stats: its owned memory is measured as stock's is, the memory that differs from the template")
	}
	fmt.Fprintln(w, "host = memory files, Sentry, gofer, stubs and page tables, and an equal part of the page pool")
	if t := r.templateOnce(judgedName); t > 0 {
		fmt.Fprintf(w, "       and 1/%d of the %s that the page cache holds of the template the agentzip sandboxes share\n", r.Clones, mib(t))
	}
	for _, t := range r.Teardowns {
		shared := ""
		if t.TemplateOnceBytes > 0 {
			shared = fmt.Sprintf(", besides %s of shared template", mib(t.TemplateOnceBytes))
		}
		fmt.Fprintf(w, "ending the %d %s sandboxes gave the host back %.0f MiB (MemAvailable)%s\n", r.Clones, t.System, float64(t.FreedBytes)/(1<<20), shared)
	}
	if r.HostReductionMemFree > 0 {
		fmt.Fprintf(w, "host reduction by MemAvailable: %s\n", x(r.HostReductionMemFree))
	}

	fmt.Fprintf(w, "\nSTEP TIMES (s)\n")
	fmt.Fprintf(w, "%-11s%8s |%9s%9s |%9s%9s |%12s |  %s\n", "step", "steps", "stock p50", "p95", "az p50", "p95", "az / stock", "outputs equal")
	fmt.Fprintln(w, strings.Repeat("-", 92))
	for _, s := range r.StepTimes {
		fmt.Fprintf(w, "%-11s%8d |%9.3f%9.3f |%9.3f%9.3f |%12s |  %d of %d\n", s.Step, s.Samples, s.StockMedian, s.StockP95, s.AgentzipMedian, s.AgentzipP95, x(s.Ratio), s.Equal, s.Samples)
	}
	fmt.Fprintf(w, "restore: stock %.2f s, agentzip %.2f s median\n", quantile(r.restoreSeconds(stockName), 0.5), quantile(r.restoreSeconds(judgedName), 0.5))
	fmt.Fprintf(w, "median of az / stock over the same step of the same clone: %s; processor time of the stepping sandbox: %s\n", x(r.StepTimeRatioMedian), x(r.CPUTimeRatio))
	stockLoad, judgedLoad := r.othersLoad(stockName), r.othersLoad(judgedName)
	fmt.Fprintf(w, "other programs used %.0f%% of the machine during stock's steps and %.0f%% during agentzip's\n", 100*stockLoad, 100*judgedLoad)
	unsettled := 0
	for _, s := range r.Settles {
		if !s.Quiet {
			unsettled++
		}
	}
	if unsettled > 0 {
		fmt.Fprintf(w, "note: in %d of %d waits background work was still going on when the wait ended (--settle)\n", unsettled, len(r.Settles))
	}

	fmt.Fprintf(w, "\nreduction of owned memory %s, of host memory %s; step time %s of stock's; outputs %s; %.0f s in all\n",
		x(r.OwnedReduction), x(r.HostReduction), x(r.StepTimeRatio), map[bool]string{true: "equal", false: "NOT EQUAL"}[r.OutputsEqual], r.ElapsedSeconds)
	for i, mm := range r.Mismatches {
		if i == 3 {
			fmt.Fprintf(w, "... and %d more\n", len(r.Mismatches)-i)
			break
		}
		fmt.Fprintf(w, "clone %d, round %d, %s: stock %.300s, agentzip %.300s\n", mm.Clone, mm.Round, mm.Step, mm.Stock, mm.Agentzip)
	}
	for _, p := range r.CheckProblems {
		fmt.Fprintf(w, "check: %s\n", p)
	}
	if n := len(r.PoolProblems); n > 0 {
		fmt.Fprintf(w, "note: sandboxes were measured %d times without a connection to the page pool, first %s\n", n, r.PoolProblems[0])
	}
}
