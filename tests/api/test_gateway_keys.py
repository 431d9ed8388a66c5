"""Keys between a gateway, its clients and its upstreams: who sees which."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.gateway.config import ConfigFile, UpstreamPool
from octavo.gateway.run import GatewayOptions, serve
from octavo.server.guard import Access
from octavo.server.sender import SENDER
from tests.api.test_releases import listening, sound, url

ENVIRON = {"OCTAVO_ONE": "one", "OCTAVO_LARGE": "large"}


class Keyed:
    """A server that wants this key for everything. owner: of its models. seen: headers of what it
    was asked, by path."""

    def __init__(self, key: str, owner: str = "vllm") -> None:
        self._app, self._key, self._owner = sound(), key, owner
        self.seen: list[tuple[str, dict[str, str]]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {k.decode(): v.decode() for k, v in scope["headers"]}
        self.seen.append((scope["path"], headers))
        if headers.get("authorization") != f"Bearer {self._key}":
            return await _say(send, 401, {"error": {"message": "no"}})
        if scope["path"] == "/v1/models":
            return await _say(send, 200, {"data": [{"id": "m", "owned_by": self._owner}]})
        await self._app(scope, receive, send)

    def asked(self, path: str = "/v1/completions") -> list[dict[str, str]]:
        return [headers for at, headers in self.seen if at == path]


async def _say(send: Send, status: int, body: Any) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})


@asynccontextmanager
async def served(app: ASGIApp) -> AsyncIterator[str]:
    """The address of a server."""
    sock = listening()
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
    task = asyncio.create_task(server.serve([sock]))
    try:
        yield url(sock)
    finally:
        server.should_exit = True
        await task
        sock.close()


@asynccontextmanager
async def gateway(keys: tuple[str, ...] = (), **config: Any) -> AsyncIterator[str]:
    """The address of one that has such a configuration. keys: of its clients."""
    sock, ready = listening(), asyncio.Event()
    file = ConfigFile(probe_interval=0.2, queue_timeout=2, **config)
    options = GatewayOptions(Access(api_keys=keys), file, environ=ENVIRON)
    serving = serve(options, sock, ready=lambda _: ready.set(), ended=lambda _: None)
    task = asyncio.create_task(serving)
    try:
        await ready.wait()
        yield url(sock)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        sock.close()


def pool(at: str, **more: Any) -> dict[str, UpstreamPool]:
    return {"default": UpstreamPool(upstreams=(at,), **more)}


async def post(at: str, path: str, body: Any, headers: dict[str, str]) -> tuple[int, str]:
    async with aiohttp.ClientSession(headers=headers) as session:
        async with session.post(at + path, json=body) as response:
            return response.status, await response.text()


async def ask(at: str, key: str, stream: bool = False, model: str = "m") -> tuple[int, str]:
    """A completion, of who has this key, and says to be somebody."""
    headers = {"authorization": f"Bearer {key}", SENDER: "mine"}
    body = {"model": model, "prompt": "x", "stream": stream}
    return await post(at, "/v1/completions", body, headers)


@pytest.mark.parametrize(("owner", "names"), [("octavo", 2), ("vllm", 0)])
def test_octavos_servers_hear_who_sent_a_request_and_no_others_do(owner: str, names: int) -> None:
    """By the keys of the gateway, whatever clients say of themselves."""

    async def test() -> None:
        upstream = Keyed("one", owner)
        async with (
            served(upstream) as up,
            gateway(("a", "b"), pools=pool(up), upstream_key="${OCTAVO_ONE}") as at,
        ):
            for key in ("a", "b", "a"):
                for stream in (False, True):
                    assert (await ask(at, key, stream))[0] == 200
        found = [headers.get(SENDER, "") for headers in upstream.asked()]
        assert len(found) == 6 and len({*found} - {""}) == names and "mine" not in found
        assert found[:2] == found[4:] and len({*found[:2]}) == len({*found[2:4]}) == 1

    asyncio.run(test())


def test_senders_of_another_gateway_stay_apart() -> None:
    """It has one key, and says who sends."""

    async def test() -> None:
        upstream = Keyed("one", "octavo")
        async with (
            served(upstream) as up,
            gateway(("outer",), pools=pool(up), upstream_key="${OCTAVO_ONE}") as at,
        ):
            for name in ("a", "b", "a"):
                headers = {"authorization": "Bearer outer", SENDER: name}
                body = {"model": "m", "prompt": "x"}
                assert (await post(at, "/v1/completions", body, headers))[0] == 200
        first, second, third = (headers[SENDER] for headers in upstream.asked())
        assert first == third != second and not {"a", "b"} & {first, second}

    asyncio.run(test())


def test_an_upstream_that_is_added_to_a_pool_sees_the_key_of_the_pool() -> None:
    async def test() -> None:
        large, other = Keyed("large"), Keyed("one")
        pools = {"large": UpstreamPool(key="${OCTAVO_LARGE}")}
        async with (
            served(large) as first,
            served(other) as second,
            gateway(pools=pools, upstream_key="${OCTAVO_ONE}") as at,
        ):
            for text in (f"large={first}", f"small={second}"):
                status, _ = await post(at, "/v1/upstreams", {"upstream": text}, {})
                assert status == 200
            async with asyncio.timeout(5):
                while not large.seen or not other.seen:
                    await asyncio.sleep(0.02)
            assert large.seen[0][1]["authorization"] == "Bearer large"
            assert other.seen[0][1]["authorization"] == "Bearer one"

    asyncio.run(test())


async def get(at: str, path: str, key: str = "") -> str:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with aiohttp.ClientSession(headers=headers) as session:
        async with session.get(at + path) as response:
            return await response.text()


def test_an_upstream_that_wants_keys_of_its_clients_is_asked_for_any_model(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The gateway has no key to ask for its models with; whoever has one may use it."""

    async def test() -> None:
        upstream = Keyed("mine")
        async with served(upstream) as up, gateway(pools=pool(up)) as at:
            for stream in (False, True):
                assert (await ask(at, "mine", stream))[0] == 200
                assert (await ask(at, "other", stream))[0] == 401
            assert (await ask(at, "mine", model="n"))[0] == 200  # whatever it serves
            assert json.loads(await get(at, "/v1/models"))["data"] == []
            (card,) = json.loads(await get(at, "/v1/upstreams"))["upstreams"]
            assert (card["state"], card["models"]) == ("up", ["*"])
            said = await get(at, "/metrics")
            assert 'model_name="*"' in said and 'model_name="n"' not in said
            asked = len(upstream.asked("/v1/models"))
            async with asyncio.timeout(5):
                while len(upstream.asked("/v1/models")) < asked + 2:
                    await asyncio.sleep(0.05)

    asyncio.run(test())
    (told,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "says its models only to who has a key" in told and "--upstream-key KEY" in told


def test_an_upstream_that_wants_a_key_that_nobody_sends_is_down() -> None:
    async def test() -> None:
        async with served(Keyed("mine")) as up:
            for keys, more in ((("a",), {}), ((), {"upstream_key": "${OCTAVO_ONE}"})):
                async with gateway(keys, pools=pool(up), **more) as at:
                    status, text = await ask(at, "a")
                    assert (status, json.loads(text)["error"]["code"]) == (503, "no_upstream")

    asyncio.run(test())
