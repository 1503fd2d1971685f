package server

import (
	"encoding/binary"
	"math/rand/v2"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"runsc-agentzip/memfile/codec"
	"runsc-agentzip/pkg/pool/wire"
)

// BenchmarkClients1000 has 1000 sandboxes of a domain offer 2000 pages each, half
// of them the same for all, publish what is asked for and take what there is.
// It reports what the pool holds in the end, in bytes, and how fast it was.
func BenchmarkClients1000(b *testing.B) {
	const (
		clients = 1000
		common  = 1000
		own     = 1000
		batch   = 250
	)
	var lim unix.Rlimit
	require.NoError(b, unix.Getrlimit(unix.RLIMIT_NOFILE, &lim))
	if lim.Cur < 3*clients {
		b.Skipf("needs %d descriptors: ulimit -n", 3*clients)
	}
	contents := make([]*codec.Page, common)
	for i := range contents {
		contents[i] = page(uint64(i), 700)
	}
	for b.Loop() {
		var before, after runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&before)
		s := New(Options{})
		fds := make([]int, clients)
		for i := range fds {
			ours, theirs := pair(b)
			fds[i] = ours
			require.NoError(b, s.Attach(theirs, greeting("d")))
		}
		d := s.anyDomain()
		hasher := wire.NewHasher(&d.key)
		hashes := make([]wire.Hash, common)
		for i := range hashes {
			hashes[i] = hasher.Sum(contents[i])
		}
		var messages atomic.Int64
		start := time.Now()
		send := func(fd int, msg []byte) {
			for wire.Send(fd, msg, -1) == unix.EAGAIN {
				unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}, 100)
			}
			messages.Add(1)
		}
		react := func(fd int, buf []byte) {
			for {
				n, got, err := wire.Receive(fd, buf)
				if err != nil {
					return
				}
				unix.Close(got)
				messages.Add(1)
				m, _ := wire.Parse(buf[:n])
				switch m.Type {
				case wire.Want:
					for j := range m.N {
						p := m.Page(j)
						send(fd, publishMessage(wire.Content{Page: p, Template: wire.NoPage, Data: contents[p.Cookie]}))
					}
				case wire.Published:
					var locs []wire.Loc
					for j := range m.N {
						locs = append(locs, m.Place(j).Loc)
					}
					send(fd, refMessage(wire.Ref, locs...))
				}
			}
		}
		var wg sync.WaitGroup
		// A few at a time are awake.
		slots := make(chan struct{}, 8)
		for i, fd := range fds {
			wg.Add(1)
			go func() {
				defer wg.Done()
				slots <- struct{}{}
				defer func() { <-slots }()
				buf := buffers.Get().(*[wire.MaxMessage]byte)
				defer buffers.Put(buf)
				pages := make([]wire.Page, 0, batch)
				for j := range common + own {
					p := wire.Page{Cookie: uint32(j % common)}
					if j%2 == 0 {
						p.Hash = hashes[j/2]
						p.Cookie = uint32(j / 2)
					} else {
						// Anything will do for what nobody else has.
						r := rand.NewPCG(uint64(i), uint64(j))
						binary.LittleEndian.PutUint64(p.Hash[:], r.Uint64())
						binary.LittleEndian.PutUint64(p.Hash[8:], r.Uint64())
					}
					if pages = append(pages, p); len(pages) == batch {
						send(fd, offerMessage(pages...))
						pages = pages[:0]
						react(fd, buf[:])
					}
				}
			}()
		}
		wg.Wait()
		awaitStats(b, s, func(u *Usage) bool { return u.Offers == clients*(common+own) })
		buf := new([wire.MaxMessage]byte)
		for done := false; !done; {
			done = s.Stats().Total.Published == common
			for _, fd := range fds {
				react(fd, buf[:])
			}
		}
		elapsed := time.Since(start)
		runtime.GC()
		runtime.GC()
		runtime.ReadMemStats(&after)
		st := s.Stats().Total
		require.EqualValues(b, common, st.Published)
		require.EqualValues(b, clients*own, st.Candidates)
		heap := float64(after.HeapAlloc+after.StackInuse) - float64(before.HeapAlloc+before.StackInuse)
		b.ReportMetric(heap/(1<<20), "heap-MiB")
		b.ReportMetric(float64(st.HeapBytes)/(1<<20), "estimated-MiB")
		b.ReportMetric(heap/(clients*(common+own)), "heap-B/offered")
		b.ReportMetric(float64(st.Bytes)/float64(st.Pages), "memfd-B/page")
		b.ReportMetric(float64(messages.Load())/elapsed.Seconds(), "messages/s")
		b.ReportMetric(float64(st.Offers)/elapsed.Seconds(), "offers/s")
		for _, fd := range fds {
			unix.Close(fd)
		}
		require.NoError(b, s.Close())
	}
}

// BenchmarkOffer is a page offered that the pool has, and one that it does not
// have.
func BenchmarkOffer(b *testing.B) {
	for _, bench := range []struct {
		name string
		hit  bool
	}{{"hit", true}, {"candidate", false}} {
		b.Run(bench.name, func(b *testing.B) {
			s := newServer(Options{}, func() stamp { return began })
			defer s.Close()
			p := newPeer(b, s, greeting("d"))
			p.tap.drop = true
			defer p.end()
			var pages []wire.Page
			for i := range 1000 {
				content := page(uint64(i), 100)
				h := wire.NewHasher(&p.conn.d.key).Sum(content)
				pages = append(pages, wire.Page{Hash: h})
				if bench.hit {
					p.conn.d.mu.Lock()
					p.conn.d.append(&wire.Record{Hash: h, Tag: codec.TagFill, Enc: content[:8]})
					p.conn.d.mu.Unlock()
				}
			}
			msg := offerMessage(pages...)
			for b.Loop() {
				p.conn.message(msg, -1)
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/1000, "ns/page")
		})
	}
}

// BenchmarkOverhead has sandboxes of a domain do what clones of one Python project did
// (800 offers each, half of them with a sketch, of which one in four resembles one of one
// sibling, 8 pages in common, 52 KB of patterns), and reports
// what the pool says that it costs each of them beside the pages in use, in bytes.
func BenchmarkOverhead(b *testing.B) {
	for _, clients := range []int{2, 8, 100, 1000} {
		b.Run(strconv.Itoa(clients), func(b *testing.B) {
			for b.Loop() {
				var now atomic.Uint32
				now.Store(uint32(began))
				s := newServer(Options{}, func() stamp { return stamp(now.Load()) })
				benchOverhead(b, s, clients, func(d stamp) {
					now.Add(uint32(d))
					s.tick()
				})
				require.NoError(b, s.Close())
			}
		})
	}
}

func benchOverhead(b *testing.B, s *Server, clients int, pass func(stamp)) {
	const (
		offers = 800
		batch  = 50
	)
	content := func(who, i int) *codec.Page {
		switch {
		case i%100 == 7:
			return page(uint64(i), 700)
		case i%8 == 1:
			return variant(page(uint64(who/2)<<16+uint64(i), 700), uint64(who))
		default:
			return page(uint64(1+who)<<32+uint64(i), 700)
		}
	}
	var peers []*peer
	for range clients {
		peers = append(peers, newPeer(b, s, greeting("d")))
	}
	r := rand.New(rand.NewPCG(1, 1))
	patterns := make([]byte, 52<<10)
	for range len(patterns) / 20 {
		patterns[r.IntN(len(patterns))] = 1 << r.IntN(8)
	}
	work := func(who int) {
		p := peers[who]
		p.sync(b)
		wants, told, similar := p.view.wants, p.view.told, p.view.similar
		p.view.wants, p.view.told, p.view.similar, p.view.shares = nil, nil, nil, nil
		for _, w := range wants {
			p.conn.message(publishMessage(wire.Content{Page: w, Template: wire.NoPage, Data: content(who, int(w.Cookie))}), -1)
		}
		spared := 0
		for _, pl := range append(told, similar...) {
			p.conn.message(refMessage(wire.Ref, pl.Loc), -1)
		}
		spared += 1000 * len(similar)
		var w wire.Writer
		w.Begin(wire.Usage, uint32(spared))
		p.conn.message(w.Bytes(), -1)
	}
	for from := 0; from < offers; from += batch {
		for who, p := range peers {
			p.sync(b)
			var plain []wire.Page
			var sketched []*wire.Sketched
			for i := from; i < from+batch; i++ {
				c := content(who, i)
				pg := wire.Page{Hash: p.view.hash(c), Cookie: uint32(i)}
				if i%2 == 0 {
					plain = append(plain, pg)
				} else {
					sketched = append(sketched, &wire.Sketched{Page: pg, Sketch: sketchOf(c), Alone: true})
				}
			}
			p.conn.message(offerMessage(plain...), -1)
			p.conn.message(resembleMessage(sketched...), -1)
			for rest := patterns; len(rest) > 0 && from == 0; {
				n := min(len(rest), wire.MaxPart)
				var w wire.Writer
				w.Begin(wire.Patterns, uint32(len(patterns)))
				w.Body(rest[:n])
				p.conn.message(w.Bytes(), -1)
				rest = rest[n:]
			}
			work(who)
		}
		for who := range peers {
			work(who)
		}
		pass(20 * second)
	}
	for range 3 {
		for who := range peers {
			work(who)
		}
		pass(20 * second)
	}
	st := s.Stats().Total
	n := float64(clients)
	b.ReportMetric(float64(st.Bytes-st.ReferencedBytes+st.HeapBytes)/n, "overhead-B/client")
	b.ReportMetric(float64(st.HeapBytes)/n, "heap-B/client")
	b.ReportMetric(float64(st.IndexBytes)/n, "index-B/client")
	b.ReportMetric(float64(st.UnreferencedBytes)/n, "unreferenced-B/client")
	b.ReportMetric(float64(st.SketchBytes)/n, "sketches-B/client")
	b.ReportMetric(float64(st.CandidateBytes)/n, "candidates-B/client")
	b.ReportMetric(float64(st.PatternBytes)/n, "patterns-B/client")
	b.ReportMetric(float64(st.Similar)/n, "similar/client")
	b.ReportMetric(float64(st.Published), "published")
	for _, p := range peers {
		p.end()
	}
}
