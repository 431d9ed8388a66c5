"""A program as native operations: fuses neighbours, assigns buffers by lifetime."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from octavo import _native
from octavo.backends.fused import EmitOp, FusedOp, GatedOp, LinearOp, SoftcapOp
from octavo.backends.fusion import fuse
from octavo.backends.selection import select_early
from octavo.checkpoint import TensorType
from octavo.errors import Unsupported
from octavo.program import Program, Value, Weight

FLOATING = {TensorType.F32, TensorType.F16, TensorType.TABLE4, TensorType.FP8}  # read fp32


class Forms(NamedTuple):
    """Copies of a linear layer's input: for fixed point, for groups of integers (halves: and of
    halves of them), as bf16, fp32."""

    fixed: bool
    grouped: bool
    halves: bool
    bf16: bool
    f32: bool


class BufferShape(NamedTuple):
    """A row for each selected row or for each token of the step."""

    selected: bool
    width: int


class ActShape(NamedTuple):
    """An input of linear layers. reader: "head" for what the program given has after its rows are
    selected, "gate" for what projections read whose activation is all that is read of them.
    adapted: the forms that only adapters read. per_thread: each thread may have its own."""

    selected: bool
    reader: str
    width: int
    forms: Forms
    adapted: Forms
    per_thread: bool


@dataclass
class Lowered:
    """A program ready to load: operations, and where every value lives."""

    program: Program
    ops: list[FusedOp]
    adapters: bool = False  # whether LoRA adapters may be loaded
    early: frozenset[int] = frozenset()  # selected values, as of `select_early`
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
    halves = any(_native.has_halves(int(kind)) for kind in grouped)
    return Forms(bool(fixed), bool(grouped), halves, bf16, floats or bool(kinds & FLOATING))


def _assign(lowered: Lowered) -> None:
    """Gives every value a buffer, reusing those whose value has been read for the last time."""
    effects = [op.effects for op in lowered.ops]
    p = lowered.program
    results = (p.output, p.hidden, *p.taps)  # read after the step
    logits = _logits(lowered)  # by whose buffer the head is known
    if logits:
        lowered.buffers.append(_shape(p.output))
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
        dead = [v for v in e.reads if last[v.id] == i and v not in results and v.id not in logits]
        in_place = [v for v in dead if v == e.residual and len(e.writes) == 1]
        for value in in_place:
            free.setdefault(_shape(value), []).append(lowered.buffer_of[value.id])
        for value in e.writes:
            lowered.buffer_of[value.id] = 0 if value.id in logits else take(_shape(value))
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


def _logits(lowered: Lowered) -> set[int]:
    """The logits, before their soft cap and after it, of a program that generates."""
    found = {lowered.program.output.id} if lowered.program.task == "generate" else set[int]()
    for op in reversed(lowered.ops):
        if isinstance(op, SoftcapOp) and op.op.out.id in found:
            found.add(op.op.x.id)
    return found


def _shape(value: Value) -> BufferShape:
    return BufferShape(value.selected, value.width)


def _assign_act(
    lowered: Lowered, value: Value, per_thread: bool, free: dict[ActShape, list[int]]
) -> None:
    weights: list[Weight] = []
    permuted, reader = False, ""
    for op in lowered.ops:
        match op:
            case LinearOp() if op.source == value:
                weights += [part.op.weight for part in op.parts]
            case GatedOp() if op.gate.x == value:
                weights += [part.weight for part in (op.gate, op.up) if part]
                reader = "gate"
            case EmitOp(x, True) if x == value:
                permuted = True
    if not weights and not permuted:
        raise Unsupported("a value that no linear layer reads")
    adapters = lowered.adapters and not value.selected
    own, every = forms(weights, permuted), forms(weights, permuted, adapters)
    adapted = Forms(*(late and not early for late, early in zip(every, own, strict=True)))
    if value.selected and value.id not in lowered.early:
        reader = "head"
    key = ActShape(value.selected, reader, value.width, every, adapted, per_thread)
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
    # Adapters know their rows by the step's tokens.
    computed, early = (program, frozenset[int]()) if adapters else select_early(program)
    lowered = Lowered(program, fuse(computed, _native.WIDEST_HEAD), adapters, early)
    _assign(lowered)
    return lowered
