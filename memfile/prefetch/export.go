package prefetch

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/zeebo/xxh3"
)

// The format of exported patterns, little-endian:
//
//	magic     8 bytes, the version in it
//	template  32 bytes, the digest of the template
//	patterns  uint32; for each of them
//	  groups  uint32; for each of them, in ascending order
//	    number uint64
//	    order  uint32
//	    pages  64 bytes, a bit for each
//	    same   64 bytes, a bit for each that was left as the template has it
//	checksum  uint64, XXH3 of all before it
//
// It is a cache: a reader that does not like it does without.
const (
	exportMagic = "AZWS\x00\x00\x00\x02"

	// File is what an export is called beside the template's files.
	File = "prefetch.azws"

	// exportGroups bounds the groups of one pattern, and groupNumbers their numbers:
	// 8 and 128 GiB of memory file.
	exportGroups = 1 << 12
	groupNumbers = 1 << 16
	groupSize    = 8 + 4 + 2*8*len(bitmap{})

	// ExportMax is more than any export takes, in bytes.
	ExportMax = 16 << 20
)

// A Digest says which template the pages belong to.
type Digest [32]byte

// ErrNotForTemplate says that patterns were learnt on another template.
var ErrNotForTemplate = errors.New("the patterns were learnt on another template")

// Export returns the patterns, for sandboxes restored from the same template: the
// last of them, as many as fit in limit bytes.
func (h *History) Export(template Digest, limit int) []byte {
	h.learn.Lock()
	defer h.learn.Unlock()
	ps, size := h.patterns, len(exportMagic)+len(template)+4+8
	for k := len(ps) - 1; k >= 0; k-- {
		if size += 4 + min(ps[k].len(), exportGroups)*groupSize; size > limit {
			ps = ps[k+1:]
			break
		}
	}
	b := append([]byte(exportMagic), template[:]...)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(ps)))
	for _, p := range ps {
		var ns []uint64
		p.each(func(n uint64, _, _ uint32) {
			if n < groupNumbers {
				ns = append(ns, n)
			}
		})
		slices.Sort(ns)
		ns = ns[:min(len(ns), exportGroups)]
		b = binary.LittleEndian.AppendUint32(b, uint32(len(ns)))
		for _, n := range ns {
			m, _ := p.group(n)
			b = binary.LittleEndian.AppendUint64(b, n)
			b = binary.LittleEndian.AppendUint32(b, m.order)
			for _, w := range m.pages {
				b = binary.LittleEndian.AppendUint64(b, w)
			}
			for _, w := range m.same {
				b = binary.LittleEndian.AppendUint64(b, w)
			}
		}
	}
	return binary.LittleEndian.AppendUint64(b, xxh3.Hash(b))
}

// Import takes over the patterns of an export, besides those that the History
// has, as far as there is room. On error it takes nothing.
func (h *History) Import(b []byte, template Digest) error {
	ps, err := parse(b, template)
	if err != nil {
		return err
	}
	h.learn.Lock()
	defer h.learn.Unlock()
	// What the sandbox has learnt itself is newer, and counts for more.
	h.index = nil
	h.patterns = append(ps[max(len(ps)-(MaxPatterns-len(h.patterns)), 0):], h.patterns...)
	return nil
}

// parse checks everything: the export may have been written by anybody. Wrong
// patterns cost time and no more.
func parse(b []byte, template Digest) ([]*Pattern, error) {
	const head = len(exportMagic) + len(Digest{}) + 4
	if len(b) < head+8 || len(b) > ExportMax || string(b[:8]) != exportMagic {
		return nil, errors.New("no exported patterns of a known version")
	}
	body, sum := b[:len(b)-8], binary.LittleEndian.Uint64(b[len(b)-8:])
	if xxh3.Hash(body) != sum {
		return nil, errors.New("exported patterns are damaged: wrong checksum")
	}
	if Digest(body[8:40]) != template {
		return nil, ErrNotForTemplate
	}
	count := binary.LittleEndian.Uint32(body[40:])
	body = body[head:]
	if count > MaxPatterns {
		return nil, fmt.Errorf("exported patterns are malformed: %d of them", count)
	}
	var ps []*Pattern
	for range count {
		if len(body) < 4 {
			return nil, errors.New("exported patterns are malformed: too short")
		}
		n := binary.LittleEndian.Uint32(body)
		body = body[4:]
		if n > exportGroups || uint64(len(body)) < uint64(n)*uint64(groupSize) {
			return nil, fmt.Errorf("exported patterns are malformed: %d groups in %d bytes", n, len(body))
		}
		p := &Pattern{open: make(map[uint64]*memory, n)}
		last := uint64(0)
		for i := range n {
			no := binary.LittleEndian.Uint64(body)
			if no >= groupNumbers || i > 0 && no <= last {
				return nil, fmt.Errorf("exported patterns are malformed: group %d", no)
			}
			last = no
			m := &memory{order: binary.LittleEndian.Uint32(body[8:])}
			for j := range m.pages {
				m.pages[j] = binary.LittleEndian.Uint64(body[12+8*j:])
				m.same[j] = binary.LittleEndian.Uint64(body[12+8*(len(m.pages)+j):])
			}
			p.open[no] = m
			body = body[groupSize:]
		}
		p.seal()
		ps = append(ps, p)
	}
	if len(body) != 0 {
		return nil, fmt.Errorf("exported patterns are malformed: %d bytes too many", len(body))
	}
	return ps, nil
}
