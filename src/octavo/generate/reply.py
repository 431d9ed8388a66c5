"""What a reply consists of, piece by piece."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from octavo.engine.events import Ended, Mark, Progress, Times, TokenEvent
from octavo.generate.gaps import Gaps
from octavo.text import CallDelta

MOST_MARKS = 128  # of a request that are kept


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """A token's log-probability (None: a prompt's first) and its most likely alternatives."""

    token: int
    logprob: float | None
    top: list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of a choice, the tokens behind it, and how the choice ended if it did.

    reasoning, calls: what of a chat's text was no content. prompt: log-probabilities of the whole
    prompt, once. score: of a beam, with its end. ids: tokens generated since the last delta;
    stop_token: the last of them, if it ended the choice and is no part of the text. stop_string:
    what ended it, if one did.
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
    stop_token: int | None = None
    stop_string: str | None = None

    def __bool__(self) -> bool:
        shown = self.text or self.tokens or self.finish or self.reasoning
        return bool(shown or self.calls or self.prompt)


@dataclass(frozen=True)
class FunctionCall:
    """A call that a reply asks for. arguments: JSON, as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Completion:
    """A finished reply.

    tokens: without one that only ended the text. logprobs: of `tokens`, when asked for;
    top_logprobs: beside each, its likeliest alternatives. prompt_logprobs: of every prompt token
    (None for the first), when asked for, with prompt_top_logprobs likewise. score: of a beam
    search's text. reasoning, tool_calls: what of a chat's reply is not its text.
    """

    text: str
    tokens: list[int]
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    logprobs: list[float] | None = None
    top_logprobs: list[dict[int, float]] | None = None
    prompt_logprobs: list[float | None] | None = None
    prompt_top_logprobs: list[dict[int, float]] | None = None
    score: float | None = None
    reasoning: str = ""
    tool_calls: list[FunctionCall] = field(default_factory=list)

    @property
    def message(self) -> dict[str, Any]:
        """The reply as a message, to be added to its conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": c.id, "type": "function",
                 "function": {"name": c.name, "arguments": c.arguments}}
                for c in self.tool_calls
            ]  # fmt: skip
        return message


def whole_calls(deltas: Iterable[TextDelta]) -> list[FunctionCall]:
    """The tool calls that deltas consist of."""
    calls: list[FunctionCall] = []
    for call in (c for d in deltas for c in d.calls):
        if call.id is not None:
            calls.append(FunctionCall(call.id, call.name or "", ""))
        known = calls[call.index]
        calls[call.index] = replace(known, arguments=known.arguments + call.arguments)
    return calls


def prompt_scores(
    prompts: Sequence[list[int]], choices: Sequence[Sequence[TextDelta]]
) -> list[list[TokenInfo]]:
    """The log-probabilities of each choice's prompt, where they were asked for; empty if the
    request ended before.

    Choices of one prompt follow each other. Of a prompt of one token nothing is told, and one text
    of a beam search tells for all.
    """
    each = len(choices) // len(prompts)
    told = [[TokenInfo(p[0], None, [])] if len(p) == 1 else [] for p in prompts]
    for i, deltas in enumerate(choices):
        told[i // each] = next((d.prompt for d in deltas if d.prompt), told[i // each])
    return [told[i // each] for i in range(len(choices))]


def call_arguments(text: str) -> dict[str, Any]:
    """The arguments of a call as an object; empty if the reply ended within them."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


@dataclass
class Usage:
    """Tokens and times of a request, counted as it runs.

    began, submitted, admitted, first, last: time.monotonic() of the request, of its arrival at the
    engine and its first step there, and of its first and latest token. marks: of its prompts; gaps:
    between its tokens. finishes: how its choices ended; signs: of bad ones (`generate.quality`).
    reused: tokens of each prompt, by number, that all its choices found in the prefix cache: the
    others were computed for the first of them. reached: tokens of each prompt that are computed, or
    were found. predicted: of each choice, tokens of the prediction accepted and rejected. covers:
    whether a request may go on after so many computed tokens.
    """

    prompt: int = 0
    images: int = 0  # tokens of the prompts that stand for images
    completion: int = 0
    beam_width: int = 0  # as the KV cache allowed it
    began: float = field(default_factory=time.monotonic)
    submitted: float | None = None
    admitted: float | None = None
    first: float | None = None
    last: float | None = None
    marks: list[Mark] = field(default_factory=list)
    gaps: Gaps = field(default_factory=Gaps)
    finishes: list[str] = field(default_factory=list)
    signs: list[str] = field(default_factory=list)
    reused: dict[int, int] = field(default_factory=dict)
    reached: dict[int, int] = field(default_factory=dict)
    predicted: dict[int, tuple[int, int]] = field(default_factory=dict)
    covers: Callable[[int], bool] | None = None

    @property
    def queued(self) -> float:
        """Seconds that it waited in the engine; 0.0 while nobody knows."""
        if self.submitted is None or self.admitted is None:
            return 0.0
        return self.admitted - self.submitted

    @property
    def computed(self) -> int:
        """Tokens that were computed for the request."""
        return self.seen - self.cached + self.completion

    @property
    def seen(self) -> int:
        """Tokens of the prompts that are computed, or were found in the prefix cache."""
        return sum(self.reached.values())

    @property
    def cached(self) -> int:
        """Tokens of the prompts that were found in the prefix cache."""
        return sum(self.reused.values())

    def reach(self, prompt: int, event: TokenEvent, length: int) -> None:
        """Takes over how far a choice of a prompt is, as an event tells, and what it found."""
        if isinstance(event, Ended):
            return  # which may come before anything is computed
        self.reused[prompt] = min(self.reused.get(prompt, event.cached), event.cached)
        done = event.computed if isinstance(event, Progress) else length
        self.reached[prompt] = max(self.reached.get(prompt, 0), min(done, length))

    def predict(self, choice: int, counts: tuple[int, int]) -> None:
        """Takes over how many tokens of the prediction a choice accepted and rejected so far."""
        if any(counts):
            self.predicted[choice] = counts

    def stamp(self, times: Times) -> None:
        """Takes over the engine's time stamps of one choice."""
        if times.queued:
            self.submitted = min(self.submitted or times.queued, times.queued)
        if times.admitted:
            self.admitted = min(self.admitted or times.admitted, times.admitted)
        self.marks += times.marks[: MOST_MARKS - len(self.marks)]
        if times.first_token:
            self.first = min(self.first or times.first_token, times.first_token)
            self.last = max(self.last or 0.0, times.last_token)

    def to_dict(self) -> dict[str, object]:
        details = {"cached_tokens": self.cached}
        if self.images:
            details["image_tokens"] = self.images
        value: dict[str, object] = {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": details,
        }
        if self.predicted:
            accepted, rejected = map(sum, zip(*self.predicted.values(), strict=True))
            value["completion_tokens_details"] = {
                "accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected,
            }  # fmt: skip
        return value | {"beam_width": self.beam_width} if self.beam_width else value
