package cgroup

import (
	"strconv"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"
)

// raiseMemswLimit raises the limit of memory and swap together, under cgroup v1, where a
// container is about to get more memory: the kernel refuses a limit of memory that is
// above it. What it cannot do the caller finds out, who sets both.
func raiseMemswLimit(path string, m *specs.LinuxMemory) {
	const name = "memory.memsw.limit_in_bytes"
	if m.Limit == nil || m.Swap == nil {
		return
	}
	value, err := getValue(path, name)
	if err != nil {
		return
	}
	// -1 is no limit.
	now, err := strconv.ParseInt(strings.TrimSpace(value), 10, 64)
	if err == nil && (*m.Swap == -1 || *m.Swap > now) {
		_ = setOptionalValueInt(path, name, m.Swap)
	}
}
