"""How a replica is chosen for a request, by name."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import replace
from typing import Any, Protocol

from octavo.balance.chain import root
from octavo.balance.cost import Ask, cost
from octavo.balance.prefix_index import ReplicaMatch
from octavo.balance.replica import Fleet, Replica

FEW = 16  # replicas that are looked at one by one


class Policy(Protocol):
    """Chooses among the replicas of a fleet that is kept in the policy's order."""

    def order(self, replica: Replica) -> tuple[Any, ...]: ...

    def choose(
        self, fleet: Fleet, ask: Ask, match: ReplicaMatch, barred: Collection[str]
    ) -> Replica | None:
        """A replica that is up and not barred; None if there is none."""
        ...


class LeastCost:
    """The least cost; of equal ones the one with the fewest requests, then the first by id.

    No replica costs less than the time until it begins with a prompt, plus what the fastest takes
    for what nobody has of it and for a reply. Replicas are looked at in the order of that time, so
    the search ends as soon as none can be better: with thousands of replicas as soon as with few.
    """

    def order(self, replica: Replica) -> tuple[Any, ...]:
        return (replica.drain, replica.requests)

    def choose(
        self, fleet: Fleet, ask: Ask, match: ReplicaMatch, barred: Collection[str]
    ) -> Replica | None:
        best: tuple[float, int, str] | None = None
        for blocks, holders in (*match.levels, (0, 0)):
            if holders and match.count(holders) <= FEW:
                for name in match.replicas(holders):
                    if name in fleet and fleet[name].state == "up" and name not in barred:
                        best = self._better(best, fleet[name], ask, match)
                continue
            fastest = Replica("", prompt_token=fleet.fastest, step=fleet.lightest)
            least = cost(fastest, replace(ask, images=0), blocks).total
            for replica in fleet.in_order():
                if best is not None and 1e3 * replica.drain + least >= best[0]:
                    break
                if replica.id not in barred:
                    best = self._better(best, replica, ask, match)
        return None if best is None else fleet[best[2]]

    def _better(
        self, best: tuple[float, int, str] | None, replica: Replica, ask: Ask, match: ReplicaMatch
    ) -> tuple[float, int, str]:
        own = (cost(replica, ask, match.blocks(replica.id)).total, replica.requests, replica.id)
        return own if best is None else min(best, own)


class LeastLoad:
    """The fewest requests in flight."""

    def order(self, replica: Replica) -> tuple[Any, ...]:
        return (replica.requests,)

    def choose(
        self, fleet: Fleet, ask: Ask, match: ReplicaMatch, barred: Collection[str]
    ) -> Replica | None:
        return next((r for r in fleet.in_order() if r.id not in barred), None)


class RoundRobin:
    """One after the other, by id."""

    def __init__(self) -> None:
        self._last = ""

    def order(self, replica: Replica) -> tuple[Any, ...]:
        return (replica.id,)

    def choose(
        self, fleet: Fleet, ask: Ask, match: ReplicaMatch, barred: Collection[str]
    ) -> Replica | None:
        start = fleet.place_after((self._last + "\0",))
        found = next((r for r in fleet.in_order(start) if r.id not in barred), None)
        self._last = self._last if found is None else found.id
        return found


class PrefixHash:
    """The same replica for prompts with the same beginning, of `leading` blocks, whatever there is
    to do: by the greatest hash, so that few prompts move when replicas come or go."""

    def __init__(self, leading: int = 4) -> None:
        self._leading = leading
        self._roots: dict[str, int] = {}

    def order(self, replica: Replica) -> tuple[Any, ...]:
        self._roots.setdefault(replica.id, root(replica.id))
        return (replica.id,)

    def choose(
        self, fleet: Fleet, ask: Ask, match: ReplicaMatch, barred: Collection[str]
    ) -> Replica | None:
        blocks = ask.blocks[: self._leading]
        key = blocks[-1] if blocks else ask.tokens
        able = (r for r in fleet.in_order() if r.id not in barred)
        return max(able, key=lambda r: hash((self._roots[r.id] ^ key,)), default=None)


class Random:
    """Any. seed: of the sequence of choices."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)

    def order(self, replica: Replica) -> tuple[Any, ...]:
        return (replica.id,)

    def choose(
        self, fleet: Fleet, ask: Ask, match: ReplicaMatch, barred: Collection[str]
    ) -> Replica | None:
        start = self._random.randrange(max(fleet.up, 1))
        return next((r for r in fleet.in_order(start) if r.id not in barred), None)


POLICIES: dict[str, type[Policy]] = {
    "cost": LeastCost,
    "least-load": LeastLoad,
    "round-robin": RoundRobin,
    "prefix-hash": PrefixHash,
    "random": Random,
}
