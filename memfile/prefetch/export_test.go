package prefetch

import (
	"encoding/binary"

	"github.com/zeebo/xxh3"
)

// seal makes the checksum of b right, so that fuzzing gets past it.
func seal(b []byte) []byte {
	if len(b) < 8 {
		return b
	}
	b = append([]byte(nil), b[:len(b)-8]...)
	return binary.LittleEndian.AppendUint64(b, xxh3.Hash(b))
}
