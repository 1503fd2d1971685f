package main

import (
	"bufio"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"runsc-agentzip/pkg/fleet"
	"runsc-agentzip/tools/agentbench/report"
	"runsc-agentzip/tools/agentbench/workload"
)

// newReport is a report without measurements.
func newReport(c runConfig, args []string) *report.Report {
	waits := workload.WaitDistribution
	if c.trace != "" {
		waits = "as in the trace"
	}
	return &report.Report{
		Date: time.Now().UTC().Truncate(time.Second), Commit: commit(), Command: append([]string{"agentbench", "run"}, args...),
		Machine: describeMachine(),
		Config: report.Config{
			Clones: c.clones, Steps: c.steps, Repetitions: c.repetitions, Seed: c.seed, WaitScale: c.waitScale,
			Waits: waits, Trace: c.trace,
		},
	}
}

// describeMachine says where the run takes place. What cannot be found out is
// left out.
func describeMachine() report.Machine {
	m := report.Machine{Arch: runtime.GOARCH, CPUs: runtime.NumCPU(), GoVersion: runtime.Version(), Platform: "systrap"}
	m.OS = fieldOf("/etc/os-release", "PRETTY_NAME", "=")
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		m.Kernel = unix.ByteSliceToString(u.Release[:])
	}
	m.CPU = fieldOf("/proc/cpuinfo", "model name", ":")
	if host, err := fleet.ReadHostMemory(); err == nil {
		m.MemoryBytes = host.Total
	}
	if strings.Contains(" "+fieldOf("/proc/cpuinfo", "flags", ":")+" ", " hypervisor ") {
		m.Virtual = "virtual machine"
		if b, err := os.ReadFile("/sys/class/dmi/id/sys_vendor"); err == nil {
			m.Virtual += " (" + strings.TrimSpace(string(b)) + ")"
		}
	}
	m.MapTouchNS = mapTouch()
	return m
}

// mapTouch measures Machine.MapTouchNS: the median of some rounds, or 0 if the host
// refuses the memory.
func mapTouch() float64 {
	const pages, rounds = 2048, 5
	size := pages * os.Getpagesize()
	fd, err := unix.MemfdCreate("agentbench-touch", unix.MFD_CLOEXEC)
	if err != nil {
		return 0
	}
	defer unix.Close(fd)
	if err := unix.Ftruncate(fd, int64(size)); err != nil {
		return 0
	}
	var ns []float64
	page := make([]byte, size)
	for range rounds {
		// As a page is restored and mapped.
		if unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, int64(size)) != nil {
			return 0
		}
		if n, err := unix.Pwrite(fd, page, 0); err != nil || n != size {
			return 0
		}
		mem, err := unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE)
		if err != nil {
			return 0
		}
		began := time.Now()
		for i := 0; i < size; i += os.Getpagesize() {
			mem[i]++
		}
		ns = append(ns, float64(time.Since(began).Nanoseconds())/pages)
		_ = unix.Munmap(mem)
	}
	slices.Sort(ns)
	return ns[rounds/2]
}

// fieldOf returns the value of the first line "NAME SEP VALUE" of a file.
func fieldOf(path, name, sep string) string {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	sc := bufio.NewScanner(f)
	for sc.Scan() {
		if k, v, ok := strings.Cut(sc.Text(), sep); ok && strings.TrimSpace(k) == name {
			return strings.Trim(strings.TrimSpace(v), `"`)
		}
	}
	return ""
}

// commit names the source that this was built from, if it is run in the source's
// folder, with "+" if there are changes.
func commit() string {
	b, err := os.ReadFile("go.mod")
	if err != nil || !strings.HasPrefix(string(b), "module runsc-agentzip\n") {
		return ""
	}
	dir, err := filepath.Abs(".")
	if err != nil {
		return ""
	}
	git := func(args ...string) string {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		out, err := exec.CommandContext(ctx, "git", append([]string{"-C", dir}, args...)...).Output()
		if err != nil {
			return ""
		}
		return strings.TrimSpace(string(out))
	}
	head := git("rev-parse", "--short=12", "HEAD")
	if head != "" && git("status", "--porcelain", "--untracked-files=no") != "" {
		head += "+"
	}
	return head
}
