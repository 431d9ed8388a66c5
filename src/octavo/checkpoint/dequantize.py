"""Block formats as floats: the plain reference beside the native packers, vectorised over blocks.

Layouts and formulas: ggml's `ggml-common.h`. Each function takes `[blocks, bytes]` and gives
`[blocks, elements]` in fp32, computed with one rounding per operation.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from octavo.checkpoint.base import Tensor, TensorType
from octavo.checkpoint.grouped import Codes, Grouped

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]

IQ4_NL_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)

# Twice what the codes stand for: a scale's exponent is one less for it.
MXFP4_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)


def _half(b: U8, at: int) -> F32:
    return np.ascontiguousarray(b[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(qs: U8) -> U8:
    return np.concatenate([qs & 15, qs >> 4], axis=1)


def _fifth(qh: U8) -> U8:
    return np.unpackbits(qh, axis=1, bitorder="little") * np.uint8(16)


def _q4_0(b: U8) -> F32:
    return _half(b, 0) * (_nibbles(b[:, 2:]).astype(np.float32) - 8)


def _q4_1(b: U8) -> F32:
    return _half(b, 0) * _nibbles(b[:, 4:]).astype(np.float32) + _half(b, 2)


def _q5_0(b: U8) -> F32:
    return _half(b, 0) * ((_nibbles(b[:, 6:]) | _fifth(b[:, 2:6])).astype(np.float32) - 16)


def _q5_1(b: U8) -> F32:
    return _half(b, 0) * (_nibbles(b[:, 8:]) | _fifth(b[:, 4:8])).astype(np.float32) + _half(b, 2)


def _q8_0(b: U8) -> F32:
    return _half(b, 0) * np.ascontiguousarray(b[:, 2:]).view(np.int8).astype(np.float32)


def _k_scales(s: U8) -> tuple[F32, F32]:
    """Unpacks twelve bytes of 6-bit fields to scales and minima, `[blocks, 8]` each."""
    low, mid, high = s[:, 0:4], s[:, 4:8], s[:, 8:12]
    scale = np.concatenate([low & 63, (high & 15) | (low >> 6) << 4], axis=1)
    minimum = np.concatenate([mid & 63, (high >> 4) | (mid >> 6) << 4], axis=1)
    return scale.astype(np.float32), minimum.astype(np.float32)


def _k_nibbles(qs: U8) -> U8:
    pairs = qs.reshape(-1, 4, 1, 32)
    return np.concatenate([pairs & 15, pairs >> 4], axis=2).reshape(-1, 8, 32)


def _k_values(b: U8, q: U8) -> F32:
    scale, minimum = _k_scales(b[:, 4:16])
    d, m = _half(b, 0) * scale, _half(b, 2) * minimum
    return (d[:, :, None] * q.astype(np.float32) - m[:, :, None]).reshape(len(b), 256)


def _q4_k(b: U8) -> F32:
    return _k_values(b, _k_nibbles(b[:, 16:]))


def _q5_k_codes(b: U8) -> U8:
    bits = np.unpackbits(b[:, 16:48], axis=1, bitorder="little").reshape(-1, 32, 8)
    return np.asarray(_k_nibbles(b[:, 48:]) | bits.transpose(0, 2, 1) * np.uint8(16), np.uint8)


def _q5_k(b: U8) -> F32:
    return _k_values(b, _q5_k_codes(b))


def _q6_bits(b: U8) -> U8:
    low = b[:, :128].reshape(-1, 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    shift = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    high = b[:, 128:192].reshape(-1, 2, 1, 32) >> shift & 3
    return np.asarray((low | high << 4).reshape(-1, 16, 16), np.uint8)


def _q6_k(b: U8) -> F32:
    q = _q6_bits(b).astype(np.float32) - 32
    scale = np.ascontiguousarray(b[:, 192:208]).view(np.int8).astype(np.float32)
    return ((_half(b, 208) * scale)[:, :, None] * q).reshape(-1, 256)


def _q2_bits(qs: U8) -> U8:
    shift = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    return np.asarray(qs.reshape(-1, 2, 1, 32) >> shift & 3, np.uint8).reshape(-1, 16, 16)


def _q2_k(b: U8) -> F32:
    scale, minimum = (b[:, :16] & 15).astype(np.float32), (b[:, :16] >> 4).astype(np.float32)
    d, m = _half(b, 80) * scale, _half(b, 82) * minimum
    q = _q2_bits(b[:, 16:80]).astype(np.float32)
    return (d[:, :, None] * q - m[:, :, None]).reshape(-1, 256)


def _q3_bits(b: U8) -> tuple[U8, F32]:
    """Codes and scales."""
    low, s = _q2_bits(b[:, 32:96]), b[:, 96:108]
    bits = np.unpackbits(b[:, :32], axis=1, bitorder="little").reshape(-1, 32, 8)
    high = bits.transpose(0, 2, 1).reshape(-1, 16, 16)
    shift = np.array([0, 2, 4, 6], np.uint8).reshape(1, 4, 1)
    top = (s[:, None, 8:] >> shift & 3).reshape(-1, 16)
    scale = (np.concatenate([s[:, :8] & 15, s[:, :8] >> 4], axis=1) | top << 4).astype(np.float32)
    return np.asarray(low | high << 2, np.uint8), scale


def _q3_k(b: U8) -> F32:
    codes, scale = _q3_bits(b)
    d = _half(b, 108) * (scale - 32)
    q = codes.astype(np.float32) - 4
    return np.asarray(d[:, :, None] * q, np.float32).reshape(-1, 256)


def _iq4_nl(b: U8) -> F32:
    return _half(b, 0) * IQ4_NL_VALUES[_nibbles(b[:, 2:])]


def _mxfp4(b: U8) -> F32:
    scale = np.ldexp(np.float32(1), b[:, :1].astype(np.int32) - 128)
    return scale.astype(np.float32) * MXFP4_VALUES[_nibbles(b[:, 1:])]


_BLOCKS: dict[TensorType, Callable[[U8], F32]] = {
    TensorType.Q4_0: _q4_0,
    TensorType.Q4_1: _q4_1,
    TensorType.Q5_0: _q5_0,
    TensorType.Q5_1: _q5_1,
    TensorType.Q8_0: _q8_0,
    TensorType.IQ4_NL: _iq4_nl,
    TensorType.MXFP4: _mxfp4,
    TensorType.Q2_K: _q2_k,
    TensorType.Q3_K: _q3_k,
    TensorType.Q4_K: _q4_k,
    TensorType.Q5_K: _q5_k,
    TensorType.Q6_K: _q6_k,
}


# Blocks on even steps in groups of 32, as what Grouped tensors hold: codes, scales, minima.
_EVEN: dict[TensorType, tuple[TensorType, Callable[[U8], Codes]]] = {
    TensorType.Q4_0: (TensorType.INT4, lambda b: Codes(_nibbles(b[:, 2:]), _half(b, 0))),
    TensorType.Q4_1: (
        TensorType.INT4_MIN, lambda b: Codes(_nibbles(b[:, 4:]), _half(b, 0), _half(b, 2)),
    ),
    TensorType.Q5_0: (
        TensorType.INT8,  # of which the middle is 128 instead of 16
        lambda b: Codes((_nibbles(b[:, 6:]) | _fifth(b[:, 2:6])) + np.uint8(112), _half(b, 0)),
    ),
    TensorType.Q5_1: (
        TensorType.INT8_MIN,
        lambda b: Codes(_nibbles(b[:, 8:]) | _fifth(b[:, 4:8]), _half(b, 0), _half(b, 2)),
    ),
    TensorType.Q8_0: (TensorType.INT8, lambda b: Codes(b[:, 2:] ^ np.uint8(128), _half(b, 0))),
    TensorType.Q4_K: (TensorType.INT4_MIN, lambda b: _k_codes(b, _k_nibbles(b[:, 16:]))),
    TensorType.Q5_K: (TensorType.INT8_MIN, lambda b: _k_codes(b, _q5_k_codes(b))),
}  # fmt: skip


def _k_codes(b: U8, q: U8) -> Codes:
    scale, minimum = _k_scales(b[:, 4:16])
    return Codes(q, _half(b, 0) * scale, -(_half(b, 2) * minimum))


def block_codes(tensor: Tensor) -> tuple[TensorType, Codes] | None:
    """A matrix of blocks on even steps as codes, scales and minima of groups of 32 columns, and the
    type of Grouped tensors that says what they mean. None for other types."""
    if tensor.type not in _EVEN:
        return None
    kind, read = _EVEN[tensor.type]
    c = read(tensor.raw().reshape(-1, tensor.type.block[1]))
    rows, columns = tensor.shape
    minima = None if c.minima is None else c.minima.reshape(rows, -1)
    return kind, Codes(c.codes.reshape(rows, columns), c.scales.reshape(rows, -1), minima)


def _q6_k_codes(b: U8) -> Codes:
    scale = np.ascontiguousarray(b[:, 192:208]).view(np.int8).astype(np.float32)
    return Codes(_q6_bits(b) + np.uint8(96), _half(b, 208) * scale)


def _q3_k_codes(b: U8) -> Codes:
    q, scale = _q3_bits(b)
    return Codes(q + np.uint8(4), _half(b, 108) * (scale - 32))


def _q2_k_codes(b: U8) -> Codes:
    scale, minimum = (b[:, :16] & 15).astype(np.float32), (b[:, :16] >> 4).astype(np.float32)
    return Codes(_q2_bits(b[:, 16:80]), _half(b, 80) * scale, -(_half(b, 82) * minimum))


def _iq4_nl_codes(b: U8) -> Codes:
    return Codes(_nibbles(b[:, 2:]), _half(b, 0), table=IQ4_NL_VALUES)


def _mxfp4_codes(b: U8) -> Codes:
    scale = np.ldexp(np.float32(1), b[:, :1].astype(np.int32) - 128).astype(np.float32)
    return Codes(_nibbles(b[:, 1:]), scale, table=MXFP4_VALUES)


_UNEVEN: dict[TensorType, Callable[[U8], Codes]] = {
    TensorType.Q6_K: _q6_k_codes,  # as INT8
    TensorType.Q3_K: _q3_k_codes,  # as INT4
    TensorType.Q2_K: _q2_k_codes,  # as INT4_MIN
    TensorType.IQ4_NL: _iq4_nl_codes,  # as TABLE4
    TensorType.MXFP4: _mxfp4_codes,
}


def uneven_codes(tensor: Tensor) -> Codes:
    """A matrix of the other blocks as codes: in groups of 16 columns (Q6_K as INT8, Q3_K as INT4,
    Q2_K as INT4_MIN), or with a table and groups of 32."""
    c = _UNEVEN[tensor.type](tensor.raw().reshape(-1, tensor.type.block[1]))
    rows, columns = tensor.shape
    minima = None if c.minima is None else c.minima.reshape(rows, -1)
    return Codes(c.codes.reshape(rows, columns), c.scales.reshape(rows, -1), minima, c.table)


def dequantize(tensor: Tensor) -> F32:
    """A tensor's values in fp32 and its own shape."""
    if isinstance(tensor, Grouped):
        return tensor.values()
    if tensor.type not in _BLOCKS:
        return tensor.vector()
    return decoded(tensor.raw(), tensor.type).reshape(tensor.shape)


def decoded(data: U8, kind: TensorType) -> F32:
    """What blocks stand for, `[blocks, elements]`."""
    blocks = np.ascontiguousarray(data).reshape(-1, kind.block[1])
    return _BLOCKS[kind](blocks).astype(np.float32, copy=False)
