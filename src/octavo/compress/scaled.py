"""Models with scales of features folded in: the same function, from which less is lost by rounding.

Scales are found one input after the other over calibration tokens, with the weights as they are;
AWQ and SmoothQuant differ in how (`awq.py`, `smoothquant.py`). The result is a checkpoint whose
tensors are computed when they are read, to be rounded like any other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.backends.torch.spans import Spans
from octavo.checkpoint.base import Checkpoint, Computed, Tensor, TensorType, tensor_bytes
from octavo.checkpoint.dequantize import dequantize
from octavo.checkpoint.progress import Advance
from octavo.compress.awq import Foldable
from octavo.compress.fit import F32
from octavo.compress.folding import Producer, fold_rows, input_groups, storable
from octavo.compress.grids import ScaleType, check_finite
from octavo.compress.groups import whole
from octavo.compress.packing import as_floats
from octavo.compress.statistics import InputStatistics
from octavo.compress.writing import named
from octavo.program import Program, Value, Weight

_KINDS: dict[TensorType, ScaleType] = {TensorType.F16: "f16", TensorType.BF16: "bf16"}
Search = Callable[[Sequence[F32], InputStatistics, Foldable], F32 | None]
Scales = Mapping[int, F32]  # of an input's features, by the number of its value


def find_scales(
    program: Program, wanted: Mapping[str, Tensor], tokens: npt.NDArray[np.int32], folder: Path,
    search: Search, told: Advance = lambda _: None,
) -> dict[int, F32]:  # fmt: skip
    """The scales of inputs whose layers are all `wanted` and that a producer takes.

    tokens: `[sequences, length]`. folder: where values lie that memory does not hold. search: gives
    an input's scales, None where none help. told: the bytes of layers that are done.
    """
    at = {v.id: i for i, op in reversed(list(enumerate(program.ops))) for v in op.inputs}
    spans, done = Spans(program, tokens, folder), 0
    out: dict[int, F32] = {}
    try:
        for group, producer in _foldable(program, wanted):
            spans.run(done, at[group.input.id])
            done = at[group.input.id]
            inputs = InputStatistics(group.input.width)
            for x in spans.inputs(group.input):
                inputs.update(x)
            weights = [_finite(w) for w in group.weights]
            found = search(weights, inputs, _taken_by(producer))
            if found is not None:
                out[group.input.id] = found
            told(sum(w.tensor.nbytes for w in group.weights))
    finally:
        spans.close()
    return out


def _finite(w: Weight) -> F32:
    x = dequantize(w.tensor)
    with named(w.tensor.name):
        check_finite(x)
    return x


def folded(
    checkpoint: Checkpoint, program: Program, wanted: Mapping[str, Tensor], scales: Scales
) -> Checkpoint:
    """The checkpoint with scales folded in: norms in the type they have, matrices in fp32, and the
    biases of producers in theirs."""
    edits: dict[str, list[_Edit]] = defaultdict(list)
    for group, producer in _foldable(program, wanted):
        s = scales.get(group.input.id)
        if s is None:
            continue
        for w in group.weights:
            name, rows = whole(w.tensor)
            edits[name].append(_Columns(rows, s))
        for w in producer.weights:
            name, rows = whole(w.tensor)
            edits[name].append(_Rows(rows, producer.of_rows(s), w.offset))
    changed = {n: _edited(checkpoint.tensors[n], each) for n, each in edits.items()}
    return replace(checkpoint, tensors={**checkpoint.tensors, **changed})


@dataclass(frozen=True, slots=True)
class _Input:
    """An InputGroup whose input is a value."""

    input: Value
    weights: tuple[Weight, ...]


def _foldable(program: Program, wanted: Mapping[str, Tensor]) -> Iterator[tuple[_Input, Producer]]:
    """Inputs that scales are looked for, in order. What is kept as it is has none."""
    for group in input_groups(program):
        if group.input is None or group.producer is None:
            continue
        matrices = [*group.weights, *(w for w in group.producer.weights if _is_matrix(w))]
        if all(whole(w.tensor)[0] in wanted for w in matrices):
            yield _Input(group.input, group.weights), group.producer


def _is_matrix(w: Weight) -> bool:
    return len(w.tensor.shape) == 2


def _taken_by(producer: Producer) -> Foldable:
    """Scales wanted as scales that the producer takes."""
    first = producer.weights[0]
    if _is_matrix(first):
        return producer.shared
    norm, kind = dequantize(first.tensor), _KINDS.get(first.tensor.type, "f32")
    return lambda s: storable(s, norm, first.offset, kind)


@dataclass(frozen=True, slots=True)
class _Columns:
    """Some rows' columns times scales."""

    rows: slice
    scales: F32

    def __call__(self, x: F32) -> None:
        x[self.rows] *= self.scales


@dataclass(frozen=True, slots=True)
class _Rows:
    """Some rows, or elements, divided by scales."""

    rows: slice
    scales: F32
    offset: float

    def __call__(self, x: F32) -> None:
        x[self.rows] = fold_rows(x[self.rows], self.scales, self.offset)


_Edit = _Columns | _Rows


def _edited(tensor: Tensor, edits: Sequence[_Edit]) -> Tensor:
    """A tensor with edits made when it is read."""
    kind = TensorType.F32 if len(tensor.shape) == 2 else tensor.type

    def read() -> npt.NDArray[Any]:
        x = np.array(dequantize(tensor))
        for edit in edits:
            edit(x)
        return as_floats(x, kind)

    stored = tensor_bytes(kind, tensor.shape, tensor.name)
    return Computed(tensor.name, kind, tensor.shape, stored, read)
