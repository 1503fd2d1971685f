package main

import (
	"runsc-agentzip/tools/agentbench/report"
)

// sampleID names a wait of a clone, whatever the system.
type sampleID struct {
	workload                  string
	clones, repetition, clone int
	index                     int
}

func idOf(k report.Key, clone, index int) sampleID {
	return sampleID{k.Workload, k.Clones, k.Repetition, clone, index}
}

// keptPart says, of a wait of a clone whose memory is swapped out, which part of
// its guest memory the host still has to hold, compressed or not.
type keptPart map[sampleID]float64

// pairMemory completes memory samples with figures that need stock's sample of
// the same wait, or stock's samples of the same repetition:
//
//   - What a clone of the system linux owns is not known, since one cannot look.
//     It is estimated as what stock's clone owns in the same wait, or in the
//     nearest one that was measured, times the part of its guest memory that
//     linux still holds: as if swapping treated pages that differ from the
//     template's like the others.
//   - What a counted system owns is checked from outside: the memory file, what
//     the Sentry holds beyond stock's, and an equal part of the page pool.
func pairMemory(r *report.Report, kept keptPart) {
	type turn struct {
		workload           string
		clones, repetition int
	}
	turnOf := func(k report.Key) turn { return turn{k.Workload, k.Clones, k.Repetition} }
	other := func(m report.Memory) float64 { return float64(m.Measured.OtherMemfd + m.Measured.Sentry.PSSAnon) }
	// What stock's clones own, by wait; the index of the key is 0.
	owned := make(map[sampleID]map[int]uint64)
	stockOther := make(map[turn][]float64)
	for _, m := range r.Memory {
		if m.System == report.Stock {
			clone := idOf(m.Key, m.Clone, 0)
			if owned[clone] == nil {
				owned[clone] = make(map[int]uint64)
			}
			owned[clone][m.Index] = m.OwnedBytes
			stockOther[turnOf(m.Key)] = append(stockOther[turnOf(m.Key)], other(m))
		}
	}
	for i := range r.Memory {
		m := &r.Memory[i]
		if m.System == linuxName {
			if o, ok := nearest(owned[idOf(m.Key, m.Clone, 0)], m.Index); ok {
				m.OwnedBytes = uint64(float64(o) * kept[idOf(m.Key, m.Clone, m.Index)])
				m.OwnedEstimated = true
			}
			continue
		}
		if base := stockOther[turnOf(m.Key)]; m.Stats != nil && len(base) > 0 {
			m.OwnedOutsideBytes = m.Measured.GuestMemfd + uint64(max(0, other(*m)-mean(base)))
			if m.Pool != nil {
				m.OwnedOutsideBytes += m.Pool.Own() / uint64(max(m.Clones, 1))
			}
		}
	}
}

// nearest returns the value whose key is nearest to index; of two the earlier.
func nearest(values map[int]uint64, index int) (value uint64, ok bool) {
	best := 0
	for i, v := range values {
		d, bestD := max(i-index, index-i), max(best-index, index-best)
		if !ok || d < bestD || d == bestD && i < best {
			best, value, ok = i, v, true
		}
	}
	return value, ok
}

// pairFaults tells, from the counters in two samples with one step between
// them, how many pages came back for that step.
func pairFaults(r *report.Report) {
	type id struct {
		sampleID
		system string
	}
	samples := make(map[id]*report.Memory)
	for i := range r.Memory {
		if m := &r.Memory[i]; m.Stats != nil {
			samples[id{idOf(m.Key, m.Clone, m.Index), m.System}] = m
		}
	}
	for i := range r.Steps {
		s := &r.Steps[i]
		before := samples[id{idOf(s.Key, s.Clone, s.Index-1), s.System}]
		after := samples[id{idOf(s.Key, s.Clone, s.Index), s.System}]
		if before == nil || after == nil {
			continue
		}
		s.DemandPages = after.Stats.Faults.Demand - before.Stats.Faults.Demand
		s.PrefetchedPages = after.Stats.Faults.Prefetched - before.Stats.Faults.Prefetched
		// What samples tell is counted when the step's pages are evicted.
		if after.Stats.EvictNS.Count == before.Stats.EvictNS.Count {
			continue
		}
		p, q := before.Stats.Prefetch, after.Stats.Prefetch
		s.Prefetch = &report.StepPrefetch{
			Patterns: p.Patterns,
			Wanted:   q.WantedPages - p.WantedPages, Predicted: q.PredictedPages - p.PredictedPages,
			Sampled: q.SampledPages - p.SampledPages, Used: q.UsedPages - p.UsedPages,
		}
		if n := after.Stats.ResumeNS.Count - before.Stats.ResumeNS.Count; n == 1 {
			s.Prefetch.LastFaultSeconds = float64(after.Stats.ResumeNS.SumNS-before.Stats.ResumeNS.SumNS) / 1e9
		}
	}
}
