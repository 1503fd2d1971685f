package pressure

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"text/tabwriter"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"runsc-agentzip/pkg/control"
	"runsc-agentzip/pkg/fleet"
	"runsc-agentzip/test/harness"
)

const mib = 1 << 20

// prefix starts the names of all cgroups that the tests make, so that what a killed
// test run left behind can be told from everything else, and ownPrefix those of this
// run: the process id of the tests follows.
const prefix = "agentzip-pressure-"

var ownPrefix = fmt.Sprintf("%s%d-", prefix, os.Getpid())

// ownerGone tells whether the tests that have made a cgroup have ended.
func ownerGone(path string) bool {
	pid, _, _ := strings.Cut(strings.TrimPrefix(filepath.Base(path), prefix), "-")
	_, err := os.Stat(filepath.Join("/proc", pid))
	return errors.Is(err, os.ErrNotExist)
}

func TestMain(m *testing.M) {
	if os.Geteuid() == 0 {
		// A run that was killed could not clean up.
		for _, dir := range cgroups(prefix + "*") {
			if ownerGone(dir) {
				removeCgroup(dir)
			}
		}
	}
	code := harness.Main(m, "pressure")
	printTable()
	os.Exit(code)
}

// ---- what there is -------------------------------------------------------------

// agentzip returns the runsc to test, or skips.
func agentzip(t testing.TB) string {
	t.Helper()
	path := harness.UnderTest(t, "agentzip-idle").Path
	needLimits(t)
	return path
}

// stock returns the runsc to compare with, or skips.
func stock(t testing.TB) string {
	t.Helper()
	path := harness.Stock(t).Path
	needLimits(t)
	return path
}

// needLimits skips where sandboxes with limits cannot run.
func needLimits(t testing.TB) {
	t.Helper()
	if err := memoryController(); err != nil {
		harness.Skip(t, "no sandbox can have a memory limit here: %v", err)
	}
}

const limitV1, limitV2 = "memory.limit_in_bytes", "memory.max"

// memoryTop returns the top of the hierarchy that limits memory, and the name of the
// files with limits.
func memoryTop() (dir, file string) {
	dir = "/sys/fs/cgroup/memory"
	if _, err := os.Stat(filepath.Join(dir, "memory.usage_in_bytes")); err == nil {
		return dir, limitV1
	}
	return filepath.Dir(dir), limitV2
}

// memoryController tells why memory cannot be limited, if so.
var memoryController = sync.OnceValue(func() error {
	dir, file := memoryTop()
	if file == limitV2 {
		b, err := os.ReadFile(dir + "/cgroup.controllers")
		if err != nil {
			return fmt.Errorf("cgroups are not mounted on %s: %w", dir, err)
		}
		if !slices.Contains(strings.Fields(string(b)), "memory") {
			return fmt.Errorf("%s/cgroup.controllers has no memory controller: %q", dir, b)
		}
	}
	dir = filepath.Join(dir, ownPrefix+"probe")
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	defer os.Remove(dir)
	if file == limitV1 {
		return os.WriteFile(filepath.Join(dir, file), []byte("67108864"), 0)
	}
	return nil
})

// cgroups returns the folders of a cgroup in all hierarchies.
func cgroups(name string) []string {
	one, _ := filepath.Glob("/sys/fs/cgroup/" + name)
	each, _ := filepath.Glob("/sys/fs/cgroup/*/" + name)
	return append(one, each...)
}

// removeCgroup removes a cgroup with those below it, unless there is a process in them.
func removeCgroup(dir string) {
	below, _ := filepath.Glob(filepath.Join(dir, "*", "cgroup.procs"))
	for _, file := range below {
		_ = os.Remove(filepath.Dir(file))
	}
	_ = os.Remove(dir)
}

// hasSwap tells whether memory over the limit could go elsewhere.
func hasSwap() bool {
	b, _ := os.ReadFile("/proc/swaps")
	return bytes.Count(b, []byte("\n")) > 1
}

var programs = harness.Programs{C: []string{"guest/pressure.c"}}

// ---- sandboxes -----------------------------------------------------------------

// A host is a runtime, and the cgroups of the sandboxes that it runs.
type host struct {
	*harness.Runtime
	// cgroup is what their names begin with, or the name of the one that they are in.
	cgroup string
}

// pod puts the sandboxes that are started from now on into one cgroup with a limit in
// bytes.
func (h *host) pod(t testing.TB, limit int64) {
	t.Helper()
	dir, file := memoryTop()
	if file == limitV2 {
		// It may be on already.
		_ = os.WriteFile(filepath.Join(dir, "cgroup.subtree_control"), []byte("+memory"), 0)
	}
	if err := os.Mkdir(filepath.Join(dir, h.cgroup+"pod"), 0o755); err != nil {
		t.Fatal(err)
	}
	h.setLimit(t, "pod", limit)
	h.cgroup += "pod/"
}

// setLimit changes a cgroup's limit in bytes; 0 is none. Version 1 refuses one that is
// below what is used.
func (h *host) setLimit(t testing.TB, name string, limit int64) {
	t.Helper()
	dir, file := memoryTop()
	value := strconv.FormatInt(limit, 10)
	switch {
	case limit == 0 && file == limitV1:
		value = "-1"
	case limit == 0:
		value = "max"
	}
	var err error
	for range 50 {
		if err = os.WriteFile(filepath.Join(dir, h.cgroup+name, file), []byte(value), 0); err == nil {
			return
		}
		time.Sleep(100 * time.Millisecond)
	}
	t.Fatal(err)
}

// hosts counts them.
var hosts int

// newHost returns a host that is gone when the test has ended.
func newHost(t testing.TB, binary string, flags ...string) *host {
	t.Helper()
	hosts++
	h := &host{cgroup: fmt.Sprintf("%s%d-", ownPrefix, hosts)}
	h.Runtime = harness.NewRuntime(t, harness.Options{
		Binary:    binary,
		Flags:     append([]string{"--ignore-cgroups=false"}, flags...),
		Logs:      harness.AllLogs,
		Patience:  time.Minute,
		Leftovers: h.removeCgroups,
	})
	return h
}

// removeCgroups removes what runsc did not, and returns what remains. A process that
// was just killed may be in a cgroup for a moment.
func (h *host) removeCgroups() (left []string) {
	for range 50 {
		if left = cgroups(strings.TrimSuffix(h.cgroup, "/") + "*"); len(left) == 0 {
			return nil
		}
		for _, dir := range left {
			removeCgroup(dir)
		}
		time.Sleep(20 * time.Millisecond)
	}
	return left
}

// bundle writes the bundle of a sandbox with a cgroup of its own and a limit in bytes,
// or 0.
func (h *host) bundle(t testing.TB, id string, limit int64) string {
	t.Helper()
	dir := harness.Bundle(t, fleet.Spec{
		Rootfs:         "/",
		ReadonlyRootfs: true,
		Args:           []string{programs.Path(t, "pressure")},
		Hostname:       "pressure",
		Mounts:         []fleet.Mount{{Target: "/tmp", Options: []string{"mode=1777"}}},
		MemoryLimit:    limit,
	})
	if err := setCgroup(filepath.Join(dir, "config.json"), "/"+h.cgroup+id); err != nil {
		t.Fatal(err)
	}
	return dir
}

// setCgroup has the container of a bundle run in a cgroup, without swap.
func setCgroup(config, path string) error {
	b, err := os.ReadFile(config)
	if err != nil {
		return err
	}
	var s specs.Spec
	if err := json.Unmarshal(b, &s); err != nil {
		return err
	}
	s.Linux.CgroupsPath = path
	if r := s.Linux.Resources; r != nil && r.Memory != nil && hasSwap() {
		r.Memory.Swap = r.Memory.Limit
	}
	if b, err = json.MarshalIndent(&s, "", "  "); err != nil {
		return err
	}
	return os.WriteFile(config, b, 0o644)
}

// A guest is a running program that answers lines.
type guest struct {
	t     testing.TB
	sb    *fleet.Sandbox
	limit int64
	began time.Time
}

// start runs the program under a limit in bytes, or 0, until it says that it is ready.
func (h *host) start(t testing.TB, id string, limit int64) *guest {
	t.Helper()
	return &guest{t, h.Start(t, id, h.bundle(t, id, limit)), limit, time.Now()}
}

// restore starts a clone of the program under a limit in bytes.
func (h *host) restore(t testing.TB, id string, limit int64, image string) *guest {
	t.Helper()
	return &guest{t, h.Clone(t, id, h.bundle(t, id, limit), image), limit, time.Now()}
}

// ask has the guest do something within a minute.
func (g *guest) ask(format string, args ...any) error {
	req := fmt.Sprintf(format, args...)
	reply, err := g.sb.Request(harness.Within(g.t, time.Minute), req)
	if err != nil {
		return fmt.Errorf("%s, %q after %v: %w", g.sb.ID(), req, time.Since(g.began).Round(time.Millisecond), err)
	}
	if reply != "OK" {
		return fmt.Errorf("%s, %q: %s", g.sb.ID(), req, reply)
	}
	return nil
}

func (g *guest) must(format string, args ...any) {
	g.t.Helper()
	if err := g.ask(format, args...); err != nil {
		g.t.Fatal(err)
	}
}

func (g *guest) stats() control.Stats {
	g.t.Helper()
	return harness.Stats(g.t, g.sb)
}

// evicted waits until next to nothing of the guest's memory is uncompressed.
func (g *guest) evicted() {
	g.t.Helper()
	harness.Eventually(g.t, 30*time.Second, 50*time.Millisecond, g.sb.ID()+" has been evicted", func() error {
		if resident := g.stats().ResidentBytes; resident >= 4*mib {
			return fmt.Errorf("%d MiB are in memory", resident/mib)
		}
		return nil
	})
}

// end ends the guest in order and removes the sandbox. touched is how much memory it
// has used, in MiB.
func (g *guest) end(touched int) control.Stats {
	g.t.Helper()
	took := time.Since(g.began)
	s := g.stats()
	harness.Check(g.t, g.sb)
	ctx := harness.Within(g.t, time.Minute)
	if err := g.sb.WriteLine(ctx, "quit"); err != nil {
		g.t.Error(err)
	}
	if code, err := g.sb.Wait(ctx); err != nil || code != 0 {
		g.t.Errorf("%s ended with %d, %v", g.sb.ID(), code, err)
	}
	harness.Delete(g.t, g.sb)
	addRow(g.t, g.limit, touched, took, "lives", &s.Pressure)
	return s
}

// pressed is end for a guest that its limit has put under pressure.
func (g *guest) pressed(touched int) {
	g.t.Helper()
	s := g.end(touched)
	g.t.Logf("%+v; of %d MiB, %d are in memory and %d in the store", s.Pressure, s.GuestBytes/mib, s.ResidentBytes/mib, s.StoreBytes/mib)
	if p := s.Pressure; p.Evictions == 0 || p.LimitBytes != uint64(g.limit) || p.UsedBytes == 0 || p.UsedBytes > p.LimitBytes {
		g.t.Errorf("%s: %+v", g.sb.ID(), p)
	}
	if s.ChecksumFailures != 0 {
		g.t.Errorf("%s: %d checksum failures", g.sb.ID(), s.ChecksumFailures)
	}
}

// killed has the guest do what it has too little memory for, and checks that it is
// killed for that and how runsc says so. It returns what runsc says.
func (g *guest) killed(touched int, format string, args ...any) string {
	g.t.Helper()
	err := g.ask(format, args...)
	if err == nil {
		g.t.Fatalf("%s lives after %q under a limit of %d MiB", g.sb.ID(), fmt.Sprintf(format, args...), g.limit/mib)
	}
	code, werr := g.sb.Wait(harness.Within(g.t, time.Minute))
	took := time.Since(g.began)
	if werr != nil || code != killedCode {
		g.t.Errorf("%s ended with %d, %v, want %d: %v", g.sb.ID(), code, werr, killedCode, err)
	}
	if took > killedWithin {
		g.t.Errorf("%s was killed after %v, want %v at most", g.sb.ID(), took, killedWithin)
	}
	msg := g.sb.Stderr()
	harness.Delete(g.t, g.sb)
	addRow(g.t, g.limit, touched, took, "killed", nil)
	return msg
}

const (
	// killedCode is what `runsc run` ends with if the sandbox was killed.
	killedCode = 128 + int(syscall.SIGKILL)
	// killedWithin is how long that may take.
	killedWithin = time.Minute
)

// ---- the table -------------------------------------------------------------------

var table struct {
	sync.Mutex
	rows []string
}

// addRow notes what became of a sandbox. limit is in bytes, touched in MiB.
func addRow(t testing.TB, limit int64, touched int, took time.Duration, outcome string, p *control.Pressure) {
	what := "none"
	if limit != 0 {
		what = strconv.FormatInt(limit/mib, 10)
	}
	row := fmt.Sprintf("%s\t%s\t%d\t%.1f\t%s\t", t.Name(), what, touched, took.Seconds(), outcome)
	if p != nil {
		row += fmt.Sprintf("%d\t%.1f\t", p.Evictions, float64(p.ThrottledNS)/1e9)
	} else {
		row += "\t\t"
	}
	table.Lock()
	defer table.Unlock()
	table.rows = append(table.rows, row)
}

func printTable() {
	table.Lock()
	defer table.Unlock()
	if len(table.rows) == 0 {
		return
	}
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "test\tlimit MiB\ttouched MiB\tseconds\toutcome\tevictions\tthrottled s\t")
	for _, r := range table.rows {
		fmt.Fprintln(w, r)
	}
	w.Flush()
}
