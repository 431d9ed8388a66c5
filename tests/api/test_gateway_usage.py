"""What a gateway counts of answers that nobody has read to their end, and says of overload."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.server.window import ScrapeWindow, read
from octavo.simulate.engine import Speed
from octavo.simulate.server import Simulated, SimulatedServer
from tests.api.test_releases import gateway

TOKENS = "octavo_tokens_total"


@pytest.mark.parametrize("fields", [{}, {"n": 2}])  # followed by tokens, and by chunks
def test_who_leaves_a_stream_has_used_what_it_gave(fields: dict[str, int]) -> None:
    """Else limits in tokens would be for those alone who read to the end."""
    slow = SimulatedServer(Simulated("m", 0, Speed(1e6, 0.01, 64)))

    async def test() -> None:
        async with gateway(default=slow) as at, aiohttp.ClientSession() as session:

            async def counted(direction: str) -> float:
                async with session.get(f"{at}/metrics") as response:
                    found = ScrapeWindow({}, read(await response.text()), 1)
                where = {"outcome": ("cancelled",), "direction": (direction,)}
                return found.last(TOKENS, "", **where).get("", -1.0)

            body = {"model": "m", "prompt": "x" * 400, "stream": True, "max_tokens": 4000}
            async with session.post(f"{at}/v1/completions", json=body | fields) as response:
                for _ in range(20):  # lines, of which every other one is empty
                    await response.content.readline()
            async with asyncio.timeout(20):
                while (given := await counted("output")) < 0:
                    await asyncio.sleep(0.05)
            assert 5 <= given < 400 and await counted("input") == 101

    asyncio.run(test())


class Busy:
    """A server behind a proxy that says so in words of its own."""

    def __init__(self, app: ASGIApp, status: int) -> None:
        self._app, self._status = app, status

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self._app(scope, receive, send)
        headers = [(b"content-type", b"text/html"), (b"retry-after", b"40")]
        await send({"type": "http.response.start", "status": self._status, "headers": headers})
        await send({"type": "http.response.body", "body": b"<html>busy"})


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_upstream_is_no_broken_one_whatever_it_says(status: int) -> None:
    busy = Busy(SimulatedServer(Simulated("m", 0, Speed(1e6, 0.01, 64))), status)

    async def test() -> None:
        async with gateway(default=busy) as at, aiohttp.ClientSession() as session:
            body = {"model": "m", "prompt": "x"}
            async with session.post(f"{at}/v1/completions", json=body) as response:
                error = (await response.json())["error"]
                assert (response.status, error["code"]) == (503, "overloaded")
                assert response.headers["retry-after"] == "40"

    asyncio.run(test())
