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
    Experts,
    Glu,
    LayerNorm,
    Linear,
    Op,
    Permute,
    Program,
    RmsNorm,
    Rope,
    Route,
    SelectRows,
    Softcap,
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
                sinks = self.weight(op.sinks) if op.sinks else None
                return attention(v[op.q.id], v[op.k.id], v[op.v.id], op, sinks)
            case Softcap():
                return op.cap * torch.tanh(v[op.x.id] / op.cap)
            case Permute():
                return v[op.x.id][:, list(op.order)]
            case Route():
                return route(v[op.x.id], op)
            case Experts():
                return self.experts(v[op.x.id], v[op.routes.id], op)
            case Glu():
                return glu(v[op.gate.id], v[op.up.id], op.activation)
            case Add():
                return v[op.a.id] + v[op.b.id]
        raise TypeError(f"no reference for {op.name}")

    def experts(self, x: Tensor, routes: Tensor, op: Experts) -> Tensor:
        out = torch.zeros_like(x)
        for e, (gate, up, down) in enumerate(zip(op.gate, op.up, op.down, strict=True)):
            rows = routes[:, e].nonzero()[:, 0]
            if len(rows):
                a, b, c = (self.weight(w) for w in op.biases[e]) if op.biases else (None,) * 3
                g = F.linear(x[rows], self.weight(gate), a)
                y = glu(g, F.linear(x[rows], self.weight(up), b), op.activation)
                out[rows] += routes[rows, e, None] * F.linear(y, self.weight(down), c)
        return out


def route(x: Tensor, op: Route) -> Tensor:
    """Softmax, the `top_k` largest kept; of equals the first."""
    p = x.softmax(-1)
    best = p.argsort(dim=-1, descending=True, stable=True)[:, : op.top_k]
    kept = torch.zeros_like(p).scatter(1, best, p.gather(1, best))
    return kept / kept.sum(-1, keepdim=True) if op.normalize else kept


def glu(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    if kind == "swiglu_clamped":
        gate, up = gate.clamp(max=7), up.clamp(-7, 7)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    return activate(gate, kind) * up


def activate(x: Tensor, kind: str) -> Tensor:
    if kind == "silu":
        return F.silu(x)
    if kind == "tanh":
        return torch.tanh(x)
    if kind == "relu":
        return F.relu(x)
    return F.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


def rope(x: Tensor, op: Rope) -> Tensor:
    """Turns pairs of the first features of `[T, heads * D]` by position * frequency."""
    x = x.unflatten(1, (op.heads, -1))
    angle = torch.outer(torch.arange(len(x)).float(), torch.tensor(op.frequencies))[:, None]
    cos, sin = angle.cos() * op.factor, angle.sin() * op.factor
    half = len(op.frequencies)
    x, rest = x[..., : 2 * half], x[..., 2 * half :]
    a, b = (x[..., ::2], x[..., 1::2]) if op.interleaved else (x[..., :half], x[..., half:])
    a, b = a * cos - b * sin, b * cos + a * sin
    x = torch.stack([a, b], -1).flatten(2) if op.interleaved else torch.cat([a, b], -1)
    return torch.cat([x, rest], -1).flatten(1)


def attention(q: Tensor, k: Tensor, v: Tensor, op: Attention, sinks: Tensor | None) -> Tensor:
    """softmax(q k^T * scale, capped, masked) v, heads apart."""
    q = q.unflatten(1, (op.heads, -1)).transpose(0, 1)
    k, v = (x.unflatten(1, (op.kv_heads, -1)).transpose(0, 1) for x in (k, v))
    k, v = (x.repeat_interleave(op.heads // op.kv_heads, 0) for x in (k, v))
    distance = torch.arange(q.shape[1])[:, None] - torch.arange(k.shape[1])
    seen = distance.abs() < (op.window or len(distance) + 1)
    if op.causal:
        seen &= distance >= 0
    scores = q @ k.transpose(1, 2) * op.scale
    if op.softcap:
        scores = op.softcap * torch.tanh(scores / op.softcap)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is None:
        return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
    sink = sinks[:, None, None].expand(-1, len(distance), 1)
    shares = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    return (shares @ v).transpose(0, 1).flatten(1)
