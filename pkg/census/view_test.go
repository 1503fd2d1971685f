package census

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"runsc-agentzip/pkg/control"
	"runsc-agentzip/pkg/pool/server"
)

var update = flag.Bool("update", false, "write the golden files")

func golden(t *testing.T, name, got string) {
	t.Helper()
	file := filepath.Join("testdata", name)
	if *update {
		require.NoError(t, os.WriteFile(file, []byte(got), 0o644))
	}
	want, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, string(want), got, file)
}

const (
	kib = 1 << 10
	mib = 1 << 20
	gib = 1 << 30
)

var noon = time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC)

// waiting is a sandbox that waits; change and failed make others of it.
func waiting(id string, guest, owned, faults uint64) Sandbox {
	return Sandbox{ID: id, PID: 100, State: OK, At: noon, Stats: &control.Stats{
		GuestBytes: guest, OwnedBytes: owned, ResidentBytes: owned / 4, StoreBytes: owned / 2, MetadataBytes: owned / 8, PoolShareBytes: owned / 8,
		TemplateBytes: 300 * mib, SentryRSSBytes: 41 * mib,
		Pages:     control.Pages{Resident: owned / 4 / 4096, Template: 9, Zero: 8, Pool: 7, Delta: 6, Compressed: 5, Raw: 4},
		Faults:    control.Faults{Demand: faults, Prefetched: 2 * faults, Aborted: 3},
		Prefetch:  control.Prefetch{Precision: 0.913, Recall: 0.84, Patterns: 3},
		Phase:     control.Phase{State: "waiting", SinceNS: 12_340_000_000, Why: "idle", Waits: 4, Beats: 1, IdleNS: 200_000_000},
		Pressure:  control.Pressure{Level: "none"},
		Pool:      control.Pool{State: "connected", Connects: 1, Found: 20, Published: 10, OfferedDropped: 5},
		RestoreNS: control.Histogram{Count: 6, SumNS: 1_500_000, MaxNS: 600_000, Buckets: hist(8, 1, 13, 2, 19, 3)},
		EvictNS:   control.Histogram{Count: 2, SumNS: 50_000_000, MaxNS: 40_000_000, Buckets: hist(24, 1, 40, 1)},
		Rejects:   map[string]uint64{"incompressible": 2, "store_full": 1},

		EvictedPagesTotal: 1000, RestoredPagesTotal: 3 * faults, OrphanBlobs: 1, MovedBlobs: 2,
	}}
}

// hist returns buckets from pairs of index and count.
func hist(pairs ...int) []uint64 {
	b := make([]uint64, pairs[len(pairs)-2]+1)
	for i := 0; i < len(pairs); i += 2 {
		b[pairs[i]] = uint64(pairs[i+1])
	}
	return b
}

func change(s Sandbox, f func(s *control.Stats)) Sandbox {
	f(s.Stats)
	return s
}

func failed(id string, state State, reason string) Sandbox {
	return Sandbox{ID: id, PID: 7, State: state, Reason: reason, At: noon}
}

// usual is a census of everything there is, and the one before it.
func usual() (now, prev *Census) {
	const docker = "4f1d1c2b3a49586776859403a2b1c0d1e2f3a4b5c6d7e8f9a0b1c2d3e4f5a6b7"
	now = &Census{
		At: noon, TookNS: 12_300_000, Root: "/var/run/runsc", Host: Host{24 * gib, 9 * gib},
		Sandboxes: []Sandbox{
			waiting(docker, 300*mib, 2_200*kib, 500),
			change(waiting("agent-1", 280*mib, 30*mib, 21_000), func(s *control.Stats) {
				s.Phase = control.Phase{State: "working", SinceNS: 340_000_000, Why: "input"}
				s.Pressure = control.Pressure{Level: "critical", LimitBytes: 512 * mib, UsedBytes: 500 * mib, Evictions: 3, ThrottledNS: 1_250_000_000}
			}),
			change(waiting("agent-2", 12*gib, 11*gib, 90), func(s *control.Stats) {
				s.Phase = control.Phase{State: "inhibited", SinceNS: 200 * 3600 * 1e9}
				s.Pressure = control.Pressure{Level: "high", LimitBytes: 14 * gib, UsedBytes: 12 * gib}
				s.Prefetch = control.Prefetch{}
				s.Pool = control.Pool{State: "none"}
			}),
			change(waiting("agent-3", 5*mib, 0, 0), func(s *control.Stats) { s.Pool.State = "disconnected" }),
			failed("plain", Off, "it runs with --agentzip=off"),
			failed("stock", Foreign, errForeign.Error()),
			failed("starting", Busy, ErrBusy.Error()),
			failed("stuck", Silent, "it does not answer"),
			failed("frozen", Stopped, "the sandbox's process is stopped: send it SIGCONT to have it go on"),
			failed("killed", Dead, "the sandbox's process has ended: `runsc delete` removes what is left of it"),
			failed("mad", Broken, "its answer is longer than 1048576 bytes"),
		},
		Pool: &Pool{Socket: "/run/pool.sock", Stats: &server.Stats{
			Total:   server.Usage{Clients: 2, Pages: 1234, Bytes: 8 * mib, IndexBytes: 64 * kib, HeapBytes: 2 * mib, ReferencedBytes: 7 * mib, UnreferencedBytes: 100 * kib, Candidates: 17, Segments: 2, Counts: server.Counts{Offers: 9000, Hits: 4000, Wanted: 1500, Published: 1300, Rejected: 200}},
			Domains: []server.DomainStats{{Name: "ab12"}},
		}},
	}
	p := *now
	p.Sandboxes = nil
	for _, s := range now.Sandboxes {
		if s.Stats != nil {
			st := *s.Stats
			st.Faults.Demand = st.Faults.Demand / 2
			s.Stats = &st
			s.At = s.At.Add(-time.Second)
		}
		p.Sandboxes = append(p.Sandboxes, s)
	}
	return now, &p
}

func many(n int) *Census {
	c := &Census{At: noon, Root: "/r"}
	for i := range n {
		c.Sandboxes = append(c.Sandboxes, waiting(fmt.Sprintf("tenant-17-agent-%03d", i), uint64(i+1)*mib, uint64(i+1)*100*kib, 0))
	}
	c.Sandboxes = append(c.Sandboxes, failed("zombie", Dead, "gone"))
	return c
}

func TestGoldenViews(t *testing.T) {
	now, prev := usual()
	failedPool := *now
	failedPool.Pool = &Pool{Socket: "/run/pool.sock", Reason: "connect: connection refused: start one"}
	for name, c := range map[string]struct {
		view      View
		now, prev *Census
	}{
		"80x24.txt":       {View{Width: 80, Height: 24, Sort: ByOwned}, now, prev},
		"80x24-first.txt": {View{Width: 80, Height: 24, Sort: ByID}, &failedPool, nil},
		"80x24-many.txt":  {View{Width: 80, Height: 24, Sort: ByGuest}, many(30), nil},
		"160x50.txt":      {View{Width: 160, Height: 50, Sort: ByFaults}, now, prev},
		"color.txt":       {View{Width: 100, Height: 24, Color: true, Sort: ByRatio}, now, prev},
		"narrow.txt":      {View{Width: 40, Height: 10, Sort: ByOwned}, now, prev},
		"plain.txt":       {View{Sort: ByOwned}, now, prev},
		"empty.txt":       {View{Width: 80, Height: 24, Sort: ByOwned}, &Census{At: noon, Root: "/var/run/runsc"}, nil},
	} {
		golden(t, name, strings.Join(c.view.Lines(c.now, c.prev), "\n")+"\n")
	}
}

func TestSort(t *testing.T) {
	now, prev := usual()
	for key, want := range map[Key]string{
		ByOwned:  "agent-2 agent-1 4f1d agent-3 frozen killed mad plain starting stock stuck",
		ByGuest:  "agent-2 4f1d agent-1 agent-3 frozen killed mad plain starting stock stuck",
		ByRatio:  "4f1d agent-1 agent-2 agent-3 frozen killed mad plain starting stock stuck",
		ByFaults: "agent-1 4f1d agent-2 agent-3 frozen killed mad plain starting stock stuck",
		ByID:     "4f1d agent-1 agent-2 agent-3 frozen killed mad plain starting stock stuck",
	} {
		v := View{Sort: key}
		var got []string
		for _, r := range v.rows(now, prev) {
			got = append(got, r.ID[:min(len(r.ID), 8)])
		}
		require.Equal(t, strings.Replace(want, "4f1d", "4f1d1c2b", 1), strings.Join(got, " "), key)
	}
	for _, k := range Keys {
		got, err := ParseKey(string(k))
		require.NoError(t, err)
		require.Equal(t, k, got)
	}
	_, err := ParseKey("size")
	require.ErrorContains(t, err, `"size"`)
}

func TestFaultRate(t *testing.T) {
	was := waiting("a", 1, 1, 100)
	now := waiting("a", 1, 1, 350)
	now.At = was.At.Add(2 * time.Second)
	rate, ok := FaultRate(&was, &now)
	require.True(t, ok)
	require.Equal(t, 125.0, rate)
	for name, f := range map[string]func(was, now *Sandbox){
		"restarted": func(_, now *Sandbox) { now.PID++ },
		"reset":     func(_, now *Sandbox) { now.Stats.Faults.Demand = 99 },
		"silent":    func(was, _ *Sandbox) { *was = failed("a", Silent, "") },
		"silent now": func(_, now *Sandbox) {
			*now = failed("a", Silent, "")
		},
		"same time": func(was, now *Sandbox) { was.At = now.At },
	} {
		was, now := waiting("a", 1, 1, 100), waiting("a", 1, 1, 350)
		now.At = was.At.Add(2 * time.Second)
		f(&was, &now)
		_, ok := FaultRate(&was, &now)
		require.False(t, ok, name)
	}
	_, ok = FaultRate(nil, &now)
	require.False(t, ok)
}

func TestIDs(t *testing.T) {
	rows := func(ids ...string) []row {
		var out []row
		for _, id := range ids {
			out = append(out, row{&Sandbox{ID: id}, 0})
		}
		return out
	}
	require.Equal(t, []string{"abcde~", "xyz"}, idCells(rows("abcdefgh", "xyz"), 6))
	require.Equal(t, []string{"ab~001", "ab~002", "xyz"}, idCells(rows("abcdefgh001", "abcdefgh002", "xyz"), 6))
	require.Equal(t, []string{"~", "~"}, idCells(rows("abc", "abd"), 1))
}

func TestCells(t *testing.T) {
	for n, want := range map[uint64]string{
		0: "0B", 999: "999B", 1000: "1.0K", 1023: "1.0K", 1024: "1.0K", 10*kib - 1: "10.0K", 10 * kib: "10K", 999 * kib: "999K", 1000 * kib: "1.0M",
		512 * mib: "512M", 3 << 29: "1.5G", 12 * gib: "12G", 1 << 63: "8.0E", 1<<64 - 1: "16E",
	} {
		require.Equal(t, want, size(n))
	}
	for ns, want := range map[time.Duration]string{
		0: "0.0s", 40 * time.Millisecond: "0.0s", 9940 * time.Millisecond: "9.9s", 9960 * time.Millisecond: "10s", 99 * time.Second: "99s", 100 * time.Second: "2m",
		99 * time.Minute: "99m", 2 * time.Hour: "2h", 99 * time.Hour: "99h", 100 * time.Hour: "4d",
	} {
		require.Equal(t, want, age(uint64(ns)))
	}
	require.Equal(t, "53376d", age(1<<64-1))
	for f, want := range map[float64]string{0: "-", 0.04: "0.0x", 9.94: "9.9x", 10: "10x", 999: "999x", 1e9: ">999x"} {
		require.Equal(t, want, ratio(f))
	}
	for f, want := range map[float64]string{-1: "-", 0: "0", 0.5: "0.5", 12.4: "12", 99999: "99999", 123456: "123k"} {
		require.Equal(t, want, rate(f))
	}
}

// text has what a sandbox may say to harm a terminal.
var text = rapid.StringOf(rapid.SampledFrom([]rune("ab\x1b[\n\r\t\x00\u0085é世\"\\")))

// anySandbox draws a sandbox with arbitrary contents.
func anySandbox(t *rapid.T, id string) Sandbox {
	n := rapid.OneOf(rapid.Uint64(), rapid.Uint64Range(0, 2*gib), rapid.Just(uint64(0)))
	s := Sandbox{ID: id, PID: rapid.IntRange(0, 3).Draw(t, "pid"), State: rapid.SampledFrom(States).Draw(t, "state"), At: noon.Add(time.Duration(rapid.IntRange(0, 3).Draw(t, "at")))}
	if s.State != OK {
		s.Reason = clean(text.Draw(t, "reason"), maxReason)
		return s
	}
	s.Paused = rapid.Bool().Draw(t, "paused")
	buckets := func() control.Histogram {
		return control.Histogram{Count: n.Draw(t, "count"), SumNS: n.Draw(t, "sum"), Buckets: rapid.SliceOfN(rapid.Uint64Range(0, 1000), 0, 70).Draw(t, "buckets")}
	}
	s.Stats = &control.Stats{
		GuestBytes: n.Draw(t, "guest"), OwnedBytes: n.Draw(t, "owned"), StoreBytes: n.Draw(t, "store"), TemplateBytes: n.Draw(t, "template"), SentryRSSBytes: n.Draw(t, "rss"),
		Faults:    control.Faults{Demand: n.Draw(t, "demand")},
		Prefetch:  control.Prefetch{Precision: rapid.Float64().Draw(t, "p"), Recall: rapid.Float64().Draw(t, "r")},
		Phase:     control.Phase{State: text.Draw(t, "phase"), SinceNS: n.Draw(t, "since"), Why: text.Draw(t, "why")},
		Pressure:  control.Pressure{Level: rapid.SampledFrom([]string{"", "none", "high", "critical", "?"}).Draw(t, "level"), LimitBytes: n.Draw(t, "limit"), UsedBytes: n.Draw(t, "used")},
		Pool:      control.Pool{State: text.Draw(t, "pool")},
		Rejects:   rapid.MapOf(text, n).Draw(t, "rejects"),
		RestoreNS: buckets(), EvictNS: buckets(), ResumeNS: buckets(),
	}
	return s
}

func anyCensus(t *rapid.T, name string) *Census {
	c := &Census{At: noon, Root: text.Draw(t, name)}
	for _, id := range rapid.SliceOfNDistinct(rapid.StringMatching(`[a-z]{1,3}|[a-z]{70}`), 0, 12, rapid.ID[string]).Draw(t, "ids") {
		c.Sandboxes = append(c.Sandboxes, anySandbox(t, id))
	}
	if rapid.Bool().Draw(t, "pool") {
		c.Pool = &Pool{Socket: text.Draw(t, "socket"), Reason: text.Draw(t, "reason")}
	}
	return c
}

// TestViewFits: whatever sandboxes say, lines fit the terminal and leave it alone.
func TestViewFits(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		now, prev := anyCensus(t, "now"), anyCensus(t, "prev")
		v := View{
			Width:  rapid.IntRange(0, 200).Draw(t, "width"),
			Height: rapid.IntRange(0, 20).Draw(t, "height"),
			Sort:   rapid.SampledFrom(Keys).Draw(t, "sort"),
		}
		lines := v.Lines(now, prev)
		if v.Height != 0 && len(lines) > v.Height {
			t.Fatalf("%d lines", len(lines))
		}
		for _, l := range lines {
			if v.Width != 0 && len(l) > v.Width {
				t.Fatalf("%d columns: %q", len(l), l)
			}
			for i := range len(l) {
				if l[i] < ' ' || l[i] > '~' {
					t.Fatalf("%q", l)
				}
			}
		}
	})
}
