package fleet

import (
	"context"

	"runsc-agentzip/pkg/bundle"
)

// Spec and Mount describe a container: see package bundle.
type (
	Spec  = bundle.Spec
	Mount = bundle.Mount
)

// DefaultCapabilities are Docker's default set.
var DefaultCapabilities = bundle.DefaultCapabilities

// WriteBundle writes dir/config.json: see bundle.Write.
func WriteBundle(dir string, s Spec) error { return bundle.Write(dir, s) }

// MakeRootImage makes an EROFS image of a folder: see bundle.MakeRootImage.
func MakeRootImage(ctx context.Context, image, dir string) error {
	return bundle.MakeRootImage(ctx, image, dir)
}
