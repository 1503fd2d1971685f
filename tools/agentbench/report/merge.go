package report

import (
	"fmt"
	"slices"
)

// Merge returns one report of runs that measured different things, such as other
// workloads or numbers of clones, in the same way. Runs on other machines or with
// other systems are refused, as are two that have an episode in common; what else
// differs becomes a Problem that readers see. A system is the same if its binary
// and flags are; where a report does not know its binaries, the commits must be
// the same.
func Merge(reports ...*Report) (*Report, error) {
	if len(reports) == 0 {
		return nil, fmt.Errorf("no reports to merge")
	}
	// Whatever is appended to must not be shared with the first report.
	out := new(Report)
	*out = *reports[0]
	out.Workloads, out.Systems = slices.Clone(out.Workloads), slices.Clone(out.Systems)
	out.Episodes, out.Steps = slices.Clone(out.Episodes), slices.Clone(out.Steps)
	out.Memory, out.Timeline = slices.Clone(out.Memory), slices.Clone(out.Timeline)
	out.Mismatches, out.Problems = slices.Clone(out.Mismatches), slices.Clone(out.Problems)
	out.Config.Clones = slices.Clone(out.Config.Clones)
	out.Command = slices.Clone(out.Command)

	have := make(map[Key]bool)
	for _, e := range out.Episodes {
		have[e.Key] = true
	}
	for _, r := range reports[1:] {
		if !r.Machine.same(out.Machine) {
			return nil, fmt.Errorf("the run of %s was on another machine (%s, %s) than that of %s (%s, %s)", stamp(r), r.Machine.CPU, r.Machine.Kernel, stamp(out), out.Machine.CPU, out.Machine.Kernel)
		}
		for _, s := range r.Systems {
			i := slices.IndexFunc(out.Systems, func(o System) bool { return o.Name == s.Name })
			if i < 0 {
				out.Systems = append(out.Systems, s)
				continue
			}
			o := out.Systems[i]
			switch {
			case o.SHA256 != "" && s.SHA256 != "":
				if o.SHA256 != s.SHA256 {
					return nil, fmt.Errorf("system %s ran another binary in the run of %s (%s, sha256 %s) than in that of %s (%s, sha256 %s)", s.Name, stamp(r), s.Binary, s.SHA256, stamp(out), o.Binary, o.SHA256)
				}
			case r.Commit != out.Commit:
				return nil, fmt.Errorf("the run of %s was at commit %q, that of %s at %q, and they do not both say which binary system %s ran", stamp(r), r.Commit, stamp(out), out.Commit, s.Name)
			}
			if s.Version != o.Version || !slices.Equal(s.Flags, o.Flags) {
				return nil, fmt.Errorf("system %s is not the same in both runs: version %s with %v, and version %s with %v", s.Name, o.Version, o.Flags, s.Version, s.Flags)
			}
		}
		before := len(out.Episodes)
		for _, e := range r.Episodes {
			if have[e.Key] {
				return nil, fmt.Errorf("%s with %d clones under %s, repetition %d, is in more than one report", e.Workload, e.Clones, e.System, e.Repetition)
			}
			have[e.Key] = true
			// As if the runs had followed each other.
			e.Order += before
			e.Began += out.Seconds
			out.Episodes = append(out.Episodes, e)
		}
		for _, w := range r.Workloads {
			if !slices.ContainsFunc(out.Workloads, func(o Workload) bool { return o.Name == w.Name }) {
				out.Workloads = append(out.Workloads, w)
			}
		}
		a, b := out.Config, r.Config
		for _, d := range []struct {
			what string
			a, b any
		}{
			{"commit", out.Commit, r.Commit},
			{"steps for each clone", a.Steps, b.Steps},
			{"repetitions", a.Repetitions, b.Repetitions},
			{"seed", a.Seed, b.Seed},
			{"scale of the waits", a.WaitScale, b.WaitScale},
		} {
			if d.a != d.b {
				out.Problems = append(out.Problems, Problem{Text: fmt.Sprintf("merged of runs that differ: %s %v with %v clones, and %v with %v clones", d.what, d.a, a.Clones, d.b, b.Clones)})
			}
		}
		for _, n := range b.Clones {
			if !slices.Contains(out.Config.Clones, n) {
				out.Config.Clones = append(out.Config.Clones, n)
			}
		}
		out.Command = append(append(out.Command, "+"), r.Command...)
		out.Seconds += r.Seconds
		if out.Error == "" {
			out.Error = r.Error
		}
		out.Steps = append(out.Steps, r.Steps...)
		out.Memory = append(out.Memory, r.Memory...)
		out.Timeline = append(out.Timeline, r.Timeline...)
		out.Mismatches = append(out.Mismatches, r.Mismatches...)
		out.Problems = append(out.Problems, r.Problems...)
	}
	slices.Sort(out.Config.Clones)
	out.Summarize()
	// Those of the samples are not the summary's.
	for _, r := range reports {
		for name, text := range r.Definitions {
			if _, ok := out.Definitions[name]; !ok {
				out.Definitions[name] = text
			}
		}
	}
	return out, nil
}

// stamp names a run.
func stamp(r *Report) string { return r.Date.Format("2006-01-02 15:04:05") }
