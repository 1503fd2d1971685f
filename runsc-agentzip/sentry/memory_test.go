package sentry

import (
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/sentry/pgalloc"

	"runsc-agentzip/pkg/pressure"
)

// scarce returns a sandbox with a limit of 1 GiB, and a function that sets what is used
// of it. The limit is that of a cgroup so many levels above the sandbox's own.
func scarce(t *testing.T, above int) (*scarcity, func(used uint64)) {
	dir := t.TempDir()
	file := func(name, content string) *os.File {
		name = filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(name, []byte(content), 0o600))
		f, err := os.Open(name)
		require.NoError(t, err)
		return f
	}
	var files pressure.Files
	for i := range above + 1 {
		limit := "max"
		if i == above {
			limit = fmt.Sprint(1 << 30)
		}
		files.Groups = append(files.Groups, pressure.Group{
			Limit: file(fmt.Sprint("limit", i), limit), Usage: file(fmt.Sprint("usage", i), "0"), Stat: file("stat", "")})
	}
	g := pressure.FromFiles(files)
	t.Cleanup(g.Close)
	s := &scarcity{wanted: make(chan struct{}, 1)}
	s.gauge.Store(g)
	return s, func(used uint64) {
		file(fmt.Sprint("usage", above), fmt.Sprint(used)).Close()
		for end := time.Now().Add(10 * time.Second); g.Read().Used != used && time.Now().Before(end); {
			time.Sleep(time.Millisecond)
		}
		require.Equal(t, used, g.Read().Used)
	}
}

// thread is a task.
type thread struct{ killed atomic.Bool }

func (t *thread) Killed() bool { return t.killed.Load() }

// holds is a sandbox with so much memory.
type holds uint64

func (h holds) HeldBytes() (uint64, error) { return uint64(h), nil }

const much = holds(manyBytes)

// admitted returns how long admit took.
func (s *scarcity) admitted(t task, sysno uintptr, h holds) time.Duration {
	start := time.Now()
	s.admit(t, sysno, h)
	return time.Since(start)
}

func TestAdmit(t *testing.T) {
	s, use := scarce(t, 0)
	var none thread
	waits := func(sysno uintptr, h holds) bool {
		before := s.throttled.Load()
		s.admit(&none, sysno, h)
		return s.throttled.Load() != before
	}
	wanted := func() bool { return len(s.wanted) != 0 }

	require.False(t, waits(pgalloc.NoSyscall, much))
	require.False(t, wanted())
	use(800 << 20)
	require.False(t, waits(pgalloc.NoSyscall, much))
	require.True(t, wanted())

	use(1000 << 20)
	require.GreaterOrEqual(t, s.admitted(&none, unix.SYS_MMAP, much), throttleMax)
	// It is over when there is room again, or when what there was has been evicted.
	done := make(chan struct{})
	go func() {
		defer close(done)
		time.Sleep(20 * time.Millisecond)
		use(10 << 20)
	}()
	require.Less(t, s.admitted(&none, unix.SYS_WRITE, much), throttleMax)
	<-done
	use(1000 << 20)
	go func() {
		for range throttlePasses {
			time.Sleep(20 * time.Millisecond)
			s.evictions.Add(1)
		}
	}()
	require.Less(t, s.admitted(&none, unix.SYS_WRITE, much), throttleMax)

	// Who frees memory does not wait.
	for _, sysno := range []uintptr{
		unix.SYS_MUNMAP, unix.SYS_MADVISE, unix.SYS_SHMDT, unix.SYS_CLOSE, unix.SYS_UNLINKAT, unix.SYS_FTRUNCATE,
		unix.SYS_EXIT, unix.SYS_EXIT_GROUP, unix.SYS_KILL, unix.SYS_TGKILL,
	} {
		require.False(t, waits(sysno, much), "system call %d", sysno)
	}
	s.futile.Store(time.Now().Add(time.Hour).UnixNano())
	require.Less(t, s.admitted(&none, unix.SYS_WRITE, much), throttleMax)
}

// TestAdmitKilled: nor does who was killed.
func TestAdmitKilled(t *testing.T) {
	s, use := scarce(t, 0)
	use(1000 << 20)
	var a thread
	go func() {
		time.Sleep(50 * time.Millisecond)
		a.killed.Store(true)
	}()
	took := s.admitted(&a, pgalloc.NoSyscall, much)
	require.GreaterOrEqual(t, took, 50*time.Millisecond)
	require.Less(t, took, throttleMax)
	before := s.throttled.Load()
	s.admit(&a, unix.SYS_WRITE, much)
	require.Less(t, s.throttled.Load()-before, uint64(throttleStep), "it has not slept at all")
}

// TestAdmitShared: a sandbox that has next to nothing is not held up by its siblings.
func TestAdmitShared(t *testing.T) {
	var none thread
	s, use := scarce(t, 2)
	use(1000 << 20)
	s.admit(&none, unix.SYS_WRITE, much-1)
	require.Zero(t, s.throttled.Load())
	require.NotEmpty(t, s.wanted)
	require.GreaterOrEqual(t, s.admitted(&none, unix.SYS_WRITE, much), throttleMax)

	s, use = scarce(t, 0)
	use(1000 << 20)
	require.GreaterOrEqual(t, s.admitted(&none, unix.SYS_WRITE, 0), throttleMax)
}
