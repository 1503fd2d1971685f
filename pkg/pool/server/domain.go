package server

import (
	"crypto/rand"
	"encoding/binary"
	"fmt"
	mathbits "math/bits"
	"slices"
	"sync"

	"runsc-agentzip/memfile/codec"
	"runsc-agentzip/memfile/dedup"
	"runsc-agentzip/pkg/pool/wire"
)

const (
	// maxCandidates bounds what a connection can make the pool remember.
	maxCandidates = 256 << 10
	// candidateBytes is what a candidate takes in a map, on average.
	candidateBytes = 26
	// connectionBytes is what a connection takes: measured 1.8 KiB, and 5.6 of stack.
	connectionBytes = 8 << 10
	// candidateShare: candidates take at most this part of the limits.
	candidateShare = 8
	// maxPending is how many pages of a domain are asked for at a time, and
	// maxAsked how many of one connection.
	maxPending = 16 << 10
	maxAsked   = 4 << 10
	// maxOfferers is how many connections are remembered for a pending page.
	// The others find it in the index.
	maxOfferers = 16
	// maxRefused is how many pages are remembered for having no form.
	maxRefused = 64 << 10
	// patience is how long a page is waited for until another connection may be
	// asked, and abandon how long until it is forgotten that it was asked for.
	patience = 10 * second
	abandon  = 60 * second
	// candidateShards is in how many maps the candidates are, so that each can
	// be cleaned in a short time.
	candidateShards = 64
	// maxPatternsParts is how many connections of a domain may be amid sending
	// patterns.
	maxPatternsParts = 16
	// aloneTime is how long only one connection may refer to a page until it is told
	// so: others may be slow to take it, or have restored theirs for a step.
	// aloneAgain is when it is told again, should it have missed that.
	aloneTime  = 20 * second
	aloneAgain = 120 * second
)

// A candidate is a page that one connection has offered.
type candidate struct {
	// conn is the number of the connection, or refused.
	conn   uint32
	cookie uint32
}

// refused is the connection of candidates that have no form worth keeping.
const refused = 0

// A pending page is one that a connection was asked for.
type pending struct {
	offerers []candidate
	// from is the connection that was asked, and since when.
	from  uint32
	since stamp
	// lapsed is set if another may be asked now.
	lapsed bool
	// base is set if the page was asked for to serve as a base: it is stored
	// without one. similar are pages that resemble it.
	base    bool
	similar []candidate
}

// A domain is a set of sandboxes that share pages.
type domain struct {
	s    *Server
	id   domainID
	name string
	key  wire.Key

	// encMu protects the fields that encoding needs.
	encMu sync.Mutex
	enc   *codec.Encoder
	// template is nil if there is none, or none that can be opened, or not yet.
	template Template
	// opened is the folder that opening the template was last tried in.
	opened string
	base   codec.Page
	blob   [codec.MaxEncoded]byte

	// mu protects what follows.
	mu sync.Mutex
	// conns has the connections that live, by their numbers.
	conns map[uint32]*conn
	// digest is the template's, dir where the latest connection has it.
	digest, dir string
	// based is set while template is.
	based bool

	index *index
	segs  map[uint32]*segment
	open  *segment
	// next is the number of the next segment. Numbers are not used twice.
	next uint32
	// records and recordBytes are those in all segments, referenced the size
	// of those with a reference, in bytes.
	records     uint64
	recordBytes uint64
	referenced  uint64
	// alone is the number of records with one reference.
	alone int
	// held is the memory of segments and index, in bytes.
	held uint64

	candidates [candidateShards]map[uint64]candidate
	// ncandidates is how many there are, dead how many of them belong to
	// connections that have ended, refusals how many are refused.
	ncandidates, dead, refusals int
	pending                     map[wire.Hash]*pending
	// sketches has candidates, bases published pages that have no base.
	sketches, bases sketches
	// spared is what sandboxes say that bases have spared of late, baseBytes the size
	// of pages that were taken to be bases, in bytes. Both were last halved at faded.
	spared, baseBytes uint64
	faded             stamp
	// unswept is set if there may be sketches of no use since swept.
	unswept bool
	swept   stamp
	// groups is the number of refGroups of all connections.
	groups int

	// patterns are what a sandbox has learnt about steps, packed, and patternsLen how
	// long they are otherwise, in bytes.
	patterns    []byte
	patternsLen int
	// parts is how many connections are amid sending patterns, partBytes the memory
	// of what has come, in bytes.
	parts     int
	partBytes uint64

	// event is when something last happened that compaction depends on.
	event stamp
	// empty is when the last connection ended.
	empty stamp
	// pressed is set when there was no room for a page.
	pressed bool
	counts  Counts
	// gone is set when the domain was freed.
	gone bool
}

func newDomain(s *Server, id domainID, g *wire.Greeting) (*domain, error) {
	d := &domain{
		s: s, id: id, name: id.String(),
		digest: g.Template, dir: g.TemplateDir,
		conns: map[uint32]*conn{}, segs: map[uint32]*segment{}, pending: map[wire.Hash]*pending{},
		empty: s.now(), faded: s.now(), swept: s.now(),
	}
	if _, err := rand.Read(d.key[:]); err != nil {
		return nil, err
	}
	var err error
	if d.index, err = newIndex(minPlaces); err != nil {
		return nil, err
	}
	d.hold(int64(len(d.index.mem)))
	return d, nil
}

// hold accounts for memory of segments and index. domain.mu must be held, or the
// domain be new.
func (d *domain) hold(n int64) {
	d.held += uint64(n)
	d.s.held.Add(n)
}

// over tells whether so many bytes more are over a limit, and if so sees to it
// that unreferenced pages are dropped. domain.mu must be held.
func (d *domain) over(n uint64) bool {
	o := &d.s.opts
	host := o.MaxBytes > 0 && uint64(d.s.held.Load())+n > o.MaxBytes
	if host {
		d.s.pressed.Store(true)
	}
	own := o.DomainMaxBytes > 0 && d.held+n > o.DomainMaxBytes
	if own {
		d.pressed = true
	}
	if host || own {
		d.s.kick()
	}
	return host || own
}

// full tells whether there is no room for another page. domain.mu must be held.
func (d *domain) full() bool { return d.over(wire.MaxRecord + pageRound) }

// candidateKey is the half of a hash that candidates are known by, and the map
// they are in.
func candidateKey(h *wire.Hash) (shard int, key uint64) {
	return int(h[8]) % candidateShards, binary.LittleEndian.Uint64(h[:])
}

// candidateLimit is how many candidates a domain may have.
func (d *domain) candidateLimit() int {
	limit := d.s.opts.DomainMaxBytes
	if m := d.s.opts.MaxBytes; m > 0 && (limit == 0 || m < limit) {
		limit = m
	}
	if limit == 0 {
		return maxCandidates << 20
	}
	return int(min(limit/candidateShare/candidateBytes, maxCandidates<<20))
}

// setCandidate enters a candidate of c, or makes c that of one that is there.
// domain.mu must be held.
func (d *domain) setCandidate(c *conn, p wire.Page) {
	shard, key := candidateKey(&p.Hash)
	m := d.candidates[shard]
	old, ok := m[key]
	if ok && old.conn == c.id {
		m[key] = candidate{c.id, p.Cookie}
		return
	}
	if c.candidates >= maxCandidates || !ok && d.ncandidates >= d.candidateLimit() {
		d.counts.Ignored++
		return
	}
	if ok {
		d.uncount(old)
	}
	if m == nil {
		m = map[uint64]candidate{}
		d.candidates[shard] = m
	}
	m[key] = candidate{c.id, p.Cookie}
	d.ncandidates++
	c.candidates++
}

// uncount takes a candidate that goes out of the counts. domain.mu must be held.
func (d *domain) uncount(old candidate) {
	d.ncandidates--
	if old.conn == refused {
		d.refusals--
	} else if c := d.conns[old.conn]; c != nil {
		c.candidates--
	} else {
		d.dead--
	}
}

// dropCandidate forgets a candidate. domain.mu must be held.
func (d *domain) dropCandidate(h *wire.Hash) {
	shard, key := candidateKey(h)
	if old, ok := d.candidates[shard][key]; ok {
		d.uncount(old)
		delete(d.candidates[shard], key)
	}
}

// offer handles an Offer or a Resemble.
func (d *domain) offer(c *conn, m *wire.Message) {
	chunk := max(m.N, 1)
	if m.Type == wire.Resemble {
		chunk = resembleChunk
	}
	for from := 0; from < m.N; from += chunk {
		d.offerSome(c, m, from, min(from+chunk, m.N))
	}
}

// offerSome handles some items of an Offer or a Resemble.
func (d *domain) offerSome(c *conn, m *wire.Message, from, to int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	now := d.s.now()
	drained := d.s.drained.Load()
	d.counts.Offers += uint64(to - from)
	var wants []wire.Page
	var places, similar []wire.Place
	for i := from; i < to; i++ {
		var sk wire.Sketched
		if m.Type == wire.Resemble {
			sk = m.Sketched(i)
			d.counts.Resembled++
		} else {
			sk.Page = m.Page(i)
		}
		p := sk.Page
		g, at, taken := d.lookup(&p.Hash)
		if taken {
			continue
		}
		if at >= 0 {
			d.counts.Hits++
			d.touch(g, at, now)
			places = append(places, wire.Place{Page: p, Loc: g.loc(at)})
			continue
		}
		alone := d.pending[p.Hash] == nil
		if !drained {
			var ask bool
			if ask, alone = d.offered(c, p, now); ask {
				wants = append(wants, p)
			}
		}
		if !alone || !useful(&sk.Sketch) {
			continue
		}
		g, at = d.findBase(&sk.Sketch)
		if g != nil {
			d.touch(g, at, now)
			similar = append(similar, wire.Place{Page: wire.Page{Hash: *g.hash(at), Cookie: p.Cookie}, Loc: g.loc(at)})
		}
		if !drained && sk.Alone && d.resemble(c, p, &sk.Sketch, g != nil, now) {
			// Unless the page that resembles it is the same.
			p.Base = len(d.pending[p.Hash].offerers) == 1
			wants = append(wants, p)
		}
	}
	d.pushPlaces(c, wire.Published, places)
	d.pushPlaces(c, wire.Similar, similar)
	for len(wants) > 0 {
		var w wire.Writer
		w.Begin(wire.Want, 0)
		n := min(len(wants), w.Room())
		for _, p := range wants[:n] {
			w.Page(p)
		}
		if c.push(packet{msg: w.Bytes()}, false) {
			d.counts.Wanted += uint64(n)
			c.allowed = min(c.allowed+n, maxAllowed)
		} else {
			for _, p := range wants[:n] {
				d.pending[p.Hash].lapsed = true
			}
		}
		wants = wants[n:]
	}
}

// touch notes that a record is about to be used. domain.mu must be held.
func (d *domain) touch(g *segment, at int, now stamp) {
	// Soon there will be a reference.
	if r := &g.recs[at]; r.refs == 0 {
		r.last = max(r.last, now)
		d.happened(now)
	}
}

// offered notes that c has offered a page that is not published. It tells
// whether c is to be asked for it, and whether nobody else is known to have it.
// domain.mu must be held.
func (d *domain) offered(c *conn, p wire.Page, now stamp) (ask, alone bool) {
	if w := d.pending[p.Hash]; w != nil {
		return d.offeredPending(w, c, p, now), false
	}
	shard, key := candidateKey(&p.Hash)
	cand, ok := d.candidates[shard][key]
	if ok && cand.conn == refused {
		return false, false
	}
	if !ok || cand.conn == c.id || d.conns[cand.conn] == nil {
		d.setCandidate(c, p)
		return false, true
	}
	if d.full() {
		d.counts.Full++
		return false, false
	}
	if c.asked >= maxAsked || len(d.pending) >= maxPending {
		return false, false
	}
	d.dropCandidate(&p.Hash)
	c.asked++
	d.pending[p.Hash] = &pending{offerers: []candidate{cand, {c.id, p.Cookie}}, from: c.id, since: now}
	d.s.kick()
	return true, false
}

// offeredPending is offered for a page that was asked for.
func (d *domain) offeredPending(w *pending, c *conn, p wire.Page, now stamp) bool {
	if len(w.offerers) == maxOfferers {
		w.offerers = slices.DeleteFunc(w.offerers, func(o candidate) bool { return d.conns[o.conn] == nil })
	}
	known := false
	others := slices.ContainsFunc(w.similar, func(o candidate) bool { return o.conn != c.id && d.conns[o.conn] != nil })
	for i := range w.offerers {
		switch o := &w.offerers[i]; {
		case o.conn == c.id:
			o.cookie, known = p.Cookie, true
		case d.conns[o.conn] != nil:
			others = true
		}
	}
	if !known && len(w.offerers) < maxOfferers {
		w.offerers = append(w.offerers, candidate{c.id, p.Cookie})
	}
	asked := d.conns[w.from]
	if asked != nil && !w.lapsed && now <= w.since+patience || !others || c.asked >= maxAsked || d.full() {
		return false
	}
	if asked != nil {
		asked.asked--
	}
	c.asked++
	w.from, w.since, w.lapsed = c.id, now, false
	return true
}

// settle ends that a page is asked for. domain.mu must be held.
func (d *domain) settle(h *wire.Hash, w *pending) {
	delete(d.pending, *h)
	if c := d.conns[w.from]; c != nil {
		c.asked--
	}
}

// pushPlaces tells a connection where pages are, by a Published or Similar.
// domain.mu must be held.
func (d *domain) pushPlaces(c *conn, t wire.Type, places []wire.Place) {
	for len(places) > 0 {
		var w wire.Writer
		w.Begin(t, 0)
		n := min(len(places), w.Room())
		for _, p := range places[:n] {
			w.Place(p)
		}
		if c.push(packet{msg: w.Bytes()}, false) && t == wire.Similar {
			d.counts.Similar += uint64(n)
		}
		places = places[n:]
	}
}

// A note is what a connection is to be told.
type note struct{ published, similar []wire.Place }

// publish handles a Publish.
func (d *domain) publish(c *conn, m *wire.Message) {
	hasher := wire.NewHasher(&d.key)
	notes := map[*conn]note{}
	for i := range m.N {
		ct := m.Content(i)
		claim, base := d.awaits(c, &ct.Hash)
		switch claim {
		case unasked:
			c.violations++
		case awaited:
			if hasher.Sum(ct.Data) != ct.Hash {
				c.violations++
				d.lapse(c, &ct.Hash)
				continue
			}
			d.add(&ct, base, notes)
		}
	}
	if len(notes) == 0 {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for to, n := range notes {
		// Compaction may have been faster.
		gone := func(p wire.Place) bool { return d.segs[p.Loc.Segment()] == nil }
		d.pushPlaces(to, wire.Published, slices.DeleteFunc(n.published, gone))
		d.pushPlaces(to, wire.Similar, slices.DeleteFunc(n.similar, gone))
	}
}

// A claim is what a connection that sends a page may expect.
type claim int

const (
	unasked claim = iota // nobody has asked it
	late                 // it was asked, but that is settled
	awaited              // the page is taken if it is the right one
)

// awaits tells whether a page is awaited from c, and whether to serve as a base.
func (d *domain) awaits(c *conn, h *wire.Hash) (_ claim, base bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	// A connection may answer each Want once, however late.
	if c.allowed == 0 {
		return unasked, false
	}
	w := d.pending[*h]
	if w == nil || w.from != c.id {
		c.allowed--
		return late, false
	}
	c.allowed--
	drained := d.s.drained.Load()
	if drained || d.full() {
		if !drained {
			d.counts.Full++
		}
		d.settle(h, w)
		return late, false
	}
	w.since = d.s.now()
	return awaited, w.base
}

// lapse lets others be asked for what c was asked for.
func (d *domain) lapse(c *conn, h *wire.Hash) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if w := d.pending[*h]; w != nil && w.from == c.id {
		w.lapsed = true
	}
}

// add publishes a page whose hash is right, without a base if it is to serve as
// one, and adds to notes whom to tell.
func (d *domain) add(ct *wire.Content, base bool, notes map[*conn]note) {
	d.encMu.Lock()
	defer d.encMu.Unlock()
	r, ok := d.encode(ct, base)
	var s dedup.Sketch
	if ok && !r.HasBase {
		s.Make(ct.Data)
	}

	d.mu.Lock()
	defer d.mu.Unlock()
	w := d.pending[ct.Hash]
	if w == nil {
		return
	}
	d.settle(&ct.Hash, w)
	if g, _, taken := d.lookup(&ct.Hash); g != nil || taken {
		return
	}
	if !ok {
		d.refuse(&ct.Hash)
		return
	}
	l, err := d.append(&r)
	if err != nil {
		d.counts.Full++
		return
	}
	d.counts.Published++
	d.unswept = true
	if base {
		d.baseBytes += uint64(r.Size())
	}
	for _, o := range w.offerers {
		if to := d.conns[o.conn]; to != nil {
			n := notes[to]
			n.published = append(n.published, wire.Place{Page: wire.Page{Hash: ct.Hash, Cookie: o.cookie}, Loc: l})
			notes[to] = n
		}
	}
	if r.HasBase {
		return
	}
	d.addBase(&s, &ct.Hash, base)
	for _, o := range w.similar {
		if to := d.conns[o.conn]; to != nil {
			n := notes[to]
			n.similar = append(n.similar, wire.Place{Page: wire.Page{Hash: ct.Hash, Cookie: o.cookie}, Loc: l})
			notes[to] = n
		}
	}
}

// refuse remembers that a page has no form worth keeping. domain.mu must be
// held.
func (d *domain) refuse(h *wire.Hash) {
	d.counts.Rejected++
	d.dropCandidate(h)
	if d.refusals >= maxRefused || d.ncandidates >= d.candidateLimit() {
		return
	}
	shard, key := candidateKey(h)
	if d.candidates[shard] == nil {
		d.candidates[shard] = map[uint64]candidate{}
	}
	d.candidates[shard][key] = candidate{conn: refused}
	d.ncandidates++
	d.refusals++
}

// encode finds the smallest form of a page, or the smallest without a base. The
// record is valid until encMu, which must be held, is unlocked.
func (d *domain) encode(ct *wire.Content, alone bool) (wire.Record, bool) {
	if d.enc == nil {
		d.enc = codec.NewEncoder()
	}
	in := codec.Input{Page: ct.Data, Tier: codec.TierMax}
	var t Template
	if !alone {
		t = d.openTemplate()
	}
	if t != nil && uint64(ct.Template) < t.Pages() {
		if err := t.ReadPages(d.base[:], uint64(ct.Template)); err != nil {
			d.s.log("pool: domain %s goes without base pages: page %d of template %s: %v", d.name, ct.Template, d.digest, err)
			d.closeTemplate()
		} else {
			in.Base = &d.base
		}
	}
	// With a base, Encode returns the form without one if that is shorter.
	tag, n, _ := d.enc.Encode(d.blob[:], in)
	// Zero pages and the template's cost a sandbox nothing.
	if n == 0 {
		return wire.Record{}, false
	}
	r := wire.Record{Hash: ct.Hash, Sum: codec.Sum(ct.Data), Tag: tag, Enc: d.blob[:n]}
	if tag == codec.TagWordDelta || tag == codec.TagZstdBase {
		r.HasBase, r.Base = true, ct.Template
	}
	return r, true
}

// openTemplate returns the domain's template, or nil. encMu must be held.
func (d *domain) openTemplate() Template {
	if d.template != nil || d.s.opts.OpenTemplate == nil || d.digest == "" {
		return d.template
	}
	d.mu.Lock()
	dir := d.dir
	d.mu.Unlock()
	// A folder that did not work is not tried twice.
	if dir == d.opened {
		return nil
	}
	d.opened = dir
	t, err := d.s.opts.OpenTemplate(dir, d.digest)
	if err != nil {
		d.s.log("pool: domain %s goes without base pages: open template %s in %s: %v", d.name, d.digest, dir, err)
		return nil
	}
	d.template = t
	d.mu.Lock()
	d.based = true
	d.mu.Unlock()
	return t
}

// closeTemplate closes the template, which is not opened again from the same
// folder. encMu must be held.
func (d *domain) closeTemplate() {
	if d.template == nil {
		return
	}
	if err := d.template.Close(); err != nil {
		d.s.log("pool: close template %s of domain %s: %v", d.digest, d.name, err)
	}
	d.template = nil
	d.mu.Lock()
	d.based = false
	d.mu.Unlock()
}

// append puts a record that is not published into the open segment and the
// index. domain.mu must be held.
func (d *domain) append(r *wire.Record) (wire.Loc, error) {
	if err := d.grow(&r.Hash); err != nil {
		return 0, err
	}
	now := d.s.now()
	g, b, err := d.room(uint64(r.Size()), now)
	if err != nil {
		d.s.log("pool: domain %s takes no more pages for now: %v", d.name, err)
		return 0, err
	}
	r.Put(b)
	l := g.loc(len(g.recs) - 1)
	if !wire.PutSlot(d.index.slots(&r.Hash), &r.Hash, l) {
		return 0, fmt.Errorf("index of domain %s has lost a place", d.name)
	}
	d.index.n++
	d.happened(now)
	return l, nil
}

// happened notes something that compaction depends on. domain.mu must be held.
func (d *domain) happened(now stamp) {
	d.event = now
	d.s.kick()
}

// A refGroup has the references of a connection to refGroupSize records of a
// segment that follow each other.
type refGroup [refGroupSize / 64]uint64

const refGroupSize = 256

// refKey is the key of a refGroup: the number of the segment and of the group.
func refKey(num uint32, i int) uint64 { return uint64(num)<<32 | uint64(i/refGroupSize) }

// ref handles a Ref or Unref.
func (d *domain) ref(c *conn, m *wire.Message) {
	d.mu.Lock()
	defer d.mu.Unlock()
	now := d.s.now()
	for i := range m.N {
		l := m.Loc(i)
		g := d.segs[l.Segment()]
		if g == nil {
			// Of a retired segment, it is only late.
			if l.Segment() >= d.next {
				c.violations++
			}
			continue
		}
		at := g.find(l)
		if at < 0 || uint64(l) != uint64(g.loc(at)) {
			c.violations++
			continue
		}
		key := refKey(g.num, at)
		group, had := c.refs[key]
		word, bit := at%refGroupSize/64, uint64(1)<<(at%64)
		if has := group[word]&bit != 0; has == (m.Type == wire.Ref) {
			continue
		}
		group[word] ^= bit
		if group == (refGroup{}) {
			delete(c.refs, key)
			d.groups--
		} else {
			c.refs[key] = group
			if !had {
				d.groups++
			}
		}
		if m.Type == wire.Ref {
			d.take(g, at, now)
		} else {
			d.give(g, at, now)
		}
	}
}

// take and give count a reference more or less. domain.mu must be held.
func (d *domain) take(g *segment, at int, now stamp) {
	r := &g.recs[at]
	switch r.refs++; r.refs {
	case 1:
		g.referenced += g.size(at)
		d.referenced += g.size(at)
		d.leftAlone(g, r, now)
	case 2:
		d.alone--
		g.alone--
	}
}

func (d *domain) give(g *segment, at int, now stamp) {
	r := &g.recs[at]
	switch r.refs--; r.refs {
	case 0:
		d.alone--
		g.alone--
		r.last = now
		g.referenced -= g.size(at)
		d.referenced -= g.size(at)
		d.happened(now)
	case 1:
		d.leftAlone(g, r, now)
	}
}

// leftAlone notes that one connection alone has a reference. domain.mu must be held.
func (d *domain) leftAlone(g *segment, r *rec, now stamp) {
	r.last = now
	d.alone++
	g.alone++
	if due := now + aloneTime; g.alone == 1 || due < g.aloneAt {
		g.aloneAt = due
	}
	d.s.kick()
}

// tellAlone tells connections of pages that nobody else has taken for long, of one
// segment at a time: everybody else waits meanwhile. domain.mu must be held.
func (d *domain) tellAlone(now stamp) {
	if d.alone == 0 || d.s.drained.Load() {
		return
	}
	for num, g := range d.segs {
		if g.alone == 0 || now < g.aloneAt {
			continue
		}
		due := make([]uint64, (len(g.recs)+refGroupSize-1)/refGroupSize*len(refGroup{}))
		some := false
		g.aloneAt = now + aloneAgain
		for i := range g.recs {
			r := &g.recs[i]
			if r.refs != 1 {
				continue
			}
			if r.last+aloneTime > now {
				g.aloneAt = min(g.aloneAt, r.last+aloneTime)
				continue
			}
			r.last = now + aloneAgain - aloneTime
			due[i/64] |= 1 << (i % 64)
			some = true
		}
		if !some {
			continue
		}
		for _, c := range d.conns {
			var w wire.Writer
			w.Begin(wire.Alone, 0)
			push := func() {
				if n := w.Len(); n > 0 && c.push(packet{msg: slices.Clone(w.Bytes())}, false) {
					d.counts.Alone += uint64(n)
				}
				w.Begin(wire.Alone, 0)
			}
			for i := 0; i < len(g.recs); i += refGroupSize {
				for k, has := range c.refs[refKey(num, i)] {
					for bits := has & due[i/64+k]; bits != 0; bits &= bits - 1 {
						w.Loc(g.loc(i + k*64 + mathbits.TrailingZeros64(bits)))
						if w.Room() == 0 {
							push()
						}
					}
				}
			}
			push()
		}
		return
	}
}

// lockGroups is how many refGroups are gone through before domain.mu is unlocked
// for others.
const lockGroups = 64

// eachRef calls f for the records that c has references to. domain.mu must be
// held; it is unlocked in between.
func (d *domain) eachRef(c *conn, f func(g *segment, at int)) {
	n := 0
	for key, group := range c.refs {
		if n++; n%lockGroups == 0 {
			d.mu.Unlock()
			d.mu.Lock()
			// Compaction may have taken the group out.
			if _, ok := c.refs[key]; !ok {
				continue
			}
		}
		g := d.segs[uint32(key>>32)]
		if g == nil {
			continue
		}
		for w, bits := range group {
			for i := 0; bits != 0; i, bits = i+1, bits>>1 {
				if bits&1 != 0 {
					f(g, int(uint32(key))*refGroupSize+w*64+i)
				}
			}
		}
	}
}

// usage handles a Usage, which says what bases have spared.
func (d *domain) usage(c *conn, spared uint32) {
	d.mu.Lock()
	defer d.mu.Unlock()
	now := d.s.now()
	d.fade(now)
	d.spared += uint64(spared)
	if c.shared && now < c.sharedAt+second {
		return
	}
	c.shared, c.sharedAt = true, now
	pages := 0.0
	d.eachRef(c, func(g *segment, at int) { pages += float64(g.size(at)) / float64(g.recs[at].refs) })
	var w wire.Writer
	w.Begin(wire.Share, 0)
	w.Sharing(wire.Sharing{
		Pages:    uint64(pages),
		Overhead: (d.held - d.referenced + d.heap()) / uint64(max(len(d.conns), 1)),
	})
	c.push(packet{msg: w.Bytes()}, false)
}

// heap estimates what the domain takes in the pool's own memory, in bytes.
// domain.mu must be held.
func (d *domain) heap() uint64 {
	const (
		group  = 56
		record = 16
		page   = 224
	)
	n := uint64(d.ncandidates)*candidateBytes + d.records*record + uint64(len(d.pending))*page +
		uint64(d.groups)*group + uint64(len(d.conns))*connectionBytes + uint64(cap(d.patterns)) +
		d.sketches.bytes() + d.bases.bytes()
	return n + d.partBytes
}

// join adds a connection and queues what it has to know first. Server.mu must
// be held.
func (d *domain) join(c *conn, g *wire.Greeting) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if g.TemplateDir != "" {
		d.dir = g.TemplateDir
	}
	c.d = d
	d.conns[c.id] = c
	c.limit = len(d.segs) + wire.MaxPatterns/wire.MaxPart + maxQueued
	var w wire.Writer
	w.Begin(wire.Welcome, 0)
	w.Body(d.key[:])
	c.push(packet{msg: slices.Clone(w.Bytes())}, true)
	c.push(packet{d.index.announcement(), d.index.file}, true)
	for _, g := range d.segs {
		c.push(packet{g.announcement(), g.file}, true)
	}
}

// leave takes away everything that a connection had.
func (d *domain) leave(c *conn) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.conns, c.id)
	d.dead += c.candidates
	d.unswept = true
	d.dropPart(c)
	now := d.s.now()
	if len(d.conns) == 0 {
		d.empty = now
	}
	d.eachRef(c, func(g *segment, at int) { d.give(g, at, now) })
	d.groups -= len(c.refs)
	c.refs = nil
	d.s.kick()
}
