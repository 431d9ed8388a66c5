"""Rotations, the cache, work lists and attention by kernels, beside plain torch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from octavo.backends.cuda import host
from octavo.backends.cuda.tensors import StepRows, Work
from tests.cuda.both import assert_close, both, empty_act, kernels, step_rows, whole

DIM = 24


def cache(rows: StepRows, kv_heads: int, dim: int = DIM) -> Tensor:
    """A layer's view of blocks of two layers; NaN where nothing is written."""
    count = int(rows.tables.max()) + 1
    return torch.full((count, 2, 2, kv_heads, 16, dim), math.nan, dtype=torch.bfloat16)[:, 1]


def fill(kv: Tensor, rows: StepRows, value: Tensor | None = None) -> None:
    """Keys and values of all positions that rows may see."""
    for t in range(len(rows.key)):
        for at in range(int(rows.last[t])):
            block = rows.tables[rows.table[t] + at // 16]
            if bool(kv[block, :, :, at % 16].isnan().any()):
                kv[block, :, :, at % 16] = whole(*kv[block, :, :, at % 16].shape).bfloat16()


def work(rows: StepRows, heads: int, kv_heads: int, window: int, slots: int) -> Work:
    size = len(rows.key) + slots
    out = Work(*(torch.full(s, -9, dtype=torch.int32) for s in ((size, 8), (size, 8), (4,))))
    kernels.build_work(rows, out, heads=heads, kv_heads=kv_heads, window=window, slots=slots)
    return out


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("pairs", "norm", "bias", "parts"),
    [(12, True, False, 2), (5, False, True, 1), (0, True, True, 3)],
)
def test_rope_kv(interleaved: bool, pairs: int, norm: bool, bias: bool, parts: int) -> None:
    rows = step_rows([(0, 3), (30, 2), (40_000 % 700, 1)], padded=2)
    places = torch.randint(0, 100_000, (2, 8), dtype=torch.int32)
    rows = rows._replace(coordinates=places)
    heads, kv_heads = 4, 2
    q, k, v = (
        torch.randn(parts, 8, h * DIM + 3)[:, :, : h * DIM] for h in (heads, kv_heads, kv_heads)
    )
    biases = [torch.randn(h * DIM) if bias else None for h in (heads, kv_heads, kv_heads)]
    norms = [torch.rand(DIM) + 0.5 if norm else None for _ in range(2)]
    frequencies = 10000.0 ** -(torch.arange(pairs) / 12)
    axes = torch.arange(pairs, dtype=torch.int32) % 2
    kv = cache(rows, kv_heads)
    plain, ours = both(
        "rope_kv", q, k, v, *biases, *norms, frequencies, axes, rows,
        torch.zeros(8, heads * DIM, dtype=torch.bfloat16), kv, heads=heads, kv_heads=kv_heads,
        eps=1e-6, factor=1.25, interleaved=interleaved,
    )  # fmt: skip
    assert_close(plain[11], ours[11], 1e-3)
    assert torch.equal(plain[12].isnan(), ours[12].isnan())
    assert_close(plain[12].nan_to_num(), ours[12].nan_to_num(), 1e-3)


def test_copy_slots() -> None:
    kv = torch.randn(4, 2, 2, 3, 16, DIM).bfloat16()[:, 1]
    pairs = torch.tensor([[3, 40], [-1, 5], [17, 63], [-1, -1]], dtype=torch.int32)
    plain, ours = both("copy_slots", kv, pairs)
    assert torch.equal(plain[0], ours[0])
    assert torch.equal(ours[0][2, :, :, 8], kv[0, :, :, 3])


SPANS = [
    [(0, 1)], [(700, 1), (511, 1), (1500, 1)], [(510, 40), (0, 3), (1030, 4)],
    [(600, 1), (1700, 2), (520, 1), (3, 1)],
]  # fmt: skip


@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize("slots", [0, 5, 32])
@pytest.mark.parametrize("spans", SPANS)
@pytest.mark.parametrize("heads", [16, 66])
def test_build_work(spans: list[tuple[int, int]], slots: int, window: int, heads: int) -> None:
    """With many heads few programs walk a list, and each has a share of several slices."""
    rows = step_rows(spans, blocks=120, padded=3)
    size = len(rows.key) + slots
    lists = Work(*(torch.full(s, -9, dtype=torch.int32) for s in ((size, 8), (size, 8), (4,))))
    plain, ours = both(
        "build_work", rows, lists, heads=heads, kv_heads=heads, window=window, slots=slots
    )
    for expected, got in zip(plain[1], ours[1], strict=True):
        assert torch.equal(expected, got)


def attend(
    rows: StepRows, *, slots: int = 16, heads: int = 4, kv_heads: int = 2, window: int = 0,
    softcap: float = 0.0, sinks: bool = False, flat: bool = False, dim: int = DIM,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """By plain torch and by the kernel; and by the kernel without splitting. flat: all keys score
    the same, so that results are means of what is seen."""
    tokens, kv = len(rows.key), cache(rows, kv_heads, dim)
    fill(kv, rows)
    q = torch.zeros(tokens, heads * dim) if flat else torch.randn(tokens, heads * dim)
    settings = {"heads": heads, "kv_heads": kv_heads, "scale": 0.2, "window": window, "softcap": softcap}  # fmt: skip
    scratch = torch.full((slots, 4, heads, dim + 2), math.nan)
    given = (
        q.bfloat16(), kv, rows, work(rows, heads, kv_heads, window, slots), scratch,
        torch.randn(heads) if sinks else None, empty_act(tokens, heads * dim) + 7,
    )  # fmt: skip
    expected, ours, unsplit = (given[6].clone() for _ in range(3))
    host.attention(given[0], kv.nan_to_num(), *given[2:6], expected, **settings)
    kernels.attention(*given[:6], ours, **settings)
    kernels.attention(
        *given[:3], work(rows, heads, kv_heads, window, 0), *given[4:6], unsplit, **settings
    )
    return expected, ours, unsplit


CASES = {
    "decode": ({"spans": [(700, 1), (40, 1), (511, 1)], "padded": 1}, {}),
    "prefill": ({"spans": [(505, 12), (0, 3)]}, {}),
    "window": ({"spans": [(700, 1), (590, 10)]}, {"window": 90}),
    "softcap and sinks": ({"spans": [(600, 2), (5, 1)]}, {"softcap": 3.0, "sinks": True}),
    "whole sequences": ({"spans": [(0, 30), (0, 7)], "backwards": True}, {}),
    "window both ways": ({"spans": [(0, 40)], "backwards": True}, {"window": 9}),
    "shared by three": ({"spans": [(520, 25)]}, {"heads": 3, "kv_heads": 1}),
}


@pytest.mark.parametrize("name", CASES)
def test_attention(name: str) -> None:
    given, named = CASES[name]
    rows = step_rows(**given)
    plain, ours, unsplit = attend(rows, **named)
    assert torch.equal(ours, unsplit)
    assert (
        plain.float() - ours.float()
    ).abs().max() <= 3 * 2.0**-6  # values up to 3: p and result rounded


@pytest.mark.parametrize("name", ["decode", "prefill", "window", "window both ways"])
def test_masks(name: str) -> None:
    """Means of whole numbers: a key too many or too few would show."""
    given, named = CASES[name]
    plain, ours, unsplit = attend(step_rows(**given), flat=True, **named)
    assert torch.equal(ours, unsplit)
    assert_close(plain, ours)


def test_segments_and_images() -> None:
    """Rows that begin to see later, and rows that see ahead."""
    rows = step_rows([(0, 20)])
    first = torch.tensor([0] * 9 + [9] * 11, dtype=torch.int32)
    last = torch.tensor([9] * 9 + [20] * 11, dtype=torch.int32)
    plain, ours, _ = attend(rows._replace(first=first, last=last), flat=True)
    assert_close(plain, ours)


def test_what_a_group_shares_does_not_show() -> None:
    """A row alone, and beside others that see more than it."""
    rows = step_rows([(500, 16)])
    kv, q = cache(rows, 1), torch.randn(16, 2 * DIM).bfloat16()
    fill(kv, rows)
    scratch, settings = torch.zeros(8, 4, 2, DIM + 2), {"heads": 2, "kv_heads": 1, "scale": 0.3, "window": 0, "softcap": 0.0}  # fmt: skip
    together = empty_act(16, 2 * DIM)
    kernels.attention(q, kv, rows, work(rows, 2, 1, 0, 8), scratch, None, together, **settings)
    for t in (0, 13):
        alone = StepRows(
            *(x[t : t + 1] for x in rows[:8]), rows.coordinates[:, t : t + 1], rows.tables
        )
        out = empty_act(1, 2 * DIM)
        kernels.attention(
            q[t : t + 1], kv, alone, work(alone, 2, 1, 0, 8), scratch, None, out, **settings
        )
        assert_close(together[t : t + 1], out)
