// Package prefetch predicts which pages a sandbox will want back when it
// resumes, from those that it wanted back before.
//
// A step is the time between two evictions. Steps come in kinds: an agent that
// runs the tests touches other memory than one that searches, but two searches
// touch the same (one step's set predicts the next one's of the same kind with
// 88-99 % recall at 88-99 % precision; the set repeats, the order does not).
// Nobody tells which kind a step is of. So a History keeps Patterns, the sets of
// pages that kinds of steps want, and finds out by itself:
//
//   - At the end of a step its pages are compared with every pattern. The
//     nearest, if more than half of all pages agree, learns from the step: a
//     score per page from 0 to 3 rises by two with each step that wanted the
//     page and falls by one with each that did not; from 2 on the page belongs
//     to the pattern. Otherwise the step begins a new pattern.
//   - While a step lasts, the pages that it has wanted so far are evidence of
//     its kind. A page is predicted once the patterns that have it weigh, by
//     Bayes' rule, at least one half: at first only what nearly all steps want,
//     then, after a few faults, what steps of this kind want. That the step is
//     of none of the known kinds is one of the hypotheses; it is what ends the
//     predictions of a step like no other.
//
// A page that is restored and mapped ahead of use leaves no trace when it is
// used. So one in several predicted units is restored but not mapped; its first
// use then is a fault that needs no restoring, which the caller reports with
// Used. What samples tell counts for the precision. They get fewer while the
// precision is high, since each costs a fault. Predicted pages share the fate of
// the samples in their group; of those in groups that tell nothing, nothing is
// learnt.
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

	// MaxPatterns bounds how many kinds of steps are told apart. An agent's
	// sandbox has about that many tools.
	MaxPatterns = 12

	// similar is the share of all pages that have to agree for two steps to be
	// of one kind.
	similar = 0.5

	// decay is what a pattern's weight, the number of recent steps that were of
	// its kind, is multiplied by at each step.
	decay = 0.85

	// stray is the share of a step's faults that its pattern does not have.
	stray = 0.05

	// novelWeight is the weight of the hypothesis that a step is of a new kind,
	// and novelSpace how many times more units it chooses its pages from than
	// there are in all patterns.
	novelWeight = 0.5
	novelSpace  = 4

	// negligible is how likely a pattern must be to be looked at.
	negligible = 0.01

	// maxEvidence is how many faults of a step are looked at.
	maxEvidence = 512

	// SampleMany and SampleFew are how many predicted units there are to one
	// sample, while the precision is below, or not below, highPrecision.
	SampleMany    = 8
	SampleFew     = 32
	highPrecision = 0.9
)
