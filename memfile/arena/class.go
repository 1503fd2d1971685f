package arena

// MaxBlob is the length of the longest blob: a page and 16 bytes for the
// caller's own header.
const MaxBlob = pageSize + 16

const (
	minSlot = 32
	// maxSlot holds MaxBlob and the byte after it.
	maxSlot      = (MaxBlob>>unitShift + 1) << unitShift
	maxSlabPages = 8
	// maxSlots is the number of slots that a slab's bitmaps have room for. It
	// is also what a page has of the smallest slots.
	maxSlots   = pageSize / minSlot
	maxClasses = 80
	// packedClass is not a size class but what packed slabs have in its place.
	packedClass = maxClasses
)

// classGeometry is how the slabs of a class are cut.
type classGeometry struct {
	size  uint32 // of a slot
	pages uint8  // of a slab
	slots uint8  // of a slab
}

var (
	numClasses int
	geometry   = [maxClasses + 1]classGeometry{packedClass: {pages: packedPages}}
	// classBySize maps a slot's least size in units of 16 bytes to a class.
	classBySize [maxSlot>>unitShift + 1]uint8
)

func init() { makeClasses() }

// makeClasses derives the classes; see the package comment.
func makeClasses() {
	for size := minSlot; ; {
		g := cut(size)
		last := numClasses - 1
		switch {
		case last >= 0 && geometry[last].size >= g.size:
			// The slots of the class before are already as large.
		case last >= 0 && geometry[last].pages == g.pages && geometry[last].slots == g.slots:
			geometry[last] = g
		default:
			geometry[numClasses] = g
			numClasses++
		}
		if size >= maxSlot {
			break
		}
		size = min(roundDown(size+max(size/16, 1<<unitShift)), maxSlot)
	}
	ci := 0
	for units := range classBySize {
		for int(geometry[ci].size) < units<<unitShift {
			ci++
		}
		classBySize[units] = uint8(ci)
	}
}

// cut chooses the slab for slots of a given size: the smallest of at least 4
// slots that leaves at most 1/16 unused, or else the one that leaves the least;
// then it gives what is left to the slots.
func cut(size int) classGeometry {
	var best classGeometry
	bestWaste, bestBytes := 1, 1
	for pages := 1; pages <= maxSlabPages; pages++ {
		bytes := pages * pageSize
		slots := min(bytes/size, maxSlots)
		if slots == 0 {
			continue
		}
		waste := bytes - slots*size
		enough := slots >= 4 && waste*16 <= bytes
		if enough || waste*bestBytes < bestWaste*bytes {
			best = classGeometry{size: uint32(roundDown(bytes / slots)), pages: uint8(pages), slots: uint8(slots)}
			bestWaste, bestBytes = waste, bytes
		}
		if enough {
			break
		}
	}
	return best
}

func roundDown(n int) int { return n >> unitShift << unitShift }

// classOf returns the class for a blob of n bytes. At least one byte of the
// slot is left; see setLength.
func classOf(n int) uint8 { return classBySize[n>>unitShift+1] }
