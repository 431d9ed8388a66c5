"""The stored tensors of one quantized module, with checks, and the common ways to import them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.checkpoint.base import FLOATS, Stored, TensorType
from octavo.checkpoint.grouped import Codes, Grouped
from octavo.errors import CheckpointError, Unsupported

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
LARGEST_ZERO = 1 << 8


@dataclass(frozen=True)
class Module:
    """The stored tensors of one module. name: their common prefix. stored: tensors by suffix."""

    name: str
    stored: Mapping[str, Stored]

    def has(self, *endings: str) -> bool:
        return all(ending in self.stored for ending in endings)

    def get(self, ending: str, *types: TensorType, dims: tuple[int, ...] = (2,)) -> Stored:
        """The tensor with this suffix. Raises CheckpointError unless it has one of these types and
        numbers of dimensions, and something in it."""
        tensor = self.stored.get(ending)
        if tensor is None:
            raise CheckpointError(f"{self.name[:80]}: {ending} is missing")
        if tensor.type not in types or len(tensor.shape) not in dims or 0 in tensor.shape:
            raise CheckpointError(
                f"{self.name[:80]}.{ending}: {tensor.type.name} {list(tensor.shape)}, "
                f"expected {' or '.join(t.name for t in types)} "
                f"of {' or '.join(map(str, dims))} dimensions, none of them 0"
            )
        return tensor

    def floats(self, ending: str, shape: tuple[int, ...]) -> F32:
        tensor = self.get(ending, *FLOATS, dims=(len(shape),))
        if tensor.shape != shape:
            raise self.mismatch(ending, tensor.shape, shape)
        return tensor.vector()

    def of_rows(self, ending: str, x: npt.NDArray[Any], rows: int, groups: int) -> npt.NDArray[Any]:
        """`[rows, groups]` of a tensor that may have one row for all, and no dimension for groups
        where there is one of them. Raises CheckpointError."""
        each = x.reshape(-1, (*x.shape, 1, 1)[1])
        if each.shape not in ((1, groups), (rows, groups)):
            raise self.mismatch(ending, x.shape, (rows, groups))
        return np.broadcast_to(each, (rows, groups))

    def mismatch(
        self, ending: str, shape: tuple[int, ...], expected: tuple[int, ...]
    ) -> CheckpointError:
        return CheckpointError(
            f"{self.name[:80]}.{ending} has shape {list(shape)}, expected {list(expected)}"
        )

    def group(self, columns: int, groups: int, stated: object) -> int:
        """Columns of a group: as stated, or all of them. Raises Unsupported for other sizes."""
        if groups == 1:
            return -(-columns // 32) * 32
        size = stated if isinstance(stated, int) else 0
        if size < 1 or -(-columns // size) != groups:
            size = columns // groups
        if size < 1 or -(-columns // size) != groups:
            raise CheckpointError(f"{self.name[:80]}: {groups} groups of {columns} columns")
        if size % 32:
            raise Unsupported(
                f"{self.name[:80]}: groups of {size} columns", "groups are multiples of 32"
            )
        return size

    def integers(
        self, shape: tuple[int, int], bits: int, group: int, codes: Callable[[], U8],
        scales: F32, zeros: npt.NDArray[Any] | None, order: tuple[int, ...] | None = None,
    ) -> Grouped:  # fmt: skip
        """scale * (code - zero), zeros and scales `[rows, groups]`. No zeros: the middle.

        The minimum, zero times scale, is exact in fp32 for scales of fp16 (nine bits times eleven)
        and bf16 (times eight), and rounded for those of fp32.
        """
        rows, middle = shape[0], 1 << (bits - 1)
        wide = bits > 4
        if zeros is None:
            zeros = np.full((1, 1), middle)
        if zeros.min() < -LARGEST_ZERO or zeros.max() > LARGEST_ZERO:
            raise CheckpointError(f"{self.name[:80]}: zero points up to {zeros.max()}")
        symmetric = bool((zeros == (128 if wide else 8)).all())
        kinds = (
            (TensorType.INT8, TensorType.INT8_MIN)
            if wide
            else (TensorType.INT4, TensorType.INT4_MIN)
        )
        points = None if symmetric else np.broadcast_to(zeros.astype(np.int16), scales.shape)

        def read() -> Codes:
            of_rows = np.broadcast_to(scales, (rows, scales.shape[1]))
            if points is None:
                return Codes(codes(), of_rows)
            floats = points.astype(np.float32)
            return Codes(codes(), of_rows, -floats * scales, zeros=floats)

        return self.grouped(kinds[not symmetric], shape, group, read, bits, order)

    def grouped(
        self, kind: TensorType, shape: tuple[int, int], group: int, read: Callable[[], Codes],
        bits: int, order: tuple[int, ...] | None = None,
    ) -> Grouped:  # fmt: skip
        stored = sum(t.nbytes for t in self.stored.values())
        return Grouped(f"{self.name}.weight", kind, shape, group, stored, read, bits, order)


def order_of(indices: npt.NDArray[np.int32], group: int, name: str) -> tuple[int, ...] | None:
    """Columns sorted by the group they belong to (GPTQ's act-order); None if they lie sorted."""
    sorted_groups = np.arange(len(indices)) // group
    if np.array_equal(indices, sorted_groups):
        return None
    order = np.argsort(indices, kind="stable")
    if not np.array_equal(indices[order], sorted_groups):
        raise CheckpointError(f"{name[:80]}: g_idx does not divide the columns into groups")
    return tuple(order.tolist())
