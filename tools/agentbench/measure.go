package main

import (
	"context"
	"time"

	"runsc-agentzip/pkg/fleet"
	"runsc-agentzip/tools/agentbench/report"
)

const pageSize = 4096

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
		m.CommittedBytes, m.OwnedBytes = st.GuestBytes, st.OwnedBytes
	}
	var err error
	if m.Measured, err = c.sb.Memory(); err != nil {
		return m, endedWhy(c.sb, err)
	}
	m.HostBytes = m.Measured.Host()
	if t := m.Measured.Template; t != nil {
		// Held once for all clones; each is charged its part.
		once, err := fleet.CachedBytes(t.File)
		if err != nil {
			return m, err
		}
		e.timeline.templateOnce.Store(once)
		m.HostBytes += once / uint64(e.key.Clones)
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
