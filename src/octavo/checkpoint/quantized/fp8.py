"""Eight-bit floats (e4m3) with a scale for the tensor, each row, or blocks of rows and columns."""

from __future__ import annotations

from typing import Any

import numpy as np

from octavo.checkpoint.base import FLOATS, TensorType
from octavo.checkpoint.grouped import Codes, Grouped
from octavo.checkpoint.quantized.module import F32, Module
from octavo.errors import CheckpointError

ENDINGS = ("weight", "weight_scale", "weight_scale_inv", "input_scale")
KEY = "weight"
SCALES = ("weight_scale_inv", "weight_scale")  # both are factors, whatever they are called
SCALE_BLOCK = 128


def _scales(m: Module, rows: int, columns: int, block: tuple[int, int]) -> tuple[F32, int]:
    """`[rows, groups]` scales, and the columns of a group."""
    ending = next((e for e in SCALES if m.has(e)), None)
    if ending is None:
        return np.ones((rows, 1), np.float32), m.group(columns, 1, 0)
    scales = m.get(ending, *FLOATS, dims=(0, 1, 2)).vector()
    if scales.size in (1, rows) and (scales.ndim < 2 or scales.shape[1] == 1):
        return np.broadcast_to(scales.reshape(-1, 1), (rows, 1)), m.group(columns, 1, 0)
    high, wide = block
    expected = (-(-rows // high), -(-columns // wide))
    if scales.shape != expected:
        raise m.mismatch(ending, scales.shape, expected)
    return np.repeat(scales, min(high, rows), axis=0)[:rows], m.group(columns, expected[1], wide)


def read_scaled(m: Module, block: object) -> Grouped:
    """An e4m3 weight with its scales; `block`: rows and columns that share one."""
    weight = m.get("weight", TensorType.FP8_E4M3)
    rows, columns = weight.shape
    sizes = block if isinstance(block, list) and len(block) == 2 else [SCALE_BLOCK, SCALE_BLOCK]
    if not all(isinstance(n, int) and n > 0 for n in sizes):
        raise CheckpointError(f"weight blocks of {str(sizes)[:40]}")
    scales, group = _scales(m, rows, columns, (sizes[0], sizes[1]))

    def read() -> Codes:
        codes = weight.array()
        if (codes & 127 == 127).any():
            raise CheckpointError(f"{m.name[:80]}.weight holds a NaN")
        return Codes(codes, scales)

    return m.grouped(TensorType.FP8, (rows, columns), group, read, 8)


def read(m: Module, config: dict[str, Any]) -> Grouped | None:
    """None for a weight in another type. Raises CheckpointError."""
    if m.stored["weight"].type is not TensorType.FP8_E4M3:
        return None
    return read_scaled(m, config.get("weight_block_size"))
