"""Served models whose tokens no engine computes, and a real listener in front of them."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import uvicorn
from starlette.types import ASGIApp

from octavo.checkpoint import open_checkpoint
from octavo.checkpoint.pooling import Pooling
from octavo.engine.constraint import TokenTable
from octavo.engine.events import Ended, Pooled, Times, Token, TokenEvent
from octavo.engine.request import Request, SamplingParams
from octavo.errors import InvalidValue
from octavo.generate.grammar_check import GrammarChecker
from octavo.generate.model import ServedModel
from octavo.program import Task
from octavo.server.app import create_app
from octavo.server.dialect import Dialect
from octavo.server.dialects import DIALECTS
from octavo.server.exchange import Exchange, Running, Watcher
from octavo.server.guard import Access
from octavo.server.metrics import Metrics
from octavo.server.registry import Registry
from octavo.server.source import Fetch
from octavo.server.store import Store
from octavo.server.timelines import Timelines
from octavo.text import ChatTemplate, Tokenizer
from octavo.text.chat import template_source
from tests import published
from tests.waiting import until


@dataclass
class ScriptedClient:
    """An EngineClient of its own kind: answers every request with the same tokens.

    ended: how requests end instead of with the last token. hang: they never do.
    """

    tokens: Sequence[int]
    ended: Ended | None = None
    hang: bool = False
    ready: bool = True
    adapters: list[str] = field(default_factory=list)
    pid: int | None = None
    stats: dict[str, int] = field(default_factory=lambda: {"blocks": 8, "blocks_free": 5})
    requests: list[Request] = field(default_factory=list)
    running: int = 0

    async def submit(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        self.requests.append(request)
        self.running += 1
        try:
            began, first = time.monotonic(), 0.0
            if request.pool:
                vector = np.array([len(request.prompt), 1.0], np.float32)
                yield Pooled(request.id, vector.tobytes())
                return
            for i, token in enumerate(self.tokens):
                await asyncio.sleep(0)
                last = i == len(self.tokens) - 1 and not (self.hang or self.ended)
                now = time.monotonic()
                times = Times(began, began, first or now, now)
                first = times.first_token
                finish = "length" if last else None
                yield Token(request.id, token, -0.5, finish=finish, times=times)
            if self.ended is not None:
                yield msgspec.structs.replace(self.ended, id=request.id)
            elif self.hang:
                await asyncio.Event().wait()
        finally:
            self.running -= 1

    async def load_adapter(self, name: str, path: str) -> None:
        if not (Path(path) / "adapter_config.json").exists():
            raise InvalidValue("this is no adapter", "lora_path")
        self.adapters.append(name)

    async def unload_adapter(self, name: str) -> None:
        self.adapters.remove(name)

    async def close(self) -> None:
        self.ready = False


def fake_model(
    tokenizer: Tokenizer, name: str, says: str = "", *, client: ScriptedClient | None = None,
    template: ChatTemplate | None = None, context: int = 64, task: Task = "generate",
) -> ServedModel:  # fmt: skip
    """A model that always says the same."""
    client = client or ScriptedClient(tokenizer.encode(says or name, add_bos=False))
    return ServedModel(
        name=name, aliases=(f"org/{name}",), tokenizer=tokenizer, template=template, client=client,
        grammars=GrammarChecker(TokenTable([], [], []), len(tokenizer.bytes)),
        defaults=SamplingParams(), vocabulary=len(tokenizer.bytes), context=context, created=7,
        task=task, pooling=Pooling("mean", True),
    )  # fmt: skip


@contextmanager
def template_of(model: Path, tokenizer: Tokenizer) -> Iterator[ChatTemplate]:
    """The chat template of a model file, which must have one."""
    source = template_source(open_checkpoint(model))
    assert source is not None
    made = ChatTemplate(source, tokenizer)
    yield made
    made.close()


def registry(*models: ServedModel) -> Registry:
    made = Registry()
    for model in models:
        made.add(model.name, model.client, model.aliases).model = model
    return made


class Listener:
    """A server on a port of its own, with what it has recorded."""

    def __init__(
        self,
        models: Registry,
        access: Access,
        dialects: tuple[Dialect, ...],
        lora: Path | None,
        store: Store,
        fetch: Fetch | None,
        watchers: Sequence[Watcher],
    ) -> None:
        self.models = models
        self.metrics = Metrics(models)
        self.timelines = Timelines(Running(), self.metrics.slow)
        self.watchers = watchers
        self.exchanges: list[Exchange] = []
        self.sock = socket.create_server(("127.0.0.1", 0))
        self.port = self.sock.getsockname()[1]
        self.app: ASGIApp = create_app(
            models, self.metrics, access, self.observe, lora, dialects, store,
            timelines=self.timelines, fetch=fetch, watchers=watchers,
        )  # fmt: skip

    def observe(self, one: Exchange) -> None:
        for observe in (self.metrics.finished, self.timelines.add):
            observe(one)
        for watcher in self.watchers:
            watcher.observe(one)
        self.exchanges.append(one)

    def ask(self, path: str, body: Any = None, **headers: str) -> tuple[int, str]:
        """The status and text of the response, once it is recorded; a GET without a body."""
        recorded = len(self.exchanges)
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        data = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, data, headers)
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        until(lambda: len(self.exchanges) > recorded)
        published.check(path, response.status, text, (data or "").encode())
        return response.status, text

    def json(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        status, text = self.ask(path, body, **headers)
        return status, json.loads(text)


@contextmanager
def listening(
    *models: ServedModel, access: Access | None = None,
    dialects: tuple[Dialect, ...] = DIALECTS, lora: Path | None = None,
    fetch: Fetch | None = None, watchers: Sequence[Watcher] = (),
) -> Iterator[Listener]:  # fmt: skip
    """Serves models over HTTP until the end of the block."""
    store = Store()
    one = Listener(registry(*models), access or Access(), dialects, lora, store, fetch, watchers)
    config = uvicorn.Config(
        one.app, ws="none", log_config=None, lifespan="off", interface="asgi3",
        timeout_graceful_shutdown=5,
    )  # fmt: skip
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([one.sock])))
    thread.start()
    try:
        yield one
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()
        store.close()
