"""Records a lowered program into a native model."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from octavo import _native
from octavo.backends.base import Progress
from octavo.backends.cpu.lower import Forms, Lowered, NativeOp, forms
from octavo.backends.cpu.weights import deferred, weights_of
from octavo.program import (
    Activate,
    Attention,
    Embed,
    Experts,
    Glu,
    LayerNorm,
    Linear,
    Op,
    Permute,
    RmsNorm,
    Rope,
    Route,
    Softcap,
    Value,
    Weight,
)

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "tanh": 3, "relu": 4, "swiglu_clamped": 5}
INDEXES = {"ids": 0, "positions": 1, "token_type_ids": 2}
NO_BYTES = np.zeros(0, np.uint8)
NO_FLOATS = np.zeros(0, np.float32)


def attentions_of(lowered: Lowered) -> list[Attention]:
    return [op for op in lowered.program.ops if isinstance(op, Attention)]


def schedule_of(op: Attention) -> tuple[int, bool, int]:
    """What the attention work of a step depends on: window, causality, query heads per KV head."""
    return op.window, op.causal, op.heads // op.kv_heads


def rotation_of(rope: Rope) -> tuple[tuple[float, ...], float]:
    return rope.frequencies, rope.factor


def ropes_of(lowered: Lowered) -> list[tuple[tuple[float, ...], float]]:
    ropes = [n.attention.rope for n in lowered.ops if n.attention]
    return list(dict.fromkeys(rotation_of(rope) for rope in ropes if rope))


def orders_of(lowered: Lowered) -> list[tuple[int, ...]]:
    return list(dict.fromkeys(op.order for op in lowered.program.ops if isinstance(op, Permute)))


ExpertShape = tuple[int, int, int, int, Forms, Forms]  # experts, used, hidden, ffn, inputs' forms


def expert_shape(op: Experts, lowered: Lowered) -> ExpertShape:
    (route,) = (r for r in lowered.program.ops if isinstance(r, Route) and r.out == op.routes)
    ffn = op.gate[0].tensor.shape[0]
    return len(op.gate), route.top_k, op.x.width, ffn, forms(op.gate + op.up), forms(op.down)


def expert_shapes(lowered: Lowered) -> list[ExpertShape]:
    experts = (op for op in lowered.program.ops if isinstance(op, Experts))
    return list(dict.fromkeys(expert_shape(op, lowered) for op in experts))


def measured(lowered: Lowered) -> bool:
    """Whether the head finds the statistics of logits: nothing changes them afterwards."""
    last = lowered.ops[-1]
    output = lowered.program.output
    return output.selected and last.kind == "linear" and last.writes == (output,)


class Recorder:
    """Writes a lowered program into a native model, with its weights if the model needs them.

    defer: some matrices may stay as they are stored until `pack_pending` has packed them.
    """

    def __init__(
        self, lowered: Lowered, model: _native.Model, progress: Progress, defer: bool
    ) -> None:
        self.lowered, self.model = lowered, model
        if lowered.adapters:
            model.allow_adapters()
        matrices, vectors = weights_of(lowered)
        self.matrix, self.vector = {}, {}
        # Largest first: its file pages are dropped before anything else takes memory.
        for name, t in sorted(matrices.items(), key=lambda item: -item[1].nbytes):
            raw = t.raw() if model.needs_weights else NO_BYTES
            if defer and deferred(t):
                self.matrix[name] = model.add_stored(int(t.type), raw, *t.shape)
            else:
                self.matrix[name] = model.add_matrix(int(t.type), t.group, raw, *t.shape)
            progress(t.nbytes)
        model.read_stored()
        for key, w in vectors.items():
            self.vector[key] = model.add_vector(self._values(w), w.tensor.shape[0])
        self.rope = {r: model.add_rope(np.array(r[0], np.float32), r[1]) for r in ropes_of(lowered)}
        self.order = {o: model.add_order(np.array(o, np.int32)) for o in orders_of(lowered)}
        self.expert_rows = {s: model.add_expert_rows(*s) for s in expert_shapes(lowered)}
        kinds = dict.fromkeys(map(schedule_of, attentions_of(lowered)))
        self.schedule = {kind: model.add_schedule(*kind) for kind in kinds}
        self.buffers = [model.add_buffer(s, w) for s, w in lowered.buffers]
        self.acts = [model.add_act(*act) for act in lowered.acts]

        for native in lowered.ops:
            self.record(native)
        output = lowered.program.output
        model.output(self.buffer(output), output.width, measured(lowered))

    def _values(self, weight: Weight) -> npt.NDArray[np.float32]:
        if not self.model.needs_weights:
            return NO_FLOATS
        values = weight.tensor.vector() + np.float32(weight.offset)
        return np.ascontiguousarray(values, np.float32)

    def buffer(self, value: Value | None) -> int:
        return -1 if value is None else self.buffers[self.lowered.buffer_of[value.id]]

    def act(self, value: Value | None) -> int:
        return -1 if value is None else self.acts[self.lowered.act_of[value.id]]

    def norm_weight(self, op: RmsNorm | None) -> int:
        return -1 if op is None else self.vector[op.weight.tensor.name, op.weight.offset]

    def bias(self, op: Linear) -> int:
        return self.vector[op.bias.tensor.name, 0.0] if op.bias else -1

    def record(self, native: NativeOp) -> None:
        getattr(self, f"_{native.kind}")(native, native.ops[0])

    def _embed(self, native: NativeOp, op: Embed) -> None:
        table, index = self.matrix[op.table.tensor.name], INDEXES[op.index]
        out = self.buffer(op.out)
        self.model.embed(table, out, op.scale, index, op.offset, op.replaceable)

    def _select(self, native: NativeOp, op: object) -> None:
        source, target = self.buffer(native.reads[0]), self.buffer(native.writes[0])
        self.model.select(source, target, self.act(native.act))

    def _layer_norm(self, native: NativeOp, op: LayerNorm) -> None:
        weight, bias = (self.vector[w.tensor.name, 0.0] for w in (op.weight, op.bias))
        out, act = self.buffer(op.out), self.act(native.act)
        self.model.layer_norm(self.buffer(op.x), weight, bias, op.eps, out, act)

    def _add(self, native: NativeOp, op: object) -> None:
        a, b = native.reads
        self.model.add(self.buffer(a), self.buffer(b), self.buffer(native.writes[0]))

    def _softcap(self, native: NativeOp, op: Softcap) -> None:
        assert self.buffer(op.x) == self.buffer(op.out)
        self.model.softcap(self.buffer(op.x), op.cap)

    def _emit(self, native: NativeOp, op: Op) -> None:
        assert native.act is not None
        source = self.buffer(native.reads[0]) if native.reads else -1
        order = self.order[op.order] if isinstance(op, Permute) else -1
        width = native.act.width
        self.model.emit(source, self.act(native.source), order, width, self.act(native.act))

    def _route(self, native: NativeOp, op: Route) -> None:
        self.model.route(self.buffer(op.x), self.buffer(op.out), op.top_k, op.normalize)

    def _experts(self, native: NativeOp, op: Experts) -> None:
        matrices = ([self.matrix[w.tensor.name] for w in ws] for ws in (op.gate, op.up, op.down))
        biases = [tuple(self.vector[b.tensor.name, 0.0] for b in each) for each in op.biases]
        none = [(-1, -1, -1)] * len(op.gate)
        parts = [m + b for m, b in zip(zip(*matrices, strict=True), biases or none, strict=True)]
        rows = self.expert_rows[expert_shape(op, self.lowered)]
        kind, out = ACTIVATIONS[op.activation], self.buffer(native.writes[0])
        x, routes, residual = (self.buffer(v) for v in (op.x, op.routes, native.residual))
        self.model.experts(x, routes, parts, kind, rows, out, residual)

    def _norm(self, native: NativeOp, op: RmsNorm) -> None:
        out = self.buffer(native.writes[0]) if native.writes else -1
        weight = self.norm_weight(op)
        residual = self.buffer(native.residual)
        self.model.norm(self.buffer(op.x), weight, op.eps, out, residual, self.act(native.act))

    def _linear(self, native: NativeOp, op: object) -> None:
        parts = []
        for part, target in zip(native.ops, native.writes, strict=True):
            assert isinstance(part, Linear)
            residual = self.buffer(native.residual)
            parts.append(
                (
                    self.matrix[part.weight.tensor.name],
                    self.buffer(target),
                    self.bias(part),
                    residual,
                )
            )
        self.model.linear(self.act(native.source), parts)

    def _gated(self, native: NativeOp, op: object) -> None:
        *projections, gate_op = native.ops
        assert isinstance(gate_op, Glu | Activate)
        parts = []
        for part in projections:
            assert isinstance(part, Linear)
            parts.append((self.matrix[part.weight.tensor.name], self.bias(part)))
        gate, up = parts if len(parts) == 2 else (parts[0], (-1, -1))
        kind = ACTIVATIONS[gate_op.activation]
        assert native.act is not None
        mid = self.lowered.mid_of[native.act.id]
        self.model.gated(self.act(native.source), gate, up, kind, mid, self.act(native.act))

    def _glu(self, native: NativeOp, op: Glu) -> None:
        gate, up = self.buffer(op.gate), self.buffer(op.up)
        self.model.glu(gate, up, ACTIVATIONS[op.activation], self.act(native.act))

    def _attention(self, native: NativeOp, op: Attention) -> None:
        p = native.attention
        assert p is not None
        norm = p.q_norm or p.k_norm
        self.model.attention(
            q=self.buffer(p.q), k=self.buffer(p.k), v=self.buffer(op.v), layer=op.layer,
            heads=op.heads, kv_heads=op.kv_heads, head_dim=op.q.width // op.heads,
            schedule=self.schedule[schedule_of(op)], q_norm=self.norm_weight(p.q_norm),
            k_norm=self.norm_weight(p.k_norm),
            rope=self.rope[rotation_of(p.rope)] if p.rope else -1,
            sinks=self.vector[op.sinks.tensor.name, 0.0] if op.sinks else -1,
            act=self.act(native.act), scale=op.scale, eps=norm.eps if norm else 0.0,
            softcap=op.softcap,
            interleaved=p.rope.interleaved if p.rope else False,
        )  # fmt: skip
