"""What a request costs at a replica, in milliseconds until its first token."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.balance.replica import Replica


@dataclass(frozen=True, slots=True)
class Ask:
    """What is known of a request before it is routed.

    tokens: of its prompt. blocks: its leading blocks (`chain.py`), of `block` tokens each. images:
    how many. session: requests of one stay with one replica, "" for none.
    """

    tokens: int = 0
    blocks: tuple[int, ...] = ()
    block: int = 16
    images: int = 0
    session: str = ""


@dataclass(frozen=True, slots=True)
class Cost:
    """Milliseconds by what they go to. cached: tokens of the prompt that need no computing."""

    queue: float
    prefill: float
    images: float
    cached: int

    @property
    def total(self) -> float:
        return self.queue + self.prefill + self.images


def cost(replica: Replica, ask: Ask, blocks: int = 0) -> Cost:
    """The cost at a replica that has so many leading blocks. The last token is always computed."""
    cached = min(blocks * ask.block, max(ask.tokens - 1, 0))
    return Cost(
        1e3 * replica.drain,
        1e3 * (ask.tokens - cached) * replica.prompt_token,
        1e3 * ask.images * replica.image if cached < ask.tokens - 1 else 0.0,
        cached,
    )
