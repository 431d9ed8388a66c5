"""What releases and experiments learn of a finished request: numbers, never contents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestEvent:
    """A request that has ended.

    arm: which version answered, or would have, had it not failed. step: of the release, when it
    was assigned. failed: for a reason that is not the client's. refused: as the client's mistake.
    ttft: seconds to the first token. itl: seconds between tokens, (last - first) / (tokens - 1).
    None: there were none, or the client left. kl: of shadow traffic, nats a token. at: when it
    ended. prompt_tokens: about, as it was before any version had it.
    """

    arm: str
    at: float
    step: int = 0
    failed: bool = False
    refused: bool = False
    ttft: float | None = None
    itl: float | None = None
    tokens: int = 0
    empty: bool = False
    repeating: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    batch: int = 0
    kl: float | None = None

    @property
    def answered(self) -> bool:
        return not self.failed and not self.refused and self.kl is None


Value = Callable[[RequestEvent], float | None]

# What guards and experiments measure: a value of an event, None where it has none.
VALUES: dict[str, Value] = {
    "error_rate": lambda e: None if e.kl is not None else float(e.failed),
    "refused_rate": lambda e: None if e.failed or e.kl is not None else float(e.refused),
    "empty_rate": lambda e: float(e.empty) if e.answered else None,
    "repeat_rate": lambda e: float(e.repeating) if e.answered else None,
    "ttft": lambda e: e.ttft if e.answered else None,
    "itl": lambda e: e.itl if e.answered else None,
    "tokens": lambda e: float(e.tokens) if e.answered else None,
    "shadow_kl": lambda e: e.kl,
}

# What is known of a request before it is assigned, so that no version can have changed it.
COVARIATES: dict[str, Callable[[RequestEvent], float]] = {
    "prompt_tokens": lambda e: float(e.prompt_tokens),
    "cached_tokens": lambda e: float(e.cached_tokens),
    "batch": lambda e: float(e.batch),
}
