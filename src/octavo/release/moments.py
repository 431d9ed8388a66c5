"""Means of two groups, with what explains part of their spread, from sums that add up."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Moments:
    """How many rows, their sum, and the sum of their outer products. A row is a value, then its
    covariates: what was known of a request before it was assigned."""

    count: float
    total: Floats
    products: Floats

    @classmethod
    def of(cls, rows: Floats) -> Moments:
        rows = np.atleast_2d(rows)
        return cls(float(len(rows)), rows.sum(axis=0), rows.T @ rows)

    @classmethod
    def unpack(cls, sums: Floats, width: int) -> Moments:
        """From an array of `size(width)` sums, as `row_sums` makes them."""
        return cls(float(sums[0]), sums[1 : 1 + width], sums[1 + width :].reshape(width, width))

    @property
    def mean(self) -> Floats:
        found: Floats = self.total / self.count
        return found

    @property
    def covariance(self) -> Floats:
        """Of a row; needs two."""
        centred = self.products - np.outer(self.total, self.total) / self.count
        found: Floats = centred / (self.count - 1)
        return found


def size(width: int) -> int:
    return 1 + width + width * width


def row_sums(row: Floats) -> Floats:
    """The sums of one row."""
    return np.concatenate(([1.0], row, np.outer(row, row).ravel()))


@dataclass(frozen=True)
class Difference:
    """How much larger the mean of one group is than another's. variance: of that difference.
    explained: the part of the variance that covariates have taken away."""

    mean: float
    variance: float
    explained: float = 0.0


def difference(one: Moments, other: Moments) -> Difference:
    """The difference of the means of first columns, less what the other columns explain (CUPED).

    Both groups need two rows. Covariates have the same mean in both groups but for chance, as
    assignment does not depend on them; so what they predict of the difference is chance too.
    """
    gap = one.mean - other.mean
    spread = one.covariance / one.count + other.covariance / other.count
    plain, among, across = float(spread[0, 0]), spread[1:, 1:], spread[1:, 0]
    weights = np.linalg.pinv(among) @ across if len(across) else across
    variance = max(0.0, plain - float(weights @ across))
    mean = float(gap[0] - weights @ gap[1:])
    return Difference(mean, variance, 1 - variance / plain if plain > 0 else 0.0)


def pooled_variance(one: Moments, other: Moments) -> float:
    """Of the difference of the means of first columns, if both groups are of one kind."""
    count = one.count + other.count
    both = Moments(count, one.total + other.total, one.products + other.products)
    return float(both.covariance[0, 0]) * (1 / one.count + 1 / other.count)


def mean_evidence(mean: float, variance: float, scale: float) -> float:
    """The logarithm of the evidence that a mean lies above 0, which may be read at any time.

    mean: an estimate, of so much variance, close to normal. scale: of the means that are looked
    for, the standard deviation of a half normal density, over which likelihood ratios are mixed.
    """
    if variance <= 0:
        return 0.0
    total = variance + scale * scale
    z = mean * scale / math.sqrt(variance * total)
    return math.log(2) + 0.5 * math.log(variance / total) + z * z / 2 + _log_normal_cdf(z)


def _log_normal_cdf(z: float) -> float:
    if z > -30:
        return math.log(0.5 * math.erfc(-z / math.sqrt(2)))
    return -z * z / 2 - math.log(-z * math.sqrt(2 * math.pi))  # erfc is 0 there
