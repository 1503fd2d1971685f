package workload

import (
	"fmt"
	"strconv"
)

var build = Workload{
	Name:           "build",
	Summary:        "an agent works on a C++ program: edits, builds with make -j2, runs it",
	Rootfs:         "build",
	Packages:       []string{"git", "python3", "g++", "make", "libfmt-dev", "nlohmann-json3-dev"},
	EstimatedBytes: 550 << 20,
	Cycle:          len(buildCycle),
	Spec:           spec(config{Workload: "build"}),
	Install:        install,
	Plan:           planCycle(buildCycle, nil, buildArguments),
}

var buildCycle = []string{"look", "edit", "make", "execute", "commit"}

// buildModules is how many modules guest/build.py makes.
const buildModules = 32

func buildArguments(d draw, kind string, unique int) args {
	source := func() string { return fmt.Sprintf("src/m%02d.cpp", d.IntN(buildModules)) }
	switch kind {
	case "look":
		return commands(
			[]string{"ls", "-1F", "src"},
			[]string{"cat", source(), source()},
			[]string{"grep", "-n", "-E", d.pick([]string{"#include <[m-z]", "std::(sort|visit|regex)", "for \\(", "return std::to_string"}), "-r", "src"},
			[]string{"nm", "-C", "--defined-only", fmt.Sprintf("build/m%02d.o", d.IntN(buildModules))},
			[]string{"git", "log", "--oneline", "--stat", "-n", "5"},
		)
	case "edit":
		return args{"seed": d.between(1, 1<<20), "count": d.between(1, 2), "add": d.IntN(4) == 0}
	case "make":
		return args{}
	case "execute":
		program := func() []string {
			argv := []string{"build/program"}
			for range d.between(3, 12) {
				argv = append(argv, strconv.Itoa(d.between(1, 100000)))
			}
			return append(argv, d.some([]string{"alpha", "bravo", "charlie", "delta", "echo", "foxtrot"}, d.between(1, 4))...)
		}
		return commands(program(), program(), program(), program())
	case "commit":
		return commands(
			[]string{"git", "add", "-A"},
			[]string{"git", "commit", "-q", "-m", fmt.Sprintf("Step %02d", unique)},
			[]string{"git", "log", "--oneline", "--stat", "-n", "3"},
		)
	}
	panic("no arguments for a step of kind " + kind)
}
