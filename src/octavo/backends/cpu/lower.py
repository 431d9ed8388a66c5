"""A program as native operations: fuses neighbours, finds weights, assigns buffers by lifetime.

Fusions: rotation and QK norm into attention; projections of one input into one operation; a gate
into its two projections; a residual addition into the linear layer or norm that feeds it. None
changes an operation's arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from octavo import _native
from octavo.backends.cpu.ops import (
    AddOp,
    AttentionOp,
    EmbedOp,
    EmitOp,
    ExpertsOp,
    FeaturesOp,
    GatedOp,
    GluOp,
    InjectOp,
    LayerNormOp,
    LinearOp,
    LinearPart,
    NativeOp,
    NormOp,
    RouteOp,
    SelectOp,
    SoftcapOp,
)
from octavo.checkpoint import TensorType
from octavo.errors import Unsupported
from octavo.program import (
    Activate,
    Add,
    Attention,
    Embed,
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
    Value,
    Weight,
)

FLOATING = {TensorType.F32, TensorType.F16, TensorType.TABLE4, TensorType.FP8}  # read fp32


class Forms(NamedTuple):
    """Copies of a linear layer's input: for fixed point, for groups of integers, as bf16, fp32."""

    fixed: bool
    grouped: bool
    bf16: bool
    f32: bool


class BufferShape(NamedTuple):
    """A row for each selected row or for each token of the step."""

    selected: bool
    width: int


class ActShape(NamedTuple):
    """An input of linear layers. adapted: the forms that only adapters read. per_thread: each
    thread may have its own."""

    selected: bool
    width: int
    forms: Forms
    adapted: Forms
    per_thread: bool


# Operations that leave their result as an input of linear layers; some of them nowhere else.
EMITTING = (Attention, Glu, Activate, RmsNorm, LayerNorm, SelectRows, Permute)
EMITTING_ONLY = (Attention, Glu, Activate, Permute)


@dataclass
class Lowered:
    """A program ready to load: operations, and where every value lives."""

    program: Program
    ops: list[NativeOp]
    adapters: bool = False  # whether LoRA adapters may be loaded
    buffers: list[BufferShape] = field(default_factory=list)
    acts: list[ActShape] = field(default_factory=list)
    buffer_of: dict[int, int] = field(default_factory=dict)  # value id -> buffer
    act_of: dict[int, int] = field(default_factory=dict)
    between_of: dict[int, int] = field(default_factory=dict)  # of values inside an operation


def forms(weights: Iterable[Weight], floats: bool = False, adapters: bool = False) -> Forms:
    """What these weights read their input as; floats: something else reads it as fp32."""
    kinds = {w.tensor.type for w in weights}
    if adapters:
        kinds |= {TensorType.F32, TensorType.BF16}  # which their factors may have
    fixed = {kind for kind in kinds if _native.is_fixed(int(kind))}
    grouped = kinds - fixed - FLOATING - {TensorType.BF16}
    bf16 = TensorType.BF16 in kinds
    return Forms(bool(fixed), bool(grouped), bf16, floats or bool(kinds & FLOATING))


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

    def attention(self, op: Attention) -> AttentionOp:
        if op.q.width // op.heads > _native.WIDEST_HEAD:
            raise Unsupported(f"attention heads wider than {_native.WIDEST_HEAD} dimensions")
        q, q_norm, q_rope = self.peel(op.q, op.heads)
        k, k_norm, k_rope = self.peel(op.k, op.kv_heads)
        same = (q_rope is None) == (k_rope is None) and (
            q_rope is None or k_rope is None
            or (q_rope.frequencies, q_rope.factor, q_rope.interleaved, q_rope.axes)
            == (k_rope.frequencies, k_rope.factor, k_rope.interleaved, k_rope.axes)
        )  # fmt: skip
        if not same:
            raise Unsupported("attention whose queries and keys are rotated differently")
        return AttentionOp(op, q, k, q_norm, k_norm, q_rope)

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
            add = adds.get(op.out.id)
            match op:
                case Attention():
                    out.append(attentions[op.out.id])
                case Linear():
                    self.emit(op.x, out)
                    self.linear(op, add, out)
                case Permute():
                    from_act = isinstance(self.producer[op.x.id], EMITTING_ONLY)
                    out.append(EmitOp(op.x, from_act, op.order, op.out))
                case Route():
                    out.append(RouteOp(op))
                case Experts():
                    out.append(self.experts(op, add))
                case Softcap():
                    out.append(SoftcapOp(op))
                case Add():
                    if not any(folded is op for folded in adds.values()):
                        out.append(AddOp(op))
                case RmsNorm():
                    if op.out.id not in self.folded or add is not None:
                        out.append(self.norm(op, add))
                case LayerNorm():
                    out.append(LayerNormOp(op, self.act(op.out)))
                case Glu() | Activate():
                    self.gate(op, out)
                case Embed():
                    out.append(EmbedOp(op))
                case Features():
                    out.append(FeaturesOp(op))
                case Inject():
                    out.append(InjectOp(op))
                case SelectRows():
                    out.append(SelectOp(op, self.act(op.out)))
                case _ if op.out.id not in self.folded:
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
            out.append(EmitOp(value, False, None, value))

    def experts(self, op: Experts, add: Add | None) -> ExpertsOp:
        if isinstance(self.producer[op.x.id], EMITTING_ONLY):
            raise Unsupported("experts that do not follow a norm")
        return ExpertsOp(op, op.out if add is None else add.out, _other(add, op.out))

    def linear(self, op: Linear, add: Add | None, out: list[NativeOp]) -> None:
        """Joins the linear layers before it that read the same input."""
        part = LinearPart(op, op.out if add is None else add.out)
        residual = _other(add, op.out)
        last = out[-1] if out else None
        joins = isinstance(last, LinearOp) and last.residual is None and last.source == op.x
        if residual is None and joins and isinstance(last, LinearOp):
            out[-1] = LinearOp((*last.parts, part), None)
        else:
            out.append(LinearOp((part,), residual))

    def act(self, value: Value) -> Value | None:
        """The value, if linear layers read it."""
        uses = self.uses.get(value.id, [])
        return value if any(isinstance(u, Linear) for u in uses) else None

    def gate(self, op: Glu | Activate, out: list[NativeOp]) -> None:
        """Joins the projections before it, which are nothing else's."""
        last = out[-1] if out else None
        if (
            isinstance(last, LinearOp)
            and last.effects.writes == op.inputs
            and last.residual is None
            and all(self.sole_use(v) for v in op.inputs)
        ):
            gate, *up = (part.op for part in last.parts)
            out[-1] = GatedOp(gate, up[0] if up else None, op)
        elif isinstance(op, Glu):
            out.append(GluOp(op))
        else:
            raise Unsupported("an activation that does not follow its own projections")

    def norm(self, op: RmsNorm, add: Add | None) -> NormOp:
        if op.heads != 1:
            raise Unsupported("a per-head norm outside attention")
        if add is not None:
            return NormOp(op, add.out, _other(add, op.out), None)
        linear = all(isinstance(u, Linear) for u in self.uses.get(op.out.id, []))
        if linear and op.out != self.program.hidden:
            return NormOp(op, None, None, op.out)
        return NormOp(op, op.out, None, self.act(op.out))


def _other(add: Add | None, value: Value) -> Value | None:
    """The other addend."""
    return None if add is None else add.a if add.b is value else add.b


def _assign(lowered: Lowered) -> None:
    """Gives every value a buffer, reusing those whose value has been read for the last time."""
    effects = [op.effects for op in lowered.ops]
    p = lowered.program
    results = (p.output, p.hidden, *p.taps)  # read after the step
    last: dict[int, int] = {}
    for i, e in enumerate(effects):
        ids = [v.id for v in e.reads] + ([e.source.id] if e.source else [])
        last.update(dict.fromkeys(ids, i))
    read = {v.id for e in effects for v in e.reads} | {v.id for v in results}
    free: dict[BufferShape, list[int]] = {}
    free_acts: dict[ActShape, list[int]] = {}
    held: list[tuple[BufferShape, int]] = []  # read by operations that threads may be in still

    def take(shape: BufferShape) -> int:
        if free.get(shape):
            return free[shape].pop()
        lowered.buffers.append(shape)
        return len(lowered.buffers) - 1

    for i, e in enumerate(effects):
        dead = [v for v in e.reads if last[v.id] == i and v not in results]
        in_place = [v for v in dead if v == e.residual and len(e.writes) == 1]
        for value in in_place:
            free.setdefault(_shape(value), []).append(lowered.buffer_of[value.id])
        for value in e.writes:
            lowered.buffer_of[value.id] = take(_shape(value))
        if e.act is not None:
            _assign_act(lowered, e.act, e.per_thread, free_acts)
        # What only linear layers read, they read elsewhere.
        dead += [v for v in e.writes if v.id not in read]
        held += [(_shape(v), lowered.buffer_of[v.id]) for v in dead if v not in in_place]
        if e.between is not None:
            lowered.between_of[e.between.id] = take(_shape(e.between))
            held.append((_shape(e.between), lowered.between_of[e.between.id]))
        if not e.per_thread:
            for shape, buffer in held:
                free.setdefault(shape, []).append(buffer)
            held.clear()
        if e.source is not None and last[e.source.id] == i:
            slot = lowered.act_of[e.source.id]
            free_acts.setdefault(lowered.acts[slot], []).append(slot)
    for value in results:
        if value.id not in lowered.buffer_of:
            raise Unsupported(
                f"a program whose output, hidden states or taps are %{value.id}, which are "
                "computed inside a fused operation"
            )


def _shape(value: Value) -> BufferShape:
    return BufferShape(value.selected, value.width)


def _assign_act(
    lowered: Lowered, value: Value, per_thread: bool, free: dict[ActShape, list[int]]
) -> None:
    weights: list[Weight] = []
    permuted = False
    for op in lowered.ops:
        match op:
            case LinearOp() if op.source == value:
                weights += [part.op.weight for part in op.parts]
            case GatedOp() if op.gate.x == value:
                weights += [part.weight for part in (op.gate, op.up) if part]
            case EmitOp(x, True) if x == value:
                permuted = True
    if not weights and not permuted:
        raise Unsupported("a value that no linear layer reads")
    adapters = lowered.adapters and not value.selected
    own, every = forms(weights, permuted), forms(weights, permuted, adapters)
    adapted = Forms(*(late and not early for late, early in zip(every, own, strict=True)))
    key = ActShape(value.selected, value.width, every, adapted, per_thread)
    if free.get(key):
        lowered.act_of[value.id] = free[key].pop()
    else:
        lowered.act_of[value.id] = len(lowered.acts)
        lowered.acts.append(key)


def interruptible(lowered: Lowered) -> list[int]:
    """Operations before which no thread has a result of its own that is still to be read: of those
    of the next call, others may be at work."""
    effects = [op.effects for op in lowered.ops]
    last = {e.source.id: i for i, e in enumerate(effects) if e.source}
    busy = {
        i
        for made, e in enumerate(effects)
        if e.per_thread and e.act
        for i in range(made + 1, last.get(e.act.id, made) + 1)
    }
    return [i for i in range(1, len(effects) + 1) if i not in busy]


def lower(program: Program, adapters: bool = False) -> Lowered:
    """Lowers a program for the CPU, so that LoRA adapters can be loaded if they are wanted.

    Raises Unsupported for a composition it cannot place.
    """
    lowered = Lowered(program, _Lowering(program).lower(), adapters)
    _assign(lowered)
    return lowered
