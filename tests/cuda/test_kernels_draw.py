"""Tokens drawn by a kernel, beside the CPU's sampler: the same random numbers, order and limits."""

from __future__ import annotations

import pytest
import torch

from octavo import _native
from octavo.backends.base import SamplingRow
from tests.cuda.both import kernels

VOCABULARY = 300


def drawn(logits: torch.Tensor, rows: list[SamplingRow]) -> list[int]:
    def column(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([getattr(row, name) for row in rows], dtype=dtype)

    size = -(-logits.shape[1] // 32) * 4
    masks = torch.tensor([list(row.mask or b"\xff" * size) for row in rows], dtype=torch.uint8)
    out = torch.zeros(len(rows), dtype=torch.int32)
    kernels.draw(
        logits, masks if any(row.mask for row in rows) else None,
        column("temperature", torch.float32), column("top_p", torch.float32),
        column("min_p", torch.float32), column("top_k", torch.int32), column("seed", torch.int64),
        column("position", torch.int64), out,
    )  # fmt: skip
    return out.tolist()


def by_cpu(logits: torch.Tensor, rows: list[SamplingRow]) -> list[int]:
    isa = _native.isas()[0]
    return [
        int(_native.sample(isa, x.numpy().copy(), row)[0])
        for x, row in zip(logits, rows, strict=True)
    ]


CASES = [
    ({}, True), ({"top_k": 5}, False), ({"top_p": 0.7}, True), ({"min_p": 0.05}, False),
    ({"top_k": 40, "top_p": 0.9, "min_p": 0.01}, False), ({"temperature": 0.0}, True),
    ({"temperature": 1.7}, False), ({"top_k": 1}, True),
]  # fmt: skip


@pytest.mark.parametrize(("named", "masked"), CASES, ids=str)
def test_draws_what_the_cpu_draws(named: dict[str, float], masked: bool) -> None:
    torch.manual_seed(5)
    logits = (torch.randn(4, VOCABULARY + 9) * 2)[:, :VOCABULARY]
    mask = bytes([0x6D] * 40) if masked else b""
    rows = [
        SamplingRow(**{"temperature": 0.8, "seed": (7 << 33) + i, "position": i * 1000, **named}, mask=mask)
        for i in range(4)
    ]  # fmt: skip
    assert drawn(logits, rows) == by_cpu(logits.contiguous(), rows)


def test_of_equals_the_first_are_kept() -> None:
    logits = torch.zeros(8, VOCABULARY)
    rows = [SamplingRow(temperature=1.0, top_k=6, seed=3, position=i) for i in range(8)]
    found = drawn(logits, rows)
    assert found == by_cpu(logits, rows)
    assert set(found) <= set(range(6))
    assert len(set(found)) > 2


def test_nothing_to_draw() -> None:
    rows = [SamplingRow(temperature=t, mask=bytes(40)) for t in (0.0, 1.0)]
    assert drawn(torch.zeros(2, VOCABULARY), rows) == [-1, -1]


def test_chunks() -> None:
    """Of a vocabulary that is read in pieces."""
    torch.manual_seed(6)
    logits = torch.randn(2, 8192 + 500)
    rows = [
        SamplingRow(temperature=1.0, seed=9, position=i, top_k=k) for i, k in enumerate((0, 2000))
    ]
    assert drawn(logits, rows) == by_cpu(logits, rows)
