"""An engine on a thread of its own, which any number of threads may use at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import TypeVar

from octavo.engine.engine import Engine
from octavo.engine.events import TokenEvent, ends
from octavo.engine.request import Request
from octavo.engine.stats import EngineStats
from octavo.errors import EngineFailed

T = TypeVar("T")


class EventStream:
    """Token events of some requests, in the order they came. `close` aborts what has not ended."""

    def __init__(self, requests: Sequence[Request], abort: Callable[[list[str]], None]) -> None:
        self._running = {r.id for r in requests}
        self._abort = abort
        self.inbox: SimpleQueue[TokenEvent | EngineFailed] = SimpleQueue()

    def __iter__(self) -> Iterator[TokenEvent]:
        while self._running:
            event = self.inbox.get()
            if isinstance(event, EngineFailed):
                self._running.clear()
                raise event
            if event.id in self._running:
                if ends(event):
                    self._running.discard(event.id)
                yield event

    def finish(self, request_id: str) -> None:
        """Ends a request early, because a stop string came."""
        if request_id in self._running:
            self._running.discard(request_id)
            self._abort([request_id])

    def close(self) -> None:
        """Aborts the requests that have not ended."""
        if self._running:
            self._abort(list(self._running))
            self._running.clear()


class InProcessEngine:
    """Runs an Engine on one thread: only that thread touches the engine, callers submit and wait.

    Idle, the thread waits and uses no processor time.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._streams: dict[str, EventStream] = {}  # by request; of the engine's thread
        self._lock = threading.RLock()  # nothing is queued after the end; a finalizer may interrupt
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)
        self._thread.start()

    def submit(self, requests: Sequence[Request]) -> EventStream:
        """Queues requests together; all or none. Raises RequestError if one cannot be served."""
        stream = EventStream(requests, self._abort)
        self.call(lambda engine: self._add(engine, requests, stream))
        return stream

    def call(self, function: Callable[[Engine], T]) -> T:
        """What `function` returns or raises, run on the engine's thread between two steps.

        Raises EngineFailed once the engine is closed.
        """
        result: Future[T] = Future()

        def run() -> None:
            try:
                result.set_result(function(self._engine))
            except BaseException as e:
                result.set_exception(e)

        if not self._queue(run):
            raise EngineFailed("the engine is closed", code="engine_closed")
        return result.result()

    def stats(self) -> EngineStats:
        """The engine's counts, after everything that was asked of it before."""
        return self.call(lambda engine: engine.stats())

    def close(self) -> None:
        """Ends every request and the thread, and lets go of the engine. May be called again."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._calls.put(None)
        if threading.current_thread() is not self._thread:  # which a finalizer may run on
            self._thread.join()

    def _queue(self, call: Callable[[], None]) -> bool:
        with self._lock:
            if not self._closed:
                self._calls.put(call)
            return not self._closed

    def _add(self, engine: Engine, requests: Sequence[Request], stream: EventStream) -> None:
        added: list[str] = []
        try:
            for request in requests:
                engine.add(request)
                added.append(request.id)
        except BaseException:
            for request_id in added:
                engine.abort(request_id)
            raise
        self._streams |= dict.fromkeys(added, stream)

    def _abort(self, ids: list[str]) -> None:
        """Does not wait: it may be called by a finalizer, on any thread."""

        def run() -> None:
            for request_id in ids:
                self._streams.pop(request_id, None)
                self._engine.abort(request_id)

        self._queue(run)

    def _run(self) -> None:
        settled = False
        while True:
            busy = self._engine.has_work
            try:
                # Everything that has come by now, so that requests start in one step.
                while True:
                    call = self._calls.get(block=not busy and settled)
                    if call is None:
                        return self._end()
                    call()
                    settled = False
                    busy = self._engine.has_work
            except Empty:
                pass
            if busy:
                self._step()
            settled = not (self._engine.has_work or self._engine.pack_pending())

    def _step(self) -> None:
        try:
            events = self._engine.step()
        except Exception as e:
            failure = EngineFailed(f"the engine could not compute a step: {type(e).__name__}: {e}")
            return self._fail(failure)
        for event in events:
            stream = self._streams.get(event.id)
            if ends(event):
                self._streams.pop(event.id, None)
            if stream is not None:
                stream.inbox.put(event)

    def _fail(self, failure: EngineFailed) -> None:
        streams = set(self._streams.values())
        for request_id in self._streams:
            self._engine.abort(request_id)
        self._streams.clear()
        for stream in streams:
            stream.inbox.put(failure)

    def _end(self) -> None:
        self._fail(EngineFailed("the engine was closed", code="engine_closed"))
        del self._engine
