package phase

import (
	"fmt"
	"testing"
	"time"

	"runsc-agentzip/test/harness"
)

// idleFor is how long a sandbox has to wait until all work that is done in a wait
// is over, patience how long it may take until all have done so, and costTime how
// long is measured then.
const (
	idleFor  = 30 * time.Second
	patience = 90 * time.Second
	costTime = 10 * time.Second
)

// TestIdleCost measures the processor time of sandboxes that wait and have nothing
// left to do: Sentry, gofer and the processes that guests run in. The kernel counts
// it in hundredths of a second for each process. What the programs themselves and
// gVisor take shows with the backend off.
func TestIdleCost(t *testing.T) {
	if longFlag == 0 {
		t.Skip("runs with -long only")
	}
	for _, s := range shapes {
		switch s.name {
		case "stdio server", "tcp server", "asyncio", "node", "go server", "polling thread":
		default:
			continue
		}
		t.Run(s.name, func(t *testing.T) {
			for _, mode := range []string{"off", "on"} {
				t.Run(mode, func(t *testing.T) { idleCost(t, s, mode) })
			}
		})
	}
}

func idleCost(t *testing.T, s shape, mode string) {
	// The runtime's own log is not part of the cost.
	rt := newRuntime(t, "--debug=false", "--agentzip="+mode)
	var guests []*guest
	for i := range int(longFlag) {
		// None of the names begins another.
		guests = append(guests, s.start(t, rt, fmt.Sprintf("guest-%03d", i)))
	}
	for _, g := range guests {
		if err := g.ask(shortWork); err != nil {
			t.Fatal(err)
		}
	}
	waits := "with the backend off"
	if mode == "off" {
		time.Sleep(idleFor)
	} else {
		waits = fmt.Sprintf("%d of which wait", calm(guests))
	}
	before := cost(t, rt)
	begun := time.Now()
	time.Sleep(costTime)
	used, took := cost(t, rt)-before, time.Since(begun)
	t.Logf("%d sandboxes, %s: %.2f %% of a processor each (%v in %v in all)", len(guests), waits,
		100*used.Seconds()/took.Seconds()/float64(len(guests)), used, took.Round(time.Millisecond))
}

// calm waits until the guests have waited for long, and returns how many have. Looking
// costs processor time, too, so it is not done often.
func calm(guests []*guest) int {
	for end := time.Now().Add(patience); ; {
		n := 0
		for _, g := range guests {
			if s := g.look(); s.waiting() && s.SinceNS >= uint64(idleFor) {
				n++
			}
		}
		if n == len(guests) || time.Now().After(end) {
			return n
		}
		time.Sleep(5 * time.Second)
	}
}

// cost is the processor time that the runtime's sandboxes have used.
func cost(t *testing.T, rt *harness.Runtime) time.Duration {
	t.Helper()
	var sum time.Duration
	for _, sb := range rt.Sandboxes() {
		d, err := sb.CPUTime()
		if err != nil {
			t.Fatal(fmt.Errorf("%s: %w", sb.ID(), err))
		}
		sum += d
	}
	return sum
}
