package report

import (
	"fmt"
	"math"
	"time"
)

// Figures are written the same way in the terminal and on the page: three
// digits, or all that are before the decimal point.

func digits(v float64) string {
	switch a := math.Abs(v); {
	case a == 0:
		return "0"
	case a < 0.9995:
		return fmt.Sprintf("%.3f", v)
	case a < 9.995:
		return fmt.Sprintf("%.2f", v)
	case a < 99.95:
		return fmt.Sprintf("%.1f", v)
	}
	return fmt.Sprintf("%.0f", v)
}

// times writes a ratio.
func times(v float64) string {
	if math.Abs(v) < 9.995 {
		return fmt.Sprintf("%.2fx", v)
	}
	return digits(v) + "x"
}

// ratioText writes a ratio and, if wanted, how far its interval reaches.
func ratioText(q *Ratio, interval bool) string {
	if q == nil {
		return "-"
	}
	if !interval || !q.HasInterval() {
		return times(q.Value)
	}
	return times(q.Value) + " ±" + margin(q)
}

// margin is the larger half of the interval with the decimals of the value.
func margin(q *Ratio) string {
	m := max(q.High-q.Value, q.Value-q.Low)
	if math.Abs(q.Value) >= 9.995 {
		return fmt.Sprintf("%.1f", m)
	}
	return fmt.Sprintf("%.2f", m)
}

// intervalText writes the interval of a ratio.
func intervalText(q *Ratio) string {
	if q == nil || !q.HasInterval() {
		return ""
	}
	return fmt.Sprintf("95 %% interval %s to %s", times(q.Low), times(q.High))
}

// mib writes bytes as MiB without the unit.
func mib(bytes float64) string {
	if bytes == 0 {
		return "-"
	}
	switch v := bytes / (1 << 20); {
	case v < 0.0995:
		return fmt.Sprintf("%.3f", v)
	case v < 99.95:
		return fmt.Sprintf("%.1f", v)
	default:
		return fmt.Sprintf("%.0f", v)
	}
}

// size writes bytes with the unit that suits.
func size(bytes float64) string {
	switch {
	case bytes >= 1<<30:
		return digits(bytes/(1<<30)) + " GiB"
	case bytes >= 1<<20:
		return digits(bytes/(1<<20)) + " MiB"
	case bytes >= 1<<10:
		return digits(bytes/(1<<10)) + " KiB"
	}
	return fmt.Sprintf("%.0f B", bytes)
}

// seconds writes a duration with the unit that suits.
func seconds(s float64) string {
	switch {
	case s == 0:
		return "-"
	case s < 0.0009995:
		return digits(s*1e6) + " us"
	case s < 0.9995:
		return digits(s*1e3) + " ms"
	}
	return digits(s) + " s"
}

// elapsed writes how long a run took.
func elapsed(s float64) string {
	return (time.Duration(s) * time.Second).String()
}

// count writes a number of things.
func count(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}

// outputs says how a row's answers compare with the reference's.
func (s *Summary) outputs() string {
	switch {
	case s.Differ > 0:
		return fmt.Sprintf("%d DIFFER", s.Differ)
	case s.Reference:
		return "reference"
	case s.OutputsEqual:
		return "equal"
	case s.Compared == 0:
		return "none"
	}
	return fmt.Sprintf("%d MISSING", s.Missing)
}
