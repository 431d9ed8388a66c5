"""Block formats as floats: the plain reference beside the native packers, vectorised over blocks.

Layouts and formulas: ggml's `ggml-common.h`. Each reader takes `[blocks, bytes]` and gives codes,
`[blocks, elements]` in any shape, with scales and minima `[blocks, groups]`. What they stand for is
computed in fp32 with one rounding per operation.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from octavo.checkpoint.base import Tensor, TensorType
from octavo.checkpoint.grouped import ZERO, Codes, Grouped

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]

IQ4_NL_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)

# Twice what the codes stand for: a scale's exponent is one less for it.
MXFP4_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)


def _half(b: U8, at: int) -> F32:
    return np.ascontiguousarray(b[:, at : at + 2]).view(np.float16).astype(np.float32)


def _signed(b: U8) -> F32:
    return np.ascontiguousarray(b).view(np.int8).astype(np.float32)


def _nibbles(qs: U8) -> U8:
    return np.concatenate([qs & 15, qs >> 4], axis=1)


def _five_bits(qh: U8, qs: U8) -> U8:
    return _nibbles(qs) | np.unpackbits(qh, axis=1, bitorder="little") * np.uint8(16)


# -- groups of 32 -----------------------------------------------------------------------------


def _q4_0(b: U8) -> Codes:
    return Codes(_nibbles(b[:, 2:]), _half(b, 0))


def _q4_1(b: U8) -> Codes:
    return Codes(_nibbles(b[:, 4:]), _half(b, 0), _half(b, 2))


def _q5_0(b: U8) -> Codes:
    return Codes(_five_bits(b[:, 2:6], b[:, 6:]) + np.uint8(128 - 16), _half(b, 0))


def _q5_1(b: U8) -> Codes:
    return Codes(_five_bits(b[:, 4:8], b[:, 8:]), _half(b, 0), _half(b, 2))


def _q8_0(b: U8) -> Codes:
    return Codes(b[:, 2:] ^ np.uint8(128), _half(b, 0))


def _iq4_nl(b: U8) -> Codes:
    return Codes(_nibbles(b[:, 2:]), _half(b, 0), table=IQ4_NL_VALUES)


def _mxfp4(b: U8) -> Codes:
    scale = np.ldexp(np.float32(1), b[:, :1].astype(np.int32) - 128).astype(np.float32)
    return Codes(_nibbles(b[:, 1:]), scale, table=MXFP4_VALUES)


def _k_nibbles(qs: U8) -> U8:
    pairs = qs.reshape(-1, 4, 1, 32)
    return np.concatenate([pairs & 15, pairs >> 4], axis=2).reshape(-1, 8, 32)


def _k_codes(b: U8, q: U8) -> Codes:
    """With twelve bytes of 6-bit fields, eight scales and eight minima."""
    low, mid, high = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scale = np.concatenate([low & 63, (high & 15) | (low >> 6) << 4], axis=1).astype(np.float32)
    minimum = np.concatenate([mid & 63, (high >> 4) | (mid >> 6) << 4], axis=1).astype(np.float32)
    return Codes(q, _half(b, 0) * scale, -(_half(b, 2) * minimum))


def _q4_k(b: U8) -> Codes:
    return _k_codes(b, _k_nibbles(b[:, 16:]))


def _q5_k(b: U8) -> Codes:
    bits = np.unpackbits(b[:, 16:48], axis=1, bitorder="little").reshape(-1, 32, 8)
    fifth = bits.transpose(0, 2, 1) * np.uint8(16)
    return _k_codes(b, np.asarray(_k_nibbles(b[:, 48:]) | fifth, np.uint8))


# -- groups of 16 -----------------------------------------------------------------------------


def _two_bits(qs: U8) -> U8:
    shift = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    return np.asarray(qs.reshape(-1, 2, 1, 32) >> shift & 3, np.uint8).reshape(-1, 16, 16)


def _q6_k(b: U8) -> Codes:
    pairs = b[:, :128].reshape(-1, 2, 1, 64)
    low = np.concatenate([pairs & 15, pairs >> 4], axis=2).reshape(-1, 16, 16)
    q = np.asarray(low | _two_bits(b[:, 128:192]) << 4, np.uint8)
    return Codes(q + np.uint8(128 - 32), _half(b, 208) * _signed(b[:, 192:208]))


def _q3_k(b: U8) -> Codes:
    bits = np.unpackbits(b[:, :32], axis=1, bitorder="little").reshape(-1, 32, 8)
    high = bits.transpose(0, 2, 1).reshape(-1, 16, 16)
    q, s = np.asarray(_two_bits(b[:, 32:96]) | high << 2, np.uint8), b[:, 96:108]
    shift = np.array([0, 2, 4, 6], np.uint8).reshape(1, 4, 1)
    top = (s[:, None, 8:] >> shift & 3).reshape(-1, 16)
    scale = (np.concatenate([s[:, :8] & 15, s[:, :8] >> 4], axis=1) | top << 4).astype(np.float32)
    return Codes(q + np.uint8(8 - 4), _half(b, 108) * (scale - 32))


def _q2_k(b: U8) -> Codes:
    scale, minimum = (b[:, :16] & 15).astype(np.float32), (b[:, :16] >> 4).astype(np.float32)
    return Codes(_two_bits(b[:, 16:80]), _half(b, 80) * scale, -(_half(b, 82) * minimum))


# -- all of them ------------------------------------------------------------------------------

# The type of Grouped tensors that says what codes mean, and what reads them.
_READERS: dict[TensorType, tuple[TensorType, Callable[[U8], Codes]]] = {
    TensorType.Q4_0: (TensorType.INT4, _q4_0),
    TensorType.Q4_1: (TensorType.INT4_MIN, _q4_1),
    TensorType.Q5_0: (TensorType.INT8, _q5_0),
    TensorType.Q5_1: (TensorType.INT8_MIN, _q5_1),
    TensorType.Q8_0: (TensorType.INT8, _q8_0),
    TensorType.IQ4_NL: (TensorType.TABLE4, _iq4_nl),
    TensorType.MXFP4: (TensorType.TABLE4, _mxfp4),
    TensorType.Q2_K: (TensorType.INT4_MIN, _q2_k),
    TensorType.Q3_K: (TensorType.INT4, _q3_k),
    TensorType.Q4_K: (TensorType.INT4_MIN, _q4_k),
    TensorType.Q5_K: (TensorType.INT8_MIN, _q5_k),
    TensorType.Q6_K: (TensorType.INT8, _q6_k),
}
_UNEVEN = (
    TensorType.Q2_K, TensorType.Q3_K, TensorType.Q6_K, TensorType.IQ4_NL, TensorType.MXFP4,
)  # fmt: skip


def block_codes(tensor: Tensor) -> tuple[TensorType, Codes] | None:
    """A matrix of blocks on even steps as codes, scales and minima of groups of 32 columns, and the
    type of Grouped tensors that says what they mean. None for other types."""
    if tensor.type not in _READERS or tensor.type in _UNEVEN:
        return None
    return _READERS[tensor.type][0], matrix_codes(tensor)


def matrix_codes(tensor: Tensor) -> Codes:
    """A matrix of blocks as codes `[rows, columns]`, scales and minima `[rows, groups]`: groups of
    32 columns, or 16 (Q6_K as INT8, Q3_K as INT4, Q2_K as INT4_MIN)."""
    c = _READERS[tensor.type][1](tensor.raw().reshape(-1, tensor.type.block[1]))
    rows, columns = tensor.shape
    minima = None if c.minima is None else c.minima.reshape(rows, -1)
    return Codes(c.codes.reshape(rows, columns), c.scales.reshape(rows, -1), minima, c.table)


def dequantize(tensor: Tensor) -> F32:
    """A tensor's values in fp32 and its own shape."""
    if isinstance(tensor, Grouped):
        return tensor.values()
    if tensor.type not in _READERS:
        return tensor.vector()
    return decoded(tensor.raw(), tensor.type).reshape(tensor.shape)


def decoded(data: U8, kind: TensorType) -> F32:
    """What blocks stand for, `[blocks, elements]`."""
    meaning, read = _READERS[kind]
    c = read(np.ascontiguousarray(data).reshape(-1, kind.block[1]))
    codes, scales = c.codes.reshape(*c.scales.shape, -1), c.scales[..., None]
    values = codes.astype(np.float32) if c.table is None else c.table[codes]
    if meaning in ZERO:
        values -= np.float32(ZERO[meaning])
    values *= scales
    if c.minima is not None:
        values += c.minima[..., None]
    return values.reshape(-1, kind.block[0])
