package main

import (
	"slices"

	"runsc-agentzip/tools/agentbench/report"
)

// planEpisodes lists a run's episodes in their order. Everything of a workload
// comes together, for the sake of its template; then all systems take their
// turns at one number of clones before the next, so that what changes on the
// machine during the run meets all of them.
func planEpisodes(workloads, systems []string, clones []int, repetitions int) []report.Key {
	var out []report.Key
	turn := 0
	for _, w := range workloads {
		for rep := range repetitions {
			for _, n := range clones {
				for _, s := range turnOrder(systems, turn) {
					out = append(out, report.Key{Workload: w, System: s, Clones: n, Repetition: rep})
				}
				turn++
			}
		}
	}
	return out
}

// turnOrder is the order of the systems in one turn of the run: every second one
// is the reverse of the one before it, every pair begins with another system. So
// none is always the first, for which caches are colder than for the others.
func turnOrder(systems []string, turn int) []string {
	n := turn / 2 % len(systems)
	out := slices.Concat(systems[n:], systems[:n])
	if turn%2 == 1 {
		slices.Reverse(out)
	}
	return out
}

// referenceSystem is the one whose answers the others' are compared with.
func referenceSystem(systems []string) string {
	if slices.Contains(systems, report.Stock) {
		return report.Stock
	}
	return systems[0]
}
