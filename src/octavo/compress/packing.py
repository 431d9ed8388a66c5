"""Codes and scales as the bytes of block formats."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.checkpoint.base import TensorType
from octavo.compress.fit import F32, I32

U8 = npt.NDArray[np.uint8]


def half(x: F32) -> tuple[U8, F32]:
    """fp16 bytes `[n, 2]` of `[n]`, and the values they stand for, finite."""
    rounded = np.clip(x, -65504, 65504).astype(np.float16)
    return rounded.view(np.uint8).reshape(-1, 2), rounded.astype(np.float32)


def nibbles(codes: I32) -> U8:
    """Codes of four bits `[n, 32]`, the first half of a block in the low ones."""
    c = codes.astype(np.uint8)
    return np.asarray(c[:, :16] & 15 | c[:, 16:] << 4, np.uint8)


def fifth_bits(codes: I32) -> U8:
    """The fifth bits of `[n, 32]` codes as four bytes."""
    return np.packbits((codes >> 4 & 1).astype(np.uint8), axis=1, bitorder="little")


def pairs_of_halves(codes: I32) -> U8:
    """Low four bits of `[n, 256]` codes: each 32 bytes hold 64, the first 32 in the low nibbles."""
    c = (codes & 15).astype(np.uint8).reshape(-1, 4, 2, 32)
    return np.asarray(c[:, :, 0] | c[:, :, 1] << 4, np.uint8).reshape(-1, 128)


def bit_planes(codes: I32, bit: int) -> U8:
    """One bit of `[n, 256]` codes: byte j has those of elements j, j + 32, ... from bit 0 on."""
    bits = (codes >> bit & 1).astype(np.uint8).reshape(-1, 8, 32).transpose(0, 2, 1)
    return np.packbits(bits, axis=2, bitorder="little").reshape(-1, 32)


def stack(a: U8, b: U8, c: U8, d: U8) -> U8:
    """Four arrays of two bits in one of bytes, the first lowest."""
    return np.asarray(a | b << 2 | c << 4 | d << 6, np.uint8)


def two_bits(codes: I32) -> U8:
    """Low two bits of `[n, 256]` codes: byte j of each 32 has those of j, j + 32, ..."""
    c = (codes & 3).astype(np.uint8).reshape(-1, 2, 4, 32)
    return stack(c[:, :, 0], c[:, :, 1], c[:, :, 2], c[:, :, 3]).reshape(-1, 64)


def six_bit_pairs(scales: I32, minima: I32) -> U8:
    """Eight scales and eight minima of six bits, `[n, 8]` each, as twelve bytes."""
    s, m = scales.astype(np.uint8), minima.astype(np.uint8)
    first = s[:, :4] | s[:, 4:] >> 4 << 6
    second = m[:, :4] | m[:, 4:] >> 4 << 6
    third = s[:, 4:] & 15 | (m[:, 4:] & 15) << 4
    return np.concatenate([first, second, third], axis=1)


def six_bits(scales: I32) -> U8:
    """Sixteen numbers of six bits `[n, 16]` as twelve bytes: nibbles, then pairs of high bits."""
    s = scales.astype(np.uint8)
    low = s[:, :8] & 15 | (s[:, 8:] & 15) << 4
    high = np.asarray(s >> 4, np.uint8).reshape(-1, 4, 4)
    top = stack(high[:, 0], high[:, 1], high[:, 2], high[:, 3])
    return np.concatenate([low, top], axis=1)


def as_floats(x: F32, kind: TensorType) -> npt.NDArray[Any]:
    """The nearest F32, F16 or BF16; BF16 as its bits, uint16."""
    if kind is TensorType.BF16:
        bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
        nearest = bits >> 16
        nearest &= np.uint32(1)
        nearest += np.uint32(0x7FFF)
        nearest += bits
        nearest >>= np.uint32(16)
        return nearest.astype(np.uint16)
    return x.astype(np.float16 if kind is TensorType.F16 else np.float32)
