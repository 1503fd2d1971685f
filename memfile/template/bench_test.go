package template

import (
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
)

// What every restore pays: opening a template of 400 MiB that has an index.
func BenchmarkOpen(b *testing.B) {
	dir := b.TempDir()
	writeImage(b, dir, 1, 1)
	// As much metadata as an image of that size has.
	put(b, filepath.Join(dir, StateFile), make([]byte, 1<<20))
	put(b, filepath.Join(dir, MetaFile), make([]byte, 64<<10))
	try(b, os.Truncate(filepath.Join(dir, PagesFile), 400<<20))
	openOK(b, dir)
	for b.Loop() {
		tpl, err := Open(dir, nil)
		if err != nil {
			b.Fatal(err)
		}
		_ = tpl.Close()
	}
}

// The same in the sandbox.
func BenchmarkFromFiles(b *testing.B) {
	dir := b.TempDir()
	writeImage(b, dir, 1, 1)
	try(b, os.Truncate(filepath.Join(dir, PagesFile), 400<<20))
	tpl, _ := openOK(b, dir)
	for b.Loop() {
		p, x := tpl.Files()
		v, err := FromFiles(dup(b, p), dup(b, x))
		if err != nil {
			b.Fatal(err)
		}
		_ = v.Close()
	}
}

// What the first Open pays, and one after a copy.
func BenchmarkBuild(b *testing.B) {
	const pages = 256 << 20 / PageSize
	dir := b.TempDir()
	writeImage(b, dir, pages, 1)
	b.SetBytes(pages * PageSize)
	for b.Loop() {
		try(b, os.RemoveAll(filepath.Join(dir, IndexFile)))
		tpl, err := Open(dir, nil)
		if err != nil {
			b.Fatal(err)
		}
		_ = tpl.Close()
	}
}

func BenchmarkReadPages(b *testing.B) {
	const pages = 64 << 20 / PageSize
	dir := b.TempDir()
	writeImage(b, dir, pages, 1)
	tpl, _ := openOK(b, dir)
	v := view(b, tpl)
	for _, c := range []struct {
		name  string
		pages uint64
	}{{"4KiB", 1}, {"64KiB", 16}} {
		b.Run(c.name, func(b *testing.B) {
			dst := make([]byte, c.pages*PageSize)
			b.SetBytes(int64(len(dst)))
			for b.Loop() {
				if err := v.ReadPages(dst, rand.N(pages-c.pages)); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkSum(b *testing.B) {
	tpl, _ := openOK(b, indexed(b))
	v := view(b, tpl)
	for b.Loop() {
		v.Sum(7)
	}
}
