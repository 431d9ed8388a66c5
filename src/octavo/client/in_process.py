"""An engine on a thread of its own in this process."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TypeVar

import msgspec

from octavo.client.cached_prompts import CachedPrompts
from octavo.engine.engine import Engine
from octavo.engine.events import TokenEvent, ends
from octavo.engine.request import Request
from octavo.engine.stats import EngineStats
from octavo.errors import EngineFailed, RequestError, engine_closed, place

T = TypeVar("T")


class _EventQueue:
    """Where the events of one request go: a queue of the event loop that asked."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.events: asyncio.Queue[TokenEvent | RequestError] = asyncio.Queue()


Delivery = tuple[_EventQueue, TokenEvent | RequestError]


def _deliver(deliveries: list[Delivery]) -> None:
    for stream, event in deliveries:
        stream.events.put_nowait(event)


class EngineThread(threading.Thread):
    """The thread of an engine. A finalizer that happens to run on it must not wait for it."""


class InProcessClient:
    """Runs an Engine on one thread: only that thread touches the engine.

    Any number of event loops, on any threads, may submit requests. Idle, the thread waits and uses
    no processor time.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._streams: dict[str, _EventQueue] = {}  # by request; of the engine's thread
        self._lock = threading.RLock()  # nothing is queued after the end; a finalizer may interrupt
        self._closed = False
        self._ended: Future[None] = Future()
        self._ended.set_running_or_notify_cancel()  # who waits for it cannot cancel it
        self._adapters: list[str] = []
        self._stats: EngineStats | None = engine.stats()  # the latest
        self._thread = EngineThread(target=self._run, name="octavo-engine", daemon=True)
        self._thread.start()

    @property
    def ready(self) -> bool:
        return not self._closed

    @property
    def adapters(self) -> list[str]:
        return list(self._adapters)

    @property
    def stats(self) -> dict[str, int]:
        stats = self._stats
        return (msgspec.structs.asdict(stats) if stats else {}) | {"restarts": 0}

    async def read_stats(self) -> EngineStats:
        """The counts after everything that was asked before, once the step that runs has ended.

        Raises EngineFailed once the engine is closed.
        """
        return await asyncio.wrap_future(self._call(Engine.stats))

    @property
    def caches(self) -> Sequence[CachedPrompts]:
        return ()

    @property
    def pid(self) -> int | None:
        return os.getpid()

    async def submit(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        stream = _EventQueue()
        if not self._queue(lambda: self._add(request, stream)):
            raise engine_closed()
        running = True
        try:
            while running:
                event = await stream.events.get()
                running = not isinstance(event, RequestError) and not ends(event)
                if isinstance(event, RequestError):
                    raise event
                yield event
        finally:
            if running:
                self._queue(lambda: self._abort(request.id))

    async def load_adapter(self, name: str, path: str) -> None:
        await asyncio.wrap_future(self._call(lambda engine: self._load(engine, name, Path(path))))

    async def unload_adapter(self, name: str) -> None:
        await asyncio.wrap_future(self._call(lambda engine: self._unload(engine, name)))

    async def close(self) -> None:
        self._stop()
        await asyncio.wrap_future(self._ended)
        self._thread.join()

    def load(self, name: str, folder: Path) -> None:
        """Loads an adapter for a caller without an event loop."""
        self._call(lambda engine: self._load(engine, name, folder)).result()

    def stop(self) -> None:
        """Closes without an event loop, as finalizers do. May be called again."""
        self._stop()
        if not isinstance(threading.current_thread(), EngineThread):
            self._thread.join()

    # -- any thread -----------------------------------------------------------------------------

    def _stop(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._calls.put(None)

    def _queue(self, call: Callable[[], None]) -> bool:
        """Has the engine's thread make a call. Does not wait: finalizers may call it."""
        with self._lock:
            if not self._closed:
                self._calls.put(call)
            return not self._closed

    def _call(self, function: Callable[[Engine], T]) -> Future[T]:
        """What `function` will return or raise, run on the engine's thread between two steps.

        Raises EngineFailed once the engine is closed.
        """
        result: Future[T] = Future()

        def run() -> None:
            if not result.set_running_or_notify_cancel():
                return
            try:
                result.set_result(function(self._engine))
            except BaseException as e:
                result.set_exception(e)

        if not self._queue(run):
            raise engine_closed()
        return result

    # -- the engine's thread --------------------------------------------------------------------

    def _run(self) -> None:
        packed = False
        while True:
            busy = self._engine.has_work
            try:
                # Everything that has come by now, so that requests start in one step.
                while True:
                    call = self._calls.get(block=not busy and packed)
                    if call is None:
                        return self._end()
                    call()
                    self._stats = self._engine.stats()
                    packed = False
                    busy = self._engine.has_work
            except Empty:
                pass
            if busy:
                self._step()
            packed = not (self._engine.has_work or self._engine.pack_pending())

    def _add(self, request: Request, stream: _EventQueue) -> None:
        try:
            self._engine.add(request)
        except RequestError as e:
            return self._send([(stream, e)])
        except Exception as e:
            failure = EngineFailed(f"the engine cannot take this request: {place(e)}")
            return self._send([(stream, failure)])
        self._streams[request.id] = stream

    def _abort(self, request_id: str) -> None:
        self._streams.pop(request_id, None)
        self._engine.abort(request_id)

    def _load(self, engine: Engine, name: str, path: Path) -> None:
        if engine.adapters is None:
            raise RequestError("this model was loaded without adapters", "lora_name")
        engine.adapters.load(name, path)
        self._adapters.append(name)

    def _unload(self, engine: Engine, name: str) -> None:
        if engine.adapters is None:
            raise RequestError(f"no adapter {name[:64]!r}", "lora_name", "invalid_value")
        engine.adapters.unload(name)
        self._adapters.remove(name)

    def _step(self) -> None:
        try:
            events = self._engine.step()
        except Exception as e:
            return self._fail(EngineFailed(f"the engine could not compute a step: {place(e)}"))
        self._stats = self._engine.stats()  # before anybody hears of the step
        deliveries: list[Delivery] = []
        for event in events:
            stream = self._streams.get(event.id)
            if ends(event):
                self._streams.pop(event.id, None)
            if stream is not None:
                deliveries.append((stream, event))
        self._send(deliveries)

    def _send(self, deliveries: list[Delivery]) -> None:
        """Wakes each event loop once, with all that is for it."""
        by_loop: defaultdict[asyncio.AbstractEventLoop, list[Delivery]] = defaultdict(list)
        for stream, event in deliveries:
            by_loop[stream.loop].append((stream, event))
        for loop, own in by_loop.items():
            try:
                loop.call_soon_threadsafe(_deliver, own)
            except RuntimeError:  # the loop is closed: nobody waits any longer
                gone = {stream for stream, _ in own}
                for request_id in [i for i, s in self._streams.items() if s in gone]:
                    self._abort(request_id)

    def _fail(self, failure: EngineFailed) -> None:
        streams = list(self._streams.values())
        for request_id in self._streams:
            self._engine.abort(request_id)
        self._streams.clear()
        self._stats = self._engine.stats()
        self._send([(stream, failure) for stream in streams])

    def _end(self) -> None:
        self._fail(engine_closed())
        self._stats = None
        del self._engine
        self._ended.set_result(None)
