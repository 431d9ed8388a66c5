"""One server's life: listen, load beside it, serve, drain, end."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from octavo.checkpoint.hub import Located
from octavo.checkpoint.pooling import read_pooling
from octavo.client.process import EngineClient
from octavo.engine.defaults import GenerationConfig, default_params
from octavo.engine.loader import OpenModel
from octavo.engine.plan import Plan
from octavo.errors import RequestError, UsageError
from octavo.generate.output import ServedModel
from octavo.llm import token_table
from octavo.server.app import Api, create_app
from octavo.server.connection import Connection, Limits, connection_limit, watch
from octavo.server.exchange import Exchange, Observer
from octavo.server.guard import Access
from octavo.server.logs import log_exchange
from octavo.text import ChatTemplate, load_tokenizer
from octavo.text.chat import template_source
from octavo.text.tokenizer import Tokenizer

KEEP_ALIVE = 30  # seconds between requests
HURRY = 3  # seconds for errors to be sent after the time to drain


@dataclass(frozen=True)
class ServeOptions:
    """Everything a server is told. `name`: what clients call the model."""

    located: Located
    name: str
    plan: Plan
    access: Access
    chat_template: str | None = None
    max_queue: int = 256
    drain_timeout: int = 30
    write_timeout: float = 60  # for a client to take what waits for it
    adapters: tuple[tuple[str, Path], ...] = ()  # loaded at start
    lora_folder: Path | None = None  # where others may be loaded from
    generation_config: GenerationConfig = "auto"


class _Server(uvicorn.Server):
    """The first signal drains, the second ends at once.

    Requests that are running when their time is up end with an error that says so.
    """

    def __init__(self, config: uvicorn.Config, client: EngineClient, drain_timeout: float) -> None:
        super().__init__(config)
        self._client = client
        self._drain_timeout = drain_timeout
        self._loop = asyncio.get_running_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._client.draining = True
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
        ending = self._loop.call_later(self._drain_timeout, self._client.end_streams)
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()
            self._watch.cancel()


def _server(
    app: ASGIApp, client: EngineClient, options: ServeOptions, observe: Observer
) -> _Server:
    limits = Limits(connection_limit(), write_seconds=options.write_timeout)
    config = uvicorn.Config(
        app,
        http=cast(type[asyncio.Protocol], partial(Connection, limits=limits, observe=observe)),
        ws="none",
        log_level="critical",
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=options.drain_timeout + HURRY,
    )
    return _Server(config, client, options.drain_timeout)


def _served(
    options: ServeOptions, model: OpenModel, tokenizer: Tokenizer, template: ChatTemplate | None
) -> ServedModel:
    located = options.located
    aliases = {located.name, *located.aliases} - {options.name}
    defaults = default_params(model.checkpoint, located.sampling, options.generation_config)
    context, now = options.plan.context, int(time.time())
    return ServedModel(
        options.name,
        tuple(sorted(aliases)),
        tokenizer,
        template,
        defaults,
        model.vocabulary,
        context,
        now,
        model.task,
        read_pooling(model.checkpoint, not model.program.causal),
    )


async def _load_adapters(client: EngineClient, adapters: tuple[tuple[str, Path], ...]) -> None:
    for name, path in adapters:
        try:
            await client.load_adapter(name, str(path))
        except RequestError as e:
            raise UsageError(f"--lora {name}: {e}") from None


async def serve(
    options: ServeOptions,
    model: OpenModel,
    sock: socket.socket,
    *,
    progress: Callable[[int], None],
    ready: Callable[[EngineClient, ServedModel], None],
    ended: Observer,
) -> None:
    """Serves until a signal. Raises OctavoError.

    ready: called once the model can answer. ended: called with every exchange that has ended.
    """
    path = str(options.located.path)
    client = EngineClient(
        path, options.plan, model.vocabulary, options.max_queue, progress, model.checkpoint.states
    )
    client.spawn()
    try:
        tokenizer = await asyncio.to_thread(load_tokenizer, model.checkpoint)
        source = options.chat_template or template_source(model.checkpoint)
        template = ChatTemplate(source, tokenizer) if source else None
        if template is not None:
            await asyncio.to_thread(template.check)
        client.table = token_table(tokenizer)
    except BaseException:
        await client.close()
        raise
    api = Api(client)

    def observe(one: Exchange) -> None:
        api.metrics.finished(one)
        log_exchange(one)
        ended(one)

    app = create_app(api, options.access, observe, options.lora_folder)
    server = _server(app, client, options, observe)
    running = asyncio.create_task(server.serve([sock]))
    starting = asyncio.create_task(client.start())
    try:
        await asyncio.wait({running, starting}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            await _load_adapters(client, options.adapters)
            api.served = _served(options, model, tokenizer, template)
            ready(client, api.served)
        await running
    finally:
        server.should_exit = True
        starting.cancel()
        await client.close()
        api.grammars.close()
        await asyncio.gather(running, starting, return_exceptions=True)
