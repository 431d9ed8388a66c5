"""Attention: keys and values into blocks, slices of 256 keys, merged in ascending order."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.backends.cuda.constants import (
    SOFTMAX_SLICE,
    SPLIT_TOKENS,
    attention_lists,
    group_tokens,
)
from octavo.backends.cuda.host.rows import rms, summed
from octavo.backends.cuda.tensors import StepRows, Work

BLOCK = 16


def rope_kv(
    q: Tensor, k: Tensor, v: Tensor, q_bias: Tensor | None, k_bias: Tensor | None,
    v_bias: Tensor | None, q_norm: Tensor | None, k_norm: Tensor | None, frequencies: Tensor,
    axes: Tensor, rows: StepRows, out: Tensor, kv: Tensor, *, heads: int, kv_heads: int,
    eps: float, factor: float, interleaved: bool,
) -> None:  # fmt: skip
    def turned(x: Tensor, norm: Tensor | None, count: int) -> Tensor:
        y = x.reshape(len(x), count, -1)
        y = y if norm is None else rms(y, norm, eps)
        return rotated(y, rows, frequencies, axes, factor, interleaved) if len(axes) else y

    out.copy_(turned(summed(q, q_bias), q_norm, heads).flatten(1))
    keys = turned(summed(k, k_bias), k_norm, kv_heads)
    at = (rows.key >= 0).nonzero()[:, 0]
    place = rows.key[at].long()
    block = rows.tables[rows.table[at].long() + place // BLOCK].long()
    kv[block, 0, :, place % BLOCK] = keys[at].bfloat16()
    values = summed(v, v_bias).reshape(len(keys), kv_heads, -1)
    kv[block, 1, :, place % BLOCK] = values[at].bfloat16()


def rotated(
    x: Tensor, rows: StepRows, frequencies: Tensor, axes: Tensor, factor: float, interleaved: bool
) -> Tensor:
    """Pairs of features `[T, heads, D]` turned by where their rows are."""
    angle = (rows.coordinates[axes.long()].T.float() * frequencies)[:, None]
    cos, sin = angle.cos() * factor, angle.sin() * factor
    half = len(frequencies)
    x, rest = x[..., : 2 * half], x[..., 2 * half :]
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    a, b = a * cos - b * sin, b * cos + a * sin
    x = torch.stack([a, b], -1).flatten(2) if interleaved else torch.cat([a, b], -1)
    return torch.cat([x, rest], -1)


def copy_slots(kv: Tensor, pairs: Tensor) -> None:
    source, target = pairs[pairs[:, 0] >= 0].long().T
    kv[target // BLOCK, :, :, target % BLOCK] = kv[source // BLOCK, :, :, source % BLOCK]


def seen(rows: StepRows, window: int) -> list[tuple[int, int, int]]:
    """Of each row its table, the first key that it sees and the end of them."""
    out = []
    for table, key, first, last in zip(
        *(a.tolist() for a in (rows.table, rows.key, rows.first, rows.last)), strict=True
    ):
        if window:
            first, last = max(first, key - window + 1), min(last, key + window)
        out.append((table, first, last if key >= 0 else first))
    return out


def build_work(
    rows: StepRows, work: Work, *, heads: int, kv_heads: int, window: int, slots: int
) -> None:
    """Groups of more slices than a program's share are computed a slice at a time."""
    tokens = group_tokens(heads // kv_heads, len(rows.key))
    _, programs = attention_lists(heads, kv_heads, len(rows.key))
    groups: list[list[int]] = []
    keys = rows.key.tolist()
    for t, (key, (table, first, last)) in enumerate(zip(keys, seen(rows, window), strict=True)):
        if key < 0:
            continue
        g = groups[-1] if groups else None
        follows = g is not None and g[0] + g[1] == t and g[2] == table
        if g is not None and follows and keys[t - 1] + 1 == key and g[1] < tokens:
            g[1], g[3], g[4] = g[1] + 1, min(g[3], first), max(g[4], last)
        else:
            groups.append([t, 1, table, first, last, -1, 0, 0])
    items: list[list[int]] = []
    wanted = used = 0
    slices = [range(g[3] // SOFTMAX_SLICE, (g[4] - 1) // SOFTMAX_SLICE + 1) for g in groups]
    share = max(1, -(-sum(map(len, slices)) // programs))
    for g, own in zip(groups, slices, strict=True):
        more = len(own) if len(own) > share and g[1] <= SPLIT_TOKENS else 0
        wanted += more
        if more and wanted <= slots:
            g[5], used = wanted - more, used + more
            items += [[*g[:5], s, g[5] + i, 0] for i, s in enumerate(own)]
        else:
            items.append([*g[:5], -1, -1, 0])
    for out, found in ((work.groups, groups), (work.items, items)):
        if found:
            out[: len(found)] = torch.tensor(found, dtype=torch.int32)
    work.counts.copy_(torch.tensor([len(groups), len(items), used, 0], dtype=torch.int32))


def attention(
    q: Tensor, kv: Tensor, rows: StepRows, work: Work, scratch: Tensor, sinks: Tensor | None,
    act: Tensor, *, heads: int, kv_heads: int, scale: float, window: int, softcap: float,
) -> None:  # fmt: skip
    """Each row and head by itself, whatever the work list says; slices in fp64, results rounded."""
    width = q.shape[1]
    queries = q.double().reshape(len(q), kv_heads, heads // kv_heads, -1)
    for t, (table, first, last) in enumerate(seen(rows, window)):
        if first >= last:
            act[t, :width] = 0
            continue
        state = None
        for at in range(first // SOFTMAX_SLICE * SOFTMAX_SLICE, last, SOFTMAX_SLICE):
            end = min(last, at + SOFTMAX_SLICE)
            blocks = rows.tables[table + at // BLOCK : table - (-end // BLOCK)].long()
            keys, values = kv[blocks].double().permute(1, 2, 0, 3, 4).flatten(2, 3)
            scores = queries[t] @ keys.transpose(1, 2) * scale
            scores = softcap * torch.tanh(scores / softcap) if softcap else scores
            scores[..., : max(0, first - at)] = -torch.inf
            scores[..., end - at :] = -torch.inf
            found = softmax_slice(scores, values)
            state = found if state is None else merged(state, found)
        assert state is not None
        m, total, acc = state
        if sinks is not None:
            sink = sinks.double().view(kv_heads, -1, 1)
            top = torch.maximum(m, sink)
            total = total * torch.exp(m - top) + torch.exp(sink - top)
            acc = acc * torch.exp(m - top)
        act[t, :width] = (acc / total).float().flatten().bfloat16()


State = tuple[Tensor, Tensor, Tensor]  # largest score, sum of exponentials, sum of values


def softmax_slice(scores: Tensor, values: Tensor) -> State:
    """A slice by itself."""
    m = scores.max(-1, keepdim=True).values
    p = torch.exp(scores - m)
    return m, p.sum(-1, keepdim=True), p @ values


def merged(a: State, b: State) -> State:
    """Two slices as one."""
    m = torch.maximum(a[0], b[0])
    x, y = torch.exp(a[0] - m), torch.exp(b[0] - m)
    return m, a[1] * x + b[1] * y, a[2] * x + b[2] * y
