"""A tool server: it answers lines, some after so much computing.

usage: server.py MODE [ARG]

  stdio           lines on standard input
  polling         the same, beside a thread that looks around every 20 ms
  helpers N       the same, beside N processes that wait
  asyncio         lines on standard input, in an event loop with a 100 ms timer
  unix PATH       one line a connection
  tcp PORT        the same, on 127.0.0.1
  desk PORT       connections that say "wait" are answered when another says
                  "answer LINE": with LINE

Lines:

  work N          compute for N ms, then answer OK
  later D N       answer OK, sleep D ms, compute for N ms, then say DONE
  beats           answer how often the timer or the thread ran
  hint STATE      answer OK, then write STATE to /proc/agentzip
"""

import asyncio
import collections
import os
import socket
import subprocess
import sys
import threading
import time

beats = 0


def compute(ms):
    """Uses so much processor time, with next to no system calls."""
    end = time.process_time() + ms / 1000
    n = 0
    while time.process_time() < end:
        for i in range(20000):
            n = (n * 31 + i) & 0xFFFFFFFF


def say(line):
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def obey(line, answer):
    word, *args = line.split()
    if word == "work":
        compute(int(args[0]))
        answer("OK")
    elif word == "later":
        answer("OK")
        time.sleep(int(args[0]) / 1000)
        compute(int(args[1]))
        answer("DONE")
    elif word == "beats":
        answer(str(beats))
    elif word == "hint":
        answer("OK")
        with open("/proc/agentzip", "w") as f:
            f.write(args[0])
    else:
        answer("BAD " + line)


def stdio():
    say("READY")
    for line in sys.stdin:
        obey(line, say)


def poll():
    global beats
    while True:
        time.sleep(0.02)
        beats += 1


async def loop():
    async def beat():
        global beats
        while True:
            await asyncio.sleep(0.1)
            beats += 1

    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    task = asyncio.create_task(beat())
    say("READY")
    while line := await reader.readline():
        obey(line.decode(), say)
    task.cancel()


def serve(listener, handle):
    listener.listen(16)
    say("READY")
    while True:
        conn, _ = listener.accept()
        threading.Thread(target=handle, args=(conn,), daemon=True).start()


def once(conn):
    with conn, conn.makefile("rw") as f:

        def answer(line):
            f.write(line + "\n")
            f.flush()

        obey(f.readline(), answer)


def desk():
    """Returns a handler that hands answers to those who wait, in order."""
    turn = threading.Condition()
    answers = collections.deque()

    def handle(conn):
        with conn, conn.makefile("rw") as f:
            word, _, rest = f.readline().strip().partition(" ")
            if word == "answer":
                with turn:
                    answers.append(rest)
                    turn.notify()
                f.write("OK\n")
                f.flush()
                return
            with turn:
                while not answers:
                    turn.wait()
                line = answers.popleft()
            f.write(line + "\n")
            f.flush()

    return handle


def tcp(port):
    s = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    s.bind(("127.0.0.1", int(port)))
    return s


def unix(path):
    s = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    s.bind(path)
    return s


def main(mode, *args):
    if mode == "stdio":
        stdio()
    elif mode == "polling":
        threading.Thread(target=poll, daemon=True).start()
        stdio()
    elif mode == "helpers":
        # They wait for a pipe that nobody writes to, and end with this process.
        r, w = os.pipe()
        helpers = [subprocess.Popen(["/bin/cat"], stdin=r, stdout=subprocess.DEVNULL) for _ in range(int(args[0]))]
        stdio()
        os.close(w)
        for h in helpers:
            h.wait()
    elif mode == "asyncio":
        asyncio.run(loop())
    elif mode == "unix":
        serve(unix(args[0]), once)
    elif mode == "tcp":
        serve(tcp(args[0]), once)
    elif mode == "desk":
        serve(tcp(args[0]), desk())
    else:
        sys.exit(__doc__)


main(*sys.argv[1:])
