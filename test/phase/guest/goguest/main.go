// Command goguest is a tool server and a client, to be run inside a sandbox.
//
//	goguest serve               answer lines on standard input: "work N" after N ms
//	                            of computing, "beats" with the number of ticks of a
//	                            goroutine that makes garbage every 50 ms
//	goguest ask NET ADDR LINE   send a line, print the answer
//	goguest wait NET ADDR       wait for a line N, compute for N ms and print DONE
package main

import (
	"bufio"
	"fmt"
	"net"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "goguest:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	switch {
	case len(args) == 1 && args[0] == "serve":
		return serve()
	case len(args) == 4 && args[0] == "ask":
		answer, err := ask(args[1], args[2], args[3])
		if err == nil {
			fmt.Println(answer)
		}
		return err
	case len(args) == 3 && args[0] == "wait":
		answer, err := ask(args[1], args[2], "wait")
		if err != nil {
			return err
		}
		if err := compute(answer); err != nil {
			return err
		}
		fmt.Println("DONE")
		return nil
	}
	return fmt.Errorf("arguments %q: want serve, ask NET ADDR LINE or wait NET ADDR", args)
}

// beats counts the ticks in the background, garbage is what the last one left.
var (
	beats   atomic.Uint64
	garbage atomic.Pointer[[]byte]
)

func serve() error {
	go func() {
		for range time.Tick(50 * time.Millisecond) {
			b := make([]byte, 64<<10)
			garbage.Store(&b)
			if beats.Add(1)%20 == 0 {
				runtime.GC()
			}
		}
	}()
	// Others that wait for what does not come.
	for range 8 {
		go func() { select {} }()
	}
	fmt.Println("READY")
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		word, arg, _ := strings.Cut(in.Text(), " ")
		switch word {
		case "work":
			if err := compute(arg); err != nil {
				return err
			}
			fmt.Println("OK")
		case "beats":
			fmt.Println(beats.Load())
		default:
			fmt.Println("BAD", in.Text())
		}
	}
	return in.Err()
}

// ask sends a line and returns the answer. The server may be about to start.
func ask(network, addr, line string) (string, error) {
	var conn net.Conn
	var err error
	for range 200 {
		if conn, err = net.Dial(network, addr); err == nil {
			break
		}
		time.Sleep(50 * time.Millisecond)
	}
	if err != nil {
		return "", err
	}
	defer conn.Close()
	if _, err := fmt.Fprintln(conn, line); err != nil {
		return "", err
	}
	answer, err := bufio.NewReader(conn).ReadString('\n')
	return strings.TrimSuffix(answer, "\n"), err
}

var sink atomic.Uint32

// compute uses so many milliseconds of processor time.
func compute(arg string) error {
	ms, err := strconv.Atoi(arg)
	if err != nil {
		return err
	}
	var n uint32
	for end := used() + time.Duration(ms)*time.Millisecond; used() < end; {
		for i := range uint32(1 << 20) {
			n = n*31 + i
		}
	}
	sink.Store(n)
	return nil
}

// used is the processor time that the process has used.
func used() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
