"""What an engine reports of its requests. These structs also travel between processes."""

from __future__ import annotations

from typing import Literal

import msgspec

Finish = Literal["stop", "complete", "length", "abort", "deadline", "refused", "error"]
NOT_COMPUTED = "the engine could not compute this request"
Alternatives = list[tuple[int, float]]  # token ids with their log-probabilities, best first


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """What happened to a prompt: a step computed so many of its tokens, or, with 0 tokens, the
    sequence lost its blocks to others."""

    at: float
    tokens: int


class Times(msgspec.Struct, frozen=True, array_like=True):
    """When things happened to a request, in seconds of `time.monotonic()`, which all processes of
    a host share; 0.0: not yet.

    queued: the engine got it. admitted: its first step was planned. first_token, last_token: its
    first and latest token were sampled. marks: since the event before.
    """

    queued: float = 0.0
    admitted: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    marks: list[Mark] = []


class Event(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all events. id: the request's."""

    id: str


class Token(Event, frozen=True, tag=True):
    """A generated token; the last one has `finish`.

    With finish "stop" the token ended the text and is no part of it. top: alternatives, if asked
    for. cached: prompt tokens whose keys and values were found in the prefix cache. predicted:
    tokens of the request's prediction that were accepted so far, and rejected.
    """

    token: int
    logprob: float = 0.0
    top: Alternatives = []
    finish: Finish | None = None
    cached: int = 0
    times: Times = Times()
    predicted: tuple[int, int] = (0, 0)


class PromptLogprobs(Event, frozen=True, tag=True):
    """Log-probabilities and alternatives of prompt tokens, in order, from the second one on."""

    logprobs: list[tuple[float, Alternatives]]
    cached: int = 0


class Progress(Event, frozen=True, tag=True):
    """A part of a prompt is computed: so many of its tokens are, or were found in the cache."""

    computed: int
    cached: int = 0
    times: Times = Times()


class BeamText(Event, frozen=True, tag=True):
    """One whole text of a beam search, best first.

    width: beams searched, as the KV cache allowed it. tokens, logprobs, tops: of each token, the
    one that ended the text included (see Token). last: the request has ended.
    """

    index: int
    width: int
    tokens: list[int]
    logprobs: list[float]
    tops: list[Alternatives]
    score: float
    finish: Finish
    last: bool
    cached: int = 0
    times: Times = Times()


class Pooled(Event, frozen=True, tag=True):
    """The pooled states of a prompt, or a cross-encoder's scores, as fp32. Ends the request."""

    vector: bytes
    cached: int = 0
    times: Times = Times()


class Ended(Event, frozen=True, tag=True):
    """The end of a request without a token.

    finish: "deadline", "refused" with what is wrong, "error" with NOT_COMPUTED (the log has the
    cause), or "length" for a request whose last token was reported before (a replay) or that wanted
    none. param: of what was refused, the field of SamplingParams or Request at fault; code: of the
    error.
    """

    finish: Finish
    error: str | None = None
    cached: int = 0
    times: Times = Times()
    param: str | None = None
    code: str | None = None


TokenEvent = Token | PromptLogprobs | Progress | BeamText | Pooled | Ended


def ends(event: TokenEvent) -> bool:
    """True for a request's last event."""
    if isinstance(event, Token):
        return event.finish is not None
    if isinstance(event, BeamText):
        return event.last
    return not isinstance(event, PromptLogprobs | Progress)
