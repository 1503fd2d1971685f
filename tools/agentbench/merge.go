package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"

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
	if err := fs.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return err
		}
		return errUsage
	}
	if fs.NArg() < 2 {
		fmt.Fprintf(stderr, "agentbench merge: it takes two reports or more, not %d\n", fs.NArg())
		return errUsage
	}
	var reports []*report.Report
	for _, f := range fs.Args() {
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
	if *json != "" {
		if err := m.Write(*json); err != nil {
			return err
		}
	}
	if *html != "" {
		if err := m.WriteHTML(*html); err != nil {
			return err
		}
	}
	return m.Print(stdout, columns(stdout))
}
