"""What a lowered program needs of memory, and what its weights become there."""

from __future__ import annotations

from dataclasses import dataclass

from octavo import _native
from octavo.backends.base import Limits
from octavo.backends.cpu.lower import Forms, Lowered, forms
from octavo.checkpoint import Stored, Tensor, TensorType
from octavo.checkpoint.adapter import MAX_RANK
from octavo.checkpoint.grouped import Grouped
from octavo.program import (
    Attention,
    Embed,
    Experts,
    LayerNorm,
    Linear,
    Op,
    Permute,
    RmsNorm,
    Rope,
    Route,
    Weight,
)

ADAPTED_PARTS = 3  # matrices that share an input, as native/runtime/adapter.h has it
SPARE_PARTS = 1024  # attention partials beyond one per token: long contexts are split into these
ALIGN = 64
SLACK = 1 << 20


def _up(n: int, to: int = ALIGN) -> int:
    return (n + to - 1) // to * to


def _row(width: int) -> int:
    """Floats from one row of a buffer to the next."""
    return _up(width) + 16


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of each native arena."""

    weights: int
    buffers: int
    cache: int


def _matrices_of(op: Op) -> tuple[Weight, ...]:
    match op:
        case Embed():
            return (op.table,)
        case Linear():
            return (op.weight,)
        case Experts():
            return op.gate + op.up + op.down
    return ()


def weights_of(lowered: Lowered) -> tuple[dict[str, Tensor], dict[tuple[str, float], Weight]]:
    """Matrices by name and vectors by (name, offset)."""
    matrices: dict[str, Tensor] = {}
    vectors: dict[tuple[str, float], Weight] = {}
    for op in lowered.program.ops:
        for weight in _matrices_of(op):
            matrices[weight.tensor.name] = weight.tensor
        if isinstance(op, Experts):
            vectors |= {(b.tensor.name, 0.0): b for each in op.biases for b in each}
        if isinstance(op, Attention) and op.sinks:
            vectors[op.sinks.tensor.name, 0.0] = op.sinks
        if isinstance(op, Linear) and op.bias:
            vectors[op.bias.tensor.name, 0.0] = op.bias
        if isinstance(op, LayerNorm):
            vectors[op.weight.tensor.name, 0.0] = op.weight
            vectors[op.bias.tensor.name, 0.0] = op.bias
        if isinstance(op, RmsNorm):
            vectors[op.weight.tensor.name, op.weight.offset] = op.weight
    return matrices, vectors


def deferred(tensor: Tensor) -> bool:
    """Whether steps can use it as it is stored until it is packed: rows of bf16 and fp32 become
    panels quickly."""
    floats = tensor.type in (TensorType.BF16, TensorType.F32)
    return isinstance(tensor, Stored) and floats and tensor.shape[1] % 64 == 0


def attentions_of(lowered: Lowered) -> list[Attention]:
    return [op for op in lowered.program.ops if isinstance(op, Attention)]


def _padded_head(op: Attention) -> int:
    """Dimensions of a head, to whole vectors."""
    return _up(op.q.width // op.heads, 16)


def rotation_of(rope: Rope) -> tuple[tuple[float, ...], float]:
    return rope.frequencies, rope.factor


def schedule_of(op: Attention) -> tuple[int, bool, int]:
    """What the attention work of a step depends on: window, causality, query heads a KV head."""
    return op.window, op.causal, op.heads // op.kv_heads


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


def scratch_floats(lowered: Lowered, limits: Limits) -> int:
    """Floats one thread needs: any row, the heads of a token, the outputs and queries of an
    attention item and two heads more, or a group of gates and ups of every token."""
    attentions = attentions_of(lowered)
    padded = max(_padded_head(op) for op in attentions)
    queries = max(_up(op.q.width) for op in attentions)
    widest = max(_up(width) for _, width, *_ in lowered.acts)
    return max(widest, queries, 34 * padded, 64 * max(limits.tokens, limits.selected)) + ALIGN


def block_bytes(lowered: Lowered, kv_dtype: str) -> int:
    """Bytes of one KV block over all layers."""
    return sum(
        _native.cache_block_bytes(layer.kv_heads, layer.head_dim, kv_dtype)
        for layer in lowered.program.cache
    )


@dataclass(frozen=True, slots=True)
class Kept:
    """Matrices of one type: their bytes in the file and in memory. bits: of a code in the file."""

    type: TensorType
    bits: int
    count: int
    stored: int
    packed: int


def kept(lowered: Lowered) -> list[Kept]:
    """What the matrices become, the largest part first."""
    groups: dict[tuple[TensorType, int], list[Tensor]] = {}
    for t in weights_of(lowered)[0].values():
        bits = t.bits if isinstance(t, Grouped) else 8 * t.type.block[1] // t.type.block[0]
        groups.setdefault((t.type, bits), []).append(t)
    out = [
        Kept(
            *key, len(ts), sum(t.nbytes for t in ts),
            sum(_native.matrix_bytes(int(t.type), t.group, *t.shape) for t in ts),
        )
        for key, ts in groups.items()
    ]  # fmt: skip
    return sorted(out, key=lambda k: -k.packed)


def footprint(lowered: Lowered, limits: Limits, threads: int, kv_dtype: str) -> Footprint:
    """What `load` will allocate, exactly but for page rounding."""
    matrices, vectors = weights_of(lowered)
    weights = sum(_native.matrix_bytes(int(t.type), t.group, *t.shape) for t in matrices.values())
    weights += sum(_up(4 * _up(w.tensor.shape[0], 16)) for w in vectors.values())
    rows = {False: limits.tokens, True: limits.selected}
    buffers = threads * _up(4 * (_row(scratch_floats(lowered, limits)) + 32))
    buffers += sum(_up(4 * (rows[s] * _row(w) + 16)) for s, w in lowered.buffers)
    buffers += sum(
        _native.input_bytes(rows[s], w, forms, threads if apart else 0)
        for s, w, forms, _, apart in lowered.acts
    )
    ropes = ropes_of(lowered)
    buffers += sum(_up(4 * len(f)) + _up(8 * limits.tokens * len(f)) for f, _ in ropes)
    buffers += sum(_up(4 * len(order)) for order in orders_of(lowered))
    buffers += sum(
        _native.expert_rows_bytes(limits.tokens, *shape) for shape in expert_shapes(lowered)
    )
    attentions, parts = attentions_of(lowered), limits.tokens + SPARE_PARTS
    buffers += 2 * _up(4 * parts * max(op.heads for op in attentions))
    buffers += _up(4 * parts * max(op.heads * _padded_head(op) for op in attentions))
    if lowered.program.output.selected:
        sets = _up(lowered.program.output.width, 256) // 256
        buffers += _up(4 * limits.selected * sets * 17)
    floats = [t for t in matrices.values() if deferred(t)]
    buffers += threads * max(
        (_native.room_bytes(int(t.type), t.shape[1]) for t in floats), default=0
    )
    if lowered.adapters:
        buffers += _up(4 * ADAPTED_PARTS * limits.tokens * MAX_RANK)
    return Footprint(
        weights + SLACK, buffers + SLACK, limits.blocks * block_bytes(lowered, kv_dtype)
    )
