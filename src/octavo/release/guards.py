"""The tests of a release. Each keeps sums, which add up between gateways, and has evidence of them.

What evidence e^L is worth: a version that is no worse than allowed reaches 1 / alpha with a
probability of at most alpha, however often one looks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from octavo.release import betting, moments
from octavo.release.events import COVARIATES, VALUES, RequestEvent, Value
from octavo.release.spec import MEANS, Guard

Floats = np.ndarray[Any, np.dtype[np.float64]]
SCALE = 0.1  # of differences of logarithms that are looked for: 10 % and more
LEAST = 30  # values of each group, from which on means are close to normal


@dataclass(frozen=True)
class Figures:
    """What a guard has seen: of the canary, and of what it is compared with."""

    count: int
    value: float | None
    other_count: int = 0
    other: float | None = None


class GuardTest(Protocol):
    """size: how many sums it keeps. late: whether it ignores what came during the warm-up."""

    size: int
    late: bool

    def observe(self, sums: Floats, event: RequestEvent, canary: bool, share: float) -> None:
        """Adds an event, of the canary or of what it is compared with, to a row of sums.

        share: the canary's, of the requests of both.
        """
        ...

    def evidence(self, rows: Floats, steps: Floats) -> float:
        """The logarithm of the evidence that the canary is worse than allowed, of rows of sums
        in the order of time, each of one step."""
        ...

    def figures(self, rows: Floats) -> Figures: ...


def _suffixes(rows: Floats) -> Floats:
    """The sums of all rows from each row on."""
    found: Floats = rows[::-1].cumsum(axis=0)[::-1]
    return found


def _ratio(total: float, count: float) -> float | None:
    return total / count if count else None


class LimitTest:
    """The canary's mean is above a limit. Sums: count, total, and the logs of the shares."""

    size = 2 + len(betting.FRACTIONS)

    def __init__(self, value: Value, limit: float, late: bool) -> None:
        self._value, self._limit, self.late = value, limit, late
        self._gains = {x: betting.gains(x, limit) for x in (0.0, 1.0)}

    def observe(self, sums: Floats, event: RequestEvent, canary: bool, share: float) -> None:
        value = self._value(event) if canary else None
        if value is not None:
            sums[:2] += 1.0, value
            gained = self._gains.get(value)
            sums[2:] += betting.gains(value, self._limit) if gained is None else gained

    def evidence(self, rows: Floats, steps: Floats) -> float:
        return betting.since_any_time(betting.evidence(_suffixes(rows[:, 2:])))

    def figures(self, rows: Floats) -> Figures:
        count, total = map(float, rows.sum(axis=0)[:2])
        return Figures(int(count), _ratio(total, count))


class ShareTest:
    """Of the bad answers, more are the canary's than its share of the requests explains.

    What goes wrong for both alike leaves no evidence. Sums: count and total of the canary and of
    the others, then the logs.
    """

    size = 4 + len(betting.FRACTIONS)

    def __init__(self, value: Value, margin: float, late: bool) -> None:
        self._value, self._odds, self.late = value, 1 + margin, late

    def observe(self, sums: Floats, event: RequestEvent, canary: bool, share: float) -> None:
        value = self._value(event)
        if value is None:
            return
        at = 0 if canary else 2
        sums[at : at + 2] += 1.0, value
        if value and share < 1:
            odds = self._odds * share
            sums[4:] += betting.gains(float(canary), odds / (odds + 1 - share))

    def evidence(self, rows: Floats, steps: Floats) -> float:
        return betting.since_any_time(betting.evidence(_suffixes(rows[:, 4:])))

    def figures(self, rows: Floats) -> Figures:
        n, bad, others, worse = map(float, rows.sum(axis=0)[:4])
        return Figures(int(n), _ratio(bad, n), int(others), _ratio(worse, others))


class MeanTest:
    """The canary's geometric mean is above the other's by more than a margin.

    Logarithms make a ratio a difference, and of values with long tails nearly normal ones. Sums:
    those of rows (the logarithm, covariates) of the canary, then of the others.
    """

    late = True

    def __init__(self, value: Value, margin: float, adjust: tuple[str, ...]) -> None:
        self._value, self._margin = value, math.log1p(margin)
        self._covariates = [COVARIATES[name] for name in adjust]
        self._width = 1 + len(adjust)
        self.size = 2 * moments.size(self._width)

    def observe(self, sums: Floats, event: RequestEvent, canary: bool, share: float) -> None:
        value = self._value(event)
        if value is not None and value > 0:
            row = np.array([math.log(value), *(c(event) for c in self._covariates)])
            half = self.size // 2
            part = sums[:half] if canary else sums[half:]
            part += moments.row_sums(row)

    def _groups(self, sums: Floats) -> tuple[moments.Moments, moments.Moments]:
        one, other = np.split(sums, 2)
        return (
            moments.Moments.unpack(one, self._width),
            moments.Moments.unpack(other, self._width),
        )

    def evidence(self, rows: Floats, steps: Floats) -> float:
        """Of the differences within steps: between them, traffic and load are not the same."""
        mean, weight, found = 0.0, 0.0, []
        for step in np.unique(steps)[::-1]:
            one, other = self._groups(rows[steps == step].sum(axis=0))
            if min(one.count, other.count) >= LEAST:
                gap = moments.difference(one, other)
                if gap.variance > 0:
                    mean += gap.mean / gap.variance
                    weight += 1 / gap.variance
            if weight:
                excess = mean / weight - self._margin
                found.append(moments.mean_evidence(excess, 1 / weight, SCALE))
            else:
                found.append(0.0)
        return betting.since_any_time(np.array(found[::-1]))

    def figures(self, rows: Floats) -> Figures:
        groups = self._groups(rows.sum(axis=0))
        means = [math.exp(g.mean[0]) if g.count else None for g in groups]
        return Figures(int(groups[0].count), means[0], int(groups[1].count), means[1])


def make_test(guard: Guard) -> GuardTest:
    """The test that a guard asks for."""
    if guard.metric in MEANS:
        name = guard.metric.removesuffix("_mean")
        return MeanTest(VALUES[name], guard.margin, guard.adjust)
    late = guard.metric == "ttft_over"
    value = _over(guard.slo_ms / 1000) if guard.slo_ms is not None else VALUES[guard.metric]
    if guard.max is not None:
        return LimitTest(value, guard.max, late)
    return ShareTest(value, guard.margin, late)


def _over(limit: float) -> Callable[[RequestEvent], float | None]:
    ttft = VALUES["ttft"]

    def over(event: RequestEvent) -> float | None:
        value = ttft(event)
        return None if value is None else float(value > limit)

    return over
