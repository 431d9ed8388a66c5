"""Requests that are sent again: one answer, computed once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
from starlette.types import Message, Receive, Scope, Send

from octavo.checkpoint import open_checkpoint
from octavo.server import idempotency as module
from octavo.server.guard import Principal
from octavo.server.http import json_response
from octavo.server.idempotency import REPLAYED, Idempotency
from octavo.text import load_tokenizer
from tests.unit.asgi import scope as asgi_scope
from tests.unit.fake_models import ScriptedClient, fake_model, listening


class App:
    """Answers with what it was sent and how often it was asked. gate: is waited for before that."""

    def __init__(self) -> None:
        self.asked, self.status, self.gate = 0, 200, asyncio.Event()
        self.gate.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.asked += 1
        count, body, more = self.asked, b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        await self.gate.wait()
        scope["exchange"].status = self.status
        await json_response(b"%d:%s" % (count, body), self.status)(scope, receive, send)


async def ask(
    app: Idempotency, body: bytes = b"hi", key: str | None = "k", salt: str = "", path: str = "/x",
    gone: asyncio.Event | None = None, **headers: str,
) -> tuple[int, bytes, bool]:  # fmt: skip
    """Status, body, and whether it is said to come from before. The body is sent in two parts."""
    given = headers if key is None else {"idempotency_key": key} | headers
    asked = asgi_scope(path=path, **given) | {"principal": Principal(salt)}
    half = len(body) // 2
    parts: list[Message] = [
        {"type": "http.request", "body": body[:half], "more_body": True},
        {"type": "http.request", "body": body[half:], "more_body": False},
    ]
    sent: list[Message] = []

    async def receive() -> Message:
        if parts:
            return parts.pop(0)
        await (gone or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    await app(asked, receive, send)
    whole = b"".join(m.get("body", b"") for m in sent[1:])
    return sent[0]["status"], whole, REPLAYED in sent[0]["headers"]


def run(test: Any) -> None:
    asyncio.run(asyncio.wait_for(test, 10))


def test_the_same_again() -> None:
    async def test() -> None:
        app = Idempotency(inner := App())
        assert await ask(app) == (200, b"1:hi", False)
        assert await ask(app) == (200, b"1:hi", True)
        assert await ask(app, key="other") == (200, b"2:hi", False)
        assert await ask(app, key=None) == (200, b"3:hi", False)
        assert await ask(app, salt="another sender") == (200, b"4:hi", False)
        assert await ask(app, path="/y") == (200, b"5:hi", False)
        status, text, _ = await ask(app, b"ho")
        assert status == 422 and text.startswith(b"422 idempotency_key_reused")
        assert inner.asked == 5

    run(test())


@pytest.mark.parametrize("key", ["", "a b", "x" * 256, "ä"])
def test_keys_that_are_none(key: str) -> None:
    async def test() -> None:
        app = Idempotency(inner := App())
        status, text, _ = await ask(app, key=key)
        assert status == 400 and b"idempotency-key has 1 to 255" in text and inner.asked == 0

    run(test())


@pytest.mark.parametrize(
    ("status", "kept"), [(400, True), (404, True), (429, False), (500, False), (503, False), (499, False)]
)  # fmt: skip
def test_what_may_pass_is_computed_again(status: int, kept: bool) -> None:
    async def test() -> None:
        app = Idempotency(inner := App())
        inner.status = status
        await ask(app)
        inner.status = 200
        assert await ask(app) == ((status, b"1:hi", True) if kept else (200, b"2:hi", False))

    run(test())


def test_one_that_comes_meanwhile_waits() -> None:
    async def test() -> None:
        app = Idempotency(inner := App())
        inner.gate.clear()
        first = asyncio.create_task(ask(app))
        await asyncio.sleep(0)
        others = [asyncio.create_task(ask(app)) for _ in range(3)]
        leaving = asyncio.Event()
        left = asyncio.create_task(ask(app, gone=leaving))
        await asyncio.sleep(0.01)
        leaving.set()
        assert (await left)[0] == 499
        assert not first.done() and not any(task.done() for task in others)
        inner.gate.set()
        assert await first == (200, b"1:hi", False)
        assert await asyncio.gather(*others) == [(200, b"1:hi", True)] * 3
        assert inner.asked == 1

    run(test())


def test_of_one_that_was_given_up_nothing_is_kept() -> None:
    async def test() -> None:
        app = Idempotency(inner := App())
        inner.gate.clear()
        first = asyncio.create_task(ask(app))
        await asyncio.sleep(0)
        again = asyncio.create_task(ask(app))
        await asyncio.sleep(0)
        first.cancel()
        status, text, _ = await again
        assert status == 503 and b"send it again" in text
        inner.gate.set()
        assert await ask(app) == (200, b"2:hi", False)

    run(test())


def test_answers_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest first, when there are too many or too many bytes of them, and all after a day."""

    async def test() -> None:
        now = 0.0
        app = Idempotency(App(), lambda: now)
        monkeypatch.setattr(module, "MOST_ANSWERS", 2)
        for key in "abc":
            await ask(app, key=key)
        assert [(await ask(app, key=key))[2] for key in "cba"] == [True, True, False]
        monkeypatch.setattr(module, "MOST_BYTES", 20)
        await ask(app, b"0" * 18, key="d")
        await ask(app, b"0" * 18, key="e")
        assert app._bytes <= 40 and [(await ask(app, b"0" * 18, key=key))[2] for key in "ed"] == [
            True,
            False,
        ]
        now = module.KEPT + 1
        assert not (await ask(app, b"0" * 18, key="e"))[2]
        monkeypatch.setattr(module, "MOST_ANSWER", 3)
        await ask(app, key="f")
        assert not (await ask(app, key="f"))[2]
        assert app._bytes == sum(a.size for a in app._answers.values())

    run(test())


def test_an_answer_that_is_being_made_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever comes meanwhile: it is made once, and its bytes are counted once."""

    async def test() -> None:
        app = Idempotency(inner := App())
        monkeypatch.setattr(module, "MOST_ANSWERS", 1)
        inner.gate.clear()
        first = asyncio.create_task(ask(app, key="slow"))
        await asyncio.sleep(0)
        inner.gate.set()
        for key in "ab":
            await ask(app, key=key)
        monkeypatch.setattr(module, "MOST_ANSWERS", 9)
        again = asyncio.create_task(ask(app, key="slow"))
        assert (await first)[1:] == (b"1:hi", False) and (await again)[1:] == (b"1:hi", True)
        assert app._bytes == sum(a.size for a in app._answers.values() if a.kept)

    run(test())


def test_over_http(smollm2: Path) -> None:
    """Whole answers and streams, to the byte, in every dialect; nothing is computed again."""
    tokenizer = load_tokenizer(open_checkpoint(smollm2))
    with listening(model := fake_model(tokenizer, "m", "I am here.")) as server:
        client = cast(ScriptedClient, model.client)
        for number, (path, body) in enumerate(
            [
                ("/v1/completions", {"model": "m", "prompt": "hi", "stream": False}),
                ("/v1/completions", {"model": "m", "prompt": "hi", "stream": True}),
                ("/api/generate", {"model": "m", "prompt": "hi", "raw": True}),
            ],
            1,
        ):
            key = {"Idempotency-Key": str(number)}
            first, again = server.ask(path, body, **key), server.ask(path, body, **key)
            assert first == again and first[0] == 200 and len(client.requests) == number
        assert server.json("/v1/completions", {"model": "m", "prompt": "ho"}, **key | {"Idempotency-Key": "1"})[0] == 422  # fmt: skip
        assert [e.replayed for e in server.exchanges] == [False, True] * 3 + [False]
        assert b"octavo_replayed_requests_total 3.0" in server.metrics.render()
        assert len({e.id for e in server.exchanges}) == 7


def test_when_the_first_token_is_wanted(smollm2: Path) -> None:
    tokenizer = load_tokenizer(open_checkpoint(smollm2))
    with listening(model := fake_model(tokenizer, "m", "I am here.")) as server:
        body = {"model": "m", "prompt": "hi"}
        assert server.json("/v1/completions", body, **{"X-SLO-TTFT-MS": "250"})[0] == 200
        for wrong in ("0", "-1", "x", "1e3", "86400001", "999999999"):
            status, reply = server.json("/v1/completions", body, **{"x-slo-ttft-ms": wrong})
            assert (status, reply["error"]["param"]) == (400, "x-slo-ttft-ms")
        (request,) = cast(ScriptedClient, model.client).requests
        assert request.ttft is not None and 0 < request.ttft <= 0.25
