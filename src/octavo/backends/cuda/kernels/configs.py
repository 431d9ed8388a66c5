"""Tiles, warps and stages by shape: what may be tuned, for no result depends on it."""

from __future__ import annotations

import triton


def linear_config(kind: str, tokens: int) -> tuple[int, int, int, int]:
    """(features of a tile, tokens of a tile, warps, stages) of a linear layer."""
    if tokens <= 64:
        stages = 4 if kind in ("int4", "table4") else 5  # of less bytes: as many in flight
        return 64, max(16, triton.next_power_of_2(tokens)), 4, stages
    if tokens <= 256:
        return 128, 64, 8 if kind != "bf16" else 4, 4
    return 128, 128, 8, 3


ATTENTION_PROGRAMS = 264  # that walk the work list: two for each multiprocessor of an H200


def attention_config(dim: int, rows: int) -> tuple[int, int]:
    """(warps, stages) of attention with heads of `dim` features and so many rows of a query tile.
    Sums of a row of scores are made across lanes, so only what the model fixes may decide. Four
    warps hold 64 rows of scores once, eight hold them twice."""
    return (4 if dim * rows <= 128 * 64 and rows <= 64 else 8), (2 if dim > 128 else 3)
