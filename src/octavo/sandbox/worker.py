"""A pool of worker processes for untrusted input, with limits on CPU time and memory.

The kernel enforces the limits: a profiling timer kills the worker when a task takes too much CPU
time, and its address space is bounded. Code that runs in a worker need not count anything.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Callable

import msgspec

from octavo.errors import OctavoError, Overloaded, engine_closed
from octavo.process import python_module

HEADER = 4
PATIENCE = 60.0  # seconds of real time until a task fails because the host is too busy
MEMORY = 1 << 30

# What a task ran out of, by the signal that ended its worker.
COSTS: dict[int, str] = {
    signal.SIGPROF: "time", signal.SIGABRT: "memory", signal.SIGSEGV: "memory",
}  # fmt: skip

Handler = Callable[[bytes], bytes]


class TooCostly(OctavoError):
    """A task exceeded its limit. The message is "time" or "memory"."""


class _Start(msgspec.Struct, frozen=True):
    """The first frame: limits, and `about`, the data that `prepare` gets."""

    seconds: float
    memory: int
    about: bytes


class _Reply(msgspec.Struct, frozen=True):
    """The answer to a task or to the first frame. memory: the task ran out of memory."""

    body: bytes = b""
    memory: bool = False


def _frame(body: bytes) -> bytes:
    return len(body).to_bytes(HEADER, "little") + body


# -- in the worker ------------------------------------------------------------------------------


def serve(prepare: Callable[[bytes], Handler]) -> None:
    """Main function of a worker: answers tasks from standard input until it is closed."""
    connection = socket.socket(fileno=0)
    with contextlib.suppress(EOFError, ConnectionError, KeyboardInterrupt):
        start = msgspec.msgpack.decode(_receive(connection, None), type=_Start)
        resource.setrlimit(resource.RLIMIT_AS, (start.memory, start.memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        handle = prepare(start.about)
        connection.sendall(_frame(msgspec.msgpack.encode(_Reply())))
        while True:
            task = _receive(connection, None)
            signal.setitimer(signal.ITIMER_PROF, start.seconds)  # CPU time; its signal kills
            try:
                reply = _Reply(handle(task))
            except MemoryError:
                reply = _Reply(memory=True)
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.sendall(_frame(msgspec.msgpack.encode(reply)))


def _receive(connection: socket.socket, deadline: float | None) -> bytes:
    """The next frame. Raises EOFError at the end and TimeoutError past the deadline."""
    length = int.from_bytes(_exactly(connection, HEADER, deadline), "little")
    return _exactly(connection, length, deadline)


def _exactly(connection: socket.socket, count: int, deadline: float | None) -> bytes:
    data = bytearray()
    while len(data) < count:
        if deadline is not None:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
        piece = connection.recv(min(count - len(data), 1 << 20))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


# -- in the parent process ------------------------------------------------------------------------


class _Worker:
    """One process and the connection to it. Only its first task waits for it to start."""

    def __init__(self, module: str, start: bytes) -> None:
        own, its = socket.socketpair()
        with its:
            try:
                self.process: subprocess.Popen[bytes] = subprocess.Popen(
                    python_module(module),
                    stdin=its.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )  # fmt: skip
            except BaseException:
                own.close()
                raise
        self._connection = own
        self._start: bytes | None = start

    def ask(self, task: bytes, deadline: float) -> _Reply:
        """Raises EOFError, OSError or TimeoutError when there is no answer."""
        if self._start is not None:
            self._send(self._start, deadline)
            self._start = None
            _receive(self._connection, deadline)
        self._send(task, deadline)
        return msgspec.msgpack.decode(_receive(self._connection, deadline), type=_Reply)

    def _send(self, body: bytes, deadline: float) -> None:
        self._connection.settimeout(max(0.001, deadline - time.monotonic()))
        self._connection.sendall(_frame(body))

    def end(self, grace: float = 0.0) -> int:
        """Waits `grace` seconds for the process to end, then kills it. Returns its exit code, or
        minus the signal that ended it."""
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(grace)
        self.process.kill()
        return self.process.wait()


class WorkerPool:
    """Up to `count` workers, started on demand. Thread-safe.

    module: a Python module that calls `serve`. about: data for its `prepare` function. seconds: CPU
    time of a task. memory: address space of a worker in bytes. patience: real time of a task.
    """

    def __init__(
        self, module: str, about: bytes, *, seconds: float, count: int = 1, memory: int = MEMORY,
        patience: float = PATIENCE,
    ) -> None:  # fmt: skip
        self._module, self._patience = module, patience
        self._start = msgspec.msgpack.encode(_Start(seconds, memory, about))
        self._slots = threading.BoundedSemaphore(count)
        self._lock = threading.RLock()  # a finalizer that closes may interrupt who holds it
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()
        self._end = weakref.finalize(self, _end_all, self._all)  # also when nobody closes it

    def warm(self) -> None:
        """Starts a worker in advance, so that the first task waits less."""
        with contextlib.suppress(OSError), self._lock:
            self._idle.append(self._spawn())

    def close(self) -> None:
        """Ends the workers, and with them what they do. May be called again."""
        with self._lock:
            self._end()

    def ask(self, task: bytes) -> bytes:
        """The answer to a task. Raises TooCostly, Overloaded when the host is at fault, and
        EngineFailed once the pool is closed."""
        deadline = time.monotonic() + self._patience
        if not self._slots.acquire(timeout=self._patience):
            raise _busy()
        try:
            return self._ask(task, deadline)
        finally:
            self._slots.release()

    def _spawn(self) -> _Worker:
        worker = _Worker(self._module, self._start)
        self._all.add(worker)
        return worker

    def _ask(self, task: bytes, deadline: float) -> bytes:
        try:
            with self._lock:
                if not self._end.alive:
                    raise engine_closed()
                worker = self._idle.pop() if self._idle else self._spawn()
        except OSError:  # no handles, no memory, no processes
            raise _busy() from None
        healthy, ended = False, 0
        try:
            reply = worker.ask(task, deadline)
            healthy = True
        except TimeoutError:
            raise _busy() from None
        except (EOFError, OSError):
            ended = worker.end(grace=1.0)
            if cost := COSTS.get(-ended):
                raise TooCostly(cost) from None
            raise (_busy() if self._end.alive else engine_closed()) from None
        finally:
            if not healthy:
                self._all.discard(worker)
                worker.end()
        with self._lock:
            self._idle.append(worker)
        if reply.memory:
            raise TooCostly("memory")
        return reply.body


def _busy() -> Overloaded:
    return Overloaded("the server has no room for this now; try again", code="overloaded")


def _end_all(workers: set[_Worker]) -> None:
    while workers:
        workers.pop().end()
