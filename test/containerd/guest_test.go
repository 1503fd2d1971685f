package containerd

import (
	"bytes"
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"syscall"
)

// guestEnv, set to a number of MiB, makes the test binary the program that holds
// memory inside a container, where it is /extra.
const guestEnv = "AGENTZIP_TEST_HOLD_MIB"

// runGuest fills memory with text, says so, and compares all of it on SIGUSR1. It
// prints one line an event and never returns.
func runGuest(arg string) {
	mib, err := strconv.Atoi(arg)
	if err != nil || mib <= 0 {
		fmt.Printf("bad %s %q\n", guestEnv, arg)
		os.Exit(2)
	}
	compare := make(chan os.Signal, 1)
	signal.Notify(compare, syscall.SIGUSR1)
	const pageSize = 4096
	pages := mib << 20 / pageSize
	mem, err := syscall.Mmap(-1, 0, pages*pageSize, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	if err != nil {
		fmt.Printf("mmap: %v\n", err)
		os.Exit(2)
	}
	want := make([]byte, pageSize)
	fill := func(p []byte, i int) {
		line := fmt.Appendf(nil, "line of page %d: what a tool printed\n", i)
		for n := 0; n < len(p); {
			n += copy(p[n:], line)
		}
	}
	for i := range pages {
		fill(mem[i*pageSize:][:pageSize], i)
	}
	fmt.Println("ready")
	for range compare {
		for i := range pages {
			if fill(want, i); !bytes.Equal(mem[i*pageSize:][:pageSize], want) {
				fmt.Printf("WRONG page %d\n", i)
				os.Exit(3)
			}
		}
		fmt.Println("equal")
	}
}
