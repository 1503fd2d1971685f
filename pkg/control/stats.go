// Package control defines what a sandbox's memory backend says about itself
// and what it can be asked to do: the types that travel over the sandbox's
// control socket and that `runsc-agentzip agentzip` prints.
//
// The JSON names are a stable surface: other programs read them. A field that
// a given build or configuration does not fill reads 0.
package control

// Stats is one consistent-enough snapshot of a sandbox's memory. Sizes are in
// bytes, times in nanoseconds, the rest are counts. Fields are read one after
// the other while the sandbox runs, so sums may be off by the pages that moved
// meanwhile.
type Stats struct {
	// GuestBytes is what the guest has committed, in whatever form it is held.
	GuestBytes uint64 `json:"guest_bytes"`
	// ResidentBytes is what the memory file itself holds in host memory.
	ResidentBytes uint64 `json:"resident_bytes"`
	// StoreBytes is the memory held by the compressed store, free space in its
	// slabs included.
	StoreBytes uint64 `json:"store_bytes"`
	// MetadataBytes is the page table plus the per-blob bookkeeping.
	MetadataBytes uint64 `json:"metadata_bytes"`
	// PoolShareBytes is this sandbox's share of pages held by the pool.
	PoolShareBytes uint64 `json:"pool_share_bytes"`
	// OwnedBytes is the sum of ResidentBytes, StoreBytes, MetadataBytes and
	// PoolShareBytes.
	OwnedBytes uint64 `json:"owned_bytes"`
	// TemplateBytes is the size of the shared template; it is not owned.
	TemplateBytes uint64 `json:"template_bytes"`
	// HostBytes is all that the sandbox adds to the host's memory: OwnedBytes and
	// the parts of Overhead. The template is not in it.
	HostBytes uint64 `json:"host_bytes"`
	// Overhead is what the sandbox costs besides its guest memory.
	Overhead Overhead `json:"overhead_bytes"`
	// SentryRSSBytes is the resident set of the Sentry process, shared text
	// and its mappings of guest memory included (/proc/self/statm).
	SentryRSSBytes uint64 `json:"sentry_rss_bytes"`

	Pages    Pages    `json:"pages"`
	Faults   Faults   `json:"faults"`
	Prefetch Prefetch `json:"prefetch"`
	Phase    Phase    `json:"phase"`
	Pressure Pressure `json:"pressure"`
	Pool     Pool     `json:"pool"`

	// RestoreNS and EvictNS are the distributions of the time one demand
	// restore took and the time one eviction pass took.
	RestoreNS Histogram `json:"restore_ns"`
	EvictNS   Histogram `json:"evict_ns"`
	// ResumeNS is the distribution of the time from a resume to the last demand
	// restore before the next wait, of steps that had any.
	ResumeNS Histogram `json:"resume_ns"`

	// Rejects counts pages that stayed resident, by cause.
	Rejects map[string]uint64 `json:"rejects"`

	// Evictions, Bytes in and out of the store since the start.
	EvictedPagesTotal  uint64 `json:"evicted_pages_total"`
	RestoredPagesTotal uint64 `json:"restored_pages_total"`

	// ChecksumFailures is 0 in a living sandbox unless it is about to be
	// killed: a mismatch is fatal.
	ChecksumFailures uint64 `json:"checksum_failures"`

	// Stages counts the work of compression by the form or search it went
	// into, by name. Absent without any.
	Stages map[string]Stage `json:"stages,omitempty"`

	// OrphanBlobs are stored pages that others depend on although they have
	// been restored. They count in StoreBytes.
	OrphanBlobs uint64 `json:"orphan_blobs,omitempty"`
	// MovedBlobs is how many stored pages were moved to give the memory
	// between them back.
	MovedBlobs uint64 `json:"moved_blobs,omitempty"`
}

// Overhead is the memory of a sandbox's processes on the host, in bytes. It is
// measured from outside, when it is asked for; all 0 where that failed.
type Overhead struct {
	// SentryPrivate is the Sentry's anonymous memory, swapped out or not, without
	// the store and the bookkeeping, which OwnedBytes has.
	SentryPrivate uint64 `json:"sentry_private"`
	// Gofer is the anonymous memory of the process that serves the container's
	// files. An EROFS root file system needs none. Other containers of the
	// sandbox have gofers of their own, which are not in it.
	Gofer uint64 `json:"gofer"`
	// Stubs is the same of the processes that guest processes run in, and what
	// the platform shares with them.
	Stubs uint64 `json:"stubs"`
	// PageTables is the page tables of all of these processes.
	PageTables uint64 `json:"page_tables"`
	// Kernel is other memory of the kernel, 0 where the sandbox has no memory
	// cgroup of its own that would tell.
	Kernel uint64 `json:"kernel"`
	// Files is what is mapped of files, the binary before all, but files of the
	// guest as well, in proportion to how many processes of the host map it.
	Files uint64 `json:"files"`
}

// Sum is the sum of the parts.
func (o *Overhead) Sum() uint64 {
	return o.SentryPrivate + o.Gofer + o.Stubs + o.PageTables + o.Kernel + o.Files
}

// Stage counts one way to make a page small. Several may be tried on a page.
type Stage struct {
	Tries uint64 `json:"tries"`
	// Wins of the tries were taken, with Bytes in all.
	Wins  uint64 `json:"wins"`
	Bytes uint64 `json:"bytes"`
	// Rejects of the tries came to nothing worth storing.
	Rejects uint64 `json:"rejects"`
	// NS is the time that the tries took, where it is measured.
	NS uint64 `json:"ns,omitempty"`
}

// Pages counts committed guest pages by the form they are held in.
type Pages struct {
	Resident   uint64 `json:"resident"`
	Template   uint64 `json:"template"`
	Zero       uint64 `json:"zero"`
	Pool       uint64 `json:"pool"`
	Delta      uint64 `json:"delta"`
	Compressed uint64 `json:"compressed"`
	Raw        uint64 `json:"raw"`
}

// Faults counts how evicted or candidate pages came back.
type Faults struct {
	// Demand is the number of pages restored because something touched them.
	Demand uint64 `json:"demand"`
	// Prefetched is the number of pages restored ahead of use.
	Prefetched uint64 `json:"prefetched"`
	// Aborted is the number of pages touched while they were candidates: the
	// eviction was given up and cost one remap.
	Aborted uint64 `json:"aborted"`
}

// Prefetch is the quality of the working-set predictions, 0 to 1.
type Prefetch struct {
	Precision float64 `json:"precision"`
	Recall    float64 `json:"recall"`
	// Patterns is how many kinds of steps are told apart.
	Patterns uint64 `json:"patterns"`
	// WantedPages is how many pages were restored on demand in steps, PredictedPages
	// how many were restored ahead, SampledPages how many of these were watched, and
	// UsedPages how many of those were used: what Precision and Recall are made of.
	WantedPages    uint64 `json:"wanted_pages"`
	PredictedPages uint64 `json:"predicted_pages"`
	SampledPages   uint64 `json:"sampled_pages"`
	UsedPages      uint64 `json:"used_pages"`
}

// Phase is what the sandbox is believed to be doing.
type Phase struct {
	// State is "working", "waiting" or, with eviction inhibited, "inhibited".
	State string `json:"state"`
	// SinceNS is how long the state has lasted.
	SinceNS uint64 `json:"since_ns"`
	// Why is what the state was recognised by: see package phase.
	Why string `json:"why,omitempty"`
	// Waits counts the waits so far, the present one included, and Beats the
	// times in which something ran for a moment in a wait without ending it.
	Waits uint64 `json:"waits"`
	Beats uint64 `json:"beats"`
	// IdleNS is how long nothing has to happen at present for a wait to be
	// recognised.
	IdleNS uint64 `json:"idle_ns"`
}

// Pressure is how scarce memory is for the sandbox: see package pressure.
type Pressure struct {
	// Level is "none", "high" or "critical".
	Level string `json:"level"`
	// LimitBytes is the limit of the sandbox's memory cgroup or of one above it,
	// whichever is nearest, 0 if there is none or it is not known. UsedBytes is what
	// is used of it, file cache left out, and Above how many levels above the
	// sandbox's own the cgroup is: what others in it use counts, too.
	LimitBytes uint64 `json:"limit_bytes"`
	UsedBytes  uint64 `json:"used_bytes"`
	Above      uint64 `json:"above,omitempty"`
	// Evictions counts those that pressure caused while the sandbox worked, and
	// ThrottledNS is the time that faults have waited for memory.
	Evictions   uint64 `json:"evictions"`
	ThrottledNS uint64 `json:"throttled_ns"`
}

// Pool is the sandbox's side of the host's page pool.
type Pool struct {
	// State is "connected", "disconnected" or, in a sandbox that was started
	// without a pool or a domain, "none".
	State string `json:"state"`
	// Reason is why there is no connection, if that is known.
	Reason string `json:"reason,omitempty"`
	// Connects is how many connections there were.
	Connects uint64 `json:"connects"`
	// Found is how many pages were found in the pool, whether or not they were
	// then kept there.
	Found uint64 `json:"found"`
	// Published is how many pages the sandbox gave to the pool.
	Published uint64 `json:"published"`
	// OfferedDropped is how many pages were not offered because the pool was
	// slow; later evictions offer them again.
	OfferedDropped uint64 `json:"offered_dropped"`
}

// Histogram is a distribution over power-of-two buckets: Buckets[i] counts
// observations in [2^i, 2^(i+1)) nanoseconds; trailing empty buckets are cut.
type Histogram struct {
	Count   uint64   `json:"count"`
	SumNS   uint64   `json:"sum_ns"`
	MaxNS   uint64   `json:"max_ns"`
	Buckets []uint64 `json:"buckets"`
}

// PrefetchReport is the outcome of `agentzip prefetch`.
type PrefetchReport struct {
	// Pages is how many pages were restored.
	Pages uint64 `json:"pages"`
	// ElapsedNS is the wall time it took.
	ElapsedNS uint64 `json:"elapsed_ns"`
}

// EvictReport is the outcome of one forced eviction (`agentzip evict`).
type EvictReport struct {
	// MarkedPages were committed and eligible when the pass began.
	MarkedPages uint64 `json:"marked_pages"`
	// EvictedPages now have a stored form.
	EvictedPages uint64 `json:"evicted_pages"`
	// AbortedPages were touched during the pass.
	AbortedPages uint64 `json:"aborted_pages"`
	// RejectedPages had no profitable form.
	RejectedPages uint64 `json:"rejected_pages"`
	// SkippedPages are mapped by an address space that was busy, or pinned.
	SkippedPages uint64 `json:"skipped_pages"`
	// ElapsedNS is the wall time of the pass.
	ElapsedNS uint64 `json:"elapsed_ns"`
	// Before and After are the owned bytes on either side of the pass.
	OwnedBefore uint64 `json:"owned_before_bytes"`
	OwnedAfter  uint64 `json:"owned_after_bytes"`
}

// CheckReport is the outcome of the online consistency check
// (`agentzip check`). An empty Problems means that every stored page was
// decoded, matched its checksum and that no slot of the store is lost or used
// twice.
type CheckReport struct {
	StoredPages  uint64   `json:"stored_pages"`
	CheckedPages uint64   `json:"checked_pages"`
	Problems     []string `json:"problems"`
	ElapsedNS    uint64   `json:"elapsed_ns"`
}
