"""bitsandbytes: NF4 and FP4 with a scale for each block of a flattened matrix, and INT8 rows."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from octavo.checkpoint.base import TensorType
from octavo.checkpoint.grouped import Codes, Grouped
from octavo.checkpoint.quantized.bits import U8
from octavo.checkpoint.quantized.module import F32, Module
from octavo.errors import CheckpointError, Unsupported

STATE = "weight.quant_state.bitsandbytes__"
ENDINGS = (
    "weight", "SCB", "weight_format", "weight.absmax", "weight.quant_map", "weight.nested_absmax",
    "weight.nested_quant_map", STATE + "nf4", STATE + "fp4",
)  # fmt: skip
KEY = "weight"
INT8_STEP = np.float32(1 / 127)


def _state(m: Module) -> dict[str, Any]:
    ending = STATE + ("nf4" if m.has(STATE + "nf4") else "fp4")
    try:
        state = json.loads(m.get(ending, TensorType.U8, dims=(1,)).array().tobytes())
    except ValueError:
        state = None
    shape = state.get("shape") if isinstance(state, dict) else None
    sizes = list[Any]()
    if isinstance(shape, list) and len(shape) == 2:
        sizes = [*shape, state.get("blocksize"), state.get("nested_blocksize", 1)]
    if not sizes or not all(isinstance(n, int) and n > 0 for n in sizes):
        raise CheckpointError(f"{m.name[:80]}.{ending} does not say shape and block size")
    if not isinstance(state.get("nested_offset", 0.0), int | float):
        raise CheckpointError(f"{m.name[:80]}.{ending} has a nested_offset that is no number")
    return dict(state)


def _absmax(m: Module, state: dict[str, Any], count: int) -> F32:
    if not m.has("weight.nested_absmax"):
        return m.floats("weight.absmax", (count,))
    codes = m.get("weight.absmax", TensorType.U8, dims=(1,)).array()
    if codes.shape != (count,):
        raise m.mismatch("weight.absmax", codes.shape, (count,))
    size = state["nested_blocksize"]
    scales = m.floats("weight.nested_absmax", (-(-count // size),))
    table = m.floats("weight.nested_quant_map", (256,))
    values: F32 = table[codes] * np.repeat(scales, min(size, count))[:count]
    return values + np.float32(state.get("nested_offset", 0.0))


def _four_bits(m: Module) -> Grouped:
    state = _state(m)
    rows, columns = state["shape"]
    block = state["blocksize"]
    if columns % block or block % 32:
        raise Unsupported(
            f"{m.name[:80]}: rows of {columns} are not whole blocks of {block}",
            "blocks may not reach over the end of a row",
        )
    packed = m.get("weight", TensorType.U8, dims=(1, 2))
    if packed.nbytes * 2 != rows * columns:
        raise m.mismatch("weight", packed.shape, (rows * columns // 2, 1))
    table = m.floats("weight.quant_map", (16,))

    def read() -> Codes:
        data = packed.array().reshape(-1)
        codes = np.stack([data >> 4, data & 15], axis=1).reshape(rows, columns)
        scales = _absmax(m, state, rows * columns // block)
        return Codes(codes, scales.reshape(rows, -1), None, table)

    return m.grouped(TensorType.TABLE4, (rows, columns), block, read, 4)


def read(m: Module, config: dict[str, Any]) -> Grouped | None:
    """None for a weight that was left alone. Raises CheckpointError or Unsupported."""
    if m.has(STATE + "nf4") or m.has(STATE + "fp4"):
        return _four_bits(m)
    if m.stored["weight"].type is not TensorType.I8 or not m.has("SCB"):
        return None
    weight = m.get("weight", TensorType.I8)
    rows, columns = weight.shape
    scales = (m.floats("SCB", (rows,)) * INT8_STEP).reshape(rows, 1)

    def codes() -> U8:
        return weight.array().view(np.uint8) ^ np.uint8(128)

    return m.integers((rows, columns), 8, m.group(columns, 1, 0), codes, scales, None)
