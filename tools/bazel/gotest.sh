#!/bin/bash
# usage: gotest.sh PACKAGE [go test's flags]
#
# Runs go test in the source tree. bazel starts it in a tree of links to its
# inputs, in which go.mod leads back to the source.
set -eu
cd "$(dirname "$(readlink -f go.mod)")"
# bazel decides what is up to date, hence -count=1; its time-out is a hard kill,
# so go's own has to come first, for the stacks it prints.
exec go test -count=1 -buildvcs=false \
	${TEST_TIMEOUT:+-timeout=$((TEST_TIMEOUT - 5))s} \
	${TESTBRIDGE_TEST_ONLY:+-run="$TESTBRIDGE_TEST_ONLY"} \
	"$@"
