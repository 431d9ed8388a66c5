"""MLX, affine: words along the inputs, scale * code + bias for each group."""

from __future__ import annotations

from typing import Any

from octavo.checkpoint.base import FLOATS, TensorType
from octavo.checkpoint.grouped import Codes, Grouped
from octavo.checkpoint.quantized.bits import unpack
from octavo.checkpoint.quantized.module import Module
from octavo.errors import CheckpointError, Unsupported

ENDINGS = ("weight", "scales", "biases")
KEY = "scales"


def read(m: Module, config: dict[str, Any]) -> Grouped:
    """Raises CheckpointError, or Unsupported for other modes."""
    own = config.get(m.name)
    settings = own if isinstance(own, dict) else config
    if settings.get("mode", "affine") != "affine":
        raise Unsupported(f"MLX mode {str(settings['mode'])[:20]!r}; affine is read")
    weight = m.get("weight", TensorType.U32)
    rows, words = weight.shape
    size = settings.get("group_size", 64)
    groups = m.get("scales", *FLOATS).shape[1]
    scales, minima = m.floats("scales", (rows, groups)), m.floats("biases", (rows, groups))
    columns = groups * size if isinstance(size, int) else 0
    bits = words * 32 // columns if columns else 0
    if bits not in (2, 3, 4, 5, 6, 8) or words * 32 != columns * bits:
        raise CheckpointError(
            f"{m.name[:80]}: {words} words hold no {groups} groups of {str(size)[:20]}"
        )
    group = m.group(columns, groups, size)

    def read_codes() -> Codes:
        return Codes(unpack(weight.array(), bits, columns), scales, minima)

    kind = TensorType.INT8_MIN if bits > 4 else TensorType.INT4_MIN
    return m.grouped(kind, (rows, columns), group, read_codes, bits)
