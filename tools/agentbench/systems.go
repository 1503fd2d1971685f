package main

import (
	"fmt"
	"slices"
	"strings"

	"runsc-agentzip/tools/agentbench/report"
)

// systemKind is one way to run sandboxes.
type systemKind struct {
	name, summary string
	// judged systems run the runtime under test, the others the stock runsc.
	judged bool
	// flags are global runsc flags, after the user's --runtime-flags.
	flags []string
	// ablation names the part of the runtime that is switched off.
	ablation string
	// swaps: each sandbox lies in a memory cgroup whose memory is moved to a
	// compressed swap device when it waits.
	swaps bool
	// counted: the runtime itself tells what it holds. Where it does not, guest
	// memory is compared with the template's.
	counted bool
	// pooled: all sandboxes of an episode share a page pool, if the runtime has
	// one.
	pooled bool
}

// linuxName is the system that does with Linux's own means what the runtime
// under test does.
const linuxName = "linux"

// systemKinds is every system there is, in the order of reports.
var systemKinds = []systemKind{
	{name: report.Stock, summary: "unpatched runsc"},
	{name: linuxName, summary: "unpatched runsc, a memory cgroup each, moved to compressed swap (zram, lz4) when it has waited for 200 ms, by a thread of nice 10 as the runtime under test has for its evictions, KSM on", swaps: true},
	{name: judgedName, summary: "the runtime under test with its defaults, and a page pool that the clones share", judged: true, counted: true, pooled: true},
	{name: "agentzip-nopool", summary: "without the pool: clones share nothing but the template", judged: true, counted: true,
		ablation: "pool"},
	{name: "agentzip-noprefetch", summary: "nothing is restored before it is touched", judged: true, counted: true, pooled: true,
		flags: []string{"--agentzip-prefetch=off"}, ablation: "prefetch"},
	{name: "agentzip-notemplate", summary: "a restore copies the whole template, which is each clone's own then", judged: true, counted: true, pooled: true,
		flags: []string{"--agentzip-template=load"}, ablation: "template"},
	{name: "agentzip-nodeep", summary: "what was stored in a quick form is never compressed harder", judged: true, counted: true, pooled: true,
		flags: []string{"--agentzip-deepen-after=10000h"}, ablation: "deepening"},
	{name: "agentzip-eager", summary: "evicts as soon as a wait begins", judged: true, counted: true, pooled: true,
		flags: []string{"--agentzip-idle=1ms"}, ablation: "idle time"},
	{name: "agentzip-always", summary: "evicts as soon as a wait begins, and restores nothing before it is touched", judged: true, counted: true, pooled: true,
		flags: []string{"--agentzip-idle=1ms", "--agentzip-prefetch=off"}, ablation: "idle time and prefetch"},
	{name: "agentzip-off", summary: "the runtime under test without its memory backend", judged: true,
		flags: []string{"--agentzip=off"}, ablation: "everything"},
}

// systemGroups are names for several systems.
var systemGroups = map[string]func(systemKind) bool{
	"all":      func(systemKind) bool { return true },
	"ablation": func(s systemKind) bool { return s.ablation != "" || s.name == judgedName },
}

// parseSystems translates a list of names of systems and groups of them. The
// result has the order of the list and each system once.
func parseSystems(list string) ([]systemKind, error) {
	var out []systemKind
	add := func(match func(systemKind) bool) (found bool) {
		for _, s := range systemKinds {
			if !match(s) {
				continue
			}
			found = true
			if !slices.ContainsFunc(out, func(o systemKind) bool { return o.name == s.name }) {
				out = append(out, s)
			}
		}
		return found
	}
	for name := range strings.SplitSeq(list, ",") {
		name = strings.TrimSpace(name)
		match := systemGroups[name]
		if match == nil {
			match = func(s systemKind) bool { return s.name == name }
		}
		if !add(match) {
			var known []string
			for _, s := range systemKinds {
				known = append(known, s.name)
			}
			return nil, fmt.Errorf("unknown system %q: there are %s, and the groups ablation and all", name, strings.Join(known, ", "))
		}
	}
	return out, nil
}
