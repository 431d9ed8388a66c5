"""How far a median of rounds may be from what many rounds would give."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from octavo.bench.speculation import error_of_median


@pytest.mark.parametrize("rounds", [3, 4, 5, 7, 9, 10, 25, 101])
def test_medians_are_as_far_apart_as_it_says(rounds: int) -> None:
    samples = np.random.default_rng(rounds).normal(1.0, 0.05, (4000, rounds))
    medians = [statistics.median(s) for s in samples.tolist()]
    errors = [error_of_median(s) for s in samples.tolist()]
    assert statistics.mean(errors) == pytest.approx(statistics.stdev(medians), rel=0.15)


def test_single_outliers_leave_it_alone() -> None:
    values = np.random.default_rng(1).normal(1.0, 0.05, 100).tolist()
    assert error_of_median([*values, 9.0, 0.01]) < 1.1 * error_of_median(values)


def test_two_rounds_say_nothing_of_it() -> None:
    assert math.isnan(error_of_median([1.0, 1.1]))
