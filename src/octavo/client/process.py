"""The front's side of an engine process: starts it, feeds it, watches it and replaces it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Collection, Mapping

from octavo import errors
from octavo.checkpoint.identity import FileState, check_unchanged
from octavo.client.adapter_table import Adapter, AdapterTable
from octavo.client.base import Overseer
from octavo.client.link import EngineLink
from octavo.client.load import DEFAULT_QUEUE, Load, QueueLimits, known
from octavo.client.protocol import (
    Abort,
    Adapted,
    Events,
    Failed,
    Loading,
    Ready,
    Refused,
    Start,
    Submit,
    ToEngine,
    ToFront,
    UnloadAdapter,
    Vocabulary,
)
from octavo.client.replay import SUSPECT, Replay, Stream
from octavo.client.spawned import ENGINE, Spawned, spawn
from octavo.client.watch import RESTART, unavailable, verdict, watch
from octavo.engine.constraint import TokenTable
from octavo.engine.events import TokenEvent
from octavo.engine.plan import Plan
from octavo.engine.request import Request
from octavo.errors import EngineFailed, OctavoError, Overloaded, RequestError, place

LOG = logging.getLogger(__name__)
BACKOFF = (0.0, 0.2, 1.0, 2.0, 5.0)  # the longest: what a server is late by, a cause having ended
PATIENCE = 3  # engines in a row that did not start, after which requests are no longer held back


class EngineProcessClient:
    """One supervised engine process.

    queue: limits beyond which new requests are refused with Overloaded. files: of the model, which
    must be the same whenever an engine reads them. module: what the process runs; name: what it is
    called in lists of processes. spawned: the first, if it has been started. mmproj: a file.
    """

    def __init__(
        self,
        path: str,
        plan: Plan,
        vocabulary: int,
        queue: QueueLimits = DEFAULT_QUEUE,
        progress: Callable[[int], None] = lambda _: None,
        files: Mapping[str, FileState] | None = None,
        module: str = ENGINE,
        name: str = "",
        spawned: Spawned | None = None,
        mmproj: str = "none",
    ) -> None:
        self._path, self._mmproj = path, mmproj
        self._name = name
        self._plan = plan
        self._files = dict(files or {})
        self._module = module
        self._table: TokenTable | None = None
        self.vocabulary = vocabulary
        self._queue = queue
        self._progress = progress
        self._replay = Replay()
        self._adapters = AdapterTable()
        self._one_at_a_time = asyncio.Lock()
        self.link = EngineLink(spawned) if spawned is not None else None
        self._tasks: list[asyncio.Task[None]] = []  # that end with this engine
        self._supervisor: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self._started = False  # an engine has been ready
        self._served = self._fruitful = False  # this engine has; it has computed something
        self._closing = False
        self._cause = ""  # why this engine is being killed
        self.judging = False  # it is not known yet what an engine has ended of
        self.overseer: Overseer | None = None
        self._stats: dict[str, int] = {}
        self.restarts = 0
        self.isa = ""
        self.failure: OctavoError | None = None  # why there is no engine

    @property
    def ready(self) -> bool:
        """Loaded and not stopped."""
        return self._ready.is_set() and not self._closing

    @property
    def adapters(self) -> list[str]:
        """Names of those that requests may ask for."""
        return self._adapters.names

    @property
    def adapter_paths(self) -> dict[str, str]:
        """The folders that the adapters were loaded from, by name."""
        return {name: self._adapters.adapters[name].path for name in self._adapters.names}

    @property
    def stats(self) -> dict[str, int]:
        """The engine's latest counts, and what only the front knows."""
        return known(self._stats, len(self._replay.streams), self._plan, self.restarts)

    # -- life -----------------------------------------------------------------------------------

    def spawn(self) -> None:
        """Starts the process unless that has been done, ahead of `start`. Raises EngineFailed."""
        if self.link is None:
            self.link = EngineLink(spawn(self._name, self._module))

    @property
    def pid(self) -> int | None:
        """The engine process's."""
        return self.link.pid if self.link else None

    def use(self, table: TokenTable) -> None:
        """Gives the tokens of the vocabulary, before `start` or meanwhile: until then engines are
        not ready."""
        self._table = table
        if self.link is not None and self.link.opened:
            self.link.send(Vocabulary(table))

    async def start(self) -> None:
        """Starts the engine and waits until it is ready. Raises what made it fail."""
        self._supervisor = asyncio.create_task(self._supervise())
        waiter = asyncio.create_task(self._ready.wait())
        await asyncio.wait({waiter, self._supervisor}, return_when=asyncio.FIRST_COMPLETED)
        waiter.cancel()
        if self.failure is not None:
            raise self.failure

    async def close(self) -> None:
        self._closing = True
        self._replay.fail_all(Overloaded("the server is shutting down", code="shutting_down"))
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
        self._stop_tasks()
        if self.link is not None:
            await self.link.end()
            self.link = None

    async def _supervise(self) -> None:
        """Runs one engine after the other, whatever they end of."""
        failures = unstarted = 0
        while not self._closing:
            error: OctavoError | None = None
            try:
                await self._serve_one()
            except EOFError:
                pass
            except OctavoError as e:
                error = e
            except Exception as e:
                LOG.error("an engine's messages could not be handled: %s", place(e))
            await self._bury(error)
            if not self._started:  # another try would end the same way
                self.failure = error or EngineFailed("the engine ended while loading the model")
                return
            unstarted = 0 if self._served else unstarted + 1
            known = error is not None and not isinstance(error, EngineFailed)
            if known or unstarted > PATIENCE:
                self._give_up(error)
            failures = 1 if self._fruitful else failures + 1
            await asyncio.sleep(BACKOFF[min(failures, len(BACKOFF)) - 1])

    async def _serve_one(self) -> None:
        """Runs one engine process until its socket closes. Raises EOFError, or what Failed says."""
        self._served = self._fruitful = False
        if self._started:
            await asyncio.to_thread(check_unchanged, self._files)
        self.spawn()
        assert self.link is not None
        link = self.link
        await link.open()
        self._tasks.append(asyncio.create_task(self._watch(link)))
        told = self.overseer is not None
        link.send(Start(self._path, self._plan, self._files, self._mmproj, told))
        if self._table is not None:
            link.send(Vocabulary(self._table))
        while True:
            self._handle(await link.receive())

    async def _bury(self, error: OctavoError | None) -> None:
        """Ends what is left of an engine, and finds out what it died of."""
        link, self.link = self.link, None
        self._ready.clear()
        self._stats = {}
        self._stop_tasks()
        self._adapters.engine_ended()
        if link is None:
            return
        self.judging = True
        try:
            status, cause = await link.end(), self._cause
        finally:
            self.judging = False
        self._cause = ""
        if error is None:
            doubt, ending = verdict(status, cause)
            when = "" if self._served else ", while starting"
            LOG.warning("an engine has ended: %s%s", ending, when)
            self._blame(doubt)
        if self.overseer is not None:
            self.overseer.changed(self)

    def _stop_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()

    def _blame(self, doubt: int) -> None:
        """Ends the request, or drops the adapter, that an engine has died of."""
        restoring, self._adapters.restoring = self._adapters.restoring, ""
        if adapter := self._adapters.adapters.get(restoring):
            adapter.doubt += doubt
            if adapter.doubt >= SUSPECT:
                self._lose_adapter(restoring, "the engine ended while it loaded it")
        if culprit := self._replay.died(doubt):
            LOG.error("a request has stopped the engine repeatedly, and was ended")
            message = "the engine stopped while it computed this request, also when it was alone"
            culprit.events.put_nowait(EngineFailed(message, code="engine_error"))

    def _give_up(self, error: OctavoError | None) -> None:
        """Tells everybody that there is no engine for now."""
        why = unavailable(error)
        if self.failure is None or str(self.failure) != why:
            LOG.error("not ready: %s (%s)", why, error or "it ends while it loads the model")
        self.failure = Overloaded(why, code="engine_failed")
        self._replay.fail_all(Overloaded(why, code="engine_failed"))

    async def _watch(self, link: EngineLink) -> None:
        """Kills a process that does not get on."""
        self._kill(link, await watch(link, lambda: self._replay.busy))

    def _kill(self, link: EngineLink, cause: str) -> None:
        self._cause = cause
        self._ready.clear()
        link.kill()

    async def restart(self) -> None:
        """Replaces the engine by a new one, which goes on with what this one has and is ready."""
        if self.link is not None and self._ready.is_set():
            self._kill(self.link, RESTART)
        await self._ready.wait()

    # -- messages -------------------------------------------------------------------------------

    def _send(self, message: ToEngine) -> None:
        # While the engine restarts there is nobody to tell; streams are submitted when it is back.
        if self.link is not None and self._ready.is_set():
            self.link.send(message)

    def _turn(self) -> None:
        """Gives the engine the requests whose turn it is."""
        if not self._ready.is_set():
            return
        back, submitted = self._replay.turn()
        for name in back:
            self._send(Abort(name))
        for stream in submitted:
            try:
                self._send(Submit(stream.resumed(asyncio.get_running_loop().time())))
            except (ValueError, TypeError, OverflowError):
                message = "the request holds a value that cannot be sent to the engine"
                stream.events.put_nowait(RequestError(message, code="invalid_value"))

    def _handle(self, message: ToFront) -> None:
        if isinstance(message, Events):
            self._events(message)
        elif isinstance(message, Loading):
            self._progress(message.bytes)
        elif isinstance(message, Ready):
            self.isa = message.isa
            assert self.link is not None
            self._tasks.append(asyncio.create_task(self._restore(self.link)))
        elif isinstance(message, Refused):
            if stream := self._replay.find(message.id):
                error = EngineFailed if message.code == "engine_error" else RequestError
                stream.events.put_nowait(error(message.message, message.param, message.code))
        elif isinstance(message, Adapted):
            self._adapters.answered(message)
        elif isinstance(message, Failed):
            raise getattr(errors, message.kind, OctavoError)(message.message, *message.suggestions)

    def _events(self, message: Events) -> None:
        self._stats = message.stats
        self._fruitful |= bool(message.events)
        if self.overseer is not None and (message.stored or message.removed):
            self.overseer.told(self, message.stored, message.removed)
        for event in message.events:
            if stream := self._replay.find(event.id):
                for each in stream.take(event):
                    stream.events.put_nowait(each)
        if self._replay.stepped():
            self._turn()

    # -- requests -------------------------------------------------------------------------------

    async def submit(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        """Token events of a request until its end. Closing the iterator aborts it.

        Raises RequestError if the engine refuses it, Overloaded if it cannot be served now.
        """
        stream = Stream.of(request, asyncio.get_running_loop().time())
        self.check(stream)
        self.adopt(stream)
        async with contextlib.aclosing(stream.until_end(self.release)) as events:
            async for event in events:
                yield event

    @property
    def streams(self) -> Collection[Stream]:
        """Those in flight, in order of arrival."""
        return self._replay.streams

    @property
    def suspicious(self) -> bool:
        """Whether requests run alone because an engine may have died of one of them."""
        return self._replay.suspicious

    @property
    def places(self) -> int:
        """Requests that are computed together."""
        return self._plan.limits.selected

    def check(self, stream: Stream) -> None:
        """Raises Overloaded for a stream that cannot be taken now."""
        if self._closing:
            raise Overloaded("the server is shutting down", code="shutting_down")
        if self.failure is not None:
            raise Overloaded(str(self.failure), code="engine_failed")
        self._queue.check(stream, Load.of(self._replay.streams, self.places, self._stats))

    def adopt(self, stream: Stream) -> None:
        """Takes a stream, wherever it has got to, until it is released. Raises RequestError."""
        self._adapters.acquire(stream)
        self._replay.add(stream)
        self._turn()

    def release(self, stream: Stream) -> None:
        """Forgets a stream, and ends what the engine computes of it."""
        if (name := self._replay.remove(stream)) and not stream.over:
            self._send(Abort(name))
        if self._adapters.release(stream):
            self._send(UnloadAdapter(stream.request.adapter))
        self._turn()  # it may have been the one that others wait for

    # -- adapters -------------------------------------------------------------------------------

    async def load_adapter(self, name: str, path: str) -> None:
        """Loads a LoRA adapter; a new engine loads it again. Raises RequestError."""
        async with self._one_at_a_time:
            self._adapters.check_free(name)
            adapter = await asyncio.to_thread(Adapter.at, path)
            if not self._ready.is_set() or self.link is None:
                raise Overloaded("the engine is starting", code="loading")
            await self._adapters.load(self.link, name, adapter)
            self._adapters.adapters[name] = adapter

    async def unload_adapter(self, name: str) -> None:
        """Keeps an adapter from new requests, and unloads it once those that use it have ended.
        Raises RequestError."""
        if self._adapters.leave(name):
            self._send(UnloadAdapter(name))

    async def _restore(self, link: EngineLink) -> None:
        """Gives a new engine the adapters, then the requests that others did not finish."""
        try:
            await self._adapters.restore(link, self._lose_adapter)
        except EngineFailed:
            return
        if self._started:
            self.restarts += 1
            LOG.warning("the engine is ready again")
        self.failure, self._served, self._started = None, True, True
        self._ready.set()
        self._turn()
        if self.overseer is not None:
            self.overseer.changed(self)

    def _lose_adapter(self, name: str, reason: str) -> None:
        """An engine cannot have an adapter any more: it goes, with the requests that use it."""
        if self._adapters.adapters.pop(name, None) is None:  # it has left meanwhile
            return
        LOG.error("adapter %s is unloaded: %s", name, reason)
        for stream in self._replay.streams:
            if stream.request.adapter == name:
                message = f"the adapter {name!r} could not be loaded again: {reason}"
                stream.events.put_nowait(EngineFailed(message, "adapter", "adapter_lost"))
