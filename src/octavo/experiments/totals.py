"""What an experiment has seen: per unit, how many values of each metric, and their sum.

Requests of one user are alike, so that users are what is counted, not requests.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from octavo.experiments.spec import ExperimentSpec
from octavo.release.events import COVARIATES, VALUES, RequestEvent

Floats = np.ndarray[Any, np.dtype[np.float64]]
Key = tuple[str, str, str]  # variant, unit, name of a metric, a covariate or a stage
STAGE = "@"  # before its number: how often shares had been changed


@dataclass
class Total:
    count: float = 0.0
    total: float = 0.0


@dataclass
class Totals:
    """Sums that add up."""

    of: dict[Key, Total] = field(default_factory=dict)

    def observe(self, spec: ExperimentSpec, variant: str, unit: str, event: RequestEvent) -> None:
        """Adds a request that has ended."""
        for name in spec.metrics:
            if name in VALUES and (value := VALUES[name](event)) is not None:
                self.add(variant, unit, name, value)
        for name in spec.cuped:
            self.add(variant, unit, name, COVARIATES[name](event))

    def dealt(self, variant: str, unit: str, stage: int) -> None:
        """Notes that a unit has had a variant while shares were the `stage`-th ones."""
        self.add(variant, unit, f"{STAGE}{stage}", 0.0)

    def add(self, variant: str, unit: str, name: str, value: float, count: float = 1.0) -> None:
        one = self.of.setdefault((variant, unit, name), Total())
        one.count += count
        one.total += value


@dataclass(frozen=True)
class Units:
    """Units of a variant as arrays: how many values each has, their sums, and the sums of its
    covariates (a column each) with their counts."""

    counts: Floats
    totals: Floats
    covariates: Floats
    requests: Floats

    def __len__(self) -> int:
        return len(self.counts)


def moved(keys: Iterable[Key]) -> set[str]:
    """Units that have been in several variants, which compare nothing."""
    variants: dict[str, str] = {}
    return {unit for variant, unit, _ in keys if variants.setdefault(unit, variant) != variant}


def first_dealt(keys: Collection[Key]) -> Iterator[tuple[str, str, int]]:
    """Each unit with the variant that it had first, and at which stage; what says nothing of a
    stage is of the first."""
    known: dict[str, dict[str, int]] = {}  # stages by unit and variant
    for variant, unit, name in keys:
        stages, number = known.setdefault(unit, {}), name.removeprefix(STAGE)
        if name != number and number.isdecimal():
            stages[variant] = min(int(number), stages.get(variant, int(number)))
    for variant, unit, _ in keys:
        known[unit].setdefault(variant, 0)
    for unit, stages in known.items():
        first = min(stages.values())
        yield from ((unit, variant, stage) for variant, stage in stages.items() if stage == first)


def units_of(
    totals: Mapping[Key, Total], variant: str, metric: str, cuped: tuple[str, ...],
    out: Collection[str] | None = None,
) -> Units:  # fmt: skip
    """The units of a variant that have values of a metric and of covariates. out: those that do
    not count; if not given, those that have been in another variant."""
    out = moved(totals) if out is None else out
    names = sorted(
        unit
        for of, unit, name in totals
        if of == variant and name == metric and unit not in out
        if all((variant, unit, covariate) in totals for covariate in cuped)
    )  # fmt: skip
    of = [[totals[variant, unit, name] for name in cuped] for unit in names]
    own = [totals[variant, unit, metric] for unit in names]
    return Units(
        np.array([one.count for one in own]),
        np.array([one.total for one in own]),
        np.array([[c.total for c in row] for row in of]).reshape(len(names), len(cuped)),
        np.array([row[0].count if row else 1.0 for row in of]),
    )
