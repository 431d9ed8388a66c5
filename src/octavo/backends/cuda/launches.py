"""A program as launches: operations with what they read and write by name, not yet placed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from octavo.program import Weight

BufferKind = Literal["stream", "act", "query", "sums", "ids", "order", "owner"]


class Buffer(NamedTuple):
    """Rows that an operation writes. kind: "stream" fp32, "act" bf16 padded to 64 columns, "query"
    bf16, "sums" fp32 with up to `slices` partial sums, "ids" int32; "order" and "owner" the places
    of pairs of rows and `width` experts, and the expert of each block of places. times: rows for
    each row of the step."""

    id: int
    kind: BufferKind
    selected: bool
    width: int
    slices: int = 1
    times: int = 1


class Columns(NamedTuple):
    """Part of sums, or all of a stream, as `[P, rows, width]`."""

    buffer: Buffer
    first: int
    width: int


class MatrixRef(NamedTuple):
    """Weights, by number."""

    number: int


class UnpackedRef(NamedTuple):
    """Where a matrix of codes lies in bf16 while it multiplies many rows: all have one place."""

    number: int


class VectorRef(NamedTuple):
    """fp32 vectors, one after the other if there are several; offset is added to each element."""

    weights: tuple[Weight, ...]

    @property
    def key(self) -> tuple[tuple[str, float], ...]:
        return tuple((w.tensor.name, w.offset) for w in self.weights)


class Given(NamedTuple):
    """What a step gives: "rows", those that see their segment alone ("segment_rows"), one of their
    arrays, "embeddings", "select", "pairs"."""

    name: str


class CacheRef(NamedTuple):
    """A layer's keys and values."""

    layer: int


class WorkRef(NamedTuple):
    """Attention's work list. segmented: rows see their segment alone."""

    heads: int
    kv_heads: int
    window: int
    segmented: bool


class ScratchRef(NamedTuple):
    """Where slices of attention wait for each other."""

    heads: int
    head_dim: int


class Numbers(NamedTuple):
    """Numbers that are fixed: fp32 or int32."""

    dtype: Literal["f32", "i32"]
    values: tuple[float, ...]


@dataclass(frozen=True)
class Launch:
    """One call of an operation of `kernels` or `host`. op: the fused operation it belongs to."""

    name: str
    args: tuple[Any, ...]
    options: dict[str, Any]
    op: int

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """The buffers that it touches."""
        found = [a.buffer if isinstance(a, Columns) else a for a in self.args]
        return tuple(b for b in found if isinstance(b, Buffer))
