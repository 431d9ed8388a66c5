"""How streams of other servers end, beside what the standard says."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from tests.api.test_releases import gateway, sound

CHUNK = b'data: {"id":"x","choices":[{"index":0,"text":"Hello"}]}\n\n'


class Ending:
    """A server whose streams have a chunk, and this end."""

    def __init__(self, app: ASGIApp, end: bytes) -> None:
        self._app, self._end = app, end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self._app(scope, receive, send)
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": CHUNK, "more_body": True})
        await asyncio.sleep(0.05)
        await send({"type": "http.response.body", "body": self._end})


@pytest.mark.parametrize(
    ("end", "whole"),
    [(b"data: [DONE]\n\n", True), (b"data: [DONE]\n", True), (b"data: [DONE]", True),
     (b"data: [DONE]\n\ndata: {", True), (b"data: [DO", False), (b"", False)],
)  # fmt: skip
def test_a_last_event_needs_no_empty_line(end: bytes, whole: bool) -> None:
    """Clients read it without one, so that only the gateway would take it for a broken stream."""

    async def test() -> None:
        async with (
            gateway(default=Ending(sound(), end)) as at,
            aiohttp.ClientSession() as session,
        ):
            body = {"model": "m", "prompt": "x", "stream": True, "n": 2}
            async with session.post(f"{at}/v1/completions", json=body) as response:
                said = await response.read()
            assert said.startswith(CHUNK)
            assert (b"ended in the middle" in said) == (not whole)
            assert (said == CHUNK + end) == whole

    asyncio.run(test())
