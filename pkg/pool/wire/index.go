package wire

import (
	"encoding/binary"
	"math/bits"
)

// The index of a domain leads from hashes to locations without a message. It is
// a memfd that the pool writes to and sandboxes read: a hash table of 16-byte
// slots, the first half of a hash (never 0) and a Loc. A hash lies in one of
// the MaxProbe slots from its place on; the table has MaxProbe-1 slots more than
// places. A slot may be read while it is written to, so whoever uses one looks
// at what lies at the Loc.
const (
	// SlotSize is the size of a slot, in bytes.
	SlotSize = 16
	// MaxProbe is in how many slots a hash may lie.
	MaxProbe = 8
	// ProbeSize is the size of these slots, in bytes.
	ProbeSize = MaxProbe * SlotSize
)

// IndexSize is the size of an index with so many places, in bytes.
func IndexSize(places uint64) uint64 { return (places + MaxProbe - 1) * SlotSize }

func (h *Hash) word() uint64 {
	if w := binary.LittleEndian.Uint64(h[:]); w != 0 {
		return w
	}
	return 1
}

// Probe returns the byte offset of the ProbeSize bytes in an index with so many
// places that the hash may lie in.
func Probe(h *Hash, places uint64) uint64 {
	hi, _ := bits.Mul64(binary.LittleEndian.Uint64(h[8:]), places)
	return hi * SlotSize
}

// FindSlot looks a hash up in the slots at its Probe.
func FindSlot(slots []byte, h *Hash) (Loc, bool) {
	for w := h.word(); len(slots) >= SlotSize; slots = slots[SlotSize:] {
		if binary.LittleEndian.Uint64(slots) == w {
			return Loc(binary.LittleEndian.Uint64(slots[8:])), true
		}
	}
	return 0, false
}

// PutSlot enters a hash, or its new location, into the slots at its Probe. It
// returns false if there is no room.
func PutSlot(slots []byte, h *Hash, l Loc) bool {
	var free []byte
	for w := h.word(); len(slots) >= SlotSize; slots = slots[SlotSize:] {
		switch binary.LittleEndian.Uint64(slots) {
		case w:
			binary.LittleEndian.PutUint64(slots[8:], uint64(l))
			return true
		case 0:
			if free == nil {
				free = slots
			}
		}
	}
	if free == nil {
		return false
	}
	binary.LittleEndian.PutUint64(free[8:], uint64(l))
	binary.LittleEndian.PutUint64(free, h.word())
	return true
}

// DropSlot removes a hash from the slots at its Probe, if it leads to l.
func DropSlot(slots []byte, h *Hash, l Loc) bool {
	for w := h.word(); len(slots) >= SlotSize; slots = slots[SlotSize:] {
		if binary.LittleEndian.Uint64(slots) == w && Loc(binary.LittleEndian.Uint64(slots[8:])) == l {
			clear(slots[:SlotSize])
			return true
		}
	}
	return false
}
