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
Hessian = F32 | F64  # the sum of x x^T over a layer's inputs, or a positive multiple of it

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


def inner(a: F32, b: F32) -> F32:
    """The sum of a b of each group."""
    return np.asarray(np.einsum("gn,gn->g", a, b), np.float32)


def steps_of(x: F32, scale: F32, out: F32 | None = None) -> F32:
    """x as the nearest whole number of scales `[groups, 1]`; 0 where that is 0. Written to `out`,
    which may be x."""
    steps = np.divide(x, np.where(scale == 0, np.float32(np.inf), scale), out=out)
    return np.asarray(np.rint(steps, out=steps), np.float32)


def codes_of(x: F32, scale: F32, low: int, high: int) -> I32:
    """The nearest codes, `low` to `high`, of x on a grid of `scale` `[groups]`; 0 where it is 0."""
    return _within(steps_of(x, scale[:, None]), low, high).astype(np.int32)


def _within(x: F32, low: int, high: int) -> F32:
    """x, cut where it lies outside."""
    np.maximum(x, np.float32(low), out=x)
    return np.minimum(x, np.float32(high), out=x)


def symmetric(x: F32, w: F32, low: int, high: int) -> Symmetric:
    """The grid scale * [low, high] of least weighted error; the scale may be negative."""
    if high - low < FEW:
        best = _exact_scale(x, w, np.arange(low, high + 1, dtype=np.float32))
        return Symmetric(best, codes_of(x, best, low, high))
    at = np.abs(x).argmax(axis=1, keepdims=True)
    widest = np.take_along_axis(x, at, axis=1)[:, 0]
    best, gain = np.zeros_like(widest), np.full(len(x), -1, np.float32)
    wx, q, wq = w * x, np.empty_like(x), np.empty_like(x)
    # The widest value lies on the longer side of the grid, `low`.
    for guess in (*(divide(widest, np.full_like(widest, low - step)) for step in STEPS), *ROUNDS):
        _within(steps_of(x, (best if guess is None else guess)[:, None], q), low, high)
        np.multiply(w, q, out=wq)
        xq, qq = inner(wx, q), inner(wq, q)
        better = (this := divide(xq * xq, qq)) > gain
        best, gain = np.where(better, divide(xq, qq), best), np.where(better, this, gain)
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


def affine(x: F32, w: F32, high: int, *, below: bool = False) -> Affine:
    """The grid scale * [0, high] + minimum of least weighted error; below: no minimum above 0."""
    lowest, highest = x.min(axis=1), x.max(axis=1)
    if below:
        lowest = np.minimum(lowest, 0)
    unit = (highest - lowest) / np.float32(high)
    task = _Affine(x, w, high, below)
    best = Affine(unit, lowest, task.codes(unit, lowest).astype(np.int32))
    error = task.error(best)
    scale, minimum = task.searched(unit, lowest)
    for _ in ROUNDS:
        best, error = task.better(scale, minimum, best, error)
        scale, minimum = best.scale, best.minimum
    return best


class _Affine:
    """Groups of numbers that a grid with minima is looked for."""

    def __init__(self, x: F32, w: F32, high: int, below: bool) -> None:
        self.x, self.w, self.high, self.below = x, w, high, below
        self.wx, self.sw, self.sx = w * x, w.sum(1), inner(w, x)
        self._q, self._wq = np.empty_like(x), np.empty_like(x)

    def codes(self, scale: F32, minimum: F32) -> F32:
        """As floats, until they are asked for again."""
        np.subtract(self.x, minimum[:, None], out=self._q)
        return _within(steps_of(self._q, scale[:, None], self._q), 0, self.high)

    def searched(self, unit: F32, lowest: F32) -> tuple[F32, F32]:
        """The least-squares scale and minimum of those candidates that lose least, each of which is
        rounded and solved for twice."""
        cuts = [(np.float32(0), step) for step in STEPS[::2]]
        if self.high < FEW // 2:
            cuts += [(a, b) for a in CUTS for b in (0, *CUTS)]
        best, lost = (unit, lowest), np.full(len(unit), np.inf, np.float32)
        for under, over in cuts:  # how many codes' worth of the range lie outside the grid
            narrower = 1 - (under + over) / np.float32(self.high)
            q = self.codes(unit * narrower, lowest + under * unit)
            scale, minimum, _ = self.solved(q)
            scale, minimum, this = self.solved(self.codes(scale, minimum))
            better = this < lost
            best = np.where(better, scale, best[0]), np.where(better, minimum, best[1])
            lost = np.where(better, this, lost)
        return best

    def solved(self, q: F32) -> tuple[F32, F32, F32]:
        """Codes' least-squares scale and minimum, and their error but for the sum of w x x."""
        np.multiply(self.w, q, out=self._wq)
        sw, sx, sq = self.sw, self.sx, self._wq.sum(1)
        sqq, sqx = inner(self._wq, q), inner(self._wq, self.x)
        det = sw * sqq - sq * sq
        sound = det > TINY * sw * sw
        scale = np.where(sound, divide(sw * sqx - sq * sx, det), 0).astype(np.float32)
        minimum = np.where(sound, divide(sqq * sx - sq * sqx, det), divide(sx, sw))
        if self.below:
            above = minimum > 0
            minimum = np.where(above, 0, minimum)
            scale = np.where(above, divide(sqx, sqq), scale)
        minimum = minimum.astype(np.float32)
        lost = scale * (scale * sqq - 2 * sqx) + minimum * (minimum * sw + 2 * (scale * sq - sx))
        return scale, minimum, lost

    def better(self, scale: F32, minimum: F32, best: Affine, error: F32) -> tuple[Affine, F32]:
        """For each group the better of `best` and the solution for the codes that a grid gives."""
        scale, minimum, _ = self.solved(self.codes(scale, minimum))
        this = Affine(scale, minimum, self.codes(scale, minimum).astype(np.int32))
        found = self.error(this)
        better = found < error
        merged = Affine(
            np.where(better, this.scale, best.scale),
            np.where(better, this.minimum, best.minimum),
            np.where(better[:, None], this.codes, best.codes),
        )
        return merged, np.where(better, found, error)

    def error(self, grid: Affine) -> F32:
        lost = grid.scale[:, None] * grid.codes.astype(np.float32)
        lost += grid.minimum[:, None]
        lost -= self.x
        lost *= lost
        return inner(self.w, lost)


def nearest(x: F32, table: F32) -> I32:
    """Indices of the nearest entries of an ascending table; of equals the lower."""
    middles = (table[1:] + table[:-1]) / 2
    return np.searchsorted(middles, x).astype(np.int32)


def tabled(x: F32, w: F32, table: F32) -> Symmetric:
    """The grid scale * table (ascending) of least weighted error; codes are indices into it."""
    best = _exact_scale(x, w, table)
    return Symmetric(best, nearest(divide(x, best[:, None]), table))
