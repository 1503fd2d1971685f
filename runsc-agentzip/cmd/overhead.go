package cmd

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"gvisor.dev/gvisor/runsc/cgroup"
	"gvisor.dev/gvisor/runsc/container"

	"runsc-agentzip/pkg/control"
	"runsc-agentzip/pkg/fleet"
)

// measure adds to s what only the host can see.
func measure(c *container.Container, s *control.Stats) error {
	m, err := fleet.MeasureSandbox(c.Sandbox.Pid.Load(), c.GoferPid.Load(), fleet.MappedTemplate(c.Sandbox.Pid.Load()))
	if err != nil {
		return err
	}
	s.SentryRSSBytes = m.Sentry.RSS
	files := m.Sentry.PSSFile + m.Gofer.PSSFile + m.Stubs.PSSFile
	if m.Template != nil {
		files -= min(files, m.Template.MappedPSS)
	}
	sentry := m.Sentry.PSSAnon + m.Sentry.SwapPSS
	s.Overhead = control.Overhead{
		SentryPrivate: sentry - min(sentry, s.StoreBytes+s.MetadataBytes),
		Gofer:         m.Gofer.PSSAnon + m.Gofer.SwapPSS,
		Stubs:         m.Stubs.PSSAnon + m.Stubs.SwapPSS + m.OtherMemfd,
		PageTables:    m.Sentry.PageTables + m.Gofer.PageTables + m.Stubs.PageTables,
		Files:         files,
	}
	if cg := c.Sandbox.CgroupJSON.Cgroup; cg != nil {
		s.Overhead.Kernel = kernelMemory(cg.MakePath("memory"), cgroup.IsOnlyV2(), s.Overhead.PageTables)
	}
	s.HostBytes = s.OwnedBytes + s.Overhead.Sum()
	return nil
}

// kernelMemory is the memory of the kernel that a memory cgroup is charged with,
// without page tables, or 0 if it does not tell.
func kernelMemory(dir string, v2 bool, pageTables uint64) uint64 {
	if !v2 {
		b, err := os.ReadFile(filepath.Join(dir, "memory.kmem.usage_in_bytes"))
		if err != nil {
			return 0
		}
		n, _ := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64)
		return n - min(n, pageTables)
	}
	b, err := os.ReadFile(filepath.Join(dir, "memory.stat"))
	if err != nil {
		return 0
	}
	stat := map[string]uint64{}
	for line := range strings.Lines(string(b)) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), " "); ok {
			stat[name], _ = strconv.ParseUint(value, 10, 64)
		}
	}
	// "kernel" is there since Linux 5.18.
	n := max(stat["kernel"], stat["slab"]+stat["kernel_stack"]+stat["pagetables"]+stat["percpu"]) + stat["sock"]
	return n - min(n, stat["pagetables"])
}

// rss is the resident set of a process in bytes, or 0. Everybody may read it.
func rss(pid int) uint64 {
	b, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "statm"))
	if err != nil {
		return 0
	}
	f := strings.Fields(string(b))
	if len(f) < 2 {
		return 0
	}
	n, _ := strconv.ParseUint(f[1], 10, 64)
	return n * uint64(os.Getpagesize())
}
