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


CARDS = b'{"object":"list","data":[{"id":"m","object":"model","owned_by":"others"}]}'
DONE = b"data: [DONE]\n\n"
CHUNK = b'data: {"choices":[{"text":"data: x"}],"usage":null}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":50,"completion_tokens":200}}\n\n'
CHAT, OLLAMA = "/v1/chat/completions", b'{"response":"x\\n","done":false}\n'
CLAUDE = b'event: content_block_delta\ndata: {"type":"content_block_delta"}\n\n'
CLAUDE_ENDS = (
    b'event: message_delta\ndata: {"type":"message_delta","usage":{"output_tokens":7}}\n\n'
)
CLAUDE_STOPS = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
RESPONSE = b'data: {"type":"response.output_text.delta","delta":"data: x"}\n\n'
RESPONSE_ENDS = (
    b'data: {"type":"response.completed","response":{"output":[{"text":"as data: x"}],'
    b'"usage":{"input_tokens":50,"output_tokens":8}}}\n\n'
)


def pieces(data: bytes) -> list[bytes]:
    return [data[i : i + 9] for i in range(0, len(data), 9)]


class Saying:
    """A server of others whose streams come in such parts."""

    def __init__(self, parts: list[bytes]) -> None:
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        media, parts = b"application/json", [CARDS]
        if scope["method"] == "POST":
            media, parts = b"text/event-stream", self._parts
            if parts[0][:1] == b"{":
                media = b"application/x-ndjson"
        headers = [(b"content-type", media)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
            await asyncio.sleep(0.002)
        await send({"type": "http.response.body", "body": b""})


@pytest.mark.parametrize(
    ("path", "parts", "prompt", "completion"),
    [(CHAT, [CHUNK * 100 + DONE], 2, 100), (CHAT, pieces(CHUNK * 3 + DONE), 2, 3),
     (CHAT, [CHUNK, b": ping\n\n", CHUNK, DONE, b": ping\n\n"], 2, 2),
     (CHAT, [(CHUNK * 3 + DONE).replace(b"\n", b"\r\n").replace(b"data: {", b"data:{")], 2, 3),
     (CHAT, [CHUNK * 100 + USAGE + DONE], 50, 200), (CHAT, [CHUNK, USAGE, DONE], 50, 200),
     (CHAT, pieces(CHUNK + USAGE + DONE), 50, 200), (CHAT, [CHUNK, USAGE + b"data: [DONE]"], 50, 200),
     (CHAT, [CHUNK, USAGE, DONE, b": bye\n\n", b": bye\n\n"], 50, 200),
     ("/v1/messages", [CLAUDE * 3, CLAUDE_ENDS, CLAUDE_STOPS], 2, 7),
     ("/v1/responses", [RESPONSE * 3, RESPONSE_ENDS], 50, 8),
     ("/v1/responses", [RESPONSE * 3, RESPONSE_ENDS.replace(b"data: {", b"data:{")], 50, 8),
     ("/v1/responses", [RESPONSE * 3, RESPONSE_ENDS + DONE], 50, 8),
     ("/api/generate", [OLLAMA * 3, b'{"response":"","done":true,"prompt_eval_count":50,"eval_count":4}'], 50, 4),
     ("/api/generate", pieces(OLLAMA * 2 + OLLAMA.replace(b"false", b"true")), 2, 3),
     ("/completion", [b'data: {"content":"x"}\n\n', b'data: {"stop":true,"tokens_evaluated":50,"tokens_predicted":9}\n\n'], 50, 9)],
)  # fmt: skip
def test_streams_of_others_took_what_they_say_else_what_they_show(
    path: str, parts: list[bytes], prompt: int, completion: int
) -> None:
    """However their events are cut into parts on the way."""

    async def test() -> None:
        async with gateway(default=Saying(parts)) as at, aiohttp.ClientSession() as session:

            async def counted(direction: str) -> float:
                async with session.get(f"{at}/metrics") as response:
                    found = ScrapeWindow({}, read(await response.text()), 1)
                return found.last(TOKENS, "", direction=(direction,)).get("", -1.0)

            body = {"model": "m", "prompt": "x" * 4, "stream": True}
            async with session.post(f"{at}{path}", json=body) as response:
                assert await response.read() == b"".join(parts)
            async with asyncio.timeout(20):
                while (given := await counted("output")) < 0:
                    await asyncio.sleep(0.01)
            assert (await counted("input"), given) == (prompt, completion)

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
