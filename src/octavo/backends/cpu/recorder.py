"""Records a lowered program into a native model."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from octavo import _native
from octavo.backends.cpu.activations import second_lines
from octavo.backends.cpu.lower import ActShape, Forms, Lowered, forms
from octavo.backends.cpu.weights import deferred, weights_of
from octavo.backends.fused import (
    AddOp,
    AttentionOp,
    EmbedOp,
    EmitOp,
    ExpertsOp,
    FeaturesOp,
    FusedOp,
    GatedOp,
    GluOp,
    InjectOp,
    LayerNormOp,
    LinearOp,
    NormOp,
    RouteOp,
    SelectOp,
    SoftcapOp,
)
from octavo.checkpoint.progress import Advance
from octavo.program import Experts, Linear, RmsNorm, Rope, Route, Value, Weight

ACTIVATIONS = {
    "silu": 0, "gelu_tanh": 1, "gelu": 2, "tanh": 3, "relu": 4, "swiglu_clamped": 5,
    "quick_gelu": 6,
}  # fmt: skip
INDEXES = {"ids": 0, "positions": 1, "token_type_ids": 2}
NO_BYTES = np.zeros(0, np.uint8)
NO_FLOATS = np.zeros(0, np.float32)


Rotation = tuple[tuple[float, ...], float, tuple[int, ...]]  # frequencies, factor, axes


def _rotation(rope: Rope) -> Rotation:
    return rope.frequencies, rope.factor, rope.axes


class ExpertShape(NamedTuple):
    """Of the rows that a layer of experts gathers: layers of one shape share them."""

    experts: int
    used: int
    hidden: int
    ffn: int
    inputs: Forms
    between: Forms


def _expert_shape(op: Experts, lowered: Lowered) -> ExpertShape:
    (route,) = (r for r in lowered.program.ops if isinstance(r, Route) and r.out == op.routes)
    ffn = op.gate[0].tensor.shape[0]
    inputs, between = forms(op.gate + op.up), forms(op.down)
    return ExpertShape(len(op.gate), route.top_k, op.x.width, ffn, inputs, between)


def _measured(lowered: Lowered) -> bool:
    """True if the head finds the statistics of logits: nothing changes them afterwards."""
    output = lowered.program.output
    return (
        output.selected
        and isinstance(lowered.ops[-1], LinearOp)
        and lowered.ops[-1].effects.writes == (output,)
    )


class Recorder:
    """Writes a lowered program into a native model, with its weights if the model needs them.

    defer: some matrices may stay as they are stored until `pack_pending` has packed them.
    activations: as in ProgramOptions. remainder: bf16 inputs and queries have one.
    """

    def __init__(
        self, lowered: Lowered, model: _native.Model, progress: Advance, defer: bool,
        activations: str, remainder: bool,
    ) -> None:  # fmt: skip
        self.lowered, self.model = lowered, model
        self._activations, self._remainder = activations, remainder
        if lowered.adapters:
            model.allow_adapters()
        matrices, vectors = weights_of(lowered)
        self.matrix, self.vector = {}, {}
        # Largest first: its file pages are dropped before anything else takes memory.
        sizes = {name: t.nbytes for name, t in matrices.items()}  # there may be thousands
        for name in sorted(sizes, key=sizes.__getitem__, reverse=True):
            t = matrices[name]
            raw = t.raw() if model.needs_weights else NO_BYTES
            if defer and deferred(t):
                self.matrix[name] = model.add_stored(int(t.type), raw, *t.shape)
            else:
                self.matrix[name] = model.add_matrix(int(t.type), t.group, raw, *t.shape)
            progress(sizes[name])
        model.read_stored()
        for key, w in vectors.items():
            self.vector[key] = model.add_vector(self._values(w), w.tensor.shape[0])
        self.rope: dict[Rotation, int] = {}
        self.order: dict[tuple[int, ...], int] = {}
        # by window, causal, heads a KV head, segmented, selected
        self.schedule: dict[tuple[int, bool, int, bool, bool], int] = {}
        self.expert_rows: dict[ExpertShape, int] = {}
        self.buffers = [model.add_buffer(*shape) for shape in lowered.buffers]
        self.acts = [self._add_act(shape) for shape in lowered.acts]
        self.starts: list[int] = []  # the native operation that each begins with, and their number
        for native in lowered.ops:
            self.starts.append(model.length)
            self.record(native)
        self.starts.append(model.length)
        output = lowered.program.output
        model.output(self.buffer(output), output.width, _measured(lowered))

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

    def plain_vector(self, weight: Weight | None) -> int:
        return -1 if weight is None else self.vector[weight.tensor.name, 0.0]

    def _forms(self, forms: Forms, reader: str = "") -> _native.Forms:
        """The forms, digits as the setting wants them. reader: as of `ActShape`."""
        lines = second_lines(self._activations, reader)
        if lines is None:
            return _native.Forms(**forms._asdict(), scaled=False, remainder=self._remainder)
        return _native.Forms(
            fixed=False, grouped=False, halves=forms.halves, scaled=forms.fixed or forms.grouped,
            bf16=forms.bf16, f32=forms.f32, second_lines=lines, remainder=self._remainder,
        )  # fmt: skip

    def _add_act(self, shape: ActShape) -> int:
        forms, adapted = (self._forms(x, shape.reader) for x in (shape.forms, shape.adapted))
        return self.model.add_act(
            selected=shape.selected, width=shape.width, forms=forms, adapted=adapted,
            apart=shape.per_thread,
        )  # fmt: skip

    def record(self, native: FusedOp) -> None:
        model, buffer, act = self.model, self.buffer, self.act
        match native:
            case EmbedOp(op):
                table, index = self.matrix[op.table.tensor.name], INDEXES[op.index]
                model.embed(table, buffer(op.out), op.scale, index, op.offset, op.replaceable)
            case FeaturesOp(op):
                model.embed(-1, buffer(op.out), 1.0, INDEXES["ids"], 0, True)
            case InjectOp(op):
                model.inject(buffer(op.x), buffer(op.out), op.first)
            case SelectOp(op):
                model.select_rows(buffer(op.x), buffer(op.out), act(native.act))
            case LayerNormOp(op):
                weight, bias = (self.vector[w.tensor.name, 0.0] for w in (op.weight, op.bias))
                out = buffer(op.out)
                model.layer_norm(buffer(op.x), weight, bias, op.eps, out, act(native.act))
            case NormOp(op, out_value, residual):
                weight, out = self.norm_weight(op), buffer(out_value)
                model.norm(buffer(op.x), weight, op.eps, out, buffer(residual), act(native.act))
            case AddOp(op):
                model.add(buffer(op.a), buffer(op.b), buffer(op.out))
            case SoftcapOp(op):
                assert buffer(op.x) == buffer(op.out)
                model.softcap(buffer(op.x), op.cap)
            case EmitOp():
                self._emit(native)
            case RouteOp(op):
                model.route(buffer(op.x), buffer(op.out), op.top_k, op.normalize)
            case ExpertsOp():
                self._experts(native)
            case LinearOp():
                self._linear(native)
            case GatedOp():
                self._gated(native)
            case GluOp(op):
                kind = ACTIVATIONS[op.activation]
                model.glu(buffer(op.gate), buffer(op.up), kind, act(op.out))
            case AttentionOp():
                self._attention(native)

    def _emit(self, native: EmitOp) -> None:
        source, buffer = self.act(native.x if native.from_act else None), -1
        if not native.from_act:
            buffer = self.buffer(native.x)
        order = native.order
        if order is not None and order not in self.order:
            self.order[order] = self.model.add_order(np.array(order, np.int32))
        index = -1 if order is None else self.order[order]
        self.model.emit(buffer, source, index, native.act.width, self.act(native.act))

    def _experts(self, native: ExpertsOp) -> None:
        op, shape = native.op, _expert_shape(native.op, self.lowered)
        if shape not in self.expert_rows:
            self.expert_rows[shape] = self.model.add_expert_rows(
                experts=shape.experts, used=shape.used, hidden=shape.hidden, ffn=shape.ffn,
                inputs=self._forms(shape.inputs),
                between=self._forms(shape.between),
            )  # fmt: skip
        none = (None, None, None)
        parts = [
            _native.Expert(
                gate=self.matrix[gate.tensor.name], up=self.matrix[up.tensor.name],
                down=self.matrix[down.tensor.name], gate_bias=self.plain_vector(gate_bias),
                up_bias=self.plain_vector(up_bias), down_bias=self.plain_vector(down_bias),
            )
            for gate, up, down, (gate_bias, up_bias, down_bias) in zip(
                op.gate, op.up, op.down, op.biases or [none] * len(op.gate), strict=True
            )
        ]  # fmt: skip
        self.model.experts(
            x=self.buffer(op.x), routes=self.buffer(op.routes), parts=parts,
            kind=ACTIVATIONS[op.activation], rows=self.expert_rows[shape],
            out=self.buffer(native.out), residual=self.buffer(native.residual),
        )  # fmt: skip

    def _part(self, op: Linear | None, out: Value | None = None) -> _native.LinearPart:
        if op is None:
            return _native.LinearPart()
        matrix, bias = self.matrix[op.weight.tensor.name], self.plain_vector(op.bias)
        return _native.LinearPart(matrix=matrix, out=self.buffer(out), bias=bias)

    def _linear(self, native: LinearOp) -> None:
        parts = [self._part(op, out) for op, out in native.parts]
        self.model.linear(self.act(native.source), parts, self.buffer(native.residual))

    def _gated(self, native: GatedOp) -> None:
        gate, up, out = self._part(native.gate), self._part(native.up), native.op.out
        self.model.gated(
            source=self.act(native.gate.x), gate=gate, up=up,
            kind=ACTIVATIONS[native.op.activation], mid=self.lowered.between_of[out.id],
            act=self.act(out),
        )  # fmt: skip

    def _attention(self, native: AttentionOp) -> None:
        op, norm, rope = native.op, native.q_norm or native.k_norm, native.rope
        group, selected = op.heads // op.kv_heads, native.out.selected
        kind = op.window, op.causal, group, op.segmented, selected
        if kind not in self.schedule:
            self.schedule[kind] = self.model.add_schedule(*kind)
        if rope and _rotation(rope) not in self.rope:
            frequencies = np.array(rope.frequencies, np.float32)
            axes = np.array(rope.axes, np.int32)
            self.rope[_rotation(rope)] = self.model.add_rope(frequencies, rope.factor, axes)
        attention = _native.Attention(
            q=self.buffer(native.q), k=self.buffer(native.k), v=self.buffer(op.v), layer=op.layer,
            heads=op.heads, kv_heads=op.kv_heads, head_dim=op.q.width // op.heads,
            schedule=self.schedule[kind], q_norm=self.norm_weight(native.q_norm),
            k_norm=self.norm_weight(native.k_norm),
            rope=self.rope[_rotation(rope)] if rope else -1,
            sinks=self.plain_vector(op.sinks),
            act=self.act(native.out), scale=op.scale, eps=norm.eps if norm else 0.0,
            softcap=op.softcap, interleaved=rope.interleaved if rope else False,
            remainder=self._remainder,
        )  # fmt: skip
        self.model.attention(attention)
