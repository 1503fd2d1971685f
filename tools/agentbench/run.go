package main

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"time"

	"runsc-agentzip/pkg/fleet"
	"runsc-agentzip/tools/agentbench/report"
	"runsc-agentzip/tools/agentbench/workload"
)

const runUsage = `usage: agentbench run [flags]

Measures what sandboxes of AI agents cost under several systems, side by side:
memory, step times, restores, processor time. For each workload it checkpoints
one sandbox; then each system in turn restores N clones from that image, which
take their steps at their own pace, with waits between as a model makes them.
Same steps and same waits for every system, whose answers must be equal.

systems:
%s
groups of systems: all; ablation (the runtime under test, whole and with each
part switched off)

workloads:
%s
The sandboxes of an episode of the runtime under test share a page pool, which is
started before the first of them and ended after the last.

Nothing else should run meanwhile. The system linux sets up swap for as long as
it is measured, and refuses to if the host has swap in use.

flags:
`

// runConfig is what the flags say.
type runConfig struct {
	workloads    []workload.Workload
	systems      []systemKind
	clones       []int
	steps        int
	repetitions  int
	seed         uint64
	waitScale    float64
	trace        string
	json, html   string
	runtime      string
	stock        string
	runtimeFlags []string
	work         string
	rootfs       rootfsOptions
	rootfsDir    string
	rootfsType   string
	stepTimeout  time.Duration
	// skip: leave out systems that the machine cannot run.
	skip    bool
	verbose bool
}

func parseRunFlags(args []string, stderr io.Writer) (runConfig, error) {
	var c runConfig
	fs := flag.NewFlagSet("run", flag.ContinueOnError)
	fs.SetOutput(stderr)
	fs.Usage = func() {
		var systems, workloads strings.Builder
		for _, s := range systemKinds {
			fmt.Fprintf(&systems, "  %-20s %s\n", s.name, s.summary)
		}
		all, _ := parseWorkloads("all")
		for _, w := range all {
			fmt.Fprintf(&workloads, "  %-20s %s\n", w.Name, w.Summary)
		}
		fmt.Fprintf(stderr, runUsage, &systems, &workloads)
		fs.PrintDefaults()
	}
	workloads := fs.String("workload", "swe", "workloads, `names` separated by commas, or all")
	systems := fs.String("systems", strings.Join([]string{report.Stock, linuxName, judgedName}, ","), "systems to compare, `names` separated by commas")
	clones := fs.String("clones", "8", "sandboxes alive together; several `numbers` separated by commas are measured one after the other")
	fs.IntVar(&c.steps, "steps", 20, "tool steps each clone takes, besides those it begins with; of a trace, all by default")
	fs.IntVar(&c.repetitions, "repetitions", 1, "how often everything is measured, each time with other steps")
	fs.Uint64Var(&c.seed, "seed", 1, "seed of steps and waits; repetition r uses seed+r")
	fs.Float64Var(&c.waitScale, "wait-scale", 1, "`factor` that waits are multiplied by")
	fs.StringVar(&c.trace, "trace", "", "replay this JSON `file` of steps and waits on the workload that it names, instead of --workload (format: tools/agentbench/workload/trace.go)")
	fs.StringVar(&c.json, "json", "out/run.json", "write the results and all samples to this `file`; compressed if its name ends in .gz, none if empty. An incomplete run writes to NAME.partial.json instead")
	fs.StringVar(&c.html, "html", "out/run.html", "write a page with plots to this `file`, none if empty")
	fs.StringVar(&c.runtime, "runtime", "bin/runsc-agentzip", "runsc `binary` to judge; it also makes the checkpoints")
	fs.StringVar(&c.stock, "stock", "bin/runsc-stock", "stock runsc `binary` to compare with")
	runtimeFlags := fs.String("runtime-flags", "", "extra global `flags` for --runtime, separated by spaces")
	fs.StringVar(&c.work, "work", "out/agentbench", "`directory` for images and snapshots; emptied at the end")
	fs.StringVar(&c.rootfsDir, "rootfs-dir", "out", "`directory` of the guests' root file systems; made if missing, and kept")
	fs.StringVar(&c.rootfsType, "rootfs-type", rootfsFolder, "give guests their root file system as a folder, through a gofer, or as an erofs image, without: `type` folder or erofs")
	fs.StringVar(&c.rootfs.mirror, "mirror", "", "Debian archive `URL` (default: what this machine's apt uses)")
	fs.StringVar(&c.rootfs.suite, "suite", "", "Debian `release` for the root file systems (default: this machine's)")
	fs.BoolVar(&c.rootfs.install, "install", true, "install debootstrap with apt-get if it is missing")
	fs.DurationVar(&c.stepTimeout, "step-timeout", 5*time.Minute, "a step that takes longer fails the run")
	fs.BoolVar(&c.skip, "skip-unavailable", false, "leave out the system linux where the machine cannot run it, instead of failing")
	fs.BoolVar(&c.verbose, "v", false, "show runsc commands and what sandboxes write to stderr")
	if err := fs.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return c, err
		}
		return c, errUsage
	}
	c.runtimeFlags = strings.Fields(*runtimeFlags)
	err := func() error {
		switch {
		case fs.NArg() > 0:
			return fmt.Errorf("unexpected argument %q", fs.Arg(0))
		case c.steps < 1:
			return fmt.Errorf("--steps must be at least 1, not %d", c.steps)
		case c.repetitions < 1:
			return fmt.Errorf("--repetitions must be at least 1, not %d", c.repetitions)
		case !(c.waitScale > 0) || math.IsInf(c.waitScale, 0):
			return fmt.Errorf("--wait-scale must be positive, not %v", c.waitScale)
		case c.stepTimeout <= 0:
			return fmt.Errorf("--step-timeout must be positive, not %v", c.stepTimeout)
		}
		given := make(map[string]bool)
		fs.Visit(func(f *flag.Flag) { given[f.Name] = true })
		var err error
		if c.trace != "" {
			if given["workload"] {
				return errors.New("--trace names its workload itself: leave --workload out")
			}
			if !given["steps"] {
				c.steps = 0 // all of them
			}
			w, err := workload.LoadTrace(c.trace)
			if err != nil {
				return fmt.Errorf("--trace: %w", err)
			}
			c.workloads = []workload.Workload{w}
		} else if c.workloads, err = parseWorkloads(*workloads); err != nil {
			return err
		}
		if c.systems, err = parseSystems(*systems); err != nil {
			return err
		}
		if types, err := parseRootfsTypes(c.rootfsType); err != nil {
			return err
		} else if len(types) != 1 {
			return errors.New("--rootfs-type must be one of folder and erofs; run twice and compare")
		}
		c.clones, err = parseClones(*clones)
		return err
	}()
	if err != nil {
		fmt.Fprintf(stderr, "agentbench run: %v\n", err)
		return c, errUsage
	}
	return c, nil
}

// parseClones translates a list of numbers of clones.
func parseClones(list string) ([]int, error) {
	var out []int
	for s := range strings.SplitSeq(list, ",") {
		n, err := strconv.Atoi(strings.TrimSpace(s))
		if err != nil || n < 1 {
			return nil, fmt.Errorf("--clones must be numbers from 1 on, separated by commas, not %q", list)
		}
		if !slices.Contains(out, n) {
			out = append(out, n)
		}
	}
	return out, nil
}

// contender is a system that takes part in a run.
type contender struct {
	systemKind
	rt *fleet.Runtime
}

// benchmark is one run.
type benchmark struct {
	cfg      runConfig
	progress *progress

	dir *runDir
	// swap is the swap device that exists now, if any.
	swap       swapHost
	contenders []*contender
	// makers make the checkpoints, by whether they are judged. versions are
	// those of the two binaries; only equal ones restore each other's images.
	makers   map[bool]*fleet.Runtime
	versions map[bool]string
	work     *preparedWorkload
	answers  *answerSheet
	kept     keptPart

	report *report.Report
}

func runRun(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	cfg, err := parseRunFlags(args, stderr)
	if err != nil {
		return err
	}
	if os.Geteuid() != 0 {
		return errors.New("sandboxes need root: run it as root, e.g. with sudo")
	}
	for _, path := range []string{cfg.json, cfg.html} {
		if path == "" {
			continue
		}
		// Not after an hour of measuring.
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
	}
	defer quietRuntime()()

	b := newBenchmark(cfg, args, stderr)
	err = b.run(ctx)
	if len(b.report.Episodes) > 0 {
		err = errors.Join(err, b.write(stdout))
	}
	if err != nil {
		return err
	}
	return verdict(b.report)
}

func newBenchmark(cfg runConfig, args []string, stderr io.Writer) *benchmark {
	return &benchmark{
		cfg: cfg, progress: newProgress(stderr),
		makers: make(map[bool]*fleet.Runtime), versions: make(map[bool]string), kept: make(keptPart),
		report: newReport(cfg, args),
	}
}

// run measures, removes everything but the report, and completes that.
func (b *benchmark) run(ctx context.Context) error {
	err := b.measure(ctx)
	cerr := b.cleanup()
	if cerr != nil {
		cerr = fmt.Errorf("cleaning up: %w", cerr)
		// What was measured is complete all the same.
		b.report.Problems = append(b.report.Problems, report.Problem{Text: cerr.Error()})
	}
	if ctx.Err() != nil {
		// How it broke off does not matter.
		err = interrupted(cerr)
		b.finish(err)
		return err
	}
	b.finish(err)
	return errors.Join(err, cerr)
}

// quietRuntime sets this program's Go runtime up for timing: the garbage
// collector runs when it is asked to (see collectGarbage) or much has piled up,
// and a goroutine that gets an answer does not wait for one that measures.
func quietRuntime() (restore func()) {
	percent := debug.SetGCPercent(-1)
	limit := debug.SetMemoryLimit(1 << 30)
	procs := runtime.GOMAXPROCS(runtime.NumCPU() + 2)
	return func() {
		debug.SetGCPercent(percent)
		debug.SetMemoryLimit(limit)
		runtime.GOMAXPROCS(procs)
	}
}

// verdict is an error if the answers differ or a check found something.
func verdict(r *report.Report) error {
	var errs []error
	if n := len(r.Mismatches); n > 0 {
		errs = append(errs, fmt.Errorf("%d answers differ from those of the reference system", n))
	}
	n := 0
	var first string
	for _, p := range r.Problems {
		if p.Fatal {
			if n++; n == 1 {
				first = fmt.Sprintf("%s x%d %s: %s", p.Workload, p.Clones, p.System, p.Text)
			}
		}
	}
	if n > 0 {
		errs = append(errs, fmt.Errorf("%d problems that no run should have, the first: %s", n, first))
	}
	return errors.Join(errs...)
}

func (b *benchmark) measure(ctx context.Context) error {
	if err := reclaimRuns(b.cfg.work, b.progress.say); err != nil {
		return err
	}
	// Before anything that takes long.
	if err := b.checkMemory(); err != nil {
		return err
	}
	var err error
	if b.dir, err = newRunDir(b.cfg.work); err != nil {
		return err
	}
	if err := b.checkSystems(ctx); err != nil {
		return err
	}
	if err := b.open(ctx); err != nil {
		return err
	}
	rootfs := make(map[string]string)
	for _, w := range b.cfg.workloads {
		if rootfs[w.Name], err = b.rootfs(ctx, w); err != nil {
			return err
		}
	}

	var workloads, systems []string
	for _, w := range b.cfg.workloads {
		workloads = append(workloads, w.Name)
	}
	for _, s := range b.cfg.systems {
		systems = append(systems, s.name)
	}
	b.answers = newAnswerSheet(referenceSystem(systems))
	for i, key := range planEpisodes(workloads, systems, b.cfg.clones, b.cfg.repetitions) {
		if b.work == nil || b.work.Name != key.Workload {
			w := b.cfg.workloads[slices.Index(workloads, key.Workload)]
			if err := b.prepare(ctx, w, rootfs[w.Name]); err != nil {
				return fmt.Errorf("template of %s: %w", w.Name, err)
			}
		}
		sys := b.contenders[slices.Index(systems, key.System)]
		if err := b.episode(ctx, key, i, sys); err != nil {
			return err
		}
	}
	return nil
}

// checkMemory makes sure that the clones fit into memory. No system is given
// credit for what it may save.
func (b *benchmark) checkMemory() error {
	host, err := fleet.ReadHostMemory()
	if err != nil {
		return err
	}
	w := largest(b.cfg.workloads)
	if err := checkFits(host.Available, w.EstimatedBytes+overheadEstimate, slices.Max(b.cfg.clones)); err != nil {
		return fmt.Errorf("workload %s: %w", w.Name, err)
	}
	return nil
}

// largest is the workload whose clones need the most: what fits with it fits with
// all.
func largest(workloads []workload.Workload) workload.Workload {
	return slices.MaxFunc(workloads, func(a, b workload.Workload) int { return cmp.Compare(a.EstimatedBytes, b.EstimatedBytes) })
}

// checkSystems makes sure that the machine can run all systems, or leaves out
// those that it cannot, as the user wants it.
func (b *benchmark) checkSystems(ctx context.Context) error {
	var left []systemKind
	for _, s := range b.cfg.systems {
		if s.swaps {
			if err := b.probeSwap(ctx); err != nil {
				// What could not be undone spoils the other systems' figures.
				if !b.cfg.skip || ctx.Err() != nil || b.swapLeft() {
					return fmt.Errorf("system %s: %w", s.name, err)
				}
				b.progress.say("leaving out the system %s: %v", s.name, err)
				b.report.Problems = append(b.report.Problems, report.Problem{Key: report.Key{System: s.name}, Text: fmt.Sprintf("left out: %v", err)})
				continue
			}
		}
		left = append(left, s)
	}
	if len(left) == 0 {
		return errors.New("no system is left that this machine can run")
	}
	b.cfg.systems = left
	return nil
}

// open makes the runtimes of all systems.
func (b *benchmark) open(ctx context.Context) error {
	newRuntime := func(name string, judged bool, flags []string) (*fleet.Runtime, error) {
		root, err := b.dir.reserveRoot(name)
		if err != nil {
			return nil, err
		}
		o := fleet.Options{Binary: b.cfg.stock, Root: root, Flags: flags}
		if judged {
			o.Binary, o.Flags = b.cfg.runtime, slices.Concat(b.cfg.runtimeFlags, flags)
		}
		if b.cfg.verbose {
			o.Log = b.progress
		}
		return fleet.New(o)
	}
	sums := make(map[string]string)
	hasPool, poolKnown := false, false
	for _, k := range b.cfg.systems {
		if b.makers[k.judged] == nil {
			rt, err := newRuntime("template-"+map[bool]string{false: "stock", true: "runtime"}[k.judged], k.judged, nil)
			if err != nil {
				return err
			}
			b.makers[k.judged] = rt
			if b.versions[k.judged], err = rt.Version(ctx); err != nil {
				return err
			}
		}
		rt, err := newRuntime(k.name, k.judged, k.flags)
		if err != nil {
			return err
		}
		if k.pooled && !poolKnown {
			if hasPool, err = rt.HasFlag(ctx, poolFlag); err != nil {
				return err
			}
			poolKnown = true
			if !hasPool {
				text := noPoolText(b.cfg.runtime)
				b.progress.say("note: %s", text)
				b.report.Problems = append(b.report.Problems, report.Problem{Text: text})
			}
		}
		k.pooled = k.pooled && hasPool
		b.contenders = append(b.contenders, &contender{k, rt})
		if sums[rt.Binary()] == "" {
			if sums[rt.Binary()], err = sumOf(rt.Binary()); err != nil {
				return err
			}
		}
		flags := slices.Concat(fleet.DefaultFlags, k.flags)
		if k.judged {
			flags = slices.Concat(fleet.DefaultFlags, b.cfg.runtimeFlags, k.flags)
		}
		if k.pooled {
			// Without the path, so that the same system is the same in all reports.
			flags = append(flags, poolFlags("SOCKET")...)
		}
		b.report.Systems = append(b.report.Systems, report.System{
			Name: k.name, Summary: k.summary, Binary: rt.Binary(), Version: b.versions[k.judged], SHA256: sums[rt.Binary()], Flags: flags, Ablation: k.ablation, Pool: k.pooled,
		})
	}
	return nil
}

// startPool starts the page pool of an episode.
func (b *benchmark) startPool(ctx context.Context, sys *contender) (*pagePool, error) {
	var log io.Writer
	if b.cfg.verbose {
		log = b.progress
	}
	return startPagePool(ctx, sys.rt.Binary(), poolDir(b.dir.path), log)
}

// noPoolText says that a runtime knows no page pool.
func noPoolText(binary string) string {
	return fmt.Sprintf("%s has no page pool (no flag --%s): its sandboxes run without one and share only their template", binary, poolFlag)
}

// sumOf is the SHA-256 of a file.
func sumOf(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// episode runs one and adds what it measured to the report.
func (b *benchmark) episode(ctx context.Context, key report.Key, order int, sys *contender) error {
	e := &episode{r: b, key: key, sys: sys, work: b.work}
	if err := e.run(ctx); err != nil {
		return fmt.Errorf("%s: %w", e, err)
	}
	e.out.Order = order
	r := b.report
	r.Episodes = append(r.Episodes, e.out.Episode)
	r.Steps = append(r.Steps, e.out.steps...)
	r.Memory = append(r.Memory, e.out.memory...)
	r.Timeline = append(r.Timeline, e.out.points...)
	r.Problems = append(r.Problems, e.out.problems...)
	maps.Copy(b.kept, e.out.kept)
	var seconds, owned []float64
	for _, s := range e.out.steps {
		seconds = append(seconds, s.Seconds)
	}
	for _, m := range e.out.memory {
		owned = append(owned, float64(m.OwnedBytes))
	}
	// What a system that swaps owns is estimated later.
	held := ""
	if !sys.swaps {
		held = fmt.Sprintf("owned %s a clone, ", mib(uint64(mean(owned))))
	}
	b.progress.say("%s: %d steps in %.0f s, median %.2f s, %speak %s", e, len(seconds), e.out.Seconds, quantile(seconds, 0.5), held, mib(e.out.PeakBytes))
	for _, p := range e.out.problems {
		b.progress.say("%s: %s", e, p.Text)
	}
	differ := b.answers.add(key, kindsOf(e.out.steps), e.out.answers)
	r.Mismatches = append(r.Mismatches, differ...)
	for i, m := range differ {
		if i == 3 {
			b.progress.say("... and %d more answers differ", len(differ)-i)
			break
		}
		b.progress.say("DIFFERENT ANSWER: %s x%d %s clone %d, step %d (%s)", m.Workload, m.Clones, m.System, m.Clone, m.Index, m.Kind)
	}
	return nil
}

// finish computes what follows from the samples.
func (b *benchmark) finish(err error) {
	r := b.report
	r.Seconds = time.Since(b.progress.began).Seconds()
	if err != nil {
		r.Error = err.Error()
	}
	pairMemory(r, b.kept)
	pairFaults(r)
	r.Summarize()
	maps.Copy(r.Definitions, sampleDefinitions)
}

// write stores and shows the report. One that is incomplete leaves the files of an
// earlier one alone.
func (b *benchmark) write(stdout io.Writer) error {
	var errs []error
	for _, f := range []struct {
		path, what string
		write      func(string) error
	}{
		{b.cfg.json, "results and all samples", b.report.Write},
		{b.cfg.html, "page with plots", b.report.WriteHTML},
	} {
		if f.path == "" {
			continue
		}
		path, what := f.path, f.what
		if b.report.Error != "" {
			path, what = partialPath(path), what+", incomplete"
		}
		if err := f.write(path); err != nil {
			errs = append(errs, err)
			continue
		}
		b.progress.say("%s: %s", what, path)
	}
	return errors.Join(append(errs, b.report.Print(stdout, columns(stdout)))...)
}

// partialPath is where the report of a run that broke off goes.
func partialPath(path string) string {
	base, gz := strings.CutSuffix(path, ".gz")
	ext := filepath.Ext(base)
	base = strings.TrimSuffix(base, ext) + ".partial" + ext
	if gz {
		base += ".gz"
	}
	return base
}

// cleanup ends every sandbox and removes every file of the run.
func (b *benchmark) cleanup() error {
	var errs []error
	for _, c := range b.contenders {
		errs = append(errs, c.rt.Close())
	}
	for _, rt := range b.makers {
		errs = append(errs, rt.Close())
	}
	if b.dir == nil {
		return errors.Join(errs...)
	}
	// Again, if an episode failed to: no sandbox holds on to it any more.
	errs = append(errs, b.removeSwap())
	var workErr error
	if b.work != nil {
		workErr = b.work.close()
	}
	return errors.Join(b.dir.end(errors.Join(errs...)), workErr)
}
