package client

import (
	"fmt"

	"runsc-agentzip/memfile"
	"runsc-agentzip/pkg/pool/wire"
)

const (
	// maxQueue is how many pages may wait for Work, of each kind.
	maxQueue = 4096
	// maxWork is how many pages Work returns. Half of them are kept for those that
	// are wanted, and half of the rest for similar ones, if there are as many.
	maxWork = 1024
	// maxRefusal is how much of a refusal is shown, in bytes.
	maxRefusal = 256
)

// handle does what a message says. It returns the descriptor if nobody has taken
// it, and an error if the connection is to be given up.
func (c *Client) handle(cn *conn, m *wire.Message, fd int) (int, error) {
	if wants := m.Type == wire.Index || m.Type == wire.Segment; wants != (fd >= 0) {
		how := "without its descriptor"
		if fd >= 0 {
			how = "with a descriptor"
		}
		return fd, fmt.Errorf("%w: %v %s", wire.ErrMessage, m.Type, how)
	}
	c.mu.Lock()
	defer c.unlock()
	if c.conn != cn {
		// Given up meanwhile.
		return fd, nil
	}
	if m.Type == wire.Refuse {
		return fd, fmt.Errorf("the pool refuses it: %q", m.Body[:min(len(m.Body), maxRefusal)])
	}
	if c.live == (m.Type == wire.Welcome) {
		return fd, fmt.Errorf("%w: %v at the wrong time", wire.ErrMessage, m.Type)
	}
	switch m.Type {
	case wire.Welcome:
		key := new(wire.Key)
		if len(m.Body) != len(key) {
			return fd, fmt.Errorf("%w: key of %d bytes", wire.ErrMessage, len(m.Body))
		}
		copy(key[:], m.Body)
		c.live, c.anew = true, true
		c.state.Connects++
		c.key.Store(key)
		c.signal()

	case wire.Index:
		if m.N != 1 || m.Uint64(0) > maxPlaces {
			return fd, fmt.Errorf("%w: index of another form, or with more than %d places", wire.ErrMessage, uint64(maxPlaces))
		}
		c.dropIndex()
		c.index = &index{fd: fd, places: m.Uint64(0)}
		return -1, nil

	case wire.Segment, wire.Retire:
		if len(m.Body) != 0 {
			return fd, fmt.Errorf("%w: %v with %d bytes", wire.ErrMessage, m.Type, len(m.Body))
		}
		if m.Type == wire.Segment {
			if err := c.addSegment(m.Arg, fd); err != nil {
				return fd, fmt.Errorf("%w: %v", wire.ErrMessage, err)
			}
			return -1, nil
		}
		s := c.byNumber[m.Arg]
		if s == nil {
			return fd, fmt.Errorf("%w: segment %d goes away, but there is none", wire.ErrMessage, m.Arg)
		}
		c.forget(s)
		c.signal()

	case wire.Want:
		c.state.Wanted += uint64(m.N)
		for i := 0; i < m.N && len(c.want) < maxQueue; i++ {
			c.want = append(c.want, m.Page(i))
		}
		c.signal()

	case wire.Published, wire.Similar:
		q := &c.published
		if m.Type == wire.Similar {
			q = &c.similar
		}
		for i := 0; i < m.N && len(*q) < maxQueue; i++ {
			pl := m.Place(i)
			if p, ok := c.lookup(pl.Loc); ok {
				*q = append(*q, memfile.PoolPlace{Hash: pl.Hash, Page: pl.Cookie, Loc: c.take(p)})
			}
		}
		c.signal()

	case wire.Alone:
		for i := range m.N {
			c.markAlone(m.Loc(i))
		}
		c.forgotten.Add(1)
		c.signal()

	case wire.Share:
		s, err := m.Sharing()
		if err != nil {
			return fd, err
		}
		c.share = s

	case wire.Patterns:
		return fd, c.addPatterns(m.Arg, m.Body)

	case wire.Turn:
		if len(m.Body) != 0 {
			return fd, fmt.Errorf("%w: turn with %d bytes", wire.ErrMessage, len(m.Body))
		}
		c.grantTurn()

	default:
		return fd, fmt.Errorf("%w: %v is nothing that a pool sends to a sandbox", wire.ErrMessage, m.Type)
	}
	return fd, nil
}

// addPatterns takes the next part of patterns.
//
// Preconditions: c.mu is held.
func (c *Client) addPatterns(total uint32, part []byte) error {
	if total == 0 || total > wire.MaxPatterns || len(part) == 0 {
		return fmt.Errorf("%w: part of %d bytes of %d of patterns: want 1 to %d", wire.ErrMessage, len(part), total, wire.MaxPatterns)
	}
	if len(c.incoming) == 0 {
		c.incomingTotal = total
	}
	if total != c.incomingTotal || len(part) > int(total)-len(c.incoming) {
		return fmt.Errorf("%w: part of %d bytes of %d of patterns after %d bytes of %d", wire.ErrMessage, len(part), total, len(c.incoming), c.incomingTotal)
	}
	c.incoming = append(c.incoming, part...)
	if len(c.incoming) == int(total) {
		c.patterns, c.incoming = c.incoming, nil
		c.signal()
	}
	return nil
}

// Patterns returns the patterns that have come from the pool last, once; nil if
// there are none that it has not returned.
func (c *Client) Patterns() []byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	p := c.patterns
	c.patterns = nil
	return p
}

// Work implements memfile.Pool. If there is more, Ready is signalled.
func (c *Client) Work() memfile.PoolWork {
	c.mu.Lock()
	defer c.mu.Unlock()
	w := memfile.PoolWork{Key: c.key.Load(), Stale: c.live && c.stale+c.alone > 0, Anew: c.anew}
	places := maxWork - min(len(c.want), maxWork/2)
	n := min(len(c.published), places-min(len(c.similar), places/2))
	w.Published, c.published = split(c.published, n)
	k := min(len(c.similar), places-n)
	w.Similar, c.similar = split(c.similar, k)
	w.Want, c.want = split(c.want, min(len(c.want), maxWork-n-k))
	if len(c.published)+len(c.similar)+len(c.want) > 0 {
		c.signal()
	}
	return w
}

// OfferedAll implements memfile.Pool.
func (c *Client) OfferedAll(key *wire.Key) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.liveConn(key) != nil {
		c.anew = false
	}
}

// split returns the first n items of a queue, and the rest.
func split[T any](q []T, n int) (first, rest []T) {
	if n == len(q) {
		return q, nil
	}
	first = append(first, q[:n]...)
	return first, q[:copy(q, q[n:])]
}
