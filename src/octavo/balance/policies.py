"""How a replica is chosen for a request, by name."""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from typing import Protocol

import numpy as np

from octavo.balance.chain import root
from octavo.balance.cost import Ask, Slots, cost, totals
from octavo.balance.prefix_index import ReplicaMatch
from octavo.balance.replica import FEW, REQUESTS, Fleet, Positions


class Policy(Protocol):
    """Chooses among replicas. able: those that may be chosen, one at least."""

    def choose(self, fleet: Fleet, ask: Ask, match: ReplicaMatch, able: Positions) -> int:
        """The position of one that is able."""
        ...


class FleetSlots:
    """The slots that the replicas of a fleet have in the matches of one index."""

    def __init__(self) -> None:
        self._known = -1, -1
        self._slots: Slots = np.empty(0, np.int64)

    def of(self, fleet: Fleet, match: ReplicaMatch) -> Slots:
        if (known := (fleet.generation, match.generation)) != self._known:
            self._known = known
            self._slots = np.array([match.slots.get(name, -1) for name in fleet.ids], np.int64)
        return self._slots


class LeastCost:
    """The least cost; of equal ones the one with the fewest requests, then the first by id."""

    def __init__(self) -> None:
        self._slots, self._images_slots = FleetSlots(), FleetSlots()

    def choose(self, fleet: Fleet, ask: Ask, match: ReplicaMatch, able: Positions) -> int:
        if len(able) > FEW:
            slots = self._slots.of(fleet, match)
            images = self._images_slots.of(fleet, match.images[0]) if match.images else slots
            total = totals(fleet, ask, match, slots, images)[able]
            least = np.asarray(able)[total == total.min()]
            return int(least[int(fleet.table[REQUESTS, least].argmin())])

        def order(position: int) -> tuple[float, int]:
            one = fleet.at(position)
            found = cost(one, ask, match.blocks(one.id), match.encoded(one.id))
            return found.total, one.requests

        return int(min(able, key=order))


class LeastLoad:
    """The fewest requests in flight, then the first by id."""

    def choose(self, fleet: Fleet, ask: Ask, match: ReplicaMatch, able: Positions) -> int:
        return int(able[int(fleet.table[REQUESTS, able].argmin())])


class RoundRobin:
    """One after the other, by id."""

    def __init__(self) -> None:
        self._last = ""

    def choose(self, fleet: Fleet, ask: Ask, match: ReplicaMatch, able: Positions) -> int:
        after = bisect_left(able, bisect_right(fleet.ids, self._last))
        position = int(able[after % len(able)])
        self._last = fleet.ids[position]
        return position


class PrefixHash:
    """The same replica for prompts with the same beginning, of `leading` blocks, whatever there is
    to do: by the greatest hash, so that few prompts move when replicas come or go."""

    def __init__(self, leading: int = 4) -> None:
        self._leading = leading
        self._known = -1
        self._roots: list[int] = []

    def choose(self, fleet: Fleet, ask: Ask, match: ReplicaMatch, able: Positions) -> int:
        blocks = ask.blocks[: self._leading]
        key = blocks[-1] if blocks else ask.tokens
        if fleet.generation != self._known:
            self._known, self._roots = fleet.generation, list(map(root, fleet.ids))
        roots = self._roots
        return max(map(int, able), key=lambda position: hash((roots[position] ^ key,)))


class Random:
    """Any. seed: of the sequence of choices."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)

    def choose(self, fleet: Fleet, ask: Ask, match: ReplicaMatch, able: Positions) -> int:
        return int(able[self._random.randrange(len(able))])


POLICIES: dict[str, type[Policy]] = {
    "cost": LeastCost,
    "least-load": LeastLoad,
    "round-robin": RoundRobin,
    "prefix-hash": PrefixHash,
    "random": Random,
}
