"""Token events as text: detokenizing, stop strings, and what is told about each piece."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Protocol

import msgspec

from octavo.checkpoint.pooling import Pooling
from octavo.engine.events import BeamText, Ended, PromptLogprobs, Token, TokenEvent, ends
from octavo.engine.request import Request, SamplingParams
from octavo.program import Task
from octavo.text import CallDelta, ChatTemplate, ReplyParser, TextStream, Tokenizer
from octavo.text.tools import MARKERS, ToolFormat


class TokenSource(Protocol):
    """Whoever computes tokens: an engine in this process, in another, or a pool of them."""

    def submit(self, request: Request) -> AsyncGenerator[TokenEvent, None]: ...


@dataclass(frozen=True)
class ServedModel:
    """A model under its public name."""

    name: str
    aliases: tuple[str, ...]
    tokenizer: Tokenizer
    template: ChatTemplate | None
    defaults: SamplingParams
    vocabulary: int
    context: int
    created: int
    task: Task
    pooling: Pooling
    adapter: str = ""  # the LoRA adapter that goes by this name


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """A token's log-probability (None: a prompt's first) and its most likely alternatives."""

    token: int
    logprob: float | None
    top: list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text that became showable, the tokens behind it, and how the choice ended if it did.

    reasoning, calls: what of a chat's text was no content. prompt: the scored prompt, once. score:
    of a beam, with its end. ids: tokens generated since the last piece.
    """

    choice: int
    text: str
    tokens: list[TokenInfo] = field(default_factory=list)
    finish: str | None = None
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)
    prompt: list[TokenInfo] = field(default_factory=list)
    score: float | None = None
    ids: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        shown = self.text or self.tokens or self.finish or self.reasoning
        return bool(shown or self.calls or self.prompt)


@dataclass
class Usage:
    """Counted as a request runs."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    beam_width: int = 0  # as the KV cache allowed it
    began: float = field(default_factory=time.monotonic)
    first: float | None = None
    last: float | None = None
    queued: float = 0.0  # seconds until the engine began with it
    finishes: list[str] = field(default_factory=list)  # how its choices ended

    def token(self) -> None:
        self.last = time.monotonic()
        self.first = self.first or self.last
        self.completion += 1

    def to_dict(self) -> dict[str, object]:
        value: dict[str, object] = {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }
        return value | {"beam_width": self.beam_width} if self.beam_width else value


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

    def push(self, event: TokenEvent, score: float | None = None) -> TextDelta:
        """What an event adds, which may be nothing. score: of a beam search's text."""
        if isinstance(event, Token):
            self._ids.append(event.token)
        piece = self._read(event, score)
        if not piece:
            return piece
        ids, self._ids = self._ids, []
        return replace(piece, ids=ids)

    def _read(self, event: TokenEvent, score: float | None) -> TextDelta:
        self._usage.cached = max(self._usage.cached, event.cached)
        params, tokens, text, finish = self._request.params, [], "", None
        if isinstance(event, Token):
            self._usage.token()
            self._usage.queued = max(self._usage.queued, event.times.admitted - event.times.queued)
            if params.logprobs is not None and event.finish != "stop":
                tokens = [TokenInfo(event.token, event.logprob, event.top)]
            text, finish = self._stream.push(event.token, event.finish)
        elif isinstance(event, Ended):
            text, finish = self._stream.push(None, event.finish)
        prompt = self._prompt(event) if isinstance(event, PromptLogprobs) else []
        score = score if finish else None
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

    def _prompt(self, event: PromptLogprobs) -> list[TokenInfo]:
        """The scored prompt, when the last of its log-probabilities has come."""
        prompt = self._request.prompt
        self._scores = self._scores or [TokenInfo(prompt[0], None, [])]
        for logprob, top in event.logprobs:
            self._scores.append(TokenInfo(prompt[len(self._scores)], logprob, top))
        return self._scores if len(self._scores) == len(prompt) else []


def beam_tokens(event: BeamText) -> list[TokenEvent]:
    """A beam search's text as if its tokens had come one by one."""
    last = len(event.tokens) - 1
    return [
        Token(
            event.id, token, event.logprobs[i], event.tops[i], event.finish if i == last else None,
            event.cached, event.times,
        )
        for i, token in enumerate(event.tokens)
    ]  # fmt: skip


async def generate(
    source: TokenSource, served: ServedModel, request: Request, choice: int, usage: Usage,
    reply: ReplyFormat | None = None,
) -> AsyncGenerator[TextDelta, None]:  # fmt: skip
    """The pieces of one request: choice `choice`, or from there on the texts of a beam search.

    The last piece of each has `finish`.
    """
    readings: dict[int, OutputProcessor] = {}
    async with aclosing(source.submit(request)) as events:
        async for event in events:
            index, score, tokens = 0, None, [event]
            if isinstance(event, BeamText):
                index, score, tokens = event.index, event.score, beam_tokens(event)
                usage.beam_width = event.width
            if index not in readings:
                readings[index] = OutputProcessor(served, request, choice + index, usage, reply)
            for token in tokens:
                if piece := readings[index].push(token, score):
                    if piece.finish:
                        usage.finishes.append(piece.finish)
                    yield piece
                    if piece.finish and (score is None or ends(event)):
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
    source: TokenSource, served: ServedModel, requests: list[Request], usage: Usage,
    reply: ReplyFormat | None = None,
) -> AsyncGenerator[TextDelta, None]:  # fmt: skip
    """The pieces of all choices as they come. Closing the iterator aborts every request."""
    if len(requests) == 1:
        async with aclosing(generate(source, served, requests[0], 0, usage, reply)) as pieces:
            async for piece in pieces:
                yield piece
        return
    queue: asyncio.Queue[TextDelta | BaseException | None] = asyncio.Queue()

    async def pump(request: Request, choice: int) -> None:
        try:
            async for piece in generate(source, served, request, choice, usage, reply):
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
