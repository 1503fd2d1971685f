package erofs

import (
	"gvisor.dev/gvisor/pkg/context"
)

// dropRounds is as in package gofer.
const dropRounds = 32

// DropCachedDentries drops dentries that are cached because somebody may look them
// up again. It returns how many, and ends when stop returns true.
func (fs *filesystem) DropCachedDentries(ctx context.Context, stop func() bool) (dropped uint64) {
	for range dropRounds {
		fs.cacheMu.Lock()
		left := fs.cachedDentriesLen
		fs.cacheMu.Unlock()
		if left == 0 {
			return dropped
		}
		for ; left != 0; left-- {
			if stop() || !fs.evictCachedDentry(ctx) {
				return dropped
			}
			dropped++
		}
	}
	return dropped
}
