#!/bin/bash
# usage: [WEAVE=1] gobuild.sh OUTPUT PACKAGE [go build's flags]
#
# Builds a static binary from the source tree with `make build`'s settings, which
# are what share its build cache. WEAVE=1 makes vendor/ current first; only one
# target may ask for it, since two at once would write the same files.
set -eu
out=$PWD/$1
package=$2
shift 2
cd "$(dirname "$(readlink -f go.mod)")"
if [ -n "${WEAVE:-}" ]; then
	go run -mod=readonly ./tools/weave
fi
version=$(awk '$1 == "gvisor.dev/gvisor" || $2 == "gvisor.dev/gvisor" { print $NF; exit }' go.mod)
exec env CGO_ENABLED=0 go build -buildvcs=false -trimpath \
	-ldflags "-X gvisor.dev/gvisor/runsc/version.version=$version" -o "$out" "$@" "$package"
