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

func TestOpen(t *testing.T) {
	for name, c := range map[string]struct {
		make  func(*tree)
		usage string
	}{
		"version 1": {(*tree).v1, "sys/fs/cgroup/memory/pod/memory.usage_in_bytes"},
		"version 2": {(*tree).v2, "sys/fs/cgroup/pod/memory.current"},
	} {
		t.Run(name, func(t *testing.T) {
			h := newTree(t)
			c.make(h)
			f, err := Open(h.root, 7)
			require.NoError(t, err)
			require.EqualValues(t, 256*mib, f.Limit, "the lowest limit of all above")
			g := FromFiles(*f)
			defer g.Close()
			now := time.Unix(1000, 0)
			g.made, g.now = now, func() time.Time { return now }
			level := func(want Level, used uint64) {
				t.Helper()
				h.write(c.usage, fmt.Sprintln(used))
				now = now.Add(maxAge)
				l, n := g.Read()
				require.Equal(t, want, l, "%d of %d", n, g.Limit())
				require.NoError(t, g.Err())
			}
			level(None, 10*mib)
			level(None, 240*mib) // 60 MiB of it are files
			level(HighLevel, 255*mib)
			level(CriticalLevel, 300*mib)
			level(None, 10*mib)

			// A reading that fails is no pressure, and says why.
			h.write(c.usage, "?\n")
			now = now.Add(maxAge)
			require.Equal(t, None, g.Level())
			require.Error(t, g.Err())
		})
	}
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
	require.Zero(t, f.Limit)
	g := FromFiles(*f)
	require.Equal(t, None, g.Level())
	require.False(t, g.HostHigh())
	g.Close()

	var none *Gauge
	require.Equal(t, None, none.Level())
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
	l, used := g.Read()
	t.Logf("limit %d, used %d, level %v, host high %t", g.Limit(), used, l, g.HostHigh())
	require.NoError(t, g.Err())
}
