package docker

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"strconv"
	"syscall"
)

// The test binary doubles as the program that holds memory inside a container:
// it is static, so it can be dropped into an image as it is, and it knows by
// construction what every page has to contain.
const (
	// holderEnv, set to a number of MiB, makes the binary a holder.
	holderEnv = "AGENTZIP_TEST_HOLD_MIB"
	// holderPath is where the image keeps the binary.
	holderPath = "/holder"

	pageSize = 4096
	// rewriteStride: after each verification every rewriteStride-th page gets
	// new content, so that a page stored earlier goes stale.
	rewriteStride = 8
)

// runHolder fills mib MiB, then sleeps until SIGUSR1 tells it to compare every
// page with what it must be. It prints one line an event and never returns.
func runHolder(arg string) {
	mib, err := strconv.Atoi(arg)
	if err != nil || mib <= 0 {
		fmt.Printf("bad %s %q\n", holderEnv, arg)
		os.Exit(2)
	}
	verify := make(chan os.Signal, 1)
	signal.Notify(verify, syscall.SIGUSR1)
	terminate := make(chan os.Signal, 1)
	signal.Notify(terminate, syscall.SIGTERM)

	pages := mib << 20 / pageSize
	mem, err := syscall.Mmap(-1, 0, pages*pageSize, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	if err != nil {
		fmt.Printf("mmap: %v\n", err)
		os.Exit(2)
	}
	generation := make([]uint32, pages)
	page := func(i int) []byte { return mem[i*pageSize:][:pageSize] }
	for i := range pages {
		fillPage(page(i), i, 0)
	}
	fmt.Println("ready")

	want := make([]byte, pageSize)
	for round := 1; ; round++ {
		select {
		case <-terminate:
			os.Exit(0)
		case <-verify:
		}
		for i := range pages {
			fillPage(want, i, generation[i])
			if !bytes.Equal(page(i), want) {
				fmt.Printf("verify %d WRONG page %d generation %d\n", round, i, generation[i])
				os.Exit(3)
			}
		}
		for i := round % rewriteStride; i < pages; i += rewriteStride {
			generation[i]++
			fillPage(page(i), i, generation[i])
		}
		fmt.Printf("verify %d ok\n", round)
	}
}

// fillPage writes the content of page i at a generation: in turn zeros, text,
// half noise and noise, so that every way to store a page is met.
func fillPage(p []byte, i int, generation uint32) {
	seed := [32]byte{}
	binary.LittleEndian.PutUint64(seed[0:], uint64(i))
	binary.LittleEndian.PutUint32(seed[8:], generation)
	noise := rand.NewChaCha8(seed)
	clear(p)
	switch i % 4 {
	case 0:
		if generation > 0 {
			binary.LittleEndian.PutUint32(p[i%(pageSize/4)*4:], generation)
		}
	case 1:
		line := fmt.Appendf(nil, "page %d, generation %d: the quick brown fox\n", i, generation)
		for n := 0; n < len(p); {
			n += copy(p[n:], line)
		}
	case 2:
		noise.Read(p[:pageSize/2])
	case 3:
		noise.Read(p)
	}
}
