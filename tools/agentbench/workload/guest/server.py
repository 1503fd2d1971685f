"""Tool server: the init process of an AI agent's sandbox.

Usage: server.py '{"workload": NAME, "seed": N}'. The module NAME builds the
working set and names the steps; this file speaks the protocol (see the package
comment of tools/agentbench/workload) and has what all workloads share: commands
as children of init, a persistent interpreter, the transcript and the digest of
everything the sandbox holds.

Answers depend only on the requests so far.
"""

import ctypes
import gc
import importlib
import io
import json
import linecache
import os
import re
import subprocess
import sys
import traceback
from contextlib import redirect_stdout

import fingerprint

# What every command gets: no clock, no user settings, no random hashing.
ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
    "PYTHONHASHSEED": "0",
    "OPENBLAS_NUM_THREADS": "1",
    "GIT_AUTHOR_NAME": "agent", "GIT_AUTHOR_EMAIL": "agent@example.com",
    "GIT_COMMITTER_NAME": "agent", "GIT_COMMITTER_EMAIL": "agent@example.com",
    "GIT_CONFIG_NOSYSTEM": "1", "GIT_PAGER": "cat",
}

# What programs say about times and addresses, which are not the same each time.
UNSTABLE = [
    (re.compile(r"\bin \d+\.\d+s( \(\d+:\d\d:\d\d\))?"), "in TIME"),
    (re.compile(r"\b\d+\.\d+s (call|setup|teardown)\b"), r"TIME \1"),
    (re.compile(r"\b0x[0-9a-f]{6,16}\b"), "ADDRESS"),
]


class Server:
    """State and services that the workload's module builds on."""

    def __init__(self, config):
        self.config = config
        self.seed = config.get("seed", 1)
        self.namespace = {"__name__": "__console__"}
        self.transcript = []  # (command, output): what the agent has seen
        self.requests = 0
        self.inputs = 0
        self.steps = {"repl": self.repl, "run": self.run}
        # Directories whose files state() digests.
        self.roots = ["/root", "/srv", "/tmp"]
        self.workload = importlib.import_module(config["workload"].replace("-", "_"))

    # ---- commands ----

    def command(self, argv, cwd="/", stdin="", env=None):
        """Runs a command as a child of init. The date that git sees follows
        from the number of requests. stdin is text or bytes."""
        if isinstance(stdin, str):
            stdin = stdin.encode()
        date = "%d +0000" % (1700000000 + 60 * self.requests)
        p = subprocess.run(argv, cwd=cwd, input=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                           env=dict(ENV, GIT_AUTHOR_DATE=date, GIT_COMMITTER_DATE=date, **(env or {})))
        return {"code": p.returncode, "stdout": text(p.stdout), "stderr": text(p.stderr)}

    def check(self, argv, **kw):
        """Runs a command that has to succeed and returns its output."""
        r = self.command(argv, **kw)
        if r["code"]:
            raise RuntimeError("%s: exit code %d: %s" % (" ".join(argv[:4]), r["code"], r["stderr"][-500:]))
        return r["stdout"]

    def run(self, commands, cwd="/", stdin=""):
        """Step: run commands one after the other, as an agent's shell tool
        does, and show how each began and ended."""
        return {"commands": [self.note(argv, self.command(argv, cwd=cwd, stdin=stdin)) for argv in commands]}

    def note(self, argv, result):
        """Keeps a command's output in the transcript and returns its digest."""
        out = stable(result["stdout"] + result["stderr"])
        self.transcript.append((" ".join(argv), out))
        return {"code": result["code"], "lines": out.count("\n"), "digest": fingerprint.of(out), "tail": out.strip()[-160:]}

    # ---- the persistent interpreter ----

    def repl(self, code):
        """Step: run Python code in the persistent namespace. An exception is
        an answer like any other."""
        self.inputs += 1
        name = "<input %d>" % self.inputs
        # As interactive interpreters do, so that tracebacks can show the code.
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        out, error = io.StringIO(), None
        try:
            with redirect_stdout(out):
                exec(compile(code, name, "exec"), self.namespace)
        except Exception:
            error = traceback.format_exc(limit=-1)
            out.write(error)
        out = stable(out.getvalue())
        self.transcript.append((code, out))
        result = {"out": out.strip()[-400:], "digest": fingerprint.of(out)}
        if error:
            result["error"] = stable(error.strip().splitlines()[-1])
        return result

    # ---- protocol ----

    def settle(self):
        """Gives back what is not needed: the checkpoint would keep it in the
        template."""
        if hasattr(self.workload, "settle"):
            self.workload.settle(self)
        gc.collect()
        try:
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        except (OSError, AttributeError):
            pass  # another C library
        return {}

    def state(self):
        result = {
            "files": fingerprint.files(self.roots),
            "names": fingerprint.namespace(self.namespace),
            "transcript": fingerprint.of(self.transcript),
        }
        if hasattr(self.workload, "state"):
            result.update(self.workload.state(self))
        return result

    def answer(self, line):
        self.requests += 1
        request = json.loads(line)
        op, args = request["op"], request.get("args", {})
        if op == "ping":
            return {}
        if op == "settle":
            return self.settle()
        if op == "state":
            return self.state()
        if op == "exec":
            return self.command(**args)
        if op == "step":
            return self.steps[request["name"]](**args)
        raise ValueError("unknown op %r" % op)

    def serve(self):
        say({"ready": True, **self.workload.build(self)})
        for line in sys.stdin:
            try:
                reply = {"ok": True, "result": self.answer(line)}
            except Exception as e:  # the server outlives a failed request
                reply = {"ok": False, "error": "%s: %s" % (type(e).__name__, e)}
            say(reply)
            reap()


def reap():
    """Collects what commands left behind and init inherited. Children that are
    still wanted, such as language servers, run."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def stable(out):
    for pattern, replacement in UNSTABLE:
        out = pattern.sub(replacement, out)
    return out


def text(b):
    return b.decode("utf-8", "replace")


def say(value):
    sys.stdout.write(json.dumps(value, sort_keys=True) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    Server(json.loads(sys.argv[1])).serve()
