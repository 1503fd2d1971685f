package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"runsc-agentzip/tools/agentbench/report"
)

const compareUsage = `usage: agentbench compare [flags] OLD.json NEW.json

Says what got better or worse from one report of agentbench run to another,
beyond what chance explains.

flags:
`

func runCompare(_ context.Context, args []string, stdout, stderr io.Writer) error {
	fs := flag.NewFlagSet("compare", flag.ContinueOnError)
	fs.SetOutput(stderr)
	fs.Usage = func() {
		fmt.Fprint(stderr, compareUsage)
		fs.PrintDefaults()
	}
	json := fs.String("json", "", "also write the comparison to this `file`")
	files, err := parseFiles(fs, args)
	if err != nil {
		return err
	}
	if len(files) != 2 {
		fmt.Fprintf(stderr, "agentbench compare: it takes two reports, not %d\n", len(files))
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
	c := report.Compare(reports[0], reports[1])
	if *json != "" {
		if err := os.MkdirAll(filepath.Dir(*json), 0o755); err != nil {
			return err
		}
		if err := c.Write(*json); err != nil {
			return err
		}
	}
	return c.Print(stdout, columns(stdout))
}
