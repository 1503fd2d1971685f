package wire

import (
	"crypto/sha256"
	"io"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"runsc-agentzip/memfile/codec"
	"runsc-agentzip/memfile/dedup"
)

func TestItems(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		hash := func() (h Hash) {
			copy(h[:], rapid.SliceOfN(rapid.Byte(), HashSize, HashSize).Draw(t, "hash"))
			return h
		}
		page := Page{hash(), rapid.Uint32().Draw(t, "cookie"), rapid.Bool().Draw(t, "base")}
		data := new(codec.Page)
		data[rapid.IntRange(0, len(data)-1).Draw(t, "at")] = 7
		place := Place{Page{Hash: page.Hash, Cookie: page.Cookie}, Loc(rapid.Uint64().Draw(t, "loc"))}
		plain := Page{Hash: page.Hash, Cookie: page.Cookie}
		content := Content{plain, rapid.Uint32().Draw(t, "template"), data}
		n := rapid.IntRange(0, 10).Draw(t, "n")

		var w Writer
		make := func(typ Type, item func()) Message {
			w.Begin(typ, 17)
			for range n {
				item()
			}
			require.Equal(t, n, w.Len())
			m, err := Parse(w.Bytes())
			require.NoError(t, err)
			require.Equal(t, typ, m.Type)
			require.Equal(t, n, m.N)
			require.EqualValues(t, 17, m.Arg)
			return m
		}
		offer := make(Offer, func() { w.Page(page) })
		for i := range n {
			require.Equal(t, page, offer.Page(i))
		}
		published := make(Published, func() { w.Place(place) })
		for i := range n {
			require.Equal(t, place, published.Place(i))
		}
		ref := make(Ref, func() { w.Loc(place.Loc) })
		for i := range n {
			require.Equal(t, place.Loc, ref.Loc(i))
		}
		sketched := Sketched{Page: plain, Alone: rapid.Bool().Draw(t, "alone"), Sketch: dedup.Sketch{Feature: [dedup.Features]uint32{1, 2, 3}, N: rapid.IntRange(0, dedup.Features).Draw(t, "features")}}
		resemble := make(Resemble, func() { w.Sketched(&sketched) })
		for i := range n {
			require.Equal(t, sketched, resemble.Sketched(i))
		}
		publish := make(Publish, func() { w.Content(content) })
		for i := range n {
			require.Equal(t, content, publish.Content(i))
		}
	})
}

func TestRoom(t *testing.T) {
	data := new(codec.Page)
	for typ, item := range map[Type]func(w *Writer){
		Offer:     func(w *Writer) { w.Page(Page{}) },
		Publish:   func(w *Writer) { w.Content(Content{Data: data}) },
		Published: func(w *Writer) { w.Place(Place{}) },
		Unref:     func(w *Writer) { w.Loc(0) },
		Alone:     func(w *Writer) { w.Loc(0) },
	} {
		var w Writer
		w.Begin(typ, 0)
		for w.Room() > 0 {
			item(&w)
		}
		most := MaxMessage
		if typ == Published || typ == Alone {
			most = MaxReply
		}
		require.LessOrEqual(t, len(w.Bytes()), most)
		require.Greater(t, len(w.Bytes())+itemSize[typ], most)
		_, err := Parse(w.Bytes())
		require.NoError(t, err)
	}
}

func TestGreeting(t *testing.T) {
	g := &Greeting{Version: Version, Name: "a", Domain: "tenant", Template: "00", TemplateDir: "/x"}
	var w Writer
	require.NoError(t, g.Hello(&w))
	m, err := Parse(w.Bytes())
	require.NoError(t, err)
	got, err := m.Greeting()
	require.NoError(t, err)
	require.Equal(t, g, got)

	for change, want := range map[string]func(g *Greeting){
		"version 1":           func(g *Greeting) { g.Version = 1 },
		"domain of 0 bytes":   func(g *Greeting) { g.Domain = "" },
		"domain of 129 bytes": func(g *Greeting) { g.Domain = strings.Repeat("x", MaxDomain+1) },
	} {
		bad := *g
		want(&bad)
		require.NoError(t, bad.Hello(&w))
		m, err := Parse(w.Bytes())
		require.NoError(t, err)
		_, err = m.Greeting()
		require.ErrorContains(t, err, change)
	}
	m.Body = []byte("{")
	_, err = m.Greeting()
	require.ErrorIs(t, err, ErrMessage)
	g.TemplateDir = strings.Repeat("x", 20<<10)
	require.ErrorContains(t, g.Hello(&w), "too long")
}

func TestHasher(t *testing.T) {
	key, page := &Key{1, 2, 3}, &codec.Page{9}
	h := NewHasher(key)
	want := sha256.Sum256(append(append(append([]byte{}, key[:]...), make([]byte, 32)...), page[:]...))
	for range 2 {
		require.Equal(t, Hash(want[:16]), h.Sum(page))
	}
	require.NotEqual(t, NewHasher(&Key{1}).Sum(page), h.Sum(page))
	require.Zero(t, testing.AllocsPerRun(100, func() { h.Sum(page) }))
}

func TestLoc(t *testing.T) {
	l := MakeLoc(7, SegmentSize-Align)
	require.EqualValues(t, 7, l.Segment())
	require.EqualValues(t, SegmentSize-Align, l.Offset())
}

// TestIndex compares an index with a map.
func TestIndex(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const places = 64
		table := make([]byte, IndexSize(places))
		model := map[Hash]Loc{}
		for range rapid.IntRange(0, 120).Draw(t, "n") {
			var h Hash
			h[1] = rapid.Byte().Draw(t, "name") // 0 is a hash like others
			h[15] = h[1]
			l := Loc(rapid.Uint64Range(1, 1<<50).Draw(t, "loc"))
			slots := table[Probe(&h, places):][:ProbeSize]
			switch old, ok := model[h]; {
			case !ok || rapid.Bool().Draw(t, "put"):
				if PutSlot(slots, &h, l) {
					model[h] = l
				} else {
					require.False(t, ok)
				}
			default:
				require.False(t, DropSlot(slots, &h, old+1))
				require.True(t, DropSlot(slots, &h, old))
				delete(model, h)
			}
		}
		for h, l := range model {
			got, ok := FindSlot(table[Probe(&h, places):][:ProbeSize], &h)
			require.True(t, ok)
			require.Equal(t, l, got)
		}
	})
}

func TestRecord(t *testing.T) {
	r := Record{Hash: Hash{1}, Sum: 2, Tag: codec.TagZstdBase, HasBase: true, Base: 77, Enc: []byte("xyz")}
	b := make([]byte, r.Size()+100)
	r.Put(b[:r.Size()])
	got, err := ParseRecord(b)
	require.NoError(t, err)
	require.Equal(t, r, got)
	require.Zero(t, r.Size()%Align)

	for what, b := range map[string][]byte{
		"short":           b[:RecordHeader-1],
		"cut":             b[:RecordHeader+2],
		"zeros":           make([]byte, 100),
		"no base":         with(b, 25, 0),
		"two bases":       with(b, 25, 2),
		"base of none":    with(b, 24, byte(codec.TagS2)),
		"tag pool":        with(with(b, 24, byte(codec.TagPool)), 25, 0),
		"too long":        with(b, 27, 0xff),
		"unknown tag":     with(b, 24, 200),
		"tag of no bytes": with(with(b, 24, byte(codec.TagZero)), 25, 0),
	} {
		_, err := ParseRecord(b)
		require.ErrorIs(t, err, ErrRecord, what)
	}
}

func with(b []byte, at int, v byte) []byte {
	b = append([]byte{}, b...)
	b[at] = v
	return b
}

func TestParseHostile(t *testing.T) {
	for what, b := range map[string][]byte{
		"empty":          {},
		"short":          {2, 0, 0, 0},
		"unknown":        {11, 0, 0, 0, 0, 0, 0, 0},
		"reserved":       {7, 1, 0, 0, 0, 0, 0, 0},
		"missing items":  {2, 0, 1, 0, 0, 0, 0, 0},
		"items of none":  {7, 0, 1, 0, 0, 0, 0, 0},
		"surplus":        {4, 0, 0, 0, 0, 0, 0, 0, 1},
		"too long":       make([]byte, MaxMessage+1),
		"count overflow": {3, 0, 255, 255, 0, 0, 0, 0, 1},
	} {
		_, err := Parse(b)
		require.ErrorIs(t, err, ErrMessage, what)
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte{2, 0, 0, 0, 0, 0, 0, 0})
	f.Add(make([]byte, header+PlaceSize))
	f.Fuzz(func(t *testing.T, b []byte) {
		if m, err := Parse(b); err == nil {
			for i := range m.N {
				switch m.Type {
				case Offer, Want:
					m.Page(i)
				case Publish:
					m.Content(i)
				case Resemble:
					if s := m.Sketched(i); s.Sketch.N > dedup.Features {
						t.Fatal(s)
					}
				case Published, Similar:
					m.Place(i)
				case Ref, Unref, Index, Share:
					m.Uint64(i)
				}
			}
			_, _ = m.Greeting()
			_, _ = m.Sharing()
		}
		if r, err := ParseRecord(b); err == nil {
			out := make([]byte, r.Size())
			r.Put(out)
			got, err := ParseRecord(out)
			if err != nil || got.Hash != r.Hash || string(got.Enc) != string(r.Enc) {
				t.Fatalf("%+v comes back as %+v, %v", r, got, err)
			}
		}
	})
}

func pair(t *testing.T) (a, b int) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	t.Cleanup(func() {
		unix.Close(fds[0])
		unix.Close(fds[1])
	})
	return fds[0], fds[1]
}

// descriptors is how many this process has open.
func descriptors(t *testing.T) int {
	e, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	return len(e)
}

func TestSendReceive(t *testing.T) {
	a, b := pair(t)
	buf := make([]byte, MaxMessage)
	_, _, err := Receive(b, buf)
	require.ErrorIs(t, err, unix.EAGAIN)

	require.NoError(t, Send(a, []byte("hello"), -1))
	require.NoError(t, Send(a, []byte("with"), a))
	require.NoError(t, Wait(b))
	n, fd, err := Receive(b, buf)
	require.NoError(t, err)
	require.Equal(t, "hello", string(buf[:n]))
	require.Equal(t, -1, fd)
	before := descriptors(t)
	n, fd, err = Receive(b, buf)
	require.NoError(t, err)
	require.Equal(t, "with", string(buf[:n]))
	require.Equal(t, before+1, descriptors(t))
	unix.Close(fd)

	// Too long a message, or too many descriptors.
	require.NoError(t, Send(a, make([]byte, MaxMessage+1), b))
	_, _, err = Receive(b, buf)
	require.ErrorIs(t, err, ErrMessage)
	_, err = unix.SendmsgN(a, []byte("x"), unix.UnixRights(a, b, a), nil, 0)
	require.NoError(t, err)
	_, _, err = Receive(b, buf)
	require.ErrorIs(t, err, ErrMessage)
	oob := unix.UnixRights(a, b, a, a, a, a, a, a, a, a, a, a, a, a, a, a, a, a, a, a)
	_, err = unix.SendmsgN(a, []byte("x"), oob, nil, 0)
	require.NoError(t, err)
	_, _, err = Receive(b, buf)
	require.ErrorIs(t, err, ErrMessage)
	require.Equal(t, before, descriptors(t))

	// A full socket.
	for err = nil; err == nil; err = Send(a, buf, -1) {
	}
	require.ErrorIs(t, err, unix.EAGAIN)
	require.NoError(t, unix.Shutdown(a, unix.SHUT_WR))
	for err = nil; err == nil; _, _, err = Receive(b, buf) {
	}
	require.ErrorIs(t, err, io.EOF)
	require.NoError(t, Wait(b))
}
