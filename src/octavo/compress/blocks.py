"""Encoders of GGUF's block formats: `[rows, columns]` fp32 to the bytes that models store.

Layouts: ggml's `ggml-common.h`; `checkpoint/dequantize.py` reads them. Scales are rounded to what
the format holds before the codes are chosen, so that codes make up for their rounding. `importance`
weighs columns (llama.cpp's imatrix: mean squares of a layer's inputs); without one, larger weights
count for more, as llama.cpp does it: sqrt(mean square) + |x|.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from octavo.checkpoint.base import TensorType
from octavo.checkpoint.dequantize import IQ4_NL_VALUES, MXFP4_VALUES
from octavo.compress.fit import F32, affine, codes_of, divide, nearest, symmetric, tabled
from octavo.compress.grids import check_finite
from octavo.compress.packing import U8, fifth_bits, half, nibbles
from octavo.compress.pieces import each
from octavo.compress.superblocks import q2_k, q3_k, q4_k, q5_k, q6_k
from octavo.errors import UsageError

CHUNK = 1 << 15  # weights that are searched at a time: what caches hold


def _q8_0(x: F32, w: F32) -> U8:
    d, scale = half(np.abs(x).max(axis=1) / np.float32(127))
    codes = codes_of(x, scale, -127, 127)
    return np.concatenate([d, codes.astype(np.int8).view(np.uint8)], axis=1)


def _q4_0(x: F32, w: F32) -> U8:
    d, scale = half(symmetric(x, w, -8, 7).scale)
    return np.concatenate([d, nibbles(codes_of(x, scale, -8, 7) + 8)], axis=1)


def _q5_0(x: F32, w: F32) -> U8:
    d, scale = half(symmetric(x, w, -16, 15).scale)
    codes = codes_of(x, scale, -16, 15) + 16
    return np.concatenate([d, fifth_bits(codes), nibbles(codes)], axis=1)


def _q4_1(x: F32, w: F32) -> U8:
    grid = affine(x, w, 15)
    (d, scale), (m, minimum) = half(grid.scale), half(grid.minimum)
    return np.concatenate([d, m, nibbles(codes_of(x - minimum[:, None], scale, 0, 15))], axis=1)


def _q5_1(x: F32, w: F32) -> U8:
    grid = affine(x, w, 31)
    (d, scale), (m, minimum) = half(grid.scale), half(grid.minimum)
    codes = codes_of(x - minimum[:, None], scale, 0, 31)
    return np.concatenate([d, m, fifth_bits(codes), nibbles(codes)], axis=1)


def _iq4_nl(x: F32, w: F32) -> U8:
    d, scale = half(tabled(x, w, IQ4_NL_VALUES).scale)
    return np.concatenate([d, nibbles(nearest(divide(x, scale[:, None]), IQ4_NL_VALUES))], axis=1)


def _mxfp4(x: F32, w: F32) -> U8:
    order = np.argsort(MXFP4_VALUES[:16], kind="stable")
    table = MXFP4_VALUES[order]  # twice the values; -0 and 0 are equal, either will do
    widest = np.abs(x).max(axis=1)
    exponent = np.floor(np.log2(np.maximum(widest, np.float32(2) ** -126))).astype(np.int32) - 2
    best = np.zeros(x.shape, np.int32)
    chosen, error = np.zeros(len(x), np.int32), np.full(len(x), np.inf, np.float32)
    for shift in (0, 1):  # the largest value is 6 = 1.5 * 2 ** 2, so one more may lose less
        biased = np.clip(exponent + 127 + shift, 0, 254)
        scale = np.ldexp(np.float32(1), biased - 128).astype(np.float32)[:, None]
        codes = nearest(x / scale, table)
        this = (w * (x - scale * table[codes]) ** 2).sum(1)
        better = this < error
        chosen, error = np.where(better, biased, chosen), np.where(better, this, error)
        best = np.where(better[:, None], codes, best)
    return np.concatenate(
        [chosen.astype(np.uint8)[:, None], nibbles(order.astype(np.int32)[best])], axis=1
    )


_ENCODERS: dict[TensorType, Callable[[F32, F32], U8]] = {
    TensorType.Q4_0: _q4_0,
    TensorType.Q4_1: _q4_1,
    TensorType.Q5_0: _q5_0,
    TensorType.Q5_1: _q5_1,
    TensorType.Q8_0: _q8_0,
    TensorType.IQ4_NL: _iq4_nl,
    TensorType.MXFP4: _mxfp4,
    TensorType.Q2_K: q2_k,
    TensorType.Q3_K: q3_k,
    TensorType.Q4_K: q4_k,
    TensorType.Q5_K: q5_k,
    TensorType.Q6_K: q6_k,
}
ENCODED = tuple(_ENCODERS)


def encode(x: F32, kind: TensorType, importance: F32 | None = None) -> U8:
    """The bytes `[rows, bytes a row]` of `[rows, columns]` weights in a block format.

    importance: `[columns]`, none negative. Raises UsageError for rows that are not whole blocks,
    values that are not finite, and formats that have no encoder.
    """
    if kind not in _ENCODERS:
        raise UsageError(
            f"no encoder for {kind.name}; there are {', '.join(t.name for t in ENCODED)}"
        )
    elements, size = kind.block
    rows, columns = x.shape
    if columns % elements:
        raise UsageError(f"rows of {columns} are not whole {kind.name} blocks of {elements}")
    check_finite(x)
    x = np.ascontiguousarray(x, np.float32)
    rms = np.sqrt(np.mean(x.reshape(-1, elements) ** 2, axis=1, keepdims=True))
    blocks, out = x.reshape(-1, elements), np.empty((x.size // elements, size), np.uint8)
    scale = None
    if importance is not None:  # a block of which nothing matters is rounded all the same
        least = np.maximum(importance, np.float32(1e-12)).reshape(-1, elements)
        scale = np.tile(least, (rows, 1))

    def make(here: slice) -> None:
        part, spread = blocks[here], rms[here]
        if scale is None:
            w = spread + np.abs(part)
        else:
            w = scale[here] * np.sqrt(spread**2 + part**2)
        out[here] = _ENCODERS[kind](part, w.astype(np.float32))

    each(len(blocks), CHUNK // elements, make)
    return out.reshape(rows, -1)
