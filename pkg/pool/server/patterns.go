package server

import (
	"bytes"
	"compress/flate"
	"io"
	"slices"
	"sync"

	"runsc-agentzip/pkg/pool/wire"
)

// Patterns, what a sandbox has learnt about steps, are bitmaps that are mostly empty, and
// are of use only to sandboxes that join. So they are kept packed.

// packing is held while patterns are packed: whoever floods the pool with them takes one
// processor and one packer. Nothing is locked with it.
var packing sync.Mutex

// A packer takes 0.7 MiB.
var packers = sync.Pool{New: func() any {
	w, err := flate.NewWriter(io.Discard, flate.BestSpeed)
	if err != nil {
		panic(err) // the level is one
	}
	return w
}}

// pack returns b in a form that is shorter, mostly. unpack undoes it.
func pack(b []byte) []byte {
	packing.Lock()
	defer packing.Unlock()
	var out bytes.Buffer
	w := packers.Get().(*flate.Writer)
	w.Reset(&out)
	_, err := w.Write(b)
	if cerr := w.Close(); err != nil || cerr != nil {
		panic("a buffer takes all")
	}
	w.Reset(io.Discard)
	packers.Put(w)
	return slices.Clip(bytes.Clone(out.Bytes()))
}

// unpack returns the n bytes that pack was given.
func unpack(packed []byte, n int) ([]byte, error) {
	b := make([]byte, n)
	_, err := io.ReadFull(flate.NewReader(bytes.NewReader(packed)), b)
	return b, err
}

// pattern handles a part of Patterns.
func (d *domain) pattern(c *conn, m *wire.Message) {
	all := d.patternPart(c, m)
	if all == nil {
		return
	}
	packed := pack(all)
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.gone {
		d.patterns, d.patternsLen = packed, len(all)
	}
}

// patternPart takes a part of Patterns, and returns all of them if it was the last.
func (d *domain) patternPart(c *conn, m *wire.Message) (all []byte) {
	d.mu.Lock()
	defer d.mu.Unlock()
	total := int(m.Arg)
	if c.skip > 0 {
		c.skip = max(0, c.skip-len(m.Body))
		return nil
	}
	if total == 0 || total > wire.MaxPatterns || len(m.Body) == 0 || len(c.part)+len(m.Body) > total || c.partial && total != c.total {
		c.violations++
		d.dropPart(c)
		return nil
	}
	if !c.partial {
		// Whoever finds no place now sends others later.
		if d.parts >= maxPatternsParts && len(m.Body) < total {
			d.counts.Ignored++
			c.skip = total - len(m.Body)
			return nil
		}
		c.partial, c.total, c.partAt = true, total, d.s.now()
		d.parts++
		d.s.kick()
	}
	d.partBytes -= uint64(cap(c.part))
	c.part = append(c.part, m.Body...)
	d.partBytes += uint64(cap(c.part))
	if len(c.part) < total {
		return nil
	}
	all = c.part
	d.dropPart(c)
	return all
}

// dropPart forgets the parts of patterns that c has sent. domain.mu must be
// held.
func (d *domain) dropPart(c *conn) {
	if c.partial {
		d.partBytes -= uint64(cap(c.part))
		c.partial, c.part = false, nil
		d.parts--
	}
}

// tellPatterns sends a connection what is known about steps.
func (d *domain) tellPatterns(c *conn) {
	d.mu.Lock()
	packed, n := d.patterns, d.patternsLen
	d.mu.Unlock()
	if packed == nil {
		return
	}
	all, err := unpack(packed, n)
	if err != nil {
		d.s.log("pool: domain %s has lost what it knew about steps: %v", d.name, err)
		return
	}
	for rest := all; len(rest) > 0; {
		var w wire.Writer
		w.Begin(wire.Patterns, uint32(n))
		k := min(len(rest), wire.MaxPart)
		w.Body(rest[:k])
		c.push(packet{msg: w.Bytes()}, true)
		rest = rest[k:]
	}
}
