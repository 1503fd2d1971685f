package main

import (
	"errors"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// cpuTimes is the time all processors together have spent since boot.
type cpuTimes struct {
	all, busy time.Duration
}

func readCPUTimes() (cpuTimes, error) {
	b, err := os.ReadFile("/proc/stat")
	if err != nil {
		return cpuTimes{}, err
	}
	return parseCPUTimes(string(b))
}

// parseCPUTimes reads the first line of /proc/stat. Time stolen by the
// hypervisor counts as busy: it is not there to be used.
func parseCPUTimes(stat string) (cpuTimes, error) {
	line, _, _ := strings.Cut(stat, "\n")
	f := strings.Fields(line)
	if len(f) < 8 || f[0] != "cpu" {
		return cpuTimes{}, errors.New("malformed /proc/stat")
	}
	var t cpuTimes
	// user nice system idle iowait irq softirq steal; guest times, which
	// follow, are part of user.
	for i, v := range f[1:min(len(f), 9)] {
		n, err := strconv.ParseUint(v, 10, 64)
		if err != nil {
			return cpuTimes{}, err
		}
		d := time.Duration(n) * (time.Second / 100)
		t.all += d
		if i != 3 && i != 4 {
			t.busy += d
		}
	}
	return t, nil
}

// selfCPU is the processor time of this process and of its ended children.
func selfCPU() time.Duration {
	var t time.Duration
	for _, who := range []int{syscall.RUSAGE_SELF, syscall.RUSAGE_CHILDREN} {
		var u syscall.Rusage
		if syscall.Getrusage(who, &u) == nil {
			t += time.Duration(u.Utime.Nano() + u.Stime.Nano())
		}
	}
	return t
}
