"""What operations take beside plain tensors: packed weights, the rows of a step, attention's work.

Layouts are those of `docs/cuda.md`.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Matrix(NamedTuple):
    """Weights `[n, k]` on the device, padded to tiles of 64; experts have a leading dimension.

    kind: "bf16" (codes are `[N, K]`), "int4" and "table4" (`[N/64, K/64, 64, 32]` bytes of two
    codes, 32 columns apart), "int8" and "fp8" (`[N/64, K/64, 64, 64]`); bytes of a tile are in the
    order of `pack.tiles`. group: columns that share a scale, 0 for bf16. scales, minima:
    `[groups, N]`, rows in the order of `pack.pairs`. table: the 16 values of "table4".
    """

    kind: str
    n: int
    k: int
    group: int
    codes: Tensor
    scales: Tensor | None = None
    minima: Tensor | None = None
    table: Tensor | None = None


class StepRows(NamedTuple):
    """A step's tokens, int32. Padded rows have key -1 and see nothing.

    given: row of the step's embeddings, or -1. table: offset of the sequence's block table in
    `tables`. key: position in the cache. first, last: the keys that a row sees, before a window.
    coordinates: `[axes, T]`, where rows are for rotations.
    """

    ids: Tensor
    positions: Tensor
    types: Tensor
    given: Tensor
    table: Tensor
    key: Tensor
    first: Tensor
    last: Tensor
    coordinates: Tensor
    tables: Tensor


class Work(NamedTuple):
    """What attention computes, int32. groups `[G, 8]`: rows that share a query tile: first row,
    rows, table, lowest key, end of keys, first slot of scratch or -1. items `[I, 8]`: a group's
    first five numbers, the slice of keys and its slot, -1 for all of them. counts: groups, items,
    slots."""

    groups: Tensor
    items: Tensor
    counts: Tensor
