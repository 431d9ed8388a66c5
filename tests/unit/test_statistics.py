"""Statistics of a layer's inputs: the same however the inputs come in pieces."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.compress.statistics import MOST_SAMPLES, InputStatistics
from octavo.errors import UsageError

X = np.random.default_rng(1).standard_normal((5 * MOST_SAMPLES + 7, 24)).astype(np.float32)


def of(pieces: list[np.ndarray]) -> InputStatistics:
    s = InputStatistics(X.shape[1])
    for piece in pieces:
        s.update(piece)
    return s


def test_sums() -> None:
    s, exact = of(np.array_split(X, 9)), X.astype(np.float64)
    assert s.tokens == len(X)
    # Each product is rounded once and each sum grows by at most len(X) roundings.
    bound = len(X) * 2.0**-24 * (np.abs(exact).T @ np.abs(exact))
    assert (np.abs(s.gram - exact.T @ exact) <= bound).all()
    assert np.allclose(s.mean_square, (exact**2).mean(0), rtol=1e-5)
    assert np.allclose(s.mean_abs, np.abs(exact).mean(0), rtol=1e-6)
    assert (s.max_abs == np.abs(X).max(0)).all()


@pytest.mark.parametrize("size", [1, 100, 512, 4096, len(X)])
def test_samples_do_not_depend_on_pieces(size: int) -> None:
    s = of([X[i : i + size] for i in range(0, len(X), size)])
    keys = np.arange(len(X)) * 0x9E3779B1 % 2**32
    taken = keys <= np.sort(keys)[MOST_SAMPLES - 1]
    assert len(s.samples) == MOST_SAMPLES and (s.samples == X[taken]).all()


@pytest.mark.parametrize("length", [64, 96, 128, 512])
def test_samples_are_in_no_step_with_sequences(length: int) -> None:
    """Each place of sequences is among the samples as often as among all rows, but for the rounding
    of a few."""
    count = 16_384 // length
    x = np.tile(np.arange(length, dtype=np.float32)[:, None], (count, 1))
    s = InputStatistics(1)
    s.update(x)
    found = np.bincount(s.samples[:, 0].astype(int), minlength=length)
    assert np.abs(found - MOST_SAMPLES / length).max() <= 4


def test_few_tokens() -> None:
    s = of([X[:1], X[:0]])
    assert s.tokens == 1 and (s.samples == X[:1]).all() and (s.gram == np.outer(X[0], X[0])).all()
    assert (InputStatistics(24).mean_abs == 0).all()


def test_what_is_not_finite_is_refused() -> None:
    s = of([X[:8]])
    bad = X[:3].copy()
    bad[1, 1] = np.nan
    with pytest.raises(UsageError, match="after 8 tokens"):
        s.update(bad)
    assert s.tokens == 8 and np.isfinite(s.gram).all()
