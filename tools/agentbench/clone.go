package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"time"

	"runsc-agentzip/pkg/fleet"
	"runsc-agentzip/tools/agentbench/report"
	"runsc-agentzip/tools/agentbench/workload"
)

const (
	// shortestSampled is the shortest wait in which memory is measured.
	shortestSampled = 500 * time.Millisecond
	// swapAfter is how long a clone must have waited before its memory is
	// swapped out: what the runtime under test waits by default before it
	// evicts.
	swapAfter = 200 * time.Millisecond
)

// clone is one sandbox of an episode.
type clone struct {
	e     *episode
	index int
	sb    *fleet.Sandbox
	plan  []workload.Step
	// swap is set where the clone's memory is swapped out when it waits.
	swap *swapper

	// idleSince is when the clone last answered.
	idleSince time.Time

	steps []report.Step
	// answers has one entry for each step and, at last, the clone's state.
	answers []string
}

// restore starts the clone and returns the time to its first answer.
func (c *clone) restore(ctx context.Context) (time.Duration, error) {
	began := time.Now()
	sb, err := c.e.start(ctx, c.index)
	if err != nil {
		return 0, err
	}
	c.sb = sb
	if _, err := c.request(ctx, request{Op: "ping"}.line()); err != nil {
		return 0, fmt.Errorf("first answer after the restore: %w", err)
	}
	took := time.Since(began)
	c.beginWait()
	return took, nil
}

// drive takes the clone through its steps, each after its wait. After the last
// step it waits once more, for what its waits are on average, so that every
// step is followed by a wait.
func (c *clone) drive(ctx context.Context) error {
	var total time.Duration
	for i, s := range c.plan {
		d := c.e.scaled(s.Wait)
		total += d
		if err := c.wait(ctx, i-1, d); err != nil {
			return err
		}
		if err := c.step(ctx, i, s); err != nil {
			return fmt.Errorf("%s clone %d, step %d (%s): %w", c.e.key.System, c.index, i, s.Kind, err)
		}
	}
	return c.wait(ctx, len(c.plan)-1, total/time.Duration(len(c.plan)))
}

// wait lets the clone wait and has its memory measured late in the wait, if
// that is long enough. index is the step that it follows.
func (c *clone) wait(ctx context.Context, index int, d time.Duration) error {
	waiting := &c.e.timeline.waiting
	waiting.Add(1)
	defer waiting.Add(-1)
	began := time.Now()
	if d >= shortestSampled {
		if err := sleep(ctx, sampleAt(d)); err != nil {
			return err
		}
		// A measurement that has not ended with the wait is given up.
		sctx, cancel := context.WithCancel(ctx)
		defer cancel()
		c.e.meter.request(sctx, c, waitID{index, c.idleSince})
	}
	return sleep(ctx, d-time.Since(began))
}

// sampleAt is how long after the begin of a wait memory is measured: late, but
// with a second left to do it in.
func sampleAt(d time.Duration) time.Duration {
	return max(d*6/10, d-time.Second)
}

// step takes one step.
func (c *clone) step(ctx context.Context, index int, s workload.Step) error {
	c.endWait()
	began := time.Now()
	answer, err := c.request(ctx, string(s.Request))
	took := time.Since(began)
	if err != nil {
		return err
	}
	waited := began.Sub(c.idleSince)
	c.beginWait()
	c.answers = append(c.answers, answer)
	c.steps = append(c.steps, report.Step{
		Key: c.e.key, Clone: c.index, Index: index, Kind: s.Kind,
		Began: began.Sub(c.e.began).Seconds(), WaitSeconds: waited.Seconds(), Seconds: took.Seconds(),
		Output: digest(answer),
	})
	if _, err := resultOf(answer); err != nil {
		c.e.problem(true, "clone %d, step %d (%s): %v", c.index, index, s.Kind, err)
	}
	c.e.stepDone()
	return nil
}

// state asks for a digest of everything the clone holds.
func (c *clone) state(ctx context.Context) error {
	c.endWait()
	answer, err := c.request(ctx, request{Op: stateKind}.line())
	if err != nil {
		return fmt.Errorf("%s clone %d, digest of its whole state: %w", c.e.key.System, c.index, err)
	}
	c.beginWait()
	c.answers = append(c.answers, answer)
	if _, err := resultOf(answer); err != nil {
		c.e.problem(true, "clone %d, digest of its whole state: %v", c.index, err)
	}
	return nil
}

// stateKind is the request for the digest of a clone's state, and the kind of
// step that its answer is compared as.
const stateKind = "state"

// request sends one line and returns the answer, whatever it says.
func (c *clone) request(ctx context.Context, line string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, c.e.r.cfg.stepTimeout)
	defer cancel()
	answer, err := c.sb.Request(ctx, line)
	if err != nil {
		return "", endedWhy(c.sb, err)
	}
	return answer, nil
}

// beginWait notes that the clone has answered and waits from now on.
func (c *clone) beginWait() {
	c.idleSince = time.Now()
	if c.swap != nil {
		c.swap.arm(swapAfter)
	}
}

func (c *clone) endWait() {
	if c.swap != nil {
		c.swap.disarm()
	}
}

// digest shortens an answer to what tells it from others.
func digest(answer string) string {
	h := sha256.Sum256([]byte(answer))
	return hex.EncodeToString(h[:8])
}
