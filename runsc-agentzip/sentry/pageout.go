package sentry

import (
	"runtime"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"runsc-agentzip/runsc-agentzip/gc"
)

// A wait that lasts may have the host swap the Sentry's own heap out
// (--agentzip-pageout-after): some 10 MiB of which a sandbox that waits uses nothing.
// What of it a step wants comes back by page faults of some 10 us each and more. It
// is off by default, because it takes swap that is fast, such as zram, and because
// the operator has to want swap at all.
//
// A collection would bring all of the heap back, and the runtime starts one every two
// minutes at the latest. So there is none until the heap has grown by gc.Slack, or until
// stepGrace after the wait has ended: the runtime would make up for it at once, and the
// first command would take four times as long (measured after a wait of 150 s).

// stepGrace is how long a step may last until garbage is collected again.
const stepGrace = 10 * time.Second

// arenaSize is how much address space the runtime takes for its heap at once, on every
// 64-bit Linux. It is aligned.
const arenaSize = 64 << 20

// maxArenas is how many arenas are looked for on either side of a known one.
const maxArenas = 1024

// pageoutSlice is how much is swapped out between two questions whether to stop.
const pageoutSlice = 2 << 20

// heapArenas returns the lowest address of the heap's arenas, as far as they are
// neighbours of the one that new objects are in, and how many bytes they have.
func heapArenas() (start uintptr, size uintptr) {
	known := uintptr(unsafe.Pointer(&make([]byte, 1<<16)[0])) &^ (arenaSize - 1)
	mapped := func(arena uintptr) bool {
		var vec [1]byte
		_, _, errno := unix.RawSyscall(unix.SYS_MINCORE, arena, 4096, uintptr(unsafe.Pointer(&vec)))
		return errno == 0
	}
	start, end := known, known+arenaSize
	for range maxArenas {
		if start < arenaSize || !mapped(start-arenaSize) {
			break
		}
		start -= arenaSize
	}
	for range maxArenas {
		if !mapped(end) {
			break
		}
		end += arenaSize
	}
	return start, end - start
}

// pageOut has the host swap the heap out. It does not fail: what the host does not take,
// all of it where there is no swap, stays.
func pageOut(stop func() bool) {
	start, size := heapArenas()
	for off := uintptr(0); off < size && !stop(); off += pageoutSlice {
		// Gaps and memory that is in use elsewhere are left out by the kernel.
		_, _, _ = unix.Syscall(unix.SYS_MADVISE, start+off, pageoutSlice, unix.MADV_PAGEOUT)
	}
}

// A collector holds the garbage collector off. Its zero value does not.
//
// It is held from hold on, until release is called, or releaseAfter was and the time is
// over, or a collection has taken place all the same: then the heap is back.
type collector struct {
	// mu protects the rest. It is a leaf.
	mu  sync.Mutex
	off gc.Off
	// holds counts the calls to hold: what is to end one must not end a later one.
	holds uint64
}

// hold holds it off. It may have to wait for a collection to end.
func (c *collector) hold() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.holds++
	c.off.Hold()
	runtime.AddCleanup(new([64]byte), c.releaseHold, c.holds)
}

// release lets it go on as before.
func (c *collector) release() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.off.Release()
}

func (c *collector) releaseHold(hold uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.holds == hold {
		c.off.Release()
	}
}

// releaseAfter lets it go on after a time, unless hold is called until then. It does not
// wait for anything.
func (c *collector) releaseAfter(t time.Duration) {
	c.mu.Lock()
	n := c.holds
	c.mu.Unlock()
	time.AfterFunc(t, func() { c.releaseHold(n) })
}
