package sandbox

import (
	"fmt"
	"os"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/log"
	"gvisor.dev/gvisor/pkg/sentry/fsimpl/erofs"
	"gvisor.dev/gvisor/runsc/boot"
	"gvisor.dev/gvisor/runsc/config"
	"gvisor.dev/gvisor/runsc/specutils"
)

// AgentzipImage says which template a sandbox was restored from. Its zero value
// is none.
type AgentzipImage struct {
	// Digest is the template's, in hexadecimal, and Dir the folder it is in.
	Digest, Dir string
}

// AgentzipTemplate, if not nil, returns the files that the sandbox needs to use
// the checkpoint in dir as a template, or none. opened are the image's files
// that the restore reads, in the order of boot.RestoreOpts.
var AgentzipTemplate func(conf *config.Config, dir string, opened []*os.File) ([]*os.File, AgentzipImage, error)

// AgentzipStarted, if not nil, is called in the command that has started or
// restored a sandbox, while its root container runs.
var AgentzipStarted func(conf *config.Config, s *Sandbox, image AgentzipImage)

func (s *Sandbox) agentzipStarted(conf *config.Config, image AgentzipImage) {
	if AgentzipStarted != nil {
		AgentzipStarted(conf, s, image)
	}
}

// AgentzipEnded, if not nil, is called in a command that has destroyed a sandbox with a
// registration.
var AgentzipEnded func(registration string)

// AgentzipDestroyed is called when the sandbox was destroyed.
func (s *Sandbox) AgentzipDestroyed() {
	if AgentzipEnded != nil && s.AgentzipRegistration != "" {
		AgentzipEnded(s.AgentzipRegistration)
	}
}

// Call calls a method on the sandbox's control socket.
func (s *Sandbox) Call(method string, arg, result any) error {
	return s.call(method, arg, result)
}

// restoreError says which files a restore failed on: the Sentry, which found
// out, knows only descriptors.
func restoreError(spec *specs.Spec, cid, dir string, err error) error {
	// Decoding errors carry the stack of the decoder.
	what, stack, ok := strings.Cut(err.Error(), "\ngoroutine ")
	if ok {
		log.Warningf("Restore failed at goroutine %s", stack)
	}
	if strings.Contains(what, erofs.OtherImage) {
		return fmt.Errorf("restoring container %q from %s: %s; restore with the very image, or make the checkpoint anew (images of the bundle: %s)",
			cid, dir, strings.TrimRight(what, ":"), strings.Join(erofsImages(spec), ", "))
	}
	// The words of the check of versions, and of specutils.RestoreValidateSpec.
	if strings.Contains(what, "runsc version does not match across checkpoint restore") {
		return fmt.Errorf("restoring container %q from %s: %s; an image is restored by the version that made it", cid, dir, what)
	}
	if strings.Contains(what, "does not match across checkpoint restore") {
		return fmt.Errorf("restoring container %q from %s: %s; the image is for the bundle that it was made with: args, mounts and read-only roots have to be the same", cid, dir, what)
	}
	return fmt.Errorf("restoring container %q from %s (checkpoint.img, and pages_meta.img and pages.img if there are any): %s; if it worked before, the image may be truncated or damaged: copy or make it again", cid, dir, what)
}

// erofsImages lists the files of a container's EROFS images.
func erofsImages(spec *specs.Spec) []string {
	var images []string
	if hint, err := boot.NewRootfsHint(spec); err == nil && hint != nil && hint.Mount.Type == erofs.Name {
		images = append(images, hint.Mount.Source)
	}
	for _, m := range spec.Mounts {
		if specutils.IsErofsMount(m) {
			images = append(images, m.Source)
		}
	}
	return images
}

// explainEnd tells a user whose sandbox was killed what may have done it: a
// process that the kernel kills for want of memory cannot say so itself.
//
// Preconditions: s.statusMu must be locked, and the sandbox has exited.
func (s *Sandbox) explainEnd() {
	if s.status.Signaled() && s.status.Signal() == unix.SIGKILL {
		fmt.Fprintf(os.Stderr, "runsc-agentzip: the sandbox of container %q was killed (SIGKILL). If nobody did that on purpose, it needed more memory than the limit of its cgroup or the host allows: raise the limit, or run fewer sandboxes\n", s.ID)
	}
}
