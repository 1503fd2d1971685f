package report

import "fmt"

// What the runtime is to reach with everything switched on. 8.7 is the reduction
// that was published for compressing agents' sandboxes with a pool across them.
const (
	GoalOwnedReduction = 8.7
	GoalStepTimeRatio  = 1.05
)

// judged is the system that the goals are for.
const judged = "agentzip"

// A goal is one of the goals for one row of the summary.
type goal struct {
	name string
	// want is the goal in words.
	want     string
	measured *Ratio
	met      bool
	// unsure: the confidence interval is on both sides of the goal.
	unsure bool
}

// goals judges a row; nil for systems that have no goals.
func (s *Summary) goals() []goal {
	if s.System != judged {
		return nil
	}
	owned := goal{name: "owned reduction", want: fmt.Sprintf("%.3gx or more", GoalOwnedReduction), measured: s.OwnedReduction}
	if q := s.OwnedReduction; q != nil {
		owned.met = q.Value >= GoalOwnedReduction
		owned.unsure = q.straddles(GoalOwnedReduction)
	}
	step := goal{name: "step time", want: fmt.Sprintf("%.3gx or less", GoalStepTimeRatio), measured: s.StepTimeRatio}
	if q := s.StepTimeRatio; q != nil {
		step.met = q.Value <= GoalStepTimeRatio
		step.unsure = q.straddles(GoalStepTimeRatio)
	}
	return []goal{owned, step}
}

func (q *Ratio) straddles(v float64) bool {
	return q.HasInterval() && q.Low < v && v < q.High
}

// verdict says how the goal stands.
func (g goal) verdict() string {
	if g.measured == nil {
		return "not measured against stock"
	}
	value := times(g.measured.Value)
	var text string
	switch {
	case g.met:
		text = fmt.Sprintf("goal met: %s (%s)", value, g.want)
	case g.name == "owned reduction":
		text = fmt.Sprintf("behind: %s of %s", value, times(GoalOwnedReduction))
	default:
		text = fmt.Sprintf("behind: %s, goal %s", value, g.want)
	}
	return text + g.doubt()
}

// brief is the verdict for where the goal is known.
func (g goal) brief() string {
	switch {
	case g.measured == nil:
		return "not measured against stock"
	case g.met:
		return times(g.measured.Value) + ", goal met" + g.doubt()
	}
	return times(g.measured.Value) + ", behind" + g.doubt()
}

func (g goal) doubt() string {
	switch {
	case !g.measured.HasInterval():
		return ", too few samples to be sure"
	case g.unsure:
		return ", within noise"
	}
	return ""
}
