// Package dedup finds pages that resemble a page: bases to store it relative to.
//
// A page is described by its sketch: the smallest hashes of its 16-byte chunks
// (Broder, "On the resemblance of documents", 1997). Two pages that have a
// share of their chunks in common have about that share of their sketches in
// common, wherever in the page the chunks are. Equal pages have equal sketches,
// so exact duplicates need no index of their own. A table finds the pages that
// share features with a sketch; it is a hint and no more: whoever uses it
// compares contents, or has a checksum that tells.
//
// # What was measured
//
// On all memory of a sandbox (44175 pages with language servers started after
// the restore, 36040 with servers in the template), in bytes per stored page,
// after the forms that need no search. Two candidates at most; a win must save
// a sixteenth. (By an experiment with the codecs of that time; what the whole
// pipeline reaches, `make bench-codec` tells.)
//
//	                                    after    in the template
//	no search                             885      768
//	the preceding root in the file        819      715
//	and other roots by sketch             809      707
//	and pages of the template by sketch   798      705
//	the same, with a template in which
//	such servers had run before           765
//
// Chunks of 16 bytes find 1 to 2 % more than chunks of 32; super-features of a
// rolling hash cost ten times as much for as little. Pages that have only one
// feature in common are hardly ever worth the time: two must be.
package dedup

import (
	"encoding/binary"
	"math/bits"

	"runsc-agentzip/memfile/codec"
)

// Features is how many features a sketch has at most.
const Features = 8

// chunkSize is the unit that is hashed.
const chunkSize = 16

// minShared is how many features a page must share with a sketch to be found.
const minShared = 2

// A Sketch describes a page: N features in ascending order. A page of few
// different chunks has few.
type Sketch struct {
	Feature [Features]uint32
	N       int
}

// Make makes s the sketch of p. Chunks of zeros, and those that repeat the one
// before them, say nothing about a page and are left out.
func (s *Sketch) Make(p *codec.Page) {
	n := 0
	limit := ^uint32(0)
	var last uint64
	for i := 0; i < codec.PageSize; i += chunkSize {
		a, b := binary.LittleEndian.Uint64(p[i:]), binary.LittleEndian.Uint64(p[i+8:])
		if a|b == 0 {
			continue
		}
		hi, lo := bits.Mul64(a^0x9e3779b97f4a7c15, b^0xd6e8feb86659fd93)
		h := hi ^ lo
		if h == last {
			continue
		}
		last = h
		x := uint32(h * 0xff51afd7ed558ccd >> 32)
		if x >= limit {
			continue
		}
		j := n
		for j > 0 && s.Feature[j-1] > x {
			j--
		}
		if j > 0 && s.Feature[j-1] == x {
			continue
		}
		if n < Features {
			n++
		}
		copy(s.Feature[j+1:n], s.Feature[j:n-1])
		s.Feature[j] = x
		if n == Features {
			limit = s.Feature[n-1]
		}
	}
	s.N = n
}

// A Match is a page that shares features with a sketch.
type Match struct {
	Item   uint32
	Shared int
}

// slotSize is what a feature of a page takes in a table: the feature in the
// upper half, the item's number plus 1 in the lower. 0 is an unused slot.
const slotSize = 8

const (
	// maxProbe is how far from its place a feature may lie. It also bounds
	// what a damaged table can cost.
	maxProbe = 48
	// maxSame is how many items a feature leads to: one that more have in
	// common tells them apart badly.
	maxSame = 4
)

// A Table leads from features to items. It is a hash table with linear probing
// in plain bytes, so that it can be part of a file; that of a file is mapped
// read-only and shared by all who use it.
type Table []byte

// TableSize is the size of a table for the sketches of so many pages.
func TableSize(pages uint64) uint64 {
	return (pages*Features*4/3 + maxProbe) * slotSize
}

// TablePages is how many pages a table of so many bytes is for.
func TablePages(size uint64) uint64 {
	if size < maxProbe*slotSize {
		return 0
	}
	return ((size/slotSize-maxProbe)*3 + 2) / (Features * 4)
}

func (t Table) slots() uint64 { return uint64(len(t)) / slotSize }

// place returns where a feature should lie. Features are minima, so their high
// bits are mostly zero.
func place(feature uint32, slots uint64) uint64 {
	hi, _ := bits.Mul64(uint64(feature)*0x9e3779b97f4a7c15, slots)
	return hi
}

// Add enters an item. Where the table is crowded it takes the place of another
// if replace is set, and is left out otherwise.
func (t Table) Add(s *Sketch, item uint32, replace bool) {
	slots := t.slots()
	if slots < maxProbe {
		return
	}
	for _, f := range s.Feature[:s.N] {
		v := uint64(f)<<32 | uint64(item+1)
		at, same := place(f, slots), 0
		for range maxProbe {
			b := t[at*slotSize:][:slotSize]
			old := binary.LittleEndian.Uint64(b)
			if old == 0 || old == v {
				binary.LittleEndian.PutUint64(b, v)
				v = 0
				break
			}
			if uint32(old>>32) == f {
				if same++; same == maxSame {
					if replace {
						binary.LittleEndian.PutUint64(b, v)
					}
					v = 0
					break
				}
			}
			if at++; at == slots {
				at = 0
			}
		}
		if v != 0 && replace {
			// Anywhere on the path will do.
			at = place(f, slots) + uint64(item)%maxProbe
			if at >= slots {
				at -= slots
			}
			binary.LittleEndian.PutUint64(t[at*slotSize:], v)
		}
	}
}

// Each calls f for each feature that leads to an item, in any order.
func (t Table) Each(f func(feature, item uint32)) {
	for ; len(t) >= slotSize; t = t[slotSize:] {
		if v := binary.LittleEndian.Uint64(t); uint32(v) != 0 {
			f(uint32(v>>32), uint32(v)-1)
		}
	}
}

// Find puts the items that share most features with s into best, those that
// share most first, and returns how many there are.
func (t Table) Find(s *Sketch, best []Match) int {
	slots := t.slots()
	if slots < maxProbe {
		return 0
	}
	var found [Features * maxSame]Match
	n := 0
	for _, f := range s.Feature[:s.N] {
		at, same := place(f, slots), 0
		for range maxProbe {
			v := binary.LittleEndian.Uint64(t[at*slotSize:])
			if v == 0 {
				break
			}
			if item := uint32(v) - 1; uint32(v>>32) == f && uint32(v) != 0 {
				j := 0
				for j < n && found[j].Item != item {
					j++
				}
				if j == n {
					found[n] = Match{Item: item}
					n++
				}
				found[j].Shared++
				if same++; same == maxSame {
					break
				}
			}
			if at++; at == slots {
				at = 0
			}
		}
	}
	k := 0
	for _, m := range found[:n] {
		if m.Shared < minShared {
			continue
		}
		j := k
		if k == len(best) {
			if k == 0 || best[k-1].Shared >= m.Shared {
				continue
			}
			j--
		} else {
			k++
		}
		for ; j > 0 && best[j-1].Shared < m.Shared; j-- {
			best[j] = best[j-1]
		}
		best[j] = m
	}
	return k
}
