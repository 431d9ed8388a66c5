"""Engines and clients that end at a moment that nobody likes: real ones, in this process' loop."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import socket
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.routing import Route, WebSocketRoute
from websockets.asyncio.client import ClientConnection, connect

from octavo.checkpoint.folders import is_model_folder
from octavo.checkpoint.hub import Located
from octavo.client import watch
from octavo.client.adapter_table import Adapter
from octavo.client.link import EngineLink
from octavo.client.process import EngineProcessClient
from octavo.client.protocol import LoadAdapter
from octavo.client.replay import Stream
from octavo.client.replicas import Replicas, ask_of
from octavo.engine.plan import Plan
from octavo.errors import EngineFailed, RequestError
from octavo.generate.profile import Profiling
from octavo.server import run as server_run
from octavo.server.dialects import DIALECTS
from octavo.server.exchange import Exchange, Running
from octavo.server.exchanges import ExchangeMiddleware, RouteLabel
from octavo.server.guard import Access, Keys, guarded
from octavo.server.http import EventStream
from octavo.server.http_server import http_server
from octavo.server.loopback import Loopback
from octavo.server.registry import Registry
from octavo.server.sockets import Sockets
from octavo.server.source import ModelOptions, ModelSource
from tests.api.test_replay import ask, client_of, request
from tests.parity.test_lora import make_adapter
from tests.small_models import Small, save_hf
from tests.waiting import async_until


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    save_hf(Small(), path)
    return path


def adapter(folder: Path, name: str) -> str:
    return str(make_adapter(folder.parent / name, 1, modules={"self_attn.q_proj": (64, 64)}))


def engine(folder: Path) -> AbstractAsyncContextManager[EngineProcessClient]:
    """One that may load adapters."""
    return client_of(folder, adapters=16 << 20)


def kill(client: EngineProcessClient) -> None:
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)


# -- engines --------------------------------------------------------------------------------------


@pytest.mark.parametrize("files", ["there", "gone"])
def test_an_adapter_may_go_while_a_new_engine_loads_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, files: str
) -> None:
    """Between the question and the answer, which may be a refusal: the engine is ready, without."""

    async def run() -> None:
        async with engine(folder) as client:
            path = adapter(folder, "lora")
            await client.load_adapter("a", path)
            send, unloading = EngineLink.send, list[asyncio.Task[None]]()

            def sent(self: EngineLink, message: Any) -> None:
                send(self, message)
                if isinstance(message, LoadAdapter) and client.adapters and not unloading:
                    unloading.append(asyncio.create_task(client.unload_adapter("a")))

            monkeypatch.setattr(EngineLink, "send", sent)
            if files == "gone":
                shutil.rmtree(path)
            kill(client)
            await async_until(lambda: client.restarts)
            assert len((await ask(client, request("r", [5, 6, 7], max_tokens=3))).tokens) == 3
            assert client.adapters == [] and len(unloading) == 1
            if files == "there":
                await client.load_adapter("a", path)

    uvloop.run(run())


def test_an_adapter_may_go_while_a_new_engine_loads_the_next(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with engine(folder) as client:
            path = adapter(folder, "lora")
            for name in "ab":
                await client.load_adapter(name, path)
            send, unloading = EngineLink.send, list[asyncio.Task[None]]()

            def sent(self: EngineLink, message: Any) -> None:
                send(self, message)
                if isinstance(message, LoadAdapter) and message.name == "b" and not unloading:
                    unloading.append(asyncio.create_task(client.unload_adapter("a")))

            monkeypatch.setattr(EngineLink, "send", sent)
            kill(client)
            await async_until(lambda: client.restarts)
            assert client.adapters == ["b"] and len(unloading) == 1
            await client.load_adapter("a", path)

    uvloop.run(run())


def test_a_model_that_is_loaded_again_keeps_its_adapters_if_its_engine_ends(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        paths = tuple((name, adapter(folder, name)) for name in "abc")
        options = ModelOptions(Located(folder, "m"), "m", adapters=cast(Any, paths), lora=True)
        source = ModelSource(options, cast(Any, None))
        source._loads = 1  # it was unloaded for another
        async with engine(folder) as client:
            send = EngineLink.send

            def sent(self: EngineLink, message: Any) -> None:
                send(self, message)
                if isinstance(message, LoadAdapter):
                    self.kill()

            monkeypatch.setattr(EngineLink, "send", sent)
            with pytest.raises(RequestError, match="the engine ended while it loaded the adapter"):
                await source._load_adapters(client)
            assert list(source.adapters) == ["a", "b", "c"]

    uvloop.run(run())


def test_who_loads_an_adapter_is_told_that_all_ends(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        asked, send = asyncio.Event(), EngineLink.send

        def sent(self: EngineLink, message: Any) -> None:
            asked.set() if isinstance(message, LoadAdapter) else send(self, message)

        monkeypatch.setattr(EngineLink, "send", sent)
        async with engine(folder) as client:
            loading = asyncio.create_task(client.load_adapter("a", adapter(folder, "lora")))
            await asked.wait()
        with pytest.raises(EngineFailed, match="the engine ended while it loaded the adapter"):
            await asyncio.wait_for(loading, 10)

    uvloop.run(run())


def test_who_reads_slowly_what_has_ended_is_in_nobodys_way(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither is its engine thought to be stuck, nor is it what a later one has died of."""
    monkeypatch.setattr(watch, "TICK", 0.02)

    async def run() -> None:
        async with engine(folder) as client:
            slow = client.submit(request("slow", [5, 6, 7], max_tokens=20))
            await anext(slow)
            await async_until(lambda: next(iter(client.streams)).over)
            monkeypatch.setattr(watch, "STUCK", 5)
            await asyncio.sleep(2)  # some of which an idle engine still has something to do
            assert client.ready and client.restarts == 0 and client.pid is not None
            monkeypatch.undo()
            os.kill(client.pid, signal.SIGABRT)
            await async_until(lambda: not client.ready)
            await async_until(lambda: client.ready)
            assert client.restarts == 1 and not client.suspicious
            other = await asyncio.wait_for(ask(client, request("b", [9], max_tokens=3)), 30)
            assert len(other.tokens) == 3
            assert len([event async for event in slow]) >= 19

    uvloop.run(run())


def test_a_profile_that_begins_as_an_engine_ends_is_refused(folder: Path) -> None:
    async def run() -> None:
        async with engine(folder) as client:
            link, profiling = client.link, Profiling()
            assert link is not None

            async def profile() -> None:
                while not cast(Any, link)._reader._eof:
                    await asyncio.sleep(0)
                await profiling.record({"": client}, lambda: asyncio.sleep(0.1))

            asked = asyncio.create_task(profile())
            kill(client)
            with pytest.raises(RequestError):
                await asyncio.wait_for(asked, 30)
            with pytest.raises(RequestError, match="while it was profiled"):
                await link.profile(cast(Any, asyncio.get_running_loop().create_future()))
            await async_until(lambda: client.ready)
            await profiling.record({"": client}, lambda: asyncio.sleep(0.1))

    uvloop.run(run())


class Link:
    """One whose process has been found to have ended, by SIGABRT once `ended` is set."""

    opened, pid, signs, cause = True, 1, 0, ""

    def __init__(self) -> None:
        self.ended, self.sent = asyncio.Event(), list[str]()

    def send(self, message: object) -> None:
        self.sent.append(type(message).__name__)

    def kill(self) -> None: ...

    async def end(self) -> int:
        await self.ended.wait()
        return -signal.SIGABRT


def fakes() -> tuple[list[EngineProcessClient], list[Link], Replicas]:
    """Three replicas whose engines have not become ready again."""
    limits = SimpleNamespace(selected=8, blocks=8)
    plan = cast(Plan, SimpleNamespace(limits=limits, cache=0, draft=None))
    clients = [EngineProcessClient("x", plan, 320) for _ in range(3)]
    links, pool = [Link() for _ in clients], Replicas(clients)
    for client, link in zip(clients, links, strict=True):
        client.link, client._engines = cast(EngineLink, link), 1
    return clients, links, pool


def test_what_waits_at_an_engine_that_does_not_start_moves_when_that_is_known() -> None:
    """Another one has become ready meanwhile."""

    async def run() -> None:
        clients, links, pool = fakes()
        asked = asyncio.create_task(anext(pool.submit(request("a", [1, 2, 3]))))
        await asyncio.sleep(0)
        burial = asyncio.create_task(clients[0]._bury(EngineFailed("it cannot start")))
        await asyncio.sleep(0)
        clients[1]._enter("ready")
        pool.changed(clients[1])
        links[0].ended.set()
        await burial
        (home,) = pool._at.values()
        assert home.name == "1" and links[1].sent == ["Submit"]
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)

    uvloop.run(run())


def test_a_stream_is_not_moved_before_it_is_known_what_its_engine_died_of() -> None:
    """Though another engine becomes ready in that moment."""

    async def run() -> None:
        clients, links, pool = fakes()
        clients[0]._enter("ready")
        asked = asyncio.create_task(anext(pool.submit(request("poison", [1, 2, 3]))))
        await asyncio.sleep(0)
        clients[1]._enter("ready")
        burial = asyncio.create_task(clients[0]._bury(None))
        await asyncio.sleep(0)
        clients[2]._enter("ready")
        pool.changed(clients[2])
        links[0].ended.set()
        await burial
        ((stream, home),) = pool._at.items()
        assert (home.name, stream.doubt) == ("0", 2) and not links[1].sent and not links[2].sent
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)

    uvloop.run(run())


def test_a_stream_is_not_moved_from_an_engine_that_is_being_killed_as_stuck() -> None:
    """Though another engine becomes ready before the socket of that one is closed."""

    async def run() -> None:
        clients, links, pool = fakes()
        clients[0]._enter("ready")
        asked = asyncio.create_task(anext(pool.submit(request("poison", [1, 2, 3]))))
        await asyncio.sleep(0)
        clients[0]._kill(cast(EngineLink, links[0]), "stuck")
        clients[2]._enter("ready")
        pool.changed(clients[2])
        links[0].ended.set()
        await clients[0]._bury(None)
        ((stream, home),) = pool._at.items()
        assert (home.name, stream.doubt) == ("0", 2) and not links[2].sent
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)

    uvloop.run(run())


def test_a_stream_stays_where_its_adapter_is_though_another_choice_is_elsewhere() -> None:
    """The adapter is being unloaded: no engine takes it up any more."""

    async def run() -> None:
        clients, links, pool = fakes()
        asked = msgspec.structs.replace(request("a", [1, 2, 3]), adapter="lora")
        first, second = Stream.of(asked, 0), Stream.of(asked, 0)
        for client in clients:
            client._enter("ready")
            client._adapters.adapters["lora"] = Adapter("x", {})
        pool._assign(first, ask_of(asked), pool._homes["0"])
        pool._assign(second, ask_of(asked), pool._homes["1"])
        await pool.unload_adapter("lora")
        links[0].ended.set()
        await clients[0]._bury(EngineFailed("it was killed"))
        assert [home.name for home in pool._at.values()] == ["0", "1"]

    uvloop.run(run())


# -- models ---------------------------------------------------------------------------------------


def test_models_are_looked_for_again_after_a_look_that_failed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_run, "FIND_SECONDS", 0.01)
    looks = iter([OSError("a"), OSError("b"), [], [], None])
    looked = 0

    def find() -> list[Any]:
        nonlocal looked
        looked += 1
        if isinstance(found := next(looks), OSError):
            raise found
        return found or []

    async def run() -> None:
        looking = asyncio.create_task(server_run._find(cast(Registry, None), find))
        await async_until(lambda: looked >= 4)
        looking.cancel()

    with caplog.at_level(logging.ERROR):
        uvloop.run(run())
    assert caplog.text.count("models could not be looked for: OSError") == 1
    assert not is_model_folder(Path("x" * 300))  # whose name is too long


# -- sockets --------------------------------------------------------------------------------------


class Serving:
    draining = False

    async def close(self) -> None: ...


@asynccontextmanager
async def sockets() -> AsyncGenerator[tuple[str, Any, Counter[tuple[str, int]]], None]:
    """A server whose route /s streams for ever: its address, itself, and what it has recorded."""
    seen: Counter[tuple[str, int]] = Counter()

    def observe(one: Exchange) -> None:
        seen[one.route, one.status] += 1

    async def frames() -> AsyncGenerator[bytes, None]:
        while True:
            yield b'data: {"x":"' + b"a" * 65536 + b'"}\n\n'
            await asyncio.sleep(0.001)

    async def stream(_: HttpRequest) -> EventStream:
        return EventStream(frames(), "text/event-stream")

    access, error_body, running, loopback = Access(), DIALECTS[0].error_body, Running(), Loopback()
    found = Sockets(loopback, error_body, Keys(access).owner)
    app = Starlette(routes=[Route("/s", stream, methods=["POST"]), WebSocketRoute("/v1/ws", found.serve)])  # fmt: skip
    paths = {path: RouteLabel(path, error_body) for path in ("/s", "/v1/ws")}
    other = RouteLabel("other", error_body)
    loopback.app = ExchangeMiddleware(app, paths, other, observe, running)
    outer = ExchangeMiddleware(guarded(app, access), paths, other, observe, running)
    server = http_server(outer, cast(Any, Serving()), 1, 60, observe, running)
    listening = socket.create_server(("127.0.0.1", 0))
    task = asyncio.create_task(server.serve_on(listening))
    await async_until(lambda: server.started)
    yield f"ws://127.0.0.1:{listening.getsockname()[1]}/v1/ws", server, seen
    server.handle_exit(0, None)
    await task


async def streaming(address: str) -> ClientConnection:
    """A client that has the first part of a stream, and reads no more."""
    client = await connect(address, proxy=None)
    await client.send(json.dumps({"id": "a", "path": "/s", "body": {}}))
    await client.recv()
    client.transport.pause_reading()
    return client


@pytest.fixture
def errors(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.ERROR):
        yield caplog


def test_clients_of_sockets_that_leave_in_a_stream_are_no_errors(
    errors: pytest.LogCaptureFixture,
) -> None:
    async def run() -> None:
        async with sockets() as (address, _, seen):
            for _ in range(10):
                client = await streaming(address)
                await asyncio.sleep(0.1)  # until nothing more can be sent
                client.transport.abort()
            await async_until(
                lambda: sum(n for (route, _), n in seen.items() if route == "/s") == 10
            )
            assert seen["/s", 499] == 10

    uvloop.run(run())
    assert "unexpected" not in errors.text


def test_a_server_ends_while_a_socket_is_being_closed() -> None:
    """Its client has said that it closes, and reads nothing of what is still to be sent."""

    async def run() -> None:
        async with sockets() as (address, server, _):
            client = await streaming(address)
            (connection,) = server.server_state.connections
            await async_until(lambda: connection.transport.get_write_buffer_size())
            client.protocol.send_close(1000)
            client.transport.write(b"".join(client.protocol.data_to_send()))
            await async_until(lambda: connection.conn.state.name == "CLOSING")
        client.transport.abort()

    uvloop.run(run())
