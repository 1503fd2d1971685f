#!/bin/sh
# The loop of a scheduler of agents' sandboxes, in a shell: make a template, restore
# clones of it, let each take a step and wait for its model, see what they cost
# meanwhile, let them go on, fork one, delete all. pkg/client is the same for Go.
#
#	scheduler.sh [ROOTFS]
#
# ROOTFS is a folder with a root file system, of which a shell, cat, seq and wc are
# needed; the host's own (/) by default. Guests write to memory, never to it. As
# root, with a POSIX shell and sed; RUNSC, CLONES and TMPDIR may be set.
set -eu

RUNSC=${RUNSC:-runsc-agentzip}
CLONES=${CLONES:-4}
ROOTFS=$(cd "${1:-/}" && pwd)

# Templates may be large: not where the host keeps files in memory.
work=$(mktemp -d "${TMPDIR:-/var/tmp}/scheduler.XXXXXX")
# The runtime's state. Sockets are in it, whose paths must be short.
root=$(mktemp -d /run/scheduler.XXXXXX)

# Global flags come before the command.
runsc() {
	"$RUNSC" --root="$root" --network=none --ignore-cgroups --overlay2=all:memory "$@"
}

# start ID COMMAND...: a command that starts a sandbox, in the background and in a
# session of its own: what is interrupted in the middle leaves a sandbox that nobody
# knows.
start() {
	id=$1
	shift
	setsid "$RUNSC" --root="$root" --network=none --ignore-cgroups --overlay2=all:memory \
		"$@" "$id" </dev/null >/dev/null 2>"$work/$id.err" &
}

# Whatever happens, nothing is left behind. Deleting what is not there is no error.
cleanup() {
	trap '' HUP INT PIPE TERM
	wait # for sandboxes that are being started
	left=
	for id in seed $clones $children; do
		runsc delete --force "$id" || left="$left $id"
	done
	rm -rf "$work"
	if [ -n "$left" ]; then
		echo "scheduler.sh: may still run, with their state in $root:$left" >&2
		return
	fi
	umount "$root/null-netns" 2>/dev/null || :
	rm -rf "$root"
}
clones= children=
trap cleanup EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 141' PIPE # nobody reads what it prints
trap 'exit 143' TERM

# number NAME JSON: one size of what "agentzip stats -json" prints, in bytes.
number() {
	printf '%s\n' "$2" | sed -n "s/^  \"$1\": \([0-9]*\).*/\1/p"
}

# The end of what a sandbox does: it waits, and so much of its memory was evicted
# that it holds less than half of what it has.
await_evicted() {
	n=0
	while :; do
		stats=$(runsc agentzip stats -json "$1")
		owned=$(number owned_bytes "$stats") guest=$(number guest_bytes "$stats")
		case "$stats" in
		*'"state": "waiting"'*) [ "$owned" -ge $((guest / 2)) ] || break ;;
		esac
		n=$((n + 1))
		if [ $n -gt 300 ]; then
			echo "scheduler.sh: $1 is not evicted:" >&2
			runsc agentzip stats "$1" >&2
			exit 1
		fi
		sleep 0.1
	done
	echo "$1 waits: owns $owned of $guest bytes"
}

# A step of an agent: a command in its sandbox. Here it counts its steps and writes
# some megabytes, both of which are in the sandbox's memory. Its output goes through
# a pipe: in a file, the next would begin where this one began.
step() {
	out=$(runsc exec "$1" sh -c 'cd /tmp
		echo "$1" >>steps; seq "$((100000 * $(wc -l <steps)))" 500000 >data
		echo "$1: step $(wc -l <steps), $(wc -c <data) bytes, by $(cat steps | tr "\n" " ")"' step "$1")
	echo "$out"
}

# 1. The template: a sandbox with all that the agents' have in common. Its command
# is what stays: a tool server, say.
mkdir "$work/bundle"
cat >"$work/bundle/config.json" <<EOF
{
  "ociVersion": "1.0.0",
  "process": {
    "args": ["sleep", "infinity"], "cwd": "/", "user": {"uid": 0, "gid": 0},
    "env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/tmp"]
  },
  "root": {"path": "$ROOTFS"},
  "mounts": [
    {"destination": "/proc", "type": "proc", "source": "proc"},
    {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
    {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": ["mode=1777"]}
  ],
  "linux": {"namespaces": [{"type": "pid"}, {"type": "network"}, {"type": "ipc"}, {"type": "uts"}, {"type": "mount"}]}
}
EOF
start seed run --detach --bundle "$work/bundle"
wait $! || { cat "$work/seed.err" >&2; exit 1; }
step seed
runsc agentzip template create --image-path "$work/template" --settle-cmd 'sync' seed >/dev/null
runsc delete --force seed
runsc agentzip template verify "$work/template"

# 2. The clones, some at a time. No id may be the beginning of another's: runsc takes
# the one for the other then. So the numbers have as many digits each.
i=0
while [ $i -lt "$CLONES" ]; do
	i=$((i + 1))
	clones="$clones $(printf 'clone-%03d' $i)"
done
pids=
for id in $clones; do
	start "$id" restore --detach --bundle "$work/bundle" --image-path "$work/template"
	pids="$pids $!"
done
for pid in $pids; do
	wait "$pid" || { cat "$work"/*.err >&2; exit 1; }
done
runsc list

# 3. A step each, and then they wait for their models, which costs little.
for id in $clones; do
	step "$id"
	runsc agentzip hint -phase=wait "$id"
done
for id in $clones; do
	await_evicted "$id"
done

# 4. The models have answered.
for id in $clones; do
	runsc agentzip hint -phase=resume "$id"
	step "$id"
done

# 5. Two ways to go on from where the first clone is, which goes on itself.
set -- $clones
runsc agentzip template create --image-path "$work/fork" --leave-running "$1" >/dev/null
children='fork-1 fork-2'
for id in $children; do
	start "$id" restore --detach --bundle "$work/bundle" --image-path "$work/fork"
	wait $! || { cat "$work/$id.err" >&2; exit 1; }
	step "$id"
done
step "$1"
# 6. cleanup deletes them all.
