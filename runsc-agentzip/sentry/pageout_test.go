package sentry

import (
	"runtime"
	"runtime/debug"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"runsc-agentzip/runsc-agentzip/gc"
)

// TestPageOut: all of the heap is found, and nothing in it changes.
func TestPageOut(t *testing.T) {
	var blocks [][]byte
	for i := range 48 {
		b := make([]byte, 4<<20)
		for j := range b {
			b[j] = byte(i + j>>12)
		}
		blocks = append(blocks, b)
	}
	start, size := heapArenas()
	require.Zero(t, start%arenaSize)
	require.Zero(t, size%arenaSize)
	for i := range blocks {
		at := uintptr(unsafe.Pointer(&blocks[i][0]))
		require.True(t, start <= at && at+4<<20 <= start+size, "block %d at %#x is not in %#x+%#x", i, at, start, size)
	}

	n := 0
	pageOut(func() bool { n++; return false })
	require.EqualValues(t, size/pageoutSlice, n)
	for i, b := range blocks {
		for j := range b {
			if b[j] != byte(i+j>>12) {
				t.Fatalf("block %d has changed at %d", i, j)
			}
		}
	}
	n = 0
	pageOut(func() bool { n++; return true })
	require.Equal(t, 1, n)
}

// TestCollector: the collector is held off, and goes on as before when it is released, after
// the time that was set unless it is held anew, or when garbage was collected all the same.
func TestCollector(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(73))
	before := debug.SetMemoryLimit(-1)
	percent := func() int {
		p := debug.SetGCPercent(73)
		debug.SetGCPercent(p)
		return p
	}
	var c collector
	held := func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.off.Held()
	}
	c.release()
	require.False(t, held())
	c.hold()
	require.True(t, held())
	require.Equal(t, -1, percent())
	limit := debug.SetMemoryLimit(-1)
	require.Greater(t, limit, int64(gc.Slack))
	require.Less(t, limit, before)
	c.release()
	c.release()
	require.Equal(t, 73, percent())
	require.Equal(t, before, debug.SetMemoryLimit(-1))

	c.hold()
	c.releaseAfter(0)
	require.Eventually(t, func() bool { return !held() }, time.Minute, time.Millisecond)
	require.Equal(t, before, debug.SetMemoryLimit(-1))

	// Whoever holds it last decides.
	c.hold()
	n := c.holds
	c.hold()
	c.releaseHold(n)
	require.True(t, held())
	runtime.GC()
	require.Eventually(t, func() bool { return !held() }, time.Minute, time.Millisecond)
	require.Equal(t, 73, percent())
	require.Equal(t, before, debug.SetMemoryLimit(-1))
}
