"""Codes out of the words they are packed in: element i is bits [i*b, i*b + b) of a row."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]


def unpack(words: npt.NDArray[Any], bits: int, count: int) -> U8:
    """`[rows, words]` of 32-bit little-endian words -> `[rows, count]` codes of `bits` bits."""
    data = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        codes = data
    elif bits in (2, 4):
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        codes = (data[:, :, None] >> shifts & np.uint8((1 << bits) - 1)).reshape(len(data), -1)
    else:
        stream = np.unpackbits(data, axis=1, bitorder="little")
        whole = stream.shape[1] // bits * bits
        each = stream[:, :whole].reshape(len(data), -1, bits)
        codes = np.packbits(each, axis=2, bitorder="little")[:, :, 0]
    return codes[:, :count]
