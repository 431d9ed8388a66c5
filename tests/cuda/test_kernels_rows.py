"""Norms, gates, embeddings and the head by kernels, beside plain torch."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from torch import Tensor

from octavo.backends.cuda.constants import up
from octavo.program.ops import Activation
from tests.cuda.both import act, assert_close, bf16, both, coded, empty_act, whole

TOKENS, WIDTH = 3, 100


def stream(width: int = WIDTH) -> Tensor:
    """A view of wider rows."""
    return torch.randn(TOKENS, width + 7)[:, :width]


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("centered", [False, True])
def test_add_norm(parts: int, full: bool, centered: bool) -> None:
    x, weight = torch.randn(parts, TOKENS, WIDTH + 4)[:, :, :WIDTH], torch.rand(WIDTH)
    bias, residual = (torch.randn(WIDTH), stream()) if full else (None, None)
    shift = (torch.randn(WIDTH),) if centered else ()
    name = "add_layer_norm" if centered else "add_norm"
    out = (residual if full else None, stream(), empty_act(TOKENS, WIDTH) + 5)
    host, ours = both(name, x, bias, residual, weight, *shift, *out, eps=1e-5)
    if full:
        assert torch.equal(host[2], ours[2])  # the residual's own memory has the total
    assert_close(host[-2], ours[-2], 1e-5)
    assert_close(host[-1], ours[-1], 1e-5)


@pytest.mark.parametrize("bias", [False, True])
def test_norm_add(bias: bool) -> None:
    x, residual = torch.randn(2, TOKENS, WIDTH), stream()
    b = torch.randn(WIDTH) if bias else None
    host, ours = both("norm_add", x, b, torch.rand(WIDTH), residual, residual, eps=1e-5)
    assert_close(host[4], ours[4], 1e-5)


@pytest.mark.parametrize("cap", [0.0, 2.5])
@pytest.mark.parametrize("full", [False, True])
def test_combine(cap: float, full: bool) -> None:
    x = torch.randn(3, TOKENS, WIDTH)
    bias, residual = (torch.randn(WIDTH), stream()) if full else (None, None)
    host, ours = both("combine", x, bias, residual, stream(), empty_act(TOKENS, WIDTH), cap=cap)
    assert_close(host[3], ours[3], 1e-6)
    assert torch.equal(ours[4], act(ours[3]))


ALONE = [kind for kind in get_args(Activation) if kind != "swiglu_clamped"]


@pytest.mark.parametrize("activation", ALONE)
def test_activation(activation: str) -> None:
    gate, out = torch.randn(2, TOKENS, WIDTH) * 5, empty_act(TOKENS, WIDTH) + 3
    host, ours = both("glu", gate, None, torch.randn(WIDTH), None, out, activation=activation)
    assert_close(host[4], ours[4], 1e-4)


@pytest.mark.parametrize("activation", get_args(Activation))
def test_glu(activation: str) -> None:
    gate, up_part = torch.randn(2, TOKENS, WIDTH) * 5, torch.randn(1, TOKENS, WIDTH) * 5
    biases, out = torch.randn(2, WIDTH), empty_act(TOKENS, WIDTH) + 3
    host, ours = both("glu", gate, up_part, biases[0], biases[1], out, activation=activation)
    assert_close(host[4], ours[4], 1e-4)


def test_rounding() -> None:
    """To the nearest bf16, which has eight bits; of two as near, to the even one."""
    numbers = torch.tensor([257, 258.5, 259, 383, 511, 513, 1027, -255.75, -515])
    host, ours = both("combine", numbers[None, None], None, None, None, empty_act(1, 9), cap=0.0)
    expected = [256, 258, 260, 384, 512, 512, 1024, -256, -516]
    assert ours[4][0, :9].tolist() == host[4][0, :9].tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_permute(dtype: torch.dtype) -> None:
    order = torch.randperm(WIDTH).int()
    host, ours = both(
        "permute", whole(TOKENS, up(WIDTH)).to(dtype), order, empty_act(TOKENS, WIDTH)
    )
    assert torch.equal(host[2], ours[2])


@pytest.mark.parametrize(
    ("kind", "group"),
    [("bf16", 0), ("int4", 32), ("int4", 16), ("int8", 64), ("table4", 32), ("fp8", 128)],
)
def test_embed(kind: str, group: int) -> None:
    n, k = 70, 150
    table = bf16(n, k) if kind == "bf16" else coded(kind, n, k, group, minima=group == 16)
    index = torch.tensor([0, 69, 64, -9, 500, 33], dtype=torch.int32)
    out = torch.zeros(6, k + 3)[:, :k]
    host, ours = both("embed", table, index, out, scale=1.5, offset=-1)
    assert torch.equal(host[2], ours[2])
    assert bool(host[2].any())


@pytest.mark.parametrize("add", [False, True])
def test_give(add: bool) -> None:
    row = torch.tensor([-1, 4, 0], dtype=torch.int32)
    host, ours = both("give", torch.randn(5, 210), row, stream(), first=11, add=add)
    assert torch.equal(host[2], ours[2])


def test_select() -> None:
    index = torch.tensor([2, 0, 2, 1], dtype=torch.int32)
    x = whole(TOKENS, WIDTH + 7)[:, :WIDTH]
    host, ours = both("select", x, index, torch.zeros(4, WIDTH), empty_act(4, WIDTH))
    assert torch.equal(host[2], ours[2])
    assert torch.equal(host[3], ours[3])
    assert torch.equal(ours[3], act(ours[2]))


@pytest.mark.parametrize("masked", [False, True])
def test_argmax(masked: bool) -> None:
    logits = whole(6, 9003, most=20)
    logits[1, 4], logits[2] = math.nan, -math.inf
    logits[3], logits[3, 8999] = -math.inf, -5
    masks = torch.randint(0, 256, (6, -(-9003 // 32) * 4), dtype=torch.uint8) if masked else None
    if masks is not None:
        masks[4] = 0
    host, ours = both("argmax", logits[:, :9001], masks, torch.zeros(6, dtype=torch.int32))
    assert torch.equal(host[2], ours[2])
    assert ours[2][2] == -1
