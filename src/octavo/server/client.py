"""The front's side of an engine process: starts it, feeds it, restarts it and replays its requests.

Replay is invisible to clients: a request's tokens depend on nothing but the request, so a new
engine, told which tokens were already given, continues with the very next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

import msgspec

from octavo import errors
from octavo.engine.constraint import TokenTable
from octavo.engine.plan import Plan
from octavo.engine.request import Request, TokenEvent
from octavo.errors import EngineFailed, OctavoError, Overloaded, RequestError
from octavo.process import python_module
from octavo.server.engine_process import plan_fields
from octavo.server.protocol import (
    Abort,
    Adapted,
    Events,
    Failed,
    LoadAdapter,
    Loading,
    Ready,
    Refused,
    Start,
    Submit,
    ToEngine,
    ToFront,
    UnloadAdapter,
    frame,
    read_frame,
)

ADAPT_SECONDS = 60.0  # for an adapter to load
STALL = 10.0  # seconds without a frame while requests run: not making progress
CRASHES = 2  # a request that has seen more engine deaths than this is failed, not replayed
BACKOFF = (0.0, 0.2, 1.0, 5.0, 15.0)
STABLE = 30.0  # seconds after which a new death is not counted as a crash loop


@dataclass
class _Stream:
    request: Request
    events: asyncio.Queue[TokenEvent | RequestError] = field(default_factory=asyncio.Queue)
    given: list[int] = field(default_factory=list)
    scored: int = 0
    crashes: int = 0


class EngineClient:
    """One supervised engine process.

    max_queue: requests in flight beyond which new ones are refused with Overloaded.
    """

    def __init__(
        self,
        path: str,
        plan: Plan,
        vocabulary: int,
        max_queue: int = 256,
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._path = path
        self._plan = plan_fields(plan)
        self.table = TokenTable([], [], [])  # of the vocabulary; set before `start`
        self.vocabulary = vocabulary
        self._max_queue = max_queue
        self._progress = progress
        self._streams: dict[str, _Stream] = {}
        self.adapters: dict[str, str] = {}  # names and paths of what is loaded
        self._adapting: tuple[str, asyncio.Future[Adapted]] | None = None
        self._one_at_a_time = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None  # to a process that has not been told what to do
        self._writer: asyncio.StreamWriter | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self._heard = 0.0
        self._closing = False
        self.draining = False  # set when the server is told to stop: new requests are refused
        self.stats: dict[str, int] = {}
        self.restarts = 0
        self.isa = ""
        self.failure: OctavoError | None = None

    @property
    def ready(self) -> bool:
        """Loaded, not draining, and making progress on whatever runs."""
        stalled = bool(self._streams) and time.monotonic() - self._heard > STALL
        return self._ready.is_set() and not self.draining and not stalled

    @property
    def pid(self) -> int | None:
        """The engine process's."""
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Starts the engine and waits until it is ready. Raises what made it fail."""
        self._supervisor = asyncio.create_task(self._supervise())
        waiter = asyncio.create_task(self._ready.wait())
        await asyncio.wait({waiter, self._supervisor}, return_when=asyncio.FIRST_COMPLETED)
        waiter.cancel()
        if self.failure is not None:
            raise self.failure

    async def close(self) -> None:
        """Ends the engine process and every stream."""
        self._closing = True
        if self._socket is not None:
            self._socket.close()
        if self._writer is not None:
            self._writer.close()
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
        self._reap()
        self.end_streams()

    def end_streams(self) -> None:
        """Ends every request: the server does not wait for it any longer."""
        self._fail_all(Overloaded("the server is shutting down", code="shutting_down"))

    async def submit(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        """Token events of a request until its end. Closing the iterator aborts it.

        Raises RequestError if the engine refuses it, Overloaded if the queue is full.
        """
        if self.draining or self._closing:
            raise Overloaded("the server is shutting down", code="shutting_down")
        if self.failure is not None:
            raise EngineFailed("the engine is gone and cannot start again", code="engine_failed")
        if len(self._streams) >= self._max_queue:
            raise Overloaded(
                f"{len(self._streams)} requests are in flight, which is the limit",
                code="overloaded",
            )
        stream = self._streams[request.id] = _Stream(request)
        if not self._streams.keys() - {request.id}:
            self._heard = time.monotonic()
        self._send(Submit(request))
        finished = False
        try:
            while True:
                event = await stream.events.get()
                if isinstance(event, RequestError):
                    finished = True
                    raise event
                finished = event.finish is not None and not event.more
                yield event
                if finished:
                    return
        finally:
            self._streams.pop(request.id, None)
            if not finished:
                self._send(Abort(request.id))

    async def load_adapter(self, name: str, path: str) -> None:
        """Loads a LoRA adapter; a restarted engine loads it again. Raises RequestError."""
        await self._adapt(LoadAdapter(name, path))
        self.adapters[name] = path

    async def unload_adapter(self, name: str) -> None:
        """Unloads an adapter once its requests have ended. Raises RequestError."""
        await self._adapt(UnloadAdapter(name))
        del self.adapters[name]

    async def _adapt(self, message: LoadAdapter | UnloadAdapter) -> None:
        async with self._one_at_a_time:
            if not self._ready.is_set():
                raise Overloaded("the engine is starting", code="loading")
            done: asyncio.Future[Adapted] = asyncio.get_running_loop().create_future()
            self._adapting = (message.name, done)
            self._send(message)
            try:
                answer = await asyncio.wait_for(done, ADAPT_SECONDS)
            except TimeoutError:
                raise EngineFailed("the engine did not answer", code="engine_failed") from None
            finally:
                self._adapting = None
        if answer.message:
            raise RequestError(answer.message, answer.param, answer.code)

    def _send(self, message: ToEngine) -> None:
        # While the engine restarts there is nobody to tell; streams are submitted when it is back.
        if self._writer is not None and self._ready.is_set():
            self._writer.write(frame(message))

    async def _supervise(self) -> None:
        failures = 0
        while not self._closing:
            began = time.monotonic()
            try:
                await self._serve_one()
            except EOFError:
                pass
            finally:
                self._ready.clear()
                self._reap()
            if self.failure is not None or self._closing:
                break
            if not self.isa:  # it never became ready, so another try would end the same way
                self.failure = EngineFailed("the engine process ended while loading the model")
                break
            failures = 1 if time.monotonic() - began > STABLE else failures + 1
            self.restarts += 1
            self._count_crash()
            await asyncio.sleep(BACKOFF[min(failures - 1, len(BACKOFF) - 1)])
        if self.failure is not None:
            self._fail_all(EngineFailed(f"the engine cannot start: {self.failure}"))

    def spawn(self) -> None:
        """Starts the engine process, which imports what it needs until it is told what to load."""
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                python_module(
                    "octavo.server.engine_process", str(theirs.fileno()), str(os.getpid())
                ),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C is the front's business, from the first import on
            )

    async def _serve_one(self) -> None:
        """Runs one engine process until its socket closes."""
        if self._socket is None:
            self.spawn()
        ours, self._socket = self._socket, None
        reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        self._writer.write(frame(Start(self._path, self.table, self._plan)))
        while True:
            self._handle(await read_frame(reader))

    def _handle(self, message: ToFront) -> None:
        self._heard = time.monotonic()
        if isinstance(message, Loading):
            self._progress(message.bytes)
        elif isinstance(message, Ready):
            self.isa = message.isa
            self._ready.set()
            for name, path in self.adapters.items():
                self._send(LoadAdapter(name, path))
            for running in self._streams.values():
                resumed = msgspec.structs.replace(
                    running.request, resume=list(running.given), scored=running.scored
                )
                self._send(Submit(resumed))
        elif isinstance(message, Events):
            self.stats = message.stats
            for event in message.events:
                if stream := self._streams.get(event.id):
                    stream.scored += len(event.scores)
                    if event.token is not None:
                        stream.given.append(event.token)
                    stream.events.put_nowait(self._failure(event) or event)
        elif isinstance(message, Refused):
            if stream := self._streams.get(message.id):
                stream.events.put_nowait(RequestError(message.message, message.param, message.code))
        elif isinstance(message, Adapted):
            if self._adapting is not None and self._adapting[0] == message.name:
                self._adapting[1].set_result(message)
                self._adapting = None
        elif isinstance(message, Failed):
            kind = getattr(errors, message.kind, OctavoError)
            self.failure = kind(message.message, *message.suggestions)

    def _failure(self, event: TokenEvent) -> RequestError | None:
        if event.finish == "deadline":
            return EngineFailed("the request's deadline passed", "timeout", "deadline_exceeded")
        if event.finish == "refused":
            return RequestError(event.error or "", "response_format", "constraint_failed")
        if event.finish == "error":
            return EngineFailed("the engine could not compute this request", code="engine_error")
        return None

    def _count_crash(self) -> None:
        for stream in self._streams.values():
            stream.crashes += 1
            if stream.crashes > CRASHES:
                message = "the engine stopped repeatedly while computing this request"
                stream.events.put_nowait(EngineFailed(message, code="engine_restarted"))

    def _fail_all(self, error: RequestError) -> None:
        for stream in self._streams.values():
            stream.events.put_nowait(error)

    def _reap(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None
