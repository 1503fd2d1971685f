package main

import (
	"bytes"
	_ "embed"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"

	"runsc-agentzip/pkg/fleet"
)

//go:embed workload/toolserver.py
var toolServer []byte

// toolServerPath is where the guest finds the tool server.
const toolServerPath = "opt/agentbench/toolserver.py"

// demoRootfs names the workload whose package set the demo's guest runs on: its
// tool server needs nothing else, and one root file system serves both.
const demoRootfs = "swe"

// installToolServer puts the tool server into the root file system, which all
// runs share; the file is replaced atomically and is the same for all of them
// unless agentbench itself changed.
func installToolServer(rootfs string) error {
	path := filepath.Join(rootfs, toolServerPath)
	// What is there already stays, and with it an image of the root file system.
	if old, err := os.ReadFile(path); err == nil && bytes.Equal(old, toolServer) {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	tmp := fmt.Sprintf("%s.%d", path, os.Getpid())
	if err := os.WriteFile(tmp, toolServer, 0o644); err != nil {
		return err
	}
	return os.Rename(tmp, path)
}

// workloadSpec describes the container whose init is the tool server.
func workloadSpec(rootfs string, seed uint64) fleet.Spec {
	return fleet.Spec{
		Rootfs:   rootfs,
		Hostname: "agent",
		Args:     []string{"/usr/bin/python3", "/" + toolServerPath, fmt.Sprintf(`{"seed": %d}`, seed)},
		Env: []string{
			// Reproducible answers: fixed hashing, one BLAS thread.
			"PYTHONHASHSEED=0", "OPENBLAS_NUM_THREADS=1", "LC_ALL=C.UTF-8",
			"PYTHONDONTWRITEBYTECODE=1",
		},
	}
}

// request is one line to the tool server.
type request struct {
	Op   string         `json:"op"`
	Name string         `json:"name,omitempty"`
	Args map[string]any `json:"args,omitempty"`
}

func (r request) line() string {
	b, err := json.Marshal(r)
	if err != nil {
		panic(err) // plain strings and numbers
	}
	return string(b)
}

// stepCycle is the order of tool steps; longer runs repeat it.
var stepCycle = []string{"explore", "edit", "test", "data", "repl", "explore", "edit", "repl"}

var (
	textPatterns = []string{`def _?get`, `raise ValueError`, `isinstance\(.*, np\.`, `import \w+ as`, `deprecat`, `\.astype\(`, `self\._\w+ =`, `return None`}
	namePatterns = []string{"get", "set", "index", "to_", "array", "parse", "check", "block"}
	packages     = []string{"numpy", "pandas", "dateutil", "pandas/core"}
	identifiers  = []string{"result", "outcome", "value", "answer", "computed", "final"}
	replKinds    = []string{"index", "tokens", "calls"}
)

// planStep returns what one clone does in one round. All clones of a round do
// the same kind of thing with arguments of their own, as agents that work on
// related tasks do; the plan depends on seed, clone and round only.
func planStep(seed uint64, clone, round int) request {
	rng := rand.New(rand.NewPCG(seed, uint64(clone)<<32|uint64(round)))
	pick := func(from []string) string { return from[rng.IntN(len(from))] }
	name := stepCycle[round%len(stepCycle)]
	var args map[string]any
	switch name {
	case "explore":
		args = map[string]any{"pattern": pick(textPatterns), "name": pick(namePatterns), "package": pick(packages), "top": 3 + rng.IntN(5)}
	case "edit":
		args = map[string]any{"seed": 1 + rng.IntN(1<<20), "count": 4 + rng.IntN(8), "name": pick(identifiers)}
	case "test":
		args = map[string]any{"seed": 1 + rng.IntN(1<<20), "size": 100 + rng.IntN(200), "count": 8 + rng.IntN(10)}
	case "data":
		args = map[string]any{"users": 2 + rng.IntN(4), "tool": fmt.Sprintf("tool%d", rng.IntN(12)), "quantile": 0.85 + 0.1*rng.Float64(), "name": fmt.Sprintf("frames%d", round)}
	case "repl":
		stride := 2 + rng.IntN(3)
		args = map[string]any{"kind": pick(replKinds), "name": fmt.Sprintf("r%d", round), "first": rng.IntN(stride), "stride": stride}
	default:
		panic("no plan for step " + name)
	}
	return request{Op: "step", Name: name, Args: args}
}
