"""Workload swe: an agent works on a Python project.

The repository is NetworkX as Debian packages it, its tests included, with a
history that is made up: imports by part, then revisions by several authors. The
interpreter holds what a coding agent's tools keep in memory: sources, syntax
trees, an index of names and a table of all functions.
"""

import ast
import os
import random
import re

import numpy as np
import pandas as pd

import fingerprint

SOURCE = "/usr/lib/python3/dist-packages/networkx"
REPO = "/srv/repo"
METRICS = "/srv/data/functions.csv"
AUTHORS = ["ada", "bela", "chen", "dina", "emeka", "fay"]
START = 1600000000  # date of the first commit
REVISIONS = 60
TREE_BYTES = 4 << 20  # source whose syntax trees the template holds

files = {}  # path in the repository -> text; the interpreter knows it as files
trees = {}  # path -> syntax tree


def build(server, extra={}, tree_bytes=TREE_BYTES):
    """extra are more files (path -> text) for the repository."""
    rng = random.Random(server.seed)
    make_repository(server, rng, extra)
    budget = tree_bytes
    # The project's own code first, then its tests.
    for path in sorted((p for p in files if p.endswith(".py")), key=lambda p: (is_test(p), p)):
        budget -= len(files[path])
        if budget < 0:
            break
        trees[path] = ast.parse(files[path])
    functions = measure_functions(rng)
    os.makedirs(os.path.dirname(METRICS))
    functions.to_csv(METRICS, index=False)
    index = {}  # word -> where it is
    for path in sorted(p for p in files if p.endswith(".py")):
        for number, line in enumerate(files[path].splitlines(), 1):
            for word in re.findall(r"[A-Za-z_]\w+", line):
                index.setdefault(word, []).append((path, number))
    server.namespace.update(files=files, trees=trees, functions=functions, index=index, ast=ast, re=re, np=np, pd=pd)
    server.steps.update(look=server.run, git=server.run, test=test(server), commit=server.run,
                        search=snippet(server), analyze=snippet(server), edit=edit(server), script=script(server))
    return {"files": len(files), "functions": len(functions), "head": head(server)}


def state(server):
    return {
        "head": head(server),
        "status": fingerprint.of(server.check(["git", "status", "--porcelain"], cwd=REPO)),
        "fsck": fingerprint.of(server.check(["git", "fsck", "--full", "--strict", "--no-dangling"], cwd=REPO)),
    }


def head(server):
    return server.check(["git", "rev-parse", "HEAD"], cwd=REPO).strip()


def is_test(path):
    return "/tests/" in path


def sources():
    """The files that are worth an edit: the project's own code."""
    return [p for p in sorted(files) if p.endswith(".py") and not is_test(p) and len(files[p]) > 2000]


# ---- the repository ----

def make_repository(server, rng, extra):
    """Writes the history with one git fast-import and checks it out."""
    binaries = {}  # what the tests read
    for base, dirs, names in os.walk(SOURCE):
        dirs[:] = sorted(d for d in dirs if d != "__pycache__")
        for name in sorted(names):
            path = os.path.join(base, name)
            with open(path, "rb") as f:
                content = f.read()
            path = "networkx/" + os.path.relpath(path, SOURCE)
            try:
                files[path] = content.decode()
            except UnicodeDecodeError:
                binaries[path] = content
    files.update(extra)
    files[".gitignore"] = "__pycache__/\n*.pyc\n"
    files["setup.cfg"] = "[tool:pytest]\naddopts = -p no:cacheprovider\n"

    stream = bytearray()
    count = 0

    def commit(author, message, paths):
        nonlocal count
        count += 1
        who = "%s <%s@example.com> %d +0000" % (author, author, START + 86400 * count)
        stream.extend(("commit refs/heads/main\nauthor %s\ncommitter %s\n" % (who, who)).encode())
        data(message.encode())
        for path in paths:
            stream.extend(("M 100644 inline %s\n" % path).encode())
            data(binaries[path] if path in binaries else files[path].encode())

    def data(b):
        stream.extend(b"data %d\n" % len(b))
        stream.extend(b + b"\n")

    parts = {}
    for path in sorted([*files, *binaries]):
        parts.setdefault("/".join(path.split("/")[:3]) if path.count("/") > 2 else "the rest", []).append(path)
    for part in sorted(parts):
        commit(rng.choice(AUTHORS), "Import %s" % part, parts[part])
    candidates = sources()
    for i in range(REVISIONS):
        paths = sorted(rng.sample(candidates, rng.randint(1, 5)))
        for path in paths:
            files[path] = revise(files[path], rng, rng.choice(["result", "value", "answer"]), 0.2)
        commit(rng.choice(AUTHORS), "Name results in %s" % ", ".join(p.split("/")[-1] for p in paths), paths)

    os.makedirs(REPO)
    server.check(["git", "init", "-q", "-b", "main"], cwd=REPO)
    for key, value in (("gc.auto", "0"), ("core.preloadIndex", "false"), ("pack.threads", "1")):
        server.check(["git", "config", key, value], cwd=REPO)
    server.check(["git", "fast-import", "--quiet"], cwd=REPO, stdin=stream)
    server.check(["git", "reset", "-q", "--hard", "main"], cwd=REPO)
    # Bytecode that is checked by content: it depends on nothing but the source.
    server.check(["python3", "-m", "compileall", "-q", "--invalidation-mode", "checked-hash", "networkx"], cwd=REPO)


def revise(text, rng, name, share):
    """Edits a file without changing what it does: gives some of the returned
    expressions a name first, adds a helper."""
    lines = text.splitlines(keepends=True)
    for i, line in enumerate(lines):
        m = re.match(r"( {4,})return ([a-z].*[\w)\]])$", line)
        if m and rng.random() < share:
            # A name that no closure or argument has.
            new = "%s_%d" % (name, rng.randrange(1000))
            lines[i] = "%s%s = %s\n%sreturn %s\n" % (m.group(1), new, m.group(2), m.group(1), new)
    lines.append("\n\ndef _describe_%s_%d(value):\n    return f\"{type(value).__name__} {value!r}\"\n" % (name, rng.randrange(10000)))
    revised = "".join(lines)
    try:
        ast.parse(revised)
    except SyntaxError:  # one of the expressions went on in the next line
        return text + "".join(lines[-1:])
    return revised


def measure_functions(rng):
    rows = []
    for path in sorted(trees):
        for node in ast.walk(trees[path]):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                inner = [type(n).__name__ for n in ast.walk(node)]
                rows.append((path, node.name, type(node).__name__, node.lineno, node.end_lineno - node.lineno + 1,
                             len(inner), sum(n in ("If", "For", "While", "Try", "BoolOp") for n in inner),
                             inner.count("Call"), rng.choice(AUTHORS), bool(ast.get_docstring(node))))
    return pd.DataFrame(rows, columns=["path", "name", "kind", "line", "lines", "nodes", "branches", "calls", "owner", "documented"])


# ---- steps ----

def test(server):
    def step(commands, cwd="/", stdin=""):
        """Runs tests. Those that fail are an answer; a pytest that could not run
        them, or found none, is a fault."""
        result = server.run(commands, cwd=cwd, stdin=stdin)
        for argv, r in zip(commands, result["commands"]):
            if "pytest" in argv and r["code"] not in (0, 1):
                raise RuntimeError("%s: exit code %d: %s" % (" ".join(argv), r["code"], r["tail"]))
        return result
    return step


def edit(server):
    def step(seed, count, name, share):
        """Changes some files, looks at the difference."""
        rng = random.Random(seed)
        paths = sorted(rng.sample(sources(), count))
        for path in paths:
            with open(os.path.join(REPO, path), encoding="utf-8") as f:
                text = revise(f.read(), rng, name, share)
            trees[path] = ast.parse(text)
            files[path] = text
            with open(os.path.join(REPO, path), "w", encoding="utf-8") as f:
                f.write(text)
        diff = ["git", "diff", "--stat", "-p"]
        return {"paths": paths, "diff": server.note(diff, server.command(diff, cwd=REPO))}
    return step


# Programs that agents write to answer questions about a project; each runs in
# a process of its own and leaves a report in the repository.
SCRIPT = '''
import sys
import numpy as np
import pandas as pd

table = pd.read_csv({metrics!r})
part = table[(table["lines"] >= {lines}) & (table["kind"] == {kind!r})].copy()
part["package"] = part["path"].str.split("/").str[1:3].str.join("/")
part["density"] = part["branches"] / part["nodes"]
report = part.groupby(["package", {by!r}]).agg(
    n=("name", "size"), lines=("lines", "sum"), density=("density", "mean"), calls=("calls", "max")).reset_index()
report = report.sort_values([{order!r}, "package", {by!r}], ascending=[False, True, True])
report.round(6).to_csv("report_{name}.csv", index=False)
print(report.head(12).round(4).to_string())
print(len(part), "of", len(table), np.percentile(part["lines"], [50, 90, 99]).round(2).tolist())
'''


def script(server):
    def step(name, **args):
        path = "script_%s.py" % name
        with open(os.path.join(REPO, path), "w") as f:
            f.write(SCRIPT.format(name=name, metrics=METRICS, **args))
        argv = ["python3", path]
        return server.note(argv, server.command(argv, cwd=REPO))
    return step


# Code that the agent's interpreter runs; what it finds stays there.
SNIPPETS = {
    "search": '''
hits_{name} = []
for root, dirs, names in __import__("os").walk("/srv/repo/networkx/{part}"):
    dirs[:] = sorted(d for d in dirs if d != "__pycache__")
    for n in sorted(names):
        if n.endswith(".py"):
            with open(root + "/" + n) as f:
                for number, line in enumerate(f, 1):
                    if re.search(r"{pattern}", line):
                        hits_{name}.append((root[10:] + "/" + n, number, line.strip()))
print(len(hits_{name}))
for h in hits_{name}[:8]:
    print(*h)
''',
    "calls": '''
calls_{name} = {{}}
for path, tree in sorted(trees.items()):
    if not path.startswith("networkx/{part}"):
        continue
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            f = node.func
            key = f.attr if isinstance(f, ast.Attribute) else getattr(f, "id", "?")
            calls_{name}.setdefault(key, []).append((path, node.lineno))
print(len(calls_{name}), sorted(((len(v), k) for k, v in calls_{name}.items()), reverse=True)[:6])
''',
    "outline": '''
outline_{name} = [
    (path, node.lineno, node.name, ast.get_docstring(node) or "")
    for path, tree in sorted(trees.items()) if path.startswith("networkx/{part}")
    for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and re.search(r"{pattern}", ast.unparse(node))]
print(len(outline_{name}), [o[:3] for o in outline_{name}[:6]])
''',
    "table": '''
table_{name} = functions[functions["path"].str.startswith("networkx/{part}")].copy()
table_{name}["code"] = [" ".join(files[p].splitlines()[l - 1:l + n]) for p, l, n in table_{name}[["path", "line", "lines"]].itertuples(index=False)]
table_{name}["match"] = table_{name}["code"].str.count(r"{pattern}")
print(table_{name}.groupby("owner")[["lines", "branches", "match"]].sum().to_string())
''',
}


def snippet(server):
    def step(kind, **args):
        return server.repl(SNIPPETS[kind].format(**args))
    return step
