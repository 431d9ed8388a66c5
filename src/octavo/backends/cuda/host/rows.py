"""Operations on rows: embeddings, norms, gates, sums of slices."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.backends.cuda.host.linear import values
from octavo.backends.cuda.tensors import Matrix


def summed(x: Tensor, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
    """Sums of slices added in ascending order, then the bias, then to the residual."""
    total = x[0]
    for each in x[1:]:
        total = total + each
    total = total if bias is None else total + bias
    return total.clone() if residual is None else residual + total


def put(value: Tensor, out: Tensor | None, act: Tensor | None) -> None:
    """Writes a result as fp32 and as bf16, where it is wanted."""
    if out is not None:
        out.copy_(value)
    if act is not None:
        act[:, : value.shape[1]] = value.bfloat16()


def embed(table: Matrix, index: Tensor, out: Tensor, *, scale: float, offset: int) -> None:
    rows = (index.long() + offset).clamp(0, table.n - 1)
    out.copy_(values(table)[rows, : out.shape[1]] * scale)


def give(given: Tensor, row: Tensor, out: Tensor, *, first: int, add: bool) -> None:
    at = (row >= 0).nonzero()[:, 0]
    new = given[row[at].long(), first : first + out.shape[1]]
    out[at] = out[at] + new if add else new


def select(x: Tensor, index: Tensor, out: Tensor | None, act: Tensor | None) -> None:
    put(x[index.long()], out, act)


def permute(x: Tensor, order: Tensor, act: Tensor) -> None:
    put(x[:, order.long()].float(), None, act)


def _mean(x: Tensor) -> Tensor:
    return x.double().mean(-1, keepdim=True)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x over the root of its mean square, times the weight."""
    return x * torch.rsqrt(_mean(x * x).float() + eps) * weight


def add_norm(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, weight: Tensor,
    total: Tensor | None, norm: Tensor | None, act: Tensor | None, *, eps: float,
) -> None:  # fmt: skip
    y = summed(x, bias, residual)
    put(y, total, None)
    put(rms(y, weight, eps), norm, act)


def norm_add(
    x: Tensor, bias: Tensor | None, weight: Tensor, residual: Tensor, out: Tensor, *, eps: float
) -> None:
    put(residual + rms(summed(x, bias), weight, eps), out, None)


def add_layer_norm(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, weight: Tensor, shift: Tensor,
    total: Tensor | None, norm: Tensor | None, act: Tensor | None, *, eps: float,
) -> None:  # fmt: skip
    y = summed(x, bias, residual)
    put(y, total, None)
    apart = y - _mean(y).float()
    scale = torch.rsqrt(_mean(apart * apart).float() + eps)
    put(apart * scale * weight + shift, norm, act)


def combine(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor | None,
    act: Tensor | None, *, cap: float,
) -> None:  # fmt: skip
    y = summed(x, bias, residual)
    put(cap * torch.tanh(y / cap) if cap else y, out, act)


def gated(gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    """activation(gate), times up if there is one."""
    if activation == "swiglu_clamped":
        assert up is not None
        gate, up = gate.clamp(max=7), up.clamp(-7, 7)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    y = _ACTIVATIONS[activation](gate)
    return y if up is None else y * up


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "tanh": torch.tanh,
    "relu": F.relu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
}


def glu(
    gate: Tensor, up: Tensor | None, gate_bias: Tensor | None, up_bias: Tensor | None,
    act: Tensor, *, activation: str,
) -> None:  # fmt: skip
    second = None if up is None else summed(up, up_bias)
    put(gated(summed(gate, gate_bias), second, activation), None, act)


def argmax(logits: Tensor, masks: Tensor | None, out: Tensor) -> None:
    x = torch.where(logits.isnan(), -torch.inf, logits)
    if masks is not None:
        bits = masks[:, :, None] >> torch.arange(8, dtype=torch.uint8) & 1
        x = x.masked_fill(bits.flatten(1)[:, : x.shape[1]] == 0, -torch.inf)
    best = x.max(-1, keepdim=True).values
    first = (x == best).int().argmax(-1)
    out.copy_(torch.where(best[:, 0] == -torch.inf, -1, first))
