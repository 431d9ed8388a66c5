"""Rows that the device draws for, among others: the tokens of the CPU's sampler."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo import _native
from octavo.backends.base import SamplingRow
from octavo.backends.cuda.sampling import Sampler
from tests.cuda.gpu import DEVICE, interpreted

ROWS = [
    SamplingRow(),
    SamplingRow(temperature=0.8, seed=5, position=3),
    SamplingRow(temperature=1.2, top_k=20, top_p=0.9, seed=1 << 63, position=9),
    SamplingRow(temperature=0.7, min_p=0.05, seed=7),
    SamplingRow(temperature=0.9, typical_p=0.8, seed=8),
    SamplingRow(temperature=0.9, seed=9, logprobs=2),
    SamplingRow(temperature=0.9, seed=10, adjustments=[(4, 2.0, 1.0)]),
    SamplingRow(mask=b"\xf0" + bytes(39)),
]


def test_mixed_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    interpreted(monkeypatch)
    logits = torch.randn(len(ROWS), 320, generator=torch.Generator().manual_seed(2)) * 3
    placed = logits.to(DEVICE)
    sampler = Sampler(torch.zeros(16, dtype=torch.int32, device=DEVICE))
    assert [sampler.here(row) for row in ROWS] == [True] * 4 + [False] * 4
    found = sampler.sample(placed, ROWS)
    expected = [
        _native.sample(_native.isas()[0], np.ascontiguousarray(x.numpy()), row)
        for x, row in zip(logits, ROWS, strict=True)
    ]
    assert [s.token for s in found] == [e[0] for e in expected]
    assert found[5].logprob == expected[5][1]
    for i, row in enumerate(ROWS):
        assert sampler.sample(placed[i : i + 1], [row]) == [found[i]]
