package server

import (
	"cmp"
	"slices"

	"runsc-agentzip/pkg/pool/wire"
)

// Stats is what the pool holds and what it has done. Sizes are in bytes.
type Stats struct {
	// Version is that of the protocol.
	Version int `json:"version"`
	// Drained is set after Drain.
	Drained bool `json:"drained"`
	// Total is about all domains. It counts what those that are gone have
	// done, too.
	Total Usage `json:"total"`
	// Domains has each domain, those that hold most first.
	Domains []DomainStats `json:"domains"`
	// OmittedDomains is how many are not in Domains, because the report would
	// be too long.
	OmittedDomains int `json:"omitted_domains"`
}

// DomainStats is about one domain.
type DomainStats struct {
	// Name is a short hash of the domain's key and its template's digest.
	Name string `json:"name"`
	// Template is set if the template's pages are in use as bases.
	Template bool `json:"template"`
	Usage
}

// Usage is what is held now, and what was counted so far.
type Usage struct {
	// Clients is the number of connected sandboxes.
	Clients int `json:"clients"`
	// Pages is the number of pages in segments, and Bytes the memory of
	// segments and index together.
	Pages uint64 `json:"pages"`
	Bytes uint64 `json:"bytes"`
	// IndexBytes is the memory of the index, and HeapBytes an estimate of what
	// the pool's own process needs.
	IndexBytes uint64 `json:"index_bytes"`
	HeapBytes  uint64 `json:"heap_bytes"`
	// ReferencedBytes is the size of pages that a sandbox refers to,
	// UnreferencedBytes that of the others.
	ReferencedBytes   uint64 `json:"referenced_bytes"`
	UnreferencedBytes uint64 `json:"unreferenced_bytes"`
	// Candidates is the number of pages that one sandbox has offered, and
	// Pending of those that were asked for.
	Candidates uint64 `json:"candidates"`
	Pending    uint64 `json:"pending"`
	Segments   uint64 `json:"segments"`
	// AlonePages is the number of pages that one sandbox alone refers to, and
	// SketchBytes the memory for finding pages that resemble others, part of
	// HeapBytes.
	AlonePages  uint64 `json:"alone_pages"`
	SketchBytes uint64 `json:"sketch_bytes"`
	// CandidateBytes, PatternBytes and ConnectionBytes are further parts of HeapBytes:
	// for pages that one sandbox has offered, for what is known about steps, and for
	// connections without their references.
	CandidateBytes  uint64 `json:"candidate_bytes"`
	PatternBytes    uint64 `json:"pattern_bytes"`
	ConnectionBytes uint64 `json:"connection_bytes"`
	Counts
}

// Counts are events since the pool began.
type Counts struct {
	// Offers is how many pages were offered; Hits how many of these the pool
	// had; Ignored what was not remembered because a sandbox or the domain had
	// too many candidates, or was amid too many patterns.
	Offers  uint64 `json:"offers"`
	Hits    uint64 `json:"hits"`
	Ignored uint64 `json:"ignored"`
	// Resembled is how many of the Offers came with a sketch, Similar how often
	// a sandbox was told of a page that resembles one of its own, Bases how many
	// pages have become known as such so far.
	Resembled uint64 `json:"resembled"`
	Similar   uint64 `json:"similar"`
	Bases     uint64 `json:"bases"`
	// Wanted is how many pages were asked for, Published how many the pool
	// took, Rejected how many have no form worth keeping, Full how many found
	// no room.
	Wanted    uint64 `json:"wanted"`
	Published uint64 `json:"published"`
	Rejected  uint64 `json:"rejected"`
	Full      uint64 `json:"full"`
	// Violations is what sandboxes did that the protocol forbids.
	Violations uint64 `json:"violations"`
	// Retired is the number of segments given up, Moved and Dropped of pages
	// in them that were kept and that were not.
	Retired uint64 `json:"retired"`
	Moved   uint64 `json:"moved"`
	Dropped uint64 `json:"dropped"`
	// Alone is how often a sandbox was told that nobody else has taken a page.
	Alone uint64 `json:"alone"`
}

func (c *Counts) add(o *Counts) {
	c.Offers += o.Offers
	c.Hits += o.Hits
	c.Ignored += o.Ignored
	c.Resembled += o.Resembled
	c.Similar += o.Similar
	c.Bases += o.Bases
	c.Wanted += o.Wanted
	c.Published += o.Published
	c.Rejected += o.Rejected
	c.Full += o.Full
	c.Violations += o.Violations
	c.Retired += o.Retired
	c.Moved += o.Moved
	c.Dropped += o.Dropped
	c.Alone += o.Alone
}

func (u *Usage) add(o *Usage) {
	u.Clients += o.Clients
	u.Pages += o.Pages
	u.Bytes += o.Bytes
	u.IndexBytes += o.IndexBytes
	u.HeapBytes += o.HeapBytes
	u.ReferencedBytes += o.ReferencedBytes
	u.UnreferencedBytes += o.UnreferencedBytes
	u.Candidates += o.Candidates
	u.Pending += o.Pending
	u.Segments += o.Segments
	u.AlonePages += o.AlonePages
	u.SketchBytes += o.SketchBytes
	u.CandidateBytes += o.CandidateBytes
	u.PatternBytes += o.PatternBytes
	u.ConnectionBytes += o.ConnectionBytes
	u.Counts.add(&o.Counts)
}

// Stats returns what the pool holds and has done.
func (s *Server) Stats() Stats {
	st := Stats{Version: wire.Version, Drained: s.drained.Load(), Domains: []DomainStats{}}
	s.mu.Lock()
	defer s.mu.Unlock()
	st.Total.Counts = s.past
	for _, d := range s.domains {
		ds := d.stats()
		st.Total.add(&ds.Usage)
		st.Domains = append(st.Domains, ds)
	}
	slices.SortFunc(st.Domains, func(a, b DomainStats) int {
		return cmp.Or(cmp.Compare(b.Bytes, a.Bytes), cmp.Compare(a.Name, b.Name))
	})
	return st
}

func (d *domain) stats() DomainStats {
	d.mu.Lock()
	defer d.mu.Unlock()
	return DomainStats{
		Name:     d.name,
		Template: d.based,
		Usage: Usage{
			Clients: len(d.conns),
			Pages:   d.records, Bytes: d.held, IndexBytes: uint64(len(d.index.mem)), HeapBytes: d.heap(),
			ReferencedBytes: d.referenced, UnreferencedBytes: d.recordBytes - d.referenced,
			Candidates: uint64(d.ncandidates), Pending: uint64(len(d.pending)), Segments: uint64(len(d.segs)),
			AlonePages: uint64(d.alone), SketchBytes: d.sketches.bytes() + d.bases.bytes(),
			CandidateBytes: uint64(d.ncandidates) * candidateBytes, PatternBytes: uint64(cap(d.patterns)) + d.partBytes,
			ConnectionBytes: uint64(len(d.conns)) * connectionBytes,
			Counts:          d.counts,
		},
	}
}
