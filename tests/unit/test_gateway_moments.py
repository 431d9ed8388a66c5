"""Upstreams, clients and releases that end, hang or change at a moment that nobody likes."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import uvloop
from starlette.requests import Request as HttpRequest

from octavo.balance.breaker import Breaker
from octavo.balance.replica import ReplicaTimes
from octavo.database import open_database
from octavo.experiments.controller import Experiments
from octavo.experiments.store import ExperimentStore
from octavo.gateway import hedge
from octavo.gateway.admission import UpstreamQueue, WaitLimits
from octavo.gateway.body import Relayed, read_outline
from octavo.gateway.config import GatewayConfig, LocalModel, Model, UpstreamPool
from octavo.gateway.connection import MOST_HELD
from octavo.gateway.errors import Exhausted, UpstreamFailed
from octavo.gateway.health import Health, HealthCheck
from octavo.gateway.job import RelayJob
from octavo.gateway.local import LocalPool, LocalServer
from octavo.gateway.members import Found, Members
from octavo.gateway.relay import Relay
from octavo.gateway.responses import Responses
from octavo.gateway.state import TABLES
from octavo.gateway.traffic import Dealt, Traffic
from octavo.gateway.transport import Timeouts, Transport, failed
from octavo.gateway.updates import Updates
from octavo.gateway.upstream import ModelFigures, Place, Upstream
from octavo.gateway.upstreams import UpstreamLease, Upstreams
from octavo.generate.reply import Usage
from octavo.release.controller import Releases
from octavo.release.machine import ENDED
from octavo.release.spec import convert
from octavo.release.store import ReleaseStore
from octavo.server.exchange import Exchange
from tests.waiting import async_until

Answering = Callable[[asyncio.StreamWriter], Awaitable[None]]
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
FOREVER = 3600.0


def whole(body: bytes) -> bytes:
    head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return (head % len(body)).encode() + body


def relaying(upstreams: Upstreams, transport: Transport) -> tuple[Relay, UpstreamQueue]:
    """What passes requests on to upstreams, and where these wait."""
    database = open_database(None, TABLES)
    experiments = Experiments(ExperimentStore(database))
    traffic = Traffic(Releases(ReleaseStore(database)), experiments, cast(Any, None))
    health = Health(upstreams, transport, HealthCheck())
    queue = UpstreamQueue(upstreams, WaitLimits())
    return Relay(queue, transport, health, traffic, lambda _: None, False), queue


@asynccontextmanager
async def upstream(answer: Answering) -> AsyncIterator[str]:
    """The URL of a server that answers each request so."""
    working: set[asyncio.Task[Any]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        working.add(cast(asyncio.Task[Any], asyncio.current_task()))
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]
                await reader.readexactly(int(size or 0))
                await answer(writer)
                await writer.drain()
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        listening.close()
        for task in working:
            task.cancel()
        await asyncio.gather(*working)


async def says_nothing(writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(FOREVER)


# -- upstreams ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["late", "down", "removed"])
def test_who_keeps_a_response_and_says_nothing_is_not_waited_for(how: str) -> None:
    """Neither after the time for a first token, nor once it is known not to answer."""

    async def run() -> None:
        async with upstream(says_nothing) as url:
            transport = Transport(Timeouts(first=0.2 if how == "late" else FOREVER))
            upstreams = Upstreams()
            up = upstreams.add(Place(url))
            health = Health(upstreams, transport, HealthCheck())
            relay = cast(Relay, SimpleNamespace(guarded=False))
            responses = Responses(cast(Any, None), relay, upstreams, transport, health, print)
            scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "query_string": b"", "exchange": Exchange()}  # fmt: skip
            asked = asyncio.create_task(responses._ask(HttpRequest(scope), up, "/v1/responses/x"))
            await async_until(lambda: up.cut)
            if how == "down":
                upstreams.down(up, "gone")
            elif how == "removed":
                upstreams.remove(up)
            says = {"late": "no first token for 0.2 s", "down": "does not answer any longer", "removed": "was removed"}  # fmt: skip
            with pytest.raises(UpstreamFailed, match=says[how]):
                await asyncio.wait_for(asked, 30)
            assert not up.cut
            await transport.close()

    uvloop.run(run())


def test_upstreams_say_how_large_and_how_fast_they_are() -> None:
    """Nobody has to, and what is no such number says nothing."""
    cards = [
        b'{"id":"m","cache_tokens":640,"max_model_len":4096,'
        b'"times":{"prompt_token":0.001,"step":0.02,"image":1}}',
        b'{"id":"n"}', b'{"id":"o","cache_tokens":"x","max_model_len":null,"times":[1]}',
        b'{"id":"p","cache_tokens":-1,"times":{"step":-1,"image":"x","prompt_token":1e300}}',
    ]  # fmt: skip

    async def answers(writer: asyncio.StreamWriter) -> None:
        writer.write(whole(b'{"data":[%s]}' % b",".join(cards)))

    async def run() -> None:
        async with upstream(answers) as url:
            transport, upstreams = Transport(Timeouts()), Upstreams()
            health = Health(upstreams, transport, HealthCheck())
            figures, own = await health._probe(upstreams.add(Place(url)))
            silent = dict.fromkeys("nop", ModelFigures())
            known = ModelFigures(640, ReplicaTimes(0.001, 0.02, 1), 4096)
            assert (figures, own) == ({"m": known, **silent}, False)
            await transport.close()

    uvloop.run(run())


def test_what_an_admin_has_removed_is_back_with_the_next_configuration_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not at the next look of a source. Who is in two pools is in the first, which is said once."""
    file = tmp_path / "more"
    file.write_text("http://127.0.0.1:1\nhttp://127.0.0.1:2\n")
    named = UpstreamPool(upstreams=("http://127.0.0.1:1",))
    config = GatewayConfig(pools={"default": named, "next": UpstreamPool(file=str(file))})

    async def run() -> None:
        upstreams = Upstreams()
        health = Health(upstreams, Transport(Timeouts()), HealthCheck())
        members = Members(upstreams, health)

        def there() -> dict[str, str]:
            return {up.id: up.place.pool for up in upstreams}

        members.swap(await members.find(config, {}))
        everybody = {"127.0.0.1:1": "default", "127.0.0.1:2": "next"}
        assert there() == everybody
        for up in upstreams:
            health.remove(up)
        source = ("file", str(file), "next", None)
        members._take(source, [Place(f"http://127.0.0.1:{port}", "next") for port in (1, 2, 3)])
        assert there() == {"127.0.0.1:3": "next"}
        members.swap(await members.find(config, {}))
        assert there() == everybody | {"127.0.0.1:3": "next"}
        await members.close()
        await health.close()

    asyncio.run(run())
    said = "upstream 127.0.0.1:1 is in the pool default, not in next"
    assert [m for m in caplog.messages if "is in the pool" in m] == [said]


def test_the_gateways_own_lack_of_handles_is_no_fault_of_upstreams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def answers(writer: asyncio.StreamWriter) -> None:
        writer.write(whole(b'{"data":[{"id":"m"}]}'))

    async def run() -> None:
        async with upstream(answers) as url:
            transport, upstreams, cut = Transport(Timeouts()), Upstreams(), list[str]()
            health = Health(upstreams, transport, HealthCheck(interval=0.1))
            up = health.add(Place(url))
            await async_until(lambda: up.state == "up")
            up.cut.add(cut.append)
            tried = 0

            async def connect(*_: object) -> object:
                nonlocal tried
                tried += 1
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

            monkeypatch.setattr(transport, "_connect", connect)
            await transport.close()  # the connection that was kept
            await async_until(lambda: tried > 5)
            assert (up.state, cut, up.misses) == ("up", [], 0)
            with pytest.raises(Exhausted, match="Too many open files") as raised:
                await transport.open(up, "/x", {}, b"", 1)
            assert (raised.value.status, raised.value.code) == (503, "overloaded")
            await health.close()

    uvloop.run(run())


@pytest.mark.parametrize("lacks", [True, False])
def test_names_cannot_be_looked_up_without_handles(
    monkeypatch: pytest.MonkeyPatch, lacks: bool
) -> None:
    """Which says so in other words: whether a socket can be had tells."""

    def none(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        if lacks:
            patch.setattr(socket, "socket", none)
        found = failed("x", socket.gaierror(socket.EAI_NONAME, "not known"), True)
    assert isinstance(found, Exhausted) == lacks
    assert str(found) == (
        "the gateway cannot connect to anybody: Too many open files" if lacks
        else "upstream x has a name that nobody knows"
    )  # fmt: skip
    unreachable = failed("x", OSError(errno.EADDRNOTAVAIL, "no such family here"), True)
    assert unreachable.code == "upstream_down"


@pytest.mark.parametrize(
    ("error", "result"), [(Exhausted("no handles"), None), (UpstreamFailed("gone"), False)]
)
def test_a_hedge_that_the_gateway_cannot_send_says_nothing_of_its_upstream(
    error: UpstreamFailed, result: bool | None
) -> None:
    async def run() -> None:
        async def fails() -> hedge.Begun:
            raise error

        ended: list[bool | None] = []
        tried = hedge.begin(fails(), cast(UpstreamLease, SimpleNamespace(end=ended.append)))
        await asyncio.wait({tried.task})
        assert await tried.leave() is result and ended == [result]

    uvloop.run(run())


def test_probes_go_on_whatever_an_upstream_says(monkeypatch: pytest.MonkeyPatch) -> None:
    said = b"m"

    async def answers(writer: asyncio.StreamWriter) -> None:
        writer.write(whole(b'{"data":[{"id":"%b"}]}' % said))

    async def run() -> None:
        nonlocal said
        async with upstream(answers) as url:
            transport, upstreams = Transport(Timeouts()), Upstreams()
            health = Health(upstreams, transport, HealthCheck(interval=0.1))
            up = health.add(Place(url))
            await async_until(lambda: up.state == "up")
            said = b"m\xe9"  # no UTF-8
            await async_until(lambda: up.state == "down")
            assert "is no OpenAI-compatible server" in up.reason
            said = b"m"
            await async_until(lambda: up.state == "up")

            def broken(*_: object) -> None:
                raise RuntimeError("a bug")

            with monkeypatch.context() as patch:
                patch.setattr(transport, "get", broken)
                await async_until(lambda: up.state == "down")
            assert "cannot be probed: RuntimeError" in up.reason
            await async_until(lambda: up.state == "up")
            await health.close()
            await transport.close()

    uvloop.run(run())


def test_a_connection_that_nobody_reads_from_is_not_used_again() -> None:
    """A client leaves when the end of its answer has come and is not read yet."""
    sizes = iter([MOST_HELD + 1, 2])  # of which the last byte is too much

    async def answers(writer: asyncio.StreamWriter) -> None:
        writer.write(whole(b"x" * next(sizes)))

    async def run() -> None:
        async with upstream(answers) as url:
            transport, up = Transport(Timeouts()), Upstream(Place(url), Breaker(time.monotonic))
            first = await transport.open(up, "/x", {}, b"{}", 10)
            await async_until(lambda: first.connection.ended and first.connection._paused)
            first.close()
            async with asyncio.timeout(30):
                second = await transport.open(up, "/x", {}, b"{}", 10)
                assert await second.whole() == b"xx"
            second.close()
            await transport.close()

    uvloop.run(run())


# -- clients --------------------------------------------------------------------------------------


@pytest.mark.parametrize("winner", [0, 1])
def test_a_client_that_leaves_while_a_hedge_is_settled_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, winner: int
) -> None:
    """It is known who answers first, and the other is being left."""
    turns = 0

    async def answers(writer: asyncio.StreamWriter) -> None:
        nonlocal turns
        turns += 1
        if turns - 1 == winner:
            await async_until(lambda: turns == 2)
            writer.write(STREAM + b'e\r\ndata: {"a":1}\n\r\n')
            await writer.drain()
        await asyncio.sleep(FOREVER)

    async def run() -> None:
        async with upstream(answers) as one, upstream(answers) as other:
            upstreams, transport = Upstreams("least-load"), Transport(Timeouts())
            for url in (one, other):
                upstreams.up(upstreams.add(Place(url)), {"m": ModelFigures()}, False)
            relay, queue = relaying(upstreams, transport)
            monkeypatch.setattr(relay.hedges, "wait", 0.1)
            body = b'{"model":"m","prompt":"x","stream":true,"n":2}'
            path = "/v1/completions"
            asked = Relayed(path, path, body, read_outline(body))
            job = RelayJob(asked, {}, Dealt("m", Model()), Usage(), asked.resume())
            leave = hedge.Try.leave

            async def left(self: hedge.Try) -> bool | None:
                asyncio.get_running_loop().call_soon(client.cancel)
                return await leave(self)

            with monkeypatch.context() as patch:
                patch.setattr(hedge.Try, "leave", left)
                client = asyncio.create_task(relay._first(job))
                with pytest.raises(asyncio.CancelledError):
                    await client
            assert turns == 2 and job.hedges == 1
            for up in upstreams:
                assert (up.waiting, up.running, len(up.cut)) == (0, 0, 0)
            await transport.close()

    uvloop.run(run())


# -- releases and configurations ------------------------------------------------------------------


@pytest.mark.parametrize("action", ["rollback", "promote"])
def test_an_update_ends_though_the_next_release_has_begun(action: str) -> None:
    """Which may be before anybody has looked. The pool that lost goes, unless the next has it."""

    async def run(canary: str) -> list[str]:
        releases = Releases(ReleaseStore(open_database(None, TABLES)))
        guards = [{"metric": "error_rate", "max": 0.01}]
        first = convert({"model": "m", "stable": "a", "canary": "a-next", "guards": guards})
        removed: list[str] = []

        async def edit(change: Any, who: str) -> None:
            removed.append(change.keywords["lost"])

        control = cast(Any, SimpleNamespace(edit=edit))
        updates = Updates(control, releases, cast(Any, ()), cast(Any, None))

        async def settled(pool: str) -> None: ...

        updates._settled = settled  # type: ignore[method-assign]
        release = releases.start(first, "x")
        ending = asyncio.create_task(updates._ended(release, first))
        await releases.tick()
        while releases.latest()["m"].state.phase not in ENDED:  # a promotion goes step by step
            releases.act("m", action, "x")  # type: ignore[arg-type]
        stable = "a-next" if action == "promote" else "a"
        second = {"model": "m", "stable": stable, "canary": canary, "guards": guards}
        releases.start(convert(second), "x")
        await releases.tick()
        await asyncio.wait_for(ending, 30)
        return removed

    lost = "a" if action == "promote" else "a-next"
    assert uvloop.run(run("b")) == [lost]
    assert uvloop.run(run(lost)) == []


def test_the_pool_of_a_release_that_begins_while_the_last_is_settled_stays() -> None:
    async def run() -> None:
        releases = Releases(ReleaseStore(open_database(None, TABLES)))
        guards = [{"metric": "error_rate", "max": 0.01}]
        spec = convert({"model": "m", "stable": "a", "canary": "a-next", "guards": guards})
        control = cast(Any, SimpleNamespace(edit=None))
        updates = Updates(control, releases, cast(Any, ()), cast(Any, None))

        async def settled(pool: str) -> None:
            assert pool == "a-next"
            releases.start(spec, "x")
            await releases.tick()

        updates._settled = settled  # type: ignore[method-assign]
        release = releases.start(spec, "x")
        releases.act("m", "rollback", "x")
        await releases.tick()
        await asyncio.wait_for(updates._ended(release, spec), 30)
        last = releases.last("m")
        assert last is not None and last.id != release.id

    uvloop.run(run())


class Server:
    """A server of a local pool that has been started."""

    url, pid, nbytes, last = "http://127.0.0.1:1", 1, 1, ""

    def __init__(self) -> None:
        self.ready, self.over, self.ended = asyncio.Event(), asyncio.Event(), False

    async def wait(self) -> None:
        await self.over.wait()

    async def end(self) -> None:
        self.ended = True
        self.over.set()


@pytest.mark.parametrize("turns", range(5))
def test_a_pool_that_goes_as_its_server_comes_is_gone(
    monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    """Whatever turns of the event loop lie between."""

    async def run() -> None:
        started: list[Server] = []

        async def start(*_: object) -> Server:
            started.append(Server())
            return started[-1]

        monkeypatch.setattr(LocalServer, "start", start)
        upstreams = Upstreams()
        health = Health(upstreams, Transport(Timeouts(0.2)), HealthCheck(0.1, 0.1))
        members = Members(upstreams, health)
        name = "local", "p", "x"
        pool = LocalPool(members.local, "p", LocalModel(model="x"))
        members.swap(Found([], {name: pool}, {name: []}))
        await async_until(lambda: started)
        started[0].ready.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        members.swap(Found([], {}, {}))
        await async_until(lambda: not list(upstreams) and started[0].ended)
        members.swap(Found([], {}, {}))
        await health.close()
        await members.close()

    uvloop.run(run())
