// Command weave produces the patched gVisor that runsc-agentzip is built from.
//
// It vendors the gVisor module pinned in go.mod into vendor/ (generated and
// git-ignored), applies the edits listed in hooks.go, and copies the files
// under _overlay/ into the vendored packages. No gVisor source is kept in this
// repository: an edit names a declaration and one line inside it (the anchor)
// and holds only our own text.
//
// weave is idempotent: a stamp in vendor/ records what the tree was made from,
// and a matching stamp ends the run at once. When an anchor is missing or no
// longer unique, because a new version of the module moved it, weave stops,
// names the file, the declaration and the anchor, and leaves no stamp behind,
// so the half-made tree is never taken for a good one.
//
// Usage, from anywhere inside the repository:
//
//	go run ./tools/weave          # make vendor/ current
//	go run ./tools/weave -check   # only say whether every anchor is found
package main

import (
	"bytes"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"sort"
	"strings"
	"time"
)

// module is the import path of what is patched.
const module = "gvisor.dev/gvisor"

// stampName is the file in vendor/ that records what the tree was made from.
const stampName = ".weave-stamp"

//go:embed all:_overlay *.go
var self embed.FS

func main() {
	check := flag.Bool("check", false, "check that every anchor is found, write nothing")
	force := flag.Bool("force", false, "make vendor/ again even when it is current")
	flag.Parse()
	if err := run(*check, *force); err != nil {
		fmt.Fprintf(os.Stderr, "weave: %v\n", err)
		os.Exit(1)
	}
}

func run(check, force bool) error {
	root, err := repoRoot()
	if err != nil {
		return err
	}
	vendor := filepath.Join(root, "vendor")
	want, err := stamp(root)
	if err != nil {
		return err
	}
	have, _ := os.ReadFile(filepath.Join(vendor, stampName))
	if !force && !check && string(have) == want {
		fmt.Println("weave: vendor/ is current")
		return nil
	}
	if check {
		dir, err := moduleDir(root)
		if err != nil {
			return err
		}
		n, err := apply(dir, false)
		if err != nil {
			return err
		}
		fmt.Printf("weave: all %d anchors found in %s\n", n, filepath.Base(dir))
		return nil
	}

	start := time.Now()
	// The stamp goes first: whatever fails below, the next run starts over.
	if err := os.RemoveAll(filepath.Join(vendor, stampName)); err != nil {
		return err
	}
	cmd := exec.Command("go", "mod", "vendor")
	cmd.Dir = root
	cmd.Env = append(os.Environ(), "GOFLAGS=", "GOWORK=off")
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("go mod vendor in %s: %w (is the Go module proxy reachable?)", root, err)
	}
	tree := filepath.Join(vendor, filepath.FromSlash(module))
	n, err := apply(tree, true)
	if err != nil {
		return err
	}
	m, err := overlay(tree)
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(vendor, stampName), []byte(want), 0o644); err != nil {
		return err
	}
	fmt.Printf("weave: vendored %s, %d edits, %d files added (%.1f s)\n", module, n, m, time.Since(start).Seconds())
	return nil
}

// apply makes every edit below dir and returns how many there are. With write
// false it only looks for the anchors.
func apply(dir string, write bool) (int, error) {
	byFile := map[string][]Edit{}
	for _, e := range edits {
		byFile[e.File] = append(byFile[e.File], e)
	}
	files := make([]string, 0, len(byFile))
	for f := range byFile {
		files = append(files, f)
	}
	sort.Strings(files)
	var errs []error
	for _, f := range files {
		path := filepath.Join(dir, filepath.FromSlash(f))
		src, err := os.ReadFile(path)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w: the file moved; find its declarations again and update tools/weave/hooks.go", f, err))
			continue
		}
		out, err := applyFile(f, src, byFile[f])
		if err != nil {
			errs = append(errs, err)
			continue
		}
		if !write {
			continue
		}
		// go mod vendor copies read-only files from the module cache.
		if err := os.Remove(path); err != nil {
			return 0, err
		}
		if err := os.WriteFile(path, out, 0o644); err != nil {
			return 0, err
		}
	}
	return len(edits), errors.Join(errs...)
}

// overlay copies our files into the vendored packages.
func overlay(tree string) (int, error) {
	n := 0
	err := fs.WalkDir(self, "_overlay", func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b, err := self.ReadFile(p)
		if err != nil {
			return err
		}
		dst := filepath.Join(tree, filepath.FromSlash(strings.TrimPrefix(p, "_overlay/")))
		if _, err := os.Stat(filepath.Dir(dst)); err != nil {
			return fmt.Errorf("overlay file %s: package %s is not in the vendored tree: %w", p, filepath.Dir(dst), err)
		}
		if _, err := os.Stat(dst); err == nil {
			return fmt.Errorf("overlay file %s would replace a file of %s", p, module)
		}
		n++
		return os.WriteFile(dst, b, 0o644)
	})
	return n, err
}

// stamp hashes all that vendor/ is made from: this program, its overlay files,
// go.mod and go.sum, and the set of packages the repository imports (go mod
// vendor copies only what is imported).
func stamp(root string) (string, error) {
	h := sha256.New()
	err := fs.WalkDir(self, ".", func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b, err := self.ReadFile(p)
		if err != nil {
			return err
		}
		fmt.Fprintf(h, "%s %d\n", p, len(b))
		h.Write(b)
		return nil
	})
	if err != nil {
		return "", err
	}
	for _, f := range []string{"go.mod", "go.sum"} {
		b, err := os.ReadFile(filepath.Join(root, f))
		if err != nil {
			return "", err
		}
		h.Write(b)
	}
	imports, err := importedPackages(root)
	if err != nil {
		return "", err
	}
	for _, p := range imports {
		fmt.Fprintln(h, p)
	}
	return hex.EncodeToString(h.Sum(nil)) + "\n", nil
}

func repoRoot() (string, error) {
	out, err := exec.Command("go", "env", "GOMOD").Output()
	if err != nil {
		return "", fmt.Errorf("go env GOMOD: %w", err)
	}
	mod := strings.TrimSpace(string(out))
	if mod == "" || mod == os.DevNull {
		return "", errors.New("not inside the runsc-agentzip repository: no go.mod found")
	}
	return filepath.Dir(mod), nil
}

func moduleDir(root string) (string, error) {
	cmd := exec.Command("go", "list", "-mod=mod", "-m", "-f", "{{.Dir}}", module)
	cmd.Dir = root
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("go list -m %s: %v: %s", module, err, stderr.Bytes())
	}
	dir := strings.TrimSpace(string(out))
	if dir == "" {
		return "", fmt.Errorf("%s is not in the module cache: run go mod download", module)
	}
	return dir, nil
}
