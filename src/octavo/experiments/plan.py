"""How many units an experiment needs, before it starts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from octavo.errors import UsageError
from octavo.experiments.analysis import half_width


@dataclass(frozen=True)
class SamplePlan:
    """units: of all variants together. fixed: as many as one look at the end would need."""

    effect: float
    alpha: float
    power: float
    units: int
    fixed: int
    days: float | None


def plan(
    mean: float, deviation: float, effect: float, alpha: float = 0.05, power: float = 0.8,
    share: float = 0.5, explained: float = 0.0, per_day: float | None = None,
) -> SamplePlan:  # fmt: skip
    """Units for finding a change of a metric by `effect` (0.05: 5 %) of its mean.

    deviation: its standard deviation between units. share: of the smaller variant, of two.
    explained: the part of the variance that covariates take away. per_day: units a day.
    """
    if not (mean and deviation > 0 and effect and 0 < share < 1 and 0 <= explained < 1):
        raise UsageError("a plan needs a mean and an effect other than 0, and a share below 1")
    if not (0 < alpha < 1 and 0 < power < 1):
        raise UsageError("nothing is sure: alpha and power lie between 0 and 1")
    try:
        return _plan(mean, deviation, effect, alpha, power, share, explained, per_day)
    except (OverflowError, ZeroDivisionError):
        raise UsageError(f"an effect of {effect:g} is too small to be found") from None
    except ValueError:  # of the normal distribution at 0 and 1, and of what is no number
        raise UsageError(f"no plan is as sure as alpha {alpha:g} and power {power:g}") from None


def _plan(
    mean: float, deviation: float, effect: float, alpha: float, power: float, share: float,
    explained: float, per_day: float | None,
) -> SamplePlan:  # fmt: skip
    """`plan`, where a float holds all numbers. Raises OverflowError, ZeroDivisionError,
    ValueError."""
    gap = abs(mean * effect)
    one = deviation**2 * (1 - explained) / (share * (1 - share))  # variance, times units
    normal = NormalDist()
    sure = normal.inv_cdf(power)
    fixed = math.ceil(one * ((normal.inv_cdf(1 - alpha / 2) + sure) / gap) ** 2)

    def found(units: int) -> bool:
        """Whether the interval leaves out 0 in enough cases, looked at so late (or before)."""
        variance = one / units
        return bool(gap >= half_width(variance, units, units, alpha) + sure * math.sqrt(variance))

    low, high = 1, 2
    while not found(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if found(middle) else (middle, high)
    days = high / per_day if per_day else None
    return SamplePlan(effect, alpha, power, high, fixed, days)


def rate_plan(rate: float, effect: float, share: float = 0.5, **more: float | None) -> SamplePlan:
    """The same for a rate, like that of thumbs up: what it would be has a spread of its own."""
    changed = rate * (1 + effect)
    for value in (rate, changed):
        if not 0 < value < 1:
            raise UsageError(f"a rate lies between 0 and 1, not {value:g}")
    both = (1 - share) * rate + share * changed
    apart = share * rate * (1 - rate) + (1 - share) * changed * (1 - changed)
    deviation = math.sqrt(max(apart, both * (1 - both), 0.0))  # as `compare` has it
    return plan(rate, deviation, effect, share=share, **more)  # type: ignore[arg-type]
