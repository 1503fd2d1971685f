package gofer

import (
	"gvisor.dev/gvisor/pkg/context"
)

const (
	// dropBatch is how many dentries are dropped before others get at the
	// filesystem.
	dropBatch = 64

	// dropRounds bounds how often dentries are dropped that have come to the cache
	// meanwhile: parents do, after their last child has gone, so it is how many
	// levels of directories are dropped.
	dropRounds = 32
)

// DropCachedDentries drops dentries that are cached because somebody may look them
// up again, and with them what they hold: about 1.5 KB of heap each, and a host
// file descriptor with directfs.
func (fs *filesystem) DropCachedDentries(ctx context.Context) {
	for range dropRounds {
		fs.dentryCache.mu.Lock()
		left := fs.dentryCache.dentriesLen
		fs.dentryCache.mu.Unlock()
		if left == 0 {
			return
		}
		for left != 0 {
			n := min(left, dropBatch)
			left -= n
			fs.renameMu.Lock()
			for range n {
				fs.evictCachedDentryLocked(ctx)
			}
			fs.renameMu.Unlock()
		}
	}
}
