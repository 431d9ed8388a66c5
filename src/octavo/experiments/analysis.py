"""What an experiment says: differences with intervals that hold whenever one looks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from octavo.experiments.spec import ExperimentSpec
from octavo.experiments.totals import Key, Total, Units, first_dealt, moved, units_of
from octavo.release.assignment import BUCKETS
from octavo.release.moments import Moments, difference, pooled_variance

Floats = np.ndarray[Any, np.dtype[np.float64]]
LEAST = 20  # units of each variant, from which on intervals are given
MISMATCH = 0.001  # how likely it may be that a sound experiment is called unsound
ROUNDING = 1e-9  # of means; what is less apart is the same
NOISE = 1e-6  # of deviations: what is left of a square root of rounded sums of squares


@dataclass(frozen=True)
class Comparison:
    """A metric of a variant beside the control's. low, high: of the difference, at any time.
    explained: the part of its variance that covariates took away."""

    metric: str
    variant: str
    units: int
    value: float
    control_units: int
    control: float
    difference: float
    low: float
    high: float
    explained: float
    alpha: float

    @property
    def decided(self) -> bool:
        return self.low > 0 or self.high < 0

    @property
    def varied(self) -> bool:
        """Whether units differ at all: else an interval of no width would seem to be certain."""
        return self.high - self.low > NOISE * max(abs(self.value), abs(self.control))


@dataclass(frozen=True)
class Mismatch:
    """Whether variants have the units they should have. evidence: that they do not, a logarithm."""

    counts: dict[str, int]
    expected: dict[str, float]
    evidence: float

    @property
    def found(self) -> bool:
        return self.evidence > math.log(1 / MISMATCH)


@dataclass(frozen=True)
class Analysis:
    """moved: units that changed their variant, and are left out. waiting: metrics and variants of
    which there are too few units yet, or only equal ones."""

    comparisons: tuple[Comparison, ...]
    mismatch: Mismatch
    moved: int
    waiting: tuple[str, ...]


def half_width(
    variance: Floats | float, count: Floats | float, horizon: float, alpha: float
) -> Any:
    """Of an interval around a mean of so much variance, that holds at all times together but with a
    probability of alpha. count: units so far; horizon: at which it shall be narrowest.

    The asymptotic confidence sequence of Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas
    (arXiv 2103.06476).
    """
    log = -2 * math.log(alpha)
    rho = (log + math.log(log + 1)) / horizon  # the square of theirs
    scaled = np.asarray(count) * rho
    return np.sqrt(variance * (scaled + 1) / scaled * np.log((scaled + 1) / alpha**2))


def linear(units: Units) -> tuple[float, Moments]:
    """The mean over all values of all units, and rows whose mean's variance is that mean's.

    A unit's row is how far its sum is from what its number of values explains, and the same of its
    covariates (the delta method for ratios). The rows' mean is set to the means themselves.
    """
    mean = units.totals.sum() / units.counts.sum()
    rows = [(units.totals - mean * units.counts) / units.counts.mean() + mean]
    if units.covariates.shape[1]:
        covariate = units.covariates.sum(axis=0) / units.requests.sum()
        excess = units.covariates - covariate * units.requests[:, None]
        rows += list((excess / units.requests.mean() + covariate).T)
    return float(mean), Moments.of(np.column_stack(rows))


def compare(
    pairs: Sequence[tuple[Units, Units]], metric: str, variant: str, alpha: float, horizon: int
) -> Comparison:
    """A variant's units beside the control's, in pairs of which each came under the same shares:
    what else was different at that time was so for both."""
    sizes = np.array([(len(one), len(control)) for one, control in pairs], np.float64)
    weights = sizes.prod(axis=1) / sizes.sum(axis=1)
    weights /= weights.sum()
    each = np.array([_apart(one, control) for one, control in pairs])
    value, base, apart, explained = (float(weights @ column) for column in each[:, :4].T)
    variance = float(weights**2 @ each[:, 4])
    apart = apart if abs(apart) > ROUNDING * max(abs(value), abs(base)) else 0.0
    ones, controls = (int(count) for count in sizes.sum(axis=0))
    wide = float(half_width(variance, ones + controls, horizon, alpha))
    return Comparison(
        metric, variant, ones, value, controls, base, apart, apart - wide, apart + wide,
        explained, alpha,
    )  # fmt: skip


def _apart(one: Units, control: Units) -> tuple[float, float, float, float, float]:
    """Both means, their difference, what covariates explain of it, and the variance that is
    left."""
    value, moments = linear(one)
    base, base_moments = linear(control)
    gap = difference(moments, base_moments)
    # One of two equal variants that has had no rare event yet shows no spread of its own.
    pooled = pooled_variance(moments, base_moments) * (1 - gap.explained)
    return value, base, gap.mean, gap.explained, max(gap.variance, pooled)


def multinomial_evidence(counts: Sequence[float], shares: Sequence[float]) -> float:
    """The logarithm of the evidence that units are not dealt by these shares, at any time.

    The mixture of all other shares (a Dirichlet density around these, as strong as 100 units)
    against these: Lindon and Malek, arXiv 2011.03567.
    """
    strength = 100.0
    total, found = sum(counts), 0.0
    for count, share in zip(counts, shares, strict=True):
        prior = strength * share
        found += math.lgamma(prior + count) - math.lgamma(prior) - count * math.log(share)
    return found + math.lgamma(strength) - math.lgamma(strength + total)


def mismatch(
    spec: ExperimentSpec, totals: Mapping[Key, Total], dealt: Sequence[Mapping[str, float]] = ()
) -> Mismatch:
    """Whether each variant has its share of the units, of those that first came while it had that
    share. dealt: the shares that there were, one after the other. Units that moved count where they
    were first. Once some took no part, nothing is expected of those that come under other shares:
    they may have been there all the time, and be new to the variants that grew alone."""
    counts, expected = dict.fromkeys(spec.variants, 0), dict.fromkeys(spec.variants, 0.0)
    came = Counter((variant, stage) for _, variant, stage in first_dealt(totals))
    evidence, all_took_part = 0.0, True
    for stage, shares in enumerate(dealt or (spec.shares,)):
        whole = sum(shares.values())
        parts = [shares[name] / whole for name in counts]
        units = [came[name, stage] for name in counts]
        evidence += multinomial_evidence(units, parts) if all_took_part else 0.0
        for name, count, part in zip(counts, units, parts, strict=True):
            counts[name] += count
            expected[name] += part * sum(units) if all_took_part else count
        all_took_part &= whole > 1 - 1 / BUCKETS
    return Mismatch(counts, expected, evidence)


def comparable(dealt: Sequence[Mapping[str, float]]) -> list[int]:
    """Under which of the shares that there were, one after the other, came units that tell what
    variants do. A variant that shrinks loses those of its units that come again, and keeps the
    others. Where some units took no part, old ones are new to a variant that grows by more."""
    found, least = [0], 0.5 / BUCKETS
    for stage, (before, now) in enumerate(pairwise(dealt), 1):
        if any(now[name] < before[name] - least for name in now):
            found = []
        factors = [now[name] / before[name] for name in now]
        grew, evenly = max(factors) > 1, max(factors) - min(factors) < least
        if sum(before.values()) > 1 - least or evenly or not grew:
            found.append(stage)
    return found


def _not_together(
    totals: Mapping[Key, Total], dealt: Sequence[Mapping[str, float]]
) -> list[set[str]]:
    """For each of the shares under which comparable units came, the units that did not."""
    stages = {unit: stage for unit, _, stage in first_dealt(totals)}
    return [{unit for unit, came in stages.items() if came != stage} for stage in comparable(dealt)]


def analyse(
    spec: ExperimentSpec, totals: Mapping[Key, Total], dealt: Sequence[Mapping[str, float]] = ()
) -> Analysis:
    """Every variant against the control. The first metric's alpha is shared among the variants;
    the other metrics have as much each, and decide nothing. dealt: as `mismatch` has it."""
    others = [name for name in spec.variants if name != spec.control]
    away = moved(totals)
    outs = [away | rest for rest in _not_together(totals, dealt)]
    found, waiting = [], []
    for metric in spec.metrics:
        controls = [units_of(totals, spec.control, metric, spec.cuped, out) for out in outs]
        for name in others:
            ones = [units_of(totals, name, metric, spec.cuped, out) for out in outs]
            both = zip(ones, controls, strict=True)
            pairs = [pair for pair in both if min(map(len, pair)) >= LEAST]
            alpha = spec.alpha / len(others)
            told = compare(pairs, metric, name, alpha, spec.horizon) if pairs else None
            if told is not None and told.varied:
                found.append(told)
            else:
                waiting.append(f"{metric} of {name}")
    return Analysis(tuple(found), mismatch(spec, totals, dealt), len(away), tuple(waiting))
