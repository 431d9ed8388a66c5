"""Attention over blocks of keys: one kernel for prefill and decoding.

Keys are taken in tiles of 64 with an online softmax that begins anew every 256 positions; those
slices are merged in their order. Keys are operand A, queries the columns of B: all heads that share
keys, times tokens. What a row does not see is an exact nothing to it, so its bits do not depend on
the tile's other columns, on how many there are, nor on who computes a slice.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.backends.base import BLOCK as KV_BLOCK
from octavo.backends.cuda.constants import KEY_TILE, SOFTMAX_SLICE, attention_lists, query_columns
from octavo.backends.cuda.kernels.common import FOLLOWING, dot, follow, tanh
from octavo.backends.cuda.kernels.configs import attention_config

LOG2_E = 1.4426950408889634


@triton.jit
def _shares(m, other):
    """The larger maximum and what sums relative to either are multiplied by. -inf: of nothing."""
    new = tl.maximum(m, other)
    safe = tl.where(new == float("-inf"), 0.0, new)
    return new, tl.exp2(m - safe), tl.exp2(other - safe)


@triton.jit
def _finish(m, mass, sink, SINKS: tl.constexpr):
    """What the row's output is multiplied by: its sum, and the sink's share of it."""
    own = 1.0
    if SINKS:
        _, own, theirs = _shares(m, sink)
        mass = tl.fma(mass, own, theirs)
    return own / tl.where(mass > 0, mass, 1.0)


@triton.jit
def _block(tables, tile, low, high, KEYS: tl.constexpr, KV_BLOCK: tl.constexpr):
    """The block of each key of a tile."""
    j = tile * KEYS + tl.arange(0, KEYS)
    return tl.load(tables + j // KV_BLOCK, (j >= low) & (j < high), other=0)


@triton.jit
def _walk(
    query, kv, kv_block, table, low, high, begin, end, tile, tiles, scale, cap,
    N: tl.constexpr, KEYS: tl.constexpr, SLICE: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr,
    KV_BLOCK: tl.constexpr, HALF: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """total, m, mass of the slices of tiles [tile, tiles), merged as they end. Column i sees keys
    [begin, end)[i]. Blocks of keys are looked up a tile ahead."""
    d = tl.arange(0, D)
    m, sums = tl.full((N,), float("-inf"), tl.float32), tl.zeros((KEYS, N), tl.float32)
    total_m, total_mass = m, tl.zeros((N,), tl.float32)
    acc, total = tl.zeros((D, N), tl.float32), tl.zeros((D, N), tl.float32)
    block = _block(table, tile, low, high, KEYS, KV_BLOCK)
    for number in range(tile, tiles):
        j = number * KEYS + tl.arange(0, KEYS)
        stored = (j >= low) & (j < high)
        rest = kv + block.to(tl.int64) * kv_block + j % KV_BLOCK * DIM
        block = _block(table, number + 1, low, high, KEYS, KV_BLOCK)
        places = rest[:, None] + d[None, :]
        if DIM == D:
            k = tl.load(places)
            v = tl.load(places + HALF, stored[:, None], other=0.0)
        else:
            held = stored[:, None] & (d < DIM)[None, :]
            k = tl.load(places, held, other=0.0)
            v = tl.load(places + HALF, held, other=0.0)
        s = dot(k, query, tl.zeros((KEYS, N), tl.float32)) * scale
        if CAPPED:
            s = cap * tanh(s)
        seen = (j[:, None] >= begin[None, :]) & (j[:, None] < end[None, :])
        s = tl.where(seen, s, float("-inf"))
        new, keep, _ = _shares(m, tl.max(s, 0))
        p = tl.exp2(s - tl.where(new == float("-inf"), 0.0, new)[None, :])
        sums = tl.fma(sums, keep[None, :], p)
        acc = dot(tl.trans(v), p.to(tl.bfloat16), acc * keep[None, :])
        m = new
        if ((number + 1) % (SLICE // KEYS) == 0) | (number + 1 == tiles):  # a slice ends
            total_m, before, added = _shares(total_m, m)
            total_mass = tl.fma(total_mass, before, tl.sum(sums, 0) * added)
            total = tl.fma(total, before[None, :], acc * added[None, :])
            m = tl.full((N,), float("-inf"), tl.float32)
            acc, sums = tl.zeros((D, N), tl.float32), tl.zeros((KEYS, N), tl.float32)
    return total, total_m, total_mass


@triton.jit
def _attention(
    q, kv, key, first, last, tables, items, counts, scratch, sinks, act, q_row, kv_block,
    act_row, window, scale, cap,
    HEADS: tl.constexpr, SHARED: tl.constexpr, N: tl.constexpr, KEYS: tl.constexpr,
    SLICE: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, KV_BLOCK: tl.constexpr,
    HALF: tl.constexpr, SPLIT: tl.constexpr, CAPPED: tl.constexpr, LOG2_E: tl.constexpr,
):  # fmt: skip
    """Items of the work list, one after the other, of up to N of the heads that share a key head.
    N: columns of a query tile."""
    follow()
    PER: tl.constexpr = min(SHARED, N)
    TILES: tl.constexpr = (SHARED + PER - 1) // PER
    kv_head = tl.program_id(1) // TILES
    token, own = tl.arange(0, N) // PER, tl.program_id(1) % TILES * PER + tl.arange(0, N) % PER
    head = kv_head * SHARED + own
    d = tl.arange(0, D)
    kv += kv_head * (KV_BLOCK * DIM)
    for item in range(tl.program_id(0), tl.load(counts + 1), tl.num_programs(0)):
        entry = items + 8 * item
        row, rows = tl.load(entry) + token, tl.load(entry + 1)
        low, high, only = tl.load(entry + 3), tl.load(entry + 4), tl.load(entry + 5)
        mine = (token < rows) & (own < SHARED)
        wanted = mine[None, :] & (d < DIM)[:, None]
        place = row.to(tl.int64) * q_row + head * DIM
        query = tl.load(q + place[None, :] + d[:, None], wanted, other=0.0)
        at = tl.load(key + row, mine, other=0)
        begin, end = tl.load(first + row, mine, other=0), tl.load(last + row, mine, other=0)
        if window > 0:
            begin, end = tl.maximum(begin, at - window + 1), tl.minimum(end, at + window)
        table = tables + tl.load(entry + 2)
        whole = only < 0
        from_key = tl.where(whole, low, tl.maximum(low, only * SLICE))
        to_key = tl.where(whole, high, tl.minimum(high, (only + 1) * SLICE))
        tile, tiles = from_key // KEYS, tl.cdiv(to_key, KEYS)
        total, total_m, total_mass = _walk(
            query, kv, kv_block, table, low, high, begin, end, tile, tiles, scale, cap,
            N, KEYS, SLICE, DIM, D, KV_BLOCK, HALF, CAPPED,
        )  # fmt: skip
        if whole:
            sink = total_m
            if sinks is not None:
                sink = tl.load(sinks + head, mine, other=0.0) * LOG2_E
            total = total * _finish(total_m, total_mass, sink, sinks is not None)[None, :]
            out = act + row.to(tl.int64) * act_row + head * DIM
            tl.store(out[None, :] + d[:, None], total.to(tl.bfloat16), wanted)
        else:
            slot = tl.load(entry + 6)
            part = scratch + ((slot.to(tl.int64) * SPLIT + token) * HEADS + head) * (DIM + 2)
            tl.store(part[None, :] + d[:, None], total, wanted)
            tl.store(part + DIM, total_m, mine)
            tl.store(part + DIM + 1, total_mass, mine)


@triton.jit
def _merge(
    key, groups, counts, scratch, sinks, act, tokens, act_row,
    HEADS: tl.constexpr, SLICE: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr,
    SPLIT: tl.constexpr, LOG2_E: tl.constexpr,
):  # fmt: skip
    """Slices of split groups, ascending; 0 for padded rows. One head."""
    follow()
    head = tl.program_id(1)
    d = tl.arange(0, D)
    for t in range(tl.program_id(0), tokens, tl.num_programs(0)):
        out = act + tl.cast(t, tl.int64) * act_row + head * DIM + d
        tl.store(out, tl.zeros((D,), tl.bfloat16), (d < DIM) & (tl.load(key + t) < 0))
    for g in range(tl.program_id(0), tl.load(counts), tl.num_programs(0)):
        group = groups + g * 8
        slot, low = tl.load(group + 5), tl.load(group + 3)
        slices = (tl.load(group + 4) - 1) // SLICE - low // SLICE + 1
        for r in range(0, tl.where(slot < 0, 0, tl.load(group + 1))):
            total, m, mass = tl.zeros((D,), tl.float32), float("-inf"), 0.0
            for s in range(0, slices):
                place = (tl.cast(slot + s, tl.int64) * SPLIT + r) * HEADS + head
                part = scratch + place * (DIM + 2)
                acc = tl.load(part + d, d < DIM, other=0.0)
                m, before, added = _shares(m, tl.load(part + DIM))
                mass = tl.fma(mass, before, tl.load(part + DIM + 1) * added)
                total = tl.fma(total, before, acc * added)
            sink = m
            if sinks is not None:
                sink = tl.load(sinks + head) * LOG2_E
            total = total * _finish(m, mass, sink, sinks is not None)
            out = act + tl.cast(tl.load(group) + r, tl.int64) * act_row + head * DIM + d
            tl.store(out, total.to(tl.bfloat16), d < DIM)


def attention(
    q, kv, rows, work, scratch, sinks, act, *, heads, kv_heads, scale, window, softcap
):  # fmt: skip
    """act = softmax(q k^T scale, capped) v over the keys that each row sees."""
    tokens, dim, shared = q.shape[0], kv.shape[-1], heads // kv_heads
    block = max(64, triton.next_power_of_2(dim))
    lists, programs = attention_lists(heads, kv_heads, tokens)
    warps, stages = attention_config(block)
    scaled, cap = (scale / softcap, softcap * LOG2_E) if softcap > 0 else (scale * LOG2_E, 0.0)
    _attention[(min(programs, work.items.shape[0]), lists)](
        q, kv, rows.key, rows.first, rows.last, rows.tables, work.items, work.counts, scratch,
        sinks, act, q.stride(0), kv.stride(0), act.stride(0), window,
        scaled, cap, HEADS=heads, SHARED=shared, N=query_columns(tokens), KEYS=KEY_TILE,
        SLICE=SOFTMAX_SLICE, DIM=dim, D=block, KV_BLOCK=KV_BLOCK, HALF=kv.stride(1),
        SPLIT=scratch.shape[1], CAPPED=softcap > 0, LOG2_E=LOG2_E, num_warps=warps,
        num_stages=stages, **FOLLOWING,
    )  # fmt: skip
    _merge[(min(programs, tokens), heads)](
        rows.key, work.groups, work.counts, scratch, sinks, act, tokens, act.stride(0),
        HEADS=heads, SLICE=SOFTMAX_SLICE, DIM=dim, D=block, SPLIT=scratch.shape[1], LOG2_E=LOG2_E,
        num_warps=1, **FOLLOWING,
    )  # fmt: skip
