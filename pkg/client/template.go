package client

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"time"
)

// Template is what clones are restored from. It is only names: a scheduler may keep
// it as JSON and use it later, or fill one in by hand.
type Template struct {
	// Dir is the folder of the image. It must not be written to while there are
	// clones; it may be removed, which takes effect when the last has ended.
	Dir string `json:"dir"`
	// Bundle is the bundle that the sandbox was started with, or an equal one.
	Bundle string `json:"bundle"`
	// Info is what CreateTemplate was told of it. A restore needs none of it.
	Info TemplateInfo `json:"info,omitzero"`
}

// TemplateInfo describes a template.
type TemplateInfo struct {
	// Pages is how many pages of memory it has, and Bytes their size.
	Pages uint64 `json:"pages"`
	Bytes uint64 `json:"bytes"`
	// Digest says which template it is, wherever it lies.
	Digest string `json:"digest"`
	// Created is when its index was made.
	Created time.Time `json:"created"`
	// IndexBytes is the size of the index.
	IndexBytes uint64 `json:"index_bytes"`
}

// TemplateOptions adjust CreateTemplate.
type TemplateOptions struct {
	// SettleCommand is run in the sandbox before, with /bin/sh -c: to collect
	// garbage, say. Its failure is CreateTemplate's.
	SettleCommand string
	// SettleTimeout is how long it may run and the sandbox may then keep working.
	// Default: 30 s. Negative: do not wait until the sandbox is quiet.
	SettleTimeout time.Duration
	// LeaveRunning has the sandbox go on afterwards.
	LeaveRunning bool
}

// CreateTemplate makes a template of a sandbox, which has ended when it returns (Delete
// then removes its state) unless LeaveRunning is set. dir is made if it does not
// exist; one that holds a template is refused. With LeaveRunning the sandbox stands
// still while its memory is written.
//
// A failure leaves no template, and the sandbox as it was, running; but the settle
// command may have been run. (Where only the index could not be made, or the sandbox
// does not end, the error says so, and the image is there.) If ctx ends first, a template that is being written is
// finished all the same, and returned, if that takes at most 30 s: half of it would
// be worth nothing, and the sandbox may have ended for it. If it takes longer, what
// is in dir is no template.
func (c *Client) CreateTemplate(ctx context.Context, id, dir string, o TemplateOptions) (Template, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return Template{}, fmt.Errorf("client: template: %w", err)
	}
	state, err := c.State(ctx, id)
	if err != nil {
		return Template{}, err
	}
	args := []string{"agentzip", "template", "create", "-json", "--image-path=" + dir}
	if o.SettleCommand != "" {
		args = append(args, "--settle-cmd="+o.SettleCommand)
	}
	if o.SettleTimeout != 0 {
		args = append(args, "--settle-timeout="+max(o.SettleTimeout, 0).String())
	}
	if o.LeaveRunning {
		args = append(args, "--leave-running")
	}
	args = append(args, id)
	info, err := commandToEnd[TemplateInfo](ctx, c, args...)
	if err != nil {
		return Template{}, err
	}
	t := Template{Dir: dir, Bundle: state.Bundle, Info: info}
	if o.LeaveRunning {
		return t, nil
	}
	// The command returns when the image is written, a moment before the end.
	wait, cancel := context.WithTimeout(context.WithoutCancel(ctx), grace)
	defer cancel()
	if err := c.ended(wait, id); err != nil {
		return t, fmt.Errorf("client: the template is there, but its sandbox has not ended: %w", err)
	}
	return t, nil
}

// TemplateInfo describes the template in dir. A plain checkpoint gets its index
// made, which reads all of it. A folder without a template is a *CommandError.
func (c *Client) TemplateInfo(ctx context.Context, dir string) (TemplateInfo, error) {
	return commandJSON[TemplateInfo](ctx, c, "agentzip", "template", "info", "-json", dir)
}

// VerifyTemplate reads all of the template in dir and compares it with its index. A
// template that was changed or truncated is a *CommandError that says where.
func (c *Client) VerifyTemplate(ctx context.Context, dir string) (TemplateInfo, error) {
	return commandJSON[TemplateInfo](ctx, c, "agentzip", "template", "verify", "-json", dir)
}

// SavePatterns writes what a clone has learnt about the memory that steps want
// beside its template, for clones that are restored later. It fails if the clone
// is of another template than the one in dir, or has learnt nothing yet; then what is
// there stays.
func (c *Client) SavePatterns(ctx context.Context, id, dir string) error {
	if err := c.find(id); err != nil {
		return err
	}
	_, err := c.Command(ctx, "agentzip", "prefetch", "-save", dir, id)
	return err
}

// Restore starts a clone of a template. It returns when the clone runs. A failure,
// and the end of ctx, are as with Run.
func (c *Client) Restore(ctx context.Context, t Template, s Start) error {
	if t.Dir == "" || t.Bundle == "" {
		return fmt.Errorf("client: %s: the template needs a folder and a bundle, has %q and %q", s.ID, t.Dir, t.Bundle)
	}
	dir, err := filepath.Abs(t.Dir)
	if err != nil {
		return fmt.Errorf("client: template: %w", err)
	}
	bundle, err := filepath.Abs(t.Bundle)
	if err != nil {
		return fmt.Errorf("client: bundle: %w", err)
	}
	return c.start(ctx, s, "restore", "--detach", "--bundle", bundle, "--image-path", dir, s.ID)
}

// RestoreAll starts several clones of a template, parallel of them at a time; with
// 0, as many as there are processors. Either all are there, or none: if one fails,
// no more are started, those that were are deleted, and the error is a
// *RestoreError that says which failed and why. The end of ctx counts as a failure.
// Sandboxes that were there before are not touched.
func (c *Client) RestoreAll(ctx context.Context, t Template, starts []Start, parallel int) error {
	var taken []string
	for _, s := range starts {
		if err := c.free(s.ID, taken...); err != nil {
			return &RestoreError{Clones: len(starts), Failed: []SandboxError{{s.ID, err}}}
		}
		taken = append(taken, s.ID)
	}
	if parallel <= 0 {
		parallel = runtime.GOMAXPROCS(0)
	}
	rest, stop := context.WithCancel(ctx)
	defer stop()
	errs := make([]error, len(starts))
	each(len(starts), parallel, func(i int) {
		if errs[i] = c.Restore(rest, t, starts[i]); errs[i] != nil {
			stop()
		}
	})
	e := &RestoreError{Clones: len(starts)}
	for i, err := range errs {
		// Those that another's failure called off have not failed themselves, unless
		// something was left of them.
		if err != nil && (ctx.Err() != nil || !calledOff(err)) {
			e.Failed = append(e.Failed, SandboxError{starts[i].ID, err})
		}
	}
	if rest.Err() == nil {
		return nil
	}
	undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*grace)
	defer cancel()
	left := make([]error, len(starts))
	each(len(starts), parallel, func(i int) {
		if errs[i] == nil {
			left[i] = c.Delete(undo, starts[i].ID)
		}
	})
	for i, err := range left {
		if err != nil {
			e.Left = append(e.Left, SandboxError{starts[i].ID, err})
		}
	}
	return e
}

// calledOff tells whether a start failed for nothing but its context.
func calledOff(err error) bool {
	var ce *CommandError
	return errors.As(err, &ce) && isOnly(ce.Err, context.Canceled)
}

// isOnly tells whether all that is joined in an error is the target.
func isOnly(err, target error) bool {
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		return err == target
	}
	for _, e := range joined.Unwrap() {
		if !isOnly(e, target) {
			return false
		}
	}
	return true
}

// each calls f for 0 to n-1, so many at a time, and returns when all are done.
func each(n, parallel int, f func(i int)) {
	var wg sync.WaitGroup
	turn := make(chan struct{}, parallel)
	for i := range n {
		turn <- struct{}{}
		wg.Go(func() {
			defer func() { <-turn }()
			f(i)
		})
	}
	wg.Wait()
}

// SandboxError is what happened to one sandbox of several.
type SandboxError struct {
	ID  string
	Err error
}

// RestoreError says why RestoreAll started nothing. errors.Is and errors.As look
// into all that failed.
type RestoreError struct {
	// Clones is how many there were to be.
	Clones int
	// Failed are those that could not be started, with the reason.
	Failed []SandboxError
	// Left are those that had been started and could not be deleted. They may still
	// run.
	Left []SandboxError
}

func (e *RestoreError) Error() string {
	list := func(b *strings.Builder, all []SandboxError) {
		for i, s := range all {
			if i > 0 {
				b.WriteString("; ")
			}
			fmt.Fprintf(b, "%s: %v", s.ID, s.Err)
		}
	}
	var b strings.Builder
	fmt.Fprintf(&b, "client: %d of %d clones failed, and all were undone: ", len(e.Failed), e.Clones)
	list(&b, e.Failed)
	if len(e.Left) > 0 {
		b.WriteString("; but these could not be deleted: ")
		list(&b, e.Left)
	}
	return b.String()
}

// Unwrap returns the errors of all sandboxes.
func (e *RestoreError) Unwrap() []error {
	var all []error
	for _, s := range append(e.Failed[:len(e.Failed):len(e.Failed)], e.Left...) {
		all = append(all, s.Err)
	}
	return all
}

// Fork makes a template of a sandbox that goes on, in dir, and starts clones of it,
// parallel of them at a time. They have all that the sandbox had in its memory and
// its file system when the template was made.
//
// If the clones fail, which is a *RestoreError, the template stays and is returned
// with the error: it is good, and RestoreAll can be tried again. Any other error is
// CreateTemplate's.
func (c *Client) Fork(ctx context.Context, id, dir string, clones []Start, parallel int) (Template, error) {
	// Before the work, what it would fail of afterwards.
	var taken []string
	for _, s := range clones {
		if err := c.free(s.ID, taken...); err != nil {
			return Template{}, err
		}
		taken = append(taken, s.ID)
	}
	t, err := c.CreateTemplate(ctx, id, dir, TemplateOptions{LeaveRunning: true})
	if err != nil {
		return Template{}, err
	}
	return t, c.RestoreAll(ctx, t, clones, parallel)
}
