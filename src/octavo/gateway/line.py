"""Who waits for an upstream, and in which order they have their turns."""

from __future__ import annotations

import asyncio
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import chain, count

from octavo.gateway.body import Relayed
from octavo.gateway.upstreams import UpstreamLease

Pools = tuple[str, ...]
LineKey = tuple[Pools, frozenset[str], str, str, bool]


def key_of_line(asked: Relayed, pools: Pools, barred: Collection[str]) -> LineKey:
    """Equal for requests that wait for the same upstreams: others are in no one's way."""
    return pools, frozenset(barred), asked.outline.model or "", asked.keeper, asked.begun


@dataclass(order=True)
class Waiter:
    """A request that waits; the least is the first. turn: has its place, or why there is none."""

    priority: int
    round: int
    number: int
    key: LineKey = field(compare=False)
    asked: Relayed = field(compare=False)
    turn: asyncio.Future[UpstreamLease] = field(compare=False)


@dataclass
class _Class:
    """Requests of one priority, which have their turns in rounds: each has one of every sender, and
    who comes later begins in that which is on. round: of the last that had its turn."""

    waiting: int = 0
    round: int = 0


class WaitingLines:
    """Requests that wait, one line for all who may get the same places. The lowest priority is
    first, then the lowest round, then who came first."""

    def __init__(self) -> None:
        self._lines: dict[LineKey, list[Waiter]] = {}  # none is empty; in order
        self._classes: dict[int, _Class] = {}  # by priority
        self._numbers = count()

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __iter__(self) -> Iterator[LineKey]:
        return iter(self._lines)

    def __contains__(self, key: LineKey) -> bool:
        return key in self._lines

    @property
    def last(self) -> Waiter:
        """Who is behind all others."""
        return max(line[-1] for line in self._lines.values())

    def _all(self) -> Iterator[Waiter]:
        return chain.from_iterable(self._lines.values())

    def join(self, asked: Relayed, pools: Pools, barred: Collection[str]) -> Waiter:
        """Puts a request in its line."""
        key, priority = key_of_line(asked, pools, barred), asked.priority
        line = self._lines.setdefault(key, [])
        of_class = self._classes.setdefault(priority, _Class())
        of_class.waiting += 1
        same = (w for w in self._all() if w.priority == priority and w.asked.tenant == asked.tenant)
        before = max((w.round for w in same), default=-1)
        turn = asyncio.get_running_loop().create_future()
        place = priority, max(of_class.round, before + 1), next(self._numbers)
        one = Waiter(*place, key, asked, turn)
        insort(line, one)
        return one

    def leave(self, one: Waiter) -> None:
        """Takes a request out of its line."""
        line = self._lines[one.key]
        del line[bisect_left(line, one)]
        if not line:
            del self._lines[one.key]
        of_class = self._classes[one.priority]
        of_class.waiting -= 1
        if not of_class.waiting:
            del self._classes[one.priority]

    def serve(self, give: Callable[[Waiter], bool]) -> None:
        """Gives turns as long as there are places, always to the first of those of all lines who
        may get one. give: whether it has had its turn; what one of a line cannot get, none behind
        it can."""
        heads = [line[0] for line in self._lines.values()]
        heapify(heads)
        while heads:
            one = heappop(heads)
            if give(one):
                of_class = self._classes[one.priority]
                of_class.round = max(of_class.round, one.round)
                self.leave(one)
                if one.key in self._lines:
                    heappush(heads, self._lines[one.key][0])
