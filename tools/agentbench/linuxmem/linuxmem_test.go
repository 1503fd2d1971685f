package linuxmem

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func TestParseSwaps(t *testing.T) {
	got, err := parseSwaps("Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n" +
		"/dev/zram1                              partition\t1048572\t\t2048\t\t100\n" +
		"/swap\\040file\\040(deleted)               file\t\t4096\t\t0\t\t-2\n")
	require.NoError(t, err)
	assert.Equal(t, []swap{
		{path: "/dev/zram1", size: 1048572 << 10, used: 2048 << 10},
		{path: "/swap file (deleted)", size: 4096 << 10},
	}, got)

	got, err = parseSwaps("Filename Type Size Used Priority\n")
	require.NoError(t, err)
	assert.Empty(t, got)
	for _, bad := range []string{"/dev/sda2 partition 12\n", "/dev/sda2 partition x 0 -2\n"} {
		_, err := parseSwaps(bad)
		assert.Error(t, err, bad)
	}
}

func TestParseMMStat(t *testing.T) {
	var u HostUsage
	require.NoError(t, parseMMStat("104857600  1234567  2097152        0  2097152      12        3        0        0", &u))
	assert.Equal(t, HostUsage{ZramOrig: 104857600, ZramCompressed: 1234567, ZramTotal: 2097152}, u)
	assert.Error(t, parseMMStat("1 2", &u))
	assert.Error(t, parseMMStat("1 2 x", &u))
}

func TestShare(t *testing.T) {
	u := HostUsage{SwapUsed: 1000, ZramTotal: 300}
	assert.EqualValues(t, 0, u.Share(0))
	assert.EqualValues(t, 75, u.Share(250))
	// The two are not read at the same moment.
	assert.EqualValues(t, 300, u.Share(1100))
	assert.EqualValues(t, 0, HostUsage{ZramTotal: 300}.Share(100))
}

func TestParseSwapHeader(t *testing.T) {
	page := make([]byte, 4096)
	_, ok := parseSwapHeader(page)
	assert.False(t, ok, "an empty page")
	copy(page[len(page)-10:], "SWAPSPACE2")
	_, ok = parseSwapHeader(page)
	assert.False(t, ok, "no version")
	binary.NativeEndian.PutUint32(page[1024:], 1)
	copy(page[1052:], "agb-0123456789")
	label, ok := parseSwapHeader(page)
	assert.True(t, ok)
	assert.Equal(t, "agb-0123456789", label)
	copy(page[1052:], "0123456789abcdef-beyond")
	label, _ = parseSwapHeader(page)
	assert.Equal(t, "0123456789abcdef", label)
	_, ok = parseSwapHeader([]byte("SWAPSPACE2"))
	assert.False(t, ok, "too short")
}

func TestParseStat(t *testing.T) {
	const v1 = "cache 1\nrss 2\ntotal_cache 1000\ntotal_rss 200\ntotal_shmem 700\ntotal_swap 4000\ntotal_pgpgin 1\n"
	got, err := parseStat(v1, false)
	require.NoError(t, err)
	assert.Equal(t, Usage{Anon: 200, Shmem: 700, File: 300, Swap: 4000}, got)

	const v2 = "anon 200\nfile 1000\nkernel 50\nshmem 700\nfile_mapped 1\n"
	got, err = parseStat(v2, true)
	require.NoError(t, err)
	assert.Equal(t, Usage{Anon: 200, Shmem: 700, File: 300, Kernel: 50}, got)

	_, err = parseStat(v2, false)
	assert.ErrorContains(t, err, "total_rss")
	_, err = parseStat("anon x\n", true)
	assert.Error(t, err)
}

func TestParseMemcg(t *testing.T) {
	const (
		v1Mount   = "36 25 0:30 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"
		v1Other   = "35 25 0:29 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n"
		v2Mount   = "40 25 0:34 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n"
		v2Partial = "40 25 0:34 /docker/abc /sys/fs/cgroup\\040x ro - cgroup2 cgroup rw\n"
	)
	for name, tc := range map[string]struct {
		mounts, own string
		want        memcg
		err         string
	}{
		"v1":              {v1Other + v1Mount, "5:pids:/x\n4:memory:/a/b\n0::/\n", memcg{mount: "/sys/fs/cgroup/memory", own: "/sys/fs/cgroup/memory/a/b"}, ""},
		"v1 wins":         {v2Mount + v1Mount, "4:cpu,memory:/\n0::/y\n", memcg{mount: "/sys/fs/cgroup/memory", own: "/sys/fs/cgroup/memory"}, ""},
		"v2":              {v1Other + v2Mount, "5:pids:/x\n0::/user.slice/a:b\n", memcg{mount: "/sys/fs/cgroup", own: "/sys/fs/cgroup/user.slice/a:b", v2: true}, ""},
		"v2 in container": {v2Partial, "0::/docker/abc/inner\n", memcg{mount: "/sys/fs/cgroup x", own: "/sys/fs/cgroup x/inner", v2: true}, ""},
		"outside mount":   {v2Partial, "0::/docker/other\n", memcg{}, "run it on the host"},
		"none mounted":    {v1Other, "0::/\n", memcg{}, "no cgroup file system"},
		"in none":         {v1Mount, "5:pids:/\n", memcg{}, "in none"},
	} {
		got, err := parseMemcg(tc.mounts, tc.own)
		if tc.err != "" {
			assert.ErrorContains(t, err, tc.err, name)
			continue
		}
		if assert.NoError(t, err, name) {
			assert.Equal(t, tc.want, got, name)
		}
	}
}

// TestPlanCgroups: where the groups are made, with a tree of plain files in the
// place of cgroup v2.
func TestPlanCgroups(t *testing.T) {
	mount := t.TempDir()
	own := filepath.Join(mount, "slice", "scope")
	require.NoError(t, os.MkdirAll(own, 0o755))
	subtree := func(dir, controllers string) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, subtreeFile), []byte(controllers+"\n"), 0o644))
	}
	for _, dir := range []string{mount, filepath.Dir(own), own} {
		subtree(dir, "cpu pids")
	}
	m := memcg{mount: mount, own: own, v2: true}
	assert.Equal(t, cgroupState{Parent: filepath.Join(mount, "agentbench-x"), Enabled: mount}, m.plan("x"))
	subtree(mount, "cpu memory")
	assert.Equal(t, cgroupState{Parent: filepath.Join(mount, "agentbench-x")}, m.plan("x"))
	subtree(filepath.Dir(own), "memory")
	assert.Equal(t, cgroupState{Parent: filepath.Join(mount, "slice", "agentbench-x")}, m.plan("x"))
	m.v2 = false
	assert.Equal(t, cgroupState{Parent: filepath.Join(own, "agentbench-x")}, m.plan("x"))
}

func TestStateFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.json")
	f := &stateFile{path: path, state: state{
		Format: stateFormat,
		BootID: "b",
		Zram:   zramState{Existing: []int{0, 2}, Number: noDevice, DiskBytes: 1 << 30, Label: "agb-1"},
		KSM:    ksmState{Before: ksmSettings{Run: "0", PagesToScan: "100"}, Ours: ksmSettings{Run: "1", PagesToScan: "500"}},
		Cgroup: cgroupState{Parent: "/p"},
	}}
	require.NoError(t, f.save())
	f.state.Zram.Number, f.state.Zram.DiskSeq = 1, "17"
	require.NoError(t, f.save())
	got, err := loadState(path)
	require.NoError(t, err)
	assert.Equal(t, f, got)

	// What a kill in the middle of saving leaves is removed with the file.
	require.NoError(t, os.WriteFile(path+newSuffix, []byte("{"), 0o600))
	require.NoError(t, f.remove())
	require.NoError(t, f.remove())
	entries, err := os.ReadDir(filepath.Dir(path))
	require.NoError(t, err)
	assert.Empty(t, entries)

	require.NoError(t, os.WriteFile(path, []byte(`{"format":99}`), 0o600))
	_, err = loadState(path)
	assert.ErrorContains(t, err, "format 99")
	require.NoError(t, os.WriteFile(path, []byte(`{"format`), 0o600))
	_, err = loadState(path)
	assert.ErrorContains(t, err, path)

	f.path = filepath.Join(filepath.Dir(path), "missing", "state.json")
	assert.Error(t, f.save())
}

// TestNothingToRestore: no state file, only a part of one, or one from before a
// restart of the machine.
func TestNothingToRestore(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.json")
	require.NoError(t, RestoreHost(path))
	require.NoError(t, os.WriteFile(path+newSuffix, []byte("{"), 0o600))
	require.NoError(t, RestoreHost(path))
	assert.NoFileExists(t, path+newSuffix)

	f := &stateFile{path: path, state: state{
		Format: stateFormat,
		BootID: "another",
		Zram:   zramState{Number: 0, Label: "agb-1"},
		KSM:    ksmState{Before: ksmSettings{Run: "7"}, Ours: ksmSettings{Run: "0"}},
		Cgroup: cgroupState{Parent: filepath.Dir(path)},
	}}
	require.NoError(t, f.save())
	require.NoError(t, RestoreHost(path))
	assert.NoFileExists(t, path)
}

func TestEnterRefuses(t *testing.T) {
	dir := t.TempDir()
	for _, tc := range []struct {
		args []string
		want string
	}{
		{nil, "usage"},
		{[]string{"--cgroup", dir}, "usage"},
		{[]string{"--", "true"}, "usage"},
		{[]string{"--bogus"}, "bogus"},
		{[]string{"--cgroup", dir, "--", "/no/such/program"}, "/no/such/program"},
		{[]string{"--cgroup", dir, "--", "true"}, procsFile},
	} {
		assert.ErrorContains(t, enter(tc.args), tc.want, "%q", tc.args)
	}
}

func TestGroupNames(t *testing.T) {
	for _, name := range []string{"", ".", "..", "a/b", "a\nb"} {
		_, err := (&Host{}).Group(name)
		assert.Error(t, err, "%q", name)
	}
}

func TestLowerPriority(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	nice := func() int {
		n, err := unix.Getpriority(unix.PRIO_PROCESS, unix.Gettid())
		require.NoError(t, err)
		return 20 - n
	}
	before := nice()
	restore := lowerPriority()
	require.GreaterOrEqual(t, nice(), min(reclaimNice, 19))
	restore()
	if os.Geteuid() == 0 {
		require.Equal(t, before, nice())
	}
}
