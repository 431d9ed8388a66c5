"""Routes and experts by kernels, beside plain torch."""

from __future__ import annotations

import pytest
import torch

from octavo.backends.cuda.constants import up
from octavo.backends.cuda.tensors import Matrix
from tests.cuda.both import Args, act, assert_close, bf16, both, coded, empty_act, matrices, whole

EXPERTS, TOP, WIDTH = 6, 3, 150


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("parts", [1, 2])
def test_route(normalize: bool, parts: int) -> None:
    x = torch.randn(parts, 7, EXPERTS)
    x[:, 3] = 0  # all alike: the first
    x[0, 4, 2] = x[0, 4, 5] = 9
    ids, weights = torch.zeros(7, TOP, dtype=torch.int32), torch.zeros(7, TOP)
    bias = torch.zeros(EXPERTS) if parts == 1 else None
    host, ours = both("route", x, bias, ids, weights, normalize=normalize)
    assert torch.equal(host[2], ours[2])
    assert_close(host[3], ours[3], 1e-5)
    assert ours[2][3].tolist() == [0, 1, 2]


def sorted_pairs(ids: torch.Tensor) -> tuple[Args, Args]:
    pairs = ids.numel()
    capacity = up(pairs, 16) + 16 * min(EXPERTS, pairs)
    blank = torch.full((capacity,), -7, dtype=torch.int32)
    return both("sort_pairs", ids, blank, blank[: capacity // 16].clone(), experts=EXPERTS)


@pytest.mark.parametrize("tokens", [1, 9, 40])
def test_sort_pairs(tokens: int) -> None:
    ids = torch.stack([torch.randperm(EXPERTS - 1)[:TOP].sort().values for _ in range(tokens)])
    host, ours = sorted_pairs(ids.int())
    assert torch.equal(host[1], ours[1])
    assert torch.equal(host[2], ours[2])


def expert_weights(kind: str, group: int) -> Matrix:
    each = [
        bf16(70, WIDTH) if kind == "bf16" else coded(kind, 70, WIDTH, group) for _ in range(EXPERTS)
    ]
    return matrices(each)


@pytest.mark.parametrize(
    ("kind", "group"), [("bf16", 0), ("int4", 32), ("int8", 64), ("table4", 32), ("fp8", 128)]
)
@pytest.mark.parametrize("shared", [True, False])
def test_expert_linear(kind: str, group: int, shared: bool) -> None:
    """Of one row of x for all choices of a token, or of a row for each."""
    ids = torch.tensor([[0, 2, 5], [1, 2, 3], [0, 1, 2], [2, 3, 5]], dtype=torch.int32)
    _, (_, order, owner) = sorted_pairs(ids)
    x = act(whole(4 if shared else 12, WIDTH))
    w, out = expert_weights(kind, group), torch.full((12, 70), 9.0)
    host, ours = both("expert_linear", x, w, order, owner, out, choices=TOP if shared else 1)
    assert torch.equal(host[4], ours[4])


@pytest.mark.parametrize("biased", [False, True])
def test_expert_glu(biased: bool) -> None:
    ids = torch.tensor([[0, 2, 5], [1, 2, 3]], dtype=torch.int32)
    gate, up_part = torch.randn(2, 6, WIDTH) * 4
    biases = torch.randn(2, EXPERTS, WIDTH) if biased else (None, None)
    host, ours = both(
        "expert_glu", gate, up_part, ids, biases[0], biases[1], empty_act(6, WIDTH),
        activation="swiglu_clamped",
    )  # fmt: skip
    assert_close(host[5], ours[5], 1e-4)


@pytest.mark.parametrize("full", [False, True])
def test_expert_sum(full: bool) -> None:
    ids = torch.tensor([[0, 2, 5], [1, 2, 3]], dtype=torch.int32)
    x, weights = whole(6, WIDTH), torch.randint(0, 4, (2, TOP)) / 4
    bias, residual = (whole(EXPERTS, WIDTH), whole(2, WIDTH)) if full else (None, None)
    host, ours = both("expert_sum", x, ids, weights, bias, residual, torch.zeros(2, WIDTH))
    assert torch.equal(host[5], ours[5])
