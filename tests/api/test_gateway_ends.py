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

    def __init__(self, app: ASGIApp, end: bytes, chunk: bytes = CHUNK) -> None:
        self._app, self._end, self._chunk = app, end, chunk

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self._app(scope, receive, send)
        media = b"application/x-ndjson" if self._chunk[:1] == b"{" else b"text/event-stream"
        headers = [(b"content-type", media)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": self._chunk, "more_body": True})
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


ERROR = b'data: {"error":{"message":"the engine died","type":"InternalServerError","code":500}}\n\n'
LATE = b'data: {"error":{"message":"the deadline passed","code":"deadline_exceeded"}}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("path", "end", "failed"),
    [("/v1/completions", ERROR + DONE, True), ("/v1/completions", ERROR, True),
     ("/v1/completions", LATE, False),
     ("/v1/completions", b"event: error\n" + ERROR.rstrip(), True),
     ("/v1/completions", ERROR.replace(b"\n", b"\r\n") + DONE, True),
     ("/v1/completions", b'data: {"error":null,"choices":[{"text":"error"}]}\n\n' + DONE, False),
     ("/v1/completions", b'data: {"choices":[{"text":"data: {\\"error\\":{}}"}]}\n\n' + DONE, False),
     ("/v1/messages", b'event: error\ndata: {"type":"error","error":{"type":"api_error"}}\n\n', True),
     ("/v1/responses", b'data: {"type":"response.failed","response":{"error":{"code":"x"}}}\n\n', True),
     ("/v1/responses", b'data: {"type":"response.completed","response":{"error":null}}\n\n', False)],
)  # fmt: skip
def test_a_stream_that_says_that_it_failed_has_failed(path: str, end: bytes, failed: bool) -> None:
    """Whatever follows: metrics, breakers and releases hear of it, and its client hears it once.
    What Octavo's servers say of the request alone, they have answered it with."""

    async def test() -> None:
        async with (
            gateway(default=Ending(sound(), end)) as at,
            aiohttp.ClientSession() as session,
        ):
            body = {"model": "m", "prompt": "x", "max_tokens": 4, "stream": True, "n": 2}
            async with session.post(f"{at}{path}", json=body) as response:
                assert (response.status, await response.read()) == (200, CHUNK + end)
            async with session.get(f"{at}/metrics") as response:
                said = await response.text()
            counted = [line for line in said.splitlines() if line.startswith("octavo_upstream_requests_total")]  # fmt: skip
            assert len(counted) == 1 and f'status="{502 if failed else 200}"' in counted[0]

    asyncio.run(test())


OVER = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
EVENT = b"data: {}\n\n"
TEXT = b'event: x\ndata: {"type":"x"}\n\n'


@pytest.mark.parametrize(
    ("path", "chunk", "end", "whole"),
    [("/api/chat", b'{"done":false}\n', b'{"done":true}\n', True),
     ("/api/chat", b'{"done":false}\n', b'{"done":true}', True),
     ("/api/chat", b'{"done":false}\n', b'{"done":tr', False),
     ("/api/chat", b'{"done":false}\n', b'{"done":false}\n', False),
     ("/api/generate", b'{"response":"a"}\n', b'{"response":"","done":true}\n', True),
     ("/api/generate", b'{"response":"a"}\n', b'{"response":"b"}\n', False),
     ("/completion", EVENT, b'data: {"content":"","stop":true}\n\n', True),
     ("/completion", EVENT, b'data: {"content":"","stop":false}\n\n', False),
     ("/v1/responses", EVENT, b'data: {"type":"response.incomplete"}\n\n', True),
     ("/v1/responses", EVENT, TEXT, False),
     ("/v1/messages", EVENT, OVER, True),
     ("/v1/messages", EVENT, OVER.rstrip(), True),
     ("/v1/messages", EVENT, OVER.replace(b"\n", b"\r\n"), True),
     ("/v1/messages", EVENT, OVER.rstrip() + b"\nid: 4\n", True),
     ("/v1/messages", EVENT, OVER + b": ping\n", True),
     ("/v1/messages", EVENT, OVER + b"\r\n", True),
     ("/v1/messages", EVENT, OVER + b"data: [DONE]\n\n", True),
     ("/v1/messages", EVENT, b"data: [DONE]", True),
     ("/v1/messages", EVENT, TEXT, False),
     ("/v1/messages", EVENT, b"", False),
     ("/v1/messages", EVENT, b"retr", False),
     ("/v1/messages", EVENT, OVER[:-6], False)],
)  # fmt: skip
def test_the_last_event_of_every_dialect_is_known(
    path: str, chunk: bytes, end: bytes, whole: bool
) -> None:
    """A server may close its connection in good order where its process ended."""

    async def test() -> None:
        async with (
            gateway(default=Ending(sound(), end, chunk)) as at,
            aiohttp.ClientSession() as session,
        ):
            body = {
                "model": "m", "messages": [], "prompt": "x", "input": "x", "max_tokens": 4,
                "stream": True,
            }  # fmt: skip
            async with session.post(f"{at}{path}", json=body) as response:
                said = await response.read()
            assert said.startswith(chunk)
            assert (b"ended in the middle" in said) == (not whole)
            assert (said == chunk + end) == whole

    asyncio.run(test())


INVALID = b'data: {"error":{"message":"no","type":"invalid_request_error","code":null}}\n\n'
RATED = b'data: {"error":{"message":"later","type":"x","code":429}}\n\n'


class FailingFirst:
    """A server of others whose first stream begins so; the next are sound."""

    def __init__(self, first: bytes) -> None:
        self._streams = [CHUNK + DONE, first + DONE]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, media = b'{"object":"list","data":[{"id":"m","object":"model"}]}', b"application/json"
        if scope["method"] == "POST":
            body, media = self._streams.pop(), b"text/event-stream"
        headers = [(b"content-type", media)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


@pytest.mark.parametrize(
    ("first", "again"),
    [(ERROR, True), (b": ping\n\n" + ERROR, True), (b"event: error\n" + ERROR, True), (RATED, True),
     (b'data: {"error":"it died"}\n\n', True),
     (ERROR.replace(b"500", b"422"), False), (INVALID, False), (CHUNK + ERROR, False)],
)  # fmt: skip
def test_a_stream_that_begins_with_an_error_is_asked_for_again(first: bytes, again: bool) -> None:
    """Nothing has been passed on, so that its client notices nothing; what is wrong with the
    request itself would be so anywhere."""

    async def test() -> None:
        async with (
            gateway(default=FailingFirst(first)) as at,
            aiohttp.ClientSession() as session,
        ):
            body = {"model": "m", "prompt": "x", "stream": True}
            async with session.post(f"{at}/v1/completions", json=body) as response:
                assert response.status == 200
                assert await response.read() == (CHUNK if again else first) + DONE

    asyncio.run(test())
