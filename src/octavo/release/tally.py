"""All that a release has seen: rows of sums, which gateways add up."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from octavo.release.events import RequestEvent
from octavo.release.guards import Figures, make_test
from octavo.release.spec import ReleaseSpec

Floats = np.ndarray[Any, np.dtype[np.float64]]
Key = tuple[int, int]  # the step, and which part of the time since the release began
Rows = dict[Key, Floats]
PARTS = 60  # of the first hour; they lengthen with the release's age, so that they stay few
CANARY, BASELINE, STABLE = "canary", "baseline", "stable"


@dataclass(frozen=True)
class Reading:
    """A guard as it stands. evidence: how much the canary has against it, as a logarithm of a
    factor; needed: from which on the release is rolled back."""

    title: str
    figures: Figures
    evidence: float
    needed: float

    @property
    def fired(self) -> bool:
        return self.evidence >= self.needed

    @property
    def watched(self) -> bool:
        """Whether it is half way there, so that a step had better not end."""
        return self.evidence >= self.needed / 2


@dataclass(frozen=True)
class ReleaseSummary:
    """What a release has seen. canary, other: events, of what it is compared with too."""

    canary: int
    other: int
    readings: tuple[Reading, ...]


class Tally:
    """Adds events up, in rows of sums: one for each part of the time of each step. The first two
    sums are the events of the canary and of what it is compared with."""

    def __init__(self, spec: ReleaseSpec) -> None:
        self._warm = spec.warm
        self._tests = [make_test(guard) for guard in spec.guards]
        self._titles = [guard.title for guard in spec.guards]
        self._needed = [math.log(1 / alpha) for alpha in spec.alphas]
        edges = [*accumulate((test.size for test in self._tests), initial=2)]
        self._parts = [slice(a, b) for a, b in pairwise(edges)]
        self._shares = [share for share, _ in spec.plan]
        if spec.baseline:
            self._shares = [share / (share + min(share, 1 - share)) for share in self._shares]
        self.other = BASELINE if spec.baseline else STABLE
        self.size = edges[-1]

    def observe(self, rows: Rows, event: RequestEvent, began: float) -> Key | None:
        """Adds an event to its row. began: when the canary got its first request. None: it tells
        nothing of the release."""
        if event.arm not in (CANARY, self.other):
            return None
        age = max(0.0, event.at - began)
        key = event.step, int(PARTS * math.log2(1 + age / 3600))
        if (row := rows.get(key)) is None:
            row = rows[key] = np.zeros(self.size)
        canary = event.arm == CANARY
        if event.kl is None:
            row[0 if canary else 1] += 1
        for test, part in zip(self._tests, self._parts, strict=True):
            if age >= self._warm or not test.late:
                test.observe(row[part], event, canary, self._shares[event.step])
        return key

    def read(self, rows: Rows) -> ReleaseSummary:
        keys = sorted(rows)
        if not keys:
            rows, keys = {(0, 0): np.zeros(self.size)}, [(0, 0)]
        sums, steps = np.array([rows[key] for key in keys]), np.array([step for step, _ in keys])
        parts = zip(self._tests, self._parts, self._titles, self._needed, strict=True)
        readings = tuple(
            Reading(title, test.figures(sums[:, p]), test.evidence(sums[:, p], steps), needed)
            for test, p, title, needed in parts
        )
        canary, other = map(int, sums[:, :2].sum(axis=0))
        return ReleaseSummary(canary, other, readings)


def add(rows: Rows, more: Rows) -> None:
    """Adds what another gateway has seen."""
    for key, row in more.items():
        rows[key] = rows[key] + row if key in rows else row.copy()
