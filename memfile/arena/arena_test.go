package arena

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"sync"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"
)

func newArena(t testing.TB, maxBytes uint64) *Arena {
	t.Helper()
	a, err := New(Options{MaxBytes: maxBytes})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	})
	return a
}

// blobSize draws from a distribution like that of compressed pages with a
// 16-byte header: half of them below 750 bytes, 10 % above 1600.
func blobSize(r *rand.Rand) int {
	return min(max(int(740*math.Exp(r.NormFloat64()*0.6)), 1), 3072) + 16
}

// fill writes a pattern that depends on the handle, so that blobs that overlap
// or move are noticed.
func fill(b []byte, seed uint64) {
	x := seed*0x9e3779b97f4a7c15 + 1
	for i := range b {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		b[i] = byte(x)
	}
}

func verify(b []byte, seed uint64) error {
	want := make([]byte, len(b))
	fill(want, seed)
	for i := range b {
		if b[i] != want[i] {
			return fmt.Errorf("byte %d of %d is %#x, should be %#x", i, len(b), b[i], want[i])
		}
	}
	return nil
}

func liveOf(m map[Handle]int) func(func(Handle, int) bool) {
	return func(yield func(Handle, int) bool) {
		for h, n := range m {
			if !yield(h, n) {
				return
			}
		}
	}
}

func TestClasses(t *testing.T) {
	if numClasses < 40 || numClasses > maxClasses {
		t.Errorf("%d classes", numClasses)
	}
	for i := range numClasses {
		g := geometry[i]
		if g.size%16 != 0 || g.size < minSlot || int(g.slots) > maxSlots || int(g.pages) > maxSlabPages ||
			int(g.slots)*int(g.size) > int(g.pages)*pageSize {
			t.Errorf("class %d: %+v", i, g)
		}
		if i > 0 && g.size <= geometry[i-1].size {
			t.Errorf("class %d is not larger than the one before", i)
		}
		if g.slots < 4 && g.size <= 3504 {
			t.Errorf("class %d has %d slots", i, g.slots)
		}
	}
	if n := unsafe.Sizeof(slab{}); n != 32 {
		t.Errorf("a slab's entry takes %d bytes, the package comment says 32", n)
	}
	if bitmapsOffset%8 != 0 || slabsOffset%8 != 0 || bitmapsOffset%pageSize != pageSize*3/8 || segmentPages > 1<<12 || numClasses > 1<<8 {
		t.Error("layout")
	}
}

// TestRounding checks the bounds that the package comment states.
func TestRounding(t *testing.T) {
	for n := 1; n <= MaxBlob; n++ {
		g := geometry[classOf(n)]
		if int(g.size) <= n {
			t.Fatalf("a blob of %d bytes is given a slot of %d", n, g.size)
		}
		share := float64(g.pages) * pageSize / float64(g.slots)
		bound := float64(n)*9/8 + 16
		if n < 16 {
			bound = 32
		} else if n > 3503 {
			bound = float64(n)*1.17 + 16
		}
		if share > bound {
			t.Errorf("a blob of %d bytes takes %.1f, more than %.1f", n, share, bound)
		}
	}
}

func TestLengths(t *testing.T) {
	a := newArena(t, 0)
	live := map[Handle]int{}
	for n := 1; n <= MaxBlob; n++ {
		h, b, err := a.Alloc(n)
		if err != nil || len(b) != n || cap(b) != n || h == 0 || h>>HandleBits != 0 {
			t.Fatalf("Alloc(%d) = %#x, %d bytes, %v", n, h, len(b), err)
		}
		fill(b, uint64(h))
		live[h] = n
	}
	for h, n := range live {
		b, err := a.Bytes(h)
		if err != nil || len(b) != n || cap(b) != n {
			t.Fatalf("Bytes(%#x) = %d bytes, %v; want %d", h, len(b), err, n)
		}
		if err := verify(b, uint64(h)); err != nil {
			t.Fatal(err)
		}
	}
	if err := a.Check(liveOf(live)); err != nil {
		t.Fatal(err)
	}
	for h := range live {
		a.Free(h)
	}
	if s := a.Stats(); s.Blobs != 0 || s.BlobBytes != 0 || s.SlotBytes != 0 || s.HeldBytes != 0 {
		t.Errorf("after all was freed: %+v", s)
	}
	if err := a.Check(liveOf(nil)); err != nil {
		t.Fatal(err)
	}
}

func mustPanic(t *testing.T, what string, f func()) {
	t.Helper()
	defer func() {
		t.Helper()
		if r := recover(); r == nil {
			t.Errorf("%s did not panic", what)
		} else if !strings.Contains(fmt.Sprint(r), "arena: ") {
			t.Errorf("%s panicked with %v", what, r)
		}
	}()
	f()
}

func TestErrors(t *testing.T) {
	a := newArena(t, 0)
	for _, n := range []int{-1, 0, MaxBlob + 1, math.MaxInt} {
		if _, _, err := a.Alloc(n); !errors.Is(err, ErrSize) {
			t.Errorf("Alloc(%d): %v", n, err)
		}
		if _, _, err := a.AllocPacked(n); !errors.Is(err, ErrSize) {
			t.Errorf("AllocPacked(%d): %v", n, err)
		}
	}
	if _, err := a.Bytes(1 << 20); !errors.Is(err, ErrHandle) {
		t.Errorf("handle in an empty arena: %v", err)
	}
	h, _, err := a.Alloc(100)
	if err != nil {
		t.Fatal(err)
	}
	other, _, err := a.Alloc(100)
	if err != nil {
		t.Fatal(err)
	}
	for _, bad := range []Handle{0, 1, h + 1, h - 1, h + 1<<20, h + 4096/16, 1<<40 - 1, math.MaxUint64, h | 1<<40} {
		if _, err := a.Bytes(bad); !errors.Is(err, ErrHandle) {
			t.Errorf("Bytes(%#x): %v", uint64(bad), err)
		}
		mustPanic(t, fmt.Sprintf("Free(%#x)", uint64(bad)), func() { a.Free(bad) })
	}
	// Beside, in, and before what is packed, and what was.
	packed, _, err := a.AllocPacked(100)
	if err != nil {
		t.Fatal(err)
	}
	gone, _, err := a.AllocPacked(100)
	if err != nil {
		t.Fatal(err)
	}
	a.Free(gone)
	for _, bad := range []Handle{packed + 1, packed - 1, packed - packedBitmap/16, packed + 100, packed + packedBytes/16, gone} {
		if _, err := a.Bytes(bad); !errors.Is(err, ErrHandle) {
			t.Errorf("Bytes(%#x): %v", uint64(bad), err)
		}
		mustPanic(t, fmt.Sprintf("Free(%#x)", uint64(bad)), func() { a.Free(bad) })
	}
	a.Free(packed)
	mustPanic(t, "double Free of what was packed", func() { a.Free(packed) })
	a.Free(h)
	mustPanic(t, "double Free", func() { a.Free(h) })
	a.Free(other)
	mustPanic(t, "double Free after the slab was given back", func() { a.Free(other) })
	if err := a.Check(liveOf(nil)); err != nil {
		t.Error(err)
	}
	if _, err := New(Options{MaxBytes: 4095}); err == nil {
		t.Error("MaxBytes below a page was taken")
	}
}

func TestRandomHandles(t *testing.T) {
	a := newArena(t, 0)
	live := map[Handle]int{}
	r := rand.New(rand.NewPCG(1, 1))
	for i := range 2000 {
		n := blobSize(r)
		alloc := a.Alloc
		if i%2 == 0 {
			alloc = a.AllocPacked
		}
		h, _, err := alloc(n)
		if err != nil {
			t.Fatal(err)
		}
		live[h] = n
	}
	rapid.Check(t, func(t *rapid.T) {
		h := Handle(rapid.Uint64Range(segmentUnits, 2*segmentUnits).Draw(t, "handle"))
		if rapid.IntRange(0, 9).Draw(t, "far") == 0 {
			h = Handle(rapid.Uint64().Draw(t, "any"))
		}
		n, ok := live[h]
		b, err := a.Bytes(h)
		if ok != (err == nil) || len(b) != n {
			t.Fatalf("Bytes(%#x) = %d bytes, %v", uint64(h), len(b), err)
		}
	})
}

func TestFull(t *testing.T) {
	const limit = 1 << 20
	a := newArena(t, limit)
	live := map[Handle]int{}
	r := rand.New(rand.NewPCG(2, 2))
	for {
		n := blobSize(r)
		h, _, err := a.Alloc(n)
		if errors.Is(err, ErrFull) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		live[h] = n
	}
	s := a.Stats()
	if s.HeldBytes > limit || s.HeldBytes < limit*9/10 {
		t.Errorf("full with %+v", s)
	}
	if err := a.Check(liveOf(live)); err != nil {
		t.Fatal(err)
	}
	// Full is not for ever.
	for h := range live {
		a.Free(h)
	}
	if _, _, err := a.Alloc(MaxBlob); err != nil {
		t.Error(err)
	}
}

func TestNoMemory(t *testing.T) {
	a := newArena(t, 0)
	mapMemory = func(int, int64, int, int, int) ([]byte, error) { return nil, unix.ENOMEM }
	_, _, err := a.Alloc(100)
	mapMemory = unix.Mmap
	if !errors.Is(err, ErrNoMemory) {
		t.Errorf("Alloc: %v", err)
	}
	if err := a.Check(liveOf(nil)); err != nil {
		t.Error(err)
	}
	h, _, err := a.Alloc(100)
	if err != nil {
		t.Fatal(err)
	}
	a.Free(h)
}

func TestClose(t *testing.T) {
	a, err := New(Options{})
	if err != nil {
		t.Fatal(err)
	}
	h, _, err := a.Alloc(1000)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := a.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if _, _, err := a.Alloc(1000); !errors.Is(err, ErrClosed) {
		t.Errorf("Alloc: %v", err)
	}
	if _, err := a.Bytes(h); !errors.Is(err, ErrHandle) {
		t.Errorf("Bytes: %v", err)
	}
	if s := a.Stats(); s.Blobs != 0 || s.HeldBytes != 0 || s.SegmentBytes != 0 {
		t.Errorf("%+v", s)
	}
}

// TestModel compares the arena with a map under random operations, and checks
// the bound on fragmentation with the model's own counts.
func TestModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		limit := uint64(0)
		if rapid.Bool().Draw(t, "limited") {
			limit = uint64(rapid.IntRange(1, 60).Draw(t, "pages")) * pageSize
		}
		a, err := New(Options{MaxBytes: limit})
		if err != nil {
			t.Fatal(err)
		}
		defer a.Close()
		live := map[Handle]int{}
		packed := map[Handle]bool{}
		var order []Handle // for picking at random, reproducibly
		var used, peak [maxClasses]int

		check := func(t *rapid.T) {
			if err := a.Check(liveOf(live)); err != nil {
				t.Fatal(err)
			}
			var bytes, slots, bound uint64
			for h, n := range live {
				bytes += uint64(n)
				if packed[h] {
					slots += uint64(n+2+15) / 16 * 16
					bound += packedPages * pageSize // should each have its own slab
				} else {
					slots += uint64(geometry[classOf(n)].size)
				}
			}
			for i := range numClasses {
				g := geometry[i]
				bound += uint64((peak[i]+int(g.slots)-1)/int(g.slots)) * uint64(g.pages) * pageSize
			}
			s := a.Stats()
			if s.Blobs != uint64(len(live)) || s.BlobBytes != bytes || s.SlotBytes != slots {
				t.Fatalf("%+v; the model has %d blobs, %d bytes, %d in slots", s, len(live), bytes, slots)
			}
			if s.HeldBytes > bound || s.HeldBytes < slots {
				t.Fatalf("%d bytes held for %d in slots, bound %d", s.HeldBytes, slots, bound)
			}
			if limit > 0 && s.HeldBytes > limit {
				t.Fatalf("%d bytes held, limit %d", s.HeldBytes, limit)
			}
		}
		alloc := func(t *rapid.T, n int, pack bool) {
			f := a.Alloc
			if pack {
				f = a.AllocPacked
			}
			h, b, err := f(n)
			if err != nil {
				if limit == 0 || !errors.Is(err, ErrFull) {
					t.Fatal(err)
				}
				return
			}
			if _, ok := live[h]; ok || h == 0 || len(b) != n {
				t.Fatalf("Alloc(%d) = %#x, %d bytes", n, uint64(h), len(b))
			}
			fill(b, uint64(h))
			live[h] = n
			order = append(order, h)
			if pack {
				packed[h] = true
				return
			}
			ci := classOf(n)
			used[ci]++
			peak[ci] = max(peak[ci], used[ci])
		}
		free := func(t *rapid.T, i int) {
			h := order[i]
			b, err := a.Bytes(h)
			if err != nil || len(b) != live[h] {
				t.Fatalf("Bytes(%#x) = %d bytes, %v; want %d", uint64(h), len(b), err, live[h])
			}
			if err := verify(b, uint64(h)); err != nil {
				t.Fatal(err)
			}
			a.Free(h)
			if _, err := a.Bytes(h); !errors.Is(err, ErrHandle) {
				t.Fatalf("Bytes of a freed handle: %v", err)
			}
			if packed[h] {
				delete(packed, h)
			} else if ci := classOf(live[h]); used[ci] > 1 {
				used[ci]--
			} else {
				used[ci], peak[ci] = 0, 0
			}
			delete(live, h)
			order[i] = order[len(order)-1]
			order = order[:len(order)-1]
		}
		sizes := rapid.OneOf(
			rapid.IntRange(1, MaxBlob),
			rapid.SampledFrom([]int{1, 31, 32, 33, 500, 2047, 4096, MaxBlob}),
			rapid.IntRange(700, 760),
		)
		t.Repeat(map[string]func(*rapid.T){
			"alloc": func(t *rapid.T) { alloc(t, sizes.Draw(t, "n"), rapid.Bool().Draw(t, "pack")) },
			"allocMany": func(t *rapid.T) {
				n, pack := sizes.Draw(t, "n"), rapid.Bool().Draw(t, "pack")
				for range rapid.IntRange(1, 150).Draw(t, "count") {
					alloc(t, n, pack)
				}
			},
			"free": func(t *rapid.T) {
				if len(order) == 0 {
					t.Skip()
				}
				free(t, rapid.IntRange(0, len(order)-1).Draw(t, "i"))
			},
			"freeMany": func(t *rapid.T) {
				part := rapid.IntRange(1, 3).Draw(t, "part")
				for i := len(order) - 1; i >= 0; i -= part {
					free(t, i)
				}
			},
			"compact": func(t *rapid.T) {
				before := a.Stats().HeldBytes
				at := map[Handle]int{}
				for i, h := range order {
					at[h] = i
				}
				for _, h := range a.Sparse(rapid.IntRange(1, 200).Draw(t, "limit")) {
					i, ok := at[h]
					if !ok {
						t.Fatalf("handle %#x is not in use", uint64(h))
					}
					if packed[h] {
						t.Fatalf("handle %#x is packed", uint64(h))
					}
					alloc(t, live[h], false)
					delete(at, h)
					free(t, i)
					// What was allocated last took the place of what was freed.
				}
				if after := a.Stats().HeldBytes; after > before {
					t.Fatalf("compaction grew the arena from %d to %d bytes", before, after)
				}
			},
			"pack": func(t *rapid.T) {
				for {
					before := a.Stats().HeldBytes
					at := map[Handle]int{}
					for i, h := range order {
						at[h] = i
					}
					handles := a.Loose(1 << 20)
					for _, h := range handles {
						i, ok := at[h]
						if !ok {
							t.Fatalf("handle %#x is not in use", uint64(h))
						}
						n := len(order)
						if alloc(t, live[h], true); len(order) == n {
							break // full
						}
						delete(at, h)
						free(t, i)
					}
					if len(handles) == 0 || a.Stats().HeldBytes >= before {
						break
					}
				}
				if limit > 0 {
					return // there may be no room
				}
				s := a.Stats()
				// At worst each slab has no room for another of the longest blobs.
				const end = packedBitmap + packedLength + MaxBlob + 1<<unitShift
				if lost := s.HeldBytes - s.SlotBytes; lost > max(s.SlotBytes/looseShare, s.HeldBytes*end/packedBytes)+(packedOpen+1)*pageSize {
					t.Fatalf("packed, but %+v", s)
				}
			},
			"bytes": func(t *rapid.T) {
				for h, n := range live {
					b, err := a.Bytes(h)
					if err != nil || len(b) != n {
						t.Fatal(len(b), err)
					}
					if err := verify(b, uint64(h)); err != nil {
						t.Fatal(err)
					}
				}
			},
			"": check,
		})
	})
}

func TestManySegments(t *testing.T) {
	a := newArena(t, 0)
	var handles []Handle
	live := map[Handle]int{}
	// 3 segments' worth of slabs of 8 pages, of which runs must not cross.
	for range 3 * segmentPages {
		h, _, err := a.Alloc(MaxBlob)
		if err != nil {
			t.Fatal(err)
		}
		handles = append(handles, h)
		live[h] = MaxBlob
	}
	if n := len(*a.segments.Load()); n < 4 {
		t.Errorf("%d segments", n)
	}
	if err := a.Check(liveOf(live)); err != nil {
		t.Fatal(err)
	}
	segments := a.Stats().SegmentBytes
	for round := range 3 {
		for _, h := range handles {
			a.Free(h)
		}
		if s := a.Stats(); s.HeldBytes != 0 || s.MetadataBytes > 64<<10 {
			t.Errorf("empty, but %+v", s)
		}
		handles = handles[:0]
		for range 3 * segmentPages {
			h, _, err := a.Alloc(MaxBlob - round)
			if err != nil {
				t.Fatal(err)
			}
			handles = append(handles, h)
		}
		if got := a.Stats().SegmentBytes; got != segments {
			t.Errorf("address space grew from %d to %d", segments, got)
		}
	}
}

// residentPages asks the kernel how many pages of b are there.
func residentPages(t *testing.T, b []byte) (n int) {
	vec := make([]byte, len(b)/pageSize)
	_, _, errno := syscall.Syscall(syscall.SYS_MINCORE, uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)), uintptr(unsafe.Pointer(&vec[0])))
	if errno != 0 {
		t.Skip("mincore: ", errno)
	}
	for _, v := range vec {
		n += int(v & 1)
	}
	return n
}

func resident(t *testing.T, a *Arena) (data, metadata int) {
	for _, seg := range *a.segments.Load() {
		data += residentPages(t, seg.data)
		metadata += residentPages(t, seg.mapping[segmentSize:])
	}
	return data, metadata
}

// TestReturned asks the kernel whether the accounts are true: memory held while
// blobs are there, and returned when they are gone.
func TestReturned(t *testing.T) {
	a := newArena(t, 0)
	r := rand.New(rand.NewPCG(3, 3))
	var handles []Handle
	for range 40000 {
		n := blobSize(r)
		h, b, err := a.Alloc(n)
		if err != nil {
			t.Fatal(err)
		}
		fill(b, 1)
		handles = append(handles, h)
	}
	compare := func(when string) {
		t.Helper()
		s := a.Stats()
		data, metadata := resident(t, a)
		t.Logf("%s: %+v; resident: %d data, %d metadata", when, s, data*pageSize, metadata*pageSize)
		// The last slabs of each class have pages that were never written.
		if uint64(data)*pageSize > s.HeldBytes || uint64(data)*pageSize+2<<20 < s.HeldBytes {
			t.Errorf("%s: %d bytes resident, %d held", when, data*pageSize, s.HeldBytes)
		}
		if uint64(metadata)*pageSize > s.MetadataBytes {
			t.Errorf("%s: %d bytes of metadata resident, %d counted", when, metadata*pageSize, s.MetadataBytes)
		}
	}
	compare("full")
	r.Shuffle(len(handles), func(i, j int) { handles[i], handles[j] = handles[j], handles[i] })
	for i, h := range handles {
		a.Free(h)
		switch i {
		case len(handles) / 2:
			compare("half")
		case len(handles) * 9 / 10:
			compare("one tenth")
		}
	}
	if data, metadata := resident(t, a); data != 0 || metadata != 0 {
		t.Errorf("%d pages of data, %d of metadata are still there", data, metadata)
	}
	compare("empty")
	// Only now, because it looks at bookkeeping that is not there, which the
	// kernel counts as resident although it is all one page of zeros.
	if err := a.Check(liveOf(nil)); err != nil {
		t.Error(err)
	}
}

// TestOverhead keeps the package comment's figures honest.
func TestOverhead(t *testing.T) {
	for _, blobs := range []int{5000, 25000, 100000} {
		a := newArena(t, 0)
		r := rand.New(rand.NewPCG(4, 4))
		for range blobs {
			if _, _, err := a.Alloc(blobSize(r)); err != nil {
				t.Fatal(err)
			}
		}
		s := a.Stats()
		perBlob := float64(s.MetadataBytes) / float64(blobs)
		slots := float64(s.SlotBytes) / float64(s.BlobBytes)
		all := float64(s.HeldBytes+s.MetadataBytes) / float64(s.BlobBytes)
		t.Logf("%d blobs: %.1f bytes of metadata per blob, slots %.3f, all %.3f of the blobs' bytes", blobs, perBlob, slots, all)
		if perBlob > 12 || all > 1.12 {
			t.Errorf("%d blobs: overhead", blobs)
		}
	}
}

// TestChurn frees and allocates as a sandbox does that wakes up and falls
// asleep: a third of the blobs go and others come, many times.
func TestChurn(t *testing.T) {
	a := newArena(t, 0)
	r := rand.New(rand.NewPCG(5, 5))
	var handles []Handle
	put := func() {
		h, _, err := a.Alloc(blobSize(r))
		if err != nil {
			t.Fatal(err)
		}
		handles = append(handles, h)
	}
	for range 25000 {
		put()
	}
	ratio := func() float64 {
		s := a.Stats()
		return float64(s.HeldBytes) / float64(s.BlobBytes)
	}
	first, low := ratio(), 0.0
	for range 30 {
		r.Shuffle(len(handles), func(i, j int) { handles[i], handles[j] = handles[j], handles[i] })
		keep := len(handles) * 2 / 3
		for _, h := range handles[keep:] {
			a.Free(h)
		}
		handles = handles[:keep]
		low = max(low, ratio())
		for len(handles) < 25000 {
			put()
		}
	}
	last := ratio()
	t.Logf("held/blobs: %.3f at first, %.3f after 30 rounds, %.3f at worst with a third missing", first, last, low)
	if last > 1.15 {
		t.Errorf("fragmentation grows: %.3f", last)
	}
}

func TestConcurrent(t *testing.T) {
	a := newArena(t, 24<<20)
	const workers, rounds = 8, 3000
	type blob struct {
		h    Handle
		n    int
		seed uint64
	}
	stop := make(chan struct{})
	var checker, others sync.WaitGroup
	checker.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			if err := a.Check(nil); err != nil {
				t.Error(err)
				return
			}
			a.Stats()
			a.Loose(1000)
		}
	})
	// Blobs change hands, so that they are freed by others than their makers
	// while neighbours in the slab come and go.
	pass := make(chan blob, 64)
	left := make([][]blob, workers)
	for w := range workers {
		others.Go(func() {
			r := rand.New(rand.NewPCG(6, uint64(w)))
			var mine []blob
			for i := range rounds {
				switch r.IntN(5) {
				case 0, 1:
					n := blobSize(r)
					if r.IntN(4) == 0 {
						n = 1 + r.IntN(MaxBlob)
					}
					alloc := a.Alloc
					if r.IntN(2) == 0 {
						alloc = a.AllocPacked
					}
					h, b, err := alloc(n)
					if errors.Is(err, ErrFull) {
						continue
					}
					if err != nil {
						t.Error(err)
						return
					}
					seed := uint64(w*rounds + i)
					fill(b, seed)
					mine = append(mine, blob{h, n, seed})
				case 2:
					select {
					case b := <-pass:
						mine = append(mine, b)
					default:
					}
				case 3:
					if len(mine) > 0 {
						select {
						case pass <- mine[len(mine)-1]:
							mine = mine[:len(mine)-1]
						default:
						}
					}
				case 4:
					if len(mine) > 0 {
						i := r.IntN(len(mine))
						m := mine[i]
						b, err := a.Bytes(m.h)
						if err != nil || len(b) != m.n {
							t.Errorf("Bytes(%#x) = %d bytes, %v", uint64(m.h), len(b), err)
							return
						}
						if err := verify(b, m.seed); err != nil {
							t.Error(err)
							return
						}
						if r.IntN(2) == 0 {
							a.Free(m.h)
							mine[i] = mine[len(mine)-1]
							mine = mine[:len(mine)-1]
						}
					}
				}
			}
			left[w] = mine
		})
	}
	others.Wait()
	close(stop)
	checker.Wait()
	close(pass)
	live := map[Handle]int{}
	for b := range pass {
		live[b.h] = b.n
	}
	for _, bs := range left {
		for _, b := range bs {
			live[b.h] = b.n
		}
	}
	if err := a.Check(liveOf(live)); err != nil {
		t.Error(err)
	}
	// Two frees at the same time: one of them must panic.
	for h := range live {
		var wg sync.WaitGroup
		var mu sync.Mutex
		panics := 0
		for range 2 {
			wg.Go(func() {
				defer func() {
					if recover() != nil {
						mu.Lock()
						panics++
						mu.Unlock()
					}
				}()
				a.Free(h)
			})
		}
		wg.Wait()
		if panics != 1 {
			t.Fatalf("%d of two Frees panicked", panics)
		}
	}
	if err := a.Check(liveOf(nil)); err != nil {
		t.Error(err)
	}
}

// TestCheckFinds breaks one thing at a time and expects Check to say so.
func TestCheckFinds(t *testing.T) {
	live := map[Handle]int{}
	build := func(packed bool) (*Arena, Handle) {
		a := newArena(t, 0)
		clear(live)
		r := rand.New(rand.NewPCG(7, 7))
		var last Handle
		for i := range 500 {
			n := blobSize(r)
			alloc := a.Alloc
			if packed && i > 400 {
				alloc = a.AllocPacked
			}
			h, _, err := alloc(n)
			if err != nil {
				t.Fatal(err)
			}
			if i%5 == 0 {
				a.Free(h)
				continue
			}
			live[h] = n
			last = h
		}
		if err := a.Check(liveOf(live)); err != nil {
			t.Fatal(err)
		}
		return a, last
	}
	for _, c := range []struct {
		name string
		do   func(a *Arena, h Handle, p place)
	}{
		{"leak", func(a *Arena, h Handle, p place) { delete(live, h) }},
		{"live but freed", func(a *Arena, h Handle, p place) { a.Free(h) }},
		{"wrong length", func(a *Arena, h Handle, p place) { live[h]++ }},
		{"stray handle", func(a *Arena, h Handle, p place) { live[h+1] = 10 }},
		{"lost bit", func(a *Arena, h Handle, p place) { p.slab.clear(p.slot) }},
		{"extra bit", func(a *Arena, h Handle, p place) {
			p.slab.set(p.slab.firstFree())
		}},
		{"length overwritten", func(a *Arena, h Handle, p place) { clear(p.mem) }},
		{"blobs counter", func(a *Arena, h Handle, p place) { a.classes[p.class].blobs++ }},
		{"bytes counter", func(a *Arena, h Handle, p place) { a.classes[p.class].bytes-- }},
		{"slabs counter", func(a *Arena, h Handle, p place) { a.classes[p.class].slabs++ }},
		{"held counter", func(a *Arena, h Handle, p place) { a.heldPages-- }},
		{"used counter", func(a *Arena, h Handle, p place) { p.slab.used++ }},
		{"page map", func(a *Arena, h Handle, p place) {
			(*a.segments.Load())[0].entry(int(p.slab.page)).Store(0)
		}},
		{"page map of a free page", func(a *Arena, h Handle, p place) {
			(*a.segments.Load())[0].entry(segmentPages - 1).Store(1 << 31)
		}},
		{"page bitmap", func(a *Arena, h Handle, p place) { (*a.segments.Load())[0].usedPages[63] |= 1 }},
		{"slab bitmap", func(a *Arena, h Handle, p place) { (*a.segments.Load())[0].usedSlabs[0] &^= 1 }},
		{"class", func(a *Arena, h Handle, p place) { p.slab.class ^= 1 }},
		{"overlap", func(a *Arena, h Handle, p place) { p.slab.page ^= 1 }},
		{"list", func(a *Arena, h Handle, p place) {
			c := &a.classes[p.class]
			c.groups, c.filled = [fullnessGroups]slabRef{}, 0
			for i := range numClasses { // some class has a slab that is not full
				a.classes[i].groups, a.classes[i].filled = [fullnessGroups]slabRef{}, 0
			}
		}},
		{"list loop", func(a *Arena, h Handle, p place) { p.slab.next = p.ref }},
		{"list to nowhere", func(a *Arena, h Handle, p place) { p.slab.next = 1 << 31 }},
		{"mask", func(a *Arena, h Handle, p place) { a.classes[p.class].filled ^= 1 }},
	} {
		t.Run(c.name, func(t *testing.T) {
			a, h := build(false)
			p, err := a.resolve(h)
			if err != nil {
				t.Fatal(err)
			}
			c.do(a, h, p)
			err = a.Check(liveOf(live))
			if err == nil {
				t.Error("Check found nothing")
			}
			t.Log(err)
		})
	}
	for _, c := range []struct {
		name string
		do   func(a *Arena, h Handle, p place)
	}{
		{"leak", func(a *Arena, h Handle, p place) { delete(live, h) }},
		{"live but freed", func(a *Arena, h Handle, p place) { a.Free(h) }},
		{"wrong length", func(a *Arena, h Handle, p place) { live[h]++ }},
		{"stray handle", func(a *Arena, h Handle, p place) { live[h+1] = 10 }},
		{"length overwritten", func(a *Arena, h Handle, p place) { p.mem[1] = 0xff }},
		{"shorter", func(a *Arena, h Handle, p place) { p.mem[0]-- }},
		{"lost start", func(a *Arena, h Handle, p place) {
			seg, s := a.slab(p.ref)
			packedStarts(seg, uint32(s.page)<<pageShift).flip(uint32(h)<<unitShift%segmentSize - uint32(s.page)<<pageShift)
		}},
		{"extra start", func(a *Arena, h Handle, p place) {
			seg, s := a.slab(p.ref)
			packedStarts(seg, uint32(s.page)<<pageShift).flip(packedBytes - 16)
		}},
		{"start in the bitmap", func(a *Arena, h Handle, p place) {
			seg, s := a.slab(p.ref)
			packedStarts(seg, uint32(s.page)<<pageShift).flip(0)
		}},
		{"overlap of blobs", func(a *Arena, h Handle, p place) {
			seg, s := a.slab(p.ref)
			packedStarts(seg, uint32(s.page)<<pageShift).flip(uint32(h+1)<<unitShift%segmentSize - uint32(s.page)<<pageShift)
		}},
		{"fill", func(a *Arena, h Handle, p place) { p.slab.alloc[packedFill].Store(300) }},
		{"live bytes", func(a *Arena, h Handle, p place) { p.slab.alloc[packedLive].Add(16) }},
		{"blobs counter", func(a *Arena, h Handle, p place) { a.packed.blobs++ }},
		{"bytes counter", func(a *Arena, h Handle, p place) { a.packed.bytes-- }},
		{"live counter", func(a *Arena, h Handle, p place) { a.packed.live++ }},
		{"slabs counter", func(a *Arena, h Handle, p place) { a.packed.slabs++ }},
		{"held counter", func(a *Arena, h Handle, p place) { a.heldPages-- }},
		{"packed held counter", func(a *Arena, h Handle, p place) { a.packed.held-- }},
		{"slots in use", func(a *Arena, h Handle, p place) { p.slab.used++ }},
		{"page map", func(a *Arena, h Handle, p place) { (*a.segments.Load())[0].entry(int(p.slab.page)).Store(0) }},
		{"class", func(a *Arena, h Handle, p place) { p.slab.class = 3 }},
		{"no class", func(a *Arena, h Handle, p place) { p.slab.class = packedClass + 1 }},
		{"list", func(a *Arena, h Handle, p place) { a.packed.list = 0 }},
		{"list loop", func(a *Arena, h Handle, p place) { p.slab.next = p.ref }},
		{"list to nowhere", func(a *Arena, h Handle, p place) { p.slab.next = 1 << 31 }},
		{"open class", func(a *Arena, h Handle, p place) { a.packed.open[0] = 1 }},
		{"open nowhere", func(a *Arena, h Handle, p place) { a.packed.open[0] = 1 << 31 }},
	} {
		t.Run("packed "+c.name, func(t *testing.T) {
			a, h := build(true)
			p, err := a.resolve(h)
			if err != nil || p.class != packedClass {
				t.Fatal(err)
			}
			c.do(a, h, p)
			err = a.Check(liveOf(live))
			if err == nil {
				t.Error("Check found nothing")
			}
			t.Log(err)
		})
	}
	t.Run("twice", func(t *testing.T) {
		a, h := build(true)
		err := a.Check(func(yield func(Handle, int) bool) {
			liveOf(live)(yield)
			yield(h, live[h])
		})
		if err == nil || !strings.Contains(err.Error(), "twice") {
			t.Error(err)
		}
	})
}

func TestCorruptLength(t *testing.T) {
	a := newArena(t, 0)
	for _, n := range []int{16, 100, 700, 1860, 3100} {
		for v := range 256 {
			h, _, err := a.Alloc(n)
			if err != nil {
				t.Fatal(err)
			}
			p, err := a.resolve(h)
			if err != nil {
				t.Fatal(err)
			}
			p.mem[len(p.mem)-1] = byte(v)
			if b, err := a.Bytes(h); err != nil {
				if !errors.Is(err, ErrCorrupt) {
					t.Fatal(err)
				}
			} else if len(b) < 1 || len(b) >= len(p.mem) {
				t.Fatalf("%d bytes of a slot of %d", len(b), len(p.mem))
			}
			setLength(p.mem, n)
			a.Free(h)
		}
	}
}

func TestCorruptPackedLength(t *testing.T) {
	a := newArena(t, 0)
	for _, n := range []int{16, 100, 700, 1860, 3100} {
		h, _, err := a.AllocPacked(n)
		if err != nil {
			t.Fatal(err)
		}
		p, err := a.resolve(h)
		if err != nil {
			t.Fatal(err)
		}
		for v := range 1 << 16 {
			p.mem[0], p.mem[1] = byte(v), byte(v>>8)
			if b, err := a.Bytes(h); err != nil {
				if !errors.Is(err, ErrCorrupt) {
					t.Fatal(err)
				}
			} else if len(b) != v || v < 1 || v > MaxBlob {
				t.Fatalf("%d bytes of %d", len(b), v)
			}
		}
		p.mem[0], p.mem[1] = byte(n), byte(n>>8)
		a.Free(h)
	}
}

// TestPackedOverhead keeps the package comment's figures of few blobs honest.
func TestPackedOverhead(t *testing.T) {
	for _, blobs := range []int{300, 1300, 5000, 25000} {
		a := newArena(t, 0)
		r := rand.New(rand.NewPCG(4, 4))
		live := map[Handle]int{}
		for range blobs {
			n := blobSize(r)
			h, _, err := a.Alloc(n)
			if err != nil {
				t.Fatal(err)
			}
			live[h] = n
		}
		ratio := func() float64 {
			s := a.Stats()
			return float64(s.HeldBytes+s.MetadataBytes) / float64(s.BlobBytes)
		}
		before, moves := ratio(), pack(t, a, live)
		t.Logf("%d blobs: %.3f of their bytes, packed %.3f after %d moves", blobs, before, ratio(), moves)
		if bound := 1.07 + 32.0/float64(blobs); ratio() > bound || moves > blobs {
			t.Errorf("%d blobs: overhead", blobs)
		}
		if err := a.Check(liveOf(live)); err != nil {
			t.Error(err)
		}
	}
}

// pack moves what is loose until nothing is, and returns how many blobs it moved.
func pack(t *testing.T, a *Arena, live map[Handle]int) (moves int) {
	for {
		before := a.Stats().HeldBytes
		handles := a.Loose(1 << 14)
		for _, old := range handles {
			from, err := a.Bytes(old)
			if err != nil {
				t.Fatal(err)
			}
			h, to, err := a.AllocPacked(len(from))
			if err != nil {
				t.Fatal(err)
			}
			copy(to, from)
			a.Free(old)
			live[h] = live[old]
			delete(live, old)
			moves++
		}
		if len(handles) == 0 {
			return moves
		}
		if after := a.Stats().HeldBytes; after >= before {
			t.Errorf("%d blobs were moved, from %d bytes to %d", len(handles), before, after)
			return moves
		}
	}
}

// TestPackedChurn replaces a third of the blobs over and over, and packs.
func TestPackedChurn(t *testing.T) {
	a := newArena(t, 0)
	r := rand.New(rand.NewPCG(5, 5))
	live := map[Handle]int{}
	const blobs = 1300
	worst, low, moves := 0.0, 0.0, 0
	ratio := func() float64 {
		s := a.Stats()
		return float64(s.HeldBytes) / float64(s.BlobBytes)
	}
	for range 30 {
		for len(live) < blobs {
			n := blobSize(r)
			h, b, err := a.Alloc(n)
			if err != nil {
				t.Fatal(err)
			}
			fill(b, uint64(n))
			live[h] = n
		}
		moves += pack(t, a, live)
		worst = max(worst, ratio())
		for h, n := range live {
			b, err := a.Bytes(h)
			if err != nil || len(b) != n {
				t.Fatal(len(b), err)
			}
			if err := verify(b, uint64(n)); err != nil {
				t.Fatal(err)
			}
			if r.IntN(3) == 0 {
				a.Free(h)
				delete(live, h)
			}
		}
		low = max(low, ratio())
		if err := a.Check(liveOf(live)); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("held/blobs: %.3f at worst when packed, %.3f with a third missing; %d moves", worst, low, moves)
	if worst > 1.1 {
		t.Errorf("fragmentation: %.3f", worst)
	}
}

// TestPackedFull: an arena at its limit, most of which is packed, gets room again by
// packing what is left of it, slab by slab.
func TestPackedFull(t *testing.T) {
	const limit = 4 << 20
	a := newArena(t, limit)
	r := rand.New(rand.NewPCG(6, 6))
	live := map[Handle]int{}
	fillUp := func() {
		for {
			n := blobSize(r)
			h, _, err := a.Alloc(n)
			if errors.Is(err, ErrFull) {
				return
			} else if err != nil {
				t.Fatal(err)
			}
			live[h] = n
		}
	}
	for round := range 20 {
		fillUp()
		pack(t, a, live)
		fillUp()
		before := a.Stats()
		k := 0
		for h := range live {
			if k++; k%3 == 0 {
				a.Free(h)
				delete(live, h)
			}
		}
		pack(t, a, live)
		after := a.Stats()
		if after.HeldBytes > before.HeldBytes*8/10 {
			t.Fatalf("round %d: a third is free, of %+v there is %+v", round, before, after)
		}
		if err := a.Check(liveOf(live)); err != nil {
			t.Fatal(err)
		}
	}
}

func TestPackedFreeOfOverwritten(t *testing.T) {
	a := newArena(t, 0)
	h, _, err := a.AllocPacked(100)
	if err != nil {
		t.Fatal(err)
	}
	other, _, err := a.AllocPacked(50)
	if err != nil {
		t.Fatal(err)
	}
	p, err := a.resolve(h)
	if err != nil {
		t.Fatal(err)
	}
	p.mem[0] = 200 // more than both
	mustPanic(t, "Free of a blob with a wrong length", func() { a.Free(h) })
	p.mem[0] = 174 // as much as both
	mustPanic(t, "Free of a blob with the length of two", func() { a.Free(h) })
	if _, err := a.Bytes(other); err != nil {
		t.Error(err)
	}
}
