"""Learns the scales of a rounded model so that its next tokens are those of the model it was.

The codes stay. The loss is the divergence of the two models' distributions of next tokens, as in
mlx-lm's DWQ (distilled weight quantization); what is learned is a factor near one for each group of
weights, so every format with a scale per group can hold the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import cos, pi
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from octavo.backends.torch.reference import Reference
from octavo.checkpoint import Tensor as Stored
from octavo.checkpoint.dequantize import dequantize
from octavo.compress.fit import F32
from octavo.compress.grids import Quantized
from octavo.compress.groups import whole
from octavo.compress.healing import replace_scales, rows_of
from octavo.program import Linear, Op, Program

Tensor = torch.Tensor
KEPT = 256  # of a token's likeliest followers; the others count as one
HELD_BACK = 4  # texts
RATE = 2e-3  # of the first steps, of a factor's size
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


def product_type() -> torch.dtype:
    """bf16 where the processor multiplies it, which is several times as fast and near enough to
    learn from; else fp32."""
    fast = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if fast else torch.float32


class _OnGrid(torch.autograd.Function):
    """x W^T for W = factors * scales * (codes - zeros), made anew when gradients need it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factors: Tensor, layer: _Layer) -> Tensor:
        x = x.to(layer.kind)
        ctx.save_for_backward(x, factors)
        ctx.layer = layer
        return F.linear(x, layer.values(factors)).float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, factors = ctx.saved_tensors
        layer: _Layer = ctx.layer
        grad = grad.to(layer.kind)
        return (grad @ layer.values(factors)).float(), layer.sums(grad.T @ x), None


class _Layer:
    """A rounded matrix and the factors of its scales."""

    def __init__(self, q: Quantized, kind: torch.dtype) -> None:
        self.kind = kind
        grouped = q.codes.reshape(*q.scales.shape, q.width).astype(np.int16)
        steps = grouped - q.zeros[..., None].astype(np.int16)
        self.steps = torch.from_numpy(steps.astype(np.int8 if q.grid.top < 128 else np.int16))
        self.scales = torch.from_numpy(np.array(q.scales, np.float32))
        self.factors = torch.ones_like(self.scales, requires_grad=True)

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = _OnGrid.apply(x, self.factors, self)  # type: ignore[no-untyped-call]
        return y

    def values(self, factors: Tensor) -> Tensor:
        return (self.steps * (self.scales * factors)[..., None]).to(self.kind).flatten(1)

    def sums(self, of_weights: Tensor) -> Tensor:
        """Gradients of factors from those of weights."""
        parts = of_weights.view(self.steps.shape) * self.steps
        return parts.sum(-1, dtype=torch.float32) * self.scales

    def learned(self) -> F32:
        return np.asarray((self.scales * self.factors.detach()).numpy(), np.float32)


class _Model(Reference):
    """The program with rounded layers, by the names of whole matrices; other products are of the
    same type. Experts are computed with what theirs were rounded to, which is not learned."""

    def __init__(
        self, program: Program, weights: Mapping[str, Quantized], other: _Model | None = None
    ) -> None:
        """other: a model of the same program, whose other tensors are shared."""

        def read(tensor: Stored) -> F32:
            name, rows = whole(tensor)
            return weights[name].values()[rows] if name in weights else dequantize(tensor)

        super().__init__(program, read)
        self.kind = product_type()
        self._short: dict[str, Tensor] = {}  # matrices as they are, in that type
        if other is not None:
            self._short = other._short
        self.layers: dict[str, _Layer] = {}
        for op in program.ops:
            if isinstance(op, Linear):
                name, rows = whole(op.weight.tensor)
                if name in weights:
                    part = rows_of(weights[name], rows)
                    self.layers[op.weight.tensor.name] = _Layer(part, self.kind)

    def run(self, op: Op, v: dict[int, Tensor], x: Any) -> Tensor:
        if not isinstance(op, Linear):
            return super().run(op, v, x)
        name = op.weight.tensor.name
        if name in self.layers:
            y = self.layers[name](v[op.x.id])
        else:
            if name not in self._short:
                self._short[name] = self.weight(op.weight).to(self.kind)
            y = F.linear(v[op.x.id].to(self.kind), self._short[name]).float()
        return y if op.bias is None else y + self.weight(op.bias)

    def made(self, weights: Mapping[str, Quantized]) -> dict[str, Quantized]:
        """The layers with the scales that were learned."""
        scales = {name: q.scales.copy() for name, q in weights.items()}
        for op in self.program.ops:
            if isinstance(op, Linear) and op.weight.tensor.name in self.layers:
                name, rows = whole(op.weight.tensor)
                scales[name][rows] = self.layers[op.weight.tensor.name].learned()
        return {name: replace_scales(q, scales[name]) for name, q in weights.items()}


def distill(
    program: Program, weights: Mapping[str, Quantized], texts: Sequence[list[int]],
    passes: int = 1, held_back: int = HELD_BACK, rate: float = RATE,
    told: Callable[[int, float], None] = lambda step, loss: None,
) -> Distilled:  # fmt: skip
    """Learns the scales of rounded linear layers, by the names of their matrices in the program of
    the original.

    texts: token ids, one a step, in each of the passes; the last `held_back` only judge. Scales
    that judge no better are not returned.
    """
    original = _Model(program, {})
    student = _Model(program, weights, original)

    @cache
    def wanted(i: int) -> Targets:
        with torch.no_grad():
            return targets(original.forward(texts[i]))

    learned_from = len(texts) - max(1, min(held_back, len(texts) // 2))
    judges = range(learned_from, len(texts))

    @torch.no_grad()
    def judged() -> float:
        lost = [float(divergence(student.forward(texts[i]), wanted(i))) for i in judges]
        return sum(lost) / len(lost)

    before = judged()
    factors = [layer.factors for layer in student.layers.values()]
    optimizer = torch.optim.Adam(factors, rate, BETAS)
    steps = passes * learned_from
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * (1 + cos(pi * step / steps)) / 2
        i = step % learned_from
        optimizer.zero_grad()
        loss = divergence(student.forward(texts[i]), wanted(i))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        told(step, float(loss.detach()))
    made = student.made(weights)
    student = _Model(program, made, original)
    after = judged()
    if after < before:
        return Distilled(made, before, after)
    return Distilled(dict(weights), before, before)
