package arena

import (
	"math/rand/v2"
	"testing"
)

// TestSparse compacts an arena with nine tenths of its blobs gone, the way a
// caller would.
func TestSparse(t *testing.T) {
	a := newArena(t, 0)
	r := rand.New(rand.NewPCG(9, 9))
	live := map[Handle]int{}
	seeds := map[Handle]uint64{}
	if got := a.Sparse(100); got != nil {
		t.Errorf("an empty arena has sparse slabs: %v", got)
	}
	for i := range 40000 {
		n := blobSize(r)
		h, b, err := a.Alloc(n)
		if err != nil {
			t.Fatal(err)
		}
		fill(b, uint64(i))
		live[h], seeds[h] = n, uint64(i)
	}
	for h := range live {
		if r.IntN(10) != 0 {
			a.Free(h)
			delete(live, h)
		}
	}
	ratio := func() float64 {
		s := a.Stats()
		return float64(s.HeldBytes) / float64(s.BlobBytes)
	}
	before, moves := ratio(), 0
	for range 1000 {
		handles := a.Sparse(500)
		if len(handles) == 0 {
			break
		}
		if len(handles) > 500+maxSlots {
			t.Fatalf("%d handles", len(handles))
		}
		for _, old := range handles {
			n, ok := live[old]
			if !ok {
				t.Fatalf("handle %#x is not in use", uint64(old))
			}
			from, err := a.Bytes(old)
			if err != nil {
				t.Fatal(err)
			}
			h, to, err := a.Alloc(n)
			if err != nil {
				t.Fatal(err)
			}
			copy(to, from)
			a.Free(old)
			delete(live, old)
			live[h], seeds[h] = n, seeds[old]
			moves++
		}
	}
	after := ratio()
	t.Logf("held/blobs: %.2f, and %.3f after %d moves of %d blobs", before, after, moves, len(live))
	if after > 1.15 || moves > len(live)*2 {
		t.Error("not compact")
	}
	if s := a.Stats(); s.HeldBytes != s.PackedBytes {
		t.Errorf("the slabs have %d bytes, %d are needed", s.HeldBytes, s.PackedBytes)
	}
	for h, n := range live {
		b, err := a.Bytes(h)
		if err != nil || len(b) != n {
			t.Fatal(len(b), err)
		}
		if err := verify(b, seeds[h]); err != nil {
			t.Fatal(err)
		}
	}
	if err := a.Check(liveOf(live)); err != nil {
		t.Error(err)
	}
}
