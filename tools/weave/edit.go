package main

import (
	"errors"
	"fmt"
	"go/ast"
	"go/format"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"sort"
	"strings"
)

// Where says how an Edit's text relates to the line of its anchor.
type Where int

const (
	// Before inserts the text as lines of its own before the anchor's line.
	Before Where = iota
	// After inserts it after the anchor's line.
	After
	// Replace puts the text in place of the anchor itself, not of its line.
	Replace
)

// An Edit is one change to one declaration of gVisor.
type Edit struct {
	// File is the path inside the module.
	File string
	// Decl names the declaration: "New", "MemoryFile.DecRef" or
	// "type MemoryFile".
	Decl string
	// Anchor is a part of exactly one line of the declaration.
	Anchor string
	Where  Where
	// Text is what is inserted.
	Text string
}

// An anchorError tells what moved.
type anchorError struct {
	e     Edit
	cause string
}

func (a *anchorError) Error() string {
	return fmt.Sprintf("%s: %s: %s: look at what became of it in this version of %s and update tools/weave/hooks.go",
		a.e.File, a.e.Decl, a.cause, module)
}

// applyFile returns src with all edits made. Edits do not see one another's
// text: all anchors are looked up in src.
func applyFile(name string, src []byte, edits []Edit) ([]byte, error) {
	fset := token.NewFileSet()
	file, err := parser.ParseFile(fset, name, src, parser.ParseComments)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	type splice struct {
		off, end int
		text     string
		seq      int
	}
	var splices []splice
	var errs []error
	for i, e := range edits {
		lo, hi, ok := declRange(fset, file, e.Decl)
		if !ok {
			errs = append(errs, &anchorError{e, "declaration not found"})
			continue
		}
		body := string(src[lo:hi])
		switch n := strings.Count(body, e.Anchor); n {
		case 1:
		case 0:
			errs = append(errs, &anchorError{e, fmt.Sprintf("anchor %q not found", e.Anchor)})
			continue
		default:
			errs = append(errs, &anchorError{e, fmt.Sprintf("anchor %q found %d times, want 1", e.Anchor, n)})
			continue
		}
		at := lo + strings.Index(body, e.Anchor)
		text := strings.Trim(e.Text, "\n")
		switch e.Where {
		case Before:
			off := strings.LastIndexByte(string(src[:at]), '\n') + 1
			splices = append(splices, splice{off, off, text + "\n", i})
		case After:
			off := at + strings.IndexByte(string(src[at:]), '\n') + 1
			splices = append(splices, splice{off, off, text + "\n", i})
		case Replace:
			splices = append(splices, splice{at, at + len(e.Anchor), text, i})
		}
	}
	if len(errs) != 0 {
		return nil, errors.Join(errs...)
	}
	sort.Slice(splices, func(i, j int) bool {
		if splices[i].off != splices[j].off {
			return splices[i].off < splices[j].off
		}
		return splices[i].seq < splices[j].seq
	})
	var out strings.Builder
	pos := 0
	for _, s := range splices {
		if s.off < pos {
			return nil, fmt.Errorf("%s: two edits overlap at byte %d", name, s.off)
		}
		out.Write(src[pos:s.off])
		out.WriteString(s.text)
		pos = s.end
	}
	out.Write(src[pos:])
	fmted, err := format.Source([]byte(out.String()))
	if err != nil {
		return nil, fmt.Errorf("%s: an edit left invalid Go: %w", name, err)
	}
	return fmted, nil
}

// declRange returns the byte range of a declaration.
func declRange(fset *token.FileSet, file *ast.File, name string) (lo, hi int, ok bool) {
	off := func(p token.Pos) int { return fset.Position(p).Offset }
	if typ, isType := strings.CutPrefix(name, "type "); isType {
		for _, d := range file.Decls {
			g, ok := d.(*ast.GenDecl)
			if !ok || g.Tok != token.TYPE {
				continue
			}
			for _, s := range g.Specs {
				if ts := s.(*ast.TypeSpec); ts.Name.Name == typ {
					return off(g.Pos()), off(g.End()), true
				}
			}
		}
		return 0, 0, false
	}
	recv, fn, isMethod := strings.Cut(name, ".")
	if !isMethod {
		recv, fn = "", name
	}
	for _, d := range file.Decls {
		f, ok := d.(*ast.FuncDecl)
		if !ok || f.Name.Name != fn || receiver(f) != recv {
			continue
		}
		return off(f.Pos()), off(f.End()), true
	}
	return 0, 0, false
}

func receiver(f *ast.FuncDecl) string {
	if f.Recv == nil || len(f.Recv.List) == 0 {
		return ""
	}
	t := f.Recv.List[0].Type
	if s, ok := t.(*ast.StarExpr); ok {
		t = s.X
	}
	if id, ok := t.(*ast.Ident); ok {
		return id.Name
	}
	return ""
}

// importedPackages lists the packages outside this module and the standard
// library that the repository's Go files import, tests included.
func importedPackages(root string) ([]string, error) {
	seen := map[string]bool{}
	err := filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if n := d.Name(); p != root && (n == "vendor" || n == "bin" || n == "out" || n[0] == '.' || n[0] == '_' || strings.HasPrefix(n, "bazel-")) {
				return filepath.SkipDir
			}
			return nil
		}
		if filepath.Ext(p) != ".go" {
			return nil
		}
		f, err := parser.ParseFile(token.NewFileSet(), p, nil, parser.ImportsOnly)
		if err != nil {
			return err
		}
		for _, im := range f.Imports {
			if path := strings.Trim(im.Path.Value, `"`); strings.Contains(strings.SplitN(path, "/", 2)[0], ".") {
				seen[path] = true
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	out := make([]string, 0, len(seen))
	for p := range seen {
		out = append(out, p)
	}
	sort.Strings(out)
	return out, nil
}
