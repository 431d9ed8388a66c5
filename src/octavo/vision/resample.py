"""Pictures in other sizes: Pillow's arithmetic, bit for bit, with this host's vectors.

Pillow computes each pixel of the result from those around its place, along each side by itself:
8 bits between the two passes, shares rounded to 2^-22.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo import _native
from octavo.vision.image import Pixels

Doubles = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]
Taps = tuple[Ints, Ints, Ints]  # of each line: its first pair of lines, how many, shares of all
LANCZOS, BILINEAR, BICUBIC = 1, 2, 3  # Pillow's numbers
ONE = 1 << 22
_A = -0.5  # of the bicubic


def _bilinear(x: Doubles) -> Doubles:
    x = np.abs(x)
    return np.where(x < 1, 1 - x, 0.0)


def _bicubic(x: Doubles) -> Doubles:
    x = np.abs(x)
    near = ((_A + 2) * x - (_A + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * _A
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


def _sinc(x: float) -> float:
    return math.sin(x * math.pi) / (x * math.pi) if x else 1.0


def _lanczos(x: Doubles) -> Doubles:
    values = [_sinc(v) * _sinc(v / 3) if -3 <= v < 3 else 0.0 for v in x.ravel().tolist()]
    return np.array(values).reshape(x.shape)


_FILTERS: dict[int, tuple[Callable[[Doubles], Doubles], float]] = {  # and how far they reach
    LANCZOS: (_lanczos, 3.0), BILINEAR: (_bilinear, 1.0), BICUBIC: (_bicubic, 2.0),
}  # fmt: skip
EXACT = frozenset(_FILTERS)


@lru_cache(64)
def _taps(before: int, after: int, resample: int) -> Taps:
    """Which lines each line of the result is made of."""
    weigh, reach = _FILTERS[resample]
    scale = before / after
    wide = max(scale, 1.0)
    support = reach * wide
    center = (np.arange(after) + 0.5) * scale
    low = np.maximum(np.trunc(center - support + 0.5), 0)
    high = np.minimum(np.trunc(center + support + 0.5), before)
    lines = low[:, None] + np.arange(int((high - low).max()))
    weights = weigh((lines - center[:, None] + 0.5) * (1.0 / wide))
    weights[lines >= high[:, None]] = 0.0
    total = np.zeros(after)
    for column in weights.T:  # in this order
        total += column
    weights /= np.where(total == 0, 1.0, total)[:, None]
    shares = np.trunc(weights * ONE + np.where(weights < 0, -0.5, 0.5)).astype(np.int32)
    first, odd = low.astype(np.int32) // 2, low.astype(np.int32) % 2
    even = np.zeros((after, 2 * (shares.shape[1] // 2 + 1)), np.int32)
    rows = np.arange(after)[:, None]
    even[rows, odd[:, None] + np.arange(shares.shape[1])] = shares
    pairs = ((high.astype(np.int32) + 1) // 2 - first).astype(np.int32)
    return first, pairs, even


def resampled(pixels: npt.NDArray[Any], height: int, width: int, resample: int) -> Pixels:
    """RGB pixels `[height, width, 3]` in another size; resample: one of EXACT."""
    before = np.ascontiguousarray(pixels)
    x = _taps(before.shape[1], width, resample)
    y = _taps(before.shape[0], height, resample)
    made: Pixels = _native.resample("", before, *x, *y)
    return made
