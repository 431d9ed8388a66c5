"""Linear layers: weights are operand A, tokens the columns of B, K is summed in fixed slices.

Each slice is summed from zero by the tensor core. With few tokens a program computes one slice and
whoever reads the result adds them; with many a program walks all slices of its tile and adds them
itself: the same sums in the same order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.backends.cuda.constants import TILE, slice_width, up
from octavo.backends.cuda.kernels.common import FOLLOWING, dot, follow
from octavo.backends.cuda.kernels.configs import linear_config
from octavo.backends.cuda.kernels.many import linear_many, takes, unpack
from octavo.backends.cuda.kernels.unpack import lines, odd, weights
from octavo.backends.cuda.tensors import Matrix


@triton.jit
def _of_bf16(
    w, rows, codes_row, x, t_mask, first, last,
    BN: tl.constexpr, BT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The product over tiles [first, last) of columns, from zero. x: of each token."""
    acc = tl.zeros((BN, BT), tl.float32)
    at = tl.arange(0, TILE)
    for tile in range(first, last):
        a = tl.load(w + (rows.to(tl.int64) * codes_row)[:, None] + (tile * TILE + at)[None, :])
        b = tl.load(x + (tile * TILE + at)[:, None], t_mask[None, :], other=0.0)
        acc = dot(a, b, acc)
    return acc


@triton.jit
def _of_codes(
    w, scales, minima, table, row, rows, wide, depth, x, t_mask, first, last,
    KIND: tl.constexpr, GROUP: tl.constexpr, MINIMUM: tl.constexpr, ODD: tl.constexpr,
    BN: tl.constexpr, BT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The same of codes, a tile of bytes or two of nibbles at a time: 32 bytes of every thread.
    ODD: there may be no second tile."""
    TILES: tl.constexpr = 2 if KIND == "int4" or KIND == "table4" else 1
    acc = tl.zeros((BN, BT), tl.float32)
    at = tl.arange(0, TILES * TILE)
    codes = lines(w, row, wide, depth, KIND, BN, TILE)
    for tile in range(first, last, TILES):
        x_mask = t_mask[None, :]
        if ODD and TILES == 2:
            x_mask &= at[:, None] < (last - tile) * TILE
        b = tl.load(x + (tile * TILE + at)[:, None], x_mask, other=0.0)
        a = weights(
            codes, scales, minima, table, rows, tile, last, wide, depth,
            KIND, GROUP, MINIMUM, ODD, BN, TILE,
        )  # fmt: skip
        acc = dot(a, b, acc)
    return acc


@triton.jit
def product(
    w, scales, minima, table, row, wide, codes_row, depth, x, t_mask, first, last,
    KIND: tl.constexpr, GROUP: tl.constexpr, MINIMUM: tl.constexpr, ODD: tl.constexpr,
    SLICE: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Weights from `row` on times tokens at `x`: the sum of slices [first, last). depth: tiles
    along K."""
    rows = row + tl.arange(0, BN)
    if BN > TILE:
        rows = tl.minimum(rows, wide - 1)  # the last tile may be half
    slice_tiles: tl.constexpr = SLICE // TILE
    total = tl.zeros((BN, BT), tl.float32)
    for s in range(first, last):
        begin, end = s * slice_tiles, tl.minimum((s + 1) * slice_tiles, depth)
        if KIND == "bf16":
            total += _of_bf16(w, rows, codes_row, x, t_mask, begin, end, BN, BT, TILE)
        else:
            total += _of_codes(
                w, scales, minima, table, row, rows, wide, depth, x, t_mask, begin, end,
                KIND, GROUP, MINIMUM, ODD, BN, BT, TILE,
            )  # fmt: skip
    return total


@triton.jit
def _linear(
    w, scales, minima, table, x, out, n, wide, depth, codes_row, tokens, x_row, out_part, out_row,
    KIND: tl.constexpr, GROUP: tl.constexpr, MINIMUM: tl.constexpr, ODD: tl.constexpr,
    SLICE: tl.constexpr, WALK: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One tile of the result: of one slice, or of all of them if WALK."""
    follow()
    row = tl.program_id(0) * BN
    own = row + tl.arange(0, BN)
    t = tl.program_id(1) * BT + tl.arange(0, BT)
    first = 0 if WALK else tl.program_id(2)
    last = tl.cdiv(depth, SLICE // TILE) if WALK else first + 1
    total = product(
        w, scales, minima, table, row, wide, codes_row, depth, x + (t * x_row)[None, :],
        t < tokens, first, last, KIND, GROUP, MINIMUM, ODD, SLICE, BN, BT, TILE,
    )  # fmt: skip
    place = out + (t.to(tl.int64) * out_row)[None, :] + own[:, None]
    if not WALK:
        place += first * out_part
    tl.store(place, total, (t < tokens)[None, :] & (own < n)[:, None])


def linear(x, w, out, unpacked=None):
    """out[p] = x w^T over slice p of the columns, or with one part the sum of all slices.
    unpacked: room for the values of codes, which then are multiplied as bf16 weights are."""
    width = slice_width(w.kind, w.n, w.k)
    if unpacked is not None:
        unpack(w, unpacked)
        w = Matrix("bf16", w.n, w.k, 0, unpacked)
    if takes(x, w, out):
        linear_many(x, w, width, out)
        return
    tokens, parts = x.shape[0], out.shape[0]
    depth = up(w.k) // TILE
    walk = parts == 1 and width < up(w.k)
    bn, bt, warps, stages = linear_config(w.kind, tokens)
    _linear[(triton.cdiv(up(w.n), bn), triton.cdiv(tokens, bt), parts)](
        w.codes, w.scales, w.minima, w.table, x, out, w.n, up(w.n), depth, w.codes.stride(0),
        tokens, x.stride(0), out.stride(0), out.stride(1), KIND=w.kind, GROUP=w.group,
        MINIMUM=w.minima is not None, ODD=odd(w.k), SLICE=width, WALK=walk, BN=bn, BT=bt, TILE=TILE,
        num_warps=warps, num_stages=stages, **FOLLOWING,
    )  # fmt: skip
