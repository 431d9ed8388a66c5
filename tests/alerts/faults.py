"""Faults of a running server, brought about from outside by what the kernel offers."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

ATTACH, DETACH = 16, 17  # of ptrace
THREADS = 0x40000000  # __WALL: waitpid waits for a thread, too
RUN, STOP = 0.004, 0.016  # seconds of turns


@contextmanager
def slowed(pid: int) -> Iterator[None]:
    """A process that runs a fifth of the time, as with cpulimit."""
    over = threading.Event()

    def turns() -> None:
        while not over.wait(RUN):
            os.kill(pid, signal.SIGSTOP)
            over.wait(STOP)
            os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=turns)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def stalled(pid: int) -> Iterator[None]:
    """A process whose main thread, which computes the steps, stands still: others go on."""
    _trace(ATTACH, pid)
    os.waitpid(pid, THREADS)
    try:
        yield
    finally:
        _trace(DETACH, pid)


def _trace(request: int, pid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    if libc.ptrace(request, pid, None, None):
        raise OSError(ctypes.get_errno(), f"ptrace({request})")


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Processes that take all the processor time they are given."""
    command = [sys.executable, "-c", "while True: pass"]
    burning = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for each in burning:
            each.kill()
            each.wait()
