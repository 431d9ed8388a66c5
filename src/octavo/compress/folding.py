"""Layers that share an input, and the tensors that a scale of its features can be folded into.

A scale s of features changes nothing where what makes them gives x / s and the layers' columns are
W s. Whether it can is read from a program's operations: a norm's weight takes it, and so do the
rows of a linear layer whose outputs reach the input through operations that are linear in them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from octavo.compress.fit import F32, I32, divide
from octavo.compress.grids import ScaleType, rounded
from octavo.program import (
    Activate,
    Attention,
    Experts,
    Glu,
    LayerNorm,
    Linear,
    Op,
    Program,
    RmsNorm,
    Value,
    Weight,
)


@dataclass(frozen=True, slots=True)
class Producer:
    """What makes an input: tensors whose elements or rows are divided by its scale.

    row_of: the row that each feature comes from. Heads that share values share rows, and so must
    share scales.
    """

    weights: tuple[Weight, ...]
    row_of: I32

    def shared(self, scales: F32) -> F32:
        """The scales of features with those of one row made equal: their geometric mean."""
        logs = np.log(scales.astype(np.float64))
        count = np.bincount(self.row_of)
        means = np.bincount(self.row_of, logs) / np.maximum(count, 1)
        return np.exp(means[self.row_of]).astype(np.float32)

    def of_rows(self, scales: F32) -> F32:
        """The scale of each row, 1 for rows that no feature is made of."""
        out = np.ones(int(self.row_of.max(initial=-1)) + 1, np.float32)
        out[self.row_of] = scales
        return out


@dataclass(frozen=True, slots=True)
class InputGroup:
    """Matrices whose columns are the features of one input.

    input: None for the second matrices of experts, whose input is no value. producer: None where a
    scale cannot be folded: something else reads the features, or what makes them is not linear.
    """

    input: Value | None
    weights: tuple[Weight, ...]
    producer: Producer | None


def fold_rows(stored: F32, scales: F32, offset: float = 0.0) -> F32:
    """A producer's matrix, bias or norm weight for features divided by `scales`, of each row.

    offset: what is added to the stored numbers when they are used (Gemma's norms are 1 + w).
    """
    by = scales if stored.ndim == 1 else scales[:, None]
    return np.asarray((stored + np.float32(offset)) / by - np.float32(offset), np.float32)


def storable(scales: F32, norm: F32, offset: float, kind: ScaleType) -> F32:
    """The nearest scales by which a norm's weight can be divided without a rounding error.

    Files hold norms in few digits; columns, which are rounded to a grid after, take up the rest.
    """
    new = rounded(fold_rows(norm, scales, offset), kind) + np.float32(offset)
    old = norm + np.float32(offset)
    return np.where((new != 0) & (old != 0), divide(old, new), scales).astype(np.float32)


def input_groups(program: Program) -> list[InputGroup]:
    """The groups of linear layers and experts in the order of the program."""
    return list(_Folds(program).groups())


class _Folds:
    """Who makes and who reads each value."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.made = {op.out.id: op for op in program.ops}
        self.readers: dict[int, list[Op]] = defaultdict(list)
        for op in program.ops:
            for value in dict.fromkeys(op.inputs):
                self.readers[value.id].append(op)
        self.uses = Counter(w.tensor.name for op in program.ops for w in _weights(op))

    def groups(self) -> Iterator[InputGroup]:
        seen: set[int] = set()
        for op in self.program.ops:
            if isinstance(op, Linear | Experts) and op.x.id not in seen:
                seen.add(op.x.id)
                yield self._group(op.x)
            if isinstance(op, Experts):
                yield from self._down(op)

    def _group(self, x: Value) -> InputGroup:
        weights: list[Weight] = []
        foldable = x not in (self.program.output, self.program.hidden)
        for op in self.readers[x.id]:
            if isinstance(op, Linear):
                weights.append(op.weight)
            elif isinstance(op, Experts) and op.x == x:
                weights += [*op.gate, *op.up]
            else:
                foldable = False
        producer = self._producer(x) if foldable and self._own(weights) else None
        return InputGroup(x, tuple(weights), producer)

    def _down(self, op: Experts) -> Iterator[InputGroup]:
        """Each expert's second matrix, whose input the rows of its `up` make."""
        for e, down in enumerate(op.down):
            made = (op.up[e], *((op.biases[e][1],) if op.biases else ()))
            rows = np.arange(down.tensor.shape[1], dtype=np.int32)
            linear = op.activation != "swiglu_clamped" and self._own([down, *made])
            yield InputGroup(None, (down,), Producer(made, rows) if linear else None)

    def _own(self, weights: list[Weight]) -> bool:
        """True if no other operation uses these tensors."""
        return all(self.uses[w.tensor.name] == 1 for w in weights)

    def _producer(self, x: Value) -> Producer | None:
        op = self.made[x.id]
        rows = np.arange(x.width, dtype=np.int32)
        if isinstance(op, RmsNorm | LayerNorm):
            whole = isinstance(op, LayerNorm) or op.heads == 1
            found = Producer(tuple(_weights(op)), rows) if whole else None
        else:
            found = self._rows(op, rows)
        return found if found is not None and self._own(list(found.weights)) else None

    def _rows(self, op: Op, rows: I32) -> Producer | None:
        """The linear layer that `op`'s features `rows` are proportional to."""
        if isinstance(op, Linear):
            return Producer(tuple(_weights(op)), rows)
        source: Value | None = None
        if isinstance(op, Glu) and op.activation != "swiglu_clamped" and op.gate != op.up:
            source = op.up
        elif isinstance(op, Activate) and op.activation == "relu":
            source = op.x
        elif isinstance(op, Attention) and op.v not in (op.q, op.k):
            source = op.v
            size = op.v.width // op.kv_heads
            head = rows // size * op.kv_heads // op.heads
            rows = (head * size + rows % size).astype(np.int32)
        if source is None or len(self.readers[source.id]) != 1:
            return None
        return self._rows(self.made[source.id], rows)


def _weights(op: Op) -> list[Weight]:
    """The tensors of an operation."""
    if isinstance(op, Experts):
        return [*op.gate, *op.up, *op.down, *(w for each in op.biases for w in each)]
    named = (
        getattr(op, name) for name in ("weight", "bias", "table", "sinks") if hasattr(op, name)
    )
    return [w for w in named if isinstance(w, Weight)]
