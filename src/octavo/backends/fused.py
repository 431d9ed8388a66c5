"""What programs are fused to: one class for each operation that backends compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

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
    RmsNorm,
    Rope,
    Route,
    SelectRows,
    Softcap,
    Value,
)


class Effects(NamedTuple):
    """What an operation touches, for the assignment of buffers.

    reads, writes: values in buffers. source, act: values as inputs of linear layers, read and
    written. residual: the one of `reads` whose buffer may take the result. between: a value that
    lives only inside the operation. per_thread: in small steps each thread may compute all of it
    for itself, without waiting for others before the next operation.
    """

    reads: tuple[Value, ...] = ()
    writes: tuple[Value, ...] = ()
    source: Value | None = None
    act: Value | None = None
    residual: Value | None = None
    between: Value | None = None
    per_thread: bool = False


def _some(*values: Value | None) -> tuple[Value, ...]:
    return tuple(v for v in values if v is not None)


@dataclass(frozen=True)
class EmbedOp:
    op: Embed

    @property
    def effects(self) -> Effects:
        return Effects(writes=(self.op.out,))


@dataclass(frozen=True)
class FeaturesOp:
    op: Features

    @property
    def effects(self) -> Effects:
        return Effects(writes=(self.op.out,))


@dataclass(frozen=True)
class InjectOp:
    op: Inject

    @property
    def effects(self) -> Effects:
        return Effects((self.op.x,), (self.op.out,), residual=self.op.x)


@dataclass(frozen=True)
class SelectOp:
    op: SelectRows
    act: Value | None

    @property
    def effects(self) -> Effects:
        return Effects((self.op.x,), (self.op.out,), act=self.act)


@dataclass(frozen=True)
class LayerNormOp:
    op: LayerNorm
    act: Value | None

    @property
    def effects(self) -> Effects:
        return Effects((self.op.x,), (self.op.out,), act=self.act)


@dataclass(frozen=True)
class NormOp:
    """out: the norm, or its sum with `residual`; None if only linear layers read the norm."""

    op: RmsNorm
    out: Value | None
    residual: Value | None
    act: Value | None

    @property
    def effects(self) -> Effects:
        return Effects(
            _some(self.op.x, self.residual), _some(self.out), act=self.act, residual=self.residual,
            per_thread=self.out is None,
        )  # fmt: skip


@dataclass(frozen=True)
class AddOp:
    op: Add

    @property
    def effects(self) -> Effects:
        return Effects((self.op.a, self.op.b), (self.op.out,))


@dataclass(frozen=True)
class SoftcapOp:
    op: Softcap

    @property
    def effects(self) -> Effects:
        return Effects((self.op.x,), (self.op.out,), residual=self.op.x)


@dataclass(frozen=True)
class EmitOp:
    """Makes `x` an input of linear layers, in another order of features if one is given. from_act:
    `x` is such an input itself, and in no buffer."""

    x: Value
    from_act: bool
    order: tuple[int, ...] | None
    act: Value

    @property
    def effects(self) -> Effects:
        if self.from_act:
            return Effects(source=self.x, act=self.act)
        return Effects((self.x,), act=self.act)


@dataclass(frozen=True)
class RouteOp:
    op: Route

    @property
    def effects(self) -> Effects:
        return Effects((self.op.x,), (self.op.out,))


@dataclass(frozen=True)
class ExpertsOp:
    """out: the experts' result, or its sum with `residual`."""

    op: Experts
    out: Value
    residual: Value | None

    @property
    def effects(self) -> Effects:
        reads = _some(self.op.x, self.op.routes, self.residual)
        return Effects(reads, (self.out,), residual=self.residual)


class LinearPart(NamedTuple):
    """One of the matrices that share an input."""

    op: Linear
    out: Value


@dataclass(frozen=True)
class LinearOp:
    """residual: what is added to the result, where there is one part."""

    parts: tuple[LinearPart, ...]
    residual: Value | None

    @property
    def source(self) -> Value:
        return self.parts[0].op.x

    @property
    def effects(self) -> Effects:
        writes = tuple(p.out for p in self.parts)
        return Effects(_some(self.residual), writes, self.source, residual=self.residual)


@dataclass(frozen=True)
class GatedOp:
    """Projections and the activation that is all that reads them."""

    gate: Linear
    up: Linear | None
    op: Glu | Activate

    @property
    def effects(self) -> Effects:
        out = self.op.out
        return Effects(source=self.gate.x, act=out, between=out, per_thread=True)


@dataclass(frozen=True)
class GluOp:
    op: Glu

    @property
    def effects(self) -> Effects:
        return Effects((self.op.gate, self.op.up), act=self.op.out, per_thread=True)


@dataclass(frozen=True)
class AttentionOp:
    """Attention with the norms and the rotation of its queries and keys. q, k: before these. out:
    the result, or the selected rows of it."""

    op: Attention
    q: Value
    k: Value
    q_norm: RmsNorm | None
    k_norm: RmsNorm | None
    rope: Rope | None
    out: Value

    @property
    def effects(self) -> Effects:
        return Effects((self.q, self.k, self.op.v), act=self.out, per_thread=True)


FusedOp = (
    EmbedOp | FeaturesOp | InjectOp | SelectOp | LayerNormOp | NormOp | AddOp | SoftcapOp
    | EmitOp | RouteOp | ExpertsOp | LinearOp | GatedOp | GluOp | AttentionOp
)  # fmt: skip
