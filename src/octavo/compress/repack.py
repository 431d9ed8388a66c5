"""Quantized matrices moved from one format's grid to another's without a change of any value, but
for the last bit where MLX's minima stand for zero points and scales are fp32.

Where a format cannot hold a grid exactly, the answer is None: its group is another, a minimum is no
whole number of steps, or a scale is none of the format's numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.checkpoint.base import Tensor, TensorType
from octavo.checkpoint.dequantize import block_codes
from octavo.checkpoint.grouped import Grouped
from octavo.compress import layouts
from octavo.compress.fit import F32, Affine
from octavo.compress.grids import Grid, Quantized, ScaleType, rounded
from octavo.compress.packing import fifth_bits, half, nibbles
from octavo.compress.recipes import Layout

U8 = npt.NDArray[np.uint8]
SCALES: tuple[ScaleType, ...] = ("f16", "bf16", "f32")  # the first that holds all of a matrix
MLX_GROUPS = (32, 64, 128)
FIVE_BITS = 31


def _middle(bits: int) -> int:
    return 1 << (bits - 1)


@dataclass(frozen=True)
class Uniform:
    """Codes on even steps: scale * code + minimum, or scale * (code - middle) without minima.

    codes `[rows, columns]`; scales, minima `[rows, groups]`. bits: 4 or 8.
    """

    bits: int
    codes: U8
    scales: F32
    minima: F32 | None

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return int(self.codes.shape[1] // self.scales.shape[1])

    @property
    def middle(self) -> int:
        return _middle(self.bits)

    def picked(self, rows: npt.NDArray[Any] | None) -> Uniform:
        """The same with its rows in another order."""
        if rows is None:
            return self
        minima = None if self.minima is None else self.minima[rows]
        return Uniform(self.bits, self.codes[rows], self.scales[rows], minima)


def uniform(tensor: Tensor) -> Uniform | None:
    """A tensor's grid; None for floats, other grids, groups below 32, and permuted columns."""
    if len(tensor.shape) != 2:
        return None
    if isinstance(tensor, Grouped):
        stored = tensor.type if tensor.order is None else None
        codes = tensor.read() if stored in _BITS else None
        wide = stored
    else:
        found = block_codes(tensor)
        wide, codes = found or (None, None)
    if wide is None or codes is None or wide not in _BITS:
        return None
    columns, groups = tensor.shape[1], codes.scales.shape[1]
    if columns % groups or columns // groups % 32:
        return None
    scales, minima = np.asarray(codes.scales, np.float32), codes.minima
    if minima is not None and np.array_equal(minima, scales * np.float32(-_middle(_BITS[wide]))):
        minima = None
    return Uniform(_BITS[wide], codes.codes, scales, minima)


_BITS = {
    TensorType.INT4: 4, TensorType.INT4_MIN: 4, TensorType.INT8: 8, TensorType.INT8_MIN: 8,
}  # fmt: skip


def _scale_type(*values: F32) -> ScaleType | None:
    """The first type that holds all of these."""
    return next((k for k in SCALES if all(np.array_equal(rounded(v, k), v) for v in values)), None)


def grid_of(u: Uniform, layout: Layout) -> Grid | None:
    """The grid on which a layout holds a matrix exactly; None if there is none."""
    if layout == "mlx":
        minima = _minima(u)
        held = _scale_type(u.scales, minima)
        return Grid(u.bits, u.group, False, held) if held and u.group in MLX_GROUPS else None
    held = _scale_type(u.scales)
    zeros = _zeros(u)
    if zeros is None or (held != "f16" and layout != "compressed-tensors") or held is None:
        return None
    symmetric = u.minima is None
    if layout == "awq":
        return Grid(4, u.group, False, held) if u.bits == 4 and zeros.max() <= 15 else None
    return Grid(u.bits, u.group, symmetric, held)


def _minima(u: Uniform) -> F32:
    return u.scales * np.float32(-u.middle) if u.minima is None else u.minima


def _zeros(u: Uniform) -> npt.NDArray[np.int32] | None:
    """Whole zero points from 1 to the largest code that give the minima exactly, or None."""
    if u.minima is None:
        return np.full(u.scales.shape, u.middle, np.int32)
    one = np.ones_like(u.scales)
    wanted = np.divide(-u.minima, u.scales, out=one, where=u.scales != 0)
    zeros = np.rint(wanted)
    whole = (zeros >= 1) & (zeros < 2 * u.middle) & (-zeros * u.scales == u.minima)
    return zeros.astype(np.int32) if whole.all() else None


def folder_tensors(u: Uniform, layout: Layout, grid: Grid) -> tuple[layouts.Tensors, F32]:
    """The tensors of a layout that `grid_of` has found a grid of, and the values they stand for."""
    if layout == "mlx":
        minima = _minima(u)
        codes = u.codes.reshape(-1, u.group).astype(np.int32)
        affine = Affine(u.scales.reshape(-1), minima.reshape(-1), codes)
        values = codes.astype(np.float32)
        values *= affine.scale[:, None]
        values += affine.minimum[:, None]
        shape = (u.codes.shape[0], u.codes.shape[1])
        return layouts.mlx(affine, shape, grid), values.reshape(shape)
    zeros = _zeros(u)
    assert zeros is not None
    q = Quantized(grid, u.codes, u.scales, zeros)
    return layouts.integers(layout, q), q.values()


# -- GGUF -------------------------------------------------------------------------------------


def block_type(u: Uniform) -> TensorType | None:
    """The GGUF type whose blocks hold a matrix exactly; None if there is none."""
    minima = () if u.minima is None else (u.minima,)
    if _scale_type(u.scales, *minima) != "f16":
        return None
    if u.minima is None:
        return TensorType.Q4_0 if u.bits == 4 else TensorType.Q8_0
    if u.bits == 4:
        return TensorType.Q4_1
    return TensorType.Q5_1 if u.codes.max(initial=0) <= FIVE_BITS else None


def blocks(u: Uniform, kind: TensorType) -> U8:
    """The bytes `[rows, bytes a row]` of a type that `block_type` has found."""
    each = u.group // 32
    d = half(np.repeat(u.scales, each, axis=1).reshape(-1))[0]
    codes = u.codes.reshape(-1, 32).astype(np.int32)
    if kind is TensorType.Q8_0:
        parts = [d, (codes - 128).astype(np.int8).view(np.uint8)]
    elif kind is TensorType.Q4_0:
        parts = [d, nibbles(codes)]
    else:
        assert u.minima is not None
        m = half(np.repeat(u.minima, each, axis=1).reshape(-1))[0]
        fifth = [fifth_bits(codes)] if kind is TensorType.Q5_1 else []
        parts = [d, m, *fifth, nibbles(codes & 15)]
    return np.concatenate(parts, axis=1).reshape(u.codes.shape[0], -1)
