// Package report holds what a run of agentbench measured: the types of its
// JSON file, the figures derived from the raw samples, and their presentation
// as a terminal table, as one self-contained HTML page and as a comparison of
// two runs.
//
// The raw samples are the truth: everything in Summary and Ratios can be
// computed from them again, and Compare does.
//
// # Vocabulary
//
// A run has workloads; each is measured with every system and number of clones.
// One such measurement is an episode: N clones are restored from the template
// of the workload, take all their steps, each at its own pace, and end. Only
// one episode runs at a time. An episode is repeated Config.Repetitions times;
// the order of the systems changes from each workload, number of clones
// and repetition to the next. In repetition r, clone c takes the same steps with the same waits whatever the
// system, so that (workload, clones, repetition, clone, index) names a step that
// can be compared between systems.
package report

import (
	"encoding/json"
	"math"
	"time"

	"runsc-agentzip/pkg/control"
	"runsc-agentzip/pkg/fleet"
)

// Format is the version of the JSON format.
const Format = 1

// Stock is the name of the system that the others are compared with.
const Stock = "stock"

// Report is one run. Sizes are in bytes and times in seconds. A figure that
// could not be measured is 0, or null where 0 is a possible value.
type Report struct {
	Format  int       `json:"format"`
	Date    time.Time `json:"date"`
	Commit  string    `json:"commit,omitempty"`
	Command []string  `json:"command"`
	Machine Machine   `json:"machine"`
	Config  Config    `json:"config"`
	// Seconds is how long the run took.
	Seconds float64 `json:"seconds"`
	// Error says why the run is incomplete.
	Error string `json:"error,omitempty"`

	// Summary has one entry for each workload, system and number of clones.
	Summary []Summary `json:"summary"`
	// Definitions explains the figures, by their JSON name.
	Definitions map[string]string `json:"definitions"`

	Workloads []Workload `json:"workloads"`
	Systems   []System   `json:"systems"`

	Episodes   []Episode  `json:"episodes"`
	Steps      []Step     `json:"steps"`
	Memory     []Memory   `json:"memory"`
	Timeline   []Point    `json:"timeline"`
	Mismatches []Mismatch `json:"mismatches"`
	// Problems are findings of the runtimes' own consistency checks and
	// anything else that a reader must know to judge the figures. A finding of
	// a consistency check fails the run.
	Problems []Problem `json:"problems"`
}

// Machine describes where the run took place.
type Machine struct {
	OS          string `json:"os"`
	Kernel      string `json:"kernel"`
	Arch        string `json:"arch"`
	CPU         string `json:"cpu"`
	CPUs        int    `json:"cpus"`
	MemoryBytes uint64 `json:"memory_bytes"`
	Virtual     string `json:"virtualization,omitempty"`
	GoVersion   string `json:"go_version"`
	Platform    string `json:"platform"`
	// MapTouchNS is what the first access to a page costs that was mapped again with
	// its page table entry in place, in nanoseconds, which is much
	// under a hypervisor that shadows page tables. Each page that was evicted and is
	// wanted again pays it. 0 if it was not measured.
	MapTouchNS float64 `json:"map_touch_ns,omitempty"`
}

// same tells whether m and o are one machine, whatever was measured on it.
func (m Machine) same(o Machine) bool {
	m.MapTouchNS, o.MapTouchNS = 0, 0
	return m == o
}

// Config is what the flags said.
type Config struct {
	Clones      []int   `json:"clones"`
	Steps       int     `json:"steps"`
	Repetitions int     `json:"repetitions"`
	Seed        uint64  `json:"seed"`
	WaitScale   float64 `json:"wait_scale"`
	// Waits describes the distribution that waits are drawn from.
	Waits string `json:"waits"`
	// Trace is the file that was replayed, if any.
	Trace string `json:"trace,omitempty"`
}

// Workload is one kind of sandbox and what its template costs.
type Workload struct {
	Name    string `json:"name"`
	Summary string `json:"summary"`
	// StartSeconds is how long the first sandbox took to get ready, and
	// CheckpointSeconds to be checkpointed.
	StartSeconds      float64 `json:"start_seconds"`
	CheckpointSeconds float64 `json:"checkpoint_seconds"`
	// ImageBytes is the size of the checkpoint, TemplateBytes the guest memory
	// in it.
	ImageBytes    uint64 `json:"image_bytes"`
	TemplateBytes uint64 `json:"template_bytes"`
}

// System is one way to run sandboxes.
type System struct {
	Name    string `json:"name"`
	Summary string `json:"summary"`
	Binary  string `json:"binary"`
	Version string `json:"version"`
	// SHA256 is that of the binary.
	SHA256 string   `json:"sha256,omitempty"`
	Flags  []string `json:"flags"`
	// Ablation names the part of the runtime that is switched off; "" for the
	// systems that are whole.
	Ablation string `json:"ablation,omitempty"`
	// Pool says that the sandboxes of an episode shared a page pool.
	Pool bool `json:"pool,omitempty"`
}

// Key names an episode.
type Key struct {
	Workload   string `json:"workload"`
	System     string `json:"system"`
	Clones     int    `json:"clones"`
	Repetition int    `json:"repetition"`
}

// Episode is one system's turn at one workload.
type Episode struct {
	Key
	// Began is seconds since the start of the run; Order is the episode's place
	// in the run, from 0.
	Began float64 `json:"began"`
	Order int     `json:"order"`
	// Seconds is from the first restore to the end of the last wait.
	Seconds float64 `json:"seconds"`
	// Restores is, for each clone, the time from the restore command to the
	// first answer.
	Restores []float64 `json:"restores"`
	// SandboxCPUSeconds is the processor time of the sandboxes' own processes and
	// of what the system does for them elsewhere.
	SandboxCPUSeconds float64 `json:"sandbox_cpu_seconds,omitempty"`
	// PoolCPUSeconds is the part of SandboxCPUSeconds that the page pool took.
	PoolCPUSeconds float64 `json:"pool_cpu_seconds,omitempty"`
	// CPUSeconds is the processor time the host spent during the episode, on
	// whatever; OwnCPUSeconds is the part used by agentbench and its
	// measurements. IdleCPUSeconds is what the host would have spent anyway, by
	// its load in the second before the episode.
	CPUSeconds     float64 `json:"cpu_seconds"`
	OwnCPUSeconds  float64 `json:"own_cpu_seconds"`
	IdleCPUSeconds float64 `json:"idle_cpu_seconds"`
	// Waits is how many waits its clones had, those too short to be measured and
	// those in which the machine was too busy included.
	Waits int `json:"waits,omitempty"`
	// PeakBytes is the most memory all sandboxes together added to the host.
	PeakBytes uint64 `json:"peak_bytes"`
	// TemplateOnceBytes is what the host caches of a template that all clones
	// share.
	TemplateOnceBytes uint64 `json:"template_once_bytes"`
	// FreedBytes is the memory that became available when the sandboxes ended:
	// the host's own opinion of what they cost.
	FreedBytes int64 `json:"freed_bytes"`
}

// Step is one tool step of one clone.
type Step struct {
	Key
	Clone int `json:"clone"`
	Index int `json:"index"`
	// Kind groups steps of the same nature: "explore", "edit", ...
	Kind string `json:"kind"`
	// Began is seconds since the start of the episode.
	Began float64 `json:"began"`
	// WaitSeconds is how long the clone had waited before the step.
	WaitSeconds float64 `json:"wait_seconds"`
	Seconds     float64 `json:"seconds"`
	// Output is a digest of the answer.
	Output string `json:"output"`
	// DemandPages and PrefetchedPages are how many pages came back during the
	// step and the wait before it, where the runtime tells.
	DemandPages     uint64 `json:"demand_pages,omitempty"`
	PrefetchedPages uint64 `json:"prefetched_pages,omitempty"`
	// Prefetch is how well the step was foreseen, where the runtime tells and memory
	// was measured in the waits before and after.
	Prefetch *StepPrefetch `json:"prefetch,omitempty"`
}

// StepPrefetch counts pages of one step.
type StepPrefetch struct {
	// Patterns is how many earlier steps the clone remembered in the wait before. Of
	// a clone's first step they are a sibling's.
	Patterns uint64 `json:"patterns"`
	// Wanted pages were restored on demand, Predicted ones ahead; Sampled ones are
	// those of the latter that were watched, and Used those of them that were used.
	Wanted    uint64 `json:"wanted"`
	Predicted uint64 `json:"predicted"`
	Sampled   uint64 `json:"sampled"`
	Used      uint64 `json:"used"`
	// LastFaultSeconds is the time from the end of the wait to the last restore on
	// demand, or 0 if it is not known.
	LastFaultSeconds float64 `json:"last_fault_seconds"`
}

// Memory is what one clone cost at one moment of a wait.
type Memory struct {
	Key
	Clone int `json:"clone"`
	// Index is the step that the wait follows; -1 is the wait after the restore.
	Index int `json:"index"`
	// At is seconds since the start of the episode.
	At float64 `json:"at"`
	// IdleSeconds is how long the clone had waited when it was measured.
	IdleSeconds float64 `json:"idle_seconds"`
	// CommittedBytes is guest memory in whatever form, OwnedBytes what is kept
	// for it beyond the template, HostBytes all that the sandbox adds to the
	// host, its part of a shared template and of a swap device included.
	CommittedBytes uint64 `json:"committed_bytes"`
	OwnedBytes     uint64 `json:"owned_bytes"`
	HostBytes      uint64 `json:"host_bytes"`
	// PoolShareBytes is the part of OwnedBytes that is the clone's share of the
	// page pool, as the runtime counts it.
	PoolShareBytes uint64 `json:"pool_share_bytes,omitempty"`
	// OwnedEstimated says that OwnedBytes is not counted but estimated.
	OwnedEstimated bool `json:"owned_estimated,omitempty"`
	// OwnedOutsideBytes is OwnedBytes as seen without asking the runtime.
	OwnedOutsideBytes uint64       `json:"owned_outside_bytes,omitempty"`
	Measured          fleet.Memory `json:"measured"`
	// Pool is what the page pool of all clones held at that moment. HostBytes and
	// OwnedOutsideBytes have an equal part of it for each clone.
	Pool  *fleet.PoolMemory `json:"pool,omitempty"`
	Diff  *fleet.GuestDiff  `json:"diff,omitempty"`
	Stats *control.Stats    `json:"stats,omitempty"`
	// SwapBytes is what the clone has in the swap device before compression.
	SwapBytes uint64 `json:"swap_bytes,omitempty"`
}

// Point is one reading of the whole host during an episode.
type Point struct {
	Key
	// At is seconds since the start of the episode.
	At float64 `json:"at"`
	// UsedBytes is what all sandboxes together add to the host: the memory
	// available before the episode less the memory available now, plus a shared
	// template, which the host counts as available.
	UsedBytes uint64 `json:"used_bytes"`
	// Waiting is how many clones wait.
	Waiting int `json:"waiting"`
}

// Mismatch is an answer that differs from the reference system's.
type Mismatch struct {
	Key
	Clone     int    `json:"clone"`
	Index     int    `json:"index"`
	Kind      string `json:"kind"`
	Reference string `json:"reference"`
	// Want and Got are the answers, shortened.
	Want json.RawMessage `json:"want"`
	Got  json.RawMessage `json:"got"`
}

// Problem is something that went wrong or spoils figures.
type Problem struct {
	Key
	// Fatal problems fail the run.
	Fatal bool   `json:"fatal"`
	Text  string `json:"text"`
}

// Summary is one row of the result. Ratios are against Stock in the same run
// and are null where there is nothing to compare with. Summarize computes all of
// it.
type Summary struct {
	Workload string `json:"workload"`
	System   string `json:"system"`
	Clones   int    `json:"clones"`
	// Repetitions is how many episodes the row is made of.
	Repetitions int `json:"repetitions"`

	// OwnedBytes and HostBytes are means per clone over all waits measured,
	// PeakBytes the mean over repetitions of what all clones together took.
	OwnedBytes float64 `json:"owned_bytes"`
	HostBytes  float64 `json:"host_bytes"`
	PeakBytes  float64 `json:"peak_bytes"`
	// OwnedEstimated says that OwnedBytes is not counted but estimated.
	OwnedEstimated bool `json:"owned_estimated,omitempty"`
	// OwnedOutsideBytes is OwnedBytes as seen without asking the runtime.
	OwnedOutsideBytes float64 `json:"owned_outside_bytes,omitempty"`
	// PoolShareBytes is the part of OwnedBytes that is the clone's share of the
	// page pool, PoolOutsideBytes an equal part of what the pool held, as seen
	// without asking the runtime. Both are 0 without a pool.
	PoolShareBytes   float64 `json:"pool_share_bytes,omitempty"`
	PoolOutsideBytes float64 `json:"pool_outside_bytes,omitempty"`

	// UsedBytesMean is what the Timeline shows per clone, mean over all the time of
	// the episodes.
	UsedBytesMean float64 `json:"used_bytes_mean"`

	OwnedReduction *Ratio `json:"owned_reduction"`
	HostReduction  *Ratio `json:"host_reduction"`
	// OwnedReductionLong is OwnedReduction over waits measured after at least
	// LongWait seconds.
	OwnedReductionLong *Ratio `json:"owned_reduction_long"`
	UsedReduction      *Ratio `json:"used_reduction"`

	// WaitsMeasured is how many waits the means are over, WaitsUnmeasured how many
	// are missing from them.
	WaitsMeasured   int `json:"waits_measured"`
	WaitsUnmeasured int `json:"waits_unmeasured"`

	// StepTimeRatio compares the sums of step times.
	StepTimeRatio *Ratio  `json:"step_time_ratio"`
	StepP99Ratio  *Ratio  `json:"step_p99_ratio"`
	StepSeconds   Seconds `json:"step_seconds"`
	// Kinds is StepSeconds by kind of step.
	Kinds map[string]KindSummary `json:"kinds"`

	RestoreSeconds Seconds `json:"restore_seconds"`
	RestoreRatio   *Ratio  `json:"restore_ratio"`
	// CPUSeconds is the mean over repetitions of the processor time that the
	// sandboxes of an episode took, HostCPUSeconds of what the whole host took.
	CPUSeconds float64 `json:"cpu_seconds"`
	CPURatio   *Ratio  `json:"cpu_ratio"`
	// PoolCPUSeconds is the part of CPUSeconds that the page pool took.
	PoolCPUSeconds float64 `json:"pool_cpu_seconds,omitempty"`
	HostCPUSeconds float64 `json:"host_cpu_seconds"`
	HostCPURatio   *Ratio  `json:"host_cpu_ratio"`

	// OutputsEqual: every answer equals the reference system's and none is
	// missing. The reference equals itself; its Compared is 0.
	OutputsEqual bool `json:"outputs_equal"`
	Compared     int  `json:"outputs_compared"`
	Differ       int  `json:"outputs_differ"`
	// Missing counts steps that only one of the two systems took.
	Missing int `json:"outputs_missing"`
	// Reference says that the other systems' answers are compared with this
	// one's.
	Reference bool `json:"reference,omitempty"`
}

// LongWait is the number of seconds from which on a wait is long.
const LongWait = 10

// KindSummary is the time of one kind of step.
type KindSummary struct {
	StepSeconds Seconds `json:"step_seconds"`
	Ratio       *Ratio  `json:"step_time_ratio"`
	// Prefetch is of steps before which the clone had taken others, Siblings of first
	// steps that siblings' patterns were known for. They are nil if there are none.
	Prefetch *PrefetchSummary `json:"prefetch,omitempty"`
	Siblings *PrefetchSummary `json:"prefetch_siblings,omitempty"`
}

// PrefetchSummary is how well steps were foreseen.
type PrefetchSummary struct {
	// Steps is how many there are.
	Steps int `json:"steps"`
	// Precision is the share of pages restored ahead that were used, by samples, and
	// Recall the share of pages that were restored and used that were restored ahead;
	// nil where nothing was sampled.
	Precision *float64 `json:"precision"`
	Recall    *float64 `json:"recall"`
	// WantedPages and PredictedPages are means per step.
	WantedPages    float64 `json:"wanted_pages"`
	PredictedPages float64 `json:"predicted_pages"`
	// LastFaultSeconds is the time from the end of the wait to the last restore on
	// demand.
	LastFaultSeconds Seconds `json:"last_fault_seconds"`
}

// Seconds is a distribution of times.
type Seconds struct {
	Count  int     `json:"count"`
	Median float64 `json:"median"`
	P95    float64 `json:"p95"`
	P99    float64 `json:"p99"`
	Sum    float64 `json:"sum"`
}

// Ratio is a ratio with its 95 % confidence interval. Low and High are NaN if
// there are too few samples for an interval.
//
// In JSON it is a plain number for the value, so that a reader who wants one
// figure finds one: the interval follows under the same name with "_ci"
// appended, as a list of two numbers or null.
type Ratio struct {
	Value, Low, High float64
}

// HasInterval says whether the confidence interval is known.
func (q *Ratio) HasInterval() bool {
	return !math.IsNaN(q.Low) && !math.IsNaN(q.High)
}
