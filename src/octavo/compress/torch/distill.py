"""Learns the scales of a rounded model so that its next tokens are those of the model it was.

The codes stay. The loss is the divergence of the two models' distributions of next tokens, as in
mlx-lm's DWQ (distilled weight quantization); what is learned is a factor near one for each group of
weights, so every format with a scale per group can hold the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import cos, pi
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from octavo.backends.torch.reference import Reference
from octavo.compress.grids import Quantized
from octavo.compress.healing import group_index, replace_scales
from octavo.program import Linear, Op, Program

Tensor = torch.Tensor
KEPT = 256  # of a token's likeliest followers; the others count as one
RATE = 1e-3  # of the first steps, of a factor's size
BETAS = 0.9, 0.95


@dataclass(frozen=True, slots=True)
class Distilled:
    """Layers with learned scales. before, after: the mean divergence in nats a token on the texts
    that were held back."""

    weights: dict[str, Quantized]
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class Targets:
    """What the original says of each token of a text: its likeliest followers and the rest."""

    followers: Tensor
    log_shares: Tensor  # `[tokens, KEPT + 1]`, the last of all others


def targets(logits: Tensor) -> Targets:
    """The original's distribution in short."""
    top = logits.log_softmax(-1).topk(min(KEPT, logits.shape[-1] - 1))
    return Targets(top.indices, _with_rest(top.values))


def _with_rest(kept: Tensor) -> Tensor:
    """Log shares `[tokens, n]` with that of all others behind."""
    rest = (1 - kept.double().exp().sum(-1, keepdim=True)).clamp_min(1e-12).log()
    return torch.cat([kept, rest.to(kept.dtype)], -1)


def divergence(logits: Tensor, of: Targets) -> Tensor:
    """The mean of KL(original || this) over tokens, followers that were not kept taken as one."""
    own = _with_rest(logits.log_softmax(-1).gather(1, of.followers))
    return (of.log_shares.exp() * (of.log_shares - own)).sum(-1).mean()


class _OnGrid(torch.autograd.Function):
    """x W^T for W = factors * scales * (codes - zeros), made anew when gradients need it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factors: Tensor, layer: _Layer) -> Tensor:
        ctx.save_for_backward(x, factors)
        ctx.layer = layer
        return F.linear(x, layer.values(factors))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, factors = ctx.saved_tensors
        layer: _Layer = ctx.layer
        of_weights = grad.T @ x
        return grad @ layer.values(factors), layer.sums(of_weights), None


class _Layer:
    """A rounded matrix and the factors of its scales."""

    def __init__(self, q: Quantized) -> None:
        self.q = q
        self.index = torch.from_numpy(group_index(q))
        self.codes, self.zeros = torch.from_numpy(q.codes), torch.from_numpy(q.zeros)
        self.scales = torch.from_numpy(np.ascontiguousarray(q.scales))
        self.factors = torch.ones_like(self.scales, requires_grad=True)

    def steps(self) -> Tensor:
        """scales * (codes - zeros)."""
        return (self.codes - self.zeros[:, self.index]) * self.scales[:, self.index]

    def values(self, factors: Tensor) -> Tensor:
        return self.steps() * factors[:, self.index]

    def sums(self, of_weights: Tensor) -> Tensor:
        """Gradients of factors from those of weights."""
        out = torch.zeros_like(self.scales)
        return out.index_add_(1, self.index, of_weights * self.steps())

    def made(self) -> Quantized:
        return replace_scales(self.q, (self.scales * self.factors.detach()).numpy())


class _Student(Reference):
    """The program with rounded layers."""

    def __init__(self, original: Reference, layers: Mapping[str, _Layer]) -> None:
        super().__init__(original.program)
        self._weights, self.layers = original._weights, layers

    def run(self, op: Op, v: dict[int, Tensor], x: Any) -> Tensor:
        layer = self.layers.get(op.weight.tensor.name) if isinstance(op, Linear) else None
        if layer is None or not isinstance(op, Linear):
            return super().run(op, v, x)
        y: Tensor = _OnGrid.apply(v[op.x.id], layer.factors, layer)  # type: ignore[no-untyped-call]
        return y if op.bias is None else y + self.weight(op.bias)


def distill(
    program: Program, weights: Mapping[str, Quantized], texts: Sequence[list[int]],
    steps: int, held_back: int = 2, rate: float = RATE, told: Callable[[int, float], None] | None = None,
) -> Distilled:  # fmt: skip
    """Learns the scales of the linear layers `weights`, by the names of their tensors in a program
    of the original's.

    texts: token ids, one a step, again from the first when all were seen; the last `held_back`
    only judge. Scales that judge no better are not returned.
    """
    original = Reference(program)
    layers = {name: _Layer(q) for name, q in weights.items()}
    student = _Student(original, layers)
    wanted = [targets(original.logits(ids)) for ids in texts]
    judges = range(len(texts) - held_back, len(texts))

    def judged() -> float:
        lost = [float(divergence(student.logits(texts[i]), wanted[i])) for i in judges]
        return sum(lost) / len(lost)

    before = judged()
    factors = [layer.factors for layer in layers.values()]
    optimizer = torch.optim.Adam(factors, rate, BETAS)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * (1 + cos(pi * step / steps)) / 2
        i = step % (len(texts) - held_back)
        optimizer.zero_grad()
        loss = divergence(student.forward(texts[i]), wanted[i])
        loss.backward()
        optimizer.step()
        if told is not None:
            told(step, float(loss.detach()))
    made = {name: layer.made() for name, layer in layers.items()}
    student.layers = {name: _Layer(q) for name, q in made.items()}
    after = judged()
    return Distilled(made, before, after) if after < before else Distilled(dict(weights), before, before)
