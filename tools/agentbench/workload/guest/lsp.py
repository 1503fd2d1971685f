"""Workload lsp: as swe, with language servers that know the project.

The repository has a second part, lodash in ECMAScript modules, which is what the
TypeScript server works on; the Python server works on NetworkX. They are started
with the template, or by steps if the configuration has "late".
"""

import os
import random
import re

import fingerprint
import langserv
import server as core
import swe

WEB = "/usr/share/nodejs/lodash-es"
# What the servers hold beside the interpreter makes up for fewer syntax trees.
TREE_BYTES = 1 << 20
OPEN = 8  # files of each language that are open from the start
CONFIG = '{"compilerOptions": {"target": "es2020", "module": "es2020", "lib": ["es2020"], "types": [], "checkJs": true}}\n'

servers = {}


def build(server):
    extra = {"web/jsconfig.json": CONFIG}
    for name in sorted(os.listdir(WEB)):
        if name.endswith(".js"):
            with open(os.path.join(WEB, name), encoding="utf-8") as f:
                extra["web/" + name] = f.read()
    ready = swe.build(server, extra, TREE_BYTES)
    server.steps.update(start=start(server), navigate=navigate, complete=complete, diagnose=diagnose)
    if not server.config.get("late"):
        for name in sorted(langserv.KINDS):
            server.steps["start"](name)
    return dict(ready, servers=sorted(servers))


def settle(server):
    for name in sorted(servers):
        servers[name].collect()


def state(server):
    """Also asks the servers the same questions each time."""
    result = swe.state(server)
    for name in sorted(servers):
        s, rng, answers = servers[name], random.Random(1), []
        for path in opened(s)[:5]:
            answers.append((path, s.diagnostics(path)))
            for line, column, word in places(s, path, rng, 1):
                answers.append((word, s.definition(path, line, column), s.hover(path, line, column)))
        result[name] = fingerprint.of(answers)
    return result


def candidates(name):
    if name == "ts":
        return [p for p in sorted(swe.files) if re.match(r"web/_?\w+\.js$", p) and swe.files[p].count("import ") > 1]
    # What leads into numpy takes an analysis of seconds.
    return [p for p in swe.sources() if len(swe.files[p]) < 20000 and "/algorithms/" in p and "numpy" not in swe.files[p]]


def opened(s):
    return sorted(s.texts)


def places(s, path, rng, count):
    """Uses of imported or called names in a file."""
    found = []
    for number, line in enumerate(s.texts[path].split("\n")):
        if s.name == "ts":
            for m in re.finditer(r"(?<![\w.'])((?:base|is|to|get|create|copy|array|assign)[A-Z]\w+)\(", line):
                if not line.lstrip().startswith(("*", "//")):
                    found.append((number, m.start(1), m.group(1)))
        else:
            m = re.match(r"\s+(?:return |[\w, ]+ = )?(?:nx\.)?([a-z_]{4,})\(", line)
            if m:
                found.append((number, m.start(1), m.group(1)))
    return rng.sample(found, min(count, len(found)))


# ---- steps ----

def start(server):
    def step(language):
        """Starts a server and lets it get to know the project."""
        rng = random.Random(server.seed)
        s = servers[language] = langserv.KINDS[language](core.ENV, swe.REPO)
        answers = []
        s.open(rng.sample(candidates(language), OPEN))
        for path in opened(s):
            answers.append(s.diagnostics(path))
            for line, column, word in places(s, path, rng, 1):
                answers.append((word, s.definition(path, line, column), s.hover(path, line, column)))
        if not any(a[1] for a in answers if isinstance(a, tuple)):
            # As it is when a server runs without its plugins.
            raise RuntimeError("the language server %s found no definition at all" % language)
        return {"open": opened(s), "digest": fingerprint.of(answers)}
    return step


def choose(language, seed):
    """One file that is open already and one that may not be."""
    s, rng = servers[language], random.Random(seed)
    paths = [rng.choice(opened(s)), rng.choice(candidates(language))]
    s.open(paths)
    return s, rng, paths


def navigate(language, seed, count):
    """Goes to definitions, and finds all references of what the repository
    defines, once."""
    s, rng, paths = choose(language, seed)
    answers, references = [], None
    for path in paths:
        for line, column, word in places(s, path, rng, count):
            targets = s.definition(path, line, column)
            answers.append((word, targets, s.hover(path, line, column)))
            if references is None and targets and not targets[0][0].startswith(".."):
                references = s.references(path, line, column)
    return {"paths": paths, "found": [(word, targets[:1]) for word, targets, _ in answers][:6],
            "references": len(references or []), "digest": fingerprint.of(answers, references)}


def complete(language, seed, count):
    """Asks for completions in the middle of names."""
    s, rng, paths = choose(language, seed)
    answers = []
    for path in paths:
        for line, column, word in places(s, path, rng, count):
            answers.append((word, s.completion(path, line, column + 3)))
    return {"paths": paths, "found": [(w, len(names)) for w, names in answers], "digest": fingerprint.of(answers)}


ADDITIONS = {
    "ts": "\nexport function check{seed}(value) {{\n  var known = missing{seed}(value);\n  return value.size.width + {seed};\n}}\n",
    "py": "\n\ndef check_{seed}(value):\n    known = missing_{seed}(value)\n    return value .size+ {seed}\n",
}


def diagnose(language, seed):
    """Adds a function with mistakes and asks what is wrong."""
    s, rng, paths = choose(language, seed)
    path = paths[1]
    before = s.diagnostics(path)
    after = s.edit(path, ADDITIONS[language].format(seed=seed))
    swe.files[path] = s.texts[path]
    return {"path": path, "before": len(before), "after": after[-3:], "digest": fingerprint.of(after)}
