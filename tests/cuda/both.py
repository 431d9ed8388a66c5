"""An operation computed twice: in plain torch, and by its kernel on copies of everything."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from octavo.backends.cuda import host
from octavo.backends.cuda.constants import up
from octavo.backends.cuda.tensors import Matrix, StepRows
from tests.cuda.gpu import find_kernels

kernels = find_kernels()
Args = tuple[Any, ...]


def both(name: str, *args: Any, **named: Any) -> tuple[Args, Args]:
    """The arguments as the plain operation and as the kernel leaves them."""
    copies = copy.deepcopy(args)
    getattr(host, name)(*args, **named)
    getattr(kernels, name)(*copies, **named)
    return args, copies


def assert_close(expected: Tensor, got: Tensor, bound: float = 0.0) -> None:
    """Equal but for `bound` of 1 and of the value; of bf16 a unit more: what lies close to the
    middle of two is rounded to either."""
    difference, size = (expected.double() - got.double()).abs(), expected.double().abs()
    unit = 2.0**-7 if expected.dtype is torch.bfloat16 else 0.0
    assert bool((difference <= bound * (1 + size) + unit * size).all()), difference.max()


def whole(*shape: int, most: int = 3) -> Tensor:
    """Small whole numbers, whose sums are exact in any order."""
    return torch.randint(-most, most + 1, shape).float()


def act(values: Tensor) -> Tensor:
    """As an input of linear layers: bf16 with columns of zeros up to a multiple of 64."""
    out = torch.zeros(values.shape[0], up(values.shape[1]), dtype=torch.bfloat16)
    out[:, : values.shape[1]] = values.bfloat16()
    return out


def empty_act(rows: int, width: int) -> Tensor:
    return torch.zeros(rows, up(width), dtype=torch.bfloat16)


def bf16(n: int, k: int) -> Matrix:
    codes = torch.zeros(up(n), up(k), dtype=torch.bfloat16)
    codes[:n, :k] = whole(n, k).bfloat16()
    return Matrix("bf16", n, k, 0, codes)


def coded(kind: str, n: int, k: int, group: int, minima: bool = False) -> Matrix:
    """Random codes with scales of 1 or 2: values are whole numbers, exact in bf16."""
    width = 32 if kind in ("int4", "table4") else 64
    codes = torch.randint(0, 256, (up(n) // 64, up(k) // 64, 64, width), dtype=torch.uint8)
    if kind == "int8":
        codes = codes % 8 + 124
    elif kind == "fp8":  # 0, or 1, 1.5, 2, 3 with either sign
        codes = torch.tensor([0, 56, 60, 64, 68, 184, 188, 192], dtype=torch.uint8)[
            codes.long() % 8
        ]
    scales = torch.randint(1, 3, (-(-up(k) // group), up(n))).half()
    scales[:, n:] = 0
    least = (-8 if kind == "int4" else -128) * scales if minima else None
    table = torch.arange(-8, 8).float() if kind == "table4" else None
    return Matrix(kind, n, k, group, codes, scales, least, table)


def matrices(each: list[Matrix]) -> Matrix:
    """Experts as one matrix with a leading dimension."""
    stacked = {
        name: torch.stack([getattr(m, name) for m in each])
        for name in ("codes", "scales", "minima")
        if getattr(each[0], name) is not None
    }
    return each[0]._replace(**stacked)


def step_rows(
    spans: list[tuple[int, int]], blocks: int = 48, padded: int = 0, backwards: bool = False
) -> StepRows:
    """Rows of sequences, each (first position, tokens), with `blocks` blocks in a random order, and
    padded ones. backwards: each sees its whole sequence."""
    tables = torch.randperm(len(spans) * blocks).int()
    table, key, last = [], [], []
    for number, (start, count) in enumerate(spans):
        table += [number * blocks] * count
        key += range(start, start + count)
        last += [start + count] * count if backwards else range(start + 1, start + count + 1)

    def ints(values: list[int], fill: int) -> Tensor:
        return torch.tensor(values + [fill] * padded, dtype=torch.int32)

    keys, zeros = ints(key, -1), ints([0] * len(key), 0)
    positions = keys.clamp(min=0)
    return StepRows(
        zeros, positions, zeros, zeros - 1, ints(table, 0), keys, zeros, ints(last, 0),
        positions[None], tables,
    )  # fmt: skip
