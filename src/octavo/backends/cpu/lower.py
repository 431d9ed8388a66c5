"""A program as native operations: fuses neighbours, finds weights, assigns buffers by lifetime.

Fusions: rotation and QK norm into attention; projections of one input into one operation; a gate
into its two projections; a residual addition into the linear layer or norm that feeds it. None
changes an operation's arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from octavo import _native
from octavo.checkpoint import TensorType
from octavo.errors import Unsupported
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
    Value,
    Weight,
)

Buffer = tuple[tuple[bool, int], int]  # of selected rows?, width; its index
# Copies of a linear layer's input: for fixed point, for groups of integers, as bf16, as fp32.
Forms = tuple[bool, bool, bool, bool]
FLOATING = {TensorType.F32, TensorType.F16, TensorType.TABLE4, TensorType.FP8}  # read fp32

# Of selected rows?, width, forms, which of bf16 and fp32 only adapters read, each thread its own?
ActShape = tuple[bool, int, Forms, tuple[bool, bool], bool]

# Operations that leave their result as an input of linear layers; some of them nowhere else.
EMITTING = (Attention, Glu, Activate, RmsNorm, LayerNorm, SelectRows, Permute)
EMITTING_ONLY = (Attention, Glu, Activate, Permute)


@dataclass(frozen=True)
class AttentionParts:
    """An attention with what precedes it on q and k."""

    op: Attention
    q: Value
    k: Value
    q_norm: RmsNorm | None
    k_norm: RmsNorm | None
    rope: Rope | None


@dataclass(frozen=True)
class NativeOp:
    """One native operation: `reads` and `writes` are float values; `source` and `act` are inputs of
    linear layers, read and written."""

    kind: str
    ops: tuple[Op, ...]
    reads: tuple[Value, ...] = ()
    writes: tuple[Value, ...] = ()
    source: Value | None = None
    act: Value | None = None
    residual: Value | None = None
    attention: AttentionParts | None = None

    @property
    def apart(self) -> bool:
        """Whether each thread may compute all of it for itself, when steps are small: then no
        thread waits for the others before the next operation."""
        return self.kind in ("norm", "attention", "gated", "glu") and not self.writes


@dataclass
class Lowered:
    """A program ready to load: operations, and where every value lives."""

    program: Program
    ops: list[NativeOp]
    adapters: bool = False  # whether LoRA adapters may be loaded
    buffers: list[tuple[bool, int]] = field(default_factory=list)  # (selected rows?, width)
    acts: list[ActShape] = field(default_factory=list)
    buffer_of: dict[int, int] = field(default_factory=dict)  # value id -> buffer
    act_of: dict[int, int] = field(default_factory=dict)
    mid_of: dict[int, int] = field(default_factory=dict)  # a gated value, before it is an input


def forms(weights: Iterable[Weight], floats: bool = False, adapters: bool = False) -> Forms:
    """What these weights read their input as; floats: something else reads it as fp32."""
    kinds = {w.tensor.type for w in weights}
    if adapters:
        kinds |= {TensorType.F32, TensorType.BF16}  # which their factors may have
    fixed = {kind for kind in kinds if _native.is_fixed(int(kind))}
    grouped = kinds - fixed - FLOATING - {TensorType.BF16}
    bf16 = TensorType.BF16 in kinds
    return bool(fixed), bool(grouped), bf16, floats or bool(kinds & FLOATING)


class _Lowering:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.producer = {op.out.id: op for op in program.ops}
        self.uses: dict[int, list[Op]] = {}
        for op in program.ops:
            for value in op.inputs:
                self.uses.setdefault(value.id, []).append(op)
        self.emitted: set[int] = set()
        self.folded: set[int] = set()  # ids of values that exist only inside a fused operation

    def sole_use(self, value: Value) -> bool:
        return len(self.uses.get(value.id, [])) == 1

    def peel(self, value: Value, heads: int) -> tuple[Value, RmsNorm | None, Rope | None]:
        """Walks back through rotation and per-head norm to the projection."""
        rope = norm = None
        op = self.producer[value.id]
        if isinstance(op, Rope) and self.sole_use(value):
            rope, value = op, op.x
            self.folded.add(op.out.id)
            op = self.producer[value.id]
        if isinstance(op, RmsNorm) and self.sole_use(value) and op.heads == heads:
            norm, value = op, op.x
            self.folded.add(op.out.id)
        return value, norm, rope

    def attention(self, op: Attention) -> NativeOp:
        if op.q.width // op.heads > _native.WIDEST_HEAD:
            raise Unsupported(f"attention heads wider than {_native.WIDEST_HEAD} dimensions")
        q, q_norm, q_rope = self.peel(op.q, op.heads)
        k, k_norm, k_rope = self.peel(op.k, op.kv_heads)
        same = (q_rope is None) == (k_rope is None) and (
            q_rope is None or k_rope is None
            or (q_rope.frequencies, q_rope.factor, q_rope.interleaved)
            == (k_rope.frequencies, k_rope.factor, k_rope.interleaved)
        )  # fmt: skip
        if not same:
            raise Unsupported("attention whose queries and keys are rotated differently")
        parts = AttentionParts(op, q, k, q_norm, k_norm, q_rope)
        return NativeOp("attention", (op,), (q, k, op.v), (), act=op.out, attention=parts)

    def lower(self) -> list[NativeOp]:
        attentions = {
            op.out.id: self.attention(op) for op in self.program.ops if isinstance(op, Attention)
        }
        adds: dict[int, Add] = {}  # producer's value -> the addition folded into it
        for op in self.program.ops:
            if isinstance(op, Add) and (target := self.residual_target(op)) is not None:
                adds[target.id] = op
                self.folded.add(target.id)
        out: list[NativeOp] = []
        for op in self.program.ops:
            if isinstance(op, Attention):
                out.append(attentions[op.out.id])
            elif isinstance(op, Linear):
                self.emit(op.x, out)
                self.linear(op, adds.get(op.out.id), out)
            elif isinstance(op, Permute):
                out.append(self.permute(op))
            elif isinstance(op, Route):
                out.append(NativeOp("route", (op,), (op.x,), (op.out,)))
            elif isinstance(op, Experts):
                out.append(self.experts(op, adds.get(op.out.id)))
            elif isinstance(op, Softcap):
                out.append(NativeOp("softcap", (op,), (op.x,), (op.out,), residual=op.x))
            elif isinstance(op, Add):
                if not any(add is op for add in adds.values()):
                    out.append(NativeOp("add", (op,), op.inputs, (op.out,)))
            elif isinstance(op, RmsNorm):
                if op.out.id not in self.folded or op.out.id in adds:
                    out.append(self.norm(op, adds.get(op.out.id)))
            elif isinstance(op, LayerNorm):
                out.append(NativeOp("layer_norm", (op,), (op.x,), (op.out,), act=self.act(op.out)))
            elif isinstance(op, Glu | Activate):
                self.gate(op, out)
            elif isinstance(op, Embed):
                out.append(NativeOp("embed", (op,), (), (op.out,)))
            elif isinstance(op, SelectRows):
                out.append(NativeOp("select", (op,), (op.x,), (op.out,), act=self.act(op.out)))
            elif op.out.id not in self.folded:
                raise Unsupported(f"the CPU backend cannot place {op.name} here")
        return out

    def residual_target(self, op: Add) -> Value | None:
        """The addend whose producer can add the other one itself: computed last, used only here."""
        last = op.b if op.b.id > op.a.id else op.a
        producer = self.producer[last.id]
        fits = isinstance(producer, Linear | Experts) or (
            isinstance(producer, RmsNorm) and producer.heads == 1
        )
        return last if fits and self.sole_use(last) else None

    def emit(self, value: Value, out: list[NativeOp]) -> None:
        """Makes a value an input of linear layers if what computes it does not."""
        producer = self.producer[value.id]
        if not isinstance(producer, EMITTING) and value.id not in self.emitted:
            self.emitted.add(value.id)
            out.append(NativeOp("emit", (producer,), (value,), act=value))

    def permute(self, op: Permute) -> NativeOp:
        if isinstance(self.producer[op.x.id], EMITTING_ONLY):
            return NativeOp("emit", (op,), source=op.x, act=op.out)
        return NativeOp("emit", (op,), (op.x,), act=op.out)

    def experts(self, op: Experts, add: Add | None) -> NativeOp:
        if isinstance(self.producer[op.x.id], EMITTING_ONLY):
            raise Unsupported("experts that do not follow a norm")
        residual = None if add is None else (add.a if add.b is op.out else add.b)
        reads = (op.x, op.routes) if residual is None else (op.x, op.routes, residual)
        target = op.out if add is None else add.out
        return NativeOp("experts", (op,), reads, (target,), residual=residual)

    def linear(self, op: Linear, add: Add | None, out: list[NativeOp]) -> None:
        residual = None if add is None else (add.a if add.b is op.out else add.b)
        target = op.out if add is None else add.out
        previous = out[-1] if out else None
        if (
            residual is None
            and previous
            and previous.kind == "linear"
            and previous.residual is None
        ):
            first = previous.ops[0]
            if isinstance(first, Linear) and first.x == op.x:
                out[-1] = NativeOp(
                    "linear", (*previous.ops, op), (), (*previous.writes, target), source=op.x
                )
                return
        reads = () if residual is None else (residual,)
        out.append(NativeOp("linear", (op,), reads, (target,), source=op.x, residual=residual))

    def act(self, value: Value) -> Value | None:
        """The value, if linear layers read it."""
        uses = self.uses.get(value.id, [])
        return value if any(isinstance(u, Linear) for u in uses) else None

    def gate(self, op: Glu | Activate, out: list[NativeOp]) -> None:
        """Joins the projections before it, which are nothing else's."""
        last = out[-1] if out else None
        if (
            last
            and last.kind == "linear"
            and last.writes == op.inputs
            and last.residual is None
            and all(self.sole_use(v) for v in op.inputs)
        ):
            out[-1] = NativeOp("gated", (*last.ops, op), source=last.source, act=op.out)
        elif isinstance(op, Glu):
            out.append(NativeOp("glu", (op,), op.inputs, act=op.out))
        else:
            raise Unsupported("an activation that does not follow its own projections")

    def norm(self, op: RmsNorm, add: Add | None) -> NativeOp:
        if op.heads != 1:
            raise Unsupported("a per-head norm outside attention")
        if add is not None:
            residual = add.a if add.b is op.out else add.b
            return NativeOp("norm", (op,), (op.x, residual), (add.out,), residual=residual)
        linear = all(isinstance(u, Linear) for u in self.uses.get(op.out.id, []))
        if linear and op.out != self.program.hidden:
            return NativeOp("norm", (op,), (op.x,), (), act=op.out)
        return NativeOp("norm", (op,), (op.x,), (op.out,), act=self.act(op.out))


def _assign(lowered: Lowered) -> None:
    """Gives every value a buffer, reusing those whose value has been read for the last time."""
    last: dict[int, int] = {}
    results = (lowered.program.output, lowered.program.hidden)  # read after the step
    for i, op in enumerate(lowered.ops):
        ids = [v.id for v in op.reads] + ([op.source.id] if op.source else [])
        last.update(dict.fromkeys(ids, i))
    free: dict[tuple[bool, int], list[int]] = {}
    free_acts: dict[ActShape, list[int]] = {}
    held: list[Buffer] = []  # read by operations that other threads may not have ended

    def take(key: tuple[bool, int]) -> int:
        if free.get(key):
            return free[key].pop()
        lowered.buffers.append(key)
        return len(lowered.buffers) - 1

    for i, op in enumerate(lowered.ops):
        dead = [v for v in op.reads if last[v.id] == i and v not in results]
        in_place = [v for v in dead if v == op.residual and len(op.writes) == 1]
        for value in in_place:
            free.setdefault((value.selected, value.width), []).append(lowered.buffer_of[value.id])
        for value in op.writes:
            lowered.buffer_of[value.id] = take((value.selected, value.width))
        if op.act is not None:
            _assign_act(lowered, op.act, op.apart, free_acts)
        held += [
            ((v.selected, v.width), lowered.buffer_of[v.id]) for v in dead if v not in in_place
        ]
        if op.kind == "gated" and op.act is not None:
            key = (op.act.selected, op.act.width)
            lowered.mid_of[op.act.id] = take(key)
            held.append((key, lowered.mid_of[op.act.id]))
        if not op.apart:
            for key, buffer in held:
                free.setdefault(key, []).append(buffer)
            held.clear()
        if op.source is not None and last[op.source.id] == i:
            slot = lowered.act_of[op.source.id]
            free_acts.setdefault(lowered.acts[slot], []).append(slot)
    for value in results:
        if value.id not in lowered.buffer_of:
            raise Unsupported(
                f"a program whose output or hidden states are %{value.id}, which are "
                "computed inside a fused operation"
            )


def _assign_act(
    lowered: Lowered, value: Value, apart: bool, free: dict[ActShape, list[int]]
) -> None:
    users = [op for n in lowered.ops if n.source == value for op in n.ops]
    weights = [op.weight for op in users if isinstance(op, Linear) and op.x == value]
    permuted = any(isinstance(op, Permute) and op.x == value for op in users)
    if not weights and not permuted:
        raise Unsupported("a value that no linear layer reads")
    adapters = lowered.adapters and not value.selected
    own, every = forms(weights, permuted), forms(weights, permuted, adapters)
    adapted = (every[2] and not own[2], every[3] and not own[3])
    key = (value.selected, value.width, every, adapted, apart)
    if free.get(key):
        lowered.act_of[value.id] = free[key].pop()
    else:
        lowered.act_of[value.id] = len(lowered.acts)
        lowered.acts.append(key)


def lower(program: Program, adapters: bool = False) -> Lowered:
    """Lowers a program for the CPU, with room for LoRA adapters if they are wanted.

    Raises Unsupported for a composition it cannot place.
    """
    lowered = Lowered(program, _Lowering(program).lower(), adapters)
    _assign(lowered)
    return lowered
