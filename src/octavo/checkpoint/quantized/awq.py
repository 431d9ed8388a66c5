"""AWQ, version gemm: words run along the outputs, eight nibbles each in an order of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.checkpoint.base import FLOATS, Stored, TensorType
from octavo.checkpoint.grouped import Grouped
from octavo.checkpoint.quantized.bits import U8, unpack
from octavo.checkpoint.quantized.module import Module
from octavo.errors import Unsupported

ENDINGS = ("qweight", "qzeros", "scales")
KEY = "qweight"
PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # where in its word the nibble of output j lies


def _columns(words: Stored) -> U8:
    """`[inputs, outputs / 8]` words -> `[outputs, inputs]` codes."""
    rows, count = words.shape
    nibbles = unpack(words.array(), 4, count * 8).reshape(rows, count, 8)
    codes: npt.NDArray[np.uint8] = nibbles[:, :, PLACES].reshape(rows, count * 8)
    return codes.T


def read(m: Module, config: dict[str, Any]) -> Grouped:
    """Raises CheckpointError, or Unsupported for other versions."""
    version, bits = config.get("version", "gemm"), config.get("bits", 4)
    if str(version).lower() != "gemm" or bits != 4:
        raise Unsupported(f"AWQ version {str(version)[:20]!r} with {str(bits)[:20]} bits")
    qweight = m.get("qweight", TensorType.I32)
    inputs, outputs = qweight.shape[0], qweight.shape[1] * 8
    groups = m.get("scales", *FLOATS).shape[0]
    scales = np.ascontiguousarray(m.floats("scales", (groups, outputs)).T)
    group = m.group(inputs, groups, config.get("group_size"))
    zeros = None
    if m.has("qzeros"):
        qzeros = m.get("qzeros", TensorType.I32)
        if qzeros.shape != (groups, outputs // 8):
            raise m.mismatch("qzeros", qzeros.shape, (groups, outputs // 8))
        zeros = _columns(qzeros).astype(np.int32)

    def codes() -> U8:
        return _columns(qweight)

    return m.integers((outputs, inputs), 4, group, codes, scales, zeros)
