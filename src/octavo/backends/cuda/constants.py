"""The numbers that results depend on: how sums are cut, whatever shares a step.

A sum over features or keys is the ascending sum of slices, each summed from nothing. Slices depend
on a weight's shape or on positions alone, so that a row's bits do not depend on its neighbours, on
how a prompt was cut, or on which program computed a slice. Everything else about a kernel (warps,
stages, tokens of a tile) may be tuned freely.
"""

from __future__ import annotations

TILE = 64  # packed weights are padded to it in both directions
KEY_TILE = 64  # keys of a step of the online softmax, counted from position 0
SOFTMAX_SLICE = 256  # keys whose softmax is computed from nothing, counted from position 0
PARTIAL_TOKENS = 64  # rows up to which the slices of a linear layer are stored apart
UNPACKED_TOKENS = 256  # padded rows from which codes become a matrix in bf16 before they multiply
PAIR_BLOCK = 16  # rows of one expert that are computed together
SPLIT_TOKENS = 4  # rows of a query group up to which its slices may be computed apart

# Rows that steps are padded to: one CUDA graph each.
PADDED = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048)

# Tiles times slices that keep every multiprocessor busy: codes need twice as many warps, for
# ordinary instructions unpack them, and come two tiles at a time.
_PROGRAMS, _CODED_PROGRAMS = 256, 512
_ATTENTION_PROGRAMS = 264  # two for each multiprocessor of an H200
_NARROWEST, _WIDEST = 256, 4096


def up(n: int, multiple: int = TILE) -> int:
    """n rounded up to a multiple."""
    return -(-n // multiple) * multiple


def slice_width(kind: str, n: int, k: int) -> int:
    """Features of a slice of a linear layer with weights `[n, k]`: a multiple of 64, of codes of
    128."""
    coded = kind != "bf16"
    wanted = -(-(_CODED_PROGRAMS if coded else _PROGRAMS) // -(-n // TILE))
    return min(max(up(-(-k // wanted), 2 * TILE if coded else TILE), _NARROWEST), _WIDEST)


def slices(kind: str, n: int, k: int) -> int:
    """Slices of a linear layer with weights `[n, k]`."""
    return -(-up(k) // slice_width(kind, n, k))


def query_columns(rows: int) -> int:
    """Columns of a query tile, heads that share keys times tokens, in a step of so many rows: few
    where there may be a sequence a row, so that decoding computes little of nothing."""
    return 16 if rows <= 64 else 32


def attention_lists(heads: int, kv_heads: int, rows: int) -> tuple[int, int]:
    """(lists, programs) of attention: how many walk the work list, one of up to a query tile's
    columns of the heads that share keys, and the programs that share each of them."""
    lists = kv_heads * -(-(heads // kv_heads) // query_columns(rows))
    return lists, max(1, _ATTENTION_PROGRAMS // lists)


def group_tokens(shared: int, rows: int) -> int:
    """Tokens of a query tile: each has a column for every head that shares its keys."""
    return max(1, query_columns(rows) // shared)


def padded(rows: int) -> int:
    """Rows that a step of so many is computed with: beyond the largest size, a multiple of it."""
    fitting = [size for size in PADDED if size >= rows]
    return fitting[0] if fitting else up(rows, PADDED[-1])


def places(pairs: int, experts: int) -> int:
    """Places that pairs of rows and experts need at most: each expert's begin a block."""
    return up(pairs, PAIR_BLOCK) + PAIR_BLOCK * min(experts, pairs)
