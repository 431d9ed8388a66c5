"""Linear layers of many tokens on GPUs that copy tiles by themselves (TMA), and codes as bf16.

A program walks all slices of its tile: the same products in the same order as `linear`'s.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.backends.cuda.constants import PARTIAL_TOKENS, TILE, up
from octavo.backends.cuda.kernels.common import FOLLOWING, dot, follow
from octavo.backends.cuda.kernels.configs import many_tile
from octavo.backends.cuda.kernels.unpack import lines, odd, weights

TMA = ((9, 0), (12, 0))  # from this capability to before that: later ones have 99 KiB a program
BESIDE = 8  # tiles of features whose tokens are multiplied before the next ones


@triton.jit
def _place(BESIDE: tl.constexpr):
    """The program's tile of features and of tokens: neighbours share what they read."""
    features, tokens = tl.num_programs(0), tl.num_programs(1)
    number = tl.program_id(0) + tl.program_id(1) * features
    first = number // (BESIDE * tokens) * BESIDE
    size = tl.minimum(features - first, BESIDE)
    inside = number % (BESIDE * tokens)
    return first + inside % size, inside // size


@triton.jit
def _over(
    w, x, own, t, first, last, BN: tl.constexpr, BT: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """The product over tiles [first, last) of columns, from zero."""
    acc = tl.zeros((BN, BT), tl.float32)
    for tile in range(first, last):
        a = w.load([own, tile * TILE])
        acc = dot(a, x.load([t, tile * TILE]).T, acc)
    return acc


@triton.jit
def _linear_many(
    w, x, out, n, depth, tokens, out_row,
    SLICE: tl.constexpr, WALK: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr,
    TILE: tl.constexpr, BESIDE: tl.constexpr,
):  # fmt: skip
    """One tile of the result. w, x: descriptors, which read zeros beyond the last row."""
    follow()
    feature, token = _place(BESIDE)
    own, t = feature * BN, token * BT
    if WALK:
        tiles: tl.constexpr = SLICE // TILE
        total = tl.zeros((BN, BT), tl.float32)
        for s in range(0, tl.cdiv(depth, tiles)):
            last = tl.minimum((s + 1) * tiles, depth)
            total += _over(w, x, own, t, s * tiles, last, BN, BT, TILE)
    else:
        total = _over(w, x, own, t, 0, depth, BN, BT, TILE)
    rows, columns = t + tl.arange(0, BT), own + tl.arange(0, BN)
    place = out + (rows.to(tl.int64) * out_row)[None, :] + columns[:, None]
    tl.store(place, total, (rows < tokens)[None, :] & (columns < n)[:, None])


@triton.jit
def _unpack(
    w, scales, minima, table, out, wide, depth, out_row,
    KIND: tl.constexpr, GROUP: tl.constexpr, MINIMUM: tl.constexpr, ODD: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """The values of a tile of bytes, or of two of nibbles."""
    follow()
    TILES: tl.constexpr = 2 if KIND == "int4" or KIND == "table4" else 1
    tile, row = tl.program_id(0) * TILES, tl.program_id(1) * TILE
    rows, at = row + tl.arange(0, TILE), tile * TILE + tl.arange(0, TILES * TILE)
    codes = lines(w, row, wide, depth, KIND, TILE, TILE)
    y = weights(
        codes, scales, minima, table, rows, tile, depth, wide, depth,
        KIND, GROUP, MINIMUM, ODD, TILE, TILE,
    )  # fmt: skip
    place = out + (rows.to(tl.int64) * out_row)[:, None] + at[None, :]
    tl.store(place, y, (at < depth * TILE)[None, :])


def unpack(w, out):
    """out = the weights `[N, K]` in bf16, as a linear layer multiplies them."""
    depth = up(w.k) // TILE
    each = 2 if w.kind in ("int4", "table4") else 1
    _unpack[(triton.cdiv(depth, each), up(w.n) // TILE)](
        w.codes, w.scales, w.minima, w.table, out, up(w.n), depth, out.stride(0), KIND=w.kind,
        GROUP=w.group, MINIMUM=w.minima is not None, ODD=odd(w.k), TILE=TILE, num_warps=4,
        **FOLLOWING,
    )  # fmt: skip


def copies_tiles(device):
    """Whether programs there can copy tiles by descriptors. Triton's interpreter can."""
    if device.type != "cuda":
        return True
    return TMA[0] <= torch.cuda.get_device_capability(device) < TMA[1]


def described(tensor):
    """Whether a descriptor of a matrix can be made: rows begin at multiples of 16 bytes."""
    return tensor.data_ptr() % 16 == 0 and tensor.stride(0) * 2 % 16 == 0


def takes(x, w, out):
    """Whether `linear_many` computes this: it adds the slices of bf16 weights."""
    many = x.shape[0] > PARTIAL_TOKENS and out.shape[0] == 1 and w.kind == "bf16"
    return many and described(x) and described(w.codes) and copies_tiles(x.device)


def linear_many(x, w, width, out):
    """out[0] = x w^T, the sum of all slices of so many columns."""
    tile, tokens = many_tile(w.n, x.shape[0]), x.shape[0]
    bn, bt = tile.features, tile.tokens
    _linear_many[(triton.cdiv(w.n, bn), triton.cdiv(tokens, bt))](
        TensorDescriptor.from_tensor(w.codes, [bn, TILE]),
        TensorDescriptor.from_tensor(x, [bt, TILE]), out, w.n, up(w.k) // TILE, tokens,
        out.stride(1), SLICE=width, WALK=width < up(w.k), BN=bn, BT=bt, TILE=TILE, BESIDE=BESIDE,
        num_warps=tile.warps, num_stages=tile.stages, **FOLLOWING,
    )  # fmt: skip
