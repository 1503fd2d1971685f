package client

import (
	"testing"

	"github.com/stretchr/testify/require"

	"runsc-agentzip/pkg/pool/wire"
)

func benchmarkClient(b *testing.B) (*Client, *fakePool) {
	c := New(Options{})
	b.Cleanup(c.Close)
	p, fd := dial(b)
	b.Cleanup(p.close)
	require.NoError(b, c.Attach(fd))
	p.welcome()
	p.sendIndex()
	p.addSegment(1)
	p.put(1, hashOf(1))
	p.barrier(c)
	b.ReportAllocs()
	return c, p
}

func BenchmarkFind(b *testing.B) {
	for _, bc := range []struct {
		name string
		page int
		hit  bool
	}{{"hit", 1, true}, {"miss", 2, false}} {
		b.Run(bc.name, func(b *testing.B) {
			c, _ := benchmarkClient(b)
			key, h, buf := c.Key(), hashOf(bc.page), make([]byte, wire.MaxRecord)
			for b.Loop() {
				l, _, ok := c.Find(key, &h, buf)
				if ok != bc.hit {
					b.Fatal("wrong result")
				}
				if ok {
					c.Unref(l)
				}
			}
		})
	}
}

func BenchmarkRead(b *testing.B) {
	c, _ := benchmarkClient(b)
	l, buf := mustFind(b, c, hashOf(1)), make([]byte, wire.MaxRecord)
	for b.Loop() {
		if _, err := c.Read(l, buf); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkPread is the part of Find and Read that is the kernel's.
func BenchmarkPread(b *testing.B) {
	_, p := benchmarkClient(b)
	buf := make([]byte, wire.MaxRecord)
	for b.Loop() {
		pread(p.segments[1], buf, 0)
	}
}

func BenchmarkRef(b *testing.B) {
	c, _ := benchmarkClient(b)
	l := mustFind(b, c, hashOf(1))
	for b.Loop() {
		c.Ref(l)
		c.Unref(l)
	}
}
