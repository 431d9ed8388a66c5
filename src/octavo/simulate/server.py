"""A server of a simulated engine: OpenAI's chat and text completions, streamed or whole.

Its texts are words drawn from a seed and the prompt: the same request has the same answer in every
process. Like Octavo's own server it can go on with another's stream (`server/resume.py`), and tells
what its prefix cache holds (`server/cache_events.py`).
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from itertools import count
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from octavo.balance.chain import text_chain
from octavo.client.cached_prompts import CachedPrompts
from octavo.errors import InvalidValue
from octavo.server.cache_events import PATH, CacheFeed, cache_events, prompt_name
from octavo.server.http import ClientGone, while_connected
from octavo.server.most_tokens import read_most
from octavo.server.resume import Resume, Spent, ended, told
from octavo.simulate.engine import BLOCK_TOKENS, SimulatedEngine, SimulatedRequest, Speed

WORDS = (
    "a about all and as at be but by can do each for from go have he how if in into is it know "
    "like look make many more new no not now of on one or other out people say see she so some "
    "than that the their them then there these they this time to two up use was way we what when "
    "which who will with word would write you"
).split()
TOKEN = 4  # bytes of a prompt that are a token
DEFAULT_TOKENS = 64  # of an answer that names no limit
Streamed = AsyncGenerator[int, None]


@dataclass(frozen=True)
class Simulated:
    """model: its name. seed: of all texts."""

    model: str = "simulated"
    seed: int = 0
    speed: Speed = Speed()


class _Running:
    """A simulated engine on the clock of the event loop."""

    def __init__(self, speed: Speed) -> None:
        self.engine = SimulatedEngine(speed)
        self.cache = CachedPrompts()
        self._queues: dict[str, asyncio.Queue[int]] = {}
        self._names = map(str, count())
        self._work: asyncio.Task[None] | None = None

    async def run(self, prompt: bytes, tokens: int, called: str) -> Streamed:
        """Numbers of tokens as they are computed, and before the first the tokens found cached."""
        name, queue = next(self._names), asyncio.Queue[int]()
        blocks = text_chain(prompt, BLOCK_TOKENS * TOKEN)
        self._queues[name] = queue
        size = len(prompt) // TOKEN + 1
        self.engine.submit(SimulatedRequest(name, size, tokens, blocks, called))
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._steps())
        try:
            yield await queue.get()
            for number in range(tokens):
                await queue.get()
                yield number
        finally:
            del self._queues[name]
            self.engine.abort(name)

    async def _steps(self) -> None:
        due = time.monotonic()
        while self.engine.running or self.engine.waiting:
            step = self.engine.step()
            due += step.seconds
            await asyncio.sleep(max(due - time.monotonic(), 0))
            for name, cached in step.cached.items():
                self._put(name, cached)
            self.cache.take(step.prompts)
            for name in step.tokens:
                self._put(name, 0)

    def _put(self, name: str, number: int) -> None:
        if name in self._queues:
            self._queues[name].put_nowait(number)


class SimulatedAnswer:
    """The answer to a body. within: tokens that it may have with its prompt."""

    def __init__(
        self, simulated: Simulated, chat: bool, body: dict[str, Any], within: int | None = None
    ) -> None:
        given = body.get("messages") if chat else body.get("prompt")
        self.prompt = json.dumps(given).encode()
        self.resume = None if body.get("resume") is None else Resume(**body["resume"])
        self.chat, self.stream = chat, bool(body.get("stream"))
        most = body.get("max_completion_tokens") or body.get("max_tokens")
        self.tokens = int(most or DEFAULT_TOKENS)
        if within is not None:
            self.tokens = min(self.tokens, max(1, within - self._prompt_tokens))
        drawn = random.Random(f"{simulated.seed} {body.get('seed')} {self.prompt.decode()}")
        self.words = [drawn.randrange(len(WORDS)) for _ in range(self.tokens)]
        kind = "chatcmpl-" if chat else "cmpl-"
        self._base = {
            "id": self.resume.id if self.resume else f"{kind}{drawn.getrandbits(64):x}",
            "object": ("chat.completion" if chat else "text_completion"),
            "created": self.resume.created if self.resume else int(time.time()),
            "model": simulated.model,
        }

    def whole(self) -> bytes:
        """All of it at once."""
        text = "".join(f" {WORDS[word]}" for word in self.words)
        said: dict[str, Any] = {"text": text}
        if self.chat:
            said = {"message": {"role": "assistant", "content": text}}
        choice = {"index": 0, **said, "finish_reason": "length"}
        usage = {"prompt_tokens": self._prompt_tokens, "completion_tokens": self.tokens,
                 "total_tokens": self._prompt_tokens + self.tokens}  # fmt: skip
        return json.dumps({**self._base, "choices": [choice], "usage": usage}).encode()

    @property
    def _prompt_tokens(self) -> int:
        return len(self.prompt) // TOKEN + 1

    def chunk(self, number: int) -> bytes:
        """One token of it."""
        text = f" {WORDS[self.words[number]]}"
        last = number + 1 == self.tokens
        said: dict[str, Any] = {"delta": {"content": text}} if self.chat else {"text": text}
        choice = {"index": 0, **said, "finish_reason": "length" if last else None}
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        data = json.dumps({**self._base, "object": kind, "choices": [choice]})
        out = f"data: {data}\n\n".encode()
        if last:
            return out
        return out + told([self.words[number]]) if self.resume is not None else out

    def end(self, cached: int) -> bytes:
        spent = Spent(self._prompt_tokens, self.tokens, cached)
        return b"data: [DONE]\n\n" + (ended(spent) if self.resume is not None else b"")


class SimulatedServer:
    """The ASGI application."""

    def __init__(self, simulated: Simulated) -> None:
        self._simulated = simulated
        self._running = _Running(simulated.speed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path == "/v1/models":
            speed = self._simulated.speed
            times = {"prompt_token": 1 / speed.prefill, "step": speed.step, "image": 0.0}
            card = {"id": self._simulated.model, "object": "model", "owned_by": "octavo",
                    "cache_tokens": speed.cache, "times": times}  # fmt: skip
            return await _reply(send, 200, json.dumps({"object": "list", "data": [card]}).encode())
        if path == PATH:
            return await self._tell(receive, send)
        if path in ("/health", "/health/ready"):
            return await _reply(send, 200, self._state())
        if path not in ("/v1/chat/completions", "/v1/completions"):
            return await _reply(send, 404, b'{"error":{"message":"there is no such route"}}')
        try:
            body = json.loads(await Request(scope, receive).body())
            chat, most = path == "/v1/chat/completions", read_most(Headers(scope=scope))
            answer = SimulatedAnswer(self._simulated, chat, body, most)
        except (ValueError, TypeError, AttributeError, InvalidValue):
            return await _reply(send, 400, b'{"error":{"message":"the body is no such request"}}')
        try:
            called = prompt_name(Headers(scope=scope))
            await while_connected(receive, self._answer(answer, called, send))
        except ClientGone:
            return

    def _state(self) -> bytes:
        engine = self._running.engine
        return json.dumps({"running": engine.running, "waiting": engine.waiting}).encode()

    async def _tell(self, receive: Receive, send: Send) -> None:
        """What the prefix cache holds, until the client leaves."""
        feed = CacheFeed(lambda: [self._running.cache])

        async def pass_on() -> None:
            async with aclosing(cache_events(feed, lambda: True)) as frames:
                async for frame in frames:
                    await _part(send, frame)

        await _begin(send, 200, b"text/event-stream")
        with suppress(ClientGone):
            await while_connected(receive, pass_on())

    async def _answer(self, answer: SimulatedAnswer, called: str, send: Send) -> None:
        had = 0 if answer.resume is None else len(answer.resume.tokens)
        left = answer.tokens - had
        async with aclosing(self._running.run(answer.prompt, left, called)) as tokens:
            cached = await anext(tokens)
            if not answer.stream:
                async for _ in tokens:
                    pass
                return await _reply(send, 200, answer.whole())
            await _begin(send, 200, b"text/event-stream")
            async for number in tokens:
                await _part(send, answer.chunk(had + number))
        await send({"type": "http.response.body", "body": answer.end(cached)})


async def _begin(send: Send, status: int, media: bytes) -> None:
    headers = [(b"content-type", media)]
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def _part(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


async def _reply(send: Send, status: int, body: bytes) -> None:
    await _begin(send, status, b"application/json")
    await send({"type": "http.response.body", "body": body})
