"""Where the latest requests went, and why."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from octavo.balance.router import Candidate, RoutingDecision

KEPT = 256


@dataclass(frozen=True, slots=True)
class Decision:
    """One choice among replicas. at: seconds since 1970."""

    at: float
    tokens: int
    route: RoutingDecision
    candidates: Sequence[Candidate]


class Routes:
    """The latest decisions, the first of them first."""

    def __init__(self) -> None:
        self._kept: deque[Decision] = deque(maxlen=KEPT)

    def __iter__(self) -> Iterator[Decision]:
        return iter(list(self._kept))

    def add(self, tokens: int, route: RoutingDecision, candidates: Sequence[Candidate]) -> None:
        self._kept.append(Decision(time.time(), tokens, route, candidates))
