package container

import (
	"fmt"
	"os"

	"gvisor.dev/gvisor/pkg/erofs"
	"gvisor.dev/gvisor/runsc/boot"
	"gvisor.dev/gvisor/runsc/specutils"
)

// checkErofsImages refuses, by its name, an EROFS image that is missing or cannot be
// mounted, before anything is started. The Sentry knows images by their descriptors
// only, and finds a truncated one when it wants what is missing.
//
// Preconditions: c.GoferMountConfs is set.
func (c *Container) checkErofsImages(rootfs *boot.RootfsHint) error {
	if c.GoferMountConfs[0].ShouldUseErofs() {
		if err := checkErofsImage(rootfs.Mount.Source); err != nil {
			return fmt.Errorf("root filesystem: %w", err)
		}
	}
	i := 1
	for _, m := range c.Spec.Mounts {
		if !specutils.HasMountConfig(m) {
			continue
		}
		if c.GoferMountConfs[i].ShouldUseErofs() {
			if err := checkErofsImage(m.Source); err != nil {
				return fmt.Errorf("mount %s: %w", m.Destination, err)
			}
		}
		i++
	}
	return nil
}

func checkErofsImage(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("EROFS image: %w", err)
	}
	fi, err := f.Stat()
	if err == nil && !fi.Mode().IsRegular() {
		err = fmt.Errorf("it is not a regular file (%v)", fi.Mode().Type())
	} else if err == nil && fi.Size() == 0 {
		err = fmt.Errorf("it is empty")
	}
	if err != nil {
		f.Close()
		return fmt.Errorf("EROFS image %s: %w", path, err)
	}
	image, err := erofs.OpenImage(f)
	if err != nil {
		f.Close()
		return fmt.Errorf("EROFS image %s: %w; it must be made with mkfs.erofs -E noinline_data, without compression", path, err)
	}
	defer image.Close()
	if want := uint64(image.Blocks()) * uint64(image.BlockSize()); uint64(fi.Size()) < want {
		return fmt.Errorf("EROFS image %s is truncated: it has %d bytes of %d", path, fi.Size(), want)
	}
	return nil
}
