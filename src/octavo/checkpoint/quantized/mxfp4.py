"""MXFP4: four-bit floats with a power of two for each 32 columns, kept in GGUF's blocks.

Two folders have it: gpt-oss, all experts of a layer in one tensor, and compressed-tensors. Their
bytes hold neighbouring columns, GGUF's the halves of a block.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.checkpoint.base import Computed, Stored, TensorType
from octavo.checkpoint.quantized.module import Module

U8 = npt.NDArray[np.uint8]
PARTS = ("gate_up_proj", "down_proj")
ENDINGS = tuple(f"{part}_{kind}" for part in PARTS for kind in ("blocks", "scales"))
KEY = "down_proj_blocks"


def blocks(packed: U8, exponents: U8) -> U8:
    """`[rows, columns / 2]` bytes and `[rows, columns / 32]` exponents as `[rows, blocks, 17]`."""
    pairs = packed.reshape(len(packed), -1, 16)
    codes = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(*pairs.shape[:2], 32)
    halves = codes[..., :16] | codes[..., 16:] << 4
    return np.concatenate([exponents[:, :, None], halves], axis=2)


def tensor(name: str, packed: Stored, exponents: Stored) -> Computed:
    """A matrix of both; the bytes may have a dimension for blocks."""
    rows, columns = packed.shape[0], exponents.shape[1] * 32

    def read() -> U8:
        return blocks(packed.array().reshape(rows, columns // 2), exponents.array())

    stored = packed.nbytes + exponents.nbytes
    return Computed(name, TensorType.MXFP4, (rows, columns), stored, read)


def read(m: Module, config: dict[str, Any]) -> list[Computed]:
    """Every expert's matrices, named `gate_up_proj.0` and so on. Raises CheckpointError."""
    out = []
    for part in PARTS:
        packed = m.get(f"{part}_blocks", TensorType.U8, dims=(4,))
        exponents = m.get(f"{part}_scales", TensorType.U8, dims=(3,))
        if packed.shape != (*exponents.shape, 16):
            raise m.mismatch(f"{part}_blocks", packed.shape, (*exponents.shape, 16))
        out += [
            tensor(f"{m.name}.{part}.{e}", packed.part(e), exponents.part(e))
            for e in range(packed.shape[0])
        ]
    return out
