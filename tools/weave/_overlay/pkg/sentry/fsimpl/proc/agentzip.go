package proc

import (
	"strings"

	"gvisor.dev/gvisor/pkg/context"
	"gvisor.dev/gvisor/pkg/errors/linuxerr"
	"gvisor.dev/gvisor/pkg/sentry/vfs"
	"gvisor.dev/gvisor/pkg/usermem"
)

// phaseFile is what /proc/agentzip reads as. It is a static file, of a type that
// every runsc knows: a checkpoint must not contain a type of ours.
const phaseFile = "write \"wait\" when you begin to wait for the model, \"resume\" when its answer is there\n"

// AgentzipHint takes what was written to /proc/agentzip, if it is not nil. It is
// set before the first task runs.
var AgentzipHint func(phase string) error

// Write implements vfs.WritableDynamicBytesSource.Write. Other static files refuse
// it as if there were no such method.
func (f *staticFile) Write(ctx context.Context, _ *vfs.FileDescription, src usermem.IOSequence, _ int64) (int64, error) {
	if f.StaticData.Data != phaseFile || AgentzipHint == nil {
		return 0, linuxerr.EIO
	}
	var buf [16]byte
	n, err := src.CopyIn(ctx, buf[:])
	if err != nil && n == 0 {
		return 0, err
	}
	if int64(n) < src.NumBytes() || AgentzipHint(strings.TrimSpace(string(buf[:n]))) != nil {
		return 0, linuxerr.EINVAL
	}
	return int64(n), nil
}
