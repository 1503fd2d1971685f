package harness

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"runsc-agentzip/pkg/fleet"
)

// All suites take these, so that one command line serves them all.
var (
	runtimeFlag = flag.String("runtime", envOr("AGENTZIP_RUNTIME", "bin/runsc-agentzip"),
		"the runsc under test; a relative path is taken from the top of the repository")
	stockFlag = flag.String("stock", envOr("AGENTZIP_STOCK", "bin/runsc-stock"),
		"an unpatched runsc of the same version, for what compares with one")
	requireFlag = flag.Bool("require", os.Getenv("AGENTZIP_REQUIRE") != "",
		"fail, rather than skip, where something that a test needs is missing")

	seedFlag *uint64
)

func envOr(name, def string) string {
	if v := os.Getenv(name); v != "" {
		return v
	}
	return def
}

// SeedFlag adds the flag -seed to a suite. Once Main runs it is not 0.
func SeedFlag() *uint64 {
	seedFlag = flag.Uint64("seed", 0, "seed of what is random (0: a new one each time)")
	return seedFlag
}

// suite is the name that Main was given: a part of the names of what is made.
var suite string

// Main runs the tests of the suite with that name and returns what to exit with.
func Main(m *testing.M, name string) int {
	suite = name
	if !flag.Parsed() {
		flag.Parse()
	}
	if seedFlag != nil && *seedFlag == 0 {
		*seedFlag = uint64(time.Now().UnixNano())%1_000_000 + 1
	}
	if os.Geteuid() == 0 {
		reclaim()
	}
	// On SIGTERM the go command may go first, and the pipe that we print into breaks:
	// that must not end us amid the clean-up. Ignoring it would be inherited.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
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
	return code
}

// rootPrefix starts the path of the folder of every runtime of the suite.
func rootPrefix() string {
	if suite == "" {
		panic("harness: TestMain does not call Main")
	}
	return "/run/agentzip-" + suite + "-"
}

// reclaim removes what runs of the suite have left that were killed.
func reclaim() {
	stale, _ := filepath.Glob(rootPrefix() + "*")
	for _, dir := range stale {
		if err := fleet.Reclaim(dir); err != nil && !errors.Is(err, fleet.ErrInUse) {
			fmt.Fprintf(os.Stderr, "reclaiming %s: %v\n", dir, err)
		}
	}
	removeAbandoned()
}

// RepoPath returns the path of what lies at a path relative to the top of the
// repository. An absolute path is itself.
func RepoPath(path string) string {
	if filepath.IsAbs(path) {
		return path
	}
	dir, err := os.Getwd()
	if err != nil {
		return path
	}
	for d := dir; d != "/"; d = filepath.Dir(d) {
		if _, err := os.Stat(filepath.Join(d, "go.mod")); err == nil {
			return filepath.Join(d, path)
		}
	}
	return filepath.Join(dir, path)
}

// Skip ends a test for which something is missing: it is skipped, and with -require it
// fails.
func Skip(t testing.TB, format string, args ...any) {
	t.Helper()
	if *requireFlag {
		t.Fatalf(format, args...)
	}
	t.Skipf(format, args...)
}

// NeedRoot skips a test that is not run as root.
func NeedRoot(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		Skip(t, "sandboxes need root: run the tests as root")
	}
}
