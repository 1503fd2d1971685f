// A tool server in an event loop with a 100 ms timer. It answers the lines "work N",
// after N ms of computing, and "beats", as server.py does.
'use strict';

let beats = 0;
setInterval(() => { beats++; }, 100);

function compute(ms) {
  const start = process.cpuUsage();
  let n = 0;
  for (;;) {
    const used = process.cpuUsage(start);
    if (used.user + used.system >= ms * 1000) return n;
    for (let i = 0; i < 500000; i++) n = (n * 31 + i) >>> 0;
  }
}

require('readline').createInterface({ input: process.stdin }).on('line', (line) => {
  const [word, arg] = line.split(' ');
  if (word === 'work') {
    compute(Number(arg));
    console.log('OK');
  } else if (word === 'beats') {
    console.log(String(beats));
  } else {
    console.log('BAD ' + line);
  }
}).on('close', () => process.exit(0));

console.log('READY');
