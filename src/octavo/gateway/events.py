"""What is told of every request that has ended: to metrics, and to whoever compares versions."""

from __future__ import annotations

import msgspec


class Finished(msgspec.Struct, frozen=True):
    """Numbers and names of a request. replica, pool: who answered, "" for nobody. seconds: until
    its end; ttft: until its first byte; itl: mean seconds between tokens. retries: before the first
    byte; failovers: after it. hedges: second upstreams that were asked; hedge_won: one of them
    answered. prepared: the client got a prepared answer in place of an error of this status."""

    model: str
    version: str
    replica: str
    pool: str
    status: int
    code: str | None
    seconds: float
    ttft: float | None
    itl: float | None
    prompt_tokens: int
    completion_tokens: int
    retries: int
    failovers: int
    hedges: int = 0
    hedge_won: bool = False
    prepared: bool = False
