package server

import (
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"runsc-agentzip/pkg/pool/wire"
)

// Whatever is packed comes out again, also when several do it at once.
func TestPack(t *testing.T) {
	var wg sync.WaitGroup
	for k := range uint64(4) {
		wg.Add(1)
		go func() {
			defer wg.Done()
			r := rand.New(rand.NewPCG(k, 1))
			for _, n := range []int{1, 7, 1000, 52 << 10, wire.MaxPatterns} {
				bitmap, noise := make([]byte, n), make([]byte, n)
				for i := range noise {
					noise[i] = byte(r.Uint32())
				}
				for range n / 50 {
					bitmap[r.IntN(n)] = 1 << r.IntN(8)
				}
				for _, b := range [][]byte{bitmap, noise} {
					packed := pack(b)
					got, err := unpack(packed, n)
					if err != nil || string(got) != string(b) {
						t.Errorf("%d bytes: %v", n, err)
					}
					if len(packed) > n+n/1000+20 {
						t.Errorf("%d bytes take %d", n, len(packed))
					}
				}
				if packed := pack(bitmap); n > 1000 && len(packed) > n/8 {
					t.Errorf("a bitmap of %d bytes takes %d", n, len(packed))
				}
			}
		}()
	}
	wg.Wait()
	_, err := unpack(pack(make([]byte, 100)), 101)
	require.Error(t, err)
	_, err = unpack([]byte{1, 2, 3}, 100)
	require.Error(t, err)
}
