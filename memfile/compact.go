package memfile

import (
	"sync/atomic"

	"runsc-agentzip/memfile/arena"
)

// sparseMax is how many blobs are looked at together, to bound what has to be
// remembered of them.
const sparseMax = 1 << 14

// compactRounds bounds how long compact tries in vain. It is enough for 16 GiB
// of guest memory of which half was restored.
const compactRounds = 256

// compact moves blobs out of sparsely filled slabs until none is left: then each
// size class has as few slabs as its blobs need, and the rest has gone back to
// the host. The caller holds passMu; others may be deepening for it.
//
// A blob can be moved while its page is busy. A root with dependants is copied;
// then one dependant after the other, and last its page, is made to refer to the
// copy. Whoever cannot be had meanwhile keeps the old one alive.
func (b *Backend) compact(stop func() bool) error {
	// Each round moves what is sparse, unless the guest is in the way.
	for range compactRounds {
		sparse := b.store.Sparse(sparseMax)
		if len(sparse) == 0 {
			return nil
		}
		n, err := b.move(sparse, b.store.Alloc, stop)
		if err != nil || n == 0 {
			return err
		}
	}
	return nil
}

// pack is compact for what is to stay as it is for a while: it also packs the blobs of
// slabs that size classes cannot fill. There are some 60 classes, and the 300 to 1500
// blobs of a sandbox that wrote a few MiB would take 1.3 to 2.8 times their bytes.
func (b *Backend) pack(stop func() bool) error {
	if err := b.compact(stop); err != nil {
		return err
	}
	for range compactRounds {
		before := b.store.Stats().HeldBytes
		loose := b.store.Loose(sparseMax)
		if len(loose) == 0 {
			return nil
		}
		n, err := b.move(loose, b.store.AllocPacked, stop)
		if err != nil || n == 0 || b.store.Stats().HeldBytes >= before {
			return err
		}
	}
	return nil
}

// A mover moves blobs.
type mover struct {
	b *Backend
	// to has the blobs to move; for a root that has been copied, the copy. The
	// mover has references to both, so that the old handle goes on to mean the
	// same.
	to map[arena.Handle]arena.Handle
	// owned has the copies that a page refers to.
	owned map[arena.Handle]bool
	// alloc makes room for a copy.
	alloc func(n int) (arena.Handle, []byte, error)
	moved uint64
	full  bool
}

// move moves the blobs as far as possible and returns how many it moved.
func (b *Backend) move(sparse []arena.Handle, alloc func(int) (arena.Handle, []byte, error), stop func() bool) (uint64, error) {
	m := &mover{b: b, alloc: alloc, to: make(map[arena.Handle]arena.Handle, len(sparse)), owned: map[arena.Handle]bool{}}
	for _, h := range sparse {
		m.to[h] = 0
	}
	// Pages, and which of the blobs are roots with dependants.
	var owners []uint64
	err := m.visit(stop, func(p uint64, w word) {
		if _, ok := m.to[handleOf(w)]; ok && !m.page(p, handleOf(w)) {
			owners = append(owners, p)
		}
	})
	if err == nil && (len(owners) != 0 || b.stats.orphans.Load() != 0) {
		err = m.visit(stop, func(p uint64, w word) {
			if hasBase(tagOf(w)) {
				m.dependant(p)
			}
		})
	}
	for _, p := range owners {
		m.owner(p)
	}
	for old, to := range m.to {
		if to != 0 {
			// Dependants that stayed behind, because the visit was interrupted
			// or they were busy, have a root without owner now.
			b.unref(old, m.owned[to])
			// If the page is still with the old root, or gone, the copy has
			// only dependants.
			b.unref(to, !m.owned[to])
		}
	}
	b.stats.moved.Add(m.moved)
	return m.moved, err
}

// visit calls fn for evicted pages with a blob.
func (m *mover) visit(stop func() bool, fn func(p uint64, w word)) (err error) {
	b := m.b
	b.table.visitWritten(func(first, end uint64) bool {
		if err = b.passError(stop); err != nil || m.full {
			return false
		}
		for p := first; p < end; p++ {
			if w := b.table.load(p); w&stateMask == evicted && handleOf(w) != 0 {
				fn(p, w)
			}
		}
		return true
	})
	return err
}

// copy returns a copy of a blob.
func (m *mover) copy(h arena.Handle) (arena.Handle, []byte) {
	old, err := m.b.store.Bytes(h)
	if err != nil || len(old) < blobHeader {
		return 0, nil // whoever needs it will say so
	}
	to, blob, err := m.alloc(len(old))
	if err != nil {
		m.full = true
		return 0, nil
	}
	copy(blob, old)
	m.moved++
	return to, blob
}

// page moves the blob h of a page, unless it is a root with dependants: then it
// returns false.
func (m *mover) page(p uint64, h arena.Handle) bool {
	b := m.b
	w, ok := b.claim(p)
	if !ok {
		return true
	}
	defer func() { b.unclaim(p, w) }()
	blob, err := b.store.Bytes(handleOf(w))
	if handleOf(w) != h || err != nil || len(blob) < blobHeader {
		return true
	}
	if blobHead(atomic.LoadUint64(headAt(blob))).refs() != 1 {
		return false
	}
	// With one reference, and that of a busy page, it is nobody else's. A
	// reference to a root moves with it.
	if to, _ := m.copy(h); to != 0 {
		w = w&^(handleMask<<handleShift) | word(to)<<handleShift
		b.store.Free(h)
	}
	return true
}

// dependant makes a page refer to the copy of its root.
func (m *mover) dependant(p uint64) {
	b := m.b
	w, ok := b.claim(p)
	if !ok {
		return
	}
	defer b.unclaim(p, w)
	if handleOf(w) == 0 || !hasBase(tagOf(w)) {
		return
	}
	s, err := b.parse(handleOf(w))
	if err != nil || s.base.kind != baseRoot {
		return
	}
	root := arena.Handle(s.base.n)
	to, ok := m.to[root]
	if !ok {
		return
	}
	if to == 0 {
		// The reference of p keeps the root while it is copied.
		if !b.addRef(root, maxRefs) {
			return
		}
		var blob []byte
		if to, blob = m.copy(root); to == 0 {
			b.unref(root, false)
			return
		}
		head := blobHead(atomic.LoadUint64(headAt(blob)))
		atomic.StoreUint64(headAt(blob), uint64(head&headFixed|headRef))
		m.to[root] = to
	}
	if !b.addRef(to, maxRefs) {
		return
	}
	all, _ := b.store.Bytes(handleOf(w))
	putBase(all, uint64(to))
	b.unref(root, false)
}

// owner makes the page of a root refer to the copy of it.
func (m *mover) owner(p uint64) {
	b := m.b
	w, ok := b.claim(p)
	if !ok {
		return
	}
	defer func() { b.unclaim(p, w) }()
	root := handleOf(w)
	to := m.to[root]
	if to == 0 || !b.addRef(to, maxRefs) {
		return
	}
	w = w&^(handleMask<<handleShift) | word(to)<<handleShift
	m.owned[to] = true
	// Not as its owner: it is not an orphan but replaced.
	b.unref(root, false)
}
