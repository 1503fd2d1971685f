package sentry

import (
	"math/rand/v2"
	"sync"
	"time"
	"unsafe"

	"runsc-agentzip/memfile"
	"runsc-agentzip/memfile/codec"
	"runsc-agentzip/pkg/pool/client"
	"runsc-agentzip/pkg/pool/wire"
)

const (
	// workPart is how many pages of either kind are shared before it is looked
	// again whether to go on. It is also about how many the pool's socket takes.
	workPart = 32
	// publishPause is how long the pool has to take them, which is about what it
	// needs to encode so many.
	publishPause = 2 * time.Millisecond
	// maxPublishPause is how long it is left alone if it takes none.
	maxPublishPause = 250 * time.Millisecond
	// stalePause is how long to wait before stale pages are looked for again
	// that were not found, which takes 10 us for each; it doubles up to
	// maxStalePause.
	stalePause    = time.Second
	maxStalePause = time.Minute
	// anewPause is how long to wait before a new pool is offered more of what is
	// stored, a few ms of work each time: the pool takes what it is sent in turn, and
	// offers that find the socket full are lost. Sandboxes that a pool comes back to at
	// the same time spread over it, and those of a busy host take busyAnew times as long.
	anewPause = 200 * time.Millisecond
	busyAnew  = 10
	// maxBacklog is how many pages of either kind may wait.
	maxBacklog = 16 << 10
)

// A pacer is the pool as the backend sees it. A sibling that evicts makes the
// pool ask for thousands of pages at once, or tell of them, while this sandbox
// may have no time for any, and the pool's socket takes some dozens: the pacer
// collects what comes, hands out a part of it at a time, and keeps what the
// socket did not take.
type pacer struct {
	*client.Client

	// ready is signalled when there is work or something else has changed.
	ready chan struct{}

	// mu protects what follows. Only the client's locks follow it.
	mu sync.Mutex
	// key is that of what follows.
	key *wire.Key
	// want are pages that the pool has asked for, published and similar those
	// that it has told of, each with a reference.
	want               []wire.Page
	published, similar []memfile.PoolPlace
	// full is set when the socket did not take a page, until begin.
	full bool
	// took is set when it took one since begin, and pause is how long to wait
	// before the next is offered to it: longer and longer while it takes none.
	took  bool
	pause time.Duration
	// forgotten is how many segments had gone away when stale pages were last
	// looked for.
	forgotten uint64
	// stale is set if there may be stale pages. They are looked for next at
	// staleAt, and then after stalePause.
	stale      bool
	staleAt    time.Time
	stalePause time.Duration
	// anew is set while a new pool was not offered all that is stored. It is offered
	// more at anewAt.
	anew   bool
	anewAt time.Time
}

var _ memfile.Pool = (*pacer)(nil)

func newPacer(c *client.Client) *pacer {
	p := &pacer{Client: c, ready: make(chan struct{}, 1)}
	go func() {
		for range c.Ready() {
			p.mu.Lock()
			p.collect()
			p.mu.Unlock()
			select {
			case p.ready <- struct{}{}:
			default:
			}
		}
	}()
	return p
}

// Ready is client.Client.Ready.
func (p *pacer) Ready() <-chan struct{} { return p.ready }

// collect takes over what the client has.
//
// Preconditions: p.mu is held.
func (p *pacer) collect() {
	for {
		w := p.Client.Work()
		if w.Key != p.key {
			for _, at := range append(p.published, p.similar...) {
				p.Unref(at.Loc)
			}
			p.key, p.want, p.published, p.similar = w.Key, nil, nil, nil
			p.stale, p.anewAt = false, time.Time{}
		}
		p.anew = w.Anew
		if n := p.Client.Forgotten(); w.Stale != p.stale || n != p.forgotten {
			p.stale, p.staleAt, p.stalePause = w.Stale, time.Now(), stalePause
			p.forgotten = n
		}
		p.keep(w.Want...)
		p.published = p.keepPlaces(p.published, w.Published)
		p.similar = p.keepPlaces(p.similar, w.Similar)
		if len(w.Want)+len(w.Published)+len(w.Similar) == 0 {
			return
		}
	}
}

// keepPlaces appends places that the pool has told of to a queue of them.
//
// Preconditions: p.mu is held.
func (p *pacer) keepPlaces(queue, places []memfile.PoolPlace) []memfile.PoolPlace {
	for _, at := range places {
		if p.key == nil || len(queue) >= maxBacklog {
			p.Unref(at.Loc) // the next eviction of the page, or deepening, asks again
			continue
		}
		queue = append(queue, at)
	}
	return queue
}

// keep keeps pages that the pool has asked for.
//
// Preconditions: p.mu is held.
func (p *pacer) keep(pages ...wire.Page) {
	p.want = append(p.want, pages[:min(len(pages), maxBacklog-len(p.want))]...)
}

// begin lets pages be published, though the socket was full before.
func (p *pacer) begin() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.full && !p.took {
		p.pause = min(2*p.pause, maxPublishPause)
	} else {
		p.pause = publishPause
	}
	p.full, p.took = false, false
}

// backlog returns a channel that is ready when it is time to go on with what is
// left, or nil if nothing is.
func (p *pacer) backlog() <-chan time.Time {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.key != p.Client.Key():
		return nil
	case len(p.want)+len(p.published)+len(p.similar) != 0:
		return time.After(max(p.pause, publishPause))
	case p.anew && (!p.stale || p.anewAt.Before(p.staleAt)):
		return time.After(max(time.Until(p.anewAt), publishPause))
	case p.stale:
		return time.After(time.Until(p.staleAt))
	}
	return nil
}

// Work implements memfile.Pool.Work.
func (p *pacer) Work() memfile.PoolWork {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.collect()
	w := memfile.PoolWork{Key: p.key}
	p.published, w.Published = split(p.published)
	p.similar, w.Similar = split(p.similar)
	if !p.full {
		p.want, w.Want = split(p.want)
	}
	now := time.Now()
	// What the pool asks for first: its socket takes only so much.
	if p.anew && len(p.want)+len(w.Want) == 0 && !now.Before(p.anewAt) {
		w.Anew = true
		p.anewAt = now.Add(anewAfter())
	}
	// After all else: it may have replaced some of them.
	if p.stale && len(p.want)+len(p.published)+len(p.similar)+len(w.Want)+len(w.Published)+len(w.Similar) == 0 && !now.Before(p.staleAt) {
		w.Stale = true
		p.staleAt = now.Add(p.stalePause)
		p.stalePause = min(2*p.stalePause, maxStalePause)
	}
	return w
}

// anewAfter is after how long a new pool is offered more.
func anewAfter() time.Duration {
	pause := anewPause/2 + rand.N(anewPause)
	if process.background.governor.Busy() {
		pause *= busyAnew
	}
	return pause
}

// putOff puts off what is left, since there is a reason that sharing cannot go on.
func (p *pacer) putOff() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.pause = maxPublishPause
	p.anewAt = time.Now().Add(anewPause)
}

// OfferedAll implements memfile.Pool.OfferedAll.
func (p *pacer) OfferedAll(key *wire.Key) {
	p.Client.OfferedAll(key)
	p.mu.Lock()
	defer p.mu.Unlock()
	if key == p.key {
		p.anew = false
	}
}

// split returns the first part of a queue, and what is left of it.
func split[T any](q []T) (rest, part []T) {
	part = append(part, q[:min(len(q), workPart)]...)
	if len(part) == len(q) {
		return nil, part
	}
	return q[len(part):], part
}

// Publish implements memfile.Pool.Publish.
func (p *pacer) Publish(key *wire.Key, h *wire.Hash, page, tpl uint32, content *codec.Page) bool {
	ok := p.Client.Publish(key, h, page, tpl, content)
	p.mu.Lock()
	defer p.mu.Unlock()
	if ok {
		p.took = true
		return true
	}
	if key == p.key {
		p.full = true
		p.keep(wire.Page{Hash: *h, Cookie: page})
	}
	return false
}

// Sharing implements memfile.Pool.Sharing.
func (p *pacer) Sharing() (wire.Sharing, uint64) {
	s, own := p.Client.Sharing()
	p.mu.Lock()
	defer p.mu.Unlock()
	return s, own + uint64(cap(p.want))*uint64(unsafe.Sizeof(wire.Page{})) + uint64(cap(p.published)+cap(p.similar))*uint64(unsafe.Sizeof(memfile.PoolPlace{}))
}
