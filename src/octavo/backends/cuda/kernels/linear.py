"""Linear layers: weights are operand A, tokens the columns of B, K is summed in fixed slices.

Each slice is summed from zero by the tensor core. With few tokens a program computes one slice and
whoever reads the result adds them; with many a program walks all slices of its tile and adds them
itself: the same sums in the same order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.backends.cuda.constants import TILE, slice_width, up
from octavo.backends.cuda.kernels.common import dot
from octavo.backends.cuda.kernels.configs import linear_config
from octavo.backends.cuda.kernels.unpack import scaled


@triton.jit
def step(
    acc, w, scales, minima, table, rows, wide, codes_row, depth, x, t, t_mask, x_row, k,
    KIND: tl.constexpr, GROUP: tl.constexpr, MINIMUM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """acc + the product of the weights `rows` and tokens `t` over columns [k, k + TILE)."""
    HALF: tl.constexpr = TILE // 2
    at = tl.arange(0, HALF)
    if KIND == "bf16":
        full = tl.arange(0, TILE)
        a = tl.load(w + (rows.to(tl.int64) * codes_row)[:, None] + (k + full)[None, :])
        b = tl.load(x + (t * x_row)[None, :] + (k + full)[:, None], t_mask[None, :], other=0.0)
        return dot(a, b, acc)
    else:
        x0 = x + (t * x_row)[None, :] + (k + at)[:, None]
        low = tl.load(x0, t_mask[None, :], other=0.0)
        high = tl.load(x0 + HALF, t_mask[None, :], other=0.0)
        tile = (rows // TILE).to(tl.int64) * depth + k // TILE
        if KIND == "int4" or KIND == "table4":
            places = tile * (TILE * HALF) + rows % TILE * HALF
            code = tl.load(w + places[:, None] + at[None, :])
            first, second = code & 15, code >> 4
        else:
            places = tile * (TILE * TILE) + rows % TILE * TILE
            first = tl.load(w + places[:, None] + at[None, :])
            second = tl.load(w + places[:, None] + HALF + at[None, :])
        a = scaled(first, scales, minima, table, rows, k, wide, KIND, MINIMUM, GROUP, HALF)
        acc = dot(a, low, acc)
        a = scaled(second, scales, minima, table, rows, k + HALF, wide, KIND, MINIMUM, GROUP, HALF)
        return dot(a, high, acc)


@triton.jit
def product(
    w, scales, minima, table, own, wide, codes_row, depth, x, t, t_mask, x_row, first, last,
    KIND: tl.constexpr, GROUP: tl.constexpr, MINIMUM: tl.constexpr, SLICE: tl.constexpr,
    BN: tl.constexpr, BT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Weights `own` times tokens `t`: the sum of slices [first, last). depth: tiles along K."""
    rows = tl.minimum(own, wide - 1)  # the last tile may be half
    slice_tiles: tl.constexpr = SLICE // TILE
    total = tl.zeros((BN, BT), tl.float32)
    for s in range(first, last):
        acc = tl.zeros((BN, BT), tl.float32)
        for tile in range(s * slice_tiles, tl.minimum((s + 1) * slice_tiles, depth)):
            acc = step(
                acc, w, scales, minima, table, rows, wide, codes_row, depth, x, t, t_mask, x_row,
                tile * TILE, KIND, GROUP, MINIMUM, TILE,
            )  # fmt: skip
        total += acc
    return total


@triton.jit
def _linear(
    w, scales, minima, table, x, out, n, wide, depth, codes_row, tokens, x_row, out_part, out_row,
    KIND: tl.constexpr, GROUP: tl.constexpr, MINIMUM: tl.constexpr, SLICE: tl.constexpr,
    WALK: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One tile of the result: of one slice, or of all of them if WALK."""
    own = tl.program_id(0) * BN + tl.arange(0, BN)
    t = tl.program_id(1) * BT + tl.arange(0, BT)
    first = 0 if WALK else tl.program_id(2)
    last = tl.cdiv(depth, SLICE // TILE) if WALK else first + 1
    total = product(
        w, scales, minima, table, own, wide, codes_row, depth, x, t, t < tokens, x_row, first,
        last, KIND, GROUP, MINIMUM, SLICE, BN, BT, TILE,
    )  # fmt: skip
    place = out + (t.to(tl.int64) * out_row)[None, :] + own[:, None]
    if not WALK:
        place += first * out_part
    tl.store(place, total, (t < tokens)[None, :] & (own < n)[:, None])


def linear(x, w, out):
    """out[p] = x w^T over slice p of the columns, or with one part the sum of all slices."""
    tokens, parts = x.shape[0], out.shape[0]
    width = slice_width(w.n, w.k)
    depth = up(w.k) // TILE
    walk = parts == 1 and width < up(w.k)
    bn, bt, warps, stages = linear_config(w.kind, tokens)
    _linear[(triton.cdiv(up(w.n), bn), triton.cdiv(tokens, bt), parts)](
        w.codes, w.scales, w.minima, w.table, x, out, w.n, up(w.n), depth, w.codes.stride(0),
        tokens, x.stride(0), out.stride(0), out.stride(1), KIND=w.kind, GROUP=w.group,
        MINIMUM=w.minima is not None, SLICE=width, WALK=walk, BN=bn, BT=bt, TILE=TILE,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
