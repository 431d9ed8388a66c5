"""What goes into an engine and what comes out. These structs also travel between processes."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from octavo.errors import RequestError

Finish = Literal["stop", "length", "abort", "deadline", "error"]

MAX_LOGPROBS = 20
MAX_BIAS = 1024
MAX_STOP_TOKENS = 128


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to choose tokens and when to stop.

    temperature: 0 picks the most likely token. top_k 0: no limit. min_p: drops tokens less likely
    than min_p times the best. seed: None draws one. logprobs: None for none, else how many
    alternatives to report (0 reports the chosen token's only). max_tokens: None up to the context.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    logprobs: int | None = None

    def check(self, vocabulary: int) -> None:
        """Raises RequestError naming the first field that cannot be obeyed."""
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and low <= value <= high):
                raise RequestError(
                    f"{name} is {value}; it must be between {low} and {high}", name, "invalid_value"
                )
        if self.top_p <= 0:
            raise RequestError("top_p must be above 0", "top_p", "invalid_value")
        if self.repetition_penalty <= 0:
            raise RequestError(
                "repetition_penalty must be above 0", "repetition_penalty", "invalid_value"
            )
        if len(self.logit_bias) > MAX_BIAS or len(self.stop_token_ids) > MAX_STOP_TOKENS:
            name = "logit_bias" if len(self.logit_bias) > MAX_BIAS else "stop_token_ids"
            raise RequestError(f"{name} has too many entries", name, "invalid_value")
        for token, bias in self.logit_bias.items():
            if not 0 <= token < vocabulary or not -100 <= bias <= 100:
                raise RequestError(
                    f"logit_bias {token}: {bias}: tokens are 0 to {vocabulary - 1}, "
                    "biases -100 to 100",
                    "logit_bias",
                    "invalid_value",
                )
        if any(not 0 <= t < vocabulary for t in self.stop_token_ids):
            raise RequestError(
                "stop_token_ids holds a token outside the vocabulary", "stop_token_ids"
            )


_RANGES = (
    ("max_tokens", 1, 1 << 31),
    ("temperature", 0, 2),
    ("top_p", 0, 1),
    ("top_k", 0, 1 << 31),
    ("min_p", 0, 1),
    ("seed", -(1 << 63), (1 << 63) - 1),
    ("presence_penalty", -2, 2),
    ("frequency_penalty", -2, 2),
    ("repetition_penalty", 0, 10),
    ("logprobs", 0, MAX_LOGPROBS),
)


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One completion to compute.

    resume: tokens already given to the client, to be continued from (a replay after a crash).
    priority: lower runs first. timeout: seconds from submission, None for no deadline.
    salt: requests share cached prefixes only with others of the same salt.
    """

    id: str
    prompt: list[int]
    params: SamplingParams
    resume: list[int] = []
    priority: int = 0
    timeout: float | None = None
    salt: str = ""


class TokenEvent(msgspec.Struct, frozen=True, array_like=True):
    """One token of a request, or its end, or both. `token` is None for an end without a token."""

    id: str
    token: int | None = None
    logprob: float = 0.0
    top: list[tuple[int, float]] = []
    finish: Finish | None = None
    cached: int = 0  # prompt tokens whose keys and values were found in the cache
    error: str | None = None
