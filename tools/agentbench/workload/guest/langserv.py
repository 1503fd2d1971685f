"""Clients of two language servers, which run as children of init. Both have the
same methods; what they answer is normalised: paths, lines and names, sorted."""

import json
import os
import signal
import subprocess
import urllib.parse

HERE = os.path.dirname(os.path.abspath(__file__))


class Client:
    """A server process and messages with a Content-Length header."""

    def __init__(self, argv, env, root):
        self.root = root
        self.seq = 0
        self.texts = {}  # path -> text of open files
        self.collected, fd = os.pipe()
        self.process = subprocess.Popen(argv, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                        pass_fds=[fd], env=dict(env, COLLECTED_FD=str(fd)))
        os.close(fd)

    def receive(self):
        length = None
        while True:
            line = self.process.stdout.readline()
            if not line:
                raise RuntimeError("the language server %s has ended" % self.name)
            name, _, value = line.decode().partition(":")
            if name.lower() == "content-length":
                length = int(value)
            elif not line.strip() and length is not None:
                return json.loads(self.process.stdout.read(length))

    def write(self, b):
        self.process.stdin.write(b)
        self.process.stdin.flush()

    def collect(self):
        """Lets the server collect its garbage and waits until it has."""
        self.process.send_signal(signal.SIGUSR2)
        if not os.read(self.collected, 1):
            raise RuntimeError("the language server %s has ended" % self.name)

    def relative(self, path):
        return os.path.relpath(path, self.root)

    def read(self, path):
        if path not in self.texts:
            with open(os.path.join(self.root, path), encoding="utf-8") as f:
                self.texts[path] = f.read()
        return self.texts[path]

    def append(self, path, text):
        """Edits an open file: the server hears of it, the disk gets it."""
        self.texts[path] += text
        with open(os.path.join(self.root, path), "w", encoding="utf-8") as f:
            f.write(self.texts[path])


class TypeScript(Client):
    """tsserver: requests are lines, replies have headers."""

    name = "ts"

    def __init__(self, env, root):
        super().__init__(["node", "--expose-gc", HERE + "/tsserver.js", "--disableAutomaticTypingAcquisition", "--suppressDiagnosticEvents"], env, root)
        # Without these, idle servers look at every file all the time.
        self.request("configure", watchOptions={"watchFile": "UseFsEvents", "watchDirectory": "UseFsEvents"})

    def send(self, command, arguments):
        self.seq += 1
        self.write((json.dumps({"seq": self.seq, "type": "request", "command": command, "arguments": arguments}) + "\n").encode())

    def request(self, command, **arguments):
        self.send(command, arguments)
        while True:
            m = self.receive()
            if m["type"] == "response" and m["request_seq"] == self.seq:
                # A question without an answer is a failure to tsserver.
                return m.get("body") if m["success"] else None

    def at(self, path, line, column):
        return {"file": os.path.join(self.root, path), "line": line + 1, "offset": column + 1}

    def open(self, paths):
        for path in paths:
            if path not in self.texts:
                self.send("open", {"file": os.path.join(self.root, path), "fileContent": self.read(path)})

    def spans(self, found):
        return sorted({(self.relative(s["file"]), s["start"]["line"], s["start"]["offset"]) for s in found or []})

    def definition(self, path, line, column):
        return self.spans(self.request("definition", **self.at(path, line, column)))

    def references(self, path, line, column):
        return self.spans((self.request("references", **self.at(path, line, column)) or {}).get("refs"))

    def hover(self, path, line, column):
        return (self.request("quickinfo", **self.at(path, line, column)) or {}).get("displayString", "")

    def completion(self, path, line, column):
        body = self.request("completionInfo", **self.at(path, line, column)) or {}
        return sorted(e["name"] for e in body.get("entries", []))

    def diagnostics(self, path):
        return sorted((d["start"]["line"], d["code"], d["text"])
                      for command in ("syntacticDiagnosticsSync", "semanticDiagnosticsSync")
                      for d in self.request(command, file=os.path.join(self.root, path)) or [])

    def edit(self, path, text):
        lines = self.texts[path].split("\n")
        end = self.at(path, len(lines) - 1, len(lines[-1]))
        self.send("change", dict(end, endLine=end["line"], endOffset=end["offset"], insertString=text))
        self.append(path, text)
        return self.diagnostics(path)


class Python(Client):
    """python-lsp-server: LSP with jedi, pyflakes and pycodestyle."""

    name = "py"

    def __init__(self, env, root):
        super().__init__(["python3", HERE + "/pyserver.py"], env, root)
        self.published = {}  # path -> (how often, the last diagnostics)
        self.request("initialize", processId=None, rootUri=self.uri("."), capabilities={})
        self.notify("initialized")
        # Labels as plain names: the parameters of each candidate take long.
        self.notify("workspace/didChangeConfiguration", settings={"pylsp": {"plugins": {"jedi_completion": {
            "include_params": False, "resolve_at_most": 0}}}})

    def uri(self, path):
        return "file://" + urllib.parse.quote(os.path.normpath(os.path.join(self.root, path)))

    def path(self, uri):
        return self.relative(urllib.parse.unquote(uri[len("file://"):]))

    def send(self, message):
        b = json.dumps(dict(message, jsonrpc="2.0")).encode()
        self.write(b"Content-Length: %d\r\n\r\n%s" % (len(b), b))

    def notify(self, method, **params):
        self.send({"method": method, "params": params})

    def request(self, method, **params):
        self.seq += 1
        self.send({"id": self.seq, "method": method, "params": params})
        while True:
            m = self.next()
            if m.get("id") == self.seq and "method" not in m:
                if "error" in m:
                    raise RuntimeError("%s: %s" % (method, m["error"].get("message")))
                return m["result"]

    def next(self):
        m = self.receive()
        if m.get("method") == "textDocument/publishDiagnostics":
            path = self.path(m["params"]["uri"])
            self.published[path] = (self.published.get(path, (0,))[0] + 1, sorted(
                (d["range"]["start"]["line"] + 1, str(d.get("code", d["source"])), d["message"]) for d in m["params"]["diagnostics"]))
        return m

    def change(self, changes):
        """Tells of new contents (path -> method, parameters) and waits until
        they have been looked at: the server does that a while later, by itself."""
        seen = {path: self.published.get(path, (0,))[0] for path in changes}
        for method, params in changes.values():
            self.notify(method, **params)
        while any(self.published.get(path, (0,))[0] == n for path, n in seen.items()):
            self.next()

    def at(self, path, line, column):
        return {"textDocument": {"uri": self.uri(path)}, "position": {"line": line, "character": column}}

    def open(self, paths):
        self.change({path: ("textDocument/didOpen", {"textDocument": {
            "uri": self.uri(path), "languageId": "python", "version": 1, "text": self.read(path)}})
            for path in paths if path not in self.texts})

    def spans(self, found):
        return sorted({(self.path(s["uri"]), s["range"]["start"]["line"] + 1, s["range"]["start"]["character"] + 1) for s in found or []})

    def definition(self, path, line, column):
        return self.spans(self.request("textDocument/definition", **self.at(path, line, column)))

    def references(self, path, line, column):
        return self.spans(self.request("textDocument/references", context={"includeDeclaration": True}, **self.at(path, line, column)))

    def hover(self, path, line, column):
        contents = (self.request("textDocument/hover", **self.at(path, line, column)) or {}).get("contents", "")
        return json.dumps(contents, sort_keys=True)

    def completion(self, path, line, column):
        found = self.request("textDocument/completion", **self.at(path, line, column)) or {}
        return sorted(e["label"] for e in found.get("items", []))

    def diagnostics(self, path):
        return self.published[path][1]

    def edit(self, path, text):
        self.append(path, text)
        self.change({path: ("textDocument/didChange", {
            "textDocument": {"uri": self.uri(path), "version": len(self.texts[path])},
            "contentChanges": [{"text": self.texts[path]}]})})
        return self.diagnostics(path)


KINDS = {"ts": TypeScript, "py": Python}
