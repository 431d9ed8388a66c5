"""The reference: interprets a program in fp32, one plain statement per operation.

Tests use it as the oracle of the CPU backend; attention sees whole sequences, without a cache.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from octavo.checkpoint.dequantize import dequantize
from octavo.program import (
    Activate,
    Add,
    Attention,
    Embed,
    Glu,
    LayerNorm,
    Linear,
    Op,
    Program,
    RmsNorm,
    Rope,
    SelectRows,
    Weight,
)

Tensor = torch.Tensor


class Reference:
    """Computes a program over one sequence."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._weights: dict[str, Tensor] = {}

    def weight(self, w: Weight) -> Tensor:
        if w.tensor.name not in self._weights:
            self._weights[w.tensor.name] = torch.from_numpy(np.array(dequantize(w.tensor)))
        return self._weights[w.tensor.name] + w.offset if w.offset else self._weights[w.tensor.name]

    @torch.inference_mode()
    def logits(
        self, ids: list[int], rows: list[int] | None = None, types: list[int] | None = None
    ) -> Tensor:
        """The output `[rows, width]` of a sequence; all its positions unless `rows` names some."""
        index = {
            "ids": torch.tensor(ids),
            "positions": torch.arange(len(ids)),
            "types": torch.tensor(types or [0] * len(ids)),
        }
        select = torch.arange(len(ids)) if rows is None else torch.tensor(rows)
        values: dict[int, Tensor] = {}
        for op in self.program.ops:
            values[op.out.id] = self.run(op, values, index, select)
        return values[self.program.output.id]

    def run(self, op: Op, v: dict[int, Tensor], index: dict[str, Tensor], select: Tensor) -> Tensor:
        match op:
            case Embed():
                return self.weight(op.table)[index[op.index] + op.offset] * op.scale
            case SelectRows():
                return v[op.x.id][select]
            case RmsNorm():
                x = v[op.x.id].unflatten(1, (op.heads, -1))
                x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + op.eps)
                return (x * self.weight(op.weight)).flatten(1)
            case LayerNorm():
                shape = (op.x.width,)
                return F.layer_norm(
                    v[op.x.id], shape, self.weight(op.weight), self.weight(op.bias), op.eps
                )
            case Activate():
                return activate(v[op.x.id], op.activation)
            case Linear():
                bias = self.weight(op.bias) if op.bias else None
                return F.linear(v[op.x.id], self.weight(op.weight), bias)
            case Rope():
                return rope(v[op.x.id], op)
            case Attention():
                return attention(v[op.q.id], v[op.k.id], v[op.v.id], op)
            case Glu():
                return activate(v[op.gate.id], op.activation) * v[op.up.id]
            case Add():
                return v[op.a.id] + v[op.b.id]
        raise TypeError(f"no reference for {op.name}")


def activate(x: Tensor, kind: str) -> Tensor:
    if kind == "silu":
        return F.silu(x)
    if kind == "tanh":
        return torch.tanh(x)
    if kind == "relu":
        return F.relu(x)
    return F.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


def rope(x: Tensor, op: Rope) -> Tensor:
    """Turns pairs of `[T, heads * D]` by position * frequency."""
    x = x.unflatten(1, (op.heads, -1))
    angle = torch.outer(torch.arange(len(x)).float(), torch.tensor(op.frequencies))[:, None]
    half = x.shape[-1] // 2
    a, b = (x[..., ::2], x[..., 1::2]) if op.interleaved else (x[..., :half], x[..., half:])
    a, b = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
    return (torch.stack([a, b], -1) if op.interleaved else torch.cat([a, b], -1)).flatten(1)


def attention(q: Tensor, k: Tensor, v: Tensor, op: Attention) -> Tensor:
    """softmax(q k^T * scale, masked) v, heads apart."""
    q = q.unflatten(1, (op.heads, -1)).transpose(0, 1)
    k, v = (x.unflatten(1, (op.kv_heads, -1)).transpose(0, 1) for x in (k, v))
    k, v = (x.repeat_interleave(op.heads // op.kv_heads, 0) for x in (k, v))
    distance = torch.arange(q.shape[1])[:, None] - torch.arange(k.shape[1])
    seen = distance < (op.window or len(distance) + 1)
    if op.causal:
        seen &= distance >= 0
    scores = (q @ k.transpose(1, 2) * op.scale).masked_fill(~seen, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
