package main

import (
	"bytes"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"runsc-agentzip/pkg/fleet"
)

func TestIdleFlags(t *testing.T) {
	c, err := parseIdleFlags([]string{"-clones", "1,8,32", "-waits", "1s,500ms"}, io.Discard)
	require.NoError(t, err)
	require.Equal(t, []int{1, 8, 32}, c.clones)
	require.Equal(t, []time.Duration{time.Second, 500 * time.Millisecond}, c.waits)
	require.Equal(t, []string{rootfsFolder}, c.rootfsTypes)
	for _, bad := range [][]string{{"-clones", "0"}, {"-clones", "1,"}, {"-waits", "10"}, {"-waits", "-1s"}, {"-rounds", "0"}, {"-runtime", "none"}, {"-rootfs-type", "tar"}, {"x"}} {
		var msg bytes.Buffer
		_, err := parseIdleFlags(bad, &msg)
		require.ErrorIs(t, err, errUsage, "%v", bad)
		require.Contains(t, msg.String(), "agentbench idle: ", "%v", bad)
	}
}

// What lies in the Sentry's memory for guest memory is not counted as overhead.
func TestPrintIdle(t *testing.T) {
	const mb = 1 << 20
	sample := func(system string, anon, store uint64, seconds float64) idleSample {
		m := fleet.Memory{
			GuestMemfd: 100 * mb, OtherMemfd: mb / 4,
			Sentry: fleet.ProcMemory{PSSAnon: anon, PSSFile: 5 * mb, PageTables: mb / 2},
			Gofer:  fleet.ProcMemory{PSSAnon: 4 * mb, PageTables: mb / 2},
		}
		return idleSample{System: system, Start: seconds * 10, Clones: 1, Wait: 10, Seconds: seconds, Outside: m.Overhead() - store, Store: store, Measured: m}
	}
	stock, ours := sample("stock", 20*mb, 0, 0.020), sample("agentzip", 12*mb, 2*mb, 0.025)
	share := 0.0125
	ours.CPU = &share
	var out bytes.Buffer
	require.NoError(t, printIdle(&out, []idleSample{
		stock, ours, {System: "agentzip", Clones: 1, Wait: 10, Start: 0.25, Seconds: 0.1},
	}))
	require.Contains(t, out.String(), strings.ReplaceAll(`
       1   10s     stock   20.00   4.00   0.00         1.00   5.00    0.25    30.25  200 ms        20.0 ms   20.0 ms        1        |
       1   10s  agentzip   10.00   4.00   0.00         1.00   5.00    0.25    20.25  250 ms        25.0 ms  100.0 ms        2  1.25 %|
`, "|", ""))
}
