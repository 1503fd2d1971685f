package template

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// Names of the files of a template, in its folder.
const (
	StateFile = "checkpoint.img"
	MetaFile  = "pages_meta.img"
	PagesFile = "pages.img"
	IndexFile = "pages.azidx"
)

// A Template is an opened template, to be given to sandboxes.
type Template struct {
	pages, index *os.File
	info         Info
	image        *image
}

// errChanged is why an Open begins anew.
var errChanged = fmt.Errorf("%w while it was being opened", ErrModified)

// Open opens the template in the folder dir. If there is no index, it makes it
// and keeps it in the folder, or in memory if it cannot write there; processes
// that open a template at the same time make it once. log is told of what takes
// time and of what could not be done; it may be nil.
//
// An index that does not fit the other files is an error, and so is one that
// cannot be read: a new one would accept whatever happened to the image.
func Open(dir string, log func(format string, args ...any)) (*Template, error) {
	if log == nil {
		log = func(string, ...any) {}
	}
	for tries := 0; ; tries++ {
		t, err := open(dir, log)
		if errors.Is(err, errChanged) && tries < 3 {
			continue
		}
		return t, err
	}
}

// Files returns the two files to be given to a sandbox, for FromFiles there.
// They are read-only and belong to t.
func (t *Template) Files() (pages, index *os.File) { return t.pages, t.index }

// Info describes the template.
func (t *Template) Info() Info { return t.info }

// CheckMetadata returns an error that wraps ErrMismatch unless the two files,
// opened by the caller, are the checkpoint.img and pages_meta.img that Open
// found to belong to the pages. Another image may have been moved to the place
// meanwhile.
func (t *Template) CheckMetadata(state, meta *os.File) error {
	for _, c := range []struct {
		f    *os.File
		want *smallFile
	}{{state, &t.image.state}, {meta, &t.image.meta}} {
		id, err := identify(int(c.f.Fd()))
		if err != nil {
			return fmt.Errorf("%s: %w", c.want.path, err)
		}
		// Deleting the file changes this, and does no harm.
		id.ctime = c.want.id.ctime
		if id != c.want.id {
			return fmt.Errorf("%s: %w: it was replaced or changed while the template was being opened; try again", c.want.path, ErrMismatch)
		}
	}
	return nil
}

// Close closes the files of t. Sandboxes that were given them keep working.
func (t *Template) Close() error {
	return errors.Join(t.pages.Close(), t.index.Close())
}

// Verify reads the whole template in the folder dir and returns an error unless
// it is as it was when its index was made. It changes nothing.
func Verify(dir string) (Info, error) {
	im, err := openImage(dir)
	if err != nil {
		return Info{}, err
	}
	defer im.pages.Close()
	x, f, err := im.openIndex()
	if err != nil {
		return Info{}, err
	}
	if x == nil {
		return Info{}, fmt.Errorf("%s: there is no index to verify the image against, it is made when the template is first used: %w", im.indexPath(), fs.ErrNotExist)
	}
	defer x.close()
	defer f.Close()
	if err := im.verify(x); err != nil {
		return Info{}, err
	}
	if err := x.checkDigest(); err != nil {
		return Info{}, im.indexError(err)
	}
	return x.info(), nil
}

// An identity tells one version of a file from all others on the machine.
type identity struct {
	dev, ino     uint64
	size         int64
	mtime, ctime int64
}

func identify(fd int) (identity, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return identity{}, os.NewSyscallError("fstat", err)
	}
	return identityOf(&st), nil
}

func identityOf(st *unix.Stat_t) identity {
	return identity{uint64(st.Dev), st.Ino, st.Size, st.Mtim.Nano(), st.Ctim.Nano()}
}

func (id *identity) print() fingerprint { return fingerprint{id.ino, id.mtime, id.ctime} }

// A smallFile is a file that was read in full.
type smallFile struct {
	path string
	id   identity
	sum  [sha256.Size]byte
}

// An image is a checkpoint being opened.
type image struct {
	dir         string
	pages       *os.File
	id          identity // of pages
	mode        os.FileMode
	uid, gid    int
	state, meta smallFile
}

func (im *image) pagesPath() string { return filepath.Join(im.dir, PagesFile) }
func (im *image) indexPath() string { return filepath.Join(im.dir, IndexFile) }

// indexError completes an error about the content of the index.
func (im *image) indexError(err error) error {
	return fmt.Errorf("%s: %w; if the image is known to be good, delete this file to have it rebuilt", im.indexPath(), err)
}

// openFile opens a regular file read-only, and does not hang if it is a pipe.
func openFile(path string) (*os.File, unix.Stat_t, error) {
	var st unix.Stat_t
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	for err == unix.EINTR {
		fd, err = unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	}
	if err != nil {
		return nil, st, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	if err = unix.Fstat(fd, &st); err == nil {
		err = unix.SetNonblock(fd, false)
	}
	if err == nil && st.Mode&unix.S_IFMT != unix.S_IFREG {
		err = errors.New("not a regular file")
	}
	if err != nil {
		_ = unix.Close(fd)
		return nil, st, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	return os.NewFile(uintptr(fd), path), st, nil
}

// openImage opens the image in dir and reads its small files.
func openImage(dir string) (*image, error) {
	im := &image{dir: dir}
	pages, st, err := openFile(im.pagesPath())
	if err != nil {
		if !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("template pages: %w", err)
		}
		if _, derr := os.Stat(dir); derr != nil {
			return nil, fmt.Errorf("template folder: %w", derr)
		}
		return nil, fmt.Errorf("%s: %w: it has no %s (checkpoint with --compression=none)", dir, ErrNotTemplate, PagesFile)
	}
	im.pages, im.id = pages, identityOf(&st)
	im.mode, im.uid, im.gid = os.FileMode(st.Mode&0o666), int(st.Uid), int(st.Gid)
	for _, s := range []struct {
		name string
		to   *smallFile
	}{{StateFile, &im.state}, {MetaFile, &im.meta}} {
		if *s.to, err = readSmall(filepath.Join(dir, s.name)); err != nil {
			_ = pages.Close()
			if errors.Is(err, fs.ErrNotExist) {
				return nil, fmt.Errorf("%s: %w: it has no %s", dir, ErrNotTemplate, s.name)
			}
			return nil, fmt.Errorf("template metadata: %w", err)
		}
	}
	return im, nil
}

func readSmall(path string) (smallFile, error) {
	f, st, err := openFile(path)
	if err != nil {
		return smallFile{}, err
	}
	defer f.Close()
	s := smallFile{path: path, id: identityOf(&st)}
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return smallFile{}, err
	}
	h.Sum(s.sum[:0])
	return s, nil
}

// openIndex opens the index in the folder and checks that it is this image's,
// as far as that is known without reading pages. It returns nil if there is
// none.
func (im *image) openIndex() (*index, *os.File, error) {
	f, _, err := openFile(im.indexPath())
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil, nil, nil
		}
		return nil, nil, im.indexError(fmt.Errorf("%w: %w", ErrIndex, err))
	}
	x, err := mapIndex(f)
	if err != nil {
		_ = f.Close()
		return nil, nil, im.indexError(err)
	}
	if err = x.checkSketches(); err != nil {
		err = im.indexError(err)
	} else {
		err = im.matches(x)
	}
	if err != nil {
		_ = x.close()
		_ = f.Close()
		return nil, nil, err
	}
	return x, f, nil
}

// matches compares the image with the index, except for its pages.
func (im *image) matches(x *index) error {
	for _, c := range []struct {
		file *smallFile
		want [sha256.Size]byte
	}{{&im.state, x.state}, {&im.meta, x.meta}} {
		if c.file.sum != c.want {
			return fmt.Errorf("%s: %w: it is not the file that %s was made for; put the image back as it was, or delete the index if the folder now holds another, complete image",
				c.file.path, ErrMismatch, im.indexPath())
		}
	}
	if err := checkSize(uint64(im.id.size), x.pages); err != nil {
		return fmt.Errorf("%s: %w; %s", im.pagesPath(), err, im.advice())
	}
	return nil
}

func (im *image) advice() string {
	return fmt.Sprintf("the image cannot be used: restore the file from a copy or checkpoint again (the index is %s)", im.indexPath())
}

func open(dir string, log func(string, ...any)) (_ *Template, err error) {
	im, err := openImage(dir)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = im.pages.Close()
		}
	}()
	x, f, err := im.openIndex()
	if err != nil {
		return nil, err
	}
	if x == nil || x.print != im.id.print() {
		if x != nil {
			_ = x.close()
			_ = f.Close()
		}
		if x, f, err = im.prepare(log); err != nil {
			return nil, err
		}
	}
	defer x.close()
	return &Template{pages: im.pages, index: f, info: x.info(), image: im}, nil
}

// prepare makes the index, or verifies the image against it if the fingerprint
// differs, unless another process does it meanwhile.
func (im *image) prepare(log func(string, ...any)) (*index, *os.File, error) {
	unlock := im.lock(log)
	defer unlock()
	// The lock is on the file that was opened; the index next to it must be its.
	var st unix.Stat_t
	if err := unix.Stat(im.pagesPath(), &st); err != nil {
		return nil, nil, fmt.Errorf("template pages: %w", &fs.PathError{Op: "stat", Path: im.pagesPath(), Err: err})
	}
	if identityOf(&st) != im.id {
		return nil, nil, fmt.Errorf("%s: %w", im.pagesPath(), errChanged)
	}
	x, f, err := im.openIndex()
	if err != nil || x != nil && x.print == im.id.print() {
		return x, f, err
	}
	out, outErr := im.create()
	if outErr != nil {
		// Nobody who waits for the lock will find a result.
		unlock()
	}
	defer out.discard()
	if x != nil {
		return im.refresh(x, f, out, outErr, log)
	}
	return im.build(out, outErr, log)
}

// build makes the index and writes it to out, or to memory if that is nil
// because of outErr.
func (im *image) build(out *output, outErr error, log func(string, ...any)) (*index, *os.File, error) {
	start := time.Now()
	h, sums, sketches, err := im.sumPages()
	if err != nil {
		return nil, nil, err
	}
	if outErr == nil {
		outErr = out.commit(im, h.encode(), sums, sketches)
	}
	var f *os.File
	if outErr == nil {
		log("template %s: indexed %d pages in %v", im.dir, h.pages, time.Since(start).Round(time.Millisecond))
		if f, _, err = openFile(im.indexPath()); err != nil {
			return nil, nil, im.indexError(fmt.Errorf("%w: %w", ErrIndex, err))
		}
	} else {
		log("template %s: indexed %d pages in %v; the index could not be kept beside the image, so this is done at each use: %v", im.dir, h.pages, time.Since(start).Round(time.Millisecond), outErr)
		// Each sandbox would have sketches of its own, which do not save that
		// much.
		h.sections, h.size = h.sections[:1], headerSize+uint64(len(sums))
		if f, err = inMemory(h.encode(), sums); err != nil {
			return nil, nil, fmt.Errorf("template %s: no room for an index, neither in the folder nor in memory: %w", im.dir, err)
		}
	}
	x, err := mapIndex(f)
	if err != nil {
		_ = f.Close()
		return nil, nil, im.indexError(err)
	}
	return x, f, nil
}

// refresh verifies the image against x and, if it has not changed, writes the
// index with the present fingerprint to out.
func (im *image) refresh(x *index, f *os.File, out *output, outErr error, log func(string, ...any)) (*index, *os.File, error) {
	start := time.Now()
	if err := im.verify(x); err != nil {
		_ = x.close()
		_ = f.Close()
		return nil, nil, err
	}
	x.print = im.id.print()
	if outErr == nil {
		outErr = out.commit(im, x.encode(), x.data[headerSize:])
	}
	if outErr != nil {
		log("template %s: %s is not the very file that was indexed (copied or moved?); verified its %d pages in %v. That could not be noted in the index, so it is done at each use: %v",
			im.dir, PagesFile, x.pages, time.Since(start).Round(time.Millisecond), outErr)
		return x, f, nil
	}
	log("template %s: %s is not the very file that was indexed (copied or moved?); verified its %d pages in %v and noted that in the index",
		im.dir, PagesFile, x.pages, time.Since(start).Round(time.Millisecond))
	return x, f, nil
}

// lock keeps other processes from preparing the same image, and returns what
// unlocks it, which may be called twice. Where files cannot be locked,
// preparations are merely done more than once.
func (im *image) lock(log func(string, ...any)) func() {
	fd := int(im.pages.Fd())
	err := unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB)
	if err == unix.EWOULDBLOCK {
		log("template %s: waiting for another process to read its pages", im.dir)
		for err = unix.EINTR; err == unix.EINTR; {
			err = unix.Flock(fd, unix.LOCK_EX)
		}
	}
	if err != nil {
		return func() {}
	}
	// Explicitly, because sandboxes share the open file.
	return func() { _ = unix.Flock(fd, unix.LOCK_UN) }
}
