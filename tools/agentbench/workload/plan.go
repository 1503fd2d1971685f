package workload

import (
	"encoding/json"
	"math"
	"math/rand/v2"
	"time"
)

// WaitDistribution describes how long clones wait before a step.
const WaitDistribution = "log-normal with a median of 3 s and sigma 0.857, drawn anew outside 0.1 s to 30 s: a tenth of the waits is below 1 s, a tenth above 9 s"

const (
	waitMedian = 3 * time.Second
	waitSigma  = 0.857
	waitMin    = 100 * time.Millisecond
	waitMax    = 30 * time.Second
)

// drawWait draws from WaitDistribution.
func drawWait(rng *rand.Rand) time.Duration {
	for {
		d := time.Duration(float64(waitMedian) * math.Exp(waitSigma*rng.NormFloat64()))
		if d >= waitMin && d <= waitMax {
			return d.Round(time.Millisecond)
		}
	}
}

// draw makes the random choices of one step.
type draw struct{ *rand.Rand }

// drawFor returns the source of a step's choices; steps do not share one, so
// that a plan of more steps begins with the plan of fewer. Negative indices are
// those of steps before the first.
func drawFor(seed uint64, clone, index int) draw {
	return draw{rand.New(rand.NewPCG(seed, uint64(clone)<<32|uint64(uint32(index))))}
}

func (d draw) pick(from []string) string { return from[d.IntN(len(from))] }

func (d draw) pickList(from [][]string) []string { return from[d.IntN(len(from))] }

// some picks n different elements, in the order they are listed.
func (d draw) some(from []string, n int) []string {
	chosen := make(map[int]bool)
	for _, i := range d.Perm(len(from))[:n] {
		chosen[i] = true
	}
	var out []string
	for i, s := range from {
		if chosen[i] {
			out = append(out, s)
		}
	}
	return out
}

// between returns a number from lo to hi, both included.
func (d draw) between(lo, hi int) int { return lo + d.IntN(hi-lo+1) }

// args are the arguments of a request.
type args map[string]any

// step makes a step of a request to the tool server.
func step(kind string, a args, wait time.Duration) Step {
	return Step{Kind: kind, Request: request("step", kind, a), Wait: wait}
}

func request(op, name string, a args) json.RawMessage {
	b, err := json.Marshal(struct {
		Op   string `json:"op"`
		Name string `json:"name,omitempty"`
		Args args   `json:"args,omitempty"`
	}{op, name, a})
	if err != nil {
		panic(err) // strings, numbers and lists of them
	}
	return b
}

// detour is the share of steps in which a clone, instead of what its cycle has
// next, looks for something: no two agents take the same way.
const detour = 0.2

// planCycle returns a Plan function: steps of the kinds in cycle, over and
// over, now and then replaced by one of detours. arguments returns what a step
// of some kind is asked; unique is different in each of a clone's steps.
func planCycle(cycle, detours []string, arguments func(d draw, kind string, unique int) args) func(seed uint64, clone, n int) []Step {
	return func(seed uint64, clone, n int) []Step {
		steps := make([]Step, 0, n)
		for i := range n {
			d := drawFor(seed, clone, i)
			wait := drawWait(d.Rand)
			kind := cycle[i%len(cycle)]
			if len(detours) > 0 && d.Float64() < detour {
				kind = d.pick(detours)
			}
			steps = append(steps, step(kind, arguments(d, kind, i), wait))
		}
		return steps
	}
}
