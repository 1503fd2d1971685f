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
//     It is estimated as what stock's clone owns in the same wait times the part
//     of its guest memory that linux still holds: as if swapping treated pages
//     that differ from the template's like the others.
//   - What a counted system owns is checked from outside: the memory file and
//     what the Sentry holds beyond stock's.
func pairMemory(r *report.Report, kept keptPart) {
	type turn struct {
		workload           string
		clones, repetition int
	}
	turnOf := func(k report.Key) turn { return turn{k.Workload, k.Clones, k.Repetition} }
	other := func(m report.Memory) float64 { return float64(m.Measured.OtherMemfd + m.Measured.Sentry.PSSAnon) }
	owned := make(map[sampleID]uint64)
	stockOther := make(map[turn][]float64)
	for _, m := range r.Memory {
		if m.System == report.Stock {
			owned[idOf(m.Key, m.Clone, m.Index)] = m.OwnedBytes
			stockOther[turnOf(m.Key)] = append(stockOther[turnOf(m.Key)], other(m))
		}
	}
	for i := range r.Memory {
		m := &r.Memory[i]
		id := idOf(m.Key, m.Clone, m.Index)
		if m.System == linuxName {
			if o, ok := owned[id]; ok {
				m.OwnedBytes = uint64(float64(o) * kept[id])
				m.OwnedEstimated = true
			}
			continue
		}
		if base := stockOther[turnOf(m.Key)]; m.Stats != nil && len(base) > 0 {
			m.OwnedOutsideBytes = m.Measured.GuestMemfd + uint64(max(0, other(*m)-mean(base)))
		}
	}
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
	}
}
