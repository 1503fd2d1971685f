// Command runsc-stock is gVisor's own runsc, built from the very module version
// that go.mod pins and with none of our changes: the baseline that agentbench
// and the integrity tests compare with.
//
// It has to be compiled against the module cache (-mod=readonly), because
// vendor/ holds the patched tree; `make stock` does that.
package main

import (
	"gvisor.dev/gvisor/runsc/cli/maincli"
	"gvisor.dev/gvisor/runsc/version"
)

func main() {
	// Keeps the version package's variable in the binary, so that
	// -ldflags -X can set it.
	_ = version.Version()
	maincli.Main()
}
