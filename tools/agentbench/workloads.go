package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"runsc-agentzip/pkg/fleet"
	"runsc-agentzip/tools/agentbench/report"
	"runsc-agentzip/tools/agentbench/workload"
)

// parseWorkloads translates a list of names of workloads.
func parseWorkloads(list string) ([]workload.Workload, error) {
	names := strings.Split(list, ",")
	if strings.TrimSpace(list) == "all" {
		names = workload.Names()
	}
	var out []workload.Workload
	seen := make(map[string]bool)
	for _, name := range names {
		name = strings.TrimSpace(name)
		if seen[name] {
			continue
		}
		seen[name] = true
		w, err := workload.Get(name)
		if err != nil {
			return nil, err
		}
		out = append(out, w)
	}
	return out, nil
}

// preparedWorkload is a workload whose template has been made.
type preparedWorkload struct {
	workload.Workload
	seed  uint64
	steps int

	dir    string
	bundle string
	// images are the checkpoints, by whether a judged binary restores them.
	images map[bool]string
	// reference is the template's memory as clones see it, if it is needed.
	reference *fleet.GuestSnapshot
}

// plan returns the steps of one clone in one repetition, the same for all
// systems.
func (w *preparedWorkload) plan(repetition, clone int) []workload.Step {
	return w.Plan(w.seed+uint64(repetition), clone, w.steps)
}

// close removes the template.
func (w *preparedWorkload) close() error {
	var err error
	if w.reference != nil {
		err = w.reference.Close()
	}
	return errors.Join(err, os.RemoveAll(w.dir))
}

// rootfsName is what the directory of a workload's root file system is called.
func rootfsName(w workload.Workload) string { return "rootfs-" + w.Rootfs }

// rootfs makes the root file system of a workload, or finds it.
func (b *benchmark) rootfs(ctx context.Context, w workload.Workload) (string, error) {
	o := b.cfg.rootfs
	o.dir, o.packages = filepath.Join(b.cfg.rootfsDir, rootfsName(w)), w.Packages
	dir, err := prepareRootfs(ctx, o, b.progress.say)
	if err != nil {
		return "", fmt.Errorf("root file system of %s: %w", w.Name, err)
	}
	if err := w.Install(dir); err != nil {
		return "", fmt.Errorf("root file system of %s: %w", w.Name, err)
	}
	return dir, nil
}

// prepare makes the template of a workload in place of the one before. The
// judged runtime makes it if there is one: that it can, and that a stock runsc
// restores the result, is part of what is shown. Only binaries of different
// versions, which gVisor does not let restore each other's images, get an image
// each.
func (b *benchmark) prepare(ctx context.Context, w workload.Workload, rootfs string) error {
	if b.work != nil {
		if err := b.work.close(); err != nil {
			return err
		}
	}
	p := &preparedWorkload{
		Workload: w, seed: b.cfg.seed, steps: b.cfg.steps,
		dir: filepath.Join(b.dir.path, "workload-"+w.Name), images: make(map[bool]string),
	}
	b.work = p
	p.bundle = filepath.Join(p.dir, "bundle")
	spec, err := withRootfsType(ctx, w.Spec(rootfs, b.cfg.seed), b.cfg.rootfsType, b.progress.say)
	if err != nil {
		return err
	}
	if err := fleet.WriteBundle(p.bundle, spec); err != nil {
		return err
	}
	made := report.Workload{Name: w.Name, Summary: w.Summary}
	for _, judged := range []bool{true, false} {
		rt := b.makers[judged]
		if rt == nil {
			continue
		}
		if image := p.images[!judged]; image != "" && b.versions[judged] == b.versions[!judged] {
			p.images[judged] = image
			continue
		}
		b.progress.say("%s: making the template with %s", w.Name, rt.Binary())
		image := filepath.Join(p.dir, map[bool]string{false: "stock", true: "runtime"}[judged]+"-image")
		t, err := makeTemplate(ctx, rt, "template-"+w.Name, p.bundle, image, b.cfg.stepTimeout)
		if err != nil {
			return err
		}
		p.images[judged] = image
		b.progress.say("%s: ready after %.1f s, checkpointed in %.1f s, image %s", w.Name, t.start.Seconds(), t.checkpoint.Seconds(), mib(t.imageBytes))
		if made.ImageBytes == 0 {
			made.StartSeconds, made.CheckpointSeconds = t.start.Seconds(), t.checkpoint.Seconds()
			made.ImageBytes, made.TemplateBytes = t.imageBytes, t.memfdBytes
		}
	}
	b.report.Workloads = append(b.report.Workloads, made)
	if err := b.restoreOnce(ctx); err != nil {
		return err
	}
	// What was written must not be on its way to the disk during an episode.
	unix.Sync()
	return b.warmUp(ctx)
}

// warmUp takes the steps of one cycle once, untimed and without waits: the first
// episode shall find what they read from the root file system in the host's page
// cache, as the later ones do.
func (b *benchmark) warmUp(ctx context.Context) error {
	p := b.work
	plan := p.plan(0, 0)
	plan = plan[:min(len(plan), p.Cycle)]
	if len(plan) == 0 {
		return nil
	}
	c := warmSystem(b.contenders)
	sb, err := c.rt.Restore(ctx, "warm-"+p.Name, p.bundle, p.images[c.judged])
	if err != nil {
		return fmt.Errorf("restoring the template under %s: %w", c.name, err)
	}
	for i, s := range plan {
		b.progress.status("%s: step %d/%d before anything is timed", p.Name, i+1, len(plan))
		sctx, cancel := context.WithTimeout(ctx, b.cfg.stepTimeout)
		// A step that fails will do so in the episodes, which tell.
		_, err := sb.Request(sctx, string(s.Request))
		cancel()
		if err != nil {
			return fmt.Errorf("step %d (%s) before anything is timed: %w", i, s.Kind, endedWhy(sb, err))
		}
	}
	return sb.Delete(ctx)
}

// warmSystem is the system that warms caches up: the simplest.
func warmSystem(contenders []*contender) *contender {
	rank := func(c *contender) int {
		switch {
		case c.name == report.Stock:
			return 0
		case !c.judged:
			return 1
		case !c.counted:
			return 2
		}
		return 3
	}
	return slices.MinFunc(contenders, func(a, b *contender) int { return cmp.Compare(rank(a), rank(b)) })
}

// restoreOnce restores a clone under each binary before anything is timed: the
// first restore of an image makes an index of it and fills caches. A clone that
// holds all of the template is what others are compared with.
func (b *benchmark) restoreOnce(ctx context.Context) error {
	p := b.work
	warm := make(map[bool]bool)
	for _, c := range b.contenders {
		id, image := "first-"+p.Name, p.images[c.judged]
		switch {
		case !c.counted && !c.swaps && p.reference == nil:
			ref, err := takeReference(ctx, c.rt, id, p.bundle, image, filepath.Join(p.dir, "reference"))
			if err != nil {
				return err
			}
			p.reference = ref
		case c.judged && c.counted && !warm[true]:
			sb, err := c.rt.Restore(ctx, id, p.bundle, image)
			if err != nil {
				return fmt.Errorf("restoring the template under %s: %w", c.name, err)
			}
			if _, err := ask(ctx, sb, request{Op: "ping"}.line(), b.cfg.stepTimeout); err != nil {
				return fmt.Errorf("first restore under %s: %w", c.name, endedWhy(sb, err))
			}
			if err := sb.Delete(ctx); err != nil {
				return err
			}
		default:
			continue
		}
		warm[c.judged] = true
	}
	return nil
}
