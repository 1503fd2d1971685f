package erofs

import (
	"golang.org/x/sys/unix"
)

// DropMapped takes the pages of the image that were read through it out of the
// process's page tables, which shrink with it. The host's page cache keeps them; who
// reads one again maps it anew. It may be called at any time until Close.
func (i *Image) DropMapped() error {
	return unix.Madvise(i.bytes, unix.MADV_DONTNEED)
}
