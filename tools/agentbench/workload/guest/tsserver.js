// TypeScript's language server, with garbage collection on request: on SIGUSR2
// it collects and writes a byte to the file descriptor named in COLLECTED_FD.
// Node has to run with --expose-gc.
"use strict";

const fs = require("fs");

process.on("SIGUSR2", () => {
  // The second time frees what finalizers of the first one let go.
  global.gc();
  global.gc();
  fs.writeSync(Number(process.env.COLLECTED_FD), ".");
});

require("/usr/share/nodejs/typescript/lib/tsserver.js");
