package arena

import "slices"

// Sparse returns handles of blobs that lie in sparsely filled slabs, about
// limit of them: if the caller moves each (Alloc, copy, Free), these slabs run
// empty and go back to the host, and the blobs find room in slabs that are
// there already. It returns nil if nothing can be gained.
//
// The arena cannot move blobs itself, because it does not know where handles
// are kept. A handle may be freed by others before the caller comes to it: the
// caller looks up in its own tables, under its own lock, whether it is still
// in use, and must not call Bytes before it did.
func (a *Arena) Sparse(limit int) []Handle {
	var handles []Handle
	type candidate struct {
		ref  slabRef
		used uint8
	}
	var partial []candidate
	for ci := range numClasses {
		if len(handles) >= limit {
			break
		}
		geo := &geometry[ci]
		c := &a.classes[ci]
		c.mu.Lock()
		partial = partial[:0]
		room := 0 // free slots in the slabs that stay
		for _, ref := range c.groups {
			for ref != 0 {
				_, s := a.slab(ref)
				partial = append(partial, candidate{ref, s.used})
				room += int(geo.slots - s.used)
				ref = s.next
			}
		}
		slices.SortFunc(partial, func(x, y candidate) int { return int(x.used) - int(y.used) })
		victims, moved := 0, 0
		for _, p := range partial {
			room -= int(geo.slots - p.used)
			moved += int(p.used)
			if moved > room || len(handles) >= limit {
				break
			}
			victims++
			seg, s := a.slab(p.ref)
			for slot := range int(geo.slots) {
				if s.allocated(slot) {
					handles = append(handles, seg.handle(int(s.page)*pageSize+slot*int(geo.size)))
				}
			}
		}
		// The slabs that stay are filled first, the fullest of each group
		// before the others.
		if victims > 0 {
			for _, p := range partial[victims:] {
				a.unlink(c, geo, p.ref)
				a.link(c, geo, p.ref, true)
			}
		}
		c.mu.Unlock()
	}
	return handles
}
