package workload

import (
	"slices"
)

var lspPackages = slices.Concat(basePackages, []string{
	"nodejs", "node-typescript", "node-lodash",
	// pylsp finds its plugins with setuptools.
	"python3-pylsp", "python3-pyflakes", "python3-pycodestyle", "python3-setuptools",
})

var lsp = Workload{
	Name:           "lsp",
	Summary:        "swe with a TypeScript and a Python language server that the template holds",
	Rootfs:         "lsp",
	Packages:       lspPackages,
	EstimatedBytes: 700 << 20,
	Cycle:          len(lspCycle),
	Spec:           spec(config{Workload: "lsp"}),
	Install:        install,
	Plan:           planCycle(lspCycle, sweDetours, lspArguments),
}

var lspLate = Workload{
	Name:           "lsp-late",
	Summary:        "lsp, but each clone starts its language servers after it was restored",
	Rootfs:         "lsp",
	Packages:       lspPackages,
	EstimatedBytes: 750 << 20,
	Cycle:          len(languages) + len(lspCycle),
	Spec:           spec(config{Workload: "lsp", Late: true}),
	Install:        install,
	Plan:           planLate,
}

// The languages that there are servers for.
var languages = []string{"ts", "py"}

var lspCycle = []string{"navigate", "look", "complete", "edit", "diagnose", "test", "navigate", "search", "complete", "commit", "diagnose", "script"}

// planLate begins with starting the servers, which are not among the n.
func planLate(seed uint64, clone, n int) []Step {
	var steps []Step
	for i, language := range languages {
		wait := drawWait(drawFor(seed, clone, -1-i).Rand)
		steps = append(steps, step("start", args{"language": language}, wait))
	}
	return append(steps, lsp.Plan(seed, clone, n)...)
}

func lspArguments(d draw, kind string, unique int) args {
	// Different clones edit different functions even of one file.
	seed := d.between(1, 1<<20)
	switch kind {
	case "navigate", "complete":
		// In each of two files. The Python server takes much longer for one.
		language, count := d.pick(languages), d.between(2, 6)
		if language == "py" {
			count = 1
		}
		return args{"language": language, "seed": seed, "count": count}
	case "diagnose":
		return args{"language": d.pick(languages), "seed": seed}
	}
	return sweArguments(d, kind, unique)
}
