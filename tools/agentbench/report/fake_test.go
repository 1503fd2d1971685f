package report

import (
	"encoding/json"
	"fmt"
	"hash/fnv"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"runsc-agentzip/pkg/fleet"
)

// fake describes an invented run. Its figures have the shape of real ones and
// nothing else to do with them.
type fake struct {
	workloads, systems []string
	clones             []int
	steps, repetitions int
	// seed makes the noise; the plan of steps does not depend on it.
	seed uint64
	// slow multiplies the step times of all systems but stock.
	slow float64
	// bigger multiplies the owned memory of all systems but stock.
	bigger float64
	// pool gives all systems of the runtime but agentzip-nopool a page pool.
	pool bool
}

// fullFake is as large as a full run.
func fullFake() fake {
	return fake{
		workloads: []string{"swe", "lsp", "data", "build", "trace"},
		systems:   []string{"stock", "linux", "agentzip", "agentzip-noprefetch", "agentzip-notemplate", "agentzip-nodelta"},
		clones:    []int{8, 16}, steps: 14, repetitions: 2, seed: 1,
	}
}

// smallFake is cheap enough to be made often.
func smallFake() fake {
	return fake{workloads: []string{"swe", "data"}, systems: []string{"stock", "linux", "agentzip"},
		clones: []int{4}, steps: 12, repetitions: 2, seed: 1}
}

// fakeSystem is how an invented system behaves, relative to stock.
var fakeSystem = map[string]struct{ owned, host, step, restore, cpu float64 }{
	"stock":               {1, 1, 1, 1, 1},
	"linux":               {0.42, 0.55, 1.31, 1.04, 1.5},
	"agentzip":            {0.105, 0.2, 1.06, 0.35, 1.22},
	"agentzip-noprefetch": {0.105, 0.2, 1.45, 0.35, 1.2},
	"agentzip-notemplate": {0.31, 0.43, 1.08, 1.1, 1.4},
	"agentzip-nodelta":    {0.16, 0.24, 1.04, 0.35, 1.15},
	"agentzip-nopool":     {0.2, 0.25, 1.06, 0.35, 1.2},
}

func hashed(parts ...any) *rand.Rand {
	h := fnv.New64a()
	fmt.Fprint(h, parts...)
	return rand.New(rand.NewPCG(h.Sum64(), 7))
}

// report invents the run.
func (f fake) report() *Report {
	r := f.raw()
	r.Summarize()
	return r
}

// raw invents the samples of the run, which are all that Compare uses.
func (f fake) raw() *Report {
	if f.slow == 0 {
		f.slow = 1
	}
	if f.bigger == 0 {
		f.bigger = 1
	}
	kinds := []string{"explore", "edit", "test", "data", "commit"}
	base := map[string]float64{"explore": 0.06, "edit": 0.03, "test": 0.9, "data": 0.35, "commit": 0.12}
	r := &Report{
		Date: time.Date(2001, 2, 3, 4, 5, 0, 0, time.UTC), Commit: "0123456789ab",
		Command: []string{"agentbench", "run", "--workloads=swe,lsp", "--clones=8,16"},
		Machine: Machine{OS: "Invented OS 1", Kernel: "0.0-fake", Arch: "amd64", CPU: "Imaginary CPU @ 0 GHz", CPUs: 2,
			MemoryBytes: 24 << 30, Virtual: "none at all", GoVersion: "go0", Platform: "systrap"},
		Config:     Config{Clones: f.clones, Steps: f.steps, Repetitions: f.repetitions, Seed: 1, WaitScale: 0.5, Waits: "log-normal, 0.1 s to 30 s, median 4 s"},
		Mismatches: []Mismatch{}, Problems: []Problem{}, Episodes: []Episode{}, Steps: []Step{}, Memory: []Memory{}, Timeline: []Point{},
	}
	for i, w := range f.workloads {
		r.Workloads = append(r.Workloads, Workload{Name: w, Summary: "invented workload number " + fmt.Sprint(i+1) + ", for tests", StartSeconds: 3.2,
			CheckpointSeconds: 1.1, ImageBytes: 240 << 20, TemplateBytes: 250 << 20})
	}
	for _, s := range f.systems {
		y := System{Name: s, Summary: "an invented system", Binary: "/invented/" + s, Version: "0", Flags: []string{"--platform=systrap"}}
		if len(s) > len("agentzip-no") {
			y.Ablation = s[len("agentzip-no"):]
		}
		y.Pool = f.pooled(s)
		r.Systems = append(r.Systems, y)
	}
	order := 0
	for wi, w := range f.workloads {
		for _, n := range f.clones {
			for rep := range f.repetitions {
				for _, y := range f.systems {
					f.episode(r, Key{w, y, n, rep}, float64(wi), kinds, base, order)
					order++
				}
			}
		}
	}
	r.Seconds = 60 * float64(order)
	return r
}

func (f fake) pooled(system string) bool {
	return f.pool && strings.HasPrefix(system, "agentzip") && system != "agentzip-nopool"
}

func (f fake) episode(r *Report, k Key, wi float64, kinds []string, base map[string]float64, order int) {
	b, ok := fakeSystem[k.System]
	if !ok {
		b = fakeSystem["agentzip"]
	}
	slow, bigger := f.slow, f.bigger
	if k.System == Stock {
		slow, bigger = 1, 1
	}
	noise := hashed("noise", f.seed, k)
	e := Episode{Key: k, Order: order, Began: 60 * float64(order)}
	const mib = 1 << 20
	type event struct{ at, delta float64 }
	var events []event
	perClone := 0.0
	for c := range k.Clones {
		plan := hashed("plan", k.Workload, k.Clones, k.Repetition, c)
		restore := (0.15 + 0.012*float64(c)) * b.restore * math.Exp(0.1*noise.NormFloat64())
		e.Restores = append(e.Restores, restore)
		now := restore
		working := (20 + 8*wi) * mib
		for i := -1; i < f.steps; i++ {
			if i >= 0 {
				kind := kinds[plan.IntN(len(kinds))]
				t := base[kind] * (1 + wi/4) * math.Exp(0.5*plan.NormFloat64()) * b.step * slow * math.Exp(0.12*noise.NormFloat64())
				r.Steps = append(r.Steps, Step{Key: k, Clone: c, Index: i, Kind: kind, Began: now, Seconds: t, Output: fmt.Sprintf("%s-%d-%d-%d", k.Workload, k.Repetition, c, i),
					DemandPages: uint64(noise.IntN(900))})
				if strings.HasPrefix(k.System, "agentzip") {
					own := hashed("prefetch", f.seed, k, c, i)
					sampled := uint64(16 * (1 + own.IntN(20)))
					r.Steps[len(r.Steps)-1].Prefetch = &StepPrefetch{Patterns: uint64(i + c), Wanted: uint64(own.IntN(300)), Predicted: 12 * sampled,
						Sampled: sampled, Used: uint64(own.IntN(int(sampled) + 1)), LastFaultSeconds: t * own.Float64()}
				}
				now += t
				working += float64(plan.IntN(5)) * mib
			}
			wait := min(30, 4*math.Exp(0.9*plan.NormFloat64()))
			owned := working * b.owned * bigger * math.Exp(0.05*noise.NormFloat64())
			host := (working + 260*mib) * b.host * math.Exp(0.02*noise.NormFloat64())
			now += wait
			r.Memory = append(r.Memory, Memory{Key: k, Clone: c, Index: i, At: now, IdleSeconds: wait, CommittedBytes: uint64(working) + 250*mib,
				OwnedBytes: uint64(owned), HostBytes: uint64(host), OwnedEstimated: k.System == "linux"})
			if m := &r.Memory[len(r.Memory)-1]; f.pooled(k.System) {
				m.PoolShareBytes = m.OwnedBytes / 3
				m.Pool = &fleet.PoolMemory{Memfd: m.OwnedBytes / 3 * uint64(k.Clones), Process: fleet.ProcMemory{PSSAnon: 1 << 20}}
			}
			events = append(events, event{now - wait, host * 1.3}, event{now - wait + min(wait, 0.4), -host * 0.3})
			perClone = host
		}
		events = append(events, event{now, 0})
		e.Seconds = max(e.Seconds, now)
	}
	used := 0.0
	// The host's memory wanders between what all clones take when they wait
	// and when they work.
	points := int(4 * e.Seconds)
	for i := range points {
		at := e.Seconds * float64(i) / float64(points)
		busy := 0
		for _, ev := range events {
			if ev.at <= at && at < ev.at+0.4 && ev.delta > 0 {
				busy++
			}
		}
		started := min(1, at/2)
		used = started * (float64(k.Clones)*perClone*(0.8+0.2*at/e.Seconds) + 0.4*float64(busy)*perClone + 4*mib*noise.NormFloat64())
		r.Timeline = append(r.Timeline, Point{Key: k, At: at, UsedBytes: uint64(max(0, used)), Waiting: k.Clones - min(busy, k.Clones)})
		e.PeakBytes = max(e.PeakBytes, uint64(max(0, used)))
	}
	total := 0.0
	for _, t := range r.Steps {
		if t.Key == k {
			total += t.Seconds
		}
	}
	e.CPUSeconds = 1.1*total*b.cpu/b.step*math.Exp(0.03*noise.NormFloat64()) + 2
	e.SandboxCPUSeconds = 0.9 * (e.CPUSeconds - 2)
	if f.pooled(k.System) {
		e.PoolCPUSeconds = 0.1 * e.SandboxCPUSeconds
	}
	e.Waits = k.Clones*(f.steps+1) + 3
	e.OwnCPUSeconds, e.IdleCPUSeconds = 1.5, 0.5
	r.Episodes = append(r.Episodes, e)
}

// without removes a system from the raw samples.
func without(r *Report, drop func(Key) bool) *Report {
	out := *r
	out.Episodes = slices.DeleteFunc(slices.Clone(r.Episodes), func(e Episode) bool { return drop(e.Key) })
	out.Steps = slices.DeleteFunc(slices.Clone(r.Steps), func(e Step) bool { return drop(e.Key) })
	out.Memory = slices.DeleteFunc(slices.Clone(r.Memory), func(e Memory) bool { return drop(e.Key) })
	out.Timeline = slices.DeleteFunc(slices.Clone(r.Timeline), func(e Point) bool { return drop(e.Key) })
	out.Systems = slices.DeleteFunc(slices.Clone(r.Systems), func(y System) bool { return drop(Key{System: y.Name}) })
	out.Summarize()
	return &out
}

// broken is a run that was stopped half-way and found faults.
func broken() *Report {
	r := without(smallFake().report(), func(k Key) bool { return k.Workload == "data" && k.System == "agentzip" && k.Repetition == 1 })
	r.Error = "workload data: system agentzip: clone 2: <b>runsc</b> & co: sandbox exited with status 2"
	k := Key{"swe", "linux", 4, 0}
	r.Steps[slices.IndexFunc(r.Steps, func(t Step) bool { return t.Key == k })].Output = "other"
	r.Mismatches = []Mismatch{{Key: k, Clone: 0, Index: 0, Kind: "test", Reference: Stock,
		Want: json.RawMessage(`{"code":0,"stdout":"12 passed"}`), Got: json.RawMessage(`{"code":1,"stdout":"<script>alert(1)</script> 1 failed"}`)}}
	r.Problems = []Problem{
		{Key: Key{"data", "agentzip", 4, 0}, Fatal: true, Text: "agentzip check: page 0x1f2000: checksum differs"},
		{Key: Key{"swe", "stock", 4, 1}, Text: "another program used 31 % of the machine during this episode"},
	}
	r.Summarize()
	return r
}
