package main

import (
	"context"
	"fmt"
	"time"

	"runsc-agentzip/pkg/fleet"
)

// sleep waits, unless the run is interrupted.
func sleep(ctx context.Context, t time.Duration) error {
	timer := time.NewTimer(t)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

type quiescence struct {
	took  time.Duration
	quiet bool
}

// quiesce waits until the sandboxes and their page pool, if it is not nil,
// together use less than a twentieth of one core, or for limit.
func quiesce(ctx context.Context, sbs []*fleet.Sandbox, pool *pagePool, limit time.Duration) (quiescence, error) {
	const window = 500 * time.Millisecond
	total := func() (time.Duration, error) {
		var t time.Duration
		for _, sb := range sbs {
			c, err := sb.CPUTime()
			if err != nil {
				return 0, fmt.Errorf("while waiting: %w", endedWhy(sb, err))
			}
			t += c
		}
		if pool != nil {
			c, err := pool.CPUTime()
			if err != nil {
				return 0, fmt.Errorf("while waiting: %w", err)
			}
			t += c
		}
		return t, nil
	}
	began := time.Now()
	prev, err := total()
	if err != nil {
		return quiescence{}, err
	}
	for {
		if err := sleep(ctx, window); err != nil {
			return quiescence{}, err
		}
		cur, err := total()
		if err != nil {
			return quiescence{}, err
		}
		if cur-prev < window/20 {
			return quiescence{time.Since(began), true}, nil
		}
		if time.Since(began) >= limit {
			return quiescence{time.Since(began), false}, nil
		}
		prev = cur
	}
}

// hostLoad is what the host's processors do while nothing of ours runs.
type hostLoad struct {
	// busy is a fraction of all processors, perSecond the processor seconds
	// that are used in a second.
	busy, perSecond float64
	quiet           bool
}

// quietLoad is the load up to which a host counts as quiet.
const quietLoad = 0.05

// awaitQuietHost waits until the host has been quiet for a second, or for
// limit, and tells how busy it was in the last second.
func awaitQuietHost(ctx context.Context, limit time.Duration) (hostLoad, error) {
	const window = time.Second
	began := time.Now()
	for {
		before, err := readCPUTimes()
		if err != nil {
			return hostLoad{}, err
		}
		at := time.Now()
		if err := sleep(ctx, window); err != nil {
			return hostLoad{}, err
		}
		after, err := readCPUTimes()
		if err != nil {
			return hostLoad{}, err
		}
		busy := (after.busy - before.busy).Seconds()
		l := hostLoad{
			busy:      ratio(busy, (after.all - before.all).Seconds()),
			perSecond: busy / time.Since(at).Seconds(),
		}
		l.quiet = l.busy < quietLoad
		if l.quiet || time.Since(began) >= limit {
			return l, nil
		}
	}
}
