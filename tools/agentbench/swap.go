package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"time"

	"runsc-agentzip/pkg/fleet"
	"runsc-agentzip/tools/agentbench/linuxmem"
	"runsc-agentzip/tools/agentbench/report"
)

// swapState is the file in the run's directory that says what was changed on the
// host for the sake of the system linux.
const swapState = "linuxmem.json"

// swapTimeout bounds how long the host takes to be as it was before.
const swapTimeout = 5 * time.Minute

// runEnter becomes a command in a memory cgroup; linuxmem starts it so.
func runEnter(_ context.Context, args []string, _, _ io.Writer) error {
	linuxmem.Enter(args) // does not return
	return nil
}

// probeSwap finds out whether the machine can run the system linux, by setting
// everything up and removing it again.
func (b *benchmark) probeSwap(ctx context.Context) error {
	if err := b.setUpSwap(ctx); err != nil {
		return err
	}
	return b.removeSwap()
}

// setUpSwap makes b.swap.
func (b *benchmark) setUpSwap(ctx context.Context) error {
	host, err := linuxmem.Setup(ctx, linuxmem.Options{StateFile: b.swapState()})
	if err == nil {
		b.swap = host
	}
	return err
}

func (b *benchmark) swapState() string { return filepath.Join(b.dir.path, swapState) }

// removeSwap puts the host back. The sandboxes must have ended. If it fails it may
// be called again.
func (b *benchmark) removeSwap() error {
	ctx, cancel := context.WithTimeout(context.Background(), swapTimeout)
	defer cancel()
	if b.swap != nil {
		if err := b.swap.Close(ctx); err != nil {
			return err
		}
		b.swap = nil
		return nil
	}
	if !b.swapLeft() {
		return nil
	}
	return linuxmem.RestoreHost(b.swapState())
}

// swapLeft says whether anything on the host is changed, also by a Setup that
// failed and could not take back what it had done.
func (b *benchmark) swapLeft() bool {
	_, err := os.Lstat(b.swapState())
	return err == nil
}

// swapHost is a linuxmem.Host as far as it has to be removed.
type swapHost interface{ Close(context.Context) error }

// swapSpace is the swap device of an episode, which exists no longer than it.
type swapSpace struct {
	e    *episode
	host *linuxmem.Host
}

func openSwapSpace(ctx context.Context, e *episode) (*swapSpace, error) {
	if err := e.r.setUpSwap(ctx); err != nil {
		return nil, err
	}
	return &swapSpace{e: e, host: e.r.swap.(*linuxmem.Host)}, nil
}

// close puts the host back. The sandboxes must have ended.
func (s *swapSpace) close() error { return s.e.r.removeSwap() }

// swapper swaps the memory of one clone out while it waits.
type swapper struct {
	space *swapSpace
	clone int
	group *linuxmem.Group

	mu   sync.Mutex
	stop func() // of the wait that goes on
	// cpu is what swapping out has taken. It is the system's work, done in the
	// name of this process.
	cpu time.Duration
	// done is closed when what the last arm began has ended.
	done chan struct{}
}

func (s *swapSpace) swapper(clone int) (*swapper, error) {
	g, err := s.host.Group(fmt.Sprintf("clone-%d", clone))
	if err != nil {
		return nil, err
	}
	return &swapper{space: s, clone: clone, group: g}, nil
}

// startOptions make a sandbox start in the clone's group.
func (s *swapper) startOptions() []fleet.StartOption {
	return []fleet.StartOption{fleet.WithLauncher(s.group.Launcher()...)}
}

// arm has the clone's memory swapped out after a while, unless disarmed before.
func (s *swapper) arm(after time.Duration) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	s.mu.Lock()
	s.stop = cancel
	before := s.done
	s.done = done
	s.mu.Unlock()
	go func() {
		defer close(done)
		defer cancel()
		if before != nil {
			<-before
		}
		if sleep(ctx, after) != nil {
			return
		}
		r, err := s.group.Reclaim(ctx)
		if err != nil {
			s.space.e.problem(true, "swapping clone %d out: %v", s.clone, err)
		}
		s.mu.Lock()
		s.cpu += r.CPU
		s.mu.Unlock()
	}()
}

// disarm ends a wait: what is not swapped out by now stays. It does not hold
// the step up that follows.
func (s *swapper) disarm() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stop != nil {
		s.stop()
		s.stop = nil
	}
}

// cpuTime is the processor time that swapping out has taken.
func (s *swapper) cpuTime() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.cpu
}

// settle waits until the clone's memory is swapped out, if it waits.
func (s *swapper) settle(ctx context.Context) error {
	s.mu.Lock()
	done := s.done
	s.mu.Unlock()
	if done == nil {
		return nil
	}
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// close ends what goes on.
func (s *swapper) close() {
	s.disarm()
	s.settle(context.Background())
}

// measure completes a sample without looking at guest pages, which would bring
// them back. What is owned is estimated at the end (see pairMemory).
func (s *swapper) measure(m *report.Memory) error {
	u, err := s.group.Usage()
	if err != nil {
		return err
	}
	h, err := s.space.host.Usage()
	if err != nil {
		return err
	}
	m.SwapBytes = u.Swap
	// The group holds the attached runsc too, which is not the sandbox's.
	client := m.Measured.Client
	m.HostBytes = u.Bytes - min(u.Bytes, client.PSSAnon+client.PageTables) + h.Share(u.Swap-min(u.Swap, client.SwapPSS))
	// The blocks of memory files count pages whether they are swapped out or not.
	files := m.Measured.GuestMemfd + m.Measured.OtherMemfd
	resident := min(u.Shmem, files)
	s.space.e.keep(m, ratio(float64(resident+h.Share(files-resident)), float64(files)))
	return nil
}
