"""Grids for groups of numbers: the scale (and minimum) that lose least, and the codes they give.

Every function takes `[groups, n]` values `x` with weights `w` of the same shape and minimises
sum(w * (x - decoded) ** 2) for each group. A candidate scale gives codes by rounding; given codes,
the best scale is a least-squares solution. The search takes the best of the candidates, then
alternates between the two until it no longer gains (Lloyd's algorithm on a uniform grid).
"""

from __future__ import annotations

from itertools import zip_longest
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]

STEPS = np.linspace(-1.6, 1.6, 25, dtype=np.float32)  # candidates, in codes of the widest value
CUTS = np.linspace(0.3, 1.5, 5, dtype=np.float32)  # more of them, for minima and few codes
FEW = 16  # codes, up to which every scale is looked at
ROUNDS = (None,) * 3  # of rounding and least squares after the search
TINY = np.float32(1e-30)


class Symmetric(NamedTuple):
    """x ≈ scale * codes. scale `[groups]`."""

    scale: F32
    codes: I32


class Affine(NamedTuple):
    """x ≈ scale * codes + minimum. scale, minimum `[groups]`."""

    scale: F32
    minimum: F32
    codes: I32


def divide(a: F32, b: F32) -> F32:
    """a / b, and 0 where b is 0."""
    nothing = np.zeros(np.broadcast_shapes(a.shape, b.shape), np.float32)
    return np.divide(a, b, out=nothing, where=b != 0)


def codes_of(x: F32, scale: F32, low: int, high: int) -> I32:
    """The nearest codes, `low` to `high`, of x on a grid of `scale` `[groups]`; 0 where it is 0."""
    return np.clip(np.rint(divide(x, scale[:, None])), low, high).astype(np.int32)


def symmetric(x: F32, w: F32, low: int, high: int) -> Symmetric:
    """The grid scale * [low, high] of least weighted error; the scale may be negative."""
    if high - low < FEW:
        best = _exact_scale(x, w, np.arange(low, high + 1, dtype=np.float32))
        return Symmetric(best, codes_of(x, best, low, high))
    at = np.abs(x).argmax(axis=1, keepdims=True)
    widest = np.take_along_axis(x, at, axis=1)[:, 0]
    best, gain = np.zeros_like(widest), np.full(len(x), -1, np.float32)
    # The widest value lies on the longer side of the grid, `low`.
    for guess in (*(divide(widest, np.full_like(widest, low - step)) for step in STEPS), *ROUNDS):
        scale, this = _project(x, w, codes_of(x, best if guess is None else guess, low, high))
        better = this > gain
        best, gain = np.where(better, scale, best), np.where(better, this, gain)
    return Symmetric(best, codes_of(x, best, low, high))


def _exact_scale(x: F32, w: F32, table: F32) -> F32:
    """The scale of least error for an ascending table, by looking at every set of codes that any
    scale gives.

    As a scale shrinks, x moves from one value to the next where x / scale passes the middle between
    them. In the order of these places w x v and w v v are running totals; the square of the first
    over the second is the error that is saved.
    """
    best, gain = np.zeros(len(x), np.float32), np.zeros(len(x), np.float32)
    still = table[nearest(np.zeros(1, np.float32), table)[0]]
    moves = _moves(table)
    index = np.arange(x.shape[1] * len(moves), dtype=np.uint64)
    for sign in (np.float32(1), np.float32(-1)):
        y = sign * x
        up = y > 0
        places, of_xv, of_vv = (np.empty((len(x), len(index)), np.float32) for _ in range(3))
        for i, (above, below) in enumerate(moves):
            here = slice(i * x.shape[1], (i + 1) * x.shape[1])
            middle, step, square = (np.where(up, a, b) for a, b in zip(above, below, strict=True))
            places[:, here] = np.abs(y / middle)
            of_xv[:, here] = w * y * step
            of_vv[:, here] = w * square
        # Whole numbers sort several times as fast as floats with their indices, and in one order.
        keys = (~places.view(np.uint32)).astype(np.uint64) << np.uint64(32) | index
        keys.sort(axis=1)
        order = (keys & np.uint64(0xFFFFFFFF)).astype(np.intp)
        xv, vv = (
            np.cumsum(np.take_along_axis(each, order, axis=1), axis=1) for each in (of_xv, of_vv)
        )
        xv += still * (w * y).sum(1, keepdims=True)
        vv += still * still * w.sum(1, keepdims=True)
        gains = divide(xv * xv, vv)
        at = gains.argmax(axis=1, keepdims=True)
        this, xv, vv = (np.take_along_axis(each, at, axis=1)[:, 0] for each in (gains, xv, vv))
        better = this > gain
        best = np.where(better, sign * divide(xv, vv), best)
        gain = np.where(better, this, gain)
    return best


_Move = tuple[np.float32, np.float32, np.float32]
_NO_MOVE: _Move = np.float32(np.inf), np.float32(0), np.float32(0)


def _moves(table: F32) -> list[tuple[_Move, _Move]]:
    """The steps of numbers above 0, and of those below, from the middle of a table outwards: where
    x / scale passes, what the value then grows by, and its square."""
    above: list[_Move] = []
    below: list[_Move] = []
    for low, high in zip(table, table[1:], strict=False):
        if low + high > 0:
            above.append(((low + high) / 2, high - low, high * high - low * low))
        else:
            below.insert(0, ((low + high) / 2, low - high, low * low - high * high))
    return list(zip_longest(above, below, fillvalue=_NO_MOVE))


def _project(x: F32, w: F32, codes: I32) -> tuple[F32, F32]:
    """The least-squares scale of codes, and how much error it removes."""
    q = codes.astype(np.float32)
    xq, qq = (w * x * q).sum(1), (w * q * q).sum(1)
    return divide(xq, qq), divide(xq * xq, qq)


def affine(x: F32, w: F32, high: int, *, below: bool = False) -> Affine:
    """The grid scale * [0, high] + minimum of least weighted error; below: no minimum above 0."""
    lowest, highest = x.min(axis=1), x.max(axis=1)
    if below:
        lowest = np.minimum(lowest, 0)
    unit = (highest - lowest) / np.float32(high)
    best = Affine(unit, lowest, _affine_codes(x, unit, lowest, high))
    error = _affine_error(x, w, best)
    cuts = [(np.float32(0), step) for step in STEPS]
    if high < FEW // 2:
        cuts += [(a, b) for a in CUTS for b in (0, *CUTS)]
    for under, over in cuts:  # how many codes' worth of the range lie outside the grid
        scale = unit * (1 - (under + over) / np.float32(high))
        best, error = _better(x, w, high, below, scale, lowest + under * unit, best, error)
    for _ in ROUNDS:
        best, error = _better(x, w, high, below, best.scale, best.minimum, best, error)
    return best


def _better(
    x: F32, w: F32, high: int, below: bool, scale: F32, minimum: F32, best: Affine, error: F32
) -> tuple[Affine, F32]:
    """For each group the better of `best` and the solution for the codes that a grid gives."""
    codes = _affine_codes(x, scale, minimum, high)
    scale, minimum = solve(x, w, codes.astype(np.float32), below)
    this = Affine(scale, minimum, _affine_codes(x, scale, minimum, high))
    found = _affine_error(x, w, this)
    better = found < error
    merged = Affine(
        np.where(better, this.scale, best.scale),
        np.where(better, this.minimum, best.minimum),
        np.where(better[:, None], this.codes, best.codes),
    )
    return merged, np.where(better, found, error)


def solve(x: F32, w: F32, q: F32, below: bool = False) -> tuple[F32, F32]:
    """Least-squares scale and minimum for codes q; below: a minimum above 0 is taken as 0."""
    sw, sq, sx = w.sum(1), (w * q).sum(1), (w * x).sum(1)
    sqq, sqx = (w * q * q).sum(1), (w * q * x).sum(1)
    det = sw * sqq - sq * sq
    sound = det > TINY * sw * sw
    scale = np.where(sound, divide(sw * sqx - sq * sx, det), 0)
    minimum = np.where(sound, divide(sqq * sx - sq * sqx, det), divide(sx, sw))
    if below:
        above = minimum > 0
        minimum = np.where(above, 0, minimum)
        scale = np.where(above, divide(sqx, sqq), scale)
    return scale.astype(np.float32), minimum.astype(np.float32)


def _affine_codes(x: F32, scale: F32, minimum: F32, high: int) -> I32:
    return codes_of(x - minimum[:, None], scale, 0, high)


def _affine_error(x: F32, w: F32, grid: Affine) -> F32:
    decoded = grid.scale[:, None] * grid.codes + grid.minimum[:, None]
    return np.asarray((w * (x - decoded) ** 2).sum(1), np.float32)


def nearest(x: F32, table: F32) -> I32:
    """Indices of the nearest entries of an ascending table; of equals the lower."""
    middles = (table[1:] + table[:-1]) / 2
    return np.searchsorted(middles, x).astype(np.int32)


def tabled(x: F32, w: F32, table: F32) -> Symmetric:
    """The grid scale * table (ascending) of least weighted error; codes are indices into it."""
    best = _exact_scale(x, w, table)
    return Symmetric(best, nearest(divide(x, best[:, None]), table))
