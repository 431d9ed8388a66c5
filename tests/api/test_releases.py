"""Releases and experiments through a gateway, with real servers behind it and real clients."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvicorn
from click.testing import CliRunner
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.cli.experiment import experiment
from octavo.errors import OctavoError
from octavo.gateway.config import ConfigFile, UpstreamPool
from octavo.gateway.config import Server as GatewayServer
from octavo.gateway.run import GatewayOptions, serve
from octavo.server.guard import Access
from octavo.simulate.engine import Speed
from octavo.simulate.server import Simulated, SimulatedServer

FAST = Speed(1e6, 0.001, 64)
ADMIN = "admin-key"
GUARDS = [{"metric": "error_rate", "max": 0.01}, {"metric": "repeat_rate", "max": 0.5}]
QUICK = {"hold": 0.3, "min_events": 10, "warmup": 0, "guards": GUARDS}


class Broken:
    """A server that answers nothing but questions about itself."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            start = {"type": "http.response.start", "status": 500, "headers": []}
            await send(start)
            return await send({"type": "http.response.body", "body": b"{}"})
        await self._app(scope, receive, send)


class Silent:
    """A server that takes requests and says nothing. taken: so many."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.taken = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            self.taken += 1
            while (await receive())["type"] != "http.disconnect":
                pass
            return
        await self._app(scope, receive, send)


def listening() -> socket.socket:
    sock = socket.socket(proto=socket.IPPROTO_TCP)  # without it asyncio leaves Nagle's delay on
    sock.bind(("127.0.0.1", 0))
    return sock


def url(sock: socket.socket) -> str:
    return f"http://127.0.0.1:{sock.getsockname()[1]}"


@asynccontextmanager
async def gateway(
    database: str | None = None, places: int = 256, **pools: ASGIApp
) -> AsyncIterator[str]:
    """The address of one, with a server in each pool. places: requests at each."""
    servers, tasks, found, socks = [], [], {}, [listening()]
    for pool, app in pools.items():
        config = uvicorn.Config(app, log_level="critical", lifespan="off")
        servers.append(uvicorn.Server(config))
        socks.append(listening())
        tasks.append(asyncio.create_task(servers[-1].serve([socks[-1]])))
        found[pool] = UpstreamPool(upstreams=(url(socks[-1]),))
    ready = asyncio.Event()
    state = GatewayServer(database=database, drain_timeout=2)
    config = ConfigFile(pools=found, max_inflight=places)
    options = GatewayOptions(Access(admin_key=ADMIN), config, state)
    serving = serve(options, socks[0], ready=lambda _: ready.set(), ended=lambda _: None)
    tasks.append(asyncio.create_task(serving))
    try:
        await ready.wait()
        yield url(socks[0])
    finally:
        tasks[-1].cancel()
        for server in servers:
            server.should_exit = True
        await asyncio.gather(*tasks, return_exceptions=True)
        closed = socks[0].fileno() < 0
        for sock in socks:
            sock.close()
    assert closed  # by whoever served on it


def sound(name: str = "m") -> ASGIApp:
    return SimulatedServer(Simulated(name, 0, FAST))


class Client:
    """Asks a gateway, as many users."""

    def __init__(self, session: aiohttp.ClientSession, at: str) -> None:
        self._session, self._at = session, at
        self.number = 0
        self.status: Counter[int] = Counter()
        self.replicas: Counter[str] = Counter()
        self.versions: Counter[str] = Counter()

    async def ask(self, user: str | None = None, **more: Any) -> aiohttp.ClientResponse:
        self.number += 1
        body = {
            "model": "m", "messages": [{"role": "user", "content": f"Question {self.number}"}],
            "stream": True, "max_tokens": 6, "user": user or f"user-{self.number}",
        } | more  # fmt: skip
        async with self._session.post(f"{self._at}/v1/chat/completions", json=body) as response:
            text = await response.text()
        self.status[response.status] += 1
        self.versions[response.headers.get("x-version", "")] += 1
        if response.status == 200:
            assert text.rstrip().endswith("[DONE]" if more.get("stream", True) else "}")
            self.replicas[response.headers["x-replica"]] += 1
        return response

    async def load(self, until: Callable[[], Awaitable[bool]]) -> None:
        """Sixteen users at a time, until something has happened."""
        ended = False

        async def one() -> None:
            while not ended:
                await self.ask()

        streams = [asyncio.create_task(one()) for _ in range(16)]
        while not await until():
            await asyncio.sleep(0.05)
            assert not any(stream.done() for stream in streams)
        ended = True
        await asyncio.gather(*streams)

    async def admin(self, method: str, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
        headers = {"authorization": f"Bearer {ADMIN}"}
        async with self._session.request(method, self._at + path, json=body, headers=headers) as r:
            return r.status, await r.json()

    async def phase(self) -> str:
        return str((await self.admin("GET", "/v1/releases?model=m"))[1]["phase"])


def test_promotion_and_rollback_under_load_drop_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        pools = {"default": sound(), "next": sound(), "bad": Broken(sound())}
        async with (
            gateway(str(tmp_path / "state.sqlite3"), **pools) as at,
            aiohttp.ClientSession() as session,
        ):
            client = Client(session, at)
            given = {"model": "m", "stable": "default", "canary": "next", "steps": [50, 100]}
            assert (await client.admin("POST", "/v1/releases", given | QUICK))[0] == 200
            await client.load(lambda: _is(client, "promoted"))
            assert set(client.status) == {200} and len(client.replicas) == 2
            assert {"stable", "canary"} <= set(client.versions)
            client.replicas.clear()
            for _ in range(5):
                await client.ask()
            assert len(client.replicas) == 1  # all are the new version's

            given = {"model": "m", "stable": "next", "canary": "bad", "steps": [10, 100]}
            assert (await client.admin("POST", "/v1/releases", given | QUICK))[0] == 200
            await client.load(lambda: _is(client, "rolled_back"))
            assert set(client.status) == {200}  # the old version answered in its place
            _, events = await client.admin("GET", "/v1/releases?model=m")
            assert 0 < events["guards"][0]["count"] < 60
            client.status.clear()
            for _ in range(20):
                await client.ask()
            assert client.status == {200: 20}
            _, status = await client.admin("GET", "/v1/releases?model=m")
            assert [r["who"] for r in status["audit"]] == ["admin", "octavo"]
            assert status["guards"][0]["fired"] and status["shares"] == {"stable": 1.0}

        async with gateway(str(tmp_path / "state.sqlite3"), **pools) as at, aiohttp.ClientSession() as session:  # fmt: skip
            client = Client(session, at)
            await client.ask()
            assert (client.status, client.versions) == ({200: 1}, {"stable": 1})  # still known

    async def _is(client: Client, phase: str) -> bool:
        return await client.phase() == phase

    async def alone() -> None:
        async with gateway(str(tmp_path / "state.sqlite3"), default=sound()) as at, aiohttp.ClientSession() as session:  # fmt: skip
            client = Client(session, at)
            await client.ask()  # the pool that was left is gone: the model's own answers
            assert (client.status, client.versions) == ({200: 1}, {"": 1})

    asyncio.run(test())
    asyncio.run(alone())


@asynccontextmanager
async def silent_version(
    default: ASGIApp, **options: Any
) -> AsyncIterator[tuple[Client, dict[str, Any], Silent]]:
    """A client of a gateway that gives half of its requests to a version that says nothing; the
    release that does so, and that version."""
    silent = Silent(sound())
    release = QUICK | {
        "model": "m", "stable": "default", "canary": "next", "steps": [50, 100], "warmup": 3600,
    }  # fmt: skip
    async with (
        gateway(default=default, next=silent, **options) as at,
        aiohttp.ClientSession() as session,
    ):
        client = Client(session, at)
        assert (await client.admin("POST", "/v1/releases", release))[0] == 200
        yield client, release, silent


async def ask_until_taken(
    client: Client, silent: Silent, count: int, stream: bool
) -> list[asyncio.Task[aiohttp.ClientResponse]]:
    """Requests of which the silent version has so many."""
    asked = []
    async with asyncio.timeout(30):
        while silent.taken < count:
            asked.append(asyncio.create_task(client.ask(stream=stream)))
            await asyncio.sleep(0.02)
    return asked


async def roll_back(client: Client) -> None:
    assert (await client.admin("POST", "/v1/releases/rollback", {"model": "m"}))[0] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_version_has_not_answered_is_asked_of_the_old_one(stream: bool) -> None:
    """When it is rolled back; until then whole answers may take an hour."""

    async def test() -> None:
        async with silent_version(sound()) as (client, _, silent):
            asked = await ask_until_taken(client, silent, 8, stream)
            async with asyncio.timeout(30):
                while len(asked) - sum(task.done() for task in asked) > silent.taken:
                    await asyncio.sleep(0.02)
            await roll_back(client)
            async with asyncio.timeout(30):
                await asyncio.gather(*asked)
            assert client.status == {200: len(asked)} and len(client.replicas) == 1
            taken = silent.taken
            for _ in range(10):
                await client.ask(stream=stream)
            assert (silent.taken, client.status) == (taken, {200: len(asked) + 10})

    asyncio.run(test())


def test_a_version_that_was_rolled_back_is_asked_nothing_more() -> None:
    """Not even by those who wait in line, nor if another release begins at once; and it is not
    blamed."""
    busy = SimulatedServer(Simulated("m", 0, Speed(1e6, 0.03, 64)))

    async def test() -> None:
        async with silent_version(busy, places=2, third=sound()) as (client, release, silent):
            asked = await ask_until_taken(client, silent, 2, stream=False)
            asked += [asyncio.create_task(client.ask(stream=False)) for _ in range(20)]
            await asyncio.sleep(0.1)
            assert sum(not task.done() for task in asked) > 10  # in line
            await roll_back(client)
            again = release | {"canary": "third"}
            assert (await client.admin("POST", "/v1/releases", again))[0] == 200
            async with asyncio.timeout(30):
                await asyncio.gather(*asked)
            assert client.status == {200: len(asked)} and silent.taken == 2
            upstreams = (await client.admin("GET", "/v1/upstreams"))[1]["upstreams"]
            assert [one["breaker"] for one in upstreams] == ["closed"] * 3

    asyncio.run(test())


def test_a_gateway_that_is_cancelled_ends_its_answers_first() -> None:
    async def test() -> None:
        slow = SimulatedServer(Simulated("m", 0, Speed(1e6, 0.1, 64)))
        async with aiohttp.ClientSession() as session:
            async with gateway(default=slow) as at:
                client = Client(session, at)
                asking = asyncio.create_task(client.ask(max_tokens=10))
                await asyncio.sleep(0.5)
                assert not asking.done()
            await asking
            assert client.status == {200: 1}

    asyncio.run(test())


def test_an_experiment_alters_bodies_and_takes_feedback() -> None:
    async def test() -> None:
        asked: list[dict[str, Any]] = []
        async with gateway(default=_Listening(sound(), asked)) as at, aiohttp.ClientSession() as session:  # fmt: skip
            client = Client(session, at)
            given = {
                "id": "cooler", "model": "m", "control": "a", "metrics": ["thumbs", "ttft"],
                "variants": {
                    "a": {"weight": 50},
                    "b": {"weight": 50, "set": {"temperature": 0.25}, "prompt_prefix": "Be brief. "},
                },
            }  # fmt: skip
            assert (await client.admin("POST", "/v1/experiments", given))[0] == 200
            await asyncio.sleep(1.1)
            for i in range(60):
                response = await client.ask(user=f"u{i}")
                altered = response.headers["x-variant"] == "b"
                assert (asked[-1].get("temperature") == 0.25) == altered
                assert (asked[-1]["messages"][0]["content"] == "Be brief. ") == altered
                again = await client.ask(user=f"u{i}")
                assert again.headers["x-variant"] == response.headers["x-variant"]
                told = {"experiment": "cooler", "metric": "thumbs", "value": 1, "user": f"u{i}"}
                assert (await client.admin("POST", "/v1/feedback", told))[0] == 200
            told["metric"] = "stars"
            status, error = await client.admin("POST", "/v1/feedback", told)
            assert status == 400 and "takes thumbs" in error["error"]["message"]
            status, error = await client.admin("POST", "/v1/feedback", told | {"experiment": "no"})
            said = error["error"]["message"]
            assert (status, said) == (404, "there is no experiment 'no' that goes on")
            await asyncio.sleep(1.3)
            found = await asyncio.to_thread(run, experiment, at, "report", "cooler")
            assert "thumbs" in found and "ttft" in found
            page = await session.get(
                f"{at}/v1/experiments/cooler/report?format=html",
                headers={"authorization": f"Bearer {ADMIN}"},
            )
            assert "<svg" in await page.text()
            assert "has ended" in await asyncio.to_thread(run, experiment, at, "stop", "cooler")

    asyncio.run(test())


class _Listening:
    """A server whose questions are written down."""

    def __init__(self, app: ASGIApp, asked: list[dict[str, Any]]) -> None:
        self._app, self._asked = app, asked

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        import msgspec

        async def heard() -> Any:
            message = await receive()
            if message.get("body"):
                self._asked.append(msgspec.json.decode(message["body"]))
            return message

        await self._app(scope, heard, send)


def run(command: Any, at: str, *words: str) -> str:
    """What a command prints. Raises OctavoError."""
    result = CliRunner().invoke(command, [*words, "--server", at, "--admin-key", ADMIN])
    if isinstance(result.exception, OctavoError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_a_gateway_without_the_canarys_pool_says_nothing_of_it(tmp_path: Path) -> None:
    """An admin has added it to the other one by hand; here the old version answers."""
    file = str(tmp_path / "state.sqlite3")
    spec = {"model": "m", "canary": "next", "steps": [50, 100], "hold": 60, "min_events": 10}

    async def test() -> None:
        async with (
            gateway(file, default=sound(), next=sound()) as one,
            gateway(file, default=sound()) as other,
            aiohttp.ClientSession() as session,
        ):
            first, second = Client(session, one), Client(session, other)
            assert (await first.admin("POST", "/v1/releases", spec))[0] == 200
            await async_until_known(second)
            for _ in range(40):
                await second.ask()
            assert (second.status, second.versions) == ({200: 40}, {"stable": 40})
            async with asyncio.timeout(10):
                while first.versions["canary"] < 10:
                    await first.ask()
            assert await first.phase() == await second.phase() == "running"
            await asyncio.sleep(1)  # gateways tell of what they have seen after a quarter
            report = (await first.admin("GET", "/v1/releases?model=m"))[1]
            assert report["phase"] == "running"

    async def async_until_known(client: Client) -> None:
        async with asyncio.timeout(10):
            while (await client.ask()).headers.get("x-version") is None:
                await asyncio.sleep(0.05)
        client.status.clear(), client.versions.clear()

    asyncio.run(test())
