package boot

import (
	"fmt"
	"os"

	"gvisor.dev/gvisor/pkg/sentry/kernel"
	"gvisor.dev/gvisor/pkg/sentry/state/stateio"
	"gvisor.dev/gvisor/runsc/config"
)

// AgentzipInit, if not nil, is called once in the sandbox process, before its
// first memory file is created and before seccomp filters are installed.
// stdioFDs are the root container's.
var AgentzipInit func(conf *config.Config, stdioFDs []int) error

// AgentzipRestore, if not nil, is called when a restore begins, before its
// memory file is created, with the template's files if there are any. They are
// closed after it returns.
var AgentzipRestore func(files []*os.File) error

// takeAgentzipFiles removes the template's files from o and hands them over.
func (o *RestoreOpts) takeAgentzipFiles() error {
	n := o.AgentzipFiles
	if n < 0 || n > len(o.Files) {
		return fmt.Errorf("restore with %d template files among %d files", n, len(o.Files))
	}
	files := o.Files[len(o.Files)-n:]
	o.Files = o.Files[:len(o.Files)-n]
	if AgentzipRestore == nil {
		return nil
	}
	o.agentzipTemplate = n != 0
	return AgentzipRestore(files)
}

// newPagesFileReader is stateio.NewPagesFileFDReaderDefault, with fewer workers
// if the template spares most of the reading: each raises GOMAXPROCS by one,
// for good, which costs a sandbox 60 threads and 7 MB of heap (measured).
func newPagesFileReader(o *RestoreOpts, fd int32) stateio.AsyncReader {
	if !o.agentzipTemplate {
		return stateio.NewPagesFileFDReaderDefault(fd)
	}
	return stateio.NewPagesFileFDReader(fd, 256<<10 /* maxReadBytes */, 2 /* maxParallel */)
}

// AgentzipControl, if not nil, is called for each kernel that the sandbox
// process serves (a restore replaces the first one) and returns the object
// that answers on the control socket, or nil.
var AgentzipControl func(k *kernel.Kernel, conf *config.Config) any
