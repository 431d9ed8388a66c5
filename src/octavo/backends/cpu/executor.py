"""Loads a lowered program into the native runtime."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from octavo import _native
from octavo.backends.base import Floats, Limits, Sample, StepInput
from octavo.backends.cpu.footprint import (
    SLACK,
    SPARE_PARTS,
    attentions_of,
    deferred,
    expert_shape,
    expert_shapes,
    footprint,
    measured,
    orders_of,
    ropes_of,
    rotation_of,
    schedule_of,
    scratch_floats,
    weights_of,
)
from octavo.backends.cpu.lower import Lowered, NativeOp
from octavo.errors import UsageError
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
    Program,
    RmsNorm,
    Route,
    Softcap,
    Value,
)

LOG = logging.getLogger(__name__)
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "tanh": 3, "relu": 4, "swiglu_clamped": 5}
INDEXES = {"ids": 0, "positions": 1, "token_type_ids": 2}
NOTHING = np.zeros(0, np.uint8)
PREPARE_BYTES = 16 << 20  # bytes of weights or of the cache that are prepared at a time
IDLE_PREFAULT = 256 << 20  # bytes of the cache that are while there is no work
Progress = Callable[[int], None]  # told the bytes of each tensor as it is packed


class CpuExecutable:
    """A program in the native runtime."""

    def __init__(
        self, model: _native.Model, limits: Limits, program: Program, output: int, hidden: int,
        matrices: dict[str, int],
    ) -> None:  # fmt: skip
        self.model = model
        self.limits = limits
        self.task, self.causal = program.task, program.causal
        self._output, self._hidden = output, hidden  # buffers
        self._matrices = matrices  # by tensor name

    def step(self, step: StepInput) -> list[Sample]:
        return self.decode(step, 1, [])[0]

    def decode(self, step: StepInput, steps: int, ends: list[list[int]]) -> list[list[Sample]]:
        rows = self.model.step(
            step.ids, step.positions, step.spans, step.block_tables, step.logits_indices,
            list(step.sampling), step.token_type_ids,
            step.all_logits or self.task != "generate", steps, ends,
            step.embeddings, step.embedding_rows, step.kv_writes,
        )  # fmt: skip
        return [[Sample(*row) for row in each] for each in rows]

    def logits(self, rows: int) -> Floats:
        """The output of the last step's selected rows, `[rows, width]`, copied."""
        return self.model.rows(self._output, 0, rows)

    def hidden(self, first: int, count: int) -> Floats:
        return self.model.rows(self._hidden, first, count)

    def add_adapter(self, parts: list[Any]) -> int:
        """Keeps the factors of an adapter and gives its slot (see engine/adapters.py)."""
        return self.model.add_adapter([(self._matrices[name], *rest) for name, *rest in parts])

    def remove_adapter(self, slot: int) -> None:
        self.model.remove_adapter(slot)

    def pack_pending(self) -> bool:
        """Packs more weights. Returns True while any remain."""
        return self.model.pack(PREPARE_BYTES)

    def prefault_kv(self, reached: int, idle: bool) -> bool:
        """Prefaults unused KV blocks: a step would take their memory a page at a time."""
        return self.model.prefault_kv(
            reached, IDLE_PREFAULT if idle else PREPARE_BYTES, PREPARE_BYTES
        )

    def copy_block(self, source: int, target: int) -> None:
        self.model.copy_block(source, target)


class _Recorder:
    """Writes a lowered program into a native model.

    defer: some matrices may stay as they are stored for now; mapped: the weights are there already.
    """

    def __init__(
        self, lowered: Lowered, model: _native.Model, progress: Progress, defer: bool, mapped: bool
    ) -> None:
        self.lowered, self.model = lowered, model
        matrices, vectors = weights_of(lowered)
        self.matrix, self.vector = {}, {}
        # Largest first: its file pages are dropped before anything else takes memory.
        for name, t in sorted(matrices.items(), key=lambda item: -item[1].nbytes):
            if defer and deferred(t):
                self.matrix[name] = model.add_stored(int(t.type), t.raw(), *t.shape)
            else:
                raw = NOTHING if mapped else t.raw()
                self.matrix[name] = model.add_matrix(int(t.type), t.group, raw, *t.shape)
            progress(t.nbytes)
        model.read_stored()
        for key, w in vectors.items():
            values = w.tensor.vector() + np.float32(w.offset)
            self.vector[key] = model.add_vector(np.ascontiguousarray(values, np.float32))
        self.rope = {r: model.add_rope(np.array(r[0], np.float32), r[1]) for r in ropes_of(lowered)}
        self.order = {o: model.add_order(np.array(o, np.int32)) for o in orders_of(lowered)}
        self.expert_rows = {s: model.add_expert_rows(*s) for s in expert_shapes(lowered)}
        kinds = dict.fromkeys(map(schedule_of, attentions_of(lowered)))
        self.schedule = {kind: model.add_schedule(*kind) for kind in kinds}
        self.buffers = [model.add_buffer(s, w) for s, w in lowered.buffers]
        self.acts = [model.add_act(*act) for act in lowered.acts]

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


def _keep(model: _native.Model, packed: Path) -> None:
    """Writes packed weights, in place of those of older states of the same model."""
    packed.parent.mkdir(parents=True, exist_ok=True)
    part = packed.with_suffix(f".{os.getpid()}")
    if model.save_weights(str(part)):
        part.replace(packed)
        for old in packed.parent.glob(f"{packed.stem.split('-')[0]}-*"):
            process = old.suffix.removeprefix(".")  # of one that still writes, if it lives
            if old != packed and not (process.isdigit() and Path("/proc", process).exists()):
                old.unlink(missing_ok=True)


def _map(model: _native.Model, packed: Path, used: int) -> bool:
    """Takes packed weights from a file, if there is a sound one."""
    if model.map_weights(str(packed), used):
        return True
    if packed.exists():
        LOG.warning("packed weights in %s are damaged: packing them anew", packed.name)
        packed.unlink(missing_ok=True)
    return False


def load(
    lowered: Lowered,
    limits: Limits,
    threads: int,
    kv_dtype: str = "bf16",
    progress: Progress = lambda _: None,
    packed: Path | None = None,
) -> CpuExecutable:
    """Packs the weights, all but those left to `pack_pending`, and allocates what steps can need.

    packed: a file that keeps the packed weights, all of them; mapped if it is there and what it
    holds is what was written, else written.

    The instruction set is the best the host runs, or the one `OCTAVO_ISA` names.
    """
    size = footprint(lowered, limits, threads, kv_dtype)
    try:
        isa = _native.isa(os.environ.get("OCTAVO_ISA", ""))
    except RuntimeError as e:
        raise UsageError(str(e), "OCTAVO_ISA=scalar octavo doctor") from None
    model = _native.Model(
        isa=isa, threads=threads, weight_bytes=size.weights, buffer_bytes=size.buffers,
        tokens=limits.tokens, selected=limits.selected, features=scratch_floats(lowered, limits),
    )  # fmt: skip
    if lowered.adapters:
        model.allow_adapters()
    mapped = packed is not None and _map(model, packed, size.weights - SLACK)
    recorder = _Recorder(lowered, model, progress, packed is None, mapped)
    for native in lowered.ops:
        recorder.record(native)
    program = lowered.program
    output, hidden = recorder.buffer(program.output), recorder.buffer(program.hidden)
    model.output(output, program.output.width, measured(lowered))
    if packed is not None and not mapped:
        _keep(model, packed)
    layers = [(layer.kv_heads, layer.head_dim) for layer in program.cache]
    model.allocate_cache(layers, limits.blocks, kv_dtype, limits.tokens + SPARE_PARTS)
    return CpuExecutable(model, limits, program, output, hidden, recorder.matrix)
