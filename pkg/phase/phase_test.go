package phase

import (
	"testing"
	"time"

	"pgregory.net/rapid"
)

const idle = 200 * time.Millisecond

var (
	worthIt = Wait{Length: 5 * time.Second, Work: 50 * time.Millisecond, Evicted: 900, Undone: 100}
	undone  = Wait{Length: 5 * time.Second, Work: 50 * time.Millisecond, Evicted: 100, Undone: 900}
	short   = Wait{Length: 40 * time.Millisecond, Work: 50 * time.Millisecond, Evicted: 900}
	nothing = Wait{Length: time.Millisecond, Work: 50 * time.Millisecond}
)

func TestDetector(t *testing.T) {
	for _, c := range []struct {
		name  string
		waits []Wait
		want  time.Duration
	}{
		{"at first", nil, idle},
		{"worth it", []Wait{worthIt, worthIt}, idle},
		{"undone", []Wait{undone}, 2 * idle},
		{"too short", []Wait{short}, 2 * idle},
		{"twice", []Wait{undone, short}, 4 * idle},
		{"nothing was done", []Wait{undone, nothing}, 2 * idle},
		{"back again", []Wait{undone, undone, worthIt}, 2 * idle},
		{"all the way back", []Wait{undone, undone, worthIt, worthIt, worthIt}, idle},
		{"half of it undone is worth it", []Wait{{Length: time.Second, Work: 1, Evicted: 5, Undone: 5}}, idle},
		{"a wait as long as the work is not", []Wait{{Length: 1, Work: 1, Evicted: 5}}, 2 * idle},
		{"the most", []Wait{undone, undone, undone, undone, undone, undone, undone}, MaxBackoff * idle},
		{"from the most", []Wait{undone, undone, undone, undone, undone, undone, worthIt}, MaxBackoff / 2 * idle},
	} {
		d := NewDetector(idle)
		for _, w := range c.waits {
			d.Ended(w)
		}
		if got := d.Idle(); got != c.want {
			t.Errorf("%s: idle time is %v, should be %v", c.name, got, c.want)
		}
	}
}

// TestDetectorBounds checks, for any history, that the idle time stays in its
// bounds, at most doubles or halves, and comes back to the least one.
func TestDetectorBounds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		base := time.Duration(rapid.Int64Range(1, int64(time.Minute)).Draw(t, "base"))
		d := NewDetector(base)
		for range rapid.IntRange(0, 40).Draw(t, "waits") {
			before := d.Idle()
			w := Wait{
				Length:  time.Duration(rapid.Int64Range(0, int64(time.Hour)).Draw(t, "length")),
				Work:    time.Duration(rapid.Int64Range(0, int64(time.Hour)).Draw(t, "work")),
				Evicted: rapid.Uint64().Draw(t, "evicted") >> 1,
				Undone:  rapid.Uint64().Draw(t, "undone") >> 1,
			}
			d.Ended(w)
			after := d.Idle()
			if after < base || after > MaxBackoff*base {
				t.Fatalf("%v after %+v", after, w)
			}
			if after != before && after != 2*before && 2*after != before {
				t.Fatalf("%v became %v after %+v", before, after, w)
			}
		}
		for range 4 {
			d.Ended(worthIt)
		}
		if d.Idle() != base {
			t.Fatalf("the idle time stays at %v", d.Idle())
		}
	})
}
