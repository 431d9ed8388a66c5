"""Pictures in other sizes: Pillow's pixels on every instruction set."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image
from PIL.Image import Resampling

from octavo import _native
from octavo.vision.resample import EXACT, _taps, resampled

SIZES = [
    ((336, 336), (48, 48)), ((97, 51), (64, 32)), ((1, 1), (30, 30)), ((1, 40), (17, 5)),
    ((40, 1), (1, 90)), ((300, 301), (301, 300)), ((33, 200), (56, 340)), ((641, 359), (2, 3)),
]  # fmt: skip


def noise(height: int, width: int, seed: int = 1) -> np.ndarray:
    """Black and white beside each other, where filters overshoot."""
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (height, width, 3))
    return np.where(rng.random(pixels.shape) < 0.3, 255 * (pixels > 99), pixels).astype(np.uint8)


@pytest.mark.parametrize("resample", sorted(EXACT))
def test_pixels_are_pillows(resample: int) -> None:
    rng = np.random.default_rng(resample)
    random = [tuple(map(tuple, rng.integers(1, 140, (2, 2)).tolist())) for _ in range(60)]
    for before, after in [*SIZES, *random]:
        pixels = noise(*before)
        wanted = Image.fromarray(pixels).resize(after[::-1], Resampling(resample))
        assert np.array_equal(resampled(pixels, *after, resample), np.asarray(wanted))


@pytest.mark.parametrize("isa", _native.isas())
def test_instruction_sets_agree(isa: str) -> None:
    pixels = noise(75, 131)
    x, y = _taps(131, 57, 3), _taps(75, 99, 3)
    assert np.array_equal(_native.resample(isa, pixels, *x, *y), resampled(pixels, 99, 57, 3))


def test_lines_that_are_not_there_are_refused() -> None:
    pixels, (first, pairs, shares) = noise(20, 20), _taps(20, 10, 2)
    for wrong in (
        (first + 10, pairs, shares),
        (first - 1, pairs, shares),
        (first, pairs + 9, shares),
    ):
        with pytest.raises(ValueError, match="a line outside"):
            _native.resample("", pixels, *wrong, first, pairs, shares)
    with pytest.raises(ValueError, match="shapes disagree"):
        _native.resample("", pixels, first[1:], pairs, shares, first, pairs, shares)
