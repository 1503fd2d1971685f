package template

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/zeebo/xxh3"
)

// FuzzIndex gives arbitrary bytes to what reads an index in the sandbox. Inputs
// are what matters of a file: the header up to the entries of the section table,
// and how many zeroes follow it. With fix, the header's checksum fits, which
// otherwise keeps a fuzzer out.
func FuzzIndex(f *testing.F) {
	const used = sectionsAt + 4*sectionSize
	dir := f.TempDir()
	writeImage(f, dir, 3, 1)
	openOK(f, dir)
	good := get(f, filepath.Join(dir, IndexFile))
	h, err := decodeHeader(good, uint64(len(good)))
	try(f, err)
	f.Add(h.encode()[:used], uint16(h.size-headerSize), true)
	more := section{kind: 99, offset: 3 * headerSize, length: 8, record: 4}
	h.sections, h.size = append(h.sections, more), more.offset+more.length
	f.Add(h.encode()[:used], uint16(h.size-headerSize), true)
	f.Add(good[:used], uint16(3*sumSize), false)
	f.Add(good[:10], uint16(0), true)

	pages, err := os.Create(filepath.Join(f.TempDir(), "pages"))
	try(f, err)
	f.Cleanup(func() { _ = pages.Close() })
	f.Fuzz(func(t *testing.T, head []byte, zeroes uint16, fix bool) {
		b := make([]byte, headerSize+int(zeroes))
		copy(b[:headerSize], head)
		if fix {
			rehash(b)
		}
		h, err := decodeHeader(b, uint64(len(b)))
		if err != nil {
			if !errors.Is(err, ErrIndex) && !errors.Is(err, ErrVersion) {
				t.Fatalf("untyped error: %v", err)
			}
			return
		}
		if !bytes.Equal(h.encode(), b[:headerSize]) {
			t.Fatal("the header encodes to something else")
		}
		// A checksum cannot be guessed; do not stop at it.
		for i, s := range h.sections {
			h.sections[i].sum = xxh3.Hash(b[s.offset : s.offset+s.length])
		}
		copy(b, h.encode())
		try(t, pages.Truncate(int64(h.pages*PageSize)))
		x, err := inMemory(b)
		try(t, err)
		v, err := FromFiles(dup(t, pages), x)
		if err != nil {
			t.Fatal(err)
		}
		defer v.Close()
		if s := v.Sum(0) | v.Sum(v.Pages()-1); s != 0 {
			t.Fatalf("checksum %#x from nowhere", s)
		}
		check(t, v.ReadPages(make([]byte, PageSize), v.Pages()-1), ErrModified)
	})
}
