package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"runsc-agentzip/tools/agentbench/report"
)

const mergeUsage = `usage: agentbench merge [flags] A.json B.json ...

Makes one report of several by agentbench run: of the same systems on the same
machine, run by the same binaries, with other workloads or numbers of clones.

flags:
`

func runMerge(_ context.Context, args []string, stdout, stderr io.Writer) error {
	fs := flag.NewFlagSet("merge", flag.ContinueOnError)
	fs.SetOutput(stderr)
	fs.Usage = func() {
		fmt.Fprint(stderr, mergeUsage)
		fs.PrintDefaults()
	}
	json := fs.String("json", "out/merged.json", "write the report to this `file`; none if empty")
	html := fs.String("html", "out/merged.html", "write a page with plots to this `file`; none if empty")
	files, err := parseFiles(fs, args)
	if err != nil {
		return err
	}
	if len(files) < 2 {
		fmt.Fprintf(stderr, "agentbench merge: it takes two reports or more, not %d\n", len(files))
		return errUsage
	}
	var reports []*report.Report
	for _, f := range files {
		r, err := report.Read(f)
		if err != nil {
			return err
		}
		reports = append(reports, r)
	}
	m, err := report.Merge(reports...)
	if err != nil {
		return err
	}
	var errs []error
	for _, f := range []struct {
		path  string
		write func(string) error
	}{{*json, m.Write}, {*html, m.WriteHTML}} {
		if f.path == "" {
			continue
		}
		if err := os.MkdirAll(filepath.Dir(f.path), 0o755); err != nil {
			errs = append(errs, err)
			continue
		}
		errs = append(errs, f.write(f.path))
	}
	return errors.Join(append(errs, m.Print(stdout, columns(stdout)))...)
}

// parseFiles parses a command's arguments: files, and flags that may also follow
// them, where people put them.
func parseFiles(fs *flag.FlagSet, args []string) (files []string, err error) {
	for {
		if err := fs.Parse(args); err != nil {
			if errors.Is(err, flag.ErrHelp) {
				return nil, err
			}
			return nil, errUsage
		}
		if fs.NArg() == 0 {
			return files, nil
		}
		files = append(files, fs.Arg(0))
		args = fs.Args()[1:]
	}
}
