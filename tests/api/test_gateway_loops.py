"""Gateways that are asked what they have passed on themselves, and others that ask one another."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
from starlette.types import ASGIApp, Receive, Scope, Send

from tests.api.test_releases import ADMIN, gateway, sound
from tests.waiting import SECONDS

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
HEADERS = {"Authorization": f"Bearer {ADMIN}"}


class Counted:
    """A server that notes what requests for texts have in `via`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.via: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            self.via += [value.decode() for name, value in scope["headers"] if name == b"via"]
        await self._app(scope, receive, send)


async def added(session: aiohttp.ClientSession, at: str, upstream: str, state: str) -> str:
    """Adds an upstream to the default pool of a gateway; why it is in this state, once it is."""
    body, route = {"upstream": upstream}, f"{at}/v1/upstreams"
    async with session.post(route, json=body, headers=HEADERS) as response:
        assert response.status == 200
    async with asyncio.timeout(SECONDS):
        while True:
            async with session.get(route, headers=HEADERS) as response:
                every: list[dict[str, Any]] = (await response.json())["upstreams"]
            found = next(one for one in every if one["url"] == upstream)
            if found["state"] == state:
                return str(found["reason"])
            await asyncio.sleep(0.05)


def test_a_gateway_among_its_own_upstreams_is_down_and_says_why() -> None:
    async def test() -> None:
        one = Counted(sound())
        async with gateway(default=one) as at, aiohttp.ClientSession() as session:
            reason = await added(session, at, at, "down")
            assert reason.endswith("508; it is this gateway itself: name others")
            for _ in range(8):
                async with session.post(f"{at}/v1/chat/completions", json=CHAT) as response:
                    assert response.status == 200
            assert len(one.via) == 8 and not any("," in via for via in one.via)

    asyncio.run(test())


def test_what_goes_round_is_refused_and_not_asked_again() -> None:
    """Of two gateways that ask each other alone."""

    async def test() -> None:
        async with (
            gateway(other=sound()) as a, gateway(other=sound()) as b,
            aiohttp.ClientSession() as session,
        ):  # fmt: skip
            await added(session, a, b, "up")
            await added(session, b, a, "up")
            async with session.post(f"{a}/v1/chat/completions", json=CHAT) as response:
                error = (await response.json())["error"]
                assert (response.status, error["code"]) == (508, "loop_detected")
                assert "GET /v1/upstreams" in error["message"]
                assert response.headers["x-should-retry"] == "false"
            async with session.get(f"{b}/v1/requests", headers=HEADERS) as response:
                asked = (await response.json())["recent"]
            assert sum(line["route"] == "/v1/chat/completions" for line in asked) == 1

    asyncio.run(test())


def test_a_gateway_may_ask_another() -> None:
    async def test() -> None:
        last = Counted(sound())
        async with (
            gateway(default=last) as inner, gateway(other=sound()) as outer,
            aiohttp.ClientSession() as session,
        ):  # fmt: skip
            await added(session, outer, inner, "up")
            headers = {"via": "1.1 somebody"}
            route = f"{outer}/v1/chat/completions"
            async with session.post(route, json=CHAT, headers=headers) as response:
                assert response.status == 200
            first, *gateways = last.via[0].split(", ")
            assert first == "1.1 somebody" and len(set(gateways)) == 2

    asyncio.run(test())
