// Package harness is what the end-to-end suites below test/ have in common: the flags
// that name a runsc, what is missing and so skips a test, guest programs, bundles, and
// runtimes whose sandboxes do not outlive a test. What a suite is about is its own.
//
// A suite begins with
//
//	func TestMain(m *testing.M) { os.Exit(harness.Main(m, "NAME")) }
//
// and can be given -runtime, -stock and -require.
//
// # Clean-up
//
// What is made by NewRuntime, TempDir, CoveredTempDir and Programs, and what is given to
// AtExit, is gone when the test has ended, in the reverse order of its making: when it
// has passed, failed or been skipped, and when the suite gets SIGINT, SIGTERM or SIGHUP.
// A test fails if a sandbox's process, mount or folder is left then. Against SIGKILL,
// and against the panic at go test's -timeout, nothing can be done at once: sandboxes
// end with the process that started them, and Main removes the folders and mounts that
// the suite's last run has left, and not those of one that runs. A folder in which
// something is mounted that cannot be unmounted stays. The logs of a failed test are what
// is kept on purpose, below out/NAME-failed.
package harness
