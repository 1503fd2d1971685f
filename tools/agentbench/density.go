package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"runsc-agentzip/pkg/fleet"
	"runsc-agentzip/tools/agentbench/linuxmem"
)

const densityUsage = `usage: agentbench density [flags]

Counts how many sandboxes that wait fit in an amount of the host's memory, by
starting them.

All are restored from one checkpoint of the demo's Python tool server, take one tool
step each, and wait. What they take is measured in two ways: by how much less memory
the host has available, and by adding up what their processes, page tables and memory
files hold. Sandboxes are added, or taken away again, until one more would not fit.
Then each has to answer once more.

flags:
`

// densityConfig is what the flags say.
type densityConfig struct {
	toolServerConfig
	systems      []systemKind
	skip         bool
	memory, keep uint64
	max          int
	wait         time.Duration
	json         string
}

// densityPoint is what a number of sandboxes that wait take, in bytes.
type densityPoint struct {
	Clones int `json:"clones"`
	// Sum is the sum of the sandboxes' parts: memory files, anonymous memory, page
	// tables, their share of binaries; and once for all, what the host caches of their
	// template, the page pool, and what the kernel holds more than before.
	Sum uint64 `json:"sum_bytes"`
	// Template, Pool and Kernel are these three parts of it.
	Template uint64 `json:"template_bytes"`
	Pool     uint64 `json:"pool_bytes"`
	Kernel   uint64 `json:"kernel_bytes"`
	// Drop is how much less memory the host has available than before, with the
	// template, which counts as available, and without agentbench itself and the
	// attached runsc processes.
	Drop uint64 `json:"available_drop_bytes"`
}

// densityResult is that of one system.
type densityResult struct {
	System string `json:"system"`
	// FitsSum and FitsDrop are how many sandboxes fit, as measured in both ways.
	FitsSum  densityCount `json:"fits_by_sum"`
	FitsDrop densityCount `json:"fits_by_available"`
	// Answered of Asked sandboxes answered at the end, Different of them not as those
	// of the first system.
	Asked     int `json:"asked"`
	Answered  int `json:"answered"`
	Different int `json:"different_answers"`
	// Points are all measurements in their order, Restores the seconds that each
	// restore took.
	Points   []densityPoint `json:"points"`
	Restores []float64      `json:"restore_seconds"`
}

// densityCount is how many fit, and what they took.
type densityCount struct {
	Clones int    `json:"clones"`
	Bytes  uint64 `json:"bytes"`
	// AtLeast: it ended at the number of sandboxes or at the memory that the host has
	// to keep; more might fit.
	AtLeast bool `json:"at_least"`
}

type densityReport struct {
	Command string          `json:"command"`
	Memory  uint64          `json:"memory_bytes"`
	Wait    float64         `json:"wait_seconds"`
	Systems []densityResult `json:"systems"`
}

// parseBytes understands sizes such as 4GiB, 400MiB or 123456.
func parseBytes(s string) (uint64, error) {
	number, shift := s, 0
	for unit, n := range map[string]int{"KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40} {
		if rest, ok := strings.CutSuffix(s, unit); ok {
			number, shift = rest, n
		}
	}
	f, err := strconv.ParseFloat(strings.TrimSpace(number), 64)
	if b := f * float64(uint64(1)<<shift); err == nil && b >= 1 && b < math.MaxInt64 {
		return uint64(b), nil
	}
	return 0, fmt.Errorf("a size is a number of bytes, KiB, MiB, GiB or TiB, such as 4GiB, not %q", s)
}

func parseDensityFlags(args []string, stderr io.Writer) (densityConfig, error) {
	var c densityConfig
	fs, err := toolServerFlags("density", densityUsage, &c.toolServerConfig, stderr)
	if err != nil {
		return c, err
	}
	systems := fs.String("systems", "stock,linux,agentzip", "`systems` in their order, as agentbench run has them")
	fs.BoolVar(&c.skip, "skip-unavailable", false, "leave out systems that this machine cannot run, instead of failing")
	memory := fs.String("memory", "4GiB", "the `amount` of memory to fill")
	keep := fs.String("keep", "2GiB", "no sandbox is started while the host has less memory `available` than this")
	fs.IntVar(&c.max, "max", 400, "how many sandboxes to start at most")
	fs.DurationVar(&c.wait, "wait", 10*time.Second, "how long all have waited, at least, when they are measured")
	fs.StringVar(&c.json, "json", "", "write all measurements to this `file`")
	if err := parseFlags(fs, args); err != nil {
		return c, err
	}
	bad := func(format string, a ...any) (densityConfig, error) {
		fmt.Fprintf(stderr, "agentbench density: "+format+"\n", a...)
		return c, errUsage
	}
	if c.systems, err = parseSystems(*systems); err != nil {
		return bad("--systems: %v", err)
	}
	if c.memory, err = parseBytes(*memory); err != nil {
		return bad("--memory: %v", err)
	}
	if c.keep, err = parseBytes(*keep); err != nil {
		return bad("--keep: %v", err)
	}
	switch {
	case fs.NArg() > 0:
		return bad("unexpected argument %q", fs.Arg(0))
	case c.max < 1:
		return bad("--max must be at least 1, not %d", c.max)
	case c.wait < 0 || c.stepTimeout <= 0:
		return bad("--wait must not be negative, --step-timeout positive")
	}
	return c, nil
}

func runDensity(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	cfg, err := parseDensityFlags(args, stderr)
	if err != nil {
		return err
	}
	if os.Geteuid() != 0 {
		return errors.New("sandboxes need root: run it as root, e.g. with sudo")
	}
	d := &densityRun{cfg: cfg, progress: newProgress(stderr), first: map[int]json.RawMessage{}}
	d.report = densityReport{Command: strings.Join(os.Args, " "), Memory: cfg.memory, Wait: cfg.wait.Seconds()}
	err = d.run(ctx)
	if d.dir != nil {
		var errs []error
		for _, rt := range d.runtimes {
			errs = append(errs, rt.Close())
		}
		if cerr := d.dir.end(errors.Join(errs...)); cerr != nil {
			err = errors.Join(err, fmt.Errorf("cleaning up: %w", cerr))
		}
	}
	if ctx.Err() != nil {
		return interrupted(err)
	}
	if len(d.report.Systems) != 0 {
		if cfg.json != "" {
			b, jerr := json.MarshalIndent(&d.report, "", " ")
			if jerr == nil {
				jerr = os.WriteFile(cfg.json, append(b, '\n'), 0o644)
			}
			err = errors.Join(err, jerr)
		}
		err = errors.Join(err, printDensity(stdout, &d.report))
	}
	for _, s := range d.report.Systems {
		if s.Answered != s.Asked || s.Different != 0 {
			err = errors.Join(err, fmt.Errorf("%s: of %d sandboxes %d answered, %d of them another thing than %s's", s.System, s.Asked, s.Answered, s.Different, d.report.Systems[0].System))
		}
	}
	return err
}

// densityRun is one run.
type densityRun struct {
	cfg      densityConfig
	progress *progress
	dir      *runDir
	runtimes []*fleet.Runtime
	bundle   string
	image    string
	// first are the answers of the first system's sandboxes.
	first  map[int]json.RawMessage
	report densityReport
}

func (d *densityRun) run(ctx context.Context) error {
	host, err := fleet.ReadHostMemory()
	if err != nil {
		return err
	}
	if host.Available < d.cfg.memory+d.cfg.keep {
		return fmt.Errorf("this machine has %s of memory available, which is less than --memory and --keep together: take less", mib(host.Available))
	}
	if err := reclaimRuns(d.cfg.work, d.progress.say); err != nil {
		return err
	}
	if d.dir, err = newRunDir(d.cfg.work); err != nil {
		return err
	}
	if err := d.leaveOut(ctx); err != nil {
		return err
	}
	for _, k := range d.cfg.systems {
		rt, err := d.open(k)
		if err != nil {
			return err
		}
		d.runtimes = append(d.runtimes, rt)
	}
	rootfs, err := prepareRootfs(ctx, d.cfg.rootfs, d.progress.say)
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
	d.image = filepath.Join(d.dir.path, "image")
	maker := d.runtimes[len(d.runtimes)-1]
	d.progress.status("making the template")
	if _, err := makeTemplate(ctx, maker, "template", d.bundle, d.image, d.cfg.stepTimeout); err != nil {
		return err
	}
	for i, k := range d.cfg.systems {
		if err := d.system(ctx, k, d.runtimes[i]); err != nil {
			return fmt.Errorf("%s: %w", k.name, err)
		}
	}
	return nil
}

// leaveOut removes systems that the machine cannot run, if it may.
func (d *densityRun) leaveOut(ctx context.Context) error {
	var left []systemKind
	for _, k := range d.cfg.systems {
		if k.swaps {
			host, err := d.setUpSwap(ctx)
			if err == nil {
				err = closeSwap(host)
			}
			if err != nil {
				_, changed := os.Lstat(d.swapState())
				if !d.cfg.skip || ctx.Err() != nil || changed == nil {
					return fmt.Errorf("system %s: %w", k.name, err)
				}
				d.progress.say("leaving out the system %s: %v", k.name, err)
				continue
			}
		}
		left = append(left, k)
	}
	if len(left) == 0 {
		return errors.New("no system is left that this machine can run")
	}
	d.cfg.systems = left
	return nil
}

func (d *densityRun) swapState() string { return filepath.Join(d.dir.path, swapState) }

func (d *densityRun) setUpSwap(ctx context.Context) (*linuxmem.Host, error) {
	return linuxmem.Setup(ctx, linuxmem.Options{StateFile: d.swapState()})
}

func closeSwap(host *linuxmem.Host) error {
	ctx, cancel := context.WithTimeout(context.Background(), swapTimeout)
	defer cancel()
	return host.Close(ctx)
}

func (d *densityRun) open(k systemKind) (*fleet.Runtime, error) {
	root, err := d.dir.reserveRoot(k.name)
	if err != nil {
		return nil, err
	}
	o := fleet.Options{Binary: d.cfg.stock, Root: root, Flags: k.flags}
	if k.judged {
		o.Binary, o.Flags = d.cfg.runtime, slices.Concat(d.cfg.runtimeFlags, k.flags)
	}
	if d.cfg.verbose {
		o.Log = d.progress
	}
	return fleet.New(o)
}

// crowd is the sandboxes of one system.
type crowd struct {
	d    *densityRun
	kind systemKind
	rt   *fleet.Runtime
	host *linuxmem.Host // nil unless the system swaps
	pool *pagePool      // nil unless the sandboxes share one

	before    fleet.HostMemory
	ownBefore uint64
	sandboxes []*fleet.Sandbox
	groups    []*linuxmem.Group
	since     time.Time // of the last step
	result    densityResult
}

// system counts the sandboxes of one system.
func (d *densityRun) system(ctx context.Context, k systemKind, rt *fleet.Runtime) (err error) {
	c := &crowd{d: d, kind: k, rt: rt, result: densityResult{System: k.name}}
	defer func() { err = errors.Join(err, c.close()) }()
	if k.swaps {
		if c.host, err = d.setUpSwap(ctx); err != nil {
			return err
		}
	}
	if c.before, err = fleet.ReadHostMemory(); err != nil {
		return err
	}
	if c.ownBefore, err = ownMemory(); err != nil {
		return err
	}
	if k.pooled {
		if has, err := rt.HasFlag(ctx, poolFlag); err != nil {
			return err
		} else if has {
			var log io.Writer
			if d.cfg.verbose {
				log = d.progress
			}
			if c.pool, err = startPagePool(ctx, rt.Binary(), poolDir(d.dir.path), log); err != nil {
				return err
			}
		}
	}
	at := func(n int) (densityPoint, error) { return c.at(ctx, n) }
	if c.result.FitsSum, err = fill(d.cfg.memory, d.cfg.max, &c.result.Points, sumOfPoint, at); err != nil {
		return err
	}
	if c.result.FitsDrop, err = fill(d.cfg.memory, d.cfg.max, &c.result.Points, dropOfPoint, at); err != nil {
		return err
	}
	if err := c.answer(ctx); err != nil {
		return err
	}
	d.report.Systems = append(d.report.Systems, c.result)
	r := c.result
	d.progress.say("%s: %d fit by the sum of their parts, %d by available memory; %d of %d answered", k.name, r.FitsSum.Clones, r.FitsDrop.Clones, r.Answered, r.Asked)
	return nil
}

func sumOfPoint(p densityPoint) uint64  { return p.Sum }
func dropOfPoint(p densityPoint) uint64 { return p.Drop }

// errHostFull says that the host must not have less memory available.
var errHostFull = errors.New("the host has too little memory left")

// fill finds out how many sandboxes take no more than limit. points are the
// measurements so far, at makes n sandboxes be there, and measures.
func fill(limit uint64, most int, points *[]densityPoint, of func(densityPoint) uint64, at func(n int) (densityPoint, error)) (densityCount, error) {
	// lo fit, hi do not: they were measured if full is set.
	lo, hi, full := densityPoint{}, most+1, false
	note := func(p densityPoint) {
		// What was measured last counts, since others use the host, too.
		if of(p) <= limit {
			if p.Clones > lo.Clones {
				lo = p
			}
			if p.Clones >= hi {
				hi, full = most+1, false
			}
			return
		}
		hi, full = p.Clones, true
		if lo.Clones < hi {
			return
		}
		lo = densityPoint{}
		for _, q := range *points {
			if q.Clones < hi && q.Clones > lo.Clones && of(q) <= limit {
				lo = q
			}
		}
	}
	for _, p := range *points {
		note(p)
	}
	for lo.Clones+1 < hi {
		// One more takes less than each does now: what they share is there. Where
		// nothing is seen to be taken, twice as many.
		more := lo.Clones
		if used := of(lo); used > 0 {
			more = int(0.9 * float64(limit-used) / float64(used) * float64(lo.Clones))
		}
		next := min(lo.Clones+max(more, 1), hi-1)
		p, err := at(next)
		if errors.Is(err, errHostFull) {
			return densityCount{Clones: lo.Clones, Bytes: of(lo), AtLeast: true}, nil
		}
		if err != nil {
			return densityCount{}, err
		}
		*points = append(*points, p)
		note(p)
	}
	return densityCount{Clones: lo.Clones, Bytes: of(lo), AtLeast: !full}, nil
}

// at makes n sandboxes wait, and measures them when they are as small as they get.
func (c *crowd) at(ctx context.Context, n int) (densityPoint, error) {
	if err := c.resize(ctx, n); err != nil {
		return densityPoint{}, err
	}
	c.d.progress.status("%s: %d sandboxes wait", c.kind.name, n)
	if err := sleep(ctx, time.Until(c.since.Add(c.d.cfg.wait))); err != nil {
		return densityPoint{}, err
	}
	p, err := c.measure()
	if err != nil {
		return p, err
	}
	// A busy host may need longer.
	for end := time.Now().Add(densitySettle); time.Now().Before(end); {
		if err := sleep(ctx, min(densityEvery, c.d.cfg.wait)); err != nil {
			return p, err
		}
		before := p.Sum
		if p, err = c.measure(); err != nil {
			return p, err
		}
		if p.Sum+before/200 > before {
			break
		}
	}
	c.d.progress.say("%s: %d sandboxes take %s, and the host has %s less", c.kind.name, n, mib(p.Sum), mib(p.Drop))
	return p, nil
}

// densitySettle is the longest time that sandboxes get to become smaller, and
// densityEvery the time in which they become 0.5 % smaller, at least, as long as they
// do.
const densitySettle, densityEvery = 2 * time.Minute, 3 * time.Second

// resize starts sandboxes, or ends the last ones.
func (c *crowd) resize(ctx context.Context, n int) error {
	for len(c.sandboxes) > n {
		last := len(c.sandboxes) - 1
		if err := c.sandboxes[last].Delete(ctx); err != nil {
			return err
		}
		c.sandboxes = c.sandboxes[:last]
		if c.host != nil {
			if err := c.groups[last].Close(); err != nil {
				return err
			}
			c.groups = c.groups[:last]
		}
		c.since = time.Now()
	}
	for i := len(c.sandboxes); i < n; i++ {
		host, err := fleet.ReadHostMemory()
		if err != nil {
			return err
		}
		if host.Available < c.d.cfg.keep {
			c.d.progress.say("%s: the host has %s available: no more are started than %d", c.kind.name, mib(host.Available), i)
			return errHostFull
		}
		c.d.progress.status("%s: starting sandbox %d of %d", c.kind.name, i+1, n)
		if err := c.start(ctx, i); err != nil {
			return fmt.Errorf("sandbox %d: %w", i, err)
		}
	}
	return nil
}

// start restores a sandbox and has it take its step.
func (c *crowd) start(ctx context.Context, i int) error {
	var opts []fleet.StartOption
	if c.host != nil {
		g, err := c.host.Group(fmt.Sprintf("clone-%d", i))
		if err != nil {
			return err
		}
		c.groups = append(c.groups, g)
		opts = append(opts, fleet.WithLauncher(g.Launcher()...))
	}
	if c.pool != nil {
		opts = append(opts, fleet.WithFlags(c.pool.flags()...))
	}
	began := time.Now()
	// Of one width: runsc takes the beginning of an id for the id.
	sb, err := c.rt.Restore(ctx, fmt.Sprintf("clone-%03d", i), c.d.bundle, c.d.image, opts...)
	if err != nil {
		return err
	}
	c.sandboxes = append(c.sandboxes, sb)
	c.result.Restores = append(c.result.Restores, time.Since(began).Seconds())
	if _, err := ask(ctx, sb, planStep(c.d.cfg.seed, i, 0).line(), c.d.cfg.stepTimeout); err != nil {
		return endedWhy(sb, err)
	}
	c.since = time.Now()
	if c.host == nil {
		return nil
	}
	// What the system does 200 ms after a step, when the sandbox waits.
	if err := sleep(ctx, swapAfter); err != nil {
		return err
	}
	_, err = c.groups[i].Reclaim(ctx)
	return err
}

// measure adds up.
func (c *crowd) measure() (densityPoint, error) {
	p := densityPoint{Clones: len(c.sandboxes)}
	var clients uint64
	var template *fleet.TemplateMemory
	measured, err := fleet.MeasureAll(c.sandboxes)
	if err != nil {
		for _, sb := range c.sandboxes {
			err = endedWhy(sb, err)
		}
		return p, err
	}
	var usage linuxmem.HostUsage
	if c.host != nil {
		if usage, err = c.host.Usage(); err != nil {
			return p, err
		}
	}
	for i, m := range measured {
		clients += m.Client.PSSAnon + m.Client.PageTables
		if m.Template != nil {
			template = m.Template
		}
		if c.host == nil {
			p.Sum += m.Host()
			continue
		}
		// The blocks of memory files count pages whether they are swapped out or not:
		// what the group holds is asked.
		u, err := c.groups[i].Usage()
		if err != nil {
			return p, err
		}
		p.Sum += u.Bytes - min(u.Bytes, m.Client.PSSAnon+m.Client.PageTables) + usage.Share(u.Swap-min(u.Swap, m.Client.SwapPSS))
	}
	if template != nil {
		if p.Template, err = fleet.CachedBytes(template.File); err != nil {
			return p, err
		}
	}
	if c.pool != nil {
		if err := c.pool.alive(); err != nil {
			return p, err
		}
		m, err := c.pool.measure(template, c.sandboxes)
		if err != nil {
			return p, err
		}
		p.Pool = m.Host()
	}
	host, err := fleet.ReadHostMemory()
	if err != nil {
		return p, err
	}
	own, err := ownMemory()
	if err != nil {
		return p, err
	}
	// A group is charged for the kernel's memory, too.
	if c.host == nil && host.Kernel > c.before.Kernel {
		p.Kernel = host.Kernel - c.before.Kernel
	}
	p.Sum += p.Template + p.Pool + p.Kernel
	p.Drop = availableDrop(c.before.Available+c.ownBefore, host.Available+own+clients) + p.Template
	return p, nil
}

// availableDrop is how much less there is, 0 if others have given back more.
func availableDrop(before, now uint64) uint64 { return before - min(before, now) }

// answer asks all sandboxes that are there for one more step.
func (c *crowd) answer(ctx context.Context) error {
	for i, sb := range c.sandboxes {
		c.d.progress.status("%s: sandbox %d of %d answers", c.kind.name, i+1, len(c.sandboxes))
		c.result.Asked++
		a, err := ask(ctx, sb, firstCommand(i), c.d.cfg.stepTimeout)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			c.d.progress.say("%s: sandbox %d does not answer: %v", c.kind.name, i, endedWhy(sb, err))
			continue
		}
		c.result.Answered++
		if want, ok := c.d.first[i]; !ok {
			c.d.first[i] = a
		} else if !bytes.Equal(want, a) {
			c.d.progress.say("%s: sandbox %d answers %.200s, not %.200s", c.kind.name, i, a, want)
			c.result.Different++
		}
	}
	return nil
}

// close ends all sandboxes and puts the host back, whatever went wrong before.
func (c *crowd) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), swapTimeout)
	defer cancel()
	c.d.progress.status("%s: ending all sandboxes", c.kind.name)
	var errs []error
	// Those of a failed restore, too.
	for _, sb := range c.rt.Sandboxes() {
		errs = append(errs, sb.Delete(ctx))
	}
	if c.pool != nil {
		_, err := c.pool.stop()
		errs = append(errs, err)
	}
	if c.host != nil {
		errs = append(errs, closeSwap(c.host))
	}
	return errors.Join(errs...)
}

func printDensity(w io.Writer, r *densityReport) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(w, "Sandboxes that wait in %s of memory:\n\n", mib(r.Memory))
	fmt.Fprintln(t, "system\tby the sum\teach\tby available memory\teach\tanswered\trestore\t")
	count := func(c densityCount, first densityCount) string {
		s := strconv.Itoa(c.Clones)
		if c.AtLeast {
			s = "at least " + s
		}
		if first.Clones == 0 || c.Clones == first.Clones {
			return s
		}
		return fmt.Sprintf("%s (%.1fx)", s, float64(c.Clones)/float64(first.Clones))
	}
	each := func(c densityCount) string {
		if c.Clones == 0 {
			return "-"
		}
		return fmt.Sprintf("%.1f MiB", float64(c.Bytes)/float64(c.Clones)/(1<<20))
	}
	for _, s := range r.Systems {
		first := r.Systems[0]
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%d of %d\t%.2f s\t\n", s.System, count(s.FitsSum, first.FitsSum), each(s.FitsSum),
			count(s.FitsDrop, first.FitsDrop), each(s.FitsDrop), s.Answered, s.Asked, quantile(s.Restores, 0.5))
	}
	if err := t.Flush(); err != nil {
		return err
	}
	_, err := fmt.Fprint(w, `
by the sum: memory files, anonymous memory, page tables and shares of binaries of all
processes; with the template in the page cache, the page pool and the kernel's memory.
by available memory: how much less the host has available, the template included;
other programs on the host change it. restore: median.
`)
	return err
}
