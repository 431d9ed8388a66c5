"""Matrices stored as codes with a scale for each group of columns, whatever the file calls them.

One type stands for GPTQ, AWQ, compressed-tensors, FP8, bitsandbytes and MLX: their importers say
how to read codes, scales and minima, and the value of a code is

    INT4, INT8          scale * (code - 8), scale * (code - 128)
    INT4_MIN, INT8_MIN  scale * code + minimum, or scale * (code - zero) where files have zeros
    TABLE4              scale * table[code]
    FP8                 scale * e4m3(code)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.checkpoint.base import Tensor, TensorType

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]

ZERO = {TensorType.INT4: 8, TensorType.INT8: 128}
WITH_MINIMUM = (TensorType.INT4_MIN, TensorType.INT8_MIN)


class Codes(NamedTuple):
    """codes `[rows, columns]`; scales, minima `[rows, groups]`; table `[16]`. zeros: the zero
    points `[rows, groups]`, where the file has them; minima are -scale * zero then."""

    codes: U8
    scales: F32
    minima: F32 | None = None
    table: F32 | None = None
    zeros: F32 | None = None


def e4m3(codes: U8) -> F32:
    """Eight-bit floats with four bits of exponent; 0x7f, their only NaN, reads as 480."""
    bits = (codes.astype(np.uint32) & 128) << 24 | (codes.astype(np.uint32) & 127) << 20
    return bits.view(np.float32) * np.float32(2.0**120)


@dataclass(frozen=True, slots=True)
class Grouped(Tensor):
    """columns: how many share a scale, a multiple of 32. stored: bytes in the file. bits: of a code
    there."""

    columns: int
    stored: int
    read: Callable[[], Codes] = field(repr=False)
    bits: int
    inputs: tuple[int, ...] | None = None

    @property
    def group(self) -> int:
        return self.columns

    @property
    def order(self) -> tuple[int, ...] | None:
        return self.inputs

    @property
    def nbytes(self) -> int:
        return self.stored

    def raw(self) -> U8:
        """Codes, scales, minima and table, concatenated."""
        return np.concatenate([part.reshape(-1).view(np.uint8) for part in _parts(self.read())])

    def values(self) -> F32:
        """The values in fp32, with columns in stored order. With zeros they are rounded once; with
        minima they would be rounded three times where scales are fp32."""
        c = self.read()
        scales = self._wide(c.scales)
        if self.type is TensorType.FP8:
            return scales * e4m3(c.codes)
        if c.table is not None:
            return scales * c.table[c.codes]
        codes = c.codes.astype(np.float32)
        if c.zeros is not None:
            return scales * (codes - self._wide(c.zeros))
        if c.minima is not None:
            return scales * codes + self._wide(c.minima)
        return scales * (codes - np.float32(ZERO[self.type]))

    def _wide(self, x: F32) -> F32:
        """Numbers of groups `[rows, groups]`, repeated for each column of a group."""
        return np.repeat(x, self.columns, axis=1)[:, : self.shape[1]]

    def rows(self, begin: int, end: int) -> Grouped:
        def read() -> Codes:
            c, cut = self.read(), slice(begin, end)
            minima, zeros = (None if x is None else x[cut] for x in (c.minima, c.zeros))
            return Codes(c.codes[cut], c.scales[cut], minima, c.table, zeros)

        name, _, shape = self._cut(begin, end)
        stored = self.stored * (end - begin) // self.shape[0]
        return replace(self, name=name, shape=shape, read=read, stored=stored)


def _parts(c: Codes) -> list[npt.NDArray[np.generic]]:
    whole = [c.codes, c.scales, c.minima, c.table]
    return [np.ascontiguousarray(part) for part in whole if part is not None]
