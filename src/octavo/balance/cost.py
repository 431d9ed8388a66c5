"""What a request costs at a replica, in milliseconds until its reply is there."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.balance.prefix_index import ReplicaMatch
from octavo.balance.replica import DRAIN, IMAGE, PROMPT_TOKEN, STEP, Fleet, Replica

Slots = NDArray[np.int64]  # of each replica of a fleet, -1 for one that has none


class Ask(msgspec.Struct, frozen=True):
    """What is known of a request before it is routed.

    tokens: of its prompt. blocks: its leading blocks (`chain.py`), of `block` tokens each. images:
    a number for each, by content. session: requests of one stay with one replica, "" for none.
    reply: tokens that are expected of it, 0 to look no further than the first.
    """

    tokens: int = 0
    blocks: tuple[int, ...] = ()
    block: int = 16
    images: tuple[int, ...] = ()
    session: str = ""
    reply: float = 0.0


class Cost(msgspec.Struct, frozen=True):
    """Milliseconds by what they go to. cached: tokens of the prompt that need no computing."""

    queue: float
    prefill: float
    images: float
    decode: float
    cached: int

    @property
    def total(self) -> float:
        return self.queue + self.prefill + self.images + self.decode


def cost(replica: Replica, ask: Ask, blocks: int = 0, encoded: int = 0) -> Cost:
    """The cost at a replica that has so many leading blocks, and so many images encoded. The last
    token is always computed."""
    cached = _cached(ask, blocks)
    images = len(ask.images) - encoded
    return Cost(
        1e3 * replica.drain,
        1e3 * (ask.tokens - cached) * replica.prompt_token,
        1e3 * images * replica.image if cached < ask.tokens - 1 else 0.0,
        1e3 * ask.reply * replica.step,
        cached,
    )


def _cached(ask: Ask, blocks: int) -> int:
    return min(blocks * ask.block, max(ask.tokens - 1, 0))


def totals(
    fleet: Fleet, ask: Ask, match: ReplicaMatch, slots: Slots, images_slots: Slots
) -> NDArray[np.float64]:
    """`cost` of a match at every replica of a fleet: the same operations in the same order, so that
    the totals are equal to the last bit. slots, images_slots: theirs in the match, and in those of
    its images."""

    def prefill(blocks: int) -> float:
        return 1e3 * (ask.tokens - _cached(ask, blocks))

    def encodes(blocks: int) -> float:
        return 1.0 if _cached(ask, blocks) < ask.tokens - 1 else 0.0

    table = fleet.table
    total: NDArray[np.float64] = 1e3 * table[DRAIN]
    total += match.spread(prefill, slots) * table[PROMPT_TOKEN]
    if ask.images:
        left = len(ask.images) - sum(one.spread(float, images_slots) for one in match.images)
        total += 1e3 * left * table[IMAGE] * match.spread(encodes, slots)
    total += 1e3 * ask.reply * table[STEP]
    return total
