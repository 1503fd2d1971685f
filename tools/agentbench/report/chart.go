package report

import (
	"fmt"
	"math"
	"strings"
)

// chart is a drawing made of marks whose places are computed here; the page's
// template turns it into SVG. It is drawn in a box of chartWidth by Height and
// scaled by the browser.
type chart struct {
	Title string
	// Note says in a few words what is special about this chart.
	Note   string
	Height float64
	// Label describes the chart to those who cannot see it.
	Label string

	Grid   []segment
	Bands  []rect
	Lines  []path
	Rects  []rect
	Dots   []dot
	Labels []label
	// Hover is what a pointer at one x reads from all lines.
	Hover *hover
}

const (
	chartWidth = 400.0
	// The plot lies between these margins.
	marginLeft, marginRight, marginTop, marginBottom = 44.0, 12.0, 14.0, 34.0
)

type segment struct {
	X1, Y1, X2, Y2 float64
	Class          string
}

// path is a line; Class is the system's.
type path struct{ D, Class string }

type rect struct {
	X, Y, W, H float64
	Class, Tip string
}

type dot struct {
	X, Y, R    float64
	Class, Tip string
}

type label struct {
	X, Y   float64
	Text   string
	Anchor string // start, middle or end
	Class  string
}

// hover is read by the page's script.
type hover struct {
	Left   float64       `json:"left"`
	Top    float64       `json:"top"`
	Width  float64       `json:"width"`
	Height float64       `json:"height"`
	Max    float64       `json:"max"`
	Series []hoverSeries `json:"series"`
}

type hoverSeries struct {
	Name  string `json:"name"`
	Class string `json:"class"`
	// Values are MiB at equal distances from 0 to Max; null after the end.
	Values []*float64 `json:"values"`
}

// scale maps figures to places.
type scale struct {
	min, max float64
	from, to float64
	log      bool
}

func (s scale) at(v float64) float64 {
	low, high := s.min, s.max
	if s.log {
		low, high, v = math.Log(low), math.Log(high), math.Log(max(v, s.min))
	}
	if high == low {
		return s.from
	}
	return s.from + (min(max(v, low), high)-low)/(high-low)*(s.to-s.from)
}

// ticks are round figures, about n of them.
func (s scale) ticks(n int) []float64 {
	if s.log {
		return s.logTicks()
	}
	step := niceStep((s.max - s.min) / float64(n))
	var out []float64
	// Adding 0 makes 0 of -0.
	for i := math.Ceil(s.min/step-1e-9) + 0; i*step <= s.max*(1+1e-9); i++ {
		out = append(out, i*step)
	}
	return out
}

func (s scale) logTicks() []float64 {
	var out []float64
	decades := math.Log10(s.max / s.min)
	for e := math.Floor(math.Log10(s.min)); e <= math.Ceil(math.Log10(s.max)); e++ {
		for _, m := range []float64{1, 3} {
			if v := m * math.Pow(10, e); v >= s.min*(1-1e-9) && v <= s.max*(1+1e-9) && (m == 1 || decades < 2.2) {
				out = append(out, v)
			}
		}
	}
	return out
}

// niceStep is the next of 1, 2, 5, 10, ... from v up.
func niceStep(v float64) float64 {
	if v <= 0 || math.IsNaN(v) || math.IsInf(v, 0) {
		return 1
	}
	unit := math.Pow(10, math.Floor(math.Log10(v)))
	for _, m := range []float64{1, 2, 5} {
		if v <= m*unit*(1+1e-9) {
			return m * unit
		}
	}
	return 10 * unit
}

// upTo is a linear scale from 0 that has a round end at or above v.
func upTo(v, from, to float64) scale {
	if v <= 0 {
		v = 1
	}
	step := niceStep(v / 4)
	return scale{min: 0, max: step * math.Ceil(v/step-1e-9), from: from, to: to}
}

// plain writes a tick with no more digits than it needs.
func plain(v float64) string {
	return fmt.Sprintf("%.6g", v)
}

// plotX and plotY are the ends of the plot.
func (c *chart) plotX() (from, to float64) { return marginLeft, chartWidth - marginRight }
func (c *chart) plotY() (from, to float64) { return c.Height - marginBottom, marginTop }

// yAxis draws lines across the plot and their figures.
func (c *chart) yAxis(s scale, format func(float64) string) {
	left, right := c.plotX()
	for _, v := range s.ticks(4) {
		class := "grid"
		if v == 0 {
			class = "axis"
		}
		c.Grid = append(c.Grid, segment{left, s.at(v), right, s.at(v), class})
		c.Labels = append(c.Labels, label{left - 6, s.at(v) + 4, format(v), "end", "tick"})
	}
}

// xAxis writes figures below the plot.
func (c *chart) xAxis(s scale, format func(float64) string, title string) {
	bottom, top := c.plotY()
	left, right := c.plotX()
	for _, v := range s.ticks(5) {
		if s.log {
			c.Grid = append(c.Grid, segment{s.at(v), top, s.at(v), bottom, "grid"})
		}
		c.Labels = append(c.Labels, label{s.at(v), bottom + 15, format(v), "middle", "tick"})
	}
	c.Labels = append(c.Labels, label{(left + right) / 2, c.Height - 4, title, "middle", "title"})
}

// polyline is the D of a line through points.
type polyline struct{ strings.Builder }

func (p *polyline) to(x, y float64) {
	command := "L"
	if p.Len() == 0 {
		command = "M"
	}
	fmt.Fprintf(p, "%s%.1f %.1f", command, x, y)
}
