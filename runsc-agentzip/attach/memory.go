package attach

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/log"
	"gvisor.dev/gvisor/pkg/urpc"
	"gvisor.dev/gvisor/runsc/sandbox"

	"runsc-agentzip/pkg/pressure"
)

// MemoryArgs is the argument of the method Agentzip.Memory of a sandbox: what
// tells it how scarce memory is. The files are those of pressure.Files that there
// are, in the order in which they are declared.
type MemoryArgs struct {
	urpc.FilePayload
	// Limit is the limit of the sandbox's memory cgroup in bytes, 0 without one.
	Limit uint64
	// Cgroup and Host tell which files there are.
	Cgroup, Host bool
}

// Gauge returns a Gauge for the files. It leaves the arguments' own to their owner.
func (a *MemoryArgs) Gauge() (*pressure.Gauge, error) {
	f := pressure.Files{Limit: a.Limit}
	var into []**os.File
	if a.Cgroup {
		into = append(into, &f.Usage, &f.Stat)
	}
	if a.Host {
		into = append(into, &f.Host)
	}
	if len(into) != len(a.Files) || a.Cgroup != (a.Limit != 0) {
		return nil, fmt.Errorf("%d files for the sandbox's memory, want %d, and a limit of %d", len(a.Files), len(into), a.Limit)
	}
	for i, to := range into {
		own, err := dup(a.Files[i])
		if err != nil {
			f.Close()
			return nil, fmt.Errorf("keeping a file about memory: %w", err)
		}
		*to = own
	}
	return pressure.FromFiles(f), nil
}

// dup returns a file with a descriptor of its own.
func dup(f *os.File) (*os.File, error) {
	fd, err := unix.Dup(int(f.Fd()))
	if err != nil {
		return nil, os.NewSyscallError("dup", err)
	}
	return os.NewFile(uintptr(fd), f.Name()), nil
}

// giveMemory gives a sandbox the files that tell how scarce memory is. Without them
// it evicts in waits only.
func giveMemory(s *sandbox.Sandbox) {
	f, err := pressure.Open("/", s.Pid.Load())
	defer f.Close()
	if err != nil {
		log.Infof("agentzip: sandbox %q does not know its memory limit: %v", s.ID, err)
	}
	args := &MemoryArgs{Limit: f.Limit, Cgroup: f.Limit != 0, Host: f.Host != nil}
	if args.Cgroup {
		args.Files = append(args.Files, f.Usage, f.Stat)
	}
	if args.Host {
		args.Files = append(args.Files, f.Host)
	}
	if len(args.Files) == 0 {
		return
	}
	if err := s.Call("Agentzip.Memory", args, nil); err != nil {
		log.Warningf("agentzip: sandbox %q does not know its memory limit: %v", s.ID, err)
	}
}
