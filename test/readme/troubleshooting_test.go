package readme

import (
	"fmt"
	"go/scanner"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// literals returns the texts of all string literals of the Go files below the folders,
// one a line.
func literals(t *testing.T, dirs ...string) string {
	t.Helper()
	var b strings.Builder
	for _, dir := range dirs {
		require.NoError(t, filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
			if err != nil || e.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			src, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			fset := token.NewFileSet()
			var s scanner.Scanner
			s.Init(fset.AddFile(path, -1, len(src)), src, nil, 0)
			for {
				_, tok, lit := s.Scan()
				if tok == token.EOF {
					return nil
				}
				if tok != token.STRING {
					continue
				}
				text, err := strconv.Unquote(lit)
				if err != nil {
					return fmt.Errorf("%s: %q: %w", path, lit, err)
				}
				b.WriteString(text + "\n")
			}
		}))
	}
	return b.String()
}

// quoted is a message on the page, on a line of its own.
var quoted = regexp.MustCompile("(?m)^> `(.*)`$")

// TestTroubleshooting compares runsc-agentzip/TROUBLESHOOTING.md with the code: each
// message that it quotes, each flag and each command that it names is there.
func TestTroubleshooting(t *testing.T) {
	top := repository(t)
	content, err := os.ReadFile(filepath.Join(top, "runsc-agentzip/TROUBLESHOOTING.md"))
	require.NoError(t, err)
	page := string(content)

	var dirs []string
	// gVisor's own messages are some of what a user gets.
	for _, dir := range []string{"memfile", "pkg", "runsc-agentzip", "tools/weave/_overlay", "vendor/gvisor.dev/gvisor/runsc/boot"} {
		dirs = append(dirs, filepath.Join(top, dir))
	}
	code := literals(t, dirs...)
	// A verb stands for what varies.
	code = regexp.MustCompile(`%[+#.0-9]*[a-zA-Z]`).ReplaceAllString(code, "...")

	messages := quoted.FindAllStringSubmatch(page, -1)
	require.Greater(t, len(messages), 40)
	require.Equal(t, strings.Count(page, "\n> "), len(messages), "a quotation is one message in backquotes on one line")
	for _, m := range messages {
		// Errors are chains of texts of several places: each piece between what varies
		// and the colons of a chain has to be in one.
		for part := range strings.SplitSeq(m[1], "...") {
			for piece := range strings.SplitSeq(part, ": ") {
				piece = strings.Trim(piece, " :;,()\"")
				if piece != "" && !strings.Contains(code, piece) {
					t.Errorf("TROUBLESHOOTING.md quotes %q, and no message has %q in it", m[1], piece)
				}
			}
		}
	}

	for _, flag := range regexp.MustCompile(`--?(agentzip[a-z-]*[a-z])`).FindAllStringSubmatch(page, -1) {
		if flag[1] != "agentzip" && !strings.Contains(code, "\n"+flag[1]+"\n") {
			t.Errorf("TROUBLESHOOTING.md names --%s, which is no flag", flag[1])
		}
	}
	for _, command := range regexp.MustCompile(`[^-a-z]agentzip ((?:template |pool )?[a-z]+)\b`).FindAllStringSubmatch(page, -1) {
		for word := range strings.FieldsSeq(command[1]) {
			if !strings.Contains(code, "\n"+word+"\n") {
				t.Errorf("TROUBLESHOOTING.md names the command %q, and %q is none", command[0], word)
			}
		}
	}
	// The links in the page's own table lead to headings.
	for _, link := range regexp.MustCompile(`\]\(#([^)]*)\)`).FindAllStringSubmatch(page, -1) {
		found := false
		for _, h := range regexp.MustCompile(`(?m)^## (.*)$`).FindAllStringSubmatch(page, -1) {
			found = found || strings.ReplaceAll(strings.ToLower(h[1]), " ", "-") == link[1]
		}
		require.True(t, found, "no heading for #%s", link[1])
	}
}
