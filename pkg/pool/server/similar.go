package server

import (
	"fmt"

	"golang.org/x/sys/unix"

	"runsc-agentzip/memfile/dedup"
	"runsc-agentzip/pkg/pool/wire"
)

const (
	// minFeatures is how many features a sketch must have to be of use: so
	// many must be shared for a page to be found.
	minFeatures = 2
	// minSketches is how many pages the first generation of an index of
	// sketches has, maxSketches how many all of an index have together.
	minSketches = 32
	maxSketches = 256 << 10
	// sketchSample: one page in so many is entered whatever that has brought so
	// far; the others while bases have spared more than the sketches take, and the
	// first freeSketches of each connection. Which ones depends on a sketch's
	// smallest feature, which two pages have in common as likely as any other part
	// of them.
	sketchSample = 16
	freeSketches = 8
	// sketchBytes is what a page takes in an index of sketches, in bytes.
	sketchBytes = dedup.Features*8*4/3 + sketchedBytes
	// sketchedBytes is the size of a sketched.
	sketchedBytes = 24
	// maxNear is how many pages that resemble one are looked at.
	maxNear = 8
	// resembleChunk is how many items of a Resemble are handled before
	// domain.mu is unlocked for others.
	resembleChunk = 256
)

// A sketched is a page in an index of sketches: one that a connection has
// offered, or a base, of which only the hash matters.
type sketched struct {
	candidate
	hash wire.Hash
}

// A generation is a part of an index of sketches. It is filled once.
type generation struct {
	// table leads to items. It is an anonymous mapping.
	table dedup.Table
	items []sketched
	// most is how many items it takes.
	most int
}

// sketches is an index of pages by their sketches. It has the latest pages: when a
// generation is full another one begins, larger until it has half of all pages,
// and the oldest ones are forgotten. The sketches themselves are not kept. Its zero
// value is empty. It is protected by domain.mu.
type sketches struct {
	gens []*generation
}

// A near is a page that shares features with another.
type near struct {
	*sketched
	shared int
}

// find puts pages that resemble s into best, those that share most first, and
// returns how many there are. They are valid until the next add.
func (x *sketches) find(s *dedup.Sketch, best *[maxNear]near) int {
	k := 0
	for i := len(x.gens) - 1; i >= 0; i-- {
		g := x.gens[i]
		var found [maxNear]dedup.Match
		for _, m := range found[:g.table.Find(s, found[:])] {
			if k == maxNear {
				if best[k-1].shared >= m.Shared {
					break
				}
				k--
			}
			j := k
			for ; j > 0 && best[j-1].shared < m.Shared; j-- {
				best[j] = best[j-1]
			}
			best[j] = near{&g.items[m.Item], m.Shared}
			k++
		}
	}
	return k
}

// add enters a page, of at most limit in all.
func (x *sketches) add(s *dedup.Sketch, p sketched, limit int) error {
	if limit < 1 {
		return nil
	}
	var g *generation
	if n := len(x.gens); n > 0 {
		g = x.gens[n-1]
	}
	if g == nil || len(g.items) == g.most {
		most := minSketches
		if g != nil {
			most = 2 * g.most
		}
		most = max(1, min(most, limit/2))
		total := most
		for _, old := range x.gens {
			total += old.most
		}
		for len(x.gens) > 0 && total > limit {
			total -= x.gens[0].most
			x.gens[0].free()
			x.gens = x.gens[1:]
		}
		mem, err := unix.Mmap(-1, 0, int(roundUp(dedup.TableSize(uint64(most)))), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
		if err != nil {
			return fmt.Errorf("memory for %d sketches: %w", most, err)
		}
		g = &generation{table: mem, most: most}
		x.gens = append(x.gens, g)
	}
	g.table.Add(s, uint32(len(g.items)), true)
	g.items = append(g.items, p)
	return nil
}

func (g *generation) free() { unix.Munmap(g.table) }

// free forgets all pages.
func (x *sketches) free() {
	for _, g := range x.gens {
		g.free()
	}
	x.gens = nil
}

// bytes is the memory that the index takes, in bytes.
func (x *sketches) bytes() (n uint64) {
	for _, g := range x.gens {
		n += uint64(len(g.table)) + uint64(cap(g.items))*sketchedBytes
	}
	return n
}

// sketchLimit is how many pages each of the domain's indexes of sketches may have.
func (d *domain) sketchLimit() int {
	return min(maxSketches, d.candidateLimit()*candidateBytes/sketchBytes)
}

// enter adds a page to one of the domain's indexes of sketches. domain.mu must be
// held.
func (d *domain) enter(x *sketches, s *dedup.Sketch, p sketched) bool {
	if err := x.add(s, p, d.sketchLimit()); err != nil {
		d.s.log("pool: domain %s finds fewer pages that resemble each other: %v", d.name, err)
		return false
	}
	return true
}

// useful tells whether pages can be found by a sketch that somebody else made.
func useful(s *dedup.Sketch) bool {
	for i := 1; i < s.N; i++ {
		if s.Feature[i] <= s.Feature[i-1] {
			return false
		}
	}
	return s.N >= minFeatures
}

// findBase finds a published page without a base that resembles s. domain.mu must be
// held.
func (d *domain) findBase(s *dedup.Sketch) (*segment, int) {
	var best [maxNear]near
	for _, b := range best[:d.bases.find(s, &best)] {
		g, i, _ := d.lookup(&b.hash)
		if g == nil {
			continue
		}
		if r, err := wire.ParseRecord(g.bytes(i)); err == nil && !r.HasBase {
			return g, i
		}
	}
	return nil, -1
}

// addBase makes a published page without a base known by the sketch of its content.
// domain.mu must be held.
func (d *domain) addBase(s *dedup.Sketch, h *wire.Hash) {
	if s.N < minFeatures {
		return
	}
	var best [maxNear]near
	for _, b := range best[:d.bases.find(s, &best)] {
		if b.hash == *h {
			// It was published before, and dropped.
			return
		}
	}
	if d.enter(&d.bases, s, sketched{hash: *h}) {
		d.counts.Bases++
	}
}

// resemble is for a page of c that nobody else is known to have. It tells whether
// c is to be asked for it, since a page of another resembles it. If not, c may be
// told of a base when another connection has sent it. domain.mu must be held.
func (d *domain) resemble(c *conn, p wire.Page, s *dedup.Sketch, based bool, now stamp) bool {
	var (
		best  [maxNear]near
		own   *sketched
		other *sketched
		wait  *pending
	)
	for _, b := range best[:d.sketches.find(s, &best)] {
		alive := d.conns[b.conn] != nil
		switch {
		case own == nil && b.hash == p.Hash && (b.conn == c.id || !alive):
			own = b.sketched
		case other == nil && b.conn != c.id && alive:
			other = b.sketched
		}
		if w := d.pending[b.hash]; wait == nil && w != nil && w.base && !w.lapsed && d.conns[w.from] != nil {
			wait = w
		}
	}
	me := candidate{c.id, p.Cookie}
	ask := false
	switch {
	case based:
	case wait != nil:
		wait.addSimilar(me)
	case other != nil && d.full():
		d.counts.Full++
	case other != nil && c.asked < maxAsked && len(d.pending) < maxPending:
		d.dropCandidate(&p.Hash)
		c.asked++
		w := &pending{offerers: []candidate{me}, from: c.id, since: now, base: true}
		if other.hash == p.Hash {
			w.offerers = append(w.offerers, other.candidate)
		} else {
			w.addSimilar(other.candidate)
		}
		d.pending[p.Hash] = w
		d.s.kick()
		ask = true
	}
	switch {
	case own != nil:
		own.candidate = me
	case d.sampled(s):
		d.enter(&d.sketches, s, sketched{me, p.Hash})
	}
	return ask
}

// sampled tells whether a page is to be entered by its sketch. domain.mu must be held.
func (d *domain) sampled(s *dedup.Sketch) bool {
	n := uint64(0)
	for _, g := range d.sketches.gens {
		n += uint64(len(g.items))
	}
	return s.Feature[0]%sketchSample == 0 || n*sketchBytes < d.spared+uint64(len(d.conns))*d.s.freeSketches*sketchBytes
}

// addSimilar notes whom to tell when the page is published, so that it can serve
// as a base.
func (w *pending) addSimilar(o candidate) {
	for _, s := range w.similar {
		if s == o {
			return
		}
	}
	if len(w.similar) < maxOfferers {
		w.similar = append(w.similar, o)
	}
}
