"""Token events as text: detokenizing, stop strings, and what is told about each piece."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace

import msgspec

from octavo.engine.request import Request, SamplingParams, TokenEvent
from octavo.generate.model import ServedModel
from octavo.generate.reply import TextDelta, TokenInfo, Usage
from octavo.text import ReplyParser, TextStream
from octavo.text.tools import MARKERS, ToolFormat


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """How a chat reply is told apart into thoughts, content and tool calls."""

    tools: ToolFormat | None
    reasoning: bool
    thinking: bool

    def parser(self) -> ReplyParser:
        return ReplyParser(self.tools, self.reasoning, self.thinking)


class OutputProcessor:
    """One choice's events as pieces."""

    def __init__(
        self,
        served: ServedModel,
        request: Request,
        choice: int,
        usage: Usage,
        reply: ReplyFormat | None,
    ) -> None:
        markers = reply is not None and (reply.tools is not None or reply.reasoning)
        table = served.tokenizer.bytes_saying(MARKERS) if markers else served.tokenizer.bytes
        self._stream = TextStream(table, request.params.stop_strings)
        self._parser = reply.parser() if reply else None
        self._request, self._choice, self._usage = request, choice, usage
        self._scores: list[TokenInfo] = []
        self._ids: list[int] = []  # that no piece has told of yet

    def push(self, event: TokenEvent) -> TextDelta:
        """What an event adds, which may be nothing."""
        if event.token is not None:
            self._ids.append(event.token)
        piece = self._read(event)
        if not piece:
            return piece
        ids, self._ids = self._ids, []
        return replace(piece, ids=ids)

    def _read(self, event: TokenEvent) -> TextDelta:
        self._usage.cached = max(self._usage.cached, event.cached)
        self._usage.beam_width = event.width or self._usage.beam_width
        self._usage.queued = max(self._usage.queued, event.queued)
        params, tokens = self._request.params, []
        if event.token is not None:
            self._usage.token()
            if params.logprobs is not None and event.finish != "stop":
                tokens = [TokenInfo(event.token, event.logprob, event.top)]
        text, finish = self._stream.push(event.token, event.finish)
        prompt = self._prompt(event)
        score = event.score if finish and event.width else None
        if self._parser is None:
            return TextDelta(self._choice, text, tokens, finish, prompt=prompt, score=score)
        delta = self._parser.push(text)
        reasoning, calls, text = delta.reasoning, delta.calls, delta.content
        if finish:
            rest = self._parser.finish()
            reasoning, calls, text = (
                reasoning + rest.reasoning, calls + rest.calls, text + rest.content,
            )  # fmt: skip
        if finish == "stop" and self._parser.calls:
            finish = "tool_calls"
        return TextDelta(self._choice, text, tokens, finish, reasoning, calls, prompt, score)

    def _prompt(self, event: TokenEvent) -> list[TokenInfo]:
        """The scored prompt, when the last of its log-probabilities has come."""
        if not event.scores:
            return []
        prompt = self._request.prompt
        self._scores = self._scores or [TokenInfo(prompt[0], None, [])]
        for logprob, top in event.scores:
            self._scores.append(TokenInfo(prompt[len(self._scores)], logprob, top))
        return self._scores if len(self._scores) == len(prompt) else []


async def generate(
    served: ServedModel, request: Request, choice: int, usage: Usage,
    reply: ReplyFormat | None = None,
) -> AsyncGenerator[TextDelta, None]:  # fmt: skip
    """The pieces of one request: choice `choice`, or from there on the texts of a beam search.

    The last piece of each has `finish`.
    """
    readings: dict[int, OutputProcessor] = {}
    async with aclosing(served.client.submit(request)) as events:
        async for event in events:
            if event.beam not in readings:
                readings[event.beam] = OutputProcessor(
                    served, request, choice + event.beam, usage, reply
                )
            if piece := readings[event.beam].push(event):
                if piece.finish:
                    usage.finishes.append(piece.finish)
                yield piece
                if piece.finish and not event.more:
                    return


def requests_for(
    prompts: list[list[int]],
    n: int,
    params: SamplingParams,
    timeout: float | None = None,
    priority: int = 0,
    salt: str = "",
    adapter: str = "",
) -> list[Request]:
    """`n` requests per prompt. Choice i draws with seed + i, as if it had been asked for alone.

    A beam search gives its choices in one request.
    """
    out = []
    for prompt in prompts:
        for i in range(1 if params.beam else n):
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
                    adapter=adapter,
                )
            )
    return out


async def generate_all(
    served: ServedModel, requests: list[Request], usage: Usage,
    reply: ReplyFormat | None = None,
) -> AsyncGenerator[TextDelta, None]:  # fmt: skip
    """The pieces of all choices as they come. Closing the iterator aborts every request."""
    if len(requests) == 1:
        async with aclosing(generate(served, requests[0], 0, usage, reply)) as pieces:
            async for piece in pieces:
                yield piece
        return
    queue: asyncio.Queue[TextDelta | BaseException | None] = asyncio.Queue()

    async def pump(request: Request, choice: int) -> None:
        try:
            async for piece in generate(served, request, choice, usage, reply):
                queue.put_nowait(piece)
            queue.put_nowait(None)
        except Exception as e:
            queue.put_nowait(e)

    each = [r.params.beam.n if r.params.beam else 1 for r in requests]
    firsts = [sum(each[:i]) for i in range(len(each))]
    tasks: list[asyncio.Task[None]] = []

    async def start() -> None:
        for request, first in zip(requests, firsts, strict=True):
            tasks.append(asyncio.create_task(pump(request, first)))
            await asyncio.sleep(0)  # each sends a prompt, which may be long: others have a turn

    starter = asyncio.create_task(start())
    try:
        running = len(requests)
        while running:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        starter.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(starter, *tasks, return_exceptions=True)
