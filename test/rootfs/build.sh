#!/bin/sh
# Builds a Debian root filesystem that holds everything the integrity tests need,
# for machines whose own root lacks it or should not be used:
#
#	test/rootfs/build.sh [DIR]          (default: out/rootfs-integrity)
#	go test ./test/integrity -rootfs=out/rootfs-integrity
#
# A folder that is complete already is left alone. The mirror is the one that
# this machine's own apt uses; MIRROR and SUITE override it.
set -eu

cd "$(dirname "$0")/../.."
dir=${1:-out/rootfs-integrity}
suite=${SUITE:-$(. /etc/os-release && echo "${VERSION_CODENAME:-bookworm}")}
# The name of the package with CPython's tests has the version in it.
pytests=$(apt-cache pkgnames libpython3. | grep -x 'libpython3\.[0-9]*-testsuite' | sort -V | head -n 1)
packages=stress-ng,memtester,redis-server,redis-tools,sqlite3,git,python3,${pytests:-libpython3.11-testsuite},gcc,g++,make,libc6-dev,procps,util-linux

# mirror prints the first http source of apt, in either of its formats.
mirror() {
	cat /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null |
		sed -n -e 's/^deb \(\[[^]]*\] *\)\{0,1\}\(https\{0,1\}:[^ ]*\).*/\2/p' \
			-e 's/^URIs: *\(https\{0,1\}:[^ ]*\).*/\1/p' | head -n 1
}

if [ "$(cat "$dir/.complete" 2>/dev/null)" = "$suite $packages" ]; then
	echo "$dir is complete"
	exit 0
fi
if [ "$(id -u)" != 0 ]; then
	echo "build.sh: debootstrap needs root: run it with sudo" >&2
	exit 1
fi
if ! command -v debootstrap >/dev/null; then
	echo "build.sh: debootstrap is missing: apt-get install debootstrap" >&2
	exit 1
fi
MIRROR=${MIRROR:-$(mirror)}
if [ -z "$MIRROR" ]; then
	echo "build.sh: apt has no http source here: set MIRROR" >&2
	exit 1
fi

# Only a folder that is ours is ever removed.
if [ -e "$dir" ] && [ ! -e "$dir/.complete" ]; then
	echo "build.sh: $dir exists and was not made by this script" >&2
	exit 1
fi
new=$dir.new
cleanup() {
	# debootstrap mounts these and may be interrupted before it unmounts them.
	for m in proc sys dev/pts dev; do
		umount "$new/$m" 2>/dev/null || true
	done
	rm -rf --one-file-system "$new"
}
trap cleanup EXIT
trap 'exit 1' INT TERM HUP
cleanup
mkdir -p "$(dirname "$dir")"
debootstrap --variant=minbase --include="$packages" "$suite" "$new" "$MIRROR"
rm -rf "$new"/var/cache/apt/archives/*.deb "$new"/var/lib/apt/lists/*
echo "$suite $packages" >"$new/.complete"
rm -rf --one-file-system "$dir"
mv "$new" "$dir"
echo "$dir is complete"
