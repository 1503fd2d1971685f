package server

import (
	"io"
	"maps"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"runsc-agentzip/memfile/codec"
	"runsc-agentzip/pkg/pool/wire"
)

// A wireTap is a transport that keeps what the pool sends.
type wireTap struct {
	mu     sync.Mutex
	sent   []tapped
	closed bool
	drop   bool
}

type tapped struct {
	msg []byte
	fd  int
}

func (w *wireTap) receive() (*[wire.MaxMessage]byte, int, int, error) { return nil, 0, -1, io.EOF }

func (w *wireTap) send(msg []byte, fd int) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.drop {
		return nil
	}
	if fd >= 0 {
		var err error
		// The pool's may be closed once this returns.
		if fd, err = unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0); err != nil {
			return err
		}
	}
	w.sent = append(w.sent, tapped{slices.Clone(msg), fd})
	return nil
}

func (w *wireTap) close() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.closed = true
	return nil
}

// A peer is a connection whose messages the test handles itself.
type peer struct {
	conn *conn
	tap  *wireTap
	view view
	// offered has what it has offered, refs what it holds. These may be in
	// retired segments.
	offered map[wire.Hash]bool
	refs    map[wire.Loc]*codec.Page
	ended   bool
}

// newPeer connects one. The pool's Close waits until it ends, in a test that fails
// as well.
func newPeer(t require.TestingT, s *Server, g *wire.Greeting) *peer {
	p := &peer{tap: &wireTap{}, view: newView(), offered: map[wire.Hash]bool{}, refs: map[wire.Loc]*codec.Page{}}
	var err error
	p.conn, err = s.newConn(p.tap, g)
	require.NoError(t, err)
	return p
}

// sync takes what the pool has sent.
func (p *peer) sync(t testing.TB) {
	for {
		p.conn.mu.Lock()
		busy := p.conn.writing
		p.conn.mu.Unlock()
		if !busy {
			break
		}
		runtime.Gosched()
	}
	p.tap.mu.Lock()
	sent := p.tap.sent
	p.tap.sent = nil
	p.tap.mu.Unlock()
	for _, m := range sent {
		p.view.got(t, m.msg, m.fd)
	}
}

func (p *peer) end() {
	if p.ended {
		return
	}
	p.ended = true
	p.conn.close(io.EOF)
	p.conn.s.leave(p.conn)
	p.conn.s.wg.Done()
	p.view.close()
}

// rapidTB makes a rapid.T do for helpers.
type rapidTB struct {
	testing.TB
	r *rapid.T
}

func (t rapidTB) Errorf(format string, args ...any) { t.r.Errorf(format, args...) }
func (t rapidTB) FailNow()                          { t.r.FailNow() }

// Whatever sandboxes do, in whatever order, the pool shares only what two had, and
// what a sandbox refers to stays what it is.
func TestModel(t *testing.T) {
	contents := make([]*codec.Page, 60)
	for i := range contents {
		contents[i] = page(uint64(i), []int{4096, 20, 600, 2900}[i%4])
		if i >= 30 {
			contents[i] = variant(contents[i-30], uint64(i))
		}
	}
	rapid.Check(t, func(r *rapid.T) {
		tb := rapidTB{t, r}
		now := began
		o := Options{Keep: 5 * time.Second}
		if rapid.Bool().Draw(r, "limited") {
			o.DomainMaxBytes = uint64(rapid.IntRange(40, 120).Draw(r, "limit")) << 10
		}
		s := newServer(o, func() stamp { return now })
		defer func() { require.NoError(tb, s.Close()) }()
		s.minOpen = uint64(rapid.SampledFrom([]int{0, 8 << 10}).Draw(r, "min open"))
		var peers []*peer
		defer func() {
			for _, p := range peers {
				p.end()
			}
		}()
		// owners counts the connections that have offered a page, those that
		// have ended included, since the domain began.
		owners := map[wire.Hash]map[uint32]bool{}
		// shared tells whether two connections have had a page, or one that
		// resembles it.
		shared := func(v *view, c *codec.Page) bool {
			i := slices.Index(contents, c)
			all := maps.Clone(owners[v.hash(c)])
			maps.Copy(all, owners[v.hash(contents[(i+30)%60])])
			return len(all) >= 2
		}
		byHash := map[wire.Hash]*codec.Page{}
		var key wire.Key
		join := func(r *rapid.T) {
			if len(peers) >= 5 {
				r.Skip()
			}
			p := newPeer(tb, s, greeting("d"))
			p.sync(tb)
			if key != *p.view.key {
				// The domain is new.
				key = *p.view.key
				clear(owners)
				clear(byHash)
				for _, c := range contents {
					byHash[p.view.hash(c)] = c
				}
			}
			peers = append(peers, p)
		}
		join(r)
		pick := func(r *rapid.T) *peer {
			if len(peers) == 0 {
				r.Skip()
			}
			return peers[rapid.IntRange(0, len(peers)-1).Draw(r, "peer")]
		}
		do := func(p *peer, msg []byte) { require.NoError(tb, p.conn.message(msg, -1)) }
		ref := func(p *peer, l wire.Loc, c *codec.Page) {
			require.True(tb, *c == *p.view.read(tb, l, nil))
			p.refs[l] = c
			do(p, refMessage(wire.Ref, l))
		}
		r.Repeat(map[string]func(*rapid.T){
			"join": join,
			"leave": func(r *rapid.T) {
				p := pick(r)
				peers = slices.DeleteFunc(peers, func(o *peer) bool { return o == p })
				p.end()
			},
			"offer": func(r *rapid.T) {
				p := pick(r)
				var pages []wire.Page
				from := rapid.IntRange(0, len(contents)-1).Draw(r, "from")
				n := rapid.IntRange(1, 30).Draw(r, "number")
				for i := from; i < min(from+n, len(contents)); i++ {
					h := p.view.hash(contents[i])
					pages = append(pages, wire.Page{Hash: h, Cookie: uint32(i)})
					if owners[h] == nil {
						owners[h] = map[uint32]bool{}
					}
					owners[h][p.conn.id] = true
				}
				if rapid.Bool().Draw(r, "plain") {
					do(p, offerMessage(pages...))
					return
				}
				var s []*wire.Sketched
				for _, pg := range pages {
					s = append(s, &wire.Sketched{Page: pg, Sketch: sketchOf(contents[pg.Cookie])})
				}
				do(p, resembleMessage(s...))
			},
			"publish": func(r *rapid.T) {
				p := pick(r)
				wants := p.view.wants
				p.view.wants = nil
				for _, w := range wants {
					require.True(tb, shared(&p.view, byHash[w.Hash]))
					require.True(tb, owners[w.Hash][p.conn.id])
					do(p, publishMessage(wire.Content{Page: w, Template: wire.NoPage, Data: contents[w.Cookie]}))
				}
			},
			"forget": func(r *rapid.T) { pick(r).view.wants = nil },
			"take": func(r *rapid.T) {
				p := pick(r)
				told := p.view.told
				p.view.told = nil
				for _, pl := range told {
					require.True(tb, shared(&p.view, byHash[pl.Hash]))
					require.Equal(tb, p.view.hash(contents[pl.Cookie]), pl.Hash)
					if !p.view.retired[pl.Loc.Segment()] {
						ref(p, pl.Loc, contents[pl.Cookie])
					}
				}
				similar := p.view.similar
				p.view.similar = nil
				for _, pl := range similar {
					base := byHash[pl.Hash]
					require.True(tb, shared(&p.view, base))
					require.Equal(tb, slices.Index(contents, base)%30, int(pl.Cookie)%30)
					if !p.view.retired[pl.Loc.Segment()] {
						ref(p, pl.Loc, base)
					}
				}
			},
			"find": func(r *rapid.T) {
				p := pick(r)
				for i := rapid.IntRange(0, 7).Draw(r, "from"); i < len(contents); i += 7 {
					h := p.view.hash(contents[i])
					l, ok := p.view.find(tb, &h)
					if !ok {
						continue
					}
					require.True(tb, shared(&p.view, contents[i]))
					ref(p, l, contents[i])
				}
			},
			"unref": func(r *rapid.T) {
				p := pick(r)
				locs := slices.Sorted(maps.Keys(p.refs))
				n := rapid.IntRange(0, len(locs)).Draw(r, "number")
				do(p, refMessage(wire.Unref, locs[:n]...))
				for _, l := range locs[:n] {
					delete(p.refs, l)
				}
			},
			"move": func(r *rapid.T) {
				// What was retired is looked for anew.
				p := pick(r)
				for l, c := range p.refs {
					if !p.view.retired[l.Segment()] {
						continue
					}
					h := p.view.hash(c)
					if at, ok := p.view.find(tb, &h); ok {
						ref(p, at, c)
						delete(p.refs, l)
						do(p, refMessage(wire.Unref, l))
					}
				}
			},
			"tick": func(r *rapid.T) {
				now += stamp(rapid.IntRange(0, 80).Draw(r, "tenths"))
				s.tick()
			},
			"": func(r *rapid.T) {
				live := map[wire.Loc]uint32{}
				for _, p := range peers {
					p.sync(tb)
					require.Empty(tb, p.view.refused)
					require.Zero(tb, p.conn.violations)
					require.False(tb, p.tap.closed)
					for l, c := range p.refs {
						require.True(tb, *c == *p.view.read(tb, l, nil))
						if !p.view.retired[l.Segment()] {
							live[l]++
						}
					}
				}
				for _, p := range peers {
					// Nothing has happened since that could have given it a second one.
					for _, l := range p.view.alone {
						require.Contains(tb, p.refs, l)
						require.True(tb, live[l] == 1 || p.view.retired[l.Segment()])
					}
					p.view.alone = nil
				}
				checkServer(tb, s)
				for _, d := range s.domains {
					for _, g := range d.segs {
						for i := range g.recs {
							require.Equal(tb, live[g.loc(i)], g.recs[i].refs)
							require.NotNil(tb, byHash[*g.hash(i)])
						}
					}
				}
			},
		})
	})
}
