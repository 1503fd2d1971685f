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
// tells it how scarce memory is. The files are those of pressure.Files.All.
type MemoryArgs struct {
	urpc.FilePayload
	// Groups is how many cgroups there are files of, and Host tells whether there
	// is the host's.
	Groups int
	Host   bool
}

// Gauge returns a Gauge for the files. It leaves the arguments' own to their owner.
func (a *MemoryArgs) Gauge() (*pressure.Gauge, error) {
	// The number of files bounds that of the cgroups.
	f := pressure.Files{Groups: make([]pressure.Group, min(max(a.Groups, 0), len(a.Files)))}
	var into []**os.File
	for i := range f.Groups {
		g := &f.Groups[i]
		into = append(into, &g.Limit, &g.Usage, &g.Stat)
	}
	if a.Host {
		into = append(into, &f.Host)
	}
	if len(into) != len(a.Files) || len(f.Groups) != a.Groups {
		return nil, fmt.Errorf("%d files for the sandbox's memory, want those of %d cgroups, the host's: %t", len(a.Files), a.Groups, a.Host)
	}
	for i, to := range into {
		own, err := dup(a.Files[i])
		if err != nil {
			for _, f := range into[:i] {
				_ = (*f).Close()
			}
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
	args := &MemoryArgs{FilePayload: urpc.FilePayload{Files: f.All()}, Groups: len(f.Groups), Host: f.Host != nil}
	if len(args.Files) == 0 {
		return
	}
	if err := s.Call("Agentzip.Memory", args, nil); err != nil {
		log.Warningf("agentzip: sandbox %q does not know its memory limit: %v", s.ID, err)
	}
}
