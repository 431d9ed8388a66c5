"""The reference: interprets a program in fp32, one plain statement per operation.

Tests use it as the oracle of the CPU backend; attention sees whole sequences, without a cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from octavo.checkpoint import Tensor as Stored
from octavo.checkpoint.dequantize import dequantize
from octavo.program import (
    Activate,
    Add,
    Attention,
    Embed,
    EmbedIndex,
    Experts,
    Features,
    Glu,
    Inject,
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
    branches,
)

Tensor = torch.Tensor


@dataclass(frozen=True)
class ReferenceInputs:
    """A step's inputs. index: what tables are looked up by. visible: [token, other token] where
    the first sees the second, if attention is causal. embeddings: rows that replace those of the
    tokens `embedding_rows`. selected: the tokens whose results are wanted. coordinates: `[axes,
    tokens]` for rotations along several axes, positions if there are none. segments: of tokens."""

    index: dict[EmbedIndex, Tensor]
    visible: Tensor
    selected: Tensor
    embeddings: Tensor
    embedding_rows: Tensor
    coordinates: Tensor | None = None
    segments: Tensor | None = None

    @property
    def positions(self) -> Tensor:
        return self.index["positions"]


class Reference:
    """Computes a program over one sequence, or over a tree of sequences that share prefixes."""

    def __init__(
        self, program: Program, read: Callable[[Stored], npt.NDArray[np.float32]] = dequantize
    ) -> None:
        """read: the fp32 values of a checkpoint's tensor, where they are not what it holds."""
        self.program = program
        self._read = read
        self._weights: dict[str, Tensor] = {}
        self.tapped: list[Tensor] = []  # the program's taps, as they were computed last

    def weight(self, w: Weight) -> Tensor:
        if w.tensor.name not in self._weights:
            self._weights[w.tensor.name] = torch.from_numpy(np.array(self._read(w.tensor)))
        return self._weights[w.tensor.name] + w.offset if w.offset else self._weights[w.tensor.name]

    @torch.inference_mode()
    def logits(self, ids: list[int], rows: list[int] | None = None, **given: Any) -> Tensor:
        """What `forward` gives, without what gradients need."""
        return self.forward(ids, rows, **given)

    def forward(
        self, ids: list[int], rows: list[int] | None = None, *,
        token_type_ids: list[int] | None = None, parents: list[int] | None = None,
        embeddings: dict[int, Tensor] | None = None, reach: list[int] | None = None,
        coordinates: npt.NDArray[np.int32] | None = None,
        segments: npt.NDArray[np.int32] | None = None,
    ) -> Tensor:  # fmt: skip
        """The output `[rows, width]` of a sequence; of all its tokens unless `rows` names some.

        parents: the token that each follows, for a tree (program/tree.py). embeddings: rows for
        some tokens, by index. reach: how many later tokens each sees too. coordinates, segments: as
        a step gives them. Raises ValueError for an input that is not declared.
        """
        optional = {
            "token_type_ids": token_type_ids, "parents": parents, "embeddings": embeddings,
            "reach": reach, "coordinates": coordinates, "segments": segments,
        }  # fmt: skip
        for name, value in optional.items():
            if value is not None and not self.program.takes(name):
                raise ValueError(f"the program has no input {name!r}")
        given = embeddings or {}
        positions, visible = tree(parents or list(range(-1, len(ids) - 1)))
        for token, more in enumerate(reach or ()):
            visible[token, token : token + more + 1] = True
        x = ReferenceInputs(
            {
                "ids": torch.tensor(ids),
                "positions": positions,
                "token_type_ids": torch.tensor(token_type_ids or [0] * len(ids)),
            },
            visible,
            torch.arange(len(ids)) if rows is None else torch.tensor(rows),
            torch.stack(list(given.values())) if given else torch.zeros(0),
            torch.tensor(list(given), dtype=torch.long),
            None if coordinates is None else torch.from_numpy(coordinates),
            None if segments is None else torch.from_numpy(segments),
        )
        values: dict[int, Tensor] = {}
        for op in self.program.ops:
            values[op.out.id] = self.run(op, values, x)
        self.tapped = [values[value.id] for value in self.program.taps]
        return values[self.program.output.id]

    def run(self, op: Op, v: dict[int, Tensor], x: ReferenceInputs) -> Tensor:
        match op:
            case Embed():
                out = self.weight(op.table)[x.index[op.index] + op.offset] * op.scale
                if op.replaceable and len(x.embeddings):
                    out[x.embedding_rows] = x.embeddings[:, : op.out.width]
                return out
            case Features():
                return x.embeddings[:, : op.out.width]
            case Inject():
                out = v[op.x.id].clone()
                if len(x.embeddings):
                    out[x.embedding_rows] += x.embeddings[:, op.first : op.first + op.x.width]
                return out
            case SelectRows():
                return v[op.x.id][x.selected]
            case RmsNorm():
                y = v[op.x.id].unflatten(1, (op.heads, -1))
                y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + op.eps)
                return (y * self.weight(op.weight)).flatten(1)
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
                return rope(v[op.x.id], x, op)
            case Attention():
                sinks = self.weight(op.sinks) if op.sinks else None
                return attention(v[op.q.id], v[op.k.id], v[op.v.id], x, op, sinks)
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
        for e, down in enumerate(op.down):
            rows = routes[:, e].nonzero()[:, 0]
            if len(rows):
                bias = self.weight(op.biases[e][2]) if op.biases else None
                y = F.linear(self.expert(x[rows], op, e), self.weight(down), bias)
                out[rows] += routes[rows, e, None] * y
        return out

    def expert(self, x: Tensor, op: Experts, e: int) -> Tensor:
        """What the down projection of expert e takes."""
        a, b = (self.weight(w) for w in op.biases[e][:2]) if op.biases else (None, None)
        gate, up = (F.linear(x, self.weight(w[e]), c) for w, c in ((op.gate, a), (op.up, b)))
        return glu(gate, up, op.activation)


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
    if kind == "quick_gelu":
        return x * torch.sigmoid(1.702 * x)
    return F.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


def rope(x: Tensor, inputs: ReferenceInputs, op: Rope) -> Tensor:
    """Turns pairs of the first features of `[T, heads * D]` by position * frequency."""
    x = x.unflatten(1, (op.heads, -1))
    at = inputs.positions[:, None]
    if op.axes and inputs.coordinates is not None:
        at = inputs.coordinates[list(op.axes)].T
    angle = (at.float() * torch.tensor(op.frequencies))[:, None]
    cos, sin = angle.cos() * op.factor, angle.sin() * op.factor
    half = len(op.frequencies)
    x, rest = x[..., : 2 * half], x[..., 2 * half :]
    a, b = (x[..., ::2], x[..., 1::2]) if op.interleaved else (x[..., :half], x[..., half:])
    a, b = a * cos - b * sin, b * cos + a * sin
    x = torch.stack([a, b], -1).flatten(2) if op.interleaved else torch.cat([a, b], -1)
    return torch.cat([x, rest], -1).flatten(1)


def tree(parents: list[int]) -> tuple[Tensor, Tensor]:
    """The position of each token, and which others it sees: its ancestors and itself."""
    positions = torch.zeros(len(parents), dtype=torch.long)
    visible = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for b in branches(parents):
        own = slice(b.first, b.first + b.count)
        positions[own] = torch.arange(b.count) + len(b.ancestors)
        visible[own, list(b.ancestors)] = True
        visible[own, own] = torch.ones(b.count, b.count, dtype=torch.bool).tril()
    return positions, visible


def attention(
    q: Tensor, k: Tensor, v: Tensor, x: ReferenceInputs, op: Attention, sinks: Tensor | None
) -> Tensor:
    """softmax(q k^T * scale, capped, masked) v, heads apart."""
    q = q.unflatten(1, (op.heads, -1)).transpose(0, 1)
    k, v = (y.unflatten(1, (op.kv_heads, -1)).transpose(0, 1) for y in (k, v))
    k, v = (y.repeat_interleave(op.heads // op.kv_heads, 0) for y in (k, v))
    distance = x.positions[:, None] - x.positions
    seen = distance.abs() < (op.window or len(distance) + 1)
    if op.causal:
        seen &= x.visible
    if op.segmented:
        assert x.segments is not None
        seen &= x.segments[:, None] == x.segments
    scores = q @ k.transpose(1, 2) * op.scale
    if op.softcap:
        scores = op.softcap * torch.tanh(scores / op.softcap)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is None:
        return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
    sink = sinks[:, None, None].expand(-1, len(distance), 1)
    shares = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    return (shares @ v).transpose(0, 1).flatten(1)
