package maincli

import "gvisor.dev/gvisor/runsc/cmd/util"

// ExtraCommands are registered beside runsc's own; the values are group names.
var ExtraCommands = map[util.SubCommand]string{}
