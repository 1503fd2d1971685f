package sandbox

import (
	"os"

	"gvisor.dev/gvisor/runsc/config"
)

// AgentzipTemplate, if not nil, returns the files that the sandbox needs to use
// the checkpoint in dir as a template, or none.
var AgentzipTemplate func(conf *config.Config, dir string) ([]*os.File, error)

// Call calls a method on the sandbox's control socket.
func (s *Sandbox) Call(method string, arg, result any) error {
	return s.call(method, arg, result)
}
