"""compressed-tensors: packed integers of 2 to 8 bits, int8 (W8A8), FP8, MXFP4.

What a module is shows in its tensors, so targets and ignored names need not be matched. Activations
that the file wants quantized stay at Octavo's own precision, which is higher.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from octavo.checkpoint.base import FLOATS, Computed, TensorType
from octavo.checkpoint.grouped import Grouped
from octavo.checkpoint.quantized import mxfp4
from octavo.checkpoint.quantized.bits import U8, unpack
from octavo.checkpoint.quantized.fp8 import read_scaled
from octavo.checkpoint.quantized.module import Module, order_of
from octavo.errors import CheckpointError, Unsupported

ENDINGS = (
    "weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx",
    "weight_global_scale", "input_global_scale", "input_scale", "input_zero_point",
)  # fmt: skip
KEY = "weight_scale"
FORMATS = "pack-quantized, int-quantized, float-quantized and mxfp4-pack-quantized"


def _setting(config: dict[str, Any], key: str) -> Any:
    """What the first scheme that says it has for its weights; None if none does."""
    groups = config.get("config_groups")
    for scheme in groups.values() if isinstance(groups, dict) else ():
        weights = scheme.get("weights") if isinstance(scheme, dict) else None
        if isinstance(weights, dict) and weights.get(key):
            return weights[key]
    return None


def _group_size(config: dict[str, Any]) -> int:
    """A module's own number of groups corrects it."""
    size = _setting(config, "group_size")
    return size if isinstance(size, int) and size > 0 else 0


def _packed(m: Module, config: dict[str, Any]) -> Grouped:
    packed = m.get("weight_packed", TensorType.I32)
    shape = m.get("weight_shape", TensorType.I64, TensorType.I32, dims=(1,)).array()
    if len(shape) != 2 or int(shape[0]) != packed.shape[0] or int(shape[1]) < 1:
        raise CheckpointError(f"{m.name[:80]}.weight_shape is {shape.tolist()[:4]}")
    rows, columns = int(shape[0]), int(shape[1])
    bits = packed.shape[1] * 32 // columns
    if not 2 <= bits <= 8 or packed.shape[1] != -(-columns * bits // 32):
        raise m.mismatch("weight_packed", packed.shape, (rows, -(-columns * 4 // 32)))
    groups = m.get("weight_scale", *FLOATS).shape[1]
    scales = m.floats("weight_scale", (rows, groups))
    group = m.group(columns, groups, _group_size(config))
    zeros = None
    if m.has("weight_zero_point"):
        words = m.get("weight_zero_point", TensorType.I32).array()
        if words.shape != (-(-rows * bits // 32), groups):
            raise m.mismatch("weight_zero_point", words.shape, (-(-rows * bits // 32), groups))
        zeros = unpack(words.T, bits, rows).T.astype(np.int32)
    order = None
    if m.has("weight_g_idx"):
        indices = m.get("weight_g_idx", TensorType.I32, TensorType.I64, dims=(1,)).array()
        if len(indices) != columns:
            raise m.mismatch("weight_g_idx", indices.shape, (columns,))
        order = order_of(indices, group, m.name)

    def codes() -> U8:
        c = unpack(packed.array(), bits, columns)
        return c if order is None else c[:, list(order)]

    return m.integers((rows, columns), bits, group, codes, scales, zeros, order)


def _int8(m: Module, config: dict[str, Any]) -> Grouped:
    weight = m.get("weight", TensorType.I8)
    rows, columns = weight.shape
    stored = m.get("weight_scale", *FLOATS, dims=(0, 1, 2))
    groups = (*stored.shape, 1, 1)[1]
    scales = m.of_rows("weight_scale", stored.vector(), rows, groups)
    group = m.group(columns, groups, _group_size(config))
    zeros = None
    if m.has("weight_zero_point"):
        points = m.get("weight_zero_point", TensorType.I8, dims=(0, 1, 2)).array().astype(np.int32)
        zeros = m.of_rows("weight_zero_point", points, rows, groups) + 128

    def codes() -> U8:
        return weight.array().view(np.uint8) ^ np.uint8(128)

    return m.integers((rows, columns), 8, group, codes, scales, zeros)


def _mxfp4(m: Module) -> Computed:
    packed, exponents = (m.get(f"weight_{p}", TensorType.U8) for p in ("packed", "scale"))
    expected = (exponents.shape[0], exponents.shape[1] * 16)
    if packed.shape != expected:
        raise m.mismatch("weight_packed", packed.shape, expected)
    return mxfp4.tensor(f"{m.name}.weight", packed, exponents)


def read(m: Module, config: dict[str, Any]) -> Grouped | Computed | None:
    """None for a weight that was left alone. Raises CheckpointError or Unsupported."""
    if m.has("weight_global_scale"):
        raise Unsupported(f"{m.name[:80]}: nvfp4-pack-quantized", f"supported: {FORMATS}")
    if m.has("weight_packed"):
        return _mxfp4(m) if m.stored["weight_packed"].type is TensorType.U8 else _packed(m, config)
    kind = m.get("weight", TensorType.I8, TensorType.FP8_E4M3, *FLOATS, dims=(1, 2)).type
    if kind is TensorType.I8:
        return _int8(m, config)
    if kind is TensorType.FP8_E4M3:
        return read_scaled(m, _setting(config, "block_structure"))
    return None
