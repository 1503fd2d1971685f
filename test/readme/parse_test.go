package readme

import (
	"fmt"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// A command is one that a reader would type, or a piece of a JSON file or of a Go
// program.
type command struct {
	// line is where it begins, from 1.
	line int
	// text has neither indentation nor comments; JSON and Go keep their lines.
	text string
}

// comment is one behind a command or alone on its line.
var comment = regexp.MustCompile(`(^|\s+)#(\s.*)?$`)

// commands returns what the code blocks of a Markdown text hold, indented or fenced. A
// blank line ends what is one command or one piece. Go is what a fence says is Go.
func commands(markdown string) (all []command) {
	type block struct {
		line   int
		lines  []string
		golang bool
	}
	var blocks []block
	in := false
	fence, golang := "", false
	blank := true
	for i, line := range strings.Split(markdown, "\n") {
		trimmed := strings.TrimSpace(line)
		add := func(text string) {
			if !in || blank {
				blocks = append(blocks, block{line: i + 1, golang: golang && fence != ""})
				in = true
			}
			b := &blocks[len(blocks)-1]
			b.lines = append(b.lines, text)
		}
		switch {
		case fence != "" && trimmed == fence:
			fence, in = "", false
		case fence != "" && trimmed != "":
			add(line)
		case strings.HasPrefix(trimmed, "```") || strings.HasPrefix(trimmed, "~~~"):
			fence, in, golang = trimmed[:3], false, trimmed[3:] == "go"
		case trimmed == "":
		case strings.HasPrefix(line, "    ") && (in || blank):
			add(line[4:])
		default:
			in = false
		}
		blank = trimmed == ""
	}
	for _, b := range blocks {
		text := strings.TrimSpace(strings.Join(b.lines, "\n"))
		if b.golang || strings.HasPrefix(text, "{") || strings.HasPrefix(text, `"`) {
			all = append(all, command{b.line, text})
			continue
		}
		start, joined := 0, ""
		for i, line := range b.lines {
			line = strings.TrimSpace(comment.ReplaceAllString(line, ""))
			if joined == "" {
				start = b.line + i
			}
			if head, more := strings.CutSuffix(line, `\`); more {
				joined += strings.TrimSpace(head) + " "
				continue
			}
			if joined = strings.TrimSpace(joined + line); joined != "" {
				all = append(all, command{start, joined})
			}
			joined = ""
		}
		if joined = strings.TrimSpace(joined); joined != "" {
			all = append(all, command{start, joined})
		}
	}
	return all
}

func TestCommands(t *testing.T) {
	require.Equal(t, []command{
		{3, "make demo"},
		{5, "make test"},
		{9, "{\n  \"a\": 1\n}"},
		{17, "a --b c"},
		{20, "echo '#1' a#b"},
		{23, "in --a fence"},
		{27, `"c": ["d"]`},
		{29, "after --json"},
		{32, "err = f(1)\n\tg() // with a comment"},
	}, commands(strings.Join([]string{
		"# Title",
		"",
		"    make demo    # build it",
		"                 # and run",
		"    make test",
		"",
		"text",
		"",
		"    {",
		"      \"a\": 1",
		"    }",
		"",
		"text",
		"    of a paragraph",
		"- item",
		"",
		"    a \\",
		"      --b c   # both",
		"",
		"    echo '#1' a#b",
		"",
		"```sh",
		"in --a fence",
		"```",
		"text",
		"",
		"    \"c\": [\"d\"]",
		"",
		"    after --json",
		"",
		"```go",
		"err = f(1)",
		"\tg() // with a comment",
		"```",
	}, "\n")))
}

func TestCommandsOfAnything(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		lines := rapid.SliceOf(rapid.SampledFrom([]string{"", "    a", "    b \\", "        c", "text", "- d", "```", "```go", "    # e", "    {", "    \"f\"", "~~~", "\t"})).Draw(t, "lines")
		last := 0
		for _, c := range commands(strings.Join(lines, "\n")) {
			if c.line <= last || c.line > len(lines) || c.text == "" || strings.TrimSpace(c.text) != c.text {
				t.Fatal(fmt.Sprintf("%+v after line %d of %q", c, last, lines))
			}
			last = c.line
		}
	})
}
