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
	// maxSketches bounds how many pages an index of sketches has.
	maxSketches = 256 << 10
	// sketchSample: one page in so many is entered even if the oldest ones have to be
	// forgotten for it, the others while there is room. Which ones depends on a
	// sketch's smallest feature, which two pages have in common as likely as any other
	// part of them.
	sketchSample = 32
	// sketchFloor and sketchShare: an index of sketches takes so many bytes for each
	// connection, and beyond that such a part of what bases have spared of late more
	// than they take themselves. sparedTime is how long it takes for half of that to be
	// forgotten.
	sketchFloor = 512
	sketchShare = 16
	sparedTime  = 600 * second
	// sketchedBytes is the size of a sketched, sketchBytes what a page takes in an
	// index of sketches.
	sketchedBytes = 24
	sketchBytes   = dedup.Features*8*4/3 + sketchedBytes
	// sweepTime is the least time between two looks at what an index has.
	sweepTime = 10 * second
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

// bytes is the memory that a generation takes, in bytes.
func (g *generation) bytes() uint64 { return uint64(len(g.table)) + uint64(cap(g.items))*sketchedBytes }

// sketches is an index of pages by their sketches. It has the latest pages: when a
// generation is full another one begins, half as large as all so far, and where they
// take too much the oldest ones are forgotten. The sketches themselves are not kept. Its
// zero value is empty. It is protected by domain.mu.
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

// minGeneration is what the smallest generation takes, in bytes.
var minGeneration = pageRound + dedup.TablePages(pageRound)*sketchedBytes

// generationFor returns the size of the table and the number of items of a generation for
// about want items, or more if there is room, in an index of limit bytes. Without room
// it has none.
func generationFor(want int, limit uint64) (table uint64, most int) {
	// Three quarters are the table's, and no generation is more than half of all.
	table = min(roundUp(dedup.TableSize(uint64(want))), limit/2*3/4&^(pageRound-1))
	table = max(table, pageRound)
	if limit < table+sketchedBytes {
		return 0, 0
	}
	return table, int(min(dedup.TablePages(table), (limit-table)/sketchedBytes))
}

// next is generationFor for what is entered next.
func (x *sketches) next(limit uint64) (table uint64, most int) {
	return generationFor(x.len()/2, limit)
}

// open returns the generation that is filled, if one has room.
func (x *sketches) open() *generation {
	if n := len(x.gens); n > 0 && len(x.gens[n-1].items) < x.gens[n-1].most {
		return x.gens[n-1]
	}
	return nil
}

// begin adds a generation.
func (x *sketches) begin(table uint64, most int) error {
	mem, err := unix.Mmap(-1, 0, int(table), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return fmt.Errorf("memory for %d sketches: %w", most, err)
	}
	x.gens = append(x.gens, &generation{table: mem, items: make([]sketched, 0, most), most: most})
	return nil
}

// enter enters a page in the generation that is open.
func (g *generation) enter(s *dedup.Sketch, p sketched) {
	g.table.Add(s, uint32(len(g.items)), true)
	g.items = append(g.items, p)
}

// fits tells whether a page can be entered for which none has to be forgotten.
func (x *sketches) fits(limit uint64) bool {
	if x.open() != nil {
		return true
	}
	table, most := x.next(limit)
	return most > 0 && x.bytes()+table+uint64(most)*sketchedBytes <= limit
}

// add enters a page. All of them take limit bytes at most.
func (x *sketches) add(s *dedup.Sketch, p sketched, limit uint64) error {
	if x.open() == nil {
		table, most := x.next(limit)
		if most == 0 {
			return nil
		}
		for len(x.gens) > 0 && x.bytes()+table+uint64(most)*sketchedBytes > limit {
			x.gens[0].free()
			x.gens = x.gens[1:]
		}
		if err := x.begin(table, most); err != nil {
			return err
		}
	}
	x.open().enter(s, p)
	return nil
}

// sweep forgets the pages that keep does not tell to keep, and moves the others together,
// if that gives memory back. None of the others is lost, but for those that were crowded
// out of the table so far that they could not be found.
func (x *sketches) sweep(limit uint64, keep func(*sketched) bool) error {
	kept := 0
	for _, g := range x.gens {
		for i := range g.items {
			if keep(&g.items[i]) {
				kept++
			}
		}
	}
	table, most := generationFor(kept+kept/4, 1<<62)
	if kept == 0 {
		x.free()
		return nil
	}
	whole := table + uint64(most)*sketchedBytes
	if whole > x.bytes()*3/4 {
		return nil
	}
	var to sketches
	for _, g := range x.gens {
		found := make([]dedup.Sketch, len(g.items))
		g.table.Each(func(f, item uint32) {
			if int(item) < len(found) && found[item].N < dedup.Features {
				s := &found[item]
				s.Feature[s.N] = f
				s.N++
			}
		})
		for i := range g.items {
			if found[i].N < minFeatures || !keep(&g.items[i]) {
				continue
			}
			if to.open() == nil {
				rest := kept - to.len()
				// As for what is added, so that the oldest can go first; but not
				// many, if the limit has fallen since: each is looked into by
				// every find.
				table, most := generationFor(rest+rest/4, max(limit, whole, 2*minGeneration))
				if err := to.begin(table, most); err != nil {
					to.free()
					return err
				}
			}
			to.open().enter(&found[i], g.items[i])
		}
	}
	x.free()
	*x = to
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

// len is the number of pages.
func (x *sketches) len() (n int) {
	for _, g := range x.gens {
		n += len(g.items)
	}
	return n
}

// bytes is the memory that the index takes, in bytes.
func (x *sketches) bytes() (n uint64) {
	for _, g := range x.gens {
		n += g.bytes()
	}
	return n
}

// sketchLimit is how many bytes each of the domain's indexes of sketches may take.
// domain.mu must be held.
func (d *domain) sketchLimit() uint64 {
	d.fade(d.s.now())
	earned := uint64(0)
	if d.spared > d.baseBytes {
		earned = (d.spared - d.baseBytes) / sketchShare
	}
	limit := max(uint64(len(d.conns))*d.s.sketchFloor, 2*minGeneration) + earned
	return min(limit, maxSketches*sketchBytes, uint64(d.candidateLimit())*candidateBytes)
}

// fade forgets, with time, what bases have spared and taken. domain.mu must be held.
func (d *domain) fade(now stamp) {
	if n := (now - d.faded) / sparedTime; n > 0 {
		d.spared >>= min(n, 63)
		d.baseBytes >>= min(n, 63)
		d.faded += n * sparedTime
	}
}

// sweepSketches forgets sketches of pages that are published or whose owners have
// ended. domain.mu must be held.
func (d *domain) sweepSketches() error {
	return d.sketches.sweep(d.sketchLimit(), func(p *sketched) bool {
		g, _, _ := d.lookup(&p.hash)
		return g == nil && d.conns[p.conn] != nil
	})
}

// sweepBases forgets sketches of bases that are not kept any more. domain.mu must be
// held.
func (d *domain) sweepBases(now stamp) error {
	since := now - d.s.keep
	return d.bases.sweep(d.sketchLimit(), func(p *sketched) bool {
		g, i, _ := d.lookup(&p.hash)
		return g != nil && g.recs[i].lives(since)
	})
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

// addBase makes a published page without a base known by the sketch of its content: if it
// was asked for as a base, or if there is room. domain.mu must be held.
func (d *domain) addBase(s *dedup.Sketch, h *wire.Hash, asked bool) {
	if s.N < minFeatures || !asked && !d.bases.fits(d.sketchLimit()) {
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
	case s.Feature[0]%sketchSample == 0 || d.sketches.fits(d.sketchLimit()):
		d.enter(&d.sketches, s, sketched{me, p.Hash})
	}
	return ask
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
