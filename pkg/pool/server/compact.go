package server

import (
	"slices"

	"runsc-agentzip/pkg/pool/wire"
)

const (
	// minOpen is Server.minOpen.
	minOpen = 32 << 10
	// grace is how long a page is kept for its first reference even if there
	// is no room.
	grace = 1 * second
	// moveTime is how long a page that was moved is kept for those that have a
	// reference to its old place: a sandbox may work for some time before it
	// looks.
	moveTime = 120 * second
	// encoderIdle is how long the encoder is kept without use.
	encoderIdle = 10 * second
)

// maintain does what has to be done from time to time. pressed says that the host
// has no room. It returns true if it has to be called again though nothing may
// happen until then.
func (d *domain) maintain(now stamp, pressed bool) bool {
	d.mu.Lock()
	if d.gone {
		d.mu.Unlock()
		return false
	}
	pressed = pressed || d.pressed
	d.pressed = false
	d.expire(now)
	d.tellAlone(now)
	again := len(d.pending) > 0 || d.alone > 0 && !d.s.drained.Load() || d.parts > 0 || len(d.conns) == 0 || now <= d.event+d.s.keep+encoderIdle
	idle := now > d.event+encoderIdle
	d.mu.Unlock()

	for shard := range d.candidates {
		d.mu.Lock()
		d.clean(shard)
		d.mu.Unlock()
	}
	if idle && d.encMu.TryLock() {
		if d.enc != nil {
			d.enc = nil
			d.s.dropped.Store(true)
		}
		d.encMu.Unlock()
	}
	d.compact(now, pressed)
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.unswept && now >= d.swept+sweepTime {
		d.unswept, d.swept = false, now
		err := d.sweepSketches()
		// Others may have their turn in between.
		d.mu.Unlock()
		d.mu.Lock()
		if err == nil {
			err = d.sweepBases(now)
		}
		if err != nil {
			d.s.log("pool: domain %s keeps sketches that it does not need: %v", d.name, err)
		}
	}
	return again || d.unswept
}

// expire forgets pending pages and patterns that nobody goes on sending. domain.mu
// must be held.
func (d *domain) expire(now stamp) {
	for h, w := range d.pending {
		if now <= w.since+abandon && d.conns[w.from] != nil {
			continue
		}
		alive := slices.DeleteFunc(w.offerers, func(o candidate) bool { return d.conns[o.conn] == nil })
		if w.offerers = alive; now <= w.since+abandon && len(alive) > 1 {
			continue
		}
		d.settle(&h, w)
		if len(alive) > 0 {
			d.setCandidate(d.conns[alive[0].conn], wire.Page{Hash: h, Cookie: alive[0].cookie})
		}
	}
	if d.parts > 0 {
		for _, c := range d.conns {
			if c.partial && now > c.partAt+abandon {
				d.dropPart(c)
			}
		}
	}
}

// clean makes a map of candidates anew if many of them belong to nobody. domain.mu
// must be held.
func (d *domain) clean(shard int) {
	if d.dead == 0 || (d.dead+d.refusals)*2 < d.ncandidates {
		return
	}
	old := d.candidates[shard]
	n := 0
	for _, c := range old {
		if d.conns[c.conn] != nil {
			n++
		}
	}
	if n == len(old) {
		return
	}
	m := make(map[uint64]candidate, n)
	for key, c := range old {
		if d.conns[c.conn] != nil {
			m[key] = c
		} else {
			d.uncount(c)
		}
	}
	if n == 0 {
		m = nil
	}
	d.candidates[shard] = m
}

// compact rewrites segments of which little is alive.
func (d *domain) compact(now stamp, pressed bool) {
	d.mu.Lock()
	nums := make([]uint32, 0, len(d.segs))
	for num := range d.segs {
		nums = append(nums, num)
	}
	last := d.next
	d.mu.Unlock()
	slices.Sort(nums)
	since := now - d.s.keep
	if pressed {
		since = now - grace
	}
	for _, num := range nums {
		d.mu.Lock()
		// What is written meanwhile is not looked at again.
		if g := d.segs[num]; g != nil && num < last && d.worthwhile(g, since, pressed) {
			d.rewrite(g, since, now)
		}
		d.mu.Unlock()
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if size := d.index.places + wire.MaxProbe - 1; d.index.n*sparse*4 < size && d.index.places > minPlaces {
		// The present one does as well.
		if err := d.resize(max(size/4-wire.MaxProbe+1, minPlaces)); err != nil && err != errCrowded {
			d.s.log("pool: domain %s keeps an index that is larger than it needs: %v", d.name, err)
		}
	}
}

// worthwhile tells whether a segment should be rewritten. domain.mu must be held.
func (d *domain) worthwhile(g *segment, since stamp, pressed bool) bool {
	used := g.usedBytes()
	// The quick test first.
	limit := used / 2
	if pressed {
		limit = used / 8 * 7
	}
	if g.referenced >= limit || g == d.open && used < d.s.minOpen && !pressed {
		return false
	}
	alive := g.alive(since)
	return alive < limit && (alive == 0 || !d.s.drained.Load())
}

// rewrite moves what is alive of a segment, and retires it. domain.mu must be
// held.
func (d *domain) rewrite(g *segment, since, now stamp) {
	if g == d.open {
		d.closeSegment()
	}
	for i := range g.recs {
		h, l := g.hash(i), g.loc(i)
		slots := d.index.slots(h)
		if at, ok := wire.FindSlot(slots, h); !ok || at != l {
			// It was moved before, when there was no memory for all of them.
			continue
		}
		if !g.recs[i].lives(since) {
			wire.DropSlot(slots, h, l)
			d.index.n--
			d.counts.Dropped++
			continue
		}
		// Nobody has a reference to the copy yet. Those who had one to the
		// record get the time to take it even if the host has no room.
		last := g.recs[i].last
		if g.recs[i].refs > 0 {
			last = now + max(d.s.keep, moveTime)
		}
		to, b, err := d.room(g.size(i), last)
		if err != nil {
			d.s.log("pool: compaction of domain %s: %v", d.name, err)
			return
		}
		copy(b, g.bytes(i))
		wire.PutSlot(slots, h, to.loc(len(to.recs)-1))
		d.counts.Moved++
	}
	d.event = now
	d.unswept = true
	d.retire(g)
}

// retire lets go of a segment. domain.mu must be held.
func (d *domain) retire(g *segment) {
	d.counts.Retired++
	delete(d.segs, g.num)
	d.hold(-int64(g.held()))
	d.records -= uint64(len(g.recs))
	d.recordBytes -= g.usedBytes()
	d.referenced -= g.referenced
	d.alone -= g.alone
	var w wire.Writer
	w.Begin(wire.Retire, g.num)
	p := slices.Clone(w.Bytes())
	for _, c := range d.conns {
		for i := 0; i < len(g.recs); i += refGroupSize {
			if key := refKey(g.num, i); c.refs != nil {
				if _, ok := c.refs[key]; ok {
					delete(c.refs, key)
					d.groups--
				}
			}
		}
		c.push(packet{msg: p}, true)
	}
	g.free()
}

// free lets go of everything. The domain must be without connections, and not be
// found any more.
func (d *domain) free() {
	d.encMu.Lock()
	d.closeTemplate()
	d.enc = nil
	d.encMu.Unlock()

	d.mu.Lock()
	defer d.mu.Unlock()
	d.gone = true
	for _, g := range d.segs {
		g.free()
	}
	d.segs, d.open = nil, nil
	d.index.free()
	d.hold(-int64(d.held))
	clear(d.candidates[:])
	d.sketches.free()
	d.bases.free()
	d.ncandidates, d.dead, d.refusals = 0, 0, 0
	d.records, d.recordBytes, d.referenced, d.alone = 0, 0, 0, 0
	d.pending, d.patterns, d.patternsLen = nil, nil, 0
}
