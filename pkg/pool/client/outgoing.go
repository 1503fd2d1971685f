package client

import (
	"fmt"
	"math"
	"unsafe"

	"golang.org/x/sys/unix"

	"runsc-agentzip/memfile"
	"runsc-agentzip/memfile/codec"
	"runsc-agentzip/memfile/dedup"
	"runsc-agentzip/pkg/pool/wire"
)

const (
	// batchOffers is how many offers make a message. Up to twice as many may
	// wait while one is being sent.
	batchOffers = 256
	// batchRefs is how many places are looked at for a Ref and an Unref.
	batchRefs = 256
	// patternsPart is how long the parts of patterns are, in bytes.
	patternsPart = 8 << 10
)

// transmit sends the message in w. It returns false if it was not sent.
//
// Preconditions: c.sendMu is held, c.mu is not.
func (c *Client) transmit(cn *conn) bool {
	if cn == nil || cn.fd < 0 {
		return false
	}
	switch err := wire.Send(cn.fd, c.w.Bytes(), -1); err {
	case nil:
		return true
	case unix.EAGAIN, unix.ENOBUFS, unix.ENOMEM:
		return false
	default:
		c.disconnect(cn, fmt.Errorf("sending: %w", err))
		return false
	}
}

// liveConn returns the connection if it is live and, unless key is nil, has that
// key; otherwise nil.
//
// Preconditions: c.mu is held.
func (c *Client) liveConn(key *wire.Key) *conn {
	if !c.live || key != nil && key != c.key.Load() {
		return nil
	}
	return c.conn
}

// Offer implements memfile.Pool. Offers are sent by the batch and by Flush. They
// are dropped, and counted, if the pool does not take them.
func (c *Client) Offer(key *wire.Key, h *wire.Hash, page uint32) {
	c.mu.Lock()
	if key == nil || c.liveConn(key) == nil || len(c.offers) >= 2*batchOffers {
		c.state.Dropped++
		c.mu.Unlock()
		return
	}
	c.offers = append(c.offers, wire.Page{Hash: *h, Cookie: page})
	full := len(c.offers) == batchOffers
	c.mu.Unlock()
	if full {
		c.sendMu.Lock()
		c.sendOffers()
		c.sendMu.Unlock()
	}
}

// Resemble implements memfile.Pool, and is sent and dropped like Offer.
func (c *Client) Resemble(key *wire.Key, h *wire.Hash, page uint32, sk *dedup.Sketch, alone bool) {
	c.mu.Lock()
	if key == nil || c.liveConn(key) == nil || len(c.sketched) >= 2*batchOffers {
		c.state.Dropped++
		c.mu.Unlock()
		return
	}
	c.sketched = append(c.sketched, wire.Sketched{Page: wire.Page{Hash: *h, Cookie: page}, Sketch: *sk, Alone: alone})
	full := len(c.sketched) == batchOffers
	c.mu.Unlock()
	if full {
		c.sendMu.Lock()
		c.sendSketched()
		c.sendMu.Unlock()
	}
}

// sendSketched is sendOffers for those with a sketch.
//
// Preconditions: c.sendMu is held, c.mu is not.
func (c *Client) sendSketched() {
	c.mu.Lock()
	cn, offers := c.liveConn(nil), c.sketched
	if len(offers) == 0 {
		c.mu.Unlock()
		return
	}
	c.sketched = nil
	c.mu.Unlock()

	sent := true
	for rest := offers; len(rest) > 0; {
		c.w.Begin(wire.Resemble, 0)
		n := min(len(rest), c.w.Room())
		for i := range rest[:n] {
			c.w.Sketched(&rest[i])
		}
		sent = sent && c.transmit(cn)
		c.mu.Lock()
		if sent {
			c.state.Offered += uint64(n)
		} else {
			c.state.Dropped += uint64(n)
		}
		c.mu.Unlock()
		rest = rest[n:]
	}
}

// sendOffers sends the offers that wait.
//
// Preconditions: c.sendMu is held, c.mu is not.
func (c *Client) sendOffers() {
	c.mu.Lock()
	cn, offers := c.liveConn(nil), c.offers
	if len(offers) == 0 {
		c.mu.Unlock()
		return
	}
	c.offers = nil
	c.mu.Unlock()

	c.w.Begin(wire.Offer, 0)
	for _, o := range offers {
		c.w.Page(o)
	}
	sent := c.transmit(cn)

	c.mu.Lock()
	defer c.mu.Unlock()
	if sent {
		c.state.Offered += uint64(len(offers))
	} else {
		c.state.Dropped += uint64(len(offers))
	}
}

// Publish implements memfile.Pool.
func (c *Client) Publish(key *wire.Key, h *wire.Hash, page, tpl uint32, content *codec.Page) bool {
	c.sendMu.Lock()
	defer c.sendMu.Unlock()
	c.mu.Lock()
	cn := c.liveConn(key)
	c.mu.Unlock()
	if key == nil || cn == nil {
		return false
	}
	c.w.Begin(wire.Publish, 0)
	c.w.Content(wire.Content{Page: wire.Page{Hash: *h, Cookie: page}, Template: tpl, Data: content})
	if !c.transmit(cn) {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.state.Published++
	return true
}

// AskUsage asks the pool what the sandbox costs it, and tells it what bases have
// spared. Sharing has the answer once it has come. It is not asked if the connection
// is not live or full.
func (c *Client) AskUsage() {
	c.sendMu.Lock()
	defer c.sendMu.Unlock()
	defer c.release()
	c.mu.Lock()
	cn, spared := c.liveConn(nil), uint32(min(c.spared, math.MaxUint32))
	c.mu.Unlock()
	c.w.Begin(wire.Usage, spared)
	if c.transmit(cn) {
		c.mu.Lock()
		c.spared -= min(c.spared, uint64(spared))
		c.mu.Unlock()
	}
}

// Spared implements memfile.Pool.
func (c *Client) Spared(n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.spared += uint64(n)
}

// release gives scratch up: most of the time a sandbox waits, and sends nothing.
//
// Preconditions: c.sendMu is held.
func (c *Client) release() { c.w, c.refs, c.unrefs = wire.Writer{}, nil, nil }

// SendPatterns gives the pool patterns. They are dropped if the connection is not
// live or full, if they are longer than wire.MaxPatterns, and while a part of
// earlier ones is still to be sent. What has begun is completed by Flush, so that
// the pool never sees the beginning of one and the end of another.
func (c *Client) SendPatterns(b []byte) {
	if len(b) == 0 || len(b) > wire.MaxPatterns {
		return
	}
	c.sendMu.Lock()
	defer c.sendMu.Unlock()
	defer c.release()
	c.sendOutgoing()

	c.mu.Lock()
	cn, pending := c.liveConn(nil), len(c.outgoing) > 0
	c.mu.Unlock()
	if pending {
		return
	}
	first := min(len(b), patternsPart)
	c.w.Begin(wire.Patterns, uint32(len(b)))
	c.w.Body(b[:first])
	if !c.transmit(cn) || first == len(b) {
		return
	}
	c.mu.Lock()
	if c.conn == cn {
		c.outgoing, c.outgoingTotal = append([]byte(nil), b[first:]...), uint32(len(b))
	}
	c.mu.Unlock()
	c.sendOutgoing()
}

// sendOutgoing sends what it can of patterns that have begun.
//
// Preconditions: c.sendMu is held, c.mu is not.
func (c *Client) sendOutgoing() {
	for {
		c.mu.Lock()
		cn, b, total := c.liveConn(nil), c.outgoing, c.outgoingTotal
		c.mu.Unlock()
		if len(b) == 0 {
			return
		}
		part := min(len(b), patternsPart)
		c.w.Begin(wire.Patterns, total)
		c.w.Body(b[:part])
		if !c.transmit(cn) {
			return
		}
		c.mu.Lock()
		if c.conn == cn {
			if c.outgoing = b[part:]; len(c.outgoing) == 0 {
				c.outgoing = nil
			}
		}
		c.mu.Unlock()
	}
}

// Flush implements memfile.Pool. References that the pool does not take now are
// sent by the next Flush.
func (c *Client) Flush() {
	c.sendMu.Lock()
	defer c.sendMu.Unlock()
	defer c.release()
	c.sendRefs()
	c.sendOffers()
	c.sendSketched()
	c.sendOutgoing()
}

// sendRefs tells the pool of places that have references now or no longer have.
//
// Preconditions: c.sendMu is held, c.mu is not.
func (c *Client) sendRefs() {
	c.mu.Lock()
	cn, queue := c.liveConn(nil), c.dirty
	c.dirty = nil
	c.mu.Unlock()
	for rest := queue; len(rest) > 0; {
		n := min(len(rest), batchRefs)
		c.collect(rest[:n])
		rest = rest[n:]
		ok := c.sendPlaces(cn, wire.Ref, c.refs)
		ok = c.sendPlaces(cn, wire.Unref, c.unrefs) && ok
		clear(c.refs)
		clear(c.unrefs)
		if ok {
			continue
		}
		c.mu.Lock()
		if c.conn == cn {
			c.dirty = append(c.dirty, rest...)
		}
		c.mu.Unlock()
		break
	}
}

// collect takes places off the queue. It puts those into refs and unrefs of which
// the pool is to be told, and marks them as if it had been.
//
// Preconditions: c.sendMu is held, c.mu is not.
func (c *Client) collect(queue []memfile.PoolLoc) {
	c.refs, c.unrefs = c.refs[:0], c.unrefs[:0]
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, l := range queue {
		p := place{c.segment(l), uint32(l % units)}
		if p.s == nil || p.s.gone {
			continue
		}
		// What a segment has queued that had the number before does no harm: a
		// place that is not queued needs no message.
		e := p.s.refs[p.unit] &^ queued
		switch {
		case e&counts != 0 && e&told == 0:
			e |= told
			c.refs = append(c.refs, p)
		case e&counts == 0 && e&told != 0:
			e &^= told
			c.unrefs = append(c.unrefs, p)
		}
		c.put(p, e)
	}
}

// sendPlaces sends a Ref or Unref. If the pool does not take it, the places are
// queued again unless they need no message any more.
//
// Preconditions: c.sendMu is held, c.mu is not.
func (c *Client) sendPlaces(cn *conn, t wire.Type, places []place) bool {
	if len(places) == 0 {
		return true
	}
	c.w.Begin(t, 0)
	for _, p := range places {
		c.w.Loc(p.loc())
	}
	if c.transmit(cn) {
		return true
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, p := range places {
		if !p.s.gone {
			c.put(p, p.s.refs[p.unit]^told)
		}
	}
	return false
}

// Sharing implements memfile.Pool. The bytes of its own are an estimate.
func (c *Client) Sharing() (wire.Sharing, uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	// Measured for a map of this kind, between two times it grows.
	const placeBytes = 15
	own := int(unsafe.Sizeof(*c)) + c.places*placeBytes +
		c.open*int(unsafe.Sizeof(segment{})) + cap(c.segments)*8 + cap(c.free)*4 + len(c.byNumber)*24 +
		cap(c.dirty)*int(unsafe.Sizeof(memfile.PoolLoc(0))) +
		(cap(c.offers)+cap(c.want))*int(unsafe.Sizeof(wire.Page{})) +
		cap(c.sketched)*int(unsafe.Sizeof(wire.Sketched{})) +
		(cap(c.published)+cap(c.similar))*int(unsafe.Sizeof(memfile.PoolPlace{})) +
		cap(c.patterns) + cap(c.incoming) + cap(c.outgoing)
	return c.share, uint64(own)
}
