package template

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"os"
	"runtime/debug"
	"time"

	"github.com/zeebo/xxh3"
	"golang.org/x/sys/unix"

	"runsc-agentzip/memfile/codec"
	"runsc-agentzip/memfile/dedup"
)

// PageSize is the size of a page of a template.
const PageSize = codec.PageSize

// See the package comment for the format.
const (
	magic         = "AZPGIDX\n"
	version       = 1
	headerSize    = 4096
	sectionsAt    = 256
	sectionSize   = 64
	headerSumAt   = headerSize - 8
	maxSections   = (headerSumAt - sectionsAt) / sectionSize
	sumSize       = 8
	digestPrefix  = "agentzip template 1\n"
	sketchSize    = 8
	flagCritical  = 1
	maxPages      = 1 << 32
	sectionsAlign = 4096

	sectionSums     = 1
	sectionSketches = 2
)

// A Digest says which template it is.
type Digest [sha256.Size]byte

// String returns the digest in hexadecimal.
func (d Digest) String() string { return hex.EncodeToString(d[:]) }

// MarshalText implements encoding.TextMarshaler.
func (d Digest) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (d *Digest) UnmarshalText(b []byte) error {
	if len(b) != 2*len(d) {
		return fmt.Errorf("template digest of %d digits: want %d", len(b), 2*len(d))
	}
	_, err := hex.Decode(d[:], b)
	return err
}

// Info describes a template. Sizes are in bytes.
type Info struct {
	// Pages is the number of pages in pages.img, and Bytes its size.
	Pages uint64 `json:"pages"`
	Bytes uint64 `json:"bytes"`
	// Digest says which template it is, wherever it lies.
	Digest Digest `json:"digest"`
	// Created is when the index was made.
	Created time.Time `json:"created"`
	// IndexBytes is the size of the index.
	IndexBytes uint64 `json:"index_bytes"`
}

// A fingerprint tells a file from what it was before somebody changed it.
type fingerprint struct {
	ino          uint64
	mtime, ctime int64
}

type section struct {
	kind, flags         uint32
	offset, length, sum uint64
	record              uint32
}

// header is the decoded header of an index.
type header struct {
	pages, size uint64
	created     int64
	print       fingerprint
	state, meta [sha256.Size]byte
	digest      Digest
	sections    []section
}

func (h *header) info() Info {
	return Info{
		Pages:      h.pages,
		Bytes:      h.pages * PageSize,
		Digest:     h.digest,
		Created:    time.Unix(0, h.created).UTC(),
		IndexBytes: h.size,
	}
}

// sums returns the section of checksums, which every decoded header has.
func (h *header) sums() section {
	for _, s := range h.sections {
		if s.kind == sectionSums {
			return s
		}
	}
	panic("index without checksums")
}

func (h *header) encode() []byte {
	le := binary.LittleEndian
	b := make([]byte, headerSize)
	copy(b, magic)
	le.PutUint32(b[8:], version)
	le.PutUint32(b[12:], headerSize)
	le.PutUint32(b[16:], PageSize)
	le.PutUint32(b[20:], uint32(len(h.sections)))
	le.PutUint64(b[24:], h.pages)
	le.PutUint64(b[32:], h.size)
	le.PutUint64(b[40:], uint64(h.created))
	le.PutUint64(b[48:], h.print.ino)
	le.PutUint64(b[56:], uint64(h.print.mtime))
	le.PutUint64(b[64:], uint64(h.print.ctime))
	copy(b[72:], h.state[:])
	copy(b[104:], h.meta[:])
	copy(b[136:], h.digest[:])
	for i, s := range h.sections {
		e := b[sectionsAt+i*sectionSize:]
		le.PutUint32(e[0:], s.kind)
		le.PutUint32(e[4:], s.flags)
		le.PutUint64(e[8:], s.offset)
		le.PutUint64(e[16:], s.length)
		le.PutUint64(e[24:], s.sum)
		le.PutUint32(e[32:], s.record)
	}
	le.PutUint64(b[headerSumAt:], xxh3.Hash(b[:headerSumAt]))
	return b
}

// decodeHeader decodes the first bytes of an index file of size bytes. What it
// accepts can be relied on: sections lie in the file and do not overlap, and
// there is a checksum per page. Errors wrap ErrIndex or ErrVersion.
func decodeHeader(b []byte, size uint64) (header, error) {
	var h header
	bad := func(format string, args ...any) (header, error) {
		return header{}, fmt.Errorf("%w: "+format, append([]any{ErrIndex}, args...)...)
	}
	le := binary.LittleEndian
	if len(b) < headerSize || size < headerSize {
		return bad("%d bytes are less than a header", min(uint64(len(b)), size))
	}
	b = b[:headerSize]
	if string(b[:8]) != magic {
		return bad("it does not begin like an index")
	}
	// Before the checksum, which another version may have elsewhere.
	if v := le.Uint32(b[8:]); v != version {
		return header{}, fmt.Errorf("%w: %d, this program reads %d", ErrVersion, v, version)
	}
	if le.Uint64(b[headerSumAt:]) != xxh3.Hash(b[:headerSumAt]) {
		return bad("the header does not match its checksum")
	}
	// Whoever wrote a matching checksum is still not trusted to have written
	// sensible numbers.
	if n := le.Uint32(b[12:]); n != headerSize {
		return bad("header of %d bytes, not %d", n, headerSize)
	}
	if n := le.Uint32(b[16:]); n != PageSize {
		return bad("pages of %d bytes, not %d", n, PageSize)
	}
	n := le.Uint32(b[20:])
	if n == 0 || n > maxSections {
		return bad("%d sections", n)
	}
	h.pages = le.Uint64(b[24:])
	if h.pages == 0 || h.pages > maxPages {
		return bad("%d pages", h.pages)
	}
	h.size = le.Uint64(b[32:])
	if h.size != size {
		return bad("it has %d bytes and should have %d", size, h.size)
	}
	h.created = int64(le.Uint64(b[40:]))
	h.print = fingerprint{
		ino:   le.Uint64(b[48:]),
		mtime: int64(le.Uint64(b[56:])),
		ctime: int64(le.Uint64(b[64:])),
	}
	copy(h.state[:], b[72:])
	copy(h.meta[:], b[104:])
	copy(h.digest[:], b[136:])
	end := uint64(headerSize)
	have := make(map[uint32]bool, n)
	for i := range int(n) {
		e := b[sectionsAt+i*sectionSize:]
		s := section{
			kind:   le.Uint32(e[0:]),
			flags:  le.Uint32(e[4:]),
			offset: le.Uint64(e[8:]),
			length: le.Uint64(e[16:]),
			sum:    le.Uint64(e[24:]),
			record: le.Uint32(e[32:]),
		}
		if s.offset%sectionsAlign != 0 || s.offset < end || s.offset > size || s.length > size-s.offset {
			return bad("section %d (bytes %#x, length %#x) lies outside the file, or on another", i, s.offset, s.length)
		}
		end = s.offset + s.length
		if have[s.kind] {
			return bad("two sections of kind %d", s.kind)
		}
		have[s.kind] = true
		if s.kind == sectionSums {
			if s.record != sumSize || s.length != h.pages*sumSize {
				return bad("%d bytes of checksums for %d pages", s.length, h.pages)
			}
		} else if s.flags&flagCritical != 0 {
			return bad("it needs a program that knows sections of kind %d", s.kind)
		}
		h.sections = append(h.sections, s)
	}
	if !have[sectionSums] {
		return bad("it has no checksums of pages")
	}
	// Bytes without a meaning are zero, or they have one that this program does
	// not know.
	if !bytes.Equal(h.encode(), b) {
		return bad("reserved bytes of the header are not zero")
	}
	return h, nil
}

// digestOf is the digest of the template with these parts.
func digestOf(pages uint64, state, meta [sha256.Size]byte, sums []byte) Digest {
	d := sha256.New()
	d.Write([]byte(digestPrefix))
	d.Write(binary.LittleEndian.AppendUint64(nil, pages))
	d.Write(state[:])
	d.Write(meta[:])
	d.Write(sums)
	return Digest(d.Sum(nil))
}

// An index is an index file, mapped. The mapping outlives the descriptor.
type index struct {
	header
	data     []byte      // the whole file
	sums     []byte      // the section of checksums
	sketches dedup.Table // the section of sketches, if there is one
}

// mapIndex maps and checks the index f. Errors wrap ErrIndex or ErrVersion and
// do not name the file.
func mapIndex(f *os.File) (*index, error) {
	fd := int(f.Fd())
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrIndex, os.NewSyscallError("fstat", err))
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return nil, fmt.Errorf("%w: it is not a regular file", ErrIndex)
	}
	if st.Size < headerSize {
		return nil, fmt.Errorf("%w: %d bytes are less than a header", ErrIndex, st.Size)
	}
	if int64(int(st.Size)) != st.Size {
		return nil, fmt.Errorf("%w: %d bytes are too many", ErrIndex, st.Size)
	}
	data, err := unix.Mmap(fd, 0, int(st.Size), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrIndex, os.NewSyscallError("mmap", err))
	}
	x := &index{data: data}
	var derr error
	err = x.guard(func() {
		// A copy: what has been checked must not change.
		if x.header, derr = decodeHeader(bytes.Clone(data[:headerSize]), uint64(len(data))); derr != nil {
			return
		}
		for _, s := range x.sections {
			b := data[s.offset : s.offset+s.length]
			if s.kind == sectionSketches {
				// See checkSketches.
				if s.record == sketchSize {
					x.sketches = b
				}
				continue
			}
			if xxh3.Hash(b) != s.sum {
				derr = fmt.Errorf("%w: section of kind %d does not match its checksum", ErrIndex, s.kind)
				return
			}
			if s.kind == sectionSums {
				x.sums = b
			}
		}
	})
	if err == nil {
		err = derr
	}
	if err != nil {
		_ = unix.Munmap(data)
		return nil, err
	}
	return x, nil
}

func (x *index) close() error {
	data := x.data
	x.data, x.sums, x.sketches = nil, nil, nil
	return unix.Munmap(data)
}

// guard calls fn, which reads the mapping. If the file has been truncated
// meanwhile, which nothing can prevent, the host answers with SIGBUS: guard
// turns that into an error where the Go runtime would end the process.
func (x *index) guard(fn func()) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer x.caught(&err)
	fn()
	return nil
}

func (x *index) caught(err *error) {
	r := recover()
	if r == nil {
		return
	}
	if e, ok := r.(interface{ Addr() uintptr }); ok && x.contains(e.Addr()) {
		*err = fmt.Errorf("%w: %w while in use", ErrIndex, ErrTruncated)
		return
	}
	panic(r)
}

func (x *index) checkDigest() error {
	var d Digest
	if err := x.guard(func() { d = digestOf(x.pages, x.state, x.meta, x.sums) }); err != nil {
		return err
	}
	if d != x.digest {
		return fmt.Errorf("%w: it does not have the digest it claims", ErrIndex)
	}
	return nil
}

// checkSketches compares the section of sketches, if there is one, with its
// checksum. A sandbox need not: it does not trust them.
func (x *index) checkSketches() error {
	for _, s := range x.sections {
		if s.kind != sectionSketches {
			continue
		}
		var sum uint64
		if err := x.guard(func() { sum = xxh3.Hash(x.data[s.offset : s.offset+s.length]) }); err != nil {
			return err
		}
		if sum != s.sum {
			return fmt.Errorf("%w: the sketches do not match their checksum", ErrIndex)
		}
	}
	return nil
}

// sum is the checksum of page n. It may fault, see guard.
func (x *index) sum(n uint64) uint64 {
	return binary.LittleEndian.Uint64(x.sums[n*sumSize:])
}
