"""Queries, keys and values of a step: sums of slices, norms of heads, rotations, the cache."""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.backends.base import BLOCK as KV_BLOCK
from octavo.backends.cuda.kernels.common import FOLLOWING, follow, stride, summed

EACH = 4  # heads of a program


@triton.jit
def _turn(angle, factor):
    """Cosine and sine times a factor, within 2e-7. Whole turns are taken off in fp64, quarters
    next; what is left takes the polynomials of Cephes (Moshier): no path with local memory."""
    turns = angle.to(tl.float64) * 0.15915494309189535
    quarters = ((turns - tl.floor(turns + 0.5)) * 4.0).to(tl.float32)
    nearest = tl.floor(quarters + 0.5)
    z = (quarters - nearest) * 1.5707963267948966
    y = z * z
    sin = z + z * y * (-1.6666654611e-1 + y * (8.3321608736e-3 - y * 1.9515295891e-4))
    cos = 4.166664568298827e-2 + y * (-1.388731625493765e-3 + y * 2.443315711809948e-5)
    cos = 1.0 - 0.5 * y + y * y * cos
    quarter = nearest.to(tl.int32) & 3
    odd = (quarter & 1) == 1
    c, s = tl.where(odd, sin, cos), tl.where(odd, cos, sin)
    c = tl.where((quarter == 1) | (quarter == 2), -c, c)
    return c * factor, tl.where(quarter >= 2, -s, s) * factor


@triton.jit
def _heads(x, bias, at, row, mask, part, PARTS: tl.constexpr):
    y = summed(x, row + at, mask, part, PARTS)
    return y if bias is None else y + tl.load(bias + at, mask, other=0.0)


@triton.jit
def _turned(
    x, bias, norm, frequencies, axes, coordinates, t, head, own, tokens, part, row, eps, factor,
    PARTS: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Heads `[head, feature]` of a query or key: normed and rotated. Each feature's partner is
    read again."""
    d = tl.arange(0, BLOCK)
    mask = own[:, None] & (d < DIM)[None, :]
    first = (head * DIM)[:, None]
    y = _heads(x, bias, first + d[None, :], row, mask, part, PARTS)
    scale = 1.0
    if norm is not None:
        scale = (1.0 / tl.sqrt(tl.sum(y * y, 1) / DIM + eps))[:, None]
        y = y * scale * tl.load(norm + d, d < DIM, other=0.0)[None, :]
    if PAIRS > 0:
        turned = d < 2 * PAIRS
        if INTERLEAVED:
            pair, other, leads = d // 2, d ^ 1, d % 2 == 0
        else:
            leads = d < PAIRS
            pair = tl.where(leads, d, d - PAIRS)
            other = tl.where(leads, d + PAIRS, d - PAIRS)
        z = _heads(x, bias, first + other[None, :], row, mask & turned[None, :], part, PARTS)
        if norm is not None:
            z = z * scale * tl.load(norm + other, turned, other=0.0)[None, :]
        axis = tl.load(axes + pair, turned, other=0)
        where = tl.load(coordinates + axis * tokens + t, turned, other=0).to(tl.float32)
        cos, sin = _turn(where * tl.load(frequencies + pair, turned, other=0.0), factor)
        z = tl.where(leads[None, :], -z, z)
        y = tl.where(turned[None, :], y * cos[None, :] + z * sin[None, :], y)
    return y


@triton.jit
def _rope_kv(
    q, k, v, q_bias, k_bias, v_bias, q_norm, k_norm, frequencies, axes, coordinates, key, table,
    tables, out, kv, tokens, q_part, q_row, k_part, k_row, v_part, v_row, out_row, kv_block,
    kv_half, eps, factor,
    Q_PARTS: tl.constexpr, K_PARTS: tl.constexpr, V_PARTS: tl.constexpr, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr, KV_BLOCK: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """EACH heads of one token: queries, keys or values."""
    follow()
    t = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * EACH
    queries: tl.constexpr = (HEADS + EACH - 1) // EACH * EACH
    keys: tl.constexpr = (KV_HEADS + EACH - 1) // EACH * EACH
    d = tl.arange(0, BLOCK)
    if first < queries:
        head = first + tl.arange(0, EACH)
        own = head < HEADS
        y = _turned(
            q, q_bias, q_norm, frequencies, axes, coordinates, t, head, own, tokens, q_part,
            t * q_row, eps, factor, Q_PARTS, PAIRS, INTERLEAVED, DIM, BLOCK,
        )  # fmt: skip
        columns = (head * DIM)[:, None] + d[None, :]
        mask = own[:, None] & (d < DIM)[None, :]
        tl.store(out + t * out_row + columns, y.to(tl.bfloat16), mask)
    else:
        position = tl.load(key + t)
        at = tl.maximum(position, 0)
        block = tl.load(tables + tl.load(table + t) + at // KV_BLOCK).to(tl.int64)
        mine = first - queries
        head = tl.where(mine < keys, mine, mine - keys) + tl.arange(0, EACH)
        own = head < KV_HEADS
        columns = (head * DIM)[:, None] + d[None, :]
        mask = own[:, None] & (d < DIM)[None, :]
        if mine < keys:
            y = _turned(
                k, k_bias, k_norm, frequencies, axes, coordinates, t, head, own, tokens, k_part,
                t * k_row, eps, factor, K_PARTS, PAIRS, INTERLEAVED, DIM, BLOCK,
            )  # fmt: skip
        else:
            y = _heads(v, v_bias, columns, t * v_row, mask, v_part, V_PARTS)
        half = (mine >= keys).to(tl.int64) * kv_half
        place = ((head * KV_BLOCK + at % KV_BLOCK) * DIM)[:, None] + d[None, :]
        tl.store(kv + block * kv_block + half + place, y.to(tl.bfloat16), mask & (position >= 0))


@triton.jit
def _copy_slots(
    kv, pairs, kv_block, kv_half, DIM: tl.constexpr, BLOCK: tl.constexpr, KV_BLOCK: tl.constexpr
):
    follow()
    pair, head, half = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    source, target = tl.load(pairs + 2 * pair), tl.load(pairs + 2 * pair + 1)
    d = tl.arange(0, BLOCK)
    mask = (d < DIM) & (source >= 0) & (target >= 0)
    base = kv + half.to(tl.int64) * kv_half + head * (KV_BLOCK * DIM) + d
    y = tl.load(base + (source // KV_BLOCK).to(tl.int64) * kv_block + source % KV_BLOCK * DIM, mask)
    tl.store(base + (target // KV_BLOCK).to(tl.int64) * kv_block + target % KV_BLOCK * DIM, y, mask)


def rope_kv(
    q, k, v, q_bias, k_bias, v_bias, q_norm, k_norm, frequencies, axes, rows, out, kv, *,
    heads, kv_heads, eps, factor, interleaved,
):  # fmt: skip
    """out = queries, normed and rotated; keys likewise, and values, to their places in kv."""
    tokens, dim = q.shape[1], kv.shape[-1]
    programs = triton.cdiv(heads, EACH) + 2 * triton.cdiv(kv_heads, EACH)
    _rope_kv[(tokens, programs)](
        q, k, v, q_bias, k_bias, v_bias, q_norm, k_norm, frequencies, axes, rows.coordinates,
        rows.key, rows.table, rows.tables, out, kv, stride(rows.coordinates), q.stride(0),
        q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), out.stride(0),
        kv.stride(0), kv.stride(1), eps, factor, Q_PARTS=q.shape[0], K_PARTS=k.shape[0],
        V_PARTS=v.shape[0], HEADS=heads, KV_HEADS=kv_heads, PAIRS=frequencies.shape[0],
        INTERLEAVED=interleaved, DIM=dim, BLOCK=triton.next_power_of_2(dim), KV_BLOCK=KV_BLOCK,
        EACH=EACH, num_warps=4, **FOLLOWING,
    )  # fmt: skip


def copy_slots(kv, pairs):
    """Keys and values of slot pairs[w, 0] to slot pairs[w, 1], block * 16 + token; -1: none."""
    dim = kv.shape[-1]
    _copy_slots[(pairs.shape[0], kv.shape[2], 2)](
        kv, pairs, kv.stride(0), kv.stride(1), DIM=dim, BLOCK=triton.next_power_of_2(dim),
        KV_BLOCK=KV_BLOCK, num_warps=1, **FOLLOWING,
    )  # fmt: skip
