// Package pressure tells how close a sandbox is to being killed for want of memory,
// and how scarce memory is on the host.
//
// A sandbox cannot open files of the host. Whoever starts it opens those of the
// memory cgroups that it is in and of the host's pressure (Open), and hands them over;
// the sandbox reads them again and again (FromFiles).
//
// # Levels
//
// What counts is the part of a cgroup's usage that the kernel cannot drop by itself:
// usage less the cache of files on disk (memory.stat's inactive_file and active_file,
// of version 1 their hierarchical totals). Guest memory is shmem, and stays.
//
//   - None: there is more left than what follows.
//   - High: a quarter of the limit is left, or 4 GiB if that is less. Memory should be
//     evicted even while the sandbox works, or it will be killed soon.
//   - Critical: a tenth is left, or 1 GiB if that is less, or 16 MiB if that is more.
//     Whoever wants more memory should wait for what is being evicted.
//
// A sandbox is in its own cgroup and in all above it, and each may have a limit: that
// of a Kubernetes pod is on its containers' parent. The level is the highest of any of
// them, and limits are read anew, since they may change at any time.
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
	// maxHigh and maxCritical are what is left of a limit, in bytes, when these levels
	// begin at the earliest, whatever a quarter and a tenth of it are, and minCritical
	// when Critical begins at the latest: a fault may give memory to 2 MiB, and many
	// may come at once.
	maxHigh     = 4 << 30
	maxCritical = 1 << 30
	minCritical = 16 << 20

	// maxGroups is how many cgroups are followed: a pod's container is in five.
	maxGroups = 8

	// StallShare is the share of time in which processes of the host waited for
	// memory from which on the host's pressure is High, in percent.
	StallShare = 10

	// A reading of a cgroup's usage counts until memory that is touched at fillRate,
	// in bytes per second, could have made the level higher, but from minAge to
	// maxAge: cgroups above hold many sandboxes, and their statistics are the slower
	// to read. A processor touches fresh memory at 1 GB/s.
	fillRate = 16 << 30
	minAge   = time.Millisecond
	maxAge   = 100 * time.Millisecond
	// limitAge is how long a limit counts, and hostMaxAge the same for the host's
	// pressure, which the kernel updates every two seconds.
	limitAge   = 500 * time.Millisecond
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

// Files are what a Gauge reads.
type Files struct {
	// Groups are the sandbox's cgroups, its own first and then each one's parent.
	Groups []Group
	// Host is /proc/pressure/memory, or nil.
	Host *os.File
}

// A Group is the files of a memory cgroup.
type Group struct {
	Limit, Usage, Stat *os.File
}

// Close closes the files.
func (f *Files) Close() {
	for _, f := range f.All() {
		_ = f.Close()
	}
}

// All returns the files: three of each cgroup, and the host's if there is one.
func (f *Files) All() []*os.File {
	var all []*os.File
	for _, g := range f.Groups {
		all = append(all, g.Limit, g.Usage, g.Stat)
	}
	if f.Host != nil {
		all = append(all, f.Host)
	}
	return all
}

// noLimit is from where on a limit of version 1 is none: it has no word for that.
const noLimit = 1 << 60

// Open opens the files for the process pid. root is the host's root directory. That a
// cgroup can have no limit, or that there is no pressure file, is no error.
func Open(root string, pid int) (*Files, error) {
	f := &Files{}
	f.Host, _ = os.Open(filepath.Join(root, "proc/pressure/memory"))
	dir, top, names, err := memoryCgroup(root, pid)
	if err != nil {
		return f, err
	}
	for d := dir; len(f.Groups) < maxGroups; d = filepath.Dir(d) {
		// The top of version 2 has no limit, nor has what is not there in this
		// mount namespace.
		if g, err := openGroup(d, names); err == nil {
			f.Groups = append(f.Groups, g)
		}
		if d == top || !strings.HasPrefix(d, top) {
			break
		}
	}
	return f, nil
}

func openGroup(dir string, names fileNames) (Group, error) {
	var g Group
	var err error
	if g.Limit, err = os.Open(filepath.Join(dir, names.limit)); err != nil {
		return g, err
	}
	if g.Usage, err = os.Open(filepath.Join(dir, names.usage)); err == nil {
		g.Stat, err = os.Open(filepath.Join(dir, "memory.stat"))
	}
	if err != nil {
		_ = g.Limit.Close()
		_ = g.Usage.Close() // nil is an error, too
	}
	return g, err
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

// A Reading is what is known of the cgroup that is nearest to its limit.
type Reading struct {
	Level Level
	// Limit is the cgroup's limit in bytes, 0 if none has one, and Used what is used
	// of it.
	Limit, Used uint64
	// Above is how many levels above the sandbox's own the cgroup is: if it is not 0,
	// others use the memory, too.
	Above int
}

// nearer tells whether r is nearer to its limit than o.
func (r Reading) nearer(o Reading) bool {
	if r.Level != o.Level {
		return r.Level > o.Level
	}
	return o.Limit == 0 || float64(r.Used)*float64(o.Limit) > float64(o.Used)*float64(r.Limit)
}

// A Gauge reads how scarce memory is. Its methods may be called concurrently. A nil
// Gauge always tells None.
type Gauge struct {
	// host and now are immutable.
	host *os.File
	now  func() time.Time

	// nextRead is when the last reading counts no longer, in nanoseconds since the
	// Gauge was made, and level what it said. limited tells whether a cgroup has a
	// limit.
	made     time.Time
	nextRead atomic.Int64
	level    atomic.Int32
	limited  atomic.Bool

	mu sync.Mutex
	// groups are the cgroups; last is the last reading, and limitsUntil until when
	// their limits count.
	groups      []group
	last        Reading
	limitsUntil int64
	// hostHigh is whether the host's pressure was High at hostAt.
	hostHigh bool
	hostAt   time.Time
	// err is what the last reading failed with.
	err error
	buf [8192]byte
}

// group is a cgroup and what was last read of it.
type group struct {
	files Group
	Reading
	// until is when the reading counts no longer, and err what it failed with.
	until int64
	err   error
}

// FromFiles returns a Gauge, which owns the files.
func FromFiles(f Files) *Gauge {
	g := &Gauge{host: f.Host, now: time.Now, made: time.Now()}
	for i, files := range f.Groups {
		g.groups = append(g.groups, group{files: files, Reading: Reading{Above: i}})
	}
	g.read(0)
	return g
}

// Close closes the files.
func (g *Gauge) Close() {
	if g == nil {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	f := Files{Host: g.host}
	for i := range g.groups {
		f.Groups = append(f.Groups, g.groups[i].files)
	}
	f.Close()
}

// Limited tells whether there was a limit when Level or Read last looked. It costs next
// to nothing.
func (g *Gauge) Limited() bool { return g != nil && g.limited.Load() }

// Level tells how scarce memory is for the sandbox.
func (g *Gauge) Level() Level {
	if g == nil {
		return None
	}
	if int64(g.now().Sub(g.made)) < g.nextRead.Load() {
		return Level(g.level.Load())
	}
	return g.Read().Level
}

// Read tells the same, and of which limit.
func (g *Gauge) Read() Reading {
	if g == nil {
		return Reading{}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if now := int64(g.now().Sub(g.made)); now >= g.nextRead.Load() {
		g.read(now)
	}
	return g.last
}

// read reads what counts no longer.
//
// Preconditions: g.mu is locked.
func (g *Gauge) read(now int64) {
	limits := now >= g.limitsUntil
	if limits {
		g.limitsUntil = now + int64(limitAge)
	}
	next := g.limitsUntil
	g.last, g.err = Reading{}, nil
	for i := range g.groups {
		c := &g.groups[i]
		if limits {
			var limit uint64
			if limit, c.err = g.readLimit(c.files.Limit); limit != c.Limit {
				c.Limit, c.until = limit, 0
			}
		}
		if c.Limit != 0 {
			if now >= c.until {
				c.Used, c.err = g.readUsed(c)
				var room uint64
				c.Level, room = levelOf(c.Used, c.Limit)
				c.until = now + int64(age(room))
			}
			next = min(next, c.until)
			if c.err == nil && c.nearer(g.last) {
				g.last = c.Reading
			}
		}
		if c.err != nil {
			g.err = c.err
		}
	}
	g.limited.Store(g.last.Limit != 0)
	g.level.Store(int32(g.last.Level))
	g.nextRead.Store(next)
}

// age is for how long a reading counts that has room bytes left until the next level.
func age(room uint64) time.Duration {
	const most = uint64(fillRate * maxAge / time.Second)
	return max(minAge, time.Duration(min(room, most))*time.Second/fillRate)
}

// levelOf returns the level, and how far it is to the next one, in bytes.
func levelOf(used, limit uint64) (l Level, room uint64) {
	critical := limit - max(min(limit/10, maxCritical), min(limit/2, minCritical))
	high := min(limit-min(limit/4, maxHigh), critical)
	switch {
	case used >= critical:
		return CriticalLevel, 0
	case used >= high:
		return HighLevel, critical - used
	}
	return None, high - used
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

// readLimit returns the limit in the file, or 0 if it says that there is none.
func (g *Gauge) readLimit(f *os.File) (uint64, error) {
	n, err := g.readNumber(f)
	if n >= noLimit {
		n = 0
	}
	return n, err
}

// readUsed returns the part of the usage that the kernel cannot drop. The cache is
// asked for only where it matters.
func (g *Gauge) readUsed(c *group) (uint64, error) {
	used, err := g.readNumber(c.files.Usage)
	if err != nil {
		return 0, err
	}
	if l, _ := levelOf(used, c.Limit); l == None {
		return used, nil
	}
	stat, err := g.readFile(c.files.Stat)
	if err != nil {
		return 0, err
	}
	return used - min(used, fileCache(stat)), nil
}

// readNumber returns the number in a file, or 0 for the word max.
func (g *Gauge) readNumber(f *os.File) (uint64, error) {
	b, err := g.readFile(f)
	if err != nil {
		return 0, err
	}
	if b = bytes.TrimSpace(b); string(b) == "max" {
		return 0, nil
	}
	n, err := strconv.ParseUint(string(b), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", f.Name(), err)
	}
	return n, nil
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
	if g.host == nil {
		return false
	}
	if now := g.now(); now.Sub(g.hostAt) >= hostMaxAge {
		g.hostAt = now
		b, err := g.readFile(g.host)
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
	n, err := f.ReadAt(g.buf[:], 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	return g.buf[:n], nil
}
