package main

import (
	"context"
	"time"

	"runsc-agentzip/pkg/fleet"
	"runsc-agentzip/tools/agentbench/report"
)

const pageSize = 4096

// sampleDefinitions explains the figures that samples have and the summary has
// not.
var sampleDefinitions = map[string]string{
	"waits":               "drawn by the workload as config.waits says, the same for every system, and multiplied by config.wait_scale. After its last step a clone waits once more, for the mean of its waits. In a wait of 0.5 s or more memory is measured once, after 60 % of the wait or a second before its end, whichever is later, on a thread that runs only when a processor is idle; a measurement that does not end with the wait is dropped",
	"index -1":            "the wait after the restore, which begins with the clone's first answer and lasts while other clones are restored",
	"owned_bytes, linux":  "stock's owned_bytes in the same wait, or in the nearest wait of the same clone that was measured, times the part of the guest memory that linux still holds, resident or compressed: guest pages cannot be looked at without swapping them in. 0 if stock did not take part",
	"host_bytes, linux":   "what is charged to the sandbox's memory cgroup, less the attached runsc's memory, and its part of what the compressed swap device holds, by swap space used",
	"owned_outside_bytes": "allocated blocks of the memory file, what the sandbox's other memory files and its Sentry's anonymous memory exceed the mean of stock's in the same repetition by, and an equal part of the page pool (definition of pool). It does not ask the runtime, but takes the Sentries' own heaps for equal, which differ by some MiB: a check of figures that are larger than that",
	"pool":                "the page pool of the episode, whole, measured when the clone was: memfd is the allocated blocks of its memory files, those included that only sandboxes still hold; process is its process, which has what it maps of these files in rss, pss and pss_shmem once more. host_bytes and owned_outside_bytes have an equal part for each clone: of memfd and pss_anon, host_bytes also of its binary and page tables. Memory files of the pool that a sandbox holds are measured.pool_memfd and in no sum",
	"pool_share_bytes":    "of samples: the clone's share of the page pool as the runtime counts it, part of owned_bytes. The sandbox asks the pool for it when it has evicted, so that it may be that of the wait before",
	"pool_cpu_seconds":    "processor time of the page pool's process, part of sandbox_cpu_seconds",
	"demand_pages":        "pages restored because something touched them, between the measurements in the waits before and after the step; prefetched_pages in the same way",
	"used_bytes":          "MemAvailable before the episode less MemAvailable now, and what the page cache holds of a template that all clones share; without agentbench itself. It includes what other programs took or gave back meanwhile",
	"freed_bytes":         "MemAvailable after the clones were ended less MemAvailable before, when they had waited for a while after the digest of their state, and their page pool with them; a template that they share was available before, too",
	"own_cpu_seconds":     "processor time of agentbench and of the commands with which it measures",
	"idle_cpu_seconds":    "the processor time per second that was used in the last second before the episode, times its seconds",
	"restores":            "clones are restored one after the other; the time is from the restore command to the answer to a first request. Images have been restored once before",
	"order":               "which system comes first changes from each workload, number of clones and repetition to the next. Before the first episode of a workload everything written for it is synced to disk, and one clone of stock (or of the system most like it) takes the steps of one cycle, untimed, so that the first episode finds the root file system's files cached as the others do",
}

// measure takes one memory sample of one clone.
func (e *episode) measure(ctx context.Context, c *clone, w waitID) (report.Memory, error) {
	m := report.Memory{
		Key: e.key, Clone: c.index, Index: w.index,
		At: time.Since(e.began).Seconds(), IdleSeconds: time.Since(w.since).Seconds(),
	}
	if e.sys.counted {
		st, err := c.sb.Stats(ctx)
		if err != nil {
			return m, err
		}
		m.Stats = &st
		m.CommittedBytes, m.OwnedBytes, m.PoolShareBytes = st.GuestBytes, st.OwnedBytes, st.PoolShareBytes
	}
	var err error
	if m.Measured, err = c.sb.Memory(); err != nil {
		return m, endedWhy(c.sb, err)
	}
	m.HostBytes = m.Measured.Host()
	if t := m.Measured.Template; t != nil {
		// Held once for all clones; each is charged its part.
		once, err := e.cachedTemplate(t)
		if err != nil {
			return m, err
		}
		m.HostBytes += once / uint64(e.key.Clones)
	}
	if e.pool != nil {
		if m.Pool, err = e.pool.measure(m.Measured.Template, e.sandboxes()); err != nil {
			return m, err
		}
		m.HostBytes += m.Pool.Host() / uint64(e.key.Clones)
	}
	if e.sys.counted {
		return m, nil
	}
	m.CommittedBytes = m.Measured.GuestMemfd
	if c.swap != nil {
		return m, c.swap.measure(&m)
	}
	diff, err := c.sb.DiffGuest(e.work.reference)
	if err != nil {
		return m, endedWhy(c.sb, err)
	}
	m.Diff = &diff
	m.OwnedBytes = diff.Different * pageSize
	return m, nil
}

// cachedTemplate is what the host caches of a template that all clones share.
func (e *episode) cachedTemplate(t *fleet.TemplateMemory) (uint64, error) {
	once, err := fleet.CachedBytes(t.File)
	if err == nil {
		e.timeline.templateOnce.Store(once)
	}
	return once, err
}
