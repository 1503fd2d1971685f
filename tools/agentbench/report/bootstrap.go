package report

import (
	"cmp"
	"math"
	"math/rand/v2"
	"slices"

	"github.com/aclements/go-moremath/stats"
)

const (
	confidence = 0.95
	resamples  = 2000
)

// bootstrap returns the confidence interval of a figure of n independent units.
// The figure is asked for with the number of times that each unit was drawn.
//
// Plain percentile intervals are too narrow for few units; they are expanded to
// the width that a t interval would have (Hesterberg, "What Teachers Should Know
// About the Bootstrap", 2015).
func bootstrap(n int, figure func(drawn []int) float64) (low, high float64) {
	if n < 2 {
		return math.NaN(), math.NaN()
	}
	// The seed is fixed so that a report's figures do not depend on when they
	// are computed.
	rng := rand.New(rand.NewPCG(1, uint64(n)))
	values := make([]float64, 0, resamples)
	drawn := make([]int, n)
	for range resamples {
		clear(drawn)
		for range n {
			drawn[rng.IntN(n)]++
		}
		if v := figure(drawn); !math.IsNaN(v) && !math.IsInf(v, 0) {
			values = append(values, v)
		}
	}
	if len(values) == 0 {
		return math.NaN(), math.NaN()
	}
	slices.Sort(values)
	tail := (1 - confidence) / 2
	t := stats.InvCDF(stats.TDist{V: float64(n - 1)})(tail)
	tail = stats.StdNormal.CDF(t * math.Sqrt(float64(n)/float64(n-1)))
	return quantile(values, tail), quantile(values, 1-tail)
}

// newRatio returns nil for what is not a ratio of two measured figures.
func newRatio(value, low, high float64) *Ratio {
	if math.IsNaN(value) || math.IsInf(value, 0) {
		return nil
	}
	// A figure that resampling moves to one side only is still inside.
	return &Ratio{Value: value, Low: min(low, value), High: max(high, value)}
}

// ratioOfSums is the sum of tops over the sum of bottoms, nil if there is none.
func ratioOfSums(pairs map[unit]pair) *Ratio {
	var list []pair
	for _, u := range sortedUnits(pairs) {
		list = append(list, pairs[u])
	}
	figure := func(drawn []int) float64 {
		var top, bottom float64
		for i, p := range list {
			n := 1.0
			if drawn != nil {
				n = float64(drawn[i])
			}
			top += n * p.top
			bottom += n * p.bottom
		}
		return top / bottom
	}
	low, high := bootstrap(len(list), figure)
	return newRatio(figure(nil), low, high)
}

// ratioOfQuantiles is the q-quantile of the pooled times of one group's steps
// over that of the other's same steps.
func ratioOfQuantiles(q float64, s *samples, top, bottom group) *Ratio {
	t, b := s.pairedTimes(top, bottom)
	units := sortedUnits(t)
	topPool, bottomPool := newPool(units, t), newPool(units, b)
	low, high := bootstrap(len(units), func(drawn []int) float64 {
		return topPool.quantile(q, drawn) / bottomPool.quantile(q, drawn)
	})
	all := slices.Repeat([]int{1}, len(units))
	return newRatio(topPool.quantile(q, all)/bottomPool.quantile(q, all), low, high)
}

// pool is the values of all units, from the largest down, so that high quantiles
// of many resamples are found without sorting each.
type pool struct {
	values []pooled
	// counts is how many values each unit has.
	counts []int
}

type pooled struct {
	value float64
	unit  int
}

func newPool(units []unit, values map[unit][]float64) *pool {
	p := &pool{counts: make([]int, len(units))}
	for i, u := range units {
		p.counts[i] = len(values[u])
		for _, v := range values[u] {
			p.values = append(p.values, pooled{v, i})
		}
	}
	slices.SortFunc(p.values, func(a, b pooled) int {
		return cmp.Or(cmp.Compare(b.value, a.value), cmp.Compare(a.unit, b.unit))
	})
	return p
}

// quantile is the q-quantile of the values when each unit is drawn that many
// times; NaN for none.
func (p *pool) quantile(q float64, drawn []int) float64 {
	n := 0
	for i, c := range p.counts {
		n += c * drawn[i]
	}
	if n == 0 {
		return math.NaN()
	}
	above := n - rank(q, n)
	for _, v := range p.values {
		if above -= drawn[v.unit]; above < 0 {
			return v.value
		}
	}
	return math.NaN()
}
