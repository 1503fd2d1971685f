"""Python's language server, with garbage collection on request: on SIGUSR2 it
collects and writes a byte to the file descriptor named in COLLECTED_FD."""

import ctypes
import gc
import os
import signal

from pylsp.__main__ import main


def collect(signum, frame):
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    os.write(int(os.environ["COLLECTED_FD"]), b".")


signal.signal(signal.SIGUSR2, collect)
main()
