package workload

import (
	"fmt"
	"path"
	"strconv"
)

var swe = Workload{
	Name:           "swe",
	Summary:        "an agent works on a Python project: explores, edits, tests, runs scripts, commits",
	Rootfs:         "base",
	Packages:       basePackages,
	EstimatedBytes: 400 << 20,
	Cycle:          len(sweCycle),
	Spec:           spec(config{Workload: "swe"}),
	Install:        install,
	Plan:           planCycle(sweCycle, sweDetours, sweArguments),
}

var (
	sweCycle   = []string{"look", "git", "search", "edit", "test", "analyze", "script", "commit", "test"}
	sweDetours = []string{"look", "git", "search", "analyze"}
)

const repository = "/srv/repo"

// The repository's contents that plans refer to: all of it exists in Debian
// 12's python3-networkx.
var (
	sweParts    = []string{"algorithms", "algorithms/centrality", "algorithms/flow", "algorithms/connectivity", "algorithms/isomorphism", "classes", "generators", "readwrite", "utils", "drawing", "linalg"}
	swePatterns = []string{`def _?is_`, `raise nx\.\w+Error`, `isinstance\(`, `import \w+ as`, `G\.is_directed`, `\.copy\(`, `weight=`, `for \w+, \w+ in`, `heappush`, `return (True|False)`}
	gitPatterns = []string{"raise NetworkXError", "is_directed()", "not_implemented_for", "heappush", "nx.Graph()", "lru_cache", "deque(", "warnings.warn"}
	sweSources  = []string{
		"networkx/algorithms/clique.py", "networkx/algorithms/cluster.py", "networkx/algorithms/core.py",
		"networkx/algorithms/cycles.py", "networkx/algorithms/dag.py", "networkx/algorithms/euler.py",
		"networkx/algorithms/matching.py", "networkx/algorithms/planarity.py", "networkx/algorithms/similarity.py",
		"networkx/algorithms/simple_paths.py", "networkx/algorithms/threshold.py", "networkx/algorithms/triads.py",
		"networkx/algorithms/centrality/betweenness.py", "networkx/algorithms/centrality/closeness.py",
		"networkx/algorithms/flow/maxflow.py", "networkx/algorithms/flow/preflowpush.py",
		"networkx/algorithms/isomorphism/isomorphvf2.py", "networkx/algorithms/tree/mst.py",
		"networkx/classes/graph.py", "networkx/classes/digraph.py", "networkx/classes/multigraph.py",
		"networkx/classes/function.py", "networkx/generators/random_graphs.py", "networkx/generators/geometric.py",
		"networkx/generators/community.py", "networkx/readwrite/gml.py", "networkx/readwrite/graphml.py",
		"networkx/utils/misc.py", "networkx/utils/decorators.py", "networkx/drawing/layout.py",
		"networkx/drawing/nx_pylab.py", "networkx/convert_matrix.py", "networkx/relabel.py",
	}
	sweTests = []string{
		"networkx/algorithms/approximation/tests/test_clique.py",
		"networkx/algorithms/approximation/tests/test_connectivity.py",
		"networkx/algorithms/approximation/tests/test_traveling_salesman.py",
		"networkx/algorithms/bipartite/tests/test_covering.py",
		"networkx/algorithms/centrality/tests/test_betweenness_centrality.py",
		"networkx/algorithms/centrality/tests/test_closeness_centrality.py",
		"networkx/algorithms/centrality/tests/test_group.py",
		"networkx/algorithms/centrality/tests/test_load_centrality.py",
		"networkx/algorithms/community/tests/test_lukes.py",
		"networkx/algorithms/community/tests/test_quality.py",
		"networkx/algorithms/connectivity/tests/test_disjoint_paths.py",
		"networkx/algorithms/connectivity/tests/test_edge_augmentation.py",
		"networkx/algorithms/flow/tests/test_mincost.py",
		"networkx/algorithms/flow/tests/test_networksimplex.py",
		"networkx/algorithms/isomorphism/tests/test_ismags.py",
		"networkx/algorithms/isomorphism/tests/test_isomorphvf2.py",
		"networkx/algorithms/shortest_paths/tests/test_weighted.py",
		"networkx/algorithms/tests/test_chordal.py",
		"networkx/algorithms/tests/test_cycles.py",
		"networkx/algorithms/tests/test_dag.py",
		"networkx/algorithms/tests/test_distance_measures.py",
		"networkx/algorithms/tests/test_graphical.py",
		"networkx/algorithms/tests/test_hybrid.py",
		"networkx/algorithms/tests/test_mis.py",
		"networkx/algorithms/tests/test_planarity.py",
		"networkx/algorithms/tests/test_regular.py",
		"networkx/algorithms/tests/test_richclub.py",
		"networkx/algorithms/tests/test_simple_paths.py",
		"networkx/algorithms/tests/test_sparsifiers.py",
		"networkx/algorithms/tests/test_tournament.py",
		"networkx/algorithms/tests/test_triads.py",
		"networkx/classes/tests/test_graph_historical.py",
		"networkx/classes/tests/test_graphviews.py",
		"networkx/classes/tests/test_subgraphviews.py",
		"networkx/generators/tests/test_atlas.py",
		"networkx/generators/tests/test_classic.py",
		"networkx/generators/tests/test_community.py",
		"networkx/generators/tests/test_degree_seq.py",
		"networkx/generators/tests/test_directed.py",
		"networkx/generators/tests/test_ego.py",
		"networkx/generators/tests/test_expanders.py",
		"networkx/generators/tests/test_geometric.py",
		"networkx/generators/tests/test_internet_as_graphs.py",
		"networkx/generators/tests/test_joint_degree_seq.py",
		"networkx/generators/tests/test_lattice.py",
		"networkx/generators/tests/test_line.py",
		"networkx/readwrite/tests/test_adjlist.py",
		"networkx/readwrite/tests/test_graph6.py",
		"networkx/readwrite/tests/test_sparse6.py",
	}
)

func sweArguments(d draw, kind string, unique int) args {
	name := fmt.Sprintf("%02d", unique)
	file := d.pick(sweSources)
	part := "" // half of the searches are for all of it
	if d.IntN(2) == 0 {
		part = d.pick(sweParts)
	}
	switch kind {
	case "look":
		first := d.between(1, 120)
		return commands(
			[]string{"ls", "-1F", path.Dir(file)},
			[]string{"sed", "-n", fmt.Sprintf("%d,%dp", first, first+d.between(60, 200)), file},
			[]string{"grep", "-rn", "--include=*.py", "-E", d.pick(swePatterns), path.Dir(file)},
			[]string{"wc", "-l", file, d.pick(sweSources)},
			[]string{"cat", d.pick(sweSources)},
			[]string{"find", "networkx/" + part, "-name", "test_*.py", "-size", "+8k"},
		)
	case "git":
		return commands(
			[]string{"git", "log", "--stat", "-n", strconv.Itoa(d.between(5, 20)), "--", path.Dir(file)},
			[]string{"git", "grep", "-n", "-F", d.pick(gitPatterns), "--", "networkx/" + part},
			d.pickList([][]string{
				{"git", "blame", "-s", file},
				{"git", "show", "--stat", "-p", fmt.Sprintf("HEAD~%d", d.between(1, 30))},
				{"git", "log", "--oneline", "-S", d.pick(gitPatterns), "-n", "5", "--", file},
			}),
		)
	case "search":
		return args{"kind": "search", "name": name, "part": part, "pattern": d.pick(swePatterns)}
	case "analyze":
		return args{"kind": d.pick([]string{"calls", "outline", "table"}), "name": name, "part": part, "pattern": d.pick(swePatterns)}
	case "edit":
		return args{"seed": d.between(1, 1<<20), "count": d.between(2, 6), "name": d.pick([]string{"result", "outcome", "value", "found", "final"}), "share": 0.5}
	case "test":
		return commands(append([]string{"python3", "-m", "pytest", "-q"}, d.pick(sweTests)))
	case "script":
		return args{"name": name, "lines": d.between(3, 30), "kind": d.pick([]string{"FunctionDef", "ClassDef"}),
			"by": d.pick([]string{"owner", "documented"}), "order": d.pick([]string{"n", "lines", "calls", "density"})}
	case "commit":
		return commands(
			[]string{"git", "add", "-A"},
			[]string{"git", "commit", "-q", "-m", "Step " + name},
			[]string{"git", "log", "--oneline", "--stat", "-n", "3"},
		)
	}
	panic("no arguments for a step of kind " + kind)
}

func commands(list ...[]string) args {
	return args{"commands": list, "cwd": repository}
}
