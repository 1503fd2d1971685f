package workload

import "fmt"

var data = Workload{
	Name:           "data",
	Summary:        "pandas over the same input files in every clone: load, filter, group, join, save",
	Rootfs:         "base",
	Packages:       basePackages,
	EstimatedBytes: 450 << 20,
	Cycle:          1 + len(dataCycle),
	Spec:           spec(config{Workload: "data"}),
	Install:        install,
	Plan:           planData,
}

var (
	dataCycle   = []string{"filter", "group", "join", "text", "save", "series"}
	dataDetours = []string{"filter", "group", "series"}

	categories = []string{"books", "garden", "kitchen", "lighting", "music", "office", "outdoor", "pets", "sports", "tools", "toys"}
)

// planData begins with loading: each clone has to, so it is not one of the n.
func planData(seed uint64, clone, n int) []Step {
	load := step("load", args{}, drawWait(drawFor(seed, clone, -1).Rand))
	return append([]Step{load}, planCycle(dataCycle, dataDetours, dataArguments)(seed, clone, n)...)
}

func dataArguments(d draw, kind string, unique int) args {
	name := fmt.Sprintf("%02d", unique)
	switch kind {
	case "filter":
		return args{"name": name, "categories": d.some(categories, d.between(3, 8)), "month": d.between(1, 9), "floor": d.between(8, 40)}
	case "group":
		return args{"name": name, "by": d.pick([]string{"category", "article", "state"}), "period": d.pick([]string{"month", "dayofweek", "hour", "quarter"})}
	case "join":
		return args{"name": name, "month": d.between(4, 11), "state": d.pick([]string{"returned", "cancelled", "open", "lost"}),
			"classes": d.some([]string{"a", "b", "c"}, d.between(1, 3)), "agg": d.pick([]string{"mean", "median", "max"})}
	case "text":
		return args{"name": name, "word": d.pick([]string{"neighbour", "gift", "urgent", "invoice", "fragile", "happy", "deliver", "floor"})}
	case "series":
		stride := d.between(2, 5)
		return args{"name": name, "first": d.IntN(stride), "stride": stride, "window": d.pick([]string{"7", "14", "28", "30"})}
	case "save":
		return args{"name": name, "rows": d.between(20000, 60000), "seed": d.between(1, 1<<20)}
	}
	panic("no arguments for a step of kind " + kind)
}
