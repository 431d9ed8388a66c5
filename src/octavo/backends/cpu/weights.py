"""The weights of a lowered program, and what they become in memory."""

from __future__ import annotations

from octavo import _native
from octavo.backends.base import PackedMatrices
from octavo.backends.cpu.lower import Lowered
from octavo.checkpoint import Stored, Tensor, TensorType
from octavo.checkpoint.grouped import Grouped
from octavo.program import Attention, Embed, Experts, LayerNorm, Linear, Op, RmsNorm, Weight

_FLOATS = (TensorType.BF16, TensorType.F32)


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
    return isinstance(tensor, Stored) and tensor.type in _FLOATS and tensor.shape[1] % 64 == 0


def packed_matrices(lowered: Lowered) -> list[PackedMatrices]:
    """What the matrices become, the largest part first."""
    groups: dict[tuple[TensorType, int], list[Tensor]] = {}
    for t in weights_of(lowered)[0].values():
        bits = t.bits if isinstance(t, Grouped) else 8 * t.type.block[1] // t.type.block[0]
        groups.setdefault((t.type, bits), []).append(t)
    out = [
        PackedMatrices(
            *key, len(ts), sum(t.nbytes for t in ts),
            sum(_native.matrix_bytes(int(t.type), t.group, *t.shape) for t in ts),
        )
        for key, ts in groups.items()
    ]  # fmt: skip
    return sorted(out, key=lambda k: -k.packed)
