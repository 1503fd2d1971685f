package prefetch

// A class is pages that have the same sums.
type class struct {
	pages uint64
	// sum is the weight of the patterns that have the pages, left that of the
	// ones among them that left the pages as the template has them.
	sum, left float64
}

// A tally sums weights up for up to 64 pages at once. Steps want pages in runs, so
// there are a few classes where there might be one for each page.
type tally struct {
	n       int
	classes [64]class
}

func (t *tally) put(c class) {
	t.classes[t.n] = c
	t.n++
}

// begin gives pages no weight.
func (t *tally) begin(pages uint64) {
	t.n = 0
	t.put(class{pages: pages})
}

// add gives weight w to pages, and to those of them that are same. What weighs less
// than least then is dropped.
func (t *tally) add(pages, same uint64, w, least float64) {
	for i := t.n - 1; i >= 0; i-- {
		// The last takes its place: it is one that was looked at.
		c := t.classes[i]
		t.n--
		t.classes[i] = t.classes[t.n]
		if out := c.pages &^ pages; out != 0 && c.sum >= least {
			t.put(class{out, c.sum, c.left})
		}
		in := c.pages & pages
		if in == 0 {
			continue
		}
		if c.sum += w; c.sum < least {
			continue
		}
		if s := in & same; s != 0 {
			t.put(class{s, c.sum, c.left + w})
		}
		if s := in &^ same; s != 0 {
			t.put(class{s, c.sum, c.left})
		}
	}
}

// A vote is the patterns that have a say in what a step wants.
type vote struct {
	n        int
	patterns [MaxPatterns]int
	weights  [MaxPatterns]float64
	// threshold is the weight of patterns that have a page from which on it is
	// likely.
	threshold float64
	tally     tally
}

// newVote returns the vote of patterns with weights.
func newVote(weights []float64, threshold float64) *vote {
	v := &vote{threshold: threshold}
	for k, w := range weights {
		if w >= negligible {
			v.patterns[v.n], v.weights[v.n] = k, w
			v.n++
		}
	}
	return v
}

// rounding is more than the error of a sum of weights, which are at most 1 together.
const rounding = 1e-9

// likely returns the pages of a group that the step wants with a likelihood of at least
// the threshold. row is the group's in the index. Units that are not in open are left
// out.
//
// The sums are the same, to the last bit, as if they were made for each page alone:
// weights are added in the order of the patterns. Pages that cannot reach the threshold
// any more are dropped on the way.
func (v *vote) likely(x *index, row []uint32, open uint32) (likely wish) {
	var (
		n       int
		groups  [MaxPatterns]*sealed
		masks   [MaxPatterns][]uint16
		weights [MaxPatterns]float64
		// least is what a page must weigh after a pattern.
		least [MaxPatterns]float64
	)
	for i, k := range v.patterns[:v.n] {
		if place := row[k]; place != 0 {
			p := x.patterns[k]
			groups[n], masks[n], weights[n] = &p.groups[place-1], p.masks, v.weights[i]
			n++
		}
	}
	rest := v.threshold - rounding
	for i := n - 1; i >= 0; i-- {
		least[i] = rest
		rest -= weights[i]
	}
	if rest > 0 {
		return likely
	}

	t := &v.tally
	// Units weigh at least as much as each of their pages.
	t.begin(uint64(open))
	for i := 0; i < n && t.n != 0; i++ {
		t.add(uint64(groups[i].units), 0, weights[i], least[i])
	}
	units := uint64(0)
	for _, c := range t.classes[:t.n] {
		units |= c.pages
	}
	for i := range likely.pages {
		some := uint32(units >> (i * unitsPerWord) & (1<<unitsPerWord - 1))
		if some == 0 {
			continue
		}
		t.begin(spread(some))
		for j := 0; j < n && t.n != 0; j++ {
			pages, s := groups[j].word(masks[j], i)
			t.add(pages, s, weights[j], least[j])
		}
		for _, c := range t.classes[:t.n] {
			if c.sum >= v.threshold {
				likely.pages[i] |= c.pages
				if c.left > c.sum*mostlySame {
					likely.same[i] |= c.pages
				}
			}
		}
	}
	return likely
}
