"""What a reply consists of, piece by piece."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from octavo.engine.events import Times
from octavo.text import CallDelta


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
    stop_token: the last of them, if it ended the choice and is no part of the text.
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

    def __bool__(self) -> bool:
        shown = self.text or self.tokens or self.finish or self.reasoning
        return bool(shown or self.calls or self.prompt)


@dataclass
class Usage:
    """Tokens and times of a request, counted as it runs.

    began, first, last: time.monotonic() of the request and of its first and latest token. queued:
    seconds until the engine began with it. finishes: how its choices ended.
    """

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    beam_width: int = 0  # as the KV cache allowed it
    began: float = field(default_factory=time.monotonic)
    first: float | None = None
    last: float | None = None
    queued: float = 0.0
    finishes: list[str] = field(default_factory=list)

    def stamp(self, times: Times) -> None:
        """Takes over the engine's time stamps of one choice."""
        self.queued = max(self.queued, times.admitted - times.queued)
        if times.first_token:
            self.first = min(self.first or times.first_token, times.first_token)
            self.last = max(self.last or 0.0, times.last_token)

    def to_dict(self) -> dict[str, object]:
        value: dict[str, object] = {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }
        return value | {"beam_width": self.beam_width} if self.beam_width else value
