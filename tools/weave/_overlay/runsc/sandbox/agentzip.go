package sandbox

import (
	"os"

	"gvisor.dev/gvisor/runsc/config"
)

// AgentzipTemplate, if not nil, returns the files that the sandbox needs to use
// the checkpoint in dir as a template, or none. opened are the image's files
// that the restore reads, in the order of boot.RestoreOpts.
var AgentzipTemplate func(conf *config.Config, dir string, opened []*os.File) ([]*os.File, error)

// Call calls a method on the sandbox's control socket.
func (s *Sandbox) Call(method string, arg, result any) error {
	return s.call(method, arg, result)
}
