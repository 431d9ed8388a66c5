"""Tiles, warps and stages by shape: what may be tuned, for no result depends on it."""

from __future__ import annotations

from typing import NamedTuple

import triton


def linear_config(kind: str, tokens: int) -> tuple[int, int, int, int]:
    """(features of a tile, tokens of a tile, warps, stages) of a linear layer."""
    nibbles = kind in ("int4", "table4")  # a stage has two tiles
    if tokens <= 64:
        stages = (4 if tokens <= 32 else 3) if nibbles else 5 if kind == "bf16" else 4
        return 64, max(16, triton.next_power_of_2(tokens)), 4, stages
    if tokens <= 256:
        return 128, 64, 8 if kind != "bf16" else 4, 3 if nibbles else 4
    return 128, 128, 8, 2 if nibbles else 3


class Tile(NamedTuple):
    """Of many tokens. time: of a tile along all of K, where the largest takes 100."""

    features: int
    tokens: int
    warps: int
    stages: int
    time: int


MULTIPROCESSORS = 132  # of an H100 and of an H200
# Measured on an H200 with 96 to 2,048 tokens. A larger tile reads less for what it multiplies.
TILES = (
    Tile(128, 256, 8, 4, 100),
    Tile(128, 128, 4, 4, 54),
    Tile(64, 128, 4, 6, 37),
    Tile(64, 64, 4, 6, 22),
)


def many_tile(n: int, tokens: int) -> Tile:
    """The tile of `n` features and more than 64 tokens that takes the least time: tiles are
    computed in waves of one for each multiprocessor, and the last wave takes as long as the others
    however few are in it. The larger one, of equals."""

    def taken(tile: Tile) -> int:
        tiles = triton.cdiv(n, tile.features) * triton.cdiv(tokens, tile.tokens)
        return int(triton.cdiv(tiles, MULTIPROCESSORS) * tile.time)

    return min(TILES, key=taken)


def attention_config(dim: int) -> tuple[int, int]:
    """(warps, stages) of attention with heads of `dim` features. Sums over keys are made across
    warps, so only what the model fixes may decide the first."""
    return (8, 2) if dim > 128 else (4, 3)
