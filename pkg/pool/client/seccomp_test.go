package client

import (
	"os"
	"os/exec"
	"strings"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"runsc-agentzip/memfile/codec"
	"runsc-agentzip/pkg/pool/wire"
)

// confinedEnv is set in the process that TestSystemCalls starts.
const confinedEnv = "POOL_CLIENT_TEST_CONFINED"

// TestSystemCalls has another process go through two connections under a seccomp
// filter that allows what the package comment says, and the Go runtime's calls.
func TestSystemCalls(t *testing.T) {
	if testing.CoverMode() != "" {
		t.Skip("a process that measures coverage writes files")
	}
	exe, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(exe, "-test.run=^TestConfined$", "-test.v")
	cmd.Env = append(os.Environ(), confinedEnv+"=1")
	var pools []*fakePool
	for range 2 {
		p, fd := dial(t)
		defer p.close()
		pools = append(pools, p)
		// Everything waits in the socket.
		p.welcome()
		p.sendIndex()
		p.addSegment(1)
		p.addSegment(2)
		p.publish(hashOf(2), 20, p.put(2, hashOf(2)))
		p.put(1, hashOf(1))
		p.w.Begin(wire.Patterns, 3)
		p.w.Body([]byte("abc"))
		p.send(-1)
		p.w.Begin(wire.Share, 0)
		p.w.Sharing(wire.Sharing{Pages: 77})
		p.send(-1)
		cmd.ExtraFiles = append(cmd.ExtraFiles, os.NewFile(uintptr(fd), "sandbox's end"))
	}
	out, err := cmd.CombinedOutput()
	for _, f := range cmd.ExtraFiles {
		f.Close()
	}
	require.NoError(t, err, "%s", out)
	if strings.Contains(string(out), "SKIP") {
		t.Skipf("%s", out)
	}
	require.Contains(t, string(out), "PASS: TestConfined")
	for _, p := range pools {
		require.Equal(t, []string{"ref 1:0", "offer 10", "publish 30 31 0", "patterns 8192 of 20000", "patterns 8192 of 20000", "patterns 3616 of 20000", "usage", "unref 1:0"}, p.received())
	}
}

// TestConfined is the other process of TestSystemCalls.
func TestConfined(t *testing.T) {
	if os.Getenv(confinedEnv) == "" {
		t.Skip("run by TestSystemCalls")
	}
	c := New(Options{Log: t.Logf})
	confine(t)
	h, buf := hashOf(1), make([]byte, wire.MaxRecord)
	for fd := 3; fd < 5; fd++ {
		require.NoError(t, c.Attach(fd))
		shared := uint64(0)
		for shared != 77 {
			<-c.Ready()
			s, _ := c.Sharing()
			shared = s.Pages
			if c.Key() != nil && shared != 77 {
				c.signal()
			}
		}
		l := mustFind(t, c, h)
		requireReadable(t, c, l, h)
		c.Offer(c.Key(), &h, 10)
		w := c.Work()
		require.Len(t, w.Published, 1)
		c.Unref(w.Published[0].Loc)
		require.Equal(t, "abc", string(c.Patterns()))
		c.Flush()
		require.True(t, c.Publish(c.Key(), &h, 30, 31, new(codec.Page)))
		c.SendPatterns(make([]byte, 20000))
		c.AskUsage()
		_, _, ok := c.Find(c.Key(), &wire.Hash{}, buf)
		require.False(t, ok)
		c.Unref(l)
		c.Flush()
		c.mu.Lock()
		c.share = wire.Sharing{}
		c.mu.Unlock()
	}
	c.Close()
	require.Zero(t, c.State().Segments)
}

// confine installs a seccomp filter on all threads. A system call that it does not
// allow ends the process with a trace.
func confine(t *testing.T) {
	const (
		load  = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS
		equal = unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K
		ret   = unix.BPF_RET | unix.BPF_K
		allow = 0x7fff0000 // SECCOMP_RET_ALLOW
		trap  = 0x00030000 // SECCOMP_RET_TRAP
	)
	// The low half of an argument, of a little-endian machine.
	arg := func(n uint32) uint32 { return 16 + 8*n }
	prog := []unix.SockFilter{{Code: load, K: 0}}
	any := func(nr uint32) {
		prog = append(prog, unix.SockFilter{Code: equal, Jf: 1, K: nr}, unix.SockFilter{Code: ret, K: allow})
	}
	only := func(nr, n, value uint32) {
		prog = append(prog,
			unix.SockFilter{Code: equal, Jf: 4, K: nr},
			unix.SockFilter{Code: load, K: arg(n)},
			unix.SockFilter{Code: equal, Jf: 1, K: value},
			unix.SockFilter{Code: ret, K: allow},
			unix.SockFilter{Code: ret, K: trap})
	}
	// What the package comment says.
	any(unix.SYS_PPOLL)
	any(unix.SYS_PREAD64)
	any(unix.SYS_CLOSE)
	only(unix.SYS_RECVMSG, 2, unix.MSG_DONTWAIT|unix.MSG_TRUNC)
	only(unix.SYS_SENDMSG, 2, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
	// The runtime's, with memory of its own, and the test's output.
	only(unix.SYS_MMAP, 4, ^uint32(0))
	for _, nr := range []uint32{
		unix.SYS_FUTEX, unix.SYS_NANOSLEEP, unix.SYS_CLOCK_NANOSLEEP, unix.SYS_CLOCK_GETTIME, unix.SYS_MUNMAP, unix.SYS_MADVISE,
		unix.SYS_MPROTECT, unix.SYS_SIGALTSTACK, unix.SYS_RT_SIGPROCMASK, unix.SYS_RT_SIGACTION, unix.SYS_RT_SIGRETURN,
		unix.SYS_CLONE, unix.SYS_CLONE3, unix.SYS_SET_ROBUST_LIST, unix.SYS_RSEQ, unix.SYS_GETTID, unix.SYS_GETPID, unix.SYS_TGKILL,
		unix.SYS_SCHED_YIELD, unix.SYS_SCHED_GETAFFINITY, unix.SYS_EXIT, unix.SYS_EXIT_GROUP, unix.SYS_EPOLL_PWAIT, unix.SYS_GETRANDOM,
		unix.SYS_PRCTL, unix.SYS_TIMER_CREATE, unix.SYS_TIMER_SETTIME, unix.SYS_TIMER_DELETE, unix.SYS_RESTART_SYSCALL,
		unix.SYS_WRITE,
	} {
		any(nr)
	}
	prog = append(prog, unix.SockFilter{Code: ret, K: trap})
	require.NoError(t, unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
	fprog := unix.SockFprog{Len: uint16(len(prog)), Filter: &prog[0]}
	// SECCOMP_SET_MODE_FILTER with SECCOMP_FILTER_FLAG_TSYNC.
	if r, _, errno := unix.Syscall(unix.SYS_SECCOMP, 1, 1, uintptr(unsafe.Pointer(&fprog))); errno != 0 || r != 0 {
		t.Skipf("SKIP: no seccomp filter can be installed here: %d, %v", r, errno)
	}
}
