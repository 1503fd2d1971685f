"""Workload build: an agent works on a C++ program.

The repository is a made-up command line program of many modules, which use the standard library's
heavier headers, nlohmann-json and fmt. The template holds it built, with a
precompiled header and debugging information, for incremental builds.
"""

import os
import random
import re

import fingerprint

REPO = "/srv/repo"
MODULES = 32
START = 1600000000

PRELUDE = REPO + "/build/prelude.h.gch"

sources = {}  # path -> text
built = {}  # digests of what the template built

MAKEFILE = '''\
CXX = g++
CXXFLAGS = -std=c++17 -O0 -g1 -Isrc -include build/prelude.h
PRELUDE = -std=c++17 -O0 -g1 -x c++-header
OBJECTS = $(sort $(patsubst src/%.cpp,build/%.o,$(wildcard src/*.cpp)))

build/program: $(OBJECTS)
\t$(CXX) -o $@ $(OBJECTS) -lfmt

build/%.o: src/%.cpp build/prelude.h.gch
\t$(CXX) $(CXXFLAGS) -MMD -MP -c -o $@ $<

build/prelude.h.gch: src/prelude.h
\tmkdir -p build
\tcp $< build/prelude.h
\t$(CXX) $(PRELUDE) -o $@ build/prelude.h

.PHONY: clean
clean:
\trm -rf build

-include $(wildcard build/*.d)
'''

# Compiled once; most of the template is this file's compiled form.
PRELUDE_H = '''\
#pragma once
#include <algorithm>
#include <chrono>
#include <deque>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <iomanip>
#include <iostream>
#include <list>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <regex>
#include <set>
#include <sstream>
#include <thread>
#include <unordered_map>
#include <variant>
#include <fmt/chrono.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>
'''

REGISTRY_H = '''\
#pragma once
#include <functional>
#include <map>
#include <string>
#include <vector>

// A module turns numbers and words into a line of text.
using Module = std::function<std::string(const std::vector<long>&, const std::vector<std::string>&)>;

std::map<std::string, Module>& registry();

struct Register {
  Register(const std::string& name, Module m) { registry()[name] = std::move(m); }
};
'''

MAIN = '''\
#include "registry.h"
#include <iostream>
#include <sstream>

std::map<std::string, Module>& registry() {
  static std::map<std::string, Module> modules;
  return modules;
}

// Reads numbers and words and shows what each module makes of them.
int main(int argc, char** argv) {
  std::vector<long> numbers;
  std::vector<std::string> words;
  for (int i = 1; i < argc; i++) {
    std::istringstream in(argv[i]);
    long n;
    if (in >> n) numbers.push_back(n);
    else words.push_back(argv[i]);
  }
  for (const auto& [name, module] : registry()) std::cout << name << ": " << module(numbers, words) << "\\n";
}
'''

# Bodies of modules by the headers they are about.
BODIES = [
    ("<algorithm>", "<numeric>", '''
  std::vector<long> v(n);
  v.insert(v.end(), {seed} % 97, {b});
  std::sort(v.begin(), v.end(), [](long a, long b) {{ return (a * {a}) % {m} < (b * {a}) % {m} || ((a * {a}) % {m} == (b * {a}) % {m} && a < b); }});
  std::partial_sum(v.begin(), v.end(), v.begin());
  return std::to_string(std::accumulate(v.begin(), v.end(), {b}L) % {m});'''),
    ("<regex>", "<sstream>", '''
  std::regex pattern("([a-{c}]+)([^a-{c}]*)");
  std::ostringstream out;
  for (const auto& word : w) out << std::regex_replace(word, pattern, "$2<$1>") << " ";
  out << {a};
  return out.str();'''),
    ("<unordered_map>", "<set>", '''
  std::unordered_map<std::string, std::set<long>> seen;
  for (const auto& word : w)
    for (long x : n) seen[word.substr(0, {a} % 3 + 1)].insert((x * {b} + long(word.size())) % {m});
  std::map<std::string, std::set<long>> sorted(seen.begin(), seen.end());
  std::string out;
  for (const auto& [k, values] : sorted) out += k + std::to_string(values.size() * {a});
  return out;'''),
    ("<memory>", "<variant>", '''
  struct Node {{ std::variant<long, std::string> value; std::unique_ptr<Node> next; }};
  std::unique_ptr<Node> head;
  for (long x : n) {{ auto node = std::make_unique<Node>(); node->value = x % {m} + {b}; node->next = std::move(head); head = std::move(node); }}
  for (const auto& word : w) {{ auto node = std::make_unique<Node>(); node->value = word; node->next = std::move(head); head = std::move(node); }}
  long sum = {a};
  for (const Node* p = head.get(); p; p = p->next.get())
    sum = sum * 31 % {m} + std::visit([](const auto& v) -> long {{ if constexpr (std::is_same_v<std::decay_t<decltype(v)>, long>) return v; else return long(v.size()); }}, p->value);
  return std::to_string(sum);'''),
    ("<random>", "<deque>", '''
  std::mt19937 engine({seed});
  std::deque<long> q(n.begin(), n.end());
  for (int i = 0; i < {a}; i++) {{ q.push_front(long(engine() % {m})); if (q.size() > {b}) q.pop_back(); }}
  long sum = 0;
  for (long x : q) sum = (sum * 7 + x) % {m};
  return std::to_string(sum);'''),
    ("<fmt/format.h>", "<iomanip>", '''
  std::string out;
  for (size_t i = 0; i < n.size(); i++) out += fmt::format("{{:>{{}}}}|", n[i] * {a} % {m}, {b} % 9 + 2);
  for (const auto& word : w) out += fmt::format("{{:.^{{}}}}", word, {b} % 20 + 4);
  return out;'''),
    ("<nlohmann/json.hpp>", "<list>", '''
  nlohmann::json j = {{{{"numbers", n}}, {{"words", w}}, {{"scale", {a}}}}};
  for (auto& x : j["numbers"]) x = x.get<long>() * {b} % {m};
  return j.dump();'''),
]


def module(number, rng):
    a, b, m = rng.randint(3, 90), rng.randint(3, 90), rng.choice([997, 1009, 7919, 65537])
    # The heaviest headers are rare, as in real programs.
    first, second, body = BODIES[number % 5] if number % 8 else BODIES[5 + number // 8 % 2]
    body = body.format(a=a, b=b, m=m, seed=rng.randrange(1 << 20), c=rng.choice("ghijklmno"))
    return '''\
// Module {n:02d}.
#include "registry.h"
#include {first}
#include {second}

static std::string compute(const std::vector<long>& n, const std::vector<std::string>& w) {{{body}
}}

static Register entry("m{n:02d}", compute);
'''.format(n=number, first=first, second=second, body=body)


def build(server):
    rng = random.Random(server.seed)
    sources.update({"Makefile": MAKEFILE, ".gitignore": "build/\n", "src/prelude.h": PRELUDE_H, "src/registry.h": REGISTRY_H, "src/main.cpp": MAIN})
    for i in range(MODULES):
        sources["src/m%02d.cpp" % i] = module(i, rng)
    os.makedirs(REPO + "/src")
    for path in sources:
        save(path)
    for argv in (["git", "init", "-q", "-b", "main"], ["git", "config", "gc.auto", "0"], ["git", "add", "-A"],
                 ["git", "commit", "-q", "-m", "Import"], ["make", "-s", "-j2"]):
        server.check(argv, cwd=REPO)
    server.namespace.update(sources=sources)
    built["prelude"] = fingerprint.file(PRELUDE)
    server.steps.update(look=server.run, commit=server.run, execute=server.run, edit=edit(server), make=make(server))
    return {"files": len(sources), "output": fingerprint.of(server.check(["build/program", "3", "14", "words"], cwd=REPO))}


def state(server):
    return {
        "head": server.check(["git", "rev-parse", "HEAD"], cwd=REPO).strip(),
        "fsck": fingerprint.of(server.check(["git", "fsck", "--full", "--strict", "--no-dangling"], cwd=REPO)),
        "output": fingerprint.of(server.command(["build/program", "5", "77", "many", "words"], cwd=REPO)),
        # No two builds of it are the same, but nobody builds it again.
        "prelude_unchanged": fingerprint.file(PRELUDE) == built["prelude"],
    }


def save(path):
    with open(os.path.join(REPO, path), "w", encoding="utf-8") as f:
        f.write(sources[path])


# ---- steps ----

def edit(server):
    def step(seed, count, add):
        """Gives some modules another body and looks at the difference; may add
        a module."""
        rng = random.Random(seed)
        modules = [p for p in sorted(sources) if re.match(r"src/m\d+\.cpp$", p)]
        paths = sorted(rng.sample(modules, count))
        if add:
            paths.append("src/m%02d.cpp" % len(modules))
        for path in paths:
            # Another body of the same kind.
            sources[path] = module(int(path[5:-4]), rng)
            save(path)
        diff = ["git", "diff", "--stat", "-p"]
        return {"paths": paths, "diff": server.note(diff, server.command(diff, cwd=REPO))}
    return step


def make(server):
    def step():
        """Builds what has changed. Two jobs run at once, so that the order of
        make's lines depends on chance."""
        argv = ["make", "-j2"]
        result = server.command(argv, cwd=REPO)
        result["stdout"] = "".join(sorted(result["stdout"].splitlines(keepends=True)))
        result["stderr"] = "".join(sorted(result["stderr"].splitlines(keepends=True)))
        noted = server.note(argv, result)
        noted["program"] = fingerprint.file(REPO + "/build/program")
        return noted
    return step
