package boot

import (
	"gvisor.dev/gvisor/pkg/sentry/kernel"
	"gvisor.dev/gvisor/runsc/config"
)

// AgentzipInit, if not nil, is called once in the sandbox process, before its
// first memory file is created and before seccomp filters are installed.
// stdioFDs are the root container's.
var AgentzipInit func(conf *config.Config, stdioFDs []int) error

// AgentzipControl, if not nil, is called for each kernel that the sandbox
// process serves (a restore replaces the first one) and returns the object
// that answers on the control socket, or nil.
var AgentzipControl func(k *kernel.Kernel, conf *config.Config) any
