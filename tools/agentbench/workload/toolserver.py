"""Tool server of one AI-agent sandbox: the container's init.

It reads one JSON request per line from stdin and answers with one JSON line on
stdout. At start it builds the working set that a coding agent's sandbox holds:
a repository with history in the (in-memory) root file system, the syntax trees
of its files, a pandas table and a persistent interpreter namespace. Then each
request runs one tool step on it.

Every answer depends only on the requests so far, never on time, addresses or
the runtime below, so that two runtimes can be compared by comparing answers.

Requests: {"op": "settle"}, {"op": "step", "name": NAME, "args": {...}},
{"op": "state"} (a digest of everything the sandbox holds).
"""

import ast
import ctypes
import gc
import hashlib
import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tokenize
from contextlib import redirect_stdout

import numpy as np
import pandas as pd

REPO = "/srv/repo"
LIB = "/usr/lib/python3/dist-packages"
# What goes into the repository, in the order it is committed.
PACKAGES = [
    "numpy/core", "numpy/lib", "numpy/ma", "numpy/linalg", "numpy/polynomial",
    "pandas/core", "pandas/io", "pandas/plotting", "pandas/tseries",
    "pandas/util", "dateutil", "pytz",
]

GIT_ENV = {
    "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
    "HOME": "/root",
    "LC_ALL": "C",
    "GIT_AUTHOR_NAME": "agent", "GIT_AUTHOR_EMAIL": "agent@example.com",
    "GIT_COMMITTER_NAME": "agent", "GIT_COMMITTER_EMAIL": "agent@example.com",
    # The workload's own repository needs no user or system settings.
    "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": "/dev/null",
}

files = {}        # path -> source text
trees = {}        # path -> syntax tree
table = None      # the agent's data
namespace = {}    # the persistent interpreter
commits = 0


def digest(*parts):
    h = hashlib.sha256()
    for p in parts:
        h.update(p if isinstance(p, bytes) else str(p).encode())
        h.update(b"\0")
    return h.hexdigest()[:16]


def git(*args, check=True):
    """Runs git at a fixed date, so that commit ids are reproducible."""
    date = "%d +0000" % (1700000000 + 60 * commits)
    env = dict(GIT_ENV, GIT_AUTHOR_DATE=date, GIT_COMMITTER_DATE=date)
    p = subprocess.run(["git", "-c", "gc.auto=0", "-c", "init.defaultBranch=main", *args],
                       cwd=REPO, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if check and p.returncode:
        raise RuntimeError("git %s: %d: %s" % (args[0], p.returncode, p.stdout[-500:]))
    return p.stdout


def commit(message):
    global commits
    commits += 1
    git("add", "-A")
    git("commit", "-q", "-m", message)
    return git("rev-parse", "HEAD").strip()


# ---- the working set -------------------------------------------------------

def build_repository(rng):
    os.makedirs(REPO)
    git("init", "-q")
    for package in PACKAGES:
        for base, dirs, names in os.walk(os.path.join(LIB, package)):
            dirs[:] = sorted(d for d in dirs if d not in ("tests", "__pycache__"))
            for name in sorted(names):
                if name.endswith(".py"):
                    src = os.path.join(base, name)
                    dst = os.path.join(REPO, os.path.relpath(src, LIB))
                    os.makedirs(os.path.dirname(dst), exist_ok=True)
                    shutil.copyfile(src, dst)
        commit("Import " + package)
    for base, dirs, names in os.walk(REPO):
        dirs[:] = sorted(d for d in dirs if d != ".git")
        for name in sorted(names):
            path = os.path.relpath(os.path.join(base, name), REPO)
            with open(os.path.join(REPO, path), encoding="utf-8") as f:
                files[path] = f.read()
    # Some history beyond the import.
    paths = sorted(files)
    for i in range(6):
        for path in rng.sample(paths, 8):
            write(path, files[path] + "\n# revision %d\n" % i)
        commit("Revise %d" % i)


def write(path, text):
    with open(os.path.join(REPO, path), "w", encoding="utf-8") as f:
        f.write(text)
    files[path] = text


def build_trees(budget):
    """Parses files, smallest package last, up to budget bytes of source."""
    for path in sorted(files):
        if budget <= 0:
            break
        budget -= len(files[path])
        trees[path] = ast.parse(files[path])


def build_table(rng, rows):
    n = np.random.default_rng(7)
    words = sorted({w for p in sorted(files)[:40] for w in re.findall(r"[a-z_]{4,12}", files[p])})
    return pd.DataFrame({
        "id": np.arange(rows),
        "user": n.integers(0, rows // 40, rows),
        "tool": pd.Categorical.from_codes(n.integers(0, 12, rows), ["tool%d" % i for i in range(12)]),
        "word": [words[i] for i in n.integers(0, len(words), rows)],
        "latency": n.gamma(2.0, 120.0, rows),
        "tokens": n.integers(1, 4000, rows),
        "ok": n.random(rows) < 0.93,
    })


def settle():
    """Gives garbage back before the checkpoint: it would be part of the
    template and of every clone."""
    gc.collect()
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):
        pass
    return {}


# ---- tool steps ------------------------------------------------------------

def step_explore(pattern, name, package, top):
    """Like an agent's grep and outline tools: search the files on disk, list
    the definitions of one package whose name matches."""
    rx, name = re.compile(pattern), re.compile(name)
    hits, lines, read = {}, [], 0
    for path in sorted(files):
        with open(os.path.join(REPO, path), encoding="utf-8") as f:
            text = f.read()
        read += len(text)
        for i, line in enumerate(text.splitlines(), 1):
            if rx.search(line):
                hits[path] = hits.get(path, 0) + 1
                lines.append("%s:%d:%s" % (path, i, line.strip()))
    outline = []
    for path, tree in trees.items():
        if path.startswith(package):
            for node in ast.walk(tree):
                if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and name.search(node.name):
                    outline.append("%s:%d %s" % (path, node.lineno, node.name))
    namespace.setdefault("searches", []).append(lines)
    best = sorted(hits.items(), key=lambda kv: (-kv[1], kv[0]))[:top]
    return {"read": read, "lines": len(lines), "best": best, "outline": len(outline),
            "digest": digest(*lines, *outline)}


def step_edit(seed, count, name):
    """Edit a few files, look at the diff, commit."""
    rng = random.Random(seed)
    paths = rng.sample(sorted(p for p in trees if len(files[p]) > 2000), count)
    for path in paths:
        text = files[path]
        lines = text.splitlines(keepends=True)
        for i, line in enumerate(lines):
            m = re.match(r"(\s*)return (\w+)\s*$", line)
            if m and rng.random() < 0.5:
                lines[i] = "%s%s = %s\n%sreturn %s\n" % (m.group(1), name, m.group(2), m.group(1), name)
        lines.append("\n\ndef %s_%d():\n    return %r\n" % (name, seed, path))
        write(path, "".join(lines))
        trees[path] = ast.parse(files[path])
    status = git("status", "--porcelain")
    diff = git("diff")
    head = commit("Introduce %s" % name)
    log = git("log", "--oneline", "-n", "20", "--stat")
    return {"status": status.count("\n"), "diff": len(diff), "head": head, "digest": digest(diff, log)}


TEST = '''
import ast, importlib.util, sys, unittest
import numpy as np

PATHS = %(paths)r

class Sources(unittest.TestCase):
    def test_compile(self):
        for p in PATHS:
            with open(p, encoding="utf-8") as f:
                compile(f.read(), p, "exec")

    def test_round_trip(self):
        for p in PATHS[:4]:
            with open(p, encoding="utf-8") as f:
                tree = ast.parse(f.read())
            self.assertEqual(ast.dump(ast.parse(ast.unparse(tree))), ast.dump(tree))

class Numbers(unittest.TestCase):
    def test_solve(self):
        n = np.random.default_rng(%(seed)d)
        a = n.random((%(size)d, %(size)d)) + np.eye(%(size)d) * %(size)d
        b = n.random(%(size)d)
        self.assertTrue(np.allclose(a @ np.linalg.solve(a, b), b))

    def test_fails(self):
        self.assertEqual(%(seed)d, 0)

if __name__ == "__main__":
    unittest.main()
'''


def step_test(seed, size, count):
    """Write a test module and run it in a process of its own; one test fails,
    as an agent's tests do."""
    rng = random.Random(seed)
    paths = rng.sample(sorted(p for p in files if 500 < len(files[p]) < 40000), count)
    with open(os.path.join(REPO, "test_agent.py"), "w") as f:
        f.write(TEST % {"paths": paths, "seed": seed, "size": size})
    p = subprocess.run([sys.executable, "test_agent.py", "-v"], cwd=REPO,
                       env={"PATH": GIT_ENV["PATH"], "HOME": "/root", "PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1"},
                       stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    os.remove(os.path.join(REPO, "test_agent.py"))
    out = re.sub(r"in [0-9.]+s", "in TIME", p.stdout)
    namespace.setdefault("test_logs", []).append(out)
    return {"code": p.returncode, "digest": digest(out), "last": out.strip().splitlines()[-1]}


def step_data(users, tool, quantile, name):
    """Filter, join, group and keep the result, as a data-analysis turn does."""
    t = table
    part = t[t["user"] % users == 0]
    stats = part.groupby(["user", "tool"], observed=True).agg(
        n=("id", "size"), latency=("latency", "mean"), tokens=("tokens", "sum"), ok=("ok", "mean")).reset_index()
    slow = t[t["latency"] > t["latency"].quantile(quantile)]
    joined = slow.merge(stats[["user", "tool", "latency"]], on=["user", "tool"], how="left", suffixes=("", "_mean"))
    pivot = joined.pivot_table(index="word", columns="tool", values="tokens", aggfunc="sum", observed=True).fillna(0)
    chosen = t[t["tool"] == tool].sort_values(["latency", "id"])
    chosen = chosen.assign(rank=np.arange(len(chosen)), share=chosen["tokens"].cumsum() / chosen["tokens"].sum())
    namespace[name] = {"stats": stats, "joined": joined, "pivot": pivot, "chosen": chosen}
    return {"rows": [len(part), len(stats), len(joined), len(pivot), len(chosen)],
            "digest": digest(*(frame_digest(f) for f in (stats, joined, pivot, chosen)))}


def frame_digest(frame):
    return hashlib.sha256(pd.util.hash_pandas_object(frame, index=True).values.tobytes()).hexdigest()


# What the interpreter step executes: the agent's own code, growing the heap.
REPL = {
    "index": """
index_{name} = {{}}
for path in sorted(files)[{first}::{stride}]:
    for tok in re.findall(r"[A-Za-z_]\\w+", files[path]):
        index_{name}.setdefault(tok, []).append(path)
counts = sorted(((len(v), k) for k, v in index_{name}.items()), reverse=True)
print(len(index_{name}), counts[:5])
""",
    "tokens": """
tokens_{name} = []
for path in sorted(files)[{first}::{stride}][:40]:
    for t in tokenize.generate_tokens(io.StringIO(files[path]).readline):
        tokens_{name}.append((t.type, t.string, t.start))
print(len(tokens_{name}), tokens_{name}[-3:])
""",
    "calls": """
calls_{name} = {{}}
for path, tree in sorted(trees.items())[{first}::{stride}]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            f = node.func
            key = f.attr if isinstance(f, ast.Attribute) else getattr(f, "id", "?")
            calls_{name}.setdefault(key, []).append((path, node.lineno))
print(len(calls_{name}), sorted(((len(v), k) for k, v in calls_{name}.items()), reverse=True)[:5])
""",
}


def step_repl(kind, name, first, stride):
    """Run code in the persistent namespace."""
    out = io.StringIO()
    with redirect_stdout(out):
        exec(REPL[kind].format(name=name, first=first, stride=stride), namespace)
    return {"out": out.getvalue().strip()[-300:], "names": len(namespace)}


STEPS = {"explore": step_explore, "edit": step_edit, "test": step_test, "data": step_data, "repl": step_repl}


def state():
    """Digests everything the sandbox holds: a wrong byte anywhere shows."""
    h = hashlib.sha256()
    for path in sorted(files):
        with open(os.path.join(REPO, path), "rb") as f:
            disk = f.read()
        if disk != files[path].encode():
            raise RuntimeError("%s differs between disk and memory" % path)
        h.update(disk)
    tree = hashlib.sha256()
    for path in sorted(trees):
        for node in ast.walk(trees[path]):
            tree.update(type(node).__name__.encode())
            if isinstance(node, ast.Name):
                tree.update(node.id.encode())
            elif isinstance(node, ast.Constant):
                tree.update(repr(node.value).encode())
    names = hashlib.sha256()
    for key in sorted(k for k in namespace if not k.startswith("__")):
        v = namespace[key]
        names.update(key.encode())
        if v is files or v is trees or not isinstance(v, (dict, list)):
            continue
        if isinstance(v, dict) and isinstance(v.get("pivot"), pd.DataFrame):
            for f in v.values():
                names.update(frame_digest(f).encode())
        else:
            names.update(repr(v).encode())
    return {
        "files": h.hexdigest()[:16], "trees": tree.hexdigest()[:16], "names": names.hexdigest()[:16],
        "table": frame_digest(table)[:16], "head": git("rev-parse", "HEAD").strip(),
        "fsck": digest(git("fsck", "--full", "--strict", "--no-dangling")),
    }


def main():
    global table
    config = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
    rng = random.Random(config.get("seed", 1))
    build_repository(rng)
    build_trees(config.get("source_bytes", 6 << 20))
    table = build_table(rng, config.get("rows", 800000))
    namespace.update({"files": files, "trees": trees, "table": table, "re": re, "ast": ast, "io": io,
                      "tokenize": tokenize, "np": np, "pd": pd})
    settle()
    answer({"ready": True, "files": len(files), "trees": len(trees), "rows": len(table),
            "source_bytes": sum(map(len, files.values()))})
    for line in sys.stdin:
        try:
            req = json.loads(line)
            op = req["op"]
            if op == "settle":
                result = settle()
            elif op == "state":
                result = state()
            elif op == "step":
                result = STEPS[req["name"]](**req["args"])
            else:
                raise ValueError("unknown op %r" % op)
            answer({"ok": True, "result": result})
        except Exception as e:  # the server outlives a failed tool
            answer({"ok": False, "error": "%s: %s" % (type(e).__name__, e)})


def answer(value):
    sys.stdout.write(json.dumps(value, sort_keys=True) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
