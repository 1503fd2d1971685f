// Package template holds the end-to-end tests of templates: sandboxes that are
// restored from an uncompressed checkpoint without copying it.
//
// A clone maps the checkpoint's pages read-only into its applications until
// they are written to. The tests are about what can go wrong with that: a
// mapping of the template that stays after the page was written to elsewhere, a
// write that reaches a sibling or the image, a page that is not what it was when
// the checkpoint was taken, an image that is not what it was when it was made a
// template.
//
// They run real sandboxes through two runscs of the same version:
//
//	go test ./test/template -runtime=bin/runsc-agentzip -stock=bin/runsc-stock
//
// Root, gcc and libc6-dev are needed. -long adds what takes too long for every
// change. The guest programs check themselves, say FAIL and why, and run on a
// plain Linux too; those that test/integrity has are taken from there.
//
// # Benchmarks
//
//	go test ./test/template -run '^$' -bench . -benchtime 5x -timeout 1h
//
// They restore N clones with the stock runsc and with the one under test in
// turn, as often as -benchtime says, print medians and spreads as a table, and
// write them to the file that -benchjson names.
package template
