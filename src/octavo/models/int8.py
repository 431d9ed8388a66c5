"""Linear layers in 8 bits, rounded when a model is loaded."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from octavo.checkpoint.base import FLOATS, Tensor, TensorType
from octavo.checkpoint.grouped import ZERO, Codes, Grouped
from octavo.program import Features, Linear, Op, Program

LARGEST = 127


def in_int8(program: Program) -> Program:
    """The program with float weights of linear layers as INT8, a scale a row. Layers that read what
    is given (an image's pixels) stay as they are."""
    given = {op.out for op in program.ops if isinstance(op, Features)}

    def rounded(op: Op) -> Op:
        if not isinstance(op, Linear) or op.x in given or op.weight.tensor.type not in FLOATS:
            return op
        return replace(op, weight=replace(op.weight, tensor=_rows(op.weight.tensor)))

    return replace(program, ops=tuple(map(rounded, program.ops)))


def _rows(tensor: Tensor) -> Grouped:
    rows, columns = tensor.shape

    def read() -> Codes:
        x = tensor.vector()
        scales = np.abs(x).max(1, keepdims=True) / np.float32(LARGEST)
        codes = np.rint(x / np.where(scales > 0, scales, 1)) + ZERO[TensorType.INT8]
        return Codes(codes.astype(np.uint8), scales)

    whole = -(-columns // 32) * 32
    return Grouped(tensor.name, TensorType.INT8, tensor.shape, whole, tensor.nbytes, read, 8)
