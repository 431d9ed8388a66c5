"""Matrices on grids of integers or eight-bit floats: what GPTQ, AWQ and their like store.

A weight is scale * (code - zero), codes unsigned; scale and zero belong to a group of columns of a
row. Scales are rounded to the type that files have before codes are chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.checkpoint.base import TensorType
from octavo.checkpoint.grouped import e4m3
from octavo.compress.fit import (
    F32,
    I32,
    Affine,
    affine,
    codes_of,
    divide,
    inner,
    steps_of,
    symmetric,
)
from octavo.compress.pieces import each
from octavo.errors import UsageError

U8 = npt.NDArray[np.uint8]
ScaleType = Literal["f16", "bf16", "f32"]
E4M3_MAX = np.float32(448)
GROUPS = (128, 64, 32)  # that readers take everywhere, each a part of the one before
ROUNDS = 3
LARGEST = 60_000  # a value that a scale of fp16 holds
CHUNK = 1 << 16  # weights that are searched at a time: what caches hold


@dataclass(frozen=True, slots=True)
class Grid:
    """Integers of `bits`. group: columns that share a scale, 0 for whole rows. symmetric: the zero
    is the middle of the codes; else each group has its own."""

    bits: int = 4
    group: int = 64
    symmetric: bool = True
    scales: ScaleType = "f16"

    def __post_init__(self) -> None:
        """Raises UsageError for what no format stores."""
        if self.bits not in (2, 3, 4, 8) or self.group % 32 or self.group < 0:
            raise UsageError(
                f"{self.bits} bits in groups of {self.group}; 2, 3, 4 or 8 bits in groups of whole "
                "32s are stored"
            )

    @property
    def middle(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def top(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1


Scheme = Grid | Literal["fp8"]  # of a matrix; fp8: e4m3 with a scale a row


class Quantized(NamedTuple):
    """codes `[rows, columns]`; scales fp32 and zeros `[rows, groups]`."""

    grid: Grid
    codes: U8
    scales: F32
    zeros: I32

    @classmethod
    def zeros_of(cls, shape: tuple[int, int], grid: Grid) -> Quantized:
        """A matrix of zeros."""
        groups = shape[0], shape[1] // (grid.group or shape[1])
        zeros = np.full(groups, grid.middle, np.int32)
        return cls(grid, np.full(shape, grid.middle, np.uint8), np.zeros(groups, np.float32), zeros)

    @property
    def width(self) -> int:
        """Columns of a group."""
        return self.grid.group or self.codes.shape[1]

    def values(self) -> F32:
        """What the codes stand for, fp32 `[rows, columns]`."""
        out = self.codes.astype(np.float32)
        groups = out.reshape(*self.scales.shape, self.width)
        groups -= self.zeros[..., None].astype(np.float32)
        groups *= self.scales[..., None]
        return out


def rounded(x: F32, kind: ScaleType) -> F32:
    """x as a file of that type holds it, finite."""
    if kind == "f16":
        return np.clip(x, -65504, 65504).astype(np.float16).astype(np.float32)
    if kind == "bf16":
        bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
        return (bits + 0x7FFF + (bits >> 16 & 1) & np.uint32(0xFFFF0000)).view(np.float32)
    return np.asarray(x, np.float32)


def largest_group(columns: int, wanted: int) -> int:
    """The largest usual group, `wanted` at most, that divides `columns`; 0 if none does."""
    fits = (g for g in GROUPS if g <= wanted and columns % g == 0)
    return next(fits, 0)


def check_finite(x: F32, kind: TensorType = TensorType.F16) -> None:
    """Raises UsageError for values that are no numbers, or too large for a type, or for scales of
    it."""
    widest = float(np.maximum(x.max(initial=0), -x.min(initial=0)))
    if not np.isfinite(widest):
        raise UsageError(f"{np.count_nonzero(~np.isfinite(x))} of the weights are not finite")
    if kind is TensorType.F16 and widest > LARGEST:
        raise UsageError(f"weights up to {widest:.3g}; {LARGEST:,} is the largest that is taken")


def quantize(x: F32, grid: Grid, importance: F32 | None = None) -> Quantized:
    """Rounds `[rows, columns]` weights to a grid with the least error weighted by `importance`.

    importance: `[columns]`, none negative. Raises UsageError for columns that are not whole groups
    and for values that are not finite.
    """
    rows, columns = x.shape
    width = grid.group or columns
    if columns % width:
        raise UsageError(f"{columns} columns are not whole groups of {width}")
    check_finite(x)
    weights = np.ones(columns, np.float32) if importance is None else importance
    weights = np.maximum(weights, np.float32(1e-12)).reshape(-1, width)
    at_once = max(1, CHUNK // columns)
    parts = each(rows, at_once, lambda here: _quantize(x[here], weights, grid))
    codes, scales, zeros = (np.concatenate(part) for part in zip(*parts, strict=True))
    return Quantized(grid, codes, scales, zeros)


def _quantize(x: F32, weights: F32, grid: Grid) -> tuple[U8, F32, I32]:
    """Codes, scales and zeros of some rows; weights `[groups of a row, width]`."""
    groups = np.ascontiguousarray(x, np.float32).reshape(-1, weights.shape[1])
    w = np.tile(weights, (len(x), 1))
    if grid.symmetric:
        found = symmetric(groups, w, -grid.middle, grid.top - grid.middle)
        scales = rounded(found.scale, grid.scales)
        zeros = np.full(len(groups), grid.middle, np.int32)
    else:
        scales, zeros = _with_zeros(groups, w, grid)
    codes = codes_on(groups, scales, zeros, grid)
    shape = (len(x), len(weights))
    return codes.reshape(x.shape), scales.reshape(shape), zeros.reshape(shape)


def quantize_affine(x: F32, grid: Grid) -> Affine:
    """Rounds weights to scale * code + minimum, any minimum, the groups of a matrix row by row.

    Raises UsageError as `quantize` does.
    """
    check_finite(x)

    def make(here: slice) -> Affine:
        groups = np.ascontiguousarray(x[here], np.float32).reshape(-1, grid.group)
        found = affine(groups, np.ones_like(groups), grid.top)
        scale, minimum = (rounded(v, grid.scales) for v in (found.scale, found.minimum))
        return Affine(scale, minimum, codes_of(groups - minimum[:, None], scale, 0, grid.top))

    made = each(len(x), max(1, CHUNK // x.shape[1]), make)
    return Affine(*(np.concatenate(parts) for parts in zip(*made, strict=True)))


def codes_on(x: F32, scales: F32, zeros: I32, grid: Grid) -> U8:
    """The nearest codes of `[groups, n]` numbers."""
    return _codes_on(x, scales, zeros, grid, np.empty_like(x)).astype(np.uint8)


def _codes_on(x: F32, scales: F32, zeros: I32, grid: Grid, out: F32) -> F32:
    """The same as floats, written to `out`."""
    steps_of(x, scales[:, None], out)
    out += zeros[:, None].astype(np.float32)
    np.maximum(out, np.float32(0), out=out)
    return np.minimum(out, np.float32(grid.top), out=out)


def _with_zeros(x: F32, w: F32, grid: Grid) -> tuple[F32, I32]:
    """Scales and whole zeros from 1 on (GPTQ's files cannot hold 0).

    Starts from the range of the values and from the grid with any minimum and its neighbours, and
    solves for the scale by least squares.
    """
    start = affine(x, w, grid.top)
    low, high = np.minimum(x.min(1), 0), np.maximum(x.max(1), 0)
    range_scale = (high - low) / np.float32(grid.top)
    starts = [(range_scale, np.rint(divide(-low, range_scale)))]
    starts += [(start.scale, np.rint(divide(-start.minimum, start.scale)) + i) for i in (-1, 0, 1)]
    best_scale = np.zeros(len(x), np.float32)
    best_zero = np.ones(len(x), np.int32)
    error = np.full(len(x), np.inf, np.float32)
    wx, q, wq = w * x, np.empty_like(x), np.empty_like(x)
    for first, wanted in starts:
        zeros = np.clip(wanted, 1, grid.top).astype(np.int32)
        scales = rounded(first, grid.scales)
        for _ in range(ROUNDS):
            _codes_on(x, scales, zeros, grid, q)
            q -= zeros[:, None].astype(np.float32)
            np.multiply(w, q, out=wq)
            xq, qq = inner(wx, q), inner(wq, q)
            lost = scales * (scales * qq - 2 * xq)  # but for the sum of w x x
            better = lost < error
            best_scale = np.where(better, scales, best_scale)
            best_zero = np.where(better, zeros, best_zero)
            error = np.where(better, lost, error)
            scales = rounded(divide(xq, qq), grid.scales)
    return best_scale, best_zero.astype(np.int32)


class Float8(NamedTuple):
    """e4m3 codes `[rows, columns]`; fp32 scales `[rows, 1]`."""

    codes: U8
    scales: F32

    def values(self) -> F32:
        return np.asarray(self.scales * e4m3(self.codes), np.float32)


def float8(x: F32) -> Float8:
    """e4m3 with the largest value of each row at 448. Raises UsageError."""
    check_finite(x)
    widest = np.abs(x).max(axis=1, keepdims=True)
    scales = np.where(widest > 0, widest / E4M3_MAX, 1).astype(np.float32)
    return Float8(to_e4m3(x / scales), scales)


_E4M3 = e4m3(np.arange(127, dtype=np.uint8))  # ascending; 127 is the NaN


def to_e4m3(x: F32) -> U8:
    """The nearest codes; of two that are as near the even one; 448 at most."""
    values = x.reshape(-1)
    return np.concatenate(each(len(values), CHUNK, lambda here: _nearest(values[here]))).reshape(
        x.shape
    )


def _nearest(x: F32) -> U8:
    """`to_e4m3` of values that caches hold."""
    magnitude = np.minimum(np.abs(x), E4M3_MAX)
    above = np.searchsorted(_E4M3, magnitude).clip(1, 126)
    below = above - 1
    to_above, to_below = _E4M3[above] - magnitude, magnitude - _E4M3[below]
    up = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    codes = np.where(up, above, below).astype(np.uint8)
    return np.asarray(codes | np.signbit(x).astype(np.uint8) << 7, np.uint8)
