"""What a request held is free once it has ended, without a search for cycles."""

from __future__ import annotations

import asyncio
import gc
import socket
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
import uvloop

from octavo.checkpoint import open_checkpoint
from octavo.gateway import relay
from octavo.gateway.config import ConfigFile, UpstreamPool
from octavo.gateway.config import Server as GatewayServer
from octavo.gateway.job import RelayJob
from octavo.gateway.run import GatewayOptions, serve
from octavo.server.app import create_app
from octavo.server.exchange import Exchange, Observer, Running
from octavo.server.guard import Access
from octavo.server.http_server import http_server
from octavo.server.metrics import Metrics
from octavo.server.timelines import Timelines
from octavo.text import ChatTemplate, Tokenizer, load_tokenizer
from tests.unit.fake_models import ScriptedClient, fake_model, registry, template_of
from tests.waiting import async_until

CHAT = "/v1/chat/completions"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b"a\r\ndata: {}\n\r\n"
GARBAGE = b"no length\r\n"
ASKED = {"model": "m", "messages": [{"role": "user", "content": "a b"}], "max_tokens": 5}
Post = Callable[[dict[str, Any]], Awaitable[aiohttp.ClientResponse]]


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return load_tokenizer(open_checkpoint(smollm2))


@pytest.fixture(scope="module")
def template(smollm2: Path, tokenizer: Tokenizer) -> Iterator[ChatTemplate]:
    with template_of(smollm2, tokenizer) as made:
        yield made


@pytest.fixture(autouse=True)
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Serving:
    draining = False

    async def close(self) -> None: ...


@asynccontextmanager
async def server(
    tokenizer: Tokenizer, template: ChatTemplate, hang: bool, ended: Observer
) -> AsyncIterator[str]:
    """The address of a server of a model that says little. hang: and never stops."""
    client = ScriptedClient(tokenizer.encode("a b c", add_bos=False), hang=hang)
    models = registry(fake_model(tokenizer, "m", client=client, template=template))
    running = Running()
    metrics = Metrics(models)
    timelines = Timelines(running, metrics.slow)

    def observe(one: Exchange) -> None:
        for each in (metrics.finished, timelines.add, ended):
            each(one)

    app = create_app(models, metrics, Access(), observe, timelines=timelines)
    sock = socket.create_server(("127.0.0.1", 0))
    serving = http_server(app, cast(Any, Serving()), 1, 60, observe, running)
    task = asyncio.create_task(serving.serve_on(sock))
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        serving.handle_exit(0, None)
        await task


@asynccontextmanager
async def gateway(upstream: str, ended: Observer, **options: Any) -> AsyncIterator[str]:
    sock = socket.create_server(("127.0.0.1", 0))
    config = ConfigFile(pools={"default": UpstreamPool(upstreams=(upstream,))}, **options)
    options = GatewayOptions(Access(), config, GatewayServer(drain_timeout=1))
    ready = asyncio.Event()
    task = asyncio.create_task(serve(options, sock, ready=lambda _: ready.set(), ended=ended))
    await ready.wait()
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def broken(says: bytes) -> AsyncIterator[str]:
    """The address of a server that breaks each answer off after these bytes."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET"):
            card = b'{"data":[{"id":"m"}]}'
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(card), card))
        else:
            writer.write(says)
        with suppress(ConnectionError):
            await writer.drain()
        writer.close()

    listening = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        listening.close()


async def whole(post: Post) -> None:
    async with await post(ASKED) as answer:
        assert answer.status == 200 and (await answer.json())["choices"]


async def stream(post: Post) -> None:
    async with await post(ASKED | {"stream": True}) as answer:
        assert (await answer.read()).endswith(b"data: [DONE]\n\n")


async def refused(post: Post) -> None:
    async with await post(ASKED | {"messages": 5}) as answer:
        assert answer.status == 400


async def left(post: Post) -> None:
    """Its client reads the beginning, and is gone."""
    answer = await post(ASKED | {"stream": True})
    answer.close()


async def failed(post: Post) -> None:
    async with await post(ASKED | {"stream": True}) as answer:
        assert b"upstream" in await answer.read()


class Held:
    """Weak references to what there was of each request."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.exchanges, jobs = list[weakref.ref[Exchange]](), list[weakref.ref[RelayJob]]()
        self.jobs = jobs

        class Job(RelayJob):
            def __init__(self, *given: Any, **named: Any) -> None:
                super().__init__(*given, **named)
                jobs.append(weakref.ref(self))

        monkeypatch.setattr(relay, "RelayJob", Job)

    def ended(self, one: Exchange) -> None:
        if one.route == CHAT:
            self.exchanges.append(weakref.ref(one))

    async def check(
        self, at: str, how: Callable[[Post], Awaitable[None]], *, jobs: bool, times: int = 3
    ) -> None:
        """Asks. An open connection may know its last exchange; what is large is gone."""
        async with aiohttp.ClientSession() as session:
            for _ in range(times):
                await how(lambda body: session.post(at + CHAT, json=body))
            await async_until(lambda: len(self.exchanges) == times)
            assert len(self.jobs) == jobs * times
            await async_until(lambda: not any(one() for one in self.jobs), 10)
        await async_until(lambda: not any(one() for one in self.exchanges), 10)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    return Held(monkeypatch)


@pytest.mark.parametrize("through", ["server", "gateway"])
@pytest.mark.parametrize("how", [whole, stream, refused, left])
def test_nothing_holds_a_request_that_has_ended(
    tokenizer: Tokenizer, template: ChatTemplate, held: Held, through: str,
    how: Callable[[Post], Awaitable[None]],
) -> None:  # fmt: skip
    async def run() -> None:
        if through == "server":
            async with server(tokenizer, template, how is left, held.ended) as at:
                return await held.check(at, how, jobs=False)
        async with (
            server(tokenizer, template, how is left, lambda _: None) as at,
            gateway(at, held.ended) as door,
        ):
            await held.check(door, how, jobs=True)

    uvloop.run(run())


@pytest.mark.parametrize("says", [b"", HEAD + EVENT, HEAD + GARBAGE], ids=["no", "half", "garbage"])
def test_nothing_holds_a_request_that_upstreams_have_failed(held: Held, says: bytes) -> None:
    async def run() -> None:
        async with broken(says) as at, gateway(at, held.ended, queue_timeout=0.2) as door:
            await held.check(door, failed, jobs=True, times=1)

    uvloop.run(run())
