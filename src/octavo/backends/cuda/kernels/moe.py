"""Experts: which take a row, rows sorted by them, their products, and the sum of what they give."""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.backends.cuda.constants import PAIR_BLOCK, TILE, slice_width, up
from octavo.backends.cuda.kernels.common import FOLLOWING, follow, gated, stride, summed
from octavo.backends.cuda.kernels.linear import product
from octavo.backends.cuda.kernels.unpack import odd

BLOCK = 1024


@triton.jit
def _route(
    x, bias, ids, weights, experts, x_part, x_row,
    PARTS: tl.constexpr, TOP: tl.constexpr, NORMALIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    follow()
    t = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)
    real = e < experts
    y = summed(x, t * x_row + e, real, x_part, PARTS)
    if bias is not None:
        y += tl.load(bias + e, real, other=0.0)
    y = tl.where(real, y, float("-inf"))
    p = tl.exp(y - tl.max(y, 0))
    p = p / tl.sum(p, 0)
    left = real
    for _ in tl.static_range(TOP):
        best = tl.max(tl.where(left, p, -1.0), 0)
        found = tl.min(tl.where(left & ((p == best) | (p != p)), e, BLOCK), 0)
        left = left & (e != found)
    chosen = (real & ~left).to(tl.int32)
    place = tl.cumsum(chosen, 0) - 1
    if NORMALIZE:
        kept = 0.0
        for j in tl.static_range(TOP):
            kept += tl.sum(tl.where((chosen == 1) & (place == j), p, 0.0), 0)
        p = p / kept
    tl.store(ids + t * TOP + place, e, chosen == 1)
    tl.store(weights + t * TOP + place, p, chosen == 1)


@triton.jit
def _sort_pairs(
    ids, order, owner, pairs, capacity, EXPERTS: tl.constexpr, PADDED: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The pairs of one expert, ascending; the program after the last fills the rest."""
    follow()
    expert = tl.program_id(0)
    e = tl.arange(0, PADDED)
    counts = tl.zeros((PADDED,), tl.int32)
    for at in range(0, pairs, CHUNK):
        pair = at + tl.arange(0, CHUNK)
        own = tl.load(ids + pair, pair < pairs, other=EXPERTS)
        counts += tl.histogram(own, PADDED).to(tl.int32)
    room = tl.where(e < EXPERTS, (counts + BLOCK - 1) // BLOCK * BLOCK, 0)
    begin = tl.sum(tl.where(e < expert, room, 0), 0)
    end = tl.where(expert < EXPERTS, begin + tl.sum(tl.where(e == expert, room, 0), 0), capacity)
    place = begin
    if expert < EXPERTS:
        for at in range(0, pairs, CHUNK):
            pair = at + tl.arange(0, CHUNK)
            mine = (tl.load(ids + pair, pair < pairs, other=-1) == expert).to(tl.int32)
            tl.store(order + place + tl.cumsum(mine, 0) - 1, pair, mine == 1)
            place += tl.sum(mine, 0)
    for at in range(place, end, CHUNK):
        free = at + tl.arange(0, CHUNK)
        tl.store(order + free, tl.full((CHUNK,), -1, tl.int32), free < end)
    for at in range(begin // BLOCK, end // BLOCK, CHUNK):
        block = at + tl.arange(0, CHUNK)
        value = tl.where(expert < EXPERTS, expert, -1)
        tl.store(owner + block, tl.zeros((CHUNK,), tl.int32) + value, block < end // BLOCK)


@triton.jit
def _expert_linear(
    w, scales, minima, table, x, order, owner, out, n, wide, depth, codes_row, codes_expert,
    scales_expert, x_row, out_row, choices,
    KIND: tl.constexpr, GROUP: tl.constexpr, MINIMUM: tl.constexpr, ODD: tl.constexpr,
    SLICE: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One tile of the result for BT pairs of one expert."""
    follow()
    block = tl.program_id(1)
    expert = tl.load(owner + block)
    if expert >= 0:
        pair = tl.load(order + block * BT + tl.arange(0, BT))
        mine = pair >= 0
        row = tl.program_id(0) * BN
        own = row + tl.arange(0, BN)
        w += expert.to(tl.int64) * codes_expert
        if scales is not None:
            scales += expert.to(tl.int64) * scales_expert
        if MINIMUM:
            minima += expert.to(tl.int64) * scales_expert
        total = product(
            w, scales, minima, table, row, wide, codes_row, depth,
            x + (tl.maximum(pair, 0) // choices * x_row)[None, :], mine, 0,
            tl.cdiv(depth, SLICE // TILE),
            KIND, GROUP, MINIMUM, ODD, SLICE, BN, BT, TILE,
        )  # fmt: skip
        place = out + (pair.to(tl.int64) * out_row)[None, :] + own[:, None]
        tl.store(place, total, mine[None, :] & (own < n)[:, None])


@triton.jit
def _expert_glu(
    gate, up, ids, gate_bias, up_bias, act, width, act_row, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    follow()
    pair = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    g = tl.load(gate + pair * width + at, mask, other=0.0)
    u = tl.load(up + pair * width + at, mask, other=0.0)
    expert = tl.load(ids + pair).to(tl.int64)
    if gate_bias is not None:
        g += tl.load(gate_bias + expert * width + at, mask, other=0.0)
    if up_bias is not None:
        u += tl.load(up_bias + expert * width + at, mask, other=0.0)
    tl.store(act + pair * act_row + at, gated(g, u, KIND).to(tl.bfloat16), mask)


@triton.jit
def _expert_sum(
    x, ids, weights, bias, residual, out, width, residual_row, out_row,
    TOP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    follow()
    t = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(TOP):
        pair = t * TOP + j
        y = tl.load(x + pair * width + at, mask, other=0.0)
        if bias is not None:
            y += tl.load(bias + tl.load(ids + pair).to(tl.int64) * width + at, mask, other=0.0)
        total += tl.load(weights + pair) * y
    if residual is not None:
        total = tl.load(residual + t * residual_row + at, mask, other=0.0) + total
    tl.store(out + t * out_row + at, total, mask)


def route(x, bias, ids, weights, *, normalize):
    """The k likeliest experts of each row, ascending, and their probabilities."""
    parts, rows, experts = x.shape
    _route[(rows,)](
        x, bias, ids, weights, experts, x.stride(0), x.stride(1), PARTS=parts, TOP=ids.shape[1],
        NORMALIZE=normalize, BLOCK=triton.next_power_of_2(experts), num_warps=1, **FOLLOWING,
    )  # fmt: skip


def sort_pairs(ids, order, owner, *, experts):
    """Pairs grouped by expert, each expert's padded with -1 to whole blocks, and whose each is."""
    pairs = ids.numel()
    chunk = min(1024, max(16, triton.next_power_of_2(pairs)))
    _sort_pairs[(experts + 1,)](
        ids, order, owner, pairs, order.shape[0], EXPERTS=experts,
        PADDED=triton.next_power_of_2(experts + 1), CHUNK=chunk, BLOCK=PAIR_BLOCK, **FOLLOWING,
    )  # fmt: skip


def expert_linear(x, w, order, owner, out, *, choices):
    """out[pair] = the pair's row times the weights of its expert."""
    width = slice_width(w.kind, w.n, w.k)
    _expert_linear[(up(w.n) // TILE, owner.shape[0])](
        w.codes, w.scales, w.minima, w.table, x, order, owner, out, w.n, up(w.n),
        up(w.k) // TILE, w.codes.stride(1), w.codes.stride(0), stride(w.scales), x.stride(0),
        out.stride(0), choices, KIND=w.kind, GROUP=w.group, MINIMUM=w.minima is not None,
        ODD=odd(w.k), SLICE=width, BN=TILE, BT=PAIR_BLOCK, TILE=TILE, num_warps=4, num_stages=5,
        **FOLLOWING,
    )  # fmt: skip


def expert_glu(gate, up, ids, gate_bias, up_bias, act, *, activation):
    """act = activation(gate) * up, each with the bias of the pair's expert."""
    pairs, width = gate.shape
    _expert_glu[(pairs, triton.cdiv(width, BLOCK))](
        gate, up, ids, gate_bias, up_bias, act, width, act.stride(0), KIND=activation, BLOCK=BLOCK,
        **FOLLOWING,
    )  # fmt: skip


def expert_sum(x, ids, weights, bias, residual, out):
    """out = residual + the weighted sum of what each row's experts give, in ascending order."""
    rows, width = out.shape
    _expert_sum[(rows, triton.cdiv(width, BLOCK))](
        x, ids, weights, bias, residual, out, width, stride(residual), out.stride(0),
        TOP=ids.shape[1], BLOCK=BLOCK, **FOLLOWING,
    )  # fmt: skip
