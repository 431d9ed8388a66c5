"""Token events as text: detokenizing, stop strings, and what is told about each piece."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from octavo.engine.request import Request, SamplingParams, TokenEvent
from octavo.text import ChatTemplate, TextStream, Tokenizer


class TokenSource(Protocol):
    """Whoever computes tokens: an engine in this process, in another, or a pool of them."""

    def submit(self, request: Request) -> AsyncGenerator[TokenEvent, None]: ...


@dataclass(frozen=True)
class Served:
    """A model under its public name."""

    name: str
    aliases: tuple[str, ...]
    tokenizer: Tokenizer
    template: ChatTemplate | None
    defaults: SamplingParams
    vocabulary: int
    context: int
    created: int


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """A generated token's log-probability and its most likely alternatives."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that became showable, the tokens behind it, and how the choice ended if it did."""

    choice: int
    text: str
    tokens: list[TokenInfo] = field(default_factory=list)
    finish: str | None = None


@dataclass
class Usage:
    """Counted as a request runs."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    began: float = field(default_factory=time.monotonic)
    first: float | None = None
    last: float | None = None

    def token(self) -> None:
        self.last = time.monotonic()
        self.first = self.first or self.last
        self.completion += 1

    def to_dict(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


async def generate(
    source: TokenSource, served: Served, request: Request, choice: int, usage: Usage
) -> AsyncGenerator[Piece, None]:
    """The pieces of one choice. Its last piece has `finish`."""
    stream = TextStream(served.tokenizer.bytes, request.params.stop)
    async with aclosing(source.submit(request)) as events:
        async for event in events:
            usage.cached = max(usage.cached, event.cached)
            tokens: list[TokenInfo] = []
            if event.token is not None:
                usage.token()
                if request.params.logprobs is not None and event.finish != "stop":
                    tokens = [TokenInfo(event.token, event.logprob, event.top)]
            text, finish = stream.push(event.token, event.finish)
            if text or tokens or finish:
                yield Piece(choice, text, tokens, finish)
            if finish:
                return


def requests_for(
    prompts: list[list[int]],
    n: int,
    params: SamplingParams,
    timeout: float | None = None,
    priority: int = 0,
    salt: str = "",
) -> list[Request]:
    """`n` requests per prompt. Choice i draws with seed + i, as if it had been asked for alone."""
    out = []
    for prompt in prompts:
        for i in range(n):
            seed = ((params.seed or 0) + i + (1 << 63)) % (1 << 64) - (1 << 63)
            one = msgspec.structs.replace(params, seed=seed)
            out.append(
                Request(
                    id=secrets.token_hex(12),
                    prompt=prompt,
                    params=one,
                    timeout=timeout,
                    priority=priority,
                    salt=salt,
                )
            )
    return out


async def generate_all(
    source: TokenSource, served: Served, requests: list[Request], usage: Usage
) -> AsyncGenerator[Piece, None]:
    """The pieces of all choices as they come. Closing the iterator aborts every request."""
    if len(requests) == 1:
        async with aclosing(generate(source, served, requests[0], 0, usage)) as pieces:
            async for piece in pieces:
                yield piece
        return
    queue: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue()

    async def pump(request: Request, choice: int) -> None:
        try:
            async for piece in generate(source, served, request, choice, usage):
                queue.put_nowait(piece)
            queue.put_nowait(None)
        except Exception as e:
            queue.put_nowait(e)

    tasks = [asyncio.create_task(pump(r, i)) for i, r in enumerate(requests)]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
