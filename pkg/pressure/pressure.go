// Package pressure tells how close a sandbox is to being killed for want of memory,
// and how scarce memory is on the host.
//
// A sandbox cannot open files of the host. Whoever starts it opens those of the
// memory cgroup that limits it and of the host's pressure (Open), and hands them over;
// the sandbox reads them again and again (FromFiles).
//
// # Levels
//
// What counts is the part of the cgroup's usage that the kernel cannot drop by itself:
// usage less the cache of files on disk (memory.stat's inactive_file and active_file,
// of version 1 their hierarchical totals). Guest memory is shmem, and stays.
//
//   - None: below High of the limit.
//   - High: memory should be evicted even while the sandbox works, or it will be
//     killed soon.
//   - Critical: whoever wants more memory should wait for what is being evicted.
//
// The host's own pressure (PSI, "some avg10" of /proc/pressure/memory: the share of
// the last ten seconds in which some process waited for memory) never is Critical:
// that a sandbox waits helps itself only if it has a limit.
package pressure

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// High and Critical are the shares of the limit where these levels begin.
	High     = 0.75
	Critical = 0.90

	// minHeadroom is what is left below the limit, in bytes, when Critical begins at
	// the latest: a fault may give memory to 2 MiB, and many may come at once.
	minHeadroom = 16 << 20

	// StallShare is the share of time in which processes of the host waited for
	// memory from which on the host's pressure is High, in percent.
	StallShare = 10

	// maxAge is for how long a reading counts: at 1 GB/s, which is as fast as
	// fresh memory is touched, 1 MiB.
	maxAge = time.Millisecond
	// hostMaxAge is the same for the host's pressure, which the kernel updates
	// every two seconds.
	hostMaxAge = time.Second
)

// A Level is how scarce memory is.
type Level int

const (
	None Level = iota
	HighLevel
	CriticalLevel
)

func (l Level) String() string {
	return [...]string{"none", "high", "critical"}[l]
}

// Files are what a Gauge reads. Each may be nil.
type Files struct {
	// Usage and Stat are of the cgroup that limits the sandbox.
	Usage, Stat *os.File
	// Host is /proc/pressure/memory.
	Host *os.File
	// Limit is the cgroup's, in bytes, or 0 without one.
	Limit uint64
}

// Close closes the files.
func (f *Files) Close() {
	for _, f := range []*os.File{f.Usage, f.Stat, f.Host} {
		if f != nil {
			_ = f.Close()
		}
	}
}

// noLimit is from where on a limit of version 1 is none: it has no word for that.
const noLimit = 1 << 60

// Open opens the files for the process pid: those of the cgroup with the lowest
// limit of all that it is in. root is the host's root directory. That there is no
// limit, or no pressure file, is no error.
func Open(root string, pid int) (*Files, error) {
	f := &Files{}
	f.Host, _ = os.Open(filepath.Join(root, "proc/pressure/memory"))
	dir, top, names, err := memoryCgroup(root, pid)
	if err != nil {
		return f, err
	}
	best := ""
	for d := dir; ; d = filepath.Dir(d) {
		if limit, err := readNumber(filepath.Join(d, names.limit)); err == nil && limit < noLimit && (f.Limit == 0 || limit < f.Limit) {
			f.Limit, best = limit, d
		}
		if d == top || !strings.HasPrefix(d, top) {
			break
		}
	}
	if best == "" {
		return f, nil
	}
	if f.Usage, err = os.Open(filepath.Join(best, names.usage)); err == nil {
		f.Stat, err = os.Open(filepath.Join(best, "memory.stat"))
	}
	if err != nil {
		f.Limit = 0
	}
	return f, err
}

type fileNames struct{ limit, usage string }

// memoryCgroup returns the directory of the memory cgroup of a process, and the top
// of its hierarchy.
func memoryCgroup(root string, pid int) (dir, top string, names fileNames, err error) {
	path := filepath.Join(root, "proc", strconv.Itoa(pid), "cgroup")
	b, err := os.ReadFile(path)
	if err != nil {
		return "", "", names, err
	}
	unified := ""
	for line := range strings.Lines(string(b)) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(f) != 3 {
			continue
		}
		for c := range strings.SplitSeq(f[1], ",") {
			if c == "memory" {
				top = filepath.Join(root, "sys/fs/cgroup/memory")
				return filepath.Join(top, f[2]), top, fileNames{"memory.limit_in_bytes", "memory.usage_in_bytes"}, nil
			}
		}
		if f[0] == "0" && f[1] == "" {
			unified = f[2]
		}
	}
	if unified == "" {
		return "", "", names, fmt.Errorf("%s names no cgroup that could limit memory", path)
	}
	top = filepath.Join(root, "sys/fs/cgroup")
	return filepath.Join(top, unified), top, fileNames{"memory.max", "memory.current"}, nil
}

func readNumber(file string) (uint64, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return 0, err
	}
	return strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64)
}

// A Gauge reads how scarce memory is. Its methods may be called concurrently. A nil
// Gauge always tells None.
type Gauge struct {
	// files and now are immutable.
	files Files
	now   func() time.Time

	// nextRead is when the last reading counts no longer, in nanoseconds since the
	// Gauge was made, and level what it said.
	made     time.Time
	nextRead atomic.Int64
	level    atomic.Int32

	mu sync.Mutex
	// used is the last reading; hostHigh the host's, taken at hostAt.
	used     uint64
	hostHigh bool
	hostAt   time.Time
	// err is what the last reading failed with.
	err error
	buf [8192]byte
}

// FromFiles returns a Gauge, which owns the files.
func FromFiles(f Files) *Gauge {
	return &Gauge{files: f, now: time.Now, made: time.Now()}
}

// Close closes the files.
func (g *Gauge) Close() {
	if g == nil {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.files.Close()
}

// Limit is the limit, in bytes, or 0 if there is none.
func (g *Gauge) Limit() uint64 {
	if g == nil {
		return 0
	}
	return g.files.Limit
}

// Level tells how scarce memory is for the sandbox, at most maxAge ago.
func (g *Gauge) Level() Level {
	if g == nil || g.files.Limit == 0 {
		return None
	}
	if int64(g.now().Sub(g.made)) < g.nextRead.Load() {
		return Level(g.level.Load())
	}
	l, _ := g.Read()
	return l
}

// Read returns the level and what is used of the limit, in bytes.
func (g *Gauge) Read() (Level, uint64) {
	if g == nil || g.files.Limit == 0 {
		return None, 0
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if now := int64(g.now().Sub(g.made)); now >= g.nextRead.Load() {
		if used, err := g.read(); err == nil {
			g.used, g.err = used, nil
		} else {
			g.used, g.err = 0, err
		}
		g.level.Store(int32(g.levelOf(g.used)))
		g.nextRead.Store(now + int64(maxAge))
	}
	return Level(g.level.Load()), g.used
}

func (g *Gauge) levelOf(used uint64) Level {
	limit := g.files.Limit
	critical := min(uint64(Critical*float64(limit)), limit-min(limit/2, minHeadroom))
	switch {
	case used >= critical:
		return CriticalLevel
	case used >= min(uint64(High*float64(limit)), critical):
		return HighLevel
	}
	return None
}

// Err is why the last reading failed, or nil.
func (g *Gauge) Err() error {
	if g == nil {
		return nil
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.err
}

// read returns the part of the usage that the kernel cannot drop. The cache is asked
// for only where it matters.
func (g *Gauge) read() (uint64, error) {
	b, err := g.readFile(g.files.Usage)
	if err != nil {
		return 0, err
	}
	used, err := strconv.ParseUint(string(bytes.TrimSpace(b)), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("the cgroup's memory usage: %w", err)
	}
	if float64(used) < High*float64(g.files.Limit) || g.files.Stat == nil {
		return used, nil
	}
	stat, err := g.readFile(g.files.Stat)
	if err != nil {
		return 0, err
	}
	return used - min(used, fileCache(stat)), nil
}

// fileCache returns the memory that holds files on disk, according to memory.stat.
func fileCache(stat []byte) uint64 {
	var own, total uint64
	hierarchical := false
	for line := range bytes.Lines(stat) {
		name, value, _ := bytes.Cut(bytes.TrimSpace(line), []byte(" "))
		n, err := strconv.ParseUint(string(value), 10, 64)
		if err != nil {
			continue
		}
		switch string(name) {
		case "inactive_file", "active_file":
			own += n
		case "total_inactive_file", "total_active_file":
			total += n
			hierarchical = true
		}
	}
	if hierarchical {
		return total
	}
	return own
}

// HostHigh tells whether processes of the host wait for memory.
func (g *Gauge) HostHigh() bool {
	if g == nil {
		return false
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.files.Host == nil {
		return false
	}
	if now := g.now(); now.Sub(g.hostAt) >= hostMaxAge {
		g.hostAt = now
		b, err := g.readFile(g.files.Host)
		g.hostHigh = err == nil && stalls(b) >= StallShare
	}
	return g.hostHigh
}

// stalls returns "some avg10", in percent, or 0.
func stalls(psi []byte) float64 {
	for line := range bytes.Lines(psi) {
		f := bytes.Fields(line)
		if len(f) < 2 || string(f[0]) != "some" {
			continue
		}
		for _, kv := range f[1:] {
			if v, ok := bytes.CutPrefix(kv, []byte("avg10=")); ok {
				share, _ := strconv.ParseFloat(string(v), 64)
				return share
			}
		}
	}
	return 0
}

func (g *Gauge) readFile(f *os.File) ([]byte, error) {
	if f == nil {
		return nil, os.ErrClosed
	}
	n, err := f.ReadAt(g.buf[:], 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	return g.buf[:n], nil
}
