"""One server's life: listen, load beside it, serve, drain, end."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn

from octavo.checkpoint.hub import Located
from octavo.checkpoint.pooling import read_pooling
from octavo.engine.loader import OpenModel
from octavo.engine.plan import Plan
from octavo.engine.request import SamplingParams
from octavo.errors import RequestError, UsageError
from octavo.llm import token_table
from octavo.server.app import Api, LogLine, create_app
from octavo.server.client import EngineClient
from octavo.server.generation import Served
from octavo.text import ChatTemplate, load_tokenizer
from octavo.text.chat import template_source
from octavo.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ServeOptions:
    """Everything a server is told. `name`: what clients call the model."""

    located: Located
    name: str
    plan: Plan
    api_keys: list[str]
    chat_template: str | None = None
    max_queue: int = 256
    drain_timeout: int = 30
    adapters: tuple[tuple[str, Path], ...] = ()  # loaded at start
    lora_folder: Path | None = None  # where others may be loaded from


class _Server(uvicorn.Server):
    """The first signal drains, the second ends at once."""

    def __init__(self, config: uvicorn.Config, client: EngineClient) -> None:
        super().__init__(config)
        self._client = client

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._client.draining = True
        self.force_exit = self.should_exit
        self.should_exit = True


def _served(
    options: ServeOptions, model: OpenModel, tokenizer: Tokenizer, template: ChatTemplate | None
) -> Served:
    located = options.located
    aliases = {located.name, *located.aliases} - {options.name}
    defaults = SamplingParams(**located.sampling)  # type: ignore[arg-type]
    context, now = options.plan.context, int(time.time())
    return Served(
        options.name,
        tuple(sorted(aliases)),
        tokenizer,
        template,
        defaults,
        model.vocabulary,
        context,
        now,
        model.task,
        read_pooling(model.checkpoint, model.task != "generate"),
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
    ready: Callable[[EngineClient, Served], None],
    log: LogLine,
) -> None:
    """Serves until a signal. `ready` is called once the model can answer. Raises OctavoError."""
    path = str(options.located.path)
    client = EngineClient(
        path, options.plan, model.vocabulary, options.max_queue, progress, model.checkpoint.states
    )
    client.spawn()
    try:
        tokenizer = await asyncio.to_thread(load_tokenizer, model.checkpoint)
        source = options.chat_template or template_source(model.checkpoint)
        template = ChatTemplate(source, tokenizer) if source else None
        client.table = token_table(tokenizer)
    except BaseException:
        await client.close()
        raise
    api = Api(client, log)
    config = uvicorn.Config(
        create_app(api, options.api_keys, options.lora_folder),
        log_level="critical",
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=options.drain_timeout,
    )
    server = _Server(config, client)
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
        await api.grammars.close()
        await asyncio.gather(running, starting, return_exceptions=True)
