package fleet

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"time"
)

// PoolMemory is what a page pool that sandboxes share costs the host, measured
// from outside, in bytes.
type PoolMemory struct {
	// Memfd is the host memory of its segments and indexes (st_blocks). Those
	// that the pool has given up count as long as a sandbox holds them.
	Memfd uint64 `json:"memfd"`
	// Process is the pool's own process. What it maps of the memfds is in RSS,
	// PSS and PSSShmem once more.
	Process ProcMemory `json:"process"`
	// TemplatePSS is the part of Process.PSSFile that is a mapped template.
	TemplatePSS uint64 `json:"template_pss,omitempty"`
}

// Own is the memory that would not be there without pages to share: the memfds
// and the anonymous memory of the process.
func (m PoolMemory) Own() uint64 { return m.Memfd + m.Process.PSSAnon }

// Host is all that the pool adds to the host. A template is left out, as in
// Memory.Host.
func (m PoolMemory) Host() uint64 {
	file := m.Process.PSSFile - min(m.Process.PSSFile, m.TemplatePSS)
	return m.Own() + file + m.Process.PageTables
}

// MeasurePool measures the pool whose process is pid. template is the file of
// the template that it may map, or ""; sandboxes are those that it serves. A
// sandbox that has ended holds nothing.
func MeasurePool(pid int, template string, sandboxes []*Sandbox) (PoolMemory, error) {
	var m PoolMemory
	fds, err := memfds(pid)
	if err != nil {
		return m, fmt.Errorf("fleet: page pool: %w", err)
	}
	held := make(map[uint64]uint64)
	for _, fd := range fds {
		held[fd.ino] = fd.allocated
	}
	for _, s := range sandboxes {
		p := s.Pid()
		if p == 0 || s.Exited() {
			continue
		}
		fds, err := memfds(p)
		if gone(err) {
			continue
		} else if err != nil {
			return m, fmt.Errorf("fleet: sandbox %s: %w", s.id, err)
		}
		for _, fd := range fds {
			if !fd.writable {
				held[fd.ino] = fd.allocated
			}
		}
	}
	for _, n := range held {
		m.Memfd += n
	}
	if m.Process, err = processMemory(pid); err != nil {
		return m, fmt.Errorf("fleet: page pool: %w", err)
	}
	if template != "" {
		if m.TemplatePSS, err = mappedPSS(pid, template); err != nil {
			return m, fmt.Errorf("fleet: page pool: %w", err)
		}
	}
	return m, nil
}

// ProcessCPUTime is the processor time that a process and its children that have
// ended have used.
func ProcessCPUTime(pid int) (time.Duration, error) {
	st, err := readStat(pid)
	if err != nil {
		return 0, fmt.Errorf("fleet: process %d: %w", pid, err)
	}
	if st.state == 'Z' {
		return 0, fmt.Errorf("fleet: process %d: %w", pid, os.ErrProcessDone)
	}
	return time.Duration(st.ticks) * cpuTick, nil
}

// HasFlag reports whether the binary knows a global flag, whose name is given
// without dashes.
func (r *Runtime) HasFlag(ctx context.Context, name string) (bool, error) {
	// It writes the list to stderr.
	out, err := exec.CommandContext(ctx, r.binary, "flags").CombinedOutput()
	if err != nil {
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		return false, &CommandError{Command: "flags", Err: err, Stderr: strings.TrimSpace(string(out))}
	}
	return hasFlag(string(out), name), nil
}

// hasFlag looks for a flag in what `runsc flags` prints.
func hasFlag(text, name string) bool {
	return regexp.MustCompile(`(?m)^\s*--?` + regexp.QuoteMeta(name) + `(\s|=|$)`).MatchString(text)
}
