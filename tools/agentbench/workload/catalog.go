package workload

import (
	"fmt"
	"strings"
)

// basePackages is the content of the root file system "base".
var basePackages = []string{
	"git", "python3", "python3-numpy", "python3-pandas", "python3-tz", "python3-dateutil",
	"python3-pytest", "python3-networkx",
}

// all lists the workloads in the order they are presented.
func all() []Workload { return []Workload{swe, lsp, lspLate, data, build} }

// Names returns the names of all workloads.
func Names() []string {
	var names []string
	for _, w := range all() {
		names = append(names, w.Name)
	}
	return names
}

// Get returns a workload by its name.
func Get(name string) (Workload, error) {
	for _, w := range all() {
		if w.Name == name {
			return w, nil
		}
	}
	return Workload{}, fmt.Errorf("unknown workload %q: there are %s", name, strings.Join(Names(), ", "))
}
