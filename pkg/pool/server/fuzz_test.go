package server

import (
	"encoding/binary"
	"testing"

	"runsc-agentzip/pkg/pool/wire"
)

// FuzzMessage gives a pool with two sandboxes any messages: each is a length (2
// bytes, the highest bit says from whom), and the message.
func FuzzMessage(f *testing.F) {
	frame := func(who int, msgs ...[]byte) (b []byte) {
		for _, m := range msgs {
			b = binary.LittleEndian.AppendUint16(b, uint16(len(m)|who<<15))
			b = append(b, m...)
		}
		return b
	}
	content := page(1, 300)
	hash := wire.NewHasher(&wire.Key{}).Sum(content)
	offer := offerMessage(wire.Page{Hash: hash, Cookie: 3})
	publish := publishMessage(wire.Content{Page: wire.Page{Hash: hash}, Template: wire.NoPage, Data: content})
	var patterns wire.Writer
	patterns.Begin(wire.Patterns, 10)
	patterns.Body([]byte("01234"))
	shared := append(append(frame(0, offer), frame(1, offer)...), frame(1, publish)...)
	f.Add(shared)
	f.Add(append(shared, frame(0, refMessage(wire.Ref, 0), usageMessage(), refMessage(wire.Unref, 0, 1, 2))...))
	sketched := &wire.Sketched{Page: wire.Page{Hash: hash, Cookie: 3}, Sketch: sketchOf(content), Alone: true}
	other := &wire.Sketched{Page: wire.Page{Hash: wire.Hash{1}}, Sketch: sketched.Sketch, Alone: true}
	f.Add(append(append(frame(0, resembleMessage(other)), frame(1, resembleMessage(sketched), publish)...), frame(0, resembleMessage(other))...))
	f.Add(frame(0, patterns.Bytes(), patterns.Bytes(), patterns.Bytes()))
	f.Add(frame(0, usageMessage(), usageMessage(), []byte{9}, nil))
	f.Add(frame(1, offerMessage(), publishMessage(), refMessage(wire.Ref)))
	f.Fuzz(func(t *testing.T, b []byte) {
		now := began
		s := newServer(Options{DomainMaxBytes: 64 << 10}, func() stamp { return now })
		defer s.Close()
		peers := make([]*peer, 2)
		for i := range peers {
			peers[i] = newPeer(t, s, greeting("d"))
			defer peers[i].end()
			peers[i].tap.mu.Lock()
			peers[i].tap.drop = true
			peers[i].tap.mu.Unlock()
		}
		// A known key, so that the corpus has right hashes.
		d := s.anyDomain()
		d.key = wire.Key{}
		ended := [2]bool{}
		for len(b) >= 2 {
			n := binary.LittleEndian.Uint16(b)
			who, size := n>>15, min(int(n&0x7fff), len(b)-2)
			if !ended[who] && peers[who].conn.message(b[2:2+size], -1) != nil {
				ended[who] = true
			}
			b = b[2+size:]
			now++
			if now%16 == 0 {
				s.tick()
			}
		}
		checkServer(t, s)
		for _, p := range peers {
			p.sync(t)
			p.end()
		}
		checkServer(t, s)
		now += 2 * s.keep
		s.tick()
		if s.held.Load() != 0 || len(s.domains) != 0 {
			t.Fatal("something is left")
		}
	})
}
