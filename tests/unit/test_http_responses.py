"""Responses that fit whatever happens: retries, streams, clients that leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from starlette.types import Message

from octavo.errors import InvalidValue, Overloaded
from octavo.generate.reply import Usage
from octavo.server.exchanges import Sender
from octavo.server.guard import Unauthorized
from octavo.server.http import ClientGone, EventStream, error_response, while_connected
from tests.unit.asgi import call, scope

GONE = {"type": "http.disconnect"}


def test_headers_of_errors() -> None:
    asked = scope()
    busy = error_response(Overloaded("busy", code="overloaded"), asked)
    assert (busy.status_code, busy.headers["retry-after"]) == (503, "1")
    assert busy.headers["x-should-retry"] == "true"
    denied = error_response(Unauthorized("key", None, "invalid_api_key"), asked)
    assert (denied.status_code, denied.headers["www-authenticate"]) == (401, "Bearer")
    plain = error_response(InvalidValue("wrong", "a"), asked)
    assert "retry-after" not in plain.headers and "www-authenticate" not in plain.headers
    assert (asked["exchange"].status, asked["exchange"].code) == (400, "invalid_value")


def test_work_ends_with_its_client() -> None:
    ended: list[str] = []

    async def work() -> str:
        try:
            await asyncio.sleep(0.01)
            return "done"
        finally:
            ended.append("work")

    async def stays() -> Any:
        await asyncio.Event().wait()

    async def leaves() -> Any:
        return GONE

    assert asyncio.run(while_connected(stays, work())) == "done"
    with pytest.raises(ClientGone):
        asyncio.run(while_connected(leaves, work()))
    assert ended == ["work", "work"]


def test_a_failure_of_the_work_is_raised() -> None:
    async def fails() -> str:
        raise InvalidValue("wrong")

    async def stays() -> Any:
        await asyncio.Event().wait()

    with pytest.raises(InvalidValue):
        asyncio.run(while_connected(stays, fails()))


def test_streams() -> None:
    closed: list[bool] = []

    async def frames(endless: bool) -> AsyncGenerator[bytes, None]:
        try:
            yield b"a"
            yield b"b"
            if endless:
                await asyncio.Event().wait()
        finally:
            closed.append(True)

    asked = scope()
    sent = call(EventStream(frames(False), "text/plain"), asked)
    assert [m.get("body") for m in sent] == [None, b"a", b"b", b""]
    assert dict(sent[0]["headers"])[b"content-type"] == b"text/plain; charset=utf-8"
    assert b"content-length" not in dict(sent[0]["headers"])
    assert not sent[-1]["more_body"] and asked["exchange"].status == 0
    sent = call(EventStream(frames(True), "text/plain"), asked, [GONE])
    assert asked["exchange"].status == 499
    assert all(message["more_body"] for message in sent[1:])  # cut off
    assert closed == [True, True]


def test_what_a_stream_gives_last_goes_with_its_end() -> None:
    """However long the stream then takes to end, and whether its client waits for that."""
    asked = scope()
    one, ended = asked["exchange"], list[bool]()
    one.usage = Usage(first=1.0)

    async def frames() -> AsyncGenerator[bytes, None]:
        yield b"a"
        one.final = True
        yield b"b"
        await asyncio.sleep(0.01)
        yield b"c"
        await asyncio.sleep(0.01)
        ended.append(True)

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:  # as a server's that has sent the whole answer
        while not sent or sent[-1].get("more_body", True):
            await asyncio.sleep(0)
        return GONE

    asyncio.run(EventStream(frames(), "text/plain")(asked, receive, Sender(send, asked, one)))
    parts = [(m["body"], m["more_body"]) for m in sent[1:]]
    assert parts == [(b"a", True), (b"bc", False)]
    assert ended and one.status == 200 and one.streamed is not None


def test_a_stream_that_is_all_last_is_timed_as_one() -> None:
    asked = scope()
    one = asked["exchange"]
    one.usage, one.final = Usage(first=1.0), True

    async def frames() -> AsyncGenerator[bytes, None]:
        yield b"a"

    async def send(message: Message) -> None: ...

    call(lambda a, b, _: EventStream(frames(), "text/plain")(a, b, Sender(send, a, one)), asked)
    assert one.streamed is not None and one.ttft == one.streamed - one.began
