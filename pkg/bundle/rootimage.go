package bundle

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// Annotations that runsc reads of a container whose root is an image.
const (
	rootTypeAnnotation    = "dev.gvisor.spec.rootfs.type"
	rootSourceAnnotation  = "dev.gvisor.spec.rootfs.source"
	rootOverlayAnnotation = "dev.gvisor.spec.rootfs.overlay"
)

// mkfsOptions make what gVisor can read, the same from the same folder: no file's end
// beside its inode, which cannot be mapped; no extended attributes, since a file that
// has one cannot be opened. (-T would set the time of each file.)
var mkfsOptions = []string{"--quiet", "-E", "noinline_data", "-x-1", "--preserve-mtime"}

// MakeRootImage makes an EROFS image of what is in a folder, for Spec.RootImage, with
// mkfs.erofs (Debian: erofs-utils). Owners, modes, times and links are the folder's;
// extended attributes are left out. Devices are there, but a guest cannot open them.
// Names have at most 254 bytes. The image is not compressed, and a
// little larger than the folder. The same folder gives the same image, byte by byte,
// with the same version of mkfs.erofs: images that differ have different UUIDs, by
// which a restore tells them apart.
//
// A file that is there is replaced at once, never written to: sandboxes that use it
// keep what they have.
func MakeRootImage(ctx context.Context, image, dir string) error {
	if err := makeRootImage(ctx, image, dir); err != nil {
		return fmt.Errorf("bundle: making %s of %s: %w", image, dir, err)
	}
	return nil
}

func makeRootImage(ctx context.Context, image, dir string) (err error) {
	if fi, err := os.Stat(dir); err != nil {
		return err
	} else if !fi.IsDir() {
		return errors.New("it is not a folder")
	}
	mkfs, err := exec.LookPath("mkfs.erofs")
	if err != nil {
		return errors.New("mkfs.erofs is missing: apt-get install erofs-utils")
	}
	// In the same folder, to be renamed.
	f, err := os.CreateTemp(filepath.Dir(image), "."+filepath.Base(image)+".*")
	if err != nil {
		return err
	}
	defer func() {
		f.Close()
		if err != nil {
			os.Remove(f.Name())
		}
	}()
	began := time.Now()
	args := append(append([]string{}, mkfsOptions...), "-U", "00000000-0000-0000-0000-000000000000", f.Name(), dir)
	cmd := exec.CommandContext(ctx, mkfs, args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("mkfs.erofs: %w: %s", err, strings.TrimSpace(string(out)))
	}
	if err := identifyImage(f); err != nil {
		return err
	}
	if err := f.Chmod(0o644); err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	// Whoever compares it with the folder is to see what changed in there meanwhile.
	if err := os.Chtimes(f.Name(), began, began); err != nil {
		return err
	}
	return os.Rename(f.Name(), image)
}

// The superblock of EROFS: where it is, and what of it is needed here.
const (
	erofsSuper     = 1024
	erofsMagic     = 0xe0f5e1e2
	erofsBlockBits = 12 // offset in the superblock
	erofsChecksum  = 4
	erofsFeatures  = 8
	erofsBuilt     = 24 // of 12 bytes
	erofsUUID      = 48
	erofsHasSum    = 1 // of the compatible features: there is a checksum
)

// identifyImage gives an image without a UUID one that is made of its content. A
// restore compares the superblock only, and two folders can lead to images whose
// superblocks are the same. The time of the making goes: it is the time of files that
// have none of their own, of which there are none.
func identifyImage(f *os.File) error {
	// The checksum is of the first block, from the superblock on.
	first := make([]byte, 4096)
	if _, err := f.ReadAt(first, 0); err != nil {
		return fmt.Errorf("reading its first block: %w", err)
	}
	sb := first[erofsSuper:]
	if binary.LittleEndian.Uint32(sb) != erofsMagic || sb[erofsBlockBits] != 12 {
		return errors.New("mkfs.erofs made something else than an EROFS image with blocks of 4096 bytes")
	}
	clear(sb[erofsBuilt : erofsBuilt+12])
	clear(sb[erofsChecksum : erofsChecksum+4])
	h := sha256.New()
	h.Write(first)
	if _, err := io.Copy(h, io.NewSectionReader(f, int64(len(first)), 1<<62)); err != nil {
		return err
	}
	uuid := h.Sum(nil)[:16]
	// Version 8 of RFC 9562: whatever the maker likes.
	uuid[6] = uuid[6]&0x0f | 0x80
	uuid[8] = uuid[8]&0x3f | 0x80
	copy(sb[erofsUUID:], uuid)
	if binary.LittleEndian.Uint32(sb[erofsFeatures:])&erofsHasSum != 0 {
		binary.LittleEndian.PutUint32(sb[erofsChecksum:], ^crc32.Checksum(sb, crc32.MakeTable(crc32.Castagnoli)))
	}
	_, err := f.WriteAt(first, 0)
	return err
}

// checkRootImage says early what runsc would refuse.
func checkRootImage(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("root image: %w", err)
	}
	defer f.Close()
	var magic [4]byte
	if _, err := f.ReadAt(magic[:], erofsSuper); err != nil || !bytes.Equal(magic[:], binary.LittleEndian.AppendUint32(nil, erofsMagic)) {
		return fmt.Errorf("root image %s is not an EROFS image", path)
	}
	return nil
}
