package memfile

import (
	"math/bits"
	"sync/atomic"
	"time"

	"runsc-agentzip/memfile/codec"
	"runsc-agentzip/pkg/control"
)

// Causes for a page to stay resident, beyond the codec's own.
const (
	rejectLocked = iota
	rejectStore
	rejectCodec // + codec.Reject
	numRejects  = rejectCodec + codec.NumRejects
)

// rejectName is the name of a cause in statistics.
func rejectName(i int) string {
	switch i {
	case rejectLocked:
		return "locked_by_application"
	case rejectStore:
		return "store_full"
	}
	return codec.Reject(i - rejectCodec).String()
}

// counters are the Backend's statistics. Counts of pages now in a form go up
// and down, the others only up.
type counters struct {
	forms [codec.NumTags]atomic.Int64
	raw   atomic.Int64
	// kept are the pages in the file that have kept their form.
	kept atomic.Int64

	demand, prefetched, saved, aborted atomic.Uint64
	evictedTotal, restored, dropped    atomic.Uint64
	stored                             atomic.Uint64
	busyPasses, noMemory               atomic.Uint64
	checksumFailures                   atomic.Uint64
	rejects                            [numRejects]atomic.Uint64
	restoreNS, evictNS, resumeNS       histogram

	// lastDemand is when an access last had to restore pages, in Unix
	// nanoseconds, or 0 if none had to since the last step ended.
	lastDemand atomic.Int64

	// orphans are the roots whose pages have left the store.
	orphans atomic.Int64
	// moved counts blobs that were moved to fill slabs.
	moved atomic.Uint64

	codec  [codec.NumTags]stageCount
	reuse  stageCount
	stages [numStages]stageCount
}

// A stage is a kind of base that a search finds.
type stage int

const (
	stageTemplate stage = iota
	stageOwn
	stageNeighbour
	stagePool
	numStages
)

var stageNames = [numStages]string{"search-template", "search-own", "search-neighbour", "search-pool"}

// A stageCount counts what came of a stage.
type stageCount struct {
	tries, wins, bytes, rejects, ns atomic.Uint64
}

// tried counts an attempt that took so long and ended with n bytes, or 0 if
// there was nothing to gain.
func (c *stageCount) tried(n int, took time.Duration) {
	c.tries.Add(1)
	c.ns.Add(uint64(took))
	if n == 0 {
		c.rejects.Add(1)
	}
}

func (c *stageCount) won(n int) {
	c.wins.Add(1)
	c.bytes.Add(uint64(n))
}

func (c *stageCount) add(n codec.Count) {
	if n.Tries|n.Wins == 0 {
		return
	}
	c.tries.Add(n.Tries)
	c.wins.Add(n.Wins)
	c.bytes.Add(n.Bytes)
	c.rejects.Add(n.Rejects)
}

func (c *stageCount) snapshot() control.Stage {
	return control.Stage{Tries: c.tries.Load(), Wins: c.wins.Load(), Bytes: c.bytes.Load(), Rejects: c.rejects.Load(), NS: c.ns.Load()}
}

func (c *counters) form(t codec.Tag) *atomic.Int64 {
	return &c.forms[t]
}

func (c *counters) evictedPages() uint64 {
	n := int64(0)
	for i := range c.forms {
		n += c.forms[i].Load()
	}
	return uint64(max(n, 0))
}

// A histogram counts durations in power-of-two buckets of nanoseconds.
type histogram struct {
	buckets    [48]atomic.Uint64
	count, sum atomic.Uint64
	max        atomic.Uint64
}

func (h *histogram) add(d time.Duration) {
	ns := uint64(max(d, 1))
	h.buckets[min(bits.Len64(ns)-1, len(h.buckets)-1)].Add(1)
	h.count.Add(1)
	h.sum.Add(ns)
	for {
		m := h.max.Load()
		if ns <= m || h.max.CompareAndSwap(m, ns) {
			return
		}
	}
}

func (h *histogram) snapshot() control.Histogram {
	out := control.Histogram{Count: h.count.Load(), SumNS: h.sum.Load(), MaxNS: h.max.Load()}
	n := len(h.buckets)
	for n > 0 && h.buckets[n-1].Load() == 0 {
		n--
	}
	for i := range n {
		out.Buckets = append(out.Buckets, h.buckets[i].Load())
	}
	return out
}

// Stats returns the statistics that the Backend knows of.
func (b *Backend) Stats() control.Stats {
	var s control.Stats
	if b.closed.Load() {
		return s
	}
	held, err := b.host.HeldBytes()
	if err != nil {
		return s
	}
	st := b.store.Stats()
	s.ResidentBytes = held
	s.StoreBytes = st.HeldBytes
	s.MetadataBytes = b.table.heldBytes() + st.MetadataBytes + b.history.MetadataBytes() + uint64(max(b.passBytes.Load(), 0))
	if p := b.pool.Load(); p != nil {
		share, own := p.Sharing()
		s.PoolShareBytes = share.Pages + share.Overhead
		s.MetadataBytes += own
	}
	s.OwnedBytes = s.ResidentBytes + s.StoreBytes + s.MetadataBytes + s.PoolShareBytes
	s.GuestBytes = held + b.EvictedBytes()

	f := func(t codec.Tag) uint64 { return uint64(max(b.stats.form(t).Load(), 0)) }
	s.Pages.Zero = f(codec.TagZero)
	s.Pages.Template = f(codec.TagTemplate)
	s.Pages.Pool = f(codec.TagPool)
	s.Pages.Delta = f(codec.TagWordDelta) + f(codec.TagZstdBase)
	if b.template != nil {
		s.TemplateBytes = b.template.Pages() << pageShift
	}
	s.Pages.Compressed = f(codec.TagFill) + f(codec.TagWords) + f(codec.TagS2) + f(codec.TagZstd)
	s.Pages.Raw = uint64(max(b.stats.raw.Load(), 0))
	s.Pages.Resident = held >> pageShift
	s.Pages.Resident -= min(s.Pages.Resident, s.Pages.Raw)

	s.Faults.Demand = b.stats.demand.Load()
	s.Faults.Prefetched = b.stats.prefetched.Load()
	s.Faults.Aborted = b.stats.aborted.Load()
	q := b.history.Quality()
	s.Prefetch = control.Prefetch{
		Precision: q.Precision(), Recall: q.Recall(), Patterns: q.Patterns,
		WantedPages: q.Wanted, PredictedPages: q.Predicted, SampledPages: q.Sampled, UsedPages: q.Used,
	}
	s.EvictedPagesTotal = b.stats.evictedTotal.Load()
	s.RestoredPagesTotal = b.stats.restored.Load()
	s.RestoreNS = b.stats.restoreNS.snapshot()
	s.EvictNS = b.stats.evictNS.snapshot()
	s.ResumeNS = b.stats.resumeNS.snapshot()
	s.ChecksumFailures = b.stats.checksumFailures.Load()
	s.Rejects = map[string]uint64{}
	for i := range b.stats.rejects {
		if n := b.stats.rejects[i].Load(); n != 0 {
			s.Rejects[rejectName(i)] = n
		}
	}
	s.Stages = map[string]control.Stage{}
	stage := func(name string, c *stageCount) {
		if n := c.snapshot(); n != (control.Stage{}) {
			s.Stages[name] = n
		}
	}
	for tag := range b.stats.codec {
		stage(codec.Tag(tag).String(), &b.stats.codec[tag])
	}
	stage("kept", &b.stats.reuse)
	for i := range b.stats.stages {
		stage(stageNames[i], &b.stats.stages[i])
	}
	s.OrphanBlobs = uint64(max(b.stats.orphans.Load(), 0))
	s.MovedBlobs = b.stats.moved.Load()
	if n := b.stats.busyPasses.Load(); n != 0 {
		s.Rejects["pass_gave_up_busy"] = n
	}
	return s
}

// HeldBytes is the host memory that the backing file holds.
func (b *Backend) HeldBytes() (uint64, error) {
	if b.closed.Load() {
		return 0, ErrClosed
	}
	return b.host.HeldBytes()
}
