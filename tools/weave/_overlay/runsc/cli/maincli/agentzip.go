package maincli

import (
	"maps"

	"gvisor.dev/gvisor/runsc/cmd/util"
)

// ExtraCommands are registered beside runsc's own, in the place of those that have the
// same name; the values are group names.
var ExtraCommands = map[util.SubCommand]string{}

func addExtraCommands(cmds map[util.SubCommand]string) {
	for extra, group := range ExtraCommands {
		maps.DeleteFunc(cmds, func(c util.SubCommand, _ string) bool { return c.Name() == extra.Name() })
		cmds[extra] = group
	}
}
