// Package prefetch predicts which pages a sandbox will want back when it
// resumes, from those that it wanted back before.
//
// A step is the time between two evictions. Steps come in kinds: an agent that
// runs the tests touches other memory than one that searches, and two searches
// touch much of the same. (The set repeats, the order does not.) Nobody tells
// which kind a step is of. So a History keeps the sets of the last MaxPatterns
// steps, and lets the faults of the present one tell which of them it is like:
//
//   - A pattern's likelihood is given by Bayes' rule, the pages wanted so far
//     being draws from it, save for a share of strays. That the step is like no
//     other is one of the hypotheses; it is what ends the predictions of such a
//     step.
//   - A page is predicted once the patterns that have it weigh at least one half:
//     at first only what nearly all steps want, then what steps of this kind
//     want.
//   - At most budget pages are predicted for each fault that the step has had, so
//     that a wrong guess at the beginning of a short step costs little. What nearly
//     all remembered steps wanted is predicted at once.
//
// A page that is restored and mapped ahead of use leaves no trace when it is
// used. So one in SampleEvery predicted units is restored but not mapped; its
// first use then is a fault that needs no restoring, which the caller reports
// with Used. Samples give the precision, and decide whether the predicted pages
// around them count as wanted.
//
// On steps of a coding agent (testdata, recorded without prefetching: 35 steps
// of 3000 to 37000 pages, 26095 restores on demand) 38 % of the restores are
// left, 58 % of the pages wanted were predicted, and half of the pages predicted
// are wanted. Scores that rise and fall with each step, which this replaces, left
// 71 % of the restores.
//
// Of the pages that a step wants, many are the template's and only read: of those
// restored along with their neighbours nine in ten on the benchmark's steps. What
// an eviction finds to be the template's (Same) is not restored ahead as long as it
// is, unless it shares a unit with a page that steps change, or write to as faults
// tell (Wrote).
//
// Patterns can be exported and imported by other sandboxes that were restored
// from the same template, where pages have the same place.
//
// History is safe for concurrent use. Wanted and Used are called in faults and
// wait for nothing that takes long. Lock order: learn, then mu.
package prefetch

const (
	// GroupPages is how many pages a group has: 2 MiB.
	GroupPages = 512
	// UnitPages is how many pages are sampled together: 64 KiB.
	UnitPages = 16

	unitsPerGroup = GroupPages / UnitPages

	// MaxPatterns is how many steps are remembered.
	MaxPatterns = 16

	// decay is how much less a step counts than the one after it.
	decay = 0.97

	// stray is the share of a step's faults that a step like it did not have.
	stray = 0.2

	// novelWeight is the weight of the hypothesis that a step is like no other,
	// as a share of the number of steps remembered, and novelSpace how many times
	// more units such a step chooses its pages from than there are in all
	// patterns.
	novelWeight = 0.25
	novelSpace  = 4

	// budget is how many pages may be predicted for each fault that gives
	// evidence.
	budget = 120

	// sure is the share of remembered steps that must have wanted a page for it
	// to be predicted whatever the kind of the step, and beyond the budget, once
	// sureSteps are remembered.
	sure      = 0.8
	sureSteps = 4

	// mostlySame is the share of like steps that must have left a page as the
	// template has it for it to be left there: a fault on the first write costs
	// about as much as restoring ten pages.
	mostlySame = 0.8

	// negligible is how likely a pattern must be to be looked at.
	negligible = 0.01

	// maxEvidence is how many faults of a step are looked at.
	maxEvidence = 512

	// SampleEvery is how many predicted units there are to one sample. Each sample
	// that is used costs a fault, 0.2 ms or more. (With 16 the recorded steps have
	// as few restores on demand as with 8, with 32 those that know a sibling's
	// patterns have a fifth more.)
	SampleEvery = 16
)
