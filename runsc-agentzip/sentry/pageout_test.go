package sentry

import (
	"math"
	"runtime/debug"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
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

// TestCollector: the collector is held off once, and goes on as before.
func TestCollector(t *testing.T) {
	old := debug.SetGCPercent(73)
	defer debug.SetGCPercent(old)
	var c collector
	c.release()
	require.Equal(t, 73, debug.SetGCPercent(73))
	c.hold()
	c.hold()
	require.Equal(t, -1, debug.SetGCPercent(-1))
	limit := debug.SetMemoryLimit(-1)
	require.Greater(t, limit, int64(heapSlack))
	require.Less(t, limit, int64(math.MaxInt64))
	c.release()
	c.release()
	require.Equal(t, 73, debug.SetGCPercent(73))
	require.EqualValues(t, math.MaxInt64, debug.SetMemoryLimit(-1))
}
