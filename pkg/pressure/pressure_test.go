package pressure

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A tree is a host's root directory with the files that matter.
type tree struct {
	t    *testing.T
	root string
}

func (h *tree) write(path, content string) {
	path = filepath.Join(h.root, path)
	require.NoError(h.t, os.MkdirAll(filepath.Dir(path), 0o755))
	require.NoError(h.t, os.WriteFile(path, []byte(content), 0o644))
}

const mib = 1 << 20

func newTree(t *testing.T) *tree { return &tree{t, t.TempDir()} }

// v1 and v2 make a hierarchy in which the cgroup /pod/box has a limit of 512 MiB and
// the one above it one of 256 MiB.
func (h *tree) v1() {
	h.write("proc/7/cgroup", "9:pids:/x\n5:cpu,memory:/pod/box\n1:name=systemd:/\n0::/\n")
	h.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
	for dir, limit := range map[string]int{"pod": 256 * mib, "pod/box": 512 * mib} {
		h.write("sys/fs/cgroup/memory/"+dir+"/memory.limit_in_bytes", fmt.Sprintln(limit))
		h.write("sys/fs/cgroup/memory/"+dir+"/memory.usage_in_bytes", "1048576\n")
		h.write("sys/fs/cgroup/memory/"+dir+"/memory.stat", "inactive_file 1\ntotal_inactive_file 52428800\ntotal_active_file 10485760\n")
	}
}

func (h *tree) v2() {
	h.write("proc/7/cgroup", "0::/pod/box\n")
	for dir, limit := range map[string]int{"pod": 256 * mib, "pod/box": 512 * mib} {
		h.write("sys/fs/cgroup/"+dir+"/memory.max", fmt.Sprintln(limit))
		h.write("sys/fs/cgroup/"+dir+"/memory.current", "1048576\n")
		h.write("sys/fs/cgroup/"+dir+"/memory.stat", "anon 5\ninactive_file 52428800\nactive_file 10485760\n")
	}
}

// A clock is a Gauge's.
type clock time.Time

// open returns the Gauge of the process 7, and its clock.
func (h *tree) open() (*Gauge, *clock) {
	f, err := Open(h.root, 7)
	require.NoError(h.t, err)
	g := FromFiles(*f)
	h.t.Cleanup(g.Close)
	c := clock(g.made)
	g.now = func() time.Time { return time.Time(c) }
	return g, &c
}

func (c *clock) pass(d time.Duration) { *c = clock(time.Time(*c).Add(d)) }

// A version says where a hierarchy has what.
type version struct {
	make                   func(*tree)
	dir, limit, usage, top string
}

var versions = map[string]version{
	"version 1": {(*tree).v1, "sys/fs/cgroup/memory/", "/memory.limit_in_bytes", "/memory.usage_in_bytes", "9223372036854771712\n"},
	"version 2": {(*tree).v2, "sys/fs/cgroup/", "/memory.max", "/memory.current", "max\n"},
}

// TestNearest: the cgroup that is nearest to its limit decides.
func TestNearest(t *testing.T) {
	for name, v := range versions {
		t.Run(name, func(t *testing.T) {
			h := newTree(t)
			v.make(h)
			g, now := h.open()
			is := func(want Level, above int, limit uint64) {
				t.Helper()
				now.pass(maxAge)
				r := g.Read()
				require.Equal(t, Reading{want, limit, r.Used, above}, r)
				require.Equal(t, want, g.Level())
				require.True(t, g.Limited())
				require.NoError(t, g.Err())
			}
			use := func(dir string, used uint64) { h.write(v.dir+dir+v.usage, fmt.Sprintln(used)) }
			is(None, 1, 256*mib)
			use("pod/box", 300*mib)
			is(None, 0, 512*mib)
			use("pod", 240*mib) // 60 MiB of it are files
			is(None, 1, 256*mib)
			use("pod", 255*mib)
			is(HighLevel, 1, 256*mib)
			use("pod/box", 570*mib)
			is(CriticalLevel, 0, 512*mib)
			use("pod", 305*mib)
			is(CriticalLevel, 0, 512*mib)
			use("pod", 316*mib)
			is(CriticalLevel, 1, 256*mib)
			use("pod", 10*mib)
			use("pod/box", 10*mib)
			is(None, 1, 256*mib)

			// A reading that fails is no pressure, and says why; others count.
			use("pod/box", 570*mib)
			h.write(v.dir+"pod"+v.usage, "?\n")
			now.pass(maxAge)
			require.Equal(t, CriticalLevel, g.Level())
			require.Error(t, g.Err())
			h.write(v.dir+"pod/box"+v.usage, "?\n")
			now.pass(maxAge)
			require.Equal(t, None, g.Level())
			use("pod", 255*mib)
			use("pod/box", 10*mib)
			is(HighLevel, 1, 256*mib)
		})
	}
}

// TestUpdate: limits may come, go and change.
func TestUpdate(t *testing.T) {
	for name, v := range versions {
		t.Run(name, func(t *testing.T) {
			h := newTree(t)
			v.make(h)
			set := func(dir, limit string) { h.write(v.dir+dir+v.limit, limit) }
			set("pod", v.top)
			set("pod/box", v.top)
			h.write(v.dir+"pod/box"+v.usage, fmt.Sprintln(200*mib))
			g, now := h.open()
			require.False(t, g.Limited())
			require.Equal(t, Reading{}, g.Read())

			set("pod/box", fmt.Sprintln(128*mib))
			now.pass(limitAge - 1)
			require.Equal(t, None, g.Level(), "not yet")
			require.False(t, g.Limited())
			now.pass(1)
			require.Equal(t, CriticalLevel, g.Level())
			require.True(t, g.Limited())
			require.Equal(t, Reading{CriticalLevel, 128 * mib, 140 * mib, 0}, g.Read())

			set("pod/box", fmt.Sprintln(1024*mib))
			now.pass(limitAge)
			require.Equal(t, Reading{None, 1024 * mib, 200 * mib, 0}, g.Read())

			h.write(v.dir+"pod"+v.usage, fmt.Sprintln(61*mib))
			set("pod", fmt.Sprintln(2*mib))
			set("pod/box", v.top)
			now.pass(limitAge)
			require.Equal(t, Reading{CriticalLevel, 2 * mib, 1 * mib, 1}, g.Read())

			set("pod", v.top)
			now.pass(limitAge)
			require.Equal(t, None, g.Level())
			require.False(t, g.Limited())
			require.NoError(t, g.Err())
		})
	}
}

// TestAge: what is far from its limit is read less often.
func TestAge(t *testing.T) {
	h := newTree(t)
	h.v2()
	const usage = "sys/fs/cgroup/pod/memory.current"
	h.write(usage, fmt.Sprintln(100*mib))
	g, now := h.open()
	h.write(usage, fmt.Sprintln(400*mib))
	// 92 MiB are 5.6 ms at 16 GiB/s.
	now.pass(5 * time.Millisecond)
	require.Equal(t, None, g.Level())
	now.pass(time.Millisecond)
	require.Equal(t, CriticalLevel, g.Level())
	h.write(usage, fmt.Sprintln(100*mib))
	now.pass(minAge - 1)
	require.Equal(t, CriticalLevel, g.Level())
	now.pass(1)
	require.Equal(t, None, g.Level())
	require.Equal(t, minAge, age(0))
	require.InDelta(t, maxAge, age(1<<62), 1)
}

func TestLevels(t *testing.T) {
	const gib = 1 << 30
	for _, c := range []struct{ limit, high, critical uint64 }{
		{8 * mib, 4 * mib, 4 * mib}, // half of it, rather than 16 MiB
		{48 * mib, 32 * mib, 32 * mib},
		{100 * mib, 75 * mib, 84 * mib},
		{1000 * mib, 750 * mib, 900 * mib},
		{8 * gib, 6 * gib, 8*gib - 8*gib/10},
		{12 * gib, 9 * gib, 11 * gib},
		{16 * gib, 12 * gib, 15 * gib},
		{20 * gib, 16 * gib, 19 * gib},
		{1024 * gib, 1020 * gib, 1023 * gib},
	} {
		level := func(used uint64) Level {
			l, room := levelOf(used, c.limit)
			if l != CriticalLevel {
				above, _ := levelOf(used+room, c.limit)
				below, _ := levelOf(used+room-1, c.limit)
				require.Greater(t, above, l)
				require.Equal(t, l, below)
			}
			return l
		}
		require.Equal(t, None, level(0))
		require.Equal(t, None, level(c.high-1), "%+v", c)
		if c.high != c.critical {
			require.Equal(t, HighLevel, level(c.high), "%+v", c)
			require.Equal(t, HighLevel, level(c.critical-1), "%+v", c)
		}
		require.Equal(t, CriticalLevel, level(c.critical), "%+v", c)
		require.Equal(t, CriticalLevel, level(2*c.limit), "%+v", c)
	}
}

// TestOpenMany: of a deep hierarchy, the lower levels are followed. Those that this mount
// namespace lacks are left out.
func TestOpenMany(t *testing.T) {
	h := newTree(t)
	path := ""
	for i := range 2 * maxGroups {
		path += fmt.Sprintf("/%d", i)
		if i == 2*maxGroups-3 {
			continue
		}
		h.write("sys/fs/cgroup"+path+"/memory.max", "max\n")
		h.write("sys/fs/cgroup"+path+"/memory.current", "1\n")
		h.write("sys/fs/cgroup"+path+"/memory.stat", "")
	}
	h.write("proc/7/cgroup", "0::"+path+"\n")
	f, err := Open(h.root, 7)
	require.NoError(t, err)
	defer f.Close()
	require.Len(t, f.Groups, maxGroups)
	require.Len(t, f.All(), 3*maxGroups)
	for i, level := range []int{15, 14, 12, 11} {
		require.Equal(t, fmt.Sprint(level), filepath.Base(filepath.Dir(f.Groups[i].Limit.Name())))
	}
	// Outside of the namespace's hierarchy there is nothing to follow.
	h.write("proc/7/cgroup", "0::/../../x\n")
	f, err = Open(h.root, 7)
	require.NoError(t, err)
	require.Empty(t, f.Groups)
}

func TestOpenWithout(t *testing.T) {
	h := newTree(t)
	f, err := Open(h.root, 7)
	require.Error(t, err, "there is no such process")
	f.Close()

	h.write("proc/7/cgroup", "0::/box\n")
	h.write("sys/fs/cgroup/box/memory.max", "max\n")
	f, err = Open(h.root, 7)
	require.NoError(t, err)
	require.Empty(t, f.Groups, "its usage is not there")
	g := FromFiles(*f)
	require.Equal(t, None, g.Level())
	require.False(t, g.HostHigh())
	g.Close()

	var none *Gauge
	require.Equal(t, None, none.Level())
	require.Equal(t, Reading{}, none.Read())
	require.False(t, none.Limited())
	require.False(t, none.HostHigh())
	none.Close()
}

func TestHost(t *testing.T) {
	h := newTree(t)
	h.write("proc/7/cgroup", "0::/\n")
	h.write("proc/pressure/memory", "some avg10=9.00 avg60=50.00 avg300=0.00 total=1\nfull avg10=99.00 avg60=0.00 avg300=0.00 total=1\n")
	f, err := Open(h.root, 7)
	require.NoError(t, err)
	g := FromFiles(*f)
	defer g.Close()
	now := time.Unix(1000, 0)
	g.now = func() time.Time { return now }
	require.False(t, g.HostHigh())
	h.write("proc/pressure/memory", "some avg10=10.50 avg60=50.00 avg300=0.00 total=1\n")
	require.False(t, g.HostHigh(), "the last reading still counts")
	now = now.Add(hostMaxAge)
	require.True(t, g.HostHigh())
}

// TestOwn reads what this machine has.
func TestOwn(t *testing.T) {
	f, err := Open("/", os.Getpid())
	if err != nil {
		t.Logf("no cgroup: %v", err)
	}
	g := FromFiles(*f)
	defer g.Close()
	t.Logf("%d cgroups: %+v, host high %t", len(f.Groups), g.Read(), g.HostHigh())
	require.NoError(t, g.Err())
}

func BenchmarkLevel(b *testing.B) {
	f, err := Open("/", os.Getpid())
	if err != nil {
		b.Skip(err)
	}
	g := FromFiles(*f)
	defer g.Close()
	for b.Loop() {
		g.Level()
	}
}
