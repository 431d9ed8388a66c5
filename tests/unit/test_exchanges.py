"""Each request is recorded once, and unexpected errors have a response."""

from __future__ import annotations

import asyncio
import logging

import pytest
from starlette.types import Receive, Scope, Send

from octavo.errors import InvalidValue, RequestError
from octavo.server.exchange import OTHER, Exchange, exchange
from octavo.server.exchanges import ExchangeMiddleware, RouteLabel
from octavo.server.http import error_response
from tests.unit.asgi import call, error_body, scope


def other_body(error: RequestError) -> bytes:
    return b"another dialect"


def middleware(app: object, seen: list[Exchange]) -> ExchangeMiddleware:
    paths = {"/v1/a": RouteLabel("/v1/a", error_body), "/b/": RouteLabel("/b/{x}", other_body)}
    return ExchangeMiddleware(app, paths, RouteLabel(OTHER, error_body), seen.append, {})  # type: ignore[arg-type]


async def answers(given: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"12345", "more_body": True})
    await send({"type": "http.response.body", "body": b"678"})


async def refuses(given: Scope, receive: Receive, send: Send) -> None:
    await error_response(InvalidValue("wrong", "a"), given)(given, receive, send)


async def fails(given: Scope, receive: Receive, send: Send) -> None:
    raise ValueError("a secret")


async def fails_late(given: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    raise ValueError("a secret")


async def speaks(given: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "websocket.accept"})
    await send({"type": "websocket.send", "text": "é"})
    await send({"type": "websocket.send", "bytes": b"abc", "text": None})
    await send({"type": "websocket.close"})


def test_routes_status_and_bytes() -> None:
    seen: list[Exchange] = []
    for path in ("/v1/a", "/b/1/2", "/c", "/v1/a/b"):
        call(middleware(answers, seen), scope(path=path))
    assert [one.route for one in seen] == ["/v1/a", "/b/{x}", OTHER, OTHER]
    assert {(one.method, one.status, one.sent, one.code) for one in seen} == {
        ("POST", 200, 8, None)
    }
    assert all(one.seconds > 0 for one in seen)


def test_errors_are_written_in_the_form_of_their_route() -> None:
    seen: list[Exchange] = []
    first = call(middleware(refuses, seen), scope(path="/v1/a"))
    second = call(middleware(refuses, seen), scope(path="/b/1"))
    assert first[1]["body"] == b"400 invalid_value: wrong"
    assert second[1]["body"] == b"another dialect"
    assert [(one.status, one.code) for one in seen] == 2 * [(400, "invalid_value")]


def test_what_fails_after_an_answer_loses_nothing(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Exchange] = []
    running: dict[str, list[Scope]] = {}
    done: list[str] = []

    def broken() -> None:
        raise KeyError("a secret")

    async def app(given: Scope, receive: Receive, send: Send) -> None:
        exchange(given).at_end += [broken, lambda: done.append("the next")]
        await answers(given, receive, send)

    label = RouteLabel("/v1/a", error_body)
    with caplog.at_level(logging.ERROR):
        call(ExchangeMiddleware(app, {}, label, seen.append, running), scope())
    assert [one.status for one in seen] == [200] and done == ["the next"] and not running
    assert "after a request: KeyError" in caplog.text and "secret" not in caplog.text


def test_unexpected_errors(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Exchange] = []
    with caplog.at_level(logging.ERROR):
        sent = call(middleware(fails, seen), scope())
        assert (sent[0]["status"], b"could not answer" in sent[1]["body"]) == (500, True)
        with pytest.raises(ValueError, match="secret"):  # uvicorn cuts the connection
            call(middleware(fails_late, seen), scope())
        assert call(middleware(fails, seen), scope("websocket"))[0]["type"] == "websocket.close"
    assert [(one.status, one.code) for one in seen] == 3 * [(500, "internal_error")]
    assert "ValueError at test_exchanges.py" in caplog.text and "secret" not in caplog.text


def test_websockets_are_recorded_too() -> None:
    seen: list[Exchange] = []
    call(middleware(speaks, seen), scope("websocket", "/v1/a"))
    assert [(one.route, one.status, one.sent) for one in seen] == [("/v1/a", 101, 5)]


def test_a_cancelled_request_is_told_why() -> None:
    seen: list[Exchange] = []

    async def waits(given: Scope, receive: Receive, send: Send) -> None:
        await asyncio.Event().wait()

    sent: list[object] = []

    async def run() -> None:
        async def send(message: object) -> None:
            sent.append(message)

        task = asyncio.ensure_future(middleware(waits, seen)(scope(), None, send))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert (seen[0].status, seen[0].code) == (503, "shutting_down")
    assert sent[0]["status"] == 503  # type: ignore[index]


def test_the_exchange_of_a_scope() -> None:
    asked = scope()
    assert exchange(asked) is asked["exchange"]
