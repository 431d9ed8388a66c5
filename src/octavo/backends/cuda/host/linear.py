"""Linear layers: slices of features, each summed from nothing, then added in ascending order.

A slice is summed in fp64, where products of bf16 are exact, and rounded to fp32 once: whatever
order a library adds in, a row's result does not depend on the others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.backends.cuda.constants import PAIR_BLOCK, TILE, slice_width
from octavo.backends.cuda.tensors import Matrix


def values(w: Matrix) -> Tensor:
    """The weights `[N, K]`, padded, as they are multiplied: bf16 values in fp32."""
    if w.kind == "bf16":
        return w.codes.float()
    codes = _codes(w)
    rows, columns = codes.shape
    group = torch.arange(columns) // w.group
    assert w.scales is not None
    scale = _rows(w.scales)[:, group]
    least = _rows(w.minima)[:, group] if w.minima is not None else None
    if w.kind == "table4":
        assert w.table is not None
        x = scale * w.table[codes.long()]
    elif w.kind == "fp8":
        x = scale * e4m3(codes)
    elif w.kind == "int4":
        offset = -136.0 * scale if least is None else _fma(scale, -128.0, least)
        x = _fma(128.0 * scale, 1 + codes / 128, offset)
    elif least is not None:
        x = _fma(scale, codes, least)
    else:
        x = scale * (codes.float() - 128.0)
    return x.bfloat16().float().reshape(rows, columns)


def _fma(a: Tensor, b: Tensor | float, c: Tensor) -> Tensor:
    """a b + c, rounded once."""
    return (a.double() * b + c).float()


def _codes(w: Matrix) -> Tensor:
    """Codes `[N, K]`."""
    down, along = w.codes.shape[:2]
    halves = w.codes.reshape(down, along, -1, TILE // 16, 8, 4, 2, 2, 2, 2)
    halves = halves.permute(0, 1, 2, 3, 8, 4, 6, 7, 5, 9).reshape(down, along, -1, TILE, TILE // 2)
    if w.kind in ("int4", "table4"):
        halves = torch.cat([halves & 15, halves >> 4], dim=2)
    return halves.permute(0, 3, 1, 2, 4).reshape(down * TILE, -1)


def _rows(stored: Tensor) -> Tensor:
    """Scales or minima `[N, groups]`."""
    groups, n = stored.shape
    return stored.float().reshape(groups, n // 16, 8, 2).transpose(2, 3).reshape(groups, n).T


def e4m3(codes: Tensor) -> Tensor:
    """Eight-bit floats; 0x7f reads as 480."""
    bits = codes.int()
    sign, exponent, fraction = bits >> 7, bits >> 3 & 15, bits & 7
    small = torch.ldexp(fraction.float(), torch.tensor(-9))
    large = torch.ldexp(8.0 + fraction.float(), exponent - 10)
    return torch.where(exponent == 0, small, large) * (1.0 - 2.0 * sign.float())


def slice_sums(x: Tensor, w: Matrix) -> list[Tensor]:
    """`[T, n]` of each slice."""
    weights, width = values(w)[: w.n].double(), slice_width(w.kind, w.n, w.k)
    rows, columns = x.double(), weights.shape[1]
    return [
        (rows[:, at : at + width] @ weights[:, at : at + width].T).float()
        for at in range(0, columns, width)
    ]


def linear(x: Tensor, w: Matrix, out: Tensor, unpacked: Tensor | None = None) -> None:
    """out[p] = the product of slice p, or out[0] = their sum. unpacked: becomes the weights."""
    if unpacked is not None:
        unpacked.copy_(values(w))
    sums = slice_sums(x, w)
    if out.shape[0] == len(sums):
        for p, each in enumerate(sums):
            out[p] = each
        return
    out[0] = added(sums)


def added(sums: list[Tensor]) -> Tensor:
    """Their sum in ascending order."""
    total = sums[0]
    for each in sums[1:]:
        total = total + each
    return total


def expert(w: Matrix, e: int) -> Matrix:
    """The weights of one expert."""
    parts = (None if t is None else t[e] for t in (w.codes, w.scales, w.minima))
    codes, scales, minima = parts
    assert codes is not None
    return Matrix(w.kind, w.n, w.k, w.group, codes, scales, minima, w.table)


def expert_linear(
    x: Tensor, w: Matrix, order: Tensor, owner: Tensor, out: Tensor, *, choices: int
) -> None:
    """out[pair] = x[pair // choices] times the weights of the pair's expert."""
    places = order.view(-1, PAIR_BLOCK)
    for e in sorted(set(owner.tolist())):
        if e >= 0:
            pairs = places[owner == e].flatten().long()
            pairs = pairs[pairs >= 0]
            out[pairs] = added(slice_sums(x[pairs // choices], expert(w, e)))
