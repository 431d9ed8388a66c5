"""Streams whose model is being loaded show signs of life, and are told what went wrong."""

from __future__ import annotations

import asyncio
import http.client
import json
import time
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from octavo.checkpoint import open_checkpoint
from octavo.errors import RequestError
from octavo.generate.prepare import prepare
from octavo.generate.reply import Usage
from octavo.generate.request import GenerationRequest
from octavo.server import patience
from octavo.server.dialects.llama_cpp.responses import CompletionWriter
from octavo.server.dialects.llama_cpp.schemas import CompletionBody
from octavo.server.http import EventStream, silence, started
from octavo.server.registry import ModelLease
from octavo.server.runner import _stream
from octavo.text import load_tokenizer
from tests.unit.asgi import scope
from tests.unit.dialects import scripted, speaking
from tests.unit.fake_models import Listener, ScriptedClient, fake_model
from tests.waiting import until

COMMENT = patience.COMMENT.decode()
HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, Any] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 8},
    "/completion": {"prompt": "hi"},
}


class Loading:
    """Takes its time for each request. error: instead of a model."""

    seconds = 0.0
    error: RequestError | None = None

    async def admit(self, lease: ModelLease) -> None:
        await asyncio.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        lease.grant()


@pytest.fixture
def late(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Listener, Loading]]:
    monkeypatch.setattr(patience, "PATIENCE", 0.05)
    loading = Loading()
    with speaking(scripted(load_tokenizer(open_checkpoint(smollm2)), "ann", "Once")) as server:
        entry = server.models.entry("ann")
        entry.source, entry.leaving = cast(Any, loading), True
        server.models.loader = cast(Any, loading)
        yield server, loading
        assert entry.users == 0


def begun(text: str) -> list[str]:
    """How each line of a stream begins, which has no id yet."""
    return [line[:12] for line in text.replace(COMMENT, "").split("\n")]


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_whose_model_is_loaded(late: tuple[Listener, Loading], path: str) -> None:
    server, loading = late
    asked = BODIES[path] | {"model": "ann", "stream": True}
    plain = begun(server.ask(path, asked)[1])
    loading.seconds = 0.3
    status, text = server.ask(path, asked)
    count = text.count(COMMENT)
    assert status == 200 and count >= 3 and text.startswith(count * COMMENT)
    assert begun(text) == plain
    assert [one.status for one in server.exchanges] == [200, 200]


@pytest.mark.parametrize("path", BODIES)
def test_what_is_refused_late_is_told_in_the_stream(
    late: tuple[Listener, Loading], path: str
) -> None:
    server, loading = late
    loading.error = RequestError("it is damaged", "model", "invalid_model")
    asked = BODIES[path] | {"model": "ann", "stream": True}
    refused = server.ask(path, asked)
    assert refused[0] == 400
    loading.seconds = 0.2
    status, text = server.ask(path, asked)
    assert status == 200
    event, end = ("", "data: [DONE]\n\n") if "completions" in path else ("event: error\n", "")
    assert text.replace(COMMENT, "") == f"{event}data: {refused[1]}\n\n{end}"
    assert server.ask(path, asked | {"stream": False}) == refused
    assert [(one.status, one.code) for one in server.exchanges] == [(400, "invalid_model")] * 3


def test_who_leaves_waits_for_nothing(late: tuple[Listener, Loading]) -> None:
    server, loading = late
    loading.seconds = 30
    asked = json.dumps({"model": "ann", "prompt": "hi", "stream": True})
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    connection.request("POST", "/v1/completions", asked)
    assert connection.getresponse().read(len(COMMENT)) == patience.COMMENT
    connection.close()
    until(lambda: server.exchanges, 15)
    assert [one.status for one in server.exchanges] == [499]


def test_deadlines_count_from_the_arrival(late: tuple[Listener, Loading]) -> None:
    """Loading takes of the time, and ends with it."""
    server, loading = late
    client = server.models.entry("ann").client
    assert isinstance(client, ScriptedClient)
    loading.seconds = 0.3
    asked = {"model": "ann", "prompt": "hi", "timeout": 30}
    assert server.ask("/v1/completions", asked, **{"x-slo-ttft-ms": "9000"})[0] == 200
    (request,) = client.requests
    assert request.timeout is not None and request.timeout <= 29.7
    assert request.ttft is not None and request.ttft <= 8.7
    loading.seconds = 30
    began = time.monotonic()
    status, reply = server.json("/v1/completions", asked | {"timeout": 0.2})
    assert (status, reply["error"]["code"]) == (408, "deadline_exceeded")
    assert 0.2 <= time.monotonic() - began < 10 and len(client.requests) == 1


def test_a_stream_that_is_dropped_before_it_is_read_frees_its_request(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "PATIENCE", 0.0)
    tokenizer, client = load_tokenizer(open_checkpoint(smollm2)), ScriptedClient([], hang=True)
    job = prepare(GenerationRequest(prompts=["hi"]), fake_model(tokenizer, "ann", client=client))

    async def send(message: Message) -> None:
        raise asyncio.CancelledError

    async def run() -> None:
        asked, usage = scope(), Usage()
        body = CompletionBody(prompt="hi", stream=True)
        writer = CompletionWriter(body, job, usage)
        made = await _stream(Request(asked, silence), job, usage, writer, {}, None)
        assert client.running == 1
        with pytest.raises(asyncio.CancelledError):
            await made(asked, silence, send)
        assert client.running == 0

    asyncio.run(run())


def test_a_stream_that_is_made_after_its_client_has_left_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(patience, "PATIENCE", 0.0)
    closed: list[bool] = []

    async def frames() -> AsyncGenerator[bytes, None]:
        try:
            yield b""
            yield b"text"
        finally:
            closed.append(True)

    async def run() -> None:
        go, asked = asyncio.Event(), scope()
        asked["exchange"].stream_awaited = True

        async def handler(request: Request) -> Response:
            await go.wait()
            return EventStream(await started(frames()), patience.EVENTS)

        late = await patience.patient(handler, bytes)(Request(asked))
        assert isinstance(late, EventStream)
        assert await anext(late.frames) == patience.COMMENT
        go.set()
        for _ in range(5):
            await asyncio.sleep(0)  # it is made, and nobody asks for the next frame
        assert not closed
        await late.frames.aclose()
        assert closed == [True]

    asyncio.run(run())
