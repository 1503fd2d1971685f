package main

import (
	"bufio"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sort"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"runsc-agentzip/pkg/fleet"
)

// The micro benchmark measures the two costs that everything else is made of:
// what a fault on evicted memory costs next to what any first touch costs under
// gVisor, and what the backend costs a sandbox that is never evicted.
//
// The guest is this binary again ("agentbench guest"), so nothing has to be
// installed.

// microUnits are the map units compared, in KiB.
var microUnits = []int{4, 16, 64, 256}

type microResult struct {
	Command string `json:"command"`
	// NS has the samples of each measurement, nanoseconds per page or per
	// operation, by name.
	NS map[string][]float64 `json:"ns"`
}

func runMicro(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	fs := flag.NewFlagSet("micro", flag.ContinueOnError)
	fs.SetOutput(stderr)
	runtime := fs.String("runtime", "bin/runsc-agentzip", "runsc-agentzip binary")
	stock := fs.String("stock", "bin/runsc-stock", "stock runsc binary")
	pages := fs.Int("pages", 4096, "pages touched per sample")
	rounds := fs.Int("rounds", 5, "rounds; each measures everything once, in turn")
	out := fs.String("json", "", "write all samples to this file")
	if err := fs.Parse(args); err != nil {
		if err == flag.ErrHelp {
			return err
		}
		return errUsage
	}
	if fs.NArg() != 0 || *pages < 16 || *rounds < 1 {
		fmt.Fprintln(stderr, "agentbench micro: -pages must be at least 16, -rounds at least 1, and there are no arguments")
		return errUsage
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("/var/tmp", "agentbench-micro-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	bundle := filepath.Join(dir, "bundle")
	spec := fleet.Spec{Rootfs: "/", ReadonlyRootfs: true, Args: []string{self, "guest", strconv.Itoa(*pages)}}
	if err := fleet.WriteBundle(bundle, spec); err != nil {
		return err
	}
	res := microResult{Command: strings.Join(os.Args, " "), NS: map[string][]float64{}}
	add := func(name string, ns float64) { res.NS[name] = append(res.NS[name], ns) }

	// with runs f against one sandbox.
	n := 0
	with := func(binary string, flags []string, f func(*fleet.Sandbox) error) error {
		r, err := fleet.New(fleet.Options{Binary: binary, Flags: flags})
		if err != nil {
			return err
		}
		defer r.Close()
		n++
		s, err := r.Run(ctx, fmt.Sprintf("micro-%d", n), bundle)
		if err != nil {
			return err
		}
		return f(s)
	}
	ask := func(s *fleet.Sandbox, what string) (float64, error) {
		line, err := s.Request(ctx, what)
		if err != nil {
			return 0, err
		}
		return strconv.ParseFloat(strings.TrimSpace(line), 64)
	}

	for round := range *rounds {
		fmt.Fprintf(stdout, "round %d of %d\n", round+1, *rounds)
		// Costs of a sandbox that is not evicted.
		for _, v := range []struct {
			name, binary string
			flags        []string
		}{
			{"stock", *stock, nil},
			{"on, never idle", *runtime, []string{"--agentzip-idle=1h"}},
			{"off", *runtime, []string{"--agentzip=off"}},
		} {
			if err := with(v.binary, v.flags, func(s *fleet.Sandbox) error {
				for _, w := range []string{"pipe", "fault", "touch"} {
					ns, err := ask(s, w)
					if err != nil {
						return err
					}
					add(w+", "+v.name, ns)
				}
				return nil
			}); err != nil {
				return err
			}
		}
		// Faults on evicted memory.
		for _, kib := range microUnits {
			flags := []string{"--agentzip-idle=1h", "--agentzip-prefetch=off", fmt.Sprintf("--agentzip-map-unit=%d", kib<<10)}
			if err := with(*runtime, flags, func(s *fleet.Sandbox) error {
				if _, err := ask(s, "fill"); err != nil {
					return err
				}
				for _, w := range []string{"sequential", "random"} {
					if _, err := s.Evict(ctx); err != nil {
						return err
					}
					ns, err := ask(s, w)
					if err != nil {
						return err
					}
					add(fmt.Sprintf("evicted %s, %d KiB", w, kib), ns)
				}
				return nil
			}); err != nil {
				return err
			}
		}
	}

	names := make([]string, 0, len(res.NS))
	for k := range res.NS {
		names = append(names, k)
	}
	sort.Strings(names)
	fmt.Fprintf(stdout, "\n%-32s %10s %10s %10s\n", "ns per page or operation", "median", "min", "max")
	for _, k := range names {
		v := append([]float64(nil), res.NS[k]...)
		sort.Float64s(v)
		fmt.Fprintf(stdout, "%-32s %10.0f %10.0f %10.0f\n", k, v[len(v)/2], v[0], v[len(v)-1])
	}
	fmt.Fprint(stdout, `
pipe: write and read 4 KiB. fault: mmap, touch and unmap 64 pages, per page.
touch: first touch of fresh memory, one page at a time.
evicted: reading evicted pages, every page in order, or one page per 64 KiB in random order.
`)
	if *out != "" {
		b, err := json.MarshalIndent(&res, "", " ")
		if err != nil {
			return err
		}
		return os.WriteFile(*out, b, 0o644)
	}
	return nil
}

// runGuest is what runs inside the sandbox: it does what each line of its
// standard input says and answers with nanoseconds.
func runGuest(_ context.Context, args []string, stdout, _ io.Writer) error {
	pages := 4096
	if len(args) == 1 {
		if n, err := strconv.Atoi(args[0]); err == nil {
			pages = n
		}
	}
	mem, err := unix.Mmap(-1, 0, pages*4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return err
	}
	var sum byte
	ops := map[string]func() (int, error){
		"fill": func() (int, error) {
			// Words as a program's heap has them: pointers near each other,
			// small numbers, zeroes.
			x := uint32(1)
			for i := 0; i+8 <= len(mem); i += 8 {
				x = x*1664525 + 1013904223
				switch x >> 30 {
				case 0, 1:
					mem[i], mem[i+1], mem[i+2] = byte(x), byte(x>>8), byte(x>>16)
					mem[i+5] = 0x7f
				case 2:
					mem[i] = byte(x >> 8)
				}
			}
			return pages, nil
		},
		"sequential": func() (int, error) {
			for i := 0; i < len(mem); i += 4096 {
				sum += mem[i]
			}
			return pages, nil
		},
		"random": func() (int, error) {
			units := pages / 16
			step := units*5/8 | 1
			for i, u := 0, 0; i < units; i++ {
				u = (u + step) % units
				sum += mem[u*65536]
			}
			return units, nil
		},
		"touch": func() (int, error) {
			m, err := unix.Mmap(-1, 0, pages*4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
			if err != nil {
				return 0, err
			}
			for i := 0; i < len(m); i += 4096 {
				m[i] = 1
			}
			return pages, unix.Munmap(m)
		},
		"fault": func() (int, error) {
			for range pages / 64 {
				m, err := unix.Mmap(-1, 0, 64*4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
				if err != nil {
					return 0, err
				}
				for i := 0; i < len(m); i += 4096 {
					m[i] = 1
				}
				if err := unix.Munmap(m); err != nil {
					return 0, err
				}
			}
			return pages, nil
		},
		"pipe": func() (int, error) {
			var p [2]int
			if err := unix.Pipe(p[:]); err != nil {
				return 0, err
			}
			defer unix.Close(p[0])
			defer unix.Close(p[1])
			buf := make([]byte, 4096)
			for range pages {
				if _, err := unix.Write(p[1], buf); err != nil {
					return 0, err
				}
				if _, err := unix.Read(p[0], buf); err != nil {
					return 0, err
				}
			}
			return pages, nil
		},
	}
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		op, ok := ops[in.Text()]
		if !ok {
			return fmt.Errorf("unknown operation %q", in.Text())
		}
		start := time.Now()
		n, err := op()
		if err != nil {
			return err
		}
		fmt.Fprintf(stdout, "%.0f\n", float64(time.Since(start).Nanoseconds())/float64(n))
	}
	return in.Err()
}
