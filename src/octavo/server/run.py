"""Runs a server: listens, loads models meanwhile, serves, drains, and ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp

from octavo.errors import UsageError, place
from octavo.generate.media import MediaPolicy
from octavo.server.background import Background
from octavo.server.batches import Batches
from octavo.server.exchange import Exchange, Observer, Running, Watcher
from octavo.server.guard import Access
from octavo.server.http_server import http_server
from octavo.server.logs import log_exchange
from octavo.server.memory_spikes import MemorySpikes
from octavo.server.metrics import Metrics
from octavo.server.pool import ModelPool
from octavo.server.registry import Registry
from octavo.server.source import Fetch, NamedSource, add_source
from octavo.server.store import Store
from octavo.server.timelines import Timelines

Find = Callable[[], Sequence[NamedSource]]
LOG = logging.getLogger("octavo.server")
FIND_SECONDS = 5.0  # between looks for models


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
    watchers: Sequence[Watcher] = ()
    ui: bool = True  # whether browsers get the page


def _application(*given: Any, **named: Any) -> ASGIApp:
    """`create_app`'s, whose imports take 0.1 s: an engine starts meanwhile."""
    from octavo.server.app import create_app

    return create_app(*given, **named)


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
    known = ""
    while True:
        try:
            for options, source in await asyncio.to_thread(find):
                with contextlib.suppress(UsageError):
                    add_source(models, options, source)
            known = ""
        except Exception as e:  # the next look may go well
            if (wrong := place(e)) != known:
                LOG.error("models could not be looked for: %s", wrong)
            known = wrong
        await asyncio.sleep(FIND_SECONDS)


async def _load_first(models: Registry, pool: ModelPool, count: int) -> None:
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
    models.loader = pool = ModelPool(wanted.budget, options.keep_alive)
    models.starting = True
    for each in wanted.sources:
        add_source(models, *each)
    metrics, keyring = Metrics(models), options.access.keyring
    timelines = Timelines(answered, metrics.slow)
    memory = MemorySpikes(models, answered, timelines.spikes, metrics.spiked)
    observers = [metrics.finished, timelines.add, memory.ended, log_exchange, ended]
    observers += [keyring.count] if keyring is not None else []
    observers += [watcher.observe for watcher in options.watchers]

    def observe(one: Exchange) -> None:
        for each in observers:
            each(one)

    starting = asyncio.create_task(_load_first(models, pool, wanted.first))
    app = await asyncio.to_thread(
        _application, models, metrics, options.access, observe, options.lora_folder, store=store,
        batches=batches, media=options.media, background=background, timelines=timelines,
        fetch=wanted.fetch, watchers=options.watchers, ui=options.ui,
    )  # fmt: skip
    server = http_server(
        app, models, options.drain_timeout, options.write_timeout, observe, answered
    )
    running = asyncio.create_task(server.serve_on(sock))
    tasks = [running, starting, *map(asyncio.create_task, (pool.expire(), memory.watch()))]
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
        for watcher in options.watchers:
            await asyncio.to_thread(watcher.close)
