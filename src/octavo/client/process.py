"""The front's side of an engine process: starts it, feeds it, watches it and replaces it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from copy import copy
from typing import Literal

from octavo import errors
from octavo.checkpoint.identity import FileState, check_unchanged
from octavo.client.adapter_table import Adapter, AdapterTable
from octavo.client.base import Overseer
from octavo.client.cached_prompts import CachedPrompts
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
from octavo.client.replay import Replay, Stream
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
Phase = Literal["starting", "ready", "ending", "closed"]  # ending: it is not known yet of what


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
        self._name, self._plan = name, plan
        self._files = dict(files or {})
        self._module = module
        self._table: TokenTable | None = None
        self.vocabulary = vocabulary
        self._queue, self._progress = queue, progress
        self._replay = Replay()
        self._adapters = AdapterTable()
        self._one_at_a_time = asyncio.Lock()
        self.link = EngineLink(spawned) if spawned is not None else None
        self._tasks: list[asyncio.Task[None]] = []  # that end with this engine
        self._supervisor: asyncio.Task[None] | None = None
        self.phase: Phase = "starting"
        self._failure: OctavoError | None = None  # why no engine is ready, once they are given up
        self._changed = asyncio.Event()  # either of them
        self._engines = 0  # that have been ready
        self._unstarted = self._futile = 0  # in a row that have not been; that computed nothing
        self.overseer: Overseer | None = None
        self.caches = (CachedPrompts(),)
        self._stats: dict[str, int] = {}
        self.isa = ""

    @property
    def ready(self) -> bool:
        """Loaded and not stopped."""
        return self.phase == "ready"

    @property
    def restarts(self) -> int:
        """Engines that have taken the place of another."""
        return max(0, self._engines - 1)

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
        await self._until_ready()

    async def _until_ready(self) -> None:
        """Returns once an engine is ready. Raises why there is none."""
        while not self.ready:
            self._check()
            await self._changed.wait()

    def _enter(self, phase: Phase, failure: OctavoError | None = None) -> None:
        """Changes the phase and wakes who waits for it. failure: is kept until `ready`."""
        if self.phase != "closed":
            self.phase = phase
            self._failure = None if phase == "ready" else failure or self._failure
        self._changed.set()
        self._changed = asyncio.Event()

    def _check(self) -> None:
        """Raises why there is no engine, once they are given up."""
        if self._failure is not None:
            raise copy(self._failure)  # each has a traceback

    async def close(self) -> None:
        closing = Overloaded("the server is shutting down", code="shutting_down")
        self._enter("closed", closing)
        self._replay.fail_all(closing)
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
        if self.link is not None:
            await self.link.end()
            self.link = None

    async def _supervise(self) -> None:
        """Runs one engine after the other, whatever they end of."""
        while self.phase != "closed":
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
            if not self._engines:  # another try would end the same way
                ended = EngineFailed("the engine ended while loading the model")
                return self._enter("starting", error or ended)
            if self._unstarted > PATIENCE or not isinstance(error, EngineFailed | None):
                self._give_up(error)
            await asyncio.sleep(BACKOFF[min(self._futile, len(BACKOFF) - 1)])
            self._futile += 1

    async def _serve_one(self) -> None:
        """Runs one engine process until its socket closes. Raises EOFError, or what Failed says."""
        self._unstarted += 1
        if self._engines:
            await asyncio.to_thread(check_unchanged, self._files)
        link = self.link = self.link or EngineLink(spawn(self._name, self._module))
        await link.open()
        link.send(Start(self._path, self._plan, self._files, self._mmproj))
        if self._table is not None:
            link.send(Vocabulary(self._table))
        self._tasks = [asyncio.create_task(self._watch(link))]
        try:
            while True:
                self._handle(await link.receive())
        finally:
            for task in self._tasks:
                task.cancel()
            self._adapters.engine_ended()

    async def _bury(self, error: OctavoError | None) -> None:
        """Ends what is left of an engine, and finds out what it died of."""
        link, self.link = self.link, None
        self._stats = {}
        self.caches[0].clear()
        if link is None:
            return
        self._enter("ending")
        status = await link.end()
        if error is None:
            doubt, ending = verdict(status, link.cause)
            when = ", while starting" if self._unstarted else ""
            LOG.warning("an engine has ended: %s%s", ending, when)
            self._blame(doubt)
        self._enter("starting")
        if self.overseer is not None:
            self.overseer.changed(self)

    def _blame(self, doubt: int) -> None:
        """Ends the request, or drops the adapter, that an engine has died of."""
        if lost := self._adapters.died(doubt):
            self._lose_adapter(lost, "the engine ended while it loaded it")
        if culprit := self._replay.died(doubt):
            LOG.error("a request has stopped the engine repeatedly, and was ended")
            message = "the engine stopped while it computed this request, also when it was alone"
            culprit.events.put_nowait(EngineFailed(message, code="engine_error"))

    def _give_up(self, error: OctavoError | None) -> None:
        """Tells everybody that there is no engine for now."""
        failure = Overloaded(unavailable(error), code="engine_failed")
        if str(self._failure) != str(failure):
            LOG.error("not ready: %s (%s)", failure, error or "it ends while it loads the model")
        self._enter("starting", failure)
        self._replay.fail_all(failure)

    async def _watch(self, link: EngineLink) -> None:
        """Kills a process that does not get on."""
        self._kill(link, await watch(link, lambda: self._replay.busy))

    def _kill(self, link: EngineLink, cause: str) -> None:
        link.cause = cause
        self._enter("ending")
        link.kill()

    async def restart(self) -> None:
        """Replaces the engine by a new one, which goes on with what this one has and is ready.
        Raises Overloaded if engines are given up meanwhile, or have been."""
        if self.link is not None and self.ready:
            self._kill(self.link, RESTART)
        await self._until_ready()

    # -- messages -------------------------------------------------------------------------------

    def _send(self, message: ToEngine) -> None:
        # While the engine restarts there is nobody to tell; streams are submitted when it is back.
        if self.link is not None and self.ready:
            self.link.send(message)

    def _turn(self) -> None:
        """Gives the engine the requests whose turn it is."""
        if not self.ready:
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
        if message.events:
            self._futile = 0
        if self.overseer is not None and (message.stored or message.removed):
            self.overseer.told(self, message.stored, message.removed)
        self.caches[0].take(message.prompts)
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
        self._check()
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
            if not self.ready or self.link is None:
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
        self._engines, self._unstarted = self._engines + 1, 0
        if self.restarts:
            LOG.warning("the engine is ready again")
        self._enter("ready")
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
