"""Experts: pairs of a row and one of its choices, numbered row * choices + choice."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.backends.cuda.constants import PAIR_BLOCK, up
from octavo.backends.cuda.host.rows import gated, put, summed


def route(x: Tensor, bias: Tensor | None, ids: Tensor, weights: Tensor, *, normalize: bool) -> None:
    p = summed(x, bias).double().softmax(-1).float()
    k = ids.shape[1]
    best = p.argsort(dim=-1, descending=True, stable=True)[:, :k].sort(-1).values
    kept = p.gather(1, best)
    if normalize:
        total = kept[:, 0]
        for j in range(1, k):
            total = total + kept[:, j]
        kept = kept / total[:, None]
    ids.copy_(best)
    weights.copy_(kept)


def sort_pairs(ids: Tensor, order: Tensor, owner: Tensor, *, experts: int) -> None:
    order.fill_(-1)
    owner.fill_(-1)
    flat, at = ids.flatten(), 0
    for e in range(experts):
        pairs = (flat == e).nonzero()[:, 0]
        order[at : at + len(pairs)] = pairs.int()
        end = at + up(len(pairs), PAIR_BLOCK)
        owner[at // PAIR_BLOCK : end // PAIR_BLOCK] = e
        at = end


def expert_glu(
    gate: Tensor, up: Tensor, ids: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None,
    act: Tensor, *, activation: str,
) -> None:  # fmt: skip
    chosen = ids.flatten().long()
    first = gate if gate_bias is None else gate + gate_bias[chosen]
    second = up if up_bias is None else up + up_bias[chosen]
    put(gated(first, second, activation), None, act)


def expert_sum(
    x: Tensor, ids: Tensor, weights: Tensor, bias: Tensor | None, residual: Tensor | None,
    out: Tensor,
) -> None:  # fmt: skip
    rows, k = ids.shape
    parts = x.view(rows, k, -1)
    total = torch.zeros_like(parts[:, 0])
    for j in range(k):
        part = parts[:, j] if bias is None else parts[:, j] + bias[ids[:, j].long()]
        total = total + weights[:, j, None] * part
    out.copy_(total if residual is None else residual + total)
