package erofs

import (
	"fmt"
	"time"

	"gvisor.dev/gvisor/pkg/context"
	"gvisor.dev/gvisor/pkg/erofs"
	"gvisor.dev/gvisor/pkg/log"
	"gvisor.dev/gvisor/pkg/sentry/checkpoint"
)

// OtherImage is a part of the error of a restore with another image than the
// checkpoint was made with. It crosses the control socket as text.
const OtherImage = "is not the EROFS image that the checkpoint was made with"

func otherImage(id checkpoint.ResourceID, got, want erofs.SuperBlock) string {
	describe := func(sb erofs.SuperBlock) string {
		return fmt.Sprintf("UUID %x, built %s, %d blocks, checksum %#x",
			sb.UUID, time.Unix(int64(sb.BuildTime), int64(sb.BuildTimeNsec)).UTC().Format(time.RFC3339), sb.Blocks, sb.Checksum)
	}
	return fmt.Sprintf("the image of the mount %s %s: it has %s, that one had %s", id.Path, OtherImage, describe(got), describe(want))
}

// dropRounds is as in package gofer.
const dropRounds = 32

// DropCachedDentries drops dentries that are cached because somebody may look them
// up again, and what the Sentry has mapped of the image. It returns how many dentries,
// and ends when stop returns true.
func (fs *filesystem) DropCachedDentries(ctx context.Context, stop func() bool) (dropped uint64) {
	// A FUSE server would have to be asked again, page by page.
	if !fs.useReadForIO && !stop() {
		if err := fs.image.DropMapped(); err != nil {
			log.Debugf("agentzip: unmapping an EROFS image: %v", err)
		}
	}
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
