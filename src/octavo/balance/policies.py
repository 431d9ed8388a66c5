"""How a replica is chosen for a request, by name."""

from __future__ import annotations

import random
from bisect import bisect_right
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.balance.chain import root
from octavo.balance.cost import Ask, totals
from octavo.balance.prefix_index import ReplicaMatch
from octavo.balance.replica import REQUESTS, Fleet

Able = NDArray[np.bool_]  # replicas that may be chosen: one at least


class Policy(Protocol):
    """Chooses among replicas."""

    def choose(self, fleet: Fleet, ask: Ask, match: ReplicaMatch, able: Able) -> int:
        """The place in the fleet of one that is able."""
        ...


class LeastCost:
    """The least cost; of equal ones the one with the fewest requests, then the first by id."""

    def __init__(self) -> None:
        self._known = -1, -1
        self._slots: NDArray[np.int64] = np.empty(0, np.int64)

    def choose(self, fleet: Fleet, ask: Ask, match: ReplicaMatch, able: Able) -> int:
        total = np.where(able, totals(fleet, ask, match, self._of(fleet, match)), np.inf)
        least = np.flatnonzero(total == total.min())
        return int(least[fleet.table[REQUESTS, least].argmin()])

    def _of(self, fleet: Fleet, match: ReplicaMatch) -> NDArray[np.int64]:
        """The slot of each replica in a match."""
        if (known := (fleet.generation, match.generation)) != self._known:
            self._known = known
            self._slots = np.array([match.slots.get(name, -1) for name in fleet.ids], np.int64)
        return self._slots


class LeastLoad:
    """The fewest requests in flight, then the first by id."""

    def choose(self, fleet: Fleet, ask: Ask, match: ReplicaMatch, able: Able) -> int:
        return int(np.where(able, fleet.table[REQUESTS], np.inf).argmin())


class RoundRobin:
    """One after the other, by id."""

    def __init__(self) -> None:
        self._last = ""

    def choose(self, fleet: Fleet, ask: Ask, match: ReplicaMatch, able: Able) -> int:
        places = np.flatnonzero(able)
        after = np.searchsorted(places, bisect_right(fleet.ids, self._last))
        place = int(places[after % len(places)])
        self._last = fleet.ids[place]
        return place


class PrefixHash:
    """The same replica for prompts with the same beginning, of `leading` blocks, whatever there is
    to do: by the greatest hash, so that few prompts move when replicas come or go."""

    def __init__(self, leading: int = 4) -> None:
        self._leading = leading
        self._roots: dict[str, int] = {}

    def choose(self, fleet: Fleet, ask: Ask, match: ReplicaMatch, able: Able) -> int:
        blocks = ask.blocks[: self._leading]
        key = blocks[-1] if blocks else ask.tokens
        places: list[int] = np.flatnonzero(able).tolist()
        return max(places, key=lambda place: hash((self._root(fleet.ids[place]) ^ key,)))

    def _root(self, replica: str) -> int:
        if replica not in self._roots:
            self._roots[replica] = root(replica)
        return self._roots[replica]


class Random:
    """Any. seed: of the sequence of choices."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)

    def choose(self, fleet: Fleet, ask: Ask, match: ReplicaMatch, able: Able) -> int:
        places = np.flatnonzero(able)
        return int(places[self._random.randrange(len(places))])


POLICIES: dict[str, type[Policy]] = {
    "cost": LeastCost,
    "least-load": LeastLoad,
    "round-robin": RoundRobin,
    "prefix-hash": PrefixHash,
    "random": Random,
}
