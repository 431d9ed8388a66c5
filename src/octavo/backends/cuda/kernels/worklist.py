"""What attention computes in a step, found on the device: launches do not depend on lengths."""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.backends.cuda.constants import (
    SOFTMAX_SLICE,
    SPLIT_TOKENS,
    attention_lists,
    group_tokens,
)
from octavo.backends.cuda.kernels.common import FOLLOWING, follow


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b)


@triton.jit
def _runs(table, key, t, tokens, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Whether each row begins a group, and the rows of the group."""
    inside = t < tokens
    own, mine = tl.load(key + t, inside, other=-1), tl.load(table + t, inside, other=-1)
    before = tl.load(key + t - 1, inside & (t > 0), other=-1)
    theirs = tl.load(table + t - 1, inside & (t > 0), other=-1)
    real = own >= 0
    begins = real & ~((mine == theirs) & (before >= 0) & (own == before + 1))
    run = tl.associative_scan(tl.where(begins, t, 0), 0, _larger)
    heads = real & ((t - run) % GROUP == 0)
    # a group ends where the next row does not go on with it
    following = tl.load(key + t + 1, t + 1 < tokens, other=-1)
    joined = tl.load(table + t + 1, t + 1 < tokens, other=-1) == mine
    goes_on = (following > 0) & joined & (following == own + 1) & ((t + 1 - run) % GROUP != 0)
    end = tl.associative_scan(tl.where(goes_on, BLOCK, t + 1), 0, _smaller, reverse=True)
    return heads, tl.where(heads, end - t, 0)


@triton.jit
def _build_work(
    key, table, first, last, groups, items, counts, tokens, window, slots, programs,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, SLICE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    follow()
    t = tl.arange(0, BLOCK)
    heads, rows = _runs(table, key, t, tokens, GROUP, BLOCK)
    low = tl.full((BLOCK,), 2147483647, tl.int32)
    high = tl.zeros((BLOCK,), tl.int32)
    for j in range(0, tl.max(rows, 0)):
        mine = j < rows
        at = tl.load(key + t + j, mine, other=0)
        begin = tl.load(first + t + j, mine, other=2147483647)
        end = tl.load(last + t + j, mine, other=0)
        if window > 0:
            begin = tl.where(mine, tl.maximum(begin, at - window + 1), begin)
            end = tl.minimum(end, tl.where(mine, at + window, 0))
        low, high = tl.minimum(low, begin), tl.maximum(high, end)
    slices = tl.where(heads, (high - 1) // SLICE - low // SLICE + 1, 0)
    share = tl.maximum(1, tl.cdiv(tl.sum(slices, 0), programs))
    wanted = tl.where((rows <= SPLIT) & (slices > share), slices, 0)
    taken = tl.cumsum(wanted, 0)
    split = (wanted > 0) & (taken <= slots)
    begun = heads.to(tl.int32)
    group = tl.cumsum(begun, 0) - begun
    entry = groups + group * 8
    tl.store(entry, t, heads)
    tl.store(entry + 1, rows, heads)
    begins = tl.load(table + t, heads, other=0)
    tl.store(entry + 2, begins, heads)
    tl.store(entry + 3, low, heads)
    tl.store(entry + 4, high, heads)
    tl.store(entry + 5, tl.where(split, taken - wanted, -1), heads)
    tl.store(entry + 6, tl.zeros((BLOCK,), tl.int32), heads)
    tl.store(entry + 7, tl.zeros((BLOCK,), tl.int32), heads)
    count = tl.where(split, slices, begun)
    item = tl.cumsum(count, 0) - count
    for s in range(0, tl.max(count, 0)):
        mine, place = s < count, items + (item + s) * 8
        tl.store(place, t, mine)
        tl.store(place + 1, rows, mine)
        tl.store(place + 2, begins, mine)
        tl.store(place + 3, low, mine)
        tl.store(place + 4, high, mine)
        tl.store(place + 5, tl.where(split, low // SLICE + s, -1), mine)
        tl.store(place + 6, tl.where(split, taken - wanted + s, -1), mine)
        tl.store(place + 7, tl.zeros((BLOCK,), tl.int32), mine)
    tl.store(counts, tl.sum(begun, 0))
    tl.store(counts + 1, tl.sum(count, 0))
    tl.store(counts + 2, tl.sum(tl.where(split, slices, 0), 0))
    tl.store(counts + 3, 0)


def build_work(rows, work, *, heads, kv_heads, window, slots):
    """Groups of rows that fill a query tile, and the items that attention computes of them: those
    of more slices than a program's share a slice at a time."""
    count = rows.key.shape[0]
    block = max(16, triton.next_power_of_2(count))
    _, programs = attention_lists(heads, kv_heads, count)
    _build_work[(1,)](
        rows.key, rows.table, rows.first, rows.last, work.groups, work.items, work.counts, count,
        window, slots, programs, GROUP=group_tokens(heads // kv_heads, count), BLOCK=block,
        SLICE=SOFTMAX_SLICE, SPLIT=SPLIT_TOKENS, num_warps=8 if block > 256 else 4, **FOLLOWING,
    )  # fmt: skip
