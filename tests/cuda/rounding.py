"""Triton's interpreter cuts numbers off where a GPU rounds them to bf16 (`cvt.rn`): here it rounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_cut = interpreter._convert_float


def _convert(x: np.ndarray, source: Any, target: Any, mode: Any) -> np.ndarray:
    """Bits of floats as those of another type: from fp32 to bf16 to nearest, ties to even."""
    if source != tl.float32 or target != tl.bfloat16:
        found: np.ndarray = _cut(x, source, target, mode)
        return found
    values = torch.from_numpy(np.ascontiguousarray(x).view(np.float32))
    return values.bfloat16().view(torch.int16).numpy().view(np.uint16).reshape(x.shape)


def round_to_nearest() -> None:
    """Makes the interpreter round."""
    interpreter._convert_float = _convert
