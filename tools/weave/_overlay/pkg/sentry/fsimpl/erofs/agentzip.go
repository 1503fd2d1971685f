package erofs

import (
	"gvisor.dev/gvisor/pkg/context"
)

// dropRounds is as in package gofer.
const dropRounds = 32

// DropCachedDentries drops dentries that are cached because somebody may look them
// up again.
func (fs *filesystem) DropCachedDentries(ctx context.Context) {
	for range dropRounds {
		fs.cacheMu.Lock()
		left := fs.cachedDentriesLen
		fs.cacheMu.Unlock()
		if left == 0 {
			return
		}
		for ; left != 0 && fs.evictCachedDentry(ctx); left-- {
		}
	}
}
