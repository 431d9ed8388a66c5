"""Runs a server: listens, loads the model meanwhile, serves, drains, and ends."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from octavo.checkpoint.hub import Located
from octavo.client.process import EngineProcessClient
from octavo.engine.defaults import GenerationConfig
from octavo.engine.loader import OpenModel
from octavo.engine.plan import Plan
from octavo.errors import RequestError, UsageError
from octavo.generate.load import served_model, token_table
from octavo.generate.media import MediaPolicy
from octavo.generate.model import ServedModel
from octavo.server.app import create_app
from octavo.server.connection import Connection, Limits, connection_limit, watch
from octavo.server.dialects import DIALECTS
from octavo.server.exchange import Exchange, Observer
from octavo.server.guard import Access
from octavo.server.logs import log_exchange
from octavo.server.metrics import Metrics
from octavo.server.registry import Registry
from octavo.text import ChatTemplate, load_tokenizer
from octavo.text.chat import template_source

KEEP_ALIVE = 30  # seconds between requests
HURRY = 3  # seconds for errors to be sent after the time to drain


@dataclass(frozen=True)
class ModelOptions:
    """A model to serve. name: what clients call it. adapters: loaded at start, by name."""

    located: Located
    name: str
    plan: Plan
    chat_template: str | None = None
    max_queue: int = 256
    adapters: tuple[tuple[str, Path], ...] = ()
    generation_config: GenerationConfig = "auto"


@dataclass(frozen=True)
class ServeOptions:
    """A server, whatever it serves. write_timeout: seconds for a client to take what is sent."""

    access: Access
    drain_timeout: int = 30
    write_timeout: float = 60
    lora_folder: Path | None = None  # where adapters may be loaded from while serving
    media: MediaPolicy = field(default_factory=MediaPolicy)


class _Server(uvicorn.Server):
    """The first signal drains, the second ends at once.

    Requests that are running when their time is up end with an error that says so.
    """

    def __init__(self, config: uvicorn.Config, models: Registry, drain_timeout: float) -> None:
        super().__init__(config)
        self._models = models
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
            await super().shutdown(sockets)
        finally:
            ending.cancel()
            self._watch.cancel()

    async def _end_requests(self) -> None:
        await asyncio.sleep(self._drain_timeout)
        await self._models.close()


def _server(app: ASGIApp, models: Registry, options: ServeOptions, observe: Observer) -> _Server:
    limits = Limits(connection_limit(), write_seconds=options.write_timeout)
    connection = partial(
        Connection, limits=limits, observe=observe, error_body=DIALECTS[0].error_body
    )
    config = uvicorn.Config(
        app,
        http=cast(type[asyncio.Protocol], connection),
        ws="none",
        log_level="critical",
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=options.drain_timeout + HURRY,
    )
    return _Server(config, models, options.drain_timeout)


async def open_served(
    options: ModelOptions, model: OpenModel, client: EngineProcessClient
) -> ServedModel:
    """What is read of a model beside its engine. Raises OctavoError."""
    tokenizer = await asyncio.to_thread(load_tokenizer, model.checkpoint)
    source = options.chat_template or template_source(model.checkpoint)
    template = ChatTemplate(source, tokenizer) if source else None
    if template is not None:
        await asyncio.to_thread(template.check)
    client.table = token_table(tokenizer)
    return served_model(
        model, options.located, tokenizer, client.table, template, client, options.plan.context,
        options.generation_config, options.name,
    )  # fmt: skip


async def _start(client: EngineProcessClient, adapters: tuple[tuple[str, Path], ...]) -> None:
    """Waits until the engine is ready and has its adapters. Raises OctavoError."""
    await client.start()
    for name, path in adapters:
        try:
            await client.load_adapter(name, str(path))
        except RequestError as e:
            raise UsageError(f"--lora {name}: {e}") from None


async def serve(
    options: ServeOptions,
    wanted: ModelOptions,
    model: OpenModel,
    sock: socket.socket,
    *,
    progress: Callable[[int], None],
    ready: Callable[[EngineProcessClient, ServedModel], None],
    ended: Observer,
) -> None:
    """Serves a model until a signal. Raises OctavoError.

    ready: called once the model can answer. ended: called with every exchange that has ended.
    """
    client = EngineProcessClient(
        str(wanted.located.path), wanted.plan, model.vocabulary, wanted.max_queue, progress,
        model.checkpoint.states,
    )  # fmt: skip
    client.spawn()
    try:
        served = await open_served(wanted, model, client)
    except BaseException:
        await client.close()
        raise
    models = Registry()
    entry = models.add(served.name, client, served.aliases)
    metrics = Metrics(models)

    def observe(one: Exchange) -> None:
        metrics.finished(one)
        log_exchange(one)
        ended(one)

    app = create_app(
        models, metrics, options.access, observe, options.lora_folder, media=options.media
    )
    server = _server(app, models, options, observe)
    running = asyncio.create_task(server.serve([sock]))
    starting = asyncio.create_task(_start(client, wanted.adapters))
    try:
        await asyncio.wait({running, starting}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            entry.model = served
            ready(client, served)
        await running
    finally:
        server.should_exit = True
        starting.cancel()
        await served.close()
        await asyncio.gather(running, starting, return_exceptions=True)
