package main

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// aptSource is one package archive the machine itself installs from.
type aptSource struct {
	uri        string
	suites     []string
	components []string
	// signedBy is a keyring file, if the entry names one.
	signedBy string
}

// distribution reads the code name of the running system from os-release.
func distribution(osRelease string) (id, codename string) {
	for line := range strings.Lines(osRelease) {
		k, v, _ := strings.Cut(strings.TrimSpace(line), "=")
		v = strings.Trim(v, `"'`)
		switch k {
		case "ID":
			id = v
		case "VERSION_CODENAME":
			codename = v
		}
	}
	return id, codename
}

// findMirror returns the archive that this machine's own apt configuration
// uses for the release named codename: the one place known to be reachable
// and wanted here.
func findMirror(aptDir, codename string) (aptSource, error) {
	var files []string
	files = append(files, filepath.Join(aptDir, "sources.list"))
	for _, pattern := range []string{"*.list", "*.sources"} {
		m, _ := filepath.Glob(filepath.Join(aptDir, "sources.list.d", pattern))
		files = append(files, m...)
	}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			continue
		}
		parse := parseOneLine
		if strings.HasSuffix(f, ".sources") {
			parse = parseDeb822
		}
		for _, s := range parse(b) {
			if slices.Contains(s.suites, codename) && slices.Contains(s.components, "main") && usableURI(s.uri) {
				return s, nil
			}
		}
	}
	return aptSource{}, fmt.Errorf("no http archive for %q with component main in %s: give one with --mirror", codename, aptDir)
}

// usableURI reports whether debootstrap can fetch from it.
func usableURI(uri string) bool {
	for _, scheme := range []string{"http://", "https://", "file:", "ftp://"} {
		if strings.HasPrefix(uri, scheme) {
			return true
		}
	}
	return false
}

// parseOneLine parses the classic format: deb [opts] URI SUITE COMPONENT...
func parseOneLine(b []byte) []aptSource {
	var out []aptSource
	sc := bufio.NewScanner(bytes.NewReader(b))
	for sc.Scan() {
		line, _, _ := strings.Cut(sc.Text(), "#")
		f := strings.Fields(line)
		if len(f) == 0 || f[0] != "deb" {
			continue
		}
		f = f[1:]
		var s aptSource
		if len(f) > 0 && strings.HasPrefix(f[0], "[") {
			end := slices.IndexFunc(f, func(w string) bool { return strings.HasSuffix(w, "]") })
			if end < 0 {
				continue
			}
			for _, o := range f[:end+1] {
				if v, ok := strings.CutPrefix(strings.Trim(o, "[]"), "signed-by="); ok && strings.HasPrefix(v, "/") {
					s.signedBy = v
				}
			}
			f = f[end+1:]
		}
		if len(f) < 3 {
			continue
		}
		s.uri, s.suites, s.components = f[0], f[1:2], f[2:]
		out = append(out, s)
	}
	return out
}

// parseDeb822 parses the stanza format of *.sources files.
func parseDeb822(b []byte) []aptSource {
	var out []aptSource
	field := make(map[string]string)
	last := ""
	flush := func() {
		defer clear(field)
		if strings.EqualFold(strings.TrimSpace(field["enabled"]), "no") {
			return
		}
		if !slices.Contains(strings.Fields(field["types"]), "deb") {
			return
		}
		for _, uri := range strings.Fields(field["uris"]) {
			s := aptSource{
				uri:        uri,
				suites:     strings.Fields(field["suites"]),
				components: strings.Fields(field["components"]),
			}
			// The field may also hold a whole key; only a file is of use.
			if k := strings.TrimSpace(field["signed-by"]); strings.HasPrefix(k, "/") && !strings.ContainsAny(k, " \n") {
				s.signedBy = k
			}
			out = append(out, s)
		}
	}
	for line := range strings.Lines(string(b)) {
		line = strings.TrimRight(line, "\r\n")
		switch {
		case strings.TrimSpace(line) == "":
			flush()
			last = ""
		case strings.HasPrefix(line, "#"):
		case line[0] == ' ' || line[0] == '\t':
			if last != "" {
				field[last] += "\n" + strings.TrimSpace(line)
			}
		default:
			k, v, ok := strings.Cut(line, ":")
			if !ok {
				continue
			}
			last = strings.ToLower(k)
			field[last] = strings.TrimSpace(v)
		}
	}
	flush()
	return out
}
