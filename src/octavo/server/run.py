"""Runs a server: listens, loads models meanwhile, serves, drains, and ends."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from octavo.errors import UsageError
from octavo.generate.media import MediaPolicy
from octavo.server.background import Background
from octavo.server.batches import Batches
from octavo.server.bodies import MAX_BODY
from octavo.server.connection import Connection, Limits, connection_limit, watch
from octavo.server.exchange import Exchange, Observer, Running
from octavo.server.guard import Access
from octavo.server.logs import log_exchange
from octavo.server.metrics import Metrics
from octavo.server.pool import Pool
from octavo.server.registry import Registry
from octavo.server.source import Fetch, NamedSource, add_source
from octavo.server.store import Store

Find = Callable[[], Sequence[NamedSource]]
FIND_SECONDS = 5.0  # between looks for models
KEEP_ALIVE = 30  # seconds between requests
DRAIN_LOOK = 0.02  # seconds between looks whether all is answered
HURRY = 3  # seconds for errors to be sent after the time to drain


@dataclass(frozen=True)
class ServeOptions:
    """A server, whatever it serves. write_timeout: seconds for a client to take what is sent."""

    access: Access
    drain_timeout: int = 30
    write_timeout: float = 60
    lora_folder: Path | None = None  # where adapters may be loaded from while serving
    media: MediaPolicy = field(default_factory=MediaPolicy)
    keep_alive: float | None = None  # seconds after which idle models are unloaded
    data: Path | None = None  # of what outlives the server; None: nothing does
    ui: bool = True  # whether browsers get the page


class _Server(uvicorn.Server):
    """The first signal drains, the second ends at once.

    Requests that are running when their time is up end with an error that says so. running: all of
    them, also those of sockets and what goes on in the background.
    """

    def __init__(
        self, config: uvicorn.Config, models: Registry, drain_timeout: float, running: Running
    ) -> None:
        super().__init__(config)
        self._models = models
        self._running = running
        self._drain_timeout = drain_timeout
        self._loop = asyncio.get_running_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._models.draining = True
        self.force_exit = self.should_exit
        self.should_exit = True
        if self.force_exit:
            self._loop.call_soon_threadsafe(self._hang_up)

    def _hang_up(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._watch = asyncio.create_task(watch(self.server_state.connections))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(self._end_requests())
        try:
            await self._drain()
            self.config.timeout_graceful_shutdown = HURRY
            await super().shutdown(sockets)
        finally:
            ending.cancel()
            self._watch.cancel()

    async def _drain(self) -> None:
        """Waits for what is being answered. Sockets stay open meanwhile, for their answers."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._drain_timeout + HURRY):
                while not self.force_exit and any(
                    s["type"] == "http" for each in self._running.values() for s in each
                ):
                    await asyncio.sleep(DRAIN_LOOK)

    async def _end_requests(self) -> None:
        await asyncio.sleep(self._drain_timeout)
        await self._models.close()


def _application(*given: Any, **named: Any) -> ASGIApp:
    """`create_app`'s, whose imports take 0.1 s: an engine starts meanwhile."""
    from octavo.server.app import create_app

    return create_app(*given, **named)


def _socket_protocol(**given: Any) -> asyncio.Protocol:
    from octavo.server.socket_protocol import SocketProtocol

    return SocketProtocol(**given)


def _server(
    app: ASGIApp, models: Registry, options: ServeOptions, observe: Observer, running: Running
) -> _Server:
    from octavo.server.dialects import DIALECTS

    limits = Limits(connection_limit(), write_seconds=options.write_timeout)
    connection = partial(
        Connection, limits=limits, observe=observe, error_body=DIALECTS[0].error_body
    )
    config = uvicorn.Config(
        app,
        http=cast(type[asyncio.Protocol], connection),
        ws=cast(type[asyncio.Protocol], _socket_protocol),
        ws_max_size=MAX_BODY,
        ws_per_message_deflate=False,
        log_level="critical",
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=options.drain_timeout + HURRY,
    )
    return _Server(config, models, options.drain_timeout, running)


@dataclass(frozen=True)
class Models:
    """What a server serves: models within one budget of bytes.

    first: those to load at the start, as far as there is room. find: gives the models that have
    been found beside them since the last time; it may block. fetch: fetches one, None where that is
    forbidden.
    """

    sources: Sequence[NamedSource]
    budget: int
    first: int = 0
    find: Find | None = None
    fetch: Fetch | None = None


async def _find(models: Registry, find: Find) -> None:
    """Adds models that are found while serving, for ever. One with a taken name is left out."""
    while True:
        for options, source in await asyncio.to_thread(find):
            with contextlib.suppress(UsageError):
                add_source(models, options, source)
        await asyncio.sleep(FIND_SECONDS)


async def _load_first(models: Registry, pool: Pool, count: int) -> None:
    """Loads the models that are named, in order, while there is room. Raises OctavoError."""
    for entry in list(models)[:count]:
        if entry.pinned or await asyncio.to_thread(pool.has_room, entry):
            await pool.load(entry)
    models.starting = False


async def serve(
    options: ServeOptions,
    wanted: Models,
    sock: socket.socket,
    *,
    ready: Callable[[Registry], None],
    ended: Observer,
) -> None:
    """Serves models until a signal. Raises OctavoError.

    ready: called once the first can answer. ended: called with every exchange that has ended.
    """
    with closing(Store(options.data)) as store:
        await _serve(options, wanted, sock, store, ready, ended)


async def _serve(
    options: ServeOptions, wanted: Models, sock: socket.socket, store: Store,
    ready: Callable[[Registry], None], ended: Observer,
) -> None:  # fmt: skip
    models, batches, background = Registry(), Batches(store), Background()
    answered = Running()
    models.loader = pool = Pool(wanted.budget, options.keep_alive)
    models.starting = True
    for each in wanted.sources:
        add_source(models, *each)
    metrics, keyring = Metrics(models), options.access.keyring

    def observe(one: Exchange) -> None:
        metrics.finished(one)
        log_exchange(one)
        if keyring is not None:
            keyring.count(one)
        ended(one)

    starting = asyncio.create_task(_load_first(models, pool, wanted.first))
    app = await asyncio.to_thread(
        _application, models, metrics, options.access, observe, options.lora_folder, store=store,
        batches=batches, media=options.media, background=background, running=answered,
        fetch=wanted.fetch, ui=options.ui,
    )  # fmt: skip
    server = _server(app, models, options, observe, answered)
    running = asyncio.create_task(server.serve([sock]))
    tasks = [running, starting, asyncio.create_task(pool.expire())]
    if keyring is not None:
        tasks.append(asyncio.create_task(keyring.watch()))
    if wanted.find is not None:
        tasks.append(asyncio.create_task(_find(models, wanted.find)))
    try:
        await asyncio.wait({running, starting}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            ready(models)
            batches.resume()
        await running
    finally:
        server.should_exit = True
        for task in tasks[1:]:
            task.cancel()
        await batches.close()
        await background.close()
        await pool.close()
        await asyncio.gather(*(e.model.close() for e in models if e.model is not None))
        await asyncio.gather(*tasks, return_exceptions=True)
        if keyring is not None:
            await keyring.close()
