package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"runsc-agentzip/pkg/control"
	"runsc-agentzip/pkg/fleet"
)

const demoUsage = `usage: agentbench demo [flags]

Starts one sandbox with a Python tool server that holds a real working set,
checkpoints it, restores N sandboxes from the image under a stock runsc and N
under the runtime to judge, and takes each through the same tool steps with
waits between. If the two binaries are of different versions, which gVisor
does not let restore each other's images, each makes an image of its own from
the same tool server.

Sandboxes are driven in batches: all N of one system take their next step one
after the other, then that system waits, then it is the other system's turn,
and the order alternates from round to round. Both systems' sandboxes are alive
all the time where memory permits; otherwise one system runs after the other.
A batch begins only after the background work of the waiting sandboxes has died
down (bounded by --settle), so that eviction by one system is not charged to
the step times of the other. Eviction by sandboxes of the same system is.

The sandboxes of the runtime to judge share a page pool.

flags:
`

// demoConfig is what the flags say.
type demoConfig struct {
	toolServerConfig
	clones     int
	rounds     int
	wait       time.Duration
	settle     time.Duration
	json       string
	interleave string
}

func parseDemoFlags(args []string, stderr io.Writer) (demoConfig, error) {
	var c demoConfig
	fs, err := toolServerFlags("demo", demoUsage, &c.toolServerConfig, stderr)
	if err != nil {
		return c, err
	}
	fs.IntVar(&c.clones, "clones", 8, "sandboxes to restore under each runtime")
	fs.IntVar(&c.rounds, "rounds", 6, "tool steps each sandbox takes")
	fs.DurationVar(&c.wait, "wait", 3*time.Second, "how long sandboxes wait after each step")
	fs.DurationVar(&c.settle, "settle", 15*time.Second, "at most this long a batch waits for background work of idle sandboxes")
	fs.StringVar(&c.json, "json", "out/demo.json", "write the results and raw samples to this `file`")
	fs.StringVar(&c.interleave, "interleave", "auto", "keep both systems' sandboxes alive together: on, off or auto (if memory permits)")
	if err := parseFlags(fs, args); err != nil {
		return c, err
	}
	bad := func(format string, a ...any) (demoConfig, error) {
		fmt.Fprintf(stderr, "agentbench demo: "+format+"\n", a...)
		return c, errUsage
	}
	switch {
	case fs.NArg() > 0:
		return bad("unexpected argument %q", fs.Arg(0))
	case c.clones < 1:
		return bad("--clones must be at least 1, not %d", c.clones)
	case c.rounds < 1:
		return bad("--rounds must be at least 1, not %d", c.rounds)
	case c.wait < 0 || c.settle < 0 || c.stepTimeout <= 0:
		return bad("--wait and --settle must not be negative, --step-timeout must be positive")
	case c.interleave != "on" && c.interleave != "off" && c.interleave != "auto":
		return bad("--interleave must be on, off or auto, not %q", c.interleave)
	}
	return c, nil
}

// demo is one run.
type demo struct {
	cfg    demoConfig
	stderr io.Writer
	began  time.Time

	dir       *runDir
	bundle    string
	reference *fleet.GuestSnapshot
	systems   []*system // stock first
	report    *demoReport
}

// system is one runtime under test with its sandboxes.
type system struct {
	name string
	rt   *fleet.Runtime
	// image is the checkpoint its clones are restored from.
	image  string
	clones []*fleet.Sandbox
	// idleSince is when each clone last answered.
	idleSince []time.Time
	// hasStats: the runtime tells what it holds.
	hasStats bool
	// pooled: its clones are to share a page pool, which is pool while they live.
	pooled bool
	pool   *pagePool
}

const (
	stockName  = "stock"
	judgedName = "agentzip"
)

func runDemo(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	cfg, err := parseDemoFlags(args, stderr)
	if err != nil {
		return err
	}
	if os.Geteuid() != 0 {
		return errors.New("sandboxes need root: run it as root, e.g. with sudo")
	}
	d := &demo{cfg: cfg, stderr: stderr, began: time.Now(), report: newDemoReport(cfg)}
	err = d.run(ctx)
	cerr := d.cleanup()
	if cerr != nil {
		cerr = fmt.Errorf("cleaning up: %w", cerr)
	}
	if ctx.Err() != nil {
		// Half a measurement is none, and how it broke off does not matter.
		return interrupted(cerr)
	}
	err = errors.Join(err, cerr)
	d.report.finish(time.Since(d.began), err)
	if len(d.report.Steps) > 0 {
		if werr := d.report.write(cfg.json); werr != nil {
			err = errors.Join(err, werr)
		} else {
			d.say("results and raw samples: %s", cfg.json)
		}
	}
	if err != nil {
		return err
	}
	d.report.print(stdout)
	if !d.report.OutputsEqual {
		return errors.New("outputs differ between the two runtimes")
	}
	if n := len(d.report.CheckProblems); n > 0 {
		return fmt.Errorf("the consistency check of the runtime found %d problems", n)
	}
	return nil
}

// say prints a line of progress.
func (d *demo) say(format string, args ...any) {
	fmt.Fprintf(d.stderr, "[%5.1fs] "+format+"\n", append([]any{time.Since(d.began).Seconds()}, args...)...)
}

// cleanup ends every sandbox and removes every file of the run.
func (d *demo) cleanup() error {
	var errs []error
	for _, s := range d.systems {
		errs = append(errs, s.rt.Close(), d.stopPool(s))
	}
	var referenceErr error
	if d.reference != nil {
		referenceErr = d.reference.Close()
	}
	err := errors.Join(errs...)
	if d.dir != nil {
		err = d.dir.end(err)
	}
	return errors.Join(err, referenceErr)
}

func (d *demo) run(ctx context.Context) error {
	if err := reclaimRuns(d.cfg.work, d.say); err != nil {
		return err
	}
	var err error
	if d.dir, err = newRunDir(d.cfg.work); err != nil {
		return err
	}
	// Before the root file system: a wrong path should not cost minutes.
	if err := d.openSystems(); err != nil {
		return err
	}
	rootfs, err := prepareRootfs(ctx, d.cfg.rootfs, d.say)
	if err != nil {
		return err
	}
	if err := installToolServer(rootfs); err != nil {
		return err
	}
	d.bundle = filepath.Join(d.dir.path, "bundle")
	if err := fleet.WriteBundle(d.bundle, workloadSpec(rootfs, d.cfg.seed)); err != nil {
		return err
	}
	if err := d.makeTemplates(ctx); err != nil {
		return err
	}
	groups, err := d.plan()
	if err != nil {
		return err
	}
	if err := d.takeReference(ctx); err != nil {
		return err
	}
	for _, g := range groups {
		if err := d.runGroup(ctx, g); err != nil {
			return err
		}
	}
	return nil
}

func (d *demo) openSystems() error {
	for _, o := range []struct {
		name, binary string
		flags        []string
	}{
		{stockName, d.cfg.stock, nil},
		{judgedName, d.cfg.runtime, d.cfg.runtimeFlags},
	} {
		root, err := d.dir.reserveRoot(o.name)
		if err != nil {
			return err
		}
		opts := fleet.Options{Binary: o.binary, Root: root, Flags: o.flags}
		if d.cfg.verbose {
			opts.Log = d.stderr
		}
		rt, err := fleet.New(opts)
		if err != nil {
			return err
		}
		d.systems = append(d.systems, &system{name: o.name, rt: rt})
	}
	return nil
}

// makeTemplates makes the image that the clones of both systems are restored
// from. The judged runtime makes it: that it can, and that a stock runsc
// restores the result, is part of what the demo shows.
func (d *demo) makeTemplates(ctx context.Context) error {
	stock, judged := d.systems[0], d.systems[1]
	for _, s := range d.systems {
		v, err := s.rt.Version(ctx)
		if err != nil {
			return err
		}
		d.report.Versions[s.name] = v
	}
	var err error
	if judged.pooled, err = judged.rt.HasFlag(ctx, poolFlag); err != nil {
		return err
	}
	if !judged.pooled {
		d.say("note: %s", noPoolText(d.cfg.runtime))
	}
	if judged.image, err = d.makeTemplate(ctx, judged, &d.report.Template); err != nil {
		return err
	}
	stock.image = judged.image
	d.report.SharedImage = d.report.Versions[stockName] == d.report.Versions[judgedName]
	if d.report.SharedImage {
		return nil
	}
	d.say("note: %s is version %s and %s is version %s, which do not restore each other's images: making one for each", d.cfg.stock, d.report.Versions[stockName], d.cfg.runtime, d.report.Versions[judgedName])
	stock.image, err = d.makeTemplate(ctx, stock, &d.report.StockTemplate)
	return err
}

// makeTemplate makes the image of one system.
func (d *demo) makeTemplate(ctx context.Context, s *system, t *templateReport) (string, error) {
	d.say("%-8s template: starting the tool server (imports, repository, syntax trees, table)", s.name)
	image := filepath.Join(d.dir.path, s.name+"-image")
	made, err := makeTemplate(ctx, s.rt, s.name+"-template", d.bundle, image, d.cfg.stepTimeout)
	if err != nil {
		return "", err
	}
	*t = templateReport{
		Ready: made.ready, StartSeconds: made.start.Seconds(), CheckpointSeconds: made.checkpoint.Seconds(),
		MemfdBytes: made.memfdBytes, ImageBytes: made.imageBytes,
	}
	d.say("%-8s template: ready after %.1f s, checkpointed in %.1f s, image %s", s.name, t.StartSeconds, t.CheckpointSeconds, mib(t.ImageBytes))
	return image, nil
}

// Rough upper estimates for what the guest of one sandbox of this workload adds
// to its template's memory.
const (
	growthEstimate        = 60 << 20
	growthPerStepEstimate = 16 << 20
)

// plan decides from the memory left which systems are alive together. The
// judged runtime is not given credit for what it may save.
func (d *demo) plan() ([][]*system, error) {
	host, err := fleet.ReadHostMemory()
	if err != nil {
		return nil, err
	}
	perSandbox := d.report.Template.ImageBytes + growthEstimate + uint64(d.cfg.rounds)*growthPerStepEstimate + overheadEstimate
	together, err := planGroups(host.Available, perSandbox, d.cfg.clones, d.cfg.interleave)
	if err != nil {
		return nil, err
	}
	d.report.Interleaved = together
	if together {
		return [][]*system{d.systems}, nil
	}
	d.say("one system after the other: both at once need more than the %s of memory available", mib(host.Available))
	return [][]*system{d.systems[:1], d.systems[1:]}, nil
}

// planGroups reports whether both systems' sandboxes fit into memory together.
func planGroups(available, perSandbox uint64, clones int, mode string) (together bool, err error) {
	if err := checkFits(available, perSandbox, clones); err != nil {
		return false, err
	}
	usable := usableMemory(available)
	need := perSandbox * uint64(clones)
	switch {
	case mode == "off":
		return false, nil
	case 2*need <= usable:
		return true, nil
	case mode == "on":
		return false, fmt.Errorf("2 x %d sandboxes need about %s of memory and only %s is available: use --interleave=off or --clones %d or less", clones, mib(2*need), mib(available), usable/perSandbox/2)
	}
	return false, nil
}

// takeReference records the template's pages as clones see them.
func (d *demo) takeReference(ctx context.Context) error {
	s := d.systems[0]
	var err error
	if d.reference, err = takeReference(ctx, s.rt, "reference", d.bundle, s.image, filepath.Join(d.dir.path, "reference")); err != nil {
		return err
	}
	d.report.ReferenceBytes = d.reference.Bytes()
	return nil
}

// runGroup takes the sandboxes of one or both systems through the whole
// workload and ends them.
func (d *demo) runGroup(ctx context.Context, group []*system) error {
	for _, s := range group {
		if err := d.restore(ctx, s); err != nil {
			return err
		}
		if err := d.waitAndMeasure(ctx, group, s, restoreRound, "restore"); err != nil {
			return err
		}
	}
	for round := range d.cfg.rounds {
		order := group
		if len(group) == 2 && round%2 == 1 {
			order = []*system{group[1], group[0]}
		}
		for _, s := range order {
			if err := d.batch(ctx, s, round); err != nil {
				return err
			}
			if err := d.waitAndMeasure(ctx, group, s, round, stepCycle[round%len(stepCycle)]); err != nil {
				return err
			}
		}
	}
	for _, s := range group {
		if err := d.verify(ctx, s); err != nil {
			return err
		}
	}
	for _, s := range group {
		if err := d.teardown(ctx, group, s); err != nil {
			return err
		}
	}
	return nil
}

// restore starts the clones of a system.
func (d *demo) restore(ctx context.Context, s *system) error {
	var opts []fleet.StartOption
	if s.pooled {
		var log io.Writer
		if d.cfg.verbose {
			log = d.stderr
		}
		var err error
		if s.pool, err = startPagePool(ctx, s.rt.Binary(), poolDir(d.dir.path), log); err != nil {
			return err
		}
		opts = append(opts, fleet.WithFlags(s.pool.flags()...))
	}
	for i := range d.cfg.clones {
		sb, err := s.rt.Restore(ctx, fmt.Sprintf("%s-%03d", s.name, i), d.bundle, s.image, opts...)
		if err != nil {
			return fmt.Errorf("restoring %s clone %d: %w", s.name, i, err)
		}
		s.clones = append(s.clones, sb)
		s.idleSince = append(s.idleSince, time.Now())
		d.report.Restores = append(d.report.Restores, restoreSample{System: s.name, Clone: i, Seconds: sb.StartDuration().Seconds()})
	}
	_, err := s.clones[0].Stats(ctx)
	s.hasStats = err == nil
	if err != nil && !errors.Is(err, fleet.ErrNoAgentzip) {
		return err
	}
	if s.name == judgedName {
		d.report.RuntimeHasStats = s.hasStats
	}
	d.say("%-8s restored %d sandboxes, median %.2f s", s.name, d.cfg.clones, quantile(d.report.restoreSeconds(s.name), 0.5))
	return nil
}

// batch lets every clone of a system take its step of a round.
func (d *demo) batch(ctx context.Context, s *system, round int) error {
	var times []float64
	load, err := d.startLoad()
	if err != nil {
		return err
	}
	for i, sb := range s.clones {
		req := planStep(d.cfg.seed, i, round)
		cpu0, err := sb.CPUTime()
		if err != nil {
			return err
		}
		idle := time.Since(s.idleSince[i])
		began := time.Now()
		line, err := d.ask(ctx, sb, req)
		took := time.Since(began)
		if err != nil {
			return fmt.Errorf("%s clone %d, %s step of round %d: %w", s.name, i, req.Name, round, err)
		}
		s.idleSince[i] = time.Now()
		cpu1, err := sb.CPUTime()
		if err != nil {
			return err
		}
		d.report.Steps = append(d.report.Steps, stepSample{
			System: s.name, Clone: i, Round: round, Step: req.Name,
			IdleSeconds: idle.Seconds(), Seconds: took.Seconds(), CPUSeconds: (cpu1 - cpu0).Seconds(), Output: line,
		})
		times = append(times, took.Seconds())
		if err := d.measure(ctx, s, i, round, req.Name, beforeWait); err != nil {
			return err
		}
	}
	b, err := load.stop()
	if err != nil {
		return err
	}
	b.System, b.Round = s.name, round
	d.report.Batches = append(d.report.Batches, b)
	d.say("%-8s round %d/%d %-8s median %.2f s", s.name, round+1, d.cfg.rounds, stepCycle[round%len(stepCycle)], quantile(times, 0.5))
	return nil
}

// ask sends a request and returns the result part of a good answer.
func (d *demo) ask(ctx context.Context, sb *fleet.Sandbox, req request) (json.RawMessage, error) {
	return ask(ctx, sb, req.line(), d.cfg.stepTimeout)
}

// waitAndMeasure lets a system's clones wait, lets background work of the
// whole group die down, and measures.
func (d *demo) waitAndMeasure(ctx context.Context, group []*system, s *system, round int, step string) error {
	if err := sleep(ctx, d.cfg.wait); err != nil {
		return err
	}
	q, err := quiesceGroup(ctx, group, d.cfg.settle)
	if err != nil {
		return err
	}
	d.report.Settles = append(d.report.Settles, settleSample{System: s.name, Round: round, Seconds: q.took.Seconds(), Quiet: q.quiet})
	for i := range s.clones {
		if err := d.measure(ctx, s, i, round, step, afterWait); err != nil {
			return err
		}
	}
	return nil
}

// quiesceGroup waits until nothing of the systems' sandboxes works in the
// background, or for limit.
func quiesceGroup(ctx context.Context, group []*system, limit time.Duration) (quiescence, error) {
	var all []*fleet.Sandbox
	var pool *pagePool
	for _, g := range group {
		all = append(all, g.clones...)
		if g.pool != nil {
			pool = g.pool
		}
	}
	return quiesce(ctx, all, pool, limit)
}

// loadMeter tells how much of the machine other programs use meanwhile, which
// is what spoils comparisons of times.
type loadMeter struct {
	d     *demo
	began time.Time
	total cpuTimes
	own   time.Duration
}

func (d *demo) startLoad() (*loadMeter, error) {
	m := &loadMeter{d: d, began: time.Now()}
	var err error
	if m.total, err = readCPUTimes(); err != nil {
		return nil, err
	}
	m.own = d.ownCPU()
	return m, nil
}

// ownCPU is the processor time of this program, of the runsc commands it ran
// and of all sandboxes alive.
func (d *demo) ownCPU() time.Duration {
	t := selfCPU()
	for _, s := range d.systems {
		for _, sb := range s.clones {
			// One that just ended shows as an error where it matters.
			if c, err := sb.CPUTime(); err == nil {
				t += c
			}
		}
		if s.pool != nil {
			if c, err := s.pool.CPUTime(); err == nil {
				t += c
			}
		}
	}
	return t
}

func (m *loadMeter) stop() (batchSample, error) {
	now, err := readCPUTimes()
	if err != nil {
		return batchSample{}, err
	}
	own := (m.d.ownCPU() - m.own).Seconds()
	all := (now.all - m.total.all).Seconds()
	busy := (now.busy - m.total.busy).Seconds()
	return batchSample{
		Seconds: time.Since(m.began).Seconds(),
		Busy:    ratio(busy, all),
		Own:     ratio(own, all),
		Others:  max(0, ratio(busy-own, all)),
	}, nil
}

// measure takes one memory sample of one clone.
func (d *demo) measure(ctx context.Context, s *system, clone, round int, step, when string) error {
	sb := s.clones[clone]
	m := memorySample{System: s.name, Clone: clone, Round: round, Step: step, When: when, IdleSeconds: time.Since(s.idleSince[clone]).Seconds()}
	var st control.Stats
	if s.hasStats {
		var err error
		if st, err = sb.Stats(ctx); err != nil {
			return err
		}
	}
	var err error
	if m.Memory, err = sb.Memory(); err != nil {
		return endedWhy(sb, err)
	}
	m.HostBytes = m.Memory.Host()
	if t := m.Memory.Template; t != nil {
		// Held once for all clones; each is charged its part.
		if m.TemplateOnceBytes, err = fleet.CachedBytes(t.File); err != nil {
			return err
		}
		m.HostBytes += m.TemplateOnceBytes / uint64(d.cfg.clones)
	}
	if s.pool != nil {
		if m.Pool, err = s.pool.measure(m.Memory.Template, s.clones); err != nil {
			return err
		}
		m.HostBytes += m.Pool.Host() / uint64(d.cfg.clones)
	}
	if s.hasStats {
		m.Stats = &st
		m.CommittedBytes, m.OwnedBytes = st.GuestBytes, st.OwnedBytes
	} else {
		m.CommittedBytes = m.Memory.GuestMemfd
		// Comparing pages takes a while: not between two steps.
		if when == afterWait {
			diff, err := sb.DiffGuest(d.reference)
			if err != nil {
				return endedWhy(sb, err)
			}
			m.Diff = &diff
			m.OwnedBytes = diff.Different * 4096
		}
	}
	d.report.Memory = append(d.report.Memory, m)
	return nil
}

// verify compares everything the clones hold, outside the timed steps, and has
// the runtime check itself.
func (d *demo) verify(ctx context.Context, s *system) error {
	var times []float64
	for i, sb := range s.clones {
		began := time.Now()
		out, err := d.ask(ctx, sb, request{Op: "state"})
		if err != nil {
			return fmt.Errorf("%s clone %d, digest of its whole state: %w", s.name, i, err)
		}
		took := time.Since(began).Seconds()
		times = append(times, took)
		d.report.States = append(d.report.States, stepSample{System: s.name, Clone: i, Round: d.cfg.rounds, Step: "state", Seconds: took, Output: out})
		s.idleSince[i] = time.Now()
		if !s.hasStats {
			continue
		}
		c, err := sb.Check(ctx)
		if err != nil {
			return fmt.Errorf("%s clone %d: %w", s.name, i, err)
		}
		for _, p := range c.Problems {
			d.report.CheckProblems = append(d.report.CheckProblems, fmt.Sprintf("clone %d: %s", i, p))
		}
	}
	d.say("%-8s digested everything its sandboxes hold, median %.2f s", s.name, quantile(times, 0.5))
	return nil
}

// stopPool ends a system's page pool, if it has one.
func (d *demo) stopPool(s *system) error {
	if s.pool == nil {
		return nil
	}
	killed, err := s.pool.stop()
	if killed {
		d.say("note: the page pool did not end within %v of SIGTERM and was killed", s.pool.grace)
	}
	s.pool = nil
	return err
}

// teardown ends a system's sandboxes and sees what the host gets back.
func (d *demo) teardown(ctx context.Context, group []*system, s *system) error {
	if err := sleep(ctx, d.cfg.wait); err != nil {
		return err
	}
	if _, err := quiesceGroup(ctx, group, d.cfg.settle); err != nil {
		return err
	}
	for i := range s.clones {
		if err := d.measure(ctx, s, i, d.cfg.rounds, "state", afterWait); err != nil {
			return err
		}
	}
	// MemAvailable takes a shared template, which lies in the page cache, for
	// memory that is to be had; the host has to hold it all the same.
	template := d.report.templateOnce(s.name)
	before, err := fleet.ReadHostMemory()
	if err != nil {
		return err
	}
	for _, sb := range s.clones {
		if err := sb.Delete(ctx); err != nil {
			return err
		}
	}
	s.clones = nil
	if err := d.stopPool(s); err != nil {
		return err
	}
	// The kernel frees some of it a little later.
	if err := sleep(ctx, time.Second); err != nil {
		return err
	}
	after, err := fleet.ReadHostMemory()
	if err != nil {
		return err
	}
	d.report.Teardowns = append(d.report.Teardowns, teardownSample{
		System: s.name, AvailableBefore: before.Available, AvailableAfter: after.Available,
		FreedBytes: int64(after.Available) - int64(before.Available), TemplateOnceBytes: template,
	})
	return nil
}
