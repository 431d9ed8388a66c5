"""Bodies as they come in: limits for one and for all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest
from starlette.requests import Request

from octavo.errors import Overloaded
from octavo.server.bodies import MAX_BODY, Bodies, TooLarge
from octavo.server.exchange import Exchange
from octavo.server.http import ClientGone
from octavo.server.parsing import Fields
from octavo.server.sizes import SizeBounds


class Text(msgspec.Struct):
    text: str


def sent(*chunks: bytes, then: Callable[[], Awaitable[None]] | None = None) -> Request:
    """A request of which some chunks have come; `then` is waited for before the last."""
    left = list(chunks)

    async def receive() -> dict[str, object]:
        if len(left) == 1 and then is not None:
            await then()
        if not left:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    return Request({"type": "http", "headers": [], "exchange": Exchange()}, receive)


def read(bodies: Bodies, request: Request) -> asyncio.Task[Text]:
    return asyncio.ensure_future(
        bodies.read(request, Text, Fields(), lambda _: SizeBounds(100, 100))
    )


def test_all_bodies_together_have_a_limit() -> None:
    """What is being read counts until it is understood, refused or left."""

    async def run() -> None:
        bodies, more = Bodies(1000), asyncio.Event()

        async def wait() -> None:
            await more.wait()

        half = b'{"text":"' + b"a" * 500
        first = read(bodies, sent(half, b'"}', then=wait))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await read(bodies, sent(half, b'"}'))
        gone = read(bodies, sent(b"x" * 100, b"y", then=wait))
        await asyncio.sleep(0)
        gone.cancel()
        more.set()
        assert (await first).text == "a" * 500
        assert (await read(bodies, sent(b'{"text":"' + b"b" * 900, b'"}'))).text == "b" * 900

    asyncio.run(run())


def test_a_client_that_leaves_in_the_middle() -> None:
    async def run() -> None:
        request = sent(b'{"text":')
        request._receive = sent()._receive
        with pytest.raises(ClientGone):
            await read(Bodies(), request)

    asyncio.run(run())


async def measure(size: int) -> tuple[int, int]:
    """The length of the text of a body of `size` bytes, and the bytes that were counted."""
    frame = b'{"text":""}'
    body = frame[:-2] + b"a" * (size - len(frame)) + frame[-2:]
    request = sent(*(body[i : i + 65536] for i in range(0, len(body), 65536)))
    text = (await read(Bodies(), request)).text
    return len(text) + len(frame), request.scope["exchange"].received


def test_the_limit_of_one() -> None:
    assert asyncio.run(measure(MAX_BODY)) == (MAX_BODY, MAX_BODY)
    with pytest.raises(TooLarge):
        asyncio.run(measure(MAX_BODY + 1))
