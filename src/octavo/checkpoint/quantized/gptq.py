"""GPTQ: words run down the inputs; `qzeros` hold the zero point less one, unless version 2.

Layout: AutoGPTQ and GPTQModel. `g_idx` names the group of each input; with act-order they are mixed
and columns are sorted here, so that the program permutes the layer's input instead.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from octavo.checkpoint.base import FLOATS, TensorType
from octavo.checkpoint.grouped import Grouped
from octavo.checkpoint.quantized.bits import U8, unpack
from octavo.checkpoint.quantized.module import Module, order_of
from octavo.errors import Unsupported

ENDINGS = ("qweight", "qzeros", "scales", "g_idx")
KEY = "qweight"
BITS = (2, 3, 4, 8)


def read(m: Module, config: dict[str, Any]) -> Grouped:
    """Raises CheckpointError, or Unsupported for other numbers of bits."""
    qweight = m.get("qweight", TensorType.I32)
    qzeros = m.get("qzeros", TensorType.I32)
    words, outputs = qweight.shape
    indices = m.get("g_idx", TensorType.I32, dims=(1,)).array() if m.has("g_idx") else None
    bits = config.get("bits")
    if indices is not None:
        bits = words * 32 // len(indices)  # each module may have its own
    if bits not in BITS:
        raise Unsupported(f"{m.name[:80]}: GPTQ with {str(bits)[:20]} bits")
    inputs = len(indices) if indices is not None else words * 32 // bits
    if words * 32 != inputs * bits:
        raise m.mismatch("qweight", qweight.shape, (inputs * bits // 32, outputs))
    groups = m.get("scales", *FLOATS).shape[0]
    scales = np.ascontiguousarray(m.floats("scales", (groups, outputs)).T)
    if qzeros.shape[0] != groups or qzeros.shape[1] * 32 // bits < outputs:
        raise m.mismatch("qzeros", qzeros.shape, (groups, outputs * bits // 32))
    group = m.group(inputs, groups, config.get("group_size"))
    zeros = unpack(qzeros.array(), bits, outputs).T.astype(np.int32)
    if config.get("checkpoint_format") != "gptq_v2":
        zeros = zeros + 1 & (1 << bits) - 1
    order = None if indices is None else order_of(indices, group, m.name)

    def codes() -> U8:
        c = unpack(qweight.array().T, bits, inputs)
        return c if order is None else c[:, list(order)]

    return m.integers((outputs, inputs), bits, group, codes, scales, zeros, order)
