package pressure

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
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
)

var (
	runtimeFlag = flag.String("runtime", envOr("AGENTZIP_RUNTIME", "bin/runsc-agentzip"),
		"the runsc under test; a relative path is taken from the top of the repository")
	stockFlag = flag.String("stock", envOr("AGENTZIP_STOCK", "bin/runsc-stock"),
		"an unpatched runsc, to compare with; what needs it is skipped if it is missing")
	requireFlag = flag.Bool("require", os.Getenv("AGENTZIP_REQUIRE") != "",
		"fail, rather than skip, where something that a test needs is missing")
)

func envOr(name, def string) string {
	if v := os.Getenv(name); v != "" {
		return v
	}
	return def
}

const mib = 1 << 20

// prefix starts the name of every other folder and cgroup that the tests make, so that
// what a killed test run left behind can be told from everything else. The process id
// of the tests follows. rootPrefix is the same for the folder of a runtime.
const (
	prefix     = "agentzip-pressure-"
	rootPrefix = "/run/" + prefix
)

// guestParent is where the guest program is. It is not below /tmp, which in the sandbox
// is another.
const guestParent = "/var/tmp"

// ownPrefix starts the names of what these tests make.
var ownPrefix = fmt.Sprintf("%s%d-", prefix, os.Getpid())

// ownerGone tells whether the tests that have made a folder or cgroup have ended.
func ownerGone(path string) bool {
	pid, _, _ := strings.Cut(strings.TrimPrefix(filepath.Base(path), prefix), "-")
	_, err := os.Stat(filepath.Join("/proc", pid))
	return errors.Is(err, os.ErrNotExist)
}

func repoRoot() string {
	dir, err := os.Getwd()
	if err != nil {
		return "."
	}
	for d := dir; d != "/"; d = filepath.Dir(d) {
		if _, err := os.Stat(filepath.Join(d, "go.mod")); err == nil {
			return d
		}
	}
	return dir
}

// repoPath resolves a path that was given from the top of the repository.
func repoPath(p string) string {
	if filepath.IsAbs(p) {
		return p
	}
	return filepath.Join(repoRoot(), p)
}

func TestMain(m *testing.M) {
	flag.Parse()
	if os.Geteuid() == 0 {
		// A run that was killed could not clean up.
		stale, _ := filepath.Glob(rootPrefix + "*")
		for _, dir := range stale {
			if err := fleet.Reclaim(dir); err != nil && !errors.Is(err, fleet.ErrInUse) {
				fmt.Fprintf(os.Stderr, "reclaiming %s: %v\n", dir, err)
			}
		}
		for _, dir := range cgroups(prefix + "*") {
			if ownerGone(dir) {
				removeCgroup(dir)
			}
		}
		for _, parent := range []string{os.TempDir(), guestParent} {
			dirs, _ := filepath.Glob(filepath.Join(parent, prefix+"*"))
			for _, dir := range dirs {
				if ownerGone(dir) {
					_ = os.RemoveAll(dir)
				}
			}
		}
	}
	// Neither Ctrl-C nor a terminated CI job leaves sandboxes behind.
	sigs := make(chan os.Signal, 1)
	signal.Notify(sigs, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	go func() {
		s := <-sigs
		fmt.Fprintf(os.Stderr, "%v: removing sandboxes\n", s)
		undoAll()
		os.Exit(1)
	}()
	code := m.Run()
	undoAll()
	printTable()
	os.Exit(code)
}

// ---- what must not outlive the tests ----------------------------------------

var undo struct {
	sync.Mutex
	fns []func()
}

// atExit has f run once, at the end of the test or when the tests are
// interrupted; the last is the first to run. Without a test it is at the end of all.
func atExit(t testing.TB, f func()) {
	once := sync.OnceFunc(f)
	undo.Lock()
	undo.fns = append(undo.fns, once)
	undo.Unlock()
	if t != nil {
		t.Cleanup(once)
	}
}

func undoAll() {
	undo.Lock()
	defer undo.Unlock()
	for i := len(undo.fns) - 1; i >= 0; i-- {
		undo.fns[i]()
	}
	undo.fns = nil
}

func tempDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", ownPrefix)
	if err != nil {
		t.Fatal(err)
	}
	atExit(t, func() { os.RemoveAll(dir) })
	return dir
}

func skip(t testing.TB, format string, args ...any) {
	t.Helper()
	if *requireFlag {
		t.Fatalf(format, args...)
	}
	t.Skipf(format, args...)
}

func deadline(d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	// The timer goes with the deadline, and a test ends before long.
	_ = cancel
	return ctx
}

// ---- what there is -------------------------------------------------------------

// agentzip returns the runsc to test, or skips.
func agentzip(t testing.TB) string {
	t.Helper()
	path := repoPath(*runtimeFlag)
	if !usable(t, path, "make build", "-runtime") {
		skip(t, "%s knows no agentzip: a stock runsc?", path)
	}
	return path
}

// stock returns the runsc to compare with, or skips.
func stock(t testing.TB) string {
	t.Helper()
	path := repoPath(*stockFlag)
	if usable(t, path, "make stock", "-stock") {
		skip(t, "%s is no stock runsc", path)
	}
	return path
}

// usable tells whether a runsc is ours. It skips where sandboxes with limits cannot run.
func usable(t testing.TB, path, target, name string) (ours bool) {
	t.Helper()
	if os.Geteuid() != 0 {
		skip(t, "sandboxes need root: run the tests as root")
	}
	if err := memoryController(); err != nil {
		skip(t, "no sandbox can have a memory limit here: %v", err)
	}
	out, err := exec.Command(path, "flags").CombinedOutput()
	if errors.Is(err, os.ErrNotExist) {
		skip(t, "%s does not exist: run `%s` or name a runsc with %s", path, target, name)
	}
	if err != nil {
		t.Fatalf("%s flags: %v: %s", path, err, out)
	}
	return bytes.Contains(out, []byte("-agentzip-idle"))
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

// program returns the folder with the guest program.
var program = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp(guestParent, ownPrefix)
	if err != nil {
		return "", err
	}
	atExit(nil, func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		return "", err
	}
	b, err := exec.Command("gcc", "-O2", "-Wall", "-Wextra", "-Werror", "-I../integrity/guest", "-static", "-pthread",
		"-o", filepath.Join(dir, "pressure"), "guest/pressure.c").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("compiling the guest (gcc and libc6-dev are needed): %w\n%s", err, b)
	}
	return dir, nil
})

// ---- sandboxes -----------------------------------------------------------------

// A host is a runtime, and the cgroups of the sandboxes that it runs.
type host struct {
	*fleet.Runtime
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

// newHost returns a host that is closed when the test ends. Its logs are kept under
// out/ if the test fails.
func newHost(t testing.TB, binary string, flags ...string) *host {
	t.Helper()
	root, err := os.MkdirTemp(filepath.Dir(rootPrefix), filepath.Base(rootPrefix))
	if err != nil {
		t.Fatal(err)
	}
	logs := tempDir(t)
	logFile, err := os.Create(filepath.Join(logs, "fleet.txt"))
	if err != nil {
		t.Fatal(err)
	}
	rt, err := fleet.New(fleet.Options{
		Binary: binary,
		Root:   root,
		Flags: append([]string{"--ignore-cgroups=false", "--debug", "--debug-log=" + logs + "/",
			"--panic-log=" + logs + "/panic.txt"}, flags...),
		Log: logFile,
	})
	if err != nil {
		os.RemoveAll(root)
		t.Fatal(err)
	}
	hosts++
	h := &host{rt, fmt.Sprintf("%s%d-", ownPrefix, hosts)}
	atExit(t, func() {
		if err := rt.Close(); err != nil {
			t.Errorf("cleaning up: %v", err)
		}
		if left := h.removeCgroups(); len(left) != 0 {
			t.Errorf("these cgroups remain: %q", left)
		}
		logFile.Close()
		if t.Failed() {
			dst := filepath.Join(repoRoot(), "out", "pressure-failed", strings.ReplaceAll(t.Name(), "/", "-"), filepath.Base(root))
			os.RemoveAll(dst)
			t.Logf("logs are in %s (%v)", dst, os.CopyFS(dst, os.DirFS(logs)))
		}
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
	if _, err := exec.LookPath("gcc"); err != nil {
		skip(t, "gcc is missing: apt-get install gcc libc6-dev")
	}
	prog, err := program()
	if err != nil {
		t.Fatal(err)
	}
	dir := tempDir(t)
	if err := fleet.WriteBundle(dir, fleet.Spec{
		Rootfs:         "/",
		ReadonlyRootfs: true,
		Args:           []string{filepath.Join(prog, "pressure")},
		Hostname:       "pressure",
		Mounts:         []fleet.Mount{{Target: "/tmp", Options: []string{"mode=1777"}}},
		MemoryLimit:    limit,
	}); err != nil {
		t.Fatal(err)
	}
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
	ctx := deadline(time.Minute)
	sb, err := h.Run(ctx, id, h.bundle(t, id, limit))
	if err != nil {
		t.Fatalf("starting %s: %v", id, err)
	}
	if line, err := sb.ReadLine(ctx); err != nil || line != "READY" {
		t.Fatalf("%s: %q, %v", id, line, err)
	}
	return &guest{t, sb, limit, time.Now()}
}

// restore starts a clone of the program under a limit in bytes.
func (h *host) restore(t testing.TB, id string, limit int64, image string) *guest {
	t.Helper()
	sb, err := h.Restore(deadline(time.Minute), id, h.bundle(t, id, limit), image)
	if err != nil {
		t.Fatalf("restoring %s: %v", id, err)
	}
	return &guest{t, sb, limit, time.Now()}
}

// ask has the guest do something within a minute.
func (g *guest) ask(format string, args ...any) error {
	req := fmt.Sprintf(format, args...)
	reply, err := g.sb.Request(deadline(time.Minute), req)
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
	s, err := g.sb.Stats(deadline(time.Minute))
	if err != nil {
		g.t.Fatalf("agentzip stats %s: %v", g.sb.ID(), err)
	}
	return s
}

// evicted waits until next to nothing of the guest's memory is uncompressed.
func (g *guest) evicted() {
	g.t.Helper()
	var resident uint64
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		if resident = g.stats().ResidentBytes; resident < 4*mib {
			return
		}
	}
	g.t.Fatalf("%s still has %d MiB in memory", g.sb.ID(), resident/mib)
}

// end ends the guest in order and removes the sandbox. touched is how much memory it
// has used, in MiB.
func (g *guest) end(touched int) control.Stats {
	g.t.Helper()
	took := time.Since(g.began)
	s := g.stats()
	if r, err := g.sb.Check(deadline(time.Minute)); err != nil || len(r.Problems) != 0 {
		g.t.Errorf("agentzip check %s: %v, %q", g.sb.ID(), err, r.Problems)
	}
	ctx := deadline(time.Minute)
	if err := g.sb.WriteLine(ctx, "quit"); err != nil {
		g.t.Error(err)
	}
	if code, err := g.sb.Wait(ctx); err != nil || code != 0 {
		g.t.Errorf("%s ended with %d, %v", g.sb.ID(), code, err)
	}
	g.delete()
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

func (g *guest) delete() {
	g.t.Helper()
	if err := g.sb.Delete(deadline(time.Minute)); err != nil {
		g.t.Errorf("deleting %s: %v", g.sb.ID(), err)
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
	code, werr := g.sb.Wait(deadline(time.Minute))
	took := time.Since(g.began)
	if werr != nil || code != killedCode {
		g.t.Errorf("%s ended with %d, %v, want %d: %v", g.sb.ID(), code, werr, killedCode, err)
	}
	if took > killedWithin {
		g.t.Errorf("%s was killed after %v, want %v at most", g.sb.ID(), took, killedWithin)
	}
	msg := g.sb.Stderr()
	g.delete()
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
