package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"runsc-agentzip/pkg/fleet"
)

const idleUsage = `usage: agentbench idle [flags]

Measures what a sandbox costs outside its guest memory while it waits: the memory
of its Sentry, its gofer and its stubs, and their page tables; the processor time it
uses; and how long its first command after the wait takes.

Sandboxes with the demo's Python tool server take two tool steps, then wait and
take one small step in turn, under a stock runsc and under the runtime to judge.
With --fresh they are started, else they are restored from a checkpoint of one. With
--rootfs-type folder,erofs all is measured with either kind of root file system.

flags:
`

// idleConfig is what the flags say.
type idleConfig struct {
	toolServerConfig
	clones      []int
	waits       []time.Duration
	rounds      int
	fresh       bool
	json        string
	rootfsTypes []string
}

// idleSample is one sandbox at the end of one wait. Sizes are in bytes.
type idleSample struct {
	System string `json:"system"`
	// Rootfs is the kind of its root file system, "" for a folder.
	Rootfs string  `json:"rootfs,omitempty"`
	Clones int     `json:"clones"`
	Clone  int     `json:"clone"`
	Round  int     `json:"round"`
	Wait   float64 `json:"wait_seconds"`
	// Seconds is how long the first command after the wait took, from the request
	// to the answer.
	Seconds float64 `json:"first_command_seconds"`
	// Start is how long it took to restore, or to start, the sandbox.
	Start float64 `json:"start_seconds"`
	// Outside is the sum of the parts that are not guest memory.
	Outside  uint64       `json:"outside_bytes"`
	Owned    uint64       `json:"owned_bytes,omitempty"`
	Measured fleet.Memory `json:"measured"`
	// Store is what the Sentry holds in its own memory for guest memory.
	Store uint64 `json:"store_bytes,omitempty"`
	// CPU is the share of a processor that all of its processes took in the second
	// half of a wait of cpuMinWait or more, nil if it was not measured.
	CPU *float64 `json:"cpu,omitempty"`
}

// cpuMinWait is the shortest wait in whose second half processor time is measured: the
// kernel counts it by ticks of 10 ms.
const cpuMinWait = 10 * time.Second

type idleReport struct {
	Command string       `json:"command"`
	Fresh   bool         `json:"fresh"`
	Samples []idleSample `json:"samples"`
}

func parseIdleFlags(args []string, stderr io.Writer) (idleConfig, error) {
	var c idleConfig
	fs, err := toolServerFlags("idle", idleUsage, &c.toolServerConfig, stderr)
	if err != nil {
		return c, err
	}
	fs.Lookup("stock").Usage += ", or none"
	clones := fs.String("clones", "1,8", "numbers of sandboxes, separated by commas")
	waits := fs.String("waits", "1s,10s,60s", "how long they wait, separated by commas")
	fs.IntVar(&c.rounds, "rounds", 7, "how often each waits so long")
	fs.BoolVar(&c.fresh, "fresh", false, "start sandboxes instead of restoring them")
	fs.StringVar(&c.json, "json", "", "write all samples to this `file`")
	types := fs.String("rootfs-type", rootfsFolder, "kinds of root file system to measure with, folder (with a gofer) and erofs (an image, without), separated by commas")
	if err := parseFlags(fs, args); err != nil {
		return c, err
	}
	bad := func(format string, a ...any) (idleConfig, error) {
		fmt.Fprintf(stderr, "agentbench idle: "+format+"\n", a...)
		return c, errUsage
	}
	for s := range strings.SplitSeq(*clones, ",") {
		n, err := strconv.Atoi(s)
		if err != nil || n < 1 {
			return bad("--clones must be numbers of at least 1, not %q", *clones)
		}
		c.clones = append(c.clones, n)
	}
	for s := range strings.SplitSeq(*waits, ",") {
		d, err := time.ParseDuration(s)
		if err != nil || d <= 0 {
			return bad("--waits must be times such as 10s, not %q", *waits)
		}
		c.waits = append(c.waits, d)
	}
	if c.rootfsTypes, err = parseRootfsTypes(*types); err != nil {
		return bad("%v", err)
	}
	switch {
	case fs.NArg() > 0:
		return bad("unexpected argument %q", fs.Arg(0))
	case c.runtime == "none":
		return bad("--runtime must be a binary: only --stock may be none")
	case c.rounds < 1 || c.stepTimeout <= 0:
		return bad("--rounds must be at least 1, --step-timeout positive")
	}
	return c, nil
}

func runIdle(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	cfg, err := parseIdleFlags(args, stderr)
	if err != nil {
		return err
	}
	if os.Geteuid() != 0 {
		return errors.New("sandboxes need root: run it as root, e.g. with sudo")
	}
	r := &idleRun{cfg: cfg, stderr: stderr, began: time.Now()}
	r.report.Command, r.report.Fresh = strings.Join(os.Args, " "), cfg.fresh
	err = r.run(ctx)
	cerr := r.cleanup()
	if ctx.Err() != nil {
		return interrupted(cerr)
	}
	if cerr != nil {
		err = errors.Join(err, fmt.Errorf("cleaning up: %w", cerr))
	}
	if cfg.json != "" && len(r.report.Samples) != 0 {
		b, jerr := json.MarshalIndent(&r.report, "", " ")
		if jerr == nil {
			jerr = os.WriteFile(cfg.json, b, 0o644)
		}
		err = errors.Join(err, jerr)
	}
	if err != nil {
		return err
	}
	return printIdle(stdout, r.report.Samples)
}

// idleRun is one run.
type idleRun struct {
	cfg     idleConfig
	stderr  io.Writer
	began   time.Time
	dir     *runDir
	systems []*system
	report  idleReport
}

func (r *idleRun) say(format string, args ...any) {
	fmt.Fprintf(r.stderr, "[%5.1fs] "+format+"\n", append([]any{time.Since(r.began).Seconds()}, args...)...)
}

func (r *idleRun) cleanup() error {
	var errs []error
	for _, s := range r.systems {
		errs = append(errs, s.rt.Close())
	}
	err := errors.Join(errs...)
	if r.dir != nil {
		err = r.dir.end(err)
	}
	return err
}

func (r *idleRun) run(ctx context.Context) error {
	if err := reclaimRuns(r.cfg.work, r.say); err != nil {
		return err
	}
	var err error
	if r.dir, err = newRunDir(r.cfg.work); err != nil {
		return err
	}
	for _, o := range []struct {
		name, binary string
		flags        []string
	}{
		{stockName, r.cfg.stock, nil},
		{judgedName, r.cfg.runtime, r.cfg.runtimeFlags},
	} {
		if o.binary == "none" {
			continue
		}
		root, err := r.dir.reserveRoot(o.name)
		if err != nil {
			return err
		}
		opts := fleet.Options{Binary: o.binary, Root: root, Flags: o.flags}
		if r.cfg.verbose {
			opts.Log = r.stderr
		}
		rt, err := fleet.New(opts)
		if err != nil {
			return err
		}
		r.systems = append(r.systems, &system{name: o.name, rt: rt})
	}
	rootfs, err := prepareRootfs(ctx, r.cfg.rootfs, r.say)
	if err != nil {
		return err
	}
	if err := installToolServer(rootfs); err != nil {
		return err
	}
	var subjects []idleSubject
	for i, t := range r.cfg.rootfsTypes {
		spec, err := withRootfsType(ctx, workloadSpec(rootfs, r.cfg.seed), t, r.say)
		if err != nil {
			return err
		}
		bundle := filepath.Join(r.dir.path, "bundle-"+t)
		if err := fleet.WriteBundle(bundle, spec); err != nil {
			return err
		}
		image := ""
		if !r.cfg.fresh {
			judged := r.systems[len(r.systems)-1]
			image = filepath.Join(r.dir.path, "image-"+t)
			if _, err := makeTemplate(ctx, judged.rt, fmt.Sprintf("template-%d", i), bundle, image, r.cfg.stepTimeout); err != nil {
				return err
			}
		}
		for _, s := range r.systems {
			subjects = append(subjects, idleSubject{system: s, rootfs: t, bundle: bundle, image: image})
		}
	}
	for i, n := range r.cfg.clones {
		order := slices.Clone(subjects)
		if i%2 == 1 {
			slices.Reverse(order)
		}
		for _, s := range order {
			if err := r.episode(ctx, s, n, i); err != nil {
				return fmt.Errorf("%s with %d sandboxes: %w", s.title(), n, err)
			}
		}
	}
	return nil
}

// idleSubject is what an episode measures.
type idleSubject struct {
	*system
	rootfs        string
	bundle, image string
}

func (s idleSubject) title() string { return idleTitle(s.name, s.rootfs) }

// idleTitle is what a system is called; a folder is what all have that have no other
// root file system.
func idleTitle(system, rootfs string) string {
	if rootfs == "" || rootfs == rootfsFolder {
		return system
	}
	return system + ", " + rootfs
}

// firstCommand is what a sandbox is asked after a wait: a small step whose work
// does not depend on when it is done.
func firstCommand(clone int) string {
	return request{Op: "step", Name: "explore", Args: map[string]any{
		"pattern": textPatterns[clone%len(textPatterns)], "name": "get", "package": "dateutil", "top": 3}}.line()
}

// episode measures n sandboxes of a system. number tells it from others.
func (r *idleRun) episode(ctx context.Context, s idleSubject, n, number int) error {
	var sandboxes []*fleet.Sandbox
	defer func() {
		for _, sb := range sandboxes {
			if err := sb.Delete(context.WithoutCancel(ctx)); err != nil {
				r.say("note: %v", err)
			}
		}
	}()
	for i := range n {
		id := fmt.Sprintf("%s-%s-%d-%d-%03d", s.name, s.rootfs, number, n, i)
		var sb *fleet.Sandbox
		var err error
		if s.image == "" {
			if sb, err = s.rt.Run(ctx, id, s.bundle); err == nil {
				sandboxes = append(sandboxes, sb)
				_, err = sb.ReadLine(ctx)
			}
		} else if sb, err = s.rt.Restore(ctx, id, s.bundle, s.image); err == nil {
			sandboxes = append(sandboxes, sb)
		}
		if err != nil {
			return err
		}
	}
	_, err := sandboxes[0].Stats(ctx)
	s.hasStats = err == nil
	if err != nil && !errors.Is(err, fleet.ErrNoAgentzip) {
		return err
	}
	last := make([]time.Time, n)
	for i, sb := range sandboxes {
		for _, round := range []int{0, 1} {
			if _, err := ask(ctx, sb, planStep(r.cfg.seed, i, round).line(), r.cfg.stepTimeout); err != nil {
				return endedWhy(sb, err)
			}
		}
		if _, err := ask(ctx, sb, firstCommand(i), r.cfg.stepTimeout); err != nil {
			return endedWhy(sb, err)
		}
		last[i] = time.Now()
	}
	for round := range r.cfg.rounds {
		for _, wait := range r.cfg.waits {
			for i, sb := range sandboxes {
				select {
				case <-ctx.Done():
					return ctx.Err()
				case <-time.After(time.Until(last[i].Add(wait))):
				}
				m := idleSample{System: s.name, Rootfs: s.rootfs, Start: sb.StartDuration().Seconds(), Clones: n, Clone: i, Round: round, Wait: wait.Seconds()}
				began := time.Now()
				if _, err := ask(ctx, sb, firstCommand(i), r.cfg.stepTimeout); err != nil {
					return endedWhy(sb, err)
				}
				last[i] = time.Now()
				m.Seconds = last[i].Sub(began).Seconds()
				r.report.Samples = append(r.report.Samples, m)
			}
			// Memory is measured in a wait of the same length of its own, since to
			// measure takes time and processors.
			if round != 0 {
				continue
			}
			used := make([]usedCPU, n)
			if wait >= cpuMinWait {
				select {
				case <-ctx.Done():
					return ctx.Err()
				case <-time.After(time.Until(last[n-1].Add(wait / 2))):
				}
				for i, sb := range sandboxes {
					if err := used[i].begin(sb); err != nil {
						return endedWhy(sb, err)
					}
				}
			}
			for i, sb := range sandboxes {
				select {
				case <-ctx.Done():
					return ctx.Err()
				case <-time.After(time.Until(later(last[i].Add(wait), used[i].since.Add(wait/2)))):
				}
				m := &r.report.Samples[len(r.report.Samples)-n+i]
				// Before memory is measured, which asks the sandbox.
				if m.CPU, err = used[i].end(sb); err != nil {
					return endedWhy(sb, err)
				}
				if err := r.measure(ctx, s.system, sb, m); err != nil {
					return err
				}
			}
			for i, sb := range sandboxes {
				if _, err := ask(ctx, sb, firstCommand(i), r.cfg.stepTimeout); err != nil {
					return endedWhy(sb, err)
				}
				last[i] = time.Now()
			}
			r.say("%-8s %d sandboxes: waits of %v measured", s.title(), n, wait)
		}
	}
	return nil
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// A usedCPU measures how much of a processor a sandbox uses.
type usedCPU struct {
	since time.Time
	cpu   time.Duration
}

func (u *usedCPU) begin(sb *fleet.Sandbox) (err error) {
	u.cpu, err = sb.CPUTime()
	u.since = time.Now()
	return err
}

// end returns nil if there was no begin.
func (u *usedCPU) end(sb *fleet.Sandbox) (*float64, error) {
	if u.since.IsZero() {
		return nil, nil
	}
	cpu, err := sb.CPUTime()
	if err != nil {
		return nil, err
	}
	share := (cpu - u.cpu).Seconds() / time.Since(u.since).Seconds()
	return &share, nil
}

func (r *idleRun) measure(ctx context.Context, s *system, sb *fleet.Sandbox, m *idleSample) error {
	var err error
	if m.Measured, err = sb.Memory(); err != nil {
		return endedWhy(sb, err)
	}
	m.Outside = m.Measured.Overhead()
	if !s.hasStats {
		return nil
	}
	st, err := sb.Stats(ctx)
	if err != nil {
		return err
	}
	m.Owned = st.OwnedBytes
	// These lie in the Sentry's memory, and are part of what guest memory costs.
	m.Store = st.StoreBytes + st.MetadataBytes
	m.Outside -= min(m.Outside, m.Store)
	return nil
}

// percent is the mean of shares, or nothing if there are none.
func percent(shares []float64) string {
	if len(shares) == 0 {
		return ""
	}
	sum := 0.0
	for _, s := range shares {
		sum += s
	}
	return fmt.Sprintf("%.2f %%", 100*sum/float64(len(shares)))
}

// printIdle prints medians.
func printIdle(w io.Writer, samples []idleSample) error {
	type key struct {
		clones int
		wait   float64
		system string
	}
	by := map[key][]idleSample{}
	var keys []key
	for _, s := range samples {
		k := key{s.Clones, s.Wait, idleTitle(s.System, s.Rootfs)}
		if by[k] == nil {
			keys = append(keys, k)
		}
		by[k] = append(by[k], s)
	}
	slices.SortStableFunc(keys, func(a, b key) int {
		if a.clones != b.clones {
			return a.clones - b.clones
		}
		return int(1000 * (a.wait - b.wait))
	})
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "clones\twait\tsystem\tSentry\tgofer\tstubs\tpage tables\tfiles\tmemfds\toutside\tstart\tfirst command\tp99\tsamples\tCPU\t")
	for _, k := range keys {
		var seconds, starts, cpu []float64
		parts := make([][]float64, 7)
		for _, s := range by[k] {
			seconds, starts = append(seconds, s.Seconds), append(starts, s.Start)
			if s.CPU != nil {
				cpu = append(cpu, *s.CPU)
			}
			if s.Outside == 0 {
				continue
			}
			m := s.Measured
			file := m.Sentry.PSSFile + m.Gofer.PSSFile + m.Stubs.PSSFile
			if m.Template != nil {
				file -= min(file, m.Template.MappedPSS)
			}
			for i, v := range []uint64{
				m.Sentry.PSSAnon - min(m.Sentry.PSSAnon, s.Store), m.Gofer.PSSAnon, m.Stubs.PSSAnon,
				m.Sentry.PageTables + m.Gofer.PageTables + m.Stubs.PageTables, file, m.OtherMemfd, s.Outside,
			} {
				parts[i] = append(parts[i], float64(v)/(1<<20))
			}
		}
		fmt.Fprintf(t, "%d\t%gs\t%s\t", k.clones, k.wait, k.system)
		for _, p := range parts {
			fmt.Fprintf(t, "%.2f\t", quantile(p, 0.5))
		}
		fmt.Fprintf(t, "%.0f ms\t%.1f ms\t%.1f ms\t%d\t%s\t\n", 1000*quantile(starts, 0.5), 1000*quantile(seconds, 0.5), 1000*quantile(seconds, 0.99), len(seconds), percent(cpu))
	}
	if err := t.Flush(); err != nil {
		return err
	}
	_, err := fmt.Fprint(w, `
Medians, in MiB per sandbox. Sentry, gofer, stubs: their anonymous memory, without
the store of evicted guest memory. files: binaries and libraries, in proportion to
how many processes map them. outside: the sum of the parts. start: what it took to
restore it, or to start it. CPU: the mean share of a processor that it uses in the
second half of a wait of 10 s or more.
`)
	return err
}
